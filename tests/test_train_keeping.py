"""Several domains in one run; states of the target that are kept while training."""

import pytest
import torch
from transformers import LlamaModel

from draftsmith.train import draft_setup
from draftsmith.train.data import load_examples
from draftsmith.train.stream import units


@pytest.fixture(scope="module")
def domains(answers):
    """Distilled sets of 24 and of 12 answers."""
    return [
        answers("A draft model proposes tokens and the target", 3, 2, 16),
        answers("Numbers such as 12, 345", 1, 1, 9),
    ]


def test_a_small_domain_is_drawn_more_often_and_each_of_its_rows_as_often(domains):
    examples = load_examples(domains, None, 40)
    assert examples.domains is not None and examples.domains.tolist() == [0] * 24 + [1] * 12
    stream = units(examples, 0, 480, seed=3, temperature=1e9)
    counts = torch.bincount(torch.from_numpy(stream), minlength=36).tolist()
    assert counts[:24] == [10] * 24 and counts[24:] == [20] * 12
    for start, stop in ((0, 7), (7, 8), (100, 333)):
        assert (
            units(examples, start, stop, 3, temperature=1e9).tolist() == stream[start:stop].tolist()
        )


@pytest.mark.parametrize(
    "more",
    [
        pytest.param(["--packing", "true"], marks=pytest.mark.slow, id="packed"),
        pytest.param([], id="plain"),
    ],
)
def test_held_states_save_forwards_and_change_no_bit(
    more, answers, draft_dir, target_dir, tmp_path, door, monkeypatch
):
    """All held, some, none, and the target's on disk; some three epochs, five evaluations."""
    data = answers("Numbers such as 12, 345 and 6789", 2, 3, 20)
    words = (
        f"train --data {data} --draft {draft_dir} --target {target_dir} --objective fkl "
        "--max_length 48 "
        "--steps 16 --batch_size 8 --eval_every 4 --save_every 3 --heldout_fraction 0.2 "
        "--optim.lr 0.01 --device cpu"
    ).split()
    forwards = []
    real = LlamaModel.forward

    def counted(self, input_ids=None, **options):
        if not self.training and input_ids is not None:
            forwards.append(tuple(input_ids.shape))
        return real(self, input_ids=input_ids, **options)

    monkeypatch.setattr(LlamaModel, "forward", counted)
    files, counts = {}, {}
    for name, limit in (("all", 2**31), ("some", 10_000), ("none", 0), ("disk", 0)):
        forwards.clear()
        monkeypatch.setattr(draft_setup, "_MEMORY_BYTES", limit)
        cache = ["--head.features", str(tmp_path / "features")] if name == "disk" else []
        door.ok(*words, *more, *cache, "--out", tmp_path / name)
        made = [
            (tmp_path / name / file).read_bytes()
            for file in ("model.safetensors", "run/metrics.jsonl")
        ]
        files[name], counts[name] = made, len(forwards)
    assert files["some"] == files["all"] == files["none"] == files["disk"]
    assert counts["all"] < counts["some"] < counts["none"]
    assert counts["disk"] < counts["none"]
