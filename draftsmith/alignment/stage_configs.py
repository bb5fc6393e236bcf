"""The options of each stage: real configurations, made from those of `align`."""

from dataclasses import asdict, dataclass, fields
from pathlib import Path
from typing import cast

from draftsmith.alignment.config import AlignConfig, DistillChoices, EvalChoices, TrainChoices
from draftsmith.core.devices import resolve_device
from draftsmith.core.errors import InputError
from draftsmith.core.io import JsonObject
from draftsmith.core.prompt_rows import NAME, parse_named
from draftsmith.core.ranks import groups
from draftsmith.core.settings import loading
from draftsmith.distill.config import DistillConfig
from draftsmith.drafts.draft_sources import JOINED
from draftsmith.drafts.load import draft_kind
from draftsmith.eval.config import EvalConfig
from draftsmith.train.config import DraftKind, HeadOptions, TrainConfig

# Names in the evaluation: prompt lookup, and prompt lookup beside the draft.
LOOKUP = "lookup"
BOTH = "both"
_FRESH_DEPTHS = 4  # a fresh EAGLE-3 head is trained as deep as trees usually go


def _common(config: AlignConfig) -> JsonObject:
    shared = {key: getattr(config, key) for key in ("target", "chat_template", "date")}
    return shared | loading(config)


@dataclass(frozen=True)
class Stages:
    """The options of every stage. general: of the text to replay; None without replay. training: by
    the name of the draft.
    """

    distill: DistillConfig
    general: DistillConfig | None
    training: dict[str, TrainConfig]
    evaluation: EvalConfig


def stages_of(config: AlignConfig) -> Stages:
    """Return the options of every stage; those of `align` are complete."""
    return Stages(
        distill=distill_config(config),
        general=general_config(config) if config.train.replay_fraction else None,
        training={name: train_config(config, name) for name in config.trained()},
        evaluation=eval_config(config),
    )


def given(options: JsonObject) -> JsonObject:
    """Return options without those that are open, also in groups."""
    return {
        key: given(value) if isinstance(value, dict) else value
        for key, value in options.items()
        if value is not None
    }


def _shared(
    choices: DistillChoices | TrainChoices | EvalChoices,
    stage: type[DistillConfig | TrainConfig | EvalConfig],
) -> JsonObject:
    """Return the options of `align` that the stage itself has."""
    options = given(asdict(choices))
    return {field.name: options[field.name] for field in fields(stage) if field.name in options}


def distill_config(config: AlignConfig) -> DistillConfig:
    """Return the options of distilling the answers to the prompts that are not held out."""
    out = config.directory
    return DistillConfig(
        **_shared(config.distill, DistillConfig),
        **_common(config),
        prompts=config.prompts if config.id else str(out / "prompts" / "train.jsonl"),
        out=str(out / "distilled"),
        prompt_tokens=config.prompt_tokens,
        seed=config.seed,
    )


def general_config(config: AlignConfig) -> DistillConfig:
    """Return the options of writing text to replay: what the target writes by itself."""
    return DistillConfig(
        **_common(config),
        prompts=f"{config.distill.general_from}:{config.distill.general_texts}",
        out=str(config.directory / "general"),
        max_new_tokens=config.distill.max_new_tokens,
        batch_size=config.distill.batch_size,
        part_rows=config.distill.part_rows,
        temperature=1.0,
        top_p=1.0,
        top_k=0,
        min_p=0.0,
        seed=config.seed,
    )


def train_config(config: AlignConfig, name: str) -> TrainConfig:
    """Return the options of training the draft `name`, one of `config.trained()`."""
    out = config.directory
    objective = config.trained()[name]
    options = config.train
    replayed = 0.0 if name in config.plain_drafts() else options.replay_fraction
    rows = options.rows_per_step
    batch = options.batch_size * groups()
    if rows % batch:
        raise InputError(
            f"train.batch_size: {options.batch_size} on {groups()} processes does not divide "
            f"train.rows_per_step, {rows}; change one of them"
        )
    kind = _kind(config)
    # On a CPU, cache the target's states: else it would read the answers in every pass. One
    # language model keeps them in memory; several share them.
    again = kind != "lm" or len(config.trained()) > 1
    cached = again and resolve_device(config.device).type == "cpu"
    head = HeadOptions(
        features=str(out / "features") if cached else None,
        test_steps=_FRESH_DEPTHS if kind == "eagle3" and config.draft is None else None,
    )
    # Replay adds steps of its own: as many sequences of answers are trained on as without it.
    replay_steps = round(options.steps / (1 - replayed)) - options.steps
    shared = _shared(options, TrainConfig) | _common(config)
    # A checkpoint of a large draft is several times its size.
    shared |= {"steps": options.steps + replay_steps, "replay_fraction": replayed, "keep": 1}
    return TrainConfig(
        **shared,
        out=str(out / name),
        kind=kind,
        draft=config.draft,
        objective=objective,
        data=[str(out / "distilled")],
        replay=[str(out / "general")] if replayed else [],
        accumulation=rows // batch,
        head=head,
        tracker=config.tracker,
        seed=config.seed + 1 + config.objective.index(objective),
    )


def expected_training(config: AlignConfig) -> TrainConfig:
    """Return the options of training as far as they are known before anything is loaded."""
    choices = _shared(config.train, TrainConfig)
    kind = _kind(config) or "eagle3"
    return TrainConfig(
        **{key: choices[key] for key in choices if key in ("batch_size", "max_length")},
        target=config.target,
        **loading(config),
        out=config.out,
        kind=kind,
        draft=config.draft,
        objective=config.objective[0],
        data=[config.prompts],
        head=HeadOptions(test_steps=_FRESH_DEPTHS if kind == "eagle3" else None),
    )


def _kind(config: AlignConfig) -> DraftKind:
    if config.draft is None:
        return config.kind
    kind = draft_kind(config.draft).replace("draft", "lm")
    if config.kind not in (None, kind):
        raise InputError(f"kind: {config.draft} is of kind {kind}; leave --kind out")
    return cast(DraftKind, kind)


def contenders(config: AlignConfig) -> list[str]:
    """Return what is compared, NAME=SOURCE: the base, the trained drafts, and prompt lookup, the
    rival that needs no training; of a single trained draft also the two joined.
    """
    drafts = {"base": config.draft} if config.draft else {}
    drafts |= {name: str(config.directory / name) for name in config.trained()}
    drafts[LOOKUP] = "prompt_lookup"
    if len(config.trained()) == 1:
        (name,) = config.trained()
        drafts[BOTH] = JOINED + drafts[name]
    return [f"{name}={source}" for name, source in drafts.items()]


def eval_config(config: AlignConfig) -> EvalConfig:
    """Return the options of evaluating all contenders."""
    out = config.directory
    # Name held-out prompts as their file, unless that is no name or another set has it.
    heldout = Path(config.prompts.partition(":")[0]).stem
    if not NAME.fullmatch(heldout) or heldout in (*parse_named("ood", config.ood), "id", "ood"):
        heldout = "heldout"
    own = config.id or [f"{heldout}={out / 'prompts' / 'heldout.jsonl'}"]
    changed = []
    if config.eval.other_template:
        for name, source in parse_named("id", own).items():
            changed.append(f"{name}-template=template:{source}")
    return EvalConfig(
        **_shared(config.eval, EvalConfig),
        **_common(config),
        draft=contenders(config),
        id=own,
        ood=[*config.ood, *changed],
        out=str(out / "eval"),
        top_p=config.distill.top_p,
        top_k=config.distill.top_k,
        min_p=config.distill.min_p,
        prompt_tokens=config.prompt_tokens,
        tracker=config.tracker,
        seed=config.seed + 1 + len(config.objective),
    )
