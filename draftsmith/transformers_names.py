"""Names of transformers' `from_pretrained` and `generate`: what each does here, in one table."""

import functools
import inspect
import os
from collections.abc import Callable, Collection, Mapping
from inspect import Parameter
from itertools import chain
from numbers import Integral
from types import NoneType
from typing import Any, ParamSpec, TypeVar, get_args

from draftsmith.core.errors import InputError, nearest
from draftsmith.core.io import read_words
from draftsmith.core.option_names import nearest_option
from draftsmith.core.settings import is_off, off_values

P = ParamSpec("P")
R = TypeVar("R")
Options = dict[str, Any]


def _device(value: object) -> object:
    if isinstance(value, Mapping):
        raise TypeError("device_map: write device='cuda:0', or target_device_map=... for a map")
    return f"cuda:{value}" if isinstance(value, int) else str(value)


def _dtype(value: object) -> object:
    return str(value).removeprefix("torch.")


def _without_padding(prompts: Any, mask: Any) -> Any:
    """Return token ids, one prompt or a list, without those that an attention mask hides."""
    rows = _listed(prompts)
    masks = _listed(mask)
    if rows and isinstance(rows[0], Integral):
        return _seen(rows, masks)
    if len(rows) != len(masks):
        raise _no_mask()
    return [_seen(_listed(row), _listed(of_row)) for row, of_row in zip(rows, masks, strict=True)]


def _listed(values: Any) -> list[Any]:
    values = values.tolist() if hasattr(values, "tolist") else values
    return list(values) if isinstance(values, list | tuple) else []


def _seen(ids: list[Any], mask: list[Any]) -> list[Any]:
    seen = [place for place, value in enumerate(mask) if value]
    run = ids[seen[0] : seen[-1] + 1] if seen else []
    flags = all(value in (0, 1) for value in mask)
    if not mask or len(mask) != len(ids) or len(run) != len(seen) or not flags:
        raise _no_mask()
    return run


def _no_mask() -> InputError:
    return InputError(
        "attention_mask: expected a 0 or 1 for each token id, with zeros at the ends of a row only"
    )


# What our option gets of theirs, where that is not the value itself.
_CONVERTED: dict[str, Callable[[object], object]] = {
    "device_map": _device,
    "torch_dtype": _dtype,
    "dtype": _dtype,
}
_WORDS = read_words(__file__)
_SAMPLING = ("temperature", "top_k", "top_p", "min_p")
_PROMPTS = "prompts"
_PLAIN = {bool, str, NoneType}
_POSITIONAL = (Parameter.POSITIONAL_ONLY, Parameter.POSITIONAL_OR_KEYWORD)


def in_our_names(where: str, given: Options, known: Collection[str]) -> Options:
    """Return options in our names.

    Raise TypeError, beginning with `where`, for an option that is not `known` and not taken.
    """
    ours: Options = {}
    mask = given.get("attention_mask")
    for name, value in given.items():
        our = _WORDS["taken"].get(name, name)
        if our is None:
            continue
        if our not in known:
            if not _asks_nothing(name, value):
                _refuse(where, name, known)
            continue
        if our in ours:
            raise TypeError(f"{where}: {our} is given twice, under two names; keep one")
        value = _CONVERTED[name](value) if name in _CONVERTED else value
        if our == _PROMPTS and mask is not None:
            value = _without_padding(value, mask)
        ours[our] = os.fspath(value) if isinstance(value, os.PathLike) else value
    return ours


def _asks_nothing(name: str, value: object) -> bool:
    """Whether transformers has this option, and this value is the one that changes nothing."""
    if value is not None and value is not False:
        return is_off(name, value)
    from transformers import GenerationConfig  # takes a second: only for such an option

    return name in _WORDS["instead"] or hasattr(GenerationConfig(), name) or is_off(name, value)


def _refuse(where: str, name: str, known: Collection[str]) -> None:
    fix = _WORDS["instead"].get(name)
    if fix is None and name in off_values():
        fix = _WORDS["instead"]["logits_processor"]
    if fix is None:
        near = nearest_option(name, list(known))
        fix = f"did you mean {near}?" if near else nearest(name, known)
    raise TypeError(f"{where}: no option {name!r}; {fix}")


def _of_config(config: Any) -> Options:
    """Return what a generation config sets, by transformers' names."""
    if not isinstance(config, Mapping) and not hasattr(config, "to_diff_dict"):
        raise InputError(
            f"generation_config: expected a GenerationConfig or a dict, got {config!r}"
        )
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
    place it gives them itself. Raise InputError where a text stands for a bool, or another type
    for a text.
    """

    def decorate(function: Callable[P, R]) -> Callable[P, R]:
        name = function.__name__
        taken = [inspect.signature(each).parameters.values() for each in (function, *inner)]
        positional = [option.name for option in taken[0] if option.kind in _POSITIONAL]
        known = [option for option in positional if option != "self"]
        plain = {}
        for option in chain.from_iterable(taken):
            if option.kind is Parameter.KEYWORD_ONLY:
                known.append(option.name)
                kinds = get_args(option.annotation) or (option.annotation,)
                if _PLAIN.issuperset(kinds):
                    plain[option.name] = kinds

        @functools.wraps(function)
        def call(*args: P.args, **options: P.kwargs) -> R:
            given: Options = dict(options)
            config = given.pop("generation_config", None)
            mask = given.get("attention_mask")
            ours = in_our_names(name, given, known)
            by_place = []
            for argument, value in zip(positional, args, strict=False):
                if argument in ours:
                    raise TypeError(f"{name}: {argument} is given twice, once by place; keep one")
                hides = argument == _PROMPTS and mask is not None
                by_place.append(_without_padding(value, mask) if hides else value)
            if config is not None:
                ours = in_our_names(f"{name}: generation_config", _of_config(config), known) | ours
            for option, kinds in plain.items():
                if option in ours and not isinstance(ours[option], kinds):
                    kind = " or ".join(kind.__name__ for kind in kinds if kind is not NoneType)
                    raise InputError(f"{option}: expected a {kind}, got {ours[option]!r}")
            changed: Callable[..., R] = function
            return changed(*by_place, *args[len(by_place) :], **ours)

        return call

    return decorate
