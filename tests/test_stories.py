"""A pretrained model that is not ours, as a target through the same commands; skipped where it is not at hand."""

import json
import os
from pathlib import Path

import pytest

from draftsmith.__main__ import main

SHARED = Path(os.environ.get("DRAFTSMITH_SHARED", Path(__file__).parents[2] / "shared"))
STORIES = SHARED / "models" / "stories260k"
ALPACA = SHARED / "data" / "alpaca.jsonl"

pytestmark = pytest.mark.skipif(
    not (STORIES.is_dir() and ALPACA.is_file()), reason="no pretrained model and data beside the clone"
)

STARTS = ("Once upon a time", "One day, a boy", "There was a little", "Lily and Tom", "The big dog", "Mom said")
ENDS = ("", " who", " and", " was", " saw")
SHAPE = {
    "model_type": "llama",
    "vocab_size": 512,
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_hidden_layers": 1,
    "num_attention_heads": 2,
    "num_key_value_heads": 2,
    "max_position_embeddings": 512,
    "tie_word_embeddings": True,
    "bos_token_id": 1,
    "eos_token_id": 2,
}


def test_greedy_text_is_the_published_one(capsys: pytest.CaptureFixture[str]) -> None:
    words = ["decode", "--target", str(STORIES), "--prompt", "Once upon a time", "--max_new_tokens", "40", "--json"]
    assert main(words) == 0
    text = json.loads(capsys.readouterr().out.splitlines()[-1])["outputs"][0]["text"]
    expected = ", there was a little girl named Lily. She loved to play outside in the park. One day, she saw a big"
    assert text.startswith(expected)


@pytest.mark.slow
def test_distill_train_decode_eval(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    prompts = tmp_path / "stories.jsonl"
    prompts.write_text("".join(json.dumps({"prompt": a + b}) + "\n" for a in STARTS for b in ENDS))
    (tmp_path / "config.json").write_text(json.dumps(SHAPE))
    data, draft, out = (str(tmp_path / name) for name in ("data", "draft", "eval"))
    target = str(STORIES)
    distill = ["--target", target, "--prompts", str(prompts), "--out", data, "--num_samples", "8"]
    assert main(["distill", *distill, "--max_new_tokens", "48", "--batch_size", "60"]) == 0
    train = ["--target", target, "--draft_config", str(tmp_path / "config.json"), "--data", data, "--out", draft]
    train += ["--objective", "fkl", "--epochs", "8", "--optim.lr", "4e-3", "--batch_size", "16", "--json"]
    capsys.readouterr()
    assert main(["train", *train]) == 0
    trained = json.loads(capsys.readouterr().out.splitlines()[-1])
    first = json.loads((tmp_path / "draft" / "run" / "metrics.jsonl").read_text().splitlines()[0])
    assert trained["heldout_alpha"] > 2 * first["heldout_alpha"]

    decoded = []
    for tree in ("chain:3", "kary:3,2"):
        words = ["--target", target, "--draft", draft, "--tree", tree, "--prompt", "Once upon a time", "--json"]
        assert main(["decode", *words, "--max_new_tokens", "60"]) == 0
        decoded.append(json.loads(capsys.readouterr().out.splitlines()[-1]))
    assert main(["decode", "--target", target, "--prompt", "Once upon a time", "--max_new_tokens", "60", "--json"]) == 0
    alone = json.loads(capsys.readouterr().out.splitlines()[-1])
    for row in decoded:
        assert row["outputs"][0]["output_ids"] == alone["outputs"][0]["output_ids"]
        assert row["accepted"] > 0 and row["target_calls"] < alone["target_calls"]

    suites = ["--id", f"stories={prompts}", "--ood", f"alpaca={ALPACA}"]
    limits = ["--max_prompts", "12", "--max_new_tokens", "24", "--speed_prompts", "0", "--bootstrap", "300"]
    # Alpaca's rows are chats, and this target has no template of its own.
    template = tmp_path / "turns.jinja"
    template.write_text("{% for turn in messages %}{{ turn.content }}\n{% endfor %}")
    words = ["--target", target, "--draft", f"d={draft}", *suites, *limits, "--chat_template", str(template)]
    assert main(["eval", *words, "--out", out]) == 0
    results = json.loads((tmp_path / "eval" / "results.json").read_text())
    rows = [row for row in results["rows"] if row["domain"] != row["kind"]]
    alpha = {(row["kind"], row["temperature"]): row["value"] for row in rows if row["figure"] == "alpha"}
    assert alpha["id", 1.0] > alpha["ood", 1.0]
    assert {row["value"] for row in rows if row["figure"] == "identical"} == {12}
