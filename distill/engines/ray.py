"""The target on a Ray cluster: workers that hold the `hf` engine, each given the requests of one part at a time.

Ray places the workers, carries requests and answers, starts a worker again that has died and asks it again. What a
worker answers follows from its requests alone: a set is the same bytes for any number of workers, also if they die.
"""

import logging
import os
import signal
import socket
from collections import deque
from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import Any

import ray
from ray.exceptions import RayActorError, RayError, RayTaskError

from distill.config import DistillConfig
from distill.engines.protocol import Answer, AnswerRequest, Done
from draftsmith_core.errors import InputError, RunError
from draftsmith_core.generation_defaults import ResolvedSampling
from draftsmith_core.processes import require_single_process
from draftsmith_core.tokenization import Tokenizer

# A worker that works on one group and holds the next need not wait for this process.
_GROUPS_A_WORKER = 2
# How often a group may end its worker before it is taken for the reason.
_RETRIES = 3
_PATIENCE_S, _CONNECT_S = 60.0, 10.0
Scored = tuple[Answer, bytes | None]
log = logging.getLogger(__name__)


class Worker:
    """The `hf` engine in a process of its own, loaded when it is first asked for, so that what is wrong with a target
    is an error of a task and not a death.
    """

    def __init__(self, config: DistillConfig, tokenizer: Tokenizer) -> None:
        self._config, self._tokenizer = config, tokenizer

    def _engine(self) -> Any:
        from distill.engines.hf import HFEngine

        if not hasattr(self, "_loaded"):
            self._loaded = HFEngine(self._config, self._tokenizer)
        return self._loaded

    def facts(self) -> tuple[dict[str, Any], ResolvedSampling, int | None]:
        """Identity, sampling and longest prompt of the engine."""
        engine = self._engine()
        return engine.identity, engine.sampling, engine.max_prompt_tokens

    def process(self) -> int:
        """The id of its process on its node."""
        return os.getpid()

    def seconds_per_token(self, requests: Sequence[AnswerRequest]) -> dict[str, float]:
        """As the engine's."""
        times: dict[str, float] = self._engine().seconds_per_token(requests)
        return times

    def answer(self, requests: Sequence[AnswerRequest], tree: str) -> list[Scored]:
        """The answers to a group, in its order, with teacher rows where the options ask for them."""
        engine, answers, k = self._engine(), {}, self._config.teacher_top_k
        engine.tree = tree

        def done(request: AnswerRequest, answer: Any) -> None:
            answers[request.key] = answer, engine.score(request, answer, k) if k else None

        engine.run(iter([requests]), done)
        return [answers[request.key] for request in requests]


class RayEngine:
    """Workers on a cluster. Those that the cluster has no room for yet join when they have started."""

    keeps_answers = False
    takes_ids = True

    def __init__(self, config: DistillConfig, tokenizer: Tokenizer) -> None:
        require_single_process("distill --engine ray")
        _connect(config.address)
        workers, resources = _workers(config)
        options: dict[str, Any] = {"max_restarts": -1, "max_task_retries": _RETRIES, **resources}
        worker = ray.remote(Worker).options(**options)
        own = replace(config, engine="hf", address=None, workers=None)
        self._workers: list[Any] = [worker.remote(own, tokenizer) for _ in range(workers)]
        self.tree = ""
        self._scores: dict[tuple[int, int, int], bytes] = {}
        # The worker that starts first speaks for all.
        facts = [each.facts.remote() for each in self._workers]
        first: list[Any] = []
        while not first:
            first, _ = ray.wait(facts, num_returns=1, timeout=_PATIENCE_S)
            if not first:
                log.warning("no worker has started yet; each needs %s of the cluster, see `ray status`", resources)
        self.identity, self.sampling, self.max_prompt_tokens = _result(first[0])

    def run(self, groups: Iterator[Sequence[AnswerRequest]], done: Done) -> None:
        """Ask everything in `groups`, a group by one worker. The turns that follow in it are asked together, when all
        answers before them are there.
        """
        starting = {worker.process.remote(): worker for worker in self._workers}
        asked: dict[Any, tuple[Any, Sequence[AnswerRequest]]] = {}
        free: deque[Any] = deque()
        following: deque[Sequence[AnswerRequest]] = deque()
        while True:
            while free and (group := following.popleft() if following else next(groups, None)):
                worker = free.popleft()
                asked[worker.answer.remote(list(group), self.tree)] = worker, group
            if free and not asked:
                return
            (ready,), _ = ray.wait([*asked, *starting], num_returns=1)
            if ready in starting:
                free.extend([starting.pop(ready)] * _GROUPS_A_WORKER)
                continue
            worker, group = asked.pop(ready)
            after = []
            for request, (answer, rows) in zip(group, _result(ready), strict=True):
                if rows is not None:
                    self._scores[request.key] = rows
                if (next_turn := done(request, answer)) is not None:
                    after.append(next_turn)
                self._scores.clear()
            if after:
                following.append(after)
            free.append(worker)

    def seconds_per_token(self, requests: Sequence[AnswerRequest]) -> dict[str, float]:
        """As measured by one worker."""
        times: dict[str, float] = _result(self._workers[0].seconds_per_token.remote(requests))
        return times

    def score(self, request: AnswerRequest, response: Answer, k: int) -> bytes:
        """What came with the answer."""
        return self._scores[request.key]


def _connect(address: str | None) -> None:
    """Join the cluster at `address` (without one: that of RAY_ADDRESS, else a local one is started)."""
    if ray.is_initialized():
        return
    host, _, port = (address or "").removeprefix("ray://").rpartition(":")
    if host and port.isdecimal():
        # Ray itself tries for minutes.
        try:
            socket.create_connection((host, int(port)), timeout=_CONNECT_S).close()
        except (OSError, OverflowError) as error:
            raise InputError(f"address: no Ray cluster at {address}: {_first_line(error)}") from None
    # Ray handles SIGTERM by itself from then on, and the command has its own way to stop.
    handler = signal.getsignal(signal.SIGTERM)
    try:
        ray.init(address=address, logging_level=logging.WARNING, include_dashboard=False if address is None else None)
    except (ConnectionError, ValueError, RuntimeError) as error:
        raise InputError(f"address: no Ray cluster at {address or 'RAY_ADDRESS'}: {_first_line(error)}") from None
    finally:
        if handler is not None:
            signal.signal(signal.SIGTERM, handler)


def _workers(config: DistillConfig) -> tuple[int, dict[str, float]]:
    """How many workers, and what each is given: a GPU, or an equal share of the processors."""
    there = ray.cluster_resources()
    gpus, cpus = int(there.get("GPU", 0)), there.get("CPU", 1)
    if gpus and config.device != "cpu":
        return config.workers or gpus, {"num_gpus": 1}
    nodes = sum(node["Alive"] for node in ray.nodes())
    workers = config.workers or nodes
    return workers, {"num_cpus": max(1, int(cpus // max(workers, nodes)))}


def _result(reference: Any) -> Any:
    """What a task returned; its own error in one line, RunError for what went wrong around it."""
    try:
        return ray.get(reference)
    except RayTaskError as error:
        if isinstance(error.cause, InputError | RunError):
            raise error.cause from None
        raise
    except RayActorError as error:
        tries = f"its worker died {_RETRIES + 1} times over it"
        raise RunError(f"ray: a group of rows could not be answered, {tries} ({_first_line(error)})") from None
    except RayError as error:
        raise RunError(f"ray: {_first_line(error)}; the same command continues") from None


def _first_line(error: BaseException) -> str:
    return (str(error).strip() or type(error).__name__).splitlines()[0]
