"""`draftsmith demo`: `draftsmith align` on the shipped nano pair."""

from dataclasses import dataclass

from draftsmith.cli.output import finish
from draftsmith_core.option_types import check_types
from draftsmith_core.options import parse


@dataclass(frozen=True, kw_only=True)
class DemoConfig:
    """Align the shipped base draft with the shipped target so that it keeps what it knew (policy balanced), beside
    plain alignment, and measure what each buys where; then time the drafts beside the same target padded to the cost of
    a large one."""

    out: str = "out/demo"
    """Everything the demo makes, a copy of the pair and the prompts included."""
    short: bool = False
    """A few prompts and steps: shows in seconds that everything runs; the figures mean nothing."""
    rebuild_pair: str | None = None
    """Instead: train the shipped pair from nothing in this directory (about an hour on two cores)."""
    device: str = "auto"
    """auto, cpu, cuda or cuda:N."""
    dtype: str = "auto"
    """Of the models: auto (float32 on a CPU, else the checkpoint's own), float32, bfloat16 or float16."""

    def __post_init__(self) -> None:
        check_types(self)


def run(argv: list[str]) -> None:
    """Run the demo, or rebuild its pair."""
    config, as_json = parse(DemoConfig, "demo", argv)
    import time
    from pathlib import Path

    from rich.console import Console

    from draftsmith.alignment import outcome
    from draftsmith.alignment.stages import align
    from draftsmith.demo import demo_run
    from draftsmith_core.processes import is_main, require_single_process

    if config.rebuild_pair is not None:
        from draftsmith.demo.rebuild_pair import rebuild

        require_single_process("demo --rebuild_pair")
        pair = rebuild(demo_run.RECIPES, Path(config.rebuild_pair), config.device)
        finish({"pair": str(pair)}, [f"{pair}: target/ and base/, as in {demo_run.PAIR}"], as_json)
        return
    started = time.monotonic()
    options = demo_run.prepare(Path(config.out), config.short, config.device, config.dtype)
    results = align(options)
    large = demo_run.time_large(options, config.short)
    if is_main():
        Console().print(outcome.table(results))
        lines = [*outcome.lines(options, results), *demo_run.large_lines(large)]
        summary = outcome.summary(options, results) | {"large": demo_run.large_summary(large)}
        finish(summary, [*lines, f"took {time.monotonic() - started:.0f} s"], as_json)
