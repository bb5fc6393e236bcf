"""`draftsmith train`."""

from draftsmith.cli.output import command_line, finish
from draftsmith_core.options import parse
from train.config import TrainConfig


def run(argv: list[str]) -> None:
    """Fit a draft; the checkpoint is the directory `out`."""
    config, as_json = parse(TrainConfig, "train", argv)
    from train.training_run import train

    summary = train(config, command_line("train", argv))
    alpha = f", alpha {summary['heldout_alpha']:.4f}" if "heldout_alpha" in summary else ""
    lines = [
        f"{summary['checkpoint']}: {summary['steps']} steps, best held-out loss {summary['heldout_loss']:.4f}"
        f"{alpha} at step {summary['best_step']}"
    ]
    finish(summary, lines, as_json)
