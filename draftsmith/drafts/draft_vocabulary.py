"""Draft vocabularies: drafts with output rows for the commonest tokens only, which never draft the
others.

At a vocabulary of 128,000 tokens the output projection is most of what a small draft reads per
token, and most of its rows are never drafted (FR-Spec, arXiv 2502.14856; EAGLE-3, arXiv 2503.01840,
has the same in its heads). A language model stays whole on disk, and other engines load it as it
is; a small file beside it names the tokens that draftsmith drafts, as offsets like those of an
EAGLE-3 head (`d2t`). Loading keeps only their rows of the output projection.

Legend: V the whole vocabulary, D tokens of the draft vocabulary, N tokens of a text.
"""

import itertools
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor, nn
from transformers import PreTrainedModel

from draftsmith.core.errors import InputError
from draftsmith.core.hub import cached
from draftsmith.core.models import vocabulary_size
from draftsmith.core.sampling import Sampling, probs

FILE = "draft_vocabulary.safetensors"
_BUFFER = "target_ids_D"
# Of the texts on which the target says what it finds likely.
_TEXTS = 16
_TOKENS = 64
# Of each, the last positions are read: over a large vocabulary they take longer than the text.
_POSITIONS = 16
# A draft that is worth having, for the choice of its vocabulary.
_USUAL_ALPHA = 0.6
_DEPTH = 3
_HALVINGS = 8


def check_draft_vocabulary(option: str, size: int, whole: int, has_one: str | None = None) -> None:
    """Raise InputError if `size` exceeds the vocabulary, or if the draft `has_one` has a draft
    vocabulary already.
    """
    if has_one is not None:
        raise InputError(f"{option}: {has_one} already has one ({FILE}); leave the option out")
    if size > whole:
        raise InputError(f"{option}: {size} is more than the vocabulary of {whole}; lower it")


def token_counts(rows: Iterable[Sequence[int]]) -> Counter[int]:
    """How often each token occurs in these sequences."""
    return Counter(itertools.chain.from_iterable(rows))


def commonest_tokens(counts: Counter[int], size: int, likely: Sequence[float] = ()) -> list[int]:
    """The `size` commonest tokens, as sorted ids; ties, and tokens that do not occur, by `likely`
    (a probability each), then by id.
    """
    known = range(max(size, max(counts, default=0) + 1, len(likely)))
    beside = dict(enumerate(likely))
    by_count = sorted(known, key=lambda token: (-counts[token], -beside.get(token, 0.0)))
    return sorted(by_count[:size])


@torch.no_grad()
def mean_probabilities(target: PreTrainedModel, texts: Iterable[Sequence[int]]) -> Tensor:
    """What the target finds likely at the ends of some of these texts: the mean of its
    distributions `[V]`, fp32 on the CPU.
    """
    total_V = torch.zeros(vocabulary_size(target))
    for text in itertools.islice(texts, _TEXTS):
        ids_1N = torch.tensor([text[-_TOKENS:]], device=target.device)
        out = target(ids_1N, use_cache=False, logits_to_keep=_POSITIONS)
        # Some models ignore `logits_to_keep` and return all positions.
        logits_NV = out.logits[0, -_POSITIONS:]
        total_V += probs(logits_NV, Sampling(temperature=1.0)).sum(0).cpu()
    return total_V / total_V.sum().clamp_min(1)


def likely_tokens(
    counts: Counter[int],
    size: int,
    target: PreTrainedModel,
    texts: Iterable[Sequence[int]],
    whole: int,
) -> list[int]:
    """The `size` commonest tokens, as sorted ids. Places that are left go to the tokens that the
    target finds likeliest on `texts`, not to special and unused ones, which have the lowest ids.
    whole: number of tokens to choose from; the target may have more.
    """
    free = size - sum(count > 0 for count in counts.values())
    likely = mean_probabilities(target, texts)[:whole].tolist() if free > 0 else []
    return commonest_tokens(counts, size, likely)


@dataclass(frozen=True)
class VocabularySize:
    """How many tokens a draft drafts. missing: the target's mass on other tokens, on texts that did
    not choose them. cost: what the draft reads per token, as a share of the target.
    """

    tokens: int
    missing: float
    cost: float

    @property
    def speed(self) -> float:
        """Tokens per time of the target's step, on a chain of a usual draft."""
        alpha = _USUAL_ALPHA * (1 - self.missing)
        tau = sum(alpha**depth for depth in range(_DEPTH + 1))
        return tau / (1 + _DEPTH * self.cost)


def fastest_size(
    target: PreTrainedModel, texts: Sequence[Sequence[int]], *, layers: float, projection: float
) -> VocabularySize:
    """Choose how many tokens to draft, from the curve of missing mass against cost: the whole
    vocabulary, a half of it, a quarter and so on.

    texts: every second chooses tokens, the others say what is missing. layers: what the draft
    reads beside its output projection; projection: over the whole vocabulary. Both are shares of
    the target.
    """
    whole = vocabulary_size(target)
    order_V = mean_probabilities(target, texts[::2]).argsort(descending=True)
    covered_V = mean_probabilities(target, texts[1::2])[order_V].cumsum(0)
    sizes = []
    for halvings in range(_HALVINGS):
        tokens = max(1, whole >> halvings)
        missing = max(0.0, 1 - float(covered_V[tokens - 1]))
        sizes.append(VocabularySize(tokens, missing, layers + projection * tokens / whole))
    return max(sizes, key=lambda size: size.speed)


def rarest_token(counts: Counter[int], embedding_VH: Tensor) -> int:
    """The token that is rarest in the text; of several the last, which in a padded vocabulary is
    unused.

    Not one without an embedding, as padding often is: masked slots would begin as zeros, all alike.
    """
    largest_V = embedding_VH.abs().amax(-1)
    embedded: list[int] = largest_V.nonzero().flatten().tolist()
    return min(embedded, key=lambda token: (counts[token], -token))


def to_target(logits: Tensor, ids_D: Tensor, size: int) -> Tensor:
    """Logits `[..., D]` of these tokens as logits over all `size` tokens, `[..., V]`: -inf for the
    others.
    """
    out = logits.new_full((*logits.shape[:-1], size), -torch.inf)
    return out.index_copy_(-1, ids_D.to(logits.device), logits)


def draft_rows(ids_D: Tensor, tokens_N: Tensor) -> Tensor:
    """The draft's row of each token (any shape), D for a token that it does not draft. `ids_D` is
    sorted.
    """
    rows_N = torch.searchsorted(ids_D, tokens_N).clamp_max(len(ids_D) - 1)
    return torch.where(ids_D[rows_N] == tokens_N, rows_N, len(ids_D))


def drafted_rows(ids_D: Tensor, tokens_N: Tensor) -> tuple[Tensor, Tensor]:
    """A row of the draft for each token, and whether the draft has the token; the last row stands
    for the others.
    """
    rows_N = draft_rows(ids_D, tokens_N)
    return rows_N.clamp_max(len(ids_D) - 1), rows_N < len(ids_D)


def offsets(ids_D: Tensor) -> Tensor:
    """`d2t`: what is added to a row's number to get its token."""
    return ids_D - torch.arange(len(ids_D), device=ids_D.device)


def from_offsets(d2t: Tensor, size: int) -> Tensor | None:
    """The tokens that `d2t` names, in its order; None unless they are distinct ids below `size`."""
    if d2t.ndim != 1 or not len(d2t) or d2t.is_floating_point():
        return None
    ids_D = d2t + torch.arange(len(d2t), device=d2t.device)
    differ = len(ids_D.unique()) == len(ids_D)
    known_D = (ids_D >= 0) & (ids_D < size)
    return ids_D if differ and known_D.all() else None


class DraftVocabulary(nn.Module):
    """A head over the tokens `target_ids_D` of the target's vocabulary; `reduced` says whether
    these are a part of it.

    On disk a part is the offsets `d2t` (target id = draft id + offset) and the mask `t2d`.
    """

    d2t: Tensor
    t2d: Tensor
    target_ids_D: Tensor

    def hold_vocabulary(self, drafted: int, size: int) -> None:
        """Begin with the first `drafted` tokens of `size`."""
        self.vocab_size = size
        self.reduced = drafted < size
        ids_D = torch.arange(drafted)
        self.register_buffer("target_ids_D", ids_D, persistent=False)
        if self.reduced:
            self.register_buffer("d2t", torch.zeros_like(ids_D))
            self.register_buffer("t2d", torch.arange(size) < drafted)

    def set_draft_vocab(self, ids: Sequence[int]) -> None:
        """Make these the tokens it drafts: sorted target ids, as many as it has rows."""
        chosen = torch.tensor(ids, dtype=torch.long, device=self.d2t.device)
        self.d2t = offsets(chosen)
        self.t2d = torch.zeros_like(self.t2d).index_fill_(0, chosen, True)
        self.read_draft_vocab()

    def read_draft_vocab(self) -> None:
        """Take the draft vocabulary from `d2t`, after weights were loaded."""
        if self.reduced:
            self.target_ids_D = self.d2t + torch.arange(len(self.d2t), device=self.d2t.device)

    def to_target(self, logits: Tensor) -> Tensor:
        """Logits over the target's vocabulary `[..., V]`: -inf for tokens that the head cannot
        draft.
        """
        return to_target(logits, self.target_ids_D, self.vocab_size) if self.reduced else logits


def write_draft_vocabulary(directory: Path, ids_D: Tensor) -> None:
    """Name these tokens beside a language model that was saved whole."""
    save_file({"d2t": offsets(ids_D.cpu()).contiguous()}, directory / FILE)


def read_draft_vocabulary(name: str, size: int) -> Tensor | None:
    """The draft vocabulary beside a language model in a directory or on the hub; None if it drafts
    all tokens.
    """
    if (file := cached(name, FILE)) is None:
        return None
    ids_D = from_offsets(load_file(file)["d2t"], size)
    if ids_D is None:
        raise InputError(
            f"{file}: does not name tokens of a vocabulary of {size}; copy the whole directory "
            "again"
        )
    return ids_D.sort().values


def attach_draft_vocabulary(model: PreTrainedModel, ids_D: Tensor) -> None:
    """Note on a whole model which tokens it drafts. Its forward stays as it is; `trim` changes
    it.
    """
    model.register_buffer(_BUFFER, ids_D.to(model.device), persistent=False)


def draft_vocabulary(model: nn.Module) -> Tensor | None:
    """The tokens `[D]` that a language model drafts, sorted; None for all of them."""
    return model._buffers.get(_BUFFER)


@torch.no_grad()
def trim(model: PreTrainedModel, ids_D: Tensor) -> None:
    """Keep only these rows of the output projection, a plain linear layer.

    The model's forward still gives logits over its whole vocabulary, -inf for all other tokens.
    Such a model cannot be saved: its weights are not those of its config.
    """
    output = model.get_output_embeddings()
    assert type(output) is nn.Linear, f"the output projection is a {type(output).__name__}"
    ids_D = ids_D.to(output.weight.device)
    # On the meta device, so that no weights are drawn: that would move the global random state.
    rows = nn.Linear(output.in_features, len(ids_D), bias=output.bias is not None, device="meta")
    for name, whole in output.named_parameters():
        setattr(rows, name, nn.Parameter(whole.detach()[ids_D], whole.requires_grad))
    rows.train(output.training)
    # The embedding stays whole, so that the two are no longer one tensor.
    model.config.get_text_config(decoder=True).tie_word_embeddings = False
    model.config.tie_word_embeddings = False
    model.set_output_embeddings(rows)
    attach_draft_vocabulary(model, ids_D)
    # Behind everything that the model does to its logits: a soft cap (Gemma 2) would make -inf
    # finite.
    model.register_forward_hook(_over_all_tokens)


def _over_all_tokens(model: nn.Module, _: Any, output: Any) -> None:
    ids_D = draft_vocabulary(model)
    assert ids_D is not None and isinstance(model, PreTrainedModel)
    output.logits = to_target(output.logits, ids_D, vocabulary_size(model))
