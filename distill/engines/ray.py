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
from draftsmith_core.errors import InputError, RunError, first_line
from draftsmith_core.generation_defaults import ResolvedSampling
from draftsmith_core.processes import require_single_process
from draftsmith_core.tokenization import Tokenizer

# A worker that works on one group and holds the next need not wait for this process.
_GROUPS_A_WORKER = 2
# How often a group may end its worker before it is taken for the reason, and how often a worker is started again: one
# that dies whenever it starts would otherwise be waited for without end.
_RETRIES, _RESTARTS = 3, 20
# Seconds without a worker after which that is said; without one on a cluster of our own, where nobody else can be in
# the way; and for a connection.
_PATIENCE_S, _OWN_PATIENCE_S, _CONNECT_S = 60.0, 900.0, 10.0
LOCAL = "local"  # as Ray calls a cluster that it starts for this process
_NAMES = ("GPU", "CPU")
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
        """Seconds per token by tree, as the engine in this worker measures them."""
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
        self._connected = _connect(config.address)
        self._workers: list[Any] = []
        self.tree = ""
        self._scores: dict[tuple[int, int, int], bytes] = {}
        try:
            workers, resources = _workers(config)
            options: dict[str, Any] = {"max_restarts": _RESTARTS, "max_task_retries": _RETRIES, **resources}
            worker = ray.remote(Worker).options(**options)
            own = replace(config, engine="hf", address=None, workers=None)
            self._workers += [worker.remote(own, tokenizer) for _ in range(workers)]
            # One worker answers for all. It may take as long as it needs to load the target.
            self._speaker = self._first_started(resources)
            self.identity, self.sampling, self.max_prompt_tokens = _result(self._speaker.facts.remote())
        except BaseException:
            self.close()
            raise

    def _first_started(self, resources: dict[str, float]) -> Any:
        """The worker that starts first. What workers wait for is said once."""
        starting = {each.process.remote(): each for each in self._workers}
        ready, _ = ray.wait(list(starting), num_returns=1, timeout=_PATIENCE_S)
        if not ready:
            free = {name: ray.available_resources().get(name, 0) for name in _NAMES}
            said = "no worker has started for %.0f s: each needs %s of the cluster, where %s are free"
            log.warning(said, _PATIENCE_S, resources, free)
            most = _OWN_PATIENCE_S if self._connected == LOCAL else None
            ready, _ = ray.wait(list(starting), num_returns=1, timeout=most)
        if not ready:
            raise RunError(f"ray: no worker has started for {_OWN_PATIENCE_S:.0f} s; see the logs of Ray's session")
        _result(ready[0])
        return starting[ready[0]]

    def close(self) -> None:
        """End the workers at once, whoever still refers to them, and leave the cluster if this engine joined it."""
        try:
            for worker in self._workers:
                ray.kill(worker)
        except (RayError, ConnectionError) as error:  # the cluster is gone, and they with it
            log.warning("ray: %s", first_line(error))
        self._workers.clear()
        if self._connected:
            ray.shutdown()

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
        """Seconds per token by tree, measured by one worker for all."""
        times: dict[str, float] = _result(self._speaker.seconds_per_token.remote(requests))
        return times

    def score(self, request: AnswerRequest, response: Answer, k: int) -> bytes:
        """The teacher rows that the worker sent along with this answer; `response` and `k` are not needed."""
        return self._scores[request.key]


def _connect(address: str | None) -> str:
    """Join the cluster at `address` (without one: that of RAY_ADDRESS, else a local one is started); the address, ""
    where this process had joined one before.
    """
    if ray.is_initialized():
        return ""
    # Without an address Ray would join any cluster that `ray start` has begun on this machine.
    address = address or os.environ.get("RAY_ADDRESS") or LOCAL
    host, _, port = address.removeprefix("ray://").rpartition(":")
    if host and port.isdecimal():
        # Ray itself tries for minutes.
        try:
            socket.create_connection((host, int(port)), timeout=_CONNECT_S).close()
        except (OSError, OverflowError) as error:
            raise InputError(f"address: no Ray cluster at {address}: {first_line(error)}") from None
    # Ray handles SIGTERM by itself from then on, and the command has its own way to stop.
    handler = signal.getsignal(signal.SIGTERM)
    try:
        ray.init(address=address, logging_level=logging.WARNING, include_dashboard=False if address == LOCAL else None)
    except Exception as error:  # of a start or a connection that fails Ray has no class of its own
        if address == LOCAL:
            raise RunError(f"ray: no local cluster could be started ({first_line(error)})") from None
        # Unless it is told to, Ray shows a token to no cluster that is named by its address.
        token = "" if "RAY_AUTH_MODE" in os.environ else "; if it wants a token, set RAY_AUTH_MODE=token"
        raise InputError(f"address: no Ray cluster at {address}: {first_line(error)}{token}") from None
    finally:
        if handler is not None:
            signal.signal(signal.SIGTERM, handler)
    return address


def _workers(config: DistillConfig) -> tuple[int, dict[str, float]]:
    """How many workers, and what each is given: a GPU, or as many processors as leave room for all. Says so when the
    cluster has not the room.
    """
    nodes = [node["Resources"] for node in ray.nodes() if node["Alive"]]
    gpus, cpus = ([int(node.get(name, 0)) for node in nodes] for name in _NAMES)
    resources: dict[str, float]
    if sum(gpus) and config.device != "cpu":
        workers, room, resources = config.workers or sum(gpus), sum(gpus), {"num_gpus": 1}
    else:
        workers = config.workers or max(1, sum(count > 0 for count in cpus))
        share = processors_each(cpus, workers)
        room, resources = sum(count // share for count in cpus), {"num_cpus": share}
    if room < workers:
        log.warning(
            "the cluster has room for %d of %d workers, each of which needs %s; the others start when it has grown",
            *(room, workers, resources),
        )
    return workers, resources


def processors_each(nodes: Sequence[int], workers: int) -> int:
    """The most processors that each of so many workers can have at a time on nodes with so many; 1 where none can."""
    most = max(nodes, default=1)
    return next((n for n in range(most, 1, -1) if sum(count // n for count in nodes) >= workers), 1)


def _result(reference: Any) -> Any:
    """What a task returned; its own error in one line, RunError for what went wrong around it."""
    try:
        return ray.get(reference)
    except RayTaskError as error:
        if isinstance(error.cause, InputError | RunError):
            raise error.cause from None
        raise
    except RayActorError as error:
        often = f"{_RETRIES + 1} times over one group of rows or {_RESTARTS + 1} times in all"
        raise RunError(f"ray: a worker died {often} ({first_line(error)}); the same command continues") from None
    except RayError as error:
        raise RunError(f"ray: {first_line(error)}; the same command continues") from None
