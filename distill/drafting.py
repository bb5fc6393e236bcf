"""Whether a draft pays where a set is made, and with which tree: measured once, when it is begun, and kept with it.

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
    """Let `engine` draft the tree that takes the least time per token, if it takes less than the target alone, on a
    batch of the first prompts; or what it drafted when this set was begun. Every process of a launch calls it; one of
    them measures.
    """
    engine.tree = divided(1, lambda _: _decide(out, config, engine, prompts))[0]


def _decide(out: Path, config: DistillConfig, engine: DraftingEngine, prompts: PromptReader) -> str:
    for name in _RECORDS:
        if (out / name).exists():
            known = read_json(out / name, "the record of a distilled set").get("drafted") or ""
            used = f"used, {known}" if known else "not used"
            log.warning("--draft %s: %s, as when this set was begun", config.draft, used)
            return known
    requests = _first_requests(config, engine, prompts)
    if not requests:
        raise RunError(f"--draft: none of the first rows of {config.prompts} can be asked, to measure whether it pays")
    seconds = engine.seconds_per_token(requests)
    alone = seconds.pop("")
    tree, drafted = min(seconds.items(), key=lambda each: each[1])
    pays = drafted < alone
    log.warning(
        "--draft %s: %s takes %.2f times as long per token as the target alone, on a batch of %d rows; %s",
        config.draft,
        tree,
        drafted / alone,
        len(requests),
        "used" if pays else "switched off",
    )
    write_json_atomic(out / DECISION, {"drafted": tree if pays else None})
    return tree if pays else ""


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
