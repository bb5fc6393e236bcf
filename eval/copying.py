"""Drafts that copy from the text, alone or beside a model: what they would have proposed along the
target's own continuations.

A copied token y has q(y) = 1, so alpha at its position is p(y), and 0 where nothing is proposed.
Given that the text's token x was output, it was accepted if and only if it is y.

Legend: N positions, V vocabulary, P prompts, L positions of the longest continuation, D depths, K
ranks.
"""

from collections.abc import Iterable, Mapping, Sequence

import numpy as np
import torch
from torch import Tensor

from draftsmith.core.retrieval_text import read_documents
from draftsmith.decode import PromptLookupProposer
from draftsmith.decode.propose.lookup_first import copy_at
from draftsmith.decode.propose.prompt_lookup import NgramIndex
from draftsmith.decode.propose.sources import (
    AnyDraft,
    CopyingDraft,
    JoinedDraft,
    proposer_of,
)
from draftsmith.decode.propose.text_proposer import TextProposer, Trie
from draftsmith.decode.suffix_index import SuffixIndex
from draftsmith.decode.tree import chain
from draftsmith.drafts.draft_sources import JOINED, is_copying, is_joined
from draftsmith.drafts.load import Draft, LoadedModels
from draftsmith.eval.formulas import Continuation
from draftsmith.eval.predict import Floats, Traces

# Stands beyond the end of a text; -1 where nothing was copied.
OUTSIDE = -2


def loaded_drafts(sources: Mapping[str, str], pair: LoadedModels) -> dict[str, AnyDraft]:
    """Return the drafts of some sources. pair: has those of `method.models_of(sources)`."""
    drafts: dict[str, AnyDraft] = {}
    by_source: dict[str, Draft] = {}
    for name, draft in pair.drafts.items():
        by_source[sources[name].removeprefix(JOINED)] = draft
    for name, source in sources.items():
        if is_copying(source):
            kind, _, file = source.partition(":")
            index = SuffixIndex.build(read_documents(file, pair.tokenizer)) if file else None
            drafts[name] = CopyingDraft(kind, index)
        elif is_joined(source):
            drafts[name] = JoinedDraft(by_source[source.removeprefix(JOINED)])
        else:
            drafts[name] = pair.drafts[name]
    return drafts


def model_of(draft: AnyDraft) -> Draft | None:
    """Return the model that a draft drafts with; None for one without weights."""
    if isinstance(draft, CopyingDraft):
        return None
    return draft.model if isinstance(draft, JoinedDraft) else draft


def copied_tokens(
    texts: Sequence[Continuation], depths: int, draft: CopyingDraft | JoinedDraft, *, beside: bool
) -> tuple[np.ndarray[tuple[int, ...], np.dtype[np.int64]], Floats]:
    """Return what a draft copies as a chain below every position of some texts, `[D, P, L]`, and 1
    where that stands alone, without the model beside it, `[1, P, L]`.

    Entry (d, i, t) was proposed for token t of text i from d tokens before; -1 if nothing was.
    beside: as `stands_beside`.
    """
    longest = max(len(text.output_ids) for text in texts)
    tokens_DPL = np.full((depths, len(texts), longest), -1)
    alone_1PL = np.zeros((1, len(texts), longest))
    joined = isinstance(draft, JoinedDraft)
    copier = PromptLookupProposer() if joined else proposer_of(draft)
    assert isinstance(copier, TextProposer)
    for i, text in enumerate(texts):
        row = copier.row(text.prompt_ids)
        for root, token in enumerate(text.output_ids):
            if joined:
                assert isinstance(row, NgramIndex)
                copied, alone_1PL[0, i, root] = copy_at(row, depths, beside=beside)
            else:
                trie = Trie(chain(depths))
                row.draft(trie)
                copied = list(trie.flatten().tokens)
            for d, proposed in enumerate(copied[: len(text.output_ids) - root]):
                tokens_DPL[d, i, root + d] = proposed
            row.read([token])
    return tokens_DPL, alone_1PL


def copied_traces(
    texts: Sequence[Continuation],
    p_NV: Tensor,
    depths: int,
    rules: Iterable[str],
    draft: CopyingDraft | JoinedDraft,
    *,
    beside: bool = True,
) -> Traces:
    """Return the traces of what copies, on texts whose target distributions are `p_NV`.

    p: at every position of the texts, one after another. rules: those of `ranks_needed`; on a
    chain each accepts the one candidate alike.
    """
    tokens_DPL, alone_1PL = copied_tokens(texts, depths, draft, beside=beside)
    lengths_P = np.array([len(text.output_ids) for text in texts])
    x_PL = np.full(tokens_DPL.shape[1:], OUTSIDE)
    for i, text in enumerate(texts):
        x_PL[i, : len(text.output_ids)] = text.output_ids
    same_DPL = (tokens_DPL == x_PL).astype(np.float64)
    offers_DPL = (tokens_DPL >= 0).astype(np.float64)
    inside_PL = x_PL != OUTSIDE
    y_N = torch.tensor(tokens_DPL[0, inside_PL], device=p_NV.device)
    y_N1 = y_N.unsqueeze(1)
    p_y_N1 = p_NV.gather(1, y_N1.clamp(min=0)) * (y_N1 >= 0)
    alpha_1PL = np.zeros((1, *x_PL.shape))
    alpha_1PL[0, inside_PL] = p_y_N1[:, 0].double().cpu()
    values: dict[str, Floats] = dict.fromkeys(("alpha", "greedy", "match"), alpha_1PL)
    values |= {"missing": np.zeros_like(alpha_1PL), "offers": offers_DPL}
    values |= {"copied": offers_DPL, "copied_alpha": alpha_1PL, "alone": alone_1PL}
    # No rank has the order of a token that was not copied.
    order_DPL = np.where(same_DPL == 1, 1, np.inf)
    values |= {"ratio": same_DPL, "order": order_DPL, "belief": same_DPL}
    values |= {rule: same_DPL[..., None] for rule in rules}
    return Traces(lengths_P, False, values)


def joined_traces(copied: Traces, drafted: Traces) -> Traces:
    """Return the traces of a model with lookup beside it: those of the model, and of the copies.

    alpha is without bias: where a copy is the text's token, it adds the chance that the model's was
    refused. Four more values, as of `Traces`:
    * alone: 1 where the model is left out
    * copied_same: 1 where a copied token is the text's
    * drafted: 1 where the model drafted
    * drafted_alpha: its alpha there, else 0
    """
    copies = {key: copied.values[key] for key in ("copied", "copied_alpha", "alone")}
    same_DPL = copied.values["ratio"]
    refused_1PL = 1 - np.minimum(1, drafted.values["ratio"][:1])
    drafted_1PL = 1 - copies["alone"]
    drafted_alpha = drafted_1PL * drafted.values["alpha"]
    more = drafted_1PL * same_DPL[:1] * refused_1PL
    alpha = drafted_alpha + more + copies["alone"] * copies["copied_alpha"]
    values = {"alpha": alpha, "copied_same": same_DPL}
    values |= {"drafted": drafted_1PL, "drafted_alpha": drafted_alpha}
    return Traces(drafted.lengths_P, drafted.any_depth, drafted.values | copies | values)
