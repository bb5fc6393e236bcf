"""`draftsmith plan`: which tree to decode with, on this machine, for this pair, this sampling and this traffic.

1. The target writes the answers; one forward of each model over them gives the chances of acceptance at every rank and
   depth (`eval.acceptance`).
2. Steps are timed over rows that are verified and nodes that are expanded (`eval.plan_model`).
3. Chains, k-ary trees in MCSD's whole space and trees grown node by node from joint runs (`eval.plan_model`, Sequoia's
   objective without its assumption) are ranked by expected tokens per step over seconds per step. What can only be
   tried, confidence stops and trees that grow while decoding, is timed on a few prompts.
4. The best are timed beside the target alone, interleaved, and the fastest is the plan: of four candidates the largest
   measured rate is chosen, so that its speedup is optimistic by what the noise of the clock is among them. The interval
   of its speedup is the bootstrap over prompts, for the one that was chosen; whether it pays is judged among all.
"""

import os
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np
from transformers import PreTrainedModel

from decode import PROPOSERS, Proposer, SpeculativeDecoder, Tree, TreeShape, default_verifier, parse_tree, take_over
from decode.tree_spec import kary
from drafts.load import Draft, depth_limit, kind_of, load_pair
from draftsmith_core.engine_commands import SERVING
from draftsmith_core.errors import InputError
from draftsmith_core.generation_defaults import resolve_sampling, sampling_options
from draftsmith_core.io import write_json_atomic
from draftsmith_core.model_options import loading
from draftsmith_core.models import eos_ids, vocabulary_size
from draftsmith_core.processes import say
from draftsmith_core.progress import Advance, progress
from draftsmith_core.prompts import Prompt, read_prompts
from draftsmith_core.provenance import provenance
from draftsmith_core.sampling import Sampling, generator, row_seed
from draftsmith_core.tokenization import load_tokenizer
from eval import measure
from eval.bootstrap import PromptSums, estimate, quotient, ratio_signs, resamples
from eval.config import PlanConfig
from eval.estimate import read_traces
from eval.model_rows import machine, model_row
from eval.plan_model import Costs, JointRuns, kary_space, measure_costs
from eval.predict import Traces, chances, expected_counts
from eval.request import Method

SCHEMA_VERSION = 1
NODES, DEPTH, LONGEST_CHAIN = 64, 16, 16
# Candidates of one node that are looked at: all of MCSD's where drawing so many is quick, else few.
RANKS, FEW_RANKS, MANY_ELEMENTS = 32, 8, 2**24
TRIED = (
    "chain:6,stop=0.1",
    "chain:8,stop=0.3",
    "chain:12,stop=0.5",
    "eagle2:depth=3,beam=3,nodes=8",
    "eagle2:depth=5,beam=4,nodes=16",
    "opt:nodes=12,depth=5,gain=0.2",
)
STEP_TOKENS, TRY_PROMPTS, TRY_TOKENS = 16, 3, 32
FINALISTS, TEXT_BATCH = 3, 16
# Finalists are timed anew, with the same seeds, until each has had so many seconds, at most so often.
CONFIRM_S, CONFIRM_ROUNDS = 1.0, 5
STEPS = 6
# `--tree auto` plans on so many prompts, with answers of so many tokens.
NOW_PROMPTS, NOW_TOKENS = 8, 48


@dataclass(frozen=True)
class Candidate:
    """A tree that may be best. `spec` is None for one without a name, `rate` tokens per second, predicted or tried."""

    family: str
    spec: str | None
    shape: TreeShape
    rate: float
    step_s: float | None

    @property
    def name(self) -> str:
        """The name that tables show: the spec, or nodes and levels of a tree without one."""
        return self.spec or f"static, {self.shape.size} nodes in {self.shape.depth} levels"

    def written(self) -> dict[str, Any]:
        """What plan.json holds of this tree, to be read by `--tree auto:FILE`."""
        return {"spec": self.spec} if self.spec else {"parents": list(self.shape.parents)}  # type: ignore[union-attr]


@dataclass(frozen=True)
class Planner:
    """A pair, what it is planned for, and the decoders that it is timed with."""

    target: PreTrainedModel
    draft: Draft
    prompts: Sequence[Prompt]
    sampling: Sampling
    batch_size: int
    max_new_tokens: int
    seed: int

    @cached_property
    def proposer(self) -> Proposer:
        """The proposer for this kind of draft."""
        return PROPOSERS[kind_of(self.draft)].make(self.draft)

    def decoder(self, shape: TreeShape | None) -> SpeculativeDecoder:
        """A decoder for this tree (None: no draft); raises ValueError where the draft cannot draft this shape."""
        if shape is None:
            return SpeculativeDecoder(self.target)
        return SpeculativeDecoder(self.target, self.proposer, shape, default_verifier(shape))

    def run(
        self, decoder: SpeculativeDecoder, contexts: Sequence[Sequence[int]], tokens: int, *, ends: bool
    ) -> tuple[int, float, int]:
        """Tokens emitted, seconds, and steps of one batch; `ends`: whether the target's end tokens end a row."""
        seeds = [generator(row_seed(self.seed, f"plan/{index}")) for index in range(len(contexts))]
        batch = decoder.generate(contexts, self.sampling, tokens, seeds, eos_ids(self.target) if ends else ())
        steps = max(each.stats.target_calls for each in batch.generations)
        return sum(len(each.output_ids) for each in batch.generations), batch.decode_s, steps


def plan_pair(planner: Planner, *, confirm_prompts: int, advance: Advance) -> dict[str, Any]:
    """The plan, as JSON but for what the caller knows of names and machine."""
    started = time.perf_counter()
    prompts, sampling = planner.prompts, planner.sampling
    advance(1, "the target's answers")
    options = {"max_new_tokens": planner.max_new_tokens, "batch_size": TEXT_BATCH, "seed": planner.seed}
    rows = measure.answers(planner.target, prompts, sampling, **options)
    positions = sum(len(row.output_ids) for row in rows)
    ranks = RANKS if positions * vocabulary_size(planner.target) <= MANY_ELEMENTS * 2 or sampling.greedy else FEW_RANKS
    deepest = depth_limit(planner.draft)
    depth = min(DEPTH, deepest or DEPTH)
    advance(1, "acceptance")
    asked = [Method(f"chain:{depth}", "naive"), Method(f"kary:{ranks}", "mcsd")]
    traces = read_traces(planner.target, {"d": planner.draft}, rows, sampling, asked, batch_size=TEXT_BATCH)["d"]
    advance(1, "costs of a step")
    costs, timed = measure_costs(_stepper(planner, [[*row.prompt_ids, *row.output_ids] for row in rows]), deepest)
    advance(1, "choosing")
    chosen = _choose(planner, traces, costs, ranks, depth)
    advance(1, "trees that can only be tried")
    tried, refused = _try(planner, costs)
    finalists = _finalists([*chosen, *tried])
    advance(1, "confirming")
    confirmed = _confirm(planner, finalists, prompts[:confirm_prompts])
    best = max(range(len(finalists)), key=lambda index: confirmed[1 + index]["tokens_per_s"])
    speedup = confirmed[1 + best]["speedup"]

    def rate(verifier: str, n: int) -> tuple[float, float]:
        chain = kary((1,) * n)
        tau = _emitted_per_call(chain, verifier, sampling, traces).pooled or 0.0
        return tau, tau / costs.step(chain)

    return {
        "schema_version": SCHEMA_VERSION,
        "tree": finalists[best].written(),
        "name": finalists[best].name,
        "verifier": default_verifier(finalists[best].shape),
        "pays": _pays([row["speedup"] for row in confirmed[1:]], best),
        "speedup": speedup,
        "sampling": asdict(sampling),
        "batch_size": planner.batch_size,
        "max_new_tokens": planner.max_new_tokens,
        "prompts": len(prompts),
        "positions": positions,
        "ranks": ranks,
        "costs": {**asdict(costs), "rounds": timed},
        "candidates": [
            {"family": each.family, "tree": each.name, "tokens_per_s": each.rate, "step_s": each.step_s}
            | _expected(each, sampling, traces, planner.seed)
            for each in [*chosen[:20], *tried]
        ],
        "not_tried": refused,
        "confirmed": confirmed,
        "domains": _by_domain(prompts, traces, costs, sampling, chosen),
        "engines": engine_flags(kind_of(planner.draft), rate, 1 / costs.alone, depth),
        "load": os.getloadavg()[0],
        "seconds": time.perf_counter() - started,
    }


def planned_tree(plan: dict[str, Any]) -> TreeShape:
    """The tree that a plan (the contents of plan.json) names."""
    chosen = plan["tree"]
    return parse_tree(chosen["spec"]) if chosen.get("spec") else Tree(tuple(chosen["parents"]))


def _stepper(planner: Planner, texts: list[list[int]]) -> Callable[[Tree | None], float]:
    """Seconds per step on a tree behind real contexts: the first two thirds of prompts with their answers."""
    contexts = [text[: max(1, 2 * len(text) // 3)] for text in texts]
    batch = [contexts[index % len(contexts)] for index in range(planner.batch_size)]
    decoders: dict[Tree | None, SpeculativeDecoder] = {}

    def seconds(tree: Tree | None) -> float:
        if tree not in decoders:
            decoders[tree] = planner.decoder(tree)
        _, spent, steps = planner.run(decoders[tree], batch, min(STEP_TOKENS, planner.max_new_tokens), ends=False)
        return spent / steps

    return seconds


def _choose(planner: Planner, traces: Traces, costs: Costs, ranks: int, depth: int) -> list[Candidate]:
    """Static trees, the fastest expected first."""
    lengths_P = np.array([trace.length for trace in traces.rows])
    runs = JointRuns(chances(ranks, "mcsd", planner.sampling, traces), lengths_P)
    trees: list[tuple[str, str | None, Tree]] = [
        ("chain", f"chain:{n}", kary((1,) * n)) for n in range(1, min(LONGEST_CHAIN, depth) + 1)
    ]
    trees += [("kary", spec, tree) for spec, tree in kary_space(NODES, depth, ranks).items()]
    for levels in range(2, depth + 1):
        trees += [("grown", None, tree) for tree in runs.grow(NODES, levels) if not tree.is_chain]
    found: dict[Tree, Candidate] = {}
    for family, spec, tree in trees:
        if tree not in found:
            step_s = costs.step(tree)
            found[tree] = Candidate(family, spec, tree, planner.batch_size * runs.length(tree) / step_s, step_s)
    return sorted(found.values(), key=lambda each: -each.rate)


def _try(planner: Planner, costs: Costs) -> tuple[list[Candidate], list[dict[str, str]]]:
    """What cannot be predicted, by the clock on a few prompts; and what this draft cannot do, with its reason."""
    found, refused = [], []
    for spec in TRIED:
        shape = parse_tree(spec)
        try:
            decoder = planner.decoder(shape)
        except ValueError as error:
            refused.append({"tree": spec, "reason": str(error)})
            continue
        tokens, seconds = 0, 0.0
        for warm, batch in enumerate(_batches(planner.prompts[: TRY_PROMPTS * planner.batch_size], planner.batch_size)):
            contexts = [prompt.ids for prompt in batch]
            if not warm:
                planner.run(decoder, contexts, 4, ends=False)
            emitted, spent, _ = planner.run(decoder, contexts, min(TRY_TOKENS, planner.max_new_tokens), ends=True)
            tokens, seconds = tokens + emitted, seconds + spent
        found.append(Candidate("stop" if "stop" in spec else "grows", spec, shape, tokens / seconds, None))
    return found, refused


def _batches(prompts: Sequence[Prompt], size: int) -> list[Sequence[Prompt]]:
    return [prompts[start : start + size] for start in range(0, len(prompts), size)]


def _finalists(candidates: Sequence[Candidate]) -> list[Candidate]:
    """The three fastest, of three families where there are as many: neighbours of one family hardly differ."""
    ordered = sorted(candidates, key=lambda each: -each.rate)
    first: dict[str, Candidate] = {}
    for each in ordered:
        first.setdefault(each.family, each)
    chosen = sorted(first.values(), key=lambda each: -each.rate)[:FINALISTS]
    return chosen + [each for each in ordered if each not in chosen][: FINALISTS - len(chosen)]


def _confirm(planner: Planner, finalists: Sequence[Candidate], prompts: Sequence[Prompt]) -> list[dict[str, Any]]:
    """Tokens per second of the target alone and of every finalist, interleaved in rotating order, after a warm-up; in
    as many rounds as it takes for each to be timed for `CONFIRM_S`.
    """
    decoders = [planner.decoder(None), *(planner.decoder(each.shape) for each in finalists)]
    batches = _batches(prompts, planner.batch_size)
    emitted, seconds = ([[0.0] * len(batches) for _ in decoders] for _ in range(2))
    for decoder in decoders:
        planner.run(decoder, [prompt.ids for prompt in batches[0]], 8, ends=False)
    order = list(range(len(decoders)))
    for round_ in range(CONFIRM_ROUNDS):
        for index, batch in enumerate(batches):
            turn = (round_ + index) % len(order)
            for which in order[turn:] + order[:turn]:
                contexts = [prompt.ids for prompt in batch]
                tokens, spent, _ = planner.run(decoders[which], contexts, planner.max_new_tokens, ends=True)
                emitted[which][index] += tokens
                seconds[which][index] += spent
        if min(map(sum, seconds)) >= CONFIRM_S:
            break
    picks = resamples(len(batches), 2000, row_seed(planner.seed, "plan/confirm"))
    alone = PromptSums.of(emitted[0], seconds[0])
    rows: list[dict[str, Any]] = []
    for which, name in enumerate(["the target alone", *(each.name for each in finalists)]):
        sums = PromptSums.of(emitted[which], seconds[which])
        row: dict[str, Any] = {"tree": name, "tokens_per_s": sums.pooled, "speedup": None}
        if which:
            found = quotient(sums, alone, picks)
            row |= {"predicted_or_tried": finalists[which - 1].rate, "family": finalists[which - 1].family}
            row["speedup"] = {key: found[key] for key in ("value", "low", "high", "prompts")}
        rows.append(row)
    return rows


def _pays(speedups: Sequence[dict[str, Any]], best: int) -> bool | None:
    """Whether to draft: yes where the best is faster than the target alone beyond chance, under Holm's correction over
    all that were timed, because the best of three looks better than it is; no where it was not the faster; else None.
    """
    if ratio_signs(speedups)[best] == 1:
        return True
    return False if (speedups[best]["value"] or 0.0) <= 1 else None


def _emitted_per_call(tree: Tree, verifier: str, sampling: Sampling, traces: Traces) -> PromptSums:
    """Tokens of every text over the target calls that are expected for it."""
    counts = expected_counts(tree, verifier, sampling, traces)
    return PromptSums.of([trace.length for trace in traces.rows], counts["target_calls"])


def _expected(candidate: Candidate, sampling: Sampling, traces: Traces, seed: int) -> dict[str, Any]:
    """tau of a static candidate, with the interval of its expectation; None for what was only tried."""
    if candidate.step_s is None or not isinstance(candidate.shape, Tree):
        return {"tau": None}
    sums = _emitted_per_call(candidate.shape, default_verifier(candidate.shape), sampling, traces)
    found = estimate(sums, resamples(len(traces.rows), 500, row_seed(seed, "plan/tau")))
    return {"tau": {key: found[key] for key in ("value", "low", "high")}}


def _by_domain(
    prompts: Sequence[Prompt], traces: Traces, costs: Costs, sampling: Sampling, chosen: Sequence[Candidate]
) -> list[dict[str, Any]]:
    """Of every domain of the prompts: which of the best static trees would be fastest there, as predicted."""
    rows = []
    for domain in dict.fromkeys(prompt.domain for prompt in prompts):
        own = Traces(
            [trace for prompt, trace in zip(prompts, traces.rows, strict=True) if prompt.domain == domain],
            traces.any_depth,
        )
        rates = []
        for each in chosen[:20]:
            assert isinstance(each.shape, Tree)
            tau = _emitted_per_call(each.shape, default_verifier(each.shape), sampling, own).pooled or 0.0
            rates.append((tau / costs.step(each.shape), tau, each.name))
        speed, tau, name = max(rates)
        rows.append(
            {"domain": domain, "prompts": len(own.rows), "tree": name, "tau": tau, "speedup": speed * costs.alone}
        )
    return rows


# Engine: the rule above temperature 0, as a verifier here, and in words.
# At temperature 0 all of them accept what the target would have chosen.
_GREEDY_DRAFT = ("naive", "the draft takes its most probable token, the target samples")
_RULES = {
    "vllm": _GREEDY_DRAFT,
    "sglang": _GREEDY_DRAFT,
    "llama.cpp": _GREEDY_DRAFT,
    "transformers": ("speculative", "the draft samples, accepted with min(1, p/q)"),
}


def engine_flags(
    kind: str, rate: Callable[[str, int], tuple[float, float]], alone: float, longest: int
) -> list[dict[str, Any]]:
    """By engine that loads such a draft: the best length, and tau and speedup there. `rate(verifier, n)` gives tau and
    tokens per second of a chain of n, `alone` the tokens per second without a draft, as predicted here.
    """
    found: list[dict[str, Any]] = []
    for engine, (verifier, rule) in _RULES.items():
        if kind not in SERVING[engine]:
            continue
        rates = [(rate(verifier, n), n) for n in range(1, longest + 1)]
        (tau, speed), best = max(rates, key=lambda each: each[0][1])
        found.append({"engine": engine, "rule": rule, "draft_tokens": best, "tau": tau, "speedup": speed / alone})
    return found


def with_commands(engines: Sequence[dict[str, Any]], kind: str, target: str, draft: str) -> list[dict[str, Any]]:
    """The same with the command that serves the pair, and those that first write what it reads (`exports`)."""
    rows = []
    for row in engines:
        exports, command = SERVING[row["engine"]][kind].commands(kind, target, draft, row["draft_tokens"])
        rows.append({**row, "exports": exports, "command": command})
    return rows


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
    take_over(pair.target, draft)
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
