"""How servers with OpenAI's API are asked and what they answer: where they take and give token ids, and where text.

| dialect | server | asked with | tokens |
|---|---|---|---|
| `llama.cpp` | llama-server | POST /completion, prompt as ids | `tokens` |
| `ids` | vLLM, and others that know `return_token_ids` | POST /v1/completions, prompt as ids | `token_ids` |
| `text` | any other | POST /v1/completions, prompt as text | the tokenizer's for the text |

All ask for the same distribution: temperature, then top-k, top-p, min-p, and no penalties. A server that refuses the
keys for that which OpenAI's API does not have is asked without them, as long as they would change nothing (`plain`).
"""

import json
import operator
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Literal
from urllib.parse import urljoin

from distill.engines.protocol import Answer
from draftsmith_core.sampling_options import Sampling
from draftsmith_core.tokenization import Tokenizer, encode_text

Kind = Literal["llama.cpp", "ids", "text"]


class Garbage(Exception):
    """What a server sent is no completion: not JSON, or without the keys of one."""


@dataclass(frozen=True)
class Asked:
    """What every request of a run shares."""

    model: str
    tokenizer: Tokenizer
    sampling: Sampling
    max_new_tokens: int
    eos_ids: tuple[int, ...]
    ignore_eos: bool
    vocabulary: int  # of the tokenizer, which counts it anew each time that it is asked

    def knows(self, ids: Sequence[int]) -> bool:
        """Whether all of them are tokens of the tokenizer."""
        return all(0 <= token < self.vocabulary for token in ids)


@dataclass(frozen=True)
class Dialect:
    """How one kind of server is asked. plain: leave out what OpenAI's own API does not know."""

    kind: Kind
    plain: bool = False

    def url(self, base: str) -> str:
        """The address to post to, for a server whose API is at `base`, which ends with a slash."""
        return urljoin(base, "../completion" if self.kind == "llama.cpp" else "completions")

    def body(self, asked: Asked, prompt_ids: Sequence[int], seed: int) -> dict[str, Any]:
        """The JSON to post. Seeds are cut to 31 bits, which all servers take."""
        sampling = asked.sampling
        count = {"n_predict" if self.kind == "llama.cpp" else "max_tokens": asked.max_new_tokens}
        body = {"model": asked.model, **count, "temperature": sampling.temperature, "top_p": sampling.top_p}
        body |= {"seed": seed & 0x7FFFFFFF, "stream": False}
        body["prompt"] = prompt_text(asked.tokenizer, prompt_ids) if self.kind == "text" else list(prompt_ids)
        if not self.plain:
            body |= {"top_k": sampling.top_k, "min_p": sampling.min_p, "repetition_penalty": 1.0}
            if asked.ignore_eos:
                body["ignore_eos"] = True
        if self.kind == "ids":
            # vLLM's -1 is every version's "all tokens"; 0 only that of the newer ones.
            body |= {"return_token_ids": True, "top_k": sampling.top_k or -1, "skip_special_tokens": False}
        if self.kind == "llama.cpp":
            # Its own defaults are top-k 40, top-p 0.95, min-p 0.05, and it scales by the temperature last.
            order = ["temperature", "top_k", "top_p", "min_p"]
            body |= {"return_tokens": True, "samplers": order, "repeat_penalty": 1.0, "cache_prompt": False}
        return body

    def answer(self, asked: Asked, raw: bytes) -> tuple[Answer, int]:
        """The answer in what a server sent, and the tokens of prompt and answer as it counts them; else Garbage."""
        try:
            reply = json.loads(raw)
            if self.kind == "llama.cpp":
                ids = list(map(operator.index, reply["tokens"]))
                reason = "length" if reply["stop_type"] == "limit" else "stop"
                return self._ended(asked, ids, reason, "target"), reply["tokens_evaluated"] + len(ids)
            choice = reply["choices"][0]
            reason = choice["finish_reason"]
            used = reply.get("usage") or {}
            if self.kind == "ids":
                ids = list(map(operator.index, choice["token_ids"]))
                return self._ended(asked, ids, reason, "target"), int(used.get("total_tokens") or len(ids))
            text = choice["text"]
            if not isinstance(text, str):
                raise TypeError("its text is none")
            ids = asked.tokenizer(text, add_special_tokens=False)["input_ids"]
            drawn, total = used.get("completion_tokens"), int(used.get("total_tokens") or len(ids))
            # The server may count the end token, which is not in the text.
            right = asked.tokenizer.decode(ids) == text and (drawn is None or int(drawn) - len(ids) in (0, 1))
            return self._ended(asked, ids, reason, "text" if right else "text_differs"), total
        except (ValueError, KeyError, TypeError, IndexError, AttributeError, RecursionError, OverflowError) as error:
            raise Garbage(f"answered what is no completion ({type(error).__name__}: {error})"[:200]) from None

    def _ended(self, asked: Asked, ids: list[int], reason: Any, tokens_from: str) -> Answer:
        if reason not in ("stop", "length"):
            raise Garbage(f"ended an answer by {reason!r}")
        if reason == "stop" and asked.eos_ids and not (ids and ids[-1] in asked.eos_ids):
            ids = [*ids, asked.eos_ids[0]]
        if not ids:
            raise Garbage("answered without any token")
        return Answer(tuple(ids), str(reason), tokens_from)


def prompt_text(tokenizer: Tokenizer, ids: Sequence[int]) -> str:
    """The text that a server turns into these tokens: without the BOS that its tokenizer will add again."""
    text = tokenizer.decode(list(ids), skip_special_tokens=False, clean_up_tokenization_spaces=False)
    assert isinstance(text, str)
    begin = str(tokenizer.bos_token or "")
    adds = bool(begin) and encode_text(tokenizer, "a")[:1] == [tokenizer.bos_token_id]
    return text.removeprefix(begin) if adds else text
