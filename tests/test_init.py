"""`draftsmith init`: one command gives a directory that decodes, with what it is worth; wrong words
are refused.
"""

import json

import pytest
import torch
from transformers import AutoTokenizer

from draftsmith.core.models import load_model, parameter_count
from draftsmith.drafts.draft_vocabulary import read_draft_vocabulary


def made(door, target, out, words):
    road = f"init --target {target} --out {out} --device cpu {words}"
    return door.summary(*road.split())


def decoded(door, target, *draft):
    words = f"decode --target {target} --max_new_tokens 12 --temperature 0 --device cpu --prompt"
    said, _ = door.ok(*words.split(), "The quick", *draft)
    return said.splitlines()[0]


def test_a_pruned_draft_of_all_layers_is_the_target(
    door, target_dir, prompts_file, tmp_path, golden
):
    words = f"--method prune --num_layers 2 --prompts {prompts_file} --max_new_tokens 12"
    found = made(door, target_dir, tmp_path / "d", words)
    assert found["alpha"] == pytest.approx(1.0, abs=1e-5) and found["positions"] > 20
    assert 0 < found["alpha_match"] < found["alpha_greedy_draft"] < 1
    assert found["draft_cost"] == found["target_cost"]
    record = json.loads((tmp_path / "d" / "draftsmith.json").read_text())
    assert record["kind"] == "draft-lm" and record["target"] == target_dir
    golden(record["command"])


@pytest.mark.parametrize("method", ["prune", "transplant"])
def test_what_is_made_decodes_losslessly(
    method, door, target_dir, donor_dir, prompts_file, tmp_path, golden
):
    words = {
        "prune": "--method prune --num_layers 1 --intermediate_size 12",
        "transplant": f"--method transplant --donor {donor_dir} --num_layers 1",
    }
    out = tmp_path / "draft"
    asked = f"--prompts {prompts_file} --max_new_tokens 8"
    found = made(door, target_dir, out, f"{words[method]} {asked}")
    assert 0 < found["alpha"] < 1 and 0 <= found["alpha_match"] <= found["alpha"] + 1e-6
    draft = load_model(str(out), device="cpu")
    assert parameter_count(draft) == found["parameters"] and draft.config.vocab_size == 290
    same = AutoTokenizer.from_pretrained(out)
    assert same.get_vocab() == AutoTokenizer.from_pretrained(target_dir).get_vocab()
    assert decoded(door, target_dir) == decoded(door, target_dir, "--draft", out)
    if method == "transplant":
        golden(" ".join(found["notes"]))


def test_a_draft_of_the_commonest_tokens_is_whole_on_disk_and_decodes_losslessly(
    door, target_dir, prompts_file, distilled, tmp_path, golden
):
    words = f"--method prune --num_layers 1 --prompts {prompts_file} --max_new_tokens 8"
    whole = made(door, target_dir, tmp_path / "whole", words)
    less = f"{words} --draft_vocab_size 40 --data {distilled}"
    part = made(door, target_dir, tmp_path / "part", less)
    assert (
        whole["missing_mass"] == 0 < part["missing_mass"] < 1
        and part["alpha"] <= 1 - part["missing_mass"] + 1e-6
    )
    assert part["draft_cost"] == whole["draft_cost"] - 250 * 16
    said = " ".join(part["notes"])
    golden(said)
    ids = read_draft_vocabulary(str(tmp_path / "part"), 290)
    assert ids is not None and len(ids) == 40
    weights = [
        load_model(str(tmp_path / name), device="cpu").state_dict() for name in ("whole", "part")
    ]
    assert all(torch.equal(weights[0][key], weights[1][key]) for key in weights[0])
    assert decoded(door, target_dir) == decoded(door, target_dir, "--draft", tmp_path / "part")
