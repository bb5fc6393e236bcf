"""Estimates without a decoding loop: one forward of the target over its own text, and one of every
draft.

They give the expected acceptance of one drafted token under three rules (`docs/acceptance.md`) and,
by `eval.predict`, how many target calls a tree would have taken to write the same text.

Legend: B rows, T columns (tokens), C columns with logits, V vocabulary of the target, N positions,
D depths, L tokens of the longest continuation, K ranks.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, TypedDict

import numpy as np
import torch
from torch import Tensor
from transformers import PreTrainedModel

from decode.propose.network import fit_vocabulary
from drafts.load import Draft
from draftsmith_core.errors import RunError
from draftsmith_core.models import vocabulary_size
from draftsmith_core.ranks import divided
from draftsmith_core.sampling import Sampling, acceptance, generator, probs, row_seed, uniforms
from eval.acceptance import Continuation, Positions, draft_logits, model_logits, rank_chances
from eval.diagnosis.diagnose import (
    Diagnosis,
    RootMeasurement,
    RootStep,
    diagnosis_of,
    positions_per_prompt,
    root_sums,
)
from eval.method import Method
from eval.predict import PredictedCounts, Traces, predict, ranks_needed

# Logits held at once, as a number of elements (256 MiB in fp32). Fewer rows are read at once to
# fit.
MAX_LOGITS = 2**26


class AlphaMeasurement(TypedDict):
    """Per prompt, summed over `count` response positions: sum_x min(p, q) (`sum`), p(argmax q)
    (`greedy`), sum_x p q (`match`) and p of the tokens that the draft cannot draft (`missing`).

    `roots`: by root step, what `eval.diagnosis.diagnose` found at some of these positions.
    `predicted`: by method, the counts expected of decoding with it. `diagnosis`: if asked for.
    """

    sum: list[float]
    greedy: list[float]
    match: list[float]
    missing: list[float]
    count: list[int]
    roots: dict[str, RootMeasurement]
    predicted: dict[str, PredictedCounts]
    diagnosis: Diagnosis | None


# Gives lists with an entry per text, by name. Called once for every draft and group of texts.
Observer = Callable[[Positions], Any]


def _groups(rows: Sequence[Continuation], most_columns: int) -> list[Sequence[Continuation]]:
    """Halve the rows until each group has at most `most_columns` columns with logits, padding
    included, or one row.
    """
    columns = max(len(row.prompt_ids) + len(row.output_ids) for row in rows) - min(
        len(row.prompt_ids) for row in rows
    )
    if len(rows) == 1 or len(rows) * columns <= most_columns:
        return [rows]
    half = len(rows) // 2
    return _groups(rows[:half], most_columns) + _groups(rows[half:], most_columns)


@dataclass(eq=False)
class _Reader:
    """Reads rows side by side, padded on the right: N positions that predict a response token."""

    target: PreTrainedModel
    drafts: Mapping[str, Draft]
    sampling: Sampling
    methods: Sequence[Method]
    seed: int
    names: Mapping[str, str]
    observers: Mapping[str, Observer]

    def __post_init__(self) -> None:
        self.depths = max((method.shape.depth for method in self.methods), default=1)
        self.ranks = ranks_needed(self.methods, self.sampling)
        # Whether to record each token's place in the draft's order, which costs a pass over the
        # vocabulary.
        self.places = self.sampling.greedy or any(
            method.verifier == "naive" for method in self.methods
        )

    @torch.inference_mode()
    def read(
        self, start: int, rows: Sequence[Continuation]
    ) -> tuple[dict[str, Traces], dict[str, dict[str, Any]]]:
        """Return the traces of some rows and the observers' results, by draft, from one forward of
        each model.

        start: number of the first row.
        """
        target, self.start, self.rows = self.target, start, rows
        self.observed: dict[str, dict[str, Any]] = {}
        texts = [torch.tensor([*row.prompt_ids, *row.output_ids]) for row in rows]
        ids_BS = torch.nn.utils.rnn.pad_sequence(texts, batch_first=True).to(target.device)
        ids_BT = ids_BS[:, :-1]  # the last token predicts nothing that is measured
        prompt_B, lengths_B = (
            torch.tensor([len(getattr(row, part)) for row in rows], device=target.device)
            for part in ("prompt_ids", "output_ids")
        )
        column_T = torch.arange(ids_BT.shape[1], device=target.device)
        mask_BT = column_T < (prompt_B + lengths_B - 1)[:, None]
        self.b_N, self.c_N = (mask_BT & (column_T >= prompt_B[:, None] - 1)).nonzero(as_tuple=True)
        self.x_N1 = ids_BS[self.b_N, self.c_N + 1].unsqueeze(1)
        self.place_N = self.c_N - prompt_B[self.b_N] + 1
        longest, most = int(lengths_B.max()), max(self.ranks.values(), default=1)
        # The candidates of a prompt's positions come from its own stream, the same for every draft
        # and batch.
        self.u_BLK = torch.zeros(len(rows), longest, most, dtype=torch.double)
        for b, row in enumerate(rows if most > 1 else ()):
            stream = uniforms(
                [generator(row_seed(self.seed, f"{row.id}/candidates"))], len(row.output_ids) * most
            )
            self.u_BLK[b, : len(row.output_ids)] = stream.view(-1, most)
        first = int(prompt_B.min()) - 1  # columns before it predict no response token
        keep = len(column_T) - first
        out = target(
            input_ids=ids_BT,
            attention_mask=mask_BT.long(),
            position_ids=column_T.expand_as(ids_BT),
            use_cache=False,
            output_hidden_states=any(
                not isinstance(draft, PreTrainedModel) for draft in self.drafts.values()
            ),
            logits_to_keep=keep,
        )
        column_N = self.c_N - first
        self.p_NV = probs(self._finite("", out.logits[self.b_N, column_N]), self.sampling)
        traces = {}
        for name, draft in self.drafts.items():
            alone = isinstance(draft, PreTrainedModel)
            shape = 1 if alone else self.depths, len(rows), longest
            self.arrays = {
                key: np.zeros((1, *shape[1:])) for key in ("alpha", "greedy", "match", "missing")
            }
            self.arrays |= {key: np.zeros(shape) for key in ("ratio", "belief", "place")}
            self.arrays |= {rule: np.zeros((*shape, count)) for rule, count in self.ranks.items()}
            if isinstance(draft, PreTrainedModel):
                logits_BCV = model_logits(draft, ids_BT, keep).to(target.device)
                self._read_draft(name, logits_BCV[self.b_N, column_N], 0)
            else:
                at = self.b_N, self.c_N
                unrolled = draft_logits(
                    draft, out.hidden_states, ids_BT, prompt_B == 1, self.depths, at
                )
                for depth, (logits_NV, sure_N) in enumerate(unrolled):
                    self._read_draft(name, logits_NV, depth, sure_N)
            traces[name] = Traces(lengths_B.cpu().numpy(), alone, self.arrays)
        return traces, self.observed

    def _read_draft(
        self, name: str, logits_NV: Tensor, depth: int, sure_N: Tensor | None = None
    ) -> None:
        """Record a draft's values of the tokens `depth` places after the next one, from its logits
        at every position.

        sure: `Network.confidence` of these tokens, if the draft predicts it.
        """
        total, sampling = len(self.b_N), self.sampling
        n_N = torch.arange(total, device=logits_NV.device)[depth:]
        n_N = n_N[
            self.b_N[depth:] == self.b_N[: max(0, total - depth)]
        ]  # positions with a root `depth` places before
        if depth and not len(n_N):
            return
        b_N, x_N1 = self.b_N[n_N], self.x_N1[n_N]
        chosen_NV = logits_NV[n_N - depth] if depth else logits_NV
        logits_NV = self._finite(name, fit_vocabulary(chosen_NV, vocabulary_size(self.target)))
        q_NV, p_N1 = probs(logits_NV, sampling), self.p_NV[n_N, x_N1[:, 0]].unsqueeze(1)
        values = {"ratio": q_NV.gather(1, x_N1) / p_N1.clamp(min=torch.finfo(p_N1.dtype).tiny)}
        if sure_N is None:
            values["belief"] = (logits_NV.float().softmax(-1) if sampling.greedy else q_NV).gather(
                1, x_N1
            )
        else:
            values["belief"] = sure_N[n_N - depth].unsqueeze(1)
        if self.places:
            own_N1, ids_V = (
                logits_NV.gather(1, x_N1),
                torch.arange(logits_NV.shape[1], device=x_N1.device),
            )
            ahead_NV = (logits_NV > own_N1) | ((logits_NV == own_N1) & (ids_V < x_N1))
            values["place"] = 1 + ahead_NV.sum(1, keepdim=True).masked_fill(
                own_N1 == -torch.inf, len(ids_V)
            )
        at = b_N.cpu().numpy(), self.place_N[n_N].cpu().numpy()
        if not depth:
            p_NV = self.p_NV
            # A sum of fp32 probabilities may exceed 1 by its rounding; a probability may not.
            values["alpha"] = acceptance(p_NV, q_NV).unsqueeze(1).double().clamp(max=1.0)
            values["greedy"] = p_NV.gather(1, q_NV.argmax(1, keepdim=True))
            values["match"] = (p_NV * q_NV).sum(1, keepdim=True)
            values["missing"] = p_NV.masked_fill(logits_NV > -torch.inf, 0).sum(1, keepdim=True)
            places = list(zip(at[0].tolist(), at[1].tolist(), strict=True))
            positions = Positions(self.start, self.rows, places, p_NV, q_NV, logits_NV)
            self.observed[name] = {
                key: observe(positions) for key, observe in self.observers.items()
            }
        for key, value in values.items():
            self.arrays[key][depth, *at] = value[:, 0].double().cpu().numpy()
        for rule, count in self.ranks.items():
            chances_NK = rank_chances(
                rule, self.p_NV[n_N], q_NV, x_N1, self.u_BLK[at].to(q_NV.device), count
            )
            self.arrays[rule][depth, *at] = chances_NK.double().cpu().numpy()

    def _finite(self, name: str, logits_NV: Tensor) -> Tensor:
        """Return the logits; raise RunError if a row has a NaN or +inf, or only -inf (tokens that
        the model lacks).
        """
        broken_N = ~logits_NV.amax(-1).isfinite()  # max() returns a NaN or +inf as it is
        if broken_N.any():
            row = self.rows[int(self.b_N[broken_N.nonzero()[0, 0]])].id
            model = self.names.get(name, f"draft {name}" if name else "the target")
            raise RunError(
                f"{model}: non-finite logits on prompt {row}; try --dtype float32, or check its "
                "weights"
            )
        return logits_NV


def read_traces(
    target: PreTrainedModel,
    drafts: Mapping[str, Draft],
    rows: Sequence[Continuation],
    sampling: Sampling,
    methods: Sequence[Method],
    *,
    batch_size: int,
    max_logits: int = MAX_LOGITS,
    seed: int = 0,
    names: Mapping[str, str] | None = None,
    observers: Mapping[str, Observer] | None = None,
) -> tuple[dict[str, Traces], dict[str, dict[str, Any]]]:
    """Return, by draft, the traces of all rows as far as `methods` need them, and each observer's
    results.

    All drafts share one forward of the target, and launched processes divide the batches.
    max_logits: the most logits held at once per model, except for a single row. names: the models
    in error messages; the target's key is "". Raise RunError with model and prompt if logits are
    not finite.
    """
    observers = observers or {}
    reader = _Reader(target, drafts, sampling, methods, seed, names or {}, observers)

    def read_batch(index: int) -> list[tuple[dict[str, Traces], dict[str, dict[str, Any]]]]:
        start = index * batch_size
        batch = rows[start : start + batch_size]
        results = []
        for group in _groups(batch, max_logits // vocabulary_size(target)):
            results.append(reader.read(start, group))
            start += len(group)
        return results

    parts = [part for batch in divided(-(-len(rows) // batch_size), read_batch) for part in batch]
    traces = {name: Traces.joined([part[name] for part, _ in parts]) for name in drafts}

    def joined(groups: Sequence[Mapping[str, list[Any]]]) -> dict[str, list[Any]]:
        return {key: [value for group in groups for value in group[key]] for key in groups[0]}

    return traces, {
        name: {key: joined([observed[name][key] for _, observed in parts]) for key in observers}
        for name in drafts
    }


def measure_alphas(
    target: PreTrainedModel,
    drafts: Mapping[str, Draft],
    rows: Sequence[Continuation],
    sampling: Sampling,
    methods: Sequence[Method] = (),
    *,
    roots: Sequence[RootStep] = (),
    diagnose: bool = False,
    seed: int = 0,
    **options: Any,
) -> dict[str, AlphaMeasurement]:
    """By draft, with an entry per row: the expected acceptance of one token under three rules,
    summed in fp64 over the positions that predict a response token (EOS included), and the counts
    expected of decoding with `methods`.

    `rows` hold the target's own continuations at this sampling, so the mean over positions is over
    its own distribution. `roots` are simulated at some of the positions. options:
    as for `read_traces`.
    """
    size = len(rows), vocabulary_size(target)
    observers: dict[str, Observer] = {
        step.name: partial(root_sums, step, positions_per_prompt(step, *size), seed)
        for step in roots
    }
    if diagnose:
        observers["diagnosis"] = partial(diagnosis_of, sampling, seed)
    traces, observed = read_traces(
        target, drafts, rows, sampling, methods, observers=observers, seed=seed, **options
    )
    measured: dict[str, AlphaMeasurement] = {}
    for name, read in traces.items():
        predicted = {
            method.name: predict(method.shape, method.verifier, sampling, read)
            for method in methods
        }
        measured[name] = AlphaMeasurement(
            sum=read.sums("alpha"),
            greedy=read.sums("greedy"),
            match=read.sums("match"),
            missing=read.sums("missing"),
            count=read.lengths_P.tolist(),
            roots={step.name: observed[name][step.name] for step in roots},
            predicted={key: value for key, value in predicted.items() if value is not None},
            diagnosis=observed[name].get("diagnosis"),
        )
    return measured


def alpha_sums(
    target: PreTrainedModel,
    draft: Draft,
    rows: Sequence[Continuation],
    sampling: Sampling,
    **options: Any,
) -> AlphaMeasurement:
    """`measure_alphas` of a single draft."""
    return measure_alphas(target, {"draft": draft}, rows, sampling, **options)["draft"]
