"""The target on a pool of servers with OpenAI's API. Each server has `concurrency` workers, which share one queue."""

import asyncio
import os
import random
import sys
import time
from collections import deque
from collections.abc import AsyncIterator, Iterator, Sequence
from contextlib import asynccontextmanager, nullcontext
from dataclasses import dataclass, replace
from typing import Any
from urllib.parse import urlsplit

import httpx

from distill.config import DistillConfig
from distill.engines import Answer, AnswerRequest, Done, Failed, RemoteTarget, sampling_of
from distill.engines.server import Completion, Refused, Server, Unavailable
from draftsmith_core.errors import InputError, RunError
from draftsmith_core.tokenization import Tokenizer

# Attempts per request that a server may have seen, and the silence of all servers after which the run ends.
ATTEMPTS = 8
PATIENCE_S = 600.0
# Failures in a row after which a server gets one request at a time, until one succeeds.
_FAILURES = 3
# Longest pause after a server's first failure in a row, doubled for each further one, and its maximum.
BACKOFF_S = (0.5, 60.0)
# Parts that may wait for their last answers while others are asked: bounds the memory.
_OPEN_GROUPS = 8


class OpenAIEngine:
    """Servers that answer, and the distribution that they are asked to draw from."""

    keeps_answers = True

    def __init__(self, config: DistillConfig, tokenizer: Tokenizer) -> None:
        self._config = config
        target = RemoteTarget(config.target, tokenizer)
        self.sampling = sampling_of(config, target)
        self._completion = Completion(
            *(config.served_model or "", tokenizer, self.sampling.sampling, config.max_new_tokens, target.eos_ids),
            *(config.ignore_eos, len(tokenizer)),
        )
        self._servers = [
            Server(url if urlsplit(url).path.strip("/") else f"{url.rstrip('/')}/v1", config.timeout_s)
            for url in config.endpoint
        ]
        self._certificates = httpx.create_ssl_context()  # takes milliseconds, and every worker needs it
        self._spent_requests = self._spent_tokens = 0
        length = _run(self._probe())
        self.takes_ids = all(server.dialect.ids for server in self._servers if server.dialect is not None)
        self.max_prompt_tokens = None if length is None else length - config.max_new_tokens
        self.identity: dict[str, Any] = {"target_fingerprint": None, "served_model": self._completion.model}

    def run(self, groups: Iterator[Sequence[AnswerRequest]], done: Done) -> None:
        """Ask everything in `groups`. Raise RunError if a budget is spent or no server answers any more."""
        _run(_Pool(self, groups, done).run())

    def close(self) -> None:
        """Nothing to release: connections end with each run."""

    @asynccontextmanager
    async def client(self, server: Server) -> AsyncIterator[httpx.AsyncClient]:
        """Open a client with one connection.

        A client with many connections scans all of them at each request, which at 64 costs more than the request.
        """
        key = os.environ.get(self._config.api_key_env, "").strip()
        if not (key.isascii() and key.isprintable()):  # httpx would show the value
            raise InputError(f"api_key_env: {self._config.api_key_env} is not printable ASCII; set it again")
        async with httpx.AsyncClient(
            headers={"Authorization": f"Bearer {key}"} if key else {},
            verify=self._certificates,
            timeout=httpx.Timeout(self._config.timeout_s, connect=min(10.0, self._config.timeout_s)),
            # A server on this machine is asked directly, not through a proxy of the environment.
            trust_env=urlsplit(server.url).hostname not in ("localhost", "127.0.0.1", "::1"),
        ) as client:
            yield client

    async def _probe(self) -> int | None:
        """Try every server once. Return the context length that all of them have, if they list one.

        Warn about a server that does not answer, and try it again later. Raise InputError if none answers.
        """
        lengths, reasons = [], []
        for server in self._servers:
            try:
                async with self.client(server) as client:
                    lengths.append(await self.wake(server, client))
            except Unavailable as unavailable:
                reasons.append(unavailable.reason)
                sys.stderr.write(f"draftsmith distill: {unavailable.reason}; trying it again later\n")
            except Refused as refused:
                raise self.no_key(refused) from None
        if not lengths:
            raise InputError(f"endpoint: no server answers ({reasons[0]}); start one, or check the address")
        return min((length for length in lengths if length is not None), default=None)

    async def wake(self, server: Server, client: httpx.AsyncClient) -> int | None:
        """Find out what a server serves and how to ask it; return its context length, if it lists one."""
        models = await server.models(client)
        if not self._completion.model:
            if len(models) != 1:
                serves = f"serves {', '.join(models)}" if models else "does not list its model"
                raise InputError(f"{server.url}: {serves}; name the target with --served_model NAME")
            self._completion = replace(self._completion, model=next(iter(models)))
        name = self._completion.model
        if models and name not in models and self._config.served_model is None:
            raise InputError(f"{server.url}: serves {', '.join(models)}, and {self._servers[0].url} {name}")
        owners = {str(entry.get("owned_by")) for entry in models.values()}
        await server.choose_dialect(client, self._completion, "llamacpp" in owners)
        if not server.dialect.ids:  # type: ignore[union-attr]
            sys.stderr.write(f"draftsmith distill: {server.url}: returns text, not token ids; tokenising it again\n")
        entry = models.get(name, {})
        meta = entry.get("meta") or {}  # of llama-server
        length = entry.get("max_model_len") or meta.get("n_ctx") or meta.get("n_ctx_train")
        return length if isinstance(length, int) else None

    def no_key(self, refused: Refused) -> InputError:
        """Return the error for a refusal before or during the run that concerns every request."""
        variable = self._config.api_key_env
        if refused.status in (401, 403):
            fix = "the server rejects the key in" if os.environ.get(variable) else "put the server's key into"
            return InputError(f"{refused.reason}: {fix} {variable}")
        return InputError(refused.reason)


def _run(work: Any) -> Any:
    """Run a coroutine. If several tasks failed, raise the first error."""
    try:
        return asyncio.run(work)
    except BaseExceptionGroup as errors:
        raise errors.exceptions[0] from None


@dataclass
class _Job:
    request: AnswerRequest
    group: int
    attempts: int = 0


class _Pool:
    """One run: requests that wait, requests without an outcome per open group, and what has been spent."""

    def __init__(self, engine: OpenAIEngine, groups: Iterator[Sequence[AnswerRequest]], done: Done) -> None:
        self.engine, self.config, self.groups, self.done = engine, engine._config, groups, done
        self.waiting: deque[_Job] = deque()  # in the order of the prompts
        self.open: dict[int, int] = {}
        self.next_group = 0
        self.exhausted = False
        self.changed = asyncio.Condition()
        self.one_at_a_time = {server.url: asyncio.Lock() for server in engine._servers}
        self.last_answer = time.monotonic()

    async def run(self) -> None:
        async with asyncio.TaskGroup() as tasks:
            for server in self.engine._servers:
                for _ in range(self.config.concurrency):
                    tasks.create_task(self._work(server))
        if (spent := self._spent()) and (self.open or self._refill()):
            raise RunError(f"{spent}; raise it, and the same command continues")

    async def _work(self, server: Server) -> None:
        async with self.engine.client(server) as client:
            while True:
                failing = server.failures >= _FAILURES or server.dialect is None
                async with self.one_at_a_time[server.url] if failing else nullcontext():
                    if server.failures:
                        first, most = BACKOFF_S
                        await asyncio.sleep(random.uniform(0, min(most, first * 2.0 ** (server.failures - 1))))
                    job = await self._next()
                    if job is None:
                        return
                    await self._send(job, server, client)

    async def _send(self, job: _Job, server: Server, client: httpx.AsyncClient) -> None:
        awake = server.dialect is not None
        try:
            if not awake:
                await self.engine.wake(server, client)
            answer, tokens = await server.ask(client, self.engine._completion, job.request)
        except Unavailable as unavailable:
            server.failures += 1
            job.attempts += unavailable.counts and awake
            await self._retry(job, server, unavailable)
            await asyncio.sleep(unavailable.after_s or 0)
        except Refused as refused:
            if refused.status in (401, 403):
                raise self.engine.no_key(refused) from None
            await self._outcome(job, _failed(server, refused.reason))
        else:
            server.failures = 0
            self.engine._spent_tokens += tokens
            self.last_answer = time.monotonic()
            await self._outcome(job, answer)

    async def _next(self) -> _Job | None:
        """Wait for a request to send; None when all have an outcome or a budget is spent."""
        async with self.changed:
            while not self._spent():
                if self.waiting or self._refill():
                    self.engine._spent_requests += 1
                    return self.waiting.popleft()
                if not self.open:
                    break
                await self.changed.wait()
            self.changed.notify_all()
        return None

    def _refill(self) -> bool:
        """Take the next group if not too many are open. Return whether anything waits."""
        while not self.waiting and not self.exhausted and len(self.open) < _OPEN_GROUPS:
            requests = next(self.groups, None)
            if requests is None:
                self.exhausted = True
            else:
                self.open[self.next_group] = len(requests)
                self.waiting.extend(_Job(request, self.next_group) for request in requests)
                self.next_group += 1
        return bool(self.waiting)

    def _spent(self) -> str:
        config, engine = self.config, self.engine
        if config.max_requests is not None and engine._spent_requests >= config.max_requests:
            return f"max_requests: all {config.max_requests} are spent"
        if config.max_tokens is not None and engine._spent_tokens >= config.max_tokens:
            return f"max_tokens: {engine._spent_tokens} are spent of {config.max_tokens}"
        return ""

    async def _retry(self, job: _Job, server: Server, unavailable: Unavailable) -> None:
        job.attempts += unavailable.counts
        if job.attempts >= ATTEMPTS:
            await self._outcome(job, _failed(server, f"{unavailable.reason}; tried {ATTEMPTS} times"))
            return
        if time.monotonic() - self.last_answer > max(PATIENCE_S, self.config.timeout_s):
            raise RunError(
                f"no server has answered for {PATIENCE_S:.0f} s ({unavailable.reason}); the same command continues"
            )
        async with self.changed:
            self.waiting.append(job)
            self.changed.notify()

    async def _outcome(self, job: _Job, answer: Answer | Failed) -> None:
        async with self.changed:
            following = self.done(job.request, answer)
            if following is not None:
                # First in the queue, so that a conversation ends, and its part is written, before others begin.
                self.waiting.appendleft(_Job(following, job.group))
                self.changed.notify()
                return
            self.open[job.group] -= 1
            if not self.open[job.group]:
                del self.open[job.group]
                self.changed.notify_all()


def _failed(server: Server, reason: str) -> Failed:
    # The set may be given to others, and addresses of servers are not for them.
    return Failed(reason.removeprefix(f"{server.url}: "))
