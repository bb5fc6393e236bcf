"""Decode prompt sets for real: the target alone, then every draft against it, counted and timed.

Each result is plain JSON, kept on disk as one measurement of the evaluation. Lists are in the order
of the prompts.
"""

import os
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, TypedDict

import torch
from transformers import PreTrainedModel

from decode import PROPOSERS, BatchOutput, Generation, SpeculativeDecoder, Tree
from drafts.load import Draft, kind_of
from draftsmith_core.models import (
    eos_ids,
)
from draftsmith_core.progress import Tick, no_tick
from draftsmith_core.prompts import Prompt
from draftsmith_core.ranks import divided
from draftsmith_core.sampling import Sampling, generator, row_seed
from eval.acceptance import Continuation
from eval.method import Method

WARM_UP_TOKENS = 8
# Trees of one level separate the cost of drafting from that of verifying. The number of prompts
# that they are timed on, and the most nodes of such a tree.
COST_PROMPTS, MOST_NODES = 2, 64
# Counts of `decode.stats` that are kept per prompt.
COUNTED = ("target_calls", "emitted", "proposed", "accepted", "depth_sum")
COUNTED_BY_DEPTH = ("accepted_by_depth", "reached_by_depth")


class BaselineMeasurement(TypedDict):
    """The target's own continuations, shared by all drafts so that everything is paired by
    prompt.
    """

    output_ids: list[list[int]]
    finish_reason: list[str]


class SpeedMeasurement(TypedDict):
    """Interleaved runs at batch 1 over the same prompts in one process, and the load average before
    and after.

    A run has `draft` (None for the target alone), `tree`, `verifier`, and per prompt the counts
    `emitted`, `target_calls` and `depth_sum` and the seconds `prefill_s` and `decode_s`.
    `one_level`: runs of the first prompts with a tree of one level and as many nodes; each has the
    draft, tree and verifier of the run that it belongs to.
    """

    prompt_ids: list[str]
    runs: list[dict[str, Any]]
    one_level: list[dict[str, Any]]
    load: list[float]


def decoder_of(target: PreTrainedModel, draft: Draft, method: Method) -> SpeculativeDecoder:
    """Return the decoder of one (draft, tree, verifier); raise ValueError if they do not fit."""
    return SpeculativeDecoder(
        target, PROPOSERS[kind_of(draft)].make(draft), method.shape, method.verifier
    )


def _speed_run(draft: str | None, method: Method | None) -> dict[str, Any]:
    named = {"draft": draft, "tree": method and method.tree, "verifier": method and method.verifier}
    return named | {
        key: [] for key in ("emitted", "target_calls", "depth_sum", "prefill_s", "decode_s")
    }


@dataclass(frozen=True, eq=False)
class Task:
    """Prompts to decode, and what all methods share. Methods call `tick(n)` for every n finished
    prompts.
    """

    target: PreTrainedModel
    prompts: Sequence[Prompt]
    sampling: Sampling
    eos: Sequence[int]
    max_new_tokens: int
    seed: int
    batch_size: int = 1

    def baseline(self, tick: Tick = no_tick) -> BaselineMeasurement:
        rows = self._decode(SpeculativeDecoder(self.target, None), None, tick)
        return {
            "output_ids": [row.output_ids for row in rows],
            "finish_reason": [row.finish_reason for row in rows],
        }

    def decoding(
        self, draft: Draft, method: Method, expected: BaselineMeasurement, tick: Tick = no_tick
    ) -> dict[str, Any]:
        """Decode every prompt with a draft; return `COUNTED` and `COUNTED_BY_DEPTH` per prompt.

        `identical` compares greedy outputs with the target's own (`_identical`); None above
        temperature 0.
        """
        rows = self._decode(decoder_of(self.target, draft, method), method, tick)
        counts: dict[str, Any] = {key: [getattr(row.stats, key) for row in rows] for key in COUNTED}
        counts |= {key: [list(getattr(row.stats, key)) for row in rows] for key in COUNTED_BY_DEPTH}
        counts["identical"] = (
            self._identical([row.output_ids for row in rows], expected)
            if self.sampling.greedy
            else None
        )
        return counts

    def speed(
        self,
        drafts: dict[str, Draft],
        methods: Sequence[Method],
        costs_of: Method | None = None,
        tick: Tick = no_tick,
    ) -> SpeedMeasurement:
        """Time the target alone and every (draft, method) at batch 1, prompt by prompt, in rotating
        order. On the first prompts, also time every draft on one level of as many nodes as the
        method `costs_of` has.

        Interleaving spreads a slow minute of the machine over all of them, rotation the advantage
        of warm caches. Each is warmed up once before the clock counts.
        """
        load = os.getloadavg()[0]
        # Decoder, method and run, and whether the tree is of one level.
        alone = SpeculativeDecoder(self.target, None), None, _speed_run(None, None), False
        contenders: list[tuple[SpeculativeDecoder, Method | None, dict[str, Any], bool]] = [alone]
        for name, draft in drafts.items():
            for method in methods:
                contenders.append(
                    (
                        decoder_of(self.target, draft, method),
                        method,
                        _speed_run(name, method),
                        False,
                    )
                )
            if costs_of is not None:
                level = Tree((-1,) * min(costs_of.shape.size, MOST_NODES))
                # A verifier of chains takes one candidate a level, so the cheapest rule for several
                # takes its place.
                rule = "exact" if costs_of.shape.size == costs_of.shape.depth else costs_of.verifier
                decoder = SpeculativeDecoder(
                    self.target, PROPOSERS[kind_of(draft)].make(draft), level, rule
                )
                contenders.append((decoder, costs_of, _speed_run(name, costs_of), True))
        for decoder, timed, *_ in contenders:
            self._generate(
                decoder, self.prompts[:1], timed, min(WARM_UP_TOKENS, self.max_new_tokens)
            )
        for index, prompt in enumerate(self.prompts):
            turn = index % len(contenders)
            for decoder, timed, run, flat in contenders[turn:] + contenders[:turn]:
                if flat and index >= COST_PROMPTS:
                    continue
                batch = self._generate(decoder, [prompt], timed, self.max_new_tokens)
                stats = batch.generations[0].stats
                run["emitted"].append(len(batch.generations[0].output_ids))
                run["target_calls"].append(stats.target_calls)
                run["depth_sum"].append(stats.depth_sum)
                run["prefill_s"].append(batch.prefill_s)
                run["decode_s"].append(batch.decode_s)
                tick(0 if flat else 1)
        return SpeedMeasurement(
            prompt_ids=[prompt.id for prompt in self.prompts],
            runs=[run for *_, run, flat in contenders if not flat],
            one_level=[run for *_, run, flat in contenders if flat],
            load=[load, os.getloadavg()[0]],
        )

    def _decode(
        self, decoder: SpeculativeDecoder, method: Method | None, tick: Tick
    ) -> list[Generation]:
        """All prompts, batch by batch. Batches are the same however many processes divide them."""

        def decode(index: int) -> list[Generation]:
            rows = self.prompts[index * self.batch_size : (index + 1) * self.batch_size]
            batch = self._generate(decoder, rows, method, self.max_new_tokens)
            tick(len(rows))
            return batch.generations

        return [
            row
            for rows in divided(-(-len(self.prompts) // self.batch_size), decode)
            for row in rows
        ]

    def _generate(
        self,
        decoder: SpeculativeDecoder,
        rows: Sequence[Prompt],
        method: Method | None,
        tokens: int,
    ) -> BatchOutput:
        # All drafts share a random stream of a prompt, which makes their differences less noisy.
        stream = f"{self.sampling.temperature}" + (
            f"/{method.tree}/{method.verifier}" if method else ""
        )
        seeds = [generator(row_seed(self.seed, f"{row.id}/{stream}")) for row in rows]
        return decoder.generate([row.ids for row in rows], self.sampling, tokens, seeds, self.eos)

    @torch.inference_mode()
    def _identical(self, outputs: list[list[int]], expected: BaselineMeasurement) -> dict[str, Any]:
        """Return `same`, the number of outputs that equal the target's own, `of`, the number of
        all, and `largest_gap`: of the others, between the target's logits of the two tokens where
        they first differ.
        """
        gaps = []
        for prompt, ours, theirs in zip(self.prompts, outputs, expected["output_ids"], strict=True):
            if ours != theirs:
                # Outputs end at the same end tokens and length, so neither is the beginning of the
                # other.
                shared = next(
                    i for i, (a, b) in enumerate(zip(ours, theirs, strict=False)) if a != b
                )
                ids_1T = torch.tensor([[*prompt.ids, *ours[:shared]]], device=self.target.device)
                logits_V = self.target(input_ids=ids_1T).logits[0, -1].double()
                gaps.append(float((logits_V[ours[shared]] - logits_V[theirs[shared]]).abs()))
        return {
            "same": len(outputs) - len(gaps),
            "of": len(outputs),
            "largest_gap": max(gaps, default=None),
        }


def continuations(prompts: Sequence[Prompt], baseline: BaselineMeasurement) -> list[Continuation]:
    """Prompts with what the target wrote, as `estimate.measure_alphas` takes them."""
    outputs = baseline["output_ids"]
    return [
        Continuation(prompt.id, prompt.ids, output)
        for prompt, output in zip(prompts, outputs, strict=True)
    ]


def answers(
    target: PreTrainedModel, prompts: Sequence[Prompt], sampling: Sampling, **options: Any
) -> list[Continuation]:
    """Continue prompts with the target up to its own end tokens; `options` as for `Task`."""
    return continuations(
        prompts, Task(target, prompts, sampling, eos_ids(target), **options).baseline()
    )
