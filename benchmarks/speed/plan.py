"""A plan beside an exhaustive sweep: `python benchmarks/speed/plan.py [--draft D] [--temperature 1]
[--out FILE]`.

The sweep times every chain of 1 to 16 tokens, every k-ary tree of MCSD's space up to `--nodes`
nodes and `--depth` levels, confidence stops and trees that grow, on the same prompts in rotating
order. The fastest of so many noisy figures is fast by luck, so its best `FINAL`, what the plan
chose and the target alone are timed again on other prompts, in rotating order: `lost` is how much
slower the plan's tree is there than the fastest of them, with the 95 % interval over prompts.
`share_of_time` is the plan's time over the sweep's, the second timing not counted. Without
arguments the pair is the demo's; leave the machine alone meanwhile.
"""

# ruff: noqa: E402
import sys
from pathlib import Path

if __name__ == "__main__":
    # Python puts this directory first, where files have the names of packages (eval, train,
    # decode).
    sys.path[0] = str(Path(__file__).resolve().parents[2])

import os
import time
from dataclasses import dataclass
from typing import Any

from benchmarks.lib.shipped_pair import LARGER_DRAFT, PAIR, answer, heldout_prompts
from draftsmith.core.progress import progress
from draftsmith.core.prompts import Prompt
from draftsmith.core.sampling import Sampling
from draftsmith.decode import SpeculativeDecoder, Tree, TreeShape, parse_tree
from draftsmith.decode.tree_spec import kary
from draftsmith.drafts.load import load_models
from draftsmith.eval.bootstrap import PromptSums, quotient, resamples

ALONE = "the target alone"
FINAL = 6


@dataclass(frozen=True, kw_only=True)
class BenchmarkConfig:
    """Set a plan beside a sweep."""

    target: str = str(PAIR / "target")
    """The target."""
    draft: str = str(LARGER_DRAFT)
    """The draft."""
    temperature: float = 1.0
    """Temperature."""
    nodes: int = 64
    """Most nodes of a k-ary tree of the sweep."""
    depth: int = 5
    """Most levels of a k-ary tree of the sweep."""
    prompts: int = 16
    """Prompts that acceptance is measured on."""
    timed: int = 2
    """Prompts of the sweep, and of the plan's own confirmation."""
    again: int = 12
    """Prompts on which the best are timed again."""
    max_new_tokens: int = 48
    """Tokens per prompt."""
    out: str | None = None
    """A JSON file for the outcome."""


def run(config: BenchmarkConfig) -> dict[str, Any]:
    """Plan, sweep, and time the best again."""
    from draftsmith.eval.planning.expected_tokens import kary_space
    from draftsmith.eval.planning.plan import plan_pair
    from draftsmith.eval.planning.planner import Planner, tried

    pair = load_models(config.target, {"draft": config.draft}, device="cpu", dtype="float32")
    prompts = heldout_prompts(pair.tokenizer, config.prompts + config.again)
    planner = Planner(
        pair.target,
        pair.drafts["draft"],
        prompts[: config.prompts],
        Sampling(temperature=config.temperature),
        batch_size=1,
        max_new_tokens=config.max_new_tokens,
        seed=0,
    )
    planned = plan_pair(planner, config.timed)
    chosen = planned["name"] if planned["pays"] is not False else ALONE
    tree = planned["tree"]
    shape = parse_tree(tree["spec"]) if "spec" in tree else Tree(tuple(tree["parents"]))
    shapes: dict[str, TreeShape | None] = {ALONE: None, planned["name"]: shape}
    shapes |= {f"chain:{n}": kary((1,) * n) for n in range(1, 17)}
    shapes |= kary_space(config.nodes, config.depth, 32)
    shapes |= {spec: parse_tree(spec) for spec in tried(planner.draft)}
    started = time.perf_counter()
    swept = _timed(planner, shapes, prompts[: config.timed])
    sweep_s = time.perf_counter() - started
    rates = {name: sums.pooled or 0.0 for name, sums in swept.items()}
    ranked = sorted(rates, key=lambda name: -rates[name])
    finals = {name: shapes[name] for name in dict.fromkeys([ALONE, chosen, *ranked[:FINAL]])}
    again = _timed(planner, finals, prompts[config.prompts :])
    best = max(again, key=lambda name: again[name].pooled or 0.0)
    share = quotient(again[chosen], again[best], resamples(config.again, 2000, 0))
    lost = None if chosen == best else [1 - (share[key] or 0.0) for key in ("value", "high", "low")]
    return {
        "planned": chosen,
        "best": best,
        "trees": len(shapes),
        "lost": lost or [0.0, 0.0, 0.0],
        "plan_s": planned["seconds"],
        "sweep_s": sweep_s,
        "share_of_time": planned["seconds"] / sweep_s,
        "tokens_per_s": {name: sums.pooled for name, sums in again.items()},
        "swept_tokens_per_s": {name: rates[name] for name in ranked},
        "load_average": os.getloadavg()[0],
    }


def _timed(
    planner: Any, shapes: dict[str, TreeShape | None], prompts: list[Prompt]
) -> dict[str, PromptSums]:
    """Tokens over seconds by tree; every prompt begins the round with another tree."""
    decoders: dict[str, SpeculativeDecoder] = {
        name: planner.decoder(shape) for name, shape in shapes.items()
    }
    counts: dict[str, list[tuple[float, float]]] = {name: [] for name in shapes}
    names = list(shapes)
    with progress("sweep", len(prompts) * len(names)) as advance:
        for index, prompt in enumerate(prompts):
            turn = index * len(names) // len(prompts)
            for name in names[turn:] + names[:turn]:
                if not index:
                    planner.run(decoders[name], [prompt.ids], 4, ends=False)
                tokens, seconds, _ = planner.run(
                    decoders[name], [prompt.ids], planner.max_new_tokens, ends=True
                )
                counts[name].append((tokens, seconds))
                advance(1, name)
    return {name: PromptSums.of(*zip(*each, strict=True)) for name, each in counts.items()}


if __name__ == "__main__":
    answer(BenchmarkConfig, "plan", run)
