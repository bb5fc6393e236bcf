"""Estimates without a decoding loop: one forward of the target over its own text, and one of every draft.

They give the expected acceptance of one drafted token under three rules (`docs/acceptance.md`) and, by `eval.predict`,
how many target calls a tree would have taken to write the same text.

Legend: B rows, T columns (tokens), C columns of one chunk, V vocabulary of the target, N positions.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TypedDict, TypeVar

import torch
from torch import Tensor
from transformers import PreTrainedModel

from decode.propose.network import fit_vocabulary
from drafts.load import Draft
from draftsmith_core.errors import RunError
from draftsmith_core.models import vocabulary_size
from draftsmith_core.processes import divided, launched
from draftsmith_core.progress import Tick, no_tick
from draftsmith_core.sampling import Sampling, acceptance, generator, probs, row_seed, uniforms
from eval.acceptance import Continuation, Trace, draft_logits, model_logits, rank_chances
from eval.diagnose import Diagnoser, Diagnosis
from eval.headroom import RootMeasurement, RootStep, RootSums
from eval.predict import PredictedCounts, Traces, predict, ranks_needed
from eval.request import Method

T = TypeVar("T")
# Logits held at once, as a number of elements (256 MiB in fp32). Columns, or rows where a head drafts, are cut to fit.
MAX_LOGITS = 2**26


class AlphaMeasurement(TypedDict):
    """Per prompt, summed over `count` response positions: sum_x min(p, q) (`sum`), p(argmax q) (`greedy`), sum_x p q
    (`match`) and p of the tokens that the draft cannot draft (`missing`).

    `roots`: by name of a root step, what `eval.headroom` found at some of these positions. `predicted`: by name of a
    method, what decoding with it is expected to count. `diagnosis`: why (`eval.diagnose`), if it was asked for.
    """

    sum: list[float]
    greedy: list[float]
    match: list[float]
    missing: list[float]
    count: list[int]
    roots: dict[str, RootMeasurement]
    predicted: dict[str, PredictedCounts]
    diagnosis: Diagnosis | None


@dataclass(frozen=True)
class _Asked:
    """What to read off the forwards.

    depths: how far heads are unrolled. ranks: candidates by rule. places: whether to keep each token's place in the
    draft's order. roots, diagnosers: by draft, what collects root steps and diagnoses on the way. names: what errors
    call the models; the target's key is "".
    """

    sampling: Sampling
    depths: int
    ranks: Mapping[str, int]
    places: bool
    seed: int
    names: Mapping[str, str]
    roots: Mapping[str, RootSums]
    diagnosers: Mapping[str, Diagnoser]
    max_logits: int


@dataclass(frozen=True, eq=False)
class _Texts:
    """Rows of a batch side by side, padded on the right. `wanted_BT`: columns that predict a response token."""

    rows: Sequence[Continuation]
    ids_BT: Tensor
    next_BT: Tensor
    mask_BT: Tensor
    wanted_BT: Tensor
    alone_B: Tensor

    @staticmethod
    def of(rows: Sequence[Continuation], device: torch.device) -> "_Texts":
        texts = [[*row.prompt_ids, *row.output_ids] for row in rows]
        # The last token predicts nothing that is measured, so it is no input.
        columns = max(map(len, texts)) - 1
        ids_BT, next_BT, mask_BT = (torch.zeros(len(rows), columns, dtype=torch.long) for _ in range(3))
        wanted_BT = torch.zeros(len(rows), columns, dtype=torch.bool)
        for b, (row, text) in enumerate(zip(rows, texts, strict=True)):
            ids_BT[b, : len(text) - 1] = torch.tensor(text[:-1])
            next_BT[b, : len(text) - 1] = torch.tensor(text[1:])
            mask_BT[b, : len(text) - 1] = 1
            wanted_BT[b, len(row.prompt_ids) - 1 : len(text) - 1] = True
        alone_B = torch.tensor([len(row.prompt_ids) == 1 for row in rows])
        return _Texts(rows, ids_BT.to(device), next_BT.to(device), mask_BT.to(device), wanted_BT.to(device), alone_B)


def _chunks(first: int, columns: int, width: int) -> list[tuple[int, int]]:
    """Column ranges: everything before `first`, whose logits are not needed, at once; then `width` at a time."""
    edges = [0, first] if first else [0]
    while edges[-1] < columns:
        edges.append(min(columns, edges[-1] + width))
    return list(zip(edges[:-1], edges[1:], strict=True))


@torch.inference_mode()
def _read(
    target: PreTrainedModel, drafts: Mapping[str, Draft], rows: Sequence[Continuation], asked: _Asked, first_row: int
) -> dict[str, list[Trace]]:
    """The traces of some rows by draft: one forward of the target, and one of every draft, over all of their tokens."""
    texts = _Texts.of(rows, target.device)
    columns, vocabulary = texts.ids_BT.shape[1], vocabulary_size(target)
    heads = {name: draft for name, draft in drafts.items() if not isinstance(draft, PreTrainedModel)}
    if heads and len(rows) > 1 and len(rows) * columns * vocabulary > asked.max_logits:
        # A head's deeper drafts reach over columns, so that rows are divided and not columns.
        half = len(rows) // 2
        left = _read(target, drafts, rows[:half], asked, first_row)
        right = _read(target, drafts, rows[half:], asked, first_row + half)
        return {name: left[name] + right[name] for name in drafts}
    traces = {name: [Trace(len(row.output_ids)) for row in rows] for name in drafts}
    for name, own in traces.items():
        for trace in own:
            trace.reserve(asked.depths if name in heads else 1, asked.ranks)
    reader = _Reader(texts, asked, traces, first_row)
    first = min(len(row.prompt_ids) for row in rows) - 1
    width = columns if heads else max(1, asked.max_logits // (len(rows) * vocabulary))
    caches: dict[str, Any] = dict.fromkeys(["", *drafts])
    for start, stop in _chunks(0 if heads else first, columns, width):
        keep = 1 if stop <= first else 0
        out = target(
            input_ids=texts.ids_BT[:, start:stop],
            attention_mask=texts.mask_BT[:, :stop],
            position_ids=torch.arange(start, stop, device=target.device).expand(len(rows), -1),
            past_key_values=caches[""],
            use_cache=True,
            output_hidden_states=bool(heads),
            logits_to_keep=keep,
        )
        caches[""] = out.past_key_values
        at_N = None if keep else reader.target(out.logits, start)
        for name, draft in drafts.items():
            if isinstance(draft, PreTrainedModel):
                ids_BC = texts.ids_BT[:, start:stop]
                logits, caches[name] = model_logits(draft, ids_BC, start, caches[name], keep)
                if at_N is not None:
                    reader.draft(name, fit_vocabulary(logits, vocabulary).to(target.device), 0)
            elif at_N is not None:
                unrolled = draft_logits(draft, out.hidden_states, texts.ids_BT, texts.alone_B, asked.depths)
                for depth, logits in enumerate(unrolled):
                    reader.draft(name, fit_vocabulary(logits, vocabulary), depth)
    return traces


class _Reader:
    """Fills the traces from the logits, one chunk of columns after another: first `target`, then `draft` for each."""

    def __init__(self, texts: _Texts, asked: _Asked, traces: Mapping[str, list[Trace]], first_row: int) -> None:
        self.texts, self.asked, self.traces, self.first_row = texts, asked, traces, first_row
        most = max(asked.ranks.values(), default=1)
        # The candidates of a prompt's positions come from its own stream, the same for every draft and batch.
        self.uniforms = {
            b: uniforms([generator(row_seed(asked.seed, f"{row.id}/candidates"))], len(row.output_ids) * most).view(
                -1, most
            )
            for b, row in enumerate(texts.rows if most > 1 else ())
        }

    def target(self, logits_BCV: Tensor, start: int) -> Tensor:
        """Begin a chunk at column `start`: p at its wanted columns. Returns how they are numbered, `[B, C]`."""
        self.start = start
        self.wanted_BC = self.texts.wanted_BT[:, start : start + logits_BCV.shape[1]]
        self.p_NV = probs(self._finite("", logits_BCV, self.wanted_BC), self.asked.sampling)
        self.number_BC = torch.zeros_like(self.wanted_BC, dtype=torch.long)
        self.number_BC[self.wanted_BC] = torch.arange(len(self.p_NV), device=self.p_NV.device)
        return self.number_BC

    def draft(self, name: str, logits_BCV: Tensor, depth: int) -> None:
        """Record what a draft says of the token `depth` places after the next one, for each column of the chunk."""
        sampling, later_BC = self.asked.sampling, self.wanted_BC.clone()
        if depth:
            later_BC[:, :-depth] &= self.wanted_BC[:, depth:]
            later_BC[:, -depth:] = False
        chosen_NV = self._finite(name, logits_BCV, later_BC)
        at_b, at_c = later_BC.nonzero(as_tuple=True)
        if not len(at_b):
            return
        p_NV = self.p_NV if not depth else self.p_NV[self.number_BC[at_b, at_c + depth]]
        q_NV = probs(chosen_NV, sampling)
        x_N1 = self.texts.next_BT[at_b, at_c + self.start + depth].unsqueeze(1)
        values = {"ratio": q_NV.gather(1, x_N1) / p_NV.gather(1, x_N1).clamp(min=torch.finfo(p_NV.dtype).tiny)}
        values["belief"] = chosen_NV.float().softmax(-1).gather(1, x_N1) if sampling.greedy else q_NV.gather(1, x_N1)
        if self.asked.places:
            own_N1, ids_V = chosen_NV.gather(1, x_N1), torch.arange(chosen_NV.shape[1], device=x_N1.device)
            ahead_NV = (chosen_NV > own_N1) | ((chosen_NV == own_N1) & (ids_V < x_N1))
            values["place"] = ahead_NV.sum(1, keepdim=True).masked_fill(own_N1 == -torch.inf, len(ids_V))
        if not depth:
            # A sum of fp32 probabilities may exceed 1 by its rounding; a probability may not.
            values["alpha"] = acceptance(p_NV, q_NV).unsqueeze(1).double().clamp(max=1.0)
            values["greedy"] = p_NV.gather(1, q_NV.argmax(1, keepdim=True))
            values["match"] = (p_NV * q_NV).sum(1, keepdim=True)
            values["missing"] = p_NV.masked_fill(chosen_NV > -torch.inf, 0).sum(1, keepdim=True)
            if name in self.asked.roots:
                columns = (at_c + self.start).tolist()
                self.asked.roots[name].add(self.first_row, at_b.tolist(), columns, p_NV, q_NV)
        places = [
            (b, c + self.start + depth - len(self.texts.rows[b].prompt_ids) + 1)
            for b, c in zip(at_b.tolist(), at_c.tolist(), strict=True)
        ]
        if not depth and name in self.asked.diagnosers:
            self.asked.diagnosers[name].add([(self.first_row + b, at) for b, at in places], p_NV, q_NV, chosen_NV)
        for rule, count in self.asked.ranks.items():
            u_NK = torch.stack([self.uniforms[b][at] for b, at in places]) if count > 1 else x_N1.double()
            values[rule] = rank_chances(rule, p_NV, q_NV, x_N1[:, 0], u_NK.to(p_NV.device), count)
        self._keep(name, depth, places, {key: value.double().cpu().numpy() for key, value in values.items()})

    def _keep(self, name: str, depth: int, places: list[tuple[int, int]], values: Mapping[str, Any]) -> None:
        for number, (b, at) in enumerate(places):
            trace = self.traces[name][b]
            for key in ("alpha", "greedy", "match", "missing") if not depth else ():
                getattr(trace, key)[at] = values[key][number, 0]
            for key in ("ratio", "belief", "place"):
                if key in values:
                    getattr(trace, key)[depth, at] = values[key][number, 0]
            for rule in self.asked.ranks:
                trace.ranks[rule][depth, at] = values[rule][number]

    def _finite(self, name: str, logits_BCV: Tensor, wanted_BC: Tensor) -> Tensor:
        """The logits `[N, V]` at the wanted columns; RunError that names model and prompt where a logit is NaN or +inf,
        or all of them are -inf.

        -inf alone is right: a token that the model does not have. At temperature 0 a NaN would pass unseen as the
        argmax.
        """
        chosen_NV = logits_BCV[wanted_BC]
        # A NaN or +inf comes out of max() as itself.
        broken_N = ~chosen_NV.amax(-1).isfinite()
        if broken_N.any():
            row = self.texts.rows[int(wanted_BC.nonzero()[broken_N][0, 0])]
            model = self.asked.names[name]
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
    roots: Mapping[str, RootSums] | None = None,
    diagnosers: Mapping[str, Diagnoser] | None = None,
    seed: int = 0,
    names: Mapping[str, str] | None = None,
    tick: Tick = no_tick,
) -> dict[str, Traces]:
    """By draft, the traces of all rows (`eval.acceptance.Trace`), as far as these methods need them.

    `rows` hold continuations by the target at this `sampling`. All drafts share one forward of the target, and
    processes that were launched together divide the batches. At most about `max_logits` logits per model are held at
    once; for heads at least those of one whole row. `names`: what errors call the models, the target's key being "".
    Raises RunError that names model and prompt where logits are not finite.
    """
    asked = _Asked(
        sampling=sampling,
        depths=max((method.shape.depth for method in methods), default=1),
        ranks=ranks_needed(methods, sampling),
        places=sampling.greedy or any(method.verifier == "naive" for method in methods),
        seed=seed,
        names={"": "the target"} | {name: f"draft {name}" for name in drafts} | dict(names or {}),
        roots=roots or {},
        diagnosers=diagnosers or {},
        max_logits=max_logits,
    )

    def read_batch(index: int) -> dict[str, list[Trace]]:
        start = index * batch_size
        batch = rows[start : start + batch_size]
        found = _read(target, drafts, batch, asked, start)
        tick(len(batch))
        return found

    read: dict[str, list[Trace]] = {name: [] for name in drafts}
    for batch in divided(-(-len(rows) // batch_size), read_batch):
        for name, found in batch.items():
            read[name] += found
    # What was summed up on the way, every process has of its own prompts.
    for own in asked.roots.values():
        sums = _of_all(own.sums)
        own.sums = {step: _of_owners([part[step] for part in sums], batch_size) for step in own.sums}
    for each in asked.diagnosers.values():
        each.found = _of_owners(_of_all(each.found), batch_size)
    return {name: Traces(rows, isinstance(drafts[name], PreTrainedModel)) for name, rows in read.items()}


def _of_all(own: T) -> list[T]:
    """`own` of every process, in the order of the processes."""
    return divided(launched(), lambda _: own)


def _of_owners(parts: Sequence[Any], batch_size: int) -> Any:
    """Lists by prompt, each prompt's entry from the process that worked on its batch (see `divided`)."""
    return {
        key: [parts[row // batch_size % len(parts)][key][row] for row in range(len(values))]
        for key, values in parts[0].items()
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

    `rows` hold the target's own continuations, so that the mean over positions is over its own distribution. `roots`
    are simulated at some of the positions (`eval.headroom`), from `seed`. Otherwise as `read_traces`, which takes the
    `options`.
    """
    lengths = [(len(row.prompt_ids), len(row.output_ids)) for row in rows]
    ids, vocabulary = [row.id for row in rows], vocabulary_size(target)
    sums = {name: RootSums(roots, lengths, ids, vocabulary, seed) for name in (drafts if roots else ())}
    diagnosers = {name: Diagnoser(rows, sampling, seed) for name in (drafts if diagnose else ())}
    asked = {"roots": sums, "diagnosers": diagnosers, "seed": seed, **options}
    read = read_traces(target, drafts, rows, sampling, methods, **asked)
    found: dict[str, AlphaMeasurement] = {}
    for name, traces in read.items():
        counts = {method.name: predict(method, sampling, traces) for method in methods}
        found[name] = AlphaMeasurement(
            sum=[float(trace.alpha.sum()) for trace in traces.rows],
            greedy=[float(trace.greedy.sum()) for trace in traces.rows],
            match=[float(trace.match.sum()) for trace in traces.rows],
            missing=[float(trace.missing.sum()) for trace in traces.rows],
            count=[trace.length for trace in traces.rows],
            roots=sums[name].sums if roots else {},
            predicted={key: value for key, value in counts.items() if value is not None},
            diagnosis=diagnosers[name].found if diagnose else None,
        )
    return found


def alpha_sums(
    target: PreTrainedModel,
    draft: Draft,
    rows: Sequence[Continuation],
    sampling: Sampling,
    *,
    names: tuple[str, str] = ("the target", "the draft"),
    **options: Any,
) -> AlphaMeasurement:
    """`measure_alphas` of a single draft; `names` are what errors call target and draft."""
    called = {"": names[0], "draft": names[1]}
    return measure_alphas(target, {"draft": draft}, rows, sampling, names=called, **options)["draft"]
