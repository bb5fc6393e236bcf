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
from draftsmith.core.penalties import Seen, penalised
from draftsmith.core.sampling import Sampling, probs, uniforms
from draftsmith.decode.choosing import draw, largest
from draftsmith.decode.guest_checks import check_proposal, check_verdict
from draftsmith.decode.kernel_forward import Forwarded
from draftsmith.decode.propose.protocol import (
    Outcome,
    Proposal,
    Proposer,
    Session,
    SessionSetup,
)
from draftsmith.decode.recorded.proposal import in_bucket
from draftsmith.decode.runner import Block, Runner
from draftsmith.decode.stats import DecodeStats
from draftsmith.decode.tree import Drawing, Tree, TreeShape
from draftsmith.decode.tree_batch import TreeBatch
from draftsmith.decode.verify import VERIFIERS, Verifier
from draftsmith.decode.verify.copies import along_copies, beside
from draftsmith.decode.verify.exact import follow
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


class _NoDraft:
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


@dataclass(frozen=True, eq=False)
class _Judged:
    """The outcome of one step on the host.

    finite_B: see `_finite`. states: the target's at the root and on the accepted path, `[B, D + 1,
    H]` per layer. distributions: returns the target's, `[B, M, V]`.
    """

    finite_B: list[int]
    walks: list[Walk]
    states: Sequence[Tensor]
    distributions: Callable[[], Tensor]


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
        # At temperature 0 every proposer takes the most probable tokens.
        greedy = options.sampling.greedy
        drawing: Drawing = "deterministic" if greedy else parts.drawing
        self.num_draft_uniforms = 0 if drawing == "deterministic" else parts.tree.size
        most = parts.verifier.uniforms(_widest(parts.tree))
        # The longest copy; its uniforms come last.
        self.num_copied = parts.tree.depth if parts.proposer and parts.proposer.copies else 0
        self.num_uniforms = self.num_draft_uniforms + most + self.num_copied
        self.vocabulary = vocabulary_size(parts.target)
        self.seen = Seen.of(prompts, self.vocabulary, options.sampling, runner.device)
        self.session = self._start(prompts, drawing)
        self._first = True  # the step whose shapes are checked

    def _start(self, prompts: Sequence[Sequence[int]], drawing: Drawing) -> Session:
        parts, options = self.parts, self.options
        room = options.max_new_tokens + parts.tree.size + self.num_copied + 1
        known = [prompt[:-1] for prompt in prompts]
        hidden = self.runner.prefill(known, room, self.hidden_layers)
        if parts.proposer is None:
            return _NoDraft(len(prompts), self.runner.device)
        setup = SessionSetup(
            prompts=prompts,
            tree=parts.tree,
            drawing=drawing,
            sampling=options.sampling,
            max_new_tokens=options.max_new_tokens,
            hidden_BTH=hidden,
            device=self.runner.device,
            vocabulary=vocabulary_size(parts.target),
            compile=parts.compile,
            trees=not self.runner.takes_absent,
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
        self.session = _NoDraft(len(self.batch), self.runner.device)

    def step(self) -> list[_Row]:
        """Draft, score, verify and record, with one forward of the target. Return the rows that
        ended.
        """
        draft_u_BN = verify_u_BU = None
        if not self.options.sampling.greedy:
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
        return self._record(judged)

    def _judge(self, proposal: Proposal, u_BU: Tensor | None) -> _Judged:
        """Score and verify a proposal; by less than the functions of tensors where that does."""
        parts = self.parts
        if not parts.compile:
            if u_BU is not None and parts.proposer is None:
                return self._draw_undrafted(proposal, u_BU)
            known = VERIFIERS.get(parts.verifier.name) is parts.verifier
            if u_BU is None and known and self.runner.device.type == "cpu":
                return self._follow_on_host(proposal)
        return self._verify_tensors(proposal, u_BU)

    def _verify_tensors(self, proposal: Proposal, u_BU: Tensor | None) -> _Judged:
        """Score and verify in one function of tensors, which can be recorded."""
        nodes = proposal.tokens_BM.shape[1]
        if self.parts.compile:
            proposal = in_bucket(proposal, len(self.batch))
        verifier = self._rule_for(proposal)
        checks = self._first
        sampling = self.options.sampling
        bound = self.runner.bind(self._block(proposal), hidden_layers=self.hidden_layers)
        least, most_copied = self._least, self.num_copied

        def step(
            last_B1: Tensor,
            proposal: Proposal,
            inputs: tuple[Tensor, ...],
            u_BU: Tensor | None,
            seen: Seen | None,
        ) -> tuple[Tensor, Tensor, tuple[Tensor, ...]]:
            logits_BMV, hidden = bound.run(_target_inputs(last_B1, proposal, least), inputs)
            forwarded = _penalised(logits_BMV, sampling, proposal, seen), hidden
            return _verify(
                verifier, sampling, proposal, forwarded, u_BU, most_copied, checks=checks
            )

        name = ("verify", bound.name, sampling, verifier.name)
        facts, p_BMV, states = self.runner.call(
            name, step, self._last_B1(), proposal, bound.inputs, u_BU, self.seen
        )
        finite_B: list[int] = []
        walks: list[Walk] = []
        own_BC: list[list[int]] = []
        depth = proposal.tree.depth
        # One transfer, so that a step waits only once.
        for finite, accepted, is_open, drafted, offered, *rest in facts.tolist():
            finite_B.append(finite)
            emitted = rest[depth : depth + accepted + 1]
            walks.append(Walk(rest[:accepted], emitted, bool(is_open), drafted, offered))
            own_BC.append(rest[2 * depth + 1 :])
        if proposal.num_copied:
            walks = along_copies(proposal, walks, own_BC)
            places = []
            for walk in walks:
                start = 1 + depth * walk.copied
                places.append(list(range(start, start + len(walk.path))))
            states = _on_path(states, _indices(places, self.runner.device))
        return _Judged(finite_B, walks, states, lambda: p_BMV[:, :nodes])

    def _follow_on_host(self, proposal: Proposal) -> _Judged:
        """At temperature 0 on a CPU, where all of `VERIFIERS` follow the target's own tokens. Lists
        are faster than many small tensors.
        """
        logits_BMV, hidden = self._scored(proposal)
        best = largest(logits_BMV, 1)
        nodes = proposal.tokens_BM.shape[1]
        best_BM = best.indices[..., 0].tolist()
        walks = along_copies(proposal, follow(proposal, best_BM), [row[nodes:] for row in best_BM])
        largest_BM = best.values[..., 0]
        finite_B = _finite(largest_BM, proposal.finite)
        if hidden:
            paths = [walk.path for walk in walks]
            hidden = _on_path(hidden, _indices(paths, self.runner.device))
        sampling = self.options.sampling
        return _Judged(finite_B.tolist(), walks, hidden, lambda: probs(logits_BMV, sampling))

    def _draw_undrafted(self, proposal: Proposal, u_BU: Tensor) -> _Judged:
        """Draw a token from the target at every root, where nothing is ever drafted."""
        logits_B1V, _ = self._scored(proposal)
        p_B1V = probs(logits_B1V, self.options.sampling)
        u_B = u_BU[:, 0].to(p_B1V.device)
        tokens_B = draw(p_B1V[:, 0], u_B)
        walks = [Walk([], [token], False, 0, 0) for token in tokens_B.tolist()]
        finite_B = _finite(logits_B1V.amax(2), None)
        return _Judged(finite_B.tolist(), walks, (), lambda: p_B1V)

    def _scored(self, proposal: Proposal) -> Forwarded:
        tokens_BM = _target_inputs(self._last_B1(), proposal, self._least)
        block = self._block(proposal)
        logits_BMV, hidden = self.runner.forward(tokens_BM, block, hidden_layers=self.hidden_layers)
        return _penalised(logits_BMV, self.options.sampling, proposal, self.seen), hidden

    def _last_B1(self) -> Tensor:
        return torch.tensor([[row.last] for row in self.batch], device=self.runner.device)

    def _block(self, proposal: Proposal) -> Block:
        tree, copied = proposal.tree, proposal.num_copied
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

    def _record(self, judged: _Judged) -> list[_Row]:
        for index, row in enumerate(self.batch):
            finite = judged.finite_B[index]
            if finite != _ALL_FINITE:
                target, proposer = self.parts.target, self.parts.proposer
                name = f"target {target.name_or_path or type(target).__name__}"
                if finite & 1 and proposer is not None:
                    name = proposer.name
                where = f"after {len(row.ids)} new tokens of prompt {row.index}"
                raise InputError(
                    f"the {name} gave logits that are not finite {where}; its weights are "
                    "damaged or need float32"
                )
            self._emit(row, judged.walks[index])
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

    def _emit(self, row: _Row, walk: Walk) -> None:
        """Cut a block at EOS and at `max_new_tokens`, count it, and pass it to `on_tokens`."""
        options = self.options
        room = options.max_new_tokens - len(row.ids)
        accepted = len(walk.path)
        tokens = walk.emitted[:room]
        for index, token in enumerate(tokens):
            if token in options.eos_ids:
                tokens = tokens[: index + 1]
                row.finish_reason = "stop"
                break
        if options.stop is not None:
            count = options.stop(row.ids + tokens, len(tokens))
            if count is not None:
                tokens = tokens[:count]
                row.finish_reason = "stop"
        row.ids += tokens
        if not row.finish_reason and len(tokens) == room:
            row.finish_reason = "length"
        drafted = min(accepted, len(tokens))
        from_draft = [index < drafted for index in range(len(tokens))]
        row.from_draft += from_draft
        # The depth after the last accepted one was reached only if the target's token in its place
        # was not cut off.
        whole = len(tokens) == accepted + 1
        reached = drafted + int(walk.is_open and whole)
        row.stats += DecodeStats(
            target_calls=1,
            emitted=len(tokens),
            proposed=walk.drafted,
            accepted=drafted,
            depth_sum=walk.offered,
            accepted_by_depth=(1,) * drafted,
            reached_by_depth=(1,) * reached,
            copied_calls=int(walk.copied),
            copied_accepted=drafted * walk.copied,
        )
        row.last = tokens[-1]
        if options.on_tokens is not None:
            options.on_tokens(row.index, tokens, from_draft)


def _target_inputs(last_B1: Tensor, proposal: Proposal, least: int) -> Tensor:
    drafted_BN = proposal.whole_BM[:, 1:].clamp(min=least)
    return torch.cat([last_B1, drafted_BN], dim=1)


def _penalised(
    logits_BMV: Tensor, sampling: Sampling, proposal: Proposal, seen: Seen | None
) -> Tensor:
    """Return the logits at each node, given the text and the path to it."""
    if seen is None:
        return logits_BMV
    tree = beside(proposal.tree, proposal.num_copied)
    at = seen.in_tree(proposal.whole_BM, tree.sees_RMM)
    return penalised(logits_BMV, sampling, at)


def _verify(
    verifier: Verifier,
    sampling: Sampling,
    proposal: Proposal,
    forwarded: Forwarded,
    u_BU: Tensor | None,
    most_copied: int,
    *,
    checks: bool,
) -> tuple[Tensor, Tensor, tuple[Tensor, ...]]:
    """Verify a scored proposal. Return the facts that the host needs, integers `[B, ...]`; the
    target's distributions `[B, M, V]`; and its states at the root, on the accepted path and at
    copied nodes, `[B, 1 + D + C, H]` per layer. most_copied: uniforms for copies, the last ones.
    """
    logits_BMV, hidden = forwarded
    p_BMV = probs(logits_BMV, sampling)
    nodes = proposal.tokens_BM.shape[1]
    u_BC = None
    if u_BU is not None and most_copied:
        u_BU, u_BC = u_BU.tensor_split([u_BU.shape[1] - most_copied], dim=1)
    verdict = verifier.run(proposal, p_BMV[:, :nodes], u_BU)
    if checks:
        check_verdict(verifier.name, verdict, proposal)
    exists_BM = proposal.tokens_BM >= 0
    depths_RM = pad(proposal.tree.depths_RN, (1, 0))
    finite_B = _finite(logits_BMV.amax(2), proposal.finite)
    drafted_B = exists_BM.sum(1)
    offered_B = (exists_BM * depths_RM).amax(1)
    counts = [finite_B, verdict.accepted_B, verdict.open_B, drafted_B, offered_B]
    counts_B5 = torch.stack(counts, dim=1)
    facts = [counts_B5, verdict.nodes_BD, verdict.tokens_BD1]
    nodes_BD = verdict.nodes_BD
    if proposal.num_copied:
        p_BCV = p_BMV[:, nodes:]
        if u_BC is None:
            facts.append(largest(p_BCV, 1).indices[..., 0])
        else:
            facts.append(draw(p_BCV, u_BC[:, : proposal.num_copied]))
        copies_C = torch.arange(nodes, p_BMV.shape[1], device=p_BMV.device)
        nodes_BD = torch.cat([nodes_BD, copies_C.expand(len(p_BMV), -1)], dim=1)
    return torch.cat(facts, dim=1), p_BMV, _on_path(hidden, nodes_BD)


def _on_path(hidden: Sequence[Tensor], nodes_BD: Tensor) -> tuple[Tensor, ...]:
    """Return states at the root and at these nodes."""
    path_BD1 = pad(nodes_BD, (1, 0)).unsqueeze(2)
    return tuple(layer.gather(1, path_BD1.expand(-1, -1, layer.shape[2])) for layer in hidden)


def _indices(paths: Sequence[Sequence[int]], device: torch.device) -> Tensor:
    """Return the nodes of each row's path, with zeros behind shorter ones."""
    depth = max(map(len, paths))
    padded = [[*path, *[0] * (depth - len(path))] for path in paths]
    return torch.tensor(padded, dtype=torch.long, device=device)


def _finite(largest_BM: Tensor, draft: Tensor | None) -> Tensor:
    """`[B]`: 1 if the target's logits are finite, plus 2 if the draft's are. The largest logit of
    a node shows any NaN or plus infinity; minus infinity marks an impossible token.
    """
    largest_B = largest_BM.amax(1)
    target_B = largest_B.isfinite().long()
    return target_B + 2 if draft is None else target_B + 2 * draft


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
