"""A training run from its options to its checkpoint: load, check, fit, publish."""

import json
import logging
import math
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch
from accelerate import Accelerator
from accelerate.utils import InitProcessGroupKwargs
from transformers import AutoConfig, AutoModelForCausalLM, PretrainedConfig, PreTrainedModel

from draftsmith.errors import InputError, RunError
from draftsmith.io import hash_json, read_json
from draftsmith.models import (
    check_same_vocabulary,
    check_tokenizer,
    context_length,
    dtype_name,
    fingerprint,
    load_model,
    resolve_device,
    vocabulary_size,
)
from draftsmith.processes import check, on_main, process_group_options
from draftsmith.run import provenance
from draftsmith.sampling import row_seed
from draftsmith.text import Tokenizer, load_tokenizer
from train import checkpoint
from train.config import TrainConfig
from train.data import Examples, divide, load_examples
from train.loop import Job, fit

log = logging.getLogger(__name__)

# Options that change where or how a run is watched, not what it computes.
_NOT_IDENTITY = ("out", "tracker", "project", "device", "save_every")


def train(config: TrainConfig, command: str) -> dict[str, Any]:
    """Run `config` to its end, continuing what a killed run left. Returns the summary; raises InputError."""
    accelerator = make_accelerator(config)
    out = Path(config.out)
    tokenizer = _tokenizer(config)
    torch.manual_seed(config.seed)
    model = build_draft(config)
    target = None
    if config.target is not None:
        target = load_model(
            config.target,
            device=str(accelerator.device),
            dtype=config.dtype,
            trust_remote_code=config.trust_remote_code,
        )
    _check_fit(config, model, target, tokenizer)
    with accelerator.main_process_first():
        training, heldout = _examples(config, tokenizer)
    for examples in (training, heldout):
        _check_data(config, examples, model, target)
    rows_per_step = config.batch_size * config.accumulation * accelerator.num_processes
    steps = config.steps or math.ceil(config.epochs * len(training.rows) / rows_per_step)
    identity = {
        "config": {key: value for key, value in asdict(config).items() if key not in _NOT_IDENTITY},
        "data": training.digest,
        "heldout_data": heldout.digest,
        "target_fingerprint": fingerprint(target) if target is not None else None,
        "initial_fingerprint": fingerprint(model),
        "target_dtype": dtype_name(target) if target is not None else None,
        "precision": accelerator.mixed_precision,
        "processes": accelerator.num_processes,
    }
    # A JSON round trip, so that what is compared on resume is what was written.
    identity = json.loads(json.dumps(identity))
    run_dir = out / "run"
    on_main(lambda: checkpoint.claim(run_dir, identity))
    if (out / "config.json").exists():
        return _summary(out, read_json(out / "draftsmith.json", "the record of a draft checkpoint"))
    if config.tracker == "wandb":
        _start_wandb(accelerator, config, identity, run_dir)
    model.to(accelerator.device)
    # From here on randomness is dropout's; processes that shared a seed would drop the same cells.
    torch.manual_seed(row_seed(config.seed, f"process {accelerator.process_index}"))
    job = Job(config, accelerator, model, target, training, heldout, steps, run_dir)
    position, figures = fit(job)
    record = {
        "kind": "draft-lm",
        "objective": config.objective,
        "target": config.target,
        "target_fingerprint": identity["target_fingerprint"],
        "fingerprint": fingerprint(model),
        "data": {
            "training": {"rows": len(training.rows), "dropped": training.dropped, "digest": training.digest},
            "heldout": {"rows": len(heldout.rows), "dropped": heldout.dropped, "digest": heldout.digest},
            "response_tokens": int(training.valid_tokens.sum()),
        },
        "processes": accelerator.num_processes,
        "steps": position.step,
        "best_step": position.best_step,
        **figures,
        **provenance(command, asdict(config)),
    }
    if accelerator.is_main_process:
        checkpoint.publish(out, model, tokenizer, record)
    accelerator.wait_for_everyone()
    accelerator.end_training()
    return _summary(out, record)


def _summary(out: Path, record: dict[str, Any]) -> dict[str, Any]:
    keys = ("objective", "steps", "best_step", "heldout_loss", "heldout_alpha", "fingerprint")
    return {"checkpoint": str(out)} | {key: record[key] for key in keys if key in record}


def make_accelerator(config: TrainConfig) -> Accelerator:
    """One process, or as many as the launcher started; RunError when the two do not agree."""
    device = resolve_device(config.device)
    on_cpu = device.type == "cpu"
    if device.type == "cuda":
        torch.cuda.set_device(device)
    options = process_group_options(on_cpu)
    precision = {"fp32": "no", "bf16": "bf16", "auto": "no"}[config.precision]
    if config.precision == "auto" and not on_cpu and torch.cuda.is_bf16_supported():
        precision = "bf16"
    accelerator = Accelerator(
        cpu=on_cpu,
        mixed_precision=precision,
        kwargs_handlers=[InitProcessGroupKwargs(**options)] if options else [],
        log_with="wandb" if config.tracker == "wandb" else None,
    )
    check(accelerator.num_processes)
    if accelerator.gradient_accumulation_steps != 1:
        raise RunError("the launcher sets gradient_accumulation_steps; leave it at 1 and set `accumulation` instead")
    return accelerator


def build_draft(config: TrainConfig) -> PreTrainedModel:
    """The draft to train, fp32 on the CPU: loaded from `draft`, or fresh from `draft_config`."""
    shape = read_shape(config.draft_config) if config.draft_config is not None else None
    if config.draft is None:
        assert shape is not None
        model = AutoModelForCausalLM.from_config(shape, dtype=torch.float32)
        assert isinstance(model, PreTrainedModel)
        return model
    model = load_model(config.draft, device="cpu", dtype="float32", trust_remote_code=config.trust_remote_code)
    if shape is not None:
        for key in ("model_type", "hidden_size", "num_hidden_layers", "intermediate_size", "vocab_size"):
            there, wanted = getattr(model.config, key, None), getattr(shape, key, None)
            if there != wanted:
                raise InputError(
                    f"{config.draft}: its {key} is {there}, {config.draft_config} says {wanted}; "
                    f"drop `draft_config` or name the right draft"
                )
    return model


def read_shape(path: str) -> PretrainedConfig:
    """A model shape from a Hugging Face config.json; InputError names the file and key at fault."""
    values = read_json(Path(path), "a Hugging Face config.json")
    if not isinstance(values, dict) or "model_type" not in values:
        raise InputError(f"{path}: key 'model_type' is missing; a Hugging Face config.json has it")
    values = dict(values)
    kind = values.pop("model_type")
    try:
        return AutoConfig.for_model(kind, **values)
    except Exception as error:
        # Configurations validate themselves with errors of several kinds, some of many lines.
        reason = (str(error).strip().splitlines() or [type(error).__name__])[0]
        raise InputError(f"{path}: not a model that transformers can build ({reason})") from None


def _tokenizer(config: TrainConfig) -> Tokenizer | None:
    name = config.tokenizer or config.target or config.draft
    return None if name is None else load_tokenizer(name, config.trust_remote_code)


def _check_fit(
    config: TrainConfig, model: PreTrainedModel, target: PreTrainedModel | None, tokenizer: Tokenizer | None
) -> None:
    draft_name = config.draft or config.draft_config or "draft"
    if target is not None:
        check_same_vocabulary(target, [(draft_name, model)])
    if tokenizer is not None:
        check_tokenizer(draft_name, model, tokenizer)
    for name, each in ((draft_name, model), (config.target, target)):
        limit = context_length(each) if each is not None else None
        if limit is not None and config.max_length > limit:
            raise InputError(f"max_length: {config.max_length} is more than the {limit} positions of {name}")


def _check_data(
    config: TrainConfig, examples: Examples, model: PreTrainedModel, target: PreTrainedModel | None
) -> None:
    if examples.max_token >= vocabulary_size(model):
        raise InputError(
            f"data: holds token {examples.max_token}, and the draft's vocabulary has {vocabulary_size(model)}; "
            f"it was made with another tokenizer"
        )
    if target is not None and examples.targets - {fingerprint(target)}:
        log.warning("data: was distilled from other weights than those of target %s", config.target)


def _examples(config: TrainConfig, tokenizer: Tokenizer | None) -> tuple[Examples, Examples]:
    everything = load_examples(config.data, tokenizer, config.max_length)
    if config.heldout:
        return everything, load_examples(config.heldout, tokenizer, config.max_length)
    return divide(everything, config.heldout_fraction)


def _start_wandb(accelerator: Accelerator, config: TrainConfig, identity: dict[str, Any], run_dir: Path) -> None:
    try:
        import wandb  # noqa: F401
    except ImportError:
        raise InputError("tracker: wandb is not installed; pip install 'draftsmith[wandb]'") from None
    # A resumed run goes on in the same W&B run; another `out` is another one.
    run_id = hash_json([str(run_dir.resolve()), identity])[:16]
    options = {"dir": str(run_dir), "name": Path(config.out).name, "id": run_id, "resume": "allow"}
    accelerator.init_trackers(config.project, config=identity, init_kwargs={"wandb": options})
