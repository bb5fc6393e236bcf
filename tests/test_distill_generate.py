"""A distilled set is the same bytes however it was made, with every row and every count."""

import re

import pytest

from draftsmith.core.io import sha256_file
from draftsmith.core.models import eos_ids, load_model
from draftsmith.core.sampling import Sampling, generator, row_seed
from draftsmith.distill.config import DistillConfig
from draftsmith.distill.generate import distill
from tests.distilled import errors, files, manifest, rows_of


@pytest.fixture
def words(target_dir, prompts_file):
    return (
        f"distill --target {target_dir} --prompts {prompts_file} --out set --num_samples 3 "
        "--max_new_tokens 10 "
        "--batch_size 3 --part_rows 6 --seed 11"
    ).split()


@pytest.fixture
def whole(words, tmp_path, door, monkeypatch):
    """The set of a run that nothing disturbed."""
    (tmp_path / "whole").mkdir()
    monkeypatch.chdir(tmp_path / "whole")
    door.ok(*words)
    return tmp_path / "whole" / "set"


def test_every_row_and_every_count(whole, target_dir):
    """Law 8: read = done + skipped + failed."""
    rows, record = rows_of(whole), manifest(whole)
    # Each part has the answers to two prompts; the fourth row of the nine is empty, and the last
    # part has one prompt.
    parts = {f"part-{i:05d}.parquet" for i in range(5)}
    assert {path.name for path in whole.iterdir()} == {
        "manifest.json",
        "README.md",
        "errors.jsonl",
        "run.json",
        *parts,
    }
    assert [part["rows"] for part in record["parts"]] == [6, 3, 6, 6, 3]
    assert all(sha256_file(whole / part["file"]) == part["sha256"] for part in record["parts"])
    counts = dict(
        prompts_read=9, prompts_done=8, prompts_skipped=1, prompts_failed=0, rows=24, rows_dropped=0
    )
    assert record["counts"] == counts
    assert record["skipped_because"] == ["1 skipped: key 'prompt' is empty (row 4)"]
    assert errors(whole) == [{"row": 4, "outcome": "skipped", "reason": "key 'prompt' is empty"}]
    assert record["tokens_from"] == {"target": 24}
    assert record["complete"] is True
    assert record["response_tokens"] == sum(len(row["response_ids"]) for row in rows)
    reasons = [row["finish_reason"] for row in rows]
    assert record["finish_reasons"] == {r: reasons.count(r) for r in ("stop", "length")}
    assert min(record["finish_reasons"].values()) > 0
    eos = set(eos_ids(load_model(target_dir, device="cpu")))
    for row in rows:
        ids = row["response_ids"]
        assert (row["finish_reason"] == "stop") == (ids[-1] in eos)
        assert not eos.intersection(ids[:-1])
        assert len(ids) <= 10
        assert row["finish_reason"] == "stop" or len(ids) == 10
    assert len({row["id"] for row in rows}) == 24
    assert [row["sample_index"] for row in rows] == [0, 1, 2] * 8
    assert {row["domain"] for row in rows} == {"default", "models"}
    # Two rows of the prompts are the same text; their samples are still independent.
    twins = [row["response_ids"] for row in rows if row["prompt_ids"] == rows[0]["prompt_ids"]]
    assert len(twins) == 6
    assert len({tuple(ids) for ids in twins}) > 1


def test_a_row_can_be_made_again_from_its_seed(whole, target_dir):
    from draftsmith.decode import SpeculativeDecoder

    model = load_model(target_dir, device="cpu")
    decoder = SpeculativeDecoder(model)
    rows = rows_of(whole)
    assert len({row["seed"] for row in rows}) == len(rows)
    assert row_seed(11, "numbers/1") in {row["seed"] for row in rows}
    for row in rows[::5]:
        alone = decoder.generate(
            [row["prompt_ids"]], Sampling(), 10, [generator(row["seed"])], eos_ids(model)
        )
        assert alone.generations[0].output_ids == row["response_ids"]


@pytest.mark.parametrize(
    "change", [{"batch_size": 1}, {"batch_size": 24}, {"part_rows": 1024}, {"part_rows": 1}]
)
def test_batches_and_parts_only_change_the_cutting(
    whole, tmp_path, target_dir, prompts_file, change
):
    options = {
        "batch_size": 3,
        "part_rows": 6,
        "num_samples": 3,
        "max_new_tokens": 10,
        "seed": 11,
    }
    out = tmp_path / "set"
    config = DistillConfig(
        target=target_dir, prompts=prompts_file, out=str(out), **(options | change)
    )
    summary = distill(config, "distill")
    assert rows_of(out) == rows_of(whole)
    per_part = max(1, config.part_rows // 3)
    assert len(list(out.glob("part-*"))) + len(list(out.glob("empty-*"))) == -(-9 // per_part)
    assert summary["rows"] == 24


def test_another_seed_and_another_sampling_give_other_rows(
    whole, tmp_path, target_dir, prompts_file
):
    def make(name, **options):
        settings = {"num_samples": 3, "max_new_tokens": 10, "seed": 11} | options
        distill(
            DistillConfig(
                target=target_dir, prompts=prompts_file, out=str(tmp_path / name), **settings
            ),
            "x",
        )
        return rows_of(tmp_path / name)

    base = [row["response_ids"] for row in rows_of(whole)]
    assert [row["response_ids"] for row in make("seed", seed=12)] != base
    assert [row["response_ids"] for row in make("top", top_k=2)] != base
    greedy = make("greedy", temperature=0.0)
    assert all(
        a["response_ids"] == b["response_ids"]
        for a, b in zip(greedy[::3], greedy[1::3], strict=True)
    )
    on = make("on", ignore_eos=True)
    assert {len(row["response_ids"]) for row in on} == {10}
    assert {row["finish_reason"] for row in on} == {"length"}
    # Until it ends, an answer is the same answer.
    assert all(a["response_ids"][: len(b)] == b for a, b in zip(on, base, strict=True))


@pytest.mark.slow
def test_two_processes_make_the_same_bytes(words, whole, tmp_path, launch):
    there = tmp_path / "two"
    there.mkdir()
    run = launch(["--multi_gpu", "--num_processes", "2"], "-m", "draftsmith", *words, cwd=there)
    made = files(there / "set")
    # The record of a run names its places.
    assert made.keys() == files(whole).keys()
    assert made | {"run.json": b""} == files(whole) | {"run.json": b""}
    assert run.stdout.count("24 rows") == 1
    # Each process made its own share; the main one speaks.
    shown = re.findall(
        r"distill: .*?\| (\d+)/(\d+) \[", run.stderr
    )  # more lines the longer it takes
    assert {total for _, total in shown} == {"5"} and ("5", "5") in shown
