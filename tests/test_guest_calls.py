"""Every public call that runs a model, made once on a tiny pair, leaves the process as it was."""

import subprocess
import sys
from typing import Any

import pytest
import torch

import draftsmith as ds
from tests.conftest import ROOT
from tests.distilled import write_rows
from tests.drafting_server import drafting
from tests.global_state import changed, global_state

IMPORT = """
from tests.global_state import changed, global_state
before = global_state()
import draftsmith as ds
assert changed(before) == {}, changed(before)
for name in ds.__all__:
    getattr(ds, name)
# scipy and sympy filter warnings of theirs, rich draws a number.
assert changed(before).keys() <= {"warnings", "random"}, changed(before).keys()
"""


@pytest.mark.slow(15)
def test_importing_every_public_name_leaves_the_process_as_it_was():
    subprocess.run([sys.executable, "-c", IMPORT], cwd=ROOT, check=True)


def calls_of(there, target, draft, answers, url):
    """Calls by what they call; later ones read what earlier ones left."""
    common: dict[str, Any] = {"target": target, "device": "cpu"}
    prompts = str(there / "prompts.jsonl")
    short: dict[str, Any] = {"max_prompts": 4, "max_new_tokens": 6}
    fit: dict[str, Any] = {"data": [answers], "steps": 2, "max_length": 48}
    head, trained, measured = (str(there / name) for name in ("head", "trained", "measured"))

    def out(name):
        return str(there / name)

    pair = ds.load_pair(target, draft=draft, device="cpu")
    decoder = ds.SpeculativeDecoder(pair.target)

    def results():
        return ds.Results.load(measured)

    return {
        "load_pair": lambda: ds.load_pair(target, draft=draft, device="cpu"),
        "generate": lambda: pair.generate("a", max_new_tokens=6, temperature=1.0),
        "stream": lambda: list(pair.stream("a", max_new_tokens=6)),
        "SpeculativeDecoder": lambda: decoder.generate([[5, 6]], max_new_tokens=6),
        "distill": lambda: ds.distill(prompts=prompts, out=out("set"), **common, **short),
        "score_set": lambda: ds.score_set(score=answers, out=out("scored"), **common),
        "init": lambda: ds.init(
            method="prune", num_layers=1, out=out("pruned"), prompts=prompts, **common, **short
        ),
        "train": lambda: ds.train(draft=draft, out=trained, objective="fkl", **common, **fit),
        "train a head": lambda: ds.train(kind="eagle3", out=head, **common, **fit),
        "evaluate": lambda: ds.evaluate(
            draft=[f"base={draft}", f"mine={trained}"],
            id=[f"x={prompts}"],
            ood=[f"y={prompts}"],
            out=measured,
            speed_prompts=1,
            bootstrap=100,
            tree=["chain:2"],
            temperature=[1.0],
            **common,
            **short,
        ),
        "Results": lambda: results().plot(),
        "plan": lambda: ds.plan(draft=draft, prompts=prompts, out=out("p.json"), **common, **short),
        "export": lambda: ds.export(
            draft=head, out=out("export"), format="speculators", target=target
        ),
        "served": lambda: ds.served(served=url, draft=draft, prompts=prompts, **common, **short),
        "align": lambda: ds.align(
            draft=draft,
            prompts=prompts,
            out=out("align"),
            distill={"max_new_tokens": 6, "max_prompts": 12},
            train={"steps": 2},
            eval={"max_prompts": 2, "max_new_tokens": 4, "speed_prompts": 1, "bootstrap": 100},
            **common,
        ),
    }


@pytest.mark.slow(60)
def test_every_public_call_leaves_the_process_as_it_was(
    tmp_path, target_dir, draft_dir, answers, monkeypatch
):
    monkeypatch.setattr("draftsmith.eval.plan.Planner.tried", lambda _: ["chain:2"])
    words = "The quick brown fox jumps over a lazy dog and numbers such as 12".split()
    texts = [" ".join(words[start : start + size]) for size in range(4, 9) for start in range(8)]
    rows: list[dict[str, Any]] = [{"prompt": text} for text in texts]
    write_rows(tmp_path / "prompts.jsonl", *rows)
    data = answers("A draft model proposes tokens", 2, 1, 12)
    served = ds.load_pair(target_dir, draft={"draft": draft_dir}, device="cpu", fast=False)
    with drafting("vllm", served) as (url, _):
        calls = calls_of(tmp_path, target_dir, draft_dir, data, url)
        found: dict[str, object] = {}
        for name, call in calls.items():
            torch.manual_seed(7)
            before = global_state()
            call()
            if difference := changed(before):
                found[name] = difference
    assert found == {}
