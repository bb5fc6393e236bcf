"""`draftsmith plan`: the fastest tree on this machine, for this pair, sampling and traffic.

docs/planning.md has the steps. The best three candidates are timed beside the target alone,
interleaved, and the fastest is the plan. The best of several noisy timings is biased upwards
(winner's curse), so the test that it pays corrects for all of them.

Legend: M methods, B batches.
"""

import os
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any, NamedTuple, TypeVar

import numpy as np

from draftsmith.core.asked_hash import Groups
from draftsmith.core.devices import resolve_device
from draftsmith.core.hub import quiet
from draftsmith.core.io import JsonObject, write_json_atomic
from draftsmith.core.models import eos_ids
from draftsmith.core.options import configured
from draftsmith.core.progress import progress
from draftsmith.core.prompts import Prompt
from draftsmith.core.ranks import say
from draftsmith.core.records import provenance
from draftsmith.core.sampling import row_seed
from draftsmith.core.settings import resolve_sampling, sampling_options
from draftsmith.decode import Tree, takes_trees
from draftsmith.decode.compiled.steps import check_backend
from draftsmith.decode.method import OWN_TREE, Method
from draftsmith.decode.propose.choosing import menu, name_of
from draftsmith.decode.propose.sources import AnyDraft, CopyingDraft, proposer_of
from draftsmith.decode.step_costs import StepCosts, measure
from draftsmith.drafts.draft_sources import check_sources, models_of
from draftsmith.drafts.heads.block import BlockHead
from draftsmith.drafts.load import Draft, depth_limit
from draftsmith.eval import remarks
from draftsmith.eval.bootstrap import Floats, PromptSums, quotient, resamples, signs
from draftsmith.eval.config import PlanConfig
from draftsmith.eval.copying import loaded_drafts, model_of
from draftsmith.eval.facts import machine, model_rows
from draftsmith.eval.formats import with_interval
from draftsmith.eval.groups import groups_of
from draftsmith.eval.loading import load
from draftsmith.eval.schema import Estimate
from draftsmith.eval.timing import Task, records_steps

T = TypeVar("T")
SCHEMA_VERSION = 2
FINALISTS = 3
# Trees that are tried beside those of `--tree auto`.
LARGER = ("chain:12", "chain:16", "kary:8", "kary:8,2")
STOPPING = ("chain:6,stop=0.1", "chain:8,stop=0.3", "chain:12,stop=0.5")
# A longer block costs nothing extra, so a block drafter drafts the whole block and stops within it.
BLOCK_STOPS = (0.05, 0.15, 0.3, 0.5)
GROWING = (
    "eagle2:depth=3,beam=3,nodes=8",
    "eagle2:depth=5,beam=4,nodes=16",
    "opt:nodes=12,depth=5,gain=0.2",
)
# Prompts and tokens of a run that tries a tree.
TRY_PROMPTS = 3
TRY_TOKENS = 32
# Time finalists again, with the same seeds, until each has run this long, in at most this many
# rounds.
CONFIRM_S = 1.0
CONFIRM_ROUNDS = 5


class Candidate(NamedTuple):
    """A method that may be best. rate: its tokens per second on a few prompts."""

    method: Method
    rate: float


@dataclass(frozen=True)
class Planner:
    """A pair and the traffic to plan for."""

    task: Task
    draft: AnyDraft

    @property
    def model(self) -> Draft | None:
        """The model that the draft drafts with, if any."""
        return model_of(self.draft)

    @property
    def trees_fit(self) -> bool:
        """Whether the pair takes trees other than chains."""
        return takes_trees(self.task.target, self.model)

    def batches(self, count: int) -> list[Sequence[Prompt]]:
        """The first `count` batches of prompts."""
        return _batches(self.task.prompts, self.task.batch_size, count)

    def batch_groups(self, count: int) -> list[int]:
        """The group of each of the first `count` batches: those that share a group of prompts are
        one.
        """
        groups = groups_of(self.task.prompts)
        return Groups(_batches(groups, self.task.batch_size, count)).numbers()

    def costs(self) -> StepCosts:
        """Time steps, as `--tree auto` does."""
        task = self.task
        draft = None if self.model is None else proposer_of(self.model)
        trees = self.trees_fit
        return measure(task.target, draft, task.sampling, trees=trees, compile=task.compile)

    def tried(self) -> list[str]:
        """Specs of the trees to time."""
        draft = self.draft
        if isinstance(draft, CopyingDraft) and not draft.reads_text:
            return [OWN_TREE]
        deepest = None if self.model is None else depth_limit(self.model)
        chosen = map(name_of, menu(deepest, chains_only=not self.trees_fit))
        if isinstance(draft, BlockHead):
            stopping = [f"chain:{draft.depths},stop={stop}" for stop in BLOCK_STOPS]
            return [*chosen, *stopping, *GROWING]
        return [*chosen, *LARGER, *STOPPING, *GROWING]

    def timed(
        self,
        methods: Sequence[Method | None],
        batches: Sequence[Sequence[Prompt]],
        tokens: int,
        rounds: int = 1,
    ) -> Floats:
        """Decode the batches by M methods (None: no draft), at most so often, until each has run
        `CONFIRM_S`. Return tokens and seconds by method and batch, round after round, `[M, B, 2]`.
        """
        contenders = [self.task.contender(self.draft, method) for method in methods]
        ran_MB2 = np.zeros((len(methods), 0, 2))
        for _ in range(rounds):
            if ran_MB2[:, :, 1].sum(1).min() < CONFIRM_S:
                self.task.race(contenders, batches, min(tokens, self.task.max_new_tokens))
                ran_MB2 = np.array([contender.ran() for contender in contenders])
        return ran_MB2

    def try_trees(self) -> tuple[list[Candidate], list[dict[str, str]]]:
        """Time the trees on a few prompts. Return also those that the draft cannot draft, with the
        reason.
        """
        candidates: list[Candidate] = []
        not_tried = []
        for spec in self.tried():
            method = Method.of(spec, None if self.model else "exact")
            try:
                ran_1B2 = self.timed([method], self.batches(TRY_PROMPTS), TRY_TOKENS)
            except ValueError as error:
                not_tried.append({"tree": spec, "reason": str(error)})
                continue
            tokens, seconds = ran_1B2.sum((0, 1))
            candidates.append(Candidate(method, tokens / seconds))
        return candidates, not_tried


def _batches(values: Sequence[T], size: int, count: int) -> list[Sequence[T]]:
    """The first `count` batches of values by prompt, or all."""
    starts = range(0, min(len(values), count * size), size)
    return [values[start : start + size] for start in starts]


def plan_pair(planner: Planner, confirm_batches: int) -> JsonObject:
    """Return the plan as JSON, without the names of the models and the machine."""
    task = planner.task
    started = time.perf_counter()
    load_before = os.getloadavg()[0]
    with progress("plan", 3) as advance:
        advance(1, "costs of a step")
        costs = planner.costs()
        advance(1, "trees")
        tried, not_tried = planner.try_trees()
        advance(1, "confirming")
        tried.sort(key=lambda candidate: -candidate.rate)
        finalists = [candidate.method for candidate in tried[:FINALISTS]]
        batches = planner.batches(confirm_batches)
        tokens = task.max_new_tokens
        ran_MB2 = planner.timed([None, *finalists], batches, tokens, CONFIRM_ROUNDS)
    groups = planner.batch_groups(confirm_batches)
    rows = _confirmed(finalists, ran_MB2, groups * (ran_MB2.shape[1] // len(groups)), task.seed)
    rates = [row["tokens_per_s"] for row in rows[1:]]
    speedups = [row["speedup"] for row in rows[1:]]
    best = rates.index(max(rates))
    winner = finalists[best]
    alone_B = ran_MB2[0, :, 1] / ran_MB2[0, :, 0]
    load = [load_before, os.getloadavg()[0]]
    cpus = os.cpu_count() or 1
    conditions = remarks.conditions("plan", task.sampling.temperature, load, alone_B.tolist(), cpus)
    busy = remarks.of_timing([conditions], cpus)
    # A busy machine's clock speaks neither for a draft nor against it.
    pays = None if busy else _pays(speedups, best)
    noted = list(remarks.of_target(str(task.target.name_or_path), task.target))
    noted += remarks.of_groups({"timed": groups})
    return {
        "schema_version": SCHEMA_VERSION,
        "tree": _tree(winner),
        "name": winner.tree,
        "verifier": winner.verifier,
        "pays": pays,
        "speedup": speedups[best],
        "sampling": task.sampling.record(),
        "batch_size": task.batch_size,
        "max_new_tokens": task.max_new_tokens,
        "compile": task.compile,
        "prompts": len(task.prompts),
        "costs": asdict(costs),
        "candidates": [{"tree": each.method.tree, "tokens_per_s": each.rate} for each in tried],
        "not_tried": not_tried,
        "confirmed": rows,
        "conditions": conditions,
        "remarks": [remark["text"] for remark in [*noted, *busy]],
        "seconds": time.perf_counter() - started,
    }


def _tree(method: Method) -> JsonObject:
    """A tree as `auto:FILE` reads it."""
    if method.tree != OWN_TREE:
        return {"spec": method.tree}
    assert isinstance(method.shape, Tree)
    return {"parents": list(method.shape.parents)}


def _confirmed(
    finalists: Sequence[Method], ran_MB2: Floats, groups: Sequence[int], seed: int
) -> list[JsonObject]:
    """The target alone and the finalists by the clock, as JSON."""
    alone, *others = [PromptSums(ran_B2[:, 0], ran_B2[:, 1]) for ran_B2 in ran_MB2]
    picks = resamples(groups, 2000, row_seed(seed, "plan/confirm"))
    rows: list[JsonObject] = [
        {"tree": "the target alone", "tokens_per_s": alone.pooled, "speedup": None}
    ]
    for method, own in zip(finalists, others, strict=True):
        speedup = quotient(own, alone, picks)
        rows.append({"tree": method.tree, "tokens_per_s": own.pooled, "speedup": speedup})
    return rows


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
    task = Task(
        target=pair.target,
        prompts=suite.prompts,
        sampling=resolved.sampling,
        eos=eos_ids(pair.target),
        batch_size=config.batch_size,
        max_new_tokens=config.max_new_tokens,
        seed=config.seed,
        compile=records_steps(config.compile, pair.target, drafts.values()),
    )
    document = plan_pair(Planner(task, drafts["draft"]), config.confirm_prompts)
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
