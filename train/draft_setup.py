"""The draft of a run: made from its options, put into a trainee, written as a checkpoint of its
kind.
"""

import logging
from collections.abc import Sequence
from pathlib import Path
from typing import Any, cast

import torch
from torch import Tensor, nn
from transformers import (
    AttentionInterface,
    AutoConfig,
    AutoModelForCausalLM,
    PretrainedConfig,
    PreTrainedModel,
)

from draftsmith.core.errors import InputError, first_line
from draftsmith.core.io import kept_json, make_dir, read_json
from draftsmith.core.large_target import is_divided
from draftsmith.core.models import (
    check_finite,
    load_model,
    read_per_token,
    vocabulary_size,
)
from draftsmith.core.ranks import groups, with_target
from draftsmith.core.records import RECORD
from draftsmith.core.state_store import (
    StateFiles,
    StateMemory,
    StateStore,
    StoredStates,
    cached_layers,
    checkpoint_digest,
)
from draftsmith.drafts.config import BLOCK_KINDS
from draftsmith.drafts.draft_vocabulary import (
    DraftVocabulary,
    attach_draft_vocabulary,
    check_draft_vocabulary,
    commonest_tokens,
    draft_vocabulary,
    likely_tokens,
    rarest_token,
    read_draft_vocabulary,
    write_draft_vocabulary,
)
from draftsmith.drafts.heads import HEADS, head_kind, load_head, write_head
from draftsmith.drafts.heads.borrowed import borrow
from draftsmith.drafts.heads.feature_head import FeatureHead
from draftsmith.drafts.heads.medusa import ResBlock
from draftsmith.drafts.heads.unrolled_attention import UNROLLED, attention
from draftsmith.drafts.load import Draft
from draftsmith.drafts.make.size import filled, too_costly
from draftsmith.train import parallel
from draftsmith.train.config import VOCABULARY_KINDS, TrainConfig
from draftsmith.train.data import Examples
from draftsmith.train.job import TrainingJob
from draftsmith.train.states_ahead import StatesAhead
from draftsmith.train.trainee import Trainee
from draftsmith.train.trainees import TRAINEES

_SHAPE = ("model_type", "hidden_size", "num_hidden_layers", "intermediate_size", "vocab_size")
_OF_FRESH_HEADS = ("num_heads", "num_layers", "norms", "block_size", "target_layers", "window")
_OF_TRAINEES = ("noise", "test_steps", "step_decay", "anchors")
_CACHE_GIB = 16.0
# Limit of the hidden states that are kept in memory, in each process.
_MEMORY_BYTES = 2 * 2**30
log = logging.getLogger(__name__)


def is_untrained(draft: str | None) -> bool:
    """Whether the draft that a run begins with was never trained: fresh, or as `init` made it."""
    if draft is None:
        return True
    record = Path(draft) / RECORD
    return record.is_file() and "made" in read_json(record, "the record of a draft")


def build(
    config: TrainConfig,
    target: PreTrainedModel | None,
    training: Examples,
    chosen: Sequence[int] | None = None,
) -> Draft:
    """Make the draft to train, fp32 on the CPU: loaded from `draft`, or fresh.

    chosen: the tokens that it drafts, if this run has chosen them before.
    """
    if config.draft is not None:
        kind = head_kind(config.draft) or "lm"
        if kind != config.kind:
            raise InputError(
                f"{config.draft}: is of kind {kind}, not {config.kind}; set kind to {kind}"
            )
    if config.kind == "lm":
        model = _build_lm(config, target)
        return _with_draft_vocabulary(config, model, target, training, chosen)
    assert target is not None
    options = _head_options(config, _OF_FRESH_HEADS)
    if config.draft is not None:
        for key in options:
            raise InputError(f"head.{key}: {config.draft} has its own; leave it out")
        head = load_head(config.draft, target)
        check_finite(config.draft, head)
    else:
        options = fresh_options(config)
        if config.kind in VOCABULARY_KINDS:
            whole = vocabulary_size(target)
            options["draft_vocab"] = chosen or _draft_vocab(config, whole, target, training)
        if config.kind in BLOCK_KINDS:
            options["mask_token_id"] = rarest_token(
                training.response_counts, borrow(target).embedding_weight
            )
        head = HEADS[config.kind].fresh(target, **options)
    return head.to(device="cpu", dtype=torch.float32)


def fresh_options(config: TrainConfig) -> dict[str, Any]:
    """The options that a fresh head is made with, beside its vocabulary."""
    options = _head_options(config, _OF_FRESH_HEADS)
    if config.kind not in ("medusa", "hydra"):
        options["seed"] = config.seed
    return options


def _head_options(config: TrainConfig, keys: Sequence[str]) -> dict[str, Any]:
    """Those options of a head that are not null; the others have their defaults in the head or its
    trainee.
    """
    options = {key: getattr(config.head, key) for key in keys}
    return {key: value for key, value in options.items() if value is not None}


def _build_lm(config: TrainConfig, target: PreTrainedModel | None) -> PreTrainedModel:
    if config.draft is None:
        assert config.draft_config is not None
        shape = read_shape(config.draft_config, None if target is None else target.config)
        model = AutoModelForCausalLM.from_config(shape, dtype=torch.float32)
        assert isinstance(model, PreTrainedModel)
        if target is not None and config.states is None:
            warning = too_costly(read_per_token(model), read_per_token(target))
            if warning:
                log.warning("%s: %s", config.draft_config, warning)
        return model
    model = load_model(
        config.draft, device="cpu", dtype="float32", trust_remote_code=config.trust_remote_code
    )
    given = model.config if config.draft_config is None else read_shape(config.draft_config)
    for key in _SHAPE:
        has = getattr(model.config, key, None)
        wanted = getattr(given, key, None)
        if has != wanted:
            raise InputError(
                f"{config.draft}: its {key} is {has}, {config.draft_config} says {wanted}"
            )
    return model


def read_shape(path: str, target: PretrainedConfig | None = None) -> PretrainedConfig:
    """Read a model shape from a Hugging Face config.json; what it leaves open is the target's, with
    a warning.
    """
    values = dict(read_json(Path(path), "a Hugging Face config.json"))
    if target is not None:
        values, taken = filled(values, target)
        if taken:
            shown = ", ".join(f"{key} {value}" for key, value in taken.items())
            log.warning("%s: takes from the target: %s", path, shown)
    elif "vocab_size" not in values:
        raise InputError(f"{path}: key 'vocab_size' is missing; add it, or name a --target")
    try:
        return AutoConfig.for_model(values.pop("model_type"), **values)
    except Exception as error:
        # Configuration classes validate themselves with errors of several types, some of many
        # lines.
        raise InputError(
            f"{path}: not a model that transformers can build ({first_line(error)})"
        ) from None


def _with_draft_vocabulary(
    config: TrainConfig,
    model: PreTrainedModel,
    target: PreTrainedModel | None,
    training: Examples,
    chosen: Sequence[int] | None,
) -> PreTrainedModel:
    """Attach the draft vocabulary that the language model has on disk, or that the options ask
    for.
    """
    # Either vocabulary may be padded, and a token of the draft's padding is none of the target's.
    whole = min(vocabulary_size(part) for part in (model, target) if part is not None)
    ids_D = None if config.draft is None else read_draft_vocabulary(config.draft, whole)
    if ids_D is None:
        ids = chosen or _draft_vocab(config, whole, target, training)
        ids_D = None if ids is None else torch.tensor(ids)
    elif config.draft_vocab_size is not None:
        check_draft_vocabulary("draft_vocab_size", config.draft_vocab_size, whole, config.draft)
    if ids_D is not None:
        attach_draft_vocabulary(model, ids_D)
    return model


def _draft_vocab(
    config: TrainConfig, whole: int, target: PreTrainedModel | None, training: Examples
) -> list[int] | None:
    """Return the most frequent tokens of the responses, and the likeliest others where these are
    few; None for the whole vocabulary.
    """
    size = config.draft_vocab_size
    if size is None or size == whole:
        return None
    check_draft_vocabulary("draft_vocab_size", size, whole)
    if target is None or config.states is not None:
        return commonest_tokens(training.response_counts, size)
    counts = training.response_counts
    return with_target(lambda: likely_tokens(counts, size, target, training.tokens(), whole))


def kept_tokens(file: Path) -> list[int] | None:
    """Return the tokens that an earlier process of a run chose to draft; None without any."""
    kept = kept_json(file, "the draft vocabulary of a run", ["tokens"])
    return None if kept is None else list(kept["tokens"])


def drafted_tokens(draft: Draft) -> list[int] | None:
    """Return the tokens that a draft of a part of the vocabulary drafts; None for all."""
    ids_D: Tensor | None = None
    if isinstance(draft, PreTrainedModel):
        ids_D = draft_vocabulary(draft)
    elif isinstance(draft, DraftVocabulary) and draft.reduced:
        ids_D = draft.target_ids_D
    return None if ids_D is None else ids_D.tolist()


def make_trainee(job: TrainingJob, draft: Draft) -> Trainee:
    """Put the draft into the trainee of its kind, on this process's device."""
    config = job.config
    device = job.world.device
    draft.to(device)  # type: ignore[arg-type]
    states: StateStore | None = None
    if job.target is not None:
        states = state_files(job, draft, job.target)
        # On a CPU only: documents run one at a time, which would leave another device idle.
        if states is None and device.type == "cpu" and isinstance(draft, PreTrainedModel):
            states = StateMemory(_MEMORY_BYTES, job.target.dtype, _reuses_states(job))
    given: dict[str, Any] = {"packing": config.packing, "states": states}
    if not isinstance(draft, PreTrainedModel):
        given |= _head_options(config, _OF_TRAINEES)
        if config.gradient_checkpointing:
            cast(FeatureHead, draft).gradient_checkpointing = True
    trainee = TRAINEES[config.kind](draft, job.objective, job.target, **given)
    if config.gradient_checkpointing and isinstance(draft, PreTrainedModel):
        draft.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
    if config.torch_compile:
        compile_layers(draft)
    return trainee


def compile_layers(draft: Draft) -> None:
    """Compile each layer of a draft, or residual block of Medusa and Hydra, for rows of any length.

    The attention of unrolled depths is left out: it would need a graph for each depth.
    """
    layers: Sequence[nn.Module] = [part for part in draft.modules() if isinstance(part, ResBlock)]
    if isinstance(draft, FeatureHead):
        layers = [draft.layer, *draft.deeper]
        AttentionInterface.register(UNROLLED, torch.compiler.disable(attention))
    layers = layers or parallel.repeated_layers(draft) or [draft]
    # Layers of one class share the limit. Each may need graphs with and without gradients, and of
    # two uses.
    torch._dynamo.config.recompile_limit = 8 * len(layers)
    for layer in layers:
        layer.compile(dynamic=True)


def _reuses_states(job: TrainingJob) -> bool:
    """Whether rows of the training data repeat and the objective reads the target's states."""
    drawn = job.steps * job.rows_per_step * (1 - job.config.replay_fraction)
    repeat = drawn > (job.training.replay_from or len(job.training))
    return repeat and job.objective.needs_target


def state_files(job: TrainingJob, draft: Draft, target: PreTrainedModel) -> StateFiles | None:
    """The target's states in files, as the options have them."""
    config = job.config
    options = config.head
    layers = (-1,) if isinstance(draft, PreTrainedModel) else cached_layers(draft.hidden_layers)
    if config.states_from:
        limit_gib = config.states_gib or _CACHE_GIB
        assert config.states is not None
        make_dir(Path(config.states), "states")
        return StatesAhead(job, layers, int(limit_gib * 2**30))
    if config.states is not None:
        states = StoredStates(config.states, target, job.identity["states"])
        for option, examples in (("data", job.training), ("heldout", job.heldout)):
            states.require(examples.tokens(), layers, config.max_length, option)
        return states
    if options.features is None:
        return None
    make_dir(Path(options.features), "head.features")
    limit_gib = options.features_gib or _CACHE_GIB
    assert config.target is not None
    digest = checkpoint_digest(config.target, config.revision)
    if is_divided(target):
        # Sums that are made in shares round otherwise.
        digest = f"{digest}/{config.target_parallel}"
    limit = int(limit_gib * 2**30)
    return StateFiles(options.features, digest, target.dtype, max_bytes=limit, processes=groups())


def write(draft: Draft, directory: Path) -> None:
    """The draft's own files, into a directory that exists."""
    if isinstance(draft, PreTrainedModel):
        draft.save_pretrained(directory)
        ids_D = draft_vocabulary(draft)
        if ids_D is not None:
            write_draft_vocabulary(directory, ids_D)
    else:
        write_head(draft, directory)
