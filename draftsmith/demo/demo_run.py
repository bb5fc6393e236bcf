"""The demo: align the shipped pair on text that every Python carries, then time the drafts beside
the target padded to the cost of a large one (`draftsmith.demo.widen`).
"""

import shutil
from pathlib import Path
from typing import Any

import yaml
from transformers import LlamaForCausalLM

from draftsmith.alignment.choices import LOOKUP, contenders
from draftsmith.alignment.config import AlignConfig
from draftsmith.core.hub import quiet
from draftsmith.core.io import JsonObject, atomic_dir, make_dir, write_rows, write_text_atomic
from draftsmith.core.launcher import join_processes
from draftsmith.core.models import load_model
from draftsmith.core.ranks import on_main
from draftsmith.core.tokenization import load_tokenizer
from draftsmith.demo import corpus
from draftsmith.demo.widen import widen
from draftsmith.eval.config import EvalConfig
from draftsmith.eval.report.page import first_table, pictures, render_template
from draftsmith.eval.results import Results
from draftsmith.eval.run import evaluate
from draftsmith.eval.summary import lead, table, verdict

RECIPES = Path(__file__).parent / "recipes"
PAIR = Path(__file__).parent / "pair"
# The domain that the draft is aligned on; the others are out of distribution.
ID_DOMAIN = "prose"
# The set out of distribution that is timed too.
TIMED_OOD = "code="
# Alignment prompts are short, so that there are thousands. Evaluation prompts are from documents
# that neither the pair nor the drafts have seen.
TRAIN_CHARACTERS = 300
EVAL_CHARACTERS = 400
# The padded target. At four times the width, the padded norms are halved: fp16 holds every value.
LARGE = {"hidden_size": 768, "intermediate_size": 2432, "num_hidden_layers": 12}


def prepare(out: Path, short: bool, device: str) -> AlignConfig:
    """Write the prompts and a copy of the pair under `out`; return the options of `align`."""
    prompts = {domain: f"{domain}={out / 'prompts' / domain}.jsonl" for domain in corpus.DOMAINS}
    config = AlignConfig(
        **recipe(short),
        target=str(out / "pair" / "target"),
        draft=str(out / "pair" / "base"),
        prompts=str(out / "prompts" / f"{ID_DOMAIN}.train.jsonl"),
        id=[prompts.pop(ID_DOMAIN)],
        ood=list(prompts.values()),
        out=str(out),
        device=device,
    )
    join_processes(device, config)
    on_main(lambda: _write(out))
    return config


def recipe(short: bool) -> JsonObject:
    """Return the demo's choices as `AlignConfig` takes them."""
    values: JsonObject = _read("demo")
    if short:
        for stage, options in _read("demo_short").items():
            values[stage] |= options
    return values


def _read(name: str) -> Any:
    return yaml.safe_load((RECIPES / f"{name}.yaml").read_text(encoding="utf-8"))


def time_large(options: AlignConfig, short: bool) -> Results:
    """Time the demo's drafts beside the target padded with zeros to the cost of a large one.

    A draft pays if the target is expensive; the shipped one is too cheap to show it. Prompt lookup
    is left out: it saves few calls on these sets, as the first evaluation shows.
    """
    large = Path(options.target).with_name("large")

    @quiet()
    def make() -> None:
        if large.is_dir():
            return
        model = load_model(options.target, device="cpu", dtype="float32")
        assert isinstance(model, LlamaForCausalLM)
        with atomic_dir(large) as directory:
            widen(model, **LARGE).half().save_pretrained(directory)
            load_tokenizer(options.target).save_pretrained(directory)

    on_main(make)
    values = _read("large")
    if short:
        values |= {"max_prompts": 2, "max_new_tokens": 8, "speed_prompts": 2, "bootstrap": 200}
    out = options.directory
    config = EvalConfig(
        target=str(large),
        draft=[name for name in contenders(options) if not name.startswith(f"{LOOKUP}=")],
        id=options.id,
        ood=[source for source in options.ood if source.startswith(TIMED_OOD)],
        out=str(out / "eval-large"),
        seed=options.seed,
        device=options.device,
        dtype=options.dtype,
        **values,
    )
    return evaluate(config)


def write_page(small: Results, large: Results) -> list[str]:
    """Write OUT/report.html, which leads with the large target; return what the demo prints. The
    one verdict is that of the large target: beside the small one nothing is timed.
    """
    more = (
        f" Here all sets are measured, at most {_most_prompts(small)} prompts of each; below, two "
        f"sets and {_most_prompts(large)} prompts of each, so that α differs."
    )
    head = lead(large)
    page = large.directory.parent / "report.html"
    html = render_template(
        "demo.html.j2",
        head,
        pictures=pictures(small, "alpha", more=more),
        first=first_table(large, head),
    )
    write_text_atomic(page, html)
    return [
        *verdict(head),
        *table(large, head),
        "With the shipped target:",
        *lead(small).changes,
        f"report: {page.resolve()}",
    ]


def _most_prompts(results: Results) -> int:
    return max(suite["done"] for suite in results.document["suites"])


def _write(out: Path) -> None:
    make_dir(out, "--out")
    if not (out / "pair").is_dir():
        # Copy the pair, so that printed commands work wherever the package is installed.
        with atomic_dir(out / "pair") as directory:
            shutil.copytree(PAIR, directory, dirs_exist_ok=True, copy_function=shutil.copyfile)
    if not (out / "prompts").is_dir():
        with atomic_dir(out / "prompts") as directory:
            train = corpus.split(ID_DOMAIN).train
            write_rows(
                directory / f"{ID_DOMAIN}.train.jsonl",
                corpus.passages(ID_DOMAIN, train, TRAIN_CHARACTERS),
            )
            for domain in corpus.DOMAINS:
                heldout = corpus.split(domain).heldout
                write_rows(
                    directory / f"{domain}.jsonl", corpus.passages(domain, heldout, EVAL_CHARACTERS)
                )
