"""The target on a Ray cluster: `hf` engines as actors, each given one group of requests at a time.

Ray places the workers, carries requests and answers, restarts a worker that died and asks it again.
"""

import logging
import os
import signal
import socket
from collections import deque
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any

import ray
from ray.exceptions import RayActorError, RayError, RayTaskError
from ray.util import ActorPool

from draftsmith.core.errors import InputError, RunError, first_line
from draftsmith.core.ranks import require_single_process
from draftsmith.core.tokenization import Tokenizer
from draftsmith.distill.config import DistillConfig
from draftsmith.distill.engines import (
    WAVE_BATCHES,
    Answer,
    AnswerRequest,
    Done,
    Engine,
    Failed,
    Groups,
    Key,
)

# Attempts per group before it is taken for the reason of its worker's death, and restarts per
# worker.
_RETRIES = 3
_RESTARTS = 20
# Seconds for a worker to load the target, and for a connection.
_START_S = 1800.0
_CONNECT_S = 10.0
log = logging.getLogger(__name__)
LOCAL = "local"  # Ray's name for a cluster that it starts for this process


# What an `Engine` says of its target.
_FACTS = ("identity", "sampling", "max_prompt_tokens")


@dataclass
class Worker:
    """An `hf` engine in its own process. The first call loads it, so that its errors reach the
    caller.
    """

    config: DistillConfig
    tokenizer: Tokenizer

    @cached_property
    def _engine(self) -> Engine:
        from draftsmith.distill.engines.hf import HFEngine

        return HFEngine(self.config, self.tokenizer)

    def facts(self) -> dict[str, object]:
        return {name: getattr(self._engine, name) for name in _FACTS}

    def answer(self, requests: Sequence[AnswerRequest]) -> dict[Key, Answer | Failed]:
        """Answer a group; return the outcome of each request by its key."""
        answers = {}
        self._engine.run(
            iter([requests]), lambda request, answer: answers.update({request.key: answer})
        )
        return {request.key: answers[request.key] for request in requests}


class RayEngine(Engine):
    """Workers on a cluster: one per GPU, or per node without GPUs, or as many as `--workers`
    says.
    """

    def __init__(self, config: DistillConfig, tokenizer: Tokenizer) -> None:
        require_single_process("distill --engine ray")
        self._joined = not ray.is_initialized()
        if self._joined:
            _join(config.address)
        self.workers: list[Any] = []
        self.wave = WAVE_BATCHES * config.batch_size
        try:
            count, of_worker = _resources(config)
            actor = ray.remote(Worker).options(
                max_restarts=_RESTARTS, max_task_retries=_RETRIES, **of_worker
            )
            local = replace(config, engine="hf", address=None, workers=None)
            # Ray drops a large argument that nobody holds, and could not restart the worker.
            self._tokenizer = ray.put(tokenizer)
            self.workers += [actor.remote(local, self._tokenizer) for _ in range(count)]
            with _worker_errors():
                facts = ray.get(self.workers[0].facts.remote(), timeout=_START_S)
            vars(self).update(facts)
        except BaseException:
            self.close()
            raise

    def close(self) -> None:
        """End the workers, and leave the cluster if this engine joined it."""
        for worker in self.workers:
            ray.kill(worker)
        self.workers.clear()
        if self._joined:
            ray.shutdown()

    def run(self, groups: Groups, done: Done) -> None:
        """Ask everything in `groups`, one group per worker call. Later turns of a group are asked
        together.
        """
        pool = ActorPool(self.workers)
        following: deque[Sequence[AnswerRequest]] = deque()
        submitted: dict[Key, Sequence[AnswerRequest]] = {}

        def submit() -> None:
            # A worker holds the next group while it works on one.
            while len(submitted) < 2 * len(self.workers):
                group = following.popleft() if following else next(groups, None)
                if group is None:
                    return
                submitted[group[0].key] = group
                pool.submit(lambda worker, group: worker.answer.remote(list(group)), group)

        submit()
        while submitted:
            with _worker_errors():
                answers = pool.get_next_unordered()
            group = submitted.pop(next(iter(answers)))
            turns = [done(request, answers[request.key]) for request in group]
            requests = [request for request in turns if request is not None]
            if requests:
                following.append(requests)
            submit()


def _join(address: str | None) -> None:
    """Join the cluster at `address` or RAY_ADDRESS; without either, start a local one."""
    # Without an address Ray would join any cluster that `ray start` began on this machine.
    address = address or os.environ.get("RAY_ADDRESS") or LOCAL
    host, _, port = address.removeprefix("ray://").rpartition(":")
    if host and port.isdecimal():
        try:  # Ray itself would try for minutes
            socket.create_connection((host, int(port)), timeout=_CONNECT_S).close()
        except OSError as error:
            raise InputError(f"address: no Ray cluster at {address}: {first_line(error)}") from None
    # Ray installs a SIGTERM handler of its own, and the command has its own way to stop.
    handler = signal.getsignal(signal.SIGTERM)
    try:
        ray.init(
            address=address,
            logging_level=logging.WARNING,
            include_dashboard=False if address == LOCAL else None,
        )
    except Exception as error:  # Ray has no class of its own for a connection that fails
        # Unless told to, Ray sends no token to a cluster that is named by its address.
        reason = first_line(error)
        if "RAY_AUTH_MODE" not in os.environ:
            reason += "; if it wants a token, set RAY_AUTH_MODE=token"
        raise InputError(f"address: no Ray cluster at {address}: {reason}") from None
    finally:
        # In another thread than the main one Ray changes nothing, and nobody can.
        if signal.getsignal(signal.SIGTERM) is not handler:
            signal.signal(signal.SIGTERM, handler)


def _resources(config: DistillConfig) -> tuple[int, dict[str, float]]:
    """Choose the number of workers, and the GPU or processors of each. Warn if the cluster has room
    for fewer than asked for.
    """
    nodes = [node["Resources"] for node in ray.nodes() if node["Alive"]]
    gpus = sum(int(node.get("GPU", 0)) for node in nodes)
    cpus = [int(node.get("CPU", 0)) for node in nodes]
    if gpus and config.device != "cpu":
        room = gpus
        count = config.workers or gpus
        of_worker = {"num_gpus": 1.0}
    else:
        count = config.workers or max(1, sum(number > 0 for number in cpus))
        # The most processors that each worker can have; 1 if they do not fit.
        size = max(cpus, default=1)
        while size > 1 and sum(number // size for number in cpus) < count:
            size -= 1
        size = max(1, size)
        room = sum(number // size for number in cpus)
        of_worker = {"num_cpus": float(size)}
    if room < count:
        log.warning(
            "the cluster has room for %d of %d workers, each of which needs %s",
            room,
            count,
            of_worker,
        )
    return max(1, min(room, count)), of_worker


@contextmanager
def _worker_errors() -> Iterator[None]:
    """Turn Ray's errors into one line. An error of the target passes through as it was raised."""
    try:
        yield
    except RayTaskError as error:
        if isinstance(error.cause, InputError | RunError):
            raise error.cause from None
        raise
    except RayActorError as error:
        often = f"{_RETRIES + 1} times over one group of rows or {_RESTARTS + 1} times in all"
        reason = f"a worker died {often} ({first_line(error)})"
        raise RunError(f"ray: {reason}; run the same command again to resume") from None
    except RayError as error:
        raise RunError(f"ray: {first_line(error)}; run the same command again to resume") from None
