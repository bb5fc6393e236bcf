"""`doctor --served` on engines with a draft that is cut at 64 tokens on purpose: the table by
length shows it.
"""

import argparse
import inspect
import json
import shutil
from typing import Any

import pytest
from transformers import AutoModelForCausalLM, MistralConfig, MistralForCausalLM

import draftsmith as ds
from benchmarks.lib.engines import llama_server, vllm_server
from draftsmith.core.tokenization import load_tokenizer
from draftsmith.drafts.layouts import gguf_file
from tests.conftest import ROOT
from tests.openvino_ir import engine

TARGET = ROOT / "draftsmith" / "demo" / "pair" / "target"
CUT, LONGEST, PROMPTS, TOKENS = 64, 200, 20, 24

pytestmark = pytest.mark.engines


def ask(place, port):
    """Prompts of 8 to 200 tokens, from one text. The pair here is the target with itself."""
    tokenizer = load_tokenizer(str(TARGET))
    text = inspect.getsource(argparse)
    ids = tokenizer(text, add_special_tokens=False, verbose=False)["input_ids"]
    rows = []
    for row in range(PROMPTS):
        length = 8 + (LONGEST - 8) * row // (PROMPTS - 1)
        begin = 900 * row
        rows.append({"prompt": tokenizer.decode(ids[begin : begin + length])})
    (place / "prompts.jsonl").write_text("\n".join(map(json.dumps, rows)))
    return ds.served(
        target=str(TARGET),
        draft=str(TARGET),
        served=f"http://127.0.0.1:{port}",
        prompts=str(place / "prompts.jsonl"),
        temperature=0,
        max_new_tokens=TOKENS,
        dtype="float32",
        device="cpu",
    )


def is_less_beyond_its_length(found):
    rows = [row for row in found["acceptance"] if row["of"].startswith("prompts of up to ")]
    assert found["texts"][1]["value"]["value"] == 0.0, "these are not the target's own texts"
    away = [row["predicted"]["value"] - row["served"]["value"] for row in rows]
    assert [row["of"].split()[4] for row in rows] == ["16", "32", "64", "128", "256"]
    assert away[:2] == [0, 0] and away[3] >= 0 and away[4] > 0.2, rows
    assert found["judgement"] == "less"


def test_a_window_of_64_in_vllm(tmp_path):
    python = engine("vllm")
    model = AutoModelForCausalLM.from_pretrained(TARGET, dtype="float32")
    shape = model.config.to_dict()
    for key in ("model_type", "architectures"):
        del shape[key]
    shape["layer_types"] = ["sliding_attention"] * model.config.num_hidden_layers
    shape["sliding_window"] = CUT
    draft = MistralForCausalLM(MistralConfig(**shape))
    draft.load_state_dict(model.state_dict())
    draft.save_pretrained(tmp_path / "draft")
    for file in TARGET.glob("tokenizer*"):
        shutil.copy(file, tmp_path / "draft")
    drafting = {"method": "draft_model", "model": str(tmp_path / "draft")}
    words = ["--model", str(TARGET), "--dtype", "float32", "--enforce-eager"]
    words += ["--speculative-config", json.dumps(drafting | {"num_speculative_tokens": 3})]
    # With caches of two kinds, vLLM 0.32 answers long prompts otherwise than its target alone.
    words += "--disable-hybrid-kv-cache-manager --max-model-len 512 --max-num-seqs 2".split()
    with vllm_server(python, words) as port:
        is_less_beyond_its_length(ask(tmp_path, port))


def test_attention_that_breaks_at_64_in_llama_cpp(tmp_path, monkeypatch):
    """It takes no window for such models, but a factor on the attention of each 64 positions."""
    server = engine("llama-server")
    common: dict[str, Any] = {"format": "gguf", "dtype": "float32", "draft": str(TARGET)}
    ds.export(**common, out=str(tmp_path / "target"))
    add_shape = gguf_file._add_shape

    def add_factor(writer, config):
        add_shape(writer, config)
        writer.add_attn_temperature_scale(-1.44)  # 1 / log 2: no attention from 64 on
        writer.add_rope_scaling_orig_ctx_len(CUT)

    monkeypatch.setitem(gguf_file.ARCHITECTURES, "llama", "mistral3")
    monkeypatch.setattr(gguf_file, "_PAIRED", ("mistral3",))
    monkeypatch.setattr(gguf_file, "_add_shape", add_factor)
    ds.export(**common, out=str(tmp_path / "draft"))
    words = ["-m", f"{tmp_path}/target/model.gguf", "-md", f"{tmp_path}/draft/model.gguf"]
    words += "-c 512 -np 1 -t 1 -fa off -ctk f32 -ctv f32 -ctkd f32 -ctvd f32 --metrics".split()
    words += "--spec-type draft-simple --spec-draft-n-max 3 --spec-draft-p-min 0".split()
    with llama_server(server, words) as port:
        is_less_beyond_its_length(ask(tmp_path, port))
