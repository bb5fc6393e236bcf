"""A distilled set as one page: lengths of prompts and answers, finish reasons, the target's entropy, domains.

Legend: R response tokens, K stored tokens at each.
"""

import math
from collections import Counter
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from draftsmith_core.errors import InputError, one_line
from draftsmith_core.io import read_json, write_text_atomic
from draftsmith_core.teacher_rows import COLUMN, unpack
from eval.report.formats import percent, shortened
from eval.report.page import Picture, render_template
from eval.report.theme import MARKS, WIDTH, drawing, inline_svg

PAGE = "stats.html"
# Bars of a histogram; domains with a bar of their own; characters of a name beside one.
_BARS, _DOMAINS, _NAME = 32, 24, 20
_ENTROPY_EDGES = np.linspace(0, 12, 49)  # nats; no vocabulary in use reaches the last edge


@dataclass
class Stats:
    """Sums over the rows of a set. Lengths in tokens, in the order of the rows; those of answers by finish reason.

    entropies: tokens by the target's entropy, between `_ENTROPY_EDGES`; None without stored distributions.
    """

    prompt_lengths: list[int] = field(default_factory=list)
    lengths: dict[str, list[int]] = field(default_factory=dict)
    domains: Counter[str] = field(default_factory=Counter)
    temperatures: Counter[str] = field(default_factory=Counter)
    entropies: npt.NDArray[np.int64] | None = None
    entropy: float = 0.0
    tail_mass: float = 0.0


def write_set_page(directory: str) -> Path:
    """Write DIRECTORY/stats.html and return its path; raise InputError unless it holds a finished distilled set."""
    root = Path(directory)
    manifest = read_json(root / "manifest.json", "the manifest of a finished distilled set")
    if not manifest.get("complete"):
        raise InputError(f"{directory}: the distilled set is not finished; run the same distill command again")
    stats = Stats()
    for part in manifest["parts"]:
        _add(stats, root / part["file"])
    write_text_atomic(root / PAGE, _render(manifest, stats))
    return root / PAGE


def _add(stats: Stats, path: Path) -> None:
    wanted = ("prompt_ids", "response_ids", "finish_reason", "domain", "temperature", COLUMN)
    try:
        file = pq.ParquetFile(path)
        names = [name for name in wanted if name in file.schema_arrow.names]
        # Few rows at a time, because teacher rows are large.
        for batch in file.iter_batches(256, columns=names):
            _add_rows(stats, batch)
    except (OSError, pa.ArrowException) as error:
        raise InputError(f"{path}: cannot be read ({one_line(error)})") from None


def _add_rows(stats: Stats, batch: pa.RecordBatch) -> None:
    lengths = pc.list_value_length(batch.column("response_ids")).to_pylist()
    stats.prompt_lengths += pc.list_value_length(batch.column("prompt_ids")).to_pylist()
    reasons, domains = (batch.column(name).to_pylist() for name in ("finish_reason", "domain"))
    for reason, domain, length in zip(reasons, domains, lengths, strict=True):
        stats.lengths.setdefault(str(reason), []).append(length)
        stats.domains[domain] += length
    if "temperature" in batch.schema.names:
        temperatures = batch.column("temperature").to_pylist()
        stats.temperatures.update("not known" if value is None else f"{value:g}" for value in temperatures)
    if COLUMN not in batch.schema.names:
        return
    if stats.entropies is None:
        stats.entropies = np.zeros(len(_ENTROPY_EDGES) - 1, dtype=np.int64)
    for value in batch.column(COLUMN).to_pylist():
        _, logprobs_RK, tail_R = unpack(value)
        # All tokens that are not stored count as one outcome: a lower bound.
        mass_R = np.where(tail_R > 0, tail_R, 1)
        entropy_R = -(np.exp(logprobs_RK) * logprobs_RK).sum(-1) - mass_R * np.log(mass_R)
        stats.entropies += np.histogram(np.clip(entropy_R, 0, _ENTROPY_EDGES[-1]), _ENTROPY_EDGES)[0]
        stats.entropy += float(entropy_R.sum())
        stats.tail_mass += float(tail_R.sum())


def _render(manifest: dict[str, Any], stats: Stats) -> str:
    counts, tokens = manifest["counts"], manifest["response_tokens"]
    rows = [(name.replace("_", " "), f"{value:,}") for name, value in counts.items()]
    answers = [length for lengths in stats.lengths.values() for length in lengths]
    rows += [("response tokens", f"{tokens:,}")]
    for name, values in (("prompt", stats.prompt_lengths), ("answer", answers)):
        least, middle, most = np.percentile(values, (0, 50, 100))
        rows.append((f"tokens of {name}: least, median, most", f"{least:,.0f}, {middle:,.0f}, {most:,.0f}"))
    for name, values in sorted(stats.lengths.items()):
        rows.append((f"ended by {name}", f"{len(values):,} ({percent(len(values) / len(answers))})"))
    rows += [(f"at temperature {name}", f"{count:,}") for name, count in sorted(stats.temperatures.items())]
    if stats.entropies is not None:
        rows.append(("mean entropy of a token, nats, at least", f"{stats.entropy / tokens:.3f}"))
        rows.append(("mean mass of the tokens that are not stored", f"{stats.tail_mass / tokens:.4f}"))
    reasons = ("skipped_because", "failed_because", "shortened_because", "dropped_because")
    with drawing(MARKS):
        pictures = [
            Picture(title, caption, inline_svg(figure, name, title)) for name, title, caption, figure in _figures(stats)
        ]
    return render_template(
        "distilled_set.html.j2",
        f"{counts['rows']:,} answers, {tokens:,} tokens",
        pictures,
        target=manifest.get("config", {}).get("target", "a target"),
        reasons=[line for key in reasons for line in manifest.get(key, [])],
        rows=rows,
        command=manifest.get("command", ""),
    )


def _figures(stats: Stats) -> list[tuple[str, str, str, Figure]]:
    """(name, title, caption, figure) of every picture."""
    ends = "Tokens of an answer, by how it ended: `stop` is the target's own end, `length` the limit."
    turns = "Tokens of a prompt, with the earlier turns of its conversation."
    figures = [
        ("lengths", "How long the answers are", ends, _histogram(stats.lengths, "tokens of an answer")),
        ("prompts", "How long the prompts are", turns, _histogram({"": stats.prompt_lengths}, "tokens of a prompt")),
    ]
    if stats.entropies is not None:
        caption = (
            "The target's entropy at each token of an answer, from the stored distributions; the tokens that they do "
            "not list count as one outcome. A draft has it easy on the left."
        )
        figures.append(("entropy", "How sure the target is", caption, _entropy(stats.entropies)))
    shares = "Share of the response tokens, by domain."
    return [*figures, ("domains", "What it is about", shares, _domains(stats.domains))]


def _histogram(values: dict[str, list[int]], label: str) -> Figure:
    most = max(map(max, values.values()))
    width = math.ceil((most + 1) / _BARS)
    names = sorted(values, reverse=True)
    figure, ax = _axes(2.4)
    ax.hist(
        [values[name] for name in names],
        [edge - 0.5 for edge in range(0, most + 1 + width, width)],
        stacked=True,
        color=[MARKS[f"d{index % 6 + 1}"] for index in range(len(names))],
        label=names,
        lw=0,
    )
    if len(names) > 1:
        ax.legend()
    ax.set_xlabel(label)
    ax.set_ylabel("rows")
    return figure


def _entropy(counts: npt.NDArray[np.int64]) -> Figure:
    last = int(np.flatnonzero(counts).max(initial=0)) + 1
    figure, ax = _axes(2.4)
    ax.bar(_ENTROPY_EDGES[:last], counts[:last], np.diff(_ENTROPY_EDGES)[:last], align="edge", color=MARKS["d1"], lw=0)
    ax.set_xlabel("entropy, nats")
    ax.set_ylabel("tokens")
    return figure


def _domains(tokens: Counter[str]) -> Figure:
    shown = tokens.most_common(_DOMAINS)
    if rest := tokens.total() - sum(count for _, count in shown):
        shown.append((f"{len(tokens) - _DOMAINS} others", rest))
    shares = [count / max(1, tokens.total()) for _, count in shown]
    figure, ax = _axes(0.7 + 0.25 * len(shown))
    names = [shortened(name, _NAME) for name, _ in shown]
    bars = ax.barh(range(len(shown)), shares, tick_label=names, color=MARKS["d1"], height=0.6)
    ax.bar_label(bars, [f" {percent(share)}" for share in shares], color=MARKS["ink"])
    ax.invert_yaxis()
    ax.grid(visible=False, axis="y")
    ax.set_xlim(0, 1.12)
    ax.set_xlabel("share of the response tokens")
    return figure


def _axes(height: float) -> tuple[Figure, Axes]:
    figure = Figure(figsize=(WIDTH, height))
    return figure, figure.subplots()
