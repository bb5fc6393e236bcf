r"""Acceptance by position in a long answer; speed-up by batch and by length of the prompt.

    python benchmarks/speed/lengths.py --out lengths.json [--target DIR --draft DIR] \
        [--sections alpha batch prompt]

`alpha`: the target writes `--new_tokens` tokens behind held-out prose at temperature 1, past every
EOS, and one forward of each model over these texts gives the draft's alpha, in bins of position
that double, with 95 % intervals over prompts. `batch` and `prompt`: speed-up over the target alone
at every batch size and prompt length. Rounds alternate between the two, every round has other
prompts, and the figure is the median of the rounds' ratios with its quartiles.

Prints Markdown tables. Every cell is saved to `--out`; the same command resumes there. Without
arguments the pair is the demo's, whose context ends at 512: a longer answer is cut, and a longer
prompt is left out.
"""

# ruff: noqa: E402
import sys
from pathlib import Path

if __name__ == "__main__":
    # Python puts this directory first, where files have the names of packages (eval, train,
    # decode).
    sys.path[0] = str(Path(__file__).resolve().parents[2])

import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from functools import partial
from typing import Any

import numpy as np
import torch
from transformers import PreTrainedModel

from benchmarks.lib.pages import gap, table
from benchmarks.lib.shipped_pair import PAIR, heldout_prompts
from benchmarks.lib.timing import rotated
from benchmarks.speed.decode import device_name
from draftsmith.core.command_line import parse
from draftsmith.core.errors import InputError
from draftsmith.core.io import read_json, write_json_atomic
from draftsmith.core.models import context_length, eos_ids, fingerprint
from draftsmith.core.provenance import provenance
from draftsmith.core.runs import difference, hold
from draftsmith.core.sampling import Sampling
from draftsmith.core.tokenization import Tokenizer, encode_text
from draftsmith.decode import DraftModelProposer, SpeculativeDecoder
from draftsmith.demo import corpus
from draftsmith.drafts.load import load_models
from draftsmith.eval import bootstrap
from draftsmith.eval.bootstrap import PromptSums, resamples
from draftsmith.eval.estimate import read_traces
from draftsmith.eval.measuring import Task, continuations
from draftsmith.eval.remarks import conditions, of_timing
from draftsmith.eval.report.formats import with_interval

COMMAND = "benchmarks/speed/lengths.py"
SECTIONS = ("alpha", "batch", "prompt")
FIRST_BIN, WARM_UP_TOKENS = 64, 4
# Length of the prompts that `heldout_prompts` cuts.
ANSWERED_TOKENS = 32
SAMPLING = Sampling(temperature=1.0)


@dataclass(frozen=True, kw_only=True)
class Options:
    """Measure a pair over long answers, batches and long prompts."""

    out: str
    """JSON file for the outcome, saved after every cell."""
    target: str = str(PAIR / "target")
    """The target."""
    draft: str = str(PAIR / "base")
    """The draft, a language model."""
    sections: list[str] = field(default_factory=lambda: list(SECTIONS))
    """Any of alpha, batch, prompt."""
    prompts: int = 16
    """Prompts of the section `alpha`, of 32 tokens each."""
    new_tokens: int = 2048
    """Tokens of every answer in the section `alpha`."""
    group: int = 8
    """Answers written side by side in the section `alpha`."""
    tree: str = "chain:4"
    """Tree of the timed draft."""
    batch: list[int] = field(default_factory=lambda: [1, 4, 16, 64])
    """Batch sizes, with prompts of the first of `--prompt_tokens`."""
    prompt_tokens: list[int] = field(default_factory=lambda: [32, 128, 512, 1024])
    """Prompt lengths, at batch 1."""
    timed_tokens: int = 32
    """Tokens of every timed answer."""
    rounds: int = 5
    """Timed rounds per cell."""
    threads: int = 2
    """CPU threads of torch."""
    device: str = "auto"
    dtype: str = "auto"


def bins(tokens: int) -> list[tuple[int, int]]:
    """Positions from, to (exclusive): 64, then doubling, up to `tokens`."""
    edges = [0, FIRST_BIN]
    while edges[-1] < tokens:
        edges.append(2 * edges[-1])
    return [(low, min(high, tokens)) for low, high in zip(edges, edges[1:], strict=False)]


def reach(*models: PreTrainedModel) -> int:
    """The longest text that all models read."""
    return min(context_length(model) or 10**9 for model in models)


def alpha_cell(
    target: PreTrainedModel,
    draft: PreTrainedModel,
    tokenizer: Tokenizer,
    options: Options,
    first: int,
    tokens: int,
) -> dict[str, Any]:
    """Sums of alpha by prompt and bin over the answers to `--group` prompts from `first` on."""
    prompts = heldout_prompts(tokenizer, options.prompts)[first : first + options.group]
    task = Task(target, prompts, SAMPLING, (), tokens, seed=0, batch_size=len(prompts))
    rows = continuations(prompts, task.baseline())
    traces, _ = read_traces(target, {"draft": draft}, rows, SAMPLING, (), batch_size=len(rows))
    alpha_PL = traces["draft"].values["alpha"][0]
    eos = eos_ids(target)
    ends = [
        next((at for at, token in enumerate(row.output_ids) if token in eos), None) for row in rows
    ]
    sums = [[float(alpha_L[i:j].sum()) for i, j in bins(tokens)] for alpha_L in alpha_PL]
    return {"tokens": tokens, "sums": sums, "first_eos": ends}


def speed_cell(
    target: PreTrainedModel,
    draft: PreTrainedModel,
    text: Sequence[int],
    options: Options,
    batch: int,
    length: int,
) -> dict[str, Any]:
    """Tokens, target calls and seconds of every round, of the target alone and with the draft."""
    if length + options.timed_tokens > (limit := reach(target, draft)):
        return {"left_out": f"the models reach {limit} positions"}
    decoders = {
        "alone": SpeculativeDecoder(target),
        "draft": SpeculativeDecoder(target, DraftModelProposer(draft), tree=options.tree),
    }
    counts: dict[str, list[dict[str, float]]] = {name: [] for name in decoders}
    load = os.getloadavg()[0]
    for turn in range(-1, options.rounds):
        starts = [(turn + 1) * batch * length + row * length for row in range(batch)]
        prompts = [[text[(start + i) % len(text)] for i in range(length)] for start in starts]
        for name in rotated(list(decoders), turn):
            tokens = (
                options.timed_tokens if turn >= 0 else min(WARM_UP_TOKENS, options.timed_tokens)
            )
            made = decoders[name].generate(prompts, SAMPLING, tokens, eos_ids=(), seed=turn + 1)
            stats = [generation.stats for generation in made.generations]
            row = {
                "emitted": sum(each.emitted for each in stats),
                "calls": sum(each.target_calls for each in stats),
            }
            if turn >= 0:
                counts[name].append(row | {"prefill_s": made.prefill_s, "decode_s": made.decode_s})
    return {"rounds": counts, "load": [load, os.getloadavg()[0]]}


def cells_of(
    options: Options, tokenizer: Tokenizer, pair: tuple[PreTrainedModel, PreTrainedModel]
) -> dict[str, Callable[[], Any]]:
    """Every cell by name. A cell that does not fit the context says so."""
    texts = [row["text"] for row in corpus.passages("prose", corpus.split("prose").heldout)]
    text = [token for each in texts for token in encode_text(tokenizer, each)]
    tokens = min(options.new_tokens, reach(*pair) - ANSWERED_TOKENS)
    if (count := len(heldout_prompts(tokenizer, options.prompts))) < options.prompts:
        raise InputError(
            f"--prompts {options.prompts}: the held-out prose has only {count} passages; ask for "
            "fewer"
        )
    sizes = [("batch", size, options.prompt_tokens[0]) for size in options.batch]
    sizes += [("prompt", 1, length) for length in options.prompt_tokens]

    cells: dict[str, Callable[[], Any]] = {
        f"alpha {first}": partial(alpha_cell, *pair, tokenizer, options, first, tokens)
        for first in range(0, options.prompts, options.group)
    }
    cells |= {
        f"{kind} {b} {n}": partial(speed_cell, *pair, text, options, b, n) for kind, b, n in sizes
    }
    return {name: measure for name, measure in cells.items() if name.split()[0] in options.sections}


def summary(cells: Mapping[str, Any]) -> dict[str, Any]:
    """Alpha by bin with its change from the first bin, and speed-ups with the prompt's forward in
    and out.
    """
    found: dict[str, Any] = {"alpha": [], "speed": []}
    done = [cell for name, cell in cells.items() if name.startswith("alpha")]
    if sums := [of_prompt for cell in done for of_prompt in cell["sums"]]:
        tokens, ends = done[0]["tokens"], [end for cell in done for end in cell["first_eos"]]
        picks, parts = resamples(len(sums), 2000, 0), []
        for index, (low, high) in enumerate(bins(tokens)):
            parts.append(
                PromptSums.of([of_prompt[index] for of_prompt in sums], [high - low] * len(sums))
            )
            alpha, change = (
                bootstrap.estimate(parts[-1], picks),
                bootstrap.difference(parts[-1], parts[0], picks),
            )
            ended = sum(end is not None and end < low for end in ends)
            found["alpha"].append(
                {"from": low, "to": high - 1, "alpha": alpha, "change": change, "ended": ended}
            )
    conditioned = []
    for name, cell in cells.items():
        kind, *sizes = name.split()
        if kind == "alpha":
            continue
        row: dict[str, Any] = {
            "section": kind,
            "batch": int(sizes[0]),
            "prompt_tokens": int(sizes[1]),
        }
        if "rounds" in cell:
            alone, draft = cell["rounds"]["alone"], cell["rounds"]["draft"]
            rates = {
                key: (_rates(alone, key), _rates(draft, key))
                for key in ("with_prompt", "without_prompt")
            }
            row |= {
                key: np.quantile(b / a, [0.5, 0.25, 0.75]).tolist() for key, (a, b) in rates.items()
            }
            row["tau"] = sum(each["emitted"] for each in draft) / sum(
                each["calls"] for each in draft
            )
            row["alone_tokens_per_s"] = float(np.median(rates["with_prompt"][0]))
            busy = conditions(
                name, 1.0, cell["load"], rates["without_prompt"][0].tolist(), os.cpu_count() or 1
            )
            conditioned.append(busy)
        found["speed"].append(row | {key: cell[key] for key in ("left_out",) if key in cell})
    found["remarks"] = of_timing(conditioned, os.cpu_count() or 1)
    return found


def _rates(rounds: Sequence[Mapping[str, float]], key: str) -> Any:
    prompt = float(key == "with_prompt")
    return np.array(
        [each["emitted"] / (each["decode_s"] + prompt * each["prefill_s"]) for each in rounds]
    )


def tables(found: Mapping[str, Any]) -> str:
    """The tables and remarks of a summary, in Markdown."""
    alphas = []
    for row in found["alpha"]:
        change = gap(row["change"]) if row["from"] else ""
        alphas.append(
            [f"{row['from']}-{row['to']}", with_interval(row["alpha"]), change, str(row["ended"])]
        )
    speeds = []
    for row in found["speed"]:
        rest = [row.get("left_out", ""), "", ""]
        if "tau" in row:
            gains = (
                "{:.2f} ({:.2f} to {:.2f})".format(*row[key])
                for key in ("with_prompt", "without_prompt")
            )
            rest = [*gains, f"{row['tau']:.2f}"]
        speeds.append([str(row["batch"]), str(row["prompt_tokens"]), *rest])
    parts = [table(["position", "alpha", "change from the first bin", "answers past EOS"], alphas)]
    parts.append(table(["batch", "prompt", "speed-up, prompt in", "prompt out", "tau"], speeds))
    return "\n\n".join([*parts, *(remark["text"] for remark in found["remarks"])]) + "\n"


def run(options: Options) -> dict[str, Any]:
    """Measure every cell that `--out` does not have yet."""
    if unknown := sorted(set(options.sections) - set(SECTIONS)):
        raise InputError(f"--sections {unknown[0]}: use any of {', '.join(SECTIONS)}")
    pair = load_models(
        options.target, {"draft": options.draft}, device=options.device, dtype=options.dtype
    )
    target, draft = pair.target, pair.drafts["draft"]
    if not isinstance(draft, PreTrainedModel):
        raise InputError(f"--draft {options.draft}: is a head; use a language model")
    free = ("out", "sections")  # what may differ when a run is resumed
    identity = {key: value for key, value in asdict(options).items() if key not in free}
    identity |= {"target_weights": fingerprint(target), "draft_weights": fingerprint(draft)}
    setting = {
        "identity": identity,
        **provenance(COMMAND, asdict(options)),
        "device": device_name(target),
    }
    setting["parameters"] = {"target": target.num_parameters(), "draft": draft.num_parameters()}
    out, cells = Path(options.out), {}
    with hold(out, file=True):
        if out.exists():
            kept = read_json(out, "a result of this benchmark")
            if differs := difference(kept["identity"], identity):
                raise InputError(
                    f"--out {out}: was made with other options: {differs}; choose another --out"
                )
            cells = kept["cells"]
        for name, measure in cells_of(options, pair.tokenizer, (target, draft)).items():
            if name not in cells:
                cells[name] = measure()
                sys.stderr.write(f"{name}: done\n")
            result = setting | {"cells": cells, "summary": summary(cells)}
            write_json_atomic(out, result)
    return result


def main() -> None:
    """Run, and print the tables."""
    options, _ = parse(Options, "lengths", sys.argv[1:])
    torch.set_num_threads(options.threads)
    sys.stdout.write(tables(run(options)["summary"]))


if __name__ == "__main__":
    try:
        main()
    except InputError as error:
        sys.exit(f"{COMMAND}: {error}")
