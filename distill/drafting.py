"""Whether a draft pays where a set is made, and with which tree: measured once, and recorded with the set.

Drafting changes which tokens are drawn, not their distribution; all processes and resumed runs follow one decision.
"""

import logging
from collections.abc import Sequence
from pathlib import Path

from distill.config import DistillConfig
from distill.engines import AnswerRequest, DraftingEngine
from draftsmith_core.errors import RunError
from draftsmith_core.io import read_json, write_json_atomic
from draftsmith_core.processes import divided
from draftsmith_core.prompts import Prompt

# `drafting.json` of a set in the making, `manifest.json` of a finished one.
DECISION = "drafting.json"
_RECORDS = (DECISION, "manifest.json")
log = logging.getLogger(__name__)


def settle_drafting(out: Path, config: DistillConfig, engine: DraftingEngine, prompts: Sequence[Prompt]) -> str:
    """Set `engine.tree` to the fastest tree on a batch of `prompts`, or to the recorded one; return it. Every process
    of a launch calls this; one of them measures.
    """
    engine.tree = divided(1, lambda _: _decide(out, config, engine, prompts))[0]
    return engine.tree


def _decide(out: Path, config: DistillConfig, engine: DraftingEngine, prompts: Sequence[Prompt]) -> str:
    for name in _RECORDS:
        if (out / name).exists():
            tree: str = read_json(out / name, "the record of a distilled set").get("drafted") or ""
            log.warning("--draft %s: as when this set was begun: %s", config.draft, tree or "not used")
            return tree
    most = engine.max_prompt_tokens
    fitting = [prompt for prompt in prompts if most is None or len(prompt.ids) <= most]
    samples = [(prompt, sample) for prompt in fitting for sample in range(config.num_samples)][: config.batch_size]
    if not samples:
        raise RunError(f"--draft: the first prompts of {config.prompts} are too long to time the draft on")
    requests = [AnswerRequest((prompt.row, sample, 0), prompt.ids, prompt.row) for prompt, sample in samples]
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
