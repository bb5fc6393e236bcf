"""The study of a real chat model, on the demo's pair in tiny sizes: its pieces resume, and keep what is kept."""

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from benchmarks import real_study
from benchmarks.objectives_data import ROOT
from benchmarks.real_pair import best, run
from benchmarks.real_study import TINY, Options, Study, data, keep_set
from benchmarks.shipped_pair import PAIR
from draftsmith_core.errors import InputError
from draftsmith_core.io import write_rows
from eval.results import Results
from tests.test_benchmarks_objectives import texts


@pytest.fixture
def study(tmp_path: Path) -> Study:
    """Tiny sizes, on the demo's target."""
    place = tmp_path / "texts"
    for start, (name, count) in enumerate({"alpaca": 20, "gsm8k_train": 9, "gsm8k_test": 3, "humaneval": 3}.items()):
        write_rows(place / f"{name}.jsonl", ({"prompt": row["text"]} for row in texts(count, start)))
    for name in ("c4", "wiki"):
        write_rows(place / f"{name}.jsonl", ({"text": 3 * f"{row['text']} "} for row in texts(3, len(name))))
    options = Options(target=str(PAIR / "target"), data=str(place), out=str(tmp_path / "out"), tiny=True)
    return Study(options, TINY)


def test_names_that_are_unknown_are_refused() -> None:
    with pytest.raises(InputError, match="--only speeed: use any of data, which"):
        run(Options(target="t", data="d", out="o", only=["speeed"]))


@pytest.mark.slow  # distils, and loads the target three times
def test_a_kept_set_is_taken_by_the_target_that_wrote_it(study: Study, monkeypatch: pytest.MonkeyPatch) -> None:
    data(study)
    kept = Path(study.options.out).parent / "kept"
    monkeypatch.setattr(real_study, "KEPT", kept)
    for name in TINY.answered:
        keep_set(study, name)
    manifest = (kept / "chat" / "manifest.json").read_text()
    assert study.options.target not in manifest and str(study.out) not in manifest
    (study.out / "data").rename(study.out / "first")
    asked: list[str] = []
    monkeypatch.setattr(real_study, "distill", lambda config, command: asked.append(config.out))
    # Prompts are on this machine; the answers come from the repository.
    taken = Study(Options(**{**vars(study.options), "tiny": False}), TINY)
    data(taken)
    part = "chat/part-00000.parquet"
    assert (study.out / "data" / part).read_bytes() == (study.out / "first" / part).read_bytes()
    changed = json.loads(manifest)
    changed["identity"]["target_fingerprint"] = "0" * 16
    (kept / "chat" / "manifest.json").write_text(json.dumps(changed))
    (study.out / "data").rename(study.out / "second")
    data(taken)
    assert asked == [str(study.out / "data" / "chat")] and (study.out / "data" / "maths").exists()


@pytest.mark.slow  # distils, trains and evaluates, twice interrupted
def test_a_killed_piece_continues(study: Study) -> None:
    options = study.options
    words = [sys.executable, "-m", "benchmarks.real_pair", "--target", options.target, "--data", options.data]
    words += ["--out", options.out, "--tiny", "true", "--only", "data", "which", "--drafts", "pruned", "hydra"]
    process = subprocess.Popen(words, cwd=ROOT, stderr=subprocess.DEVNULL, stdout=subprocess.DEVNULL)
    record = study.out / "drafts" / "pruned" / "draftsmith.json"
    for _ in range(3000):
        if record.exists() or process.poll() is not None:
            break
        time.sleep(0.1)
    os.kill(process.pid, signal.SIGKILL)
    assert process.wait() == -signal.SIGKILL and record.exists()
    made = record.read_bytes()
    done = subprocess.run(words, cwd=ROOT, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr[-2000:]
    assert record.read_bytes() == made
    results = Results.load(study.out / "which")
    assert results.drafts == ["pruned", "hydra"] and results.domains() == ["chat", "maths", "code", "c4", "wiki"]
    assert "| hydra |" in done.stdout and "tau chat, predicted" in done.stdout
    assert best(study, "hydra") == "hydra"
    with pytest.raises(InputError, match="has none of eagle3; run --only which"):
        best(study, "eagle3")
