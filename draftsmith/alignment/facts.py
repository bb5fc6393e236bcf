"""What `align` finds out, with one load of the models, before it chooses options."""

from dataclasses import dataclass
from typing import TypeVar

import torch
from transformers import PreTrainedModel

from draftsmith.alignment.config import AlignConfig
from draftsmith.alignment.prompt_split import Split, hold_out
from draftsmith.core.devices import resolve_device
from draftsmith.core.models import (
    of_all_layers,
    parameter_count,
    read_per_token,
    text_config,
    vocabulary_size,
)
from draftsmith.core.prompt_rows import parse_named
from draftsmith.core.prompts import PromptSet, room_for_prompts
from draftsmith.core.settings import loading, resolve_sampling, tokenizing
from draftsmith.core.template_date import fix_date
from draftsmith.core.tokenization import load_tokenizer
from draftsmith.distill.own_prompts import user_opening
from draftsmith.drafts.draft_vocabulary import VocabularySize, fastest_size
from draftsmith.drafts.load import LoadedModels, load_models
from draftsmith.eval.other_templates import read_set

T = TypeVar("T")


@dataclass(frozen=True)
class Facts:
    """What the choices depend on.

    chats: whether the prompts are chats. own_chats: whether the target can write chats by itself,
    user turns included. split: the prompts to train on and those to hold out, unless --id names
    others. prompts: those to train on that fit. longest_prompt, context: in tokens; the context is
    the shortest of all models, None if unknown. gpu_bytes: memory of the GPU, 0 without one.
    cache_bytes: keys and values of a token. draft_parameters: how many.
    temperature: the target's own. date: what the chat template prints, if it prints one. drafted:
    the draft vocabulary of a fresh EAGLE-3 head.
    """

    chats: bool
    own_chats: bool
    split: Split
    prompts: int
    longest_prompt: int
    context: int | None
    gpu_bytes: int
    cache_bytes: int
    draft_parameters: int
    temperature: float
    date: str | None = None
    drafted: VocabularySize | None = None

    def by_device(self, on_gpu: T, on_cpu: T) -> T:
        """Return one value on a GPU and another on a CPU."""
        return on_gpu if self.gpu_bytes else on_cpu


def look(config: AlignConfig) -> tuple[Facts, PromptSet]:
    """Load the models once and read all prompts, so that what does not fit is refused now."""
    tokenizer = load_tokenizer(config.target, **tokenizing(config))
    drafts = [config.draft] if config.draft else []
    models = load_models(config.target, drafts, tokenizer=tokenizer, **loading(config))
    target = models.target
    draft = next(iter(models.drafts.values()), None)
    date = fix_date(tokenizer, config.date)
    device = resolve_device(config.device)
    gpu_bytes = 0
    if device.type == "cuda":
        gpu_bytes = torch.cuda.get_device_properties(device).total_memory
    most = config.distill.get("max_prompts") or (20_000 if gpu_bytes else 1024)
    measured = config.eval.get("max_prompts") or (64 if gpu_bytes else 40)
    prompts = _read(config, models, config.prompts, "distill", most + measured)
    split = {} if config.id else hold_out(config.prompts, prompts, measured)
    for source in parse_named("ood", [*config.id, *config.ood]).values():
        _read(config, models, source, "eval", 1000)
    chats = prompts.prompts[0].chat is not None
    ids = [prompt.ids for prompt in prompts.prompts]
    text = text_config(target)
    # A fresh EAGLE head is one decoder layer and a projection: about 14 times the square of the
    # hidden size.
    size = 14 * text.hidden_size**2 if draft is None else parameter_count(draft)
    drafted = None
    if draft is None and config.kind in (None, "eagle3"):
        read = read_per_token(target)
        projection = text.hidden_size * vocabulary_size(target)
        drafted = fastest_size(target, ids, layers=size / read, projection=projection / read)
    sampling = resolve_sampling(config.target, target, config.distill, default_temperature=1.0)
    facts = Facts(
        chats=chats,
        own_chats=chats and bool(user_opening(tokenizer, config.prompts).ids),
        split=split,
        prompts=len(split.get("train", ids)),
        longest_prompt=max(map(len, ids)),
        context=models.context,
        gpu_bytes=gpu_bytes,
        cache_bytes=_cache_bytes(target),
        draft_parameters=size,
        temperature=sampling.sampling.temperature,
        date=date,
        drafted=drafted,
    )
    return facts, prompts


def _cache_bytes(target: PreTrainedModel) -> int:
    """Bytes of a token's keys and values, about: as if all layers were alike, and heads together as
    wide as the model.
    """
    config = text_config(target)
    heads = of_all_layers(config, "num_attention_heads") or 1
    groups = of_all_layers(config, "num_key_value_heads") or heads
    width = config.hidden_size * groups // heads
    return int(2 * config.num_hidden_layers * width * target.dtype.itemsize)


def _read(
    config: AlignConfig, models: LoadedModels, source: str, stage: str, limit: int
) -> PromptSet:
    """Read the prompts that leave room for the new tokens of a stage."""
    new_tokens = getattr(config, stage).get("max_new_tokens", 1)
    room = room_for_prompts(models.context, new_tokens, f"{stage}.max_new_tokens")
    return read_set(
        source,
        models.tokenizer,
        prompt_tokens=config.prompt_tokens,
        max_tokens=room,
        limit=limit,
    )
