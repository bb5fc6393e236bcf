"""`distill --draft`: the decoder's own answers, and a decision that is made once and kept with the set."""

from pathlib import Path
from typing import Any

import pytest

from decode import DraftModelProposer, SpeculativeDecoder
from distill.config import DistillConfig
from distill.engines import AnswerRequest
from distill.engines.hf import HFEngine
from draftsmith_core.models import eos_ids, load_model
from draftsmith_core.sampling import Sampling, generator, row_seed
from draftsmith_core.tokenization import load_tokenizer
from tests.distilled import Door, files, manifest, rows_of


@pytest.fixture
def words(target_dir: str, draft_dir: str, prompts_file: str) -> list[str]:
    return (
        f"distill --target {target_dir} --prompts {prompts_file} --out set --num_samples 2 --max_new_tokens 8 "
        f"--batch_size 3 --part_rows 4 --seed 5 --draft {draft_dir}"
    ).split()


def measured(monkeypatch: pytest.MonkeyPatch, alone: float, drafted: float) -> None:
    monkeypatch.setattr(
        HFEngine, "seconds_per_token", lambda self, requests: {"": alone, "chain:1": 9.0, "chain:2": drafted}
    )


@pytest.mark.parametrize("tree", ["chain:2", "kary:2,1"])
def test_answers_are_those_of_the_decoder(target_dir: str, draft_dir: str, prompts_file: str, tree: str) -> None:
    """The decoder's distribution is the target's (law 1)."""
    options: dict[str, Any] = {"top_k": 3, "max_new_tokens": 9, "batch_size": 4, "device": "cpu"}
    config = DistillConfig(target=target_dir, prompts=prompts_file, out="unused", draft=draft_dir, tree=tree, **options)
    engine = HFEngine(config, load_tokenizer(target_dir))
    target, draft = (load_model(name, device="cpu") for name in (target_dir, draft_dir))
    requests = [AnswerRequest((n, 0, 0), (5, 70, 80 + n), row_seed(3, str(n))) for n in range(12)]
    decoders = {"": SpeculativeDecoder(target), tree: SpeculativeDecoder(target, DraftModelProposer(draft), tree)}
    answers: dict[str, dict[Any, tuple[int, ...]]] = {used: {} for used in decoders}

    def done(request: AnswerRequest, answer: Any) -> None:
        answers[engine.tree][request.key] = answer.response_ids

    for engine.tree, decoder in decoders.items():
        engine.run(iter([requests]), done)
        for request in requests:
            rows: Any = [request.prompt_ids], Sampling(top_k=3), 9, [generator(request.seed)], eos_ids(target)
            assert list(answers[engine.tree][request.key]) == decoder.generate(*rows).generations[0].output_ids
    assert answers[""] != answers[tree], "nothing was drafted"


@pytest.mark.parametrize("drafted", [False, True])
def test_the_decision_is_measured_once_said_and_kept(
    words: list[str],
    tmp_path: Path,
    door: Door,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
    drafted: bool,
) -> None:
    monkeypatch.chdir(tmp_path)
    code, _, err = door(*words[:-2], "--out", "plain")
    assert code == 0, err
    measured(monkeypatch, 2.0, 1.0 if drafted else 3.0)
    code, _, err = door(*words)
    assert code == 0, err
    said = [message for message in caplog.messages if "--draft" in message]
    assert len(said) == 1 and "batch of 3 rows" in said[0]
    assert (f": chain:2 takes {0.5 if drafted else 1.5:.2f} times as long per token" in said[0]) and (
        said[0].endswith("; used" if drafted else "; switched off")
    )
    made, record = files(pattern="part-*"), manifest()
    assert record["drafted"] == ("chain:2" if drafted else None) and not (tmp_path / "set" / "drafting.json").exists()
    assert len(record["identity"]["draft_fingerprint"]) == 16
    # Switched off, the rows are those of the target alone; else they are others of the same number.
    assert (
        [row["response_ids"] for row in rows_of()] == [row["response_ids"] for row in rows_of("plain")]
    ) is not drafted
    # A lost part is made again as it was, whatever a measurement would say now.
    monkeypatch.setattr(HFEngine, "seconds_per_token", None)
    (tmp_path / "set" / "part-00001.parquet").unlink()
    code, _, err = door(*words)
    assert (code, files(pattern="part-*")) == (0, made), err
    assert caplog.messages[-1].endswith(f": as when this set was begun: {'chain:2' if drafted else 'not used'}")
    code, _, err = door(*words, "--tree", "chain:2")
    assert code == 2 and "--out set: was made with other options" in err


def test_it_is_really_measured(target_dir: str, draft_dir: str, prompts_file: str) -> None:
    config = DistillConfig(
        target=target_dir, prompts=prompts_file, out="unused", draft=draft_dir, max_new_tokens=6, device="cpu"
    )
    engine = HFEngine(config, load_tokenizer(target_dir))
    requests = [AnswerRequest((n, 0, 0), (5, 70 + n), n) for n in range(4)]
    seconds = engine.seconds_per_token(requests)
    assert seconds.keys() == {"", "chain:1", "chain:2", "chain:4"}
    assert all(0 < each < 10 for each in seconds.values())
