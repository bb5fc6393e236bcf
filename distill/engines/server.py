"""One server with a completions API: how to ask it, how to read its replies, and which failures to retry.

| dialect | server | request | tokens |
|---|---|---|---|
| `llama.cpp` | llama-server | POST /completion, prompt as ids | `tokens` |
| `openai` | vLLM, others | POST /v1/completions, prompt as ids or text | `token_ids`, else the text's |

Every request states the distribution, because servers have defaults of their own: temperature, then top-k, top-p and
min-p, no penalties. A server that rejects keys which OpenAI's API does not have is asked without them if they would
change nothing (`plain`).
"""

import asyncio
import json
import operator
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal
from urllib.parse import urljoin

import httpx

from distill.engines import Answer, AnswerRequest, at_temperature
from draftsmith_core.errors import InputError
from draftsmith_core.settings import Sampling
from draftsmith_core.tokenization import Tokenizer, encode_text

_LIST_TIMEOUT_S = 30.0
_TRIAL_TOKENS = 16
# Statuses below 500 after which the same request may succeed: on this server later, or on another one.
_NO_FAULT = (*range(300, 400), 402, 404, 405, 409, 410, 425, 429, 503)
_RETRY = (408, *_NO_FAULT)


class Refused(Exception):
    """The server understood the request and rejects it; do not send it again."""

    def __init__(self, reason: str, status: int = 0) -> None:
        super().__init__(reason)
        self.reason, self.status = reason, status


class Unavailable(Exception):
    """No answer this time; retry, here or elsewhere.

    counts: the request may have been the cause. after_s: the delay that the server asks for.
    """

    def __init__(self, reason: str, counts: bool = True, after_s: float | None = None) -> None:
        super().__init__(reason)
        self.reason, self.counts, self.after_s = reason, counts, after_s


@dataclass(frozen=True)
class Completion:
    """What all requests of a run share. vocabulary: tokens of the tokenizer."""

    model: str
    tokenizer: Tokenizer
    sampling: Sampling
    max_new_tokens: int
    eos_ids: tuple[int, ...]
    ignore_eos: bool
    vocabulary: int


@dataclass(frozen=True)
class Dialect:
    """How one server is asked. ids: the prompt goes out, and the answer comes back, as token ids."""

    kind: Literal["llama.cpp", "openai"]
    ids: bool = True
    plain: bool = False

    def body(self, completion: Completion, prompt_ids: Sequence[int], seed: int) -> dict[str, Any]:
        """Return the JSON to post. Seeds are cut to 31 bits, which all servers take."""
        sampling, most = completion.sampling, completion.max_new_tokens
        body: dict[str, Any] = {"model": completion.model, "temperature": sampling.temperature, "top_p": sampling.top_p}
        body |= {"seed": seed & 0x7FFFFFFF, "stream": False}
        body["prompt"] = list(prompt_ids) if self.ids else _prompt_text(completion.tokenizer, prompt_ids)
        if not self.plain:
            body |= {"top_k": sampling.top_k, "min_p": sampling.min_p, "repetition_penalty": 1.0}
            if completion.ignore_eos:
                body["ignore_eos"] = True
        if self.kind == "llama.cpp":
            # Its own defaults are top-k 40, top-p 0.95, min-p 0.05, and it scales by the temperature last.
            order = ["temperature", "top_k", "top_p", "min_p"]
            body |= {"return_tokens": True, "samplers": order, "repeat_penalty": 1.0, "cache_prompt": False}
            return body | {"n_predict": most}
        if self.ids:
            # -1 means "all tokens" in every version of vLLM, 0 only in newer ones.
            body |= {"return_token_ids": True, "top_k": sampling.top_k or -1, "skip_special_tokens": False}
        return body | {"max_tokens": most}

    def answer(self, completion: Completion, raw: bytes) -> tuple[Answer, int]:
        """Read a reply: the answer, and the tokens of prompt and answer as the server counts them.

        Raise ValueError, TypeError, LookupError or AttributeError if the reply is no completion.
        """
        reply = json.loads(raw)
        if self.kind == "llama.cpp":
            ids = list(map(operator.index, reply["tokens"]))
            reason = "length" if reply["stop_type"] == "limit" else "stop"
            return _ended(completion, ids, reason, "target"), reply["tokens_evaluated"] + len(ids)
        choice, usage = reply["choices"][0], reply.get("usage") or {}
        if self.ids:
            ids = list(map(operator.index, choice["token_ids"]))
            return _ended(completion, ids, choice["finish_reason"], "target"), int(
                usage.get("total_tokens") or len(ids)
            )
        ids = completion.tokenizer(choice["text"], add_special_tokens=False)["input_ids"]
        drawn = usage.get("completion_tokens")
        # The server may count the end token, which is not in the text.
        same = completion.tokenizer.decode(ids) == choice["text"] and (drawn is None or int(drawn) - len(ids) in (0, 1))
        answer = _ended(completion, ids, choice["finish_reason"], "text" if same else "text_differs")
        return answer, int(usage.get("total_tokens") or len(ids))


def _ended(completion: Completion, ids: list[int], reason: Any, tokens_from: str) -> Answer:
    if reason not in ("stop", "length"):
        raise ValueError(f"finish_reason {reason!r}")
    if reason == "stop" and completion.eos_ids and not (ids and ids[-1] in completion.eos_ids):
        ids = [*ids, completion.eos_ids[0]]
    if not ids:
        raise ValueError("no tokens")
    return Answer(tuple(ids), reason, tokens_from)


def _prompt_text(tokenizer: Tokenizer, ids: Sequence[int]) -> str:
    """Return the text that a server tokenises to `ids`: without the BOS that its tokenizer adds."""
    text = str(tokenizer.decode(list(ids), skip_special_tokens=False, clean_up_tokenization_spaces=False))
    bos = str(tokenizer.bos_token or "")
    adds_bos = bool(bos) and encode_text(tokenizer, "a")[:1] == [tokenizer.bos_token_id]
    return text.removeprefix(bos) if adds_bos else text


class Server:
    """A server of the pool. dialect: None until it has answered a trial request. failures: in a row, of all workers."""

    def __init__(self, url: str, timeout_s: float) -> None:
        self.url, self.base, self.timeout_s = url, url.rstrip("/") + "/", timeout_s
        self.dialect: Dialect | None = None
        self.failures = 0

    async def models(self, client: httpx.AsyncClient) -> dict[str, dict[str, Any]]:
        """Return what /models lists, by name; empty if the server has no such list."""
        try:
            reply = await client.get(f"{self.base}models", timeout=_LIST_TIMEOUT_S)
            if reply.status_code in (404, 405):
                return {}
            self._check(reply)
            return {str(entry["id"]): entry for entry in reply.json()["data"]}
        except (httpx.HTTPError, ValueError, LookupError, TypeError) as error:
            raise Unavailable(f"{self.url}: /models does not answer ({_reason(error)})", counts=False) from None

    async def choose_dialect(self, client: httpx.AsyncClient, completion: Completion, llama_cpp: bool) -> None:
        """Find the richest dialect that the server understands, with one short answer each.

        Raise InputError if none works or the server cannot draw from the distribution that the options ask for.
        """
        openai = [Dialect("openai"), Dialect("openai", ids=False), Dialect("openai", ids=False, plain=True)]
        trial = replace(completion, max_new_tokens=_TRIAL_TOKENS, ignore_eos=False)
        reason = ""
        for dialect in [Dialect("llama.cpp")] if llama_cpp else openai:
            try:
                await self.post(client, dialect, trial, encode_text(trial.tokenizer, "The"), seed=1)
            except Refused as refused:
                if refused.status in (401, 403):
                    raise
                reason = refused.reason
                continue
            except Unavailable as unavailable:
                if "no completion" not in unavailable.reason:
                    raise
                reason = unavailable.reason
                continue
            sampling = completion.sampling
            extra = {"top_k": sampling.top_k, "min_p": sampling.min_p, "ignore_eos": completion.ignore_eos}
            if dialect.plain and (given := [key for key, value in extra.items() if value]):
                raise InputError(f"{self.url}: does not take {given[0]}; set it to its neutral value")
            self.dialect = dialect
            return
        raise InputError(f"{reason}: is it a completions server?")

    async def ask(
        self, client: httpx.AsyncClient, completion: Completion, request: AnswerRequest
    ) -> tuple[Answer, int]:
        """Return one answer and the tokens it cost; raise Refused or Unavailable if there is none."""
        assert self.dialect is not None
        completion = replace(completion, sampling=at_temperature(completion.sampling, request.temperature))
        return await self.post(client, self.dialect, completion, request.prompt_ids, request.seed)

    async def post(
        self,
        client: httpx.AsyncClient,
        dialect: Dialect,
        completion: Completion,
        prompt_ids: Sequence[int],
        seed: int,
    ) -> tuple[Answer, int]:
        """Send one request in this dialect and check that the answer can be the target's."""
        try:
            # httpx bounds the wait for the next bytes only, and a server can send some without end.
            async with asyncio.timeout(self.timeout_s):
                path = "../completion" if dialect.kind == "llama.cpp" else "completions"
                reply = await client.post(urljoin(self.base, path), json=dialect.body(completion, prompt_ids, seed))
            self._check(reply)
            answer, tokens = dialect.answer(completion, reply.content)
        except (httpx.HTTPError, TimeoutError) as error:
            refused = isinstance(error, httpx.ConnectError | httpx.ConnectTimeout)
            raise Unavailable(f"{self.url}: {_reason(error)}", counts=not refused) from None
        except (ValueError, LookupError, TypeError, AttributeError, RecursionError, OverflowError) as error:
            raise Unavailable(f"{self.url}: answered with no completion ({_reason(error)})"[:300]) from None
        ids = answer.response_ids
        too_long = answer.tokens_from == "target" and len(ids) > completion.max_new_tokens + 1  # one more for EOS
        if too_long or not all(0 <= token < completion.vocabulary for token in ids):
            raise Refused(f"{self.url}: gave {len(ids)} tokens up to id {max(ids)}, which the target cannot have drawn")
        return answer, tokens

    def _check(self, reply: httpx.Response) -> None:
        status = reply.status_code
        if status < 300:
            return
        location = reply.headers.get("location")
        detail = f"leads to {location}" if location else " ".join(reply.text.split())[:200] or "no reason"
        reason = f"{self.url}: status {status} ({detail})"
        if status < 500 and status not in _RETRY:
            raise Refused(reason, status)
        # The request itself may be what breaks the server; a rate limit is not its fault.
        raise Unavailable(reason, counts=status not in _NO_FAULT, after_s=_retry_after(reply))


def _reason(error: Exception) -> str:
    return f"{type(error).__name__}: {error}" if str(error) else type(error).__name__


def _retry_after(reply: httpx.Response) -> float | None:
    try:
        return min(300.0, max(0.0, float(reply.headers["retry-after"])))
    except (KeyError, ValueError):
        return None  # absent, or a date, which model servers do not send
