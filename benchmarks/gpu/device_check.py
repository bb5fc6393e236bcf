"""Everything that only a GPU can tell, in one command of at most nine minutes; prints JSON.

    export PYTHONPATH=.
    python benchmarks/gpu/device_check.py --out device.json [--sections greedy decoding]
    python benchmarks/gpu/device_check.py --tiny --device cpu   # the same code on tiny models

Sections: `tests` (those marked gpu), `greedy` (fp32 outputs beside `generate`), `decoding`,
`training` and `distillation` at the shape of Llama-3.1-8B; docs/gpu.md says what each measures.
Each runs in a process of its own with its own time limit: one that fails or is cut leaves its error
beside the figures that it had, and the next one runs. The exit code is 1 if any failed. Needs torch
and transformers alone; nothing is downloaded.
"""

# ruff: noqa: E402
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
if __name__ == "__main__":
    # Python puts this directory first, where decode.py and train.py would hide the packages.
    sys.path[0] = str(ROOT)

import argparse
import json
import os
import subprocess
import tempfile
import time
import traceback
from typing import Any

import torch

from benchmarks.gpu.device_measure import Check
from benchmarks.gpu.device_sections import SECTIONS
from draftsmith.core.devices import resolve_device
from draftsmith.core.io import JsonObject, write_text_atomic
from draftsmith.core.provenance import git_commit, versions

_PATIENCE = 10  # tiny runs are tests, and a busy machine is no reason to fail
_GRACE_S = 5  # between a section's own limit and the end of its process


def parser() -> argparse.ArgumentParser:
    """The options; argparse, because pydantic may be missing here."""
    made = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
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


def run_here(name: str, device: torch.device, tiny: bool, out: Path) -> None:
    """Run one section in this process; `out` is written anew with each figure."""
    function, limit_s = SECTIONS[name]
    found: JsonObject = {}

    def report(key: str, value: Any) -> None:
        found[key] = value
        write_text_atomic(out, json.dumps(found))

    if device.type == "cuda":
        # fp32 is fp32 here: outputs are compared token for token.
        torch.backends.cuda.matmul.allow_tf32 = False
        torch.backends.cudnn.allow_tf32 = False
    try:
        function(
            Check(device, tiny, time.monotonic() + limit_s * (_PATIENCE if tiny else 1), report)
        )
    except Exception:
        report("error", traceback.format_exc(limit=-4))
        raise SystemExit(1) from None


def run_apart(name: str, options: argparse.Namespace) -> JsonObject:
    """Run one section in a process of its own, at most as long as it may take."""
    limit_s = SECTIONS[name][1] * (_PATIENCE if options.tiny else 1) + _GRACE_S
    words = [
        sys.executable,
        __file__,
        "--run",
        name,
        "--device",
        options.device,
        *(["--tiny"] if options.tiny else []),
    ]
    with tempfile.TemporaryDirectory() as directory:
        out = Path(directory) / "found.json"
        began = time.monotonic()
        environment = os.environ | {
            "PYTHONPATH": os.pathsep.join([str(ROOT), os.environ.get("PYTHONPATH", "")])
        }
        try:
            done = subprocess.run(
                [*words, "--out", str(out)], timeout=limit_s, env=environment, capture_output=True
            )
            ended: JsonObject = {"exit_code": done.returncode}
            if done.returncode:
                ended["stderr"] = done.stderr.decode(errors="replace")[-2000:]
        except subprocess.TimeoutExpired:
            ended = {"exit_code": None, "error": f"cut after {limit_s} s"}
        found = json.loads(out.read_text()) if out.exists() else {}
        return {"seconds": round(time.monotonic() - began, 1), "figures": found, **ended}


def main(argv: list[str] | None = None) -> int:
    """Run the sections and print the JSON; the exit code."""
    options = parser().parse_args(argv)
    device = resolve_device(options.device)
    if options.run is not None:
        run_here(options.run, device, options.tiny, Path(options.out))
        return 0
    result: JsonObject = {
        "setting": {
            "device": torch.cuda.get_device_name(device) if device.type == "cuda" else "cpu",
            "memory_GB": torch.cuda.get_device_properties(device).total_memory / 1e9
            if device.type == "cuda"
            else None,
            "cuda": torch.version.cuda,
            "cores": os.cpu_count(),
            "tiny": options.tiny,
            "versions": versions(),
            "git_commit": git_commit(),
        }
    }
    for name in options.sections:
        result[name] = run_apart(name, options)
        sys.stderr.write(
            f"{name}: {result[name]['seconds']} s, exit code {result[name]['exit_code']}\n"
        )
        if options.out is not None:
            write_text_atomic(Path(options.out), json.dumps(result, indent=2) + "\n")
    sys.stdout.write(json.dumps(result, indent=2) + "\n")
    return int(any(result[name]["exit_code"] != 0 for name in options.sections))


if __name__ == "__main__":
    sys.exit(main())
