"""Every reason to refuse an evaluation before a model is loaded, and the options taken apart."""

import re
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property

from decode import VERIFIERS, TreeShape, default_verifier, parse_tree
from draftsmith_core.errors import InputError, nearest
from draftsmith_core.io import read_tree_file
from draftsmith_core.option_types import check_least
from draftsmith_core.processes import launched
from draftsmith_core.sampling_options import Sampling
from draftsmith_core.suites import load_suite, suite_name
from eval.config import EvalConfig
from eval.require import Requirement

NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,63}")


@dataclass(frozen=True)
class Method:
    """One decoding method: a tree and the rule that verifies it."""

    tree: str
    verifier: str

    @property
    def name(self) -> str:
        """Tree and rule, as tables show them."""
        return f"{self.tree} {self.verifier}"

    @property
    def lossless(self) -> bool:
        """True when the output distribution is the target's own."""
        return VERIFIERS[self.verifier].lossless

    @cached_property
    def shape(self) -> TreeShape:
        """The tree itself, read once, because a file may change during the run. ValueError as `parse_tree`."""
        return parse_tree(self.tree, read_tree_file)


@dataclass(frozen=True)
class EvalRequest:
    """An `EvalConfig` taken apart and found sound."""

    drafts: dict[str, str]
    base: str
    id_sets: dict[str, str]
    ood_sets: dict[str, str]
    samplings: list[Sampling]
    methods: list[Method]


def parse_named(option: str, values: Sequence[str]) -> dict[str, str]:
    """`["a=x", "b=y"]` -> `{"a": "x", "b": "y"}`. InputError, one line, for anything else."""
    named: dict[str, str] = {}
    for value in values:
        name, equals, rest = value.partition("=")
        if not equals or not rest:
            raise InputError(
                f"{option} {value}: expected NAME=VALUE, such as {option} mine={value.strip('=') or 'PATH'}"
            )
        if not NAME.fullmatch(name):
            raise InputError(
                f"{option} {value}: {name!r} is not a name; use up to 64 letters, digits, '.', '_' or '-', "
                f"starting with a letter or digit"
            )
        if name in named:
            raise InputError(f"{option} {value}: the name {name!r} is used twice; give each its own")
        named[name] = rest
    return named


def _with_names(sets: Sequence[str]) -> list[str]:
    """`@gsm8k` as `gsm8k=@gsm8k`; InputError for a suite that there is not, under whatever name."""
    named = [f"{suite_name(value)}={value}" if value.startswith("@") else value for value in sets]
    for value in named:
        source = value.partition("=")[2]
        if source.startswith("@"):
            load_suite(suite_name(source))
    return named


def _methods(trees: Sequence[str], verifiers: Sequence[str]) -> list[Method]:
    methods: list[Method] = []
    for spec in trees:
        if spec == "auto":
            continue  # planned once the models are there
        try:
            tree = parse_tree(spec, read_tree_file)
        except InputError as error:
            raise InputError(f"--tree {spec}: {error}") from None
        except ValueError as error:
            raise InputError(f"--tree: {error}") from None
        for name in verifiers or [default_verifier(tree)]:
            if name not in VERIFIERS:
                raise InputError(f"--verifier {name}: unknown; {nearest(name, VERIFIERS)}")
            method = Method(spec, name)
            try:
                # Draft models and heads have every drawing of siblings of a static tree, so the rule gets its first
                # choice. A tree that grows while decoding always takes the most probable tokens.
                VERIFIERS[name].check(method.shape, VERIFIERS[name].drawings[0])
            except ValueError as error:
                raise InputError(f"--tree {spec} --verifier {name}: {error}") from None
            methods.append(method)
    return methods


def check(config: EvalConfig) -> EvalRequest:
    """Everything that can be refused without loading a model. Raises InputError, one line."""
    if not config.draft:
        raise InputError("--draft: name at least one draft, such as --draft base=PATH")
    if not config.id:
        raise InputError("--id: name at least one prompt set in distribution, such as --id chat=prompts.jsonl")
    drafts = parse_named("--draft", config.draft)
    if "target" in drafts:
        raise InputError("--draft target=...: the name 'target' is the target's; give the draft another")
    id_sets = parse_named("--id", _with_names(config.id))
    ood_sets = parse_named("--ood", _with_names(config.ood))
    for name in ("id", "ood"):
        if name in id_sets or name in ood_sets:
            raise InputError(f"--id or --ood {name}=...: this name stands for all sets of a kind; give the set another")
    if config.tracker == "none" and config.project != EvalConfig.project:
        raise InputError(f"--project {config.project}: is for --tracker wandb, and no tracker is asked for")
    for name in ood_sets:
        if name in id_sets:
            raise InputError(f"--ood {name}: the name is taken by --id {name}; a set is either ID or OOD")
    base = config.base if config.base is not None else next(iter(drafts))
    if base not in drafts:
        raise InputError(f"--base {base}: no draft has this name; {nearest(base, drafts)}")
    check_least(config, 1, "max_prompts", "prompt_tokens", "max_new_tokens", "batch_size")
    check_least(config, 0, "speed_prompts")
    check_least(config, 100, "bootstrap")
    for option, values in (("temperature", config.temperature), ("tree", config.tree), ("verifier", config.verifier)):
        if len(set(values)) < len(values):
            raise InputError(f"--{option}: {' '.join(map(str, values))} names one value twice")
    if not config.temperature:
        raise InputError("--temperature: name at least one, such as --temperature 0 1")
    if not config.tree:
        raise InputError("--tree: name at least one, such as --tree chain:4")
    try:
        # What is left open, the target decides once it is loaded; until then it is off.
        top_k, top_p, min_p = config.top_k or 0, 1.0 if config.top_p is None else config.top_p, config.min_p or 0.0
        samplings = [Sampling(temperature=t, top_k=top_k, top_p=top_p, min_p=min_p) for t in config.temperature]
    except ValueError as error:
        raise InputError(f"--{error}") from None
    methods = _methods(config.tree, config.verifier)
    if "auto" in config.tree and launched() > 1:
        raise InputError(
            "--tree auto: plans by the clock, in one process; run `draftsmith plan`, then --tree auto:FILE"
        )
    for text in config.require:
        requirement = Requirement.parse(text)
        if requirement.figure == "speedup" and not config.speed_prompts:
            raise InputError(f"--require {text!r}: nothing is timed with --speed_prompts 0; time some, or drop it")
        if requirement.figure == "transfer" and not ood_sets:
            raise InputError(f"--require {text!r}: is about sets out of distribution, and there are none; add --ood")
        if "auto" in config.tree:
            continue  # trees are known once one is planned
        for _ in requirement.cells(
            drafts=list(drafts),
            base=base,
            id_sets=id_sets,
            ood_sets=ood_sets,
            temperatures=config.temperature,
            methods=[(method.tree, method.verifier) for method in methods],
        ):
            pass  # names are checked as it goes
    return EvalRequest(drafts, base, id_sets, ood_sets, samplings, methods)
