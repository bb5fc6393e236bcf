"""The speculative decoder: draft a tree, score it with one target forward, keep what the verifier
accepts.

`SpeculativeDecoder` holds what stays between `generate` calls; `decode.batch_run.BatchRun` holds
the steps of one call.
"""

import threading
import time
from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from typing import TypeVar

import torch
from transformers import PreTrainedModel

from draftsmith.core.devices import attention_of_any_length
from draftsmith.core.large_target import in_parts
from draftsmith.core.models import context_length, eos_ids as eos_of, vocabulary_size
from draftsmith.core.sampling import Sampling, generator, row_seed
from draftsmith.core.settings import PENALTIES, say_ignored
from draftsmith.decode.batch_run import (
    BatchRun,
    Generation,
    OnTokens,
    Options,
    StopCondition,
)
from draftsmith.decode.compiled.runner import make_runner
from draftsmith.decode.compiled.steps import StaticSteps
from draftsmith.decode.packed_weights import kernel_products, packs_of
from draftsmith.decode.propose.protocol import Proposer
from draftsmith.decode.runner import Runner
from draftsmith.decode.supported_models import ability, check_context, check_tree
from draftsmith.decode.tree import Drawing, Tree, TreeShape
from draftsmith.decode.tree_spec import Written, parse_tree
from draftsmith.decode.verify import VERIFIERS, Verifier, default_verifier, find_verifier

Key = TypeVar("Key")
# Takes the number of free places; returns at most that many prompts, each as (key, token ids,
# generator).
Source = Callable[[int], Sequence[tuple[Key, Sequence[int], torch.Generator]]]
# Refill when this share of the batch is free, so that several rows share one prefill.
_FREE = 1 / 20


@dataclass(frozen=True)
class BatchOutput:
    """Outputs in prompt order, and seconds of prefill, decoding and recording steps (`compile`)."""

    generations: list[Generation]
    prefill_s: float
    decode_s: float
    compile_s: float = 0.0


class SpeculativeDecoder:
    """Decode with a target and a proposer. `proposer=None` is autoregressive decoding through the
    same code.

        decoder = SpeculativeDecoder(target, DraftModelProposer(draft), "kary:4,2,2")
        prompts = [tokenizer.encode("Return the")]
        batch = decoder.generate(prompts, Sampling(temperature=0.7), 64, seed=0)
        batch.generations[0].output_ids

    proposer: one of `decode`, or your own (`decode.propose.protocol.Proposer` has an example).
    tree: what `parse_tree` takes, or a shape; by default one that suits the proposer. verifier: a
    key of `VERIFIERS` or your own `Verifier`; by default one that suits proposer and tree. fast:
    use the lean forward and, without `compile`, the packed weights of a target that `take_over`
    gave away (`decode.packed_weights`). compile: True records each step as a CUDA graph when it
    first occurs; the name of a torch.compile backend also compiles it, on a CPU too. `fast` and
    `compile` change outputs by rounding only; a target that verifies chains only
    (`decode.supported_models.ability`) ignores them. Raises ValueError if the parts do not fit.
    """

    def __init__(
        self,
        target: PreTrainedModel,
        proposer: Proposer | None = None,
        tree: Written | TreeShape | None = None,
        verifier: str | Verifier | None = None,
        *,
        fast: bool = True,
        compile: bool | str = False,  # noqa: A002 (as in torch.compile)
    ) -> None:
        if isinstance(target, str):
            raise ValueError(f"target: expected a loaded model, got {target!r}; load_pair loads it")
        self.target = target
        self._able = ability(target)
        self.proposer = proposer
        self.tree: TreeShape = Tree(())
        self.verifier = VERIFIERS["exact"]
        self.drawing: Drawing = "deterministic"
        if proposer is not None:
            if tree is None:
                self.tree = proposer.default_tree()
            elif isinstance(tree, TreeShape):
                self.tree = tree
            else:
                self.tree = parse_tree(tree, deepest=proposer.deepest)
            offered = proposer.drawings(self.tree)
            if verifier is None:
                draws = offered != {"deterministic"}
                verifier = default_verifier(self.tree, draws=draws, drafts=proposer.drafts)
            self.verifier = find_verifier(verifier)
            proposer.check(target, self.tree)
            # The first method of drawing that the verifier prefers and the proposer has.
            usable = [drawing for drawing in self.verifier.drawings if drawing in offered]
            # If they have none in common, take any: `check` explains.
            self.drawing = usable[0] if usable else min(offered)
            self.verifier.check(self.tree, self.drawing, proposer.drafts)
        elif tree is not None:
            raise ValueError("tree: proposer=None drafts nothing; leave it out, or pass a proposer")
        elif verifier is not None:
            self.verifier = find_verifier(verifier)
        check_tree(target, self._able, self.tree)
        self._limit = context_length(target)
        # Neither recorded steps nor packed weights know the layers of other targets.
        trees = self._able.drafts == "tree"
        backend = compile if trees else False
        self.compile: bool | str = backend
        self.steps = StaticSteps(target, backend, lean=fast) if backend else None
        self.compile_s = 0.0
        # Recorded steps share one set of buffers, so threads take turns.
        self._turn = threading.Lock() if backend else nullcontext()
        lean = fast and trees and not backend and not in_parts(target)
        self._packs = packs_of(target) if lean else None

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
        """Continue all prompts (token ids) as one batch, greedily by default.

        generators: one per prompt; by default seeded with a hash of `seed` and the prompt's index,
        so that a row does not depend on its batch. eos_ids: tokens that end a row; None for the
        target's own, () to go on to `max_new_tokens`. on_tokens(row, ids, from_draft): called after
        each step with the new tokens. stop: see `StopCondition`. Raises ValueError for a prompt
        that is empty or does not fit the context.
        """
        if generators is None:
            generators = [generator(row_seed(seed, str(row))) for row in range(len(prompts))]
        if eos_ids is None:
            eos_ids = eos_of(self.target)
        self.check(prompts, max_new_tokens)
        if not len(prompts):
            return BatchOutput([], 0.0, 0.0)
        say_ignored(str(self.target.name_or_path), self.target, followed=PENALTIES)
        options = Options(sampling, max_new_tokens, frozenset(eos_ids), on_tokens, stop)
        began = self._clock()
        with self._turn, self._products():
            run = BatchRun(self, self._new_runner(), options, prompts, generators)
            prefilled = self._clock()
            while run.batch:
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
        """Continue prompts without drafts in a batch of at most `rows`; a new prompt replaces one
        that has ended.

        Yield each output with its key. `source(free)` returns at most `free` next prompts. It is
        called after all earlier outputs were yielded, so that an answer may lead to another prompt;
        decoding ends when it returns none and the batch is empty. The composition of batches
        depends only on the prompts and their generators. Raise ValueError for a decoder with a
        proposer or with recorded steps.
        """
        if self.proposer is not None or self.steps is not None:
            raise ValueError(
                "continuous() takes neither a proposer nor compile; make the decoder without them"
            )
        ends = eos_of(self.target) if eos_ids is None else eos_ids
        options = Options(sampling, max_new_tokens, frozenset(ends))
        run: BatchRun | None = None
        keys: dict[int, Key] = {}
        count = 0
        while True:
            live = len(run.batch) if run is not None else 0
            free = rows - live
            refills = not live or free >= max(1, rows * _FREE)
            joining = source(free) if refills else ()
            if not joining and not live:
                return
            with self._products():
                if joining:
                    new, prompts, generators = zip(*joining, strict=True)
                    self.check(prompts, max_new_tokens)
                    keys |= dict(enumerate(new, count))
                    runner = run.runner.fresh() if run is not None else self._new_runner()
                    if not live:
                        run = None  # frees its cache before another is made
                    joins = BatchRun(self, runner, options, prompts, generators, count)
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
        """Recorded or compiled steps of the target and of the proposer's models; empty without
        `compile`.
        """
        if self.steps is None:
            return []
        drafting = self.proposer.steps if self.proposer is not None else ()
        return [self.steps, *drafting]

    @contextmanager
    def _products(self) -> Iterator[None]:
        """Multiply packed weights with the kernel, also between forwards, where heads have products
        of their own; leave out the caller's autocast, and attention that plans for every length.
        """
        # The caller's autocast would run some parts of a step in another dtype.
        with torch.autocast(self.target.device.type, enabled=False), attention_of_any_length():
            with nullcontext() if self._packs is None else kernel_products():
                yield

    def _new_runner(self) -> Runner:
        return make_runner(self.target, self._able, self._limit, self._packs, self.steps)

    def check(self, prompts: Sequence[Sequence[int]], max_new_tokens: int) -> None:
        """Raise ValueError for prompts that `generate` refuses."""
        if max_new_tokens < 1:
            raise ValueError(f"max_new_tokens: must be at least 1, got {max_new_tokens}")
        if not len(prompts):
            return
        if self.target.training:
            raise ValueError(
                "the target is in training mode, where dropout changes its outputs; call "
                "target.eval()"
            )
        vocabulary = vocabulary_size(self.target)
        for row, prompt in enumerate(prompts):
            if not len(prompt) or not 0 <= min(prompt) <= max(prompt) < vocabulary:
                raise ValueError(
                    f"prompt {row}: expected at least one token id, each from 0 to {vocabulary - 1}"
                )
        check_context("target", self._limit, prompts, max_new_tokens)
        if self.proposer is not None:
            self.proposer.check_lengths(prompts, max_new_tokens)

    def _clock(self) -> float:
        if self.target.device.type == "cuda":
            torch.cuda.synchronize(self.target.device)
        return time.perf_counter()
