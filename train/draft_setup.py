"""The draft of a run: made from its options, put into a trainee, written as a checkpoint of its kind."""

import logging
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from transformers import AutoConfig, AutoModelForCausalLM, PretrainedConfig, PreTrainedModel
from transformers.pytorch_utils import Conv1D

from drafts.draft_vocabulary import (
    attach_draft_vocabulary,
    check_draft_vocabulary,
    count_vocabulary,
    coverage,
    draft_vocabulary,
    read_draft_vocabulary,
    write_draft_vocabulary,
)
from drafts.heads import HEADS, Head, load_head, write_head
from drafts.heads.eagle3 import Eagle3Head
from drafts.load import Draft, draft_kind
from drafts.make.shape import filled, read_per_token, too_costly
from draftsmith_core.errors import InputError, first_line
from draftsmith_core.io import atomic_dir, make_dir, read_json
from draftsmith_core.models import check_finite, fingerprint, load_model, vocabulary_size
from draftsmith_core.packages import require_package
from draftsmith_core.processes import say
from train import onpolicy, parallel
from train.config import Lora, TrainConfig
from train.data import Examples
from train.features import FeatureCache, StateMemory, cached_layers
from train.objective import Objective
from train.onpolicy import Answerer
from train.parallel import World
from train.trainees import TRAINEES

# Options of a fresh head only; a trained one has them in its config.
_SHAPE_OPTIONS = ("num_heads", "num_layers", "draft_vocab_size")
# Options of a head that are arguments of its trainee.
_TRAINEE_OPTIONS = ("noise", "test_steps", "step_decay")
_CACHE_GIB = 16.0
# Limit of the hidden states that are kept in memory, in each process.
_MEMORY_BYTES = 2 * 2**30
log = logging.getLogger(__name__)


def build(config: TrainConfig, target: PreTrainedModel | None, training: Examples) -> Draft:
    """The draft to train, fp32 on the CPU: loaded from `draft`, or fresh. InputError, one line, when it cannot be."""
    if config.kind == "lm":
        return _with_draft_vocabulary(config, _build_lm(config, target), target, training)
    assert target is not None
    head = _fresh_head(config, target, training) if config.draft is None else _loaded_head(config, target)
    return head.to(device="cpu", dtype=torch.float32)


def _build_lm(config: TrainConfig, target: PreTrainedModel | None) -> PreTrainedModel:
    shape = None if config.draft_config is None else read_shape(config.draft_config)
    if config.draft is None:
        assert shape is not None and config.draft_config is not None
        model = AutoModelForCausalLM.from_config(_filled_shape(config, shape, target), dtype=torch.float32)
        assert isinstance(model, PreTrainedModel)
        if target is not None and (warning := too_costly(read_per_token(model), read_per_token(target))):
            log.warning("%s: %s", config.draft_config, warning)
        return model
    kind = draft_kind(config.draft)
    if kind != "draft":
        raise InputError(f"{config.draft}: is a head of kind {kind} and not a language model; set kind to {kind}")
    model = load_model(config.draft, device="cpu", dtype="float32", trust_remote_code=config.trust_remote_code)
    for key in ("model_type", "hidden_size", "num_hidden_layers", "intermediate_size", "vocab_size"):
        has, wanted = getattr(model.config, key, None), getattr(shape, key, None)
        if shape is not None and has != wanted:
            raise InputError(f"{config.draft}: its {key} is {has}, {config.draft_config} says {wanted}")
    return model


def _filled_shape(config: TrainConfig, shape: PretrainedConfig, target: PreTrainedModel | None) -> PretrainedConfig:
    """The shape in `draft_config`; what the file leaves open is the target's, with a warning."""
    assert config.draft_config is not None
    values = read_json(Path(config.draft_config), "a Hugging Face config.json")
    if target is not None:
        theirs: PretrainedConfig = target.config
    elif config.target is not None:
        theirs = AutoConfig.from_pretrained(config.target, trust_remote_code=config.trust_remote_code)
    elif "vocab_size" not in values:
        raise InputError(f"{config.draft_config}: key 'vocab_size' is missing; add it, or name a --target")
    else:
        return shape
    values, taken = filled(values, theirs)
    if not taken:
        return shape
    shown = ", ".join(f"{key} {value}" for key, value in taken.items())
    log.warning("%s: takes from the target: %s", config.draft_config, shown)
    return AutoConfig.for_model(values.pop("model_type"), **values)


def read_shape(path: str) -> PretrainedConfig:
    """Read a model shape from a Hugging Face config.json; InputError names the file."""
    values = dict(read_json(Path(path), "a Hugging Face config.json"))
    try:
        return AutoConfig.for_model(values.pop("model_type"), **values)
    except Exception as error:
        # Configuration classes validate themselves with errors of several types, some of many lines.
        raise InputError(f"{path}: not a model that transformers can build ({first_line(error)})") from None


def _fresh_head(config: TrainConfig, target: PreTrainedModel, training: Examples) -> Head:
    match config.kind:
        case "eagle":
            return HEADS["eagle"].fresh(target, seed=config.seed)  # type: ignore[call-arg]
        case "eagle3":
            whole = vocabulary_size(target)
            return Eagle3Head.fresh(target, draft_vocab=_draft_vocab(config, whole, training), seed=config.seed)
    return HEADS[config.kind].fresh(target, **_given(config, ("num_heads", "num_layers")))


def _given(config: TrainConfig, keys: Sequence[str]) -> dict[str, Any]:
    """Those of these options of a head that are set; the others have their defaults in the head or its trainee."""
    return {key: value for key in keys if (value := getattr(config.head, key)) is not None}


def _with_draft_vocabulary(
    config: TrainConfig, model: PreTrainedModel, target: PreTrainedModel | None, training: Examples
) -> PreTrainedModel:
    """The language model with the draft vocabulary that it has on disk, or that is asked for; else as it is."""
    # Either vocabulary may be padded, and a token of the draft's padding is none of the target's.
    whole = min(vocabulary_size(each) for each in (model, target) if each is not None)
    known = None if config.draft is None else read_draft_vocabulary(config.draft, whole)
    if known is not None and config.head.draft_vocab_size is not None:
        check_draft_vocabulary("head.draft_vocab_size", config.head.draft_vocab_size, whole, config.draft)
    ids = _draft_vocab(config, whole, training) if known is None else known
    if ids is not None:
        attach_draft_vocabulary(model, torch.as_tensor(ids))
    return model


def _draft_vocab(config: TrainConfig, whole: int, training: Examples) -> list[int] | None:
    """The commonest tokens of the responses, as many as asked for; None for the whole vocabulary."""
    size = config.head.draft_vocab_size
    if size is None or size == whole:
        return None
    check_draft_vocabulary("head.draft_vocab_size", size, whole)
    return count_vocabulary(_responses(training), size)


def announce_draft_vocabulary(draft: Draft, training: Examples) -> None:
    """Print how much of the responses a draft of a part of the vocabulary can draft."""
    if isinstance(draft, PreTrainedModel):
        ids_D, whole = draft_vocabulary(draft), vocabulary_size(draft)
    else:
        ids_D = draft.target_ids_D if isinstance(draft, Eagle3Head) and draft.reduced else None
        whole = draft.vocab_size
    if ids_D is not None:
        say(
            f"train: drafts {len(ids_D):,} of {whole:,} tokens; of the responses "
            f"{coverage(ids_D, _responses(training))}; what the target gives to others is heldout_missing_mass"
        )


def _responses(training: Examples) -> Iterator[list[int]]:
    for batch in training.rows.select_columns(["response_ids"]).iter(batch_size=1024):
        yield from batch["response_ids"]


def _loaded_head(config: TrainConfig, target: PreTrainedModel) -> Head:
    assert config.draft is not None
    kind = "lm" if (kind := draft_kind(config.draft)) == "draft" else kind
    if kind != config.kind:
        raise InputError(f"{config.draft}: is of kind {kind}, not {config.kind}; set kind to {kind}")
    for key in _SHAPE_OPTIONS:
        if getattr(config.head, key) is not None:
            raise InputError(f"head.{key}: is for a fresh head; the one in {config.draft} has its own")
    head = load_head(config.draft, target)
    check_finite(config.draft, head)
    return head


def attach_lora(draft: Draft, options: Lora) -> Any:
    """Put LoRA adapters (Hu et al. 2021, arXiv 2106.09685) into the linear layers of a language model, in place, and
    freeze all else; return peft's handle. The adapters change nothing until they are trained.
    """
    require_package("peft", "lora.rank")
    import peft

    assert isinstance(draft, PreTrainedModel)
    # peft skips a name that fits nothing as long as another one fits.
    names = [name for name, _ in draft.named_modules()]
    for target in options.targets:
        if not any(f".{name}".endswith(f".{target}") for name in names):
            linear = (name for name, module in draft.named_modules() if isinstance(module, nn.Linear | Conv1D))
            known = ", ".join(dict.fromkeys(name.rpartition(".")[2] for name in linear))
            raise InputError(f"lora.targets: no layer of {draft.name_or_path} is named {target!r}; it has {known}")
    alpha: Any = 2 * options.rank if options.alpha is None else options.alpha
    adapters = peft.LoraConfig(
        r=options.rank,
        lora_alpha=alpha,
        lora_dropout=options.dropout,
        target_modules=options.targets or "all-linear",
        task_type="CAUSAL_LM",
    )
    adapted = peft.get_peft_model(draft, adapters)
    if any(parameter.requires_grad for parameter in draft.get_output_embeddings().parameters()):
        raise InputError("lora.targets: names the output projection, which is not trained with LoRA; leave it out")
    return adapted


def merge_lora(adapted: Any, directory: Path) -> PreTrainedModel:
    """Write the adapters in peft's format as `directory`, fold them into the weights, and return the plain draft."""
    with atomic_dir(directory) as temporary:
        adapted.save_pretrained(temporary)
        (temporary / "README.md").unlink(missing_ok=True)  # peft's card has gaps; the draft's own has everything
    merged: PreTrainedModel = adapted.merge_and_unload()
    return merged


def make_trainee(
    config: TrainConfig,
    objective: Objective,
    world: World,
    draft: Draft,
    frozen: Mapping[str, PreTrainedModel],
    memory: StateMemory | None,
) -> nn.Module:
    """The trainee of this kind of draft, on this process's device, set up as the options say.

    memory: of the frozen models of a language model; `state_memory` says which.
    """
    target, anchor = frozen.get("target"), frozen.get("anchor")
    draft.to(world.device)  # type: ignore[arg-type]
    if not isinstance(draft, PreTrainedModel):
        assert target is not None
        given = _given(config, _TRAINEE_OPTIONS)
        cache = _feature_cache(config, world, draft.hidden_layers, target)
        return TRAINEES[config.kind](draft, objective, target, config.packing, cache, **given)
    near = None if anchor is None else (anchor, config.anchor_kl)
    cache = None if target is None else _feature_cache(config, world, (-1,), target)
    trainee = TRAINEES["lm"](
        draft, objective, target, frozen.get("reference"), config.packing, anchor=near, cache=cache, memory=memory
    )
    if config.gradient_checkpointing:
        draft.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
    if config.compile:
        parallel.compile_layers(draft)
    return trainee


def make_answerer(config: TrainConfig, world: World, draft: Draft, target: PreTrainedModel | None) -> Answerer | None:
    """What generates with the draft if training is on-policy, else None."""
    if config.on_policy.fraction == 0:
        return None
    assert isinstance(draft, PreTrainedModel) and target is not None
    if world.sharing in ("zero3", "fsdp"):
        raise InputError(f"on_policy: needs whole weights, and {world.sharing} shards them; use ddp.yaml or zero2.yaml")
    return onpolicy.make_answerer(draft, config.on_policy, config.max_length, config.seed, vocabulary_size(target))


def state_memory(
    config: TrainConfig,
    objective: Objective,
    world: World,
    frozen: Mapping[str, PreTrainedModel],
    training: Examples,
    heldout: Examples,
    steps: int,
) -> StateMemory | None:
    """Return the memory that holds the states of frozen models between epochs and evaluations; None if there is none.

    On a CPU only: documents run one at a time, which would leave another device idle. Training data is held if it comes
    back and is read: not in a single epoch, nor answers that the draft generates; held-out data always comes back.
    """
    held = [name for name in frozen if name != "target" or config.head.features is None]
    if config.kind != "lm" or not held or world.device.type != "cpu":
        return None
    drawn = steps * config.batch_size * config.accumulation * world.size * (1 - config.replay_fraction)
    epochs = drawn / (training.replay_from or len(training))
    read = objective.needs_target or list(frozen) != ["target"]
    return StateMemory(_MEMORY_BYTES, epochs > 1 and read and config.on_policy.fraction == 0)


def _feature_cache(
    config: TrainConfig, world: World, layers: Sequence[int], target: PreTrainedModel
) -> FeatureCache | None:
    if config.head.features is None:
        return None
    make_dir(Path(config.head.features), "head.features")
    return FeatureCache(
        config.head.features,
        fingerprint(target),
        cached_layers(layers),
        target.dtype,
        int((config.head.features_gib or _CACHE_GIB) * 2**30),
        world.accelerator.process_index,
        world.size,
    )


def load_state(draft: Draft, weights: dict[str, Tensor]) -> None:
    """Load weights that a run has saved into a draft that `build` made."""
    parallel.load_weights(draft, weights)
    if isinstance(draft, Eagle3Head):
        draft.read_draft_vocab()


def write(draft: Draft, directory: Path) -> None:
    """The draft's own files, into a directory that exists."""
    if isinstance(draft, PreTrainedModel):
        draft.save_pretrained(directory)
        if (ids_D := draft_vocabulary(draft)) is not None:
            write_draft_vocabulary(directory, ids_D)
    else:
        write_head(draft, directory)
