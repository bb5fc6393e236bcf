"""Parse an `EvalConfig` into names, sources, samplings, methods and requirements, and check all
that needs no model.

Imports no torch.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from decode import VERIFIERS, default_verifier, parse_tree
from draftsmith_core.errors import InputError, nearest
from draftsmith_core.io import read_tree_file
from draftsmith_core.prompt_rows import load_suite, parse_named, suite_name
from draftsmith_core.settings import Sampling
from eval.config import EvalConfig
from eval.method import Method
from eval.requirement import Requirement


@dataclass(frozen=True)
class EvalRequest:
    """What an evaluation measures. Drafts and prompt sets map names to sources."""

    drafts: dict[str, str]
    base: str
    id_sets: dict[str, str]
    ood_sets: dict[str, str]
    samplings: list[Sampling]
    methods: list[Method]


def _sets(option: str, values: Sequence[str]) -> dict[str, str]:
    sets = parse_named(option, values)
    for name, source in sets.items():
        if name in ("id", "ood"):
            raise InputError(
                f"{option} {name}=...: this name stands for all sets of a kind; use another"
            )
        if source.startswith("@"):
            load_suite(suite_name(source))  # refuses an unknown suite
    return sets


def _methods(trees: Sequence[str], verifiers: Sequence[str]) -> list[Method]:
    methods: list[Method] = []
    for spec in trees:
        try:
            for name in verifiers or [default_verifier(parse_tree(spec, read_tree_file))]:
                if name not in VERIFIERS:
                    raise InputError(f"unknown verifier; {nearest(name, VERIFIERS)}")
                methods.append(method := Method(spec, name))
                # A draft can draw the siblings of a static tree in any way, so take the verifier's
                # first choice.
                VERIFIERS[name].check(method.shape, VERIFIERS[name].drawings[0])
        except ValueError as error:
            raise InputError(
                f"--tree {spec} --verifier {' '.join(verifiers) or 'default'}: {error}"
            ) from None
    return list(dict.fromkeys(methods))


def check(config: EvalConfig) -> EvalRequest:
    """Parse the options. Raise InputError for those that no models can satisfy."""
    drafts = parse_named("--draft", config.draft)
    if "target" in drafts:
        raise InputError("--draft target=...: this name is the target's; use another")
    id_sets, ood_sets = _sets("--id", config.id), _sets("--ood", config.ood)
    if both := id_sets.keys() & ood_sets.keys():
        raise InputError(f"--ood {min(both)}: --id has this name; a set is either ID or OOD")
    base = config.base or next(iter(drafts))
    if base not in drafts:
        raise InputError(f"--base {base}: no draft has this name; {nearest(base, drafts)}")
    planned = Path(drafts[next((name for name in drafts if name != base), base)]) / "plan.json"
    if "auto" in config.tree and not planned.is_file():
        raise InputError(
            f"--tree auto: {planned} is missing; `draftsmith plan` with this draft makes it"
        )
    # Until the target is loaded, what its generation_config.json decides is off.
    top_p = 1.0 if config.top_p is None else config.top_p
    samplings = [
        Sampling(
            temperature=temperature, top_k=config.top_k or 0, top_p=top_p, min_p=config.min_p or 0.0
        )
        for temperature in dict.fromkeys(config.temperature)
    ]
    trees = [f"auto:{planned}" if spec == "auto" else spec for spec in config.tree]
    methods = [] if trees == ["none"] else _methods(trees, config.verifier)
    for text in config.require:
        requirement = Requirement.parse(text)
        if requirement.figure == "speedup" and not config.speed_prompts:
            raise InputError(f"--require {text!r}: --speed_prompts 0 times nothing")
        if requirement.figure == "transfer" and not ood_sets:
            raise InputError(f"--require {text!r}: needs sets out of distribution; add --ood")
        hows = [(method.tree, method.verifier) for method in methods]
        requirement.cells(
            list(drafts),
            base,
            {"id": list(id_sets), "ood": list(ood_sets)},
            config.temperature,
            hows,
        )
    return EvalRequest(drafts, base, id_sets, ood_sets, samplings, methods)
