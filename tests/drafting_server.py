"""A server that decodes with a pair as vLLM, llama.cpp and SGLang do, and counts drafts as they
do.
"""

import itertools
import json
import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from http.server import ThreadingHTTPServer
from types import SimpleNamespace
from typing import Any

import draftsmith as ds
from tests.serving import JsonHandler, running

PLACES = [f'accepted_tokens_per_pos_total{{engine="0",position="{place}"}}' for place in range(4)]


@dataclass
class Drafting:
    """What is served, and its mistakes. temperature: of requests that give none. counts: of
    /metrics, by line. accepts: how many drafts each step is said to accept, in turn. loses: share
    of the accepted drafts that is lost while another request is in flight. stops: drafts nothing
    then. told: by /server_info. written: answers by prompt (`samplers.write`), in turn, in place of
    the pair's own.
    """

    engine: str
    pair: ds.Pair
    verifier: str | None = None
    temperature: float = 0.0
    template: str = "{messages}"
    speculates: bool = True
    tokens: int = 3
    others: int = 0
    per_request: bool = False
    accepts: Sequence[int] = ()
    loses: float = 0.0
    stops: bool = False
    written: Sequence[dict[tuple[int, ...], Any]] = ()
    told: dict[str, Any] = field(default_factory=dict)
    active: int = 0
    most_active: int = 0
    lock: Any = field(default_factory=threading.Lock)
    counts: dict[str, int] = field(default_factory=dict)
    bodies: list[dict[str, Any]] = field(default_factory=list)
    memory: dict[str, Any] = field(default_factory=dict)

    def get(self, path: str) -> Any:
        """The reply to a GET."""
        if path == "/v1/models":
            return {"data": [{"id": "target", "owned_by": self.engine}]}
        if path == "/metrics":
            lines = [
                f"{self.engine}:spec_decode_num_{key} {value}.0"
                for key, value in self.counts.items()
            ]
            return "# HELP counts\n" + "\n".join(lines) + "\n"
        if path.startswith("/server_info"):
            return self.told
        return {"speculative_num_steps": self.tokens, "speculative_eagle_topk": 1}

    def post(self, path: str, body: dict[str, Any]) -> dict[str, Any]:
        """The reply to a POST."""
        with self.lock:
            self.bodies.append(body)
            self.active += 1
            self.most_active = max(self.most_active, self.active)
        try:
            return self._answer(path, body)
        finally:
            with self.lock:
                self.active -= 1

    def _answer(self, path: str, body: dict[str, Any]) -> dict[str, Any]:
        if path == "/apply-template":
            return {"prompt": self.template.format(messages=body["messages"][-1]["content"])}
        if path == "/tokenize":
            return {"tokens": self.pair.encode(body["content"], raw=True)}
        sampling = body.get("sampling_params", body)
        prompt = body.get("prompt") or body.get("input_ids")
        if prompt is None:
            prompt = self.pair.encode(
                self.template.format(messages=body["messages"][-1]["content"])
            )
        most = next(
            sampling[key]
            for key in ("max_tokens", "n_predict", "max_new_tokens")
            if key in sampling
        )
        how: dict[str, Any] = {
            "temperature": sampling.get("temperature", self.temperature),
            "ignore_eos": True,
        }
        how |= {"top_k": 0, "top_p": 1.0, "min_p": 0.0, "seed": len(self.bodies)}
        key = json.dumps([prompt, most, how if how["temperature"] else 0])
        if key not in self.memory:
            self.memory[key] = self._generated(prompt, most, how)
        first, rest = self.memory[key]
        ids, stats = first + rest.output_ids, rest.stats
        if self.accepts or (self.loses and self.active > 1):
            stats = self._counted(stats, len(ids) - 1)
        with self.lock:
            return self._reply(prompt, ids, stats, how, self.stops and self.active > 1)

    def _counted(self, stats: Any, tokens: int) -> Any:
        """Counts of steps that accept something else than was accepted."""
        reached = [stats.target_calls, *stats.accepted_by_depth, *[0] * self.tokens]
        steps: list[int] = []
        if self.loses:
            for accepted in range(self.tokens + 1):
                steps += [accepted] * (reached[accepted] - reached[accepted + 1])
            lost = [round(accepted * self.loses + 0.01) for accepted in steps]
            steps = [accepted - less for accepted, less in zip(steps, lost, strict=True)]
            steps += [0] * sum(lost)
        else:
            turns = itertools.cycle(self.accepts)
            while len(steps) + sum(steps) < tokens:
                steps.append(next(turns))
        return SimpleNamespace(
            target_calls=len(steps),
            proposed=self.tokens * len(steps),
            accepted=sum(steps),
            accepted_by_depth=[sum(n > at for n in steps) for at in range(self.tokens)],
        )

    def _reply(
        self,
        prompt: list[int],
        ids: list[int],
        stats: Any,
        how: dict[str, Any],
        stopped: bool = False,
    ) -> Any:
        self.counts["generation_tokens_total"] = self.counts.get(
            "generation_tokens_total", 0
        ) + len(ids)
        if self.speculates and not stopped:
            by_depth = [*stats.accepted_by_depth, *[0] * self.tokens]
            values = [stats.target_calls + self.others, stats.proposed, stats.accepted, *by_depth]
            names = [
                "drafts_total",
                "draft_tokens_total",
                "accepted_tokens_total",
                *PLACES[: self.tokens],
            ]
            for name, value in zip(names, values, strict=False):
                self.counts[name] = self.counts.get(name, 0) + value
        # llama.cpp drafts no token that could not be emitted, so that every call emits one token of
        # its own.
        accepted = len(ids) - 1 - stats.target_calls
        drafted = (
            {"draft_n": stats.proposed, "draft_n_accepted": accepted} if self.speculates else {}
        )
        drawn = {"temperature": how["temperature"], "top_k": 0, "top_p": 1.0, "min_p": 0.0}
        replies: dict[str, dict[str, Any]] = {
            "vllm": {
                "prompt_token_ids": prompt,
                "choices": [{"token_ids": ids, "finish_reason": "length"}],
            },
            "llamacpp": {"tokens": ids, "stop_type": "limit", "tokens_evaluated": len(prompt)}
            | {"generation_settings": drawn, "timings": {"predicted_n": len(ids)} | drafted},
            "sglang": {
                "output_ids": ids,
                "meta_info": {"spec_verify_ct": stats.target_calls * self.speculates},
            },
        }
        if self.per_request:
            reached = [stats.target_calls, *stats.accepted_by_depth, *[0] * self.tokens]
            steps = [reached[j] - reached[j + 1] for j in range(self.tokens + 1)]
            metrics = {
                "acceptance_histogram": steps,
                "num_spec_steps": stats.target_calls,
                "num_accepted_draft_tokens": stats.accepted,
                "num_draft_tokens": stats.target_calls * self.tokens,
                "num_spec_tokens": self.tokens,
            }
            replies["vllm"]["metrics"] = {"speculative_decoding": metrics}
        return replies[self.engine]

    def _generated(self, prompt: list[int], most: int, how: dict[str, Any]) -> Any:
        if self.written:
            number = sum(body["prompt"] == prompt for body in self.bodies) - 1
            answer = self.written[number % len(self.written)][tuple(prompt)]
            time.sleep(0.01 if self.loses or self.stops else 0)  # so that requests meet
            return answer.ids[:1], answer
        first = self.pair.generate(prompt, draft=(), max_new_tokens=1, **how).output_ids
        rest = self.pair.generate(
            prompt + first,
            tree=f"chain:{self.tokens}",
            verifier=self.verifier,
            max_new_tokens=most - 1,
            **how,
        )
        return first, rest


@contextmanager
def drafting(engine: str, pair: ds.Pair, **mistakes: Any) -> Iterator[tuple[str, Drafting]]:
    """Serve a pair while the block runs; yield the address."""
    served = Drafting(engine, pair, **mistakes)

    class Handler(JsonHandler):
        def do_GET(self) -> None:
            self.send(200, served.get(self.path))

        def do_POST(self) -> None:
            self.send(200, served.post(self.path, self.body()))

    with running(ThreadingHTTPServer(("127.0.0.1", 0), Handler)) as server:
        yield f"http://127.0.0.1:{server.server_address[1]}", served
