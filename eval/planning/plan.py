"""`draftsmith plan`: the fastest tree on this machine, for this pair, sampling and traffic.

docs/planning.md has the steps. The best three candidates are timed beside the target alone,
interleaved, and the fastest is the plan. The best of several noisy timings is biased upwards
(winner's curse), so the test that it pays corrects for all of them.
"""

import os
import time
from collections.abc import Sequence
from dataclasses import asdict
from statistics import median
from typing import Any

from draftsmith.core.devices import resolve_device
from draftsmith.core.hub import quiet
from draftsmith.core.io import JsonObject, write_json_atomic
from draftsmith.core.options import configured
from draftsmith.core.progress import progress
from draftsmith.core.ranks import say
from draftsmith.core.records import provenance
from draftsmith.core.settings import resolve_sampling, sampling_options
from draftsmith.decode import Tree, default_verifier
from draftsmith.decode.compiled.steps import check_backend
from draftsmith.decode.method import OWN_TREE
from draftsmith.drafts.draft_sources import check_sources, models_of
from draftsmith.eval import remarks
from draftsmith.eval.bootstrap import signs
from draftsmith.eval.config import PlanConfig
from draftsmith.eval.copying import loaded_drafts
from draftsmith.eval.facts import machine, model_rows
from draftsmith.eval.formats import with_interval
from draftsmith.eval.loading import load
from draftsmith.eval.planning.tree_trials import Planner
from draftsmith.eval.schema import Estimate
from draftsmith.eval.timing import records_steps

SCHEMA_VERSION = 2
FINALISTS = 3


def plan_pair(planner: Planner, confirm_batches: int) -> JsonObject:
    """Return the plan as JSON, without the names of the models and the machine."""
    with progress("plan", 3) as advance:
        advance(1, "costs of a step")
        costs = planner.costs()
        advance(1, "trees")
        tried, not_tried = planner.try_trees()
        advance(1, "confirming")
        tried.sort(key=lambda candidate: -candidate.rate)
        finalists = tried[:FINALISTS]
        confirmed = planner.confirm(finalists, confirm_batches)
    rates = [row["tokens_per_s"] for row in confirmed.rows[1:]]
    speedups = [row["speedup"] for row in confirmed.rows[1:]]
    best = rates.index(max(rates))
    winner = finalists[best]
    tree: JsonObject = {"spec": winner.spec}
    if winner.spec == OWN_TREE:
        assert isinstance(winner.shape, Tree)
        tree = {"parents": list(winner.shape.parents)}
    # Timings of the target alone over their median; other work on the machine spreads them.
    noise = [second / median(confirmed.alone_s) for second in confirmed.alone_s]
    load = [planner.load, os.getloadavg()[0]]
    cpus = os.cpu_count() or 1
    conditions = remarks.conditions("plan", planner.sampling.temperature, load, noise, cpus)
    busy = remarks.of_timing([conditions], cpus)
    # A busy machine's clock speaks neither for a draft nor against it.
    pays = None if busy else _pays(speedups, best)
    noted = list(remarks.of_target(str(planner.target.name_or_path), planner.target))
    noted += remarks.of_groups({"timed": planner.batch_groups(confirm_batches)})
    return {
        "schema_version": SCHEMA_VERSION,
        "tree": tree,
        "name": winner.spec,
        "verifier": default_verifier(winner.shape, draws=planner.model is not None),
        "pays": pays,
        "speedup": speedups[best],
        "sampling": planner.sampling.record(),
        "batch_size": planner.batch_size,
        "max_new_tokens": planner.max_new_tokens,
        "compile": planner.compile,
        "prompts": len(planner.prompts),
        "prompt_groups": planner.groups,
        "costs": asdict(costs),
        "candidates": [{"tree": each.spec, "tokens_per_s": each.rate} for each in tried],
        "not_tried": not_tried,
        "confirmed": confirmed.rows,
        "conditions": conditions,
        "remarks": [remark["text"] for remark in [*noted, *busy]],
        "seconds": time.perf_counter() - planner.started,
    }


def _pays(speedups: Sequence[Estimate], best: int) -> bool | None:
    """True if the best is significantly faster than the target alone, False if it was not faster,
    else None.

    Holm's correction is over all that were timed, because the best of three looks better than it
    is.
    """
    if signs(speedups)[best] == 1:
        return True
    return False if (speedups[best]["value"] or 0.0) <= 1 else None


@quiet()
def plan(config: PlanConfig | None = None, **options: Any) -> JsonObject:
    """Find the fastest tree for a pair; write the plan, with all its measurements, to `config.file`
    and return it. Raise InputError for a pair or prompts that cannot be planned for.
    """
    config = configured(PlanConfig, config, options)
    sources = {"draft": config.draft}
    check_sources(sources.values())
    check_backend(config.compile, resolve_device(config.device))
    (suite,), pair = load(config, models_of(sources), {"prompts": config.prompts}, {})
    drafts = loaded_drafts(sources, pair)
    remarks.announce(remarks.of_target(config.target, pair.target), strict=False)
    resolved = resolve_sampling(config.target, pair.target, sampling_options(config))
    if resolved.note:
        say(f"plan: {resolved.note}")
    planner = Planner(
        target=pair.target,
        draft=drafts["draft"],
        prompts=suite.prompts,
        sampling=resolved.sampling,
        batch_size=config.batch_size,
        max_new_tokens=config.max_new_tokens,
        seed=config.seed,
        compile=records_steps(config.compile, pair.target, drafts.values()),
    )
    document = plan_pair(planner, config.confirm_prompts)
    options = {"prompts": config.prompts, "seed": config.seed}
    document |= {
        "models": model_rows(config.target, pair.target, sources, drafts),
        "machine": machine(pair.target),
        "provenance": provenance("draftsmith plan", options),
    }
    write_json_atomic(config.file, document)
    return document


def plan_lines(document: JsonObject) -> list[str]:
    """The summary for people."""
    best = f"{document['name']} with {document['verifier']}"
    times = f"{with_interval(document['speedup'], 2)} times"
    verdict = {
        True: f"use {best}: {times} as fast as no draft",
        False: f"use no draft: the best, {best}, is {times} as fast",
        None: f"the best is {best}, {times} as fast as no draft; that cannot be told from 1",
    }[document["pays"]]
    lines = [f"remark: {remark}" for remark in document["remarks"]]
    if document["conditions"]["busy"]:
        verdict = f"plan again when the machine is quiet; the best was {best}, {times} no draft"
    where = f"temperature {document['sampling']['temperature']:g}, batch {document['batch_size']}"
    if document["compile"]:
        where += ", recorded steps"
    rates = (f"{row['tree']} {row['tokens_per_s']:.1f}" for row in document["confirmed"])
    return [*lines, f"{verdict} ({where})", f"tokens/s: {', '.join(rates)}"]
