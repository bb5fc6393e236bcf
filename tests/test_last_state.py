"""A tap is the raw output of a layer, the last one included, wherever states are read.

Legend: B rows, T tokens, H hidden size.
"""

from typing import Any

import pytest
import torch

import draftsmith as ds
from draftsmith.core.hidden_states import body, body_states, forward_with_states
from draftsmith.core.models import fingerprint
from draftsmith.core.state_store import StateFiles
from draftsmith.drafts.heads import HEADS, load_head, save_head
from draftsmith.drafts.heads.block import DFlashHead
from draftsmith.drafts.heads.eagle3 import Eagle3Head
from draftsmith.train.batch import Batch
from draftsmith.train.frozen_target import FrozenTarget
from tests.hybrid_models import hybrid
from tests.tiny_models import stirred
from tests.train_laws import SIZES, tiny_family

LAST = SIZES["num_hidden_layers"]
KINDS: dict[str, dict[str, Any]] = {
    "eagle3": {},
    "dflash": {"num_layers": 1, "target_layers": (0, 1)},
    "dspark": {"num_layers": 1, "target_layers": (1,)},
}
# Where the layers of a family are.
FAMILIES = {
    "llama": "model.layers",
    "qwen3": "model.layers",
    "gemma2": "model.layers",
    "gpt2": "transformer.h",
    "gpt_neox": "gpt_neox.layers",
}
STATEFUL = {"lfm2": "model.layers", "qwen3_next": "model.layers", "mamba2": "backbone.layers"}


def ids_of(rows=2, tokens=9, vocabulary=SIZES["vocab_size"]):
    random = torch.Generator().manual_seed(3)
    return torch.randint(3, vocabulary, (rows, tokens), generator=random)


@torch.no_grad()
def hooked(target, path, ids_BT):
    """The output of the last decoder layer, by a hook written here, and the final state."""
    seen: list[Any] = []
    layer = target.get_submodule(path)[-1]
    handle = layer.register_forward_hook(lambda _, __, output: seen.append(output))
    final_BTH = target.base_model(ids_BT).last_hidden_state
    handle.remove()
    return (seen[0][0] if isinstance(seen[0], tuple) else seen[0]), final_BTH


def head_of(kind, target):
    fresh: Any = HEADS[kind].fresh
    return stirred(fresh(target, **KINDS[kind]).eval())


def made(kind):
    return hybrid(kind) if kind in STATEFUL else tiny_family(kind)


@pytest.mark.parametrize("kind", [*FAMILIES, *STATEFUL])
def test_the_last_tap_is_what_the_last_layer_returns(kind):
    """transformers' own last entry is the final state, which is far from it."""
    target = made(kind)
    ids_BT = ids_of(vocabulary=target.config.vocab_size)
    raw_BTH, final_BTH = hooked(target, (FAMILIES | STATEFUL)[kind], ids_BT)
    taps = (target.config.num_hidden_layers, -1)
    with torch.no_grad():
        _, (raw, final) = forward_with_states(target, taps, input_ids=ids_BT)
    assert torch.equal(raw, raw_BTH) and torch.equal(final, final_BTH)
    assert not torch.allclose(raw, final, atol=0.1)


@pytest.mark.parametrize("kind", [*FAMILIES, *STATEFUL])
@torch.no_grad()
def test_states_are_the_ones_that_transformers_keeps(kind):
    target = made(kind)
    ids_BT = ids_of(vocabulary=target.config.vocab_size)
    kept = body(target)(input_ids=ids_BT, use_cache=False, output_hidden_states=True)
    zero, one, final = body_states(target, (0, 1, -1), input_ids=ids_BT, use_cache=False)
    assert torch.equal(zero, kept.hidden_states[0])
    assert torch.equal(one, kept.hidden_states[1])
    assert torch.equal(final, kept.last_hidden_state)


@pytest.mark.parametrize("kind", KINDS)
def test_training_reads_the_raw_output(kind, tmp_path):
    target, ids_BT = tiny_family("llama"), ids_of()
    head = head_of(kind, target)
    assert head.hidden_layers[-1] == LAST
    raw_BTH, final_BTH = hooked(target, "model.layers", ids_BT)
    batch = Batch(ids_BT, ids_BT)
    files = StateFiles(tmp_path, fingerprint(target), torch.float32)
    for store in (None, files, files):
        frozen = FrozenTarget(target, head.hidden_layers, states=store)
        states, last_BTH = frozen.read(batch)
        torch.testing.assert_close(states[-1][:, :-1], raw_BTH[:, :-1], atol=1e-5, rtol=0)
        if store is None:
            torch.testing.assert_close(last_BTH, final_BTH, atol=1e-5, rtol=0)


@pytest.mark.parametrize("form", ["dflash", "speculators"])
def test_an_exported_head_still_reads_the_last_state(form, target_dir, tmp_path):
    target = ds.load_pair(target_dir, device="cpu").target
    head = DFlashHead.fresh(target, num_layers=1, block_size=3, target_layers=(0, 1))
    save_head(head, tmp_path / "head")
    options: Any = {"draft": str(tmp_path / "head"), "target": str(target_dir), "format": form}
    ds.export(ds.ExportConfig(**options, out=str(tmp_path / "out")))
    assert load_head(tmp_path / "out", target).hidden_layers == (1, 2)


def test_sglang_gives_no_output_of_the_last_layer(target_dir, tmp_path, golden):
    """Its models keep the states that enter a layer."""
    target = ds.load_pair(target_dir, device="cpu").target
    save_head(Eagle3Head.fresh(target), tmp_path / "head")
    options: Any = {"draft": str(tmp_path / "head"), "target": str(target_dir)}
    with golden.raises():
        ds.export(ds.ExportConfig(**options, format="sglang", out=str(tmp_path / "out")))
    ds.export(ds.ExportConfig(**options, format="speculators", out=str(tmp_path / "out")))
