"""A distilled set as one page: lengths of prompts and answers, finish reasons, the target's entropy, domains.

Legend: R response tokens, K stored tokens at each.
"""

import math
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.compute as pc
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from pyarrow.dataset import Dataset, dataset

from draftsmith_core.errors import InputError, one_line
from draftsmith_core.io import read_json, write_text_atomic
from draftsmith_core.teacher_rows import COLUMN, unpack
from eval.report.formats import percent, shortened
from eval.report.page import Picture, render_template
from eval.report.theme import LIGHT, WIDTH, drawing, inline_svg

if TYPE_CHECKING:
    from pandas import DataFrame

PAGE = "stats.html"
_BARS, _DOMAINS, _NAME = 32, 24, 20  # bars of a histogram, domains with a bar, characters of a name beside one
_ENTROPY_EDGES = np.linspace(0, 12, 49)  # nats; no vocabulary in use reaches the last edge


def write_set_page(directory: str) -> Path:
    """Write DIRECTORY/stats.html and return its path; raise InputError unless it holds a finished distilled set."""
    root = Path(directory)
    manifest = read_json(root / "manifest.json", "the manifest of a finished distilled set")
    if not manifest.get("complete"):
        raise InputError(f"{directory}: the distilled set is not finished; run the same distill command again")
    try:
        data = dataset([str(root / part["file"]) for part in manifest["parts"]])
        answers, teacher = read_answers(data), read_teacher(data)
    except (OSError, pa.ArrowException) as error:
        raise InputError(f"{directory}: cannot be read ({one_line(error)})") from None
    write_text_atomic(root / PAGE, _render(manifest, answers, teacher))
    return root / PAGE


def read_answers(data: Dataset) -> "DataFrame":
    """One row per answer: `prompt` and `answer` in tokens, finish_reason, domain, temperature."""
    columns = {name: pc.field(name) for name in ("finish_reason", "domain", "temperature")}
    lengths = {"prompt": "prompt_ids", "answer": "response_ids"}
    columns |= {name: pc.list_value_length(pc.field(ids)) for name, ids in lengths.items()}
    return data.to_table(columns=columns).to_pandas()


def read_teacher(data: Dataset) -> tuple[npt.NDArray[np.int64], float, float] | None:
    """Tokens by the target's entropy between `_ENTROPY_EDGES`, the sum of the entropies, and that of the mass that is
    not stored; None without stored distributions.
    """
    if COLUMN not in data.schema.names:
        return None
    counts, entropy, tail_mass = np.zeros(len(_ENTROPY_EDGES) - 1, dtype=np.int64), 0.0, 0.0
    # Few rows at a time, because teacher rows are large.
    for batch in data.to_batches(columns=[COLUMN], batch_size=256):
        for value in batch.column(COLUMN).to_pylist():
            _, logprobs_RK, tail_R = unpack(value)
            # All tokens that are not stored count as one outcome: a lower bound.
            mass_R = np.where(tail_R > 0, tail_R, 1)
            entropy_R = -(np.exp(logprobs_RK) * logprobs_RK).sum(-1) - mass_R * np.log(mass_R)
            counts += np.histogram(np.clip(entropy_R, 0, _ENTROPY_EDGES[-1]), _ENTROPY_EDGES)[0]
            entropy += float(entropy_R.sum())
            tail_mass += float(tail_R.sum())
    return counts, entropy, tail_mass


def _render(
    manifest: dict[str, Any], answers: "DataFrame", teacher: tuple[npt.NDArray[np.int64], float, float] | None
) -> str:
    counts, tokens = manifest["counts"], manifest["response_tokens"]
    rows = [(name.replace("_", " "), f"{value:,}") for name, value in counts.items()]
    rows.append(("response tokens", f"{tokens:,}"))
    for name in ("prompt", "answer"):
        least, middle, most = answers[name].quantile((0, 0.5, 1))
        rows.append((f"tokens of {name}: least, median, most", f"{least:,.0f}, {middle:,.0f}, {most:,.0f}"))
    for reason, count in answers["finish_reason"].value_counts().sort_index().items():
        rows.append((f"ended by {reason}", f"{count:,} ({percent(count / len(answers))})"))
    for temperature, count in answers["temperature"].value_counts().sort_index().items():
        rows.append((f"at temperature {temperature:g}", f"{count:,}"))
    if teacher is not None:
        rows.append(("mean entropy of a token, nats, at least", f"{teacher[1] / tokens:.3f}"))
        rows.append(("mean mass of the tokens that are not stored", f"{teacher[2] / tokens:.4f}"))
    reasons = ("skipped_because", "failed_because", "shortened_because", "dropped_because")
    return render_template(
        "distilled_set.html.j2",
        f"{counts['rows']:,} answers, {tokens:,} tokens",
        _pictures(answers, None if teacher is None else teacher[0]),
        target=manifest.get("config", {}).get("target", "a target"),
        reasons=[line for key in reasons for line in manifest.get(key, [])],
        rows=rows,
        command=manifest.get("command", ""),
    )


def _pictures(answers: "DataFrame", entropies: npt.NDArray[np.int64] | None) -> list[Picture]:
    pictures: list[Picture] = []

    @contextmanager
    def picture(title: str, caption: str, label: str, height: float = 2.4) -> Iterator[Axes]:
        figure = Figure(figsize=(WIDTH, height))
        yield (ax := figure.subplots())
        ax.set_xlabel(label)
        pictures.append(Picture(title, caption, inline_svg(figure, title.replace(" ", "-").lower(), title)))

    with drawing(LIGHT):
        caption = "Tokens of an answer, by how it ended: `stop` is the target's own end, `length` the limit."
        with picture("How long the answers are", caption, "tokens of an answer") as ax:
            ends = {reason: group["answer"] for reason, group in sorted(answers.groupby("finish_reason"), reverse=True)}
            colours = [LIGHT[f"d{index % 6 + 1}"] for index in range(len(ends))]
            bins = _bins(answers["answer"].max())
            ax.hist(list(ends.values()), bins, stacked=True, color=colours, label=list(ends), lw=0)
            ax.legend()
            ax.set_ylabel("rows")
        caption = "Tokens of a prompt, with the earlier turns of its conversation."
        with picture("How long the prompts are", caption, "tokens of a prompt") as ax:
            ax.hist(answers["prompt"], _bins(answers["prompt"].max()), color=LIGHT["d1"], lw=0)
            ax.set_ylabel("rows")
        if entropies is not None:
            caption = (
                "The target's entropy at each token of an answer, from the stored distributions; the tokens that they "
                "do not list count as one outcome. A draft has it easy on the left."
            )
            with picture("How sure the target is", caption, "entropy, nats") as ax:
                last = int(np.flatnonzero(entropies).max(initial=0)) + 1
                widths = np.diff(_ENTROPY_EDGES)[:last]
                ax.bar(_ENTROPY_EDGES[:last], entropies[:last], widths, align="edge", color=LIGHT["d1"], lw=0)
                ax.set_ylabel("tokens")
        tokens = answers.groupby("domain")["answer"].sum().sort_values(ascending=False, kind="stable")
        shares = dict(tokens[:_DOMAINS] / max(1, tokens.sum()))
        if rest := len(tokens[_DOMAINS:]):
            shares[f"{rest} others"] = 1 - sum(shares.values())
        caption, height = "Share of the response tokens, by domain.", 0.7 + 0.25 * len(shares)
        with picture("What it is about", caption, "share of the response tokens", height) as ax:
            names = [shortened(name, _NAME) for name in shares]
            bars = ax.barh(range(len(shares)), list(shares.values()), tick_label=names, color=LIGHT["d1"], height=0.6)
            ax.bar_label(bars, [f" {percent(share)}" for share in shares.values()], color=LIGHT["ink"])
            ax.invert_yaxis()
            ax.grid(visible=False, axis="y")
            ax.set_xlim(0, 1.12)
    return pictures


def _bins(most: int) -> list[float]:
    width = math.ceil((most + 1) / _BARS)
    return [edge - 0.5 for edge in range(0, most + 1 + width, width)]
