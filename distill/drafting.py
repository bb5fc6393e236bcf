"""Whether a draft pays where a set is made: measured once, at its beginning, and kept with the set.

Drafting changes which tokens are drawn, not how they are distributed. So all processes and all runs that continue a set
must do alike for it to come out the same bytes, and none of them may measure again.
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
    """Let `engine` draft if that takes less time per token than the target alone, on a batch of the first prompts, or
    if it did when this set was begun. Every process of a launch calls it; one of them measures.
    """
    engine.drafts = divided(1, lambda _: _decide(out, config, engine, prompts))[0]


def _decide(out: Path, config: DistillConfig, engine: DraftingEngine, prompts: PromptReader) -> bool:
    for name in _RECORDS:
        if (out / name).exists():
            known = bool(read_json(out / name, "the record of a distilled set").get("drafted"))
            log.warning("--draft %s: %s, as when this set was begun", config.draft, "used" if known else "not used")
            return known
    requests = _first_requests(config, engine, prompts)
    if not requests:
        raise RunError(f"--draft: none of the first rows of {config.prompts} can be asked, to measure whether it pays")
    alone, drafted = engine.seconds_per_token(requests)
    pays = drafted < alone
    log.warning(
        "--draft %s: takes %.2f of the time per token that the target takes alone, on a batch of %d rows; %s",
        config.draft,
        drafted / alone,
        len(requests),
        "used" if pays else "switched off",
    )
    write_json_atomic(out / DECISION, {"drafted": pays})
    return pays


def _first_requests(config: DistillConfig, engine: DraftingEngine, prompts: PromptReader) -> list[AnswerRequest]:
    """A batch of the first prompts, as often as each is answered."""
    reader = PromptReader(prompts.source, prompts.tokenizer, prompts.domain, prompts.prompt_tokens)
    requests: list[AnswerRequest] = []
    for record in islice(iterate_records(config.prompts), config.max_prompts):
        try:
            found = reader.read(record)
        except InputError:
            continue  # counted, with its reason, when its part is made
        most = engine.max_prompt_tokens
        if not isinstance(found, Prompt) or (most is not None and len(found.ids) > most):
            continue
        for sample in range(config.num_samples):
            seed = row_seed(config.seed, f"drafting/{record.number}/{sample}")
            requests.append(AnswerRequest((record.number, sample, 0), found.ids, seed))
            if len(requests) == config.batch_size:
                return requests
    return requests
