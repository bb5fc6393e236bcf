"""The exact law of a tiny model's continuations."""

import itertools
from collections.abc import Sequence

import torch
from torch import Tensor
from transformers import PreTrainedModel

from draftsmith.core.sampling import Sampling, probs
from draftsmith.decode.lossless import chi_square as chi_square


@torch.inference_mode()
def exact_distribution(
    model: PreTrainedModel, prompt: Sequence[int], length: int, sampling: Sampling
) -> Tensor:
    """Probability of every continuation of the prompt, `[V ** length]`, from teacher-forced
    forwards.
    """
    sequences = torch.tensor(list(itertools.product(range(model.config.vocab_size), repeat=length)))
    inputs = torch.cat([torch.tensor(prompt).expand(len(sequences), -1), sequences], dim=1)
    logits = model(input_ids=inputs).logits[:, len(prompt) - 1 : -1]
    return probs(logits, sampling).gather(2, sequences.unsqueeze(-1)).squeeze(-1).double().prod(1)


def counts_of(outputs: Sequence[Sequence[int]], vocabulary: int) -> Tensor:
    """How often each output of equal length came, in the order of `exact_distribution`."""
    ids = torch.tensor(outputs)
    length = ids.shape[1]
    code = (ids * vocabulary ** torch.arange(length - 1, -1, -1)).sum(1)
    return torch.bincount(code, minlength=vocabulary**length)
