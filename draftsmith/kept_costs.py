"""Costs of a pair's steps, measured when they are first needed and kept for this machine.

They lie in the user's cache directory, by pair, dtype, threads, machine and kind of sampling. While
a process runs they stay as they are, so that the same seed gives the same text.
"""

import os
import platform
import threading
from collections.abc import Sequence
from dataclasses import asdict
from functools import cache
from pathlib import Path

import torch
from transformers import PreTrainedModel

from draftsmith.core import __version__
from draftsmith.core.errors import InputError
from draftsmith.core.io import hash_json, read_json, write_json_atomic
from draftsmith.core.models import dtype_name, fingerprint
from draftsmith.core.ranks import say
from draftsmith.core.sampling import Sampling
from draftsmith.decode import Proposer
from draftsmith.decode.propose.choosing import Costs, trees_fit
from draftsmith.decode.propose.lookup_first import LookupFirst
from draftsmith.decode.step_costs import Curve, StepCosts, measure
from draftsmith.drafts.load import Draft, draft_fingerprint

# Two measurements at once would time each other.
_MEASURING = threading.Lock()


def kept_costs(target: PreTrainedModel, drafts: Sequence[Draft], proposer: Proposer) -> Costs:
    """Return the costs of a pair's steps by sampling; read or measured once a process."""
    beside = proposer.draft if isinstance(proposer, LookupFirst) else proposer
    draft = beside if drafts else None

    @cache
    def measured(greedy: bool) -> StepCosts:
        # Hashing reads all weights.
        pair = [
            fingerprint(target),
            *map(draft_fingerprint, drafts),
            proposer.name,
            dtype_name(target),
            str(target.device),
            torch.get_num_threads(),
            platform.node(),
            torch.__version__,
            __version__,
            greedy,
        ]
        home = os.environ.get("XDG_CACHE_HOME") or f"{os.environ.get('HOME', os.devnull)}/.cache"
        file = Path(home) / "draftsmith/step-costs" / f"{hash_json(pair)[:16]}.json"
        if found := _read(file):
            return found
        say("auto: measuring what steps cost; later runs have it")
        trees = trees_fit(target, beside)
        sampling = Sampling(temperature=0.0 if greedy else 1.0)
        costs = measure(target, draft, sampling, trees=trees)
        try:
            file.parent.mkdir(parents=True, exist_ok=True)
            write_json_atomic(file, asdict(costs))
        except OSError as error:
            say(f"auto: {file}: cannot be kept ({error})")
        return costs

    def costs_at(sampling: Sampling) -> StepCosts:
        with _MEASURING:
            return measured(sampling.greedy)

    return costs_at


def _read(file: Path) -> StepCosts | None:
    try:
        found = read_json(file, "costs of steps", ("target", "first", "more"))
        return StepCosts(_curve(found["target"]), float(found["first"]), _curve(found["more"]))
    except (InputError, KeyError, TypeError, ValueError):
        return None


def _curve(record: dict[str, float]) -> Curve:
    return {int(size): float(record[size]) for size in ("1", *record)}
