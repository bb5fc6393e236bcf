"""A training run from its options to its checkpoint: prepare, fit, publish."""

import atexit
import json
import logging
import math
import traceback
from collections.abc import Sequence
from dataclasses import asdict, replace
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from drafts.draft_vocabulary import DraftVocabulary
from drafts.heads.block import BlockHead
from drafts.load import Draft, check_draft_vocabulary, draft_fingerprint
from draftsmith_core import wandb_runs
from draftsmith_core.errors import InputError
from draftsmith_core.hub import check_push, pushed
from draftsmith_core.io import remove_leftovers
from draftsmith_core.launcher import leave_processes
from draftsmith_core.models import (
    check_tokenizer,
    context_length,
    dtype_name,
    fingerprint,
    load_model,
    vocabulary_size,
)
from draftsmith_core.options import configured, identity as identity_options
from draftsmith_core.prompts import write_prompt_hashes
from draftsmith_core.ranks import is_main, on_main, say
from draftsmith_core.runs import Run, command_line, provenance, read_record
from draftsmith_core.sampling import row_seed
from draftsmith_core.settings import loading
from draftsmith_core.signals import Terminated
from draftsmith_core.tokenization import Tokenizer, load_tokenizer
from train import draft_setup, loop
from train.config import TrainConfig
from train.data import (
    Examples,
    collate,
    divide,
    load_examples,
    packed,
    trained_prompts,
    with_replay,
)
from train.loop import Position, TrainingJob, fit
from train.losses import LossFn
from train.objective import Objective, custom_objective, loss_digest, parse_objective
from train.parallel import load_weights, make_world
from train.smoke import make_inputs, smoke_config
from train.trainees.block import BlockTrainee, calibrate

log = logging.getLogger(__name__)
# Held-out rows that a confidence is calibrated on; its few temperatures need no more.
_CALIBRATION_ROWS = 512


def train(
    config: TrainConfig | None = None,
    command: str | None = None,
    *,
    loss: LossFn | None = None,
    **options: Any,
) -> dict[str, Any]:
    """Train to the end, resuming what a killed run left. Return the summary.

    command: the command line to record. loss: your own loss in place of `config.objective`
    (`train.objective.custom_objective`); it is recorded by its name. Raise InputError for input
    that cannot be used, RunError for what fails while running. SIGTERM ends it with Terminated
    (exit code 143) and Ctrl-C with KeyboardInterrupt, with a checkpoint of that step.
    """
    config = configured(TrainConfig, config, options)
    out = Path(f"{config.out}-smoke" if config.smoke else config.out)
    if config.push_to_hub is not None and not config.smoke:
        check_push(config.push_to_hub)
    command = command or command_line("train", config)
    atexit.unregister(leave_processes)
    with Run(out) as run:
        job = _prepare(config, loss)
        if (out / "config.json").exists() and not (job.run_dir / "run.json").exists():
            raise InputError(
                f"{out}: holds a model that this run did not make; choose another `out`"
            )
        run.begin(job.identity, ("run/run.json",))
        for place in (job.run_dir, job.run_dir / "checkpoints"):
            on_main(partial(remove_leftovers, place))
        if (out / "config.json").exists():
            on_main(lambda: loop.drop_old(job))
            record = read_record(out)
        else:
            wandb_runs.start(job.world.accelerator, job.config, job.identity, job.run_dir)
            try:
                position, best = fit(job, run.stop)
            except (KeyboardInterrupt, Terminated) as stopped:
                if run.stop.agreed:
                    # The frames of the loop hold the wrappers too.
                    traceback.clear_frames(stopped.__traceback__)
                    job = _freed(job)
                    atexit.register(leave_processes)
                raise
            job = _freed(job)
            record = _publish(job, position, best, command)
    atexit.register(leave_processes)
    keys = ["objective", "steps", "best_step", "heldout_loss", "heldout_alpha", "heldout_tau"]
    keys += ["confidence_error", "fingerprint"]
    summary = {"checkpoint": str(out)} | {key: record[key] for key in keys if key in record}
    return summary | pushed(out, None if config.smoke else config.push_to_hub, "model")


def _freed(job: TrainingJob) -> TrainingJob:
    """The job without its trainee and the wrappers.

    They must be freed before the process group: their destructors join its threads while they hold
    Python's global lock and can deadlock.
    """
    job = replace(job, trainee=nn.Identity())
    job.world.accelerator.free_memory()
    return job


def _prepare(config: TrainConfig, loss: LossFn | None) -> TrainingJob:
    objective = parse_objective(config.objective, config.temperature)
    if loss is not None:
        objective = custom_objective(loss, config.temperature)
    wandb_runs.check_tracker(config.tracker)
    world = make_world(config)
    if config.smoke:
        recipe = config
        on_main(lambda: make_inputs(recipe))
        config = smoke_config(recipe)
    name = config.tokenizer or config.target or config.draft
    revisions = {config.target: config.revision}
    tokenizer = None
    if name is not None:
        tokenizer = load_tokenizer(
            name, config.trust_remote_code, config.chat_template, revisions.get(name)
        )
    options: Any = loading(config) | {"device": str(world.device)}
    target = load_model(config.target, **options) if config.target else None
    with world.accelerator.main_process_first():
        training, heldout = _examples(config, tokenizer)
    torch.manual_seed(config.seed)
    draft = draft_setup.build(config, target, training)
    _check(config, objective, draft, target, tokenizer, (training, heldout))
    rows_per_step = config.batch_size * config.accumulation * world.size
    identity = {
        "config": identity_options(config) | {"objective": objective.spec},
        "data": training.digest,
        "heldout_data": heldout.digest,
        "target_fingerprint": fingerprint(target) if target is not None else None,
        "initial_fingerprint": draft_fingerprint(draft),
        "target_dtype": None if target is None else dtype_name(target),
        "precision": "bf16" if world.bf16 else "fp32",
        "rows_per_step": rows_per_step,
        "loss_source": None if loss is None else loss_digest(loss),
    }
    if is_main():
        draft_setup.announce_draft_vocabulary(draft, training)
        if target is not None and (training.targets | heldout.targets) - {
            identity["target_fingerprint"]
        }:
            log.warning(
                "data: was distilled from other weights than those of target %s", config.target
            )
        if dropped := training.dropped + (heldout.dropped if config.heldout else 0):
            fits = f"within max_length {config.max_length}"
            log.warning("data: %d rows have no response token %s and are skipped", dropped, fits)
        if set(config.heldout) & set(config.data):
            log.warning(
                "heldout: %s is in `data` too; held-out figures will measure memory",
                config.heldout[0],
            )
    steps = config.steps or math.ceil(config.epochs * len(training) / rows_per_step)
    drawn = steps * rows_per_step * (1 - config.replay_fraction)
    # Data does not come back in a single epoch, nor states that nothing reads.
    comes_back = drawn > (training.replay_from or len(training)) and objective.needs_target
    trainee = draft_setup.make_trainee(config, objective, world, draft, target, comes_back)
    # From here on random numbers are for dropout and noise; processes with one seed would all drop
    # the same units.
    torch.manual_seed(row_seed(config.seed, f"process {world.accelerator.process_index}"))
    # As JSON, because the identity is compared with what was written.
    identity = json.loads(json.dumps(identity))
    return TrainingJob(
        config, world, objective, trainee, training, heldout, steps, identity, tokenizer, target
    )


def _publish(
    job: TrainingJob, position: Position, weights: dict[str, Tensor], command: str
) -> dict[str, Any]:
    config, training, heldout, out = job.config, job.training, job.heldout, Path(job.config.out)
    objective = job.objective.spec
    record = {
        "kind": "draft-lm" if config.kind == "lm" else config.kind,
        "objective": objective,
        "target": config.target,
        "target_fingerprint": job.identity["target_fingerprint"],
        "data": {
            "training": {
                "rows": len(training.rows),
                "dropped": training.dropped,
                "digest": training.digest,
            },
            "heldout": {
                "rows": len(heldout.rows),
                "dropped": heldout.dropped,
                "digest": heldout.digest,
            },
            "response_tokens": int(training.valid_tokens.sum()),
        },
        "processes": job.world.size,
        "sharing": job.world.sharing,
        "steps": position.step,
        "best_step": position.best_step,
        **position.best_figures,
        **provenance(command, asdict(config) | {"objective": objective}),
    }

    def write() -> None:
        best = draft_setup.build(config, job.target, training)
        load_weights(best, weights)
        if isinstance(best, DraftVocabulary):
            best.read_draft_vocab()
        if isinstance(best, BlockHead) and best.config.confidence:
            record.update(_calibrate(job, best))
        record["fingerprint"] = draft_fingerprint(best)

        def write_files(directory: Path) -> None:
            draft_setup.write(best, directory)
            write_prompt_hashes(directory, trained_prompts(training))

        loop.publish(job, write_files, record)

    on_main(write)
    wandb_runs.finish(job.world.accelerator, config.tracker, record, out)
    return record


def _calibrate(job: TrainingJob, head: BlockHead) -> dict[str, float]:
    config, heldout, target = job.config, job.heldout, job.target
    assert target is not None
    rows = range(min(len(heldout), _CALIBRATION_ROWS))
    size = min(config.batch_size, (len(rows) + 1) // 2)
    trainee = BlockTrainee(head.to(target.device), job.objective, target, config.packing)
    batches = (
        collate(heldout, rows[at : at + size]).to(target.device) for at in range(0, len(rows), size)
    )
    figures = calibrate(trainee, batches)
    head.to("cpu")
    raw, scaled = figures.values()
    say(f"train: confidence: calibration error {raw:.3f}, with temperatures {scaled:.3f}")
    return figures


def _check(
    config: TrainConfig,
    objective: Objective,
    draft: Draft,
    target: PreTrainedModel | None,
    tokenizer: Tokenizer | None,
    data: Sequence[Examples],
) -> None:
    """Raise InputError unless draft, target, tokenizer and data belong together and there is a
    teacher if needed.
    """
    # Fresh weights come without a tokenizer that could differ from the target's.
    if config.draft is not None and target is not None and tokenizer is not None:
        check_draft_vocabulary(config.draft, draft, target, tokenizer, config.trust_remote_code)
    models = {"target": target, "draft": draft}
    if isinstance(draft, PreTrainedModel) and tokenizer is not None:
        check_tokenizer(config.draft or config.draft_config or "draft", draft, tokenizer)
    for role, model in models.items():
        limit = context_length(model) if isinstance(model, PreTrainedModel) else None
        if limit is not None and config.max_length > limit:
            raise InputError(
                f"max_length: {config.max_length} is more than the {limit} positions of the {role}"
            )
    sizes = {
        "draft": vocabulary_size(draft) if isinstance(draft, PreTrainedModel) else draft.vocab_size
    }
    if target is not None:
        sizes["target"] = vocabulary_size(target)
    token = max(examples.max_token for examples in data)
    for role, size in sizes.items():
        if token >= size:
            raise InputError(
                f"data: token {token} exceeds the {role}'s vocabulary of {size}; use data in its "
                "tokens"
            )
    stored = all(examples.stored for examples in data)
    if target is None and not stored and objective.needs_target:
        raise InputError(
            f"target: objective {objective.spec} needs the target as its teacher, or data with "
            "teacher columns"
        )


def _examples(config: TrainConfig, tokenizer: Tokenizer | None) -> tuple[Examples, Examples]:
    def read(option: str) -> Examples:
        try:
            return load_examples(getattr(config, option), tokenizer, config.max_length)
        except InputError as error:
            raise InputError(f"{option}: {error}") from None

    training = read("data")
    if config.heldout:
        heldout = read("heldout")
    else:
        training, heldout = divide(training, config.heldout_fraction)
    parts = [training, heldout, *([read("replay")] if config.replay else [])]
    if config.packing:
        parts = [packed(part, config.seed) for part in parts]
    training, heldout, *replay = parts
    return with_replay(training, *replay) if replay else training, heldout
