"""What makes figures mean less than they seem to: each is said in the terminal, in results.json and in the report.

`eval --strict` turns them into errors: before anything is measured where that is known by then, else at the end.
"""

from collections import Counter
from collections.abc import Mapping, Sequence
from itertools import combinations
from pathlib import Path

import numpy as np
from transformers import PreTrainedModel

from draftsmith_core.errors import InputError
from draftsmith_core.models import parameter_count
from draftsmith_core.processes import say
from draftsmith_core.prompts import Prompt, prompt_hash, read_prompt_hashes, token_runs
from draftsmith_core.settings import Quantize
from eval.config import EvalConfig
from eval.schema import Conditions, ModelRow, Remark
from eval.suites import Suite

# Two prompts are near-duplicates when they share this much of their runs of so many tokens (Jaccard similarity).
SHINGLE, SIMILAR = 5, 0.8
# The middle half of the rounds of the target alone may differ by this share of their median on a quiet machine.
SPREAD = 0.15


def announce(remarks: Sequence[Remark], *, strict: bool) -> list[Remark]:
    """Write remarks to standard error, and return them; InputError with the first of them when `strict`."""
    if strict and remarks:
        more = f" (and {len(remarks) - 1} more)" if len(remarks) > 1 else ""
        raise InputError(f"--strict: {remarks[0]['text']}{more}")
    for remark in remarks:
        say(f"remark: {remark['text']}")
    return list(remarks)


def of_options(config: EvalConfig) -> list[Remark]:
    """Options that were given and change nothing."""
    off = {"top_k": (None, 0), "top_p": (None, 1.0), "min_p": (None, 0.0)}
    given = [name for name, values in off.items() if getattr(config, name) not in values]
    if not given or any(config.temperature):
        return []
    return [Remark(about="options", text=f"--{given[0]}: changes nothing at temperature 0, the only one measured")]


def of_sets(config: EvalConfig, suites: Sequence[Suite]) -> list[Remark]:
    """An option about `text` rows where there are none."""
    if config.prompt_tokens == EvalConfig.prompt_tokens or any(suite.from_text for suite in suites):
        return []
    text = f"--prompt_tokens {config.prompt_tokens}: changes nothing, no prompt set has rows with `text`"
    return [Remark(about="options", text=text)]


def of_counts(config: EvalConfig, suites: Sequence[Suite]) -> list[str]:
    """Lines about sets that are cut short, or smaller than what is to be timed. Nothing is wrong with that."""
    cut = [suite.name for suite in suites if suite.more]
    few = [suite for suite in suites if len(suite.prompts) < config.speed_prompts]
    said = [f"{', '.join(cut)}: only the first {config.max_prompts} rows are read (--max_prompts)"] if cut else []
    if few:
        sizes = ", ".join(f"{suite.name} {len(suite.prompts)}" for suite in few)
        said.append(f"--speed_prompts {config.speed_prompts}: all prompts are timed where a set has fewer ({sizes})")
    return said


def of_prompts(suites: Sequence[Suite]) -> list[Remark]:
    """Prompts that two sets share, and prompts of one that are nearly those of another."""
    remarks = []
    for one, other in combinations(suites, 2):
        names = f"{one.name} ({one.kind.upper()}) and {other.name} ({other.kind.upper()})"
        meaning = "; figures in and out of distribution are not apart" if one.kind != other.kind else ""
        hashes = {prompt_hash(prompt.ids) for prompt in one.prompts}
        same = [prompt for prompt in other.prompts if prompt_hash(prompt.ids) in hashes]
        if same:
            text = f"{names}: {len(same)} of {len(other.prompts)} prompts of the second are in the first too{meaning}"
            remarks.append(Remark(about="same_prompts", text=text))
        rest = [prompt for prompt in other.prompts if prompt_hash(prompt.ids) not in hashes]
        near = near_duplicates(one.prompts, rest)
        if near:
            text = f"{names}: {len(near)} prompts of the second are near-duplicates of the first, such as {near[0].id}"
            remarks.append(Remark(about="near_duplicates", text=text + meaning))
    return remarks


def near_duplicates(known: Sequence[Prompt], others: Sequence[Prompt]) -> list[Prompt]:
    """Those of `others` that share at least `SIMILAR` of their token 5-grams with one of `known`."""
    shingles = [token_runs(prompt.ids, SHINGLE) for prompt in known]
    where: dict[tuple[int, ...], list[int]] = {}
    for index, found in enumerate(shingles):
        for shingle in found:
            where.setdefault(shingle, []).append(index)
    near = []
    for prompt in others:
        own = token_runs(prompt.ids, SHINGLE)
        shared = Counter(index for shingle in own for index in where.get(shingle, ()))
        if any(count / (len(own) + len(shingles[index]) - count) >= SIMILAR for index, count in shared.items()):
            near.append(prompt)
    return near


def of_training(drafts: Mapping[str, str], suites: Sequence[Suite]) -> list[Remark]:
    """Prompts that a draft was trained on, by the hashes in its checkpoint; `drafts` maps names to directories."""
    remarks = []
    for name, source in drafts.items():
        trained = read_prompt_hashes(Path(source))
        if trained is None:
            continue
        for suite in suites:
            asked = np.array([prompt_hash(prompt.ids) for prompt in suite.prompts], dtype=np.uint64)
            seen = int(np.isin(asked, trained).sum())
            if seen:
                text = (
                    f"{suite.name} ({suite.kind.upper()}): draft {name} was trained on {seen} of its {len(asked)} "
                    f"prompts; its figures there are not about unseen prompts"
                )
                remarks.append(Remark(about="trained_on", text=text))
    return remarks


def of_models(models: Mapping[str, ModelRow], quantize_draft: Quantize | None = None) -> list[Remark]:
    """Drafts that cannot be cheap, that are the same, or that an option passes over."""
    remarks = []
    target = models["target"]
    drafts = [name for name in models if name != "target"]
    for name in drafts:
        row = models[name]
        if row["kind"] == "draft" and row["parameters"] >= target["parameters"]:
            text = (
                f"draft {name}: has {row['parameters']:,} parameters, the target {target['parameters']:,}; a draft "
                f"that is not smaller cannot make decoding faster"
            )
            remarks.append(Remark(about="large_draft", text=text))
        elif row["kind"] != "draft" and quantize_draft not in (None, "none"):
            text = f"draft {name}: is a head, and --quantize_draft {quantize_draft} does not apply to heads"
            remarks.append(Remark(about="options", text=text))
    for one, other in combinations(drafts, 2):
        if models[one]["fingerprint"] == models[other]["fingerprint"]:
            remarks.append(Remark(about="same_draft", text=f"drafts {one} and {other}: have the same weights"))
    return remarks


def of_target(name: str, target: PreTrainedModel) -> list[Remark]:
    """A target that `drafts.make.widen` made: its speed is real, the size is not."""
    small = getattr(target.config, "widened_from", None)
    if small is None:
        return []
    text = (
        f"target {name}: is a model of {small:,} parameters padded with zeros to {parameter_count(target):,}; what it "
        f"writes and accepts is the small model's, what it costs is a large one's"
    )
    return [Remark(about="widened_target", text=text)]


def loaded(load: Sequence[float], cpus: int) -> bool:
    """Whether others kept the machine busy: one more than its processors, all of which the evaluation itself uses."""
    return max(load, default=0.0) > cpus + 1


def of_timing(conditions: Sequence[Conditions], cpus: int) -> list[Remark]:
    """Clock times taken on a busy machine: its load, or rounds that differ among themselves."""
    remarks = []
    load = max((value for row in conditions for value in row["load"]), default=0.0)
    if loaded([load], cpus):
        text = f"speed: the machine was busy while the clock ran (load average {load:.1f} on {cpus} processors)"
        remarks.append(Remark(about="busy_machine", text=text))
    spread = max((row["spread"] or 0.0 for row in conditions), default=0.0)
    if spread > SPREAD:
        text = (
            f"speed: rounds of the target alone differ by {spread:.0%} of their median (quartiles); clock times of "
            f"this run are rough"
        )
        remarks.append(Remark(about="busy_machine", text=text))
    return remarks
