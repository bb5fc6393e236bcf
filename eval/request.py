"""Parse an `EvalConfig` into names, sources, samplings, methods and requirements, and check all
that needs no model.

Imports no torch.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from glob import glob

from draftsmith.core.errors import InputError, nearest
from draftsmith.core.io import read_tree_file
from draftsmith.core.prompt_rows import parse_named
from draftsmith.core.settings import Sampling, sampling_options
from draftsmith.core.suites import load_suite, suite_name
from draftsmith.decode import tree_spec
from draftsmith.decode.method import OWN_TREE, Method
from draftsmith.drafts.draft_sources import check_sources, copies_first, is_copying, is_lookahead
from draftsmith.eval.config import EvalConfig
from draftsmith.eval.requirement import Requirement, Scope
from draftsmith.eval.schema import How


@dataclass(frozen=True)
class EvalRequest:
    """What an evaluation measures. Drafts (runs, of several seeds) and prompt sets map names to
    sources.

    asked: the methods of the options. methods: those of each draft.
    """

    config: EvalConfig
    drafts: dict[str, str]
    base: str
    id_sets: dict[str, str]
    ood_sets: dict[str, str]
    asked: list[Method]
    methods: dict[str, list[Method]]

    @property
    def samplings(self) -> list[Sampling]:
        """A sampling per temperature. Filters that are not set are off."""
        asked = sampling_options(self.config)
        temperatures = dict.fromkeys(asked.pop("temperature"))
        given = {key: value for key, value in asked.items() if value is not None}
        return [Sampling(temperature=temperature, **given) for temperature in temperatures]

    @property
    def runs(self) -> int:
        """Number of drafts with a method."""
        return sum(map(len, self.methods.values()))

    def resolved(self, sampling: Sampling, date: str | None, *, compile: bool) -> "EvalRequest":  # noqa: A002
        """Take filters and penalties from a sampling with the target's defaults, the date that the
        chat template prints, and whether timed steps are recorded.
        """
        values = sampling_options(sampling)
        del values["temperature"]
        config = replace(self.config, **values, date=date, compile=compile)
        return replace(self, config=config)


def draft_and_seed(run: str) -> tuple[str, int]:
    """The draft and the number of a run; a draft of one run is its own. No given name has a `#`."""
    draft, _, number = run.partition("#")
    return draft, int(number or 1)


def named_runs(values: Sequence[str]) -> dict[str, str]:
    """Sources by name. A NAME= that comes several times, or with a pattern, has runs: training
    seeds, NAME, NAME#2 and so on. Raise InputError for a run that is given twice.
    """
    sources: dict[str, list[str]] = {}
    for value in values:
        ((name, source),) = parse_named("--draft", [value]).items()
        runs = sources.setdefault(name, [])
        if runs and not value.startswith(f"{name}="):
            parse_named("--draft", [f"{name}={runs[0]}", value])  # refuses the second
        found = sorted(glob(source)) if "*" in source else [source]
        if not found or set(found) & set(runs):
            why = "is given twice" if found else "fits no directory"
            raise InputError(f"--draft {value}: {why}; name each run once")
        runs += found
    named = {}
    for name, runs in sources.items():
        for number, run in enumerate(runs, start=1):
            named[name if number == 1 else f"{name}#{number}"] = run
    return named


def _sets(option: str, values: Sequence[str]) -> dict[str, str]:
    sets = parse_named(option, values)
    for name, source in sets.items():
        if name in ("id", "ood"):
            raise InputError(
                f"{option} {name}={source}: {name} stands for all sets of a kind; take another "
                f"name, such as mine={source}"
            )
        if source.startswith("@"):
            load_suite(suite_name(source))  # refuses an unknown suite
    return sets


def _methods(trees: Sequence[str], verifiers: Sequence[str]) -> list[Method]:
    methods: list[Method] = []
    for spec in trees:
        try:
            for name in verifiers or (None,):
                method = Method.of(spec, name, read_tree_file)
                # A draft can draw the siblings of a static tree in any way, so take the verifier's
                # first choice.
                method.rule.check(method.shape, method.rule.drawings[0])
                methods.append(method)
        except ValueError as error:
            raise InputError(
                f"tree {spec}, verifier {' '.join(verifiers) or 'default'}: {error}"
            ) from None
    return list(dict.fromkeys(methods))


def _methods_of(source: str, methods: Sequence[Method]) -> list[Method]:
    """Return the methods that a draft is decoded with, of those that are asked for: lookahead
    drafts its own tree only.
    """
    if is_lookahead(source) and methods:
        return [Method.of(OWN_TREE, "exact")]
    return list(methods)


def check(config: EvalConfig) -> EvalRequest:
    """Parse the options. Raise InputError for those that no models can satisfy."""
    drafts = named_runs(config.draft)
    named = [f"{draft_and_seed(run)[0]}={source}" for run, source in drafts.items()]
    config = replace(config, draft=named)
    if "target" in drafts:
        raise InputError("--draft target=...: this name is the target's; use another")
    check_sources(drafts.values())
    id_sets = _sets("--id", config.id)
    ood_sets = _sets("--ood", config.ood)
    if both := id_sets.keys() & ood_sets.keys():
        raise InputError(f"--ood {min(both)}: --id has this name; a set is either ID or OOD")
    # What copies is no draft to compare alignments with, unless there is no other.
    first = {run: source for run, source in drafts.items() if draft_and_seed(run)[1] == 1}
    trained = [name for name, source in first.items() if not copies_first(source)] or list(first)
    base = config.base or trained[0]
    if base not in first:
        raise InputError(f"--base {base}: no draft has this name; {nearest(base, first)}")
    if base not in trained:
        why = "has no weights" if is_copying(first[base]) else "copies before it drafts"
        raise InputError(f"--base {base}: {why}; {nearest(base, trained)}")
    trees = list(map(tree_spec, config.tree))
    asked = [] if trees == ["none"] else _methods(trees, config.verifier)
    methods = {name: _methods_of(source, asked) for name, source in drafts.items()}
    ahead = [name for name, source in drafts.items() if is_lookahead(source)]
    if ahead and not asked:
        raise InputError(f"--draft {ahead[0]}=lookahead: has no alpha to measure with --tree none")
    known: dict[str, list[How]] = {}
    for name in first:
        known[name] = [(method.tree, method.verifier) for method in methods[name]]
    scope = Scope(
        base=base,
        id_sets=list(id_sets),
        ood_sets=list(ood_sets),
        temperatures=config.temperature,
        methods=known,
        copying=[name for name, source in first.items() if copies_first(source)],
    )
    _check_requirements(config, scope)
    return EvalRequest(config, drafts, base, id_sets, ood_sets, asked, methods)


def _check_requirements(config: EvalConfig, scope: Scope) -> None:
    for text in config.require:
        requirement = Requirement.parse(text)
        if requirement.figure == "speedup" and not config.speed_prompts:
            raise InputError(f"--require {text!r}: --speed_prompts 0 times nothing")
        requirement.judged(scope)
