"""Answers of a target that is nowhere in memory, and their states in files: what an evaluation
measures acceptance on in place of the target's own decoding.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import chain
from pathlib import Path

from draftsmith.core.chats import Chat
from draftsmith.core.distilled_sets import described, set_rows
from draftsmith.core.errors import InputError
from draftsmith.core.io import JsonObject, read_manifest
from draftsmith.core.model_configs import read_config, without_values
from draftsmith.core.models import (
    dtype_name,
    load_model,
    memory_bytes,
    parameter_count,
    read_per_token,
)
from draftsmith.core.prompts import Prompt
from draftsmith.core.ranks import say
from draftsmith.core.settings import Sampling, loading, tokenizing
from draftsmith.core.state_store import StoredStates, cached_layers, checkpoint_digest
from draftsmith.core.tokenization import load_tokenizer
from draftsmith.drafts.draft_sources import models_of
from draftsmith.drafts.heads import Head
from draftsmith.drafts.load import LoadedModels, load_draft
from draftsmith.eval.config import EvalConfig, StatesEvalConfig
from draftsmith.eval.request import EvalRequest
from draftsmith.eval.schema import ModelRow, SuiteKind
from draftsmith.eval.suites import Suite
from draftsmith.eval.timing import BaselineMeasurement


@dataclass(frozen=True)
class Answers:
    """baselines: the answers of each suite. pair: its target was loaded without its layers."""

    suites: list[Suite]
    baselines: dict[str, BaselineMeasurement]
    pair: LoadedModels
    states: StoredStates
    fingerprint: str

    def whole(self, part: ModelRow) -> ModelRow:
        """The facts of the whole target, from those of the part that is here."""
        config = read_config(self.pair.target_name, trust_remote_code=False)
        model = without_values(config, self.pair.target.dtype)
        row = part.copy()
        row["fingerprint"] = self.fingerprint
        row["parameters"] = parameter_count(model)
        row["read_per_token"] = read_per_token(model)
        row["memory_bytes"] = memory_bytes(model)
        return row


def options_of(config: StatesEvalConfig) -> EvalConfig:
    """The options of an evaluation that decodes nothing, with the sampling that the answers were
    drawn with.
    """
    sampling = _sampling([*config.id, *config.ood])
    return EvalConfig(
        target=config.target,
        draft=config.draft,
        id=config.id,
        ood=config.ood,
        tree=config.tree,
        out=config.out,
        temperature=[sampling.temperature],
        top_k=sampling.top_k or 0,
        top_p=sampling.top_p or 1.0,
        min_p=sampling.min_p or 0.0,
        repetition_penalty=1.0,
        presence_penalty=0.0,
        frequency_penalty=0.0,
        compile=False,
        speed_prompts=0,
        **loading(config),
    )


def read_answers(request: EvalRequest, directory: str) -> Answers:
    """Read sets and load models. directory: of the states. Raise InputError for answers without
    states.
    """
    config = request.config
    target = load_model(config.target, **loading(config), layers=False)
    options: JsonObject = {"device": str(target.device), "dtype": dtype_name(target)}
    drafts = {}
    for name, source in models_of(request.drafts).items():
        drafts[name] = load_draft(source, target, **options)
    read = [draft.hidden_layers for draft in drafts.values() if isinstance(draft, Head)]
    layers = cached_layers(sorted(set(chain.from_iterable(read))))
    digest = checkpoint_digest(config.target, config.revision)
    states = StoredStates(directory, target, digest)
    suites = []
    baselines = {}
    for name, source in (request.id_sets | request.ood_sets).items():
        rows = [row for row in set_rows(source) if row["prompt_ids"]]
        whole = [[*row["prompt_ids"], *row["response_ids"]] for row in rows]
        states.require(whole, layers, 2**31, source)
        baselines[name] = BaselineMeasurement(
            output_ids=[row["response_ids"] for row in rows],
            finish_reason=[row["finish_reason"] for row in rows],
        )
        say(f"{source}: {'; '.join(described(read_manifest(Path(source))))}")
        prompts = []
        for row in rows:
            ids = tuple(row["prompt_ids"])
            # Which tokens are the user's is unknown, so that only equal prompts are one group.
            prompts.append(Prompt(row["id"], name, ids, chat=Chat(()), asked=int(row["asked"], 16)))
        kind: SuiteKind = "id" if name in request.id_sets else "ood"
        suites.append(Suite(name, kind, source, tuple(prompts), (), len(prompts)))
    tokenizer = load_tokenizer(config.target, **tokenizing(config))
    pair = LoadedModels(config.target, target, tokenizer, drafts)
    return Answers(suites, baselines, pair, states, digest)


def _sampling(sets: Sequence[str]) -> Sampling:
    """What the answers were drawn with."""
    found = set()
    for source in sets:
        directory = Path(source.rpartition("=")[2])
        config = read_manifest(directory)["config"]
        reshaped = {key: config[key] for key in ("top_k", "top_p", "min_p")}
        for temperature in {row["temperature"] for row in set_rows(str(directory))}:
            if temperature is None:
                raise InputError(f"{directory}: its answers have an unknown temperature")
            found.add(Sampling(temperature=temperature, **reshaped))
    if len(found) != 1:
        raise InputError("--id, --ood: their answers were drawn in several ways")
    return found.pop()
