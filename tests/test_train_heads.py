"""Trainees of heads: they see what decoding sees, count what it drafts, and train what is theirs;
cached features.
"""

import copy
import shutil
from functools import partialmethod
from typing import Any, cast

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor
from torch._dynamo.utils import counters
from torch._inductor.compile_fx import compile_fx
from transformers import AttentionInterface, Cache, DynamicCache

from draftsmith.core.hidden_states import forward_with_states
from draftsmith.core.state_store import StateFiles
from draftsmith.drafts.heads.block import BlockHead
from draftsmith.drafts.heads.eagle3 import Eagle3Head
from draftsmith.drafts.heads.medusa import HydraHeads, MedusaHeads
from draftsmith.drafts.heads.unrolled_attention import UNROLLED, attention
from draftsmith.train.batch import IGNORE, Batch
from draftsmith.train.draft_setup import compile_layers
from draftsmith.train.objective import parse_objective
from draftsmith.train.trainees import TRAINEES
from tests.test_drafts_heads import make_target
from tests.tiny_models import DRAFT_VOCAB, FRESH, stirred
from tests.train_laws import tiny_family

V, H = 40, 16
# (prompt, response): an ordinary row, one without a prompt, a prompt of one token, a response of
# one token.
ROWS = [
    ([3, 7, 20, 11], [5, 6, 30, 7, 1]),
    ([], [8, 21, 37, 2, 6, 1]),
    ([9], [38, 5, 11]),
    ([4, 39, 12, 17, 20, 6], [1]),
]


def make_bounded_target():
    """A target that bounds its logits and scales its embedding."""
    more = {"initializer_range": 0.3, "final_logit_softcapping": 3.0, "sliding_window": 4096}
    return tiny_family("gemma2", 4, 0.0, vocab_size=V, num_hidden_layers=3, **more)


@pytest.fixture(scope="module")
def target():
    return make_target()


OPTIONS: dict[str, dict[str, Any]] = {
    "eagle": {"noise": 0.0, "depths": 3},
    "eagle-deep": {"noise": 0.0, "depths": 3, "test_steps": 2},
    "eagle3": {"test_steps": 3},
    "eagle3-3.1": {"test_steps": 3},
    "mtp": {"test_steps": 3},
    "medusa": {},
    "hydra": {},
    **dict.fromkeys(("dflash", "dflash-part", "jetspec", "dspark"), {}),
}
PARTS = ("eagle3", "dflash-part")
every_kind = pytest.mark.parametrize("kind", OPTIONS)


def fresh(kind, target):
    return FRESH[kind.removesuffix("-deep")](target)


def trainee_of(kind, target, objective="fkl", **options):
    return TRAINEES[kind.split("-")[0]](
        stirred(fresh(kind, target)),
        parse_objective(objective),
        target,
        chunk=4,
        **(OPTIONS[kind] | options),
    )


@pytest.fixture
def graphs(kind, monkeypatch):
    """The graphs of compiled layers; those of EAGLE-1 become code, others run as they are."""
    found: list[Any] = []

    def collect(graph, inputs):
        found.append(graph)
        return compile_fx(graph, inputs) if kind == "eagle" else graph.forward

    plain = torch.nn.Module.compile
    monkeypatch.setattr(torch.nn.Module, "compile", partialmethod(plain, backend=collect))
    monkeypatch.setitem(cast(Any, AttentionInterface)._global_mapping, UNROLLED, attention)
    torch.compiler.reset()
    counters.clear()
    with torch._dynamo.config.patch(recompile_limit=8):
        yield found
    torch.compiler.reset()


OTHERS = ("eagle", "mtp", "medusa", "hydra", "dflash", "dspark")


@pytest.mark.parametrize(
    "kind", ["eagle3", *(pytest.param(kind, marks=pytest.mark.slow(20)) for kind in OTHERS)]
)
def test_rows_of_any_length_share_the_graphs_of_compiled_layers(kind, target, graphs):
    if kind == "eagle" and shutil.which("g++") is None:
        pytest.skip("torch.compile needs g++ on a CPU")
    depths: dict[str, Any] = {"test_steps": 4} if kind == "eagle3" else {}
    plain, compiled = (trainee_of(kind, target, **depths) for _ in range(2))
    compile_layers(compiled.draft)
    made = []
    for width, training in ((9, True), (9, False), (12, True), (20, False)):
        batch = batch_of(ROWS if training else ROWS[:2], width)
        with torch.set_grad_enabled(training):
            wanted, found = (trainee.train(training)(batch) for trainee in (plain, compiled))
        torch.testing.assert_close(found, wanted)
        if training:
            wanted.loss.backward()
            found.loss.backward()
        made.append(len(graphs))
    assert 0 < made[0] and made[1] == made[-1]
    for name, parameter in plain.draft.named_parameters():
        torch.testing.assert_close(compiled.draft.get_parameter(name).grad, parameter.grad)
    broken = counters["graph_break"]
    assert len(broken) == (kind in ("eagle", "eagle3", "mtp")) and all(
        "attention" in why for why in broken
    )


def batch_of(rows, width=None, pad=0):
    width = width or max(len(a) + len(b) for a, b in rows)
    ids_BT, labels_BT = torch.full((len(rows), width), pad), torch.full((len(rows), width), IGNORE)
    for b, (prompt, response) in enumerate(rows):
        fill(ids_BT[b], labels_BT[b], prompt, response)
    return Batch(ids_BT, labels_BT)


def fill(ids_T, labels_T, prompt, response):
    tokens, first = torch.tensor(prompt + response), max(len(prompt), 1)
    ids_T[: len(tokens)] = tokens
    labels_T[first - 1 : len(tokens) - 1] = tokens[first:]


def packed_batch(groups):
    width = max(sum(sum(map(len, ROWS[i])) for i in group) for group in groups) + 1
    ids_BT = torch.zeros(len(groups), width, dtype=torch.long)
    labels_BT, documents_BT = torch.full_like(ids_BT, IGNORE), torch.full_like(ids_BT, -1)
    positions_BT = torch.zeros_like(ids_BT)
    for b, group in enumerate(groups):
        start = 0
        for number, i in enumerate(group):
            length = sum(map(len, ROWS[i]))
            fill(ids_BT[b, start:], labels_BT[b, start:], *ROWS[i])
            positions_BT[b, start : start + length] = torch.arange(length)
            documents_BT[b, start : start + length] = number
            start += length
    return Batch(ids_BT, labels_BT, positions_BT, documents_BT)


def decoded(head, target, ids, at, depths):
    """Logits and own features of a draft of the text's tokens behind `at`, one token a forward, as
    the decoder does.
    """
    with torch.no_grad():
        _, read = forward_with_states(target, head.hidden_layers, input_ids=torch.tensor([ids]))
    states = list(read)
    logits: list[Tensor] = []
    features: list[Tensor] = []
    if isinstance(head, MedusaHeads):
        return list(head(states[0][:, at : at + 1])[0, 0][:depths]), []
    if isinstance(head, BlockHead):
        anchor, size, drafted = at + 1, head.config.block_size, ids[at + 1 : at + 1 + depths]
        context, positions = torch.arange(anchor)[None], anchor + torch.arange(size)[None]
        past = DynamicCache()
        head.remember(head.fuse([state[:, :anchor] for state in states]), context, past)
        near = positions.T - context < (head.config.window or 99)
        own = torch.ones(size, size, dtype=torch.bool).tril(0 if head.config.causal else size)
        mask = torch.cat([near, own], 1)[None, None]
        block_SH = head.slots(
            head.states(head.block(torch.tensor([ids[anchor]])), mask, positions, past)
        )[0, :depths]
        logits_dV = head.logits(head.raw_logits(block_SH), torch.tensor(drafted))
        return list(logits_dV[:, DRAFT_VOCAB] if head.reduced else logits_dV), list(block_SH)
    if isinstance(head, HydraHeads):
        for d in range(depths):
            logits.append(
                head(states[0][:, at : at + 1], torch.tensor([[ids[at + 1 : at + 2 + d]]]))[0, 0]
            )
        return logits, []
    fused = head.fuse(states) if isinstance(head, Eagle3Head) else states[0]
    cache: Cache = DynamicCache()
    for t in range(at + 1):
        out_1V, own = head(torch.tensor([[ids[t + 1]]]), fused[:, t : t + 1], None, None, cache)
    for d in range(depths):
        if d:
            out_1V, own = head(torch.tensor([[ids[at + 1 + d]]]), own, None, None, cache)
        logits.append(out_1V[0, 0])
        features.append(own[0, 0])
    return logits, features


def starts(prompt, response, depth):
    """Positions whose feature chooses a root that decoding drafts from, as far as the text tells
    what comes after.
    """
    count = len(prompt) + len(response)
    return [
        t
        for t in range(count)
        if max(len(prompt), 1) <= t + 2 and t + 1 + depth < count and t + 1 >= 1
    ]


def reference(kind, trainee, target, objective):
    """Loss, alpha and counts by depth, missing mass: one draft at a time, whole logits, plain
    formulas.
    """
    head = trainee.draft
    total, alpha, counts, missing = torch.zeros(()), [0.0] * 3, [0] * 3, 0.0
    for prompt, response in ROWS:
        ids = prompt + response
        with torch.no_grad():
            out = target(torch.tensor([ids]), output_hidden_states=True)
        p_TV, last_TH = out.logits[0].softmax(-1), out.hidden_states[-1][0]
        for depth in range(3):
            for t in starts(prompt, response, depth + 1):
                logits, own = decoded(head, target, ids, t, depth + 1)
                row, token = t + depth + 1, ids[t + depth + 2]
                p_V, q_D = p_TV[row], logits[-1].softmax(-1)
                kept = p_V[DRAFT_VOCAB] if kind in PARTS else p_V
                counts[depth] += 1
                alpha[depth] += float(torch.minimum(kept, q_D).sum().detach())
                missing += float(1 - kept.sum()) if depth == 0 else 0.0
                wanted = kept / kept.sum()
                if objective == "fkl":
                    loss = (wanted * (wanted.log() - q_D.log())).sum()
                elif kind in PARTS and token not in DRAFT_VOCAB:
                    loss = torch.zeros(())
                else:
                    loss = -q_D[DRAFT_VOCAB.index(token) if kind in PARTS else token].log()
                if kind == "dspark":
                    overlap = torch.minimum(kept, q_D).sum().detach()
                    said = head.confidence_logits(own[-1], torch.tensor(ids[t + 1 + depth]))
                    loss = loss + F.binary_cross_entropy_with_logits(said, overlap)
                if kind in ("eagle", "eagle-deep"):
                    whole = 0.1 * loss + F.smooth_l1_loss(own[-1], last_TH[row])
                    weight = trainee.step_decay**depth if depth < trainee.test_steps else 0.0
                    total = total + weight * whole
                else:
                    total = total + trainee.step_decay**depth * loss
    return total, alpha, counts, missing


@pytest.mark.parametrize(("objective", "make"), [("fkl", make_bounded_target), ("ce", make_target)])
@every_kind
def test_sums_and_gradients_are_those_of_one_draft_at_a_time(kind, objective, make):
    """Law 5: a draft is made one token a forward, as the decoder makes it, and its loss from whole
    logits. For EAGLE-3 this is the training-time test against its slow reference, gradients through
    all steps included.
    """
    target = make()
    trainee = trainee_of(kind, target, objective).eval()
    wanted, alpha, counts, missing = reference(kind, trainee, target, objective)
    wanted.backward()
    slopes = [p.grad for p in trainee.parameters()]
    trainee.zero_grad(set_to_none=True)
    sums = trainee(batch_of(ROWS))
    sums.loss.backward()
    torch.testing.assert_close(sums.loss, wanted, atol=1e-4, rtol=1e-5)
    assert sums.depth_tokens_D.tolist() == counts and int(sums.tokens) == counts[0] == 12
    torch.testing.assert_close(sums.depth_alpha_D, torch.tensor(alpha), atol=1e-4, rtol=1e-5)
    torch.testing.assert_close(sums.alpha, sums.depth_alpha_D[0])
    assert 0 < float(sums.alpha) < counts[0]
    for parameter, slope in zip(trainee.parameters(), slopes, strict=True):
        torch.testing.assert_close(parameter.grad, slope, atol=1e-4, rtol=1e-4)
        assert slope.abs().sum() > 0
    # All of the head is trained, and nothing else.
    assert {id(p) for p in trainee.parameters()} == {id(p) for p in trainee.draft.parameters()}
    assert all(p.grad is None for p in target.parameters())
    if kind in PARTS:
        assert sums.missing is not None and 0 < missing < counts[0]
        torch.testing.assert_close(sums.missing, torch.tensor(missing), atol=1e-4, rtol=1e-5)
    else:
        assert sums.missing is None


def gradients(trainee, batches):
    trainee.zero_grad(set_to_none=True)
    found = [trainee(batch) for batch in batches]
    for sums in found:
        sums.loss.backward()
    return (
        sum(float(s.loss.detach()) for s in found),
        [p.grad.clone() for p in trainee.parameters()],
        found,
    )


@every_kind
def test_loss_does_not_depend_on_how_rows_are_batched_padded_or_packed(kind, target):
    trainee = trainee_of(kind, target, packing=True)
    loss, slopes, sums = gradients(trainee, [batch_of(ROWS)])
    ways = [
        [batch_of([row]) for row in ROWS],
        [batch_of(ROWS, width=17, pad=9)],
        [batch_of(ROWS[:3]), batch_of(ROWS[3:], width=12)],
        [packed_batch([[3, 1, 0, 2]])],
        [packed_batch([[0], [2, 1, 3]])],
    ]
    for batches in ways:
        other, others, parts = gradients(trainee, batches)
        assert other == pytest.approx(loss, rel=1e-5)
        for slope, wanted in zip(others, slopes, strict=True):
            torch.testing.assert_close(slope, wanted, atol=2e-5, rtol=1e-4)
        assert sum(int(part.tokens) for part in parts) == int(sums[0].tokens)
        alpha = torch.stack([part.depth_alpha_D for part in parts]).sum(0)
        torch.testing.assert_close(alpha, sums[0].depth_alpha_D, atol=1e-4, rtol=1e-5)


@every_kind
def test_turns_of_a_chat_in_one_sequence_have_the_losses_of_their_rows(kind, target):
    trainee = trainee_of(kind, target).eval()
    first = ([5, 6], [7, 8, 1])
    second = ([5, 6, 7, 8, 1, 9, 10, 11, 12], [4, 3, 1])
    once = batch_of([second])
    fill(once.ids_BT[0].clone(), once.labels_BT[0], *first)
    wanted, slopes, apart = gradients(trainee, [batch_of([first]), batch_of([second])])
    found, others, (sums,) = gradients(trainee, [once])
    assert found == pytest.approx(wanted, rel=1e-5)
    assert int(sums.tokens) == sum(int(part.tokens) for part in apart)
    for slope, other in zip(slopes, others, strict=True):
        torch.testing.assert_close(other, slope, atol=2e-5, rtol=1e-4)
    for name in ("depth_alpha_D", "depth_tokens_D"):
        parts = torch.stack([getattr(part, name) for part in apart]).sum(0)
        torch.testing.assert_close(getattr(sums, name), parts, atol=1e-4, rtol=1e-5)


@every_kind
def test_a_batch_without_a_draft_that_counts_has_a_loss_of_zero(kind, target):
    sums = trainee_of(kind, target)(batch_of([([], [5, 1])]))
    sums.loss.backward()
    assert (
        float(sums.loss.detach()) == 0
        and int(sums.tokens) == 0
        and sums.depth_tokens_D.tolist() == [0, 0, 0]
    )


@pytest.mark.parametrize("target_dtype", [torch.float32, torch.bfloat16])
@every_kind
def test_half_precision_changes_the_sums_by_rounding_only(kind, target_dtype, target):
    exact = trainee_of(kind, target)(batch_of(ROWS))
    trainee = trainee_of(kind, copy.deepcopy(target).to(target_dtype)).float()
    with torch.autocast("cpu", torch.bfloat16):
        sums = trainee(batch_of(ROWS))
    sums.loss.backward()
    torch.testing.assert_close(sums.loss, exact.loss, atol=0, rtol=0.05)
    torch.testing.assert_close(sums.alpha, exact.alpha, atol=0, rtol=0.05)
    assert all(p.grad is not None and p.grad.dtype == torch.float32 for p in trainee.parameters())


def test_noise_is_drawn_while_training_only_and_again_the_same_from_the_same_seed(target):
    trainee, batch = trainee_of("eagle", target, noise=0.1), batch_of(ROWS)
    plain = trainee_of("eagle", target)
    losses = []
    for seed in (0, 0, 1):
        torch.manual_seed(seed)
        losses.append(float(trainee(batch).loss.detach()))
    assert losses[0] == losses[1] != losses[2]
    assert losses[0] != float(plain(batch).loss.detach())
    assert float(trainee.eval()(batch).loss.detach()) == float(plain.eval()(batch).loss.detach())


def states(seed, tokens, dtype=torch.float32):
    return torch.randn(2, tokens, H, generator=torch.Generator().manual_seed(seed)).to(dtype)


def cache_at(directory, **changes):
    options: dict[str, Any] = {
        "fingerprint": "a" * 16,
        "dtype": torch.float32,
        "max_bytes": 2**20,
    }
    return StateFiles(directory, **(options | changes))


def test_a_cached_row_is_found_by_the_same_key_only(tmp_path):
    cache = cache_at(tmp_path)
    cache.put([1, 2, 3], (1, -1), states(0, 3))
    for again in (cache, cache_at(tmp_path), cache_at(tmp_path, processes=2)):
        found = again.get([1, 2, 3], (1, -1))
        assert found is not None and torch.equal(found, states(0, 3))
        assert again.get([1, 2], (1, -1)) is None and again.get([1, 2, 4], (1, -1)) is None
    assert cache.get([1, 2, 3], (2, -1)) is None
    for changes in ({"fingerprint": "b" * 16}, {"dtype": torch.bfloat16}):
        assert cache_at(tmp_path, **changes).get([1, 2, 3], (1, -1)) is None


def test_drafts_that_read_some_of_the_same_layers_share_them(tmp_path):
    cache = cache_at(tmp_path)
    cache.put([1, 2, 3], (1, -1), states(0, 3))
    size = on_disk(tmp_path)
    last = cache.get([1, 2, 3], (-1,))
    assert last is not None and torch.equal(last, states(0, 3)[1:])
    assert cache.get([1, 2, 3], (1, 2, -1)) is None
    cache.put([1, 2, 3], (1, 2, -1), torch.cat([states(0, 3)[:1], states(1, 3)]))
    assert on_disk(tmp_path) < 1.9 * size
    swapped = cache.get([1, 2, 3], (-1, 1))
    assert swapped is not None and torch.equal(swapped, states(0, 3).flip(0))


def on_disk(directory):
    return sum(file.stat().st_size for file in directory.rglob("*.safetensors"))


@pytest.mark.parametrize("processes", [1, 3])
def test_a_full_cache_stays_within_its_bound_and_keeps_what_it_has(tmp_path, processes):
    bound = 60_000
    caches = [cache_at(tmp_path, max_bytes=bound, processes=processes) for _ in range(processes)]
    for number in range(90):
        caches[number % processes].put([number] * 10, (1, -1), states(number, 10))
        assert on_disk(tmp_path) <= bound
    assert 0.6 * bound < on_disk(tmp_path) <= bound
    again = cache_at(tmp_path, max_bytes=bound)
    hits = [number for number in range(90) if again.get([number] * 10, (1, -1)) is not None]
    assert len(hits) > 20 and hits == list(range(len(hits)))
