"""The speculative decoder: draft a tree, score it with one target forward, keep what the verifier accepts.

Here is what stays from one `generate` call to the next; the steps of one are `decode.batch_run.BatchRun`.
"""

import threading
import time
from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import TypeVar

import torch
from transformers import PreTrainedModel

from decode.batch_run import BatchRun, Generation, OnTokens, StopCondition
from decode.defaults import default_verifier
from decode.packed_weights import packs_of
from decode.propose.protocol import Proposer
from decode.runner import Block, Runner
from decode.static_steps import StaticSteps
from decode.supported_models import attention_windows, check_context
from decode.tree import Drawing, Tree, TreeShape
from decode.tree_batch import TreeBatch
from decode.tree_spec import parse_tree
from decode.verify import VERIFIERS, Verifier
from draftsmith_core.models import context_length, vocabulary_size
from draftsmith_core.models import eos_ids as eos_of
from draftsmith_core.sampling import Sampling, generator, row_seed

_KEPT_BLOCKS = 64
Key = TypeVar("Key")
# Called with a number of free places; returns at most so many prompts for them: (key, token ids, generator) of each.
Source = Callable[[int], Sequence[tuple[Key, Sequence[int], torch.Generator]]]
# Free places are filled when they are this share of all: a prefill by itself for every single one would cost more.
_FREE = 1 / 20


@dataclass(frozen=True)
class BatchOutput:
    """All outputs in prompt order, and the wall clock in seconds: of prefill, of decoding, and (with `compile`) of
    recording steps.
    """

    generations: list[Generation]
    prefill_s: float
    decode_s: float
    compile_s: float = 0.0


class SpeculativeDecoder:
    """Decodes with a target and a proposer; `proposer=None` is autoregressive decoding through the same code.

        decoder = SpeculativeDecoder(target, DraftModelProposer(draft), "kary:4,2,2")
        batch = decoder.generate([tokenizer.encode("Return the")], Sampling(temperature=0.7), 64, seed=0)
        batch.generations[0].output_ids

    `tree` is a spec (`parse_tree`) or a shape; None for the one that suits the proposer. `verifier` is a key of
    `VERIFIERS` or a `Verifier` of your own; None for the one that suits proposer and tree (`default_verifier`).
    Without a proposer there is nothing to verify, and both must be None. A proposer of your own is any object that
    follows `decode.propose.protocol.Proposer`, where there is an example. `fast=False` runs the target through its own
    forward only, without packed weights or the lean LLaMA forward. The target is not changed; `take_over(target)`
    saves memory (`decode.packed_weights`).
    `compile=True` records every step as a CUDA graph of fixed shapes, when it first occurs, and replays it from then
    on; the name of a torch.compile backend compiles it too, and works on a CPU (`decode.static_steps`). Outputs differ
    by rounding at most. Raises ValueError, one line with the fix, when the parts do not go together.
    """

    def __init__(
        self,
        target: PreTrainedModel,
        proposer: Proposer | None = None,
        tree: str | TreeShape | None = None,
        verifier: str | Verifier | None = None,
        *,
        fast: bool = True,
        compile: bool | str = False,  # noqa: A002 (as in torch.compile)
    ) -> None:
        self.target, self.proposer = target, proposer
        self.tree: TreeShape = Tree(())
        self.verifier = VERIFIERS["exact"]
        self.drawing: Drawing = "deterministic"
        if proposer is not None:
            self.tree = parse_tree(tree) if isinstance(tree, str) else tree or proposer.default_tree()
            self.verifier = _verifier(proposer, self.tree, verifier)
            proposer.check(target, self.tree)
            # The first method of drawing that the verifier prefers and the proposer has.
            offered = proposer.drawings(self.tree)
            self.drawing = next((each for each in self.verifier.drawings if each in offered), min(offered))
            self.verifier.check(self.tree, self.drawing, proposer.drafts)
        elif tree is not None or verifier is not None:
            raise ValueError("tree, verifier: proposer=None drafts nothing; leave them out, or pass a proposer")
        self._windows = attention_windows(target)
        self._limit = context_length(target)
        self._blocks: dict[TreeBatch, Block] = {}
        self.steps = StaticSteps(target, compile, lean=bool(fast)) if compile else None
        self.compile, self.compile_s = compile, 0.0
        # Recorded steps have one set of buffers, so that threads wait for their turn.
        self._turn = threading.Lock() if compile else nullcontext()
        self._packs = packs_of(target) if fast and not compile else None

    @torch.inference_mode()
    def generate(
        self,
        prompts: Sequence[Sequence[int]],
        sampling: Sampling = Sampling(temperature=0.0),  # noqa: B008 (frozen)
        max_new_tokens: int = 128,
        generators: Sequence[torch.Generator] | None = None,
        eos_ids: Collection[int] | None = None,
        on_tokens: OnTokens | None = None,
        stop: StopCondition | None = None,
        *,
        seed: int = 0,
    ) -> BatchOutput:
        """Continue all prompts (token ids) as one batch, greedily unless `sampling` says otherwise.

        Prompt b draws from a generator of its own, seeded with a hash of `seed` and b, and so does not depend on what
        shares its batch; pass `generators`, one per prompt, to seed them otherwise. A row ends at any of `eos_ids`
        (None: the target's own; () goes on to `max_new_tokens`) and where `stop` says (`decode.batch_run`).
        `on_tokens(row, ids, from_draft)` is called after each step with the tokens just emitted. Raises ValueError for
        an empty prompt, a prompt that does not fit the context, or a number of generators that differs.
        """
        if generators is None:
            generators = [generator(row_seed(seed, str(row))) for row in range(len(prompts))]
        if eos_ids is None:
            eos_ids = eos_of(self.target)
        if not prompts:
            return BatchOutput([], 0.0, 0.0)
        self._check(prompts, max_new_tokens)
        began = self._clock()
        with self._turn, self._own_dtype():
            run = BatchRun(self, prompts, sampling, max_new_tokens, generators, frozenset(eos_ids), on_tokens, stop)
            prefilled = self._clock()
            while run.live:
                run.step()
        ended = self._clock()
        compile_s = sum(steps.take_seconds() for steps in self.every_steps)
        self.compile_s += compile_s
        generations = [row.generation for row in run.rows]
        return BatchOutput(generations, prefilled - began, ended - prefilled - compile_s, compile_s)

    @torch.inference_mode()
    def continuous(
        self,
        source: Source[Key],
        rows: int,
        sampling: Sampling = Sampling(temperature=0.0),  # noqa: B008 (frozen)
        max_new_tokens: int = 128,
        eos_ids: Collection[int] | None = None,
    ) -> Iterator[tuple[Key, Generation]]:
        """Continue prompts in a batch of at most `rows` in which the next prompt takes the place of one that has ended;
        yields what ended, with its key.

        `source(free)` gives the next prompts, at most `free`, and is asked once all that ended before has been handed
        out, so that an answer may lead to another prompt; when it gives none the batch goes on without, and ends when
        it is empty. Who shares a batch with whom follows from the prompts and their generators alone. Memory is that of
        `rows` rows as long as the longest prompt and its answer. Raises ValueError as `generate` does, and where steps
        are compiled.
        """
        if self.steps is not None:
            raise ValueError("compile: recorded steps keep the rows that they began with; leave compile out")
        eos = frozenset(eos_of(self.target) if eos_ids is None else eos_ids)
        run: BatchRun | None = None
        keys: dict[int, Key] = {}
        count = 0
        while True:
            free = rows - (run.live if run is not None else 0)
            joining = source(free) if free == rows or free >= max(1, rows * _FREE) else ()
            if not joining and (run is None or not run.live):
                return
            with self._own_dtype():
                if joining:
                    prompts = [prompt for _, prompt, _ in joining]
                    generators = [generator for _, _, generator in joining]
                    self._check(prompts, max_new_tokens)
                    keys |= {count + place: key for place, (key, _, _) in enumerate(joining)}
                    runner = run.runner.fresh() if run is not None else None
                    if run is not None and not run.live:
                        run = None  # frees its cache before another is made
                    joins = BatchRun(
                        self, prompts, sampling, max_new_tokens, generators, eos, None, None, count, runner
                    )
                    count += len(joining)
                    if run is None:
                        run = joins
                    else:
                        run.join(joins)
                    del joins
                assert run is not None
                ended = run.step()
            for row in ended:
                yield keys.pop(row.index), row.generation

    @property
    def every_steps(self) -> list[StaticSteps]:
        """What is recorded or compiled of the target and of the proposer's models; empty without `compile`."""
        if self.steps is None:
            return []
        return [self.steps, *(self.proposer.steps if self.proposer is not None else ())]

    def new_runner(self) -> Runner:
        """The target with an empty cache."""
        return Runner(self.target, self._windows, self._limit, self._packs, self.steps)

    def block(self, tree: TreeBatch) -> Block:
        """The target's block of [root] + tree; kept for trees that all rows share."""
        block = self._blocks.get(tree)
        if block is None:
            offsets_RM = torch.nn.functional.pad(tree.depths_RN, (1, 0))
            block = Block(offsets_RM, tree.sees_RMM, static=tree.rows == 1)
            if tree.rows == 1:
                # A static proposer gives the same few objects again: its tree, and that tree cut to a depth.
                if len(self._blocks) >= _KEPT_BLOCKS:
                    self._blocks.clear()
                self._blocks[tree] = block
        return block

    def _check(self, prompts: Sequence[Sequence[int]], max_new_tokens: int) -> None:
        if self.target.training:
            raise ValueError("the target is in training mode, where dropout changes its outputs; call target.eval()")
        if max_new_tokens < 1:
            raise ValueError(f"max_new_tokens: must be at least 1, got {max_new_tokens}")
        vocabulary = vocabulary_size(self.target)
        for row, prompt in enumerate(prompts):
            if isinstance(prompt, str | int) or not len(prompt) or not 0 <= min(prompt) <= max(prompt) < vocabulary:
                raise ValueError(f"prompt {row}: expected at least one token id, each from 0 to {vocabulary - 1}")
        check_context("target", self._limit, prompts, max_new_tokens)
        if self.proposer is not None:
            self.proposer.check_lengths(prompts, max_new_tokens)

    def _own_dtype(self) -> AbstractContextManager[object]:
        """Switch off the caller's autocast, which would run some parts of a step in another dtype."""
        return torch.autocast(self.target.device.type, enabled=False)

    def _clock(self) -> float:
        if self.target.device.type == "cuda":
            torch.cuda.synchronize(self.target.device)
        return time.perf_counter()


def _verifier(proposer: Proposer, tree: TreeShape, verifier: str | Verifier | None) -> Verifier:
    if isinstance(verifier, Verifier):
        return verifier
    if verifier is None:
        draws = proposer.drawings(tree) != {"deterministic"}
        verifier = default_verifier(tree, draws=draws, drafts=proposer.drafts)
    if verifier not in VERIFIERS:
        raise ValueError(f"verifier '{verifier}': unknown; use one of {', '.join(sorted(VERIFIERS))}")
    return VERIFIERS[verifier]
