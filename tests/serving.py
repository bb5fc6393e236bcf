"""A server of completions as other engines have it, whose behaviour a test chooses; its answers
follow from seeds.
"""

import contextlib
import hashlib
import json
import math
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any, TypeVar

from transformers import PreTrainedTokenizerBase

# What a server does with its n-th request (from 0, trial requests of the start included) instead of
# answering: a status, the bytes of an answer, or "garbage", "half", "reset", "never", "drops" (a
# byte now and then, without end); None to answer.
Misbehave = Callable[[int], int | str | bytes | None]
EOS = 1


def answer_of(prompt: Any, seed: int, most: int) -> tuple[list[int], str]:
    """The answer of the served model: 1 to 12 tokens that follow from prompt and seed."""
    digest = hashlib.sha256(json.dumps([prompt, seed]).encode()).digest()
    ids = [36 + byte % 58 for byte in digest[: 1 + digest[0] % 12]]
    return (ids[:most], "length") if len(ids) >= most else ([*ids, EOS], "stop")


class Server(ThreadingHTTPServer):
    """One served model. kind: `llama.cpp`, `vllm` or `text` (takes and gives text, and refuses
    ids).
    """

    daemon_threads = True
    request_queue_size = 256

    def __init__(self, kind: str, tokenizer: PreTrainedTokenizerBase, **options: Any) -> None:
        super().__init__(("127.0.0.1", 0), _Handler)
        self.kind, self.tokenizer = kind, tokenizer
        self.model: str = options.get("model", "target")
        self.samples: bool = options.get("samples", True)
        self.key: str = options.get("key", "")
        self.misbehave: Misbehave = options.get("misbehave", lambda number: None)
        self.moved_to: str = options.get("moved_to", "")
        self.strict_keys: bool = options.get("strict_keys", False)
        # How it counts and shows: the end token in `usage`, a token put into every answer, what
        # its log-probabilities are taken from, and the model that its replies name.
        self.counts_end: bool = options.get("counts_end", True)
        self.insert: int | None = options.get("insert")
        self.processed: bool = options.get("processed", False)
        self.teacher: Callable[[dict[str, float]], dict[str, float]] | None = options.get("teacher")
        self.ignores_seeds: bool = options.get("ignores_seeds", False)
        self.names: str = options.get("names", "")
        self.error: str = options.get("error", "not now")
        # Writes the states of these tokens and returns the path.
        self.states: Callable[[list[int]], str] | None = options.get("states")
        self.list_drips: int = options.get("list_drips", 0)
        self.bodies: list[dict[str, Any]] = []
        self.lists = 0
        self.answered: list[str] = []
        self.active = self.most_active = 0
        self.lock = threading.Lock()
        self.stopping = threading.Event()

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.server_address[1]}/v1"

    def shutdown(self) -> None:
        self.stopping.set()
        super().shutdown()

    def handle_error(self, request: Any, client_address: Any) -> None:
        """Clients that went away are no news."""


class JsonHandler(BaseHTTPRequestHandler):
    """Reads and answers JSON, and prints nothing."""

    def log_message(self, format: str, *words: Any) -> None:  # noqa: A002
        return

    def body(self) -> Any:
        return json.loads(self.rfile.read(int(self.headers["content-length"])))

    def send(self, status: int, value: Any, **headers: str) -> None:
        """Bytes and text are sent as they are."""
        data = (
            value
            if isinstance(value, bytes)
            else (value if isinstance(value, str) else json.dumps(value)).encode()
        )
        self.send_response(status)
        for name, header in ({"content-type": "application/json"} | headers).items():
            self.send_header(name, header)
        self.send_header("content-length", str(len(data)))
        self.end_headers()
        self.wfile.write(data)


class _Handler(JsonHandler):
    protocol_version = "HTTP/1.1"
    server: Server

    def do_GET(self) -> None:
        if self.server.moved_to:
            self.send(307, {}, location=f"{self.server.moved_to}{self.path}")
            return
        self.server.lists += 1
        if self.server.lists <= self.server.list_drips:
            self._drip()
            return
        owner = {"llama.cpp": "llamacpp", "vllm": "vllm"}.get(self.server.kind, "someone")
        listed: dict[str, Any] = {"id": self.server.model, "owned_by": owner}
        if self.server.kind == "vllm":
            listed["max_model_len"] = 96
        self.send(200, {"data": [listed]})

    def do_POST(self) -> None:
        body, server = self.body(), self.server
        with server.lock:
            number = len(server.bodies)
            server.bodies.append(body)
            server.active += 1
            server.most_active = max(server.most_active, server.active)
        try:
            self._answer(body, server.misbehave(number))
        finally:
            with server.lock:
                server.active -= 1

    def _answer(self, body: dict[str, Any], wrong: int | str | bytes | None) -> None:
        server = self.server
        if self.path != ("/completion" if server.kind == "llama.cpp" else "/v1/completions"):
            self.send(404, {"error": "no such path"})
        elif server.key and self.headers.get("authorization") != f"Bearer {server.key}":
            self.send(401, {"error": "who are you?"})
        elif isinstance(wrong, int):
            self.send(
                wrong, {"error": server.error}, **({"retry-after": "0.05"} if wrong == 429 else {})
            )
        elif wrong == "garbage":
            self.send(200, {"choices": [{"message": None}], "was": "no completion"})
        elif wrong == "half":
            self.send_response(200)
            self.send_header("content-length", "1000")
            self.end_headers()
            self.wfile.write(b'{"choices": [')
            self.close_connection = True
        elif isinstance(wrong, bytes):
            self.send(200, wrong)
        elif wrong == "drops":
            self._drip()
        elif wrong == "reset":
            self.close_connection = True
            self.connection.close()
        elif wrong == "never":
            server.stopping.wait(60)
            self.close_connection = True
        elif server.strict_keys and {"top_k", "min_p", "return_token_ids"} & body.keys():
            self.send(400, {"error": "unknown key"})
        elif server.kind == "text" and not isinstance(body["prompt"], str):
            self.send(400, {"error": "prompt must be text"})
        else:
            self.send(200, self._completion(body))

    def _drip(self) -> None:
        self.send_response(200)
        self.send_header("connection", "close")
        self.end_headers()
        self.close_connection = True
        with contextlib.suppress(OSError):
            while not self.server.stopping.wait(0.02):
                self.wfile.write(b" ")

    def _completion(self, body: dict[str, Any]) -> dict[str, Any]:
        server, prompt = self.server, body["prompt"]
        if server.kind == "text":
            prompt = server.tokenizer(prompt)["input_ids"]
        most = int(body["n_predict" if server.kind == "llama.cpp" else "max_tokens"])
        seed = body["seed"] if body["temperature"] and not server.ignores_seeds else 0
        ids, reason = answer_of(prompt, seed, most)
        if server.insert is not None:
            ids[1:1] = [server.insert]
        if str(EOS) in body.get("logit_bias", {}):
            ids, reason = [EOS], "stop"
        with server.lock:
            server.answered.append(json.dumps([prompt, seed]))
        if server.kind == "llama.cpp":
            return {
                "tokens": ids,
                "stop_type": "limit" if reason == "length" else "eos",
                "tokens_evaluated": 3,
            }
        skips = body.get("skip_special_tokens", True)
        shown = [token for token in ids if token != EOS]
        text = server.tokenizer.decode(shown, skip_special_tokens=skips)
        counted = len(ids) - (reason == "stop" and not server.counts_end)
        usage = {"completion_tokens": counted, "total_tokens": len(ids) + len(prompt)}
        choice: dict[str, Any] = {"index": 0, "text": text, "finish_reason": reason}
        if server.kind == "vllm" and body.get("return_token_ids"):
            choice["token_ids"] = ids
        if server.kind == "vllm" and body.get("logprobs"):
            # Half the mass for the drawn token, which comes beside as many likeliest ones as were
            # asked for.
            shared = {f"token_id:{100 + i}": math.log(0.2 / 2**i) for i in range(body["logprobs"])}
            choice["logprobs"] = {
                "top_logprobs": [
                    self._shown(shared | {f"token_id:{i}": math.log(0.5)}, body) for i in ids
                ]
            }
        named: dict[str, Any] = {"model": server.names} if server.names else {}
        if server.states is not None and "kv_transfer_params" in body:
            path = server.states([*prompt, *ids][:-1])
            named["kv_transfer_params"] = {"hidden_states_path": path}
        return {"choices": [choice], "usage": usage, **named}

    def _shown(self, row: dict[str, float], body: dict[str, Any]) -> dict[str, float]:
        """A row as vLLM shows it; its `processed` modes after temperature and top-p."""
        if self.server.teacher is not None:
            return self.server.teacher(row)
        if not self.server.processed:
            return row
        heat = max(body["temperature"], 0.01)
        # The tokens that are not listed share a tenth.
        scaled = {name: value / heat for name, value in row.items()}
        total = sum(map(math.exp, scaled.values())) + math.exp(math.log(0.1) / heat)
        shown: dict[str, float] = {}
        mass = 0.0
        for name, value in sorted(scaled.items(), key=lambda pair: -pair[1]):
            shown[name] = value - math.log(total) if mass < body["top_p"] else -9999.0
            mass += math.exp(value) / total
        return shown


S = TypeVar("S", bound=ThreadingHTTPServer)


@contextmanager
def running(server: S) -> Iterator[S]:
    """A server while the block runs."""
    thread = threading.Thread(target=server.serve_forever, args=(0.01,), daemon=True)
    thread.start()
    try:
        yield server
    finally:
        server.shutdown()
        server.server_close()
        thread.join()


def serving(
    kind: str, tokenizer: PreTrainedTokenizerBase, **options: Any
) -> AbstractContextManager[Server]:
    """A server on a port of the system's choice while the block runs."""
    return running(Server(kind, tokenizer, **options))


def wait_until(condition: Callable[[], bool]) -> None:
    """Until something has happened; the time limit is pytest's."""
    while not condition():
        time.sleep(0.002)
