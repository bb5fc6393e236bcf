"""A training run from its options to its checkpoint: prepare, fit, publish."""

import atexit
import json
import logging
import traceback
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import torch
from transformers import PreTrainedModel

from draftsmith.core.devices import attention_of_any_length, generators_kept
from draftsmith.core.errors import InputError, without_secrets
from draftsmith.core.hub import check_push, pushed
from draftsmith.core.io import (
    JsonObject,
    refuse_foreign,
    remove_leftovers,
    sha256_file,
    write_sealed,
)
from draftsmith.core.launcher import leave_processes
from draftsmith.core.models import (
    check_tokenizer,
    context_length,
    dtype_name,
    eos_ids,
    fingerprint,
    load_model,
    vocabulary_size,
)
from draftsmith.core.options import (
    command_line,
    configured,
    identity as identity_options,
    known_by_content,
)
from draftsmith.core.prompts import write_prompt_hashes
from draftsmith.core.ranks import from_main, is_main, on_main, own_group
from draftsmith.core.records import RECORD, provenance, read_record, read_run
from draftsmith.core.runs import Run
from draftsmith.core.sampling import row_seed
from draftsmith.core.settings import loading
from draftsmith.core.signals import StopSignal, Terminated
from draftsmith.core.state_store import checkpoint_digest
from draftsmith.core.template_date import fix_date
from draftsmith.core.tokenization import Tokenizer, load_tokenizer, tokenizer_digest
from draftsmith.core.wandb_runs import check_tracker
from draftsmith.drafts.draft_vocabulary import DraftVocabulary
from draftsmith.drafts.heads.block import BlockHead
from draftsmith.drafts.load import Draft, check_tokens_agree, draft_fingerprint
from draftsmith.train import checkpoint, draft_setup, tracking
from draftsmith.train.batches import collate, tokens_of
from draftsmith.train.config import Optim, TrainConfig
from draftsmith.train.data import (
    Examples,
    chats_read_once,
    divide,
    load_examples,
    packed,
    set_dates,
    trained_prompts,
    with_replay,
)
from draftsmith.train.job import Position, TrainingJob
from draftsmith.train.loop import Progress, fit
from draftsmith.train.losses import LossFn
from draftsmith.train.objective import custom_objective, loss_digest, parse_objective
from draftsmith.train.optimizer import usual_rate
from draftsmith.train.parallel import load_weights
from draftsmith.train.states_ahead import StatesAhead
from draftsmith.train.trainee import Trainee
from draftsmith.train.trainees.block import BlockTrainee, calibrate
from draftsmith.train.world import make_world

log = logging.getLogger(__name__)
# Held-out rows that a confidence is calibrated on; its few temperatures need no more.
_CALIBRATION_ROWS = 512
# Of the record of a draft.
_SUMMARY = (
    *("objective", "steps", "best_step", "heldout_loss", "heldout_alpha", "heldout_tau"),
    *("heldout_missing_mass", "confidence_error", "fingerprint"),
)
# Below this alpha one drafted token saves less than the cheapest step of a draft costs.
_NO_USE = 0.05


@attention_of_any_length()
def train(
    config: TrainConfig | None = None,
    command: str | None = None,
    *,
    loss: LossFn | None = None,
    **options: Any,
) -> JsonObject:
    """Train to the end, resuming what a killed run left. Return the summary.

    command: the command line to record. loss: your own loss in place of `config.objective`
    (`train.objective.custom_objective`); it is recorded by its name. Raise InputError for input
    that cannot be used, RunError for what fails while running. SIGTERM ends it with Terminated
    (exit code 143) and Ctrl-C with KeyboardInterrupt, with a checkpoint of that step; unless the
    host has a handler of its own, which then runs instead.
    """
    if loss is not None and not callable(loss):
        raise InputError("loss: is a function of your own; objective='fkl' names one of ours")
    config = configured(TrainConfig, config, options)
    out = Path(config.out)
    if config.push_to_hub is not None:
        check_push(config.push_to_hub)
    if command is None:
        command = command_line("train", config)
        if loss is not None:
            # The command line has no option for it.
            command = f"draftsmith.train in Python, with the loss {custom_objective(loss).spec}"
    atexit.unregister(leave_processes)
    with Run(out) as run, generators_kept():
        loaded = _prepare(config, loss)
        job = loaded.job
        _begin(run, job, command)
        published = from_main(lambda: checkpoint.is_published(job))
        for directory in (job.run_dir, job.checkpoints):
            on_main(partial(remove_leftovers, directory))
        if published:
            on_main(lambda: checkpoint.drop_old(job))
            record = read_record(out)
        else:
            settings = {"config": job.identity["config"] | known_by_content(config)}
            beside = without_secrets(asdict(job.config)) | {"processes": job.world.size}
            tracking.start(
                job.world.accelerator,
                out,
                job.identity | settings,
                beside,
                tracker=config.tracker,
            )
            record = _publish(job, _fit(loaded, run.stop), command)
        run.finish("steps", record["steps"])
    atexit.register(leave_processes)
    summary = {"checkpoint": str(out)} | {key: record[key] for key in _SUMMARY if key in record}
    return summary | pushed(out, config.push_to_hub, "model")


def _begin(run: Run, job: TrainingJob, command: str) -> None:
    """Claim the directory; keep the tokens that a new run chose to draft."""
    if not read_run(run.out):
        if (run.out / "config.json").exists():
            raise InputError(
                f"{run.out}: holds a model that this run did not make; choose another `out`"
            )
        refuse_foreign(run.out, ("*.safetensors", "README.md", RECORD))
    stage = f"draft ({job.config.kind})"
    run.begin(stage, job.identity, command, known_by_content(job.config))
    if not run.resumed and job.drafted is not None:
        tokens = {"tokens": job.drafted}
        on_main(lambda: write_sealed(job.draft_vocabulary, tokens))


@dataclass
class _Prepared:
    """A job and its draft in the trainee, which is None once it is freed."""

    job: TrainingJob
    trainee: Trainee | None

    def free(self) -> None:
        """Free the trainee and the wrappers before the process group.

        Their destructors join its threads while they hold Python's global lock and can deadlock.
        """
        self.trainee = None
        self.job.world.accelerator.free_memory()


def _fit(loaded: _Prepared, stop: StopSignal) -> Progress:
    """Train to the end; then, and when a signal stopped it, free the trainee."""
    assert loaded.trainee is not None
    try:
        done = fit(loaded.job, loaded.trainee, stop)
    except (KeyboardInterrupt, Terminated) as stopped:
        if stop.agreed:
            # The frames of the loop hold the wrappers too.
            traceback.clear_frames(stopped.__traceback__)
            loaded.free()
            atexit.register(leave_processes)
        raise
    loaded.free()
    return done


def _date(config: TrainConfig, tokenizer: Tokenizer | None) -> str | None:
    """Return the date in the data's prompts, if the chat template prints one; chats that are text
    get that of the distilled sets beside them.
    """
    sources = [*config.data, *config.heldout, *config.replay]
    dates = set_dates(sources)
    if len(dates) > 1:
        log.warning("data: the chat template printed several dates: %s", ", ".join(dates))
    kept = next(iter(dates), None)
    if tokenizer is None or all(Path(source).is_dir() for source in sources):
        return kept
    begun = read_run(Path(config.out)).get("identity", {}).get("date")
    return fix_date(tokenizer, config.date, begun or kept)


def _prepare(config: TrainConfig, loss: LossFn | None) -> _Prepared:
    """Load target, tokenizer, data and draft, check that they fit, and put the draft into its
    trainee.
    """
    objective = parse_objective(config.objective, config.loss_temperature)
    if loss is not None:
        objective = custom_objective(loss, config.loss_temperature)
    check_tracker(config.tracker)
    world = make_world(config)
    config = replace(config, optim=_with_name(config, zero=world.zero))
    tokenizer = _tokenizer(config)
    date = _date(config, tokenizer)
    options: JsonObject = loading(config) | {"device": str(world.device)}
    options["layers"] = config.states is None
    target = load_model(config.target, **options) if config.target else None
    with world.accelerator.main_process_first():
        ends = () if target is None else eos_ids(target)
        training, heldout = _examples(config, tokenizer, ends)
    job = TrainingJob(config, world, objective, training, heldout, tokenizer, target, date=date)
    torch.manual_seed(config.seed)
    chosen = None
    if read_run(Path(config.out)):
        chosen = from_main(lambda: draft_setup.kept_tokens(job.draft_vocabulary))
    draft = draft_setup.build(config, job.target, job.training, chosen)
    job = replace(job, drafted=draft_setup.drafted_tokens(draft))
    _check(job, draft)
    job = _with_rate(job, draft)
    source = None if loss is None else loss_digest(loss)
    job = replace(job, identity=_identity(job, draft) | {"loss_source": source})
    if is_main():
        _announce(job)
    trainee = draft_setup.make_trainee(job, draft)
    # From here on random numbers are for dropout and noise; processes with one seed would all drop
    # the same units.
    torch.manual_seed(row_seed(config.seed, f"process {own_group()}"))
    return _Prepared(job, trainee)


def _with_name(config: TrainConfig, *, zero: bool) -> Optim:
    """Choose the optimizer where the options leave it open."""
    optim = config.optim
    # DeepSpeed shares matrices in pieces, which Muon cannot train.
    muon = draft_setup.is_untrained(config.draft) and not zero
    name = optim.name or ("muon" if muon else "adamw")
    return replace(optim, name=name)


def _with_rate(job: TrainingJob, draft: Draft) -> TrainingJob:
    """Choose the rate where the options leave it open."""
    optim = job.config.optim
    trained = sum(each.numel() for each in draft.parameters() if each.requires_grad)
    lr = optim.lr or usual_rate(trained, taught=job.objective.needs_target)
    chosen = replace(optim, lr=lr)
    return replace(job, config=replace(job.config, optim=chosen))


def _identity(job: TrainingJob, draft: Draft) -> JsonObject:
    """Return what decides the result of a run, as plain JSON."""
    config = job.config
    target = job.target
    identity = {
        "config": identity_options(config) | {"objective": job.objective.spec},
        "data": job.training.digest,
        "heldout_data": job.heldout.digest,
        "target_fingerprint": None if target is None or config.states else fingerprint(target),
        "initial_fingerprint": draft_fingerprint(draft),
        "tokenizer": None if job.tokenizer is None else tokenizer_digest(job.tokenizer),
        "target_dtype": None if target is None else dtype_name(target),
        "precision": "bf16" if job.world.bf16 else "fp32",
        "rows_per_step": job.rows_per_step,
    }
    if job.date is not None:
        identity["date"] = job.date
    if config.states is not None:
        # A target without its layers has no fingerprint.
        identity["states"] = checkpoint_digest(str(config.target), config.revision)
    # As JSON, because the identity is compared with what was written.
    return dict(json.loads(json.dumps(identity)))


def _tokenizer(config: TrainConfig) -> Tokenizer | None:
    name = config.tokenizer or config.target or config.draft
    if name is None:
        return None
    revision = config.revision if name == config.target else None
    return load_tokenizer(name, config.trust_remote_code, config.chat_template, revision)


def _announce(job: TrainingJob) -> None:
    """Warn of data of another target, of rows that are dropped, and of held-out rows in `data`."""
    config = job.config
    targets = job.training.targets | job.heldout.targets
    if (
        config.target is not None
        and config.states is None
        and targets - {job.identity["target_fingerprint"]}
    ):
        log.warning("data: was distilled from other weights than those of target %s", config.target)
    dropped = job.training.dropped + (job.heldout.dropped if config.heldout else 0)
    if dropped:
        fits = f"within max_length {config.max_length}"
        log.warning("data: %d rows have no response token %s and are skipped", dropped, fits)
    if set(config.heldout) & set(config.data):
        log.warning(
            "heldout: %s is in `data` too; held-out figures will measure memory",
            config.heldout[0],
        )


def _publish(job: TrainingJob, done: Progress, command: str) -> JsonObject:
    config = job.config
    position = done.position
    objective = job.objective.spec
    _warn_of_no_use(position)
    record = {
        "kind": "draft-lm" if config.kind == "lm" else config.kind,
        "objective": objective,
        "target": config.target,
        "target_fingerprint": job.identity["target_fingerprint"],
        **({} if job.date is None else {"date": job.date}),
        "data": {
            "training": _data_record(job.training),
            "heldout": _data_record(job.heldout),
            "response_tokens": int(job.training.valid_tokens.sum()),
        },
        "processes": job.world.size,
        "sharing": job.world.sharing,
        "steps": position.step,
        "best_step": position.best_step,
        **position.best_figures,
        "metrics_sha256": from_main(lambda: sha256_file(job.metrics)),
        **provenance(command, asdict(config) | {"objective": objective}),
    }

    def write() -> None:
        best = draft_setup.build(config, job.target, job.training, job.drafted)
        load_weights(best, done.best)
        if isinstance(best, DraftVocabulary):
            best.read_draft_vocab()
        if isinstance(best, BlockHead) and best.config.confidence:
            record.update(_calibrate(job, best))
        record["fingerprint"] = draft_fingerprint(best)
        with checkpoint.publish(job, record) as directory:
            draft_setup.write(best, directory)
            write_prompt_hashes(directory, trained_prompts(job.training))

    on_main(write)
    tracking.finish(job.world.accelerator, record, Path(config.out))
    return record


def _warn_of_no_use(position: Position) -> None:
    alpha = position.best_figures.get("heldout_alpha")
    if is_main() and alpha is not None and alpha < _NO_USE:
        log.warning(
            "held-out alpha %.3f at step %d: too low for any tree to pay; raise optim.lr or steps, "
            "or give more answers",
            alpha,
            position.best_step,
        )


def _data_record(examples: Examples) -> JsonObject:
    return {"rows": len(examples.rows), "dropped": examples.dropped, "digest": examples.digest}


def _calibrate(job: TrainingJob, head: BlockHead) -> dict[str, float]:
    config = job.config
    target = job.target
    assert target is not None
    rows = range(min(len(job.heldout), _CALIBRATION_ROWS))
    size = min(config.batch_size, (len(rows) + 1) // 2)
    states = None
    if config.states is not None:
        states = draft_setup.state_files(job, head, target)
    ahead = states if isinstance(states, StatesAhead) else None
    if ahead is not None:
        ahead.begin(tokens_of(job.heldout, rows))
    trainee = BlockTrainee(head.to(target.device), job.objective, target, config.packing, states)
    groups = [rows[at : at + size] for at in range(0, len(rows), size)]
    batches = (collate(job.heldout, group).to(target.device) for group in groups)
    figures = calibrate(trainee, batches)
    if ahead is not None:
        ahead.close()
    head.to("cpu")
    return figures


def _check(job: TrainingJob, draft: Draft) -> None:
    """Raise InputError unless draft, target, tokenizer and data belong together and there is a
    teacher if needed.
    """
    config = job.config
    target = job.target
    sizes: dict[str, int] = {}
    if not isinstance(draft, PreTrainedModel):
        sizes["draft"] = draft.vocab_size
    elif job.tokenizer is not None:
        # Fresh weights come without a tokenizer that could differ from the target's.
        if config.draft is not None and target is not None:
            check_tokens_agree(config.draft, draft, target, job.tokenizer, config.trust_remote_code)
        check_tokenizer(config.draft or config.draft_config or "draft", draft, job.tokenizer)
    for role, model in (("draft", draft), ("target", target)):
        if not isinstance(model, PreTrainedModel):
            continue
        sizes[role] = vocabulary_size(model)
        limit = context_length(model)
        if limit is not None and config.max_length > limit:
            raise InputError(
                f"max_length: {config.max_length} is more than the {limit} positions of the {role}"
            )
    token = max(job.training.max_token, job.heldout.max_token)
    for role, size in sizes.items():
        if token >= size:
            raise InputError(
                f"data: token {token} exceeds the {role}'s vocabulary of {size}; use data in its "
                "tokens"
            )
    stored = job.training.stored and job.heldout.stored
    if target is None and not stored and job.objective.needs_target:
        raise InputError(
            f"target: objective {job.objective.spec} needs the target as its teacher, or data with "
            "teacher columns"
        )


def _examples(
    config: TrainConfig, tokenizer: Tokenizer | None, ends: Sequence[int]
) -> tuple[Examples, Examples]:
    def read(option: str) -> Examples:
        try:
            return load_examples(
                getattr(config, option),
                tokenizer,
                config.max_length,
                ends=ends,
                thinking=config.thinking == "keep",
            )
        except InputError as error:
            raise InputError(f"{option}: {error}") from None

    training = read("data")
    if config.heldout:
        heldout = read("heldout")
    else:
        training, heldout = divide(training, config.heldout_fraction)
    training = chats_read_once(training)
    heldout = chats_read_once(heldout)
    replay = chats_read_once(read("replay")) if config.replay else None
    if config.packing:
        training = packed(training, config.seed)
        heldout = packed(heldout, config.seed)
        replay = None if replay is None else packed(replay, config.seed)
    return training if replay is None else with_replay(training, replay), heldout
