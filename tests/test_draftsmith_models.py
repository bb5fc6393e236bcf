"""Models: what is loaded, what is refused, and how two are told apart."""

from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from draftsmith.errors import InputError
from draftsmith.models import (
    check_same_vocabulary,
    context_length,
    eos_ids,
    fingerprint,
    load_model,
    resolve_device,
    vocabulary_size,
)
from draftsmith.text import load_tokenizer

Door = Callable[..., tuple[int, str, str]]


def test_a_model_is_loaded_whole_and_ready(target_dir: str) -> None:
    model = load_model(target_dir, device="cpu")
    assert not model.training
    assert model.dtype == torch.float32
    assert (vocabulary_size(model), context_length(model)) == (290, 96)
    assert eos_ids(model)[0] == 1
    assert len(eos_ids(model)) == 17
    assert load_model(target_dir, device="cpu", dtype="bfloat16").dtype == torch.bfloat16


def test_a_fingerprint_follows_weights_and_not_their_precision(target_dir: str, draft_dir: str) -> None:
    model = load_model(target_dir, device="cpu")
    before = fingerprint(model)
    assert len(before) == 16
    assert fingerprint(load_model(target_dir, device="cpu")) == before
    assert fingerprint(load_model(draft_dir, device="cpu")) != before
    with torch.no_grad():
        model.get_output_embeddings().weight[-1, -1] += 1e-3
    assert fingerprint(model) != before


@pytest.fixture
def pickled(tmp_path: Path, target_dir: str) -> str:
    """The target with its weights as a pickle."""
    there = Path(target_dir)
    for file in there.iterdir():
        if file.suffix == ".json":
            (tmp_path / file.name).write_bytes(file.read_bytes())
    torch.save(load_file(there / "model.safetensors"), tmp_path / "pytorch_model.bin")
    return str(tmp_path)


def test_a_pickle_is_refused(pickled: str, door: Door) -> None:
    with pytest.raises(InputError, match="no causal language model could be loaded"):
        load_model(pickled, device="cpu")
    code, out, err = door("decode", "--target", pickled, "--prompt", "a")
    assert (code, out) == (2, "")
    assert len(err.strip().splitlines()) == 1
    assert "safetensors" in err


def test_code_in_a_checkpoint_does_not_run(tmp_path: Path, target_dir: str, door: Door) -> None:
    for file in Path(target_dir).iterdir():
        (tmp_path / file.name).write_bytes(file.read_bytes())
    ran = tmp_path / "ran"
    (tmp_path / "evil.py").write_text(f"open({str(ran)!r}, 'w')\n")
    (tmp_path / "config.json").write_text(
        '{"model_type": "evil", "auto_map": {"AutoConfig": "evil.C", "AutoModelForCausalLM": "evil.M"}}'
    )
    code, _, err = door("decode", "--target", str(tmp_path), "--prompt", "a")
    assert code == 2
    assert len(err.strip().splitlines()) == 1
    assert not ran.exists()


@pytest.mark.parametrize("damage", ["truncate", "no_weights", "config"])
def test_a_damaged_checkpoint_is_one_line(tmp_path: Path, target_dir: str, damage: str) -> None:
    for file in Path(target_dir).iterdir():
        (tmp_path / file.name).write_bytes(file.read_bytes())
    weights = tmp_path / "model.safetensors"
    if damage == "truncate":
        weights.write_bytes(weights.read_bytes()[:1000])
    elif damage == "no_weights":
        weights.unlink()
    else:
        (tmp_path / "config.json").write_text("{")
    with pytest.raises(InputError) as caught:
        load_model(str(tmp_path), device="cpu")
    assert str(tmp_path) in str(caught.value)
    assert "\n" not in str(caught.value)


def test_vocabularies_must_be_equal(target_dir: str, draft_dir: str, other_vocabulary_dir: str) -> None:
    target, draft, other = (load_model(each, device="cpu") for each in (target_dir, draft_dir, other_vocabulary_dir))
    check_same_vocabulary(target, [("draft", draft)])
    with pytest.raises(InputError, match="^other: its vocabulary has 300 tokens and the target's has 290"):
        check_same_vocabulary(target, [("draft", draft), ("other", other)])


def test_devices() -> None:
    assert resolve_device("cpu").type == "cpu"
    assert resolve_device("auto").type in ("cpu", "cuda")
    for name in ("abacus", "cuda:77", "meta", "mps"):
        with pytest.raises(InputError, match=f"^--device {name}: "):
            resolve_device(name)


def test_a_directory_without_a_tokenizer(tmp_path: Path) -> None:
    with pytest.raises(InputError, match="no tokenizer could be loaded"):
        load_tokenizer(str(tmp_path))
    with pytest.raises(InputError, match="no such directory"):
        load_tokenizer(str(tmp_path / "none"))


def test_a_fingerprint_follows_the_architecture(target_dir: str) -> None:
    model = load_model(target_dir, device="cpu")
    before = fingerprint(model)
    model.config.rms_norm_eps = 0.5
    assert fingerprint(model) != before
