"""vLLM serves our exports: its output is the target's own, it accepts what we accept and predict
(laws 10 and 11).
"""

from dataclasses import replace
from typing import Any

import numpy as np
import pytest

import draftsmith as ds
from benchmarks.lib.engines import vllm_answers
from draftsmith.core.sampling import Sampling
from draftsmith.decode.method import Method
from draftsmith.drafts.engine_commands import SERVING
from draftsmith.drafts.heads import save_head
from draftsmith.drafts.heads.eagle3 import Eagle3Head
from draftsmith.drafts.layouts.export import WRITERS
from draftsmith.drafts.load import load_source
from draftsmith.eval.alpha import measure_alphas
from draftsmith.eval.counts import of_method
from draftsmith.eval.formulas import Continuation
from draftsmith.train.config import HeadOptions
from tests.conftest import ROOT
from tests.engine_proofs import Proof, proven_by_vllm
from tests.learnt_heads import AHEAD, TOKENS, learn
from tests.openvino_ir import engine
from tests.tiny_models import at_depth, stirred

TARGET = str(ROOT / "draftsmith" / "demo" / "pair" / "target")
LEARNT = [
    "Return the value of the",
    "If the file is not found,",
    "import os\nimport 12",
    "The list of all",
]
TEXTS = ["Raise an exception if the", "for key in sorted(", "class Reader:\n    def", *LEARNT[:2]]
SAMPLES = 8
GREEDY, HOT = {"temperature": 0}, {"temperature": 1, "n": SAMPLES, "seed": 7}
# The drafts that vLLM serves: kind, format of the export, its name in vLLM. The demo's target has
# too few layers for the authors' own choice of states.
SERVED = {
    "eagle3 of its authors": ("eagle3", "eagle", "eagle3"),
    "lm": ("lm", "hf", "draft_model"),
    "eagle": ("eagle", "eagle", "eagle"),
    "eagle3": ("eagle3", "speculators", "eagle3"),
    "eagle3 of SGLang": ("eagle3", "sglang", "eagle3"),
    "medusa": ("medusa", "medusa", "medusa"),
    "dflash": ("dflash", "dflash", "dflash"),
    "dflash of speculators": ("dflash", "speculators", "dflash"),
    "jetspec": ("jetspec", "dflash", "dflash"),
}
DEMO, REAL = (
    [name for name in SERVED if "authors" not in name],
    ("lm", "eagle3", "eagle3 of its authors"),
)
SAMPLED = ("lm", "eagle3")

pytestmark = pytest.mark.engines


class Served:
    """A target with drafts, their exports, and what vLLM made of them."""

    def __init__(self, target, place):
        self.target, self.place = target, place
        self.proofs: dict[str, Proof] = {}
        self.runs: dict[str, dict[str, Any]] = {}
        self.answers: dict[str, Any] = {}
        self.engine = {
            "model": target,
            "dtype": "float32",
            "max_model_len": 256,
            "max_num_seqs": SAMPLES,
        }

    def pair(self, kind):
        return ds.load_pair(
            self.target, draft=str(self.place / kind), device="cpu", dtype="float32"
        )

    def export(self, name, samples=True):
        kind, form, method = SERVED[name]
        out = self.place / f"{kind}.{form}"
        config = ds.ExportConfig(
            draft=str(self.place / kind),
            target=self.target,
            format=form,  # type: ignore[arg-type]
            out=str(out),
            dtype="float32",
        )
        ds.export(config)
        if kind != "lm" and form in ("eagle", SERVING["vllm"][kind].draft_format):
            source = load_source(str(self.place / kind), self.target, "float32")
            self.proofs[name] = proven_by_vllm(source, out, engine("vllm"))
        self.add(
            name,
            {"method": method, "model": str(out)},
            [GREEDY] + [HOT] * (samples and name in SAMPLED),
        )

    def add(self, name, draft, ways):
        more = (
            {}
            if draft is None
            else {"speculative_config": draft | {"num_speculative_tokens": AHEAD}}
        )
        self.runs[name] = {"engine": self.engine | more, "ways": ways}

    def serve(self, prompts, tokens):
        for run in self.runs.values():
            run |= {"prompts": prompts, "max_new_tokens": tokens}
        self.answers = vllm_answers(engine("vllm"), self.runs)["answers"]
        assert not {
            name: answer for name, answer in self.answers.items() if isinstance(answer, dict)
        }

    def as_we_accept(self, name, tokens):
        """Compare greedy answers row by row, and return the number of accepted tokens."""
        rows, pair = self.answers[name][0], self.pair(SERVED[name][0])
        options: dict[str, Any] = {"tree": f"chain:{AHEAD}", "temperature": 0, "ignore_eos": True}
        accepted = 0
        for row, prompt in zip(rows, self.runs[name]["prompts"], strict=True):
            # vLLM takes the first token from the prompt's forward, and drafts only then.
            first, *rest = row["tokens"][0]
            own = pair.generate([*prompt, first], max_new_tokens=tokens - 1, **options)
            assert own.output_ids == rest
            by_depth = (*own.stats.accepted_by_depth, *[0] * AHEAD)[:AHEAD]
            assert row["drafts"] == own.stats.target_calls
            # In the last step vLLM also counts accepted tokens that the limit cuts off.
            assert all(
                its - mine in (0, 1)
                for its, mine in zip(row["per_position"], by_depth, strict=True)
            )
            accepted += own.stats.accepted
        return accepted


@pytest.fixture(scope="module")
def served(tmp_path_factory):
    """The demo's target with a draft of each kind that has learnt some of its answers."""
    engine("vllm")
    found = Served(TARGET, tmp_path_factory.mktemp("served"))
    ds.init(
        ds.InitConfig(target=TARGET, out=str(found.place / "start"), method="prune", num_layers=1)
    )
    for kind in ("lm", "eagle", "eagle3", "medusa", "dflash", "jetspec"):
        options: dict[str, Any] = {
            "lm": {"draft": str(found.place / "start")},
            "eagle3": {"draft_vocab_size": 2048},
        }
        learn(kind, TARGET, LEARNT, found.place, **options.get(kind, {}))
    for name in DEMO:
        found.export(name)
    found.add("alone", None, [GREEDY])
    found.add(
        "ngram", {"method": "ngram", "prompt_lookup_max": 3, "prompt_lookup_min": 1}, [GREEDY]
    )
    for name in SAMPLED:
        draft = found.runs[name]["engine"]["speculative_config"] | {
            "draft_sample_method": "probabilistic"
        }
        found.add(f"{name}, sampled", draft, [HOT])
    pair = found.pair("lm")
    found.serve([pair.encode(text) for text in TEXTS], TOKENS)
    return found


def test_exports_are_proven_by_vllm(served):
    assert served.proofs.keys() == {"eagle", "eagle3", "medusa", "dflash", "jetspec"}
    for name, proof in served.proofs.items():
        kind, form, _ = SERVED[name]
        # A local version, as of the CPU build, may follow.
        assert proof.engine.partition("+")[0] == WRITERS[form, kind].proven_in


def test_greedy_outputs_are_the_targets_own(served):
    alone = [row["tokens"] for row in served.answers["alone"][0]]
    for name in ("ngram", *DEMO):
        assert [row["tokens"] for row in served.answers[name][0]] == alone
    assert sum(sum(row["per_position"]) for row in served.answers["ngram"][0]) > 0


@pytest.mark.parametrize("name", DEMO)
def test_it_accepts_what_we_accept(served, name):
    assert served.as_we_accept(name, TOKENS) > len(TEXTS), (
        "hardly anything was accepted, so nothing was compared"
    )


@pytest.mark.parametrize("name", SAMPLED)
@pytest.mark.parametrize("rule", ["naive", "speculative"])
def test_acceptance_at_temperature_one_is_the_predicted_one(served, name, rule):
    """Per position, from vLLM's own samples as the texts. By default it drafts greedily: `naive`
    predicts exactly that, since the text decides what was accepted. With draft probabilities it is
    speculative sampling, and only the mean is given; a step accepts by itself, so the variance of a
    count is below its mean.
    """
    rows = served.answers[name][1] if rule == "naive" else served.answers[f"{name}, sampled"][0]
    pair, method = served.pair(SERVED[name][0]), Method.of(f"chain:{AHEAD}", rule)
    (draft,) = pair.drafts.values()
    texts = [
        Continuation(f"{i}.{j}", [*prompt, ids[0]], ids[1:])
        for i, (prompt, row) in enumerate(zip(served.runs[name]["prompts"], rows, strict=True))
        for j, ids in enumerate(row["tokens"])
    ]
    found = measure_alphas(
        pair.target, {"d": draft}, texts, Sampling(temperature=1.0), [method], batch_size=30
    )["d"]
    calls = sum(of_method(found, method)["expected_calls"])
    by_depth = np.array(at_depth(found, "expected_accepted", method)).sum(1)
    drafts, counted = (
        sum(row["drafts"] for row in rows),
        np.array([row["per_position"] for row in rows]).sum(0),
    )
    # In the last step of a text vLLM also counts accepted tokens that the limit cuts off.
    surplus = len(texts) * by_depth / calls
    noise = 3 * by_depth**0.5 if rule == "speculative" else np.full(AHEAD, 1e-6)
    assert abs(drafts - calls) <= noise.sum()
    assert (counted >= by_depth - noise).all() and (counted <= by_depth + noise + 2 * surplus).all()
    # What was measured tells the two rules apart.
    whole = of_method(found)
    other = sum(whole["alpha" if rule == "naive" else "greedy"]) / sum(whole["positions"])
    assert abs(counted[0] / drafts - other) > 0.02


def test_the_last_tap_is_the_raw_output_of_the_last_layer(tmp_path):
    """As vLLM gives it: its logits are ours, and a block drafter is accepted as we accept it."""
    engine("vllm")
    served = Served(TARGET, tmp_path)
    target = ds.load_pair(TARGET, device="cpu", dtype="float32").target
    options = HeadOptions(num_layers=2, block_size=AHEAD + 1, target_layers=[1, 3, 5])
    learn("dflash", TARGET, LEARNT, tmp_path, head=options)
    fresh = Eagle3Head.fresh(target)
    config = replace(fresh.config, eagle_aux_hidden_state_layer_ids=(1, 3, 6))
    save_head(stirred(Eagle3Head(config, target), 0.05), tmp_path / "eagle3")
    for name in ("dflash", "dflash of speculators", "eagle3"):
        served.export(name, samples=False)
    assert served.proofs.keys() == {"dflash", "eagle3"}
    served.serve([served.pair("dflash").encode(text) for text in LEARNT], TOKENS)
    for name in ("dflash", "dflash of speculators"):
        assert served.as_we_accept(name, TOKENS) > len(LEARNT)


def test_a_real_chat_model_is_served_as_we_decode_it(smollm2, tmp_path):
    engine("vllm")
    real = Served(smollm2, tmp_path)
    ds.init(ds.InitConfig(target=smollm2, out=str(tmp_path / "lm"), method="prune", num_layers=26))
    learn("eagle3", smollm2, LEARNT, tmp_path, steps=30, draft_vocab_size=2048)
    for name in REAL:
        real.export(name, samples=False)
    prompts = [real.pair("lm").encode(text) for text in LEARNT]
    real.serve(prompts, TOKENS)
    for name in REAL:
        assert real.as_we_accept(name, TOKENS) > len(prompts), (
            "hardly anything was accepted, so nothing was compared"
        )
    assert real.proofs.keys() == {"eagle3", "eagle3 of its authors"}
