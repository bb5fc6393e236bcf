"""Decode prompt sets for real: the target alone, then every draft against it, counted and timed.

Each result is plain JSON, kept on disk as one measurement of the evaluation. Lists are in the order
of the prompts.
"""

import math
import os
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import chain
from typing import Any, TypedDict

import torch
from transformers import PreTrainedModel

from draftsmith.core.errors import InputError, RunError
from draftsmith.core.large_target import in_parts
from draftsmith.core.models import eos_ids
from draftsmith.core.penalties import Seen, penalised
from draftsmith.core.progress import Tick, no_tick
from draftsmith.core.prompts import Prompt
from draftsmith.core.ranks import divided, say
from draftsmith.core.sampling import Sampling, generator, row_seed
from draftsmith.decode import (
    BatchOutput,
    Generation,
    SpeculativeDecoder,
)
from draftsmith.decode.method import Method
from draftsmith.decode.propose.sources import AnyDraft, JoinedDraft, proposer_of
from draftsmith.eval.counts import TARGET, CellCounts, Count, at_depths, decoded
from draftsmith.eval.formulas import Continuation

WARM_UP_TOKENS = 8
# Counts that are kept, by their name in `decode.stats`.
COUNTED = {
    "target_calls": "calls",
    "emitted": "emitted",
    "proposed": "proposed",
    "accepted": "accepted",
    "depth_sum": "offered_depth",
}
COUNTED_BY_DEPTH = {"accepted_by_depth": "accepted_here", "reached_by_depth": "reached"}


class BaselineMeasurement(TypedDict):
    """The target's own continuations, shared by all drafts so that everything is paired by
    prompt.
    """

    output_ids: list[list[int]]
    finish_reason: list[str]


class TimedCounts(TypedDict):
    """Counts of a draft, of the target alone (`TARGET`) too, in interleaved runs at batch 1 over
    the same prompts, and the load average before and after.
    """

    runs: list[tuple[str, list[Count]]]
    load: list[float]


@dataclass(frozen=True)
class Contender:
    """A decoder that is timed."""

    decoder: SpeculativeDecoder
    draft: str = TARGET
    method: Method | None = None
    outputs: list[BatchOutput] = field(default_factory=list)

    def counts(self) -> list[Count]:
        """Return counts and seconds of the outputs."""
        rows = [output.generations[0] for output in self.outputs]
        prefill = [output.prefill_s for output in self.outputs]
        seconds = [output.decode_s for output in self.outputs]
        values: dict[str, Sequence[float]] = {
            "timed_tokens": [len(row.output_ids) for row in rows],
            "timed_calls": [row.stats.target_calls for row in rows],
            "decode_s": seconds,
            "whole_s": [sum(pair) for pair in zip(prefill, seconds, strict=True)],
        }
        return [decoded(self.method, key, of) for key, of in values.items()]

    def ran(self) -> list[tuple[int, float]]:
        """Return the tokens and seconds of each output."""
        found = []
        for output in self.outputs:
            tokens = sum(len(row.output_ids) for row in output.generations)
            found.append((tokens, output.decode_s))
        return found


def decoder_of(
    target: PreTrainedModel,
    draft: AnyDraft,
    method: Method,
    compile: bool | str = False,  # noqa: A002 (as in torch.compile)
) -> SpeculativeDecoder:
    """Return the decoder of one (draft, tree, verifier); raise ValueError if they do not fit."""
    return SpeculativeDecoder(
        target, proposer_of(draft), method.shape, method.verifier, compile=compile
    )


def records_steps(asked: bool | None, target: PreTrainedModel, drafts: Iterable[AnyDraft]) -> bool:
    """Whether to time recorded steps: as asked; by default on a GPU, if one step of each draft can
    be recorded. If not, print the reason.
    """
    if asked is not None or target.device.type != "cuda" or in_parts(target):
        return bool(asked)
    try:
        for proposer in (None, *map(proposer_of, drafts)):
            decoder = SpeculativeDecoder(target, proposer, compile=True)
            decoder.generate([[0]], max_new_tokens=2, eos_ids=())
    except (InputError, RunError) as error:
        say(f"timing steps without recording them: {error}")
        return False
    return True


@dataclass(frozen=True, eq=False)
class Task:
    """Prompts to decode, and what all methods share. Methods call `tick(n)` for every n finished
    prompts. compile: of the decoders that are timed.
    """

    target: PreTrainedModel
    prompts: Sequence[Prompt]
    sampling: Sampling
    eos: Sequence[int]
    max_new_tokens: int
    seed: int
    batch_size: int = 1
    compile: bool | str = False

    def baseline(self, tick: Tick = no_tick) -> BaselineMeasurement:
        """Continue every prompt with the target alone."""
        rows = self._decode(SpeculativeDecoder(self.target), None, tick)
        return BaselineMeasurement(
            output_ids=[row.output_ids for row in rows],
            finish_reason=[row.finish_reason for row in rows],
        )

    def decoding(
        self,
        draft: AnyDraft,
        method: Method,
        expected: BaselineMeasurement,
        tick: Tick = no_tick,
    ) -> CellCounts:
        """Decode every prompt with a draft. Greedy outputs are compared with the target's own."""
        rows = self._decode(decoder_of(self.target, draft, method), method, tick)
        stats = [row.stats for row in rows]
        counts = []
        for name, key in COUNTED.items():
            counts.append(decoded(method, key, [getattr(of, name) for of in stats]))
        for name, key in COUNTED_BY_DEPTH.items():
            counts += at_depths(method, key, [getattr(of, name) for of in stats])
        first = [sum(of.accepted_by_depth[:1]) for of in stats]
        refused = [of.target_calls - accepted for of, accepted in zip(stats, first, strict=True)]
        counts.append(decoded(method, "refused", refused))
        if isinstance(draft, JoinedDraft):
            drafted = [of.accepted - of.copied_accepted for of in stats]
            counts += [
                decoded(method, "copied_calls", [of.copied_calls for of in stats]),
                decoded(method, "copied_accepted", [of.copied_accepted for of in stats]),
                decoded(method, "drafted_accepted", drafted),
            ]
        if self.sampling.greedy:
            gaps = self._gaps([row.output_ids for row in rows], expected["output_ids"])
            counts += [
                decoded(method, "outputs", [1] * len(gaps)),
                decoded(method, "identical", [int(gap is None) for gap in gaps]),
                decoded(method, "gap", [gap or 0.0 for gap in gaps]),
            ]
        return CellCounts(counts=counts)

    def speed(
        self,
        drafts: Mapping[str, AnyDraft],
        methods: Mapping[str, Sequence[Method]],
        tick: Tick = no_tick,
    ) -> TimedCounts:
        """Time the target alone and every (draft, method) at batch 1, prompt by prompt."""
        load = os.getloadavg()[0]
        contenders = [self.contender()]
        for name, draft in drafts.items():
            contenders += [self.contender(draft, method, name) for method in methods[name]]
        self.race(contenders, [[prompt] for prompt in self.prompts], self.max_new_tokens, tick)
        return TimedCounts(
            runs=[(contender.draft, contender.counts()) for contender in contenders],
            load=[load, os.getloadavg()[0]],
        )

    def contender(
        self, draft: AnyDraft | None = None, method: Method | None = None, name: str = TARGET
    ) -> Contender:
        """Return what is timed of a draft with a method; without, of the target alone. Raise
        ValueError if they do not fit.
        """
        decoder = SpeculativeDecoder(self.target, compile=self.compile)
        if draft is not None and method is not None:
            decoder = decoder_of(self.target, draft, method, self.compile)
        return Contender(decoder, name, method)

    def race(
        self,
        contenders: Sequence[Contender],
        batches: Sequence[Sequence[Prompt]],
        tokens: int,
        tick: Tick = no_tick,
    ) -> None:
        """Decode the batches with every contender, in rotating order.

        Interleaving spreads a slow minute of the machine over all of them, rotation the advantage
        of warm caches. Each is warmed up once before the clock counts.
        """
        for contender in contenders:
            if not contender.outputs:
                warm_up = min(WARM_UP_TOKENS, tokens)
                self._generate(contender.decoder, batches[0], contender.method, warm_up)
        for batch in batches:
            first = len(contenders[0].outputs) % len(contenders)
            for contender in [*contenders[first:], *contenders[:first]]:
                output = self._generate(contender.decoder, batch, contender.method, tokens)
                contender.outputs.append(output)
                tick(len(batch))

    def _decode(
        self, decoder: SpeculativeDecoder, method: Method | None, tick: Tick
    ) -> list[Generation]:
        """All prompts, batch by batch. Batches are the same however many processes divide them."""

        def decode(index: int) -> list[Generation]:
            rows = self.prompts[index * self.batch_size : (index + 1) * self.batch_size]
            batch = self._generate(decoder, rows, method, self.max_new_tokens)
            tick(len(rows))
            return batch.generations

        batches = math.ceil(len(self.prompts) / self.batch_size)
        return list(chain.from_iterable(divided(batches, decode)))

    def _generate(
        self,
        decoder: SpeculativeDecoder,
        rows: Sequence[Prompt],
        method: Method | None,
        tokens: int,
    ) -> BatchOutput:
        # All drafts share a random stream of a prompt, which makes their differences less noisy.
        stream = str(self.sampling.temperature)
        if method:
            stream += f"/{method.tree}/{method.verifier}"
        seeds = [generator(row_seed(self.seed, f"{row.id}/{stream}")) for row in rows]
        return decoder.generate([row.ids for row in rows], self.sampling, tokens, seeds, self.eos)

    @torch.inference_mode()
    def _gaps(
        self, outputs: Sequence[Sequence[int]], expected: Sequence[Sequence[int]]
    ) -> list[float | None]:
        """By output, the gap between the target's logits of the two first tokens that differ from
        the target's own; None where none does.
        """
        gaps: list[float | None] = []
        for prompt, ours, theirs in zip(self.prompts, outputs, expected, strict=True):
            if ours == theirs:
                gaps.append(None)
                continue
            # Outputs end at the same end tokens and length, so neither is the beginning of the
            # other.
            same = [a == b for a, b in zip(ours, theirs, strict=False)]
            shared = same.index(False)
            ids_1T = torch.tensor([[*prompt.ids, *ours[:shared]]], device=self.target.device)
            logits_1V = self.target(input_ids=ids_1T).logits[0, -1:]
            seen = Seen.along(prompt.ids, ours[: shared + 1], logits_1V)
            logits_V = penalised(logits_1V, self.sampling, seen)[0].double()
            gap = logits_V[ours[shared]] - logits_V[theirs[shared]]
            gaps.append(abs(float(gap)))
        return gaps


def continuations(prompts: Sequence[Prompt], baseline: BaselineMeasurement) -> list[Continuation]:
    """Prompts with what the target wrote, as `alpha.measure_alphas` takes them."""
    outputs = baseline["output_ids"]
    return [
        Continuation(prompt.id, prompt.ids, output)
        for prompt, output in zip(prompts, outputs, strict=True)
    ]


def answers(
    target: PreTrainedModel, prompts: Sequence[Prompt], sampling: Sampling, **options: Any
) -> list[Continuation]:
    """Continue prompts with the target up to its own end tokens; `options` as for `Task`."""
    task = Task(target, prompts, sampling, eos_ids(target), **options)
    return continuations(prompts, task.baseline())
