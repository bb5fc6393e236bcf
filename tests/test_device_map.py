"""A target whose layers are spread over devices, memory and disk gives what a whole one gives."""

import json
from dataclasses import replace

import pyarrow.parquet as pq
import pytest
import torch

from draftsmith.alignment.config import AlignConfig
from draftsmith.core import large_target
from draftsmith.core.large_target import is_spread
from draftsmith.core.model_configs import read_config, without_values
from draftsmith.core.models import fingerprint, load_model
from draftsmith.core.teacher_rows import COLUMN
from draftsmith.decode import PromptLookupProposer, SpeculativeDecoder
from draftsmith.decoding import take_over
from draftsmith.train.config import TrainConfig
from tests.small_targets import made
from tests.test_target_parallel import EAGLE3, FAMILIES, Road, counted, families, outcome
from tests.train_laws import close, metrics

__all__ = ["families"]
GIB = 2**30
KINDS = [*FAMILIES, "gpt2"]


# Room for the tables alone, which stay on the device of the run.
ON_DISK = "auto:0.00000001"


@pytest.mark.parametrize("kind", KINDS)
def test_layers_on_disk_are_the_same_model(kind, tmp_path, capsys, golden):
    made(kind, tmp_path, **FAMILIES.get(kind, {}))
    whole = load_model(str(tmp_path), device="cpu")
    parts = load_model(str(tmp_path), device="cpu", target_device_map=ON_DISK)
    golden(capsys.readouterr().err)
    assert is_spread(parts) and not is_spread(whole)
    assert fingerprint(parts) == fingerprint(whole)
    take_over(parts)
    prompts = [list(range(5, 15)), list(range(40, 43))]
    answers = [
        SpeculativeDecoder(model, PromptLookupProposer(), "chain:3").generate(
            prompts, max_new_tokens=6
        )
        for model in (whole, parts)
    ]
    one, two = ([row.output_ids for row in answer.generations] for answer in answers)
    assert one == two
    with golden.raises():
        SpeculativeDecoder(parts, compile="eager")


# Where accelerate finds that much free; the target has 4 layers of 12 KiB and two tables of 36.
PLACED = [
    ("auto", {0: 1, 1: 1, "cpu": 1}, {0, 1}),
    ("auto:0.00015", {0: 1, "cpu": 1}, {0, "cpu"}),
    ("auto:0.0001", {"cpu": 1}, {"cpu", "disk"}),
    ("auto", {"cpu": 1}, {"cpu"}),
]


@pytest.mark.parametrize(("way", "free", "places"), PLACED)
def test_tables_stay_on_the_device_of_the_run(way, free, places, tmp_path, monkeypatch):
    made("llama", tmp_path, num_hidden_layers=4)
    model = without_values(read_config(str(tmp_path)))
    found = {key: GIB * size for key, size in free.items()}
    monkeypatch.setattr(large_target, "get_max_memory", lambda: found)
    device = torch.device("cuda:0" if 0 in free else "cpu")
    placed = large_target.device_map(way, model, device)
    main = large_target.place_of(device)
    assert placed["model.embed_tokens"] == placed["lm_head"] == main
    sizes = large_target.bytes_by_place(placed, model)
    assert set(sizes) == places
    assert sum(sizes.values()) == sum(each.nbytes for each in model.parameters())


def test_where_it_is_not_for(target_dir, tmp_path, monkeypatch, golden):
    config = TrainConfig(out="o", data=["d"], target=target_dir, kind="eagle")
    with golden.raises():
        replace(config, target_device_map="cuda:0")
    with golden.raises():
        replace(config, target_device_map="auto", states="s")
    with golden.raises():
        AlignConfig(target=target_dir, prompts="p", out="o", init="prune", target_device_map="auto")
    monkeypatch.setenv("WORLD_SIZE", "2")
    with golden.raises():
        load_model(target_dir, device="cpu", target_device_map="auto")


@pytest.mark.slow(60)
def test_distilling_training_and_evaluating_are_the_same(families, draft_dir, door):
    """Losses and weights to the bit. Decoding multiplies without the kernel, which rounds
    otherwise.
    """
    one = Road(families, draft_dir, "llama", "one")
    two = Road(families, draft_dir, "llama", "two")
    spread = ["--target_device_map", ON_DISK]
    door.ok(*one.distill())
    door.ok(*two.distill(), *spread)
    files = [families / f"llama-{how}" / "part-00000.parquet" for how in ("one", "two")]
    here, there = (pq.read_table(file).drop_columns([COLUMN]) for file in files)
    assert here == there
    door.ok(*one.train(f"{EAGLE3} {families}/features-one"))
    door.ok(*two.train(f"{EAGLE3} {families}/features-two"), *spread)
    draft, again = (families / f"llama-{how}-draft" for how in ("one", "two"))
    close(draft, again, atol=0)
    assert metrics(draft) == metrics(again)
    door.ok(*one.evaluate())
    door.ok(*two.evaluate(), *spread)
    alone, parts = (counted(families / f"llama-{how}-eval") for how in ("one", "two"))
    assert len(alone) == 8 and alone.keys() == parts.keys()
    for name, cell in alone.items():
        given = json.loads((families / "llama-two-eval" / "cells" / name).read_text())
        assert outcome(given) == cell
