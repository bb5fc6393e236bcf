"""Speculative decoding in one file, as the papers have it: what the rest of `decode` makes fast.

A draft proposes a tree of tokens, one pass of the target scores them all, and a rejection rule
keeps a path; the output has exactly the target's distribution. A chain (one sibling a level) is
Leviathan et al. (arXiv 2211.17192); siblings drawn independently are SpecInfer's (2305.09781).

Legend: V vocabulary. p is the target's distribution, q the draft's. There is no cache.
"""

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

Model = Callable[[Sequence[int]], Tensor]  # a text -> the distribution of its next token, [V]
Branch = tuple[int, ...]  # drafted tokens from the root down


def draw(p_V: Tensor, generator: torch.Generator) -> int:
    """Draw a token. From a one-hot distribution this is greedy decoding."""
    return int(torch.multinomial(p_V, 1, generator=generator))


def residual(p_V: Tensor, q_V: Tensor) -> Tensor:
    """Return what is left of p after a draw from q was refused: norm(max(0, p - q))."""
    left_V = (p_V - q_V).clamp(min=0)
    return left_V / left_V.sum()


def draft_tree(
    draft: Model, text: list[int], widths: Sequence[int], generator: torch.Generator
) -> tuple[dict[Branch, list[int]], dict[Branch, Tensor]]:
    """Draw `widths[d]` siblings below every node of depth d; return them and the nodes' q."""
    siblings: dict[Branch, list[int]] = {}
    q_of: dict[Branch, Tensor] = {}
    level: list[Branch] = [()]
    for width in widths:
        for path in level:
            q_of[path] = draft([*text, *path])
            siblings[path] = [draw(q_of[path], generator) for _ in range(width)]
        level = [(*path, token) for path in level for token in dict.fromkeys(siblings[path])]
    return siblings | {leaf: [] for leaf in level}, q_of


def accept(
    siblings: dict[Branch, list[int]],
    p_of: dict[Branch, Tensor],
    q_of: dict[Branch, Tensor],
    generator: torch.Generator,
) -> Branch:
    """Walk down from the root; return the accepted tokens and one more of the target's."""
    path: Branch = ()
    while True:
        p_V = p_of[path]
        for token in siblings[path]:
            if torch.rand((), generator=generator) < p_V[token] / q_of[path][token]:
                path = (*path, token)
                break
            p_V = residual(p_V, q_of[path])
        else:  # every sibling was refused, or the path is a leaf: the bonus token
            return (*path, draw(p_V, generator))


def decode(
    target: Model,
    draft: Model,
    prompt: Sequence[int],
    widths: Sequence[int],
    max_new_tokens: int,
    generator: torch.Generator,
) -> list[Branch]:
    """Return the tokens of each target call, with a tree of `widths` such as (1, 1) or (4, 2)."""
    steps: list[Branch] = []
    while (missing := max_new_tokens - sum(map(len, steps))) > 0:
        text = [*prompt, *(token for step in steps for token in step)]
        siblings, q_of = draft_tree(draft, text, widths, generator)
        p_of = {path: target([*text, *path]) for path in siblings}  # one pass of a real target
        steps.append(accept(siblings, p_of, q_of, generator)[:missing])
    return steps
