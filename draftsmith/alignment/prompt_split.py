"""The prompts of `align`, divided into a part to train on and a part that is held out."""

from itertools import islice

from draftsmith.core.asked_hash import asked_in_chat, group_ranks
from draftsmith.core.errors import InputError
from draftsmith.core.prompt_rows import asked_of, iterate_records, parse_record
from draftsmith.core.prompts import PromptSet

Split = dict[str, list[dict[str, object]]]


def hold_out(source: str, read: PromptSet, most: int) -> Split:
    """Divide the rows of `source`, without the skipped ones, into `train` and `heldout`.

    Hold out `most` prompts, and never more than a fifth, because the rest trains the draft, by the
    hashes of what they ask, whatever the order of the rows, the template and its date. Rows that
    ask the same, and a chat with its own earlier turns, count once and stay on one side.
    """
    keys = []
    for prompt in read.prompts:
        keys.append(prompt.hashes)
        if prompt.chat is not None:
            chat = prompt.chat
            keys[-1] += [asked_in_chat(chat.first(turns)) for turns in chat.answered()]
    ranks = group_ranks(keys)
    different = max(ranks) + 1
    if different == 1:
        raise InputError(
            f"{source}: its prompts ask the same, or are turns of one chat, so none can be held "
            "out; add prompts, or name others with --id"
        )
    count = max(1, min(most, different // 5))
    skipped = {skip.row for skip in read.skipped}
    used = iter(zip(read.prompts, ranks, strict=True))
    split: Split = {"train": [], "heldout": []}
    for row in islice(iterate_records(source), read.rows):
        if row.number in skipped:
            continue
        prompt, rank = next(used)
        asked = asked_of(parse_record(row))
        side = "heldout" if rank < count else "train"
        split[side].append({"id": prompt.id, "domain": prompt.domain, **asked})
    return split
