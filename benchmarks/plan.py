"""A plan beside an exhaustive sweep: `python benchmarks/plan.py [--temperature 1] [--out FILE]`.

The sweep times every chain of 1 to 16 tokens, every k-ary tree of MCSD's space up to `--nodes` nodes, confidence stops
and trees that grow, all on the same prompts, interleaved in rotating order, and what the plan chose among them. `lost`
is how much slower that is than the sweep's best, both by the sweep's clock; the best of so many is the largest of
noisy figures, so that even a perfect plan loses a little by it. `share_of_time` is the plan's time over the sweep's.
Without arguments the pair is the demo's; leave the machine alone meanwhile.
"""

import json
import os
import sys
import time
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from typing import Any

# Files beside this one have the names of packages (eval, train, decode); they must not be found instead.
sys.path[:] = [entry for entry in sys.path if Path(entry).resolve() != Path(__file__).resolve().parent]

from decode import SpeculativeDecoder, TreeShape, parse_tree  # noqa: E402
from decode.tree_spec import kary  # noqa: E402
from drafts.load import load_pair  # noqa: E402
from draftsmith.demo import corpus  # noqa: E402
from draftsmith_core.io import write_json_atomic  # noqa: E402
from draftsmith_core.options import parse  # noqa: E402
from draftsmith_core.progress import progress  # noqa: E402
from draftsmith_core.prompts import Prompt  # noqa: E402
from draftsmith_core.sampling import Sampling  # noqa: E402

ROOT = Path(__file__).resolve().parents[1]
PAIR = ROOT / "draftsmith" / "demo" / "pair"


@dataclass(frozen=True, kw_only=True)
class BenchmarkConfig:
    """Set a plan beside a sweep."""

    target: str = str(PAIR / "target")
    """The target."""
    draft: str = str(ROOT / "configs" / "bench" / "draft")
    """The draft."""
    temperature: float = 1.0
    """Temperature."""
    nodes: int = 32
    """Most nodes of a k-ary tree of the sweep."""
    depth: int = 6
    """Most levels of a k-ary tree of the sweep."""
    prompts: int = 16
    """Prompts that acceptance is measured on."""
    timed: int = 4
    """Prompts of the sweep."""
    max_new_tokens: int = 64
    """Tokens per prompt."""
    out: str | None = None
    """A JSON file for the outcome."""


def run(config: BenchmarkConfig) -> dict[str, Any]:
    """Plan, then sweep."""
    from eval.plan import TRIED, Planner, plan_pair, planned_tree
    from eval.plan_joint import kary_space

    pair = load_pair(config.target, {"draft": config.draft}, device="cpu", dtype="float32")
    rows = islice(corpus.passages("prose", corpus.split("prose").heldout, 300), config.prompts)
    prompts = [Prompt(row["id"], "prose", tuple(pair.tokenizer.encode(row["text"])[:32])) for row in rows]
    planner = Planner.of(
        pair.target,
        pair.drafts["draft"],
        prompts,
        Sampling(temperature=config.temperature),
        batch_size=1,
        max_new_tokens=config.max_new_tokens,
        seed=0,
    )
    with progress("plan", 6) as advance:
        planned = plan_pair(planner, confirm_prompts=config.timed, advance=advance)
    started = time.perf_counter()
    shapes: dict[str, TreeShape | None] = {"the target alone": None, planned["name"]: planned_tree(planned)}
    shapes |= {f"chain:{n}": kary((1,) * n) for n in range(1, 17)}
    shapes |= kary_space(config.nodes, config.depth, 32)
    shapes |= {spec: parse_tree(spec) for spec in TRIED}
    rates = _sweep(planner, shapes, prompts[: config.timed])
    sweep_s = time.perf_counter() - started
    best = max(rates, key=lambda name: rates[name])
    return {
        "planned": planned["name"],
        "best": best,
        "trees": len(shapes),
        "lost": 1 - rates[planned["name"]] / rates[best],
        "plan_s": planned["seconds"],
        "sweep_s": sweep_s,
        "share_of_time": planned["seconds"] / sweep_s,
        "tokens_per_s": rates,
        "load_average": os.getloadavg()[0],
    }


def _sweep(planner: Any, shapes: dict[str, TreeShape | None], prompts: list[Prompt]) -> dict[str, float]:
    """Tokens per second by tree."""
    decoders: dict[str, SpeculativeDecoder] = {name: planner.decoder(shape) for name, shape in shapes.items()}
    sums = {name: [0, 0.0] for name in shapes}
    names = list(shapes)
    with progress("sweep", len(prompts) * len(names)) as advance:
        for index, prompt in enumerate(prompts):
            turn = index * len(names) // len(prompts)
            for name in names[turn:] + names[:turn]:
                if not sums[name][0]:
                    planner.run(decoders[name], [prompt.ids], 4, ends=False)
                tokens, seconds, _ = planner.run(decoders[name], [prompt.ids], planner.max_new_tokens, ends=True)
                sums[name] = [sums[name][0] + tokens, sums[name][1] + seconds]
                advance(1, name)
    return {name: tokens / seconds for name, (tokens, seconds) in sums.items()}


if __name__ == "__main__":
    chosen, _ = parse(BenchmarkConfig, "plan", sys.argv[1:])
    found = run(chosen)
    sys.stdout.write(json.dumps(found, indent=1) + "\n")
    if chosen.out:
        write_json_atomic(Path(chosen.out), found)
