"""Costs of a pair's steps, measured when they are first needed and kept for this machine.

They lie in the user's cache directory, by pair, dtype, threads, machine and kind of sampling. While
a process runs they stay as they are, so that the same seed gives the same text.
"""

import os
import platform
from collections.abc import Sequence
from dataclasses import asdict
from functools import cache
from pathlib import Path

import torch
from transformers import PreTrainedModel

from draftsmith.core.io import hash_json, kept_json, write_json_atomic
from draftsmith.core.models import dtype_name, fingerprint
from draftsmith.core.ranks import say
from draftsmith.core.sampling import Sampling
from draftsmith.decode import Proposer, takes_trees
from draftsmith.decode.propose.choosing import Costs
from draftsmith.decode.propose.lookup_first import LookupFirst
from draftsmith.decode.step_costs import Curve, StepCosts, measure
from draftsmith.drafts.load import Draft, draft_fingerprint


def kept_costs(target: PreTrainedModel, drafts: Sequence[Draft], proposer: Proposer) -> Costs:
    """Return the costs of a pair's steps by sampling; read or measured once a process."""
    draft = proposer.draft if isinstance(proposer, LookupFirst) else proposer
    model = draft if drafts else None
    trees = all(takes_trees(target, each) for each in drafts)

    @cache
    def pair() -> list[object]:
        # Hashing reads all weights.
        return [
            fingerprint(target),
            *map(draft_fingerprint, drafts),
            proposer.name,
            dtype_name(target),
            str(target.device),
            torch.get_num_threads(),
            platform.node(),
            torch.__version__,
        ]

    @cache
    def costs_of(greedy: bool) -> StepCosts:
        file = _directory() / f"{hash_json([*pair(), greedy])[:16]}.json"
        found = kept_json(file, "costs of steps", ("target", "first", "more"))
        if found is not None:
            return StepCosts(_curve(found["target"]), found["first"], _curve(found["more"]))
        say("auto: measuring what steps cost; later runs have it")
        measured = measure(target, model, Sampling(temperature=0.0 if greedy else 1.0), trees=trees)
        try:
            file.parent.mkdir(parents=True, exist_ok=True)
            write_json_atomic(file, asdict(measured))
        except OSError as error:
            say(f"auto: {file}: cannot be kept ({error})")
        return measured

    return lambda sampling: costs_of(sampling.greedy)


def _curve(record: dict[str, float]) -> Curve:
    return {int(size): seconds for size, seconds in record.items()}


def _directory() -> Path:
    home = os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache"
    return Path(home) / "draftsmith" / "step-costs"
