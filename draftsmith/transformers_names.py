"""Names of transformers' `from_pretrained` and `generate`: what each does here, in one table."""

import functools
import inspect
from collections.abc import Callable, Collection, Mapping
from inspect import Parameter
from itertools import chain
from typing import Any, ParamSpec, TypeVar

from draftsmith.core.errors import nearest
from draftsmith.core.io import read_words
from draftsmith.core.option_names import nearest_option

P = ParamSpec("P")
R = TypeVar("R")
Options = dict[str, Any]


def _device(value: object, given: Options) -> object:
    if isinstance(value, Mapping):
        raise TypeError("device_map: a model is on one device here; write device='cuda:0'")
    return f"cuda:{value}" if isinstance(value, int) else str(value)


def _dtype(value: object, given: Options) -> object:
    return str(value).removeprefix("torch.")


def _ids(value: object, given: Options) -> object:
    """Return token ids as lists, without those that the attention mask hides."""
    ids = _as_list(value)
    mask = given.get("attention_mask")
    if mask is None or not ids:
        return ids
    if not isinstance(ids[0], list):
        return _seen(ids, _as_list(mask))
    return [_seen(row, of_row) for row, of_row in zip(ids, _as_list(mask), strict=True)]


def _as_list(ids: Any) -> list[Any]:
    return list(ids.tolist() if hasattr(ids, "tolist") else ids)


def _seen(ids: list[int], mask: list[int]) -> list[int]:
    return [token for token, seen in zip(ids, mask, strict=True) if seen]


# What our option gets of theirs, where that is not the value itself.
_CONVERTED: dict[str, Callable[[object, Options], object]] = {
    "device_map": _device,
    "torch_dtype": _dtype,
    "dtype": _dtype,
    "input_ids": _ids,
    "inputs": _ids,
}
_WORDS = read_words(__file__)
_SAMPLING = ("temperature", "top_k", "top_p", "min_p")
_POSITIONAL = (Parameter.POSITIONAL_ONLY, Parameter.POSITIONAL_OR_KEYWORD)


def in_our_names(where: str, given: Options, known: Collection[str]) -> Options:
    """Return options in our names.

    Raise TypeError, beginning with `where`, for an option that is not `known` and not taken.
    """
    ours: Options = {}
    for name, value in given.items():
        if name in _WORDS["instead"]:
            raise TypeError(f"{where}: no option {name!r}; {_WORDS['instead'][name]}")
        our = _WORDS["taken"].get(name, name)
        if our is None:
            continue
        if our not in known:
            near = nearest_option(name, list(known))
            fix = f"did you mean {near}?" if near else nearest(name, known)
            raise TypeError(f"{where}: no option {name!r}; {fix}")
        if our in ours:
            raise TypeError(f"{where}: {our} is given twice, under two names; keep one")
        ours[our] = _CONVERTED[name](value, given) if name in _CONVERTED else value
    return ours


def _of_config(config: Any) -> Options:
    """Return what a generation config sets, by transformers' names."""
    values: Options = dict(config if isinstance(config, Mapping) else config.to_diff_dict())
    values.setdefault("do_sample", False)
    left_out: list[str] = [*_WORDS["of_the_model"]]
    if not values["do_sample"]:  # then transformers does not read these
        left_out += _SAMPLING
    # None and False ask for nothing; a model's own config has many of them.
    for name, value in values.items():
        if name != "do_sample" and (value is None or value is False):
            left_out.append(name)
    return {name: value for name, value in values.items() if name not in left_out}


def takes_their_names(*inner: Callable[..., object]) -> Callable[[Callable[P, R]], Callable[P, R]]:
    """Decorate a function so that it takes options by transformers' names too.

    inner: functions that the decorated one passes the rest of its options to. What they take by
    place it gives them itself.
    """

    def decorate(function: Callable[P, R]) -> Callable[P, R]:
        name = function.__name__
        taken = [inspect.signature(each).parameters.values() for each in (function, *inner)]
        positional = [option.name for option in taken[0] if option.kind in _POSITIONAL]
        known = [option for option in positional if option != "self"]
        for option in chain.from_iterable(taken):
            if option.kind is Parameter.KEYWORD_ONLY:
                known.append(option.name)

        @functools.wraps(function)
        def call(*args: P.args, **options: P.kwargs) -> R:
            given: Options = dict(options)
            config = given.pop("generation_config", None)
            ours = in_our_names(name, given, known)
            for argument in positional[: len(args)]:
                if argument in ours:
                    raise TypeError(f"{name}: {argument} is given twice, once by place; keep one")
            if config is not None:
                ours = in_our_names(f"{name}: generation_config", _of_config(config), known) | ours
            return function(*args, **ours)

        return call

    return decorate
