"""Prompts as a stream: read as they come, each row accounted for, and never confused with another
file's.
"""

import gc
import json
import tracemalloc
from collections import Counter
from pathlib import Path
from typing import Any

import pyarrow.parquet as pq
import pytest

from draftsmith.distill.engines import ENGINES, Answer, Engine
from draftsmith.distill.engines.hf import HFEngine
from tests.distilled import errors, files, rows_of, write_rows

GOOD = [{"prompt": f"The quick {number}", "domain": "d"} for number in range(9)]
# Lines that are no prompts.
BAD = [
    b"{broken",
    b"[1]",
    {"other": 1},
    {"prompt": ""},
    b'{"prompt": "caf\xe9"}',
    b'{"prompt": "\\ud83d"}',
    {"prompt": 5},
    {"prompt": "dog " * 200},
    {"messages": []},
    {"messages": [{"role": "user", "content": "a"}]},
]


@pytest.fixture
def words(target_dir, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    lines: list[Any] = list(GOOD)
    for place, line in enumerate(BAD):
        lines.insert(2 * place, line)
    write_rows("p.jsonl", *lines, "")
    command = (
        f"distill --target {target_dir} --prompts p.jsonl --out set --max_new_tokens 6 "
        "--part_rows 4 --num_samples 2"
    )
    return command.split()


def test_rows_that_cannot_be_read_are_skipped_with_their_reasons(words, door, golden):
    out, _ = door.ok(*words)
    golden(out)
    assert [(line["row"], line["outcome"]) for line in errors()] == [
        (2 * place + 1, "skipped") for place in range(10)
    ]
    golden("\n".join(line["reason"] for line in errors()))
    door.refused(*words, "--out", "strict", "--strict")
    assert not Path("strict").exists()


def test_prompts_that_changed_since_are_refused(words, door, golden):
    door.ok(*words)
    made = files()
    lines = Path("p.jsonl").read_bytes().splitlines()
    lines[11] = b'{"prompt": "another"}'
    Path("p.jsonl").write_bytes(b"\n".join(lines) + b"\n")
    door.refused(*words)
    assert files() == made


def test_a_mixture_of_temperatures(words, door, target_dir, golden):
    """Each row is what its own temperature gives, and the shares are those that were asked for."""
    write_rows("p.jsonl", *({"prompt": f"The {i}", "id": str(i)} for i in range(60)))
    words = [*words, "--part_rows", "200"]
    door.ok(*words, "--temperatures", "0:1", "1.0:2", "0.5:2")
    rows = rows_of("set")
    counts = Counter(row["temperature"] for row in rows)
    # 120 draws with shares of 0.2, 0.4, 0.4: within four standard deviations.
    assert (
        7 <= counts[0.0] <= 41
        and all(27 <= counts[value] <= 69 for value in (0.5, 1.0))
        and len(counts) == 3
    )
    for temperature in (0.0, 1.0):
        door.ok(*words, "--temperature", temperature, "--out", f"at{temperature}")
        alone = {row["seed"]: row for row in rows_of(f"at{temperature}")}
        assert {row["temperature"] for row in alone.values()} == {temperature}
        for row in rows:
            if row["temperature"] == temperature:
                assert row["response_ids"] == alone[row["seed"]]["response_ids"]
    golden(Path("set/README.md").read_text(), having="temperatures")


class _Echo(Engine):
    """An engine that answers with one token."""

    max_prompt_tokens = None

    def __init__(self, config, tokenizer):
        like = HFEngine(config, tokenizer)
        self.sampling, self.identity = like.sampling, like.identity

    def run(self, groups, done):
        for group in groups:
            for request in group:
                assert done(request, Answer((7,), "length")) is None


@pytest.mark.slow
def test_memory_does_not_grow_with_the_rows(words, door, monkeypatch, tmp_path):
    """What Python holds after eight parts and after 64: rows, prompts, answers and reasons have
    gone to the disk.
    """
    monkeypatch.setitem(ENGINES, "hf", _Echo)
    lines = [json.dumps({"prompt": f"The {i}" if i % 5 else ""}) + "\n" for i in range(64 * 32)]
    Path("p.jsonl").write_text("".join(lines))
    held: dict[int, int] = {}
    write = pq.write_table

    def measured(table, path):
        write(table, path)
        if len(held) in (7, 63):
            gc.collect()
        held[len(held)] = tracemalloc.get_traced_memory()[0]

    monkeypatch.setattr(pq, "write_table", measured)
    tracemalloc.start()
    try:
        code, _, err = door(*words, "--part_rows", 64)
    finally:
        tracemalloc.stop()
    assert code == 0, err
    assert len(held) == 64
    # 1,800 rows later; a kept row would be at least 1 kB.
    assert held[63] - held[7] < 200_000
