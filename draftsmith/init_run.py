"""`init`: make a draft to start from, measure it, write it."""

import copy
import dataclasses
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from transformers import PreTrainedModel

from draftsmith.config import InitConfig
from draftsmith.core.devices import generators_kept
from draftsmith.core.errors import InputError
from draftsmith.core.hub import quiet
from draftsmith.core.io import JsonObject, atomic_dir, check_out, checksums, write_sealed
from draftsmith.core.models import (
    fingerprint,
    load_model,
    parameter_count,
    read_per_token,
    text_config,
    vocabulary_size,
)
from draftsmith.core.options import command_line, configured, identity
from draftsmith.core.prompts import read_prompts, room_for_prompts
from draftsmith.core.ranks import say
from draftsmith.core.records import RECORD, provenance
from draftsmith.core.runs import record_finished
from draftsmith.core.sampling import Sampling
from draftsmith.core.settings import loading
from draftsmith.core.tokenization import load_tokenizer
from draftsmith.decode.supported_models import ability
from draftsmith.drafts.draft_vocabulary import (
    check_draft_vocabulary,
    likely_tokens,
    token_counts,
    trim,
    write_draft_vocabulary,
)
from draftsmith.drafts.load import LoadedModels, load_models
from draftsmith.drafts.make.prune import prune
from draftsmith.drafts.make.size import too_costly
from draftsmith.drafts.make.transplant import transplant
from draftsmith.eval import timing
from draftsmith.eval.alpha import measure_alphas
from draftsmith.eval.counts import of_method
from draftsmith.eval.formulas import Continuation
from draftsmith.train.data import load_examples

_BATCH = 8
# How answers are drawn, and the draft measured.
_DRAWN = Sampling(temperature=1.0)
_BLOCK = 1024  # tokens of a text that are read at a time


@quiet()
@generators_kept()
def init(config: InitConfig | None = None, **options: Any) -> JsonObject:
    """Make a draft by `config.method`, write it to `config.out` with the target's tokenizer, and
    measure it.

    Return what `init --json` prints. Costs are parameters read per token. The rest are means over
    `positions` of the answers to --prompts, None without prompts: `alpha` under speculative
    sampling, sum_x min(p, q); `alpha_greedy_draft`, if the draft takes its likeliest token,
    p(argmax q); `alpha_match`, if draft and target must sample the same token, sum_x p q;
    `missing_mass`, the target's probability of tokens that the draft cannot draft. Raise InputError
    for models that do not fit, before anything is written.
    """
    config = configured(InitConfig, config, options)
    out = Path(config.out)
    if out.exists() and (not out.is_dir() or any(out.iterdir())):
        raise InputError(f"--out {out}: exists and is not empty; name another directory")
    check_out(out)
    pair = load_models(config.target, chat_template=config.chat_template, **loading(config))
    target = pair.target
    ability(target)  # raises InputError for a target that cannot check drafts
    texts = _answers(config, pair)
    draft, notes = _make(config, pair, texts)
    used = draft
    ids_D = None
    whole = min(vocabulary_size(draft), vocabulary_size(target))
    if config.draft_vocab_size not in (None, whole):
        check_draft_vocabulary("draft_vocab_size", config.draft_vocab_size, whole)
        ids_D, said = _drafted_tokens(config, whole, pair, texts)
        notes.append(f"tokens: drafts {len(ids_D):,} of {whole:,}, {said}")
        used = copy.deepcopy(draft)
        trim(used, ids_D)
    costs = {"draft_cost": read_per_token(used), "target_cost": read_per_token(target)}
    if warning := too_costly(costs["draft_cost"], costs["target_cost"]):
        say(f"warning: {warning}")
    figures = _alphas(target, used, texts)
    command = command_line("init", config)
    with atomic_dir(out) as directory:
        draft.save_pretrained(directory)
        if ids_D is not None:
            write_draft_vocabulary(directory, ids_D)
        pair.tokenizer.save_pretrained(directory)
        record = {
            "kind": "draft-lm",
            "target": config.target,
            "target_fingerprint": fingerprint(target),
            "made": notes,
            **provenance(command, dataclasses.asdict(config)),
        }
        write_sealed(directory / RECORD, record | {"files": checksums(directory)})
        inputs = {"target": config.target, "out": config.out}
        record_finished(directory, "draft (lm)", identity(config), command, inputs)
    return {
        "out": str(out),
        "parameters": parameter_count(used),
        **costs,
        **figures,
        "notes": notes,
    }


def in_words(summary: JsonObject) -> list[str]:
    """Return what `init` prints: notes, cost, and alpha."""
    cost = summary["draft_cost"]
    share = cost / summary["target_cost"]
    lines = [
        *summary["notes"],
        f"cost:   {share:.3f} of the target ({cost:,} parameters read per token)",
    ]
    if summary["alpha"] is None:
        return [*lines, "alpha:  not measured; add --prompts"]
    lines.append(
        f"alpha:  {summary['alpha']:.3f} speculative, {summary['alpha_greedy_draft']:.3f} greedy "
        f"draft, {summary['alpha_match']:.3f} sample match (temperature 1, "
        f"{summary['positions']} positions)"
    )
    if summary["missing_mass"]:
        lines.append(
            f"missing: {summary['missing_mass']:.3f} of the target's mass cannot be drafted"
        )
    return lines


def _drafted_tokens(
    config: InitConfig, whole: int, pair: LoadedModels, texts: Sequence[Continuation]
) -> tuple[Tensor, str]:
    """Return the commonest tokens of --data, else of the answers, and what is said of them. If
    these are few, the target says which others are likely.
    """
    answers = [(text.prompt_ids, text.output_ids) for text in texts]
    source = "the answers to --prompts"
    if config.data:
        rows = load_examples(config.data, pair.tokenizer, _BLOCK).rows
        answers = [(row["prompt_ids"], row["response_ids"]) for row in rows]
        source = "--data"
    size = config.draft_vocab_size
    assert size is not None
    counts = token_counts(response for _, response in answers)
    read = ((*prompt, *response) for prompt, response in answers)
    ids_D = torch.tensor(likely_tokens(counts, size, pair.target, read, whole))
    return ids_D, f"the commonest of {source}"


def _make(
    config: InitConfig, pair: LoadedModels, texts: Sequence[Continuation]
) -> tuple[PreTrainedModel, list[str]]:
    """Return the draft, and lines on how it was made."""
    target = pair.target
    keep = config.keep or "even"
    if config.method == "prune":
        depth = text_config(target).num_hidden_layers
        draft, layers = prune(
            target,
            num_layers=config.num_layers or max(1, depth // 4),
            keep=keep,
            intermediate_size=config.intermediate_size,
            texts=[text.ids for text in texts],
        )
        numbers = " ".join(map(str, layers))
        return draft, [f"layers {numbers} of the target's {depth}"]
    assert config.donor is not None
    donor = load_model(config.donor, **loading(config) | {"revision": None})
    notes = []
    if config.num_layers is not None:
        donor, layers = prune(donor, num_layers=config.num_layers, keep=keep)
        numbers = " ".join(map(str, layers))
        notes.append(f"layers {numbers} of the donor")
    donor_tokenizer = load_tokenizer(config.donor, config.trust_remote_code)
    draft, rows = transplant(donor, donor_tokenizer, target, pair.tokenizer)
    notes.append(
        f"embeddings: {rows.shared} of tokens that both have, {rows.from_pieces} means of the "
        f"donor's pieces, {len(rows.unmapped)} new"
    )
    return draft, notes


def _answers(config: InitConfig, pair: LoadedModels) -> list[Continuation]:
    """Return the target's answers to --prompts; none without."""
    if config.prompts is None:
        return []
    read = read_prompts(
        config.prompts,
        pair.tokenizer,
        prompt_tokens=config.prompt_tokens,
        max_tokens=room_for_prompts(pair.context, config.max_new_tokens),
        limit=config.max_prompts,
    )
    read.say_skipped()
    return timing.answers(
        pair.target,
        read.prompts,
        _DRAWN,
        max_new_tokens=config.max_new_tokens,
        batch_size=_BATCH,
        seed=config.seed,
    )


def _alphas(
    target: PreTrainedModel, draft: PreTrainedModel, texts: Sequence[Continuation]
) -> JsonObject:
    """Return the number of positions, alpha under the three rules, and the mass that cannot be
    drafted. Without texts, these are None.
    """
    keys = {
        "alpha": "alpha",
        "alpha_greedy_draft": "greedy",
        "alpha_match": "match",
        "missing_mass": "missing",
    }
    if not texts:
        return {"positions": 0} | dict.fromkeys(keys)
    measured = measure_alphas(target, {"draft": draft}, texts, _DRAWN, batch_size=_BATCH)
    sums = {key: sum(values) for key, values in of_method(measured["draft"]).items()}
    means = {key: sums[name] / sums["positions"] for key, name in keys.items()}
    return {"positions": sums["positions"], **means}
