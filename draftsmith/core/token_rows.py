"""Rows of token ids, as preparing tools write them: `input_ids` with `loss_mask` or `labels`, or
`prompt_ids` with `response_ids`.

Ids are taken as they are. A token is trained where the mask is 1, or its label is not -100.
"""

from itertools import groupby

from draftsmith.core.chats import Exchange
from draftsmith.core.errors import InputError
from draftsmith.core.io import JsonObject

ID_KEYS = ("input_ids", "prompt_ids")
_NOT_TRAINED = -100


def answers_in_ids(row: JsonObject, vocabulary: int) -> list[Exchange]:
    """Return each run of trained tokens behind all tokens before it.

    vocabulary: number of token ids. Raise InputError for a broken row.
    """
    if row.get("input_ids") is None:
        prompt = _token_ids(row, "prompt_ids", vocabulary)
        return [Exchange(prompt, _token_ids(row, "response_ids", vocabulary))]
    ids = _token_ids(row, "input_ids", vocabulary)
    answers = []
    stop = 0
    for is_trained, run in groupby(_trained(row, ids)):
        start = stop
        stop += len(list(run))
        if is_trained:
            answers.append(Exchange(ids[:start], ids[start:stop]))
    if not answers:
        raise InputError("key 'input_ids': no token is trained")
    return answers


def prompt_in_ids(row: JsonObject, vocabulary: int) -> list[int]:
    """Return the tokens before the last answer; all tokens of a row without a mask."""
    if row.get("input_ids") is None:
        return _token_ids(row, "prompt_ids", vocabulary)
    if row.get("loss_mask") is None and row.get("labels") is None:
        return _token_ids(row, "input_ids", vocabulary)
    prompt = answers_in_ids(row, vocabulary)[-1].prompt_ids
    if not prompt:
        raise InputError("key 'input_ids': no token stands before the trained ones")
    return prompt


def _trained(row: JsonObject, ids: list[int]) -> list[bool]:
    key = "labels" if row.get("loss_mask") is None else "loss_mask"
    marks = row.get(key)
    if marks is None:
        raise InputError("key 'input_ids': needs 'loss_mask' or 'labels' beside it")
    if not isinstance(marks, list) or len(marks) != len(ids):
        raise InputError(f"key '{key}': must be a list as long as 'input_ids'")
    if key == "loss_mask":
        return [mark == 1 for mark in marks]
    trained = [label != _NOT_TRAINED for label in marks]
    for token, label in zip(ids, marks, strict=True):
        if label not in (token, _NOT_TRAINED):
            raise InputError("key 'labels': must repeat 'input_ids' or be -100, not shifted")
    return trained


def _token_ids(row: JsonObject, key: str, vocabulary: int) -> list[int]:
    ids = row.get(key)
    if not isinstance(ids, list) or not all(type(token) is int for token in ids):
        raise InputError(f"key '{key}': must be a list of token ids")
    if not all(0 <= token < vocabulary for token in ids):
        raise InputError(
            f"key '{key}': holds a token that the tokenizer, with {vocabulary}, does not have"
        )
    return ids
