"""What `make install` alone installs is enough: every module imports, or stands behind an extra
that its command asks for first; and README's commands run, on the shipped pair.

    .venv/bin/python tests/workers/base_install.py [imports]
"""

import importlib
import pkgutil
import subprocess
import sys
import tempfile
from pathlib import Path

import draftsmith

# Imported by a command that has asked for their extra.
BEHIND_EXTRAS = {"draftsmith.distill.engines.ray", "draftsmith.distill.engines.vllm"}
PAIR = Path(draftsmith.__file__).parent / "demo" / "pair"
TARGET = f"--target {PAIR / 'target'}"
BOTH = f"{TARGET} --draft {PAIR / 'base'}"
# A command, its exit code, and what it says.
COMMANDS = [
    (f"decode {BOTH} --tree kary:3,2 --max_new_tokens 8 --prompt", 0, "tokens"),
    (f"doctor {BOTH}", 0, "transformers"),
    (f"doctor {BOTH} --served http://127.0.0.1:9 --prompts p.jsonl", 2, "does not answer"),
    (f"distill {TARGET} --prompts p.jsonl --out set --max_new_tokens 4", 0, "set"),
    (f"distill {TARGET} --prompts p.jsonl --out v --engine vllm", 2, "pip install -e '.[vllm]'"),
    (f"distill {TARGET} --prompts p.jsonl --out r --engine ray", 2, "pip install -e '.[ray]'"),
    (f"export --draft {PAIR / 'base'} --format gguf --out g", 2, "pip install -e '.[gguf]'"),
]


def import_all() -> None:
    """Import every module; ModuleNotFoundError if one needs more than the base."""
    for module in pkgutil.walk_packages(draftsmith.__path__, "draftsmith."):
        if module.name not in BEHIND_EXTRAS and not module.name.endswith("__main__"):
            importlib.import_module(module.name)


def run_commands(where: str) -> None:
    """Run the commands; AssertionError if one ends otherwise, or with a traceback."""
    Path(where, "p.jsonl").write_text('{"prompt": "Return the"}\n{"prompt": "A list"}\n')
    for text, code, said in COMMANDS:
        words = text.split() + (["Return the"] if text.endswith("--prompt") else [])
        done = subprocess.run(
            [sys.executable, "-m", "draftsmith", *words], cwd=where, capture_output=True, text=True
        )
        printed = done.stdout + done.stderr
        assert done.returncode == code and said in printed, f"{text}\n{done.returncode} {printed}"
        assert "Traceback" not in printed, printed


if __name__ == "__main__":
    import_all()
    if sys.argv[1:] != ["imports"]:
        with tempfile.TemporaryDirectory() as where:
            run_commands(where)
