"""The target on a pool of servers with OpenAI's API. Whoever has room gets the next request; nothing is asked twice
that was answered.
"""

import asyncio
import os
import time
from collections import deque
from collections.abc import AsyncIterator, Iterator, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass
from typing import Any, NoReturn
from urllib.parse import urlsplit

import httpx

from distill.config import DistillConfig
from distill.engines.dialects import Asked
from distill.engines.endpoint import Endpoint, Refusal, Trouble, backoff_s
from distill.engines.generation_settings import GenerationSettings, sampling_of
from distill.engines.probe import Found, look, wake
from distill.engines.protocol import Answer, AnswerRequest, Done, Failed
from draftsmith_core.errors import InputError, RunError
from draftsmith_core.tokenization import Tokenizer

# How often one request is tried on servers that are there, and how long none of them may answer at all.
ATTEMPTS = 8
PATIENCE_S = 600.0
# Status codes of a server that no longer serves the target. Rows are then asked elsewhere and not given up.
_ELSEWHERE = (*range(300, 400), 402, 404, 405, 410)
# Parts that may wait for their last answers while others are asked: what bounds the memory.
_OPEN_GROUPS = 8


@dataclass
class _Job:
    """A request on its way. `not_before` is when it may be tried again."""

    request: AnswerRequest
    group: int
    attempts: int = 0
    not_before: float = 0.0


class OpenAIEngine:
    """Servers that are asked for answers, and the distribution that they are asked to draw them from."""

    keeps_answers = True

    def __init__(self, config: DistillConfig, tokenizer: Tokenizer) -> None:
        self._config = config
        settings = GenerationSettings(config.target)
        self.sampling = sampling_of(config, settings)
        found: Found = asyncio.run(self._look(tokenizer, settings.eos_ids(tokenizer)))
        self._asked = found.asked
        self._dialects = found.dialects
        self.takes_ids = all(dialect.kind != "text" for dialect in found.dialects.values())
        self._spent = (0, 0)  # requests and tokens of earlier runs of this engine
        limit = found.context_length
        self.max_prompt_tokens = None if limit is None else limit - config.max_new_tokens
        self.identity: dict[str, Any] = {"target_fingerprint": None, "served_model": found.asked.model}

    async def _look(self, tokenizer: Tokenizer, eos_ids: tuple[int, ...]) -> Found:
        async with _open(self._config) as endpoints:
            return await look(endpoints, self._config, tokenizer, self.sampling.sampling, eos_ids)

    def score(self, request: AnswerRequest, response: Answer, k: int) -> bytes:
        """Never called: servers give no whole distributions, so `--teacher_top_k` is refused with this engine."""
        raise NotImplementedError

    def close(self) -> None:
        """Nothing to do: the servers are not ours, and connections end with each run."""

    def run(self, groups: Iterator[Sequence[AnswerRequest]], done: Done) -> None:
        """Ask everything in `groups`, as many requests at a time as the servers take.

        RunError when a budget is spent or no server answers any more; what was answered until then is kept.
        """
        asyncio.run(self._run(groups, done))

    async def _run(self, groups: Iterator[Sequence[AnswerRequest]], done: Done) -> None:
        async with _open(self._config) as endpoints:
            for endpoint in endpoints:
                endpoint.dialect = self._dialects.get(endpoint.url)
            pool = _Pool(self._config, self._asked, endpoints, groups, done)
            pool.requests, pool.tokens = self._spent
            try:
                await pool.run()
            finally:
                self._spent = (pool.requests, pool.tokens)


@asynccontextmanager
async def _open(config: DistillConfig) -> AsyncIterator[list[Endpoint]]:
    """The endpoints, whose connections are closed at the end of the block."""
    key = os.environ.get(config.api_key_env, "").strip()
    if not (key.isascii() and key.isprintable()):  # what is wrong with a header is said with its value
        raise InputError(f"api_key_env: {config.api_key_env} holds what no key can; set it again")
    options = {
        "headers": {"Authorization": f"Bearer {key}"} if key else {},
        "timeout": httpx.Timeout(config.timeout_s, connect=min(10.0, config.timeout_s)),
        "verify": httpx.create_ssl_context(),
    }
    endpoints = []
    for url in config.endpoint:
        parts = urlsplit(url)
        # A server on this machine is asked directly, not through a proxy that the environment names.
        own = options | {"trust_env": parts.hostname not in ("localhost", "127.0.0.1", "::1")}
        endpoints.append(Endpoint(url if parts.path.strip("/") else f"{url.rstrip('/')}/v1", config.concurrency, own))
    try:
        yield endpoints
    finally:
        for endpoint in endpoints:
            await endpoint.close()


class _Pool:
    """One run over the servers: which requests wait, which are under way, and what has been spent."""

    def __init__(
        self,
        config: DistillConfig,
        asked: Asked,
        endpoints: list[Endpoint],
        groups: Iterator[Sequence[AnswerRequest]],
        done: Done,
    ) -> None:
        self.config, self.asked, self.endpoints, self.groups, self.done = config, asked, endpoints, groups, done
        self.waiting: deque[_Job] = deque()  # in the order of the prompts
        self.later: list[_Job] = []  # until their time has come
        self.left: dict[int, int] = {}  # requests of each group that have no outcome
        self.tasks: set[asyncio.Task[None]] = set()
        self.next_group = 0
        self.exhausted = False
        self.requests = self.tokens = 0
        self.changed = asyncio.Event()
        self.error: BaseException | None = None
        self.last_answer = time.monotonic()

    async def run(self) -> None:
        """Until everything has an outcome; raises what made that impossible."""
        try:
            while self.error is None:
                self.changed.clear()
                self._start_what_can()
                spent = self._spent()
                if not self.tasks and (spent or not (self.waiting or self.later or self._refill())):
                    break
                if not spent:
                    self._check_patience()
                await self._sleep()
            if self.error is not None:
                raise self.error
            if spent := self._spent():
                if self.waiting or self.later or self._refill():
                    raise RunError(f"{spent}; raise it, and the same command continues")
        finally:
            for task in self.tasks:
                task.cancel()
            await asyncio.gather(*self.tasks, return_exceptions=True)

    async def _sleep(self) -> None:
        """Until an answer comes, or the first of those that wait for a time may go on."""
        now = time.monotonic()
        times = [job.not_before for job in self.later] + [each.rests_until for each in self.endpoints]
        soon = min((at - now for at in times if at > now), default=5.0)
        try:
            await asyncio.wait_for(self.changed.wait(), min(5.0, max(0.001, soon)))
        except TimeoutError:
            return

    def _spent(self) -> str:
        if self.config.max_requests is not None and self.requests >= self.config.max_requests:
            return f"max_requests: all {self.config.max_requests} are spent"
        if self.config.max_tokens is not None and self.tokens >= self.config.max_tokens:
            return f"max_tokens: {self.tokens} are spent of {self.config.max_tokens}"
        return ""

    def _refill(self) -> bool:
        """Take a group if there is one and not too many are open; whether anything waits."""
        while not self.waiting and not self.exhausted and len(self.left) < _OPEN_GROUPS:
            requests = next(self.groups, None)
            if requests is None:
                self.exhausted = True
            else:
                number, self.next_group = self.next_group, self.next_group + 1
                self.left[number] = len(requests)
                self.waiting.extend(_Job(request, number) for request in requests)
        return bool(self.waiting)

    def _start_what_can(self) -> None:
        now = time.monotonic()
        ready = [job for job in self.later if job.not_before <= now]
        if ready:
            self.later = [job for job in self.later if job.not_before > now]
            self.waiting.extend(ready)
        while not self._spent():
            free = [each for each in self.endpoints if each.free(now)]
            if not free or not (self.waiting or self._refill()):
                return
            # The one with the most room, so that all are equally busy however fast each is.
            endpoint = max(free, key=lambda each: each.limit - each.active)
            endpoint.active += 1
            self.requests += 1
            task = asyncio.create_task(self._ask(endpoint, self.waiting.popleft()))
            self.tasks.add(task)
            task.add_done_callback(self._ended)

    def _ended(self, task: asyncio.Task[None]) -> None:
        self.tasks.discard(task)
        if not task.cancelled() and (error := task.exception()) is not None:
            self.error = self.error or error
        self.changed.set()

    async def _ask(self, endpoint: Endpoint, job: _Job) -> None:
        try:
            if endpoint.dialect is None:
                endpoint.dialect = await wake(endpoint, self.config, self.asked)
            answer, tokens = await endpoint.ask(self.asked, job.request)
        except Trouble as trouble:
            job.attempts += trouble.delivered
            if job.attempts >= ATTEMPTS:
                self._outcome(job, _failed(endpoint, f"{trouble.reason}; tried {ATTEMPTS} times"))
                return
            wait = backoff_s(max(1, job.attempts)) if trouble.after_s is None else trouble.after_s
            job.not_before = time.monotonic() + wait
            self.later.append(job)
            return
        except Refusal as refusal:
            if refusal.status in (401, 403):
                _no_key(refusal, self.config.api_key_env)
            if refusal.status in _ELSEWHERE:
                endpoint.failed(refusal.reason.removeprefix(f"{endpoint.url}: "))
                self.later.append(job)
                return
            self._outcome(job, _failed(endpoint, refusal.reason))
            return
        finally:
            endpoint.active -= 1
        self.tokens += tokens
        self.last_answer = time.monotonic()
        self._outcome(job, answer)

    def _outcome(self, job: _Job, answer: Answer | Failed) -> None:
        after = self.done(job.request, answer)
        if after is not None:
            # First in the queue, so that a conversation ends, and its part is written, before others begin.
            self.waiting.appendleft(_Job(after, job.group))
            return
        self.left[job.group] -= 1
        if not self.left[job.group]:
            del self.left[job.group]

    def _check_patience(self) -> None:
        if time.monotonic() - self.last_answer < max(PATIENCE_S, self.config.timeout_s):
            return
        reasons = "; ".join(f"{each.url}: {each.last_reason or 'no answer yet'}" for each in self.endpoints)
        raise RunError(f"no server has answered for {PATIENCE_S:.0f} s ({reasons}); the same command continues")


def _failed(endpoint: Endpoint, reason: str) -> Failed:
    # The set may be given to others, and addresses of servers are not for them.
    return Failed(reason.removeprefix(f"{endpoint.url}: "))


def _no_key(refusal: Refusal, variable: str) -> NoReturn:
    said = "its key was refused" if os.environ.get(variable) else f"it wants a key; put it into {variable}"
    raise InputError(f"{refusal.reason}: {said}") from None
