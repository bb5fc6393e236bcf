"""Which prompts are one: intervals and counts are over groups of prompts, not over rows.

Prompts that ask the same, or nearly, are accepted alike, so a second one says next to nothing about
others. `figures.TERMS` states the rule. Legend: P prompts, W bins of tokens.
"""

from collections.abc import Sequence

import numpy as np

from draftsmith.core.asked_hash import Groups
from draftsmith.core.prompts import Prompt

# Two prompts are one group if at most so many tokens are changed, added or left out. A preamble
# that prompts share does not make them one, because the tokens that differ are counted.
DIFFER = 4
# And at most this share of what the user says, so that short questions stay apart.
DIFFER_SHARE = 0.25
# Of a chat, tokens of the template are not the user's; a token is about so many characters.
_CHARACTERS = 4
# Tokens are counted in so many bins to find the prompts to compare.
_BINS = 256


def groups_of(prompts: Sequence[Prompt]) -> list[int]:
    """Number the group of each prompt, from 0 in the order of first prompts. Two prompts that are
    alike a third one are of one group.
    """
    found = Groups([prompt.hashes for prompt in prompts])
    apart = [index for index in range(len(prompts)) if found.first(index) == index]
    apart.sort(key=lambda index: len(prompts[index].ids))
    lengths = [len(prompts[index].ids) for index in apart]
    most_P = np.array([_most_differing(prompts[index]) for index in apart])
    bins_PW = np.zeros((len(apart), _BINS), np.int32)
    for row, index in enumerate(apart):
        ids = np.array(prompts[index].ids, np.int64)
        bins_PW[row] = np.bincount(ids % _BINS, minlength=_BINS)
    for row, index in enumerate(apart):
        longest = lengths[row] + int(most_P[row])
        longer = slice(row + 1, int(np.searchsorted(lengths, longest, side="right")))
        added_P = np.maximum(bins_PW[longer] - bins_PW[row], 0).sum(1)
        least_P = np.minimum(most_P[longer], most_P[row])
        for near in np.flatnonzero(added_P <= least_P):
            other = apart[row + 1 + near]
            both = (prompts[index].ids, prompts[other].ids)
            if found.first(index) != found.first(other) and _within(*both, int(least_P[near])):
                found.join(index, other)
    return found.numbers()


def _most_differing(prompt: Prompt) -> int:
    """How many tokens may differ in a prompt that is of one group with this one."""
    said = len(prompt.ids)
    if prompt.chat is not None:
        turns = [turn for turn in prompt.chat.messages if turn["role"] == "user"]
        said = sum(len(turn["content"]) for turn in turns) // _CHARACTERS
    return min(DIFFER, int(DIFFER_SHARE * said))


def _within(one: Sequence[int], other: Sequence[int], most: int) -> bool:
    """Whether one prompt becomes another by changing, adding or leaving out at most `most`
    tokens.
    """

    def rest(at: int, there: int, left: int) -> bool:
        while at < len(one) and there < len(other) and one[at] == other[there]:
            at += 1
            there += 1
        if max(len(one) - at, len(other) - there) <= left:
            return True
        steps = ((at + 1, there + 1), (at + 1, there), (at, there + 1))
        return left > 0 and any(rest(*step, left - 1) for step in steps)

    return rest(0, 0, most)
