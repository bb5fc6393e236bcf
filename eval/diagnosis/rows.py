"""Make the rows of results.json that explain acceptance, from the measurements of
`eval.diagnosis.diagnose`.
"""

import math
import unicodedata
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import numpy as np
import pandas as pd

from eval.bootstrap import PromptSums, difference, estimate, interval, joined
from eval.diagnosis.diagnose import BINS, Diagnosis
from eval.remarks import overlaps
from eval.rows import Group, Measured, Setting
from eval.schema import Estimate, Row
from eval.suites import Suite

# Properties that positions are grouped by, and the edges of their bins.
ENTROPY, PLACE, CLASS = (
    "entropy of the target, bits",
    "position in the answer",
    "class of the token",
)
NEAR = "similarity to ID prompts"
EDGES = {ENTROPY: (0.5, 1.5, 3.0), PLACE: (4, 16, 64), NEAR: (0.05, 0.2, 0.5)}
# Length of the token n-grams that make two prompts similar.
NGRAM = 3
SHOWN_CANDIDATES = (1, 2, 4, 8, 16, 32, 64)
# Tokens seen less often than this are not listed among those that lost most.
LEAST_SEEN, LISTED = 5, 12
_CODE = set("_=<>{}[]\\/|&^%$#@~*+`")


def diagnosis_rows(
    setting: Setting, measured: Measured, text_of: Callable[[int], str]
) -> list[Row]:
    """Rows about all sets of a kind. `text_of` gives the text of a token."""
    similar = similarities(setting.suites)
    rows: list[Row] = []
    for group in setting.groups():
        if group.domain != group.kind:
            continue
        diagnoses: dict[str, list[Diagnosis]] = {
            draft: [alphas["diagnosis"] for alphas in group.parts(measured.alphas, draft)]
            for draft in setting.drafts
        }
        outputs = joined(group.parts(measured.baselines), "output_ids")
        near = [value for suite in group.suites for value in similar[suite.name]]
        positions = _positions(outputs, near, diagnoses[setting.base], text_of)
        alphas = pd.DataFrame(
            {draft: np.concatenate(joined(parts, "alpha")) for draft, parts in diagnoses.items()}
        )
        parts = list(_by_part(group, positions, alphas))
        for draft, diagnosis in diagnoses.items():
            base = setting.base if draft != setting.base else None
            for name, sums in parts:
                rows.append(
                    group.row("alpha_by_part", draft, estimate(sums[draft], group.picks), part=name)
                )
                rows.append(
                    group.row(
                        "positions_by_part", draft, sums[draft].denominator_P.sum(), part=name
                    )
                )
                if base is not None:
                    gain = difference(sums[draft], sums[base], group.picks)
                    rows.append(group.row("gain_by_part", draft, gain, part=name))
            rows += _calibration(group, draft, diagnosis)
            rows += _candidates(group, draft, diagnosis)
            rows += (
                _lost(group, draft, positions["text"], alphas[draft], alphas[base])
                if base is not None
                else []
            )
    return rows


def _positions(
    outputs: Sequence[Sequence[int]],
    near: Sequence[float],
    base: Sequence[Diagnosis],
    text_of: Callable[[int], str],
) -> pd.DataFrame:
    lengths = [len(output) for output in outputs]
    texts = [text_of(token) for output in outputs for token in output]
    return pd.DataFrame(
        {
            "prompt": np.repeat(np.arange(len(outputs)), lengths),
            "text": texts,
            ENTROPY: np.concatenate(joined(base, "entropy")),
            PLACE: np.concatenate([np.arange(length) for length in lengths]),
            CLASS: [token_class(text) for text in texts],
            NEAR: np.repeat(near, lengths),
        }
    )


def _by_part(
    group: Group, positions: pd.DataFrame, alphas: pd.DataFrame
) -> Iterator[tuple[str, dict[str, PromptSums]]]:
    """Every kind of position that occurs, and the drafts' per-prompt acceptance there."""
    prompts = range(group.picks.weights_RP.shape[1])
    for by in (ENTROPY, PLACE, CLASS, NEAR):
        # At temperature 0 the target's distribution is a single token, whose entropy says nothing.
        if by == ENTROPY and group.temperature == 0:
            continue
        part = positions[by]
        if by in EDGES:
            edges = EDGES[by]
            between = [f"{a:g} to {b:g}" for a, b in zip(edges, edges[1:], strict=False)]
            names = [f"below {edges[0]:g}", *between, f"{edges[-1]:g} and more"]
            part = pd.cut(part, [-math.inf, *edges, math.inf], right=False, labels=names)
        for name, inside in alphas.groupby(part, observed=True):
            by_prompt = inside.groupby(positions["prompt"])
            count_P = by_prompt.size().reindex(prompts, fill_value=0).to_numpy(np.float64)
            sums = by_prompt.sum().reindex(prompts, fill_value=0.0)
            yield (
                f"{by}: {name}",
                {draft: PromptSums(sums[draft].to_numpy(), count_P) for draft in alphas},
            )


def _lost(
    group: Group,
    draft: str,
    texts: "pd.Series[str]",
    new: "pd.Series[float]",
    old: "pd.Series[float]",
) -> Iterator[Row]:
    """The tokens of the text at which most acceptance was lost in all, worst first."""
    tokens = pd.DataFrame({"lost": new - old, "lost_alpha": new, "lost_base_alpha": old}).groupby(
        texts
    )
    seen = tokens.mean().assign(lost=tokens["lost"].sum(), n=tokens.size())
    lost = (
        seen[(seen["n"] >= LEAST_SEEN) & (seen["lost"] < 0)]
        .sort_values("lost", kind="stable")
        .head(LISTED)
    )
    for text, token in lost.iterrows():
        for figure in ("lost", "lost_alpha", "lost_base_alpha"):
            yield group.row(figure, draft, token[figure], part=str(text), n=int(token["n"]))


def token_class(text: str) -> str:
    """words, digits, code, punctuation, whitespace or non-Latin."""
    bare = text.strip()
    if not bare:
        return "whitespace"
    foreign = (
        ch for ch in bare if not ch.isascii() and not unicodedata.name(ch, "").startswith("LATIN")
    )
    if any(ch.isalpha() or ch == "\N{REPLACEMENT CHARACTER}" for ch in foreign):
        return "non-Latin"
    if any(ch.isdigit() for ch in bare):
        return "digits"
    if any(ch in _CODE for ch in bare):
        return "code"
    return "words" if any(ch.isalpha() for ch in bare) else "punctuation"


def similarities(suites: Sequence[Suite]) -> dict[str, list[float]]:
    """By set, the largest share of each prompt's token trigrams that one other ID prompt has
    too.
    """
    known = [prompt for suite in suites if suite.kind == "id" for prompt in suite.prompts]
    shares: dict[str, list[float]] = {suite.name: [] for suite in suites}
    for suite in suites:
        for prompt, (runs, shared) in zip(
            suite.prompts, overlaps(known, suite.prompts, NGRAM), strict=True
        ):
            others = [count for index, count in shared.items() if known[index] is not prompt]
            shares[suite.name].append(max(others, default=0) / max(1, runs))
    return shares


def _calibration(group: Group, draft: str, new: Sequence[Diagnosis]) -> Iterator[Row]:
    sums_PB3 = np.asarray(joined(new, "confidence"), np.float64)
    pooled_B3 = sums_PB3.sum(0)
    if (
        group.temperature
    ):  # at 0 the target takes one token for sure, and no confidence but 1 would be right
        # ECE of every resample; it cannot fall below what noise within the bins makes of a
        # calibrated draft.
        ece_R = _ece(np.einsum("rp,pbc->rbc", group.picks.weights_RP, sums_PB3))
        low, high = interval(ece_R, group.picks, least=0.0, most=1.0)
        yield group.row(
            "ece",
            draft,
            Estimate(value=float(_ece(pooled_B3)), low=low, high=high, n=len(sums_PB3)),
        )
    for tenth, (mass, sure, accepted) in enumerate(pooled_B3):
        yield group.row("drafted_mass", draft, mass, at=tenth)
        yield group.row("confidence", draft, sure / mass if mass else None, at=tenth)
        yield group.row("acceptance", draft, accepted / mass if mass else None, at=tenth)


def _ece(sums_B3: Any) -> Any:
    """sum over bins of |accepted - confidence| over the mass drafted; NaN where nothing was."""
    assert sums_B3.shape[-2] == BINS
    with np.errstate(divide="ignore", invalid="ignore"):
        return np.abs(sums_B3[..., 2] - sums_B3[..., 1]).sum(-1) / sums_B3[..., 0].sum(-1)


def _candidates(group: Group, draft: str, new: Sequence[Diagnosis]) -> Iterator[Row]:
    counts = [len(values) for values in joined(new, "alpha")]
    ways: list[tuple[str, list[Any], list[int]]] = [
        ("candidates_best", joined(new, "best"), counts)
    ]
    if group.temperature:
        ways.append(("candidates_drawn", joined(new, "drawn"), joined(new, "drawn_count")))
    for figure, sums, below in ways:
        for k in SHOWN_CANDIDATES:
            accepted = estimate(
                PromptSums.of([prompt[k - 1] for prompt in sums], below), group.picks
            )
            yield group.row(figure, draft, accepted, at=k)
