"""Texts that the target did not write are seen; those of lossless verifiers and of a rounded target
are its own. At a real vocabulary: the demo's pair.
"""

from types import SimpleNamespace

import numpy as np
import pytest
import torch

import draftsmith as ds
from draftsmith.core.sampling import Sampling
from draftsmith.eval.alpha import Reader
from draftsmith.eval.bootstrap import PromptSums, resamples
from draftsmith.eval.formulas import Continuation
from draftsmith.eval.predict import Traces
from draftsmith.eval.text_figures import TEXT_VALUES, judge_texts, sampled_figures, text_values
from draftsmith.serving.acceptance import _Compared
from tests.conftest import ROOT
from tests.samplers import drawn, keeps, noise_like, refused_law

DEMO = ROOT / "draftsmith" / "demo" / "pair"
PROMPTS = ["Return the value", "def __init__(self", "If the file is", "import os", "The list of"]
ROWS, TOKENS = 40, 64


@pytest.fixture(scope="module")
def pair():
    return ds.load_pair(
        str(DEMO / "target"), draft={"draft": str(DEMO / "base")}, device="cpu", fast=False
    )


@pytest.fixture(scope="module")
def laws(pair):
    """Logits of target and draft, p and q `[N, V]` at places of the target's own texts."""
    found = []
    for row in range(ROWS):
        ids = pair.encode(PROMPTS[row % len(PROMPTS)], raw=True)
        text = pair.generate(
            ids, draft=(), max_new_tokens=TOKENS, temperature=1.0, seed=row, ignore_eos=True
        )
        ids_BT = torch.tensor([[*ids, *text.output_ids][:-1]])
        with torch.no_grad():
            both = [model(ids_BT).logits[0] for model in (pair.target, pair.drafts["draft"])]
        found.append([logits[-TOKENS:].float() for logits in both])
    target, draft = (torch.cat(part) for part in zip(*found, strict=True))
    return SimpleNamespace(logits=target, p=target.softmax(1), q=draft.softmax(1))


def sampled(rule, p, q, random):
    """A token at every place: of a draft's token that `rule` judges."""
    noise = noise_like(p, random)
    draft = drawn(q, noise)
    kept = keeps(rule, p, q, draft, random)
    if rule != "shared noise":
        noise = noise_like(p, random)
    return torch.where(kept, draft, drawn(refused_law(rule, p, q, draft), noise))


def traces_of(p, q, x):
    values = text_values(p, q, x)
    places = {name: values[name].double().numpy().reshape(1, -1, TOKENS) for name in TEXT_VALUES}
    return Traces(np.full(len(x) // TOKENS, TOKENS), True, places)


def judged(p, q, x):
    traces = traces_of(p, q, x)
    return judge_texts(traces, False, resamples(range(len(traces.lengths_P)), 400, seed=0))


@pytest.mark.slow(60)
@pytest.mark.parametrize(
    "rule",
    ["a tenth unverified", "1.5 p/q", "from p", "one-hot residual", "typical", "shared noise"],
)
def test_a_sampler_that_is_not_lossless_is_seen(laws, rule):
    random = torch.Generator().manual_seed(3)
    times = 20 if rule == "shared noise" else 3
    sums: dict[str, list[float]] = {name: [] for name in (*TEXT_VALUES, "tokens")}
    for _ in range(times):
        traces = traces_of(laws.p, laws.q, sampled(rule, laws.p, laws.q, random))
        for name in TEXT_VALUES:
            sums[name] += traces.sums(name)
        sums["tokens"] += traces.lengths_P.tolist()
    picks = resamples(list(range(ROWS)) * times, 400, seed=0)
    likelihood, share = sampled_figures(sums, picks)
    assert abs(share.z) > 3, (rule, share, likelihood)
    # A lenient rule is seen by what it makes of the likelihood, too.
    assert rule != "typical" or likelihood.z > 3


@pytest.mark.slow(120)
def test_a_rounded_lossless_server_is_as_predicted(laws):
    """200 runs of ten prompts, asked four times; the served target is rounded to bf16."""

    def calls(accepted):
        by_row = TOKENS - accepted.view(-1, TOKENS).sum(1)
        return PromptSums.of([float(TOKENS)] * len(by_row), by_row.tolist())

    random = torch.Generator().manual_seed(4)
    rounded = laws.logits.bfloat16().float().softmax(1)
    judgements = []
    for _ in range(200):
        rows = torch.randint(ROWS, (10,), generator=random)
        places = (rows[:, None] * TOKENS + torch.arange(TOKENS)).flatten()
        p, q = laws.p[places], laws.q[places]
        x = drawn(rounded[places], noise_like(p, random))
        chances = (q.gather(1, x) / p.gather(1, x)).clamp(max=1)
        predicted = calls(chances)
        loads = []
        for _ in range(4):
            accepted = torch.rand(x.shape, generator=random) < chances
            loads.append(_Compared(calls(accepted), predicted, range(len(rows))).judgement)
        seen = {*loads, judged(p, q, x).finding or "as predicted"}
        judgements.append("more" if "more" in seen else " ".join(sorted(seen)))
    assert judgements.count("as predicted") >= 190 and "more" not in judgements


@pytest.mark.slow(120)
@pytest.mark.parametrize(
    ("tree", "verifier"),
    [
        ("chain:3", None),
        ("chain:3", "block"),
        ("kary:3,2", None),
        ("kary:4", None),
        ("eagle2:depth=4,beam=4,nodes=12", None),
    ],
)
def test_our_own_verifiers_write_the_targets_texts(pair, tree, verifier):
    rows = []
    for seed in range(ROWS):
        ids = pair.encode(PROMPTS[seed % len(PROMPTS)], raw=True)
        text = pair.generate(
            ids,
            tree=tree,
            verifier=verifier,
            max_new_tokens=TOKENS,
            temperature=1.0,
            seed=seed,
            ignore_eos=True,
        )
        rows.append(Continuation(str(seed), ids, text.output_ids))
    reader = Reader(pair.target, pair.drafts, Sampling(), [], batch_size=8, texts=True)
    found = judge_texts(reader.read(rows)["draft"], False, resamples(range(ROWS), 400, seed=0))
    assert found.finding is None
    assert all(abs(row["z"]) < 3 for row in found.rows), found.rows
