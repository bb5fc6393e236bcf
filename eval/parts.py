"""Parts of the target's answers, which have counts of their own: by place, by the tokens before,
by whether the text repeats itself, and by what is written: thinking, an answer or a call of a tool.

Legend: P texts, L tokens of the longest, B bins of confidence, N positions, K tokens in the draft's
order.
"""

from collections.abc import Mapping, Sequence

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from draftsmith.core.distilled_sets import repeats
from draftsmith.core.sampling import Sampling
from draftsmith.core.tokenization import Tokenizer
from draftsmith.eval.formulas import Continuation

PLACE = "place in the answer"
CONTEXT = "tokens before"
SPAN = "span"
TEXT = "text"
CONFIDENCE = "confidence"
EDGES = {PLACE: (4, 16, 64), CONTEXT: (256, 512, 1024, 2048, 4096, 8192)}
"""Where the bins of a number begin, but the first."""
# Tokens that begin a span, and tokens that end one, by the template that writes them.
_BEGINS = {
    "<think>": "thinking",
    "[THINK]": "thinking",
    "<|START_THINKING|>": "thinking",
    "<tool_call>": "call",
    "[TOOL_CALLS]": "call",
    "<|tool_call|>": "call",
    "<|python_tag|>": "call",
    "<|START_ACTION|>": "call",
}
_ENDS = ("</think>", "[/THINK]", "<|END_THINKING|>", "</tool_call>", "<|END_ACTION|>")
_ANSWER = "answer"
# Most probable tokens per position whose confidence counts.
_LIKELIEST = 64
BINS = 10
Inside = npt.NDArray[np.bool_]


def part_names(by: str) -> list[str]:
    """The names of the parts by a number, ascending."""
    edges = EDGES[by]
    between = [f"{a:g} to {b:g}" for a, b in zip(edges, edges[1:], strict=False)]
    names = [f"below {edges[0]:g}", *between, f"{edges[-1]:g} and more"]
    return [f"{by}: {name}" for name in names]


def confidence_names() -> list[str]:
    """The names of the tenths of the draft's confidence, ascending."""
    return [f"{CONFIDENCE}: {tenth / BINS:g} to {(tenth + 1) / BINS:g}" for tenth in range(BINS)]


def span_marks(tokenizer: Tokenizer) -> dict[int, str]:
    """The token ids that begin a span, and those that end one, of a tokenizer that has them."""
    added = tokenizer.get_added_vocab()
    marks = {added[mark]: span for mark, span in _BEGINS.items() if mark in added}
    return marks | {added[mark]: _ANSWER for mark in _ENDS if mark in added}


def parts_of(texts: Sequence[Continuation], marks: Mapping[int, str]) -> dict[str, Inside]:
    """By part, the positions `[P, L]` that are inside."""
    longest = max(len(text.output_ids) for text in texts)
    place_L = np.arange(longest)
    lengths_P1 = np.array([[len(text.output_ids)] for text in texts])
    before_P1 = np.array([[len(text.prompt_ids)] for text in texts])
    exists_PL = place_L < lengths_P1
    numbers = {PLACE: place_L + 0 * before_P1, CONTEXT: place_L + before_P1}
    parts: dict[str, Inside] = {}
    for by, number_PL in numbers.items():
        bin_PL = np.digitize(number_PL, EDGES[by])
        of_bin = {name: exists_PL & (bin_PL == i) for i, name in enumerate(part_names(by))}
        parts |= of_bin
    looping_P1 = np.array([[repeats(text.output_ids)] for text in texts])
    parts[f"{TEXT}: looping"] = exists_PL & looping_P1
    parts[f"{TEXT}: other"] = exists_PL & ~looping_P1
    spans = np.full((len(texts), longest), "", object)
    for row, text in enumerate(texts if marks else ()):
        spans[row, : len(text.output_ids)] = _spans(text, marks)
    names = dict.fromkeys([*_BEGINS.values(), _ANSWER])
    parts |= {f"{SPAN}: {name}": spans == name for name in names}
    return {name: inside_PL for name, inside_PL in parts.items() if inside_PL.any()}


def _spans(text: Continuation, marks: Mapping[int, str]) -> list[str]:
    """The span of each token of an answer; what begins or ends a span is of it."""
    spans = []
    span = _ANSWER
    for token in text.ids:
        begun = marks.get(token, span)
        spans.append(span if begun == _ANSWER else begun)
        span = begun
    return spans[len(text.prompt_ids) :]


def believed(sampling: Sampling, q_NV: Tensor, logits_NV: Tensor) -> Tensor:
    """The draft's confidence in each token: q, or at temperature 0, where q is one token, that of
    its logits.
    """
    return logits_NV.float().softmax(-1) if sampling.greedy else q_NV


def by_confidence(sampling: Sampling, p_NV: Tensor, q_NV: Tensor, logits_NV: Tensor) -> Tensor:
    """By position and tenth of the draft's confidence, `[N, B, 3]`: the mass that it drafted, that
    mass times its confidence, and times p.
    """
    belief_NV = believed(sampling, q_NV, logits_NV)
    count = min(_LIKELIEST, p_NV.shape[1])
    belief_NK, ids_NK = belief_NV.topk(count, dim=-1)
    q_NK = q_NV.gather(1, ids_NK)
    p_NK = p_NV.gather(1, ids_NK)
    values_NK3 = torch.stack([q_NK, q_NK * belief_NK, q_NK * p_NK], dim=-1).double()
    bin_NK = (belief_NK * BINS).long().clamp(max=BINS - 1)
    sums_NB3 = values_NK3.new_zeros(len(belief_NK), BINS, 3)
    return sums_NB3.scatter_add_(1, bin_NK.unsqueeze(-1).expand(-1, -1, 3), values_NK3)
