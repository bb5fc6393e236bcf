"""What is left out on request: prompts of the evaluation, and answers that teach nothing."""

import hashlib
import re
from collections import Counter
from collections.abc import Iterator, Sequence

from draftsmith.core.chats import THINKING
from draftsmith.core.distilled_sets import repeats
from draftsmith.core.errors import InputError
from draftsmith.core.io import JsonObject, hash_json
from draftsmith.core.prompt_rows import iterate_rows, parse_named
from draftsmith.core.row_formats import given_keys
from draftsmith.core.token_rows import ID_KEYS
from draftsmith.core.tokenization import Tokenizer, decode_text
from draftsmith.distill.config import DistillConfig
from draftsmith.distill.engines import Answer

# Words in a run that a prompt must not share with the evaluation, as for GPT-3 (Brown et al. 2020,
# appendix C).
WORDS = 13
# A run in more rows of a suite is its form ("Answer the following question ..."), not its content.
_FORM = 10
# Scripts written without spaces: every character is a word.
_UNSPACED = "\u3040-\u30ff\u3400-\u4dbf\u4e00-\u9fff\uf900-\ufaff"
_WORD = re.compile(rf"[{_UNSPACED}]|[^\W{_UNSPACED}]+")


def why_dropped(config: DistillConfig, tokenizer: Tokenizer, answer: Answer) -> str:
    """Return the reason to leave an answer out of the set, "" to keep it."""
    ids = list(answer.response_ids)
    if "truncated" in config.drop and answer.finish_reason == "length":
        return "truncated"
    if "empty" in config.drop and not decode_text(tokenizer, ids).strip():
        return "empty"
    if config.thinking == "drop" and any(mark in tokenizer.decode(ids) for mark in THINKING):
        return "thinks"
    if "repetitive" in config.drop and repeats(ids):
        return "repetitive"
    return ""


class Suites:
    """Hashed runs of words of the evaluation's prompt sets, with the name of the set."""

    def __init__(self, named: Sequence[str]) -> None:
        """named: prompt sources, `NAME=P` or P. Raise InputError for a source that cannot be
        read.
        """
        self._names: dict[int, str] = {}
        for name, source in parse_named("--decontaminate", named).items():
            counts: Counter[int] = Counter()
            for row in iterate_rows(source):
                counts.update(set(runs_of_words(row)))
            self._names |= {run: name for run, count in counts.items() if count <= _FORM}

    @property
    def digest(self) -> str:
        return hash_json(sorted(self._names))[:16]

    def shared_with(self, row: JsonObject) -> str | None:
        """Return the name of a set that the row shares a run with."""
        return next((self._names[run] for run in runs_of_words(row) if run in self._names), None)


def runs_of_words(row: JsonObject) -> Iterator[int]:
    """Yield a 64-bit hash of each run of WORDS words of a row's users or text; a shorter text is
    one run. Raise InputError for a row of token ids.

    Hashes are of the text before any chat template, whose words all prompts would share.
    """
    key = next(iter(given_keys(row)), "")
    texts = []
    if key == "messages":
        for turn in row["messages"]:
            if isinstance(turn, dict) and turn.get("role") == "user":
                texts.append(str(turn.get("content")))
    elif key in ID_KEYS:
        raise InputError(
            f"--decontaminate: compares texts, and a row has ids in {key!r}; leave it out"
        )
    elif key:
        texts.append(str(row[key]))
    for text in texts:
        words = _WORD.findall(text.lower())
        starts = range(max(1, len(words) - WORDS + 1)) if words else ()
        for start in starts:
            run = " ".join(words[start : start + WORDS])
            digest = hashlib.blake2b(run.encode("utf-8", "replace"), digest_size=8)
            yield int.from_bytes(digest.digest(), "big")
