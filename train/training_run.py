"""A training run from its options to its checkpoint: prepare, fit, publish."""

import atexit
import json
import logging
import math
import traceback
from collections.abc import Mapping
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import torch
from transformers import PreTrainedModel

from drafts.load import Draft, check_draft_vocabulary, draft_fingerprint
from drafts.vocabulary import VocabularyMap
from draftsmith_core.errors import InputError
from draftsmith_core.hub import check_push, pushed
from draftsmith_core.io import read_json, remove_leftovers
from draftsmith_core.models import check_tokenizer, context_length, dtype_name, fingerprint, load_model, vocabulary_size
from draftsmith_core.processes import Terminated, is_main, leave_processes, on_main, terminable, without_fsdp_variable
from draftsmith_core.prompts import write_prompt_hashes
from draftsmith_core.provenance import command_line, provenance
from draftsmith_core.run_directory import claim, hold, keeping
from draftsmith_core.sampling import row_seed
from draftsmith_core.tokenization import Tokenizer, load_tokenizer
from draftsmith_core.wandb_runs import check_tracker
from train import checkpoint, draft_setup, lora, tracking
from train.config import TrainConfig
from train.data import Examples, divide, load_examples, packed, trained_prompts, with_replay
from train.loop import TrainingJob, fit
from train.losses import LossFn
from train.objective import Objective, custom_objective, loss_digest, parse_objective
from train.retokenize import announce, other_tokenizer
from train.smoke import make_inputs, smoke_config
from train.world import World, make_world

log = logging.getLogger(__name__)

# Options that do not decide what a run computes (but for rounding): where, how fast, how watched, and how the rows of a
# step are divided. How many rows a step has is `rows_per_step` of the identity.
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
# How much larger than its draft's a target's padded vocabulary may be, where the target itself is not loaded.
_PADDING = 1024


@dataclass(frozen=True)
class PreparedRun:
    """What a run needs beside the loop. identity: what another run must share with this one to continue it."""

    config: TrainConfig
    world: World
    out: Path
    tokenizer: Tokenizer | None
    target: PreTrainedModel | None
    training: Examples
    heldout: Examples
    identity: dict[str, Any]

    @property
    def run_dir(self) -> Path:
        """What only training itself needs: checkpoints, the best weights, metrics."""
        return self.out / "run"


def train(config: TrainConfig, command: str | None = None, *, loss: LossFn | None = None) -> dict[str, Any]:
    """Train to the end, continuing what a killed run left. Returns the summary, a dictionary.

    command: the command line to record; without one, the one that asks for `config`. loss: a loss of one's own in place
    of `config.objective`, as `train.objective.custom_objective` describes; it is recorded by its name.
    Raises InputError for input that cannot be used, and RunError for what fails while running. SIGTERM ends it with
    Terminated (exit code 143) and Ctrl-C with KeyboardInterrupt, with a checkpoint of that step.
    """
    out = Path(f"{config.out}-smoke" if config.smoke else config.out)
    if config.push_to_hub is not None:
        check_push(config.push_to_hub)
    command = command or command_line("train", config)
    atexit.unregister(leave_processes)
    with terminable() as stop, without_fsdp_variable(), keeping(lambda: any(out.glob("run/checkpoints/step_*"))):
        run, job = _prepare(config, loss)
        with hold(run.out, "out"):
            record = _claim(run)
            if record is None:
                tracking.start(run.world.accelerator, run.config, run.identity, run.run_dir)
                try:
                    position = fit(job, stop)
                except (KeyboardInterrupt, Terminated) as stopped:
                    if stop.agreed:
                        # As below; the frames of the loop hold the wrappers too.
                        traceback.clear_frames(stopped.__traceback__)
                        del job
                        run.world.accelerator.free_memory()
                        atexit.register(leave_processes)
                    raise
                # Free the wrappers before the process group: their destructors join its threads while they hold
                # Python's global lock and can deadlock. So a run that fails leaves the group to the interpreter.
                del job
                run.world.accelerator.free_memory()
                record = _publish(run, position, command)
    atexit.register(leave_processes)
    keys = ("objective", "steps", "best_step", "heldout_loss", "heldout_alpha", "heldout_tau", "fingerprint")
    summary = {"checkpoint": str(out)} | {key: record[key] for key in keys if key in record}
    return summary | pushed(out, config.push_to_hub, "model")


def _prepare(config: TrainConfig, loss: LossFn | None) -> tuple[PreparedRun, TrainingJob]:
    """Load and check everything. The job holds the draft, which must be freed before the process group is."""
    objective = _objective(config, loss)
    check_tracker(config.tracker)
    world = make_world(config)
    if config.smoke:
        recipe = config
        on_main(lambda: make_inputs(recipe))
        config = smoke_config(recipe)
    mapping, tokenizer = other_tokenizer(config, data_tokenizer := _tokenizer(config))
    anchor = config.draft if config.anchor_kl else None
    named = {"target": None if mapping else config.target, "reference": config.reference, "anchor": anchor}
    frozen = {which: _frozen(config, name, world) for which, name in named.items() if name is not None}
    target = frozen.get("target")
    with world.accelerator.main_process_first():
        training, heldout = _examples(config, data_tokenizer, mapping)
    torch.manual_seed(config.seed)
    draft = draft_setup.build(config, target, training)
    if config.lora.rank:
        if world.sharing.startswith("zero"):
            raise InputError(
                "lora.rank: was not tried under DeepSpeed; launch with configs/accelerate/ddp.yaml or fsdp2.yaml"
            )
        assert isinstance(draft, PreTrainedModel)
        lora.attach(draft, config.lora)
    _check_models(config, draft, frozen, tokenizer)
    for examples in (training, heldout):
        _check_data(config, objective, examples, draft, target)
    sizes = vocabulary_size(draft) if isinstance(draft, PreTrainedModel) else draft.vocab_size
    draft_setup.announce_draft_vocabulary(draft, training, sizes)
    if mapping is not None:
        announce(len(training.rows) + len(heldout.rows), training.left_out + heldout.left_out, mapping)
    identity = _identity(config, world, training, heldout, draft, frozen)
    if loss is not None:
        identity["config"]["objective"] = objective.spec
        identity["loss_source"] = loss_digest(loss)
        if identity["loss_source"] is None and is_main():
            log.warning("%s: its source is not found; a run that continues takes it for the same loss", objective.spec)
    others = training.targets | heldout.targets
    if target is not None and others - {identity["target_fingerprint"]} and is_main():
        log.warning("data: was distilled from other weights than those of target %s", config.target)
    if training.dropped + heldout.dropped and is_main():
        log.warning(
            "data: %d rows have no response token within max_length %d and are left out",
            training.dropped if not config.heldout else training.dropped + heldout.dropped,
            config.max_length,
        )
    if set(config.heldout) & set(config.data) and is_main():
        log.warning("heldout: %s is in `data` too; held-out figures will measure memory", config.heldout[0])
    steps = config.steps or math.ceil(config.epochs * len(training) / identity["rows_per_step"])
    run = PreparedRun(config, world, Path(config.out), tokenizer, target, training, heldout, identity)
    memory = draft_setup.state_memory(config, objective, world, frozen, training, heldout, steps)
    trainee = draft_setup.make_trainee(config, objective, world, draft, frozen, memory)
    answerer = draft_setup.make_answerer(config, world, draft, target)
    job = TrainingJob(config, objective.spec, world, trainee, training, heldout, steps, run.run_dir, answerer, frozen)
    # From here on random numbers are for dropout and noise; processes with one seed would all drop the same units.
    torch.manual_seed(row_seed(config.seed, f"process {world.accelerator.process_index}"))
    return run, job


def _objective(config: TrainConfig, loss: LossFn | None) -> Objective:
    if loss is None:
        objective = parse_objective(config.objective, config.temperature)
        if config.temperature != 1 and not objective.needs_target:
            raise InputError("temperature: `ce` has none; leave it out, or use an objective that has a teacher")
        return objective
    if config.objective != TrainConfig.objective:
        raise InputError(
            f"objective: is {config.objective}, and a `loss` was given to be used in its place; leave out one"
        )
    return custom_objective(loss, config.temperature)


def _identity(
    config: TrainConfig,
    world: World,
    training: Examples,
    heldout: Examples,
    draft: Draft,
    frozen: Mapping[str, PreTrainedModel],
) -> dict[str, Any]:
    """Everything that decides what a run computes; as JSON, because it is compared with what was written."""
    fingerprints = {name: fingerprint(model) for name, model in frozen.items() if name != "anchor"}
    identity = {
        "config": {key: value for key, value in asdict(config).items() if key not in _NOT_IDENTITY},
        "data": training.digest,
        "heldout_data": heldout.digest,
        "target_fingerprint": fingerprints.get("target"),
        "reference_fingerprint": fingerprints.get("reference"),
        "initial_fingerprint": draft_fingerprint(draft),
        "target_dtype": dtype_name(frozen["target"]) if "target" in frozen else None,
        "precision": "bf16" if world.bf16 else "fp32",
        "rows_per_step": config.batch_size * config.accumulation * world.size,
    }
    result: dict[str, Any] = json.loads(json.dumps(identity))
    return result


def _claim(run: PreparedRun) -> dict[str, Any] | None:
    """Make `out` this run's own, or make sure it is; returns the checkpoint's record if the run is finished already."""

    def work() -> None:
        if (run.out / "config.json").exists() and not (run.run_dir / "run.json").exists():
            raise InputError(f"{run.out}: holds a model that this run did not make; choose another `out`")
        claim(
            run.out,
            run.identity,
            what="training run",
            option="out",
            records=("run/run.json",),
            advice={"rows_per_step": "set batch_size or accumulation so that their product x processes is the same"},
        )
        remove_leftovers(run.run_dir)
        remove_leftovers(run.run_dir / "checkpoints")

    on_main(work)
    if not (run.out / "config.json").exists():
        return None
    on_main(lambda: checkpoint.tidy(run.run_dir, run.config))
    return read_json(run.out / "draftsmith.json", "the record of a draft checkpoint")


def _publish(run: PreparedRun, position: checkpoint.Position, command: str) -> dict[str, Any]:
    """Write the checkpoint from the best weights; its record."""
    config, training, heldout = run.config, run.training, run.heldout
    objective = run.identity["config"]["objective"]
    record = {
        "kind": "draft-lm" if config.kind == "lm" else config.kind,
        "objective": objective,
        "target": config.target,
        "target_fingerprint": run.identity["target_fingerprint"],
        "data": {
            "training": {"rows": len(training.rows), "dropped": training.dropped, "digest": training.digest},
            "heldout": {"rows": len(heldout.rows), "dropped": heldout.dropped, "digest": heldout.digest},
            "response_tokens": int(training.valid_tokens.sum()),
            "left_out": training.left_out + heldout.left_out,
        },
        "processes": run.world.size,
        "sharing": run.world.sharing,
        "steps": position.step,
        "best_step": position.best_step,
        **position.best_figures,
        **provenance(command, asdict(config) | {"objective": objective}),
    }

    def write() -> None:
        # The trained draft may be sharded over processes; its best weights are whole in `run/best`.
        best = draft_setup.build(config, run.target, training)
        adapted = lora.attach(best, config.lora) if config.lora.rank and isinstance(best, PreTrainedModel) else None
        draft_setup.load_state(best, checkpoint.load_best(run.run_dir))
        if adapted is not None:
            best = lora.write_and_merge(adapted, run.out / "adapter")
        record["fingerprint"] = draft_fingerprint(best)

        def write_files(directory: Path) -> None:
            draft_setup.write(best, directory)
            write_prompt_hashes(directory, trained_prompts(training))

        checkpoint.publish(run.out, write_files, run.tokenizer, record, config)

    on_main(write)
    tracking.finish(run.world.accelerator, config, record, run.out)
    return record


def _frozen(config: TrainConfig, name: str, world: World) -> PreTrainedModel:
    return load_model(name, device=str(world.device), dtype=config.dtype, trust_remote_code=config.trust_remote_code)


def _tokenizer(config: TrainConfig) -> Tokenizer | None:
    name = config.tokenizer or config.target or config.draft
    return None if name is None else load_tokenizer(name, config.trust_remote_code, config.chat_template)


def _check_models(
    config: TrainConfig,
    draft: Draft,
    frozen: Mapping[str, PreTrainedModel],
    tokenizer: Tokenizer | None,
) -> None:
    """InputError unless draft, target, reference and tokenizer belong together and reach `max_length`."""
    target = frozen.get("target")
    draft_name = config.draft or config.draft_config or "draft"
    # Fresh weights come without a tokenizer that could differ from the target's.
    if config.draft is not None and target is not None and tokenizer is not None:
        check_draft_vocabulary(config.draft, draft, target, tokenizer, config.trust_remote_code)
    models = [(config.target, target), (config.reference, frozen.get("reference"))]
    if isinstance(draft, PreTrainedModel):
        models.insert(0, (draft_name, draft))
        if tokenizer is not None:
            check_tokenizer(draft_name, draft, tokenizer)
    for name, each in models:
        limit = context_length(each) if each is not None else None
        if limit is not None and config.max_length > limit:
            raise InputError(f"max_length: {config.max_length} is more than the {limit} positions of {name}")


def _check_data(
    config: TrainConfig, objective: Objective, examples: Examples, draft: Draft, target: PreTrainedModel | None
) -> None:
    """InputError unless both models know every token, and there is a teacher where one is needed."""
    sizes = {"draft": vocabulary_size(draft) if isinstance(draft, PreTrainedModel) else draft.vocab_size}
    if target is not None:
        sizes["target"] = vocabulary_size(target)
    for name, size in sizes.items():
        if examples.max_token >= size:
            raise InputError(
                f"data: holds token {examples.max_token}, and the {name}'s vocabulary has {size}; "
                f"it was made with another tokenizer"
            )
    known = sizes.get("target", sizes["draft"] + _PADDING)
    top_id, place = examples.max_top_id
    if top_id >= known:
        raise InputError(
            f"{place}: key 'teacher' holds token {top_id}, and the vocabulary has {known}; make the set again"
        )
    if objective.needs_target and target is None and not examples.stored:
        raise InputError(
            f"target: objective {objective.spec} needs the target as its teacher, or data with teacher columns"
        )
    if config.best_by == "alpha" and target is None and not examples.stored:
        raise InputError("best_by: alpha needs a target, or data with teacher columns; use loss")


def _examples(
    config: TrainConfig, tokenizer: Tokenizer | None, mapping: VocabularyMap | None
) -> tuple[Examples, Examples]:
    """Training data with its replay, and held-out data."""
    training = load_examples(config.data, tokenizer, config.max_length, mapping)
    if config.heldout:
        heldout = load_examples(config.heldout, tokenizer, config.max_length, mapping)
    else:
        training, heldout = divide(training, config.heldout_fraction)
        heldout = replace(heldout, left_out=0)
    replay = load_examples(config.replay, tokenizer, config.max_length, mapping) if config.replay else None
    if config.packing:
        training, heldout = packed(training, config.seed), packed(heldout, config.seed)
        replay = None if replay is None else packed(replay, config.seed)
    return training if replay is None else with_replay(training, replay), heldout
