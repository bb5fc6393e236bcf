"""Make the rows of results.json that explain acceptance, from the measurements of
`eval.diagnosis.diagnose`.
"""

import math
import unicodedata
from collections.abc import Callable, Iterator, Mapping, Sequence
from itertools import chain

import numpy as np
import pandas as pd

from draftsmith.eval.bootstrap import Floats, PromptSums, difference, joined, resampled
from draftsmith.eval.diagnosis.diagnose import BINS, Diagnosis
from draftsmith.eval.remarks import overlaps
from draftsmith.eval.rows import Group, Measured, Setting
from draftsmith.eval.schema import Row
from draftsmith.eval.seeds import runs_of
from draftsmith.eval.suites import Suite

# Properties that positions are grouped by, and the edges of their bins.
ENTROPY = "entropy of the target, bits"
PLACE = "position in the answer"
CONTEXT = "tokens before"
CLASS = "class of the token"
NEAR = "similarity to ID prompts"
EDGES = {
    ENTROPY: (0.5, 1.5, 3.0),
    PLACE: (4, 16, 64),
    CONTEXT: (256, 512, 1024, 2048, 4096, 8192),
    NEAR: (0.05, 0.2, 0.5),
}
# Length of the token n-grams that make two prompts similar.
NGRAM = 3
# Tokens seen less often than this are not listed among those that lost most.
LEAST_SEEN = 5
# Tokens that are listed.
LISTED = 12
_CODE = set("_=<>{}[]\\/|&^%$#@~*+`")


def diagnosis_rows(
    setting: Setting, measured: Measured, text_of: Callable[[int], str]
) -> Iterator[Row]:
    """Rows about all sets of a kind, of drafts with weights. `text_of` gives a token's text.

    Without weights in the base there is nothing to compare with, and no rows.
    """
    lacking = {key[2] for key, part in measured.alphas.items() if part["diagnosis"] is None}
    drafts = [draft for draft in setting.methods if draft not in lacking]
    base = setting.base
    bases = runs_of(base, drafts)
    if not bases:
        return
    similar = similarities(setting.suites)
    for group in setting.groups():
        if group.domain != group.kind:
            continue
        diagnoses: dict[str, list[Diagnosis]] = {}
        alphas = pd.DataFrame()
        for draft in drafts:
            parts = group.parts(measured.alphas, draft)
            diagnoses[draft] = [part["diagnosis"] for part in parts]
            alphas[draft] = np.concatenate(joined(diagnoses[draft], "alpha"))
        alphas[base] = alphas[bases].mean(axis=1)
        positions = _positions(group, measured, similar, diagnoses[bases[0]], text_of)
        sums_of = dict(_by_part(group, positions, alphas))
        for draft, diagnosis in diagnoses.items():
            for part, sums in sums_of.items():
                count = sums[draft].denominator_P.sum()
                yield group.row("alpha_by_part", draft, sums[draft], part=part)
                yield group.row("positions_by_part", draft, count, part=part)
                if draft not in bases:
                    gain = difference(sums[draft], sums[base], group.picks)
                    yield group.row("gain_by_part", draft, gain, part=part)
            yield from _calibration(group, draft, diagnosis)
            if draft not in bases:
                yield from _lost(group, draft, positions["text"], alphas[draft], alphas[base])


def _positions(
    group: Group,
    measured: Measured,
    similar: Mapping[str, Sequence[float]],
    base: Sequence[Diagnosis],
    text_of: Callable[[int], str],
) -> pd.DataFrame:
    outputs = joined(group.parts(measured.baselines), "output_ids")
    prompt_tokens = [len(prompt.ids) for suite in group.suites for prompt in suite.prompts]
    near = list(chain.from_iterable(similar[suite.name] for suite in group.suites))
    lengths = [len(output) for output in outputs]
    texts = [text_of(token) for token in chain.from_iterable(outputs)]
    places = np.concatenate([np.arange(length) for length in lengths])
    columns = {
        "prompt": np.repeat(np.arange(len(outputs)), lengths),
        "text": texts,
        ENTROPY: np.concatenate(joined(base, "entropy")),
        PLACE: places,
        CONTEXT: places + np.repeat(prompt_tokens, lengths),
        CLASS: [token_class(text) for text in texts],
        NEAR: np.repeat(near, lengths),
    }
    return pd.DataFrame(columns)


def bin_names(by: str) -> list[str]:
    """The names of the bins of a property, ascending."""
    edges = EDGES[by]
    between = [f"{a:g} to {b:g}" for a, b in zip(edges, edges[1:], strict=False)]
    return [f"below {edges[0]:g}", *between, f"{edges[-1]:g} and more"]


def _by_part(
    group: Group, positions: pd.DataFrame, alphas: pd.DataFrame
) -> Iterator[tuple[str, dict[str, PromptSums]]]:
    """Every kind of position that occurs, and the drafts' per-prompt acceptance there."""
    prompts = range(group.picks.prompts)
    for by in (ENTROPY, PLACE, CONTEXT, CLASS, NEAR):
        part = positions[by]
        # At temperature 0 the target's distribution is a single token, whose entropy says nothing.
        if by == ENTROPY and group.temperature == 0:
            continue
        if by == CONTEXT and (part < EDGES[CONTEXT][0]).all():
            continue
        if by in EDGES:
            edges = [-math.inf, *EDGES[by], math.inf]
            part = pd.cut(part, edges, right=False, labels=bin_names(by))
        for name, inside in alphas.groupby(part, observed=True):
            by_prompt = inside.groupby(positions["prompt"])
            sizes = by_prompt.size().reindex(prompts, fill_value=0)
            count_P = sizes.to_numpy(np.float64)
            sums = by_prompt.sum().reindex(prompts, fill_value=0.0)
            of_drafts = {draft: PromptSums(sums[draft].to_numpy(), count_P) for draft in alphas}
            yield f"{by}: {name}", of_drafts


def _lost(
    group: Group,
    draft: str,
    texts: "pd.Series[str]",
    new: "pd.Series[float]",
    old: "pd.Series[float]",
) -> Iterator[Row]:
    """The tokens of the text at which most acceptance was lost in all, worst first."""
    figures = pd.DataFrame({"lost": new - old, "lost_alpha": new, "lost_base_alpha": old})
    tokens = figures.groupby(texts)
    seen = tokens.mean().assign(lost=tokens["lost"].sum(), n=tokens.size())
    often = seen[seen["n"] >= LEAST_SEEN]
    lost = often[often["lost"] < 0].sort_values("lost", kind="stable")
    for text, token in lost.head(LISTED).iterrows():
        for figure in ("lost", "lost_alpha", "lost_base_alpha"):
            yield group.row(figure, draft, token[figure], part=str(text), n=int(token["n"]))


def token_class(text: str) -> str:
    """words, digits, code, punctuation, whitespace or non-Latin."""
    bare = text.strip()
    if not bare:
        return "whitespace"
    for ch in bare:
        latin = ch.isascii() or unicodedata.name(ch, "").startswith("LATIN")
        if not latin and (ch.isalpha() or ch == "\N{REPLACEMENT CHARACTER}"):
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
    id_suites = [suite for suite in suites if suite.kind == "id"]
    known = list(chain.from_iterable(suite.prompts for suite in id_suites))
    shares: dict[str, list[float]] = {suite.name: [] for suite in suites}
    for suite in suites:
        counted = zip(suite.prompts, overlaps(known, suite.prompts, NGRAM), strict=True)
        for prompt, (runs, shared) in counted:
            others = [count for index, count in shared.items() if known[index] is not prompt]
            shares[suite.name].append(max(others, default=0) / max(1, runs))
    return shares


def _calibration(group: Group, draft: str, new: Sequence[Diagnosis]) -> Iterator[Row]:
    sums_PB3 = np.asarray(joined(new, "confidence"), np.float64)
    pooled_B3 = sums_PB3.sum(0)
    # At temperature 0 the target takes one token for sure, and no confidence but 1 would be right.
    if group.temperature:
        # ECE of every resample; it cannot fall below what noise within the bins makes of a
        # calibrated draft.
        ece_R = _ece(np.einsum("rp,pbc->rbc", group.picks.weights_RP, sums_PB3))
        ece = resampled(float(_ece(pooled_B3)), ece_R, group.picks, least=0.0, most=1.0)
        yield group.row("ece", draft, ece)
    for tenth, (mass, sure, _) in enumerate(pooled_B3):
        yield group.row("drafted_mass", draft, mass, at=tenth)
        yield group.row("confidence", draft, sure / mass if mass else None, at=tenth)
        drafted_P, _, accepted_P = sums_PB3[:, tenth].T
        yield group.row("acceptance", draft, PromptSums(accepted_P, drafted_P), at=tenth)


def _ece(sums_B3: Floats) -> Floats:
    """sum over bins of |accepted - confidence| over the mass drafted; NaN where nothing was."""
    assert sums_B3.shape[-2] == BINS
    mass_B, sure_B, accepted_B = np.moveaxis(sums_B3, -1, 0)
    away: Floats = np.abs(accepted_B - sure_B).sum(-1)
    with np.errstate(divide="ignore", invalid="ignore"):
        return away / mass_B.sum(-1)
