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
from draftsmith_core.settings import Sampling
from draftsmith_core.teacher_rows import pack_likeliest
from draftsmith_core.tokenization import Tokenizer, encode_text

_LIST_TIMEOUT_S = 30.0
_TRIAL = AnswerRequest(Key(0, 0, 0), (), seed=1)
# Tokens of a trial answer, and how often a dialect is tried before a garbled reply means that it is
# not understood.
_TRIAL_TOKENS, _TRIALS = 16, 3
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

    kind: Literal["llama.cpp", "openai"]
    ids: bool = True
    plain: bool = False

    def body(self, completion: Completion, request: AnswerRequest) -> dict[str, Any]:
        """Return the JSON to post. Seeds are cut to 31 bits, which all servers take."""
        sampling, most = (
            at_temperature(completion.sampling, request.temperature),
            completion.max_new_tokens,
        )
        body: dict[str, Any] = {
            "model": completion.model,
            "temperature": sampling.temperature,
            "top_p": sampling.top_p,
        }
        body |= {"seed": request.seed & 0x7FFFFFFF, "stream": False}
        body["prompt"] = (
            list(request.prompt_ids)
            if self.ids
            else _text(completion.tokenizer, request.prompt_ids)
        )
        if not self.plain:
            body |= {"top_k": sampling.top_k, "min_p": sampling.min_p, "repetition_penalty": 1.0}
            if completion.ignore_eos:
                body["ignore_eos"] = True
        if self.kind == "llama.cpp":
            # Its own defaults are top-k 40, top-p 0.95, min-p 0.05, and it scales by the
            # temperature last.
            order = ["temperature", "top_k", "top_p", "min_p"]
            body |= {
                "return_tokens": True,
                "samplers": order,
                "repeat_penalty": 1.0,
                "cache_prompt": False,
            }
            return body | {"n_predict": most}
        if self.ids:
            # -1 means "all tokens" in every version of vLLM, 0 only in newer ones.
            body |= {
                "return_token_ids": True,
                "top_k": sampling.top_k or -1,
                "skip_special_tokens": False,
            }
        if completion.teacher:
            body |= {"logprobs": completion.teacher, "return_tokens_as_token_ids": True}
        return body | {"max_tokens": most}

    def answer(
        self, completion: Completion, prompt_ids: Sequence[int], raw: bytes
    ) -> tuple[Answer, int]:
        """Read a reply: the answer, and the tokens of prompt and answer as the server counts them.

        Raise ValueError, TypeError, LookupError or AttributeError if the reply is no completion.
        """
        reply, tokens_from, teacher = json.loads(raw), "target", None
        if self.kind == "llama.cpp":
            ids = list(map(operator.index, reply["tokens"]))
            reason = "length" if reply["stop_type"] == "limit" else "stop"
            spent = reply["tokens_evaluated"] + len(ids)
        else:
            choice, usage = reply["choices"][0], reply.get("usage") or {}
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
        if reason == "stop" and completion.eos_ids and not (ids and ids[-1] in completion.eos_ids):
            ids = [*ids, completion.eos_ids[0]]
        if not ids:
            raise ValueError("no tokens")
        if completion.teacher:
            rows = choice["logprobs"]["top_logprobs"]
            if len(rows) != len(ids):
                raise ValueError(f"log-probabilities of {len(rows)} tokens")
            # By position from "token_id:N". vLLM adds the drawn token to the likeliest.
            best = [
                sorted(row.items(), key=lambda item: -item[1])[: completion.teacher] for row in rows
            ]
            pairs = [
                [(int(name.removeprefix("token_id:")), logprob) for name, logprob in row]
                for row in best
            ]
            teacher = pack_likeliest(pairs, completion.vocabulary)
        return Answer(tuple(ids), reason, tokens_from, teacher), spent


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
    candidates = [whole[len(prompt_ids) :]] if whole[: len(prompt_ids)] == list(prompt_ids) else []
    candidates += [
        list(tokenizer(alone, add_special_tokens=False)["input_ids"])
        for alone in dict.fromkeys([text, text.removeprefix(" ")])
    ]
    for ids in candidates:
        # A server may count the end token, which is not in the text.
        if _text(tokenizer, [*prompt_ids, *ids]).endswith(text) and (
            drawn is None or int(drawn) - len(ids) in (0, 1)
        ):
            return ids, True
    return candidates[0], False


def _text(tokenizer: Tokenizer, ids: Sequence[int]) -> str:
    """Return the text that a server tokenises to `ids`: without the BOS that its tokenizer adds."""
    text = str(
        tokenizer.decode(list(ids), skip_special_tokens=False, clean_up_tokenization_spaces=False)
    )
    bos = str(tokenizer.bos_token or "")
    adds_bos = bool(bos) and encode_text(tokenizer, "a")[:1] == [tokenizer.bos_token_id]
    return text.removeprefix(bos) if adds_bos else text


class Server:
    """A server of the pool. dialect: None until it has answered a trial request. failures: in a
    row.
    """

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
            raise self._failed(error, "/models does not answer") from None

    async def choose_dialect(
        self, client: httpx.AsyncClient, completion: Completion, owners: set[str]
    ) -> None:
        """Find the richest dialect that the server understands, with one short answer each.

        owners: who serves, as /models says; empty if it was not asked. Raise InputError if no
        dialect works or the server cannot draw from the distribution that the options ask for.
        """
        openai = [
            Dialect("openai"),
            Dialect("openai", ids=False),
            Dialect("openai", ids=False, plain=True),
        ]
        llama_cpp = [Dialect("llama.cpp")] if not owners or "llamacpp" in owners else []
        dialects = llama_cpp if owners and llama_cpp else [*llama_cpp, *openai]
        if completion.teacher:
            dialects = openai[:1]
        trial = replace(completion, max_new_tokens=_TRIAL_TOKENS, ignore_eos=False)
        request = replace(_TRIAL, prompt_ids=tuple(encode_text(trial.tokenizer, "The")))
        reason, refused = "", None
        for dialect in [dialect for dialect in dialects for _ in range(_TRIALS)]:
            if dialect == refused:
                continue
            try:
                await self.ask(client, trial, request, dialect)
            except NoAnswer as failure:
                unknown = failure.garbled or not failure.retry or failure.status in (404, 405)
                if not unknown or (failure.status in (401, 403) and dialect.kind == "openai"):
                    raise
                reason, refused = failure.reason, None if failure.garbled else dialect
                continue
            sampling = completion.sampling
            extra = {
                "top_k": sampling.top_k,
                "min_p": sampling.min_p,
                "ignore_eos": completion.ignore_eos,
            }
            if dialect.plain and (given := [key for key, value in extra.items() if value]):
                raise InputError(
                    f"{self.url}: does not take {given[0]}; set it to its neutral value"
                )
            self.dialect = dialect
            return
        if completion.teacher:
            needs = (
                "teacher_top_k: needs vLLM's server, started with --max-logprobs "
                f"{completion.teacher}"
            )
            raise InputError(f"{needs} or more ({reason})")
        raise InputError(f"{reason}: is it a completions server?")

    async def ask(
        self,
        client: httpx.AsyncClient,
        completion: Completion,
        request: AnswerRequest,
        dialect: Dialect,
    ) -> tuple[Answer, int]:
        """Return one answer, checked, and the tokens it cost; raise NoAnswer if there is none."""
        path = "../completion" if dialect.kind == "llama.cpp" else "completions"
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
            answer, tokens = dialect.answer(completion, request.prompt_ids, reply.content)
        except (
            ValueError,
            LookupError,
            TypeError,
            AttributeError,
            RecursionError,
            OverflowError,
        ) as error:
            raise self._failed(error, "answered with no completion", reply) from None
        ids = answer.response_ids
        too_long = (
            answer.tokens_from == "target" and len(ids) > completion.max_new_tokens + 1
        )  # one more for EOS
        if too_long or not all(0 <= token < completion.vocabulary for token in ids):
            reason = (
                f"gave {len(ids)} tokens up to id {max(ids)}, which the target cannot have drawn"
            )
            raise NoAnswer(f"{self.url}: {reason}", retry=False)
        return answer, tokens

    def _failed(
        self, error: Exception, what: str = "", reply: httpx.Response | None = None
    ) -> NoAnswer:
        said = f"{type(error).__name__}: {error}" if str(error) else type(error).__name__
        no_connection = isinstance(error, httpx.ConnectError | httpx.ConnectTimeout)
        garbled = not isinstance(error, httpx.HTTPError | TimeoutError)
        reason = f"{what} ({said[:300]})" if what else said[:300]
        if reply is not None and b'"error"' in reply.content:
            reason += f": {_shown(reply)}"
        return NoAnswer(f"{self.url}: {reason}", counts=not no_connection, garbled=garbled)

    def _check(self, reply: httpx.Response) -> None:
        status = reply.status_code
        if status < 300:
            return
        location = reply.headers.get("location")
        reason = (
            f"{self.url}: status {status} ({f'leads to {location}' if location else _shown(reply)})"
        )
        try:
            after_s = min(300.0, max(0.0, float(reply.headers["retry-after"])))
        except (KeyError, ValueError):
            after_s = 0.0  # absent, or a date, which model servers do not send
        # The request itself may be what breaks the server; a rate limit is not its fault.
        retry, counts = status >= 500 or status in _RETRY, status not in _NO_FAULT
        raise NoAnswer(reason, status, retry=retry, counts=counts, after_s=after_s)


def _shown(reply: httpx.Response) -> str:
    return " ".join(reply.text.split())[:200] or "no reason"
