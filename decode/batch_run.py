"""Prompts that are decoded together, step by step: draft, score, verify, record.

At each step a row draws uniforms for the proposer and then for the verifier from its own generator,
always the same number: its output does not depend on its batch mates (law 4). At temperature 0 it
draws none. A row that has ended leaves the batch at once; the last rows move up into its place.

Legend: B rows still in the batch, N drafted nodes, M = N + 1 with the root, D depth, V vocabulary,
U uniforms per row.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from functools import lru_cache, partial
from typing import Protocol

import torch
from torch import Tensor
from torch.nn.functional import pad
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from draftsmith.core.errors import InputError
from draftsmith.core.models import vocabulary_size
from draftsmith.core.penalties import Seen
from draftsmith.core.sampling import Sampling, uniforms
from draftsmith.decode.compiled.runner import in_bucket
from draftsmith.decode.guest_checks import check_proposal
from draftsmith.decode.noise import Noise
from draftsmith.decode.propose.protocol import (
    Outcome,
    Proposal,
    Proposer,
    Session,
    SessionSetup,
)
from draftsmith.decode.runner import Block, Runner
from draftsmith.decode.stats import DecodeStats
from draftsmith.decode.step import Judged, Question, Ruled, by_own_tokens, by_rule, on_host, score
from draftsmith.decode.tree import Drawing, Tree, TreeShape
from draftsmith.decode.tree_batch import TreeBatch
from draftsmith.decode.verify import VERIFIERS, Verifier
from draftsmith.decode.verify.copies import beside
from draftsmith.decode.verify.tree_walk import Walk

_ALL_FINITE = 3  # `_finite` of a row whose target and draft have finite logits
OnTokens = Callable[[int, list[int], list[bool]], None]
# `stop(ids, new)` returns how many of the last `new` tokens of a row's output `ids` to keep, None
# to go on.
StopCondition = Callable[[Sequence[int], int], int | None]

# A token may be a fragment of a character, and some tokenizers decode a token differently at the
# beginning of a text, so a few more tokens are decoded than the longest string can have.
_MARGIN_TOKENS = 8


class StopStrings:
    """End a row after the first token that completes any of `strings` in its decoded output.

    That token is kept whole, as with transformers' `stop_strings`.
    """

    def __init__(self, tokenizer: PreTrainedTokenizerBase, strings: Sequence[str]) -> None:
        if isinstance(strings, str) or not strings or not all(strings):
            raise ValueError(
                f"stop: expected a list of strings, none of them empty, got {strings!r}"
            )
        self._tokenizer = tokenizer
        self._strings = tuple(strings)
        longest = max(len(text.encode()) for text in strings)
        self._reach = longest + _MARGIN_TOKENS

    def __call__(self, ids: Sequence[int], new: int) -> int | None:
        """Return how many of the last `new` tokens of `ids` to keep; None if no string is
        complete.
        """
        known = len(ids) - new
        # Decode the whole block first, because most steps complete nothing.
        if self._complete(ids, known, len(ids)):
            for end in range(known + 1, len(ids) + 1):
                if self._complete(ids, end, end):
                    return end - known
        return None

    def _complete(self, ids: Sequence[int], begin: int, end: int) -> bool:
        first = max(begin - self._reach, 0)
        text = self._tokenizer.decode(list(ids[first:end]), clean_up_tokenization_spaces=False)
        return any(string in text for string in self._strings)


@dataclass(frozen=True)
class Generation:
    """One prompt's output: new tokens only. `finish_reason` is "stop" after an EOS token, which is
    included, or a stop condition, and "length" at `max_new_tokens`. `from_draft` marks drafted
    tokens.
    """

    output_ids: list[int]
    finish_reason: str
    from_draft: list[bool]
    stats: DecodeStats


@dataclass(eq=False)
class _Row:
    index: int
    last: int
    generator: torch.Generator
    stats: DecodeStats
    ids: list[int] = field(default_factory=list)
    from_draft: list[bool] = field(default_factory=list)
    finish_reason: str = ""

    @property
    def generation(self) -> Generation:
        return Generation(self.ids, self.finish_reason, self.from_draft, self.stats)

    def read(self, walk: Walk, options: "Options", chosen: str | None) -> None:
        """Cut a block at EOS and at `max_new_tokens`, count it, and pass it to `on_tokens`."""
        room = options.max_new_tokens - len(self.ids)
        accepted = len(walk.path)
        tokens = walk.emitted[:room]
        for index, token in enumerate(tokens):
            if token in options.eos_ids:
                tokens = tokens[: index + 1]
                self.finish_reason = "stop"
                break
        if options.stop is not None:
            count = options.stop(self.ids + tokens, len(tokens))
            if count is not None:
                tokens = tokens[:count]
                self.finish_reason = "stop"
        self.ids += tokens
        if not self.finish_reason and len(tokens) == room:
            self.finish_reason = "length"
        drafted = min(accepted, len(tokens))
        from_draft = [index < drafted for index in range(len(tokens))]
        self.from_draft += from_draft
        # The depth after the last accepted one was reached only if the target's token in its place
        # was not cut off.
        whole = len(tokens) == accepted + 1
        reached = drafted + int(walk.is_open and whole)
        self.stats += DecodeStats(
            target_calls=1,
            emitted=len(tokens),
            proposed=walk.drafted,
            accepted=drafted,
            depth_sum=walk.offered,
            accepted_by_depth=(1,) * drafted,
            reached_by_depth=(1,) * reached,
            copied_calls=int(walk.copied),
            copied_accepted=drafted * walk.copied,
            chosen={} if chosen is None else {chosen: 1},
        )
        self.last = tokens[-1]
        if options.on_tokens is not None:
            options.on_tokens(self.index, tokens, from_draft)


class NoDraft:
    """The session of autoregressive decoding: an empty tree at every step."""

    def __init__(self, rows: int, device: torch.device) -> None:
        self._tree = TreeBatch.build(Tree(()), device)
        self._tokens_BM = torch.full((rows, 1), -1, device=device)

    def propose(self, u_BN: Tensor | None) -> Proposal:
        return Proposal(self._tree, self._tokens_BM, None, "deterministic")

    def commit(self, outcome: Outcome) -> None:
        return

    def select_rows(self, rows: Sequence[int]) -> None:
        self._tokens_BM = self._tokens_BM[: len(rows)]


@dataclass(frozen=True)
class Options:
    """How to continue prompts; see `SpeculativeDecoder.generate`."""

    sampling: Sampling
    max_new_tokens: int
    eos_ids: frozenset[int]
    on_tokens: OnTokens | None = None
    stop: StopCondition | None = None


class Parts(Protocol):
    """What a decoder decodes with. drawing: how children are chosen above temperature 0."""

    target: PreTrainedModel
    proposer: Proposer | None
    tree: TreeShape
    drawing: Drawing
    verifier: Verifier
    compile: bool | str


class BatchRun:
    """Prompts that are decoded together. `rows` are those it began with, `batch` all that have not
    ended, in the order of the tensors.
    """

    def __init__(
        self,
        parts: Parts,
        runner: Runner,
        options: Options,
        prompts: Sequence[Sequence[int]],
        generators: Sequence[torch.Generator],
        first: int = 0,
    ) -> None:
        """runner: the target with an empty cache. first: the index of the first prompt."""
        self.parts = parts
        self.runner = runner
        self.options = options
        zeros = (0,) * parts.tree.depth
        stats = DecodeStats(accepted_by_depth=zeros, reached_by_depth=zeros)
        pairs = zip(prompts, generators, strict=True)
        self.rows = [
            _Row(index, prompt[-1], generator, stats)
            for index, (prompt, generator) in enumerate(pairs, first)
        ]
        self.batch = list(self.rows)
        self._least = -1 if runner.takes_absent else 0  # the token of absent nodes
        self.hidden_layers = parts.proposer.hidden_layers if parts.proposer else ()
        self.vocabulary = vocabulary_size(parts.target)
        self.sampling = options.sampling
        self.noise: Noise | None = None
        if parts.verifier.shared_noise and not options.sampling.greedy:
            # Target and draft take the most probable tokens once noise was added.
            self.sampling = replace(options.sampling, temperature=0.0)
            self.noise = Noise(options.sampling, self.vocabulary, runner.device)
        # At temperature 0 every proposer takes the most probable tokens.
        drawing: Drawing = "deterministic" if self.sampling.greedy else parts.drawing
        self.num_draft_uniforms = 0 if drawing == "deterministic" else parts.tree.size
        most = parts.verifier.uniforms(_widest(parts.tree))
        # The longest copy; its uniforms come last.
        self.num_copied = parts.proposer.longest_copy(parts.tree) if parts.proposer else 0
        self.num_uniforms = self.num_draft_uniforms + most + self.num_copied
        self.seen = Seen.of(prompts, self.vocabulary, self.sampling, runner.device)
        self.session = self._start(prompts, drawing)
        self._first = True  # the step whose shapes are checked
        self._is_known = VERIFIERS.get(parts.verifier.name) is parts.verifier

    def _start(self, prompts: Sequence[Sequence[int]], drawing: Drawing) -> Session:
        parts = self.parts
        options = self.options
        room = options.max_new_tokens + parts.tree.size + self.num_copied + 1
        known = [prompt[:-1] for prompt in prompts]
        hidden = self.runner.prefill(known, room, self.hidden_layers)
        if parts.proposer is None:
            return NoDraft(len(prompts), self.runner.device)
        setup = SessionSetup(
            prompts=prompts,
            tree=parts.tree,
            drawing=drawing,
            sampling=self.sampling,
            max_new_tokens=options.max_new_tokens,
            hidden_BTH=hidden,
            device=self.runner.device,
            vocabulary=self.vocabulary,
            compile=parts.compile,
            trees=not self.runner.takes_absent,
            noise=self.noise,
        )
        return parts.proposer.start(setup)

    def join(self, other: "BatchRun") -> None:
        """Append the rows of another run without drafts, of the same options, which has made no
        step.
        """
        self.runner.join(other.runner)
        if self.seen is not None and other.seen is not None:
            pairs = zip(self.seen, other.seen, strict=True)
            self.seen = Seen(*(torch.cat(pair) for pair in pairs))
        self.batch += other.batch
        self.session = NoDraft(len(self.batch), self.runner.device)

    def step(self) -> list[_Row]:
        """Draft, score, verify and record, with one forward of the target. Return the rows that
        ended.
        """
        draft_u_BN = verify_u_BU = None
        if self.noise is not None:
            seeds = [row.generator.initial_seed() % 2**63 for row in self.batch]
            self.noise.move(seeds, [len(row.ids) for row in self.batch])
        if not self.sampling.greedy:
            # One transfer for all uniforms of a step, so that no rule waits for the host.
            u_BU = uniforms([row.generator for row in self.batch], self.num_uniforms)
            u_BU = u_BU.to(self.runner.device)
            verify_u_BU = u_BU[:, self.num_draft_uniforms :]
            if self.num_draft_uniforms:
                draft_u_BN = u_BU[:, : self.num_draft_uniforms]
        proposal = self.session.propose(draft_u_BN)
        parts = self.parts
        if self._first and parts.proposer is not None:
            check_proposal(
                f"proposer {parts.proposer.name}",
                proposal,
                parts.tree,
                len(self.batch),
                self.vocabulary,
                self.runner.device,
            )
        self.runner.open()
        judged = self._judge(proposal, verify_u_BU)
        self._first = False
        return self._emit(judged, proposal.names or [None] * len(self.batch))

    def _follows(self, proposal: Proposal, u_BU: Tensor | None) -> bool:
        """Whether the rule comes to the target's own tokens, and they are judged on the host."""
        if self.parts.compile:
            return False
        known = self._is_known and self.runner.device.type == "cpu"
        if u_BU is None:
            return known
        lossless = known and self.parts.verifier.lossless
        return self.parts.proposer is None or (lossless and proposal.nodes == 1)

    def _judge(self, proposal: Proposal, u_BU: Tensor | None) -> Judged:
        """Score a proposal and judge it; see `decode.step`."""
        parts = self.parts
        sampling = self.sampling
        scoring = self.options.sampling
        nodes = proposal.nodes
        if parts.compile:
            proposal = in_bucket(proposal, len(self.batch))
        forward = self.runner.bind(self._block(proposal), hidden_layers=self.hidden_layers)
        noise_BDV = None
        if self.noise is not None:
            noise_BDV = self.noise.down_to(max(proposal.tree.depth, proposal.num_copied))
        question = Question(proposal, self._last_B1(), forward.inputs, self.seen, noise_BDV)
        least = self._least
        most_copied = self.num_copied
        checks = self._first
        verifier = self._rule_for(proposal)
        if self._follows(proposal, u_BU):
            scored = score(forward, question, scoring, least)
            if u_BU is not None:
                u_BU = self._of_root(verifier, u_BU, proposal.num_copied)
            return by_own_tokens(proposal, scored, sampling, u_BU)

        def judge(question: Question, u_BU: Tensor | None) -> Ruled:
            scored = score(forward, question, scoring, least)
            proposal = question.proposal
            return by_rule(verifier, proposal, scored, sampling, u_BU, most_copied, checks=checks)

        name = ("verify", forward.name, scoring, verifier.name)
        ruled = self.runner.call(name, judge, question, u_BU)
        return on_host(proposal, ruled, nodes)

    def _of_root(self, verifier: Verifier, u_BU: Tensor, copied: int) -> Tensor:
        """The uniforms `[B, 1 + C]` of a root without children and of the copies below it."""
        most = u_BU.shape[1] - self.num_copied
        at = verifier.root_uniform % most
        root_B1 = u_BU[:, at : at + 1]
        if not copied:
            return root_B1
        return torch.cat([root_B1, u_BU[:, most : most + copied]], dim=1)

    def _last_B1(self) -> Tensor:
        return torch.tensor([[row.last] for row in self.batch], device=self.runner.device)

    def _block(self, proposal: Proposal) -> Block:
        tree = proposal.tree
        copied = proposal.num_copied
        if tree.rows == 1 and not self.parts.tree.grows:
            return _static_block(tree, copied)
        return _block_of(tree, copied, static=False)

    def _rule_for(self, proposal: Proposal) -> Verifier:
        """Return the rule for all rows of a step: `exact` if the proposer drafts nothing and the
        verifier cannot verify that.

        A row must get the same rule whether or not its batch mates drafted, because rules use
        uniforms differently.
        """
        verifier = self.parts.verifier
        takes = proposal.tree.depth or proposal.drawing in verifier.drawings
        return verifier if takes else VERIFIERS["exact"]

    def _emit(self, judged: Judged, names: Sequence[str | None]) -> list[_Row]:
        """Give each row its tokens, and let runner and session go on behind them."""
        for index, row in enumerate(self.batch):
            if judged.finite_B[index] != _ALL_FINITE:
                self._refuse(row, of_draft=bool(judged.finite_B[index] & 1))
            row.read(judged.walks[index], self.options, names[index])
        indices = [index for index, row in enumerate(self.batch) if row.finish_reason]
        ended = [self.batch[index] for index in indices]
        if len(ended) == len(self.batch):
            self.batch = []
            return ended
        paths = [walk.path for walk in judged.walks]
        self.runner.keep([[0, *path] for path in paths])
        states = []
        for index, path in enumerate(paths):
            states.append([layer[index, : len(path) + 1] for layer in judged.states])
        emitted = [walk.emitted for walk in judged.walks]
        if self.seen is not None:
            self.seen.read(emitted)
        self.session.commit(Outcome(paths, emitted, states, judged.distributions))
        if indices:
            left = self.runner.remove(indices)
            self.seen = self.seen and self.seen.rows(left)
            self.batch = [self.batch[index] for index in left]
            self.session.select_rows(left)
        return ended

    def _refuse(self, row: _Row, *, of_draft: bool) -> None:
        target = self.parts.target
        proposer = self.parts.proposer
        name = f"target {target.name_or_path or type(target).__name__}"
        if of_draft and proposer is not None:
            name = proposer.name
        raise InputError(
            f"the {name} gave logits that are not finite after {len(row.ids)} new tokens of prompt "
            f"{row.index}; its weights are damaged or need float32"
        )


def _block_of(tree: TreeBatch, copied: int, *, static: bool) -> Block:
    """Return the target's block of a tree with `copied` tokens beside it."""
    tree = beside(tree, copied)
    return Block(pad(tree.depths_RN, (1, 0)), tree.sees_RMM, static=static)


# A static proposer passes the same few objects again: its tree, and that tree cut to a depth.
_static_block = lru_cache(maxsize=64)(partial(_block_of, static=True))


def _widest(tree: TreeShape) -> TreeBatch:
    """Return a tree that takes at least as many uniforms as any drafted on this shape."""
    size = tree.size
    flat = Tree((-1,) * size)
    batch = TreeBatch.build(flat, torch.device("cpu"))
    return replace(batch, widths=(size,) * tree.depth)
