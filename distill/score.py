"""Teacher rows: the target's distribution at every token of an answer, as its top tokens and the mass of the rest.

Legend: P prompt tokens, R response tokens, C positions of a chunk, V vocabulary, K kept tokens.
"""

from collections.abc import Sequence

import numpy as np
import torch
from transformers import PreTrainedModel

from draftsmith_core.errors import RunError
from draftsmith_core.teacher_rows import pack

# Bounds the memory of the float64 copy of a chunk's logits.
_CHUNK_VALUES = 2**24


@torch.inference_mode()
def score(model: PreTrainedModel, prompt_ids: Sequence[int], response_ids: Sequence[int], k: int) -> bytes:
    """The k likeliest tokens at every token of an answer, as `draftsmith_core.teacher_rows` stores them.

    At temperature 1 over the whole vocabulary, whatever temperature the answer was drawn at. One forward over prompt
    and answer, alone and without padding, so that rows do not depend on their batch. Without a prompt nothing predicts
    the first token, and its row, which training passes over, repeats the second's. Raises RunError, naming the model,
    for logits that are not finite.
    """
    ids_1T = torch.tensor([[*prompt_ids, *response_ids]], device=model.device)
    # The last position predicts what follows the answer. Some models ignore `logits_to_keep` and give all positions.
    logits_TV = model(input_ids=ids_1T, use_cache=False, logits_to_keep=len(response_ids) + 1).logits[0]
    logits_RV = logits_TV[-len(response_ids) - 1 : -1] if prompt_ids else logits_TV[[0, *range(len(response_ids) - 1)]]
    if not logits_RV.amax(-1).isfinite().all():
        raise RunError(f"{model.name_or_path}: gives logits that are NaN or infinite on an answer; try --dtype float32")
    vocabulary = logits_RV.shape[-1]
    found = []
    for logits_CV in logits_RV.split(max(1, _CHUNK_VALUES // vocabulary)):
        top = logits_CV.double().log_softmax(-1).topk(min(k, vocabulary), dim=-1)
        tail_C = (1 - top.values.exp().sum(-1)).clamp_min(0)
        found.append((top.indices.cpu().numpy(), top.values.cpu().numpy(), tail_C.cpu().numpy()))
    ids_RK, logprobs_RK, tail_R = (np.concatenate(each) for each in zip(*found, strict=True))
    return pack(ids_RK, logprobs_RK, tail_R, vocabulary)
