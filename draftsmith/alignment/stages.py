"""The road from prompts to a report, stage by stage, through the functions that the commands call."""

import dataclasses
import gc
import json
import shlex
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import torch
import yaml
from accelerate.utils import broadcast_object_list
from transformers import PreTrainedModel

from distill.generate import distill
from drafts.draft_vocabulary import check_draft_vocabulary, draft_vocabulary
from drafts.load import LoadedPair, load_pair
from draftsmith.alignment.choices import Facts, complete, most_prompts
from draftsmith.alignment.config import AlignConfig
from draftsmith.alignment.outcome import best_draft
from draftsmith.alignment.policy import keep_general
from draftsmith.alignment.prompts import check_unchanged, hold_out
from draftsmith.alignment.stage_configs import distill_config, eval_config, general_config, train_config
from draftsmith.config import InitConfig
from draftsmith.starting import init
from draftsmith_core.cards import add_results
from draftsmith_core.errors import InputError
from draftsmith_core.generation_defaults import resolve_sampling
from draftsmith_core.hub import check_push, pushed
from draftsmith_core.io import write_text_atomic
from draftsmith_core.model_options import loading
from draftsmith_core.models import parameter_count, resolve_device, vocabulary_size
from draftsmith_core.options import check_file, from_values
from draftsmith_core.processes import (
    Terminated,
    join_processes,
    launched,
    on_main,
    say,
    terminable,
    without_fsdp_variable,
)
from draftsmith_core.prompt_rows import iterate_rows
from draftsmith_core.prompts import PromptSet, read_prompts
from draftsmith_core.provenance import difference
from draftsmith_core.run_directory import hold
from draftsmith_core.tokenization import load_tokenizer
from eval.evaluate import evaluate
from eval.request import check
from eval.results import Results
from train.training_run import train

# Options that say where the work is done, not what is done: another value may continue a run.
_NOT_IDENTITY = ("out", "device", "push_to_hub")


def align(config: AlignConfig) -> Results:
    """Distil, train, evaluate and report; returns the results. What `config` leaves open is chosen, and printed.

    Everything is under `config.out`: align.yaml (the options with nothing left open), prompts/, distilled/, one
    checkpoint per objective, eval/. Every stage continues what a killed run left. Of several processes all generate,
    train and evaluate. Raises InputError for what cannot be done, RunError for
    what failed; Ctrl-C and SIGTERM carry a note that says what was kept.
    """
    out = Path(config.out)
    if config.push_to_hub is not None:
        check_push(config.push_to_hub)
    join_processes(config.device)
    with terminable(), without_fsdp_variable(), _saying_what_is_kept(out), hold(out):
        config = _settle(_started(config, out), out)
        prompts = str(out / "prompts" / "train.jsonl") if not config.id else config.prompts
        say(f"\n1/3 distil: {config.target} answers {prompts}")
        distill(distill_config(config, prompts))
        if config.train.replay_fraction:
            say(f"{config.target} writes {config.distill.general_texts} texts by itself, to be replayed")
            distill(general_config(config))
        for name, objective in config.trained().items():
            say(f"\n2/3 train: {name} ({objective})")
            train(train_config(config, name))
            _free()
        if config.policy != "id":
            on_main(lambda: _keep_general(config, out))
        say("\n3/3 evaluate")
        results = evaluate(eval_config(config))
        for name in config.compared():
            on_main(partial(add_results, out / name, out / "eval" / "results.json", name))
        for url in pushed(out / best_draft(config, results), config.push_to_hub, "model").values():
            say(f"uploaded: {url}")
    return results


@contextmanager
def _saying_what_is_kept(out: Path) -> Iterator[None]:
    """Put a note on Ctrl-C and SIGTERM in the block: what is on disk, and the command that goes on from there."""
    try:
        yield
    except (KeyboardInterrupt, Terminated) as stop:
        launcher = "accelerate launch [...] -m " if launched() > 1 else ""
        words = shlex.join(["draftsmith", "align", "--config", str(out / "align.yaml"), "--out", str(out)])
        kept = _kept(out)
        also = f", as does `{launcher}{words}`" if (out / "align.yaml").exists() else ""
        stop.add_note(
            f"kept in {out}: {', '.join(kept)}; the same command continues{also}" if kept else "nothing was kept"
        )
        raise


def _kept(out: Path) -> list[str]:
    """What a run in `out` has finished, stage by stage; empty when it would begin anew."""
    found = ["the draft to start from (start)"] if (out / "start" / "config.json").exists() else []
    if not (out / "align.yaml").exists():
        return found
    found.insert(0, "the options (align.yaml)")
    parts = len(list(out.glob("distilled/part-*.parquet")))
    if (out / "distilled" / "manifest.json").exists():
        found.append("all answers (distilled)")
    elif parts:
        found.append(f"{parts} files of answers (distilled)")
    if (out / "general" / "manifest.json").exists():
        found.append("the target's own texts (general)")
    for run in sorted(out.glob("*/run"), key=lambda each: each.stat().st_mtime):
        steps = [int(each.name.removeprefix("step_")) for each in run.glob("checkpoints/step_*")]
        if (run.parent / "config.json").exists():
            found.append(f"the draft {run.parent.name}")
        elif steps:
            found.append(f"the draft {run.parent.name} up to step {max(steps)}")
    measured = len(list(out.glob("eval/cells/*.json")))
    return [*found, f"{measured} measurements (eval)"] if measured else found


def _keep_general(config: AlignConfig, out: Path) -> None:
    for line in keep_general(config, out):
        say(line)
    _free()


def _free() -> None:
    gc.collect()
    if torch.cuda.is_available():
        torch.cuda.empty_cache()


def settled(config: AlignConfig) -> AlignConfig:
    """The options of the run that `align(config)` has made, with nothing left open."""
    out = Path(config.out)
    return replace(_continued(_from_start(config, out), out / "align.yaml"), out=config.out)


def _settle(config: AlignConfig, out: Path) -> AlignConfig:
    """The options with nothing left open: from OUT/align.yaml where a run has begun here, else chosen and written."""
    file = out / "align.yaml"
    settled: list[AlignConfig | None] = [None]

    def decide() -> None:
        if file.exists():
            settled[0] = _continued(config, file)
            check_unchanged(config.prompts, out / "prompts")
            say(f"{file}: continuing what was begun here")
            return
        facts, read = _look(config)
        whole, choices = complete(config, facts)
        # What a later stage would refuse is refused now, before anything is written or hours have passed.
        distill_config(whole, "")
        for name in whole.trained():
            train_config(whole, name)
        check(eval_config(whole))
        if whole.heldout_prompts is not None:
            hold_out(config.prompts, read, whole.heldout_prompts, out / "prompts")
        if read.skipped:
            skip = read.skipped[0]
            say(f"{config.prompts}: {len(read.skipped)} of {read.rows} rows skipped (row {skip.row}: {skip.reason})")
        for line in choices:
            say(f"chosen: {line}")
        write_text_atomic(file, _to_yaml(whole, choices))
        say(f"{file}: all of it, to be edited and run again with --config")
        settled[0] = whole

    on_main(decide)
    if launched() > 1:
        broadcast_object_list(settled)
    assert settled[0] is not None
    return replace(settled[0], out=config.out, device=config.device, push_to_hub=config.push_to_hub)


def _started(config: AlignConfig, out: Path) -> AlignConfig:
    """With --init: make the draft, unless an earlier start of this run did, and return options that name it."""
    if config.init is None:
        return config
    start = out / "start"

    def make() -> None:
        if start.exists():
            return
        say(f"init: {config.init} makes {start}")
        made = init(
            InitConfig(
                target=config.target,
                out=str(start),
                method=config.init or "prune",
                donor=config.donor,
                prompts=config.prompts,
                prompt_tokens=config.prompt_tokens,
                seed=config.seed,
                **loading(config),
            )
        )
        for line in made.lines(1.0):
            say(line)
        _free()

    on_main(make)
    return _from_start(config, out)


def _from_start(config: AlignConfig, out: Path) -> AlignConfig:
    """The options as align.yaml has them: with --init, the draft that it made in place of `init` and `donor`."""
    return config if config.init is None else replace(config, draft=str(out / "start"), init=None, donor=None)


def _room(context: int, key: str, asked: int | None) -> int:
    """How many tokens a prompt may have beside `asked` new ones (None: still to be chosen) in this context."""
    if asked is not None and asked >= context:
        raise InputError(f"{key}: {asked} leaves no room in a context of {context}")
    return context - (asked or 1)


def _look(config: AlignConfig) -> tuple[Facts, PromptSet]:
    """Load everything once, so that what does not go together is refused before hours of work; measure it."""
    on_gpu = resolve_device(config.device).type == "cuda"
    tokenizer = load_tokenizer(config.target, config.trust_remote_code, config.chat_template)
    pair = load_pair(config.target, [config.draft] if config.draft else [], tokenizer=tokenizer, **loading(config))
    _check_draft_vocabulary(config, pair)
    id_only = _id_only(config, pair)
    if id_only and config.policy in ("balanced", "no_loss"):
        raise InputError(f"policy: {config.policy} cannot be followed ({id_only}); use --policy id")
    heldout = 0 if config.id else (config.heldout_prompts or 64)
    context = pair.context or 1 << 30
    read = read_prompts(
        config.prompts,
        pair.tokenizer,
        prompt_tokens=config.prompt_tokens,
        max_tokens=_room(context, "distill.max_new_tokens", config.distill.max_new_tokens),
        limit=most_prompts(config, on_gpu) + heldout,
    )
    for named in (*config.id, *config.ood):
        read_prompts(
            named.partition("=")[2],
            pair.tokenizer,
            prompt_tokens=config.prompt_tokens,
            max_tokens=_room(context, "eval.max_new_tokens", config.eval.max_new_tokens),
            limit=1000,
        )
    _, first = next(iterate_rows(config.prompts))
    rows = "chat" if first.get("messages") is not None else "prompt" if first.get("prompt") is not None else "text"
    draft = next(iter(pair.drafts.values()), None)
    hidden = pair.target.config.get_text_config().hidden_size
    facts = Facts(
        rows,
        len(read.prompts),
        max(len(prompt.ids) for prompt in read.prompts),
        pair.context,
        on_gpu,
        launched(),
        parameter_count(pair.target),
        # A fresh EAGLE head is one decoder layer and a projection: about 14 times the square of the hidden size.
        14 * hidden**2 if draft is None else parameter_count(draft),
        resolve_sampling(config.target, pair.target, temperature=config.distill.temperature, default_temperature=1.0),
        id_only,
    )
    del pair, draft
    _free()
    return facts, read


def _check_draft_vocabulary(config: AlignConfig, pair: LoadedPair) -> None:
    """InputError where the draft cannot get the draft vocabulary that is asked for, before hours have passed."""
    size, key = config.train.draft_vocab_size, "train.draft_vocab_size"
    name, draft = next(iter(pair.drafts.items()), (None, None))
    if not size or draft is None:
        return
    if not isinstance(draft, PreTrainedModel):
        raise InputError(f"{key}: {name} is a head, and only a language model can get one; leave it out")
    whole = min(vocabulary_size(draft), vocabulary_size(pair.target))
    check_draft_vocabulary(key, size, whole, None if draft_vocabulary(draft) is None else name)


def _id_only(config: AlignConfig, pair: LoadedPair) -> str:
    """Why only policy id can be followed with this pair; empty where any can."""
    if config.draft is None or not isinstance(pair.drafts[config.draft], PreTrainedModel):
        return "a head has no language model to go back to"
    tokenizer = pair.tokenizer
    if tokenizer.bos_token_id is None and tokenizer.eos_token_id is None:
        return "the target has no BOS or EOS to begin a text of its own with"
    return ""


def _continued(config: AlignConfig, file: Path) -> AlignConfig:
    """The options of the run that was begun here; InputError where this command asks for something else."""
    try:
        text = file.read_text(encoding="utf-8")
        if isinstance(yaml.compose(text, Loader=yaml.SafeLoader), yaml.MappingNode):
            check_file(AlignConfig, file)
        there = from_values(AlignConfig, yaml.safe_load(text))
    except (OSError, ValueError, yaml.YAMLError, TypeError, KeyError, AttributeError) as error:
        raise InputError(
            f"{file}: cannot be read as the options of a run ({error}); delete it, or name another --out"
        ) from None
    wanted, begun = dataclasses.asdict(config), dataclasses.asdict(there)
    _fill(wanted, begun)
    for key in _NOT_IDENTITY:
        del wanted[key], begun[key]
    differs = difference(json.loads(json.dumps(begun)), json.loads(json.dumps(wanted)))
    if differs is not None:
        raise InputError(
            f"--out {file.parent}: another run was begun there: its {differs}; name another --out, or edit {file} "
            f"and run it with --config"
        )
    return there


def _fill(wanted: dict[str, Any], begun: dict[str, Any]) -> None:
    """Take what `wanted` leaves open from `begun`."""
    for key, value in wanted.items():
        if isinstance(value, dict):
            _fill(value, begun[key])
        elif value is None or value == []:
            wanted[key] = begun[key]


def _to_yaml(config: AlignConfig, choices: list[str]) -> str:
    """The options as a file for --config, with the reason behind every chosen one."""
    reasons = {line.partition(" ")[0]: line.partition("   (")[2].removesuffix(")") for line in choices}

    def line(key: str, value: Any, section: str = "") -> str:
        shown = yaml.safe_dump([value], default_flow_style=True, width=10**6, allow_unicode=True).strip()[1:-1]
        why = reasons.get(f"{section}.{key}" if section else key)
        return f"{'  ' * bool(section)}{key}: {shown}" + (f"  # {why}" if why else "")

    lines = ["# Every option of this run; `draftsmith align --config FILE --out DIR` runs it again."]
    # Sections last: YAML reads what follows one as part of it only by its indentation, which is easy to get wrong.
    for key, value in sorted(dataclasses.asdict(config).items(), key=lambda item: isinstance(item[1], dict)):
        if isinstance(value, dict):
            lines += ["", f"{key}:", *(line(name, inner, key) for name, inner in value.items())]
        else:
            lines.append(line(key, value))
    return "\n".join(lines) + "\n"
