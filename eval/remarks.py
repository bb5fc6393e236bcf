"""Remarks: reasons to trust the figures less. They stand in the terminal, in results.json and in
the report.

`eval --strict` turns them into errors: before the first measurement if they are known by then, else
at the end.
"""

from collections.abc import Hashable, Iterable, Iterator, Mapping, Sequence
from itertools import chain, combinations, product
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
from transformers import PreTrainedModel

from draftsmith.core.errors import InputError, counted
from draftsmith.core.io import JsonObject
from draftsmith.core.models import parameter_count
from draftsmith.core.prompt_rows import IN_OTHER_TEMPLATES
from draftsmith.core.prompts import read_prompt_hashes
from draftsmith.core.ranks import say
from draftsmith.core.records import read_record
from draftsmith.decode import VERIFIERS
from draftsmith.decode.native import missing_kernel
from draftsmith.drafts.load import other_targets
from draftsmith.eval.request import draft_and_seed
from draftsmith.eval.schema import BUSY, Conditions, ModelRow, Remark
from draftsmith.eval.suites import Suite, prompt_groups

if TYPE_CHECKING:
    from pandas import DataFrame

# Intervals from fewer prompts are called rough.
FEW = 8
# Prompts of a set from which drafts can be told apart.
ENOUGH = 32
# On a quiet machine, the interquartile range of the target's timings is at most this share of their
# median.
SPREAD = 0.15
# The largest logit gap that rounding can flip, by dtype: a few units in the last digit of a logit
# of 32.
TIES = {"float32": 2e-3, "float16": 0.15, "bfloat16": 1.0}


def announce(remarks: Iterable[Remark], *, strict: bool) -> list[Remark]:
    """Print remarks to standard error and return them; with `strict`, raise InputError with the
    first.
    """
    found = list(remarks)
    if strict and found:
        more = f" (and {len(found) - 1} more)" if len(found) > 1 else ""
        raise InputError(f"--strict: {found[0]['text']}{more}")
    for remark in found:
        say(f"remark: {remark['text']}")
    return found


def of_prompts(suites: Sequence[Suite]) -> Iterator[Remark]:
    """Find prompts that two sets share, or nearly, unless one is the other in other templates."""
    groups = prompt_groups(suites)
    for one, other in combinations(suites, 2):
        sources = {one.source, other.source}
        if any(f"{IN_OTHER_TEMPLATES}{source}" in sources for source in sources):
            continue
        known = set(groups[one.name])
        if same := sum(group in known for group in groups[other.name]):
            text = f"{_with_kind(one)} and {_with_kind(other)}: {same} of "
            text += (
                f"{counted(len(other.prompts), 'prompt')} of the second repeat the first, or nearly"
            )
            if one.kind != other.kind:
                text += "; figures in and out of distribution are not apart"
            yield Remark(about="same_prompts", text=text)


def of_groups(groups: Mapping[str, Sequence[Hashable]]) -> Iterator[Remark]:
    """Find sets, by the group of each prompt, whose prompts repeat, and those with so few groups
    that intervals are rough.
    """
    few = []
    for name, numbers in groups.items():
        apart = len(set(numbers))
        if repeats := len(numbers) - apart:
            text = f"{name}: {repeats} of {counted(len(numbers), 'prompt')} repeat others, or "
            text += f"nearly; intervals and counts are of {apart}"
            yield Remark(about="repeats", text=text)
        if apart < FEW:
            few.append(f"{name} {apart}")
    if few:
        text = f"few prompts ({', '.join(few)}): intervals are rough, and one of width 0 is not "
        yield Remark(about="few_prompts", text=f"{text}certainty; use {ENOUGH} or more")


def _with_kind(suite: Suite) -> str:
    return f"{suite.name} ({suite.kind.upper()})"


def of_training(drafts: Mapping[str, str], suites: Sequence[Suite]) -> Iterator[Remark]:
    """Find prompts that a draft was trained on, by the hashes in its checkpoint; `drafts` maps
    names to directories.
    """
    for (name, source), suite in product(drafts.items(), suites):
        trained = read_prompt_hashes(Path(source))
        if trained is None:
            continue
        hashes_P2 = np.array([prompt.hashes for prompt in suite.prompts], dtype=np.uint64)
        if seen := int(np.isin(hashes_P2, trained).any(axis=-1).sum()):
            where = f"{_with_kind(suite)}: draft {name}"
            text = f"{where} was trained on {seen} of its {counted(len(hashes_P2), 'prompt')}"
            text += "; its figures there are not about unseen prompts"
            yield Remark(about="trained_on", text=text)


def of_targets(drafts: Mapping[str, str], target: PreTrainedModel) -> list[Remark]:
    """Find drafts that were trained for another target; `drafts` maps names to directories."""
    lines = other_targets(drafts.values(), target)
    return [Remark(about="other_target", text=line) for line in lines]


def of_models(models: Mapping[str, ModelRow]) -> Iterator[Remark]:
    """Find drafts whose runs differ in more than their training seed."""
    for name, row in models.items():
        draft, _ = draft_and_seed(name)
        first = models[draft]
        one, other = (_options_of(each) for each in (first, row))
        differ = [key for key, value in one.items() if value != other.get(key)]
        if row is not first and differ != ["seed"]:
            named = ", ".join(differ) or "no recorded option"
            text = f"draft {draft}: its runs differ in {named}, not in their training seed alone"
            yield Remark(about="seeds", text=text)


def _options_of(row: ModelRow) -> JsonObject:
    options: JsonObject = read_record(Path(row["name"])).get("config", {})
    return options


def of_target(name: str, target: PreTrainedModel) -> Iterator[Remark]:
    """Warn if the target was padded by `widen`, and if the native kernel is missing."""
    if small := getattr(target.config, "widened_from", None):
        padded = f"padded with zeros to {parameter_count(target):,}"
        text = f"target {name}: is a model of {small:,} parameters {padded}; it writes the same"
        text += " and costs as much as a large one"
        yield Remark(about="widened_target", text=text)
    if slower := missing_kernel(target.device):
        yield Remark(about="missing_kernel", text=f"speeds are of {slower}")


def conditions(
    domain: str, temperature: float, load: list[float], rates: Sequence[float], cpus: int
) -> Conditions:
    """How quiet the machine was, by its load and by what should have been equal `rates` of the
    target alone.
    """
    spread = None
    if len(rates) >= 4:
        low, middle, high = np.quantile(rates, [0.25, 0.5, 0.75])
        spread = float((high - low) / middle)
    busy = loaded(load, cpus) or (spread or 0.0) > SPREAD
    return Conditions(domain=domain, temperature=temperature, load=load, spread=spread, busy=busy)


def loaded(load: Sequence[float], cpus: int) -> bool:
    """Whether others kept the machine busy: more than one process beyond those of the evaluation,
    on all processors.
    """
    return max(load, default=0.0) > cpus + 1


def of_outputs(counts: "DataFrame", dtype: str) -> Iterator[Remark]:
    """Find lossless verifiers with which outputs at temperature 0 are not the target's own, by more
    than rounding in `dtype`.
    """
    for verifier, rows in counts.groupby("rule", observed=True):
        values = {key: part["value"] for key, part in rows.groupby("key", observed=True)}
        if not VERIFIERS[verifier].lossless or "outputs" not in values:
            continue
        gap = values["gap"].max()
        if gap > TIES.get(dtype, TIES["float32"]):
            outputs = int(values["outputs"].sum())
            other = outputs - int(values["identical"].sum())
            text = f"verifier {verifier}: {other} of {counted(outputs, 'output')} at temperature 0 "
            text += f"differ from the target's own, where its logits are up to {gap:.2g} apart in "
            text += f"{dtype}, more than rounding explains; it is not lossless"
            yield Remark(about="outputs", text=text)


def of_timing(conditions: Sequence[Conditions], cpus: int) -> list[Remark]:
    """Find timings taken on a busy machine: a high load, or rounds that differ."""
    load = max(chain.from_iterable(row["load"] for row in conditions), default=0.0)
    spread = max((row["spread"] or 0.0 for row in conditions), default=0.0)
    causes = []
    if loaded([load], cpus):
        causes.append(f"load average {load:.1f} on {cpus} processors")
    if spread > SPREAD:
        causes.append(f"timings of the target vary by {spread:.0%}, IQR/median")
    if not causes:
        return []
    text = f"the machine was busy during timing ({'; '.join(causes)}); treat speeds as rough"
    return [Remark(about=BUSY, text=text)]
