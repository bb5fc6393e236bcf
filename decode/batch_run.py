"""Prompts that are decoded together, step by step: draft, score, verify, record.

At each step a row draws uniforms for the proposer and then for the verifier from its own generator,
always the same number: its output does not depend on its batch mates (law 4). At temperature 0 it
draws none. A row that has ended leaves the batch at once; the last rows move up into its place.

Legend: B rows still in the batch, N drafted nodes, M = N + 1 with the root, D depth, V vocabulary,
U uniforms per row.
"""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

import torch
from torch import Tensor
from transformers import PreTrainedTokenizerBase

from decode.propose.protocol import Outcome, Proposal, Session, SessionSetup, padded
from decode.recorded.steps import StaticSteps, bucket
from decode.runner import Runner
from decode.stats import DecodeStats
from decode.tree import Drawing, Tree, TreeShape
from decode.tree_batch import TreeBatch
from decode.verify import VERIFIERS, Verifier
from decode.verify.exact import follow
from decode.verify.tree_walk import Walk
from draftsmith_core.errors import InputError
from draftsmith_core.models import vocabulary_size
from draftsmith_core.sampling import Sampling, draw, probs, uniforms

if TYPE_CHECKING:
    from decode.engine import SpeculativeDecoder

_TREE_ARRAYS = 5  # how many tensors a `TreeBatch` has
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
        self._tokenizer, self._strings = tokenizer, tuple(strings)
        self._reach = max(len(text.encode()) for text in strings) + _MARGIN_TOKENS

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
        recent = list(ids[max(begin - self._reach, 0) : end])
        text = self._tokenizer.decode(recent, clean_up_tokenization_spaces=False)
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


class _Row:
    def __init__(
        self, index: int, prompt: Sequence[int], generator: torch.Generator, depth: int
    ) -> None:
        self.index = index
        self.last = prompt[-1]
        self.generator = generator
        self.ids: list[int] = []
        self.from_draft: list[bool] = []
        self.finish_reason = ""
        self.stats = DecodeStats(accepted_by_depth=(0,) * depth, reached_by_depth=(0,) * depth)

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


class BatchRun:
    """Prompts that are decoded together. `rows` are those it began with, `batch` all that have not
    ended, in the order of the tensors.
    """

    def __init__(
        self,
        decoder: "SpeculativeDecoder",
        prompts: Sequence[Sequence[int]],
        sampling: Sampling,
        max_new_tokens: int,
        generators: Sequence[torch.Generator],
        eos_ids: frozenset[int],
        on_tokens: OnTokens | None = None,
        stop: StopCondition | None = None,
        first: int = 0,
        runner: Runner | None = None,
    ) -> None:
        """first: the index of the first prompt. runner: an empty one of the same target, to share
        its weights.
        """
        self.decoder, self.sampling, self.max_new_tokens = decoder, sampling, max_new_tokens
        self.eos_ids, self.on_tokens, self.stop = eos_ids, on_tokens, stop
        tree, proposer = decoder.tree, decoder.proposer
        # At temperature 0 every proposer takes the most probable tokens.
        drawing: Drawing = "deterministic" if sampling.greedy else decoder.drawing
        pairs = enumerate(zip(prompts, generators, strict=True), first)
        self.rows = [
            _Row(index, prompt, generator, tree.depth) for index, (prompt, generator) in pairs
        ]
        self.batch = list(self.rows)
        self.hidden_layers = proposer.hidden_layers if proposer else ()
        self.runner = runner or decoder.new_runner()
        hidden = self.runner.prefill(
            [p[:-1] for p in prompts], max_new_tokens + tree.size + 1, self.hidden_layers
        )
        device = self.runner.device
        self.session: Session
        if proposer is None:
            self.session = _NoDraft(len(self.rows), device)
        else:
            setup = SessionSetup(
                prompts=prompts,
                tree=tree,
                drawing=drawing,
                sampling=sampling,
                max_new_tokens=max_new_tokens,
                hidden_BTH=hidden,
                device=device,
                vocabulary=vocabulary_size(decoder.target),
                compile=decoder.compile,
            )
            self.session = proposer.start(setup)
        self.num_draft_uniforms = 0 if drawing == "deterministic" else tree.size
        self.num_uniforms = self.num_draft_uniforms + decoder.verifier.uniforms(_widest(tree))

    def join(self, other: "BatchRun") -> None:
        """Append the rows of another run without drafts, of the same options, which has made no
        step.
        """
        self.runner.join(other.runner)
        self.batch += other.batch
        self.session = _NoDraft(len(self.batch), self.runner.device)

    def step(self) -> list[_Row]:
        """Draft, score, verify and record, with one forward of the target. Return the rows that
        ended.
        """
        u_BU = None
        if not self.sampling.greedy:
            # One transfer for all uniforms of a step, so that no rule waits for the host.
            u_BU = uniforms([row.generator for row in self.batch], self.num_uniforms).to(
                self.runner.device
            )
        split = self.num_draft_uniforms
        proposal = self.session.propose(u_BU[:, :split] if u_BU is not None and split else None)
        u_BU = None if u_BU is None else u_BU[:, split:]
        last_B = [row.last for row in self.batch]
        self.runner.open()
        if self.runner.steps is not None:
            facts, p_BMV, states = self._static_step(self.runner.steps, proposal, last_B, u_BU)
            return self._record(*_on_host(facts, proposal.tree.depth), states, lambda: p_BMV)
        tokens_BM = proposal.tokens_BM.clamp(min=0)
        tokens_BM[:, 0] = (
            torch.tensor(last_B, device=tokens_BM.device) if len(last_B) > 1 else last_B[0]
        )
        block = self.decoder.block(proposal.tree)
        logits_BMV, hidden = self.runner.forward(tokens_BM, block, hidden_layers=self.hidden_layers)
        # A proposer may draft nothing in a step, which not every rule can verify: `exact` then
        # draws the token. A row must get the same rule whether or not its batch mates drafted,
        # because rules use uniforms differently.
        takes = proposal.tree.depth or proposal.drawing in self.decoder.verifier.drawings
        verifier = self.decoder.verifier if takes else VERIFIERS["exact"]
        if (
            self.sampling.greedy
            and logits_BMV.device.type == "cpu"
            and VERIFIERS.get(verifier.name) is verifier
        ):
            judged = _judge_greedily(proposal, logits_BMV, hidden)
            return self._record(*judged, lambda: probs(logits_BMV, self.sampling))
        if (
            u_BU is not None
            and not proposal.tree.depth
            and verifier is VERIFIERS["exact"]
            and not hidden
        ):
            return self._draw(logits_BMV, u_BU, proposal.finite)
        facts, p_BMV, states = _judge(verifier, self.sampling, proposal, logits_BMV, hidden, u_BU)
        return self._record(*_on_host(facts, proposal.tree.depth), states, lambda: p_BMV)

    def _draw(self, logits_B1V: Tensor, u_BU: Tensor, finite: Tensor | None) -> list[_Row]:
        """Record a token from the target at every root, where nothing was drafted."""
        p_B1V = probs(logits_B1V, self.sampling)
        tokens_B = draw(p_B1V[:, 0], u_BU[:, 0].to(p_B1V.device))
        facts_B2 = torch.stack([_finite(logits_B1V, finite), tokens_B], dim=1).tolist()
        walks = [Walk([], [token], False, 0, 0) for _, token in facts_B2]
        return self._record([finite for finite, _ in facts_B2], walks, [], lambda: p_B1V)

    def _static_step(
        self, steps: StaticSteps, proposal: Proposal, last_B: list[int], u_BU: Tensor | None
    ) -> tuple[Tensor, Tensor, list[Tensor]]:
        """The target's forward and `_judge` as one function of tensors with static shapes."""
        rows, nodes = len(last_B), proposal.tokens_BM.shape[1]
        proposal = padded(proposal, rows, bucket(nodes - 1))
        tree, drawing, drafts = proposal.tree, proposal.drawing, proposal.drafts
        widths, verifier, sampling = tree.widths, self.decoder.verifier, self.sampling
        run = self.runner.static(proposal.tokens_BM.shape[1], 0, self.hidden_layers)
        optional = {"u": u_BU, "q": proposal.q_BEV, "finite": proposal.finite}
        given = {key: value for key, value in optional.items() if value is not None}
        keys = tuple(given)

        def step(
            last_B1: Tensor, state_B3: Tensor, tokens_BM: Tensor, *rest: Tensor
        ) -> tuple[Tensor, ...]:
            parents, depths, children, groups, sees = rest[:_TREE_ARRAYS]
            now = TreeBatch(parents, depths, children, groups, sees, widths)
            extra = dict(zip(keys, rest[_TREE_ARRAYS:], strict=True))
            drafted = Proposal(now, tokens_BM, extra.get("q"), drawing, drafts, extra.get("finite"))
            inputs_BM = torch.cat([last_B1, tokens_BM[:, 1:].clamp(min=0)], dim=1)
            offsets_BM = torch.nn.functional.pad(now.depths_RN, (1, 0))
            logits_BMV, hidden = run(inputs_BM, offsets_BM, now.sees_RMM, state_B3)
            facts, p_BMV, states = _judge(
                verifier, sampling, drafted, logits_BMV, hidden, extra.get("u")
            )
            return facts, p_BMV, *states

        last_B1 = torch.tensor(last_B, device=self.runner.device).unsqueeze(1)
        arrays = (tree.parents_RN, tree.depths_RN, tree.children_RMK, tree.groups_RM, tree.sees_RMM)
        name = ("verify", run.name, widths, drawing, drafts, keys, sampling, verifier.name)
        facts, p_BMV, *states = steps.call(
            name,
            step,
            rows,
            last_B1,
            self.runner.state_B3,
            proposal.tokens_BM,
            *arrays,
            *given.values(),
        )
        return facts, p_BMV[:, :nodes], states

    def _record(
        self,
        finite_B: list[int],
        walks: list[Walk],
        hidden: Sequence[Tensor],
        distributions: Callable[[], Tensor],
    ) -> list[_Row]:
        for row, finite, walk in zip(self.batch, finite_B, walks, strict=True):
            if finite != _ALL_FINITE:
                target, proposer = self.decoder.target, self.decoder.proposer
                name = f"target {target.name_or_path or type(target).__name__}"
                if finite & 1 and proposer is not None:
                    name = proposer.name
                where = f"after {len(row.ids)} new tokens of prompt {row.index}"
                raise InputError(
                    f"the {name} gave logits that are not finite {where}; its weights are "
                    "damaged or need float32"
                )
            self._emit(row, walk)
        places = [place for place, row in enumerate(self.batch) if row.finish_reason]
        ended_rows = [self.batch[place] for place in places]
        if len(ended_rows) == len(self.batch):
            self.batch = []
            return ended_rows
        paths = [walk.path for walk in walks]
        self.runner.keep([[0, *path] for path in paths])
        states = [
            [layer[place, : len(path) + 1] for layer in hidden] for place, path in enumerate(paths)
        ]
        self.session.commit(Outcome(paths, [walk.emitted for walk in walks], states, distributions))
        if places:
            left = self.runner.remove(places)
            self.batch = [self.batch[place] for place in left]
            self.session.select_rows(left)
        return ended_rows

    def _emit(self, row: _Row, walk: Walk) -> None:
        """Cut a block at EOS and at `max_new_tokens`, count it, and pass it to `on_tokens`."""
        room = self.max_new_tokens - len(row.ids)
        accepted, tokens = len(walk.path), walk.emitted[:room]
        for place, token in enumerate(tokens):
            if token in self.eos_ids:
                tokens = tokens[: place + 1]
                row.finish_reason = "stop"
                break
        if (
            self.stop is not None
            and (count := self.stop(row.ids + tokens, len(tokens))) is not None
        ):
            tokens = tokens[:count]
            row.finish_reason = "stop"
        row.ids += tokens
        if not row.finish_reason and len(tokens) == room:
            row.finish_reason = "length"
        drafted = min(accepted, len(tokens))
        from_draft = [place < drafted for place in range(len(tokens))]
        row.from_draft += from_draft
        # The depth after the last accepted one was reached only if the target's token in its place
        # was not cut off.
        reached = drafted + int(walk.is_open and len(tokens) == accepted + 1)
        counts = (1, len(tokens), walk.drafted, drafted, walk.offered)
        row.stats += DecodeStats(
            *counts, accepted_by_depth=(1,) * drafted, reached_by_depth=(1,) * reached
        )
        row.last = tokens[-1]
        if self.on_tokens is not None:
            self.on_tokens(row.index, tokens, from_draft)


def _judge(
    verifier: Verifier,
    sampling: Sampling,
    proposal: Proposal,
    logits_BMV: Tensor,
    hidden: Sequence[Tensor],
    u_BU: Tensor | None,
) -> tuple[Tensor, Tensor, list[Tensor]]:
    """Verify a scored proposal. Return the facts that the host needs, integers `[B, ...]`; the
    target's distributions `[B, M, V]`; and its states at the root and on the accepted path, `[B, D
    + 1, H]` per layer.
    """
    p_BMV = probs(logits_BMV, sampling)
    verdict = verifier.run(proposal, p_BMV, u_BU)
    exists_BM = proposal.tokens_BM >= 0
    drafted_B = exists_BM.sum(1)
    offered_B = (
        (exists_BM[:, 1:] * proposal.tree.depths_RN).amax(1)
        if exists_BM.shape[1] > 1
        else drafted_B
    )
    facts = torch.cat(
        [
            torch.stack(
                [_finite(logits_BMV, proposal.finite), verdict.accepted_B, verdict.open_B], dim=1
            ),
            torch.stack([drafted_B, offered_B], dim=1),
            verdict.nodes_BD,
            verdict.tokens_BD1,
        ],
        dim=1,
    )
    path_BD1 = torch.nn.functional.pad(verdict.nodes_BD, (1, 0)).unsqueeze(2)
    return (
        facts,
        p_BMV,
        [layer.gather(1, path_BD1.expand(-1, -1, layer.shape[2])) for layer in hidden],
    )


def _judge_greedily(
    proposal: Proposal, logits_BMV: Tensor, hidden: Sequence[Tensor]
) -> tuple[list[int], list[Walk], list[Tensor]]:
    """`_judge` at temperature 0 on a CPU, where all of `VERIFIERS` follow the target's own tokens.
    Lists are faster than many small tensors.
    """
    best = logits_BMV.max(-1)  # of equal logits the first, as argmax, and faster
    walks = follow(proposal, best.indices.tolist())
    target_B = [all(map(math.isfinite, values)) for values in best.values.tolist()]
    draft_B = [True] if proposal.finite is None else proposal.finite.view(-1).tolist()
    draft_B *= len(target_B) // len(draft_B)
    finite_B = [target + 2 * draft for target, draft in zip(target_B, draft_B, strict=True)]
    if not hidden:
        return finite_B, walks, []
    depth = proposal.tree.depth
    path_BD1 = torch.tensor(
        [[0, *walk.path, *[0] * (depth - len(walk.path))] for walk in walks]
    ).unsqueeze(2)
    return (
        finite_B,
        walks,
        [layer.gather(1, path_BD1.expand(-1, -1, layer.shape[2])) for layer in hidden],
    )


def _on_host(facts: Tensor, depth: int) -> tuple[list[int], list[Walk]]:
    """Return each row's `_finite` and walk from the `facts` of `_judge`: one transfer, so a step
    waits only once.
    """
    finite_B: list[int] = []
    walks: list[Walk] = []
    for finite, accepted, is_open, drafted, offered, *rest in facts.tolist():
        finite_B.append(finite)
        emitted = rest[depth : depth + accepted + 1]
        walks.append(Walk(rest[:accepted], emitted, bool(is_open), drafted, offered))
    return finite_B, walks


def _finite(logits_BMV: Tensor, draft: Tensor | None) -> Tensor:
    """`[B]`: 1 if the target's logits are finite, plus 2 if the draft's are. The largest logit
    shows any NaN or plus infinity; minus infinity marks an impossible token.
    """
    target_B = logits_BMV.amax((1, 2)).isfinite().long()
    return target_B + 2 if draft is None else target_B + 2 * draft


def _widest(tree: TreeShape) -> TreeBatch:
    """Return a tree that takes at least as many uniforms as any drafted on this shape."""
    if isinstance(tree, Tree) and not tree.size:
        return TreeBatch.build(tree, torch.device("cpu"))
    return replace(
        TreeBatch.build(Tree((-1,) * tree.size), torch.device("cpu")),
        widths=(tree.size,) * tree.depth,
    )
