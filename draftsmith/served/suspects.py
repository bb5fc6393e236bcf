"""Why a served draft accepts less than predicted: each suspect changes what a prediction is made
from.

A change is a generator of (detail, changed case); it yields nothing where it does not apply. Models
are copied before they are changed. Add a suspect as a function and an entry of `SUSPECTS`.

Legend: B rows, T tokens, H hidden size, P keys, D draft vocabulary.
"""

import copy
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, Literal

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from drafts.heads.eagle import FeatureHead
from drafts.heads.eagle3 import Eagle3Head
from drafts.load import Draft
from draftsmith_core.models import text_config
from draftsmith_core.sampling import Sampling
from eval.acceptance import Continuation


@dataclass(frozen=True)
class Case:
    """What a prediction is made from: models, texts, the sampling, and the rule by which drafted
    tokens stay.

    rows: the served texts. read_ids: the prompts as the server read them. samplings: other ones it
    may draw from.
    """

    target: PreTrainedModel
    draft: Draft
    rows: Sequence[Continuation]
    sampling: Sampling
    rule: str
    read_ids: Sequence[Sequence[int]]
    samplings: Sequence[Sampling]


Change = Callable[[Case], Iterator[tuple[str, Case]]]


@dataclass(frozen=True)
class Suspect:
    """A cause, and what to do about it. of_text: it changes the texts that the target gives,
    too.
    """

    change: Change
    remedy: str
    of_text: bool = False


def _layers(case: Case) -> Iterator[tuple[str, Case]]:
    if isinstance(case.draft, PreTrainedModel) or len(case.draft.hidden_layers) == 1:
        return
    for detail, step in (("one later", 1), ("one earlier", -1)):
        draft: Any = copy.deepcopy(case.draft)
        draft.hidden_layers = tuple(layer + step for layer in draft.hidden_layers)
        if (
            min(draft.hidden_layers) >= 0
            and max(draft.hidden_layers) <= text_config(case.target).num_hidden_layers
        ):
            yield detail, replace(case, draft=draft)


def _residual(case: Case) -> Iterator[tuple[str, Case]]:
    if isinstance(case.draft, Eagle3Head):
        draft = copy.deepcopy(case.draft)
        layer: Any = draft.midlayer
        layer.norm_before_residual = not layer.norm_before_residual
        yield f"taken as {str(layer.norm_before_residual).lower()}", replace(case, draft=draft)


def _vocabulary(case: Case) -> Iterator[tuple[str, Case]]:
    if not isinstance(case.draft, Eagle3Head) or not case.draft.reduced:
        return
    ids_D, offsets_D = case.draft.target_ids_D, case.draft.d2t
    rows_D = torch.arange(len(ids_D), device=ids_D.device)
    maps = {
        "not applied": rows_D,
        "its offsets taken for token ids": offsets_D,
        "shifted by one row": offsets_D.roll(1) + rows_D,
        "one token up": ids_D + 1,
        "one token down": ids_D - 1,
    }
    for detail, wrong_D in maps.items():
        draft = copy.deepcopy(case.draft)
        draft.target_ids_D = wrong_D.clamp(0, case.draft.vocab_size - 1)
        yield detail, replace(case, draft=draft)


def _rotary_modules(model: nn.Module) -> list[tuple[nn.Module, str, Any]]:
    return [
        (m, name, c)
        for m in model.modules()
        for name, c in m.named_children()
        if hasattr(c, "inv_freq")
    ]


def _rope(role: Literal["target", "draft"], case: Case) -> Iterator[tuple[str, Case]]:
    model: nn.Module = getattr(case, role)
    rope: dict[str, Any] = next(
        (rotary.config.rope_parameters for _, _, rotary in _rotary_modules(model)), {}
    )
    plain = {"rope_type": "default", "rope_theta": rope.get("rope_theta")}
    losses = {
        "scaling dropped": plain,
        "theta and scaling dropped": plain | {"rope_theta": 10000.0},
    }
    for detail, left in losses.items():
        if "rope_type" not in rope or left == {key: rope.get(key) for key in left}:
            continue
        changed = copy.deepcopy(model)
        for parent, name, rotary in _rotary_modules(changed):
            config = copy.deepcopy(rotary.config)
            config.rope_parameters = {
                key: rope[key] for key in ("partial_rotary_factor",) if key in rope
            } | left
            setattr(parent, name, type(rotary)(config).to(rotary.inv_freq.device))
        yield detail, replace(case, **{role: changed})  # type: ignore[arg-type]


def _no_prompt(case: Case) -> Iterator[tuple[str, Case]]:
    texts = [[*row.prompt_ids, *row.output_ids] for row in case.rows]
    lengths = [len(row.prompt_ids) - 1 for row in case.rows]

    def in_prompt(ids_BT: Tensor) -> Tensor:
        """Whether a column `[B, T]` is in the prompt, before the token that was answered first."""
        read = [row[: ids_BT.shape[1]] for row in ids_BT.tolist()]
        hidden = [
            next((n for n, t in zip(lengths, texts, strict=True) if r[: len(t) - 1] == t[:-1]), 0)
            for r in read
        ]
        return (
            torch.arange(ids_BT.shape[1], device=ids_BT.device)
            < torch.tensor(hidden, device=ids_BT.device)[:, None]
        )

    def of_head(module: nn.Module, args: tuple[Any, ...]) -> tuple[Any, ...] | None:
        ids_BT, features_BTH, sees_B1TP, *rest = args
        if not rest[-1].get_seq_length():
            hidden.append(in_prompt(ids_BT))
        columns = hidden[-1].shape[1]
        outside_B11P = nn.functional.pad(
            ~hidden[-1], (0, sees_B1TP.shape[-1] - columns), value=True
        )[:, None, None]
        itself_TP = torch.eye(columns, sees_B1TP.shape[-1], dtype=torch.bool, device=ids_BT.device)
        return ids_BT, features_BTH, sees_B1TP & (outside_B11P | itself_TP), *rest

    def of_model(
        module: nn.Module, args: Any, options: dict[str, Any]
    ) -> tuple[Any, dict[str, Any]]:
        mask_BT = options["attention_mask"] * ~in_prompt(options["input_ids"])
        return args, options | {"attention_mask": mask_BT}

    hidden: list[Tensor] = []
    draft: Any = copy.deepcopy(case.draft)
    if isinstance(draft, PreTrainedModel):
        draft.register_forward_pre_hook(of_model, with_kwargs=True)
    elif isinstance(draft, FeatureHead):
        draft.register_forward_pre_hook(of_head)
    else:
        return
    yield "the draft has not read the prompt", replace(case, draft=draft)


def _greedy_draft(case: Case) -> Iterator[tuple[str, Case]]:
    if case.rule != "naive" and not case.sampling.greedy:
        yield "it takes its most probable token", replace(case, rule="naive")


def _template(case: Case) -> Iterator[tuple[str, Case]]:
    rows = [
        replace(row, prompt_ids=[*read, row.prompt_ids[-1]])
        for row, read in zip(case.rows, case.read_ids, strict=True)
    ]
    if changed := sum(
        a.prompt_ids != list(b.prompt_ids) for a, b in zip(rows, case.rows, strict=True)
    ):
        yield f"{changed} of {len(rows)} prompts have other tokens there", replace(case, rows=rows)


def _sampling(case: Case) -> Iterator[tuple[str, Case]]:
    for sampling in case.samplings:
        if sampling != case.sampling:
            values = {"top_k": sampling.top_k, "top_p": sampling.top_p, "min_p": sampling.min_p}
            more = [
                f"{key} {value:g}"
                for key, value in values.items()
                if value != getattr(Sampling(), key)
            ]
            yield (
                ", ".join([f"temperature {sampling.temperature:g}", *more]),
                replace(case, sampling=sampling),
            )


def _rounded(case: Case) -> Iterator[tuple[str, Case]]:
    if case.target.dtype != torch.bfloat16:
        yield "bfloat16", replace(case, target=copy.deepcopy(case.target).to(torch.bfloat16))  # type: ignore[arg-type]
    target = copy.deepcopy(case.target)
    for name, module in target.named_modules():
        if (
            isinstance(module, nn.Linear)
            and module.in_features % 32 == 0
            and not name.endswith("lm_head")
        ):
            blocks = module.weight.data.view(-1, 32)
            scale = blocks.gather(1, blocks.abs().argmax(1, keepdim=True)) / -8
            blocks.copy_((blocks / scale).nan_to_num().add(0.5).floor().clamp(-8, 7) * scale)
    yield "four bits (Q4_0)", replace(case, target=target)


_EXPORT = "write the draft again with `draftsmith export` for this engine"
# Of two that fit alike, the earlier one is named.
SUSPECTS: dict[str, Suspect] = {
    "greedy draft": Suspect(
        _greedy_draft, 'let the draft sample: "draft_sample_method": "probabilistic" in vLLM'
    ),
    "auxiliary layers": Suspect(_layers, f"check eagle_aux_hidden_state_layer_ids, or {_EXPORT}"),
    "norm_before_residual": Suspect(
        _residual, f"write this key into the draft's config.json, or {_EXPORT}"
    ),
    "vocabulary map": Suspect(_vocabulary, f"check d2t, or {_EXPORT}"),
    "rope of the draft": Suspect(
        partial(_rope, "draft"), "give the draft's rope_theta and rope_scaling as here"
    ),
    "prefix cache": Suspect(_no_prompt, "start the server without prefix caching, or update it"),
    "rope of the target": Suspect(
        partial(_rope, "target"), "give the target's rope_theta and rope_scaling as here", True
    ),
    "chat template": Suspect(
        _template, "serve with the target's own chat template, or train with the server's", True
    ),
    "sampling": Suspect(
        _sampling, "give the temperature with each request, or mend the server's defaults", True
    ),
    "rounding of the target": Suspect(
        _rounded, "serve the target in the type that the draft was trained for", True
    ),
}
