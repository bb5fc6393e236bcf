"""Speculative decoding inside transformers: `model.generate(..., custom_generate=speculative(proposer))`.

Everything else of `generate` stays as it is: generation configs, `max_new_tokens`, EOS, padded batches,
`num_return_sequences`, `return_dict_in_generate`. What changes the distribution of a token beyond temperature, top-k,
top-p and min-p is refused: acceptance is only correct for the distribution that is sampled from.
"""

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor
from transformers import GenerationConfig, PreTrainedModel
from transformers.generation.logits_process import (
    LogitsProcessorList,
    MinPLogitsWarper,
    TemperatureLogitsWarper,
    TopKLogitsWarper,
    TopPLogitsWarper,
)
from transformers.generation.stopping_criteria import EosTokenCriteria, MaxLengthCriteria, StoppingCriteriaList
from transformers.generation.utils import GenerateDecoderOnlyOutput

from decode.batch_run import StopCondition
from decode.engine import SpeculativeDecoder
from decode.propose.protocol import Proposer
from decode.tree import TreeShape
from decode.verify import Verifier
from draftsmith_core.sampling import Sampling, generator

_WARPERS = (TemperatureLogitsWarper, TopKLogitsWarper, TopPLogitsWarper, MinPLogitsWarper)
# What `generate` itself adds to a model's arguments. The decoder would ignore any other.
_MODEL_ARGUMENTS = frozenset({"attention_mask", "position_ids", "past_key_values", "use_cache", "logits_to_keep"})
_UNSUPPORTED = (
    *("output_scores", "output_logits", "output_attentions", "output_hidden_states"),
    *("penalty_alpha", "prompt_lookup_num_tokens", "dola_layers"),
)


def speculative(
    proposer: Proposer | None,
    tree: str | TreeShape | None = None,
    verifier: str | Verifier | None = None,
    *,
    stop: StopCondition | None = None,
) -> Callable[..., Tensor | GenerateDecoderOnlyOutput]:
    """Return a function for the `custom_generate` argument of `model.generate`, from `SpeculativeDecoder`'s arguments.

    The target is the model on which `generate` is called. Randomness comes from torch's global generator, as in
    `generate` itself. A `streamer` and the `tokenizer` for `stop_strings` never reach a `custom_generate` function:
    pass `stop=StopStrings(tokenizer, strings)` here, and stream with `on_tokens` of `SpeculativeDecoder.generate`.
    The function raises ValueError for settings that it cannot honour exactly.
    """
    decoders: list[SpeculativeDecoder] = []

    def generate(
        model: PreTrainedModel,
        input_ids: Tensor,
        logits_processor: LogitsProcessorList,
        stopping_criteria: StoppingCriteriaList,
        generation_config: GenerationConfig,
        # Named here, a model's own argument would be handed over twice.
        **model_kwargs: Any,
    ) -> Tensor | GenerateDecoderOnlyOutput:
        _check(logits_processor, stopping_criteria, generation_config, model_kwargs)
        if not decoders or decoders[0].target is not model:
            decoders[:] = [SpeculativeDecoder(model, proposer, tree, verifier)]
        batch = decoders[0].generate(
            _prompts(input_ids, model_kwargs.get("attention_mask"), model_kwargs.get("position_ids")),
            _sampling(generation_config),
            int(generation_config.max_length) - input_ids.shape[1],
            [generator(int(seed)) for seed in torch.randint(2**62, (len(input_ids),))],
            _eos(stopping_criteria),
            stop=stop,
        )
        outputs = [generation.output_ids for generation in batch.generations]
        sequences = torch.cat([input_ids, _padded(outputs, generation_config, input_ids.device)], dim=1)
        if generation_config.return_dict_in_generate:
            return GenerateDecoderOnlyOutput(sequences=sequences)  # type: ignore[arg-type]
        return sequences

    return generate


def _check(
    processors: LogitsProcessorList,
    criteria: StoppingCriteriaList,
    config: GenerationConfig,
    model_kwargs: dict[str, Any],
) -> None:
    ignored = [type(warper).__name__ for warper in processors if not isinstance(warper, _WARPERS)]
    known = MaxLengthCriteria | EosTokenCriteria
    ignored += [type(criterion).__name__ for criterion in criteria if not isinstance(criterion, known)]
    ignored += [name for name in _UNSUPPORTED if getattr(config, name, None)]
    ignored += ["num_beams"] if (config.num_beams or 1) > 1 else []
    ignored += [name for name, value in model_kwargs.items() if value is not None and name not in _MODEL_ARGUMENTS]
    cache = model_kwargs.get("past_key_values")
    ignored += ["past_key_values"] if cache is not None and cache.get_seq_length() else []
    if ignored:
        raise ValueError(
            f"speculative decoding cannot honour {', '.join(ignored)}; leave it out, or call generate without "
            f"custom_generate"
        )


def _prompts(input_ids: Tensor, mask: Tensor | None, positions: Tensor | None) -> list[list[int]]:
    """The rows without their padding. ValueError for a mask or positions that say more than where the padding is."""
    seen = torch.ones_like(input_ids, dtype=torch.bool) if mask is None else mask.to(input_ids.device).bool()
    counted = seen.long().cumsum(1) - 1
    shown = counted if positions is None else positions.to(counted.device)
    if seen.shape != input_ids.shape or shown.dim() != 2 or not bool(((shown == counted) | ~seen).all()):
        raise ValueError(
            "speculative decoding counts positions itself: attention_mask may only mark padding; leave out position_ids"
        )
    return [row[real].tolist() for row, real in zip(input_ids, seen, strict=True)]


def _sampling(config: GenerationConfig) -> Sampling:
    if not config.do_sample:
        return Sampling(temperature=0.0)
    return Sampling(
        temperature=1.0 if config.temperature is None else config.temperature,
        top_k=config.top_k or 0,
        top_p=1.0 if config.top_p is None else config.top_p,
        min_p=config.min_p or 0.0,
    )


def _eos(criteria: StoppingCriteriaList) -> list[int]:
    ends = [criterion for criterion in criteria if isinstance(criterion, EosTokenCriteria)]
    return [int(token) for criterion in ends for token in criterion.eos_token_id]


def _padded(outputs: Sequence[Sequence[int]], config: GenerationConfig, device: torch.device) -> Tensor:
    longest = max(map(len, outputs))
    padding = config.pad_token_id
    if padding is None:
        eos = config.eos_token_id
        padding = eos if isinstance(eos, int) else (eos or [0])[0]
    return torch.tensor([[*ids, *[padding] * (longest - len(ids))] for ids in outputs], device=device)
