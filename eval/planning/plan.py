"""`draftsmith plan`: the fastest tree on this machine, for this pair, sampling and traffic.

docs/planning.md has the steps. The best three candidates are timed beside the target alone,
interleaved, and the fastest is the plan. The best of several noisy timings is biased upwards
(winner's curse), so the test that it pays corrects for all of them.
"""

import os
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from functools import cache
from statistics import median
from typing import Any

from transformers import PreTrainedModel

from decode import PROPOSERS, SpeculativeDecoder, Tree, TreeShape, default_verifier, parse_tree
from decode.tree_spec import kary
from drafts.heads.block import BlockHead
from drafts.load import Draft, depth_limit, kind_of
from draftsmith_core.engine_commands import SERVING
from draftsmith_core.errors import counted
from draftsmith_core.io import write_json_atomic
from draftsmith_core.models import eos_ids, vocabulary_size
from draftsmith_core.options import configured
from draftsmith_core.progress import progress
from draftsmith_core.prompts import Prompt
from draftsmith_core.ranks import say
from draftsmith_core.runs import provenance
from draftsmith_core.sampling import Sampling, generator, row_seed
from draftsmith_core.settings import resolve_sampling, sampling_options
from eval import measuring, remarks
from eval.acceptance import Continuation
from eval.bootstrap import PromptSums, estimate, quotient, resamples, signs
from eval.config import PlanConfig
from eval.estimate import read_traces
from eval.facts import machine, model_row
from eval.method import Method
from eval.planning.plan_model import Costs, JointRuns, fit, kary_space, time_shapes
from eval.predict import Traces, chances, predict
from eval.suites import load

SCHEMA_VERSION = 1
NODES, DEPTH, LONGEST_CHAIN = 64, 16, 16
# Siblings per node that are predicted: RANKS if drawing that many is quick, else FEW_RANKS.
RANKS, FEW_RANKS, MANY_ELEMENTS = 32, 8, 2**25
STOPPING = ("chain:6,stop=0.1", "chain:8,stop=0.3", "chain:12,stop=0.5")
# A longer block costs nothing extra, so draft the whole block and stop within it.
BLOCK_STOPS = (0.05, 0.15, 0.3, 0.5)
GROWING = (
    "eagle2:depth=3,beam=3,nodes=8",
    "eagle2:depth=5,beam=4,nodes=16",
    "opt:nodes=12,depth=5,gain=0.2",
)
STEP_TOKENS, TRY_PROMPTS, TRY_TOKENS = 16, 3, 32
FINALISTS, TEXT_BATCH = 3, 16
# Time finalists again, with the same seeds, until each has run this long, in at most this many
# rounds.
CONFIRM_S, CONFIRM_ROUNDS = 1.0, 5
STEPS = 6
# Time limit. As it nears, skip optional work: more prompts, rounds, trees whose tau cannot be
# predicted.
LIMIT_S = 900.0
# Each engine's acceptance rule above temperature 0: our verifier, and a description (engines'
# sources and documentation, November 2026). At temperature 0 all engines accept what the target
# would have chosen.
_GREEDY_DRAFT = ("naive", "the draft takes its most probable token, the target samples")
ENGINE_RULES = {
    "vllm": _GREEDY_DRAFT,
    "sglang": _GREEDY_DRAFT,
    "llama.cpp": _GREEDY_DRAFT,
    "transformers": ("speculative", "the draft samples, accepted with min(1, p/q)"),
}


@dataclass(frozen=True)
class Candidate:
    """A tree that may be best. `spec` is None for a tree without a name; `rate` is tokens per
    second, predicted or tried; `step_s` is None for a tree that was tried.
    """

    family: str
    spec: str | None
    shape: TreeShape
    rate: float
    step_s: float | None

    @property
    def name(self) -> str:
        """The spec, or the size of a tree without one."""
        return (
            self.spec
            or f"static, {counted(self.shape.size, 'node')} in {counted(self.shape.depth, 'level')}"
        )


@dataclass(frozen=True)
class Planner:
    """A pair and the traffic to plan for."""

    target: PreTrainedModel
    draft: Draft
    prompts: Sequence[Prompt]
    sampling: Sampling
    batch_size: int
    max_new_tokens: int
    seed: int

    def decoder(self, shape: TreeShape | None) -> SpeculativeDecoder:
        """Return a decoder for this tree (None: no draft); raise ValueError if the draft cannot
        draft this shape.
        """
        if shape is None:
            return SpeculativeDecoder(self.target)
        proposer = PROPOSERS[kind_of(self.draft)].make(self.draft)
        return SpeculativeDecoder(self.target, proposer, shape, default_verifier(shape))

    def run(
        self,
        decoder: SpeculativeDecoder,
        contexts: Sequence[Sequence[int]],
        tokens: int,
        *,
        ends: bool,
    ) -> tuple[int, float, int]:
        """Tokens emitted, seconds, and steps of one batch; `ends`: whether the target's end tokens
        end a row.
        """
        seeds = [generator(row_seed(self.seed, f"plan/{index}")) for index in range(len(contexts))]
        tokens = min(tokens, self.max_new_tokens)
        batch = decoder.generate(
            contexts, self.sampling, tokens, seeds, eos_ids(self.target) if ends else ()
        )
        steps = max(row.stats.target_calls for row in batch.generations)
        return sum(len(row.output_ids) for row in batch.generations), batch.decode_s, steps

    def batches(self, count: int) -> list[list[tuple[int, ...]]]:
        """Token ids of the first `count` batches of prompts."""
        ids = [prompt.ids for prompt in self.prompts[: count * self.batch_size]]
        return [
            ids[start : start + self.batch_size] for start in range(0, len(ids), self.batch_size)
        ]


@dataclass(frozen=True)
class _Expected:
    """Predictions for static trees, from one forward over the answers."""

    sampling: Sampling
    traces: Traces
    costs: Costs

    def tokens_per_call(self, tree: Tree, verifier: str) -> PromptSums:
        """Tokens of every text over its predicted target calls."""
        counts = predict(tree, verifier, self.sampling, self.traces)
        assert counts is not None
        return PromptSums.of(self.traces.lengths_P.tolist(), counts["target_calls"])

    def rate(self, tree: Tree, verifier: str) -> tuple[float, float]:
        """Tokens per second, and per step."""
        tau = self.tokens_per_call(tree, verifier).pooled or 0.0
        return tau / self.costs.step(tree), tau

    def row(self, candidate: Candidate, seed: int) -> dict[str, Any]:
        """A candidate as JSON, with its predicted tau (None if it was only tried)."""
        tau, tree = None, candidate.shape
        if candidate.step_s is not None and isinstance(tree, Tree):
            picks = resamples(len(self.traces.lengths_P), 500, row_seed(seed, "plan/tau"))
            tau = estimate(self.tokens_per_call(tree, default_verifier(tree)), picks)
        names = {"family": candidate.family, "tree": candidate.name}
        return {**names, "tokens_per_s": candidate.rate, "step_s": candidate.step_s, "tau": tau}


def plan_pair(planner: Planner, confirm_batches: int) -> dict[str, Any]:
    """Return the plan as JSON, without the names of the models and the machine."""
    started, sampling, load = time.perf_counter(), planner.sampling, os.getloadavg()[0]

    def within(share: float) -> bool:
        return time.perf_counter() - started < share * LIMIT_S

    with progress("plan", STEPS) as advance:
        advance(1, "the target's answers")
        options = {
            "max_new_tokens": planner.max_new_tokens,
            "batch_size": TEXT_BATCH,
            "seed": planner.seed,
        }
        rows: list[Continuation] = []
        while len(rows) < len(planner.prompts) and (not rows or within(0.3)):
            part = planner.prompts[len(rows) : len(rows) + TEXT_BATCH]
            rows += measuring.answers(planner.target, part, sampling, **options)
        positions = sum(len(row.output_ids) for row in rows)
        ranks = (
            RANKS
            if positions * vocabulary_size(planner.target) <= MANY_ELEMENTS or sampling.greedy
            else FEW_RANKS
        )
        deepest = depth_limit(planner.draft)
        depth = min(DEPTH, deepest or DEPTH)
        advance(1, "acceptance")
        methods = [Method(f"chain:{depth}", "naive"), Method(f"kary:{ranks}", "mcsd")]
        read, _ = read_traces(
            planner.target, {"d": planner.draft}, rows, sampling, methods, batch_size=TEXT_BATCH
        )
        advance(1, "costs of a step")
        stepper = _stepper(planner, [[*row.prompt_ids, *row.output_ids] for row in rows])
        rounds = time_shapes(stepper, deepest, lambda: within(0.5))
        expected = _Expected(sampling, read["d"], costs := fit(rounds))
        advance(1, "choosing")
        static = _choose(planner, expected, ranks, depth)
        advance(1, "trees that can only be tried")
        tried, not_tried = _try(planner, lambda: within(0.7))
        finalists = _finalists([*static, *tried])
        advance(1, "confirming")
        confirmed, rounds["confirmed"] = _confirm(
            planner, finalists, confirm_batches, lambda: within(1.0)
        )
    best = max(range(len(finalists)), key=lambda index: confirmed[1 + index]["tokens_per_s"])
    pays = _pays([row["speedup"] for row in confirmed[1:]], best)
    # Timings of every shape over their median; other work on the machine spreads them.
    noise = [second / median(seconds) for seconds in rounds.values() for second in seconds]
    conditions = remarks.conditions(
        "plan", sampling.temperature, [load, os.getloadavg()[0]], noise, os.cpu_count() or 1
    )
    busy = remarks.of_timing([conditions], os.cpu_count() or 1)
    noted = [*remarks.of_target(str(planner.target.name_or_path), planner.target), *busy]
    winner = finalists[best]
    # Slots that see each other draft something else in a shorter block.
    whole = isinstance(planner.draft, BlockHead) and not planner.draft.config.causal
    lengths = range(depth if whole else 1, depth + 1)
    return {
        "schema_version": SCHEMA_VERSION,
        "tree": {"spec": winner.spec} if winner.spec else {"parents": list(winner.shape.parents)},  # type: ignore[union-attr]
        "name": winner.name,
        "verifier": default_verifier(winner.shape),
        "pays": pays,
        "speedup": confirmed[1 + best]["speedup"],
        "sampling": asdict(sampling),
        "batch_size": planner.batch_size,
        "max_new_tokens": planner.max_new_tokens,
        "prompts": len(rows),
        "positions": positions,
        "ranks": ranks,
        "costs": {**asdict(costs), "rounds": rounds},
        "candidates": [
            expected.row(candidate, planner.seed) for candidate in [*static[:20], *tried]
        ],
        "not_tried": not_tried,
        "confirmed": confirmed,
        # Give no engine advice if timings are noisy or no draft pays.
        "engines": []
        if busy or pays is False
        else _engines(kind_of(planner.draft), expected, lengths),
        "conditions": conditions,
        "remarks": [remark["text"] for remark in noted],
        "seconds": time.perf_counter() - started,
    }


def _stepper(planner: Planner, texts: list[list[int]]) -> Callable[[Tree | None], float]:
    """Return a timer: seconds per step on a tree. Contexts are the first two thirds of each prompt
    plus answer.
    """
    contexts = [text[: max(1, 2 * len(text) // 3)] for text in texts]
    batch = [contexts[index % len(contexts)] for index in range(planner.batch_size)]
    decoder = cache(planner.decoder)

    def seconds(tree: Tree | None) -> float:
        _, spent, steps = planner.run(decoder(tree), batch, STEP_TOKENS, ends=False)
        return spent / steps

    return seconds


def _choose(planner: Planner, expected: _Expected, ranks: int, depth: int) -> list[Candidate]:
    runs = JointRuns(
        chances(ranks, "mcsd", planner.sampling, expected.traces), expected.traces.lengths_P
    )
    trees: list[tuple[str, str | None, Tree]] = [
        ("chain", f"chain:{n}", kary((1,) * n)) for n in range(1, min(LONGEST_CHAIN, depth) + 1)
    ]
    trees += [("kary", spec, tree) for spec, tree in kary_space(NODES, depth, ranks).items()]
    for levels in range(2, depth + 1):
        trees += [("grown", None, tree) for tree in runs.grow(NODES, levels) if not tree.is_chain]
    candidates: dict[Tree, Candidate] = {}
    for family, spec, tree in trees:
        if tree not in candidates:
            step_s = expected.costs.step(tree)
            candidates[tree] = Candidate(
                family, spec, tree, planner.batch_size * runs.length(tree) / step_s, step_s
            )
    return sorted(candidates.values(), key=lambda candidate: -candidate.rate)


def tried(draft: Draft) -> tuple[str, ...]:
    """Specs of the trees to time: their steps vary in size, so they cannot be predicted."""
    if isinstance(draft, BlockHead):
        return (*(f"chain:{draft.depths},stop={stop}" for stop in BLOCK_STOPS), *GROWING)
    return (*STOPPING, *GROWING)


def _try(
    planner: Planner, go_on: Callable[[], bool]
) -> tuple[list[Candidate], list[dict[str, str]]]:
    """Time trees with a stop and growing ones on a few prompts; return also the skipped ones, with
    the reason.
    """
    candidates, not_tried = [], []
    for spec in tried(planner.draft):
        shape = parse_tree(spec)
        try:
            if not go_on():
                raise ValueError("no time was left")
            decoder = planner.decoder(shape)
        except ValueError as error:
            not_tried.append({"tree": spec, "reason": str(error)})
            continue
        batches = planner.batches(TRY_PROMPTS)
        planner.run(decoder, batches[0], 4, ends=False)  # warm-up
        runs = [planner.run(decoder, batch, TRY_TOKENS, ends=True) for batch in batches]
        rate = sum(tokens for tokens, _, _ in runs) / sum(seconds for _, seconds, _ in runs)
        candidates.append(Candidate("stop" if "stop" in spec else "grows", spec, shape, rate, None))
    return candidates, not_tried


def _finalists(candidates: Sequence[Candidate]) -> list[Candidate]:
    """The three fastest, of three families if there are as many: neighbours of one family hardly
    differ.
    """
    ordered = sorted(candidates, key=lambda candidate: -candidate.rate)
    first: dict[str, Candidate] = {}
    for candidate in ordered:
        first.setdefault(candidate.family, candidate)
    chosen = list(first.values())[:FINALISTS]
    return (
        chosen
        + [candidate for candidate in ordered if candidate not in chosen][: FINALISTS - len(chosen)]
    )


def _confirm(
    planner: Planner, finalists: Sequence[Candidate], count: int, go_on: Callable[[], bool]
) -> tuple[list[dict[str, Any]], list[float]]:
    """Time the target alone and every finalist, interleaved in rotating order, until each has run
    `CONFIRM_S`; return also the target's seconds per token, run by run.
    """
    decoders = [planner.decoder(None), *(planner.decoder(finalist.shape) for finalist in finalists)]
    batches = planner.batches(count)
    emitted, seconds = ([[0.0] * len(batches) for _ in decoders] for _ in range(2))
    for decoder in decoders:
        planner.run(decoder, batches[0], 8, ends=False)  # warm-up
    order = list(range(len(decoders)))
    alone_s: list[float] = []
    for round_ in range(CONFIRM_ROUNDS):
        for index, batch in enumerate(batches):
            if alone_s and not go_on():
                break
            turn = (round_ + index) % len(order)
            for which in order[turn:] + order[:turn]:
                tokens, spent, _ = planner.run(
                    decoders[which], batch, planner.max_new_tokens, ends=True
                )
                emitted[which][index] += tokens
                seconds[which][index] += spent
                alone_s += [] if which else [spent / tokens]
        if min(map(sum, seconds)) >= CONFIRM_S or not go_on():
            break
    timed = sum(second > 0 for second in seconds[0])
    picks = resamples(timed, 2000, row_seed(planner.seed, "plan/confirm"))
    alone, *rates = [
        PromptSums.of(n[:timed], s[:timed]) for n, s in zip(emitted, seconds, strict=True)
    ]
    return [
        {"tree": "the target alone", "tokens_per_s": alone.pooled, "speedup": None},
        *(
            {
                "tree": finalist.name,
                "tokens_per_s": rate.pooled,
                "speedup": quotient(rate, alone, picks),
                "predicted_or_tried": finalist.rate,
                "family": finalist.family,
            }
            for finalist, rate in zip(finalists, rates, strict=True)
        ),
    ], alone_s


def _pays(speedups: Sequence[dict[str, Any]], best: int) -> bool | None:
    """True if the best is significantly faster than the target alone, False if it was not faster,
    else None.

    Holm's correction is over all that were timed, because the best of three looks better than it
    is.
    """
    if signs(speedups, ratios=True)[best] == 1:
        return True
    return False if (speedups[best]["value"] or 0.0) <= 1 else None


def _engines(kind: str, expected: _Expected, lengths: Sequence[int]) -> list[dict[str, Any]]:
    """For each engine that loads such a draft, the best draft length under its own rule at this
    machine's costs.
    """
    rows: list[dict[str, Any]] = []
    for engine, (verifier, rule) in ENGINE_RULES.items():
        if kind in SERVING[engine]:
            rates = [(*expected.rate(kary((1,) * n), verifier), n) for n in lengths]
            speed, tau, best = max(rates, key=lambda rate: rate[0])
            row = {"engine": engine, "rule": rule, "draft_tokens": best, "tau": tau}
            rows.append({**row, "speedup": speed * expected.costs.alone})
    return rows


def plan(config: PlanConfig | None = None, **options: Any) -> dict[str, Any]:
    """Find the fastest tree for a pair; write the plan, with all its measurements, to `config.file`
    and return it.
    """
    config = configured(PlanConfig, config, options)
    say(f"plan: takes up to about {LIMIT_S / 60:.0f} minutes; {config.file} will hold the plan")
    (suite,), pair = load(config, {"draft": config.draft}, {"prompts": config.prompts}, {})
    draft = pair.drafts["draft"]
    remarks.announce(remarks.of_target(config.target, pair.target), strict=False)
    for place, reason in suite.skipped:
        say(f"plan: {place} skipped: {reason}")
    resolved = resolve_sampling(config.target, pair.target, **sampling_options(config))
    if resolved.note:
        say(f"plan: {resolved.note}")
    planner = Planner(
        pair.target,
        draft,
        suite.prompts,
        resolved.sampling,
        config.batch_size,
        config.max_new_tokens,
        config.seed,
    )
    planned = plan_pair(planner, config.confirm_prompts)
    engines = []
    for row in planned["engines"]:
        serving = SERVING[row["engine"]][kind_of(draft)]
        exports, command = serving.commands(
            kind_of(draft), config.target, config.draft, row["draft_tokens"]
        )
        engines.append({**row, "exports": exports, "command": command})
    document = {
        **planned,
        "engines": engines,
        "models": {
            "target": model_row(config.target, pair.target),
            "draft": model_row(config.draft, draft),
        },
        "machine": machine(pair.target),
        "provenance": provenance(
            "draftsmith plan", {"prompts": config.prompts, "seed": config.seed}
        ),
    }
    write_json_atomic(config.file, document)
    return document


def plan_lines(document: dict[str, Any]) -> list[str]:
    """The summary for people."""
    speedup = document["speedup"]
    where = f"temperature {document['sampling']['temperature']:g}, batch {document['batch_size']}"
    bounds = "" if speedup["low"] is None else f" [{speedup['low']:.2f}, {speedup['high']:.2f}]"
    best, times = (
        f"{document['name']} with {document['verifier']}",
        f"{speedup['value']:.2f}{bounds}",
    )
    verdict = {
        True: f"use {best}: {times} times as fast as no draft",
        False: f"use no draft: the best, {best}, is {times} times as fast",
        None: f"the best is {best}, {times} times as fast as no draft; that cannot be told from 1",
    }[document["pays"]]
    lines = [f"remark: {remark}" for remark in document["remarks"]]
    lines += ["plan again when the machine is idle"] if document["conditions"]["busy"] else []
    lines += [f"{verdict} ({where})", ""]
    width = max(len(row["tree"]) for row in document["confirmed"])
    for row in document["confirmed"]:
        times = f"  {row['speedup']['value']:.2f}x" if row["speedup"] else ""
        lines.append(f"  {row['tree']:<{width}}  {row['tokens_per_s']:8.1f} tokens/s{times}")
    if document["engines"]:
        lines += ["", "elsewhere, under each engine's rule and at this machine's costs:"]
    for row in document["engines"]:
        lines.append(
            f"  {row['engine']}: {row['draft_tokens']} draft tokens, {row['tau']:.2f} tokens a "
            "step expected"
        )
        lines += [f"    {command}" for command in (*row["exports"], row["command"])]
    return lines
