"""One server with a completions API: how to ask it, how to read its replies, and which failures to
retry.

| dialect | server | request | tokens |
|---|---|---|---|
| `llama.cpp` | llama-server | POST /completion, prompt as ids | `tokens` |
| `openai` | vLLM, others | POST /v1/completions, prompt as ids or text | `token_ids`, else the
text's |

Teacher rows come from vLLM's `logprobs`, which are the target's own at temperature 1 unless it was
started otherwise.

Every request states the whole distribution, because servers have defaults of their own. A server
that rejects keys which OpenAI's API does not have is asked without them if they would change
nothing (`plain`).
"""

import asyncio
import json
import operator
import os
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal
from urllib.parse import urljoin, urlsplit

import httpx

from distill.engines import Answer, AnswerRequest, Key, at_temperature
from draftsmith_core.errors import InputError
from draftsmith_core.io import JsonObject
from draftsmith_core.settings import Sampling
from draftsmith_core.teacher_rows import pack_likeliest
from draftsmith_core.tokenization import Tokenizer, encode_text, text_with_specials

_LIST_TIMEOUT_S = 30.0
_TRIAL = AnswerRequest(Key(0, 0, 0), (), seed=1)
# Tokens of a trial answer, and how often a dialect is tried before a garbled reply means that it is
# not understood.
_TRIAL_TOKENS = 16
_TRIALS = 3
# Statuses below 500 after which the same request may succeed: on this server later, or on another
# one.
_NO_FAULT = (*range(300, 400), 402, 404, 405, 409, 410, 425, 429, 503)
_RETRY = (408, *_NO_FAULT)


@dataclass(eq=False)
class NoAnswer(Exception):
    """A request without an answer.

    retry: the same request may succeed later or elsewhere. counts: the request itself may have been
    the cause. after_s: the delay that the server asks for. garbled: the server replied, with
    something that is no completion.
    """

    reason: str
    status: int = 0
    retry: bool = True
    counts: bool = True
    after_s: float = 0.0
    garbled: bool = False


def client_options(url: str, key_variable: str) -> dict[str, Any]:
    """Options of an httpx client of a server: the key in an environment variable, and whether to
    use proxies.
    """
    # Of other characters httpx would complain, and show the key.
    key = "".join(letter for letter in os.environ.get(key_variable, "") if "!" <= letter <= "~")
    return {
        "headers": {"Authorization": f"Bearer {key}"} if key else {},
        # A server on this machine is asked directly, not through a proxy of the environment.
        "trust_env": urlsplit(url).hostname not in ("localhost", "127.0.0.1", "::1"),
    }


@dataclass(frozen=True)
class Completion:
    """What all requests of a run share. vocabulary: tokens of the tokenizer. teacher: length of the
    teacher rows, 0 for no teacher rows.
    """

    model: str
    tokenizer: Tokenizer
    sampling: Sampling
    max_new_tokens: int
    eos_ids: tuple[int, ...]
    ignore_eos: bool
    vocabulary: int
    teacher: int = 0


@dataclass(frozen=True)
class Dialect:
    """How one server is asked. ids: the prompt goes out, and the answer comes back, as token
    ids.
    """

    api: Literal["llama.cpp", "openai"]
    ids: bool = True
    plain: bool = False

    def body(self, completion: Completion, request: AnswerRequest) -> JsonObject:
        """Return the JSON to post. Seeds are cut to 31 bits, which all servers take."""
        sampling = at_temperature(completion.sampling, request.temperature)
        body: JsonObject = {
            "model": completion.model,
            "temperature": sampling.temperature,
            "top_p": sampling.top_p,
            "seed": request.seed & 0x7FFFFFFF,
            "stream": False,
            "prompt": list(request.prompt_ids)
            if self.ids
            else _text(completion.tokenizer, request.prompt_ids),
        }
        if not self.plain:
            body |= {"top_k": sampling.top_k, "min_p": sampling.min_p, "repetition_penalty": 1.0}
            if completion.ignore_eos:
                body["ignore_eos"] = True
        if self.api == "llama.cpp":
            # Its own defaults are top-k 40, top-p 0.95, min-p 0.05, and it scales by the
            # temperature last.
            return body | {
                "return_tokens": True,
                "samplers": ["temperature", "top_k", "top_p", "min_p"],
                "repeat_penalty": 1.0,
                "cache_prompt": False,
                "n_predict": completion.max_new_tokens,
            }
        if self.ids:
            # -1 means "all tokens" in every version of vLLM, 0 only in newer ones.
            body |= {
                "return_token_ids": True,
                "top_k": sampling.top_k or -1,
                "skip_special_tokens": False,
            }
        if completion.teacher:
            body |= {"logprobs": completion.teacher, "return_tokens_as_token_ids": True}
        return body | {"max_tokens": completion.max_new_tokens}

    def answer(self, completion: Completion, prompt_ids: Sequence[int], raw: bytes) -> "Answered":
        """Read a reply.

        Raise ValueError, TypeError, LookupError or AttributeError if the reply is no completion.
        """
        reply = json.loads(raw)
        tokens_from = "target"
        if self.api == "llama.cpp":
            ids = list(map(operator.index, reply["tokens"]))
            reason = "length" if reply["stop_type"] == "limit" else "stop"
            spent = reply["tokens_evaluated"] + len(ids)
        else:
            choice = reply["choices"][0]
            usage = reply.get("usage") or {}
            reason = choice["finish_reason"]
            if self.ids:
                ids = list(map(operator.index, choice["token_ids"]))
            else:
                ids, same = encode_answer(
                    completion.tokenizer, prompt_ids, choice["text"], usage.get("completion_tokens")
                )
                tokens_from = "text" if same else "text_differs"
            spent = int(usage.get("total_tokens") or len(ids))
        if reason not in ("stop", "length"):
            raise ValueError(f"finish_reason {reason!r}")
        ends = completion.eos_ids
        if reason == "stop" and ends and not (ids and ids[-1] in ends):
            ids = [*ids, ends[0]]
        if not ids:
            raise ValueError("no tokens")
        teacher = None
        if completion.teacher:
            rows = choice["logprobs"]["top_logprobs"]
            if len(rows) != len(ids):
                raise ValueError(f"log-probabilities of {len(rows)} tokens")
            likeliest = [_likeliest(row, completion.teacher) for row in rows]
            teacher = pack_likeliest(likeliest, completion.vocabulary)
        return Answered(Answer(tuple(ids), reason, tokens_from, teacher), spent)


@dataclass(frozen=True)
class Answered:
    """An answer, and its tokens and those of the prompt as the server counts them."""

    answer: Answer
    spent: int


def _likeliest(row: dict[str, float], k: int) -> list[tuple[int, float]]:
    """The k likeliest tokens of a position. vLLM adds the drawn token to them."""
    pairs = [(int(name.removeprefix("token_id:")), logprob) for name, logprob in row.items()]
    pairs.sort(key=lambda pair: -pair[1])
    return pairs[:k]


def encode_answer(
    tokenizer: Tokenizer, prompt_ids: Sequence[int], text: str, drawn: int | None
) -> tuple[list[int], bool]:
    """Return the token ids of an answer that came as text, and whether they can be the `drawn`
    tokens of the target.

    The answer is encoded behind its prompt, because SentencePiece tokenizers put a space piece
    before a text that stands alone; then alone, with and without the space that it begins with.
    """
    before = _text(tokenizer, prompt_ids)
    whole = encode_text(tokenizer, before + text)
    length = len(prompt_ids)
    candidates = [whole[length:]] if whole[:length] == list(prompt_ids) else []
    for alone in dict.fromkeys([text, text.removeprefix(" ")]):
        encoded = tokenizer(alone, add_special_tokens=False)
        candidates.append(list(encoded["input_ids"]))
    for ids in candidates:
        # A server may count the end token, which is not in the text.
        fits = drawn is None or int(drawn) - len(ids) in (0, 1)
        if fits and _text(tokenizer, [*prompt_ids, *ids]).endswith(text):
            return ids, True
    return candidates[0], False


def _text(tokenizer: Tokenizer, ids: Sequence[int]) -> str:
    """Return the text that a server tokenises to `ids`: without the BOS that its tokenizer adds."""
    text = text_with_specials(tokenizer, ids)
    bos = str(tokenizer.bos_token or "")
    adds_bos = bool(bos) and encode_text(tokenizer, "a")[:1] == [tokenizer.bos_token_id]
    return text.removeprefix(bos) if adds_bos else text


class Server:
    """A server of the pool. dialect: None until it has answered a trial request. failures: in a
    row.
    """

    def __init__(self, url: str, timeout_s: float) -> None:
        self.url = url
        self.base = url.rstrip("/") + "/"
        self.timeout_s = timeout_s
        self.dialect: Dialect | None = None
        self.failures = 0

    async def models(self, client: httpx.AsyncClient) -> dict[str, JsonObject]:
        """Return what /models lists, by name; empty if the server has no such list."""
        try:
            reply = await client.get(f"{self.base}models", timeout=_LIST_TIMEOUT_S)
            if reply.status_code in (404, 405):
                return {}
            self._check(reply)
            return {str(entry["id"]): entry for entry in reply.json()["data"]}
        except (httpx.HTTPError, ValueError, LookupError, TypeError) as error:
            raise self._failed(error, "/models does not answer") from None

    async def choose_dialect(
        self, client: httpx.AsyncClient, completion: Completion, owners: set[str]
    ) -> Dialect:
        """Find the richest dialect that the server understands, with one short answer each.

        owners: who serves, as /models says; empty if it was not asked. Raise InputError if no
        dialect works or the server cannot draw from the distribution that the options ask for.
        """
        request = replace(_TRIAL, prompt_ids=tuple(encode_text(completion.tokenizer, "The")))
        trial = replace(completion, max_new_tokens=_TRIAL_TOKENS, ignore_eos=False)
        reason = ""
        for dialect in _candidates(completion, owners):
            for _ in range(_TRIALS):
                try:
                    await self.ask(client, trial, request, dialect)
                except NoAnswer as failure:
                    unknown = failure.garbled or not failure.retry or failure.status in (404, 405)
                    if not unknown or (failure.status in (401, 403) and dialect.api == "openai"):
                        raise
                    reason = failure.reason
                    if not failure.garbled:
                        break
                else:
                    self._check_plain(dialect, completion)
                    self.dialect = dialect
                    return dialect
        if completion.teacher:
            needs = (
                "teacher_top_k: needs vLLM's server, started with --max-logprobs "
                f"{completion.teacher}"
            )
            raise InputError(f"{needs} or more ({reason})")
        raise InputError(f"{reason}: is it a completions server?")

    def _check_plain(self, dialect: Dialect, completion: Completion) -> None:
        sampling = completion.sampling
        extra = {
            "top_k": sampling.top_k,
            "min_p": sampling.min_p,
            "ignore_eos": completion.ignore_eos,
        }
        given = [key for key, value in extra.items() if value]
        if dialect.plain and given:
            raise InputError(f"{self.url}: does not take {given[0]}; set it to its neutral value")

    async def ask(
        self,
        client: httpx.AsyncClient,
        completion: Completion,
        request: AnswerRequest,
        dialect: Dialect,
    ) -> Answered:
        """Return one answer, checked; raise NoAnswer if there is none."""
        path = "../completion" if dialect.api == "llama.cpp" else "completions"
        try:
            # httpx bounds the wait for the next bytes only, and a server can send some without end.
            async with asyncio.timeout(self.timeout_s):
                reply = await client.post(
                    urljoin(self.base, path), json=dialect.body(completion, request)
                )
        except (httpx.HTTPError, TimeoutError) as error:
            raise self._failed(error) from None
        self._check(reply)
        try:
            answered = dialect.answer(completion, request.prompt_ids, reply.content)
        except (
            ValueError,
            LookupError,
            TypeError,
            AttributeError,
            RecursionError,
            OverflowError,
        ) as error:
            raise self._failed(error, "answered with no completion", reply) from None
        ids = answered.answer.response_ids
        most = completion.max_new_tokens + 1  # one more for EOS
        too_long = answered.answer.tokens_from == "target" and len(ids) > most
        if too_long or not all(0 <= token < completion.vocabulary for token in ids):
            reason = (
                f"gave {len(ids)} tokens up to id {max(ids)}, which the target cannot have drawn"
            )
            raise NoAnswer(f"{self.url}: {reason}", retry=False)
        return answered

    def _failed(
        self, error: Exception, what: str = "", reply: httpx.Response | None = None
    ) -> NoAnswer:
        name = type(error).__name__
        text = f"{name}: {error}"[:300] if str(error) else name
        no_connection = isinstance(error, httpx.ConnectError | httpx.ConnectTimeout)
        garbled = not isinstance(error, httpx.HTTPError | TimeoutError)
        reason = f"{what} ({text})" if what else text
        if reply is not None and b'"error"' in reply.content:
            reason += f": {_shown(reply)}"
        return NoAnswer(f"{self.url}: {reason}", counts=not no_connection, garbled=garbled)

    def _check(self, reply: httpx.Response) -> None:
        status = reply.status_code
        if status < 300:
            return
        location = reply.headers.get("location")
        what = f"leads to {location}" if location else _shown(reply)
        reason = f"{self.url}: status {status} ({what})"
        try:
            asked_s = float(reply.headers["retry-after"])
            after_s = min(300.0, max(0.0, asked_s))
        except (KeyError, ValueError):
            after_s = 0.0  # absent, or a date, which model servers do not send
        # The request itself may be what breaks the server; a rate limit is not its fault.
        retry = status >= 500 or status in _RETRY
        counts = status not in _NO_FAULT
        raise NoAnswer(reason, status, retry=retry, counts=counts, after_s=after_s)


def _candidates(completion: Completion, owners: set[str]) -> list[Dialect]:
    """The dialects to try, the richest first."""
    if completion.teacher:
        return [Dialect("openai")]
    if "llamacpp" in owners:
        return [Dialect("llama.cpp")]
    openai = [Dialect("openai"), Dialect("openai", ids=False)]
    openai.append(Dialect("openai", ids=False, plain=True))
    return openai if owners else [Dialect("llama.cpp"), *openai]


def _shown(reply: httpx.Response) -> str:
    words = reply.text.split()
    return " ".join(words)[:200] or "no reason"
