"""Read the prompt sets of an evaluation, and load its models."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import islice
from pathlib import Path
from typing import Any

from draftsmith.core.errors import InputError
from draftsmith.core.io import hash_json, read_json
from draftsmith.core.prompts import Prompt, PromptSet, read_prompts
from draftsmith.core.ranks import say
from draftsmith.core.record import read_record
from draftsmith.core.settings import loading, tokenizing
from draftsmith.core.suites import load_suite, suite_name
from draftsmith.core.template_date import fix_date
from draftsmith.core.tokenization import Tokenizer, load_tokenizer
from draftsmith.decode import take_over
from draftsmith.drafts.load import LoadedModels, load_models
from draftsmith.eval.config import EvalConfig, PlanConfig
from draftsmith.eval.groups import groups_of
from draftsmith.eval.own_answers import ask_again, read_questions
from draftsmith.eval.schema import SuiteKind


@dataclass(frozen=True)
class Suite:
    """A named prompt set. `len(prompts) + len(skipped) == rows`; a skip is (row or prompt, reason).

    more: as in `PromptSet`.
    """

    name: str
    kind: SuiteKind
    source: str
    prompts: tuple[Prompt, ...]
    skipped: tuple[tuple[str, str], ...]
    rows: int
    more: bool = False

    @property
    def digest(self) -> str:
        """Hash of prompt ids and tokens, which kept measurements depend on."""
        return hash_json([[prompt.id, list(prompt.ids)] for prompt in self.prompts])


def prompt_groups(suites: Sequence[Suite]) -> dict[str, list[int]]:
    """The group of each prompt by suite, numbered through all suites (`eval.groups`)."""
    numbers = iter(groups_of([prompt for suite in suites for prompt in suite.prompts]))
    return {suite.name: list(islice(numbers, len(suite.prompts))) for suite in suites}


def fit(suites: Sequence[Suite], max_new_tokens: int, context: int | None) -> list[Suite]:
    """Skip the prompts that leave no room for `max_new_tokens` in `context`, the shortest context
    of all models.

    All drafts skip the same prompts, because they are compared on the same ones. Say how many.
    """
    if context is None:
        return list(suites)
    fitted = []
    for suite in suites:
        prompts: list[Prompt] = []
        skipped = list(suite.skipped)
        for prompt in suite.prompts:
            if len(prompt.ids) + max_new_tokens <= context:
                prompts.append(prompt)
                continue
            reason = f"{len(prompt.ids)} tokens and {max_new_tokens} new ones exceed a context of "
            skipped.append((f"prompt {prompt.id}", f"{reason}{context}"))
        if suite.prompts and not prompts:
            reason = skipped[len(suite.skipped)][1]
            raise InputError(
                f"{suite.source}: {reason}; lower --max_new_tokens or use shorter prompts"
            )
        if count := len(skipped) - len(suite.skipped):
            say(f"{suite.source}: {count} of {suite.rows} rows skipped: {skipped[-1][1]}")
        fitted.append(replace(suite, prompts=tuple(prompts), skipped=tuple(skipped)))
    return fitted


def load(
    config: EvalConfig | PlanConfig,
    drafts: dict[str, str],
    id_sets: dict[str, str],
    ood_sets: dict[str, str],
    **options: Any,
) -> tuple[list[Suite], LoadedModels]:
    """Read the prompts, ID sets first, then load the models. options: as for `load_models`."""
    tokenizer = load_tokenizer(config.target, **tokenizing(config))
    date = fix_date(tokenizer, config.date, _kept_date(config.out, drafts))
    if date is not None:
        say(f"the chat template prints the date; in these prompts it is {date}")
    reads: list[PromptSet] = []
    suites: list[Suite] = []
    for name, source in (id_sets | ood_sets).items():
        read = _read(config, tokenizer, name, source)
        skipped = tuple((f"row {skip.row}", skip.reason) for skip in read.skipped)
        kind: SuiteKind = "id" if name in id_sets else "ood"
        suites.append(Suite(name, kind, source, read.prompts, skipped, read.rows, read.more))
        reads.append(read)
    options = {"quantize": config.quantize, "tokenizer": tokenizer, **loading(config), **options}
    pair = load_models(config.target, drafts, **options)
    take_over(pair.target, *pair.drafts.values())
    suites = fit(suites, config.max_new_tokens, pair.context)
    if any(_asks_again(suite.source) for suite in suites):
        suites = [_with_own_answers(suite, pair, config) for suite in suites]
        suites = fit(suites, config.max_new_tokens, pair.context)
    # Last, so that a refusal above stands alone.
    for read in reads:
        read.say_skipped()
    return suites, pair


def _kept_date(out: str | None, drafts: Mapping[str, str]) -> str | None:
    """Return the date of the data that a draft was trained on, else of the results in `out`."""
    for source in drafts.values():
        date: str | None = read_record(Path(source)).get("date")
        if date is not None:
            return date
    file = Path(str(out)) / "results.json"
    results = read_json(file, "results") if file.is_file() else {}
    kept: str | None = results.get("config", {}).get("date")
    return kept


def _read(
    config: EvalConfig | PlanConfig, tokenizer: Tokenizer, name: str, source: str
) -> PromptSet:
    if _asks_again(source):
        return read_questions(source, tokenizer, domain=name, limit=config.max_prompts)
    return read_prompts(
        source,
        tokenizer,
        domain=name,
        prompt_tokens=config.prompt_tokens,
        limit=config.max_prompts,
    )


def _asks_again(source: str) -> bool:
    return source.startswith("@") and load_suite(suite_name(source)).asks_again


def _with_own_answers(suite: Suite, pair: LoadedModels, config: EvalConfig | PlanConfig) -> Suite:
    if not _asks_again(suite.source):
        return suite
    say(f"{suite.name}: {len(suite.prompts)} first answers by the target")
    prompts = ask_again(pair.target, pair.tokenizer, suite.prompts, config.max_new_tokens)
    return replace(suite, prompts=prompts)
