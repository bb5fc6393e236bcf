"""A training run from its options to its checkpoint: load, check, fit, publish."""

import json
import logging
import math
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch
from transformers import PreTrainedModel

from drafts.load import Draft, check_draft_vocabulary, draft_fingerprint
from draftsmith_core.errors import InputError
from draftsmith_core.hub import check_push, pushed
from draftsmith_core.io import read_json
from draftsmith_core.models import (
    check_same_vocabulary,
    check_tokenizer,
    context_length,
    dtype_name,
    fingerprint,
    load_model,
    vocabulary_size,
)
from draftsmith_core.processes import StopSignal, on_main, terminable
from draftsmith_core.provenance import provenance
from draftsmith_core.run_directory import keeping
from draftsmith_core.sampling import row_seed
from draftsmith_core.tokenization import Tokenizer, load_tokenizer
from train import checkpoint, draft_setup, tracking
from train.config import TrainConfig
from train.data import Examples, divide, load_examples, packed, with_replay
from train.loop import Job, fit
from train.objective import parse_objective
from train.smoke import make_inputs, smoke_config
from train.world import World, make_world

log = logging.getLogger(__name__)

# Options that change where, how fast or how watched a run is, not what it computes (but for rounding). How the rows of
# a step are divided is among them; how many they are is not.
_NOT_IDENTITY = (
    "out",
    "tracker",
    "project",
    "push_to_hub",
    "device",
    "save_every",
    "keep",
    "batch_size",
    "accumulation",
    "gradient_checkpointing",
    "compile",
)


def train(config: TrainConfig, command: str) -> dict[str, Any]:
    """Run `config` to its end, continuing what a killed run left. Returns the summary; raises InputError.

    SIGTERM ends it with Terminated (exit code 143) and Ctrl-C with KeyboardInterrupt, with a checkpoint of that step.
    """
    out = Path(f"{config.out}-smoke" if config.smoke else config.out)
    if config.push_to_hub is not None:
        check_push(config.push_to_hub)
    with terminable() as stop, keeping(lambda: any(out.glob("run/checkpoints/step_*"))):
        summary = _train(config, command, stop)
    return summary | pushed(out, config.push_to_hub, "model")


def _train(config: TrainConfig, command: str, stop: StopSignal) -> dict[str, Any]:
    tracking.check_installed(config)
    world = make_world(config)
    accelerator = world.accelerator
    if config.smoke:
        recipe = config
        on_main(lambda: make_inputs(recipe))
        config = smoke_config(recipe)
    out = Path(config.out)
    tokenizer = _tokenizer(config)
    target = _frozen(config, config.target, world)
    reference = _frozen(config, config.reference, world)
    with accelerator.main_process_first():
        training, heldout = _examples(config, tokenizer)
    torch.manual_seed(config.seed)
    draft = draft_setup.build(config, target, training)
    _check_fit(config, draft, target, reference, tokenizer)
    for examples in (training, heldout):
        _check_data(config, examples, draft, target)
    if target is not None and (training.targets | heldout.targets) - {fingerprint(target)}:
        log.warning("data: was distilled from other weights than those of target %s", config.target)
    answerer = draft_setup.make_answerer(config, world, draft, target)
    rows_per_step = config.batch_size * config.accumulation * world.size
    steps = config.steps or math.ceil(config.epochs * len(training) / rows_per_step)
    identity = {
        "config": {key: value for key, value in asdict(config).items() if key not in _NOT_IDENTITY},
        "data": training.digest,
        "heldout_data": heldout.digest,
        "target_fingerprint": fingerprint(target) if target is not None else None,
        "reference_fingerprint": fingerprint(reference) if reference is not None else None,
        "initial_fingerprint": draft_fingerprint(draft),
        "target_dtype": dtype_name(target) if target is not None else None,
        "precision": "bf16" if world.bf16 else "fp32",
        "rows_per_step": rows_per_step,
    }
    # A JSON round trip, so that what is compared on resume is what was written.
    identity = json.loads(json.dumps(identity))
    run_dir = out / "run"
    on_main(lambda: checkpoint.claim(run_dir, identity))
    keeping = checkpoint.Keeping(config.keep, config.save_every)
    if (out / "config.json").exists():
        on_main(lambda: checkpoint.tidy(run_dir, keeping))
        return _summary(out, read_json(out / "draftsmith.json", "the record of a draft checkpoint"))
    tracking.start(accelerator, config, identity, run_dir)
    trainee = draft_setup.make_trainee(config, world, draft, target, reference)
    # From here on randomness is dropout's; processes that shared a seed would drop the same cells.
    torch.manual_seed(row_seed(config.seed, f"process {accelerator.process_index}"))
    position = fit(Job(config, world, trainee, training, heldout, steps, run_dir, answerer), stop)
    # What was shared must go before its process group: a wrapper that goes later waits for the group's threads with the
    # interpreter's lock in hand, which those may be waiting for, and a group that outlives the interpreter aborts.
    del draft, trainee, answerer
    accelerator.free_memory()
    record = {
        "kind": "draft-lm" if config.kind == "lm" else config.kind,
        "objective": config.objective,
        "target": config.target,
        "target_fingerprint": identity["target_fingerprint"],
        "data": {
            "training": {"rows": len(training.rows), "dropped": training.dropped, "digest": training.digest},
            "heldout": {"rows": len(heldout.rows), "dropped": heldout.dropped, "digest": heldout.digest},
            "response_tokens": int(training.valid_tokens.sum()),
        },
        "processes": world.size,
        "sharing": world.kind,
        "steps": position.step,
        "best_step": position.best_step,
        **position.best_figures,
        **provenance(command, asdict(config)),
    }

    def publish() -> None:
        # The trained draft may be in parts all over the processes; its weights are in `best`, whole.
        best = draft_setup.build(config, target, training)
        draft_setup.load_state(best, checkpoint.load_best(run_dir))
        record["fingerprint"] = draft_fingerprint(best)
        checkpoint.publish(out, lambda directory: draft_setup.write(best, directory), tokenizer, record, keeping)

    on_main(publish)
    tracking.finish(accelerator, config, record, out)
    return _summary(out, record)


def _summary(out: Path, record: dict[str, Any]) -> dict[str, Any]:
    keys = ("objective", "steps", "best_step", "heldout_loss", "heldout_alpha", "heldout_tau", "fingerprint")
    return {"checkpoint": str(out)} | {key: record[key] for key in keys if key in record}


def _frozen(config: TrainConfig, name: str | None, world: World) -> PreTrainedModel | None:
    if name is None:
        return None
    return load_model(name, device=str(world.device), dtype=config.dtype, trust_remote_code=config.trust_remote_code)


def _tokenizer(config: TrainConfig) -> Tokenizer | None:
    name = config.tokenizer or config.target or config.draft
    return None if name is None else load_tokenizer(name, config.trust_remote_code)


def _check_fit(
    config: TrainConfig,
    draft: Draft,
    target: PreTrainedModel | None,
    reference: PreTrainedModel | None,
    tokenizer: Tokenizer | None,
) -> None:
    draft_name = config.draft or config.draft_config or "draft"
    # Fresh weights have no tokenizer of their own to differ by.
    if config.draft is not None and target is not None and tokenizer is not None:
        check_draft_vocabulary(config.draft, draft, target, tokenizer, config.trust_remote_code)
    models = [(config.target, target), (config.reference, reference)]
    if isinstance(draft, PreTrainedModel):
        models.insert(0, (draft_name, draft))
        if reference is not None:
            check_same_vocabulary(draft, [(config.reference or "reference", reference)])
        if tokenizer is not None:
            check_tokenizer(draft_name, draft, tokenizer)
    for name, each in models:
        limit = context_length(each) if each is not None else None
        if limit is not None and config.max_length > limit:
            raise InputError(f"max_length: {config.max_length} is more than the {limit} positions of {name}")


def _check_data(config: TrainConfig, examples: Examples, draft: Draft, target: PreTrainedModel | None) -> None:
    sizes = {"draft": vocabulary_size(draft) if isinstance(draft, PreTrainedModel) else draft.vocab_size}
    if target is not None:
        sizes["target"] = vocabulary_size(target)
    for name, size in sizes.items():
        if examples.max_token >= size:
            raise InputError(
                f"data: holds token {examples.max_token}, and the {name}'s vocabulary has {size}; "
                f"it was made with another tokenizer"
            )
    objective = parse_objective(config.objective, config.temperature)
    if objective.needs_target and target is None and not examples.stored:
        raise InputError(
            f"target: objective {config.objective} needs the target as its teacher, or data with teacher columns"
        )
    if config.best_by == "alpha" and target is None and not examples.stored:
        raise InputError("best_by: alpha needs a target, or data with teacher columns; use loss")


def _examples(config: TrainConfig, tokenizer: Tokenizer | None) -> tuple[Examples, Examples]:
    training = load_examples(config.data, tokenizer, config.max_length)
    if config.heldout:
        heldout = load_examples(config.heldout, tokenizer, config.max_length)
    else:
        training, heldout = divide(training, config.heldout_fraction)
    replay = load_examples(config.replay, tokenizer, config.max_length) if config.replay else None
    if config.packing:
        training, heldout = packed(training, config.seed), packed(heldout, config.seed)
        replay = None if replay is None else packed(replay, config.seed)
    return training if replay is None else with_replay(training, replay), heldout
