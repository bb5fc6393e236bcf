"""What is left out on request: prompts that are nearly those of earlier rows or are held out, and answers that teach
nothing. Every one is counted with its reason.
"""

from collections.abc import Callable, Iterable, Sequence
from functools import cache, partial
from typing import Any

import numpy as np
import numpy.typing as npt

from distill.config import DistillConfig
from distill.conversations import THINKING
from distill.decontaminate import runs_of_words
from distill.engines import Answer
from draftsmith_core.errors import InputError
from draftsmith_core.packages import require_package
from draftsmith_core.prompt_rows import Record, parse_record
from draftsmith_core.prompts import prompt_hash
from draftsmith_core.tokenization import Tokenizer, decode_text

HELD_OUT = "held out by split"
# A repetitive answer: this share of its runs of this many tokens stood earlier in it. Shorter answers cannot be one.
_REPEATED, _RUN, _LEAST = 0.5, 4, 32
# What near-duplicates are told by: runs of words, and random permutations, whose estimate of a similarity of 0.8 has a
# standard deviation of 0.035.
_WORDS, _PERMUTATIONS = 5, 128
# An answer is in the wrong language where another has this probability; a few words or figures show none.
_SURE, _UNKNOWN = 0.8, ("und", "zxx")


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
    if config.languages:
        found, _ = _languages().classify(decode_text(tokenizer, ids))
        if found not in (*config.languages, *_UNKNOWN):
            return f"in language {found}, not {' or '.join(config.languages)}"
    return ""


def check_languages(codes: Sequence[str]) -> None:
    """InputError for a language that is not known here, or without the package that knows them."""
    if codes:
        require_package("py3langid", "languages")
        known = set(_languages().labels) - set(_UNKNOWN)
        if unknown := [code for code in codes if code not in known]:
            raise InputError(f"languages: {unknown[0]!r} is none of {', '.join(sorted(known))}")


@cache
def _languages() -> Any:
    """Naive Bayes over byte n-grams (Lui and Baldwin 2012, langid.py); its model comes with the package."""
    from py3langid.langid import MODEL_FILE, LanguageIdentifier

    return LanguageIdentifier.from_model_file(MODEL_FILE, norm_probs=True, min_confidence=_SURE)


def _is_repetitive(ids: Sequence[int]) -> bool:
    runs = [tuple(ids[start : start + _RUN]) for start in range(len(ids) - _RUN + 1)]
    return len(ids) >= _LEAST and 1 - len(set(runs)) / len(runs) >= _REPEATED


class NearDuplicates:
    """The prompts that were read, by MinHash (Broder 1997) of their words in locality-sensitive buckets.

    Every process is shown every row in the order of the source, so that all agree on what is left out. About 1 kB a
    prompt stays in memory.
    """

    def __init__(self, similarity: float, source: str) -> None:
        from datasketch import MinHash, MinHashLSH

        self.similarity, self.source = similarity, source
        self._index = MinHashLSH(threshold=similarity, num_perm=_PERMUTATIONS)
        self._values: dict[int, npt.NDArray[Any]] = {}
        like = MinHash(num_perm=_PERMUTATIONS, hashfunc=_low_bits)
        options: dict[str, Any] = {"permutations": like.permutations, "scheme": like.scheme, "hashfunc": _low_bits}
        self._new: Callable[[], Any] = partial(MinHash, num_perm=_PERMUTATIONS, **options)

    def among(self, records: Iterable[Record]) -> dict[int, int]:
        """Of these rows, which come next in the source, those that are nearly an earlier one: row, earlier row."""
        found = {}
        for record in records:
            try:
                runs = set(runs_of_words(parse_record(record, self.source), _WORDS))
            except InputError:
                continue  # whoever reads the row says so
            if not runs:
                continue
            sketch = self._new()
            sketch.update_batch(runs)
            values = sketch.hashvalues
            like = [
                number
                for number in self._index.query(sketch)
                if np.mean(self._values[number] == values) >= self.similarity
            ]
            if like:
                found[record.number] = min(like)
            else:
                self._index.insert(record.number, sketch)
                self._values[record.number] = values
        return found


def _low_bits(run: int) -> int:
    return run & 0xFFFFFFFF
