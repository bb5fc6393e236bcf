"""All that a process has once, so that a library can leave it as it was."""

import asyncio
import locale
import logging
import multiprocessing
import os
import random
import signal
import sys
import warnings

import datasets
import huggingface_hub
import numpy as np
import torch
import transformers
from huggingface_hub import constants
from huggingface_hub.utils.tqdm import are_progress_bars_disabled

_LIBRARIES = (
    *("root", "transformers", "datasets", "huggingface_hub", "accelerate", "torch", "draftsmith"),
    *("DeepSpeed", "matplotlib", "filelock", "py.warnings"),
)


def global_state() -> dict[str, object]:
    """Return every part of the process's state by name, as values that compare."""
    return _python() | _logging() | _torch() | _libraries()


def changed(before: dict[str, object], besides: str = "nothing") -> dict[str, object]:
    """Return what is another now, but for parts whose names begin so."""
    return {
        name: (before[name], value)
        for name, value in global_state().items()
        if value != before[name] and not name.startswith(besides)
    }


def _python() -> dict[str, object]:
    umask = os.umask(0)
    os.umask(umask)
    policy = asyncio.events._event_loop_policy  # type: ignore[attr-defined]  # asking creates it
    return {
        "environment": dict(os.environ),
        "working directory": os.getcwd(),
        "umask": umask,
        "sys.path": list(sys.path),
        "sys.meta_path": [repr(finder) for finder in sys.meta_path],
        "sys.argv": list(sys.argv),
        "excepthook": sys.excepthook,
        "standard streams": (sys.stdin, sys.stdout, sys.stderr),
        "recursion limit": sys.getrecursionlimit(),
        "start method": multiprocessing.get_start_method(allow_none=True),
        "locale": locale.setlocale(locale.LC_ALL),
        "asyncio policy": policy,
        "signals": {number: signal.getsignal(number) for number in signal.valid_signals()},
        "timers": signal.getitimer(signal.ITIMER_VIRTUAL),
        "warnings": list(warnings.filters),
        "random": random.getstate(),
        "numpy generator": [str(part) for part in np.random.get_state()],  # noqa: NPY002
        "numpy errors": np.geterr(),
    }


def _logging() -> dict[str, object]:
    loggers = [logging.getLogger(None if name == "root" else name) for name in _LIBRARIES]
    return {
        f"logger {logger.name}": (logger.level, logger.propagate, list(logger.handlers))
        for logger in loggers
    } | {"logging disabled": logging.root.manager.disable}


def _torch() -> dict[str, object]:
    backends = torch.backends
    return {
        "torch generator": torch.get_rng_state().tolist(),
        "torch dtype": torch.get_default_dtype(),
        "torch device": torch.get_default_device(),
        "torch threads": torch.get_num_threads(),
        "grad mode": (torch.is_grad_enabled(), torch.is_inference_mode_enabled()),
        "autocast": torch.is_autocast_enabled("cpu"),
        "deterministic": (
            torch.are_deterministic_algorithms_enabled(),
            torch.is_deterministic_algorithms_warn_only_enabled(),
        ),
        "matmul precision": torch.get_float32_matmul_precision(),
        "sdp": (
            backends.cuda.cudnn_sdp_enabled(),
            backends.cuda.flash_sdp_enabled(),
            backends.cuda.mem_efficient_sdp_enabled(),
            backends.cuda.math_sdp_enabled(),
        ),
        "cudnn": (
            backends.cudnn.enabled,
            backends.cudnn.benchmark,
            backends.cudnn.deterministic,
            backends.cudnn.allow_tf32,
            backends.cuda.matmul.allow_tf32,
        ),
        "flush denormal": torch.get_num_interop_threads(),
        "default process group": torch.distributed.is_initialized(),
    }


def _libraries() -> dict[str, object]:
    return {
        "transformers bars": transformers.logging.is_progress_bar_enabled(),
        "transformers verbosity": transformers.logging.get_verbosity(),
        "datasets bars": datasets.utils.logging.is_progress_bar_enabled(),
        "datasets verbosity": datasets.logging.get_verbosity(),
        "datasets caching": datasets.is_caching_enabled(),
        "hub bars": are_progress_bars_disabled(),
        "hub verbosity": huggingface_hub.logging.get_verbosity(),
        "hub offline": constants.HF_HUB_OFFLINE,
    }
