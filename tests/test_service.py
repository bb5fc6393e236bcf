"""`examples/service.py`: two pairs behind FastAPI, clients that leave, memory that stays flat."""

import asyncio
import ctypes
import gc
import importlib.util
import json
import os
import sys
import threading
from dataclasses import dataclass, field
from pathlib import Path

import pytest

from draftsmith.core.environment import environment
from tests.conftest import ROOT

REQUESTS = 500
AT_ONCE = 4


@pytest.fixture(scope="module")
def fastapi(tmp_path_factory):
    """FastAPI, which no option of ours installs: that of this environment, or of vLLM's."""
    if importlib.util.find_spec("fastapi") is None:
        places = ROOT.glob(".engines/vllm/lib/python3*/site-packages/fastapi")
        found = next(places, None)
        if found is None:
            pytest.skip("fastapi is not installed, nor the vLLM of `make engines`, which has it")
        links = tmp_path_factory.mktemp("fastapi")
        for package in ("fastapi", "starlette", "annotated_doc"):
            (links / package).symlink_to(found.parent / package)
        sys.path.append(str(links))


@pytest.fixture(scope="module")
def service(fastapi, target_dir, draft_dir):
    spec = importlib.util.spec_from_file_location("service", ROOT / "examples" / "service.py")
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    with environment(PAIRS=f"one={target_dir},{draft_dir} two={target_dir}"):
        spec.loader.exec_module(module)
    return module


@dataclass
class Client:
    """Sends one request to an ASGI application; leaves after some pieces of the answer."""

    leaves_after: int | None = None
    status: int = 0
    pieces: list[str] = field(default_factory=list)

    async def post(self, app, path, **body):
        """Return the answer."""
        gone = asyncio.Event()
        sending = [{"type": "http.request", "body": json.dumps(body).encode()}]

        async def receive():
            if not sending:
                await gone.wait()
            return sending.pop() if sending else {"type": "http.disconnect"}

        async def send(message):
            self.status = message.get("status", self.status)
            if text := message.get("body"):
                self.pieces.append(text.decode())
            if len(self.pieces) == self.leaves_after:
                gone.set()
                await asyncio.sleep(0)

        scope = {
            "type": "http",
            "method": "POST",
            "path": path,
            "query_string": b"",
            "headers": [(b"content-type", b"application/json")],
        }
        await app(scope, receive, send)
        return "".join(self.pieces)


def memory():
    """Bytes of this process, after what is free has been given back."""
    gc.collect()
    ctypes.CDLL(None).malloc_trim(0)
    pages = int(Path("/proc/self/statm").read_text().split()[1])
    return pages * os.sysconf("SC_PAGE_SIZE")


@pytest.mark.slow(20)
def test_a_service_answers_500_requests_with_flat_memory(service):
    app, prompts = service.app, ["a", "over the lazy dog", "the dog does not mind"]
    answers = {
        (name, prompt): pair.generate(prompt, max_new_tokens=12).text
        for name, pair in service.pairs.items()
        for prompt in prompts
    }
    left = []

    async def ask(number):
        name, prompt = ("one", "two")[number % 2], prompts[number % 3]
        options = {"prompt": prompt, "max_new_tokens": 12}
        if number % 5 == 0:
            client = Client(leaves_after=2)
            await client.post(app, f"/{name}/stream", prompt="a", max_new_tokens=80)
            left.append(client)
        elif number % 5 == 1:
            text = json.loads(await Client().post(app, f"/{name}/generate", **options))["text"]
            assert text == answers[name, prompt]
        else:
            assert await Client().post(app, f"/{name}/stream", **options) == answers[name, prompt]

    async def serve(numbers):
        for first in numbers[::AT_ONCE]:
            await asyncio.gather(*(ask(number) for number in range(first, first + AT_ONCE)))

    async def all_requests():
        sizes, threads = [], []
        for first in range(0, REQUESTS, 100):
            await serve(range(first, first + 100))
            sizes.append(memory())
            threads.append(threading.active_count())
        return sizes, threads

    sizes, threads = asyncio.run(all_requests())
    # A cache of 96 positions has 12 KB: one kept by each of the last 300 requests is 3.6 MB.
    assert max(sizes[2:]) - sizes[1] < 1_500_000, sizes
    # A stream's thread has ended when its client has gone.
    assert max(threads) == threads[0], threads
    assert len(left) == REQUESTS // 5
    # Of 35 pieces.
    assert all(2 <= len(client.pieces) <= 4 for client in left)
