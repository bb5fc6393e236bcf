"""Estimates without a decoding loop: one forward of the target over its own text, and one of every draft.

They give the expected acceptance of one drafted token under three rules (`docs/acceptance.md`) and, by `eval.predict`,
how many target calls a tree would have taken to write the same text.

Legend: B rows, T columns (tokens), C columns of one chunk, V vocabulary of the target, N positions, D depths, L tokens
of the longest continuation, K ranks.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
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
from eval.acceptance import Continuation, Trace, draft_logits, model_logits, rank_chances
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
# (number of the first row, rows) -> per draft, the sinks that collect statistics of p and q during the forward.
MakeSinks = Callable[[int, Sequence[Continuation]], dict[str, list[Sink]]]


def _chunks(first: int, columns: int, width: int) -> list[tuple[int, int]]:
    """Column ranges: everything before `first`, whose logits are not needed, at once; then `width` at a time."""
    edges = [0, first] if first else [0]
    while edges[-1] < columns:
        edges.append(min(columns, edges[-1] + width))
    return list(zip(edges[:-1], edges[1:], strict=True))


def _groups(rows: Sequence[Continuation], most_tokens: int) -> list[Sequence[Continuation]]:
    """Halve the rows until each group has at most `most_tokens` tokens, padding included, or one row."""
    columns = max(len(row.prompt_ids) + len(row.output_ids) for row in rows) - 1
    if len(rows) == 1 or len(rows) * columns <= most_tokens:
        return [rows]
    half = len(rows) // 2
    return _groups(rows[:half], most_tokens) + _groups(rows[half:], most_tokens)


@dataclass
class _Reader:
    """Reads rows side by side, padded on the right, in chunks of columns; for each, the target before the drafts.

    places: whether to record each token's place in the draft's order. names: the models in error messages; the target's
    key is "".
    """

    target: PreTrainedModel
    drafts: Mapping[str, Draft]
    sampling: Sampling
    depths: int
    ranks: Mapping[str, int]
    places: bool
    seed: int
    names: Mapping[str, str]
    max_logits: int

    def _begin(self, rows: Sequence[Continuation], sinks: Mapping[str, Sequence[Sink]]) -> None:
        self.rows, self.sinks = rows, sinks
        texts = [[*row.prompt_ids, *row.output_ids] for row in rows]
        # The last token predicts nothing that is measured, so it is no input.
        shape = len(rows), max(map(len, texts)) - 1
        self.ids_BT, self.next_BT, self.mask_BT = (torch.zeros(shape, dtype=torch.long) for _ in range(3))
        self.wanted_BT = torch.zeros(shape, dtype=torch.bool)  # columns that predict a response token
        for b, (row, text) in enumerate(zip(rows, texts, strict=True)):
            self.ids_BT[b, : len(text) - 1] = torch.tensor(text[:-1])
            self.next_BT[b, : len(text) - 1] = torch.tensor(text[1:])
            self.mask_BT[b, : len(text) - 1] = 1
            self.wanted_BT[b, len(row.prompt_ids) - 1 : len(text) - 1] = True
        for key in ("ids_BT", "next_BT", "mask_BT", "wanted_BT"):
            setattr(self, key, getattr(self, key).to(self.target.device))
        self.prompt_B = torch.tensor([len(row.prompt_ids) for row in rows])
        longest, most = max(len(row.output_ids) for row in rows), max(self.ranks.values(), default=1)
        # The candidates of a prompt's positions come from its own stream, the same for every draft and batch.
        self.u_BLK = torch.zeros(len(rows), longest, most, dtype=torch.double)
        for b, row in enumerate(rows if most > 1 else ()):
            stream = uniforms([generator(row_seed(self.seed, f"{row.id}/candidates"))], len(row.output_ids) * most)
            self.u_BLK[b, : len(row.output_ids)] = stream.view(-1, most)
        # By draft and quantity, `[D, B, L]`, or `[D, B, L, K]` for a rule with several candidates.
        self.values: dict[str, dict[str, Any]] = {}
        for name, draft in self.drafts.items():
            deep = 1 if isinstance(draft, PreTrainedModel) else self.depths, len(rows), longest
            values = {key: np.zeros((1, *deep[1:])) for key in ("alpha", "greedy", "match", "missing")}
            values |= {"ratio": np.zeros(deep), "belief": np.zeros(deep), "place": np.full(deep, np.inf)}
            self.values[name] = values | {rule: np.zeros((*deep, count)) for rule, count in self.ranks.items()}

    @torch.inference_mode()
    def read(self, rows: Sequence[Continuation], sinks: Mapping[str, Sequence[Sink]]) -> dict[str, list[Trace]]:
        """Return the traces of some rows by draft, from one forward of each model over all tokens."""
        self._begin(rows, sinks)
        target, drafts, (count, columns) = self.target, self.drafts, self.ids_BT.shape
        vocabulary = vocabulary_size(target)
        heads = any(not isinstance(draft, PreTrainedModel) for draft in drafts.values())
        # A head's deeper drafts reach over columns, so it reads all of them at once.
        first = 0 if heads else int(self.prompt_B.min()) - 1
        width = columns if heads else max(1, self.max_logits // (count * vocabulary))
        caches: dict[str, Any] = dict.fromkeys(["", *drafts])
        for start, stop in _chunks(first, columns, width):
            keep = 1 if stop <= first else 0
            out = target(
                input_ids=self.ids_BT[:, start:stop],
                attention_mask=self.mask_BT[:, :stop],
                position_ids=torch.arange(start, stop, device=target.device).expand(count, -1),
                past_key_values=caches[""],
                use_cache=True,
                output_hidden_states=heads,
                logits_to_keep=keep,
            )
            caches[""] = out.past_key_values
            if not keep:
                self._read_target(out.logits, start)
            for name, draft in drafts.items():
                if isinstance(draft, PreTrainedModel):
                    ids_BC = self.ids_BT[:, start:stop]
                    logits, caches[name] = model_logits(draft, ids_BC, start, caches[name], keep)
                    if not keep:
                        self._read_draft(name, fit_vocabulary(logits, vocabulary).to(target.device), 0)
                elif not keep:
                    alone_B = self.prompt_B == 1
                    unrolled = draft_logits(draft, out.hidden_states, self.ids_BT, alone_B, self.depths)
                    for depth, logits in enumerate(unrolled):
                        self._read_draft(name, fit_vocabulary(logits, vocabulary), depth)
        return {name: [self._trace(name, b) for b in range(count)] for name in drafts}

    def _read_target(self, logits_BCV: Tensor, start: int) -> None:
        """Begin a chunk at column `start`: keep p at its wanted columns."""
        self.start = start
        self.wanted_BC = self.wanted_BT[:, start : start + logits_BCV.shape[1]]
        self.p_NV = probs(self._finite("", logits_BCV, self.wanted_BC), self.sampling)
        self.number_BC = torch.zeros_like(self.wanted_BC, dtype=torch.long)
        self.number_BC[self.wanted_BC] = torch.arange(len(self.p_NV), device=self.p_NV.device)

    def _read_draft(self, name: str, logits_BCV: Tensor, depth: int) -> None:
        """Record the draft's distribution of the token `depth` places after the next one, for each column."""
        sampling, later_BC = self.sampling, self.wanted_BC.clone()
        if depth:
            later_BC[:, :-depth] &= self.wanted_BC[:, depth:]
            later_BC[:, -depth:] = False
        chosen_NV = self._finite(name, logits_BCV, later_BC)
        at_b, at_c = later_BC.nonzero(as_tuple=True)
        if not len(at_b):
            return
        p_NV = self.p_NV if not depth else self.p_NV[self.number_BC[at_b, at_c + depth]]
        q_NV = probs(chosen_NV, sampling)
        x_N1 = self.next_BT[at_b, at_c + self.start + depth].unsqueeze(1)
        values = {"ratio": q_NV.gather(1, x_N1) / p_NV.gather(1, x_N1).clamp(min=torch.finfo(p_NV.dtype).tiny)}
        values["belief"] = chosen_NV.float().softmax(-1).gather(1, x_N1) if sampling.greedy else q_NV.gather(1, x_N1)
        if self.places:
            own_N1, ids_V = chosen_NV.gather(1, x_N1), torch.arange(chosen_NV.shape[1], device=x_N1.device)
            ahead_NV = (chosen_NV > own_N1) | ((chosen_NV == own_N1) & (ids_V < x_N1))
            values["place"] = ahead_NV.sum(1, keepdim=True).masked_fill(own_N1 == -torch.inf, len(ids_V))
        row_N = at_b.cpu()
        place_N = at_c.cpu() + self.start + depth - self.prompt_B[row_N] + 1
        if not depth:
            # A sum of fp32 probabilities may exceed 1 by its rounding; a probability may not.
            values["alpha"] = acceptance(p_NV, q_NV).unsqueeze(1).double().clamp(max=1.0)
            values["greedy"] = p_NV.gather(1, q_NV.argmax(1, keepdim=True))
            values["match"] = (p_NV * q_NV).sum(1, keepdim=True)
            values["missing"] = p_NV.masked_fill(chosen_NV > -torch.inf, 0).sum(1, keepdim=True)
            places = list(zip(row_N.tolist(), place_N.tolist(), strict=True))
            for sink in self.sinks.get(name, ()):
                sink.add(places, p_NV, q_NV, chosen_NV)
        arrays, at = self.values[name], (row_N.numpy(), place_N.numpy())
        for key, value in values.items():
            arrays[key][depth, at[0], at[1]] = value[:, 0].double().cpu().numpy()
        for rule, count in self.ranks.items():
            u_NK = self.u_BLK[row_N, place_N].to(p_NV.device)
            chances_NK = rank_chances(rule, p_NV, q_NV, x_N1[:, 0], u_NK, count)
            arrays[rule][depth, at[0], at[1]] = chances_NK.double().cpu().numpy()

    def _trace(self, name: str, b: int) -> Trace:
        length, ranks = len(self.rows[b].output_ids), self.ranks
        values = {key: array[:, b, :length] for key, array in self.values[name].items()}
        flat = {key: values[key][0] for key in ("alpha", "greedy", "match", "missing")}
        deep = {key: values[key] for key in ("ratio", "place", "belief")}
        return Trace(length, **flat, **deep, ranks={rule: values[rule] for rule in ranks})

    def _finite(self, name: str, logits_BCV: Tensor, wanted_BC: Tensor) -> Tensor:
        """Return the logits `[N, V]` at the wanted columns; raise RunError if one is NaN or +inf, or all are -inf.

        -inf marks a token that the model lacks. Without this check, the argmax could silently be a NaN.
        """
        chosen_NV = logits_BCV[wanted_BC]
        broken_N = ~chosen_NV.amax(-1).isfinite()  # max() returns a NaN or +inf as it is
        if broken_N.any():
            row, model = self.rows[int(wanted_BC.nonzero()[broken_N][0, 0])], self.names[name]
            raise RunError(f"{model}: not finite logits on prompt {row.id}; try --dtype float32, or check its weights")
        return chosen_NV


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
    sinks: MakeSinks = lambda start, rows: {},
    tick: Tick = no_tick,
) -> tuple[dict[str, Traces], dict[str, list[Any]]]:
    """Return, by draft, the traces of all rows as far as `methods` need them, and what its sinks found.

    All drafts share one forward of the target, and launched processes divide the batches. max_logits: about the most
    logits held at once per model; for heads at least those of one row. names: the models in error messages, the
    target's being "". Raise RunError that names model and prompt if logits are not finite.
    """
    reader = _Reader(
        target,
        drafts,
        sampling,
        depths=max((method.shape.depth for method in methods), default=1),
        ranks=ranks_needed(methods, sampling),
        places=sampling.greedy or any(method.verifier == "naive" for method in methods),
        seed=seed,
        names={"": "the target"} | {name: f"draft {name}" for name in drafts} | dict(names or {}),
        max_logits=max_logits,
    )
    heads = any(not isinstance(draft, PreTrainedModel) for draft in drafts.values())

    def read_batch(index: int) -> list[tuple[dict[str, list[Trace]], dict[str, list[Any]]]]:
        start = index * batch_size
        batch = rows[start : start + batch_size]
        results = []
        for group in _groups(batch, max_logits // vocabulary_size(target)) if heads else [batch]:
            collecting = sinks(start, group)
            traces = reader.read(group, collecting)
            results.append((traces, {name: [sink.found for sink in part] for name, part in collecting.items()}))
            start += len(group)
        tick(len(batch))
        return results

    parts = [part for batch in divided(-(-len(rows) // batch_size), read_batch) for part in batch]
    traces = {
        name: Traces([trace for part, _ in parts for trace in part[name]], isinstance(draft, PreTrainedModel))
        for name, draft in drafts.items()
    }
    collected = {
        name: [_joined(found) for found in zip(*(part[name] for _, part in parts), strict=True)] for name in parts[0][1]
    }
    return traces, collected


def _joined(parts: Sequence[Mapping[str, list[Any]]]) -> dict[str, list[Any]]:
    return {key: [value for part in parts for value in part[key]] for key in parts[0]}


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

    def sinks(start: int, group: Sequence[Continuation]) -> dict[str, list[Sink]]:
        made: dict[str, list[Sink]] = {}
        for name in drafts:
            made[name] = [RootSums(step, group, counts[step][start:], seed) for step in roots]
            if diagnose:
                made[name].append(Diagnoser(group, sampling, seed, first=start))
        return made

    traces, collected = read_traces(target, drafts, rows, sampling, methods, sinks=sinks, seed=seed, **options)
    measured: dict[str, AlphaMeasurement] = {}
    for name, read in traces.items():
        predicted = {method.name: predict(method, sampling, read) for method in methods}
        *root_sums, diagnosis = collected[name] if diagnose else [*collected[name], None]
        measured[name] = AlphaMeasurement(
            sum=[float(trace.alpha.sum()) for trace in read.rows],
            greedy=[float(trace.greedy.sum()) for trace in read.rows],
            match=[float(trace.match.sum()) for trace in read.rows],
            missing=[float(trace.missing.sum()) for trace in read.rows],
            count=[trace.length for trace in read.rows],
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
