"""The prompt sets of an evaluation."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import chain, islice

from draftsmith.core.errors import InputError, without_secrets
from draftsmith.core.io import hash_json
from draftsmith.core.prompts import Prompt
from draftsmith.core.ranks import say
from draftsmith.eval.groups import groups_of
from draftsmith.eval.schema import SuiteKind


@dataclass(frozen=True)
class Suite:
    """A prompt set, `len(prompts) + len(skipped) == rows`. A skip is (row or prompt, reason)."""

    name: str
    kind: SuiteKind
    source: str
    prompts: tuple[Prompt, ...]
    skipped: tuple[tuple[str, str], ...]
    rows: int

    @property
    def digest(self) -> str:
        """Hash of prompt ids and tokens, which kept measurements depend on."""
        return hash_json([[prompt.id, list(prompt.ids)] for prompt in self.prompts])


def prompt_groups(suites: Sequence[Suite]) -> dict[str, list[int]]:
    """The group of each prompt by suite, numbered through all suites (`eval.groups`)."""
    prompts = list(chain.from_iterable(suite.prompts for suite in suites))
    numbers = iter(groups_of(prompts))
    return {suite.name: list(islice(numbers, len(suite.prompts))) for suite in suites}


def suite_rows(
    suites: Sequence[Suite], groups: Mapping[str, Sequence[int]]
) -> list[dict[str, object]]:
    """Return the rows of every prompt set that were read, done, skipped and failed, which add up,
    and its prompts.
    """
    rows: list[dict[str, object]] = []
    for suite in suites:
        prompts = suite.prompts
        row = {
            "name": suite.name,
            "kind": suite.kind,
            "source": without_secrets(suite.source),
            "read": suite.rows,
            "done": len(prompts),
            "skipped": len(suite.skipped),
            "failed": suite.rows - len(prompts) - len(suite.skipped),
            "skipped_rows": [{"row": row, "reason": reason} for row, reason in suite.skipped],
            "prompt_ids": [prompt.id for prompt in prompts],
            "prompt_groups": groups[suite.name],
            "digest": suite.digest,
        }
        rows.append(row)
    return rows


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
