"""`distill --draft`: the target's own distribution, and a decision that is made once and kept with the set."""

from collections import Counter
from pathlib import Path
from typing import Any

import pytest
import torch

from distill.config import DistillConfig
from distill.engines import AnswerRequest
from distill.engines.hf import HFEngine
from draftsmith_core.models import load_model
from draftsmith_core.sampling import Sampling, probs, row_seed
from draftsmith_core.tokenization import load_tokenizer
from tests.chi_square import chi_square
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


@torch.inference_mode()
@pytest.mark.parametrize("tree", ["chain:2", "kary:2,1"])
def test_answers_have_the_targets_distribution(target_dir: str, draft_dir: str, prompts_file: str, tree: str) -> None:
    """Three tokens out of three likeliest each: 27 answers, whose chances follow from the target alone."""
    draws, length = 3000, 3
    config = DistillConfig(
        target=target_dir,
        prompts=prompts_file,
        out="unused",
        draft=draft_dir,
        tree=tree,
        top_k=3,
        max_new_tokens=length,
        ignore_eos=True,
        batch_size=500,
        device="cpu",
    )
    engine = HFEngine(config, load_tokenizer(target_dir))
    prompt = (5, 70, 80, 90)

    def sample() -> Counter[tuple[int, ...]]:
        found: Counter[tuple[int, ...]] = Counter()

        def done(request: AnswerRequest, answer: Any) -> None:
            found[answer.response_ids] += 1

        engine.run(iter([[AnswerRequest((n, 0, 0), prompt, row_seed(3, str(n))) for n in range(draws)]]), done)
        assert found.total() == draws
        return found

    model = load_model(target_dir, device="cpu")
    chances: dict[tuple[int, ...], float] = {(): 1.0}
    for _ in range(length):
        below: dict[tuple[int, ...], float] = {}
        for ids, chance in chances.items():
            p_V = probs(model(torch.tensor([[*prompt, *ids]])).logits[0, -1], Sampling(top_k=3))
            below |= {(*ids, int(token)): chance * float(p_V[token]) for token in p_V.nonzero().flatten()}
        chances = below
    assert len(chances) == 3**length
    alone = sample()
    engine.tree = tree
    drafted = sample()
    assert drafted != alone, "nothing was drafted"

    def statistic(found: Counter[tuple[int, ...]]) -> float:
        assert set(found) <= set(chances)
        counts, distribution = ([float(values[ids]) for ids in chances] for values in (found, chances))
        return chi_square(torch.tensor(counts), torch.tensor(distribution).double(), 1e-5)

    assert statistic(alone) < 1 and statistic(drafted) < 1
    # The test can fail: the second likeliest token where the likeliest was drawn.
    wrong = Counter({(*ids[:2], 0): count for ids, count in drafted.items()})
    assert not set(wrong) <= set(chances) or statistic(wrong) >= 1


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
