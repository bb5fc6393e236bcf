"""The target on a pool of servers with OpenAI's API. Each server has `concurrency` slots; a request
takes one.
"""

import asyncio
import os
import random
import time
from collections.abc import Coroutine, Iterator, Sequence
from contextlib import AsyncExitStack
from dataclasses import dataclass, replace
from typing import TypeVar
from urllib.parse import urlsplit

import httpx2

from draftsmith.core.errors import InputError, RunError
from draftsmith.core.prompts import room_for_prompts
from draftsmith.core.ranks import say
from draftsmith.core.tokenization import Tokenizer
from draftsmith.distill.config import DistillConfig
from draftsmith.distill.engines import (
    Answer,
    AnswerRequest,
    Done,
    Engine,
    Failed,
    Groups,
    RemoteTarget,
    sampling_of,
)
from draftsmith.distill.engines.replies import client_options, key_of
from draftsmith.distill.engines.server import Answered, Completion, NoAnswer, Server
from draftsmith.distill.engines.state_writer import StateWriter
from draftsmith.distill.teacher_measures import distance

# Attempts per request that a server may have seen, and the silence of all servers after which the
# run ends.
ATTEMPTS = 8
PATIENCE_S = 600.0
# Longest pause of a slot after its server's first failure in a row, doubled for each further one;
# and its maximum.
FIRST_PAUSE_S = 0.5
LONGEST_PAUSE_S = 60.0
# Failures in a row after which it is said that a server is silent.
_SILENT = 2
# Share of the mass in which teacher rows of two servers may differ: one may round to 8 bits.
_LARGEST_DISTANCE = 0.2
# Seconds after an empty group.
_NOTHING_YET_S = 0.01
# Parts that may wait for their last answers while others are asked: bounds the memory.
_OPEN_GROUPS = 8

T = TypeVar("T")


@dataclass(frozen=True)
class Slot:
    """One request at a time to a server, over a connection of its own."""

    server: Server
    client: httpx2.AsyncClient


class OpenAIEngine(Engine):
    """Servers that answer, and the distribution that they are asked to draw from."""

    def __init__(self, config: DistillConfig, tokenizer: Tokenizer) -> None:
        self._config = config
        target = RemoteTarget(config.target, tokenizer)
        self.sampling = sampling_of(config, target)
        self._completion = Completion(
            model=config.served_model or "",
            tokenizer=tokenizer,
            sampling=self.sampling.sampling,
            max_new_tokens=config.max_new_tokens,
            eos_ids=target.eos_ids,
            ignore_eos=config.ignore_eos,
            vocabulary=len(tokenizer),
            teacher=config.teacher_top_k,
            states=config.states is not None,
        )
        if config.states is not None:
            self.states = StateWriter(config)
        self._key = key_of(config.api_key_env)
        self._servers = [
            Server(_api_url(url), config.timeout_s, self._key) for url in config.endpoint
        ]
        # Takes milliseconds, and every client needs it.
        self._certificates = httpx2.create_ssl_context()
        self._spent_requests = 0
        self._spent_tokens = 0
        length = _run(self._probe())
        dialects = [server.dialect for server in self._servers if server.dialect is not None]
        self.takes_ids = all(dialect.ids for dialect in dialects)
        self.max_prompt_tokens = room_for_prompts(length, config.max_new_tokens)
        self.identity = {
            "target_fingerprint": None,
            "served_model": self._completion.model,
        }

    def run(self, groups: Groups, done: Done) -> None:
        """Ask everything in `groups`. Raise RunError if a budget is spent or no server answers any
        more.
        """
        _run(self._ask_all(groups, done))

    def one_by_one(self) -> Iterator[str]:
        servers = self._servers
        for server in servers:
            if server.dialect is not None:
                self._servers = [server]
                yield server.url
        self._servers = servers

    def _client(self, server: Server) -> httpx2.AsyncClient:
        """Return a client for one connection.

        A client with many connections scans all of them at each request, which at 64 costs more
        than the request.
        """
        longest_s = self._config.timeout_s
        return httpx2.AsyncClient(
            **client_options(server.url, self._key),
            verify=self._certificates,
            timeout=httpx2.Timeout(longest_s, connect=min(10.0, longest_s)),
        )

    async def _probe(self) -> int | None:
        """Try every server. Return the context length that all of them have, if they list one.

        Warn about a server that does not answer, and try it again later. Raise InputError if none
        answers.
        """
        lengths = []
        reasons = []
        for server in self._servers:
            async with self._client(server) as client:
                for attempt in range(1, ATTEMPTS + 1):
                    try:
                        lengths.append(await self._wake(server, client))
                        break
                    except NoAnswer as failure:
                        self._refuse(failure)
                        if attempt == ATTEMPTS or (not failure.counts and not failure.status):
                            reasons.append(failure.reason)
                            say(f"draftsmith distill: {failure.reason}; trying it again later")
                            break
                        await asyncio.sleep(_pause_s(failure, attempt))
        if not lengths:
            raise InputError(
                f"endpoint: no server answers ({reasons[0]}); start one, or check the address"
            )
        stated = [length for length in lengths if length is not None]
        return min(stated, default=None)

    async def _wake(self, server: Server, client: httpx2.AsyncClient) -> int | None:
        """Find out what a server serves and how to ask it; return its context length, if it lists
        one.
        """
        models = await server.models(client) if self._config.served_model is None else {}
        name = self._completion.model
        if not name:
            if len(models) != 1:
                serves = f"serves {', '.join(models)}" if models else "does not list its model"
                serves = server.said(serves)
                raise InputError(
                    f"{server.url}: {serves}; name the target with --served_model NAME"
                )
            (name,) = models
            self._completion = replace(self._completion, model=name)
        if models and name not in models:
            raise InputError(
                f"{server.url}: serves {server.said(', '.join(models))}, but "
                f"{self._servers[0].url} serves {server.said(name)}"
            )
        owners = {str(entry.get("owned_by")) for entry in models.values()}
        dialect = await server.choose_dialect(client, self._completion, owners)
        for other in self._servers:
            if server.teacher is not None and other.teacher is not None:
                apart = distance(server.teacher, other.teacher)
                if apart > _LARGEST_DISTANCE:
                    raise InputError(
                        f"{server.url}: its teacher rows and those of {other.url} on the same "
                        f"prompt differ by {apart:.0%} of their mass; serve one model on all"
                    )
        if not dialect.ids:
            say(
                f"draftsmith distill: {server.url}: returns text, not token ids; tokenising it "
                "again"
            )
        entry = models.get(name, {})
        meta = entry.get("meta") or {}  # of llama-server
        length = entry.get("max_model_len") or meta.get("n_ctx") or meta.get("n_ctx_train")
        return length if isinstance(length, int) else None

    def _refuse(self, failure: NoAnswer) -> None:
        """Raise InputError for a refusal that concerns every request."""
        variable = self._config.api_key_env
        if failure.status in (401, 403):
            has_key = os.environ.get(variable)
            fix = "the server rejects the key in" if has_key else "put the server's key into"
            raise InputError(f"{failure.reason}: {fix} {variable}")
        if not failure.retry:
            raise InputError(failure.reason)

    async def _ask_all(self, groups: Groups, done: Done) -> None:
        self._last_answer = time.monotonic()
        self._unasked = ""
        self._free: asyncio.Queue[Slot] = asyncio.Queue()
        # A server that does not answer yet has one slot; the others wait here.
        self._spare: dict[str, list[Slot]] = {}
        room = asyncio.Semaphore(_OPEN_GROUPS)

        async def ask_in_turn(request: AnswerRequest) -> None:
            following: AnswerRequest | None = request
            while following is not None:
                answer = await self._outcome(following)
                if answer is None:
                    return
                following = done(following, answer)

        async def ask_group(requests: Sequence[AnswerRequest]) -> None:
            async with asyncio.TaskGroup() as rows:
                for request in requests:
                    rows.create_task(ask_in_turn(request))
            room.release()

        async with AsyncExitStack() as stack, asyncio.TaskGroup() as tasks:
            for server in self._servers:
                slots = []
                for _ in range(self._config.concurrency):
                    client = await stack.enter_async_context(self._client(server))
                    slots.append(Slot(server, client))
                self._free.put_nowait(slots[0])
                self._spare[server.url] = slots[1:]
                if server.dialect is not None:
                    self._use_spare(server)
            await room.acquire()
            for requests in groups:
                if not requests:
                    await asyncio.sleep(_NOTHING_YET_S)
                    continue
                tasks.create_task(ask_group(requests))
                await room.acquire()
                if self._unasked:
                    break
        if self._unasked:
            raise RunError(f"{self._unasked}; raise it, and run the same command again to resume")

    def _use_spare(self, server: Server) -> None:
        for slot in self._spare.pop(server.url, []):
            self._free.put_nowait(slot)

    async def _outcome(self, request: AnswerRequest) -> Answer | Failed | None:
        """Ask until there is an answer or no hope of one; None if a budget is spent first."""
        attempts = 0
        while True:
            slot = await self._free.get()
            server = slot.server
            self._unasked = self._spent_budget()
            if self._unasked:
                self._free.put_nowait(slot)
                return None
            self._spent_requests += 1
            pause_s = 0.0
            try:
                answered = await self._ask(slot, request)
            except NoAnswer as failure:
                # The set may be given to others, and addresses of servers are not for them.
                reason = failure.reason.removeprefix(f"{server.url}: ")
                if not failure.retry:
                    if failure.status in (401, 403) or server.dialect is None:
                        self._refuse(failure)
                    return Failed(reason)
                server.failures += 1
                if server.failures == _SILENT and not failure.status and server.dialect is not None:
                    others = "others are asked, " if len(self._servers) > 1 else ""
                    say(f"draftsmith: {failure.reason}; {others}it is tried again later")
                pause_s = _pause_s(failure, server.failures)
                attempts += failure.counts and server.dialect is not None
                if attempts >= ATTEMPTS:
                    return Failed(f"{reason}; tried {ATTEMPTS} times")
                self._check_patience(failure)
            else:
                server.failures = 0
                self._spent_tokens += answered.spent
                self._last_answer = time.monotonic()
                if self.states is not None:
                    answer = answered.answer.response_ids
                    ids = (*request.prompt_ids, *answer)
                    drawn = len(answer) if request.sampling.temperature <= 1 else 0
                    self.states.take(answered.states, request.key.row, ids, drawn, server.url)
                return answered.answer
            finally:
                asyncio.get_running_loop().call_later(pause_s, self._free.put_nowait, slot)

    def _spent_budget(self) -> str:
        """Return the budget that is spent, "" if there is none."""
        requests = self._config.max_requests
        tokens = self._config.max_tokens
        if requests is not None and self._spent_requests >= requests:
            return f"max_requests: all {requests} are spent"
        if tokens is not None and self._spent_tokens >= tokens:
            return f"max_tokens: {self._spent_tokens} are spent of {tokens}"
        return self._unasked

    async def _ask(self, slot: Slot, request: AnswerRequest) -> Answered:
        server = slot.server
        if server.dialect is None:
            await self._wake(server, slot.client)
            self._use_spare(server)
        assert server.dialect is not None
        return await server.ask(slot.client, self._completion, request, server.dialect)

    def _check_patience(self, failure: NoAnswer) -> None:
        silence_s = time.monotonic() - self._last_answer
        if silence_s > max(PATIENCE_S, self._config.timeout_s):
            raise RunError(
                f"no server has answered for {PATIENCE_S:.0f} s ({failure.reason}); run the same "
                "command again to resume"
            )


def _api_url(url: str) -> str:
    """A URL without a path is that of the server; its API is under /v1."""
    return url if urlsplit(url).path.strip("/") else f"{url.rstrip('/')}/v1"


def _pause_s(failure: NoAnswer, failures: int) -> float:
    doublings = min(failures - 1, 20)
    longest_s = min(LONGEST_PAUSE_S, FIRST_PAUSE_S * 2.0**doublings)
    return max(failure.after_s, random.uniform(0, longest_s))


def _run(work: Coroutine[object, None, T]) -> T:
    """Run a coroutine. If several tasks failed, raise the first error."""
    try:
        return asyncio.run(work)
    except BaseExceptionGroup as errors:
        error: BaseException = errors
        while isinstance(error, BaseExceptionGroup):
            error = error.exceptions[0]
        raise error from None
