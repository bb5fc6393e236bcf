"""Why a served draft accepts less than predicted: each suspect changes what a prediction is made
from.

A change yields (detail, changed case), or nothing if it does not apply. It copies a model before it
changes it. To add a suspect, write a function, enter it in `OF_THE_DRAFT` or `OF_THE_TARGET`, and
its remedy in suspects.yaml.

Legend: B rows, T tokens, H hidden size, P keys, D draft vocabulary.
"""

import copy
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from typing import Any, Literal

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from draftsmith.core.io import read_words
from draftsmith.core.models import text_config
from draftsmith.core.sampling import Sampling
from draftsmith.drafts.heads.eagle3 import Eagle3Head
from draftsmith.drafts.heads.feature_head import FeatureHead
from draftsmith.serving.replay import Case, log_likelihoods

# Kinds of penalties, and the steps in which they are tried: twenty each, then finer.
_PENALTY_STEPS = {
    "repetition_penalty": 0.05,
    "presence_penalty": 0.1,
    "frequency_penalty": 0.1,
}
Cases = Iterator[tuple[str, Case]]
Change = Callable[[Case], Cases]


def _layers(case: Case) -> Cases:
    if isinstance(case.draft, PreTrainedModel) or -1 in case.draft.hidden_layers:
        return
    deepest = text_config(case.target).num_hidden_layers
    for detail, step in {"one later": 1, "one earlier": -1}.items():
        layers = tuple(layer + step for layer in case.draft.hidden_layers)
        if min(layers) >= 0 and max(layers) <= deepest:
            draft: Any = copy.deepcopy(case.draft)
            draft.hidden_layers = layers
            yield detail, replace(case, draft=draft)


def _residual(case: Case) -> Cases:
    if isinstance(case.draft, Eagle3Head):
        draft = copy.deepcopy(case.draft)
        layer: Any = draft.midlayer
        layer.norm_before_residual = not layer.norm_before_residual
        taken = str(layer.norm_before_residual).lower()
        yield f"taken as {taken}", replace(case, draft=draft)


def _vocabulary(case: Case) -> Cases:
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


def _rope_of(role: Literal["draft", "target"]) -> Change:
    def change(case: Case) -> Cases:
        for detail, model in _other_ropes(getattr(case, role)):
            yield detail, replace(case, **{role: model})

    return change


def _other_ropes(model: nn.Module) -> Iterator[tuple[str, Any]]:
    """Yield copies of the model without scaling, and without scaling and theta."""
    rope: dict[str, Any] = {}
    for parent, name in _rotary_modules(model):
        rope = getattr(parent, name).config.rope_parameters
    if "rope_type" not in rope:
        return
    plain = {"rope_type": "default", "rope_theta": rope.get("rope_theta")}
    losses = {
        "scaling dropped": plain,
        "theta and scaling dropped": plain | {"rope_theta": 10000.0},
    }
    for detail, left in losses.items():
        if left.items() <= rope.items():
            continue
        kept = {key: rope[key] for key in ("partial_rotary_factor",) if key in rope}
        changed = copy.deepcopy(model)
        for parent, name in list(_rotary_modules(changed)):
            rotary = getattr(parent, name)
            config = copy.deepcopy(rotary.config)
            config.rope_parameters = kept | left
            again = type(rotary)(config)
            setattr(parent, name, again.to(rotary.inv_freq.device))
        yield detail, changed


def _rotary_modules(model: nn.Module) -> Iterator[tuple[nn.Module, str]]:
    """Yield the parent and the name of every rotary embedding."""
    for parent in model.modules():
        for name, child in parent.named_children():
            if hasattr(child, "inv_freq"):
                yield parent, name


def _no_prompt(case: Case) -> Cases:
    draft: Any = copy.deepcopy(case.draft)
    hides = _HiddenPrompt(case)
    if isinstance(draft, PreTrainedModel):
        draft.register_forward_pre_hook(hides.from_model, with_kwargs=True)
    elif isinstance(draft, FeatureHead):
        draft.register_forward_pre_hook(hides.from_head)
    else:
        return
    yield "the draft has not read the prompt", replace(case, draft=draft)


class _HiddenPrompt:
    """Hooks that keep a draft from attending to the prompt, up to the token answered first."""

    def __init__(self, case: Case) -> None:
        self.texts = [row.ids for row in case.rows]
        self.lengths = [len(row.prompt_ids) - 1 for row in case.rows]
        self.hidden_BT = torch.zeros(0, 0, dtype=torch.bool)

    def in_prompt(self, ids_BT: Tensor) -> Tensor:
        """Return which columns of `[B, T]` are hidden. Rows are recognised by their text."""
        hidden_BT = torch.zeros_like(ids_BT, dtype=torch.bool)
        for row, ids in enumerate(ids_BT.tolist()):
            for text, length in zip(self.texts, self.lengths, strict=True):
                if ids[: len(text) - 1] == text[:-1]:
                    hidden_BT[row, :length] = True
                    break
        return hidden_BT

    def from_head(self, module: nn.Module, args: tuple[Any, ...]) -> tuple[Any, ...]:
        ids_BT, features_BTH, sees_B1TP, *rest = args
        # The cache is empty at the first depth; later depths see the same columns.
        if not rest[-1].get_seq_length():
            self.hidden_BT = self.in_prompt(ids_BT)
        columns = self.hidden_BT.shape[1]
        keys = sees_B1TP.shape[-1]
        outside_BP = nn.functional.pad(~self.hidden_BT, (0, keys - columns), value=True)
        itself_TP = torch.eye(columns, keys, dtype=torch.bool, device=ids_BT.device)
        allowed_B1TP = outside_BP[:, None, None] | itself_TP
        return ids_BT, features_BTH, sees_B1TP & allowed_B1TP, *rest

    def from_model(
        self, module: nn.Module, args: object, options: dict[str, Tensor]
    ) -> tuple[object, dict[str, Tensor]]:
        mask_BT = options["attention_mask"] * ~self.in_prompt(options["input_ids"])
        return args, options | {"attention_mask": mask_BT}


def _greedy_draft(case: Case) -> Cases:
    if case.rule != "naive" and not case.sampling.greedy:
        yield "it takes its most probable token", replace(case, rule="naive")


def _template(case: Case) -> Cases:
    rows = []
    differing = 0
    for row, read_ids in zip(case.rows, case.read_ids, strict=True):
        prompt_ids = [*read_ids, row.prompt_ids[-1]]
        differing += prompt_ids != list(row.prompt_ids)
        rows.append(replace(row, prompt_ids=prompt_ids))
    if differing:
        detail = f"{differing} of {len(rows)} prompts have other tokens there"
        yield detail, replace(case, rows=rows)


def _sampling(case: Case) -> Cases:
    usual = Sampling()
    for sampling in case.samplings:
        if sampling == case.sampling:
            continue
        parts = [f"temperature {sampling.temperature:g}"]
        for key in ("top_k", "top_p", "min_p"):
            value = getattr(sampling, key)
            if value != getattr(usual, key):
                parts.append(f"{key} {value:g}")
        yield ", ".join(parts), replace(case, sampling=sampling)


def _penalty(case: Case) -> Cases:
    """The one under which the texts are likeliest: servers do not report theirs."""
    none = case.sampling
    tried = [none]
    for kind, step in _PENALTY_STEPS.items():
        tried += [_moved(none, kind, step * count) for count in range(1, 21)]
    best = _likeliest(case, tried)
    if best == none:
        return
    (kind,) = (kind for kind in _PENALTY_STEPS if getattr(best, kind) != getattr(none, kind))
    step = _PENALTY_STEPS[kind]
    for _ in range(3):
        step /= 4
        near = [_moved(best, kind, step * count) for count in (-3, -2, -1, 1, 2, 3)]
        best = _likeliest(case, [best, *near])
    yield f"{kind.replace('_', ' ')} {getattr(best, kind):.3g}", replace(case, sampling=best)


def _moved(sampling: Sampling, kind: str, by: float) -> Sampling:
    values: dict[str, Any] = {kind: getattr(sampling, kind) + by}
    return replace(sampling, **values)


def _likeliest(case: Case, samplings: Sequence[Sampling]) -> Sampling:
    """Of equal ones the first."""
    found = log_likelihoods(case, samplings)
    return samplings[found.index(max(found))]


def _rounded(case: Case) -> Cases:
    target: Any = copy.deepcopy(case.target)
    if target.dtype != torch.bfloat16:
        yield "bfloat16", replace(case, target=target.to(torch.bfloat16))
    target = copy.deepcopy(case.target)
    for name, module in target.named_modules():
        if isinstance(module, nn.Linear) and not name.endswith("lm_head"):
            _round_to_four_bits(module.weight.data)
    yield "four bits (Q4_0)", replace(case, target=target)


def _round_to_four_bits(weight: Tensor) -> None:
    """Round as llama.cpp's Q4_0: 32 weights share a scale, and the largest of them is -8."""
    if weight.shape[1] % 32:
        return
    blocks = weight.view(-1, 32)
    largest = blocks.abs().argmax(1, keepdim=True)
    scale = blocks.gather(1, largest) / -8
    nearest = (blocks / scale).nan_to_num() + 0.5
    levels = nearest.floor().clamp(-8, 7)
    blocks.copy_(levels * scale)


# If two fit equally well, the earlier one is named.
OF_THE_DRAFT: dict[str, Change] = {
    "greedy draft": _greedy_draft,
    "auxiliary layers": _layers,
    "norm_before_residual": _residual,
    "vocabulary map": _vocabulary,
    "rope of the draft": _rope_of("draft"),
    "prefix cache": _no_prompt,
}
# These change what the target writes.
OF_THE_TARGET: dict[str, Change] = {
    "rope of the target": _rope_of("target"),
    "chat template": _template,
    "sampling": _sampling,
    "penalty": _penalty,
    "rounding of the target": _rounded,
}
REMEDIES = read_words(__file__)
