"""What `align` finds out before it chooses options."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import torch
from transformers import PreTrainedModel

from draftsmith.alignment.config import AlignConfig
from draftsmith.alignment.engines import support_of
from draftsmith.core.devices import resolve_device
from draftsmith.core.models import (
    of_all_layers,
    parameter_count,
    read_per_token,
    text_config,
    vocabulary_size,
)
from draftsmith.core.prompt_rows import iterate_rows, parse_named
from draftsmith.core.prompts import PromptSet, room_for_prompts
from draftsmith.core.ranks import groups
from draftsmith.core.settings import ResolvedSampling, loading, resolve_sampling, tokenizing
from draftsmith.core.tokenization import load_tokenizer
from draftsmith.decode.recorded.steps import check_backend
from draftsmith.distill.own_prompts import user_opening
from draftsmith.drafts.draft_vocabulary import (
    VocabularySize,
    check_draft_vocabulary,
    draft_vocabulary,
    fastest_size,
)
from draftsmith.drafts.engine_commands import Support
from draftsmith.drafts.load import LoadedModels, load_models
from draftsmith.eval.other_templates import read_set


@dataclass(frozen=True)
class Facts:
    """What the choices depend on.

    rows: "chat", "prompt", "text" or "ids". own_chats: whether the target can write chats by
    itself, user turns included. prompts: number of usable prompts; different: of those that ask
    different things, 0 if all do. longest_prompt, context: in tokens; the context is the shortest
    of all models, None if unknown. gpu_bytes: memory of the GPU, 0 without one. cache_bytes: of the
    target's keys and values for one token. fresh_head: whether there is no draft to start from.
    target_read: parameters of the target that a token reads. projection_share, layer_share: the
    share of them in the output projection and in one layer. support: by kind of draft, what each
    engine does with it. drafted: the draft vocabulary of a fresh EAGLE-3 head, if it is not given.
    """

    rows: str
    own_chats: bool
    prompts: int
    longest_prompt: int
    context: int | None
    on_gpu: bool
    gpu_bytes: int
    cache_bytes: int
    processes: int
    target_parameters: int
    target_read: int
    draft_parameters: int
    sampling: ResolvedSampling
    different: int = 0
    fresh_head: bool = False
    vocabulary: int = 0
    projection_share: float = 0.0
    layer_share: float = 0.0
    support: Mapping[str, Sequence[Support]] = field(default_factory=dict)
    drafted: VocabularySize | None = None


def load(config: AlignConfig) -> LoadedModels:
    """Load target and draft; refuse a draft vocabulary that the draft cannot take."""
    models = load_models(
        config.target,
        [config.draft] if config.draft else [],
        tokenizer=load_tokenizer(config.target, **tokenizing(config)),
        **loading(config),
    )
    size = config.train.draft_vocab_size
    for draft in models.drafts.values():
        if isinstance(draft, PreTrainedModel) and size is not None:
            whole = min(vocabulary_size(draft), vocabulary_size(models.target))
            owner = None if draft_vocabulary(draft) is None else config.draft
            check_draft_vocabulary("train.draft_vocab_size", size, whole, owner)
    return models


def look(config: AlignConfig, models: LoadedModels) -> tuple[Facts, PromptSet]:
    """Read all prompts, so that what does not fit is refused before hours of work."""
    target = models.target
    draft = next(iter(models.drafts.values()), None)
    device = resolve_device(config.device)
    check_backend(config.eval.compile, device)
    on_gpu = device.type == "cuda"
    most = config.distill.max_prompts or (20_000 if on_gpu else 1024)
    if not config.id:
        most += config.heldout_prompts or 64
    prompts = _read(config, models, config.prompts, "distill", most)
    for source in parse_named("ood", [*config.id, *config.ood]).values():
        _read(config, models, source, "eval", 1000)
    rows = _row_kind(next(iterate_rows(config.prompts)))
    ids = [prompt.ids for prompt in prompts.prompts]
    read = read_per_token(target)
    vocabulary = vocabulary_size(target)
    text = text_config(target)
    projection = text.hidden_size * vocabulary
    # A fresh EAGLE head is one decoder layer and a projection: about 14 times the square of the
    # hidden size.
    size = 14 * text.hidden_size**2 if draft is None else parameter_count(draft)
    drafted = None
    # A draft vocabulary is left to choose: that of a fresh EAGLE-3 head.
    if draft is None and config.kind in (None, "eagle3") and config.train.draft_vocab_size is None:
        drafted = fastest_size(target, ids, layers=size / read, projection=projection / read)
    asked = {"temperature": config.distill.temperature}
    facts = Facts(
        rows=rows,
        own_chats=rows == "chat" and bool(user_opening(models.tokenizer, config.prompts).ids),
        prompts=len(ids),
        different=len({prompt.asked for prompt in prompts.prompts}),
        longest_prompt=max(map(len, ids)),
        context=models.context,
        on_gpu=on_gpu,
        gpu_bytes=torch.cuda.get_device_properties(device).total_memory if on_gpu else 0,
        cache_bytes=_cache_bytes(target),
        processes=groups(),
        target_parameters=parameter_count(target),
        target_read=read,
        draft_parameters=size,
        sampling=resolve_sampling(config.target, target, asked, default_temperature=1.0),
        fresh_head=draft is None,
        vocabulary=vocabulary,
        projection_share=projection / read,
        layer_share=(read - projection) / text.num_hidden_layers / read,
        support=support_of(config, models),
        drafted=drafted,
    )
    return facts, prompts


def _cache_bytes(target: PreTrainedModel) -> int:
    """Bytes of a token's keys and values, as if all layers were alike; of states as wide as the
    model's where its config does not say.
    """
    config = text_config(target)
    heads = of_all_layers(config, "num_attention_heads") or 1
    groups = of_all_layers(config, "num_key_value_heads") or heads
    size = of_all_layers(config, "head_dim") or config.hidden_size // heads
    return int(2 * config.num_hidden_layers * groups * size * target.dtype.itemsize)


def _row_kind(row: Mapping[str, object]) -> str:
    if row.get("messages") is not None:
        return "chat"
    return next((kind for kind in ("prompt", "text") if row.get(kind) is not None), "ids")


def _read(
    config: AlignConfig, models: LoadedModels, source: str, stage: str, limit: int
) -> PromptSet:
    """Read the prompts that leave room for the new tokens of a stage."""
    new_tokens = getattr(config, stage).max_new_tokens or 1
    room = room_for_prompts(models.context, new_tokens, f"{stage}.max_new_tokens")
    return read_set(
        source,
        models.tokenizer,
        prompt_tokens=config.prompt_tokens,
        max_tokens=room,
        limit=limit,
    )
