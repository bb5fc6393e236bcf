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
import re
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Literal
from urllib.parse import urljoin

import httpx2

from draftsmith.core.errors import InputError
from draftsmith.core.io import JsonObject
from draftsmith.core.ranks import say
from draftsmith.core.settings import Sampling
from draftsmith.core.teacher_rows import TeacherRows, pack_likeliest, unpack
from draftsmith.core.tokenization import Tokenizer, encode_text, text_with_specials
from draftsmith.distill.engines import Answer, AnswerRequest, Key
from draftsmith.distill.engines.replies import said
from draftsmith.distill.engines.state_writer import WITH_ANSWER, taken
from draftsmith.distill.teacher_measures import LEAST_NATS, entropies

_LIST_TIMEOUT_S = 30.0
# Tokens of a trial answer, and how often a dialect is tried before a garbled reply means that it is
# not understood.
_TRIAL_TOKENS = 16
_TRIALS = 3
# Nearly greedy: of probabilities after these options, one token has all.
_SHARP = Sampling(temperature=0.01, top_k=1, top_p=0.01)
# Statuses below 500 after which the same request may succeed: on this server later, or on another
# one.
_NO_FAULT = (*range(300, 400), 402, 404, 405, 409, 410, 425, 429, 503)
_RETRY = (408, *_NO_FAULT)
# What a reply of any other form raises where it is read.
_UNREADABLE = (
    ValueError,
    LookupError,
    TypeError,
    AttributeError,
    RecursionError,
    OverflowError,
)
_NOT_RAW = (
    "its log-probabilities are not the target's own at temperature 1; start vLLM with "
    "--logprobs-mode raw_logprobs, and without a draft"
)


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


@dataclass(frozen=True)
class Completion:
    """What all requests of a run share. vocabulary: tokens of the tokenizer. teacher: length of the
    teacher rows, 0 for no teacher rows. states: whether vLLM writes hidden states. ends_at_once:
    ask for the end of an answer alone.
    """

    model: str
    tokenizer: Tokenizer
    sampling: Sampling
    max_new_tokens: int
    eos_ids: tuple[int, ...]
    ignore_eos: bool
    vocabulary: int
    teacher: int = 0
    states: bool = False
    ends_at_once: bool = False


@dataclass(frozen=True)
class Dialect:
    """How one server is asked. ids: the prompt goes out, and the answer comes back, as token
    ids. counts_end: `usage` counts the end token, as vLLM, SGLang, llama.cpp and transformers do.
    """

    api: Literal["llama.cpp", "openai"]
    ids: bool = True
    plain: bool = False
    counts_end: bool = True

    def body(self, completion: Completion, request: AnswerRequest) -> JsonObject:
        """Return the JSON to post. Seeds are cut to 31 bits, which all servers take."""
        sampling = request.sampling
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
        if not self.plain:
            body["skip_special_tokens"] = False
        if self.ids:
            # -1 means "all tokens" in every version of vLLM, 0 only in newer ones.
            body |= {"return_token_ids": True, "top_k": sampling.top_k or -1}
        if completion.ends_at_once:
            body["logit_bias"] = {str(token): 100 for token in completion.eos_ids}
        if completion.states:
            body["kv_transfer_params"] = WITH_ANSWER
        if completion.teacher:
            body |= {"logprobs": completion.teacher, "return_tokens_as_token_ids": True}
        return body | {"max_tokens": request.max_new_tokens or completion.max_new_tokens}

    def answer(self, completion: Completion, prompt_ids: Sequence[int], raw: bytes) -> "Answered":
        """Read a reply.

        Raise ValueError, TypeError, LookupError or AttributeError if the reply is no completion,
        and InputError if its log-probabilities are not the target's own.
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
                # Servers cut an end from the text, and may show it if it is a special token.
                special = completion.tokenizer.all_special_ids
                ends = [token for token in completion.eos_ids if token in special]
                ids, same = encode_answer(
                    completion.tokenizer,
                    prompt_ids,
                    choice["text"],
                    drawn=usage.get("completion_tokens"),
                    ends=ends if reason == "stop" and self.counts_end else None,
                )
                tokens_from = "text" if same else "text_differs"
            spent = int(usage.get("total_tokens") or len(ids))
        if reason not in ("stop", "length"):
            raise ValueError(f"finish_reason {reason!r}")
        eos_ids = completion.eos_ids
        if reason == "stop" and eos_ids and not (ids and ids[-1] in eos_ids):
            ids = [*ids, eos_ids[0]]
        if not ids:
            raise ValueError("no tokens")
        teacher = None
        if completion.teacher:
            rows = choice["logprobs"]["top_logprobs"]
            if len(rows) != len(ids):
                raise ValueError(f"log-probabilities of {len(rows)} tokens")
            entries = min(completion.teacher, completion.vocabulary)
            likeliest = [_likeliest(row, entries) for row in rows]
            teacher = pack_likeliest(likeliest, completion.vocabulary)
        answer = Answer(tuple(ids), reason, tokens_from, teacher)
        transfer = reply.get("kv_transfer_params") or {}
        return Answered(answer, spent, reply.get("model"), transfer.get("hidden_states_path"))


@dataclass(frozen=True)
class Answered:
    """An answer, its tokens and those of the prompt as the server counts them, and the model that
    the server names. states: its file of hidden states.
    """

    answer: Answer
    spent: int
    model: object = None
    states: str | None = None


def _likeliest(row: dict[str, float], k: int) -> list[tuple[int, float]]:
    """The k likeliest tokens of a position. vLLM adds the drawn token to them.

    Raise InputError for fewer tokens.
    """
    if len(row) < k:
        raise InputError(f"gives {len(row)} log-probabilities at a position instead of {k}")
    pairs = [(int(name.removeprefix("token_id:")), logprob) for name, logprob in row.items()]
    pairs.sort(key=lambda pair: -pair[1])
    return pairs[:k]


def encode_answer(
    tokenizer: Tokenizer,
    prompt_ids: Sequence[int],
    text: str,
    drawn: int | None,
    ends: Sequence[int] | None = None,
) -> tuple[list[int], bool]:
    """Return the token ids of an answer that came as text, and whether they can be the tokens of
    the target.

    drawn: number of tokens, as the server counts them. ends: the end tokens, if it counts one that
    need not be in the text.

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
        unseen = ends is not None and not (ids and ids[-1] in ends)
        fits = drawn is None or int(drawn) == len(ids) + unseen
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
    row. key: what its texts are shown without. teacher: of the trial request, if it asks for it.
    """

    def __init__(self, url: str, timeout_s: float, key: str = "") -> None:
        self.url = url
        self.base = url.rstrip("/") + "/"
        self.timeout_s = timeout_s
        self.dialect: Dialect | None = None
        self.teacher: TeacherRows | None = None
        self.failures = 0
        self._key = key
        self._other_model = False

    async def models(self, client: httpx2.AsyncClient) -> dict[str, JsonObject]:
        """Return what /models lists, by name; empty if the server has no such list."""
        try:
            async with asyncio.timeout(min(_LIST_TIMEOUT_S, self.timeout_s)):
                reply = await client.get(f"{self.base}models")
            if reply.status_code in (404, 405):
                return {}
            self._check(reply)
            return {str(entry["id"]): entry for entry in reply.json()["data"]}
        except (httpx2.HTTPError, TimeoutError, *_UNREADABLE) as error:
            raise self._failed(error, "/models does not answer") from None

    async def choose_dialect(
        self, client: httpx2.AsyncClient, completion: Completion, owners: set[str]
    ) -> Dialect:
        """Find the richest dialect that the server understands, with one short answer each.

        owners: who serves, as /models says; empty if it was not asked. Raise InputError if no
        dialect works or the server cannot draw from the distribution that the options ask for.
        """
        ids = tuple(encode_text(completion.tokenizer, "The"))
        sampling = _SHARP if completion.teacher else completion.sampling
        request = AnswerRequest(Key(0, 0, 0), ids, seed=1, sampling=sampling)
        trial = replace(completion, max_new_tokens=_TRIAL_TOKENS, ignore_eos=False)
        reason = ""
        for dialect in _candidates(completion, owners):
            for _ in range(_TRIALS):
                try:
                    answered = await self.ask(client, trial, request, dialect)
                    if answered.states is not None:
                        taken(Path(answered.states))
                    self._measure(answered.answer)
                except NoAnswer as failure:
                    unknown = failure.garbled or not failure.retry or failure.status in (404, 405)
                    if not unknown or (failure.status in (401, 403) and dialect.api == "openai"):
                        raise
                    reason = failure.reason
                    if not failure.garbled:
                        break
                else:
                    self._check_plain(dialect, completion)
                    if not dialect.ids and completion.eos_ids:
                        dialect = await self._with_end(client, trial, request, dialect)
                    self.dialect = dialect
                    return dialect
        if completion.teacher:
            needs = (
                "teacher_top_k: needs vLLM's server, started with --max-logprobs "
                f"{completion.teacher}"
            )
            raise InputError(f"{needs} or more ({reason})")
        raise InputError(f"{reason}: is it a completions server?")

    def _measure(self, answer: Answer) -> None:
        """Keep the teacher rows of a trial. Raise InputError if they give one token all."""
        if answer.teacher is None:
            return
        self.teacher = unpack(answer.teacher)
        nats = float(entropies(self.teacher).mean())
        if not nats >= LEAST_NATS:
            raise InputError(f"{self.url}: {_NOT_RAW} (they have {nats:.4f} nats on the mean)")

    async def _with_end(
        self,
        client: httpx2.AsyncClient,
        trial: Completion,
        request: AnswerRequest,
        dialect: Dialect,
    ) -> Dialect:
        """Return the dialect with what `usage` counts, from an answer that ends at once."""
        at_once = replace(trial, ends_at_once=True)
        try:
            answer = (await self.ask(client, at_once, request, dialect)).answer
        except NoAnswer:  # a server may refuse the bias
            return dialect
        ended = answer.response_ids == trial.eos_ids[:1]
        counts = not ended or answer.tokens_from == "text"
        return replace(dialect, counts_end=counts)

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
        client: httpx2.AsyncClient,
        completion: Completion,
        request: AnswerRequest,
        dialect: Dialect,
    ) -> Answered:
        """Return one answer, checked; raise NoAnswer if there is none."""
        path = "../completion" if dialect.api == "llama.cpp" else "completions"
        try:
            # httpx bounds the wait for the next bytes only.
            async with asyncio.timeout(self.timeout_s):
                body = dialect.body(completion, request)
                reply = await client.post(urljoin(self.base, path), json=body)
        except (httpx2.HTTPError, TimeoutError) as error:
            raise self._failed(error) from None
        self._check(reply)
        try:
            answered = dialect.answer(completion, request.prompt_ids, reply.content)
        except InputError as error:
            raise InputError(f"{self.url}: {error}") from None
        except _UNREADABLE as error:
            raise self._failed(error, "answered with no completion", reply) from None
        ids = answered.answer.response_ids
        most = (request.max_new_tokens or completion.max_new_tokens) + 1  # one more for EOS
        too_long = answered.answer.tokens_from == "target" and len(ids) > most
        if too_long or not all(0 <= token < completion.vocabulary for token in ids):
            reason = (
                f"gave {len(ids)} tokens up to id {max(ids)}, which the target cannot have drawn"
            )
            raise NoAnswer(f"{self.url}: {reason}", retry=False)
        self._check_model(answered.model, completion.model)
        return answered

    def _check_model(self, model: object, asked: str) -> None:
        """Warn once if another model than the one asked for has answered."""
        if model not in (None, asked) and not self._other_model:
            self._other_model = True
            other = self.said(str(model))
            say(f"draftsmith: {self.url}: its replies name the model {other}, not {asked}")

    def said(self, text: str) -> str:
        """Return a text of the server to print or keep."""
        return said(text, self._key)

    def _failed(
        self, error: Exception, what: str = "", reply: httpx2.Response | None = None
    ) -> NoAnswer:
        name = type(error).__name__
        text = self.said(f"{name}: {error}" if str(error) else name)
        no_connection = isinstance(error, httpx2.ConnectError | httpx2.ConnectTimeout)
        garbled = not isinstance(error, httpx2.HTTPError | TimeoutError)
        reason = f"{what} ({text})" if what else text
        if reply is not None and b'"error"' in reply.content:
            reason += f": {self._shown(reply)}"
        return NoAnswer(f"{self.url}: {reason}", counts=not no_connection, garbled=garbled)

    def _check(self, reply: httpx2.Response) -> None:
        status = reply.status_code
        if status < 300:
            return
        location, *_ = re.split("[?#]", reply.headers.get("location", ""))
        what = self.said(f"leads to {location}") if location else self._shown(reply)
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

    def _shown(self, reply: httpx2.Response) -> str:
        return self.said(reply.text) or "no reason"


def _candidates(completion: Completion, owners: set[str]) -> list[Dialect]:
    """The dialects to try, the richest first."""
    if completion.teacher or completion.states:
        return [Dialect("openai")]
    if "llamacpp" in owners:
        return [Dialect("llama.cpp")]
    openai = [Dialect("openai"), Dialect("openai", ids=False)]
    openai.append(Dialect("openai", ids=False, plain=True))
    return openai if owners else [Dialect("llama.cpp"), *openai]
