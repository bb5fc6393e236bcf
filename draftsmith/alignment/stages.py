"""Align a draft: distil, train, evaluate and report, through the functions that the commands
call.
"""

import dataclasses
import gc
import hashlib
import json
import shlex
import shutil
from dataclasses import replace
from functools import partial
from itertools import islice
from pathlib import Path
from typing import Any

import torch
import yaml
from transformers import PreTrainedModel

from distill.generate import distill
from drafts.draft_vocabulary import check_draft_vocabulary, draft_vocabulary
from drafts.load import load_models
from draftsmith.alignment import choices
from draftsmith.alignment.config import AlignConfig
from draftsmith.config import InitConfig
from draftsmith.starting import in_words, init
from draftsmith_core.cards import add_results
from draftsmith_core.command_line import check_file
from draftsmith_core.devices import resolve_device
from draftsmith_core.errors import InputError, without_secrets
from draftsmith_core.hub import check_push, pushed
from draftsmith_core.io import (
    canonical_json,
    read_json,
    sha256_file,
    write_json_atomic,
    write_rows,
    write_text_atomic,
)
from draftsmith_core.launcher import join_processes
from draftsmith_core.models import parameter_count, text_config, vocabulary_size
from draftsmith_core.options import configured
from draftsmith_core.prompt_rows import (
    asked_of,
    iterate_records,
    iterate_rows,
    parse_named,
    parse_record,
)
from draftsmith_core.prompts import PromptSet, read_prompts, room_for_prompts
from draftsmith_core.ranks import from_main, launched, on_main, say
from draftsmith_core.runs import Run, difference
from draftsmith_core.settings import loading, resolve_sampling, tokenizing
from draftsmith_core.tokenization import load_tokenizer
from eval.evaluate import evaluate
from eval.report.findings import worst_set
from eval.report.formats import with_interval
from eval.report.tables import best_tau
from eval.request import check
from eval.results import Results
from eval.summary import headline_and_table
from train.config import TrainConfig
from train.training_run import train

# Options that say where the work is done, not what is done: another value resumes a run.
_NOT_IDENTITY = ("out", "device", "push_to_hub")


def align(config: AlignConfig | None = None, **options: Any) -> Results:
    """Distil, train, evaluate and report; return the results. What `config` leaves open is chosen,
    and printed.

    Everything is under `config.out`: align.yaml (the options with nothing left open), prompts/,
    distilled/, one checkpoint per objective, eval/. Every stage resumes what a killed run left. Of
    several processes all generate, train and evaluate. Raise InputError for bad input, RunError for
    a run that failed.
    """
    config = configured(AlignConfig, config, options)
    return run_stages(config)[1]


def run_stages(config: AlignConfig) -> tuple[AlignConfig, Results]:
    """Do what `align` does; return the options with nothing left open, too."""
    out = Path(config.out)
    if config.push_to_hub is not None:
        check_push(config.push_to_hub)
    join_processes(config.device)
    with Run(out) as run:
        run.begin()
        config = from_main(lambda: _settle(_started(config, run), out))
        prompts = str(out / "prompts" / "train.jsonl") if not config.id else config.prompts
        say(f"\n1/3 distil: {config.target} answers {prompts}")
        distill(choices.distill_config(config, prompts))
        if config.train["replay_fraction"]:
            say(
                f"{config.target} writes {config.distill['general_texts']} texts by itself, to "
                "be replayed"
            )
            distill(choices.general_config(config))
        for name, objective in config.trained().items():
            settings = choices.train_config(config, name)
            longer = settings.steps / config.train["steps"] if settings.steps else 1
            why = (
                f", {longer:.2g} times the steps: as many answers, and the replayed text "
                "beside them"
            )
            say(f"\n2/3 train: {name} ({objective}{why if longer > 1 else ''})")
            train(settings)
            _free()
        on_main(lambda: shutil.rmtree(out / "features", ignore_errors=True))
        say("\n3/3 evaluate")
        results = evaluate(choices.eval_config(config))
        for name in config.trained():
            on_main(partial(add_results, out / name, out / "eval" / "results.json", name))
        for url in pushed(out / best_draft(config, results), config.push_to_hub, "model").values():
            say(f"uploaded: {url}")
    return config, results


def _free() -> None:
    gc.collect()
    if torch.cuda.is_available():
        torch.cuda.empty_cache()


def _settle(config: AlignConfig, out: Path) -> AlignConfig:
    """Return the options with nothing left open, from OUT/align.yaml if a run began; else choose
    and write them.
    """
    file = out / "align.yaml"
    if file.exists():
        whole = _resumed(config, file)
        check_unchanged(config.prompts, out / "prompts")
        say(f"{file}: continuing what was begun here")
    else:
        facts, prompts = _look(config)
        _free()
        whole, chosen = choices.complete(config, facts)
        # What a later stage would refuse is refused now, before anything is written or hours have
        # passed.
        choices.distill_config(whole, "")
        runs = {name: choices.train_config(whole, name) for name in whole.trained()}
        check(choices.eval_config(whole))
        if whole.heldout_prompts is not None:
            hold_out(config.prompts, prompts, whole.heldout_prompts, out / "prompts")
        prompts.say_skipped()
        say(_announcement(whole, runs, facts))
        head = (
            "# Every option of this run; `draftsmith align --config FILE --out DIR` runs it "
            "again. Chosen were:\n"
        )
        reasons = "".join(f"#   {line}\n" for line in chosen)
        write_text_atomic(
            file, head + reasons + yaml.safe_dump(_shown(whole), sort_keys=False, width=1000)
        )
        say(
            f"{file}: all options, {len(chosen)} chosen with their reasons; edit it and run it "
            "with --config"
        )
    return replace(whole, **{key: getattr(config, key) for key in _NOT_IDENTITY})


def _announcement(config: AlignConfig, runs: dict[str, TrainConfig], facts: choices.Facts) -> str:
    distilled, rows = config.distill, config.train["rows_per_step"]
    steps = ", ".join(f"{name} {run.steps} steps" for name, run in runs.items())
    lines = []
    if facts.fresh_head:
        size = config.train.get("draft_vocab_size")
        head = (
            "EAGLE head"
            if size is None
            else f"EAGLE-3 head that drafts {size:,} of {facts.vocabulary:,} tokens"
        )
        part = facts.projection_share * (1 if size is None else size / facts.vocabulary)
        cost = facts.draft_parameters / facts.target_parameters + part
        least = facts.layer_share + facts.projection_share
        why = (
            f"it reads {cost:.0%} of the target per token, one pruned layer with the whole "
            f"vocabulary {least:.0%}"
        )
        lines.append(f"draft: a fresh {head}: {why}; --init or --draft start a language model")
    lines.append(
        f"distil: {distilled['num_samples']} answers to each of {distilled['max_prompts']} "
        "prompts, at most "
        f"{distilled['max_new_tokens']} tokens each\ntrain: {steps} of {rows} rows"
    )
    return "\n".join([*lines, choices.expected(config, runs, facts)])


def _started(config: AlignConfig, run: Run) -> AlignConfig:
    """With --init, make the draft in OUT/start and return options that name it."""
    if config.init is None:
        return config
    start = run.out / "start"
    if not start.exists():
        say(f"init: {config.init} makes {start}")
        keys = ("target", "donor", "prompts", "prompt_tokens", "seed", "chat_template")
        options: dict[str, Any] = {key: getattr(config, key) for key in keys} | loading(config)
        summary = init(InitConfig(method=config.init, out=str(start), **options))
        for line in in_words(summary, 1.0):
            say(line)
        _free()
    return replace(config, draft=str(start), init=None, donor=None)


def _look(config: AlignConfig) -> tuple[choices.Facts, PromptSet]:
    """Load everything once, so that whatever does not fit is refused before hours of work, and
    measure it.
    """
    on_gpu = resolve_device(config.device).type == "cuda"
    tokenizer = load_tokenizer(config.target, **tokenizing(config))
    pair = load_models(
        config.target,
        [config.draft] if config.draft else [],
        tokenizer=tokenizer,
        **loading(config),
    )
    draft = next(iter(pair.drafts.values()), None)
    if isinstance(draft, PreTrainedModel) and (size := config.train.get("draft_vocab_size")):
        whole = min(vocabulary_size(draft), vocabulary_size(pair.target))
        owner = None if draft_vocabulary(draft) is None else config.draft
        check_draft_vocabulary("train.draft_vocab_size", size, whole, owner)

    def read(source: str, section: str, limit: int) -> PromptSet:
        """Prompts that leave room for the new tokens of a stage."""
        tokens = getattr(config, section).get("max_new_tokens") or 1
        room = room_for_prompts(pair.context, tokens, f"{section}.max_new_tokens")
        return read_prompts(
            source, tokenizer, prompt_tokens=config.prompt_tokens, max_tokens=room, limit=limit
        )

    most = config.distill.get("max_prompts") or (20_000 if on_gpu else 1024)
    prompts = read(
        config.prompts, "distill", most + (0 if config.id else config.heldout_prompts or 64)
    )
    for source in parse_named("ood", [*config.id, *config.ood]).values():
        read(source, "eval", 1000)
    _, first = next(iterate_rows(config.prompts))
    ids = [prompt.ids for prompt in prompts.prompts]
    text, whole = text_config(pair.target), parameter_count(pair.target)
    vocabulary = vocabulary_size(pair.target)
    projection = text.hidden_size * vocabulary
    return choices.Facts(
        rows="chat"
        if first.get("messages") is not None
        else "prompt"
        if first.get("prompt") is not None
        else "text",
        prompts=len(ids),
        longest_prompt=max(map(len, ids)),
        context=pair.context,
        on_gpu=on_gpu,
        processes=launched(),
        target_parameters=whole,
        # A fresh EAGLE head is one decoder layer and a projection: about 14 times the square of the
        # hidden size.
        draft_parameters=14 * text.hidden_size**2 if draft is None else parameter_count(draft),
        sampling=resolve_sampling(
            config.target,
            pair.target,
            temperature=config.distill.get("temperature"),
            default_temperature=1.0,
        ),
        head=not isinstance(draft, PreTrainedModel),
        mean_prompt=sum(map(len, ids)) / len(ids),
        vocabulary=vocabulary,
        projection_share=projection / whole,
        layer_share=(whole - projection) / text.num_hidden_layers / whole,
        fresh_head=draft is None,
        clock=choices.clock(pair.target, ids),
    ), prompts


def hold_out(source: str, read: PromptSet, count: int, directory: Path) -> None:
    """Write the rows of `source` to train.jsonl and heldout.jsonl in `directory`, without the
    skipped ones.

    The `count` prompts with the smallest hashes of their tokens are held out, whatever the order of
    the rows. Rows of equal tokens stay on one side.
    """
    hashes = [
        hashlib.sha256(canonical_json(list(prompt.ids)).encode()).hexdigest()
        for prompt in read.prompts
    ]
    distinct = sorted(set(hashes))
    heldout = set(distinct[: min(count, len(distinct) - 1)])
    skipped = {skip.row for skip in read.skipped}
    used = iter(zip(read.prompts, hashes, strict=True))
    sides: dict[bool, list[dict[str, Any]]] = {True: [], False: []}
    for record in islice(iterate_records(source), read.rows):
        if record.number not in skipped:
            prompt, content = next(used)
            row = {
                "id": prompt.id,
                "domain": prompt.domain,
                **asked_of(parse_record(record, source)),
            }
            sides[content in heldout].append(row)
    write_json_atomic(directory / "source.json", {"sha256": _digest(source)})
    write_rows(directory / "train.jsonl", sides[False])
    write_rows(directory / "heldout.jsonl", sides[True])


def check_unchanged(source: str, directory: Path) -> None:
    """Raise InputError if the prompt file changed since `hold_out` divided it."""
    record = directory / "source.json"
    if record.is_file() and _digest(source) not in (
        None,
        read_json(record, "the record of prompts")["sha256"],
    ):
        raise InputError(
            f"{source}: has changed since this run began; name another --out, or restore it"
        )


def _digest(source: str) -> str | None:
    return sha256_file(Path(source)) if Path(source).is_file() else None


def _resumed(config: AlignConfig, file: Path) -> AlignConfig:
    """The options of the run that began here; raise InputError if `config` differs from them."""
    check_file(AlignConfig, file)
    begun = AlignConfig(**yaml.safe_load(file.read_text(encoding="utf-8")))
    known = _shown(begun)
    wanted = _over(known, _shown(config))
    for key in _NOT_IDENTITY:
        del wanted[key], known[key]
    differs = difference(json.loads(json.dumps(known)), json.loads(json.dumps(wanted)))
    if differs is not None:
        raise InputError(
            f"--out {file.parent}: was begun with other options: {differs}; name another --out, "
            f"or edit {file} "
            f"and run it with --config"
        )
    # The file has no passwords of URLs.
    return replace(
        begun, prompts=config.prompts, id=config.id or begun.id, ood=config.ood or begun.ood
    )


def _over(known: dict[str, Any], given: dict[str, Any]) -> dict[str, Any]:
    """The known options with the given ones in their places; what is null or empty was not
    given.
    """
    groups = {
        key: _over(known[key], value)
        for key, value in given.items()
        if isinstance(known.get(key), dict)
    }
    return known | {key: value for key, value in given.items() if value not in (None, [])} | groups


def _shown(config: AlignConfig) -> dict[str, Any]:
    return without_secrets(dataclasses.asdict(config))


def summary(config: AlignConfig, results: Results) -> dict[str, Any]:
    """Where everything is, and the figures of the best draft with their intervals."""
    best = best_draft(config, results)
    tau = best_tau(results, best, "id", results.top_temperature)
    method = tau["tree"] or "", tau["verifier"] or ""
    checkpoint = str(Path(config.out) / best)
    decode = ["draftsmith", "decode", "--target", config.target, "--draft", checkpoint]
    decode += ["--tree", method[0], "--temperature", f"{results.top_temperature:g}"]
    decode += ["--trust_remote_code"] if config.trust_remote_code else []
    decode += ["--revision", config.revision] if config.revision else []
    shown: dict[str, Any] = {
        "out": config.out,
        "config": str(Path(config.out) / "align.yaml"),
        "results": str(results.directory / "results.json"),
        "report": str(results.directory / "report.html"),
        "best": best,
        "objective": config.drafts()[best],
        "policy": config.policy,
        "checkpoint": checkpoint,
        "decode": shlex.join([*decode, "--prompt", "TEXT"]),
        "temperature": results.top_temperature,
        "tree": method[0],
    }
    for kind in results.kinds:
        rows = {"alpha": results.alpha(best, kind), "gain": results.gain(best, kind)}
        rows |= {
            name: results.figure(name, best, kind, None, *method)
            for name in ("tau", "tau_gain", "speedup")
        }
        shown[kind] = {
            name: row and {key: row[key] for key in ("value", "low", "high")}
            for name, row in rows.items()
        }
    return shown


def lines(config: AlignConfig, results: Results) -> list[str]:
    """The decision, the table of figures, what was bought, where the checkpoint is, and how to
    decode with it.
    """
    shown = summary(config, results)
    where = f"at temperature {shown['temperature']:g}, decoding with {shown['tree']}"
    bought = [f"{shown['best']} ({shown['objective']}) {where}:"]
    for kind in results.kinds:
        figures = shown[kind]
        parts = [f"alpha {with_interval(figures['alpha'])}"]
        if figures["gain"]:
            parts.append(
                f"{with_interval(figures['gain'], sign=True)} over the draft it started from"
            )
        if figures["gain"] and kind == "ood" and len(results.domains("ood")) > 1:
            worst = worst_set(results, shown["best"], results.top_temperature)
            parts += (
                [f"worst on {worst['domain']}, {with_interval(worst, sign=True)}"] if worst else []
            )
        bought.append(f"  {'in' if kind == 'id' else 'out of'} distribution: {'; '.join(parts)}")
    return [
        *headline_and_table(results),
        *bought,
        f"checkpoint: {shown['checkpoint']}",
        f"decode with it: {shown['decode']}",
        f"report: {Path(shown['report']).resolve()}",
    ]


def best_draft(config: AlignConfig, results: Results) -> str:
    """The draft of the policy with the highest alpha in distribution at the highest temperature."""
    return max(config.drafts(), key=lambda draft: results.alpha(draft, "id")["value"] or 0.0)
