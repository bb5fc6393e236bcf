"""Whether a draft pays where a set is made, and with which tree: measured once, and recorded with the set.

Drafting changes which tokens are drawn, not their distribution. For equal bytes, all processes and all runs that
continue a set must therefore follow one decision.
"""

import logging
from itertools import islice
from pathlib import Path

from distill.config import DistillConfig
from distill.engines import AnswerRequest, DraftingEngine
from draftsmith_core.errors import InputError, RunError
from draftsmith_core.io import read_json, write_json_atomic
from draftsmith_core.processes import divided
from draftsmith_core.prompt_rows import iterate_records
from draftsmith_core.prompts import Prompt, PromptReader
from draftsmith_core.sampling import row_seed

# `drafting.json` of a set in the making, `manifest.json` of a finished one.
DECISION = "drafting.json"
_RECORDS = (DECISION, "manifest.json")
log = logging.getLogger(__name__)


def settle_drafting(out: Path, config: DistillConfig, engine: DraftingEngine, prompts: PromptReader) -> None:
    """Set `engine.tree` to the fastest tree on a batch of the first prompts, or to what the set was begun with.

    Every process of a launch calls this; one of them measures.
    """
    engine.tree = divided(1, lambda _: _decide(out, config, engine, prompts))[0]


def _decide(out: Path, config: DistillConfig, engine: DraftingEngine, prompts: PromptReader) -> str:
    for name in _RECORDS:
        if (out / name).exists():
            tree: str = read_json(out / name, "the record of a distilled set").get("drafted") or ""
            log.warning("--draft %s: as when this set was begun: %s", config.draft, tree or "not used")
            return tree
    requests = _first_requests(config, engine, prompts)
    if not requests:
        raise RunError(f"--draft: none of the first rows of {config.prompts} can be asked to time the draft")
    seconds = engine.seconds_per_token(requests)
    target_alone = seconds.pop("")
    tree, drafted = min(seconds.items(), key=lambda item: item[1])
    pays = drafted < target_alone
    log.warning(
        "--draft %s: %s takes %.2f times as long per token as the target alone (batch of %d rows); %s",
        *(config.draft, tree, drafted / target_alone, len(requests), "used" if pays else "switched off"),
    )
    write_json_atomic(out / DECISION, {"drafted": tree if pays else None})
    return tree if pays else ""


def _first_requests(config: DistillConfig, engine: DraftingEngine, prompts: PromptReader) -> list[AnswerRequest]:
    """One batch of the first prompts, with all their samples."""
    reader = PromptReader(prompts.source, prompts.tokenizer, prompts.domain, prompts.prompt_tokens)
    requests: list[AnswerRequest] = []
    for record in islice(iterate_records(config.prompts), config.max_prompts):
        try:
            prompt = reader.read(record)
        except InputError:
            continue  # counted, with its reason, when its part is made
        most = engine.max_prompt_tokens
        if not isinstance(prompt, Prompt) or (most is not None and len(prompt.ids) > most):
            continue
        for sample in range(config.num_samples):
            seed = row_seed(config.seed, f"drafting/{record.number}/{sample}")
            requests.append(AnswerRequest((record.number, sample, 0), prompt.ids, seed))
            if len(requests) == config.batch_size:
                return requests
    return requests
