"""Optional packages: which extra of draftsmith installs each, and the one message when it is missing."""

import importlib.util

from draftsmith_core.errors import InputError

# Import name -> extra, as in `pip install 'draftsmith[EXTRA]'`.
EXTRAS = {
    "bitsandbytes": "bnb",
    "deepspeed": "deepspeed",
    "gguf": "gguf",
    "httpx": "serve",
    "peft": "peft",
    "ray": "ray",
    "tensorboard": "tensorboard",
    "vllm": "vllm",
    "wandb": "wandb",
}


def is_installed(package: str) -> bool:
    """Whether a package can be imported; it is not imported for that."""
    return importlib.util.find_spec(package) is not None


def require_package(package: str, asked_by: str, instead: str = "") -> None:
    """InputError unless `package` is installed: one line that begins with `asked_by` and names the extra.

    asked_by: the option or file that needs it, such as "--quantize nf4". instead: what to do without it, if anything.
    """
    if not is_installed(package):
        extra = EXTRAS.get(package)
        install = f"'draftsmith[{extra}]'" if extra else package
        more = f", or {instead}" if instead else ""
        raise InputError(f"{asked_by}: needs {package}, which is not installed; pip install {install}{more}")
