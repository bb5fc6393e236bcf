"""A flipped bit in any file that a later run trusts: the run ends as one that was never damaged, or
with one line that names the file.
"""

import json
import random
import shutil
from dataclasses import asdict

import pytest

import draftsmith as ds
from draftsmith.cli.decode_run import _to_file
from draftsmith.core.errors import DraftsmithError
from draftsmith.core.runs import Run
from draftsmith.decode.stats import DecodeStats
from draftsmith.distill import parts
from draftsmith.distill.engines import (
    ENGINES,
    Answer,
    Engine,
    RemoteTarget,
    sampling_of,
)
from draftsmith.eval import run as evaluation
from draftsmith.outputs import Output
from draftsmith.train import loop
from tests.distilled import write_rows
from tests.door import forget_processes

pytestmark = pytest.mark.slow(60)
FLIPS = 40
Files = dict[str, bytes]


class HashEngine(Engine):
    """A target without weights: its answers are a function of the request's seed."""

    def __init__(self, config, tokenizer):
        self.identity = {"target_fingerprint": "ab" * 8, "target_dtype": "float32"}
        self.sampling = sampling_of(config, RemoteTarget(config.target, tokenizer))
        self.max_prompt_tokens = None
        self.wave = 3

    def run(self, groups, done):
        for group in groups:
            for request in group:
                draw = random.Random(request.seed)
                done(request, Answer(tuple(draw.choices(range(2, 290), k=6)), "length"))


def content(out):
    """Every file but what no run reads: the card, and the clock of an evaluation."""
    found = {
        str(path.relative_to(out)): path.read_bytes() for path in out.rglob("*") if path.is_file()
    }
    return {name: found[name] for name in found if not name.endswith((".md", ".html", ".png"))}


def flip(file, draw):
    changed = bytearray(file.read_bytes())
    changed[draw.randrange(len(changed))] ^= 1 << draw.randrange(8)
    file.write_bytes(changed)


def check(
    out,
    run,
    expected,
    files,
    read=content,
):
    """Flip bits of `files`, patterns of the directory that `out` is now, one in each run."""
    kept = out.with_name("kept")
    shutil.copytree(out, kept)
    draw = random.Random(0)
    for number in range(FLIPS):
        shutil.rmtree(out)
        shutil.copytree(kept, out)
        pattern = files[number % len(files)]
        file = draw.choice([path for path in sorted(out.glob(pattern)) if path.stat().st_size])
        flip(file, draw)
        forget_processes()
        try:
            run()
        except DraftsmithError as error:
            line = str(error)
            assert "\n" not in line and str(file) in line, f"{file}: {line}"
        else:
            assert read(out) == expected, file


@pytest.fixture
def distil(target_dir, tmp_path, monkeypatch):
    monkeypatch.setitem(ENGINES, "hf", HashEngine)
    rows = [{"prompt": f"Numbers such as {n}"} for n in range(30)]
    prompts = write_rows(tmp_path / "p.jsonl", *rows, "no JSON", *["no JSON"] * 8)
    out = tmp_path / "set"
    return lambda: ds.distill(target=target_dir, prompts=prompts, out=str(out), part_rows=8)


def stop(monkeypatch, owner, name, count, run):
    """Stop the run at call number `count` of a function."""
    real = getattr(owner, name)
    calls = []

    def stopping(*words, **more):
        calls.append(1)
        if len(calls) == count:
            raise KeyboardInterrupt
        return real(*words, **more)

    with monkeypatch.context() as patch, pytest.raises(KeyboardInterrupt):
        patch.setattr(owner, name, stopping)
        run()


@pytest.mark.parametrize("files", ["*.parquet", "*.json"])
def test_a_finished_set(distil, tmp_path, files):
    distil()
    check(tmp_path / "set", distil, content(tmp_path / "set"), [files])


@pytest.mark.parametrize("files", ["*.parquet", "*.json", ".part-*.sha256", ".*.answers.jsonl"])
def test_a_set_that_was_killed(distil, tmp_path, monkeypatch, files):
    out = tmp_path / "set"
    distil()
    whole = content(out)
    shutil.rmtree(out)
    stop(monkeypatch, parts.Part, "write", 3, distil)
    assert list(out.glob(files))
    check(out, distil, whole, [files])


@pytest.fixture
def fit(distilled, draft_dir, tmp_path):
    return lambda: ds.train(
        data=[distilled],
        draft=draft_dir,
        out=str(tmp_path / "draft"),
        objective="ce",
        steps=6,
        eval_every=2,
        save_every=2,
        batch_size=4,
        max_length=40,
        device="cpu",
    )


TRUSTED = ["*.safetensors", "*.json", "*.npy", "run/*.json*"]


def test_a_finished_draft(fit, tmp_path):
    fit()
    out = tmp_path / "draft"
    check(out, fit, content(out), TRUSTED)


def test_a_training_that_was_killed(fit, tmp_path, monkeypatch):
    out = tmp_path / "draft"

    def published(out):
        found = content(out)
        return {name: found[name] for name in found if "checkpoints" not in name}

    fit()
    whole = published(out)
    shutil.rmtree(out)
    stop(monkeypatch, loop, "training_step", 6, fit)
    files = ["run/checkpoints/*4/*.safetensors", "run/checkpoints/*4/*.json*", "run/*.json*"]
    check(out, fit, whole, files, published)


def test_the_weights_of_a_draft_that_others_read(fit, target_dir, tmp_path):
    fit()
    draft = str(tmp_path / "draft")
    whole = content(tmp_path / "draft")
    check(
        tmp_path / "draft",
        lambda: ds.load_pair(target_dir, draft),
        {},
        ["*.safetensors"],
        lambda _: {"was": b"loaded"},
    )
    assert whole


def test_an_evaluation(target_dir, draft_dir, prompts_file, tmp_path):
    out = tmp_path / "eval"

    def run():
        return ds.evaluate(
            target=target_dir,
            draft=[f"base={draft_dir}"],
            id=[f"p={prompts_file}"],
            out=str(out),
            tree=["chain:2"],
            temperature=[1.0],
            max_new_tokens=4,
            max_prompts=3,
            speed_prompts=0,
            bootstrap=100,
            device="cpu",
        )

    def figures(out):
        rows = json.loads((out / "results.json").read_text())["rows"]
        return content(out / "cells") | {"rows": json.dumps(rows).encode()}

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(evaluation, "write_report", lambda results: None)
        run()
        check(out, run, figures(out), ["cells/*.json"], figures)


def test_the_outputs_of_a_decoding_that_was_killed(tmp_path):
    out = tmp_path / "outputs"
    out.mkdir()
    file = out / "rows.jsonl"
    draw = random.Random(1)
    outputs = [
        Output(
            str(n), 0, 0, [1], [draw.randrange(290)], "é", "stop", [False], DecodeStats(), 0.5, 0.5
        )
        for n in range(6)
    ]

    def run():
        return _to_file(file, {"identity": "a"}, lambda first: ([each] for each in outputs[first:]))

    run()
    whole = content(out)
    with Run(file, file=True) as killed:
        killed.lock()
        with killed.journal(".rows.jsonl.partial", {"identity": "a"}) as journal:
            for output in outputs[:4]:
                journal.append([asdict(output)])
    file.unlink()
    check(out, run, whole, [".*.partial"])
