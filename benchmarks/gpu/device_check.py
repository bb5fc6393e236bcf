"""Everything that only a GPU can tell, in one command of at most nine minutes; prints JSON.

    export PYTHONPATH=.
    python benchmarks/gpu/device_check.py --out device.json [--sections greedy decoding]
    python benchmarks/gpu/device_check.py --tiny --device cpu   # the same code on tiny models

Sections: `tests` (those marked gpu), `greedy` (fp32 outputs beside `generate`), `decoding`,
`training` and `distillation` at the shape of Llama-3.1-8B. docs/gpu.md says what each measures.
Each runs in a process of its own with its own time limit: one that fails or is cut leaves its error
beside the figures that it had, and the next one runs. The exit code is 1 if any failed. Needs torch
and transformers alone; nothing is downloaded.
"""

# ruff: noqa: E402
import sys
from pathlib import Path

if __name__ == "__main__":
    # Python puts this directory first.
    sys.path[0] = str(Path(__file__).parents[2])

import argparse
import json
import os
import subprocess
import tempfile
import time
import traceback

import torch

from benchmarks.gpu.device_measure import Check
from benchmarks.gpu.device_sections import SECTIONS
from benchmarks.lib.places import ROOT
from draftsmith.core.devices import resolve_device
from draftsmith.core.io import JsonObject, write_text_atomic
from draftsmith.core.records import git_commit, versions

_PATIENCE = 10  # tiny runs are tests, and a busy machine is no reason to fail
_GRACE_S = 5  # between a section's own limit and the end of its process


def parser() -> argparse.ArgumentParser:
    """The options; argparse, because pydantic may be missing here."""
    title = (__doc__ or "").splitlines()[0]
    made = argparse.ArgumentParser(description=title)
    made.add_argument("--sections", nargs="+", choices=list(SECTIONS), default=list(SECTIONS))
    made.add_argument("--device", default="auto", help="auto, cuda, cuda:N or cpu")
    made.add_argument(
        "--tiny", action="store_true", help="tiny models: tries the code, measures nothing"
    )
    made.add_argument("--out", help="also write the JSON to this file")
    made.add_argument(
        "--run", choices=list(SECTIONS), help=argparse.SUPPRESS
    )  # used by itself: a section's process
    return made


def limit_s(name: str, tiny: bool) -> int:
    """Seconds that a section may take."""
    return SECTIONS[name][1] * (_PATIENCE if tiny else 1)


def run_here(name: str, device: torch.device, tiny: bool, out: Path) -> None:
    """Run one section in this process; `out` is written anew with each figure."""
    found: JsonObject = {}

    def report(key: str, value: object) -> None:
        found[key] = value
        write_text_atomic(out, json.dumps(found))

    if device.type == "cuda":
        # fp32 is fp32 here: outputs are compared token for token.
        torch.backends.cuda.matmul.allow_tf32 = False
        torch.backends.cudnn.allow_tf32 = False
    check = Check(device, tiny, time.monotonic() + limit_s(name, tiny), report)
    try:
        SECTIONS[name][0](check)
    except Exception:
        report("error", traceback.format_exc(limit=-4))
        raise SystemExit(1) from None


def run_apart(name: str, options: argparse.Namespace) -> JsonObject:
    """Run one section in a process of its own, at most as long as it may take."""
    patience_s = limit_s(name, options.tiny) + _GRACE_S
    words = [sys.executable, __file__, "--run", name, "--device", options.device]
    if options.tiny:
        words.append("--tiny")
    path = [str(ROOT), os.environ.get("PYTHONPATH", "")]
    environment = os.environ | {"PYTHONPATH": os.pathsep.join(path)}
    with tempfile.TemporaryDirectory() as directory:
        out = Path(directory) / "found.json"
        words += ["--out", str(out)]
        began = time.monotonic()
        try:
            done = subprocess.run(words, timeout=patience_s, env=environment, capture_output=True)
            ended: JsonObject = {"exit_code": done.returncode}
            if done.returncode:
                ended["stderr"] = done.stderr.decode(errors="replace")[-2000:]
        except subprocess.TimeoutExpired:
            ended = {"exit_code": None, "error": f"cut after {patience_s} s"}
        found = json.loads(out.read_text()) if out.exists() else {}
        seconds = round(time.monotonic() - began, 1)
        return {"seconds": seconds, "figures": found, **ended}


def setting(device: torch.device, tiny: bool) -> JsonObject:
    """Where this is measured."""
    on_cuda = device.type == "cuda"
    properties = torch.cuda.get_device_properties(device) if on_cuda else None
    return {
        "device": properties.name if properties else "cpu",
        "memory_GB": properties.total_memory / 1e9 if properties else None,
        "cuda": torch.version.cuda,
        "cores": os.cpu_count(),
        "tiny": tiny,
        "versions": versions(),
        "git_commit": git_commit(),
    }


def main(argv: list[str] | None = None) -> int:
    """Run the sections and print the JSON; the exit code."""
    options = parser().parse_args(argv)
    device = resolve_device(options.device)
    if options.run is not None:
        run_here(options.run, device, options.tiny, Path(options.out))
        return 0
    result: JsonObject = {"setting": setting(device, options.tiny)}
    failed = False
    for name in options.sections:
        ended = run_apart(name, options)
        result[name] = ended
        failed |= ended["exit_code"] != 0
        sys.stderr.write(f"{name}: {ended['seconds']} s, exit code {ended['exit_code']}\n")
        if options.out is not None:
            write_text_atomic(Path(options.out), json.dumps(result, indent=2) + "\n")
    sys.stdout.write(json.dumps(result, indent=2) + "\n")
    return int(failed)


if __name__ == "__main__":
    sys.exit(main())
