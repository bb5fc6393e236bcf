"""The change test by simulation: its false alarms, and how late it notices; and `eval --watch` on growing files."""

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

from draftsmith_core.errors import InputError
from eval import watch as watching
from eval.change_test import Band, ChangeTest

Floats = NDArray[np.float64]
STREAMS, RATE, MEAN = 1000, 0.05, 0.55


def _answers(rng: np.random.Generator, mean: float, shape: tuple[int, ...]) -> Floats:
    """Mean acceptance of answers: Beta distributed, with the spread of real ones (a standard deviation of 0.12)."""
    total = mean * (1 - mean) / 0.12**2 - 1
    return rng.beta(mean * total, (1 - mean) * total, shape)


def _bands(rng: np.random.Generator, prompts: int, streams: int) -> tuple[Floats, Floats]:
    bands = [Band.of(row, RATE) for row in _answers(rng, MEAN, (streams, prompts))]
    return np.array([band.low for band in bands]), np.array([band.high for band in bands])


def _run(test: ChangeTest, streams: Callable[[int], Floats], count: int) -> NDArray[np.int64]:
    """When each stream was called changed; 0 for never."""
    when = np.zeros(len(test.alarm_S), dtype=np.int64)
    for index in range(count):
        test.update(streams(index))
        when[(when == 0) & (test.alarm_S != 0)] = index + 1
    return when


@pytest.mark.parametrize("prompts", [16, 64, 512])
def test_streams_that_stay_at_home_are_called_changed_no_more_often_than_stated(
    prompts: int, record_property: Callable[[str, object], None]
) -> None:
    """Each stream has a baseline of its own, so that a band that misses the true mean counts against the rate too."""
    rng = np.random.default_rng(prompts)
    test = ChangeTest(*_bands(rng, prompts, STREAMS), RATE)
    alarms = int((_run(test, lambda index: _answers(rng, MEAN, (STREAMS,)), 2000) > 0).sum())
    record_property("false alarms", f"{alarms} of {STREAMS} with {prompts} prompts in the baseline")
    assert alarms <= RATE * STREAMS


def test_answers_of_two_values_are_no_worse_than_any_other() -> None:
    """The bound assumes no distribution: here all of an answer is accepted or none of it."""
    rng = np.random.default_rng(1)
    level = np.full(STREAMS, MEAN)
    test = ChangeTest(level, level, RATE)
    alarms = (_run(test, lambda index: (rng.random(STREAMS) < MEAN).astype(float), 2000) > 0).sum()
    assert 0 < alarms <= RATE * STREAMS


@pytest.mark.parametrize(("shift", "within"), [(0.05, 1500), (0.1, 250), (0.2, 90)])
@pytest.mark.parametrize("sign", [-1, 1])
def test_a_change_is_noticed(
    shift: float, within: int, sign: int, record_property: Callable[[str, object], None]
) -> None:
    rng, before, streams = np.random.default_rng(7), 200, 200
    test = ChangeTest(*_bands(rng, 256, streams), RATE)

    def stream(index: int) -> Floats:
        return _answers(rng, MEAN + sign * shift * (index >= before), (streams,))

    when = _run(test, stream, before + within)
    delay = when[when > before] - before
    record_property("delay", f"shift {sign * shift}: median {np.median(delay):.0f}, 90 % {np.quantile(delay, 0.9):.0f}")
    assert len(delay) >= 0.95 * streams
    assert (test.alarm_S[when > before] == sign).all()
    # The estimated beginning is near the true one.
    assert abs(float(np.median(test.since_S[when > before])) - before) < 40


def test_too_few_prompts_make_no_band() -> None:
    with pytest.raises(InputError, match="7 prompts are too few for a band; evaluate at least 8"):
        Band.of(np.linspace(0.2, 0.8, 7), RATE)


@pytest.fixture(scope="module")
def measured(target_dir: str, draft_dir: str, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """An evaluation of a draft that is never accepted much, with enough prompts for a band."""
    from eval.config import EvalConfig
    from eval.evaluate import evaluate

    root = tmp_path_factory.mktemp("measured")
    target = shutil.copytree(target_dir, root / "target")
    # Logs hold chats, which cannot be read without a template.
    template = "{% for message in messages %}{{ message['role'] }}: {{ message['content'] }}\n{% endfor %}"
    (target / "chat_template.jinja").write_text(template)
    rows = [{"id": f"r{i}", "prompt": f"Numbers such as {i * i}"} for i in range(12)]
    (root / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("eval.evaluate.write_report", lambda results: results.directory)
        evaluate(
            EvalConfig(
                target=str(target),
                draft=[f"mine={draft_dir}"],
                id=[f"prose={root / 'rows.jsonl'}"],
                out=str(root / "out"),
                tree=["chain:1"],
                temperature=[1.0],
                max_new_tokens=6,
                speed_prompts=0,
                bootstrap=100,
                device="cpu",
            )
        )
    return root / "out"


Door = Callable[..., tuple[int, str, str]]


def _log(path: Path, rows: list[Any]) -> Path:
    path.write_text("".join((row if isinstance(row, str) else json.dumps(row)) + "\n" for row in rows))
    return path


def test_a_log_is_followed_to_its_end_and_every_row_is_accounted_for(
    measured: Path, door: Door, tmp_path: Path
) -> None:
    answer = {"choices": [{"message": {"role": "assistant", "content": " the lazy dog"}}]}
    rows: list[Any] = [
        {"prompt_ids": [0, 5, 6], "output_ids": [7, 8]},
        {"messages": [{"role": "user", "content": "Who?"}], "response": answer},
        {"prompt": "Who", "response": " jumps"},
        {"prompt": "Who"},
        {"prompt_ids": [0, 5], "output_ids": [999]},
        {"prompt_ids": 5, "output_ids": [7]},
        "{torn",
        "\x00\x00\x7fELF",
        "[" * 100_000,
        '{"prompt_ids": [0], "output_ids": [' + "9" * 5000 + "]}",
    ]
    log = _log(tmp_path / "log.jsonl", rows)
    code, out, err = door("eval", "--watch", log, "--baseline", measured, "--follow", "false", "--window", 2, "--json")
    assert code == 0, err
    found = json.loads(out.splitlines()[-1])
    assert (found["rows"], found["answers"], found["skipped"], found["changed"]) == (10, 3, 7, None)
    assert "watch: answers 1 to 2: alpha" in err and "watch: answers 3 to 3: alpha" in err
    assert "7 of 10 rows skipped" in err and "log.jsonl:4: has no response with a text (the first)" in err


def test_a_log_of_a_draft_that_is_never_accepted_ends_with_3(
    measured: Path, door: Door, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    rows = [{"prompt_ids": [0, 5, 6], "output_ids": [7, 8, 9]} for _ in range(600)]
    log = _log(tmp_path / "log.jsonl", rows)
    # Every answer is accepted whole: far above what this draft reached in the baseline.
    found = {"sum": [3.0] * 8, "count": [3] * 8}
    monkeypatch.setattr(watching, "alpha_sums", lambda *_, **__: found)
    code, _, err = door("eval", "--watch", log, "--baseline", measured, "--follow", "false")
    assert code == 3
    (line,) = [line for line in err.splitlines() if line.startswith("draftsmith eval:")]
    assert "acceptance has left the band of id and is above" in line and "since about answer 1;" in line


def test_what_is_appended_is_read_and_half_a_line_waits(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    log = tmp_path / "log.jsonl"
    log.write_text("one\ntw")
    parts = iter(["o\nthree\n", ""])

    def sleep(seconds: float) -> None:
        with log.open("a") as file:
            file.write(next(parts))

    monkeypatch.setattr("eval.watch.time.sleep", sleep)
    lines = watching._lines(log, follow=True)
    assert [next(lines) for _ in range(6)] == ["one\n", None, "two\n", "three\n", None, None]
    assert list(watching._lines(log, follow=False)) == ["one\n", "two\n", "three\n", None]


@pytest.mark.parametrize("way", ["cut", "renamed"])
def test_a_log_that_is_rotated_is_followed(
    way: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    log = tmp_path / "log.jsonl"
    log.write_text("one\ntwo\n")
    lines = watching._lines(log, follow=True)

    def sleep(seconds: float) -> None:
        if way == "renamed":
            log.rename(tmp_path / "log.1")
            with (tmp_path / "log.1").open("a") as file:
                file.write("a last one\n")
        log.write_text("new\n")

    monkeypatch.setattr("eval.watch.time.sleep", sleep)
    assert [next(lines) for _ in range(3)] == ["one\n", "two\n", None]
    for line in [*["a last one\n"] * (way == "renamed"), None, "new\n", None]:
        assert next(lines) == line
    assert capsys.readouterr().err.count("was begun anew") == 1


@pytest.mark.parametrize(
    ("words", "message"),
    [
        ("--watch none.jsonl", "none.jsonl: no such file"),
        ("--watch {measured}/results.json --draft other", "draft 'other': not measured; there are mine"),
        ("--watch {measured}/results.json --rate 2", "--rate 2: must be from 0.0001 to 0.5"),
        ("--watch {measured}/results.json --temperature 0.3", "temperature 0.3: not measured; there are 1"),
        ("--watch {measured}/results.json --window 0", "window: 0 must be at least 1"),
    ],
)
def test_what_cannot_be_watched_is_said_in_one_line(words: str, message: str, measured: Path, door: Door) -> None:
    code, _, err = door("eval", *words.format(measured=measured).split(), "--baseline", measured)
    assert code == 2 and message in err
