"""The share of a whole draft that is rejected, in place of the rejected share of one token (arXiv 2606.12370).

A draft of g tokens has on average sum_j prod_(i<=j) alpha_i of them accepted, alpha_i being the acceptance at its i-th
position. The loss of a position is 1 minus that sum over g, for the draft that begins there; near the end of a
sequence, of the shorter draft that still fits. On the target's own text every alpha is that of plain training.

Legend: N valid tokens, S sequences, L tokens of the longest, G tokens of a draft.
"""

import torch
import torch.nn.functional as F
from torch import Tensor


def draft_losses(alpha_N: Tensor, sequence_N: Tensor, depth: int) -> tuple[Tensor, Tensor]:
    """(loss `[N]`, weight `[N]`): the loss of the draft that begins at each token, and minus the slope of their sum in
    the acceptance of each token. So the sum of weight x (1 - alpha) has the gradient of the sum of losses.

    sequence_N: the sequence of each token, ascending; no draft reaches into another. Nothing here has a gradient.
    """
    with torch.enable_grad():
        alpha_N = alpha_N.detach().clone().requires_grad_()
        _, length_S = torch.unique_consecutive(sequence_N, return_counts=True)
        column_L = torch.arange(int(length_S.max()) if len(length_S) else 0, device=alpha_N.device)
        there_SL = column_L < length_S[:, None]
        alpha_SL = torch.zeros(there_SL.shape, dtype=alpha_N.dtype, device=alpha_N.device).masked_scatter(
            there_SL, alpha_N
        )
        if not alpha_SL.numel():
            return alpha_N.detach(), alpha_N.detach()
        # Behind the end of a sequence alpha is 0, and so is every product that reaches there.
        accepted_SL = F.pad(alpha_SL, (0, depth - 1)).unfold(1, depth, 1).cumprod(-1).sum(-1)
        fits_SL = (length_S[:, None] - column_L).clamp(1, depth)
        loss_N = (1 - accepted_SL / fits_SL)[there_SL]
        (slope_N,) = torch.autograd.grad(loss_N.sum(), alpha_N)
    return loss_N.detach(), -slope_N
