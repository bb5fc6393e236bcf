"""The prompt sets of an evaluation. Every row is accounted for."""

from collections.abc import Sequence
from dataclasses import dataclass, replace

from draftsmith_core.errors import InputError
from draftsmith_core.io import hash_json
from draftsmith_core.prompts import Prompt, read_prompts
from draftsmith_core.tokenization import Tokenizer
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


def load_suites(
    id_sets: dict[str, str], ood_sets: dict[str, str], tokenizer: Tokenizer, *, prompt_tokens: int, limit: int
) -> list[Suite]:
    """Read every set, ID sets first."""
    suites = []
    kinds: list[tuple[SuiteKind, dict[str, str]]] = [("id", id_sets), ("ood", ood_sets)]
    for kind, name, source in [(kind, *item) for kind, sets in kinds for item in sets.items()]:
        read = read_prompts(source, tokenizer, domain=name, prompt_tokens=prompt_tokens, limit=limit)
        skipped = tuple((f"row {skip.row}", skip.reason) for skip in read.skipped)
        suites.append(Suite(name, kind, source, read.prompts, skipped, read.rows, read.more))
    return suites


def fit(suites: Sequence[Suite], max_new_tokens: int, contexts: dict[str, int | None]) -> list[Suite]:
    """Skip the prompts that leave some model no room for `max_new_tokens`, and record which model.

    `contexts` maps a model's name to its context length (None: unknown). A prompt that does not fit one draft is
    skipped for all, because drafts are compared on the same prompts.
    """
    limits = {name: length for name, length in contexts.items() if length is not None}
    if not limits:
        return list(suites)
    tightest, limit = min(limits.items(), key=lambda item: item[1])
    fitted = []
    for suite in suites:
        kept = tuple(prompt for prompt in suite.prompts if len(prompt.ids) + max_new_tokens <= limit)
        if not kept:
            raise InputError(
                f"{suite.source}: no prompt leaves {max_new_tokens} new tokens within the {limit} of {tightest}; "
                "lower --max_new_tokens or use shorter prompts"
            )
        long = tuple(
            (
                f"prompt {prompt.id}",
                f"{len(prompt.ids)} tokens and {max_new_tokens} new ones exceed the {limit} of {tightest}",
            )
            for prompt in suite.prompts
            if len(prompt.ids) + max_new_tokens > limit
        )
        fitted.append(replace(suite, prompts=kept, skipped=suite.skipped + long))
    return fitted
