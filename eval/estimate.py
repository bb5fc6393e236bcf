"""Estimates without a decoding loop: one forward of the target over its own text, and one of every draft.

They give the expected acceptance of one drafted token under three rules (`docs/acceptance.md`) and, by `eval.predict`,
how many target calls a tree would have taken to write the same text.

Legend: B rows, T columns (tokens), C columns of one chunk, V vocabulary of the target, N positions, D depths, L tokens
of the longest continuation, K ranks.
"""

from collections.abc import Callable, Mapping, Sequence
from itertools import pairwise
from typing import Any, TypedDict

import numpy as np
import torch
from torch import Tensor
from transformers import PreTrainedModel

from decode.propose.network import fit_vocabulary
from drafts.load import Draft
from draftsmith_core.errors import RunError
from draftsmith_core.models import vocabulary_size
from draftsmith_core.processes import divided
from draftsmith_core.progress import Tick, no_tick
from draftsmith_core.sampling import Sampling, acceptance, generator, probs, row_seed, uniforms
from eval.acceptance import Continuation, draft_logits, model_logits, rank_chances
from eval.diagnose import Diagnoser, Diagnosis
from eval.headroom import RootMeasurement, RootStep, RootSums, positions_per_prompt
from eval.predict import PredictedCounts, Traces, predict, ranks_needed
from eval.request import Method

# Logits held at once, as a number of elements (256 MiB in fp32). Columns, or rows if a head drafts, are cut to fit.
MAX_LOGITS = 2**26


class AlphaMeasurement(TypedDict):
    """Per prompt, summed over `count` response positions: sum_x min(p, q) (`sum`), p(argmax q) (`greedy`), sum_x p q
    (`match`) and p of the tokens that the draft cannot draft (`missing`).

    `roots`: by root step, what `eval.headroom` found at some of these positions. `predicted`: by method, the counts
    expected of decoding with it. `diagnosis`: `eval.diagnose`, if asked for.
    """

    sum: list[float]
    greedy: list[float]
    match: list[float]
    missing: list[float]
    count: list[int]
    roots: dict[str, RootMeasurement]
    predicted: dict[str, PredictedCounts]
    diagnosis: Diagnosis | None


Sink = RootSums | Diagnoser
# (number of the first row, rows) -> the sinks of one draft, which collect statistics of p and q during the forward.
MakeSinks = Callable[[int, Sequence[Continuation]], list[Sink]]


def _groups(rows: Sequence[Continuation], most_tokens: int) -> list[Sequence[Continuation]]:
    """Halve the rows until each group has at most `most_tokens` tokens, padding included, or one row."""
    columns = max(len(row.prompt_ids) + len(row.output_ids) for row in rows) - 1
    if len(rows) == 1 or len(rows) * columns <= most_tokens:
        return [rows]
    half = len(rows) // 2
    return _groups(rows[:half], most_tokens) + _groups(rows[half:], most_tokens)


class _Reader:
    """Reads rows side by side, padded on the right, in chunks of columns; for each, the target before the drafts."""

    def __init__(
        self, target: PreTrainedModel, drafts: Mapping[str, Draft], sampling: Sampling, methods: Sequence[Method]
    ) -> None:
        self.target, self.drafts, self.sampling = target, drafts, sampling
        self.depths = max((method.shape.depth for method in methods), default=1)
        self.ranks = ranks_needed(methods, sampling)
        # Whether to record each token's place in the draft's order, which costs a pass over the vocabulary.
        self.places = sampling.greedy or any(method.verifier == "naive" for method in methods)

    @torch.inference_mode()
    def read(
        self,
        rows: Sequence[Continuation],
        sinks: Mapping[str, Sequence[Sink]],
        max_logits: int,
        seed: int,
        names: Mapping[str, str],
    ) -> dict[str, Traces]:
        """Return the traces of some rows by draft, from one forward of each model over all tokens."""
        target, drafts, count = self.target, self.drafts, len(rows)
        self.rows, self.sinks, self.names = rows, sinks, names
        texts = [torch.tensor([*row.prompt_ids, *row.output_ids]) for row in rows]
        ids_BS = torch.nn.utils.rnn.pad_sequence(texts, batch_first=True).to(target.device)
        # The last token predicts nothing that is measured, so it is no input.
        ids_BT, self.next_BT = ids_BS[:, :-1], ids_BS[:, 1:]
        columns = ids_BT.shape[1]
        self.prompt_B, self.lengths_B = (
            torch.tensor([len(ids) for ids in part], device=target.device)
            for part in ([row.prompt_ids for row in rows], [row.output_ids for row in rows])
        )
        column_T = torch.arange(columns, device=target.device)
        mask_BT = column_T < (self.prompt_B + self.lengths_B - 1)[:, None]
        wanted_BT = mask_BT & (column_T >= self.prompt_B[:, None] - 1)  # columns that predict a response token
        longest, most = int(self.lengths_B.max()), max(self.ranks.values(), default=1)
        # The candidates of a prompt's positions come from its own stream, the same for every draft and batch.
        self.u_BLK = torch.zeros(count, longest, most, dtype=torch.double)
        for b, row in enumerate(rows if most > 1 else ()):
            stream = uniforms([generator(row_seed(seed, f"{row.id}/candidates"))], len(row.output_ids) * most)
            self.u_BLK[b, : len(row.output_ids)] = stream.view(-1, most)
        self.values: dict[str, dict[str, Any]] = {}
        for name, draft in drafts.items():
            shape = 1 if isinstance(draft, PreTrainedModel) else self.depths, count, longest
            values = {key: np.zeros((1, *shape[1:])) for key in ("alpha", "greedy", "match", "missing")}
            values |= {key: np.zeros(shape) for key in ("ratio", "belief", "place")}
            self.values[name] = values | {rule: np.zeros((*shape, most)) for rule, most in self.ranks.items()}

        vocabulary = vocabulary_size(target)
        heads = any(not isinstance(draft, PreTrainedModel) for draft in drafts.values())
        # A head's deeper drafts reach over columns, so it reads all of them at once. Logits before the answers are not
        # needed.
        first = 0 if heads else int(self.prompt_B.min()) - 1
        width = columns if heads else max(1, max_logits // (count * vocabulary))
        edges = sorted({0, *range(first, columns, width), columns})
        caches: dict[str, Any] = dict.fromkeys(["", *drafts])
        for start, stop in pairwise(edges):
            keep = 1 if stop <= first else 0
            out = target(
                input_ids=ids_BT[:, start:stop],
                attention_mask=mask_BT[:, :stop].long(),
                position_ids=column_T[start:stop].expand(count, -1),
                past_key_values=caches[""],
                use_cache=True,
                output_hidden_states=heads,
                logits_to_keep=keep,
            )
            caches[""] = out.past_key_values
            if not keep:
                # N positions: their row, their column in the chunk, and their place in the answer.
                self.b_N, self.c_N = wanted_BT[:, start:stop].nonzero(as_tuple=True)
                self.place_N, self.start = self.c_N + start - self.prompt_B[self.b_N] + 1, start
                self.p_NV = probs(self._finite("", out.logits[self.b_N, self.c_N]), self.sampling)
            for name, draft in drafts.items():
                if isinstance(draft, PreTrainedModel):
                    logits, caches[name] = model_logits(draft, ids_BT[:, start:stop], start, caches[name], keep)
                    if not keep:
                        self._read_draft(name, fit_vocabulary(logits, vocabulary).to(target.device), 0)
                elif not keep:
                    alone_B = self.prompt_B == 1
                    for depth, logits in enumerate(
                        draft_logits(draft, out.hidden_states, ids_BT, alone_B, self.depths)
                    ):
                        self._read_draft(name, fit_vocabulary(logits, vocabulary), depth)
        lengths_P = self.lengths_B.cpu().numpy()
        return {
            name: Traces(lengths_P, isinstance(draft, PreTrainedModel), self.values[name])
            for name, draft in drafts.items()
        }

    def _read_draft(self, name: str, logits_BCV: Tensor, depth: int) -> None:
        """Record the draft's distribution of the token `depth` places after the next one, for each column."""
        sampling, total = self.sampling, len(self.b_N)
        n_N = torch.arange(depth, total, device=self.b_N.device)
        n_N = n_N[self.b_N[depth:] == self.b_N[: max(0, total - depth)]]  # positions with a root `depth` places before
        if not len(n_N):
            return
        b_N, place_N = self.b_N[n_N], self.place_N[n_N]
        logits_NV = self._finite(name, logits_BCV[b_N, self.c_N[n_N - depth]])
        p_NV, q_NV = self.p_NV[n_N] if depth else self.p_NV, probs(logits_NV, sampling)
        x_N1 = self.next_BT[b_N, self.c_N[n_N] + self.start].unsqueeze(1)
        values = {"ratio": q_NV.gather(1, x_N1) / p_NV.gather(1, x_N1).clamp(min=torch.finfo(p_NV.dtype).tiny)}
        values["belief"] = (logits_NV.float().softmax(-1) if sampling.greedy else q_NV).gather(1, x_N1)
        if self.places:
            own_N1, ids_V = logits_NV.gather(1, x_N1), torch.arange(logits_NV.shape[1], device=x_N1.device)
            ahead_NV = (logits_NV > own_N1) | ((logits_NV == own_N1) & (ids_V < x_N1))
            values["place"] = 1 + ahead_NV.sum(1, keepdim=True).masked_fill(own_N1 == -torch.inf, len(ids_V))
        at = b_N.cpu(), place_N.cpu()
        if not depth:
            # A sum of fp32 probabilities may exceed 1 by its rounding; a probability may not.
            values["alpha"] = acceptance(p_NV, q_NV).unsqueeze(1).double().clamp(max=1.0)
            values["greedy"] = p_NV.gather(1, q_NV.argmax(1, keepdim=True))
            values["match"] = (p_NV * q_NV).sum(1, keepdim=True)
            values["missing"] = p_NV.masked_fill(logits_NV > -torch.inf, 0).sum(1, keepdim=True)
            places = list(zip(at[0].tolist(), at[1].tolist(), strict=True))
            for sink in self.sinks[name]:
                sink.add(places, p_NV, q_NV, logits_NV)
        arrays = self.values[name]
        for key, value in values.items():
            arrays[key][depth, *at] = value[:, 0].double().cpu().numpy()
        for rule, count in self.ranks.items():
            chances_NK = rank_chances(rule, p_NV, q_NV, x_N1, self.u_BLK[at].to(p_NV.device), count)
            arrays[rule][depth, *at] = chances_NK.double().cpu().numpy()

    def _finite(self, name: str, logits_NV: Tensor) -> Tensor:
        """Return the logits; raise RunError if a row has a NaN or +inf, or only -inf (tokens that the model lacks)."""
        broken_N = ~logits_NV.amax(-1).isfinite()  # max() returns a NaN or +inf as it is
        if broken_N.any():
            row = self.rows[int(self.b_N[broken_N.nonzero()[0, 0]])].id
            model = self.names.get(name, f"draft {name}" if name else "the target")
            raise RunError(f"{model}: not finite logits on prompt {row}; try --dtype float32, or check its weights")
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
    sinks: MakeSinks = lambda start, rows: [],
    tick: Tick = no_tick,
) -> tuple[dict[str, Traces], dict[str, list[Any]]]:
    """Return, by draft, the traces of all rows as far as `methods` need them, and what its sinks found.

    All drafts share one forward of the target, and launched processes divide the batches. max_logits: about the most
    logits held at once per model; for heads at least those of one row. names: the models in error messages, the
    target's being "". Raise RunError that names model and prompt if logits are not finite.
    """
    reader = _Reader(target, drafts, sampling, methods)
    heads = any(not isinstance(draft, PreTrainedModel) for draft in drafts.values())

    def read_batch(index: int) -> list[tuple[dict[str, Traces], dict[str, list[Any]]]]:
        start = index * batch_size
        batch = rows[start : start + batch_size]
        results = []
        for group in _groups(batch, max_logits // vocabulary_size(target)) if heads else [batch]:
            collecting = {name: sinks(start, group) for name in drafts}
            traces = reader.read(group, collecting, max_logits, seed, names or {})
            results.append((traces, {name: [sink.found for sink in part] for name, part in collecting.items()}))
            start += len(group)
        tick(len(batch))
        return results

    parts = [part for batch in divided(-(-len(rows) // batch_size), read_batch) for part in batch]
    traces = {name: Traces.joined([part[name] for part, _ in parts]) for name in drafts}
    return traces, {
        name: [
            {key: [value for part in found for value in part[key]] for key in found[0]}
            for found in zip(*(part[name] for _, part in parts), strict=True)
        ]
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
    """By draft, with an entry per row: the expected acceptance of one token under three rules, summed in fp64 over the
    positions that predict a response token (EOS included), and the counts expected of decoding with `methods`.

    `rows` hold the target's own continuations at this sampling, so the mean over positions is over its own
    distribution. `roots` are simulated at some of the positions (`eval.headroom`). options: as for `read_traces`.
    """
    counts = {step: positions_per_prompt(step, len(rows), vocabulary_size(target)) for step in roots}

    def sinks(start: int, group: Sequence[Continuation]) -> list[Sink]:
        of_draft: list[Sink] = [RootSums(step, group, counts[step][start:], seed) for step in roots]
        return [*of_draft, Diagnoser(group, sampling, seed, first=start)] if diagnose else of_draft

    traces, collected = read_traces(target, drafts, rows, sampling, methods, sinks=sinks, seed=seed, **options)
    measured: dict[str, AlphaMeasurement] = {}
    for name, read in traces.items():
        predicted = {method.name: predict(method.shape, method.verifier, sampling, read) for method in methods}
        *root_sums, diagnosis = collected[name] if diagnose else [*collected[name], None]
        measured[name] = AlphaMeasurement(
            sum=read.sums("alpha"),
            greedy=read.sums("greedy"),
            match=read.sums("match"),
            missing=read.sums("missing"),
            count=read.lengths_P.tolist(),
            roots={step.name: sums for step, sums in zip(roots, root_sums, strict=True)},
            predicted={key: value for key, value in predicted.items() if value is not None},
            diagnosis=diagnosis,
        )
    return measured


def alpha_sums(
    target: PreTrainedModel, draft: Draft, rows: Sequence[Continuation], sampling: Sampling, **options: Any
) -> AlphaMeasurement:
    """`measure_alphas` of a single draft."""
    return measure_alphas(target, {"draft": draft}, rows, sampling, **options)["draft"]
