"""Read the prompt sets of an evaluation and load its models."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from draftsmith.core.io import read_json
from draftsmith.core.prompts import PromptSet
from draftsmith.core.records import read_record
from draftsmith.core.settings import loading, tokenizing
from draftsmith.core.template_date import fix_date
from draftsmith.core.tokenization import load_tokenizer
from draftsmith.decode import take_over
from draftsmith.drafts.load import LoadedModels, load_models
from draftsmith.eval.config import EvalConfig, PlanConfig
from draftsmith.eval.other_templates import read_set
from draftsmith.eval.schema import SuiteKind
from draftsmith.eval.suites import Suite, fit


def load(
    config: EvalConfig | PlanConfig,
    drafts: dict[str, str],
    id_sets: dict[str, str],
    ood_sets: dict[str, str],
) -> tuple[list[Suite], LoadedModels]:
    """Read the prompts, ID sets first, then load the models."""
    tokenizer = load_tokenizer(config.target, **tokenizing(config))
    fix_date(tokenizer, config.date, _kept_date(config.out, drafts))
    reads: list[PromptSet] = []
    suites: list[Suite] = []
    for name, source in (id_sets | ood_sets).items():
        read = read_set(
            source,
            tokenizer,
            domain=name,
            prompt_tokens=config.prompt_tokens,
            limit=config.max_prompts,
        )
        skipped = tuple((f"row {skip.row}", skip.reason) for skip in read.skipped)
        kind: SuiteKind = "id" if name in id_sets else "ood"
        suites.append(Suite(name, kind, source, read.prompts, skipped, read.rows))
        reads.append(read)
    options: dict[str, Any] = loading(config) | {"quantize": config.quantize}
    if isinstance(config, EvalConfig):
        options["quantize_draft"] = config.quantize_draft
        options["heterogeneous_vocab"] = config.heterogeneous_vocab
    pair = load_models(config.target, drafts, tokenizer=tokenizer, **options)
    take_over(pair.target, *pair.drafts.values())
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
    date = results.get("config", {}).get("date")
    return date
