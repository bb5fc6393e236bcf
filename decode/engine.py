"""The speculative decoder: draft a tree, score it with one target forward, keep what the verifier
accepts.

Legend: B rows still in the batch, N drafted nodes, M = N + 1 with the root, D depth, V vocabulary,
U uniforms a row.

One step of a row takes N uniforms for the proposer and then those of the verifier from the row's
own generator, in that order, always the same number: a row's output depends on its prompt and its
generator, not on its batch mates (law 4). At temperature 0 none are taken. Rows that have ended
stay in the batch until half of it has.
"""

import time
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor
from transformers import PreTrainedModel

from decode.forward import Block, Runner, attention_windows
from decode.propose import Proposal, Proposer, Session
from decode.propose.draft_model import check_context
from decode.stats import Counter, DecodeStats
from decode.tree import Tree, TreeBatch, parse_tree
from decode.verify import VERIFIERS, Verifier
from draftsmith.models import context_length
from draftsmith.sampling import Sampling, probs, uniforms

OnTokens = Callable[[int, list[int], list[bool]], None]


@dataclass(frozen=True)
class Generation:
    """One prompt's output: new tokens only, EOS included if the model ended ("stop"), else cut
    ("length").
    """

    output_ids: list[int]
    finish_reason: str
    from_draft: list[bool]
    stats: DecodeStats


@dataclass(frozen=True)
class Batch:
    """All outputs in prompt order, and the wall clock of the two phases in seconds."""

    generations: list[Generation]
    prefill_s: float
    decode_s: float


class SpeculativeDecoder:
    """Decodes with a target and a proposer; `proposer=None` is autoregressive decoding through the
    same code.

    `tree` is a spec (`parse_tree`) or a `Tree`, `verifier` a key of `VERIFIERS`; both are ignored
    without a proposer. Raises ValueError, one line with the fix, when the parts do not go together.
    """

    def __init__(
        self,
        target: PreTrainedModel,
        proposer: Proposer | None = None,
        tree: str | Tree = "chain:4",
        verifier: str = "speculative",
    ) -> None:
        self.target, self.proposer = target, proposer
        self.tree = (parse_tree(tree) if isinstance(tree, str) else tree) if proposer else Tree(())
        if verifier not in VERIFIERS:
            raise ValueError(f"verifier '{verifier}': unknown; use one of {', '.join(sorted(VERIFIERS))}")
        self.verifier: Verifier = VERIFIERS[verifier if proposer else "exact"]
        self._windows = attention_windows(target)
        self._limit = context_length(target)
        if proposer is not None:
            if self.tree.size == 0:
                raise ValueError("tree: it has no nodes, so nothing can be drafted; use chain:1 or proposer=None")
            proposer.check(target, self.tree)
            self.verifier.check(self.tree, proposer.drawing(None))
        self._blocks: dict[TreeBatch, Block] = {}

    @torch.inference_mode()
    def generate(
        self,
        prompts: Sequence[Sequence[int]],
        sampling: Sampling,
        max_new_tokens: int,
        generators: Sequence[torch.Generator],
        eos_ids: Collection[int] = (),
        on_tokens: OnTokens | None = None,
    ) -> Batch:
        """Continue all prompts as one batch; `generators[b]` is the only source of randomness of
        prompt b.

        `on_tokens(row, ids, from_draft)` is called after each step with the tokens just emitted.
        Raises ValueError for an empty prompt, a prompt that does not fit the context, or a number
        of generators that differs.
        """
        self._check(prompts, sampling, max_new_tokens, generators)
        if not prompts:
            return Batch([], 0.0, 0.0)
        began = self._clock()
        run = _Run(self, prompts, sampling, max_new_tokens, generators, frozenset(eos_ids), on_tokens)
        prefilled = self._clock()
        while run.live:
            run.step()
        ended = self._clock()
        return Batch([row.generation for row in run.rows], prefilled - began, ended - prefilled)

    def block(self, tree: TreeBatch) -> Block:
        """The target's block of [root] + tree; kept for trees that all rows share."""
        block = self._blocks.get(tree)
        if block is None:
            offsets_RM = torch.nn.functional.pad(tree.depths_RN, (1, 0))
            block = Block(offsets_RM, tree.sees_RMM, static=tree.rows == 1)
            if tree.rows == 1:
                # A static proposer hands out the same arrays at every step; one entry is all that
                # is ever live.
                self._blocks = {tree: block}
        return block

    def _check(
        self,
        prompts: Sequence[Sequence[int]],
        sampling: Sampling,
        max_new_tokens: int,
        generators: Sequence[torch.Generator],
    ) -> None:
        if len(generators) != len(prompts):
            raise ValueError(f"{len(prompts)} prompts but {len(generators)} generators: pass one generator a prompt")
        if max_new_tokens < 1:
            raise ValueError(f"max_new_tokens: {max_new_tokens} is below 1; ask for at least one token")
        if not prompts:
            return
        if empty := [row for row, prompt in enumerate(prompts) if not len(prompt)]:
            raise ValueError(f"prompt {empty[0]} has no tokens; start it with the model's BOS token")
        check_context("target", self._limit, prompts, max_new_tokens)
        if self.proposer is not None:
            self.proposer.check_lengths(prompts, max_new_tokens)
            self.verifier.check(self.tree, self.proposer.drawing(sampling))

    def _clock(self) -> float:
        if self.target.device.type == "cuda":
            torch.cuda.synchronize(self.target.device)
        return time.perf_counter()


class _Row:
    """What one prompt has produced so far."""

    def __init__(self, prompt: Sequence[int], generator: torch.Generator, depth: int) -> None:
        self.last = prompt[-1]
        self.generator = generator
        self.ids: list[int] = []
        self.from_draft: list[bool] = []
        self.finish_reason = ""
        self.counter = Counter(depth)

    @property
    def generation(self) -> Generation:
        return Generation(self.ids, self.finish_reason, self.from_draft, self.counter.stats)


class _NoDraft:
    """The session of autoregressive decoding: an empty tree at every step."""

    def __init__(self, rows: int, device: torch.device) -> None:
        self._tree = Tree(()).on(device)
        self._tokens_BM = torch.full((rows, 1), -1, device=device)

    def propose(self, u_BN: Tensor | None) -> Proposal:
        return Proposal(self._tree, self._tokens_BM, None, "deterministic")

    def commit(
        self,
        paths: Sequence[Sequence[int]],
        tokens: Sequence[Sequence[int]],
        hidden: Sequence[Sequence[Tensor]],
    ) -> None:
        return

    def select_rows(self, rows: Sequence[int]) -> None:
        self._tokens_BM = self._tokens_BM[: len(rows)]


class _Run:
    """One `generate` call. `rows` are all prompts, `batch` the indices of those in the tensors,
    `live` the unfinished.
    """

    def __init__(
        self,
        decoder: SpeculativeDecoder,
        prompts: Sequence[Sequence[int]],
        sampling: Sampling,
        max_new_tokens: int,
        generators: Sequence[torch.Generator],
        eos_ids: frozenset[int],
        on_tokens: OnTokens | None,
    ) -> None:
        self.decoder, self.sampling, self.max_new_tokens = decoder, sampling, max_new_tokens
        self.eos_ids, self.on_tokens = eos_ids, on_tokens
        tree, proposer = decoder.tree, decoder.proposer
        pairs = zip(prompts, generators, strict=True)
        self.rows = [_Row(prompt, generator, tree.depth) for prompt, generator in pairs]
        self.batch = list(range(len(self.rows)))
        self.live = len(self.rows)
        self.hidden_layers = proposer.hidden_layers if proposer else ()
        self.runner = Runner(decoder.target, decoder._windows, decoder._limit)
        hidden = self.runner.prefill([p[:-1] for p in prompts], max_new_tokens + tree.size + 1, self.hidden_layers)
        device = self.runner.device
        self.session: Session = (
            proposer.start(prompts, tree, sampling, max_new_tokens, hidden, device)
            if proposer
            else _NoDraft(len(self.rows), device)
        )
        self.num_draft_uniforms = tree.size
        self.num_uniforms = tree.size + decoder.verifier.uniforms(tree.on(torch.device("cpu")))

    def step(self) -> None:
        """Draft, score, verify, and record; one forward of the target."""
        u_BU = self._uniforms()
        split = self.num_draft_uniforms
        proposal = self.session.propose(None if u_BU is None else u_BU[:, :split])
        tokens_BM = proposal.tokens_BM.clamp(min=0)
        last_B = [self.rows[index].last for index in self.batch]
        tokens_BM[:, 0] = torch.tensor(last_B, device=tokens_BM.device) if len(last_B) > 1 else last_B[0]
        self.runner.open()
        block = self.decoder.block(proposal.tree)
        logits_BMV, hidden = self.runner.forward(tokens_BM, block, hidden_layers=self.hidden_layers)
        p_BMV = probs(logits_BMV, self.sampling)
        verdict = self.decoder.verifier.run(proposal, p_BMV, None if u_BU is None else u_BU[:, split:])
        # The one synchronisation of a step: everything the host has to know, in one transfer.
        drafted_B = (proposal.tokens_BM >= 0).sum(1)
        facts = torch.cat(
            [
                torch.stack([verdict.accepted_B, verdict.open_B, drafted_B], dim=1),
                verdict.nodes_BD,
                verdict.tokens_BD1,
            ],
            dim=1,
        ).tolist()
        self._record(proposal, facts, hidden)

    def _record(self, proposal: Proposal, facts: list[list[int]], hidden: tuple[Tensor, ...]) -> None:
        depth = proposal.tree.depth
        paths: list[list[int]] = []
        blocks: list[list[int]] = []
        for index, (accepted, is_open, drafted, *rest) in zip(self.batch, facts, strict=True):
            row = self.rows[index]
            if row.finish_reason:
                paths.append([])
                blocks.append([])
                continue
            tokens = self._emit(index, rest[depth : depth + accepted + 1], accepted, bool(is_open), drafted, depth)
            ended = bool(row.finish_reason)
            paths.append([] if ended else rest[:accepted])
            blocks.append([] if ended else tokens)
        self.runner.keep([[0, *path] if block else [] for path, block in zip(paths, blocks, strict=True)])
        states = [[layer[place, [0, *path]] for layer in hidden] if hidden else [] for place, path in enumerate(paths)]
        self.session.commit(paths, blocks, states)
        for place, block in enumerate(blocks):
            if not block:
                self.runner.finish(place)
        self._compact()

    def _emit(self, index: int, tokens: list[int], accepted: int, is_open: bool, drafted: int, depth: int) -> list[int]:
        """Cut a block at EOS and at `max_new_tokens`, count what is left, and hand it out."""
        row = self.rows[index]
        room = self.max_new_tokens - len(row.ids)
        tokens = tokens[:room]
        for place, token in enumerate(tokens):
            if token in self.eos_ids:
                tokens = tokens[: place + 1]
                row.finish_reason = "stop"
                break
        row.ids += tokens
        if not row.finish_reason and len(tokens) == room:
            row.finish_reason = "length"
        kept = min(accepted, len(tokens))
        from_draft = [place < kept for place in range(len(tokens))]
        row.from_draft += from_draft
        # A further depth was reached only if the token that was emitted instead of it is still in
        # the block.
        reached = kept + int(is_open and len(tokens) == accepted + 1)
        row.counter.step(emitted=len(tokens), accepted=kept, reached=reached, proposed=drafted, depth=depth)
        row.last = tokens[-1]
        if row.finish_reason:
            self.live -= 1
        if self.on_tokens is not None:
            self.on_tokens(index, tokens, from_draft)
        return tokens

    def _compact(self) -> None:
        if not 0 < self.live <= len(self.batch) // 2:
            return
        keep = [place for place, index in enumerate(self.batch) if not self.rows[index].finish_reason]
        self.batch = [self.batch[place] for place in keep]
        self.runner.select_rows(keep)
        self.session.select_rows(keep)

    def _uniforms(self) -> Tensor | None:
        if self.sampling.greedy:
            return None
        places = [place for place, index in enumerate(self.batch) if not self.rows[index].finish_reason]
        fresh = uniforms([self.rows[self.batch[place]].generator for place in places], self.num_uniforms)
        if len(places) == len(self.batch):
            return fresh
        u_BU = torch.full((len(self.batch), self.num_uniforms), 0.5, dtype=torch.float64)
        u_BU[places] = fresh
        return u_BU
