"""What servers are, found out before they are asked for a set: their model, their tokens, whether they sample."""

import asyncio
import sys
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import httpx

from distill.config import DistillConfig
from distill.engines.dialects import Asked, Dialect
from distill.engines.endpoint import Endpoint, Refusal, Trouble
from distill.engines.protocol import Answer
from draftsmith_core.errors import InputError
from draftsmith_core.sampling_options import Sampling
from draftsmith_core.tokenization import Tokenizer, decode_text, encode_text

# Tokens of a trial answer, seeds it is drawn with, and the least temperature it is drawn at: a target that samples
# hardly ever gives all these seeds one answer.
_TOKENS, _SEEDS, _TEMPERATURE = 16, (1, 2, 3, 4), 1.5
_TEXT = "The"
# Seconds that a server has to list its models.
_LIST_S = 30.0


@dataclass(frozen=True)
class Found:
    """What every request shares, how each server that answered is asked, and the context that all of them have."""

    asked: Asked
    dialects: dict[str, Dialect]
    context_length: int | None


async def look(
    endpoints: Sequence[Endpoint],
    config: DistillConfig,
    tokenizer: Tokenizer,
    sampling: Sampling,
    eos_ids: tuple[int, ...],
) -> Found:
    """Try every server. InputError when none answers, one does not serve the target or does not sample.

    A server that does not answer is said, and tried again later.
    """
    lists = await asyncio.gather(*(_models(endpoint) for endpoint in endpoints), return_exceptions=True)
    listed = {}
    for endpoint, found in zip(endpoints, lists, strict=True):
        if isinstance(found, Refusal) and found.status in (401, 403):
            raise InputError(f"{found.reason}; put the right key into {config.api_key_env}")
        if isinstance(found, Trouble):
            sys.stderr.write(f"draftsmith distill: {found.reason}; it is tried again later\n")
        elif isinstance(found, BaseException):
            raise found
        else:
            listed[endpoint.url] = found
    if not listed:
        raise InputError(f"endpoint: none answers ({lists[0]}); start a server, or check the address")
    model = config.served_model or _only_model(listed)
    asked = Asked(model, tokenizer, sampling, config.max_new_tokens, eos_ids, config.ignore_eos, len(tokenizer))
    dialects = {}
    for endpoint in endpoints:
        if endpoint.url in listed:
            try:
                dialects[endpoint.url] = await _dialect(endpoint, asked, listed[endpoint.url])
            except Trouble as trouble:
                sys.stderr.write(f"draftsmith distill: {trouble.reason}; it is tried again later\n")
    if not dialects:
        raise InputError(f"endpoint: none gives an answer; {endpoints[0].url}: {endpoints[0].last_reason}")
    for url, dialect in dialects.items():
        if dialect.kind == "text":
            sys.stderr.write(
                f"draftsmith distill: {url}: takes and gives text, not token ids; its answers are tokenised again\n"
            )
    lengths = [length for models in listed.values() if (length := _context(models, model)) is not None]
    return Found(asked, dialects, min(lengths, default=None))


async def wake(endpoint: Endpoint, config: DistillConfig, asked: Asked) -> Dialect:
    """How to ask a server that did not answer at the start; Trouble while it does not."""
    models = await _models(endpoint)
    if config.served_model is None and asked.model not in models:
        raise InputError(f"{endpoint.url}: serves {', '.join(models)}, and not {asked.model} as the others do")
    return await _dialect(endpoint, asked, models)


async def _models(endpoint: Endpoint) -> dict[str, dict[str, Any]]:
    """What a server lists, by name; empty where it lists nothing."""
    try:
        async with asyncio.timeout(_LIST_S), endpoint.client() as client:
            reply = await client.get(f"{endpoint.base}models", timeout=_LIST_S)
        if reply.status_code in (401, 403):
            raise Refusal(f"{endpoint.url}: status {reply.status_code}", reply.status_code)
        if reply.status_code in (404, 405):
            return {}
        if where := reply.headers.get("location"):
            raise _not_there(endpoint, f"leads to {where}; name that address")
        if reply.status_code >= 400:
            raise _not_there(endpoint, f"status {reply.status_code}")
        return {str(each["id"]): each for each in reply.json()["data"]}
    except (httpx.HTTPError, TimeoutError) as error:
        raise _not_there(endpoint, f"does not answer ({str(error) or type(error).__name__})") from None
    except (ValueError, KeyError, TypeError, RecursionError):
        raise _not_there(endpoint, "/models is not a list of models, as OpenAI's API has it") from None


def _not_there(endpoint: Endpoint, reason: str) -> Trouble:
    endpoint.failed(reason)
    return Trouble(f"{endpoint.url}: {reason}", delivered=False)


def _only_model(listed: dict[str, dict[str, Any]]) -> str:
    names: dict[str, str] = {}
    for url, models in listed.items():
        if len(models) != 1:
            said = f"serves {', '.join(models)}" if models else "does not say what it serves"
            raise InputError(f"{url}: {said}; name the target as --served_model NAME")
        names[url] = next(iter(models))
    (first, model), *others = names.items()
    for url, name in others:
        if name != model:
            raise InputError(f"{url}: serves {name}, and {first} {model}; ask servers of one model, or --served_model")
    return model


def _context(models: dict[str, dict[str, Any]], model: str) -> int | None:
    """The context of a model as vLLM (`max_model_len`) or llama-server (`meta.n_ctx`) list it."""
    entry = models.get(model, {})
    meta = entry.get("meta")
    meta = meta if isinstance(meta, dict) else {}
    length = entry.get("max_model_len") or meta.get("n_ctx") or meta.get("n_ctx_train")
    return length if isinstance(length, int) else None


async def _dialect(endpoint: Endpoint, asked: Asked, models: dict[str, dict[str, Any]]) -> Dialect:
    """The richest dialect that the server understands, tried; InputError for a server that must not be used."""
    owners = {str(each.get("owned_by")) for each in models.values()}
    dialects = (
        [Dialect("llama.cpp")] if "llamacpp" in owners else [Dialect("ids"), Dialect("text"), Dialect("text", True)]
    )
    trial = replace(asked, max_new_tokens=_TOKENS, ignore_eos=False)
    refused: list[str] = []
    for dialect in dialects:
        try:
            await _draw(endpoint, dialect, trial, 1)
        except Refusal as refusal:
            if refusal.status in (401, 403):
                raise InputError(refusal.reason) from None
            refused.append(refusal.reason)
            continue
        except Trouble as trouble:
            if "no completion" not in trouble.reason:
                raise
            refused.append(trouble.reason)
            endpoint.failures = 0
            continue
        sampling = asked.sampling
        if dialect.plain and (sampling.top_k or sampling.min_p or asked.ignore_eos):
            option = "top_k" if sampling.top_k else "min_p" if sampling.min_p else "ignore_eos"
            raise InputError(f"{endpoint.url}: does not take {option}; set it to its neutral value")
        try:
            await _check_answers(endpoint, dialect, trial)
        except Refusal as refusal:
            raise InputError(f"{refusal.reason}: refuses to draw as is asked for") from None
        return dialect
    raise InputError(f"{refused[-1]}: no way of asking is understood; is it a server of completions?")


async def _draw(endpoint: Endpoint, dialect: Dialect, asked: Asked, seed: int) -> Answer:
    ids = encode_text(asked.tokenizer, _TEXT)
    answer, _ = await endpoint.post(dialect, asked, dialect.body(asked, ids, seed))
    return answer


async def _check_answers(endpoint: Endpoint, dialect: Dialect, asked: Asked) -> None:
    """InputError for tokens that the target does not have, and for a server that gives every seed one answer."""
    if asked.sampling.greedy:
        asked = replace(asked, sampling=Sampling(temperature=0))
    else:
        asked = replace(asked, sampling=Sampling(temperature=max(_TEMPERATURE, asked.sampling.temperature)))
    answers = [await _draw(endpoint, dialect, asked, seed) for seed in _SEEDS]
    if not all(asked.knows(answer.response_ids) for answer in answers):
        raise InputError(
            f"{endpoint.url}: gives tokens beyond the {asked.vocabulary} of --target's tokenizer; serve that target"
        )
    if not asked.sampling.greedy and len({answer.response_ids for answer in answers}) == 1:
        text = decode_text(asked.tokenizer, list(answers[0].response_ids))
        raise InputError(
            f"{endpoint.url}: does not sample: {len(_SEEDS)} seeds at temperature {asked.sampling.temperature:g} gave "
            f"one answer ({text[:40]!r}); switch sampling on there, or ask for --temperature 0"
        )
