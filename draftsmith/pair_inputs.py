"""What Python callers hand to a pair: which types are taken for what, and one line for the others."""

import os
from collections.abc import Mapping, Sequence
from numbers import Integral, Real

from draftsmith_core.errors import InputError


def check_integers(**numbers: object) -> None:
    """InputError, naming the option, where one of these is no whole number."""
    for key, number in numbers.items():
        if not is_integer(number):
            raise InputError(f"{key}: expected a whole number, got {number!r}")


def check_flags(**flags: object) -> None:
    """InputError, naming the option, where one of these is neither True nor False: the text "no" would count as yes."""
    for key, flag in flags.items():
        if not isinstance(flag, bool):
            raise InputError(f"{key}: expected True or False, got {flag!r}")


def check_loading(tokenizer: object, compiler: object, **flags: object) -> None:
    """InputError for options of `load_pair` that are of another type; its own checks say the rest."""
    check_flags(**flags)
    if not isinstance(compiler, bool | str):
        raise InputError(f"compile: expected True, False or the name of a torch.compile backend, got {compiler!r}")
    if tokenizer is not None and not hasattr(tokenizer, "get_vocab"):
        raise InputError(f"tokenizer: expected a tokenizer that is loaded already, or None, got {tokenizer!r}")


def texts(key: str, given: object) -> list[str]:
    """A text, several or None as a list; InputError, naming the option, for anything else: a set has no order."""
    several = [given] if isinstance(given, str) else () if given is None else given
    if not isinstance(several, Sequence) or not all(isinstance(text, str) for text in several):
        raise InputError(f"{key}: expected a text or a list of texts, got {given!r}")
    return list(several)


def check_sampling_numbers(**numbers: object) -> None:
    """InputError, naming the option, where one of these is neither None nor a number, which top_k has to be whole."""
    for key, number in numbers.items():
        kind = Integral if key == "top_k" else Real
        if number is not None and (isinstance(number, bool) or not isinstance(number, kind)):
            raise InputError(f"{key}: expected a number or None, got {number!r}")


def source_text(key: str, name: object) -> str:
    """A directory or hub name as text."""
    if not isinstance(name, str | os.PathLike):
        raise InputError(f"{key}: expected a local directory or hub name, got {name!r}")
    return os.fspath(name)


def is_one_prompt(prompts: object) -> bool:
    """Whether this is a single prompt (a text, a chat, token ids) and no list of them; InputError for neither."""
    if isinstance(prompts, str):
        return True
    shape = getattr(prompts, "shape", None)
    if shape:
        return len(shape) == 1
    if not isinstance(prompts, Sequence) or isinstance(prompts, bytes):
        raise InputError(
            f"prompts: expected a text, a chat, token ids or a list of those, found {type(prompts).__name__}"
        )
    first = prompts[0] if prompts else None
    return is_integer(first) or isinstance(first, Mapping)


def is_integer(item: object) -> bool:
    """Whether it can be a token id; numpy's integers can, True cannot."""
    return isinstance(item, Integral) and not isinstance(item, bool)
