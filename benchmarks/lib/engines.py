"""Other engines on this machine, for tests and benchmarks: where their programs are, running them.

`make engines` installs them. They need other versions of our libraries, so each lives in an
environment of its own.
"""

import json
import os
import shutil
import socket
import subprocess
import tempfile
import time
import urllib.request
from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from pathlib import Path

from benchmarks.lib.places import ROOT
from draftsmith.core.errors import RunError
from draftsmith.core.io import JsonObject

# Engine: (environment variable that names its program, that program in the directory of engines).
PROGRAMS = {
    "openvino": ("OPENVINO_PYTHON", "openvino/bin/python"),
    "speculators": ("SPECULATORS_PYTHON", "speculators/bin/python"),
    "vllm": ("VLLM_PYTHON", "vllm/bin/python"),
    "llama-server": ("LLAMA_SERVER", "llama/llama-server"),
}
# vLLM on a CPU would claim 92 % of the memory, and bind its threads to processors that may be busy.
VLLM_ON_A_CPU = {
    "VLLM_CPU_KVCACHE_SPACE": "1",
    "VLLM_CPU_OMP_THREADS_BIND": "nobind",
    "VLLM_LOGGING_LEVEL": "WARNING",
}


def program(engine: str) -> Path | None:
    """The program of an engine: by its environment variable, in `.engines` (or DRAFTSMITH_ENGINES),
    on the PATH.

    engine: `openvino` (a Python with openvino-genai, optimum-intel and onnxruntime-genai),
    `speculators` or `vllm` (a Python with it), or `llama-server`.
    """
    variable, place = PROGRAMS[engine]
    if variable in os.environ:
        return Path(os.environ[variable])
    installed = Path(os.environ.get("DRAFTSMITH_ENGINES", ROOT / ".engines"), place)
    if installed.is_file():
        return installed
    path = shutil.which(engine) if engine == "llama-server" else None
    return None if path is None else Path(path)


def how_to_get(engine: str) -> str:
    """What makes an engine available, for messages."""
    return f"`make engines` in a checkout, or set {PROGRAMS[engine][0]}"


def work(python: Path, script: str | Path, *words: str | Path) -> JsonObject:
    """Run a script in another environment; the JSON object of its last line. Raises RunError if it
    fails.
    """
    # Isolated: the other environment has its own libraries, and this project's path would hide
    # them.
    command = [str(python), "-I", str(script), *map(str, words)]
    done = subprocess.run(command, capture_output=True, text=True)
    if done.returncode:
        message = done.stderr.strip() or "no message"
        raise RunError(f"{script}: failed in {python}: {message.splitlines()[-1]}")
    return last_json(done.stdout)


def last_json(printed: str) -> JsonObject:
    """The JSON object of the last line of what a process printed."""
    *_, last = printed.splitlines()
    found: JsonObject = json.loads(last)
    return found


def vllm_answers(python: Path, runs: JsonObject) -> JsonObject:
    """What vLLM answers to `runs`: `engine`, its version, and `answers` by run
    (`vllm_generate.py`).
    """
    with tempfile.TemporaryDirectory() as place:
        request = Path(place) / "request.json"
        request.write_text(json.dumps({"runs": runs}))
        return work(python, Path(__file__).with_name("vllm_generate.py"), request)


def llama_server(server: Path, words: Sequence[str]) -> AbstractContextManager[int]:
    """Run llama-server with these options on a free port, and yield the port."""
    return _serving([str(server), *words], 120)


def vllm_server(python: Path, words: Sequence[str]) -> AbstractContextManager[int]:
    """The same for vLLM's server in this Python's environment; `vllm serve` does not start in
    vllm-cpu 0.32.
    """
    return _serving([str(python), "-m", "vllm.entrypoints.openai.api_server", *words], 900)


@contextmanager
def _serving(command: Sequence[str], start_s: int) -> Iterator[int]:
    port = free_port()
    with tempfile.TemporaryFile("w+") as log:
        process = subprocess.Popen(
            [*command, "--port", str(port)],
            env=VLLM_ON_A_CPU | os.environ,
            stdout=subprocess.DEVNULL,
            stderr=log,
            text=True,
        )
        try:
            end = time.monotonic() + start_s
            while not (up := is_up(port)) and time.monotonic() < end and process.poll() is None:
                time.sleep(0.1)
            if not up:
                log.seek(0)
                message = "no message"
                for line in log:
                    if " E " in line or "error" in line.lower():
                        message = line.strip()
                ended = process.poll()
                how = f"ended with {ended}" if ended is not None else f"gave up after {start_s} s"
                raise RunError(f"{Path(command[0]).name}: {how} before it served: {message}")
            yield port
        finally:
            process.terminate()
            process.wait()


def free_port() -> int:
    """A port of this machine on which nothing listens."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        return int(free.getsockname()[1])


def is_up(port: int) -> bool:
    """Whether a server on this machine says that it is ready."""
    try:
        with urllib.request.urlopen(f"http://127.0.0.1:{port}/health", timeout=2):
            return True
    except OSError:
        return False


def ask(port: int, path: str, body: JsonObject) -> JsonObject:
    """POST to a server on this machine."""
    headers = {"Content-Type": "application/json"}
    data = json.dumps(body).encode()
    call = urllib.request.Request(f"http://127.0.0.1:{port}/{path}", data, headers)
    with urllib.request.urlopen(call) as answer:
        found: JsonObject = json.load(answer)
        return found


def complete(
    port: int, prompt: Sequence[int], max_new_tokens: int, **sampling: object
) -> JsonObject:
    """llama-server's answer to token ids, past any end: `tokens`, and `timings` with its counts of
    drafts. It is greedy unless `sampling` says otherwise.
    """
    wanted = {
        "prompt": list(prompt),
        "n_predict": max_new_tokens,
        "ignore_eos": True,
        "return_tokens": True,
    }
    return ask(port, "completion", wanted | {"temperature": 0, "cache_prompt": False} | sampling)
