"""The errors that draftsmith raises on purpose, and the one message for an optional package that is
missing.
"""

import difflib
import importlib.util
import logging
import re
from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import contextmanager
from functools import cache, partial
from typing import Any, Self

# No scheme is longer; without a bound every character of a long word begins a search.
_URL = re.compile(
    r"(\w[\w.+-]{0,30}://)(?:[^\s/?]*@)?([^\s?'\"]*)(?:\?[^\s'\"]*?(?=(?::(?:\d+:)?)?(?:[\s'\"]|$)))?"
)

# All but tab and line break.
_CONTROLS = re.compile(r"[\x00-\x08\x0b-\x1f\x7f-\x9f]")
# As torch and the system say it.
_RAN_OUT = re.compile("out of memory|(can't|cannot) allocate memory", re.IGNORECASE)
# Characters of a message.
_LONGEST = 1200


def without_secrets(value: Any) -> Any:
    """A text, or the texts in lists and dictionaries, without the passwords and queries
    (signatures) of URLs.
    """
    return change_texts(value, partial(_URL.sub, r"\1\2"))


def change_texts(value: Any, change: Callable[[str], str]) -> Any:
    """A text, or the texts in lists and dictionaries, each changed."""
    if isinstance(value, dict):
        return {key: change_texts(item, change) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [change_texts(item, change) for item in value]
    return change(value) if isinstance(value, str) else value


def shown(text: str) -> str:
    """Return a text without the characters that control a terminal: what models, rows and servers
    write must not.
    """
    return _CONTROLS.sub("", text)


def printable(text: str) -> str:
    """Return a message as it may be printed: cut, without secrets, `shown`."""
    if len(text) > _LONGEST:
        text = f"{text[: _LONGEST // 2]} ... {text[-_LONGEST // 2 :]}"
    return shown(without_secrets(text))


@cache
def warn_once(text: str) -> None:
    """Warn, the first time that this is to be said."""
    logging.getLogger("draftsmith").warning(text)


class DraftsmithError(Exception):
    """Base of the family. One line (RequirementError: one a requirement), for the person who
    started the run.
    """

    def __init__(self, text: str) -> None:
        super().__init__(printable(text))


class InputError(DraftsmithError, ValueError):
    """Bad input or usage: the message names the file, line or key and says what to do. Exit code
    2.
    """


class OptionError(InputError, TypeError):
    """A function was called with a keyword that it does not have."""


class ChangedError(InputError):
    """A directory holds what other options made."""


class LauncherError(InputError):
    """The launcher's variables are wrong, or its processes do not meet."""


class RequirementError(DraftsmithError):
    """The run finished and misses a requirement. `unmet` has one line per missed requirement. Exit
    code 3.
    """

    def __init__(self, unmet: Sequence[str]) -> None:
        super().__init__("\n".join(unmet))
        self.unmet = tuple(unmet)

    def __reduce__(self) -> tuple[type[Self], tuple[Sequence[str]]]:
        return type(self), (self.unmet,)


class RunError(DraftsmithError, RuntimeError):
    """The run could not finish although its input was good (a full disk, a lost process). Exit code
    1.
    """


def one_line(error: BaseException) -> str:
    """Return an error's message on one line, or its class name if the message is empty."""
    words = str(error).split()
    return " ".join(words) or type(error).__name__


@contextmanager
def at(where: str) -> Iterator[None]:
    """Let an InputError in the block begin with where its fault is."""
    try:
        yield
    except InputError as error:
        raise type(error)(f"{where}: {error}") from None


def fault(error: Exception) -> str:
    """What is wrong, without what to do."""
    return first_line(error).partition("; ")[0]


def first_line(error: BaseException) -> str:
    """Return the first line of an error's message, or its class name if the message is empty."""
    lines = str(error).strip().splitlines()
    return lines[0] if lines else type(error).__name__


def counted(count: int, noun: str) -> str:
    """A count with its noun: 1 row, 2 rows."""
    return f"{count} {noun}{'s' * (count != 1)}"


def nearest(word: str, known: Collection[str], otherwise: str = "use one of") -> str:
    """Suggest the known word nearest to an unknown one, or list all of them after `otherwise`."""
    near = difflib.get_close_matches(word, known, 1)
    if near:
        return f"did you mean {near[0]}?"
    return f"{otherwise} {', '.join(known)}"


def check_keywords(given: Collection[str], known: Sequence[str], function: str) -> None:
    """Raise OptionError for the first keyword that `function` does not have."""
    for key in given:
        if key not in known:
            near = nearest_option(key, known)
            fix = f"did you mean {near}?" if near else f"help({function}) lists them"
            raise OptionError(f"{key}: no option of {function}; {fix}")


def nearest_option(key: str, known: Sequence[str], dashes: str = "") -> str | None:
    """Return the known dotted keys nearest to an unknown one, each after `dashes`, in words; None
    if none is near.
    """
    return " or ".join(f"{dashes}{name}" for name in _near(key, known)) or None


def _near(key: str, known: Sequence[str]) -> list[str]:
    # `lrr` means `optim.lr`: the part behind the dot is what people remember.
    last = _last(key).lower()
    if same := [name for name in known if _last(name) == last]:
        return difflib.get_close_matches(key, same, n=1) if "." in key else same
    # Comparing takes time by the square of the length.
    names = [_last(name) for name in known]
    near = difflib.get_close_matches(last[:100], names, n=1, cutoff=0.7)
    if near:
        return [name for name in known if _last(name) == near[0]]
    return difflib.get_close_matches(key[:100], known, n=1, cutoff=0.7)


def _last(key: str) -> str:
    return key.rpartition(".")[2]


# Import name -> extra, as in `pip install -e '.[EXTRA]'` in a checkout.
EXTRAS = {name: name for name in ("deepspeed", "gguf", "ray", "tensorboard", "vllm", "wandb")}
EXTRAS["bitsandbytes"] = "bnb"


def ran_out(error: BaseException) -> bool:
    """Whether the memory of the machine or of a device is used up."""
    return isinstance(error, MemoryError) or bool(_RAN_OUT.search(str(error)))


def is_installed(package: str) -> bool:
    """Whether a package can be imported; it is not imported for that."""
    return importlib.util.find_spec(package) is not None


def require_package(package: str, asked_by: str, instead: str = "") -> None:
    """InputError unless `package` is installed: one line that begins with `asked_by` and names the
    extra.

    asked_by: the option or file that needs it, such as "--quantize nf4". instead: what to do
    without it, if anything.
    """
    if not is_installed(package):
        extra = EXTRAS.get(package)
        install = f"-e '.[{extra}]'" if extra else package
        more = f", or {instead}" if instead else ""
        raise InputError(
            f"{asked_by}: needs {package}, which is not installed; pip install {install}{more}"
        )
