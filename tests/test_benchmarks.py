"""The benchmarks' own machinery: a widened model is the same function at a larger cost."""

import json
import os
import subprocess
import sys
from typing import Any

import pytest
import torch
from transformers import LlamaConfig, LlamaForCausalLM

from draftsmith.demo.widen import widen
from tests.conftest import ROOT

VOCAB = 61


def llama(*, key_value_heads: int, tied: bool, seed: int = 0, heads: int = 4) -> LlamaForCausalLM:
    torch.manual_seed(seed)
    config = LlamaConfig(
        vocab_size=VOCAB,
        hidden_size=32,
        intermediate_size=48,
        num_hidden_layers=2,
        num_attention_heads=heads,
        num_key_value_heads=key_value_heads,
        head_dim=8,
        max_position_embeddings=64,
        tie_word_embeddings=tied,
        rms_norm_eps=1e-3,
        initializer_range=0.4,
        attention_bias=tied,
        bos_token_id=0,
        eos_token_id=None,
    )
    model = LlamaForCausalLM(config)
    model.eval()
    # Norms of one would hide a norm that is not scaled.
    for name, value in model.named_parameters():
        if "norm" in name or name.endswith("bias"):
            torch.nn.init.uniform_(value, 0.5, 1.5)
    return model


def greedy(model: Any, ids_BT: torch.Tensor, count: int) -> torch.Tensor:
    mask_BT = torch.ones_like(ids_BT)
    out_BT = model.generate(ids_BT, attention_mask=mask_BT, do_sample=False, max_new_tokens=count)
    return out_BT[:, ids_BT.shape[1] :]


@pytest.mark.parametrize("key_value_heads", [4, 2])
@pytest.mark.parametrize("tied", [True, False])
def test_widened_model_is_the_same_function_and_an_ordinary_checkpoint(
    key_value_heads, tied, tmp_path
):
    model = llama(key_value_heads=key_value_heads, tied=tied)
    wide = widen(
        model,
        hidden_size=80,
        intermediate_size=112,
        num_hidden_layers=5,
        max_position_embeddings=128,
    )
    wide.save_pretrained(tmp_path)
    wide = LlamaForCausalLM.from_pretrained(tmp_path)
    assert wide.num_parameters() > 5 * model.num_parameters()
    assert wide.config.num_key_value_heads == wide.config.num_attention_heads * key_value_heads // 4
    tokens_BT = torch.randint(VOCAB, (3, 40), generator=torch.Generator().manual_seed(1))
    with torch.no_grad():
        ours, theirs = wide(tokens_BT).logits, model(tokens_BT).logits
    assert theirs.std() > 1
    torch.testing.assert_close(ours, theirs, atol=1e-4, rtol=0)
    assert greedy(wide, tokens_BT, 20).equal(greedy(model, tokens_BT, 20))


@pytest.mark.slow(50)
def test_the_device_check_runs_whole_on_tiny_models(tmp_path):
    """The sections in one process, but for the first. A directory of modules that cannot be
    imported hides packages.
    """
    for package in ("datasets", "pyarrow", "pydantic", "wandb"):
        (tmp_path / f"{package}.py").write_text("raise ImportError('blocked by a test')\n")
    program = (
        "import sys, torch\nfrom pathlib import Path\n"
        "from benchmarks.gpu.device_check import main, run_here\n"
        "for name in sys.argv[2:]: run_here(name, torch.device('cpu'), True, Path(sys.argv[1], "
        "name))\n"
        "sys.exit(main(['--sections', 'tests', '--tiny', '--device', 'cpu', '--out', sys.argv[1] "
        "+ '/apart']))"
    )
    words = [
        sys.executable,
        "-c",
        program,
        str(tmp_path),
        "greedy",
        "decoding",
        "training",
        "distillation",
    ]
    environment = os.environ | {"PYTHONPATH": os.pathsep.join([str(tmp_path), str(ROOT)])}
    done = subprocess.run(words, cwd=ROOT, capture_output=True, text=True, env=environment)
    assert done.returncode == 0, done.stdout + done.stderr
    assert json.loads((tmp_path / "apart").read_text())["tests"]["figures"]["exit_code"] == 0
    found = {name: json.loads((tmp_path / name).read_text()) for name in words[4:]}
    assert all(figures and not {"cut", "error"} & figures.keys() for figures in found.values()), (
        found
    )
    assert all(not figures["different"] for figures in found["greedy"].values())
    rows = [figures for figures in found["decoding"].values() if isinstance(figures, dict)]
    equal = [figures["outputs_equal_to_ar"] for figures in rows if "outputs_equal_to_ar" in figures]
    assert equal and set(equal) == {1.0}
    assert len([name for name in found["training"] if name.startswith("LM draft")]) == 3
