"""Distilling from servers: every row once and as the server drew it, whatever servers do meanwhile."""

import json
import os
import socket
import subprocess
import threading
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

import httpx
import pyarrow.parquet as pq
import pytest

import distill.engines.endpoint as endpoint_module
import distill.engines.openai as openai_module
from draftsmith_core.sampling import row_seed
from draftsmith_core.tokenization import Tokenizer, load_tokenizer
from tests.serving import EOS, Server, answer_of, serving, wait_until

Door = Callable[..., tuple[int, str, str]]
Spawn = Callable[..., Any]
PROMPTS = 40


@pytest.fixture
def tokenizer(target_dir: str) -> Tokenizer:
    return load_tokenizer(target_dir)


@pytest.fixture
def words(target_dir: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> list[str]:
    monkeypatch.chdir(tmp_path)
    monkeypatch.delenv("OPENAI_API_KEY", raising=False)
    monkeypatch.setattr(endpoint_module, "BACKOFF_S", (0.001, 0.005))
    monkeypatch.setattr(endpoint_module, "_REST_S", (0.002, 0.01))
    rows = [{"prompt": f"A draft model {number}", "id": f"p{number}"} for number in range(PROMPTS)]
    Path("prompts.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    command = f"distill --engine openai --target {target_dir} --prompts prompts.jsonl --out set --num_samples 2"
    return f"{command} --max_new_tokens 10 --part_rows 20 --seed 3 --endpoint".split()


@pytest.fixture
def serve(tokenizer: Tokenizer) -> Iterator[Callable[..., Server]]:
    with ExitStack() as stack:
        yield lambda kind="vllm", **options: stack.enter_context(serving(kind, tokenizer, **options))


def rows_of(directory: Path = Path("set")) -> list[dict[str, Any]]:
    return [row for path in sorted(directory.glob("part-*.parquet")) for row in pq.read_table(path).to_pylist()]


def manifest() -> dict[str, Any]:
    found: dict[str, Any] = json.loads(Path("set/manifest.json").read_text())
    return found


def check_rows(rows: list[dict[str, Any]], prompts: int = PROMPTS) -> None:
    """Every row is there once, with the answer that the server gave to its prompt and seed."""
    assert [(row["prompt_id"], row["sample_index"]) for row in rows] == [
        (f"p{number}", sample) for number in range(prompts) for sample in range(2)
    ]
    assert len({row["id"] for row in rows}) == len(rows)
    for row in rows:
        assert row["seed"] == row_seed(3, f"{row['prompt_id']}/{row['sample_index']}")
        ids, reason = answer_of(row["prompt_ids"], row["seed"] & 0x7FFFFFFF, 10)
        assert (row["response_ids"], row["finish_reason"]) == (ids, reason)
    assert {row["finish_reason"] for row in rows} == {"stop", "length"}


@pytest.mark.parametrize("kind", ["vllm", "llama.cpp", "text"])
def test_rows_are_what_the_server_drew(words: list[str], door: Door, serve: Callable[..., Server], kind: str) -> None:
    server = serve(kind)
    code, out, err = door(*words, server.url)
    assert code == 0, err
    rows = rows_of()
    if kind != "text":
        check_rows(rows)
    assert len({row["id"] for row in rows}) == 80
    made = manifest()
    assert made["counts"] | {"rows": 0} == {
        "prompts_read": 40, "prompts_done": 40, "prompts_skipped": 0, "prompts_failed": 0, "rows": 0, "rows_dropped": 0
    }  # fmt: skip
    assert made["identity"]["served_model"] == "target"
    assert server.url not in json.dumps(made["identity"])
    assert not list(Path("set").glob(".*"))
    if kind == "text":
        assert "takes and gives text" in err
        assert {row["tokens_from"] for row in rows} <= {"text", "text_differs"}
        assert made["tokens_from"]["text"] > 20 and sum(made["tokens_from"].values()) == 80
        differing = made["tokens_from"].get("text_differs", 0)
        assert (f"{differing} rows came as text" in out) == (differing > 0)
    else:
        assert err.splitlines() == [line for line in err.splitlines() if line.startswith("distill: ")]
        assert made["tokens_from"] == {"target": 80}
    sampling = server.bodies[-1]
    assert (sampling["temperature"], sampling["top_p"], sampling["min_p"]) == (1.0, 1.0, 0.0)
    if kind == "llama.cpp":
        assert sampling["samplers"][0] == "temperature" and sampling["top_k"] == 0


def test_text_that_does_not_come_back_is_counted(
    words: list[str], door: Door, serve: Callable[..., Server], tokenizer: Tokenizer
) -> None:
    """The served model draws tokens that the tokenizer would never choose for their text, so that some rows differ."""
    server = serve("text")
    code, out, err = door(*words, server.url)
    assert code == 0, err
    for row in rows_of():
        drawn, _ = answer_of(row["prompt_ids"], row["seed"] & 0x7FFFFFFF, 10)
        text = tokenizer.decode([token for token in drawn if token != EOS])
        again = tokenizer(text, add_special_tokens=False)["input_ids"]
        assert [token for token in row["response_ids"] if token != EOS] == again
        same = abs(len(drawn) - len(again) - (drawn[-1] == EOS)) == 0
        assert row["tokens_from"] == ("text" if same else "text_differs")


def test_a_server_of_openai_s_own_kind_gets_only_its_own_keys(
    words: list[str], door: Door, serve: Callable[..., Server]
) -> None:
    server = serve("text", strict_keys=True)
    assert door(*words, server.url)[0] == 0
    assert not {"top_k", "min_p", "return_token_ids", "repetition_penalty"} & server.bodies[-1].keys()
    code, _, err = door(*words, server.url, "--out", "other", "--top_k", 7)
    assert code == 2
    assert err.strip().splitlines()[-1].endswith("does not take top_k; set it to its neutral value")
    assert not Path("other").exists()


def test_troubles_that_pass_cost_no_row(words: list[str], door: Door, serve: Callable[..., Server]) -> None:
    """Every second request goes wrong when it is asked first, and again, in each of the ways that servers have."""
    wrong = [429, "half", 500, "garbage", 503, "reset", 408, 502]
    server = serve()

    def misbehave(number: int) -> int | str | None:
        body = server.bodies[number]
        tries = [each["seed"] for each in server.bodies[:number]].count(body["seed"])
        return wrong[(body["seed"] // 2 + tries) % 8] if body["seed"] > 4 and body["seed"] % 2 and tries < 2 else None

    server.misbehave = misbehave
    code, _, err = door(*words, server.url)
    assert code == 0, err
    check_rows(rows_of())
    # Nothing that was answered is asked again: each (prompt, seed) was answered once, but for the trial requests.
    asked = [each for each in server.answered if json.loads(each)[1] > 4]
    assert len(asked) == len(set(asked)) == 80


def test_rows_that_a_server_refuses_are_failed_with_their_reasons(
    words: list[str], door: Door, serve: Callable[..., Server]
) -> None:
    refused = {7, 20}
    server = serve("vllm")
    server.misbehave = lambda number: (
        422 if any(tuple(server.bodies[number]["prompt"]) == ids for ids in prompts) else None
    )
    tokenizer = server.tokenizer
    prompts = {tuple(tokenizer(f"A draft model {number}")["input_ids"]) for number in refused}
    code, out, err = door(*words, server.url)
    assert code == 0, err
    assert "38 done, 0 skipped, 2 failed" in out
    assert "2 failed: status 422" in out
    assert not any(server.url.encode() in path.read_bytes() for path in Path("set").iterdir() if path.suffix != ".json")
    errors = [json.loads(line) for line in Path("set/errors.jsonl").read_text().splitlines()]
    assert [(line["row"], line["outcome"]) for line in errors] == [(8, "failed"), (21, "failed")]
    rows = rows_of()
    assert len(rows) == 76 and manifest()["counts"]["prompts_failed"] == 2
    assert {f"p{number}" for number in refused}.isdisjoint(row["prompt_id"] for row in rows)


def test_a_row_that_always_breaks_the_server_does_not_stop_the_others(
    words: list[str], door: Door, serve: Callable[..., Server]
) -> None:
    server = serve("vllm")
    poison = tuple(server.tokenizer("A draft model 3")["input_ids"])
    server.misbehave = lambda number: "reset" if tuple(server.bodies[number]["prompt"]) == poison else None
    code, out, err = door(*words, server.url)
    assert code == 0, err
    assert "39 done, 0 skipped, 1 failed" in out and "tried 8 times" in out


def test_one_of_two_servers_dies_and_comes_back(
    words: list[str], door: Door, serve: Callable[..., Server], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The second answers ten requests, then nothing for a while; the first goes on alone meanwhile."""
    first, second = serve(), serve()
    second.misbehave = lambda number: "reset" if 10 <= number < 16 else None
    first.misbehave = lambda number: wait_until(lambda: len(second.bodies) > 16) if number > 40 else None
    code, _, err = door(*words, first.url, second.url)
    assert code == 0, err
    check_rows(rows_of())
    assert len(second.bodies) > 16 and len(first.bodies) > 20


def test_a_server_that_is_down_at_the_start_is_said_and_used_later(
    words: list[str], door: Door, serve: Callable[..., Server], tokenizer: Tokenizer
) -> None:
    up = serve()
    down = Server("vllm", tokenizer)
    down.server_close()
    code, _, err = door(*words, up.url, down.url)
    assert code == 0, err
    assert f"draftsmith distill: {down.url}: does not answer" in err and "it is tried again later" in err
    check_rows(rows_of())
    code, _, err = door(*words, down.url, "--out", "other")
    assert code == 2
    assert "endpoint: none answers" in err and "Traceback" not in err
    assert not Path("other").exists()


def test_when_all_servers_are_gone_what_was_answered_stays(
    words: list[str], door: Door, serve: Callable[..., Server], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(openai_module, "PATIENCE_S", 0.3)
    server = serve(misbehave=lambda number: "reset" if number >= 30 else None)
    code, _, err = door(*words, server.url, "--timeout_s", 2, "--part_rows", 1000)
    assert code == 1
    assert "no server has answered for" in err and err.strip().endswith("the same command continues")
    asked = [each for each in server.answered if json.loads(each)[1] > 4]
    assert len(asked) == 25
    server.misbehave = lambda number: None
    assert door(*words, server.url, "--part_rows", 1000)[0] == 0
    check_rows(rows_of())
    asked = [each for each in server.answered if json.loads(each)[1] > 4]
    assert len(asked) == len(set(asked)) == 80


def test_a_server_that_never_answers_is_given_up_on(words: list[str], door: Door, serve: Callable[..., Server]) -> None:
    server = serve(misbehave=lambda number: "never" if number == 12 else None)
    code, _, err = door(*words, server.url, "--timeout_s", 2)
    assert code == 0, err
    check_rows(rows_of())


@pytest.mark.parametrize("kind", ["vllm", "text"])
def test_a_server_that_does_not_sample_is_found_out(
    words: list[str], door: Door, serve: Callable[..., Server], kind: str
) -> None:
    server = serve(kind, samples=False)
    code, _, err = door(*words, server.url)
    assert code == 2
    assert f"{server.url}: does not sample: 4 seeds at temperature 1.5 gave one answer" in err
    assert not Path("set").exists()
    assert door(*words, server.url, "--temperature", 0)[0] == 0


def test_budgets_stop_and_a_larger_one_continues(words: list[str], door: Door, serve: Callable[..., Server]) -> None:
    server = serve()
    code, _, err = door(*words, server.url, "--max_requests", 30)
    assert code == 1
    assert "max_requests: all 30 are spent; raise it, and the same command continues" in err
    assert len(server.answered) == 5 + 30
    code, _, err = door(*words, server.url, "--max_tokens", 200)
    assert code == 1 and "max_tokens: " in err
    assert 200 <= int(err.partition("max_tokens: ")[2].split()[0]) < 200 + 8 * 40
    assert door(*words, server.url, "--max_requests", 80)[0] == 0
    check_rows(rows_of())
    asked = [each for each in server.answered if json.loads(each)[1] > 4]
    assert len(asked) == len(set(asked)) == 80


def test_the_key_is_from_the_environment_and_nowhere_else(
    words: list[str], door: Door, serve: Callable[..., Server], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Law 9."""
    server = serve(key="sk-secret")
    code, _, err = door(*words, server.url)
    assert code == 2
    assert "put the right key into OPENAI_API_KEY" in err or "it wants a key" in err or "status 401" in err
    monkeypatch.setenv("MY_KEY", "sk-secret")
    code, out, err = door(*words, server.url, "--api_key_env", "MY_KEY")
    assert code == 0, err
    for path in Path("set").iterdir():
        assert b"sk-secret" not in path.read_bytes()
    assert "sk-secret" not in out + err


def test_kept_answers_that_were_damaged_are_named(words: list[str], door: Door, serve: Callable[..., Server]) -> None:
    server = serve()
    assert door(*words, server.url, "--max_requests", 9)[0] == 1
    kept = Path("set/.part-00000.answers.jsonl")
    whole = kept.read_bytes()
    for damage in (b"[[0", b"7", b"[1, 2, 3]"):
        kept.write_bytes(damage + b"\n" + whole)
        code, _, err = door(*words, server.url)
        assert code == 2
        said = f"{kept}:1: was damaged; delete the file, and its rows are asked again"
        assert err.strip().splitlines()[-1] == f"draftsmith distill: {said}"
    kept.unlink()
    assert door(*words, server.url)[0] == 0
    check_rows(rows_of())


@pytest.mark.parametrize("value", ["sk-sëcret", "sk-sec\nret"])
def test_what_can_be_no_key_is_not_shown(
    words: list[str], door: Door, serve: Callable[..., Server], monkeypatch: pytest.MonkeyPatch, value: str
) -> None:
    """Law 9. A line break behind a key, which files of keys end with, is not part of it."""
    server = serve(key="sk-secret")
    monkeypatch.setenv("OPENAI_API_KEY", value)
    code, out, err = door(*words, server.url)
    assert (code, out) == (2, "")
    assert err.strip() == "draftsmith distill: api_key_env: OPENAI_API_KEY holds what no key can; set it again"
    monkeypatch.setenv("OPENAI_API_KEY", "sk-secret\n")
    assert door(*words, server.url)[0] == 0


# What no answer can be, to the rows p0, p1, ... each time that they are asked.
_NONE: list[Any] = [
    b"<html>Sign in</html>",
    b'data: {"choices": [{"text": "a"}]}\n\ndata: [DONE]\n\n',
    b"[" * 100_000,
    [],
    {"choices": [], "usage": []},
    {"choices": [{"text": ["a"], "token_ids": "ab", "finish_reason": "stop"}]},
    {"choices": [{"text": None, "token_ids": None, "finish_reason": "stop"}]},
    {"choices": [{"text": "a", "token_ids": [40], "finish_reason": "abort"}]},
    {"choices": [{"text": "a", "token_ids": [40], "finish_reason": "stop"}], "usage": [1]},
    {"choices": [{"text": "a", "token_ids": [40], "finish_reason": "stop"}], "usage": {"total_tokens": "many"}},
]
# These only where a server gives ids.
_NO_IDS = [{"choices": [{"token_ids": [40.5], "finish_reason": "stop"}]}]
_NO_TOKENS = [{"choices": [{"token_ids": ids, "finish_reason": "stop"}]} for ids in ([40, 2**40], [-1], [40] * 12)]


@pytest.mark.parametrize("kind", ["vllm", "text"])
def test_what_is_no_answer_costs_its_row_alone(
    words: list[str], door: Door, serve: Callable[..., Server], kind: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(openai_module, "ATTEMPTS", 2)
    server = serve(kind)
    wrong = [*_NONE, *([*_NO_IDS, *_NO_TOKENS] if kind == "vllm" else [])]
    texts = [f"A draft model {number}" for number in range(len(wrong))]
    prompts = texts if kind == "text" else [list(server.tokenizer(text)["input_ids"]) for text in texts]

    def misbehave(number: int) -> bytes | None:
        prompt = server.bodies[number]["prompt"]
        if prompt not in prompts:
            return None
        body = wrong[prompts.index(prompt)]
        return body if isinstance(body, bytes) else json.dumps(body).encode()

    server.misbehave = misbehave
    code, out, err = door(*words, server.url)
    assert code == 0, err
    assert f"of 40 prompts {40 - len(wrong)} done, 0 skipped, {len(wrong)} failed" in out
    errors = [json.loads(line) for line in Path("set/errors.jsonl").read_text().splitlines()]
    assert [line["row"] for line in errors] == list(range(1, len(wrong) + 1))
    for line in errors[len(_NONE) + len(_NO_IDS) :]:
        assert line["reason"].startswith("gave ") and "tried" not in line["reason"]


def test_a_server_that_sends_a_byte_now_and_then_is_given_up_on(
    words: list[str], door: Door, serve: Callable[..., Server]
) -> None:
    server = serve(misbehave=lambda number: "drops" if number == 12 else None)
    code, _, err = door(*words, server.url, "--timeout_s", 2)
    assert code == 0, err
    check_rows(rows_of())


@pytest.mark.parametrize("status", [302, 402, 404])
def test_a_server_that_serves_the_target_no_more_costs_no_row(
    words: list[str], door: Door, serve: Callable[..., Server], status: int
) -> None:
    server = serve(misbehave=lambda number: status if 30 <= number < 40 else None)
    code, _, err = door(*words, server.url)
    assert code == 0, err
    check_rows(rows_of())


def test_an_address_that_leads_elsewhere_is_named(words: list[str], door: Door, serve: Callable[..., Server]) -> None:
    server = serve(moved_to="https://elsewhere")
    code, _, err = door(*words, server.url)
    assert code == 2 and "Traceback" not in err
    assert "leads to https://elsewhere/v1/models; name that address" in err.splitlines()[-1]
    assert not Path("set").exists()


def test_a_server_that_refuses_the_temperature_of_the_trial(
    words: list[str], door: Door, serve: Callable[..., Server]
) -> None:
    server = serve()
    server.misbehave = lambda number: 400 if server.bodies[number]["temperature"] > 1 else None
    code, _, err = door(*words, server.url)
    assert code == 2 and len(err.strip().splitlines()) == 1
    assert "status 400" in err and "refuses to draw as is asked for" in err


def test_a_mixture_of_temperatures_is_asked_for(words: list[str], door: Door, serve: Callable[..., Server]) -> None:
    server = serve()
    code, _, err = door(*words, server.url, "--temperatures", "0.5:1", "1.0:1")
    assert code == 0, err
    asked = {(tuple(body["prompt"]), body["seed"]): body["temperature"] for body in server.bodies[5:]}
    rows = rows_of()
    for row in rows:
        assert row["temperature"] == asked[tuple(row["prompt_ids"]), row["seed"] & 0x7FFFFFFF]
    assert {row["temperature"] for row in rows} == {0.5, 1.0}


def test_servers_of_two_models_are_not_mixed(words: list[str], door: Door, serve: Callable[..., Server]) -> None:
    one, other = serve(), serve(model="another")
    code, _, err = door(*words, one.url, other.url)
    assert code == 2
    assert f"{other.url}: serves another, and {one.url} target" in err


def test_concurrency_is_bounded_and_grows(words: list[str], door: Door, serve: Callable[..., Server]) -> None:
    server = serve()
    server.misbehave = lambda number: wait_until(lambda: server.most_active >= 3) if number >= 8 else None
    assert door(*words, server.url, "--concurrency", 3)[0] == 0
    assert server.most_active == 3


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ([], "endpoint: --engine openai needs at least one"),
        (["--endpoint", "localhost:8000"], "is no URL"),
        (["--endpoint", "http://h:99999/v1"], "is no URL"),
        (["--endpoint", "http://[::1/v1"], "is no URL"),
        (["--endpoint", "http://h h/v1"], "is no URL"),
        (["--endpoint", "http://me:pass@h h/v1"], "'h h/v1' is no URL"),
        (["--endpoint", "http://me:pass@host/v1"], "holds a password"),
        (["--endpoint", "http://h/v1", "http://h/v1"], "names a server twice"),
        (["--endpoint", "http://h/v1", "--teacher_top_k", "4"], "teacher_top_k: servers give no whole distributions"),
        (["--endpoint", "http://h/v1", "--max_requests", "0"], "max_requests: 0 must be at least 1"),
        (["--endpoint", "http://h/v1", "--timeout_s", "0"], "timeout_s: 0.0 must be above 0"),
    ],
)
def test_options_that_cannot_be(target_dir: str, door: Door, options: list[str], said: str) -> None:
    command = ["distill", "--engine", "openai", "--target", target_dir, "--prompts", "p.jsonl", "--out", "o"]
    code, out, err = door(*command, *options)
    assert (code, out) == (2, "")
    assert said in err and "pass@" not in err and len(err.strip().splitlines()) == 1
    code, _, err = door("distill", "--target", target_dir, "--prompts", "p", "--out", "o", "--endpoint", "http://h/v1")
    assert code == 2 and "endpoint: is for servers; add --engine openai" in err


@pytest.mark.slow
def test_the_commands_of_the_page_on_data_work_in_order(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, door: Door
) -> None:
    """From servers to a trained draft that decodes, and from this process in one and in two processes; two servers
    stand for the page's.
    """
    from tests.test_docs import ROOT, commands, run_apart

    page = (ROOT / "docs" / "data.md").read_text(encoding="utf-8")
    (tmp_path / "out/demo/prompts").mkdir(parents=True)
    (tmp_path / "out/demo/pair").symlink_to(ROOT / "draftsmith/demo/pair")
    monkeypatch.chdir(tmp_path)
    text = "If the file {} is not found, an error is raised and the caller must decide what to do. "
    rows = [json.dumps({"id": f"row {i}", "text": text.format(i) * 4}) for i in range(24)]
    Path("out/demo/prompts/prose.train.jsonl").write_text("\n".join(rows) + "\n")
    Path("out/demo/prompts/prose.jsonl").write_text(
        json.dumps({"text": "Another text altogether, not to be trained on. " * 8})
    )
    tokenizer = load_tokenizer("out/demo/pair/target")
    with serving("vllm", tokenizer) as one, serving("llama.cpp", tokenizer) as other:
        for line in commands(page):
            line = line.replace("http://localhost:8000/v1", one.url).replace("http://localhost:8001/v1", other.url)
            if line.startswith("draftsmith "):
                code, said, err = door(*line.split()[1:])
                assert code == 0, f"{line}\n{err}"
            else:
                code, said = run_apart(line)
                assert code == 0, f"{line}\n{said}"
        assert len(one.answered) > 20 and len(other.answered) > 20
    assert (tmp_path / "out/served/ce/model.safetensors").exists()
    assert json.loads(Path("out/served/decoded.jsonl").read_text().splitlines()[0])["stats"]["accepted"] > 0
    alone, two = tmp_path / "out/local/data", tmp_path / "out/local/two"
    assert [path.name for path in sorted(alone.glob("*.parquet"))] == [
        path.name for path in sorted(two.glob("*.parquet"))
    ]
    assert all((two / path.name).read_bytes() == path.read_bytes() for path in alone.glob("*.parquet"))


# As benchmarks/peers.py has them: the program, and the demo's target as a GGUF file.
LLAMA_SERVER, LLAMA_GGUF = os.environ.get("LLAMA_SERVER", ""), os.environ.get("LLAMA_GGUF", "")


@contextmanager
def llama_server() -> Iterator[tuple[subprocess.Popen[bytes], str]]:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    command = [LLAMA_SERVER, "-m", LLAMA_GGUF, "--port", str(port), "-t", "1", "-c", "2048", "-np", "4"]
    server = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    try:
        wait_until(lambda: _healthy(f"http://127.0.0.1:{port}/health"))
        yield server, f"http://127.0.0.1:{port}/v1"
    finally:
        server.kill()
        server.wait()


def _healthy(url: str) -> bool:
    try:
        return httpx.get(url, trust_env=False).status_code == 200
    except httpx.HTTPError:
        return False


@pytest.mark.slow
@pytest.mark.skipif(not (LLAMA_SERVER and LLAMA_GGUF), reason="LLAMA_SERVER and LLAMA_GGUF do not name llama-server")
def test_llama_server_draws_what_this_process_draws(tmp_path: Path, door: Door) -> None:
    """The demo's target on two real servers, one of which is killed in the middle: its greedy answers are our own."""
    target = Path(__file__).parents[1] / "draftsmith" / "demo" / "pair" / "target"
    source = tmp_path / "p.jsonl"
    source.write_text("".join(json.dumps({"prompt": f"If the lock {number} is not"}) + "\n" for number in range(60)))
    words = ["distill", "--target", target, "--prompts", source, "--max_new_tokens", 24, "--temperature", 0]
    kept = tmp_path / "served" / ".part-00000.answers.jsonl"
    with llama_server() as (_, one), llama_server() as (dying, other):

        def kill() -> None:
            wait_until(lambda: kept.exists() and kept.read_bytes().count(b"\n") > 4)
            dying.kill()

        thread = threading.Thread(target=kill, daemon=True)
        thread.start()
        served = ["--engine", "openai", "--endpoint", one, other, "--concurrency", 4]
        code, _, err = door(*words, *served, "--out", tmp_path / "served")
        assert code == 0, err
        thread.join()
    assert door(*words, "--out", tmp_path / "local", "--device", "cpu")[0] == 0
    for theirs, ours in zip(rows_of(tmp_path / "served"), rows_of(tmp_path / "local"), strict=True):
        assert (theirs["response_ids"], theirs["finish_reason"]) == (ours["response_ids"], ours["finish_reason"])
