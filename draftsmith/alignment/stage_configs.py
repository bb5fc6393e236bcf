"""The options of each stage of an alignment, from those of `align` with nothing left open."""

from pathlib import Path
from typing import Any

from distill.config import DistillConfig
from drafts.load import draft_kind
from draftsmith.alignment.config import AlignConfig
from draftsmith.alignment.expected import FRESH_DEPTHS
from draftsmith_core.errors import InputError
from draftsmith_core.models import resolve_device
from draftsmith_core.processes import launched
from draftsmith_core.prompt_rows import NAME, parse_named
from draftsmith_core.settings import loading
from eval.config import EvalConfig
from train.config import HeadOptions, TrainConfig


def _common(config: AlignConfig) -> dict[str, Any]:
    return {"target": config.target, "chat_template": config.chat_template, **loading(config)}


def distill_config(config: AlignConfig, prompts: str) -> DistillConfig:
    """Options of the stage that distils the answers to `prompts` (a file)."""
    values = {key: value for key, value in config.distill.items() if key != "general_texts"}
    values |= {"prompts": prompts, "out": str(Path(config.out) / "distilled")}
    values |= {"prompt_tokens": config.prompt_tokens, "seed": config.seed}
    return DistillConfig(**values | _common(config))


def general_config(config: AlignConfig) -> DistillConfig:
    """Options of the general text to replay: the target's own, from any token on, at its own distribution."""
    chosen = config.distill
    values = {key: chosen[key] for key in ("max_new_tokens", "batch_size", "part_rows")}
    values |= {"prompts": f"token:{chosen['general_texts']}", "out": str(Path(config.out) / "general")}
    values |= {"temperature": 1.0, "top_p": 1.0, "top_k": 0, "min_p": 0.0, "seed": config.seed}
    return DistillConfig(**values | _common(config))


def train_config(config: AlignConfig, name: str) -> TrainConfig:
    """Options of the training run of the draft `name`, one of `config.trained()`."""
    out, objective = Path(config.out), config.trained()[name]
    index = config.objective.index(objective)
    values = dict(config.train)
    rows = values.pop("rows_per_step")
    if name in config.plain_drafts():
        values |= {"replay_fraction": 0.0, "anchor_kl": 0.0}
    else:
        values["replay"] = [str(out / "general")] if values["replay_fraction"] else []
        # As many sequences of answers as without replay.
        values["steps"] = round(values["steps"] / (1 - values["replay_fraction"]))
    batch = values["batch_size"] * launched()
    if rows % batch:
        raise InputError(
            f"train.batch_size: {values['batch_size']} on {launched()} processes does not divide "
            f"train.rows_per_step, {rows}; change one of them"
        )
    head: dict[str, Any] = {}
    if config.draft is not None:
        kind = draft_kind(config.draft)
    elif values.get("draft_vocab_size"):
        kind, head = "eagle3", {"test_steps": FRESH_DEPTHS}
    else:
        kind = "eagle"
    if kind != "draft" and resolve_device(config.device).type == "cpu":
        # Each pass over the answers would read them with the target again.
        head["features"] = str(out / "features")
    values |= {"head": HeadOptions(**head)}
    values |= {"kind": "lm" if kind == "draft" else kind, "draft": config.draft, "objective": objective}
    values |= {"out": str(out / name), "data": [str(out / "distilled")], "accumulation": rows // batch}
    values |= {"seed": config.seed + 1 + index}
    return TrainConfig(**values | _common(config))


def eval_config(config: AlignConfig) -> EvalConfig:
    """Options of the evaluation of the drafts that are compared with the base."""
    out = Path(config.out)
    drafts = {"base": config.draft} if config.draft else {}
    drafts |= {name: str(out / name) for name in config.compared()}
    values: dict[str, Any] = {
        "draft": [f"{name}={source}" for name, source in drafts.items()],
        "id": config.id or [f"{_set_name(config)}={out / 'prompts' / 'heldout.jsonl'}"],
        "ood": config.ood,
        "out": str(out / "eval"),
        "prompt_tokens": config.prompt_tokens,
        "seed": config.seed + 1 + len(config.objective),
    }
    values |= {key: config.distill[key] for key in ("top_p", "top_k", "min_p")}
    return EvalConfig(**values | config.eval | _common(config))


def _set_name(config: AlignConfig) -> str:
    """The name of the held-out prompts: that of their file, unless it is no name or another set has it."""
    name = Path(config.prompts.partition(":")[0]).stem
    taken = {*parse_named("ood", config.ood), "id", "ood"}
    return name if NAME.fullmatch(name) and name not in taken else "heldout"
