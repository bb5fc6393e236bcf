"""What is left out on request: prompts that are nearly those of earlier rows or are held out, and answers that teach
nothing. Every one is counted with its reason.
"""

from collections.abc import Sequence

from distill.config import DistillConfig
from distill.conversations import THINKING
from distill.engines import Answer
from draftsmith_core.prompts import prompt_hash
from draftsmith_core.tokenization import Tokenizer, decode_text

HELD_OUT = "held out by split"
# A repetitive answer: this share of its runs of this many tokens stood earlier in it. Shorter answers cannot be one.
_REPEATED, _RUN, _LEAST = 0.5, 4, 32


def is_held_out(prompt_ids: Sequence[int], split: float) -> bool:
    """Whether a prompt is among those that are not answered, by the hash that training and evaluation know it by."""
    return prompt_hash(prompt_ids) >= split * 2**64


def why_dropped(config: DistillConfig, tokenizer: Tokenizer, answer: Answer) -> str:
    """The reason to leave an answer out of the set, "" for one to keep."""
    ids = list(answer.response_ids)
    if "truncated" in config.drop and answer.finish_reason == "length":
        return "truncated"
    if config.min_response_tokens is not None and len(ids) < config.min_response_tokens:
        return f"{len(ids)} tokens, fewer than min_response_tokens {config.min_response_tokens}"
    if config.max_response_tokens is not None and len(ids) > config.max_response_tokens:
        return f"{len(ids)} tokens, more than max_response_tokens {config.max_response_tokens}"
    if "empty" in config.drop and not decode_text(tokenizer, ids).strip():
        return "empty"
    if config.thinking == "drop" and any(mark in tokenizer.decode(ids) for mark in THINKING):
        return "thinks"
    if "repetitive" in config.drop and _is_repetitive(ids):
        return "repetitive"
    return ""


def _is_repetitive(ids: Sequence[int]) -> bool:
    runs = [tuple(ids[start : start + _RUN]) for start in range(len(ids) - _RUN + 1)]
    return len(ids) >= _LEAST and 1 - len(set(runs)) / len(runs) >= _REPEATED
