"""A distilled set as one page to look at before training: lengths of prompts and answers, how answers ended, the
target's entropy, shares of domains.

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
# Bars of a histogram; domains that have a bar of their own; characters of a name beside one.
_BARS, _DOMAINS, _NAME = 32, 24, 20
# Nats; beyond the last edge lies no vocabulary that is in use.
_ENTROPY_EDGES = np.linspace(0, 12, 49)


@dataclass
class Stats:
    """What the rows of a set add up to. Lengths in tokens, one entry per row, in the order of the rows.

    entropies: counts of tokens by the target's entropy there, between `_ENTROPY_EDGES`; None where no distributions
    are stored. tail_mass: its sum over tokens.
    """

    prompt_lengths: list[npt.NDArray[np.int64]] = field(default_factory=list)
    lengths: dict[str, list[npt.NDArray[np.int64]]] = field(default_factory=dict)
    domains: Counter[str] = field(default_factory=Counter)
    temperatures: Counter[str] = field(default_factory=Counter)
    entropies: npt.NDArray[np.int64] | None = None
    entropy: float = 0.0
    tail_mass: float = 0.0


def write_set_page(directory: str) -> Path:
    """Write DIRECTORY/stats.html and return its path; InputError for what is no finished distilled set."""
    root = Path(directory)
    manifest = read_json(root / "manifest.json", "the manifest of a finished distilled set")
    if not manifest.get("complete") or not isinstance(manifest.get("parts"), list):
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
    except (OSError, pa.ArrowException, KeyError, ValueError) as error:
        raise InputError(f"{path}: cannot be read ({one_line(error)})") from None


def _add_rows(stats: Stats, batch: pa.RecordBatch) -> None:
    lengths = np.array(pc.list_value_length(batch.column("response_ids")), dtype=np.int64)
    stats.prompt_lengths.append(np.array(pc.list_value_length(batch.column("prompt_ids")), dtype=np.int64))
    reasons = np.array(batch.column("finish_reason").to_pylist(), dtype=object)
    for reason in sorted(set(reasons), key=str):
        stats.lengths.setdefault(str(reason), []).append(lengths[reasons == reason])
    for domain, length in zip(batch.column("domain").to_pylist(), lengths.tolist(), strict=True):
        stats.domains[domain] += length
    if "temperature" in batch.schema.names:
        told = ("not known" if value is None else f"{value:g}" for value in batch.column("temperature").to_pylist())
        stats.temperatures.update(told)
    if COLUMN not in batch.schema.names:
        return
    if stats.entropies is None:
        stats.entropies = np.zeros(len(_ENTROPY_EDGES) - 1, dtype=np.int64)
    for value in batch.column(COLUMN).to_pylist():
        _, logprobs_RK, tail_R = unpack(value)
        # All tokens that are not stored count as one outcome: a lower bound.
        entropy_R = -(np.exp(logprobs_RK) * logprobs_RK).sum(-1) - np.where(tail_R > 0, tail_R, 1) * np.log(
            np.where(tail_R > 0, tail_R, 1)
        )
        stats.entropies += np.histogram(np.clip(entropy_R, 0, _ENTROPY_EDGES[-1]), _ENTROPY_EDGES)[0]
        stats.entropy += float(entropy_R.sum())
        stats.tail_mass += float(tail_R.sum())


def _render(manifest: dict[str, Any], stats: Stats) -> str:
    counts, tokens = manifest["counts"], manifest["response_tokens"]
    target = manifest.get("config", {}).get("target", "a target")
    rows = [(name.replace("_", " "), f"{value:,}") for name, value in counts.items()]
    prompts, answers = np.concatenate(stats.prompt_lengths), {k: np.concatenate(v) for k, v in stats.lengths.items()}
    rows += [("response tokens", f"{tokens:,}"), *_spread("prompt", prompts)]
    rows += _spread("answer", np.concatenate(list(answers.values())))
    total = sum(map(len, answers.values()))
    rows += [(f"ended by {name}", f"{len(each):,} ({percent(len(each) / total)})") for name, each in answers.items()]
    rows += [(f"at temperature {name}", f"{count:,}") for name, count in sorted(stats.temperatures.items())]
    if stats.entropies is not None:
        rows += [("mean entropy of a token, nats, at least", f"{stats.entropy / tokens:.3f}")]
        rows += [("mean mass of the tokens that are not stored", f"{stats.tail_mass / tokens:.4f}")]
    reasons = [
        line
        for key in ("skipped_because", "failed_because", "shortened_because", "dropped_because")
        for line in manifest.get(key, [])
    ]
    with drawing(MARKS):
        pictures = _pictures(prompts, answers, stats)
    return render_template(
        "distilled_set.html.j2",
        f"{counts['rows']:,} answers, {tokens:,} tokens",
        pictures,
        target=target,
        reasons=reasons,
        rows=rows,
        command=manifest.get("command", ""),
    )


def _spread(what: str, lengths: npt.NDArray[np.int64]) -> list[tuple[str, str]]:
    least, middle, most = np.percentile(lengths, (0, 50, 100))
    return [(f"tokens of {what}: least, median, most", f"{least:,.0f}, {middle:,.0f}, {most:,.0f}")]


def _pictures(prompts: npt.NDArray[np.int64], answers: dict[str, Any], stats: Stats) -> list[Picture]:
    ends = "Tokens of an answer, by how it ended: `stop` is the target's own end, `length` the limit."
    turns = "Tokens of a prompt, with the earlier turns of its conversation."
    found = [
        ("lengths", "How long the answers are", ends, _histogram(answers, "tokens of an answer")),
        ("prompts", "How long the prompts are", turns, _histogram({"": prompts}, "tokens of a prompt")),
    ]
    if stats.entropies is not None:
        caption = (
            "The target's entropy at each token of an answer, from the stored distributions; what they do not list "
            "counts as one outcome. A draft has it easy on the left."
        )
        found.append(("entropy", "How sure the target is", caption, _entropy(stats.entropies)))
    caption = "Share of the response tokens, by domain."
    found.append(("domains", "What it is about", caption, _domains(stats.domains)))
    return [Picture(title, caption, inline_svg(figure, name, title)) for name, title, caption, figure in found]


def _histogram(values: dict[str, npt.NDArray[np.int64]], label: str) -> Figure:
    """Stacked bars of whole numbers."""
    most = max(int(each.max()) for each in values.values())
    width = math.ceil((most + 1) / _BARS)
    edges = np.arange(0, most + 1 + width, width) - 0.5
    figure, ax = _axes(2.4)
    base = np.zeros(len(edges) - 1)
    for index, (name, each) in enumerate(sorted(values.items(), reverse=True)):
        counts, colour = np.histogram(each, edges)[0], MARKS[f"d{index % 6 + 1}"]
        ax.bar(edges[:-1], counts, width, base, align="edge", color=colour, label=name, lw=0)
        base = base + counts
    if len(values) > 1:
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
    figure, ax = _axes(0.7 + 0.25 * len(shown))
    shares = [count / max(1, tokens.total()) for _, count in shown]
    ax.barh(range(len(shown)), shares, color=MARKS["d1"], height=0.6)
    ax.set_yticks(range(len(shown)), [shortened(name, _NAME) for name, _ in shown])
    ax.invert_yaxis()
    ax.grid(visible=False, axis="y")
    for y, share in enumerate(shares):
        ax.annotate(f" {percent(share)}", (share, y), va="center", color=MARKS["ink"])
    ax.set_xlim(0, 1.12)
    ax.set_xlabel("share of the response tokens")
    return figure


def _axes(height: float) -> tuple[Figure, Axes]:
    figure = Figure(figsize=(WIDTH, height))
    return figure, figure.subplots()
