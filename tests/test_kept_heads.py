"""Heads that the repository keeps: whole, small, and drafts of the model that they name."""

import re

import pytest

import draftsmith as ds
from benchmarks.lib.places import ROOT
from draftsmith.core.io import read_json, sha256_file

SMOLLM2_HEAD = ROOT / "heads" / "smollm2-135m-eagle3"
HEADS = sorted(path.parent for path in (ROOT / "heads").glob("*/config.json"))


@pytest.mark.parametrize("place", HEADS, ids=lambda place: place.name)
def test_a_kept_head_is_whole_and_small(place):
    record = read_json(place / "draftsmith.json", "the record of a draft")
    for name, digest in record["files"].items():
        assert sha256_file(place / name) == digest
    assert "model.safetensors" in record["files"]
    assert (place / "model.safetensors").stat().st_size <= 12_000_000
    text = (place / "draftsmith.json").read_text()
    assert not re.search(r"[\s\"]/", text), "a path of the machine that made it"


in_a_clone = pytest.mark.skipif(not HEADS, reason="the sdist has no heads/")


@in_a_clone
@pytest.mark.slow
def test_the_kept_head_drafts_for_smollm2(smollm2):
    pair = ds.load_pair(smollm2, draft=str(SMOLLM2_HEAD))
    prompts = ["Why is the sky blue?", "Write a short poem about rain.", "What is 12 times 9?"]
    drafted = pair.generate(prompts, tree="chain:3", temperature=0.0, max_new_tokens=48)
    alone = ds.load_pair(smollm2).generate(prompts, temperature=0.0, max_new_tokens=48)
    assert [out.text for out in drafted] == [out.text for out in alone]
    assert sum(out.stats.target_calls for out in drafted) < 120
