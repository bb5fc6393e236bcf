"""Predict what a server accepts along the served texts, by replaying the draft on them; and replay
the pair changed as an engine may change it.

To add a change, write a function that yields (detail, changed case), or nothing if it does not
apply, and enter it in `CHANGES`. It copies a model before it changes it.

Legend: P prompts, D depths, B rows, T tokens, H hidden size, K keys.
"""

import copy
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, nn
from transformers import Cache, PreTrainedModel

from draftsmith.core.models import text_config
from draftsmith.core.sampling import Sampling
from draftsmith.decode.method import Method
from draftsmith.drafts.heads.eagle3 import Eagle3Head
from draftsmith.drafts.heads.feature_head import FeatureHead
from draftsmith.drafts.heads.unrolled_attention import Unrolling
from draftsmith.drafts.load import Draft
from draftsmith.eval.alpha import Reader
from draftsmith.eval.formulas import Continuation
from draftsmith.eval.predict import PredictedCounts, Traces, predict


@dataclass(frozen=True)
class Case:
    """What a prediction is made from. rows: the served texts. rule: verifier by which drafted
    tokens stay.
    """

    target: PreTrainedModel
    draft: Draft
    rows: Sequence[Continuation]
    sampling: Sampling
    rule: str = ""


def replay(case: Case, tokens: int) -> PredictedCounts:
    """Predict drafting `tokens` at a time along the case's texts."""
    method = Method.of(f"chain:{tokens}", case.rule)
    found = predict(method.shape, method.verifier, case.sampling, trace(case, [method]))
    assert found is not None
    return found


def trace(case: Case, methods: Sequence[Method] = ()) -> Traces:
    """Read the case's texts once with target and draft."""
    reader = Reader(
        case.target,
        {"draft": case.draft},
        case.sampling,
        methods,
        batch_size=8,
        drafts_see_penalties=False,
        texts=True,
    )
    return reader.read(case.rows)["draft"]


Cases = Iterator[tuple[str, Case]]


def _greedy_draft(case: Case) -> Cases:
    if case.rule != "naive" and not case.sampling.greedy:
        yield "takes its most probable token", replace(case, rule="naive")


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


def _vocabulary(case: Case) -> Cases:
    if not isinstance(case.draft, Eagle3Head) or not case.draft.reduced:
        return
    draft = copy.deepcopy(case.draft)
    rows_D = torch.arange(len(draft.d2t), device=draft.d2t.device)
    wrong_D = draft.d2t.roll(1) + rows_D
    draft.target_ids_D = wrong_D.clamp(0, draft.vocab_size - 1)
    yield "shifted by one row", replace(case, draft=draft)


def _no_prompt(case: Case) -> Cases:
    def sees(ids_BT: Tensor) -> Tensor:
        """Hide the prompt, up to the token answered first. Rows are known by their text."""
        sees_BT = torch.ones_like(ids_BT, dtype=torch.bool)
        for index, ids in enumerate(ids_BT.tolist()):
            for row in case.rows:
                if ids[: len(row.ids) - 1] == row.ids[:-1]:
                    sees_BT[index, : len(row.prompt_ids) - 1] = False
        return sees_BT[:, None]

    yield from _seeing(case, "the draft has not read it", sees)


def _window(case: Case) -> Cases:
    longest = max(len(row.ids) for row in case.rows)
    for halved in range(1, 5):  # windows are tried from half of the longest text down
        size = 1 << ((longest - 1).bit_length() - halved)

        def sees(ids_BT: Tensor, size: int = size) -> Tensor:
            places_T = torch.arange(ids_BT.shape[1], device=ids_BT.device)
            return (places_T[:, None] - places_T < size)[None]

        yield from _seeing(case, f"{size} tokens", sees)


def _seeing(case: Case, detail: str, sees: Callable[[Tensor], Tensor]) -> Cases:
    """Let a draft attend to itself, and only where `sees` of the ids `[B, T]` allows it: a mask
    `[B, T, T]`, or of fewer rows for all.
    """
    draft: Any = copy.deepcopy(case.draft)
    allowed_BTT = torch.zeros(0, 0, 0, dtype=torch.bool)

    def allow(ids_BT: Tensor) -> None:
        nonlocal allowed_BTT
        itself_TT = torch.eye(ids_BT.shape[1], dtype=torch.bool, device=ids_BT.device)
        allowed_BTT = (sees(ids_BT) | itself_TT).expand(len(ids_BT), -1, -1)

    def mask_model(
        module: nn.Module, args: object, options: dict[str, Any]
    ) -> tuple[object, dict[str, Any]]:
        allow(options["input_ids"])
        return args, options | {"attention_mask": allowed_BTT.tril()[:, None]}

    def masked_states(
        ids_BT: Tensor, features_BTH: Tensor, mask: Unrolling, positions: Tensor, cache: Cache
    ) -> Any:
        past = int(cache.get_seq_length())
        if not past:  # later depths see the same columns
            allow(ids_BT)
        mask_B1TK = mask.mask(1 + past // mask.width, ids_BT.device)
        allowed_BTK = nn.functional.pad(allowed_BTT, (0, past), value=True)
        seen_B1TK = mask_B1TK & allowed_BTK[:, None]
        return own_states(ids_BT, features_BTH, seen_B1TK, positions, cache)

    if isinstance(draft, PreTrainedModel):
        draft.register_forward_pre_hook(mask_model, with_kwargs=True)
    elif isinstance(draft, FeatureHead):
        own_states: Any = draft.states
        draft.states = masked_states  # type: ignore[assignment,method-assign]
    else:
        return
    yield detail, replace(case, draft=draft)


CHANGES: dict[str, Callable[[Case], Cases]] = {
    "greedy draft": _greedy_draft,
    "auxiliary layers": _layers,
    "vocabulary map": _vocabulary,
    "prompt": _no_prompt,
    "window": _window,
}
