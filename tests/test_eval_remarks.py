"""Remarks: what makes figures mean less than they seem to is found, said everywhere, and an error
with --strict.
"""

import json

import numpy as np
from transformers import LlamaConfig, LlamaForCausalLM

from draftsmith.core.models import fingerprint, load_model
from draftsmith.core.prompts import Prompt, prompt_hash, read_prompt_hashes, write_prompt_hashes
from draftsmith.demo.widen import widen
from draftsmith.eval import remarks
from draftsmith.eval.counts import Tally, Where
from draftsmith.eval.schema import Conditions, ModelRow
from draftsmith.eval.suites import Suite

TEXT = tuple(range(100, 140))


def suite(name, kind, *prompts):
    made = tuple(Prompt(f"{name}{index}", name, tuple(ids)) for index, ids in enumerate(prompts))
    return Suite(name, kind, f"{name}.jsonl", made, (), len(made))


def model(parameters, fingerprint, kind="draft"):
    return ModelRow(
        name="x",
        kind=kind,
        fingerprint=fingerprint,
        model_type="llama",
        parameters=parameters,
        memory_bytes=1,
        vocabulary=9,
        dtype="float32",
        quantize="none",
        device="cpu",
        training=None,
    )


def test_prompts_that_two_sets_share_are_counted(golden):
    prose, code = (
        suite("prose", "id", TEXT, (1, 2, 3)),
        suite("code", "ood", (1, 2, 3), (4, 5, 6), TEXT),
    )
    (remark,) = remarks.of_prompts([prose, code])
    assert remark["about"] == "same_prompts"
    golden(remark["text"])
    assert not list(remarks.of_prompts([prose, suite("code", "ood", (4, 5, 6))]))


def test_prompts_that_nearly_repeat_those_of_another_set_are_counted_too(golden):
    prose = suite("prose", "id", TEXT)
    near, far = (*TEXT[:-1], 7), (*TEXT[:20], 7, 8, 9, 10, 11, *TEXT[25:])
    (remark,) = remarks.of_prompts([prose, suite("code", "ood", (1,) * 40, near)])
    golden(remark["text"])
    assert not list(remarks.of_prompts([prose, suite("code", "ood", far, TEXT[:20], ())]))


def test_prompts_that_a_draft_was_trained_on_are_found_by_the_hashes_in_its_checkpoint(
    tmp_path, golden
):
    write_prompt_hashes(tmp_path, [prompt_hash(ids) for ids in (TEXT, [9, 9], TEXT)])
    kept = read_prompt_hashes(tmp_path)
    assert kept is not None and kept.dtype == np.uint64 and len(kept) == 2 and kept[0] < kept[1]
    sets = [suite("prose", "id", TEXT, (1, 2)), suite("code", "ood", (3, 4))]
    (remark,) = remarks.of_training({"mine": str(tmp_path), "hub": "owner/name"}, sets)
    assert remark["about"] == "trained_on"
    golden(remark["text"])


def test_the_same_question_is_known_under_another_date(tmp_path, golden):
    yesterday = Prompt("a", "chat", (26, 7, 8), asked=5)
    today = Prompt("b", "chat", (27, 7, 8), asked=5)
    other = Prompt("c", "chat", (27, 7, 9), asked=6)
    write_prompt_hashes(tmp_path, yesterday.hashes)
    first = Suite("first", "id", "f", (yesterday,), (), 1)
    second = Suite("second", "id", "s", (today, other), (), 2)
    (remark,) = remarks.of_training({"mine": str(tmp_path)}, [second])
    golden(remark["text"])
    (remark,) = remarks.of_prompts([first, second])
    golden(remark["text"])


def test_drafts_that_were_trained_for_another_target(target_dir, draft_dir, tmp_path, golden):
    target = load_model(target_dir, device="cpu")
    for name, recorded in (("mine", fingerprint(target)), ("other", "0" * 16)):
        (tmp_path / name).mkdir()
        record = {"kind": "draft-lm", "target": "big", "target_fingerprint": recorded}
        (tmp_path / name / "draftsmith.json").write_text(json.dumps(record))
    drafts = {name: str(tmp_path / name) for name in ("mine", "other")} | {"plain": draft_dir}
    (remark,) = remarks.of_targets(drafts, target)
    assert remark["about"] == "other_target"
    golden(remark["text"])


def test_a_busy_machine_is_told_by_its_load_and_by_rounds_that_differ(golden):
    quiet = Conditions(domain="prose", temperature=1.0, load=[1.8, 2.2], spread=0.03, busy=False)
    assert remarks.of_timing([quiet], cpus=2) == [] == remarks.of_timing([], cpus=2)
    loaded, uneven = quiet | {"load": [2.0, 3.4]}, quiet | {"spread": 0.4}
    (one,) = remarks.of_timing([quiet, loaded], cpus=2)
    golden(one["text"])
    assert remarks.loaded(loaded["load"], 2) and not remarks.loaded(quiet["load"], 2)
    (other,) = remarks.of_timing([uneven], cpus=2)
    golden(other["text"])


def test_a_target_that_is_padded_is_no_large_model_and_a_missing_kernel_is_said(
    monkeypatch, golden
):
    monkeypatch.setattr(remarks, "missing_kernel", lambda device: None)
    config = LlamaConfig(
        vocab_size=9, hidden_size=8, intermediate_size=8, num_hidden_layers=1, num_attention_heads=2
    )
    small = LlamaForCausalLM(config)
    assert not list(remarks.of_target("small", small))
    wide = widen(widen(small, hidden_size=16), intermediate_size=24)
    (remark,) = remarks.of_target("large", wide)
    assert remark["about"] == "widened_target"
    golden(remark["text"])
    monkeypatch.setattr(
        remarks,
        "missing_kernel",
        lambda device: "decoding without its compiled kernel: no compiler",
    )
    (remark,) = remarks.of_target("small", small)
    assert remark["about"] == "missing_kernel"
    golden(remark["text"])


def test_outputs_that_differ_from_the_targets_own_are_named_once_by_verifier(golden):
    def compared(*gaps_of_runs):
        tally = Tally()
        for tree, verifier, gaps in gaps_of_runs:
            where = Where("mine", 1, "prose", "id", 0.0, tree, verifier)
            tally.append(where, "outputs", range(4), [1] * 4)
            tally.append(where, "identical", range(4), [gap == 0 for gap in gaps])
            tally.append(where, "gap", range(4), gaps)
        return tally.table()

    lossy = ("chain:3", "typical", [9.0] * 4)
    same = ("kary:2,2", "exact", [0.0] * 4)
    found = compared(("chain:3", "exact", [0.0, 1.5, 0.2, 0.1]), same, lossy)
    (remark,) = remarks.of_outputs(found, "float32")
    golden(remark["text"])
    found = compared(("chain:3", "exact", [0.0, 0.0, 0.0, 0.9]), same, lossy)
    assert not list(remarks.of_outputs(found, "bfloat16"))
