"""Acceptance without a decoding loop: one forward of the target over its own text, and one of every
draft.

They give the expected acceptance of one drafted token under three rules (`docs/acceptance.md`) and,
by `eval.predict`, how many target calls a tree would have taken to write the same text.

Legend: B rows, T columns (tokens), C columns with logits, V vocabulary of the target, N positions,
D depths, L tokens of the longest continuation, K ranks.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import chain
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.nn.functional import cross_entropy
from torch.nn.utils.rnn import pad_sequence
from transformers import PreTrainedModel

from draftsmith.core.errors import RunError
from draftsmith.core.hidden_states import forward_with_states
from draftsmith.core.models import vocabulary_size
from draftsmith.core.penalties import Seen, penalised
from draftsmith.core.prompts import Prompt
from draftsmith.core.ranks import divided
from draftsmith.core.sampling import Sampling, acceptance, generator, probs, row_seed, uniforms
from draftsmith.decode import Tree, takes_trees
from draftsmith.decode.method import Method
from draftsmith.decode.propose.lookup_first import stands_beside
from draftsmith.decode.propose.network import fit_vocabulary
from draftsmith.decode.propose.sources import AnyDraft, CopyingDraft, JoinedDraft
from draftsmith.drafts.heads import Head
from draftsmith.drafts.load import Draft
from draftsmith.eval.copying import copied_traces, joined_traces, model_of
from draftsmith.eval.counts import Count, at_depths, decoded
from draftsmith.eval.formulas import (
    Continuation,
    Unrolled,
    draft_logits,
    model_logits,
    rank_chances,
)
from draftsmith.eval.parts import BINS, Inside, believed, by_confidence, confidence_names, parts_of
from draftsmith.eval.predict import Floats, PredictedCounts, Traces, predict, ranks_needed
from draftsmith.eval.text_figures import TEXT_VALUES, text_values

# Logits held at once, as a number of elements (256 MiB in fp32). Fewer rows are read at once to
# fit.
MAX_LOGITS = 2**26
# Prompts of a set whose likelihood is taken, and their first tokens: enough to tell text from none.
_READ = 16
_LONGEST = 256

# Traces of the next token, and all whose sums are counts.
OF_NEXT = ("alpha", "greedy", "match", "missing", *TEXT_VALUES)
SUMS = (*OF_NEXT[:4], "copied", "copied_alpha", "drafted", "drafted_alpha")


def _groups(rows: Sequence[Continuation], most_columns: int) -> list[Sequence[Continuation]]:
    """Halve the rows until each group has at most `most_columns` columns with logits, padding
    included, or one row.
    """
    prompts = [len(row.prompt_ids) for row in rows]
    longest = max(len(row.ids) for row in rows)
    columns = longest - min(prompts)
    if len(rows) == 1 or len(rows) * columns <= most_columns:
        return [rows]
    half = len(rows) // 2
    return _groups(rows[:half], most_columns) + _groups(rows[half:], most_columns)


@dataclass(frozen=True, eq=False)
class _Batch:
    """Rows side by side, padded on the right, and the N positions that predict a response token.

    row, column: where a position lies. index: of the predicted token `x` in its continuation.
    """

    rows: Sequence[Continuation]
    ids_BT: Tensor
    prompt_B: Tensor
    lengths_B: Tensor
    row_N: Tensor
    column_N: Tensor
    index_N: Tensor
    x_N1: Tensor

    @classmethod
    def of(cls, rows: Sequence[Continuation], device: torch.device) -> "_Batch":
        texts = [torch.tensor(row.ids) for row in rows]
        ids_BS = pad_sequence(texts, batch_first=True).to(device)
        ids_BT = ids_BS[:, :-1]  # the last token predicts nothing that is measured
        prompt_B = torch.tensor([len(row.prompt_ids) for row in rows], device=device)
        lengths_B = torch.tensor([len(row.output_ids) for row in rows], device=device)
        column_T = torch.arange(ids_BT.shape[1], device=device)
        mask_BT = column_T < (prompt_B + lengths_B - 1)[:, None]
        first_B1 = (prompt_B - 1).unsqueeze(1)
        predicts_BT = mask_BT & (column_T >= first_B1)
        row_N, column_N = predicts_BT.nonzero(as_tuple=True)
        return cls(
            rows=rows,
            ids_BT=ids_BT,
            prompt_B=prompt_B,
            lengths_B=lengths_B,
            row_N=row_N,
            column_N=column_N,
            index_N=column_N - prompt_B[row_N] + 1,
            x_N1=ids_BS[row_N, column_N + 1].unsqueeze(1),
        )

    def penalised(self, logits_NV: Tensor, sampling: Sampling, depth: int = 0) -> Tensor:
        """Return the logits at every position but the first `depth` of each row, given the text
        before it.
        """
        if not sampling.penalises:
            return logits_NV
        lengths = [max(0, len(row.output_ids) - depth) for row in self.rows]
        changed: list[Tensor] = []
        for row, own_LV in zip(self.rows, logits_NV.split(lengths), strict=True):
            prompt = len(row.prompt_ids) - row.answered
            seen = Seen.along(row.ids[:prompt], row.ids[prompt:], own_LV)
            changed.append(penalised(own_LV, sampling, seen))
        return torch.cat(changed)

    def of_texts(self, values_NB3: Tensor) -> Floats:
        """Sum values over the positions of each row."""
        sums_PB3 = values_NB3.new_zeros((len(self.rows), BINS, 3))
        sums: Floats = sums_PB3.index_add_(0, self.row_N.cpu(), values_NB3).numpy()
        return sums

    def candidates(self, seed: int, most: int) -> Tensor:
        """Uniforms `[B, L, K]` for the candidates of each position. They come from the row's own
        stream, the same for every draft and batch.
        """
        u_BLK = torch.zeros(len(self.rows), int(self.lengths_B.max()), most, dtype=torch.double)
        for b, row in enumerate(self.rows if most > 1 else ()):
            stream = generator(row_seed(seed, f"{row.id}/candidates"))
            indices = len(row.output_ids)
            u_BLK[b, :indices] = uniforms([stream], indices * most).view(-1, most)
        return u_BLK


@dataclass(frozen=True, eq=False)
class _Drafted:
    """A draft's logits at every position, for the token `depth` indices after the next one.

    sure: `Network.confidence` of these tokens, if the draft predicts it.
    """

    name: str
    depth: int
    depths: int
    logits_NV: Tensor
    sure_N: Tensor | None


@dataclass(eq=False)
class Reader:
    """Reads continuations with the target and every draft, as far as `methods` need them.

    All drafts share one forward of the target. max_logits: the most logits held at once per model,
    except for a single row. confidence: also trace it.
    drafts_see_penalties: as in `decode`; in engines they do not.
    texts: trace `text_figures` too.
    """

    target: PreTrainedModel
    drafts: Mapping[str, AnyDraft]
    sampling: Sampling
    methods: Sequence[Method]
    batch_size: int
    max_logits: int = MAX_LOGITS
    seed: int = 0
    confidence: bool = False
    drafts_see_penalties: bool = True
    texts: bool = False

    def __post_init__(self) -> None:
        self.depths = max((method.shape.depth for method in self.methods), default=1)
        self.ranks = ranks_needed(self.methods, self.sampling)
        # Whether to record where the draft orders each token, which costs a pass over the
        # vocabulary.
        rules = [method.verifier for method in self.methods]
        self.reads_order = self.sampling.greedy or "naive" in rules
        # Each model once, under the name of the draft that it is, if there is one.
        self.models: dict[str, Draft] = {}
        for name, draft in self.drafts.items():
            model = model_of(draft)
            if model is not None and all(model is not other for other in self.models.values()):
                self.models[name] = model

    def read(self, rows: Sequence[Continuation]) -> dict[str, Traces]:
        """Return the traces of every draft. Launched processes divide the batches. Raise RunError
        with model and prompt if logits are not finite.
        """

        def read_batch(index: int) -> list[dict[str, Traces]]:
            batch = rows[index * self.batch_size : (index + 1) * self.batch_size]
            columns = self.max_logits // vocabulary_size(self.target)
            return [self._read(group) for group in _groups(batch, columns)]

        batches = -(-len(rows) // self.batch_size)
        parts = list(chain.from_iterable(divided(batches, read_batch)))
        whole = {}
        for name in self.drafts:
            whole[name] = Traces.joined([part[name] for part in parts])
        return whole

    @torch.inference_mode()
    def _read(self, rows: Sequence[Continuation]) -> dict[str, Traces]:
        """Read some rows with one forward of each model."""
        batch = _Batch.of(rows, self.target.device)
        first = int(batch.prompt_B.min()) - 1  # columns before it predict no response token
        columns = batch.ids_BT.shape[1]
        read = [draft.hidden_layers for draft in self.models.values() if isinstance(draft, Head)]
        layers = sorted(set(chain.from_iterable(read)))
        logits_BCV, states_of_layer = self._target(batch, layers, first)
        at = (batch.row_N, batch.column_N - first)
        logits_NV = self._finite("", logits_BCV[at], batch, batch.row_N)
        p_NV = probs(batch.penalised(logits_NV, self.sampling), self.sampling)
        u_BLK = batch.candidates(self.seed, max(self.ranks.values(), default=1))
        traces_of: dict[int, Traces] = {}
        for name, draft in self.models.items():
            alone = isinstance(draft, PreTrainedModel)
            if isinstance(draft, PreTrainedModel):
                logits_BCV = model_logits(draft, batch.ids_BT, columns - first)
                logits_NV = logits_BCV.to(self.target.device)[at]
                unrolled: Unrolled = iter([(logits_NV, None)])
            else:
                unrolled = draft_logits(
                    draft,
                    states_of_layer,
                    batch.ids_BT,
                    batch.prompt_B == 1,
                    self.depths,
                    (batch.row_N, batch.column_N),
                )
            arrays: dict[str, Floats] = {}
            for depth, (logits_NV, sure_N) in enumerate(unrolled):
                depths = 1 if alone else self.depths
                drafted = _Drafted(name, depth, depths, logits_NV, sure_N)
                self._record(batch, p_NV, u_BLK, drafted, arrays)
            sure_PB3 = arrays.pop("confidence", None)
            lengths_B = batch.lengths_B.cpu()
            traces_of[id(draft)] = Traces(lengths_B.numpy(), alone, arrays, sure_PB3)
        traces = {}
        for name, each in self.drafts.items():
            traces[name] = self._traces(each, batch, p_NV, traces_of)
        return traces

    def _target(
        self, batch: _Batch, layers: Sequence[int], first: int
    ) -> tuple[Tensor, dict[int, Tensor]]:
        """The target's logits from column `first` on and its states."""
        columns = batch.ids_BT.shape[1]
        # Causal models never see the padding on the right, so nothing need be masked. Without a
        # mask some take every token that equals their padding for padding (XLM).
        out, states = forward_with_states(
            self.target,
            layers,
            input_ids=batch.ids_BT,
            attention_mask=torch.ones_like(batch.ids_BT),
            use_cache=False,
            logits_to_keep=columns - first,
        )
        return out.logits[:, first - columns :], dict(zip(layers, states, strict=True))

    def _traces(
        self, draft: AnyDraft, batch: _Batch, p_NV: Tensor, traces_of: Mapping[int, Traces]
    ) -> Traces:
        """Return the traces of a draft. traces_of: those of the models, by id."""
        own = traces_of.get(id(model_of(draft)))
        if not isinstance(draft, CopyingDraft | JoinedDraft):
            assert own is not None
            return own
        beside = stands_beside(p_NV.device, takes_trees(self.target))
        copied = copied_traces(batch.rows, p_NV, self.depths, self.ranks, draft, beside=beside)
        return copied if own is None else joined_traces(copied, own)

    def _record(
        self,
        batch: _Batch,
        p_NV: Tensor,
        u_BLK: Tensor,
        drafted: _Drafted,
        arrays: dict[str, Floats],
    ) -> None:
        """Record the draft's figures at `depth` (0: the next token)."""
        depth = drafted.depth
        # Positions of a row are consecutive in N, so n's root is n - depth if both are in one row.
        roots = max(0, len(batch.row_N) - depth)
        same_N = batch.row_N[depth:] == batch.row_N[:roots]
        n_N = depth + same_N.nonzero()[:, 0]
        if depth and not len(n_N):
            return
        x_N1 = batch.x_N1[n_N]
        chosen_NV = drafted.logits_NV[n_N - depth] if depth else drafted.logits_NV
        chosen_NV = fit_vocabulary(chosen_NV, vocabulary_size(self.target))
        logits_NV = self._finite(drafted.name, chosen_NV, batch, batch.row_N[n_N])
        if self.drafts_see_penalties:
            logits_NV = batch.penalised(logits_NV, self.sampling, depth)
        q_NV = probs(logits_NV, self.sampling)
        p_x_N1 = p_NV[n_N, x_N1[:, 0]].unsqueeze(1)
        tiny = torch.finfo(p_NV.dtype).tiny
        belief_NV = believed(self.sampling, q_NV, logits_NV)
        values = {
            "ratio": q_NV.gather(1, x_N1) / p_x_N1.clamp(min=tiny),
            "belief": belief_NV.gather(1, x_N1),
        }
        if drafted.sure_N is not None:
            values["belief"] = drafted.sure_N[n_N - depth].unsqueeze(1)
        if self.reads_order:
            values["order"] = _order_of(logits_NV, x_N1)
        rows = batch.row_N[n_N].tolist()
        indices = batch.index_N[n_N].tolist()
        u_NK = u_BLK[rows, indices].to(q_NV.device)
        for rule, count in self.ranks.items():
            values[rule] = rank_chances(rule, p_NV[n_N], q_NV, x_N1, u_NK, count)
        if not depth:
            values |= _next_token(p_NV, q_NV, logits_NV)
            if self.texts:
                values |= text_values(p_NV, q_NV, x_N1)
            if self.confidence:
                sums_NB3 = by_confidence(self.sampling, p_NV, q_NV, logits_NV)
                arrays["confidence"] = batch.of_texts(sums_NB3.cpu())
        for key, values_NK in values.items():
            by_rank = key in self.ranks
            if key not in arrays:
                depths = 1 if key in OF_NEXT else drafted.depths
                shape = (depths, *u_BLK.shape[:2], values_NK.shape[1])
                arrays[key] = np.zeros(shape if by_rank else shape[:3])
            found_NK = values_NK.double().cpu().numpy()
            arrays[key][depth, rows, indices] = found_NK if by_rank else found_NK[:, 0]

    def _finite(self, name: str, logits_NV: Tensor, batch: _Batch, row_N: Tensor) -> Tensor:
        """Return the logits; raise RunError if a row has a NaN or +inf, or only -inf (tokens that
        the model lacks).

        row_N: the row of the batch that each position is in.
        """
        broken_N = ~logits_NV.amax(-1).isfinite()  # max() returns a NaN or +inf as it is
        if broken_N.any():
            first = int(row_N[broken_N].min())
            model = f"draft {name}" if name else "the target"
            row = batch.rows[first].id
            raise RunError(
                f"{model}: non-finite logits on prompt {row}; try --dtype float32, or check its "
                "weights"
            )
        return logits_NV


def _next_token(p_NV: Tensor, q_NV: Tensor, logits_NV: Tensor) -> dict[str, Tensor]:
    """Acceptance of the first drafted token under three rules, and the mass that cannot be drafted;
    each `[N, 1]`.
    """
    # A sum of fp32 probabilities may exceed 1 by its rounding; a probability may not.
    alpha_N = acceptance(p_NV, q_NV).double()
    lacking_NV = p_NV.masked_fill(logits_NV > -torch.inf, 0)
    return {
        "alpha": alpha_N.clamp(max=1.0).unsqueeze(1),
        "greedy": p_NV.gather(1, q_NV.argmax(1, keepdim=True)),
        "match": (p_NV * q_NV).sum(1, keepdim=True),
        "missing": lacking_NV.sum(1, keepdim=True),
    }


def _order_of(logits_NV: Tensor, x_N1: Tensor) -> Tensor:
    """Where token x is in the order of all logits, from 1; beyond all if the draft lacks it."""
    own_N1 = logits_NV.gather(1, x_N1)
    ids_V = torch.arange(logits_NV.shape[1], device=x_N1.device)
    ahead_NV = (logits_NV > own_N1) | ((logits_NV == own_N1) & (ids_V < x_N1))
    ahead_N1 = ahead_NV.sum(1, keepdim=True)
    return 1 + ahead_N1.masked_fill(own_N1 == -torch.inf, len(ids_V))


def measure_alphas(
    target: PreTrainedModel,
    drafts: Mapping[str, AnyDraft],
    rows: Sequence[Continuation],
    sampling: Sampling,
    methods: Sequence[Method] = (),
    *,
    brief: Sequence[Method] = (),
    marks: Mapping[int, str] | None = None,
    **options: Any,
) -> dict[str, list[Count]]:
    """Count the acceptance of each draft at the positions that predict a response token, EOS
    included, and predict decoding with `methods`, and tau alone with `brief` ones.

    `rows` hold the target's own continuations at this sampling, so the mean over positions is over
    its own distribution. marks: tokens that begin and end spans; None counts no parts. options: of
    `Reader`.
    """
    readable: dict[str, AnyDraft] = {}
    counts: dict[str, list[Count]] = {}
    for name, draft in drafts.items():
        if isinstance(draft, CopyingDraft) and not draft.reads_text:
            nothing = [0.0] * len(rows)
            counts[name] = [Count("alpha", nothing), Count("positions", nothing)]
        else:
            readable[name] = draft
    every = list(dict.fromkeys([*methods, *brief]))
    confidence = marks is not None
    whole = Reader(target, readable, sampling, every, confidence=confidence, **options).read(rows)
    parts = {} if marks is None else parts_of(rows, marks)
    for name, draft in readable.items():
        read = whole[name]
        counts[name] = _accepted(read, parts)
        if read.confidence_PB3 is not None:
            counts[name] += _by_confidence(read.confidence_PB3)
        for method in every:
            if not _is_read(draft, method):
                continue
            if predicted := predict(method.shape, method.verifier, sampling, read):
                counts[name] += _expected(read, method, predicted, brief=method not in methods)
    return counts


def _accepted(read: Traces, parts: Mapping[str, Inside]) -> list[Count]:
    known = [key for key in SUMS if key in read.values]
    counts = [Count(key, read.sums(key)) for key in known]
    counts.append(Count("positions", read.lengths_P.tolist()))
    for part, inside_PL in parts.items():
        alpha_P = np.where(inside_PL, read.values["alpha"][0], 0).sum(1)
        positions_P = inside_PL.sum(1)
        counts.append(Count("alpha", alpha_P.tolist(), part=part))
        counts.append(Count("positions", positions_P.tolist(), part=part))
    return counts


def _by_confidence(sums_PB3: Floats) -> list[Count]:
    counts = []
    for part, sums_3P in zip(confidence_names(), sums_PB3.transpose(1, 2, 0), strict=True):
        for key, sums_P in zip(("drafted_mass", "sure", "taken"), sums_3P, strict=True):
            counts.append(Count(key, sums_P.tolist(), part=part))
    return counts


def _expected(
    read: Traces, method: Method, predicted: PredictedCounts, *, brief: bool
) -> list[Count]:
    counts = [
        decoded(method, "expected_tokens", read.lengths_P.tolist()),
        decoded(method, "expected_calls", predicted["target_calls"]),
    ]
    if brief:
        return counts
    counts.append(decoded(method, "calls_variance", predicted["variance"]))
    by_depth = {"expected_accepted": "accepted_by_depth", "expected_reached": "reached_by_depth"}
    for key, of in by_depth.items():
        counts += at_depths(method, key, predicted[of])  # type: ignore[literal-required]
    return counts


def _is_read(draft: AnyDraft, method: Method) -> bool:
    """Whether the traces of a draft hold all that it proposes on a tree."""
    if isinstance(draft, CopyingDraft):
        return method.is_chain  # what it proposes beside the first candidate is not read
    # A stop ends a copy by its counts, which the traces do not hold.
    stops = isinstance(method.shape, Tree) and method.shape.stop > 0
    return not (isinstance(draft, JoinedDraft) and stops)


@torch.inference_mode()
def prompt_nats(target: PreTrainedModel, prompts: Sequence[Prompt]) -> list[Count]:
    """Count the nats of the first prompts under the target."""
    nats = []
    tokens = []
    for prompt in prompts[:_READ]:
        ids_1T = torch.tensor([prompt.ids[:_LONGEST]], device=target.device)
        logits_1TV = target(input_ids=ids_1T, attention_mask=torch.ones_like(ids_1T)).logits
        losses_T = cross_entropy(logits_1TV[0, :-1].float(), ids_1T[0, 1:], reduction="none")
        nats.append(float(losses_T.sum()))
        tokens.append(len(losses_T))
    return [Count("prompt_nats", nats), Count("prompt_tokens", tokens)]
