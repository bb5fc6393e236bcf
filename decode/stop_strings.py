"""Ending a row where its text holds a given string."""

from collections.abc import Callable, Sequence

from transformers import PreTrainedTokenizerBase

# `stop(ids, new)`: how many of the last `new` tokens of a row's output `ids` to keep, None to go on.
Stop = Callable[[Sequence[int], int], int | None]

# A token may be a fragment of a character, and some tokenizers decode a token differently at the beginning of a text.
_MARGIN_TOKENS = 8


def stop_at(tokenizer: PreTrainedTokenizerBase, strings: Sequence[str]) -> Stop:
    """End after the first token that completes any of `strings` in the decoded output (the prompt does not count).

    The token that completes a string is kept whole, as transformers' `stop_strings` does. Raises ValueError for an
    empty string.
    """
    if not strings or any(not text for text in strings):
        raise ValueError("stop: an empty string would end every text at once; give at least one character")
    reach = max(len(text.encode()) for text in strings) + _MARGIN_TOKENS

    def holds(ids: Sequence[int]) -> bool:
        text = tokenizer.decode(list(ids), clean_up_tokenization_spaces=False)
        return any(string in text for string in strings)

    def stop(ids: Sequence[int], new: int) -> int | None:
        known = len(ids) - new
        # One look at the whole block, as most steps complete nothing.
        if not holds(ids[max(known - reach, 0) :]):
            return None
        ends = range(known + 1, len(ids) + 1)
        return next((end - known for end in ends if holds(ids[max(end - reach, 0) : end])), None)

    return stop
