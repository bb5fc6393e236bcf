"""From distilling to decoding with a target that has recurrent layers, through the command line."""

import json

import pytest
import torch
from transformers import AutoModelForCausalLM

from benchmarks.lib.tiny_types import tiny_config
from tests.conftest import EOS_IDS, tiny_tokenizer
from tests.tiny_models import redrawn

CPU = ["--device", "cpu"]


@pytest.fixture(scope="module")
def hybrid_dir(tmp_path_factory):
    """Three layers of a gated delta rule and one of attention."""
    path = tmp_path_factory.mktemp("hybrid")
    config = tiny_config("qwen3_next")
    config.vocab_size = 290
    torch.manual_seed(0)
    model = redrawn(AutoModelForCausalLM.from_config(config), 0.2)
    model.generation_config.eos_token_id = EOS_IDS
    model.save_pretrained(path)
    tiny_tokenizer().save_pretrained(path)
    return path


@pytest.mark.slow
@pytest.mark.usefixtures("undrawn")
def test_a_hybrid_target_from_answers_to_decoding(
    hybrid_dir, draft_dir, prompts_file, tmp_path, door
):
    answers = tmp_path / "answers"
    target = ["--target", hybrid_dir, *CPU]
    door.ok(
        *["distill", *target, *f"--prompts {prompts_file} --out {answers}".split()],
        *"--num_samples 1 --max_new_tokens 8".split(),
    )
    scored = door.summary("distill", *target, *f"--score {answers} --out {tmp_path}/scored".split())
    assert scored["rows"] == json.loads((answers / "manifest.json").read_text())["counts"]["rows"]
    train = [*target, *f"--data {answers} --steps 2 --batch_size 4 --max_length 64".split()]
    train += ["--objective", "fkl"]
    door.ok("train", "--kind", "eagle3", *train, "--out", tmp_path / "eagle")
    door.ok(*f"train --kind lm --draft {draft_dir}".split(), *train, "--out", tmp_path / "lm")
    drafts = [f"eagle={tmp_path / 'eagle'}", f"lm={tmp_path / 'lm'}"]
    door.ok(
        *["eval", *target, "--draft", *drafts, "--id", f"own={prompts_file}"],
        *"--tree chain:2 --speed_prompts 2 --max_new_tokens 6 --max_prompts 4 --out".split(),
        tmp_path / "eval",
    )
    rows = json.loads((tmp_path / "eval" / "results.json").read_text())["rows"]
    alphas = {row["draft"]: row["value"] for row in rows if row["figure"] == "alpha"}
    assert alphas.keys() == {"eagle", "lm"} and all(0 < alpha < 1 for alpha in alphas.values())
    assert [row for row in rows if row["figure"] == "speedup"]
    plan = ["plan", *target, *f"--draft {draft_dir} --prompts {prompts_file}".split()]
    door.ok(*plan, *"--max_new_tokens 6 --confirm_prompts 2 --out".split(), tmp_path / "plan.json")
    candidates = json.loads((tmp_path / "plan.json").read_text())["candidates"]
    assert {row["tree"].partition(":")[0] for row in candidates} == {"chain"}
    decode = [
        "decode",
        *target,
        "--prompt",
        "The quick",
        *"--max_new_tokens 8 --temperature 0".split(),
    ]
    alone, _ = door.ok(*decode)
    for draft in ("eagle", "lm"):
        text, _ = door.ok(*decode, "--draft", tmp_path / draft)
        assert text.splitlines()[0] == alone.splitlines()[0]
        door.refused(*decode, "--draft", tmp_path / draft, "--tree", "kary:2,2")
