"""Align a draft: distil, train, evaluate and report, through the functions that the commands call."""

import dataclasses
import gc
import json
from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import torch
import yaml
from transformers import PreTrainedModel

from distill.generate import distill
from drafts.draft_vocabulary import check_draft_vocabulary, draft_vocabulary
from drafts.load import load_pair
from draftsmith.alignment.choices import Facts, complete, most_prompts
from draftsmith.alignment.config import AlignConfig
from draftsmith.alignment.outcome import best_draft
from draftsmith.alignment.policy import keep_general
from draftsmith.alignment.prompts import check_unchanged, hold_out
from draftsmith.alignment.stage_configs import distill_config, eval_config, general_config, train_config
from draftsmith.config import InitConfig
from draftsmith.starting import init
from draftsmith_core.cards import add_results
from draftsmith_core.command_line import check_file
from draftsmith_core.errors import InputError
from draftsmith_core.hub import check_push, pushed
from draftsmith_core.io import write_text_atomic
from draftsmith_core.models import parameter_count, resolve_device, vocabulary_size
from draftsmith_core.options import from_values
from draftsmith_core.processes import from_main, join_processes, launched, on_main, say
from draftsmith_core.prompt_rows import iterate_rows
from draftsmith_core.prompts import PromptSet, read_prompts
from draftsmith_core.runs import Run, difference
from draftsmith_core.settings import loading, resolve_sampling
from draftsmith_core.tokenization import load_tokenizer
from eval.evaluate import evaluate
from eval.request import check
from eval.results import Results
from train.training_run import train

# Options that say where the work is done, not what is done: another value resumes a run.
_NOT_IDENTITY = ("out", "device", "push_to_hub")
_SECTIONS = ("distill", "train", "eval")


def align(config: AlignConfig) -> Results:
    """Distil, train, evaluate and report; return the results. What `config` leaves open is chosen, and printed.

    Everything is under `config.out`: align.yaml (the options with nothing left open), prompts/, distilled/, one
    checkpoint per objective, eval/. Every stage resumes what a killed run left. Of several processes all generate,
    train and evaluate. Raise InputError for bad input, RunError for a run that failed.
    """
    out = Path(config.out)
    if config.push_to_hub is not None:
        check_push(config.push_to_hub)
    join_processes(config.device)
    with Run(out, keeps=("align.yaml", "start/config.json")) as run:
        run.begin()
        config = from_main(lambda: _settle(_started(config, run), out))
        prompts = str(out / "prompts" / "train.jsonl") if not config.id else config.prompts
        say(f"\n1/3 distil: {config.target} answers {prompts}")
        distill(distill_config(config, prompts))
        if config.train["replay_fraction"]:
            say(f"{config.target} writes {config.distill['general_texts']} texts by itself, to be replayed")
            distill(general_config(config))
        for name, objective in config.trained().items():
            say(f"\n2/3 train: {name} ({objective})")
            train(train_config(config, name))
            _free()
        if config.policy != "id":
            on_main(lambda: _keep_general(config, run))
        say("\n3/3 evaluate")
        results = evaluate(eval_config(config))
        for name in config.compared():
            on_main(partial(add_results, out / name, out / "eval" / "results.json", name))
        for url in pushed(out / best_draft(config, results), config.push_to_hub, "model").values():
            say(f"uploaded: {url}")
    return results


def settled(config: AlignConfig) -> AlignConfig:
    """The options of the run that `align(config)` made, with nothing left open."""
    out = Path(config.out)
    return replace(_resumed(_from_start(config), out / "align.yaml"), out=config.out)


def _keep_general(config: AlignConfig, run: Run) -> None:
    for line in keep_general(config, run):
        say(line)
    _free()


def _free() -> None:
    gc.collect()
    if torch.cuda.is_available():
        torch.cuda.empty_cache()


def _settle(config: AlignConfig, out: Path) -> AlignConfig:
    """Return the options with nothing left open, from OUT/align.yaml if a run began; else choose and write them."""
    file = out / "align.yaml"
    if file.exists():
        whole = _resumed(config, file)
        check_unchanged(config.prompts, out / "prompts")
        say(f"{file}: continuing what was begun here")
    else:
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
        say(f"{file}: all options, to be edited and run again with --config")
    return replace(whole, out=config.out, device=config.device, push_to_hub=config.push_to_hub)


def _started(config: AlignConfig, run: Run) -> AlignConfig:
    """With --init, make the draft in OUT/start and return options that name it."""
    method = config.init
    if method is None:
        return config
    start = run.out / "start"
    if not start.exists():
        say(f"init: {method} makes {start}")
        draft = init(
            InitConfig(
                target=config.target,
                out=str(start),
                method=method,
                donor=config.donor,
                prompts=config.prompts,
                prompt_tokens=config.prompt_tokens,
                seed=config.seed,
                **loading(config),
            )
        )
        for line in draft.lines(1.0):
            say(line)
        _free()
    return _from_start(config)


def _from_start(config: AlignConfig) -> AlignConfig:
    """The options as align.yaml has them: with --init, `draft` names what it made."""
    start = str(Path(config.out) / "start")
    return config if config.init is None else replace(config, draft=start, init=None, donor=None)


def _look(config: AlignConfig) -> tuple[Facts, PromptSet]:
    """Load everything once, so that whatever does not fit is refused before hours of work, and measure it."""
    on_gpu = resolve_device(config.device).type == "cuda"
    tokenizer = load_tokenizer(config.target, config.trust_remote_code, config.chat_template)
    pair = load_pair(config.target, [config.draft] if config.draft else [], tokenizer=tokenizer, **loading(config))
    draft = next(iter(pair.drafts.values()), None)
    if isinstance(draft, PreTrainedModel) and (size := config.train.get("draft_vocab_size")):
        whole = min(vocabulary_size(draft), vocabulary_size(pair.target))
        owner = None if draft_vocabulary(draft) is None else config.draft
        check_draft_vocabulary("train.draft_vocab_size", size, whole, owner)
    id_only = ""
    if not isinstance(draft, PreTrainedModel):
        id_only = "a head has no language model to go back to"
    elif tokenizer.bos_token_id is None and tokenizer.eos_token_id is None:
        id_only = "the target has no BOS or EOS to begin a text of its own with"
    if id_only and config.policy in ("balanced", "no_loss"):
        raise InputError(f"policy: {config.policy} cannot be followed ({id_only}); use --policy id")
    heldout, context = 0 if config.id else (config.heldout_prompts or 64), pair.context

    def read(source: str, section: str, limit: int) -> PromptSet:
        """Prompts that leave room for the new tokens of a stage."""
        tokens = getattr(config, section).get("max_new_tokens") or 1
        room = None if context is None else context - tokens
        if room is not None and room < 1:
            raise InputError(f"{section}.max_new_tokens: {tokens} leaves no room in a context of {context}")
        return read_prompts(source, tokenizer, prompt_tokens=config.prompt_tokens, max_tokens=room, limit=limit)

    prompts = read(config.prompts, "distill", most_prompts(config, on_gpu) + heldout)
    for named in (*config.id, *config.ood):
        read(named.partition("=")[2], "eval", 1000)
    _, first = next(iterate_rows(config.prompts))
    facts = Facts(
        rows="chat" if first.get("messages") is not None else "prompt" if first.get("prompt") is not None else "text",
        prompts=len(prompts.prompts),
        longest_prompt=max(len(prompt.ids) for prompt in prompts.prompts),
        context=context,
        on_gpu=on_gpu,
        processes=launched(),
        target_parameters=parameter_count(pair.target),
        # A fresh EAGLE head is one decoder layer and a projection: about 14 times the square of the hidden size.
        draft_parameters=14 * pair.target.config.get_text_config().hidden_size ** 2
        if draft is None
        else parameter_count(draft),
        sampling=resolve_sampling(
            config.target, pair.target, temperature=config.distill.get("temperature"), default_temperature=1.0
        ),
        id_only=id_only,
    )
    del pair, draft
    _free()
    return facts, prompts


def _resumed(config: AlignConfig, file: Path) -> AlignConfig:
    """The options of the run that began here; raise InputError if `config` differs from them."""
    check_file(AlignConfig, file)
    begun = from_values(AlignConfig, yaml.safe_load(file.read_text(encoding="utf-8")))
    known, wanted = dataclasses.asdict(begun), dataclasses.asdict(config)
    for section in _SECTIONS:
        wanted[section] = known[section] | wanted[section]
    wanted = {key: known[key] if value in (None, []) else value for key, value in wanted.items()}
    for key in _NOT_IDENTITY:
        del wanted[key], known[key]
    differs = difference(json.loads(json.dumps(known)), json.loads(json.dumps(wanted)))
    if differs is not None:
        raise InputError(
            f"--out {file.parent}: another run was begun there: its {differs}; name another --out, or edit {file} "
            f"and run it with --config"
        )
    return begun


def _to_yaml(config: AlignConfig, choices: Sequence[str]) -> str:
    """The options as a file for --config, with the reason of every choice."""
    reasons = {line.partition(" ")[0]: line.partition("   (")[2].removesuffix(")") for line in choices}

    def line(key: str, value: Any, section: str = "") -> str:
        shown = yaml.safe_dump([value], default_flow_style=True, width=10**6, allow_unicode=True).strip()[1:-1]
        why = reasons.get(f"{section}.{key}" if section else key)
        return f"{'  ' * bool(section)}{key}: {shown}" + (f"  # {why}" if why else "")

    lines = ["# Every option of this run; `draftsmith align --config FILE --out DIR` runs it again."]
    # Sections last: YAML reads what follows one as part of it only by its indentation, which is easy to get wrong.
    for key, value in sorted(dataclasses.asdict(config).items(), key=lambda item: item[0] in _SECTIONS):
        if key in _SECTIONS:
            lines += ["", f"{key}:", *(line(name, inner, key) for name, inner in value.items())]
        else:
            lines.append(line(key, value))
    return "\n".join(lines) + "\n"
