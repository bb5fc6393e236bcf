"""What starts of a draft are worth after equal distillation: pruned, transplanted, fresh, and the
shipped base.

    python -m benchmarks.studies.starting --out out/starting

Needs nothing but this repository: the shipped target and its base, the demo's prompts (prose is in
distribution, code out of it), and as donor a small model of another tokenizer that is trained here
on the same texts. Every start gets the same answers of the target, the same objective and the same
optimizer steps, for every seed. Writes starting.json and prints a table for
a page. What is there is not made again, so that a run that was stopped goes on.
"""

import json
import statistics
import sys
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import PreTrainedModel, PreTrainedTokenizerFast

from benchmarks.lib.pages import table
from benchmarks.lib.shipped_pair import PAIR
from benchmarks.studies.rebuild_pair import write_corpus
from draftsmith.config import InitConfig
from draftsmith.core.command_line import parse
from draftsmith.core.io import write_json_atomic
from draftsmith.core.models import load_model, read_per_token
from draftsmith.core.sampling import Sampling
from draftsmith.core.tokenization import load_tokenizer
from draftsmith.distill.config import DistillConfig
from draftsmith.distill.generate import distill
from draftsmith.eval.acceptance import Continuation
from draftsmith.starting import alphas, answer_texts, init
from draftsmith.train.config import Optim, TrainConfig
from draftsmith.train.training_run import train

_DONOR_VOCABULARY = 1024


@dataclass(frozen=True, kw_only=True)
class Options:
    """Compare starts on the shipped target."""

    out: str
    """Directory for everything."""
    target: str = ""
    """Another target than the shipped one; it has no base to compare with."""
    seeds: int = 3
    """Seeds of training, and of fresh weights."""
    budgets: list[int] = field(default_factory=lambda: [60, 240])
    """Optimizer steps."""
    rows: int = 768
    """Prompts that the target answers for training."""
    measured: int = 40
    """Held-out prompts of each domain."""


def main() -> None:
    """Make, train and measure every start."""
    options, _ = parse(Options, "starting", sys.argv[1:])
    out = Path(options.out)
    if not (out / "texts").is_dir():
        write_corpus(out / "texts")
    target = options.target or str(PAIR / "target")
    if not (out / "data").is_dir():
        prose = str(out / "texts" / "prose.train.jsonl")
        answers = {
            "max_prompts": options.rows,
            "max_new_tokens": 64,
            "temperature": 1.0,
            "batch_size": 64,
        }
        distill(
            DistillConfig(
                target=target, prompts=prose, out=str(out / "data"), seed=1, device="cpu", **answers
            )
        )  # type: ignore[arg-type]
    model, tokenizer = load_model(target, device="cpu"), load_tokenizer(target)
    texts = {
        domain: answer_texts(
            InitConfig(
                target=target,
                out="none",
                method="prune",
                prompts=str(out / "texts" / f"{domain}.heldout.jsonl"),
                max_prompts=options.measured,
                seed=9,
            ),
            model,
            tokenizer,
        )
        for domain in ("prose", "code")
    }
    rows: list[dict[str, Any]] = []
    for seed in range(options.seeds):
        for name, start in _starts(out, target, seed).items():
            draft = load_model(start, device="cpu")
            cost = read_per_token(draft) / read_per_token(model)
            row = {"start": name, "seed": seed, "cost": cost}
            rows.append(row | {"steps": 0} | _measure(model, draft, texts))
            for steps in options.budgets:
                trained = out / "runs" / f"{name}-{seed}-{steps}"
                _align(start, target, out, trained, steps, seed, draft)
                rows.append(
                    row
                    | {"steps": steps}
                    | _measure(model, load_model(str(trained), device="cpu"), texts)
                )
                sys.stderr.write(json.dumps(rows[-1]) + "\n")
    write_json_atomic(out / "starting.json", rows)
    sys.stdout.write(means(rows) + "\n")


def _starts(out: Path, target: str, seed: int) -> dict[str, str]:
    """Where each start lies. Only `fresh` differs between seeds."""
    donor = str(out / "donor")
    if not Path(donor).is_dir():
        _train_donor(out, donor)
    words: dict[str, dict[str, Any]] = {
        "prune": {"method": "prune", "num_layers": 1, "keep": "first"},
        "transplant": {"method": "transplant", "donor": donor},
        "fresh": {"method": "fresh", "cost": 0.15, "seed": seed},
    }
    found = {"base": str(PAIR / "base")} if target == str(PAIR / "target") else {}
    for name, options in words.items():
        place = out / "starts" / (f"{name}-{seed}" if name == "fresh" else name)
        if not place.is_dir():
            init(InitConfig(target=target, out=str(place), device="cpu", **options))
        found[name] = str(place)
    return found


def _train_donor(out: Path, place: str) -> None:
    """A model of the base's shape with a tokenizer of its own, trained on the same texts as the
    base was.
    """
    files = [
        str(out / "texts" / f"{domain}.train.jsonl") for domain in ("prose", "code", "unicode")
    ]
    own = Tokenizer(models.BPE())
    own.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    own.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=_DONOR_VOCABULARY,
        special_tokens=["<|begin|>", "<|end|>"],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    own.train_from_iterator(_lines(files), trainer)
    PreTrainedTokenizerFast(
        tokenizer_object=own, bos_token="<|begin|>", eos_token="<|end|>"
    ).save_pretrained(out / "donor-tokenizer")
    shape = json.loads((PAIR / "base" / "config.json").read_text()) | {
        "vocab_size": _DONOR_VOCABULARY
    }
    (out / "donor.config.json").write_text(json.dumps(shape))
    train(
        TrainConfig(
            out=place,
            data=files,
            draft_config=str(out / "donor.config.json"),
            tokenizer=str(out / "donor-tokenizer"),
            max_length=256,
            batch_size=8,
            steps=400,
            eval_every=400,
            heldout_fraction=0.01,
            optim=Optim(name="adamw", lr=4e-3, warmup_steps=30),
            device="cpu",
        )
    )


def _lines(files: Iterable[str]) -> Iterable[str]:
    for file in files:
        for line in Path(file).read_text(encoding="utf-8").splitlines():
            yield json.loads(line)["text"]


def _align(
    start: str, target: str, out: Path, place: Path, steps: int, seed: int, draft: PreTrainedModel
) -> None:
    """Token-level distillation on the target's answers, at the rate that `align` takes for a draft
    of this size.
    """
    parameters = sum(parameter.numel() for parameter in draft.parameters())
    rate = min(3e-3, 2e-4 * (68e6 / parameters) ** 0.5)
    train(
        TrainConfig(
            out=str(place),
            data=[str(out / "data")],
            draft=start,
            target=target,
            objective="jsd:beta=0.5",
            max_length=96,
            batch_size=16,
            steps=steps,
            eval_every=steps,
            save_every=10 * steps,
            heldout_fraction=0.03,
            optim=Optim(name="adamw", lr=rate, warmup_steps=max(1, steps // 20)),
            seed=seed,
            device="cpu",
        )
    )


def _measure(
    target: PreTrainedModel, draft: PreTrainedModel, texts: Mapping[str, list[Continuation]]
) -> dict[str, Any]:
    hot = Sampling(temperature=1.0)
    return {domain: alphas(target, draft, own, hot)["alpha"] for domain, own in texts.items()}


def means(rows: list[dict[str, Any]]) -> str:
    """Markdown: mean over seeds, and in brackets the least and the greatest where they differ."""
    budgets = sorted({row["steps"] for row in rows})
    head = [
        f"{domain} after {steps}" for domain in ("prose (ID)", "code (OOD)") for steps in budgets
    ]
    lines = []
    for name in dict.fromkeys(row["start"] for row in rows):
        own = [row for row in rows if row["start"] == name]
        cells = [
            _cell([row[domain] for row in own if row["steps"] == steps])
            for domain in ("prose", "code")
            for steps in budgets
        ]
        lines.append([name, f"{own[0]['cost']:.2f}", *cells])
    return table(["start", "cost", *head], lines)


def _cell(values: list[float]) -> str:
    spread = (
        "" if max(values) - min(values) < 5e-4 else f" ({min(values):.3f} to {max(values):.3f})"
    )
    return f"{statistics.mean(values):.3f}{spread}"


if __name__ == "__main__":
    main()
