"""`draftsmith plan` behind its options: load, plan, write."""

from dataclasses import replace
from pathlib import Path
from typing import Any

from drafts.load import kind_of, load_pair
from draftsmith_core.errors import InputError
from draftsmith_core.generation_defaults import resolve_sampling, sampling_options
from draftsmith_core.io import write_json_atomic
from draftsmith_core.model_options import loading
from draftsmith_core.processes import say
from draftsmith_core.progress import progress
from draftsmith_core.prompts import read_prompts
from draftsmith_core.provenance import provenance
from draftsmith_core.tokenization import load_tokenizer
from eval.config import PlanConfig
from eval.model_rows import machine, model_row
from eval.plan import Planner, plan_pair
from eval.plan_flags import with_commands

STEPS = 6
# `--tree auto` plans on so many prompts, with answers of so many tokens.
NOW_PROMPTS, NOW_TOKENS = 8, 48


def plan(config: PlanConfig) -> dict[str, Any]:
    """Find the fastest tree for a pair, write it with everything it is based on to `config.out`, and return that.

    Raises InputError for what cannot be loaded, read or drafted.
    """
    if Path(config.out).is_dir():
        raise InputError(f"--out {config.out}: is a directory; name a .json file")
    tokenizer = load_tokenizer(config.target, config.trust_remote_code)
    read = read_prompts(config.prompts, tokenizer, prompt_tokens=config.prompt_tokens, limit=config.max_prompts)
    pair = load_pair(
        config.target,
        {"draft": config.draft},
        quantize=config.quantize,
        tokenizer=tokenizer,
        **loading(config),
    )
    draft = pair.drafts["draft"]
    # A step that is timed stands behind two thirds of a prompt and its answer, and goes on from there.
    room = (pair.context or 2**31) - config.max_new_tokens
    prompts = [prompt for prompt in read.prompts if len(prompt.ids) <= room]
    for skip in read.skipped:
        say(f"plan: row {skip.row} skipped: {skip.reason}")
    if long := len(read.prompts) - len(prompts):
        say(f"plan: {long} prompts skipped: longer than the {room} tokens that leave room")
    if not prompts:
        raise InputError(f"--prompts {config.prompts}: none fits {room} tokens; lower --max_new_tokens")
    found = resolve_sampling(config.target, pair.target, **sampling_options(config))
    if found.note:
        say(f"plan: {found.note}")
    try:
        planner = Planner(
            pair.target,
            draft,
            prompts,
            found.sampling,
            batch_size=config.batch_size,
            max_new_tokens=config.max_new_tokens,
            seed=config.seed,
        )
        with progress("plan", STEPS) as advance:
            planned = plan_pair(planner, confirm_prompts=config.confirm_prompts * config.batch_size, advance=advance)
    except ValueError as error:
        raise InputError(f"--draft {config.draft}: {error}") from None
    document = {
        **planned,
        "engines": with_commands(planned["engines"], kind_of(draft), config.target, config.draft),
        "models": {"target": model_row(config.target, pair.target), "draft": model_row(config.draft, draft)},
        "machine": machine(pair.target),
        "provenance": provenance("draftsmith plan", {"prompts": config.prompts, "seed": config.seed}),
    }
    write_json_atomic(Path(config.out), document)
    return document


def plan_now(planner: Planner) -> dict[str, Any]:
    """A plan made on the spot, on the first prompts and with short answers, for `--tree auto`."""
    few, tokens = planner.prompts[:NOW_PROMPTS], min(NOW_TOKENS, max(4, planner.max_new_tokens))
    with progress("plan", STEPS) as advance:
        return plan_pair(
            replace(planner, prompts=few, max_new_tokens=tokens), confirm_prompts=len(few), advance=advance
        )


def planned_now(plan: dict[str, Any]) -> str:
    """One line about a plan of `plan_now`."""
    best = "no draft is faster; the best is " * (plan["pays"] is False) + plan["name"]
    times = plan["speedup"]["value"]
    return f"planned now, on {plan['prompts']} prompts: {best} ({times:.2f} times no draft)"


def plan_lines(document: dict[str, Any]) -> list[str]:
    """What a person wants to read of a plan."""
    speedup, pays = document["speedup"], document["pays"]
    where = f"temperature {document['sampling']['temperature']:g}, batch {document['batch_size']}"
    bounds = "" if speedup["low"] is None else f" [{speedup['low']:.2f}, {speedup['high']:.2f}]"
    best, times = f"{document['name']} with {document['verifier']}", f"{speedup['value']:.2f}{bounds}"
    verdict = {
        True: f"use {best}: {times} times as fast as no draft",
        False: f"use no draft: the best, {best}, is {times} times as fast",
        None: f"the best is {best}, and its {times} times the speed of no draft cannot be told from 1",
    }[pays]
    lines = [f"{verdict} ({where})", ""]
    width = max(len(row["tree"]) for row in document["confirmed"])
    for row in document["confirmed"]:
        times = f"  {row['speedup']['value']:.2f}x" if row["speedup"] else ""
        lines.append(f"  {row['tree']:<{width}}  {row['tokens_per_s']:8.1f} tokens/s{times}")
    if document["engines"]:
        lines += ["", "elsewhere, under each engine's rule and at this machine's costs:"]
        for row in document["engines"]:
            lines.append(
                f"  {row['engine']}: {row['draft_tokens']} draft tokens, {row['tau']:.2f} tokens a step expected"
            )
            lines += [f"    {command}" for command in (*row["exports"], row["command"])]
    return lines
