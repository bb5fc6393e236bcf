"""Ending a row where its text holds a given string."""

from collections.abc import Callable, Sequence

from transformers import PreTrainedTokenizerBase

# `stop(ids, new)`: how many of the last `new` tokens of a row's output `ids` to keep, None to go on.
StopCondition = Callable[[Sequence[int], int], int | None]

# A token may be a fragment of a character, and some tokenizers decode a token differently at the beginning of a text,
# so a few more tokens are decoded than the longest string can have.
_MARGIN_TOKENS = 8


class StopStrings:
    """Ends a row after the first token that completes any of `strings` in the decoded output (not in the prompt).

    The token that completes a string is kept whole, as transformers' `stop_strings` does. Raises ValueError for an
    empty string.
    """

    def __init__(self, tokenizer: PreTrainedTokenizerBase, strings: Sequence[str]) -> None:
        if isinstance(strings, str) or not strings or not all(strings):
            raise ValueError(f"stop: expected a list of strings, none of them empty, got {strings!r}")
        self._tokenizer, self._strings = tokenizer, tuple(strings)
        self._reach = max(len(text.encode()) for text in strings) + _MARGIN_TOKENS

    def __call__(self, ids: Sequence[int], new: int) -> int | None:
        """How many of the last `new` tokens of `ids` to keep; None when no string is complete."""
        known = len(ids) - new
        # One look at the whole block first, because most steps complete nothing.
        if not self._complete(ids[max(known - self._reach, 0) :]):
            return None
        ends = range(known + 1, len(ids) + 1)
        return next((end - known for end in ends if self._complete(ids[max(end - self._reach, 0) : end])), None)

    def _complete(self, ids: Sequence[int]) -> bool:
        text = self._tokenizer.decode(list(ids), clean_up_tokenization_spaces=False)
        return any(string in text for string in self._strings)
