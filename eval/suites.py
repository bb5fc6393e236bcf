"""Read the prompt sets of an evaluation, and load its models."""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

from decode import take_over
from drafts.load import LoadedModels, load_models
from draftsmith_core.errors import InputError
from draftsmith_core.io import hash_json
from draftsmith_core.prompts import Prompt, read_prompts
from draftsmith_core.settings import loading, tokenizing
from draftsmith_core.tokenization import load_tokenizer
from eval.schema import SuiteKind


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


def fit(suites: Sequence[Suite], max_new_tokens: int, context: int | None) -> list[Suite]:
    """Skip the prompts that leave no room for `max_new_tokens` in `context`, the shortest context
    of all models.

    All drafts skip the same prompts, because they are compared on the same ones.
    """
    fitted = []
    for suite in suites:
        skips = {
            prompt: f"{len(prompt.ids)} tokens and {max_new_tokens} new ones exceed a context of "
            f"{context}"
            for prompt in suite.prompts
            if context is not None and len(prompt.ids) + max_new_tokens > context
        }
        prompts = tuple(prompt for prompt in suite.prompts if prompt not in skips)
        if skips and not prompts:
            reason = next(iter(skips.values()))
            raise InputError(
                f"{suite.source}: {reason}; lower --max_new_tokens or use shorter prompts"
            )
        skipped = (
            *suite.skipped,
            *((f"prompt {prompt.id}", reason) for prompt, reason in skips.items()),
        )
        fitted.append(replace(suite, prompts=prompts, skipped=skipped))
    return fitted


def load(
    config: Any,
    drafts: dict[str, str],
    id_sets: dict[str, str],
    ood_sets: dict[str, str],
    **options: Any,
) -> tuple[list[Suite], LoadedModels]:
    """Read the prompts, ID sets first, then load the models. options: as for `load_models`."""
    tokenizer = load_tokenizer(config.target, **tokenizing(config))
    suites = []
    for name, source in (id_sets | ood_sets).items():
        limits = {"prompt_tokens": config.prompt_tokens, "limit": config.max_prompts}
        read = read_prompts(source, tokenizer, domain=name, **limits)
        skipped = tuple((f"row {skip.row}", skip.reason) for skip in read.skipped)
        kind: SuiteKind = "id" if name in id_sets else "ood"
        suites.append(Suite(name, kind, source, read.prompts, skipped, read.rows, read.more))
    pair = load_models(
        config.target,
        drafts,
        quantize=config.quantize,
        tokenizer=tokenizer,
        **loading(config) | options,
    )
    take_over(pair.target, *pair.drafts.values())
    return fit(suites, config.max_new_tokens, pair.context), pair
