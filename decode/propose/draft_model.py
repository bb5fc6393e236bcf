"""A small language model drafts the tree level by level, one forward a level.

Legend: B rows, N drafted nodes, M = N + 1 with the root, E expanded nodes (those with children), K
children of one node, W pending tokens, q queries, T cells, V vocabulary.

The draft's cache lags behind the text: the target's own token was never forwarded by the draft, and
neither was the last node of a fully accepted path, because nothing hangs below it. These one or two
*pending* tokens of each row go in with the next step's first forward, right-aligned, so that the
root is the last of them in every row. Without replacement: MCSD (arXiv 2401.06706) section 3 and
`Sampling.draw_without_replacement`.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor
from transformers import PreTrainedModel

from decode.forward import Block, Runner, attention_windows
from decode.propose.protocol import Drawing, Proposal
from decode.tree import Tree, TreeBatch
from draftsmith.models import context_length, vocabulary_size
from draftsmith.sampling import Sampling, draw, draw_without_replacement, probs


class DraftModelProposer:
    """Drafts with a language model that shares the target's vocabulary."""

    hidden_layers: tuple[int, ...] = ()

    def __init__(self, model: PreTrainedModel) -> None:
        self.model = model
        self._windows = attention_windows(model)
        self._limit = context_length(model)
        self._plans: dict[tuple[Tree, torch.device, torch.device], Plan] = {}

    def drawing(self, sampling: Sampling | None) -> Drawing:
        """Greedy takes the most probable tokens; otherwise siblings are drawn without replacement."""
        return "deterministic" if sampling is not None and sampling.greedy else "without_replacement"

    def check(self, target: PreTrainedModel, tree: Tree) -> None:
        """Refuse a draft whose logits are over another vocabulary than the target's."""
        ours, theirs = vocabulary_size(self.model), vocabulary_size(target)
        if ours != theirs:
            raise ValueError(
                f"draft vocabulary {ours} != target vocabulary {theirs}: use a draft with the target's tokenizer"
            )

    def check_lengths(self, prompts: Sequence[Sequence[int]], max_new_tokens: int) -> None:
        """Refuse what does not fit the draft's context."""
        check_context("draft", self._limit, prompts, max_new_tokens)

    def start(
        self,
        prompts: Sequence[Sequence[int]],
        tree: Tree,
        sampling: Sampling,
        max_new_tokens: int,
        hidden_BTH: Sequence[Tensor],
        device: torch.device,
    ) -> "DraftModelSession":
        """Prefill the draft's cache with every prompt but its last token."""
        runner = Runner(self.model, self._windows, self._limit)
        key = (tree, runner.device, device)
        plan = self._plans.get(key)
        if plan is None:
            plan = self._plans[key] = Plan.build(tree, runner.device, device)
        runner.prefill([prompt[:-1] for prompt in prompts], max_new_tokens + tree.size + 2)
        return DraftModelSession(runner, plan, sampling, [[prompt[-1]] for prompt in prompts])


def check_context(name: str, limit: int | None, prompts: Sequence[Sequence[int]], max_new_tokens: int) -> None:
    """ValueError when the longest prompt and `max_new_tokens` do not fit `limit` positions of the
    model `name`.
    """
    longest = max(len(prompt) for prompt in prompts)
    if limit is not None and longest + max_new_tokens > limit:
        raise ValueError(
            f"prompt of {longest} tokens + max_new_tokens {max_new_tokens} exceed the {name}'s context "
            f"of {limit} tokens; shorten the prompt or lower max_new_tokens to {max(limit - longest, 0)}"
        )


@dataclass(frozen=True, eq=False)
class Level:
    """Static indices that turn the expanded nodes of one depth into the nodes of the next."""

    draws: int  # K, the most children of one node here
    uniform_EK: Tensor  # node whose uniform decides draw k of expanded node e
    slot_c: Tensor  # for each child c: its parent among the expanded nodes of this depth
    rank_c: Tensor  # and its place among its siblings
    expanded_c: Tensor | None  # which children have children themselves; None when all have
    count: int  # number of these children


@dataclass(frozen=True, eq=False)
class Plan:
    """All that is fixed about drafting one tree: levels, blocks by number of pending tokens, cells
    of nodes.
    """

    tree: Tree
    batch: TreeBatch
    levels: tuple[Level, ...]
    blocks: dict[int, tuple[Block, ...]]
    cell_of: tuple[int | None, ...]  # M index -> cell behind the pending tokens; None when never forwarded

    @staticmethod
    def build(tree: Tree, device: torch.device, target_device: torch.device) -> "Plan":
        """Indices on the draft's device; the tree of the proposal on the target's."""
        depth_of = (0, *tree.depths)
        levels: list[Level] = []
        cells: list[int | None] = [None] * len(depth_of)
        chosen = [0]
        for depth in range(tree.depth):
            parents = [m for m, below in enumerate(tree.children) if below and depth_of[m] == depth]
            kids = [m for m, d in enumerate(depth_of) if d == depth + 1]
            most = max(len(tree.children[m]) for m in parents)
            uniform = [[tree.children[m][min(k, len(tree.children[m]) - 1)] - 1 for k in range(most)] for m in parents]
            expanded = [i for i, m in enumerate(kids) if tree.children[m]]
            levels.append(
                Level(
                    draws=most,
                    uniform_EK=torch.tensor(uniform),
                    slot_c=torch.tensor([parents.index(tree.parents[m - 1] + 1) for m in kids], device=device),
                    rank_c=torch.tensor([tree.ranks[m - 1] for m in kids], device=device),
                    expanded_c=None if len(expanded) == len(kids) else torch.tensor(expanded, device=device),
                    count=len(expanded),
                )
            )
            chosen += [kids[i] for i in expanded]
        for order, m in enumerate(chosen[1:]):
            cells[m] = order
        blocks = {pending: _blocks(tree, chosen, levels, pending, device) for pending in (1, 2)}
        return Plan(tree, tree.on(target_device), tuple(levels), blocks, tuple(cells))


def _blocks(
    tree: Tree, chosen: Sequence[int], levels: Sequence[Level], pending: int, device: torch.device
) -> tuple[Block, ...]:
    """One block a forward: first the pending tokens, then the expanded nodes (`chosen`, root first)
    of each depth.
    """
    depth_of = (0, *tree.depths)
    offsets = list(range(pending - 1)) + [pending - 1 + depth_of[m] for m in chosen]
    total = len(offsets)
    sees_TT = torch.zeros(total, total, dtype=torch.bool)
    sees_TT[:, :pending] = True
    sees_TT[:pending, :pending] = torch.ones(pending, pending, dtype=torch.bool).tril()
    nodes = torch.tensor(chosen[1:], dtype=torch.long) - 1
    sees_TT[pending:, pending:] = tree.ancestors[nodes][:, nodes]
    blocks, end = [], 0
    for count in (pending, *(level.count for level in levels[:-1])):
        begin, end = end, end + count
        offsets_1T = torch.tensor([offsets[:end]], device=device)
        blocks.append(Block(offsets_1T, sees_TT[None, begin:end, :end].to(device), static=True))
    return tuple(blocks)


class DraftModelSession:
    """The draft model's cache and pending tokens for the rows of one `generate` call."""

    def __init__(self, runner: Runner, plan: Plan, sampling: Sampling, pending: list[list[int]]) -> None:
        self.runner, self.plan, self.sampling = runner, plan, sampling
        self._pending = pending
        self._width = 1

    def propose(self, u_BN: Tensor | None) -> Proposal:
        """Draw the tree, one forward of the draft a level."""
        runner, plan = self.runner, self.plan
        self._width = max(map(len, self._pending))
        self._lead = [self._width - len(tokens) for tokens in self._pending]
        runner.open(self._lead)
        padded = [[0] * lead + tokens for lead, tokens in zip(self._lead, self._pending, strict=True)]
        inputs_Bq = torch.tensor(padded, device=runner.device)
        drafted = [torch.full((len(padded), 1), -1, device=runner.device)]
        laws: list[Tensor] = []
        previous_Be: Tensor | None = None
        for depth, (level, block) in enumerate(zip(plan.levels, plan.blocks[self._width], strict=True)):
            logits_BeV, _ = runner.forward(inputs_Bq, block, keep_logits=1 if depth == 0 else 0)
            draws_BeK = self._draw(logits_BeV, level, u_BN, laws)
            tokens_Bc = draws_BeK[:, level.slot_c, level.rank_c] if level.slot_c.numel() > 1 else draws_BeK[:, 0]
            if previous_Be is not None and plan.batch.widths[depth - 1] > 1:
                # A node that does not exist has no children. Only siblings can be missing, so a
                # chain skips this.
                tokens_Bc = tokens_Bc.masked_fill(previous_Be[:, level.slot_c] < 0, -1)
            drafted.append(tokens_Bc)
            if depth + 1 == len(plan.levels):
                break
            previous_Be = tokens_Bc if level.expanded_c is None else tokens_Bc[:, level.expanded_c]
            inputs_Bq = previous_Be.clamp(min=0)
        device = plan.batch.parents_RN.device
        return Proposal(
            tree=plan.batch,
            tokens_BM=torch.cat(drafted, dim=1).to(device),
            q_BEV=torch.cat(laws, dim=1).to(device) if laws else None,
            drawing="deterministic" if self.sampling.greedy else "without_replacement",
        )

    def commit(
        self,
        paths: Sequence[Sequence[int]],
        tokens: Sequence[Sequence[int]],
        hidden: Sequence[Sequence[Tensor]],
    ) -> None:
        """Keep the accepted path in the cache; what was never forwarded becomes pending."""
        cells: list[list[int]] = []
        for row, (path, emitted) in enumerate(zip(paths, tokens, strict=True)):
            if not emitted:
                cells.append([])
                continue
            behind = [cell for m in path if (cell := self.plan.cell_of[m]) is not None]
            cells.append([*range(self._lead[row], self._width), *(self._width + cell for cell in behind)])
            self._pending[row] = list(emitted[len(behind) :])
        self.runner.keep(cells)
        for row, emitted in enumerate(tokens):
            if not emitted:
                self.runner.finish(row)
                self._pending[row] = self._pending[row][-1:]

    def select_rows(self, rows: Sequence[int]) -> None:
        """Shrink the batch to these rows."""
        self.runner.select_rows(rows)
        self._pending = [self._pending[row] for row in rows]

    def _draw(self, logits_BeV: Tensor, level: Level, u_BN: Tensor | None, laws: list[Tensor]) -> Tensor:
        """Children of the expanded nodes of one depth, `[B, e, K]`, -1 for those that do not exist."""
        if self.sampling.greedy:
            return most_probable(logits_BeV, level.draws)
        assert u_BN is not None
        q_BeV = probs(logits_BeV, self.sampling)
        laws.append(q_BeV)
        u_BeK = u_BN[:, level.uniform_EK]
        if level.draws == 1:
            return draw(q_BeV, u_BeK[..., 0]).unsqueeze(-1)
        return draw_without_replacement(q_BeV, u_BeK)


def most_probable(logits: Tensor, count: int) -> Tensor:
    """The `count` most probable tokens of logits `[..., V]`, best first, padded with -1 beyond the
    vocabulary.
    """
    if count == 1:
        return logits.max(-1, keepdim=True).indices  # faster than argmax on a CPU
    best = logits.topk(min(count, logits.shape[-1]), dim=-1).indices
    return torch.nn.functional.pad(best, (0, count - best.shape[-1]), value=-1)
