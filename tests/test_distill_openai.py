"""Distilling from servers: every row once and as the server drew it, whatever servers do
meanwhile.
"""

import json
import shutil
import signal
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import draftsmith.distill.engines.openai as openai
from benchmarks.lib.engines import how_to_get, llama_server, program
from draftsmith.core.sampling import row_seed
from draftsmith.core.teacher_rows import unpack
from draftsmith.core.tokenization import load_tokenizer
from draftsmith.distill.engines import replies
from draftsmith.distill.engines.server import encode_answer
from tests.chat_families import FAMILIES
from tests.distilled import errors, files, manifest, rows_of, write_rows
from tests.serving import EOS, Server, answer_of, serving, wait_until
from tests.test_docs import ROOT, commands, run_line

PROMPTS = 40
TRIAL_SEED = 1


@pytest.fixture
def words(target_dir, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.delenv("OPENAI_API_KEY", raising=False)
    monkeypatch.setattr(openai, "FIRST_PAUSE_S", 0.001)
    monkeypatch.setattr(openai, "LONGEST_PAUSE_S", 0.01)
    write_rows(
        "prompts.jsonl",
        *({"prompt": f"A draft model {number}", "id": f"p{number}"} for number in range(PROMPTS)),
    )
    command = (
        f"distill --engine openai --target {target_dir} --prompts prompts.jsonl --out set "
        "--num_samples 2"
    )
    return f"{command} --max_new_tokens 10 --part_rows 20 --seed 3 --endpoint".split()


@pytest.fixture
def serve(tokenizer):
    with ExitStack() as stack:
        yield lambda kind="vllm", **options: stack.enter_context(
            serving(kind, tokenizer, **options)
        )


def answered_once(server):
    """Nothing that was answered was asked again; the trial request apart."""
    answered = [key for key in server.answered if json.loads(key)[1] != TRIAL_SEED]
    return len(answered) == len(set(answered)) == 2 * PROMPTS


def check_rows(rows):
    """Every row is there once, with the answer that the server gave to its prompt and seed."""
    assert [(row["prompt_id"], row["sample_index"]) for row in rows] == [
        (f"p{number}", sample) for number in range(PROMPTS) for sample in range(2)
    ]
    assert len({row["id"] for row in rows}) == len(rows)
    for row in rows:
        assert row["seed"] == row_seed(3, f"{row['prompt_id']}/{row['sample_index']}")
        ids, reason = answer_of(row["prompt_ids"], row["seed"] & 0x7FFFFFFF, 10)
        assert (row["response_ids"], row["finish_reason"]) == (ids, reason)
    assert {row["finish_reason"] for row in rows} == {"stop", "length"}


def test_teacher_rows_are_the_log_probabilities_of_the_server(words, door, serve, golden):
    door.ok(*words, serve().url, "--teacher_top_k", 3)
    rows = rows_of("set")
    check_rows(rows)
    for row in rows:
        ids_RK, logprobs_RK, tail_R = unpack(row["teacher"])
        # The likeliest three of the four that the server shows.
        assert ids_RK.tolist() == [[token, 100, 101] for token in row["response_ids"]]
        assert np.allclose(np.exp(logprobs_RK), [0.5, 0.2, 0.1], atol=1e-3) and np.allclose(
            tail_R, 0.2, atol=1e-3
        )
    door.refused(*words, serve("text").url, *"--teacher_top_k 3 --out other".split())


TEACHERS = {
    "one entry": lambda row: {max(row, key=row.get): 0.0},
    "one token has all": lambda row: dict.fromkeys(row, -90.0) | {max(row, key=row.get): 0.0},
    "one too few": lambda row: dict(list(row.items())[:-2]),
}


@pytest.mark.parametrize("fault", TEACHERS)
def test_teachers_that_know_nothing_are_refused(fault, words, door, serve):
    door.refused(*words, serve(teacher=TEACHERS[fault]).url, "--teacher_top_k", 4)
    assert not Path("set").exists()


def test_teachers_of_two_servers_must_agree(words, door, serve):
    def other(row):
        return {f"token_id:{int(name[9:]) + 1}": value for name, value in row.items()}

    both = [serve().url, serve(teacher=other).url]
    door.refused(*words, *both, "--teacher_top_k", 4)
    door.ok(*words, *both)


def test_a_server_that_ignores_seeds_is_named(words, door, serve, golden):
    out, _ = door.ok(*words, serve(ignores_seeds=True).url)
    golden(out, having="different answers")
    assert manifest()["texts"]["different"] == manifest()["texts"]["prompts"]


@pytest.mark.parametrize(
    "drawn", [[], ["--temperature", 0.7], ["--top_p", 0.6], ["--temperatures", "0.5:1", "1:1"]]
)
def test_log_probabilities_after_the_options_are_no_teacher(drawn, words, door, serve):
    door.refused(*words, serve(processed=True).url, "--teacher_top_k", 3, *drawn)
    assert not Path("set").exists()
    door.ok(*words, serve().url, "--teacher_top_k", 3, *drawn)
    ids_RK, logprobs_RK, tail_R = unpack(rows_of()[0]["teacher"])
    assert np.allclose(np.exp(logprobs_RK).max(-1), 0.5, atol=1e-3)


@pytest.mark.parametrize("kind", ["vllm", "llama.cpp"])
def test_rows_are_what_the_server_drew(words, door, serve, kind):
    server = serve(kind)
    door.ok(*words, server.url)
    check_rows(rows_of())
    record = manifest()
    counts = dict(
        prompts_read=40,
        prompts_done=40,
        prompts_skipped=0,
        prompts_failed=0,
        rows=80,
        rows_dropped=0,
    )
    assert record["counts"] == counts
    assert record["identity"]["served_model"] == "target" and record["tokens_from"] == {
        "target": 80
    }
    assert server.url not in json.dumps(record["identity"])
    assert not list(Path("set").glob(".*"))
    body = server.bodies[-1]
    assert (body["temperature"], body["top_p"], body["min_p"]) == (1.0, 1.0, 0.0)
    if kind == "llama.cpp":
        assert body["samplers"][0] == "temperature" and body["top_k"] == 0


def test_text_is_tokenised_again_and_what_differs_is_counted(words, door, serve, tokenizer, golden):
    """The served model draws tokens that the tokenizer would never choose for their text, so some
    rows differ.
    """
    server = serve("text", strict_keys=True)
    out, err = door.ok(*words, server.url)
    golden(err, having="token ids")
    for row in rows_of():
        drawn, _ = answer_of(row["prompt_ids"], row["seed"] & 0x7FFFFFFF, 10)
        text = tokenizer.decode([token for token in drawn if token != EOS])
        again = tokenizer(text, add_special_tokens=False)["input_ids"]
        assert [token for token in row["response_ids"] if token != EOS] == again
        same = abs(len(drawn) - len(again) - (drawn[-1] == EOS)) == 0
        assert row["tokens_from"] == ("text" if same else "text_differs")
    counts = manifest()["tokens_from"]
    assert counts["text"] > 20 and sum(counts.values()) == 80
    golden(out, having="a server's text")
    # A server that rejects the keys which OpenAI's API does not have is asked without them, if that
    # changes nothing.
    assert (
        not {"top_k", "min_p", "return_token_ids", "repetition_penalty"} & server.bodies[-1].keys()
    )
    door.refused(*words, server.url, *"--out other --top_k 7".split())
    assert not Path("other").exists()


@pytest.mark.parametrize("counts_end", [True, False])
@pytest.mark.parametrize("lost", [False, True])
def test_text_is_the_target_s_if_the_server_counts_as_many(
    lost, counts_end, words, door, serve, tokenizer, target_dir, tmp_path, golden
):
    """A server that does not show special tokens, as OpenAI's API has no key for it, loses one of
    every answer: no row of it is what the target drew, whether it ended or was cut.
    """
    insert = tokenizer.bos_token_id if lost else None
    target = tmp_path / "ends"
    shutil.copytree(target_dir, target)
    (target / "generation_config.json").write_text(json.dumps({"eos_token_id": EOS}))
    words[words.index("--target") + 1] = str(target)
    server = serve("text", strict_keys=True, counts_end=counts_end, insert=insert)
    door.ok(*words, server.url)
    for row in rows_of():
        drawn, _ = answer_of(row["prompt_ids"], row["seed"] & 0x7FFFFFFF, 10)
        same = len(row["response_ids"]) == len(drawn) and not lost
        assert row["tokens_from"] == ("text" if same else "text_differs")
    differ = manifest()["tokens_from"]["text_differs"]
    assert differ == 80 if lost else 0 < differ < 40
    train = [*"train --objective ce --draft".split(), words[words.index("--target") + 1]]
    _, said = door.ok(*train, *"--data set --out draft --steps 1 --max_length 64".split())
    golden(said, having="a server's text")
    if lost:
        shows = serve("text", insert=insert)
        door.ok(*words, shows.url, "--out", "other")
        assert "text" in manifest("other")["tokens_from"]


def test_an_answer_that_takes_too_long_is_asked_again(words, door, serve):
    server = serve(misbehave=lambda number: {12: "never", 13: "drops"}.get(number))
    door.ok(*words, server.url, "--timeout_s", 1)
    check_rows(rows_of())


def test_failed_rows_have_their_reasons_and_do_not_stop_the_others(
    words, door, serve, tokenizer, golden
):
    """One row is refused, one always breaks the server, and some get replies that are no
    answers.
    """
    no_answers: list[Any] = [
        b"<html>Sign in</html>",
        b"[" * 100_000,
        [],
        {"choices": [], "usage": []},
        {"choices": [{"text": "a", "token_ids": None, "finish_reason": "stop"}]},
        {"choices": [{"text": "a", "token_ids": [40], "finish_reason": "abort"}]},
        {"choices": [{"token_ids": [40.5], "finish_reason": "stop"}]},
        {"choices": [{"token_ids": [40, 2**40], "finish_reason": "stop"}]},
        {"choices": [{"token_ids": [40] * 12, "finish_reason": "stop"}]},
    ]
    wrong: list[Any] = [
        422,
        "reset",
        *(body if isinstance(body, bytes) else json.dumps(body).encode() for body in no_answers),
    ]
    prompts = [
        list(tokenizer(f"A draft model {number}")["input_ids"]) for number in range(len(wrong))
    ]
    server = serve()
    server.misbehave = lambda number: (
        wrong[prompts.index(prompt)]
        if (prompt := server.bodies[number]["prompt"]) in prompts
        else None
    )
    out, _ = door.ok(*words, server.url)
    golden(out.splitlines()[0])
    assert [(line["row"], line["outcome"]) for line in errors()] == [
        (n + 1, "failed") for n in range(len(wrong))
    ]
    golden("\n".join(line["reason"] for line in errors()))
    assert server.url not in Path("set/errors.jsonl").read_text()
    assert len(rows_of()) == 2 * (40 - len(wrong)) and manifest()["counts"][
        "prompts_failed"
    ] == len(wrong)


def test_one_of_two_servers_dies_and_comes_back(words, door, serve):
    first, second = serve(), serve()
    second.misbehave = lambda number: "reset" if 10 <= number < 16 else None
    first.misbehave = lambda number: (
        wait_until(lambda: len(second.bodies) > 16) if number > 40 else None
    )
    door.ok(*words, first.url, second.url, "--concurrency", 8)
    check_rows(rows_of())
    assert len(second.bodies) > 16 and len(first.bodies) > 20


def test_a_server_that_is_down(words, door, serve, tokenizer, golden):
    up, down = serve(), Server("vllm", tokenizer)
    down.server_close()
    _, err = door.ok(*words, up.url, down.url)
    golden(err, having="/models")
    check_rows(rows_of())
    code, _, err = door(*words, down.url, "--out", "other")
    assert code == 2 and "Traceback" not in err
    golden(err.strip().splitlines()[-1])
    assert not Path("other").exists()


def test_when_all_servers_are_gone_what_was_answered_stays(words, door, serve, monkeypatch, golden):
    monkeypatch.setattr(openai, "PATIENCE_S", 0.3)
    monkeypatch.setattr(openai, "FIRST_PAUSE_S", 0.05)
    monkeypatch.setattr(openai, "LONGEST_PAUSE_S", 0.5)
    server = serve(misbehave=lambda number: "reset" if number >= 30 else None)
    words = [*words, server.url, *"--part_rows 1000 --concurrency 4".split()]
    door.refused(*words, "--timeout_s", 0.5, code=1)
    assert len(server.answered) == 30
    server.misbehave = lambda number: None
    door.ok(*words)
    check_rows(rows_of())
    assert answered_once(server)


def test_budgets_stop_and_a_larger_one_continues(words, door, serve, golden):
    server = serve()
    door.refused(*words, server.url, "--max_requests", 30, code=1)
    assert len(server.answered) == 1 + 30
    code, _, err = door(*words, server.url, *"--max_tokens 200 --concurrency 4".split())
    assert code == 1 and "max_tokens: " in err
    assert 200 <= int(err.partition("max_tokens: ")[2].split()[0]) < 200 + 4 * 40
    door.ok(*words, server.url, "--max_requests", 80)
    check_rows(rows_of())
    assert answered_once(server)


def test_the_key_is_from_the_environment_and_nowhere_else(words, door, serve, monkeypatch, golden):
    """Law 9. A line break behind a key, which files of keys end with, is not part of it."""
    server = serve(key="sk-secret")
    door.refused(*words, server.url)
    monkeypatch.setenv("OPENAI_API_KEY", "sk-wr\nong")
    code, _, err = door(*words, server.url)
    assert code == 2 and "sk-wr" not in err
    golden(err.strip().splitlines()[-1])
    monkeypatch.setenv("MY_KEY", "sk-secret\n")
    out, err = door.ok(*words, server.url, "--api_key_env", "MY_KEY")
    assert not any(b"sk-secret" in path.read_bytes() for path in Path("set").iterdir())
    assert "sk-secret" not in out + err


KEY = "sk-Secret+12/34=abcXYZ"
SPELLED = [KEY, KEY.upper(), f"{'x' * 290}{KEY}"]


@pytest.mark.parametrize("spelled", SPELLED)
def test_the_key_is_out_of_what_a_server_says(spelled):
    shown = replies.said(f"bad key {spelled}, see https://a.b/c?token={KEY}", KEY)
    assert "(k" in shown and not any(part in shown.lower() for part in ("sk-sec", "abcxyz"))


def test_a_server_with_all_faults_loses_no_row_and_leaks_no_key(
    words, door, serve, monkeypatch, tokenizer, golden
):
    """Errors that repeat the key, and a list that drips; one row is refused at last, and its reason
    is in every file of the set.
    """
    monkeypatch.setenv("OPENAI_API_KEY", KEY)
    faults: list[int | str] = [
        429,
        500,
        "drops",
        408,
        "garbage",
        503,
        "half",
        "reset",
    ]
    server = serve(key=KEY, error=" | ".join(SPELLED), list_drips=1, names="another")
    refused = list(tokenizer("A draft model 7")["input_ids"])

    def misbehave(number):
        if server.bodies[number]["prompt"] == refused:
            return 400
        return faults[number // 3 % 8] if number % 3 == 2 else None

    server.misbehave = misbehave
    out, err = door.ok(*words, server.url, "--timeout_s", 1)
    counts = manifest()["counts"]
    assert (counts["prompts_done"], counts["prompts_failed"], counts["rows"]) == (39, 1, 78)
    (error,) = errors()
    assert error["row"] == 8
    golden(error["reason"])
    said = out + err + "".join(path.read_bytes().decode("latin1") for path in Path("set").iterdir())
    assert not any(spelled in said for spelled in SPELLED) and KEY[:12] not in said
    assert err.count("name the model another, not target") == 1
    # A fault that stays is the reason of the row, in one line.
    server.misbehave = lambda number: "half" if server.bodies[number]["prompt"] == refused else None
    door.ok(*words, server.url, "--out", "other")
    (error,) = errors("other")
    golden(error["reason"])


def test_a_redirect_is_named_without_its_query(words, door, serve):
    for place in ("https://elsewhere/sign?token=hush&to=", "/sign#token=hush&to="):
        err = door.refused(*words, serve(moved_to=place).url)
        assert "/sign" in err and "hush" not in err


def test_servers_that_must_not_be_used(words, door, serve, golden):
    first, other, moved = serve(), serve(model="another"), serve(moved_to="https://elsewhere")
    door.refused(*words, first.url, other.url)
    door.refused(*words, moved.url)
    assert not Path("set").exists()


def test_concurrency_is_bounded(words, door, serve):
    server = serve()
    server.misbehave = lambda number: (
        wait_until(lambda: server.most_active >= 3) if number >= 8 else None
    )
    door.ok(*words, server.url, "--concurrency", 3)
    assert server.most_active == 3


def test_the_first_requests_are_retried_as_later_ones_are(words, door, serve):
    """A fault of any kind, or two of them, before the first answer."""
    cases: list[list[Any]] = [
        [429],
        [503, 500],
        ["garbage"],
        ["half", "reset"],
        [b"[]"],
        [408, b"<html>"],
    ]
    for number, faults in enumerate(cases):
        server = serve(misbehave=dict(enumerate(faults)).get)
        door.ok(*words, server.url, *f"--out set{number} --max_prompts 2".split())
        assert manifest(f"set{number}")["tokens_from"] == {"target": 4}
    server = serve(misbehave=lambda number: b'{"error": {"message": "CUDA out of memory"}}')
    door.refused(*words, server.url, "--out", "none")
    assert not Path("none").exists()


@pytest.mark.parametrize("kind", ["vllm", "llama.cpp", "text"])
def test_a_served_model_that_is_named_needs_no_list(words, door, serve, kind):
    server = serve(kind)
    door.ok(*words, server.url, *"--served_model target --max_prompts 3".split())
    assert server.lists == 0 and len(rows_of()) == 6
    assert set(manifest()["tokens_from"]) <= (
        {"text", "text_differs"} if kind == "text" else {"target"}
    )


def test_text_is_encoded_behind_its_prompt():
    """A SentencePiece tokenizer puts a space piece before a text that stands alone; behind its
    prompt it does not.
    """
    tokenizer = FAMILIES["zephyr"].tokenizer

    def ids_of(text):
        return list(tokenizer(text, add_special_tokens=False)["input_ids"])

    prompt = ids_of("The")
    for text in (" Blue He", ", He"):
        drawn = ids_of("The" + text)[len(prompt) :]
        assert ids_of(text) != drawn
        for count, ends in ((len(drawn), None), (len(drawn) + 1, [999]), (None, None)):
            assert encode_answer(tokenizer, prompt, text, count, ends) == (drawn, True)
        for count, ends in ((len(drawn) + 2, None), (len(drawn), [999]), (len(drawn) - 1, None)):
            assert encode_answer(tokenizer, prompt, text, count, ends)[1] is False
        # The text shows the end.
        assert encode_answer(tokenizer, prompt, text, len(drawn), [drawn[-1]]) == (drawn, True)


@pytest.mark.slow
def test_faults_and_kills_lose_no_row(words, spawn, door, serve):
    """Every third request meets a fault, and the client is killed: asked = done + failed +
    skipped.
    """
    faults = [
        429,
        "half",
        b'{"choices": []}',
        500,
        "reset",
        b"[",
        "garbage",
        b'{"choices": [{}]}',
        503,
        b"null",
    ]
    write_rows(
        "prompts.jsonl",
        *({"prompt": f"A draft {n}" if n % 7 else ""} for n in range(1, 61)),
        "{broken",
    )
    server = serve(misbehave=lambda number: faults[number // 3 % 8] if number % 3 == 2 else None)
    whole = serve()
    door.ok(*words, whole.url, "--out", "whole")
    client = spawn(*words, server.url, "--concurrency", 4, cwd=Path.cwd())
    wait_until(lambda: len(server.answered) > 30)
    client.send(signal.SIGKILL)
    client.wait(-9)
    door.ok(*words, server.url)
    counts = manifest()["counts"]
    assert (counts["prompts_read"], counts["prompts_skipped"], counts["prompts_failed"]) == (
        61,
        9,
        0,
    )
    assert counts["prompts_done"] == 52 and counts["rows"] == 104
    assert files(pattern="part-*") == files("whole", "part-*")


@pytest.mark.engines
def test_llama_server_draws_what_this_process_draws(tmp_path, door):
    """Law 11: greedy answers of the demo's target on a real server are those of this process."""
    server = program("llama-server")
    if server is None:
        pytest.skip(f"llama-server is not installed: {how_to_get('llama-server')}")
    target = ROOT / "draftsmith" / "demo" / "pair" / "target"
    out = tmp_path / "target.gguf"
    door.ok(*f"export --draft {target} --format gguf --out {out} --dtype float32".split())
    gguf = next(out.rglob("*.gguf")) if out.is_dir() else out
    source = tmp_path / "p.jsonl"
    source.write_text(
        "".join(
            json.dumps({"prompt": f"If the lock {number} is not"}) + "\n" for number in range(24)
        )
    )
    words = (
        f"distill --target {target} --prompts {source} --max_new_tokens 24 --temperature 0".split()
    )
    with llama_server(server, ["-m", str(gguf), "-t", "1", "-c", "2048", "-np", "4"]) as port:
        served = f"--engine openai --endpoint http://127.0.0.1:{port}/v1 --concurrency 4".split()
        door.ok(*words, *served, "--out", tmp_path / "served")
    door.ok(*words, *f"--out {tmp_path}/local --device cpu".split())
    for theirs, ours in zip(rows_of(tmp_path / "served"), rows_of(tmp_path / "local"), strict=True):
        assert (theirs["response_ids"], theirs["finish_reason"]) == (
            ours["response_ids"],
            ours["finish_reason"],
        )


@pytest.mark.slow
def test_the_commands_of_the_page_on_data_work_in_order(tmp_path, monkeypatch, door):
    """Two servers of this test stand in for the page's."""
    monkeypatch.chdir(tmp_path)
    Path("out/demo/prompts").mkdir(parents=True)
    Path("out/demo/pair").symlink_to(ROOT / "draftsmith/demo/pair")
    text = "If the file {} is not found, an error is raised and the caller must decide what to do. "
    rows = [json.dumps({"id": f"row {i}", "text": text.format(i) * 4}) for i in range(24)]
    Path("out/demo/prompts/prose.train.jsonl").write_text("\n".join(rows) + "\n")
    Path("out/demo/prompts/prose.jsonl").write_text(
        json.dumps({"text": "Another text altogether. " * 16}) + "\n"
    )
    tokenizer = load_tokenizer("out/demo/pair/target")
    with serving("vllm", tokenizer) as one, serving("llama.cpp", tokenizer) as other:
        for line in commands((ROOT / "docs" / "data.md").read_text(encoding="utf-8")):
            line = line.replace("http://localhost:8000/v1", one.url).replace(
                "http://localhost:8001/v1", other.url
            )
            if line.startswith("draftsmith "):
                code, _, err = door(*line.split()[1:])
            else:
                code, err = run_line(line)
            assert code == 0, f"{line}\n{err}"
        assert len(one.answered) > 20 and len(other.answered) > 20
    decoded = json.loads(Path("out/served/decoded.jsonl").read_text().splitlines()[0])
    assert decoded["stats"]["accepted"] > 0
    alone, two = Path("out/local/data"), Path("out/local/two")
    parts = {path.name: path.read_bytes() for path in alone.glob("*.parquet")}
    assert parts == {path.name: path.read_bytes() for path in two.glob("*.parquet")}
