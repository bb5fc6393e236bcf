"""Drafts of a target that is nowhere in memory: acceptance on its answers, from their states."""

from itertools import chain
from pathlib import Path

from draftsmith.core.distilled_sets import set_rows
from draftsmith.core.errors import InputError
from draftsmith.core.io import JsonObject, read_manifest, write_json_atomic
from draftsmith.core.models import dtype_name, load_model
from draftsmith.core.prompt_rows import parse_named
from draftsmith.core.runs import Run
from draftsmith.core.sampling import Sampling
from draftsmith.core.settings import loading
from draftsmith.core.state_store import StoredStates, cached_layers, checkpoint_digest
from draftsmith.decode.method import Method
from draftsmith.drafts.heads import Head
from draftsmith.drafts.load import load_draft
from draftsmith.eval.acceptance import Continuation
from draftsmith.eval.config import StatesEvalConfig
from draftsmith.eval.counts import Tally, Where
from draftsmith.eval.figures import estimate, rows_as_json
from draftsmith.eval.reading import measure_alphas

_BATCH = 16


def evaluate_from_states(config: StatesEvalConfig) -> JsonObject:
    """Measure alpha and predict tau of every draft on every set; write states.json."""
    with Run(config.out) as run:
        run.lock()
        figures = _measured(config)
        write_json_atomic(run.out / "states.json", {"figures": figures})
    return {"out": config.out, "figures": figures}


def _measured(config: StatesEvalConfig) -> list[JsonObject]:
    target = load_model(config.target, **loading(config), layers=False)
    options: JsonObject = {"device": str(target.device), "dtype": dtype_name(target)}
    named = parse_named("draft", config.draft)
    drafts = {name: load_draft(source, target, **options) for name, source in named.items()}
    read = [draft.hidden_layers for draft in drafts.values() if isinstance(draft, Head)]
    digest = checkpoint_digest(config.target, config.revision)
    layers = cached_layers(sorted(set(chain.from_iterable(read))))
    states = StoredStates(config.states, target, digest)
    methods = [Method.of(tree, "speculative") for tree in config.tree]
    tally = Tally()
    # Equal questions are one group, also in several sets.
    asked: dict[str, int] = {}
    kinds = dict.fromkeys(config.id, "id") | dict.fromkeys(config.ood, "ood")
    for directory, kind in kinds.items():
        rows = [row for row in set_rows(directory) if row["prompt_ids"]]
        texts = [Continuation(row["id"], row["prompt_ids"], row["response_ids"]) for row in rows]
        states.require([text.ids for text in texts], layers, 2**31, directory)
        sampling = _sampling(directory, rows)
        measured = measure_alphas(
            target, drafts, texts, sampling, methods, batch_size=_BATCH, states=states
        )
        groups = [asked.setdefault(row["asked"], len(asked)) for row in rows]
        for name, counts in measured.items():
            where = Where(name, 1, Path(directory).name, kind, sampling.temperature)
            tally.extend(where, groups, counts)
    most = {method.tree: method.most_tokens for method in methods}
    return rows_as_json(estimate(tally.table(), base=next(iter(drafts)), most_tokens=most))


def _sampling(directory: str, rows: list[JsonObject]) -> Sampling:
    """What the answers were drawn with."""
    config = read_manifest(Path(directory))["config"]
    temperatures = {row["temperature"] for row in rows}
    if len(temperatures) != 1 or None in temperatures:
        raise InputError(f"{directory}: its answers have several temperatures, or unknown ones")
    reshaped = {key: config[key] for key in ("top_k", "top_p", "min_p")}
    return Sampling(temperature=temperatures.pop(), **reshaped)
