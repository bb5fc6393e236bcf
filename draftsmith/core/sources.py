"""Names of models, without torch: a directory here, or a name on the hub; whether the hub can be
asked.
"""

import contextlib
import re
from collections.abc import Sequence
from difflib import get_close_matches
from functools import lru_cache
from pathlib import Path
from threading import Thread
from time import monotonic

from huggingface_hub import constants

from draftsmith.core.errors import InputError, is_installed
from draftsmith.core.io import read_json

# Files of a directory that a message names.
_NAMED = 4
# Seconds that the hub has to answer, and that its answer holds.
_HUB_ANSWERS_S = 4
_HOLDS_S = 300
_GGUF = (
    "llama.cpp runs GGUF, and transformers does not: serve it with `llama-server -m FILE`; "
    "`draftsmith distill --engine openai --endpoint http://localhost:8080/v1` distils from it, "
    "and --target names the unquantised model"
)

UNREACHABLE = "the hub cannot be reached"

# One of these is in every model's directory, and one of those in every tokenizer's.
_WEIGHTS = ("*.safetensors", "*.bin", "*.pt", "*.pth")
_TOKENIZER = ("tokenizer*", "vocab*", "*.model", "*.tiktoken", "tekken.json")


def check_source(name: str) -> None:
    """Raise InputError unless `name` is a directory that can hold a model, or can be a name on the
    hub.
    """
    path = Path(name)
    on_hub = may_be_on_hub(name)
    is_model = (path / "config.json").exists()
    reason = ""
    if name.lower().endswith("gguf") and not is_model and (path.exists() or on_hub):
        reason = _GGUF
    elif path.is_file():
        reason = "is a file; name the directory that it lies in"
    elif not path.is_dir() and not on_hub:
        reason = f"no such directory{similar(path)} (a hub name is written owner/name)"
    elif not path.is_dir() and hub_lacks(name, "model"):
        reason = (
            f"no such directory here{similar(path)}, none in the hub's cache, and {UNREACHABLE}"
        )
    elif (path / "adapter_config.json").exists():
        reason = _about_adapter(path)
    elif path.is_dir() and not is_model:
        if not _has(path, _WEIGHTS) and not has_tokenizer(path):
            reason = no_model(path)
    if reason:
        raise InputError(f"{name}: {reason}")
    # transformers ignores a generation config that it cannot read, and with it the tokens that end
    # an answer.
    for file in ("config.json", "generation_config.json"):
        if (path / file).exists():
            read_json(path / file, "a model's config")


def may_be_on_hub(name: str) -> bool:
    """Whether the hub takes `name` for that of a repository."""
    written = re.fullmatch(r"\w[\w.-]*(/\w[\w.-]*)?", name, re.ASCII) is not None
    return written and not re.search(r"--|\.\.|[.-](/|$)|\.git$", name) and len(name) <= 96


def similar(path: Path) -> str:
    """Suggest the neighbour of a path that does not exist; empty if none has a name like it."""
    beside = [entry.name for entry in path.parent.glob("*")]
    near = get_close_matches(path.name, beside, 1)
    return f"; did you mean {path.parent / near[0]}?" if near else ""


def _about_adapter(directory: Path) -> str:
    """Say what to do about a LoRA adapter in a directory; empty if it is only the config that a
    merge left over.
    """
    is_adapter = _has(directory, ("adapter_model.*",))
    weights = {path.name for pattern in _WEIGHTS for path in directory.glob(pattern)}
    if any(not name.startswith("adapter_model") for name in weights):
        if not is_adapter and not is_installed("peft"):
            return ""
        return "holds a model and a LoRA adapter, which peft would add to it; move adapter_* away"
    return "holds a LoRA adapter; merge it into its base model (peft's merge_and_unload)"


def has_tokenizer(directory: Path) -> bool:
    """Whether a directory holds files of a tokenizer."""
    return _has(directory, _TOKENIZER)


def _has(directory: Path, patterns: Sequence[str]) -> bool:
    return any(any(directory.glob(pattern)) for pattern in patterns)


def no_model(directory: Path) -> str:
    """Say what a directory lacks of a model; empty if it has a config and weights."""
    names = sorted(path.name for path in directory.glob("[!.]*"))
    lacks = [] if "config.json" in names else ["no config.json"]
    if not _has(directory, _WEIGHTS):
        lacks.append("no weights")
    if not lacks:
        return ""
    holds = ", ".join([*names[:_NAMED], *["..."] * (len(names) > _NAMED)])
    what = f"{' and '.join(lacks)}, only {holds}" if names else "it is empty"
    if _has(directory, ("*.gguf",)):
        return _GGUF
    return f"holds no model ({what}); a model has config.json, *.safetensors and tokenizer.json"


def hub_lacks(name: str, repo_type: str) -> bool:
    """Whether a repository of the hub is neither in the cache nor can be asked for."""
    from huggingface_hub.file_download import repo_folder_name  # 0.2 s, which --help need not take

    folder = repo_folder_name(repo_id=name, repo_type=repo_type)
    return not (Path(constants.HF_HUB_CACHE) / folder).is_dir() and not hub_is_reachable()


def hub_is_reachable() -> bool:
    """Whether the hub can be asked. Its client would retry for a minute before saying that it
    cannot.
    """
    return not constants.HF_HUB_OFFLINE and _answers(constants.ENDPOINT, monotonic() // _HOLDS_S)


@lru_cache(maxsize=1)
def _answers(url: str, period: float) -> bool:
    """Ask once in a period. The lookup of a host has no time limit of its own, so a thread asks."""
    from huggingface_hub import get_session

    answers = []

    def ask() -> None:
        with contextlib.suppress(Exception):  # httpx and the hub's client have a dozen classes
            answers.append(get_session().head(url, timeout=_HUB_ANSWERS_S))

    asking = Thread(target=ask, daemon=True)
    asking.start()
    asking.join(_HUB_ANSWERS_S)
    return bool(answers)


def is_hub_name(name: str) -> bool:
    """Whether `name` reads as `owner/name` on the hub and is not a path that exists here."""
    return "/" in name and may_be_on_hub(name) and not Path(name).exists()
