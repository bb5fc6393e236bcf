"""`draftsmith export`."""

from drafts.config import ExportConfig
from draftsmith.cli.output import finish
from draftsmith_core.options import parse
from draftsmith_core.processes import require_single_process


def run(argv: list[str]) -> None:
    """Write a draft for another engine; the record in `out` says what proves it."""
    config, as_json = parse(ExportConfig, "export", argv)
    require_single_process("export")
    from drafts.layouts.export import export

    summary = export(config)
    proof = summary["proof"]
    engine = proof["engine"] or "proof without running an engine"
    close = "" if proof["max_difference"] is None else f"; at most {proof['max_difference']:.1e} apart"
    size = sum(summary["files"].values()) / 2**20
    lines = [f"{config.out}: {summary['kind']} as {config.format}, {len(summary['files'])} files, {size:.1f} MiB"]
    finish(summary, [*lines, f"{engine}: {proof['how']}{close}", *summary["remarks"]], as_json)
