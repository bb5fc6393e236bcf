"""Models as OpenVINO's IR, written by the `optimum-cli` line that `draftsmith doctor` prints."""

import json
import os
import shlex
import shutil
import subprocess
from pathlib import Path

import pytest

from benchmarks.lib.engines import how_to_get, program
from draftsmith.drafts.engine_commands import SERVING

# What runs there.
OPENVINO = Path(__file__).parents[1] / "benchmarks" / "speed" / "peer_openvino.py"


def openvino_request(place: Path, prompts: list[list[int]], tokens: int) -> Path:
    """The file that asks for greedy answers in fp32, alone and with four drafted tokens."""
    request = {"prompts": [prompts], "temperatures": [0], "max_new_tokens": tokens, "threads": 1}
    (place / "request.json").write_text(json.dumps(request | {"ahead": [4], "sixteen_bits": False}))
    return place / "request.json"


def engine(name: str) -> Path:
    found = program(name)
    if found is None:
        pytest.skip(f"{name} is not here: {how_to_get(name)}")
    return found


def openvino_ir(source: str, out: Path) -> Path:
    python = engine("openvino")
    copy = out.with_name(f"{out.name}-model")
    shutil.copytree(source, copy)
    # The class that a newer transformers names here may not exist in the engine's environment.
    tokenizer = copy / "tokenizer_config.json"
    values = json.loads(tokenizer.read_text()) | {"tokenizer_class": "PreTrainedTokenizerFast"}
    tokenizer.write_text(json.dumps(values))
    (line, _), _ = SERVING["openvino"]["draft"].commands("draft", "target", str(copy), 4)
    program_name, *words = shlex.split(line)
    command = [str(python.with_name(program_name)), *words[:-1], str(out)]
    # This project's path would hide the libraries of that environment.
    environment = {key: value for key, value in os.environ.items() if key != "PYTHONPATH"}
    done = subprocess.run(command, capture_output=True, text=True, env=environment)
    assert done.returncode == 0, done.stderr
    return out
