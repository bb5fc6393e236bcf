"""Prompts that the target writes itself: as it would go on, each once, all accounted for, the same
after kills.
"""

import json
from pathlib import Path

import pytest

from draftsmith.core.models import eos_ids, load_model
from draftsmith.core.sampling import Sampling, generator, row_seed
from draftsmith.core.tokenization import decode_text, load_tokenizer
from draftsmith.decode import SpeculativeDecoder
from tests.distilled import files, manifest, rows_of
from tests.serving import serving

TEMPLATE = (
    "{{ bos_token }}{% for m in messages %}[{{ m.role }}]{{ m.content }}{{ eos_token }}{% "
    "endfor %}[assistant]"
)


@pytest.fixture
def words(target_dir, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    Path("chat.jinja").write_text(TEMPLATE)
    command = (
        f"distill --target {target_dir} --chat_template chat.jinja --out set "
        "--max_new_tokens 12 --part_rows 10"
    )
    return [*command.split(), "--prompts"]


def prompts(directory="set"):
    return [json.loads(line) for line in Path(directory, "prompts.jsonl").read_text().splitlines()]


def test_prompts_are_what_the_target_writes(words, door, target_dir, golden):
    out, _ = door.ok(*words, "magpie:25", "--json")
    summary = json.loads(out.splitlines()[-1])
    own, found = summary["own_prompts"], prompts()
    assert own == manifest()["own_prompts"]
    assert (own["drawn"], own["kept"]) == (25, len(found))
    left_out = sum(int(line.split()[0]) for line in own["left_out_because"])
    assert left_out == 25 - len(found) and 5 < len(found) < 25
    golden(out)
    assert summary["prompts_done"] == summary["prompts_read"] == len(found) == len(rows_of("set"))
    assert not Path("set/.prompts").exists()
    # Each is what the target itself goes on with, from its own seed.
    model, tokenizer = load_model(target_dir, device="cpu"), load_tokenizer(target_dir)
    start = tokenizer("<s>[user]", add_special_tokens=False)["input_ids"]
    for row in found:
        seed = row_seed(0, f"magpie/{row['id'].removeprefix('magpie-')}")
        made = SpeculativeDecoder(model).generate(
            [start], Sampling(), 12, [generator(seed)], eos_ids(model)
        )
        text = decode_text(tokenizer, list(made.generations[0].output_ids))
        assert row["messages"] == [{"role": "user", "content": text.strip()}]
        assert made.generations[0].finish_reason == "stop"
    # The same command finds everything done, and other prompts are another set.
    before = files("set")
    door.ok(*words, "magpie:25", "--json")
    assert files("set") == before
    door.refused(*words, "magpie:26")


def test_a_text_that_was_drawn_before_is_left_out(words, door):
    out, _ = door.ok(*words, "magpie:300", "--part_rows", 100, "--max_new_tokens", 2)
    texts = [" ".join(row["messages"][0]["content"].lower().split()) for row in prompts()]
    assert len(set(texts)) == len(texts)
    assert any("left out: was drawn before (row " in line for line in out.splitlines())
    assert any("left out: had no end within 2 tokens (row " in line for line in out.splitlines())


def test_servers_draw_them_too_and_nothing_is_asked_twice(words, door, target_dir, golden):
    tokenizer = load_tokenizer(target_dir)
    with serving("vllm", tokenizer) as server:
        words = [*words[:-1], "--engine", "openai", "--endpoint", server.url, "--prompts"]
        door.refused(*words, "magpie:24", "--max_requests", 14, code=1)
        assert len(list(Path("set/.prompts").glob(".part-*.answers.jsonl"))) > 0
        # What is spent on prompts is not there for answers.
        code, _, err = door(*words, "magpie:24", "--max_requests", 20)
        assert code == 1 and Path("set/prompts.jsonl").exists()
        golden(err)
        out, _ = door.ok(*words, "magpie:24")
        assert f"{len(prompts())} done" in out
        begin = tokenizer("<s>[user]", add_special_tokens=False)["input_ids"]
        draws = [each for each in server.answered if json.loads(each)[0] == begin]
        assert len(draws) == len(set(draws)) == 24
    with serving("text", tokenizer) as server:
        words[words.index("--endpoint") + 1] = server.url
        door.refused(*words, "magpie:24", "--out", "other")
