"""`draftsmith merge`: of all drafts that are named or, with --greedy, of those that together raise alpha (a greedy
soup, arXiv 2203.05482).
"""

import copy
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any

from transformers import PreTrainedModel

from drafts.load import load_pair
from drafts.merge import merge as merge_drafts
from drafts.merge import merge_states
from drafts.merge_config import MergeConfig
from draftsmith_core.errors import InputError
from draftsmith_core.prompts import read_prompts
from draftsmith_core.sampling import Sampling
from eval import measure
from eval.estimate import measure_alphas

_BATCH = 16


def merge(config: MergeConfig, command: str | None = None) -> dict[str, Any]:
    """Write the merged draft to `config.out`; returns the summary. With `config.greedy` it says what was measured.

    Raises InputError for drafts that do not fit together, and for an `out` that exists.
    """
    if config.greedy is None:
        return merge_drafts(config, command)
    chosen, alphas = _chosen(config)
    plain = replace(config, greedy=None, target=None)
    if len(chosen) > 1:
        summary = merge_drafts(replace(plain, draft=chosen), command)
    else:  # no average is as good as the best draft alone, so that it is the soup
        summary = merge_drafts(replace(plain, base=chosen[0], draft=[f"{chosen[0]}=1"]), command)
    return summary | {"greedy": alphas}


def _chosen(config: MergeConfig) -> tuple[list[str], dict[str, float]]:
    """The drafts of the soup, the best first, and alpha of every draft by itself."""
    assert config.target is not None and config.greedy is not None
    names = [source for source, _ in config.weights()]
    pair = load_pair(config.target, names, device="cpu", dtype="float32", trust_remote_code=config.trust_remote_code)
    drafts = {name: draft for name, draft in pair.drafts.items() if isinstance(draft, PreTrainedModel)}
    if head := next((name for name in names if name not in drafts), None):
        raise InputError(f"--greedy: {head} is a head; only language models are chosen among")
    prompts = read_prompts(config.greedy, pair.tokenizer, limit=config.max_prompts).prompts
    options: dict[str, Any] = {"max_new_tokens": config.max_new_tokens, "batch_size": _BATCH, "seed": 0}
    sampling = Sampling(temperature=1.0)
    rows = [row for row in measure.answers(pair.target, prompts, sampling, **options) if row.output_ids]

    def alphas(models: Mapping[str, PreTrainedModel]) -> dict[str, float]:
        read = measure_alphas(pair.target, models, rows, sampling, batch_size=_BATCH)
        return {name: sum(each["sum"]) / sum(each["count"]) for name, each in read.items()}

    alone = alphas(drafts)
    states = {name: draft.state_dict() for name, draft in drafts.items()}
    made = copy.deepcopy(drafts[names[0]])

    def together(sources: Sequence[str]) -> float:
        made.load_state_dict(merge_states([(states[source], 1 / len(sources)) for source in sources]))
        return alphas({"made": made.eval()})["made"]

    return greedy_soup(alone, together), alone


def greedy_soup(alone: Mapping[str, float], together: Callable[[Sequence[str]], float]) -> list[str]:
    """From the best draft on, each next best joins where the average with it is at least as good as without it.

    alone: how good every draft is by itself. together: how good the average of some of them is.
    """
    ranked = sorted(alone, key=lambda name: -alone[name])
    soup, best = ranked[:1], alone[ranked[0]]
    for name in ranked[1:]:
        if (found := together([*soup, name])) >= best:
            soup, best = [*soup, name], found
    return soup
