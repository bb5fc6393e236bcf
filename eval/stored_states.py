"""Drafts of a target that is nowhere in memory: acceptance on its answers, from their states."""

from collections.abc import Iterator, Mapping
from itertools import chain
from pathlib import Path
from typing import Any

from draftsmith.core.distilled_sets import set_rows
from draftsmith.core.errors import InputError
from draftsmith.core.io import JsonObject, read_manifest, write_json_atomic
from draftsmith.core.models import dtype_name, load_model
from draftsmith.core.prompt_rows import parse_named
from draftsmith.core.runs import Run
from draftsmith.core.sampling import Sampling
from draftsmith.core.settings import loading
from draftsmith.core.state_store import StoredStates, cached_layers, checkpoint_digest
from draftsmith.drafts.heads import Head
from draftsmith.drafts.load import load_draft
from draftsmith.eval.acceptance import Continuation
from draftsmith.eval.bootstrap import PromptSums, estimate, resamples
from draftsmith.eval.config import StatesEvalConfig
from draftsmith.eval.method import Method
from draftsmith.eval.reading import measure_alphas

_BATCH = 16
_RESAMPLES = 2000


def evaluate_from_states(config: StatesEvalConfig) -> JsonObject:
    """Measure alpha and predict tau of every draft on every set; write states.json."""
    with Run(config.out) as run:
        run.lock()
        figures = list(_measured(config))
        write_json_atomic(run.out / "states.json", {"figures": figures})
    return {"out": config.out, "figures": figures}


def _measured(config: StatesEvalConfig) -> Iterator[JsonObject]:
    target = load_model(config.target, **loading(config), layers=False)
    options: JsonObject = {"device": str(target.device), "dtype": dtype_name(target)}
    named = parse_named("draft", config.draft)
    drafts = {name: load_draft(source, target, **options) for name, source in named.items()}
    read = [draft.hidden_layers for draft in drafts.values() if isinstance(draft, Head)]
    digest = checkpoint_digest(config.target, config.revision)
    layers = cached_layers(sorted(set(chain.from_iterable(read))))
    states = StoredStates(config.states, target, digest)
    methods = [Method.of(tree, "speculative") for tree in config.tree]
    for kind, sets in (("id", config.id), ("ood", config.ood)):
        for directory in sets:
            rows = [row for row in set_rows(directory) if row["prompt_ids"]]
            texts = [
                Continuation(row["id"], row["prompt_ids"], row["response_ids"]) for row in rows
            ]
            states.require([text.ids for text in texts], layers, 2**31, directory)
            measured = measure_alphas(
                target,
                drafts,
                texts,
                _sampling(directory, rows),
                methods,
                batch_size=_BATCH,
                states=states,
            )
            groups = [row["asked"] for row in rows]
            where = {"suite": Path(directory).name, "kind": kind}
            yield from (where | figure for figure in _figures(measured, methods, groups))


def _sampling(directory: str, rows: list[JsonObject]) -> Sampling:
    """What the answers were drawn with."""
    config = read_manifest(Path(directory))["config"]
    temperatures = {row["temperature"] for row in rows}
    if len(temperatures) != 1 or None in temperatures:
        raise InputError(f"{directory}: its answers have several temperatures, or unknown ones")
    reshaped = {key: config[key] for key in ("top_k", "top_p", "min_p")}
    return Sampling(temperature=temperatures.pop(), **reshaped)


def _figures(
    measured: Mapping[str, Any], methods: list[Method], groups: list[str]
) -> Iterator[JsonObject]:
    picks = resamples(groups, _RESAMPLES, 0)
    for name, alpha in measured.items():
        sums = PromptSums.of(alpha["sum"], alpha["count"])
        yield {"draft": name, "metric": "alpha", **estimate(sums, picks, 1.0)}
        for method in methods:
            calls = alpha["predicted"][method.name]["target_calls"]
            tau = estimate(PromptSums.of(alpha["count"], calls), picks, method.most_tokens)
            yield {"draft": name, "metric": "tau_predicted", "tree": method.tree, **tau}
