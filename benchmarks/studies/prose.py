"""Figures in the prose of the docs, each with a name that is looked up in a kept result.

docs/figures.yaml has, by page, sentences as they stand there with names in place of figures:
`{real-recipe/rows/figure=alpha&draft=eagle3&domain=id/value | .3f}`. A name is a kept result, or a
set of benchmarks/studies/real, then keys; of a list the one row that fits, or an index; or `gain of
DRAFTS over DRAFTS on SET`, in alpha at temperature 1, patterns of which are training seeds. Names
and numbers are joined by ` + `, ` - `, ` * `, ` / `, from left to right. After the bar: a format of
Python, or `[2]` for a value of two decimals with its interval (`+[2]`: with a sign).
"""

import operator
import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import cache
from itertools import chain
from pathlib import Path
from typing import Any

import yaml

from benchmarks.studies.figures import kept
from benchmarks.studies.real_tables import gain_over_seeds
from draftsmith.core.io import read_json
from draftsmith.eval.formats import with_interval
from draftsmith.eval.results import Results

_SIGNS = {"+": operator.add, "-": operator.sub, "*": operator.mul, "/": operator.truediv}
_GAIN = re.compile(r"gain of (\S+) over (\S+) on (\S+)")
_NAME = re.compile(r"\{([^{}|]+) \| ([^{}]+)\}")
_FIGURE = re.compile(r"(?<![\w.:=/-])[-+]?(?:[\d,]*\.\d+(?![\w.]*\d)|[\d,.]+%)")
# What says nothing of a measurement: code, and what a link or a tag leads to.
_NOT_PROSE = re.compile(r"`[^`]*`|\]\([^)]*\)|<[^>]*>|arXiv \d{4}\.\d{5}|95% (?:interval|range)")
# What a kept result says of its models and itself, whatever made the drafts.
_FACTS = ("models", "clock", "counts", "finish_reasons", "response_tokens")
_CODE = re.compile(r"^```.*?^```|^    .*?$", flags=re.MULTILINE | re.DOTALL)


@dataclass(frozen=True)
class Page:
    """A page of figures.yaml.

    tables: first cell of the header of each table that figures.py makes, and its kept results.
    given: text with figures that are no measurements. says: sentences with names.
    """

    tables: Mapping[str, list[str]] = field(default_factory=dict)
    given: list[str] = field(default_factory=list)
    says: list[str] = field(default_factory=list)

    def results(self) -> set[str]:
        """Return the kept results that the page has figures of: those that drafts decide."""
        names = set(chain.from_iterable(self.tables.values()))
        for sentence in self.says:
            for terms, _ in _NAME.findall(sentence):
                paths = [term for term in re.split(r" [-+*/] ", terms) if "/" in term]
                parts = [path.split("/") for path in paths]
                names |= {part[0] for part in parts if part[1] not in _FACTS}
        return names


def read(root: Path) -> tuple[dict[str, Page], dict[str, dict[str, str]]]:
    """Return the pages of figures.yaml, and how each kept result was made."""
    text = Path(root, "docs", "figures.yaml").read_text(encoding="utf-8")
    document = yaml.safe_load(text)
    pages = {name: Page(**entry) for name, entry in document["pages"].items()}
    return pages, document["made"]


def problems(root: Path, name: str, page: Page) -> list[str]:
    """Return what is wrong with the figures of a page, a line each: sentences that do not stand
    there with the figures of the kept results, and figures without a name.
    """
    written = Path(root, name).read_text(encoding="utf-8")
    text = _plain(_without_code_and_tables(written, page))
    covered: set[int] = set()
    found: list[str] = []
    for given in page.given:
        spans = _spans(text, _plain(given))
        if not spans:
            found.append(f"{name}: given, but not there: {given}")
        for start, end in spans:
            covered.update(range(start, end))
    for sentence in page.says:
        wanted, figures = _rendered(root, sentence)
        spans = _spans(text, wanted)
        if not spans:
            found.append(f"{name}: the kept results say: {wanted}")
        for start, _ in spans:
            for first, last in figures:
                covered.update(range(start + first, start + last))
    prose = _NOT_PROSE.sub(lambda match: " " * len(match[0]), text)
    for figure in _FIGURE.finditer(prose):
        first, last = figure.span()
        if not covered.issuperset(range(first, last)):
            around = text[max(0, first - 60) : last + 20]
            found.append(f"{name}: no name for {figure[0]} in: {around}")
    return found


def value(root: Path, terms: str) -> Any:
    """Return what a name stands for, or what names and numbers joined by signs give."""
    first, *rest = re.split(r" ([-+*/]) ", terms.strip())
    result = _term(root, first)
    for sign, term in zip(rest[::2], rest[1::2], strict=True):
        result = _SIGNS[sign](result, _term(root, term))
    return result


def _term(root: Path, term: str) -> Any:
    if "/" not in term:
        return float(term)
    name, *steps = term.split("/")
    found = _kept(root, name)
    for step in filter(None, steps):
        found = _step(found, step)
    return found


@cache
def _kept(root: Path, name: str) -> Any:
    manifest = Path(root, "benchmarks", "studies", "real", name, "manifest.json")
    return read_json(manifest, "a set") if manifest.is_file() else kept(root, name)


def _step(found: Any, step: str) -> Any:
    """A value of a dict or list; the one row of a list for which `key=value&key=value` holds. A
    value that is empty is null, as the set of a pool; rows of parts are left out.
    """
    if gain := _GAIN.fullmatch(step):
        return gain_over_seeds(Results(found, Path()), *gain.groups())
    if isinstance(found, dict):
        return found[step]
    if "=" not in step:
        return found[int(step)]
    rows = [row for row in found if row.get("part") is None]
    for condition in step.split("&"):
        key, _, text = condition.partition("=")
        wanted = float(text) if re.fullmatch(r"[\d.]+", text) else text or None
        rows = [row for row in rows if row.get(key) == wanted]
    if len(rows) != 1:
        raise KeyError(f"{len(rows)} rows with {step}")
    return rows[0]


def _rendered(root: Path, sentence: str) -> tuple[str, list[tuple[int, int]]]:
    """Return a sentence with its figures, as `_plain`, and where they stand in it."""
    text = ""
    spans = []
    end = 0
    for match in _NAME.finditer(sentence):
        text += _plain(sentence[end : match.start()])
        figure = _plain(_shown(value(root, match[1]), match[2]))
        spans.append((len(text), len(text) + len(figure)))
        text += figure
        end = match.end()
    return text + _plain(sentence[end:]), spans


def _shown(figure: Any, form: str) -> str:
    interval = re.fullmatch(r"(\+?)\[(\d)\]", form)
    if interval is None:
        return format(figure, form)
    return with_interval(figure, int(interval[2]), sign=bool(interval[1]))


def _plain(text: str) -> str:
    """Text in one line, with `.3` for `0.3`, `3%` for `3 %`, and ASCII signs."""
    text = re.sub(r"\s+", " ", text.replace("−", "-"))
    text = re.sub(r"(?<![\d.,])0(?=\.\d)", "", text)
    return re.sub(r"(?<=\d) %", "%", text)


def _without_code_and_tables(text: str, page: Page) -> str:
    lines = []
    inside = False
    begins = tuple(f"| {cell} |" for cell in page.tables)
    for line in _CODE.sub("", text).split("\n"):
        inside = line.startswith("|") and (inside or line.startswith(begins))
        if not inside:
            lines.append(line)
    return "\n".join(lines)


def _spans(text: str, wanted: str) -> list[tuple[int, int]]:
    wanted = wanted.strip()
    return [match.span() for match in re.finditer(re.escape(wanted), text)]
