"""Teacher rows: the target's distribution at every token of an answer, as its top tokens and the mass of the rest.

Legend: P prompt tokens, R response tokens, V vocabulary, K kept tokens.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from transformers import PreTrainedModel

from draftsmith_core.errors import RunError


@dataclass(frozen=True)
class TeacherRows:
    """Per response token: the K likeliest token ids, likeliest first `[R, K]`, their natural log-probabilities `[R, K]`
    and the probability of all other tokens `[R]`.

    All at temperature 1 over the whole vocabulary, whatever temperature the answer was drawn at.
    """

    top_ids: list[list[int]]
    top_logprobs: list[list[float]]
    tail_mass: list[float]


@torch.inference_mode()
def score(model: PreTrainedModel, prompt_ids: Sequence[int], response_ids: Sequence[int], k: int) -> TeacherRows:
    """One forward over prompt and answer, alone and without padding, so that rows do not depend on their batch.

    Raises RunError, naming the model, for logits that are not finite.
    """
    ids_1T = torch.tensor([[*prompt_ids, *response_ids]], device=model.device)
    # The last position predicts what follows the answer. Some models ignore `logits_to_keep` and give all positions.
    logits_TV = model(input_ids=ids_1T, use_cache=False, logits_to_keep=len(response_ids) + 1).logits[0]
    logits_RV = logits_TV[-len(response_ids) - 1 : -1]
    if not logits_RV.amax(-1).isfinite().all():
        raise RunError(f"{model.name_or_path}: gives logits that are NaN or infinite on an answer; try --dtype float32")
    logprobs_RV = logits_RV.double().log_softmax(-1)
    top = logprobs_RV.topk(min(k, logprobs_RV.shape[-1]), dim=-1)
    tail_R = (1 - top.values.exp().sum(-1)).clamp_min(0)
    return TeacherRows(top.indices.tolist(), top.values.tolist(), tail_R.tolist())
