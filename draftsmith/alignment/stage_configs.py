"""What `align` asks of each stage: the options of `distill`, `train` and `eval` that follow from its own."""

import dataclasses
from pathlib import Path
from typing import Any

from distill.config import DistillConfig
from drafts.load import draft_kind
from draftsmith.alignment.config import AlignConfig
from draftsmith_core.errors import InputError
from draftsmith_core.model_options import loading
from draftsmith_core.processes import launched
from eval.config import EvalConfig
from eval.request import NAME
from train.config import DraftKind, HeadOptions, Optim, TrainConfig


def _common(config: AlignConfig) -> dict[str, Any]:
    return {"target": config.target, "chat_template": config.chat_template, **loading(config)}


def distill_config(config: AlignConfig, prompts: str) -> DistillConfig:
    """Options of the stage that distils the answers to `prompts` (a file)."""
    chosen: dict[str, Any] = dataclasses.asdict(config.distill)
    del chosen["general_texts"]
    return DistillConfig(
        prompts=prompts,
        out=str(Path(config.out) / "distilled"),
        prompt_tokens=config.prompt_tokens,
        seed=config.seed,
        **chosen,
        **_common(config),
    )


def general_config(config: AlignConfig) -> DistillConfig:
    """The general text to replay: what the target writes by itself from any token on, at its own distribution."""
    return DistillConfig(
        prompts=f"token:{config.distill.general_texts}",
        out=str(Path(config.out) / "general"),
        max_new_tokens=config.distill.max_new_tokens or 1,
        batch_size=config.distill.batch_size or 1,
        part_rows=config.distill.part_rows,
        temperature=1.0,
        top_p=1.0,
        top_k=0,
        min_p=0.0,
        seed=config.seed,
        **_common(config),
    )


def train_config(config: AlignConfig, name: str) -> TrainConfig:
    """The training run of the draft `name`, one of `config.trained()`."""
    chosen: dict[str, Any] = dataclasses.asdict(config.train)
    chosen["lora"] = config.train.lora
    rates, rows = chosen.pop("lr"), chosen.pop("rows_per_step")
    head = HeadOptions(draft_vocab_size=chosen.pop("draft_vocab_size") or None)
    objective = config.trained()[name]
    index = config.objective.index(objective)
    if name in config.plain_drafts():
        chosen |= {"replay_fraction": 0.0, "anchor_kl": 0.0}
    elif chosen["replay_fraction"]:
        chosen["replay"] = [str(Path(config.out) / "general")]
    optim = Optim(lr=rates[index % len(rates)], warmup_steps=chosen.pop("warmup_steps"))
    batch = chosen["batch_size"] * launched()
    if rows % batch:
        raise InputError(
            f"train.batch_size: {chosen['batch_size']} on {launched()} processes does not divide "
            f"train.rows_per_step, {rows}; change one of them"
        )
    kind: DraftKind = "eagle"
    if config.draft is not None:
        found = draft_kind(config.draft)
        kind = "lm" if found == "draft" else found  # type: ignore[assignment]
    return TrainConfig(
        out=str(Path(config.out) / name),
        data=[str(Path(config.out) / "distilled")],
        kind=kind,
        draft=config.draft,
        objective=objective,
        accumulation=rows // batch,
        optim=optim,
        head=head,
        seed=config.seed + 1 + index,
        **chosen,
        **_common(config),
    )


def eval_config(config: AlignConfig) -> EvalConfig:
    """The evaluation of the drafts that are compared with the one they started from."""
    chosen: dict[str, Any] = dataclasses.asdict(config.eval)
    drafts = {"base": config.draft} if config.draft else {}
    drafts |= {name: str(Path(config.out) / name) for name in config.compared()}
    return EvalConfig(
        draft=[f"{name}={source}" for name, source in drafts.items()],
        id=config.id or [f"{_set_name(config)}={Path(config.out) / 'prompts' / 'heldout.jsonl'}"],
        ood=config.ood,
        out=str(Path(config.out) / "eval"),
        top_p=config.distill.top_p,
        top_k=config.distill.top_k,
        min_p=config.distill.min_p,
        prompt_tokens=config.prompt_tokens,
        seed=config.seed + 1 + len(config.objective),
        **chosen,
        **_common(config),
    )


def _set_name(config: AlignConfig) -> str:
    """What the held-out prompts are called: as their file, where that can be a name and no other set has it."""
    name = Path(config.prompts.partition(":")[0]).stem
    taken = {each.partition("=")[0] for each in config.ood} | {"id", "ood"}
    return name if NAME.fullmatch(name) and name not in taken else "heldout"
