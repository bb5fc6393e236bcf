"""Acceptance under every rule and at every depth, from one forward of target and draft over a text
of the target.

Decoding a given text walks along it. Accepted tokens are output, so the accepted token at depth d
can only be the text's own. A draft language model has then read the text itself, and its
teacher-forced distribution is the one it drafts from, without bias. Heads are unrolled to their
depth from every root.

The chance that the text's token x was accepted as the candidate of rank k, given that x was output,
is P(rank k accepted, token x) / p(x):
    speculative          min(1, q(x) / p(x)) (Leviathan et al. 2023, theorem 3.5)
    mcsd, specinfer      E[prod over earlier ranks of their refusal, times min(p_k(x), q_k(x))]
                         / p(x), with p_k and q_k what earlier refusals left (Yang et al. 2024):
                         one draw of the earlier candidates, unbiased
    exact                P(the candidate of rank k is x), from the same draw; 0 or 1 for the most
                         probable tokens
    coupled              P(x has rank k in the draft's noised order): for one candidate 1 / sum_y
                         max(p(y), q(y) p(x) / q(x)) (Daliri et al. 2024), else from one draw
Products of these along a path are unbiased because the draws of different positions are
independent.

Legend: B rows, T columns (tokens), V vocabulary, H hidden size, K ranks, D depths, N positions.
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import chain
from typing import NamedTuple, cast

import torch
from torch import Tensor
from torch.nn.functional import pad
from torch.nn.utils.rnn import pad_sequence
from transformers import PreTrainedModel

from draftsmith.core.models import vocabulary_size
from draftsmith.core.sampling import draw, gumbel
from draftsmith.decode.verify.siblings import without
from draftsmith.decode.verify.tree_walk import residual
from draftsmith.drafts.heads import Head
from draftsmith.drafts.heads.block import BlockHead
from draftsmith.drafts.heads.feature_head import FeatureHead
from draftsmith.drafts.vocabulary import vocabulary_map

# Elements of [N, V] processed at once for the candidates of a rank (32 MiB in fp32).
MAX_ELEMENTS = 2**23
Unrolled = Iterator[tuple[Tensor, Tensor | None]]
"""By depth, logits `[N, V]` and the confidence `[N]` that a stop reads."""


@dataclass(frozen=True)
class Continuation:
    """A prompt with the target's continuation: new tokens only, EOS included. answered: how many of
    the prompt's last tokens the target wrote.
    """

    id: str
    prompt_ids: Sequence[int]
    output_ids: Sequence[int]
    answered: int = 0

    @property
    def ids(self) -> list[int]:
        """The whole text."""
        return [*self.prompt_ids, *self.output_ids]


@torch.inference_mode()
def draft_logits(
    head: Head,
    hidden_states: Mapping[int, Tensor],
    ids_BT: Tensor,
    alone_B: Tensor,
    depths: int,
    at: tuple[Tensor, Tensor],
) -> Unrolled:
    """Yield a head's logits `[N, V]` at depth 1, 2, ... below N tokens of whole texts, -inf for
    tokens it lacks.

    With each comes the `Network.confidence` `[N]` that a stop reads; None if it reads the token's
    probability. At depth d, the entry of token t is for the token at t + d. It is drafted from the
    text up to t and from the text's tokens t + 1 .. t + d - 1 as if they had been drafted. There
    are at most as many depths as heads, or as a block drafts. `hidden_states`: the target's over
    the same tokens. `alone_B`: rows with a prompt of one token; only in those does an EAGLE head
    read the first token, with a state of zeros, as in decoding. `at`: row and column of each of the
    N tokens. Rows may be padded on the right.
    """
    states = [hidden_states[layer] for layer in head.hidden_layers]
    row_N, column_N = at
    # Beyond the end of a text there are no tokens; entries there mean nothing.
    later_BT = pad(ids_BT, (0, depths))
    columns_NT = column_N.unsqueeze(1) + torch.arange(depths, device=ids_BT.device)
    below_NT = later_BT[row_N.unsqueeze(1), columns_NT]
    if isinstance(head, BlockHead):
        first = int(column_N.min())
        anchors_T = torch.arange(first, ids_BT.shape[1], device=ids_BT.device)
        drafted_BTDH = head.drafted(ids_BT, states, anchors_T.expand(len(ids_BT), -1))
        drafted_NDH = drafted_BTDH[row_N, column_N - first][:, :depths]
        yield from _block_logits(head, drafted_NDH, below_NT)
        return
    # A head pairs each token with the state it was predicted from, one position earlier.
    chosen_from = [pad(state[:, :-1], (0, 0, 1, 0)) for state in states]
    if isinstance(head, FeatureHead):
        texts_BT = torch.ones_like(ids_BT)
        texts_BT[:, 0] = alone_B
        fused_BTH = head.fuse(chosen_from)
        for features_BTH in head.unroll(ids_BT, fused_BTH, depths, texts_BW=texts_BT):
            yield head.to_target(head.logits(features_BTH[at])), None
        return
    states_NH = chosen_from[0][at]
    for depth in range(min(depths, head.config.num_heads)):
        inputs = head.inputs(states_NH, below_NT[:, : depth + 1])
        yield head.logits_of(depth, inputs), None


def _block_logits(head: BlockHead, drafted_NDH: Tensor, below_NT: Tensor) -> Unrolled:
    """Yield logits and confidence by depth. A stop reads the confidence of the next depth; the
    first one reads those of depths 1 and 2.
    """
    sure_DN: list[Tensor] = []
    depths = drafted_NDH.shape[1]
    for depth in range(depths if head.config.confidence else 0):
        sure_DN.append(head.confidence(drafted_NDH[:, depth], below_NT[:, depth], depth))
    for depth in range(depths):
        logits_NV = head.logits(head.raw_logits(drafted_NDH[:, depth]), below_NT[:, depth])
        sure_N = sure_DN[min(depth + 1, depths - 1)] if sure_DN else None
        if sure_N is not None and depth == 0 and depths > 1:
            sure_N = sure_N * sure_DN[0]
        yield logits_NV, sure_N


def model_logits(draft: PreTrainedModel, ids_BT: Tensor, keep: int) -> Tensor:
    """Return a language model's logits `[B, keep, V]` at the last `keep` columns.

    For a draft of another vocabulary they are over the target's, -inf for tokens that it does not
    share, each at the last of the token's pieces in the draft's tokens.
    """
    if (words := vocabulary_map(draft)) is None:
        # The draft reads a token without embedding as its last, as in decoding. Causal attention
        # never sees the padding on the right, so nothing need be masked.
        ids_BT = ids_BT.to(draft.device).clamp(max=vocabulary_size(draft) - 1)
        mask_BT = torch.ones_like(ids_BT)
        out = draft(input_ids=ids_BT, attention_mask=mask_BT, use_cache=False, logits_to_keep=keep)
        # Some models ignore `logits_to_keep` and return all positions.
        return cast(Tensor, out.logits[:, -keep:])
    rows, counts = [], []
    for row in ids_BT.tolist():
        pieces = [words.in_draft[token] for token in row]
        rows.append(torch.tensor(list(chain.from_iterable(pieces))))
        counts.append([len(piece) for piece in pieces])
    last_BT = torch.tensor(counts, device=draft.device).cumsum(1) - 1
    ids_BS = pad_sequence(rows, batch_first=True)
    logits_BSV = draft(input_ids=ids_BS.to(draft.device), use_cache=False).logits
    last_BC = last_BT[:, -keep:]
    row_B1 = torch.arange(len(last_BC), device=draft.device).unsqueeze(1)
    return words.to_target(logits_BSV[row_B1, last_BC])


def rank_chances(
    rule: str, p_NV: Tensor, q_NV: Tensor, x_N1: Tensor, u_NK: Tensor, ranks: int
) -> Tensor:
    """Return the chance `[N, K]` that each rank was accepted with token x, given that x was output.
    It is an unbiased draw.

    rule: mcsd and exact draw candidates without replacement, specinfer with. u: uniforms, of which
    K - 1 are used.
    """
    size = max(1, MAX_ELEMENTS // p_NV.shape[1])
    chances = []
    for start in range(0, len(p_NV), size):
        part = slice(start, start + size)
        u_nK = u_NK[part, : ranks - 1]
        chances.append(_rank_chances(rule, p_NV[part], q_NV[part], x_N1[part], u_nK))
    return torch.cat(chances)


def _rank_chances(rule: str, p_NV: Tensor, q_NV: Tensor, x_N1: Tensor, u_NK: Tensor) -> Tensor:
    if rule == "coupled":
        return _coupled_chances(p_NV, q_NV, x_N1, u_NK)
    tiny = torch.finfo(p_NV.dtype).tiny
    own_N1 = p_NV.gather(1, x_N1).clamp(min=tiny)
    refused_N1 = torch.ones_like(own_N1)
    chances = []
    first = Refusal(torch.zeros_like(own_N1), p_NV, q_NV)
    later = refusals(p_NV, q_NV, u_NK, replace=rule == "specinfer")
    for refusal in chain([first], later):
        q_x_N1 = refusal.q_NV.gather(1, x_N1)
        refused_N1 = refused_N1 * (1 - refusal.accepted_N1)
        both_N1 = torch.minimum(refusal.p_NV.gather(1, x_N1), q_x_N1)
        chances.append(q_x_N1 if rule == "exact" else both_N1 * refused_N1 / own_N1)
    return torch.cat(chances, dim=1)


def _coupled_chances(p_NV: Tensor, q_NV: Tensor, x_N1: Tensor, u_NK: Tensor) -> Tensor:
    # With E = exp(-noise), x is output where E / p has its least value m at x. The E of another
    # token y is then p_y m and an exponential draw more, and y stands before x in the draft's order
    # where E_y / q_y < p_x m / q_x. m is exponential itself, so the first rank needs no draw.
    p_x_N1 = p_NV.gather(1, x_N1)
    q_x_N1 = q_NV.gather(1, x_N1)
    room_NV = (q_NV * p_x_N1 - p_NV * q_x_N1).clamp_(min=0)
    if not u_NK.shape[1]:
        return q_x_N1 / (q_x_N1 + room_NV.sum(1, keepdim=True))
    u_N = u_NK[:, 0]
    least_N = -torch.log1p(-u_N)
    seed_N = (u_N * 2**62).long()
    noise_NV = gumbel(seed_N, torch.zeros_like(seed_N), q_NV.shape[1])
    own_NV = noise_NV.neg_().exp_() * q_x_N1
    ahead_NV = own_NV < room_NV * least_N.float().unsqueeze(1)
    ranks_K = torch.arange(u_NK.shape[1] + 1, device=x_N1.device)
    is_ranked_NK = ahead_NV.sum(1, keepdim=True) == ranks_K
    return is_ranked_NK & (q_x_N1 > 0)


class Refusal(NamedTuple):
    """The chance that a candidate is accepted, and the p and q that its refusal leaves."""

    accepted_N1: Tensor
    p_NV: Tensor
    q_NV: Tensor


def refusals(p_NV: Tensor, q_NV: Tensor, u_NK: Tensor, replace: bool = False) -> Iterator[Refusal]:
    """Draw candidates from q and try them in turn (Yang et al. 2024, algorithm 1)."""
    tiny = torch.finfo(q_NV.dtype).tiny
    for u_N in u_NK.unbind(1):
        y_N1 = draw(q_NV, u_N).clamp(min=0).unsqueeze(1)
        q_y_N1 = q_NV.gather(1, y_N1)
        # False once the support of q is used up: nothing is drawn, nothing refused.
        drawn_N1 = q_y_N1 > 0
        ratio_N1 = p_NV.gather(1, y_N1) / q_y_N1.clamp(min=tiny)
        p_NV = torch.where(drawn_N1, residual(p_NV, q_NV), p_NV)
        q_NV = q_NV if replace else without(q_NV, y_N1)
        yield Refusal(ratio_N1.clamp(max=1) * drawn_N1, p_NV, q_NV)
