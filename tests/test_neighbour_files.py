"""A file of each neighbour's tutorial goes through distil, train and eval without a flag."""

import json
import shutil

import pytest

from tests.distilled import write_rows

TEMPLATE = (
    "{% for m in messages %}<|{{ m.role }}|>{{ m.content }}"
    "{% for call in m.tool_calls %}{{ call.function.name }}{% endfor %}{{ eos_token }}{% endfor %}"
    "{% if add_generation_prompt %}<|assistant|>{% endif %}"
)
WEATHER = {"name": "weather", "parameters": {"type": "object"}}


def _specforge(number):
    turns = [
        {"role": "user", "content": f"Count to {number}."},
        {"role": "assistant", "content": "One, two."},
    ]
    return {"id": f"row-{number}", "conversations": turns, "status": "success"}


def _speculators(number):
    turns = [
        {"from": "human", "value": f"Count to {number}."},
        {"from": "gpt", "value": "One, two."},
    ]
    return {"conversations": turns}


def _automodel(number):
    turns = [
        {"role": "system", "content": "Be short."},
        {"role": "user", "content": f"Count to {number}."},
        {"role": "assistant", "content": "One, two."},
    ]
    return {"messages": turns}


def _llama_factory(number):
    call = {"name": "weather", "arguments": {"city": str(number)}}
    turns = [
        {"from": "human", "value": f"City {number}?"},
        {"from": "function_call", "value": json.dumps(call)},
        {"from": "observation", "value": "21"},
        {"from": "gpt", "value": "It is warm."},
    ]
    return {"conversations": turns, "tools": json.dumps([WEATHER])}


def _alpaca(number):
    return {"instruction": f"Count to {number}.", "input": "in words", "output": "One, two."}


def _trl(number):
    return {
        "prompt": [{"role": "user", "content": f"Count to {number}."}],
        "completion": [{"role": "assistant", "content": "One, two."}],
    }


def _batch(number):
    body = {"model": "target", "messages": _automodel(number)["messages"], "max_tokens": 8}
    return {"custom_id": f"row-{number}", "method": "POST", "url": "/v1/x", "body": body}


def _torchspec(number):
    ids = [3, 10 + number, 20, 30, 40, 50]
    return {"input_ids": ids, "loss_mask": [0, 0, 1, 1, 1, 1]}


TOOLS = {
    "SpecForge": _specforge,
    "speculators": _speculators,
    "Automodel": _automodel,
    "LLaMA-Factory": _llama_factory,
    "Alpaca": _alpaca,
    "TRL": _trl,
    "OpenAI's batch": _batch,
    "TorchSpec": _torchspec,
}


@pytest.fixture(scope="module")
def chat_target(target_dir, tmp_path_factory):
    """The target with a chat template of its own."""
    directory = tmp_path_factory.mktemp("chat") / "target"
    shutil.copytree(target_dir, directory)
    (directory / "chat_template.jinja").write_text(TEMPLATE)
    return directory


@pytest.mark.usefixtures("undrawn")
@pytest.mark.parametrize("tool", TOOLS)
def test_a_file_of_a_neighbour_goes_all_the_way(tool, chat_target, draft_dir, tmp_path, door):
    rows = [TOOLS[tool](number) for number in range(1, 7)]
    file = write_rows(tmp_path / "rows.jsonl", rows)
    target = ["--target", chat_target]
    door.ok("distill", *target, "--prompts", file, "--max_new_tokens", 4, "--out", tmp_path / "set")
    counts = json.loads((tmp_path / "set/manifest.json").read_text())["counts"]
    assert counts["prompts_done"] == counts["prompts_read"] == 6
    sizes = ["--max_length", 96, "--batch_size", 2, "--steps", 1, "--heldout_fraction", 0.3]
    start = ["--draft", draft_dir, "--optim.lr", 0.01]
    door.ok("train", *target, *start, "--data", file, "--out", tmp_path / "draft", *sizes)
    measured = ["--tree", "none", "--max_prompts", 3, "--max_new_tokens", 4]
    drafts = ["--draft", f"own={tmp_path / 'draft'}", "--id", f"own={file}"]
    door.ok("eval", *target, *drafts, *measured, "--out", tmp_path / "eval")
    results = json.loads((tmp_path / "eval/results.json").read_text())
    assert results["rows"]
