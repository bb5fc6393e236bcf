"""`align --from_log`: one round of adaptation, which switches the served draft only for a better one, killed or not."""

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

import draftsmith as ds
from draftsmith.alignment.switch import exchange, recover, weights_mark
from draftsmith.alignment.traffic import Logged, divided_by_time, read_log
from draftsmith_core.tokenization import load_tokenizer
from tests.test_align import KILL, UNDRAWN

pytestmark = pytest.mark.usefixtures("undrawn")
Door = Callable[..., tuple[int, str, str]]
SMALL = "--distill.max_new_tokens 8 --distill.general_texts 6 --train.steps 12 --train.rows_per_step 4".split()
SMALL += "--train.batch_size 4 --train.save_every 4 --train.eval_every 6 --train.heldout_fraction 0.25".split()
SMALL += "--train.lr 0.01 --eval.max_new_tokens 6 --eval.speed_prompts 0 --eval.bootstrap 100 --device cpu".split()
SMALL += "--eval.tree chain:1".split()
# What a tiny draft meets after twelve steps, and what none does.
MET, NEVER = ["--require", "gain[recent] > -1"], ["--require", "gain[recent] > 0.99"]
SECRET = "4111-2222"


def row(number: int, **more: Any) -> dict[str, Any]:
    answer = {"text": " over the lazy dog and the dog does not mind"[: 9 + number % 20], "finish_reason": "stop"}
    response = {"created": 1_700_000_000 + number, "choices": [answer]}
    return {"request": {"prompt": f"The quick brown fox jumps {number} times"}, "response": response} | more


@pytest.fixture(scope="module")
def site(target_dir: str, draft_dir: str, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A directory with a log whose rows are not in the order of time, the draft that is served, and a baseline."""
    root = tmp_path_factory.mktemp("site")
    shutil.copytree(draft_dir, root / "served")
    rows = [row(number) for number in range(29, -1, -1)]
    rows.insert(3, row(40, request={"prompt": f"My card is {SECRET} and I"}))
    rows.insert(9, {"request": {"prompt": "No answer"}})
    (root / "log.jsonl").write_text("".join(json.dumps(each) + "\n" for each in rows))
    for name in ("own", "other"):
        prompts = [{"prompt": f"A draft model {name} proposes {i} tokens"} for i in range(3)]
        (root / f"{name}.jsonl").write_text("".join(json.dumps(each) + "\n" for each in prompts))
    sets = {kind: [f"{name}={root / name}.jsonl"] for kind, name in (("id", "own"), ("ood", "other"))}
    small: dict[str, Any] = {"tree": ["chain:1"], "speed_prompts": 0, "max_new_tokens": 6, "bootstrap": 100}
    models = {"target": target_dir, "draft": [f"base={root / 'served'}"], "device": "cpu"}
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("eval.evaluate.write_report", lambda results: results.directory)
        ds.evaluate(ds.EvalConfig(out=str(root / "eval"), **models, **sets, **small))  # type: ignore[arg-type]
    return root


@pytest.fixture
def here(site: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A copy of the site to work in."""
    shutil.copytree(site, tmp_path / "site")
    monkeypatch.chdir(tmp_path / "site")
    return tmp_path / "site"


WORDS = ["align", "--from_log", "log.jsonl", "--draft", "served", "--baseline", "eval/results.json", *SMALL]


def test_a_better_draft_is_promoted_once_and_can_be_rolled_back(here: Path, door: Door) -> None:
    before = weights_mark(here / "served")
    code, out, err = door(*WORDS, *MET, "--redact", r"\d{4}-\d{4}", "--json")
    assert code == 0, err
    found = json.loads(out.splitlines()[-1])
    assert found["promoted"] and weights_mark(here / "served") != before
    assert weights_mark(here / "served.previous") == before
    lineage = json.loads((here / "served" / "draftsmith.json").read_text())["lineage"]
    assert [(each["round"], each["parent"]) for each in lineage] == [(found["round"], before)]
    # The latest fifth of the log is measured on, and is not trained on; other sets are the baseline's.
    made = here / "served.rounds" / found["round"]
    recent = [json.loads(line)["prompt"] for line in (made / "prompts" / "recent.jsonl").read_text().splitlines()]
    assert sorted(recent) == [f"The quick brown fox jumps {i} times" for i in range(24, 30)]
    assert len((made / "prompts" / "train.jsonl").read_text().splitlines()) == found["answers"] == 24
    results = ds.Results.load(made / "eval")
    assert {name: results.kind(name) for name in results.domains()} == {"recent": "id", "own": "id", "other": "ood"}
    # What was left out is counted, and none of it is anywhere.
    assert "1 rows left out: matches a pattern of --redact" in err and "1 rows left out: " in err
    everything = [path for path in here.rglob("*") if path.is_file() and path.name != "log.jsonl"]
    assert len(everything) > 20 and not [path for path in everything if SECRET.encode() in path.read_bytes()]
    card = (here / "served" / "README.md").read_text()
    assert "quick brown" not in card + out + err
    # The same call is the same round: nothing is made anew.
    marks = {path: path.stat().st_mtime_ns for path in here.rglob("*") if path.is_file()}
    code, again, err = door(*WORDS, *MET, "--redact", r"\d{4}-\d{4}", "--json")
    assert code == 0 and json.loads(again.splitlines()[-1]) == found and "this round is done" in err
    assert {path: path.stat().st_mtime_ns for path in here.rglob("*") if path.is_file()} == marks
    # Back, and not further.
    code, _, err = door("align", "--rollback", "--draft", "served")
    assert code == 0 and weights_mark(here / "served") == before, err
    code, _, err = door("align", "--rollback", "--draft", "served")
    assert code == 2 and "nothing to go back to" in err
    assert weights_mark(here / "served") == before


def test_a_draft_that_misses_a_requirement_is_not_promoted_and_the_reason_is_said(here: Path, door: Door) -> None:
    before = {path: path.read_bytes() for path in (here / "served").rglob("*") if path.is_file()}
    code, out, err = door(*WORDS, *NEVER, "--json")
    assert code == 0, err
    found = json.loads(out.splitlines()[-1])
    assert not found["promoted"] and "required gain[recent] > 0.99: jsd-balanced on recent" in found["because"][0]
    assert "not promoted" in out and not (here / "served.previous").exists()
    assert {path: path.read_bytes() for path in (here / "served").rglob("*") if path.is_file()} == before


AFTER = """
import os, signal
import draftsmith.alignment.rounds as module
real = module.exchange
def dying(*words):
    real(*words)
    os.kill(os.getpid(), signal.SIGKILL)
module.exchange = dying
"""
# From the first instant to the last: (module, name in it, at which call) dies before it, AFTER behind the switch.
KILLS = [
    *(
        KILL.format(owner=owner, name=name, at=1)
        for owner, name in (
            ("draftsmith.alignment.rounds", "read_log"),
            ("draftsmith.alignment.rounds", "align"),
            ("draftsmith.alignment.stages", "train"),
            ("draftsmith.alignment.stages", "evaluate"),
            ("draftsmith.alignment.rounds", "write_json_atomic"),
            ("draftsmith.alignment.rounds", "exchange"),
        )
    ),
    AFTER,
    KILL.format(owner="draftsmith.alignment.rounds", name="write_json_atomic", at=1),
]


def served(root: Path) -> dict[str, bytes]:
    """Every file of the served draft and of the one before it."""
    return {
        str(path.relative_to(root)): path.read_bytes()
        for name in ("served", "served.previous")
        for path in (root / name).rglob("*")
        if path.is_file()
    }


@pytest.mark.slow
def test_killed_anywhere_a_whole_draft_is_served_and_the_same_call_ends_the_round(
    here: Path, spawn: Callable[..., Any], tmp_path: Path
) -> None:
    whole = tmp_path / "whole" / "site"
    shutil.copytree(here, whole)
    code, _, err = spawn(*WORDS, *MET, cwd=whole, patch=UNDRAWN).wait()
    assert code == 0, err
    old, new = weights_mark(here / "served"), weights_mark(whole / "served")
    assert old != new
    for patch in KILLS:
        code, _, err = spawn(*WORDS, *MET, cwd=here, patch=UNDRAWN + patch).wait()
        assert code == -9, (patch, err)
        assert weights_mark(here / "served") in (old, new) and (here / "served" / "config.json").is_file()
    code, _, err = spawn(*WORDS, *MET, cwd=here, patch=UNDRAWN).wait()
    assert code == 0 and "Traceback" not in err, err
    assert served(here) == served(whole)


def test_directories_change_places_with_and_without_the_kernel(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    first, second = tmp_path / "first", tmp_path / "second"

    def fill() -> None:
        for path in (first, second):
            shutil.rmtree(path, ignore_errors=True)
            path.mkdir()
            (path / "name").write_text(path.name)

    for kernel in (True, False):
        if not kernel:
            monkeypatch.setattr("draftsmith.alignment.switch.ctypes.CDLL", lambda *words, **more: object())
        fill()
        exchange(first, second)
        assert ((first / "name").read_text(), (second / "name").read_text()) == ("second", "first")
    # Killed between two renames: what had been moved away is put back.
    fill()
    second.rename(tmp_path / ".second.aside")
    recover(second)
    assert (second / "name").read_text() == "second" and not (tmp_path / ".second.aside").exists()


def log_of(path: Path, *rows: dict[str, Any]) -> str:
    path.write_text("".join(json.dumps(each) + "\n" for each in rows))
    return str(path)


def test_what_a_row_of_a_log_says(tmp_path: Path, target_dir: str) -> None:
    tokenizer = load_tokenizer(target_dir)
    ended, cut = row(1), row(0)
    cut["response"]["choices"][0]["finish_reason"] = "length"
    ids = {"prompt_ids": [0, 5, 6], "output_ids": [7, 8], "timestamp": "2023-11-14T22:13:22+00:00"}
    foreign = {"prompt_ids": [0], "output_ids": [99999], "time": 5}
    found, said = read_log(log_of(tmp_path / "log.jsonl", ended, cut, ids, foreign), tokenizer, [])
    assert [each.time for each in found] == [1_700_000_000.0, 1_700_000_001.0, 1_700_000_002.0]
    # An answer that ended by itself has the end token; one that was cut off, or that is logged as tokens, is as it is.
    assert [each.response_ids[-1] == tokenizer.eos_token_id for each in found] == [False, True, False]
    assert found[2].response_ids == (7, 8) and found[2].prompt_ids == (0, 5, 6)
    assert found[1].prompt == {"prompt": "The quick brown fox jumps 1 times"}
    assert len(said) == 1 and "ids that are not tokens of the target (row 4)" in said[0]
    # Without times the order is the file's, and that is said.
    del ids["timestamp"]
    found, said = read_log(log_of(tmp_path / "log.jsonl", ended, cut, ids), tokenizer, [])
    assert found[0].time == 1_700_000_001.0 and "in the order of the file" in said[-1]


def test_no_row_of_a_log_ends_a_round_and_none_is_told_of(tmp_path: Path, target_dir: str) -> None:
    """Rows that are broken in a way of their own are left out, with a reason that quotes nothing of them."""
    tokenizer = load_tokenizer(target_dir)
    ids = list(tokenizer.encode(f"call {SECRET} now"))
    rows: list[dict[str, Any]] = [
        row(1),
        row(2, request={"prompt": "half a character: \ud83d"}),
        {"prompt": "an answer of half a character", "response": "\udc00"},
        {"prompt_ids": ids, "output_ids": [5]},
        {"prompt_ids": [5], "output_ids": ids},
        row(3, created=True),
        row(4, created=float("nan")),
        {"prompt": "x", "response": {"choices": ["not an object"]}},
        {"messages": [{"role": "user", "content": 7}], "response": "x"},
    ]
    log = log_of(tmp_path / "log.jsonl", *rows)
    with open(log, "a") as file:
        file.write(json.dumps({"prompt": "deep"})[:-1] + ', "more": ' + "[" * 3_000 + "]" * 3_000 + "}\n")
    found, said = read_log(log, tokenizer, [SECRET])
    # `true` is no time; the one beside it is taken.
    assert [each.prompt["prompt"] for each in found] == [f"The quick brown fox jumps {i} times" for i in (1, 3)]
    text = "\n".join(said)
    assert "2 rows left out: matches a pattern of --redact" in text and "half of a surrogate pair" in text
    assert "key 'created' is no time" in text and "nested too deeply" in text and len(said) == 7
    assert SECRET not in text and "half a character:" not in text
    # What a template says of a turn may quote it.
    chat = load_tokenizer(target_dir)
    chat.chat_template = "{{ raise_exception('no role ' + messages[0].content) }}"
    said = read_log(log_of(tmp_path / "chat.jsonl", {"messages": [{"role": "user", "content": SECRET}]}), chat, [])[1]
    assert "chat template refuses it" in said[0] and SECRET not in said[0]


def test_a_log_of_several_models_is_said_to_be_one(tmp_path: Path, target_dir: str) -> None:
    tokenizer = load_tokenizer(target_dir)
    named = [row(number, model=f"m{number % 2}") for number in range(4)]
    named[2]["response"]["model"] = "m0"
    named[2]["model"] = "as it was asked for"
    assert "names 2 models" in read_log(log_of(tmp_path / "two.jsonl", *named), tokenizer, [])[1][0]
    assert read_log(log_of(tmp_path / "one.jsonl", *named[::2]), tokenizer, [])[1] == []


def test_tools_of_a_request_are_in_its_prompt(tmp_path: Path, target_dir: str) -> None:
    tokenizer = load_tokenizer(target_dir)
    tokenizer.chat_template = "{{ tools | length if tools else 0 }}{{ messages[0].content }}"
    asked = {"messages": [{"role": "user", "content": "a"}], "response": "b"}
    tools = [{"type": "function", "function": {"name": "f", "parameters": {}}}]
    found, _ = read_log(log_of(tmp_path / "log.jsonl", asked, asked | {"tools": tools}), tokenizer, [])
    assert found[0].prompt_ids != found[1].prompt_ids and found[1].prompt["tools"] == tools


def test_the_latest_prompts_are_measured_on_and_none_of_them_is_trained_on() -> None:
    rows = [Logged({"prompt": str(i)}, (i,), (1,), float(time)) for time, i in enumerate([1, 2, 3, 1, 4, 5, 5, 2])]
    earlier, recent = divided_by_time(rows, 0.5)
    assert [each.prompt_ids for each in earlier] == [(1,), (2,), (3,), (1,)]
    assert sorted(each.prompt_ids for each in recent) == [(4,), (5,)]


@pytest.mark.parametrize(
    ("options", "told"),
    [
        ({"from_log": "l"}, "needs --from_log LOG.jsonl and --baseline"),
        ({"rollback": True, "from_log": "l", "baseline": "b"}, "rollback: only switches the draft back"),
        ({"from_log": "l", "baseline": "b", "redact": ["("]}, r"redact: '\(' is no regular expression"),
        ({"from_log": "l", "baseline": "b", "require": []}, "require: is empty"),
        ({"from_log": "l", "baseline": "b", "require": ["gian > 0"]}, "gian"),
        ({"from_log": "l", "baseline": "b", "recent_fraction": 1.0}, "recent_fraction: 1.0"),
    ],
)
def test_options_that_mean_nothing_are_refused(options: dict[str, Any], told: str) -> None:
    with pytest.raises(ds.InputError, match=told):
        ds.AdaptConfig(draft="d", **options)


def test_what_cannot_be_used_leaves_the_served_draft_alone(here: Path, door: Door) -> None:
    before = served(here)
    for changed, told in (
        (["--from_log", "none.jsonl"], "--from_log none.jsonl: no such file"),
        (["--baseline", "none.json"], "none.json: no such file"),
        (["--draft", "none"], "--draft none: holds no draft"),
        (["--redact", "quick"], "leaves 1 answers to train on and 0 fresh prompts to measure on, too few"),
        (["--require", "gain[recnt] > 0"], "'recnt' is not measured; did you mean recent?"),
    ):
        code, _, err = door(*WORDS, *changed)
        assert code == 2 and told in err.splitlines()[-1] and "Traceback" not in err, err
    assert served(here) == before
    # A log that is too short leaves nothing, so that asking again every hour fills no disk.
    assert len(list(here.glob("served.rounds/*/start"))) <= 1 and not list(here.glob("served.rounds/*/jsd"))
