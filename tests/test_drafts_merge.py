"""Weights of drafts add up as the options say, and what does not fit together is refused."""

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM, PreTrainedModel

import draftsmith as ds
from draftsmith.__main__ import main
from draftsmith.core.errors import InputError
from draftsmith.core.prompts import read_prompt_hashes, write_prompt_hashes
from draftsmith.drafts.heads import save_head
from draftsmith.drafts.heads.block import DFlashHead
from draftsmith.drafts.heads.eagle3 import Eagle3Head
from draftsmith.drafts.heads.medusa import HeadsConfig, MedusaHeads
from draftsmith.drafts.load import load_models
from draftsmith.drafts.merge import merge_states


@pytest.fixture
def moved_dir(draft_dir, tmp_path):
    """The draft after a step in a random direction, as training would leave it."""
    model = AutoModelForCausalLM.from_pretrained(draft_dir, dtype=torch.float32)
    torch.manual_seed(1)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(torch.randn_like(parameter), alpha=0.02)
    model.save_pretrained(tmp_path / "moved")
    return str(tmp_path / "moved")


def weights_of(path: str | Path) -> dict[str, torch.Tensor]:
    return dict(AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32).named_parameters())


def test_interpolation_is_the_weighted_sum_and_its_ends_are_the_drafts(
    draft_dir, moved_dir, tmp_path
):
    base, moved = weights_of(draft_dir), weights_of(moved_dir)
    for weight in (0.0, 0.25, 1.0, 1.5):
        out = tmp_path / str(weight)
        summary = ds.merge(
            ds.MergeConfig(out=str(out), base=draft_dir, draft=[f"{moved_dir}={weight}"])
        )
        assert summary["weights"] == {moved_dir: weight}
        for name, tensor in weights_of(out).items():
            wanted = torch.lerp(base[name].detach().double(), moved[name].detach().double(), weight)
            torch.testing.assert_close(tensor.detach().double(), wanted, rtol=0, atol=1e-6)
    assert torch.equal(weights_of(tmp_path / "0.0")["model.norm.weight"], base["model.norm.weight"])


def test_a_soup_is_the_mean_and_task_vectors_add_up(draft_dir, moved_dir, tmp_path):
    a, b = weights_of(draft_dir), weights_of(moved_dir)
    ds.merge(ds.MergeConfig(out=str(tmp_path / "soup"), draft=[draft_dir, moved_dir]))
    for name, tensor in weights_of(tmp_path / "soup").items():
        torch.testing.assert_close(tensor, (a[name] + b[name]) / 2, rtol=0, atol=1e-6)
    one = {"w": torch.tensor([1.0, 2.0]), "map": torch.tensor([3])}
    two = {"w": torch.tensor([3.0, 0.0]), "map": torch.tensor([3])}
    base = {"w": torch.tensor([1.0, 1.0]), "map": torch.tensor([3])}
    # base + 0.5 (one - base) + 2 (two - base), by hand.
    assert merge_states([(one, 0.5), (two, 2.0)], base)["w"].tolist() == [5.0, -0.5]
    assert merge_states([(one, 0.5), (two, 2.0)], base)["map"].tolist() == [3]
    with pytest.raises(InputError, match="differ in 'map', which cannot be averaged"):
        merge_states([(one, 0.5), (two | {"map": torch.tensor([4])}, 0.5)])
    with pytest.raises(InputError, match="differ in the shape of the tensor 'map'"):
        merge_states([(one, 0.5), ({"w": two["w"]}, 0.5)])


def test_the_merged_draft_decodes_and_says_what_it_is(
    target_dir, draft_dir, moved_dir, tmp_path, capsys
):
    write_prompt_hashes(Path(moved_dir), [5, 7])
    out = tmp_path / "merged"
    assert (
        main(
            [
                "merge",
                "--base",
                draft_dir,
                "--draft",
                f"{moved_dir}=0.5",
                "--out",
                str(out),
                "--json",
            ]
        )
        == 0
    )
    printed = capsys.readouterr().out.splitlines()
    assert printed[0] == f"{out}: 0.5 x {moved_dir} + 0.5 x {draft_dir}"
    record = json.loads((out / "draftsmith.json").read_text())
    assert record["merged_from"] == [{"draft": moved_dir, "weight": 0.5}]
    assert record["fingerprint"] == json.loads(printed[-1])["fingerprint"]
    card = (out / "README.md").read_text()
    assert f"| weight of {moved_dir} | 0.5 |" in card and "By `draftsmith merge`" in card
    hashes = read_prompt_hashes(out)
    assert hashes is not None and hashes.tolist() == np.array([5, 7], dtype=np.uint64).tolist()
    pair = ds.load_pair(target_dir, draft=str(out), device="cpu")
    assert len(pair.generate("Return the", max_new_tokens=8).output_ids) == 8
    # Killed after its last rename: the same again says what is there, and another merge does not
    # write over it.
    written = (out / "model.safetensors").stat().st_mtime_ns
    assert (
        main(
            [
                "merge",
                "--base",
                draft_dir,
                "--draft",
                f"{moved_dir}=0.5",
                "--out",
                str(out),
                "--json",
            ]
        )
        == 0
    )
    assert capsys.readouterr().out.splitlines() == printed
    assert (out / "model.safetensors").stat().st_mtime_ns == written
    assert (
        main(["merge", "--base", draft_dir, "--draft", f"{moved_dir}=0.4", "--out", str(out)]) == 2
    )
    assert "exists; choose another" in capsys.readouterr().err


def eagle3(target: PreTrainedModel, path: Path, **changes: Any) -> str:
    head = Eagle3Head.fresh(target)
    save_head(Eagle3Head(replace(head.config, **changes), target), path)
    return str(path)


OTHERS: dict[str, dict[str, Any]] = {
    "eagle_aux_hidden_state_layer_ids": {"eagle_aux_hidden_state_layer_ids": (2, 1, 0)},
    "rope_parameters": {"rope_parameters": {"rope_type": "default", "rope_theta": 7.0}},
    "norm_before_residual": {"norm_before_residual": True},
}


@pytest.mark.parametrize("key", OTHERS)
def test_heads_of_one_shape_that_compute_differently_are_refused(key, target_dir, tmp_path):
    target = load_models(target_dir, device="cpu").target
    heads = [eagle3(target, tmp_path / "a"), eagle3(target, tmp_path / "b", **OTHERS[key])]
    with pytest.raises(InputError, match=f"b: '{key}' is .* only drafts that compute alike"):
        ds.merge(out=str(tmp_path / "out"), draft=heads)
    assert not (tmp_path / "out").exists()


def test_heads_of_other_targets_masks_and_windows_are_refused(target_dir, tmp_path):
    target = load_models(target_dir, device="cpu").target
    heads = [str(tmp_path / name) for name in ("a", "b")]
    for path, window in zip(heads, (3, 4), strict=True):
        head = DFlashHead.fresh(target)
        save_head(DFlashHead(replace(head.config, window=window), target), path)
    with pytest.raises(InputError, match="'dflash_config' is .*'swa_window_size': 4"):
        ds.merge(out=str(tmp_path / "out"), draft=heads)
    for path in heads:
        record = {"kind": "dflash", "target": path, "target_fingerprint": path}
        (Path(path) / "draftsmith.json").write_text(json.dumps(record))
    with pytest.raises(InputError, match="the heads were trained for different targets"):
        ds.merge(out=str(tmp_path / "out"), draft=heads)


def test_language_models_of_another_rope_are_refused(draft_dir, tmp_path):
    other = AutoModelForCausalLM.from_pretrained(draft_dir)
    other.config.rope_parameters = {"rope_type": "default", "rope_theta": 7.0}
    other.save_pretrained(tmp_path / "other")
    with pytest.raises(InputError, match="'rope_parameters' is .* compute alike"):
        ds.merge(out=str(tmp_path / "out"), draft=[draft_dir, str(tmp_path / "other")])


def test_heads_are_merged_with_their_config(target_dir, tmp_path):
    target = load_models(target_dir, device="cpu").target
    for seed in (0, 1):
        torch.manual_seed(seed)
        head = MedusaHeads(HeadsConfig.from_json({"medusa_num_heads": 2}, target), target)
        with torch.no_grad():
            for parameter in head.parameters():
                parameter.normal_()
        save_head(head, tmp_path / str(seed))
    ds.merge(
        ds.MergeConfig(
            out=str(tmp_path / "soup"), draft=[str(tmp_path / "0=0.25"), str(tmp_path / "1=0.75")]
        )
    )
    a, b, merged = (load_file(tmp_path / name / "model.safetensors") for name in ("0", "1", "soup"))
    assert list(load_models(target_dir, [str(tmp_path / "soup")], device="cpu").drafts)
    for name, tensor in merged.items():
        torch.testing.assert_close(tensor, 0.25 * a[name] + 0.75 * b[name])
