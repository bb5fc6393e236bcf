"""One round of adaptation: train the served draft on what was logged, compare, and switch it only if nothing is lost.

One call makes one round, named by a hash of the log, the baseline and the options: the same call again finds it done,
or continues it where it was killed. When to call (cron, a workflow engine) is the user's to arrange.
"""

import shutil
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

from draftsmith.alignment.config import AlignConfig
from draftsmith.alignment.outcome import best_draft
from draftsmith.alignment.rounds_config import AdaptConfig
from draftsmith.alignment.stages import align, settled
from draftsmith.alignment.switch import exchange, recover, weights_mark
from draftsmith.alignment.traffic import divided_by_time, read_log, write_traffic
from draftsmith_core.errors import InputError, RequirementError
from draftsmith_core.io import atomic_dir, copy_files, hash_json, read_json, sha256_file, write_json_atomic, writing
from draftsmith_core.processes import require_single_process, say
from draftsmith_core.provenance import read_record
from draftsmith_core.run_directory import hold
from draftsmith_core.tokenization import load_tokenizer
from eval.require import require
from eval.results import Results

RECENT = "recent"
# Options that do not decide what a round finds. Of the files, what is in them decides, not where they lie.
_NOT_IDENTITY = ("draft", "from_log", "baseline", "rollback", "out", "device")


def adapt(config: AdaptConfig) -> dict[str, Any]:
    """Make the round, or go back with `config.rollback`; returns the summary.

    Raises InputError for a log or a baseline that cannot be used; what is served is then untouched.
    """
    require_single_process("align --from_log")
    current = Path(config.draft).resolve()
    with hold(current, "--draft", file=True):
        recover(current)
        if not (current / "config.json").exists():
            raise InputError(f"--draft {config.draft}: holds no draft; name the directory that is served")
        return _rollback(current) if config.rollback else _round(config, current)


def _round(config: AdaptConfig, current: Path) -> dict[str, Any]:
    assert config.from_log is not None and config.baseline is not None
    baseline = Results.load(config.baseline)
    options = {key: value for key, value in asdict(config).items() if key not in _NOT_IDENTITY}
    files = {"log": sha256_file(_log_file(config.from_log)), "baseline": hash_json(baseline.document)}
    name = hash_json(options | files)[:16]
    directory = Path(config.out or f"{config.draft}.rounds") / name
    record = directory / "round.json"
    if record.exists():
        found = read_json(record, "the record of a round")
        say(f"{record}: this round is done; nothing is made anew")
        return found
    measured = baseline.document["config"]
    target = config.target or measured["target"]
    with hold(directory, "--out"):
        rows, said = read_log(
            config.from_log, load_tokenizer(target, config.trust_remote_code, config.chat_template), config.redact
        )
        for line in said:
            say(line)
        earlier, recent = divided_by_time(rows, config.recent_fraction)
        if min(round(config.train.heldout_fraction * len({row.key for row in earlier})), len(recent)) < 2:
            raise InputError(
                f"{config.from_log}: leaves {len(earlier)} answers to train on and {len(recent)} fresh prompts to "
                f"measure on, too few; wait for more"
            )
        begin = directory / "start"
        if not begin.exists():
            with writing(begin), atomic_dir(begin) as made:
                copy_files(current, made, without="run")
        say(f"round {name}: {len(earlier)} answers to train on, {len(recent)} later prompts to measure on")
        write_traffic(earlier, recent, directory)
    asked = _alignment(config, target, measured, directory, len(earlier))
    results = align(asked, answered=True, require=config.require)
    asked = settled(asked)
    best = best_draft(asked, results)
    unmet = _unmet(results, config.require)
    found = {
        "round": name,
        "promoted": not unmet,
        "because": unmet or [f"every requirement is met: {', '.join(config.require)}"],
        "answers": len(earlier),
        "recent_prompts": len(recent),
        "gain": {domain: results.gain(best, domain) for domain in results.domains()},
        "checkpoint": str(directory / best),
        "results": str(results.directory / "results.json"),
        "draft": config.draft,
    }
    if not unmet:
        _promote(directory / best, current, {"round": name, "parent": weights_mark(begin), "gain": found["gain"]})
    write_json_atomic(record, found)
    return found


def _log_file(source: str) -> Path:
    if not Path(source).is_file():
        what = "is a directory, a pipe or a device" if Path(source).exists() else "no such file"
        raise InputError(f"--from_log {source}: {what}; name a .jsonl log of requests with answers")
    return Path(source)


def _alignment(config: AdaptConfig, target: str, measured: Any, directory: Path, answers: int) -> AlignConfig:
    """The alignment that a round is: to the logged answers, measured on the latest prompts and the baseline's sets."""
    sets = {kind: [each for each in measured[kind] if each.partition("=")[0] != RECENT] for kind in ("id", "ood")}
    warmest = max(measured["temperature"])
    drawn = {"temperature": warmest} | {key: measured[key] for key in ("top_p", "top_k", "min_p")}
    drawn |= {key: value for key in drawn if (value := getattr(config.distill, key)) is not None}
    return AlignConfig(
        target=target,
        prompts=str(directory / "prompts" / "train.jsonl"),
        draft=str(directory / "start"),
        out=str(directory),
        objective=[config.objective],
        policy=config.policy,
        id=[f"{RECENT}={directory / 'prompts' / 'recent.jsonl'}", *sets["id"]],
        ood=sets["ood"],
        prompt_tokens=measured["prompt_tokens"],
        distill=replace(config.distill, num_samples=1, max_prompts=answers, **drawn),
        train=config.train,
        eval=replace(config.eval, temperature=config.eval.temperature or [warmest]),
        seed=config.seed,
        device=config.device,
        dtype=config.dtype,
        chat_template=config.chat_template,
        trust_remote_code=config.trust_remote_code,
    )


def _unmet(results: Results, rules: list[str]) -> list[str]:
    try:
        require(results, rules)
    except RequirementError as error:
        return list(error.unmet)
    return []


def _promote(checkpoint: Path, current: Path, lineage: dict[str, Any]) -> None:
    """Switch `current` to the checkpoint in one rename; what was there is kept as CURRENT.previous."""
    staged, previous = current.with_name(f".{current.name}.next"), current.with_name(f"{current.name}.previous")
    with writing(current, "nothing is lost; the same command continues"):
        if _lineage(current)[:1] != [lineage]:
            with atomic_dir(staged) as made:
                copy_files(checkpoint, made, without="run")
                kept = read_json(made / "draftsmith.json", "the record of a draft checkpoint")
                write_json_atomic(made / "draftsmith.json", kept | {"lineage": [lineage, *_lineage(current)]})
            exchange(staged, current)
        # From here on what is staged, if it is still there, is the draft that was served before.
        if staged.exists():
            shutil.rmtree(previous, ignore_errors=True)
            staged.rename(previous)


def _rollback(current: Path) -> dict[str, Any]:
    previous, made = current.with_name(f"{current.name}.previous"), _lineage(current)[:1]
    if not made or not previous.is_dir() or weights_mark(previous) != made[0]["parent"]:
        raise InputError(f"rollback: {previous} is not what {current} was made from; nothing to go back to")
    with writing(current, "nothing is lost; the same command continues"):
        exchange(previous, current)
    return {"round": made[0]["round"], "promoted": False, "because": ["rolled back"], "draft": str(current)}


def _lineage(draft: Path) -> list[dict[str, Any]]:
    """The rounds that a draft is from, the latest first."""
    found: list[dict[str, Any]] = read_record(draft).get("lineage", [])
    return found
