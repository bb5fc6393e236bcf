"""A target that is known by its hidden states alone: trained on from files, refused where they do
not fit.

Legend: T tokens, H hidden size.
"""

import json
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from draftsmith.core.hidden_states import body_states, final_norm, layout_of
from draftsmith.core.models import load_model
from draftsmith.core.state_store import (
    StateFiles,
    StoredStates,
    cached_layers,
    checkpoint_digest,
)
from tests.test_drafts_heads import make_target
from tests.test_train_heads import ROWS, batch_of, every_kind, fresh, trainee_of
from tests.test_train_kinds import OPTIONS as KINDS
from tests.train_laws import FAMILIES, tiny_family

DIGEST = "d" * 16


@pytest.mark.parametrize("family", FAMILIES)
def test_a_family_without_its_layers_ends_as_the_whole(family, tmp_path, golden):
    """Its embedding, norm and projection are the whole model's, and its config says so."""
    whole = tiny_family(family)
    whole.save_pretrained(tmp_path)
    ends = load_model(str(tmp_path), device="cpu", layers=False)
    assert len(list(ends.parameters())) < len(list(whole.parameters()))
    assert ends.config.num_hidden_layers == whole.config.num_hidden_layers == 2
    assert layout_of(ends).count == 3
    ids_BT = torch.arange(12).view(2, 6)
    with torch.no_grad():
        raw_BTH, final_BTH = body_states(whole, (2, -1), input_ids=ids_BT)
        assert torch.equal(final_norm(ends)(raw_BTH), final_BTH)
    with golden.raises(AssertionError):
        body_states(ends, (1,), input_ids=ids_BT)


@pytest.fixture(scope="module")
def pair(tmp_path_factory):
    """A target, and the same without its layers."""
    place = tmp_path_factory.mktemp("target")
    target = make_target()
    target.save_pretrained(place)
    return target, load_model(str(place), device="cpu", layers=False)


def write(directory, target, layers, last=0, **changes):
    """States of `ROWS` as an engine gives them: without `last` tokens."""
    options: dict[str, Any] = {"fingerprint": DIGEST, "dtype": torch.float32} | changes
    files = StateFiles(directory, **options)
    for prompt, response in ROWS:
        ids = [*prompt, *response]
        with torch.no_grad():
            states = body_states(target, layers, input_ids=torch.tensor([ids]))
        files.put(ids, layers, torch.cat(states)[:, : len(ids) - last])


def rows():
    return [[*prompt, *response] for prompt, response in ROWS]


def stored(directory, ends, layers, length=99):
    found = StoredStates(directory, ends, DIGEST)
    found.require(rows(), layers, length, "data")
    return found


@every_kind
def test_losses_are_those_beside_the_target(kind, pair, tmp_path):
    """Of files with the final state, and of an engine's: the raw last, and no last token."""
    target, ends = pair
    layers = cached_layers(fresh(kind, target).hidden_layers)
    wanted = trainee_of(kind, target)(batch_of(ROWS))
    write(tmp_path / "local", target, layers)
    write(tmp_path / "engine", target, sorted({*layers, 4} - {-1}), last=1)
    for road in ("local", "engine"):
        cache = stored(tmp_path / road, ends, layers)
        found = trainee_of(kind, ends, states=cache)(batch_of(ROWS))
        torch.testing.assert_close(found.loss, wanted.loss, atol=1e-5, rtol=1e-5)
        torch.testing.assert_close(found.depth_alpha_D, wanted.depth_alpha_D, atol=1e-5, rtol=1e-5)


def test_a_local_run_goes_on_with_files_of_an_engine(pair, tmp_path):
    """It adds the final states, which an engine does not give."""
    target, _ = pair
    layers = cached_layers(fresh("eagle3", target).hidden_layers)
    wanted = trainee_of("eagle3", target)(batch_of(ROWS))
    write(tmp_path, target, sorted({*layers, 4} - {-1}), last=1)
    for _ in range(2):
        files = StateFiles(tmp_path, DIGEST, torch.float32)
        found = trainee_of("eagle3", target, states=files)(batch_of(ROWS))
        torch.testing.assert_close(found.loss, wanted.loss, atol=1e-5, rtol=1e-5)


def test_eight_bits_round_each_token_by_its_largest_value(pair, tmp_path):
    """Files of 8 bits are found by themselves, and those of the target's dtype come first."""
    target, ends = pair
    write(tmp_path, target, (2, 4), last=1, eight_bits=True)
    rounded = [stored(tmp_path, ends, (2, 4)).get(ids, (2, 4)) for ids in rows()]
    files = [file.stat().st_size for file in tmp_path.rglob("*.safetensors")]
    write(tmp_path, target, (2, 4), last=1)
    for found, ids in zip(rounded, rows(), strict=True):
        exact = stored(tmp_path, ends, (2, 4)).get(ids, (2, 4))
        largest = exact.abs().amax(-1, keepdim=True)
        assert found.dtype == exact.dtype and not torch.equal(found, exact)
        assert ((found - exact).abs() <= largest / 253).all()
    assert 2 * sum(files) < sum(file.stat().st_size for file in tmp_path.rglob("*.safetensors"))


def test_a_row_that_is_cut_has_the_states_of_the_whole(pair, tmp_path):
    target, ends = pair
    write(tmp_path, target, (2, 4), last=1)
    cut = stored(tmp_path, ends, (2, -1), length=5)
    whole = stored(tmp_path, ends, (2, -1))
    for ids in rows():
        assert torch.equal(cut.get(ids[:5], (2, -1)), whole.get(ids, (2, -1))[:, :5])


def test_what_is_missing_is_one_line(pair, tmp_path, golden):
    target, ends = pair
    write(tmp_path, target, (1, 2, 4))
    with golden.raises():
        stored(tmp_path, ends, (2, 3, -1))
    found = StoredStates(tmp_path, ends, DIGEST)
    with golden.raises():
        found.require([*rows(), [1, 2, 3], [4, 4]], (2, -1), 99, "heldout")
    write(tmp_path / "half", target, (2, 4), dtype=torch.bfloat16)
    for place, digest in (
        (tmp_path, "e" * 16),
        (tmp_path / "none", DIGEST),
        (tmp_path / "half", DIGEST),
    ):
        with golden.raises():
            StoredStates(tmp_path / place, ends, digest).require(rows(), (2, -1), 99, "data")
    shard = found.file(rows()[0])
    content = bytearray(shard.read_bytes())
    content[-9] ^= 1
    shard.write_bytes(content)
    with golden.raises():
        stored(tmp_path, ends, (2, -1)).get(rows()[0], (2, -1))
    assert shard.exists()


def test_a_digest_follows_every_weight_and_no_file(tmp_path, golden):
    model = tiny_family("llama")
    model.save_pretrained(tmp_path / "one")
    model.save_pretrained(tmp_path / "many", max_shard_size="4KB")
    assert len(list((tmp_path / "many").glob("*.safetensors"))) > 2
    one = checkpoint_digest(str(tmp_path / "one"))
    assert checkpoint_digest(str(tmp_path / "many")) == one
    tensors = load_file(tmp_path / "one" / "model.safetensors")
    for name in tensors:
        (tmp_path / name).mkdir()
        (tmp_path / name / "config.json").write_bytes((tmp_path / "one/config.json").read_bytes())
        changed = tensors | {name: tensors[name] + 1e-3}
        save_file(changed, tmp_path / name / "model.safetensors")
        assert checkpoint_digest(str(tmp_path / name)) != one
    # Files that transformers does not read, such as a copy under the names of another library.
    save_file(tensors, tmp_path / "one" / "consolidated.safetensors")
    assert checkpoint_digest(str(tmp_path / "one")) == one
    bins = []
    for value in (1.0, 2.0):
        place = tmp_path / f"bin {value}"
        place.mkdir()
        (place / "config.json").write_bytes((tmp_path / "one/config.json").read_bytes())
        with golden.raises():
            checkpoint_digest(str(place))
        torch.save({"weight": torch.tensor(value)}, place / "pytorch_model-1.bin")
        bins.append(checkpoint_digest(str(place)))
    assert len({one, *bins}) == 3
    config = json.loads((tmp_path / "one/config.json").read_text())
    config["rms_norm_eps"] = 0.5
    (tmp_path / "one/config.json").write_text(json.dumps(config))
    assert checkpoint_digest(str(tmp_path / "one")) != one


def road(kind, target, draft, data):
    words = (
        f"train --kind {kind} --target {target} --data {data} --max_length 40 --steps 5 "
        "--batch_size 8 --eval_every 5 --heldout_fraction 0.2 --device cpu"
    ).split()
    return [*words, *KINDS[kind].split(), *(["--draft", draft] if kind == "lm" else [])]


def test_states_of_another_target_are_refused_by_the_command(
    target_dir, draft_dir, distilled, door, tmp_path, golden
):
    words = road("eagle", target_dir, draft_dir, distilled)
    states = f"--states {tmp_path}/states --out {tmp_path}/far".split()
    door.refused(*words, *states)
    assert not (tmp_path / "far").exists()
    door.refused(*words, *states, "--head.features", tmp_path / "other")
    at = words.index("--target")
    door.refused(*words[:at], *words[at + 2 :], *states)
