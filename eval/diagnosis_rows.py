"""Make the rows of results.json that explain acceptance, from the measurements of `eval.diagnose`."""

import unicodedata
from collections import Counter, defaultdict
from collections.abc import Callable, Iterator, Sequence
from functools import cache
from typing import Any

import numpy as np

from draftsmith_core.prompts import Prompt, token_runs
from draftsmith_core.tokenization import Tokenizer
from eval.bootstrap import PromptSums, difference, estimate, interval
from eval.diagnose import BINS, Diagnosis
from eval.measure import Suite
from eval.rows import Group, Measured, Setting, joined
from eval.schema import Estimate, Row, ViewedText

ENTROPY_BITS = (0.5, 1.5, 3.0)
POSITIONS = (4, 16, 64)
SIMILARITIES = (0.05, 0.2, 0.5)
# Length of the token n-grams that make two prompts similar.
NGRAM = 3
SHOWN_CANDIDATES = (1, 2, 4, 8, 16, 32, 64)
# Tokens seen less often than this are not listed among those that lost most.
LEAST_SEEN, LISTED = 5, 12
_CODE = set("_=<>{}[]\\/|&^%$#@~*+`")

# (prompt's similarity, place, token, entropy) -> the bin of a position: its order and its name.
_Bin = Callable[[float, int, str, float], tuple[int, str]]


def diagnosis_rows(
    setting: Setting, measured: Measured, text_of: Callable[[int], str]
) -> tuple[list[Row], list[ViewedText]]:
    """Rows about all sets of a kind, and the texts to view. `text_of` gives the text of a token."""
    similar = similarities(setting.suites)
    rows: list[Row] = []
    viewed: list[ViewedText] = []
    for group in setting.groups():
        if not group.pooled:
            viewed += _viewed(setting, measured, group.suites[0], group.temperature, text_of)
            continue
        diagnoses = {draft: _diagnoses(measured, group, draft) for draft in setting.drafts}
        texts = [
            [text_of(token) for token in output]
            for suite in group.suites
            for output in measured.baselines[suite.name, group.temperature]["output_ids"]
        ]
        near = [value for suite in group.suites for value in similar[suite.name]]
        for draft, new in diagnoses.items():
            base = None if draft == setting.base else diagnoses[setting.base]
            rows += _binned_alphas(group, draft, new, base, texts, near)
            rows += _calibration(group, draft, new)
            rows += _candidates(group, draft, new)
            rows += _lost(group, draft, new, base, texts) if base is not None else []
    return rows, viewed


def _diagnoses(measured: Measured, group: Group, draft: str) -> list[Diagnosis]:
    diagnoses = [alphas["diagnosis"] for alphas in group.alphas(measured, draft)]
    assert None not in diagnoses
    return [diagnosis for diagnosis in diagnoses if diagnosis is not None]


def token_class(text: str) -> str:
    """words, digits, code, punctuation, whitespace or non-Latin."""
    bare = text.strip()
    if not bare:
        return "whitespace"
    if any(ch == "\N{REPLACEMENT CHARACTER}" or (ch.isalpha() and not _latin(ch)) for ch in bare):
        return "non-Latin"
    if any(ch.isdigit() for ch in bare):
        return "digits"
    if any(ch in _CODE for ch in bare):
        return "code"
    return "words" if any(ch.isalpha() for ch in bare) else "punctuation"


def _latin(character: str) -> bool:
    return character.isascii() or unicodedata.name(character, "").startswith("LATIN")


def similarities(suites: Sequence[Suite]) -> dict[str, list[float]]:
    """By set, the largest share of each prompt's token trigrams that one other ID prompt has too."""
    where: dict[tuple[int, ...], set[int]] = defaultdict(set)
    known = [prompt for suite in suites if suite.kind == "id" for prompt in suite.prompts]
    for index, prompt in enumerate(known):
        for gram in token_runs(prompt.ids, NGRAM):
            where[gram].add(index)
    places = {id(prompt): index for index, prompt in enumerate(known)}

    def similarity(prompt: Prompt) -> float:
        grams = token_runs(prompt.ids, NGRAM)
        shared = Counter(index for gram in grams for index in where.get(gram, ()))
        shared.pop(places.get(id(prompt), -1), None)
        return max(shared.values(), default=0) / max(1, len(grams))

    return {suite.name: [similarity(prompt) for prompt in suite.prompts] for suite in suites}


def _range(value: float, edges: Sequence[float]) -> tuple[int, str]:
    """The bin of a value: "below 0.5", "0.5 to 1.5", "3 and more"."""
    at = sum(value >= edge for edge in edges)
    if at == 0:
        return at, f"below {edges[0]:g}"
    return at, f"{edges[-1]:g} and more" if at == len(edges) else f"{edges[at - 1]:g} to {edges[at]:g}"


BY: dict[str, _Bin] = {
    "entropy of the target, bits": lambda near, place, text, entropy: _range(entropy, ENTROPY_BITS),
    "position in the answer": lambda near, place, text, entropy: _range(place, POSITIONS),
    "class of the token": lambda near, place, text, entropy: (0, token_class(text)),
    "similarity to ID prompts": lambda near, place, text, entropy: _range(near, SIMILARITIES),
}


def _binned_alphas(
    group: Group,
    draft: str,
    new: Sequence[Diagnosis],
    base: Sequence[Diagnosis] | None,
    texts: list[list[str]],
    near: list[float],
) -> Iterator[Row]:
    entropies, alphas = joined(new, "entropy"), joined(new, "alpha")
    for by, bin_of in BY.items():
        # At temperature 0 the target's distribution is a single token, whose entropy says nothing.
        if by.startswith("entropy") and group.temperature == 0:
            continue
        bins = [
            [
                bin_of(near[row], place, text, entropy)
                for place, (text, entropy) in enumerate(zip(tokens, bits, strict=True))
            ]
            for row, (tokens, bits) in enumerate(zip(texts, entropies, strict=True))
        ]
        for wanted in sorted({each for row in bins for each in row}):
            name = f"{by}: {wanted[1]}"
            sums = _binned(alphas, bins, wanted)
            yield group.row("alpha_by_part", draft, estimate(sums, group.picks), part=name)
            yield group.row("positions_by_part", draft, sums.denominator_P.sum(), part=name)
            if base is not None:
                gain = difference(sums, _binned(joined(base, "alpha"), bins, wanted), group.picks)
                yield group.row("gain_by_part", draft, gain, part=name)


def _binned(
    alphas: Sequence[Sequence[float]], bins: Sequence[Sequence[tuple[int, str]]], wanted: tuple[int, str]
) -> PromptSums:
    pairs = [
        [a for a, each in zip(values, row, strict=True) if each == wanted]
        for values, row in zip(alphas, bins, strict=True)
    ]
    return PromptSums.of([sum(values) for values in pairs], [len(values) for values in pairs])


def _calibration(group: Group, draft: str, new: Sequence[Diagnosis]) -> Iterator[Row]:
    sums_PB3 = np.asarray(joined(new, "confidence"), np.float64)
    pooled_B3 = sums_PB3.sum(0)
    # ECE of every resample; it cannot fall below what noise within the bins makes of a calibrated draft.
    ece_R = _ece(np.einsum("rp,pbc->rbc", group.picks.weights_RP, sums_PB3))
    low, high = interval(ece_R, group.picks, least=0.0, most=1.0)
    yield group.row("ece", draft, Estimate(value=float(_ece(pooled_B3)), low=low, high=high, n=len(sums_PB3)))
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
    ways: list[tuple[str, list[Any], list[int]]] = [("candidates_best", joined(new, "best"), counts)]
    if group.temperature:
        ways.append(("candidates_drawn", joined(new, "drawn"), joined(new, "drawn_count")))
    for figure, sums, below in ways:
        for k in SHOWN_CANDIDATES:
            accepted = estimate(PromptSums.of([prompt[k - 1] for prompt in sums], below), group.picks)
            yield group.row(figure, draft, accepted, at=k)


def _lost(
    group: Group, draft: str, new: Sequence[Diagnosis], base: Sequence[Diagnosis], texts: list[list[str]]
) -> Iterator[Row]:
    """The tokens of the text at which most acceptance was lost in all, worst first."""
    seen: dict[str, list[tuple[float, float]]] = defaultdict(list)
    for row in zip(texts, joined(new, "alpha"), joined(base, "alpha"), strict=True):
        for text, alpha, base_alpha in zip(*row, strict=True):
            seen[text].append((alpha, base_alpha))
    changes = {text: sum(a - b for a, b in pairs) for text, pairs in seen.items() if len(pairs) >= LEAST_SEEN}
    worst = sorted((change, text) for text, change in changes.items() if change < 0)[:LISTED]
    for change, text in worst:
        count = len(seen[text])
        alpha, base_alpha = (sum(values) / count for values in zip(*seen[text], strict=True))
        figures = {"lost": change, "lost_alpha": alpha, "lost_base_alpha": base_alpha}
        for figure, value in figures.items():
            yield group.row(figure, draft, value, part=text, n=count)


def _viewed(
    setting: Setting, measured: Measured, suite: Suite, temperature: float, text_of: Callable[[int], str]
) -> Iterator[ViewedText]:
    outputs = measured.baselines[suite.name, temperature]["output_ids"]
    for draft in setting.drafts:
        diagnosis = measured.alphas[suite.name, temperature, draft]["diagnosis"]
        assert diagnosis is not None
        for row, tokens in enumerate(diagnosis["viewed"]):
            viewed = [
                {
                    "text": text_of(taken),
                    "alpha": round(alpha, 4),
                    "p": token["p"],
                    "q": token["q"],
                    "guesses": [
                        {"text": text_of(guess), "q": q, "p": p, "taken": guess == taken}
                        for guess, q, p in token["guesses"]
                    ],
                }
                for token, taken, alpha in zip(tokens, outputs[row], diagnosis["alpha"][row], strict=False)
            ]
            prompt_id = suite.prompts[row].id
            yield ViewedText(
                draft=draft, domain=suite.name, temperature=temperature, prompt_id=prompt_id, tokens=viewed
            )


def texts_by_id(tokenizer: Tokenizer) -> Callable[[int], str]:
    """The text of a token, each decoded once."""
    return cache(lambda token: str(tokenizer.decode([token])))
