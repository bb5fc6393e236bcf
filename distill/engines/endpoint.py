"""One server: how many requests it gets at a time, when it rests, and what its failures mean.

It starts with a few requests at a time; each full round of answers allows one more, and a server that says it has too
many (429, 503) halves them. A server that fails several times in a row rests, longer each time, and is then tried with
a single request.
"""

import asyncio
import random
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass, field, replace
from typing import Any

import httpx

from distill.engines.dialects import Asked, Dialect, Garbage
from distill.engines.protocol import Answer, AnswerRequest, at_temperature

# Requests at a time to begin with; failures in a row after which a server rests; seconds of its first and longest rest.
_START = 8
_FAILURES = 3
_REST_S = (1.0, 60.0)
# Seconds before a request is tried again: up to the first at its first failure, twice as many after each, at most the
# last.
BACKOFF_S = (0.5, 30.0)
_TRY_AGAIN = (408, 409, 425, 429)
_TOO_MANY = (429, 503)


@dataclass(eq=False)
class Refusal(Exception):
    """A request that must not be asked again as it is: the server understood it and said no."""

    reason: str
    status: int = 0


@dataclass(eq=False)
class Trouble(Exception):
    """A request that may be asked again, here or elsewhere.

    delivered: whether the server can have seen it. after_s: when the server wants it again, if it says so.
    """

    reason: str
    delivered: bool = True
    after_s: float | None = None


def backoff_s(attempt: int) -> float:
    """Seconds to wait after the `attempt`-th failure, drawn so that many requests do not come back at once."""
    first, most = BACKOFF_S
    return random.uniform(0, min(most, first * 2.0 ** (attempt - 1)))


@dataclass
class Endpoint:
    """A server of a pool. `limit` is how many requests it may have now, `active` how many it has."""

    url: str
    most: int
    options: dict[str, Any] = field(repr=False)
    dialect: Dialect | None = None
    limit: float = 0.0
    active: int = 0
    failures: int = 0
    rests_until: float = 0.0
    answers: int = 0
    last_reason: str = ""
    _rest_s: float = field(default=0.0, repr=False)
    _idle: list[httpx.AsyncClient] = field(default_factory=list, repr=False)

    def __post_init__(self) -> None:
        self.limit = float(min(_START, self.most))

    @asynccontextmanager
    async def client(self) -> AsyncIterator[httpx.AsyncClient]:
        """An HTTP client with a single connection, for one request; it is kept for a later one.

        One client with many connections looks at all of them at each request, which at 64 costs more than the request.
        """
        client = self._idle.pop() if self._idle else httpx.AsyncClient(**self.options)
        try:
            yield client
        finally:
            self._idle.append(client)

    async def close(self) -> None:
        """Close all connections."""
        for client in self._idle:
            await client.aclose()

    @property
    def base(self) -> str:
        """Its address, with a slash at the end."""
        return self.url.rstrip("/") + "/"

    def free(self, now: float) -> bool:
        """Whether it may have one more request now. A server that has rested is first tried with one."""
        if now < self.rests_until:
            return False
        return self.active < (1 if self._rest_s else max(1, int(self.limit)))

    async def ask(self, asked: Asked, request: AnswerRequest) -> tuple[Answer, int]:
        """One answer and the tokens it cost; Refusal or Trouble when there is none."""
        assert self.dialect is not None
        asked = replace(asked, sampling=at_temperature(asked.sampling, request.temperature))
        body = self.dialect.body(asked, request.prompt_ids, request.seed)
        answer, tokens = await self.post(self.dialect, asked, body)
        ids = answer.response_ids
        if not asked.knows(ids):
            raise Refusal(f"{self.url}: gave a token beyond the {asked.vocabulary} of --target's tokenizer")
        if answer.tokens_from == "target" and len(ids) > asked.max_new_tokens + 1:  # and the end token
            raise Refusal(f"{self.url}: gave {len(ids)} tokens where {asked.max_new_tokens} were asked for")
        return answer, tokens

    async def post(self, dialect: Dialect, asked: Asked, body: dict[str, object]) -> tuple[Answer, int]:
        """Post one request, and keep count of how the server does."""
        try:
            # httpx bounds the wait for the next bytes, and a server can send some without end.
            async with asyncio.timeout(self.options["timeout"].read), self.client() as client:
                reply = await client.post(dialect.url(self.base), json=body)
            self._check(reply)
            found = dialect.answer(asked, reply.content)
        except (httpx.HTTPError, TimeoutError) as error:
            self.failed(f"{type(error).__name__}: {error}" if str(error) else type(error).__name__)
            refused = isinstance(error, httpx.ConnectError | httpx.ConnectTimeout)
            raise Trouble(f"{self.url}: {self.last_reason}", delivered=not refused) from None
        except Garbage as error:
            self.failed(str(error))
            raise Trouble(f"{self.url}: {error}") from None
        self.answers += 1
        self.failures, self._rest_s = 0, 0.0
        self.limit = min(float(self.most), self.limit + 1 / self.limit)
        return found

    def _check(self, reply: httpx.Response) -> None:
        status = reply.status_code
        if status < 300:
            return
        where = reply.headers.get("location")
        reason = f"leads to {where}" if where else " ".join(reply.text.split())[:200] or "no reason"
        said = f"{self.url}: status {status} ({reason})"
        if status in _TOO_MANY:
            self.limit = max(1.0, self.limit / 2)
        if status in _TRY_AGAIN:
            raise Trouble(said, after_s=_retry_after(reply))
        if status >= 500:
            self.failed(f"status {status}")
            raise Trouble(said, after_s=_retry_after(reply))
        raise Refusal(said, status)

    def failed(self, reason: str) -> None:
        """Count a failure; several in a row, or one after a rest, make it rest."""
        self.failures, self.last_reason = self.failures + 1, reason
        now = time.monotonic()
        # Requests that were under way when it began to rest fail too, and say nothing new.
        if now >= self.rests_until and (self.failures >= _FAILURES or self._rest_s):
            self._rest_s = min(_REST_S[1], max(_REST_S[0], 2 * self._rest_s))
            self.rests_until = now + self._rest_s


def _retry_after(reply: httpx.Response) -> float | None:
    try:
        return min(300.0, max(0.0, float(reply.headers["retry-after"])))
    except (KeyError, ValueError):
        return None  # absent, or a date, which servers of models do not send
