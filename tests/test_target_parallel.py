"""A target that processes hold together (`--target_parallel`) gives what one process gives."""

import json
from pathlib import Path
from typing import Any

import pyarrow.parquet as pq
import pytest
from torch import nn

from draftsmith.core import ranks
from draftsmith.core.large_target import all_have, is_divided, own_share, whole
from draftsmith.core.models import load_model
from draftsmith.core.teacher_rows import COLUMN, unpack
from draftsmith.train.config import TrainConfig
from tests.distilled import write_rows
from tests.small_targets import made
from tests.test_align import ONE_WAY, SMALL
from tests.test_train_distributed import DRIVER
from tests.train_laws import close, metrics

FAMILIES: dict[str, dict[str, Any]] = {
    "llama": {},
    "qwen3": {},
    "gemma3_text": {"sliding_window": 8, "sliding_window_pattern": 2},
    "qwen3_moe": {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 16},
}
# With SGD, whose steps follow the gradient: Adam's are as long where it is rounding alone.
TRAINED = ["llama", "qwen3_moe"]
EAGLE3 = "--kind eagle3 --head.test_steps 3 --draft_vocab_size 120 --head.features"
PAIR = "--temperature 0 1 --tree chain:2 kary:2,2 --bootstrap 100 --speed_prompts 1"
# A rank is killed at a step. Evaluations end without a report, whose figures take seconds to draw.
KILLED = DRIVER.replace("SIGTERM", "SIGKILL").replace(
    "gc.freeze()",
    "draftsmith.eval.run.write_report = lambda results: results.directory\ngc.freeze()",
)
CONFIGS = Path(__file__).parents[1] / "configs" / "accelerate"


@pytest.fixture
def groups_of_two(monkeypatch):
    """Four processes in groups of two."""
    monkeypatch.setenv("WORLD_SIZE", "4")
    monkeypatch.setattr(ranks, "_together", 2)


@pytest.mark.parametrize(("rank", "own", "leads"), [(0, 0, True), (1, 0, False), (2, 1, True)])
def test_groups_divide_the_work(groups_of_two, monkeypatch, rank, own, leads):
    monkeypatch.setenv("RANK", str(rank))
    assert (ranks.groups(), ranks.own_group(), ranks.leads_group()) == (2, own, leads)
    # All call the target, because none can alone.
    assert ranks.with_target(lambda: rank) == rank


REFUSED = [
    ({}, 3, 2),
    ({}, 1, 2),
    ({"num_key_value_heads": 1}, 2, 2),
    ({"model_type": "gpt2"}, 2, 2),
]


@pytest.mark.parametrize(("changes", "processes", "count"), REFUSED)
def test_what_cannot_be_divided_is_one_line(
    changes, processes, count, tmp_path, monkeypatch, golden
):
    kind = changes.pop("model_type", "llama")
    made(kind, tmp_path, **changes)
    monkeypatch.setenv("WORLD_SIZE", str(processes))
    with golden.raises():
        load_model(str(tmp_path), device="cpu", target_parallel=count)


def test_a_model_of_one_process_is_whole(target_dir):
    model = load_model(target_dir, device="cpu")
    weight = next(model.parameters())
    assert not is_divided(model) and own_share(weight) is weight is whole(weight)
    assert all_have(model, True) and not all_have(nn.Linear(1, 1), False)


@pytest.mark.parametrize("options", [{"kind": "dspark"}, {"kind": "eagle", "states": "s"}])
def test_what_needs_the_target_alone_is_refused(options, target_dir, golden):
    with golden.raises():
        TrainConfig(out="o", data=["d"], target=target_dir, target_parallel=2, **options)


@pytest.fixture
def families(tmp_path, draft_dir):
    """A directory with a target of each family, a draft and prompts."""
    for kind, changes in FAMILIES.items():
        made(kind, tmp_path / kind, **changes)
    texts = [{"id": str(i), "prompt": f"The quick brown fox {i} jumps"} for i in range(6)]
    write_rows((tmp_path / "prompts.jsonl"), *texts)
    return tmp_path


class Road:
    """The words of each stage for a family; `how` names the outputs."""

    def __init__(self, directory, draft, kind, how):
        self.directory = directory
        self.draft = draft
        self.kind = kind
        self.out = directory / f"{kind}-{how}"
        self.target = f"--target {directory / kind} --device cpu"

    def distill(self):
        return (
            f"distill {self.target} --prompts {self.directory / 'prompts.jsonl'} --temperature 1 "
            f"--max_new_tokens 8 --part_rows 4 --batch_size 3 --teacher_top_k 8 --out {self.out}"
        ).split()

    def train(self, what, rows=4):
        data = self.directory / f"{self.kind}-one"
        return (
            f"train {self.target} --data {data} --heldout {data} --max_length 40 --steps 3 "
            f"--eval_every 2 --save_every 1 --batch_size {rows} --optim.name sgd --optim.lr 0.3 "
            "--objective fkl "
            f"--out {self.out}-draft {what}"
        ).split()

    def evaluate(self):
        draft = self.directory / f"{self.kind}-one-draft"
        return (
            f"eval {self.target} --draft drafted={draft} --id own={self.directory}/prompts.jsonl "
            f"--max_prompts 3 --max_new_tokens 6 --out {self.out}-eval {PAIR}"
        ).split()

    def align(self):
        return (
            f"align {self.target} --prompts {self.directory / 'prompts.jsonl'} "
            f"--draft {self.draft} --eval.max_prompts 2 --out {self.out}-align "
            f"{' '.join(map(str, SMALL + ONE_WAY))}"
        ).split()


def counted(out):
    """Tokens and counts of decoding, and alphas, by measurement."""
    cells = {path.name: json.loads(path.read_text()) for path in (out / "cells").glob("*.json")}
    kept = {}
    for name, cell in cells.items():
        if outcome(cell) is not cell:
            kept[name] = pytest.approx(outcome(cell), rel=1e-4)
        elif "load" not in cell:
            kept[name] = cell
    return kept


def outcome(cell):
    """The alphas of a reading; of another cell all of it."""
    read = "counts" in cell and cell["counts"][0][0] == "alpha"
    return cell["counts"][0][1] if read else cell


@pytest.mark.slow(50)
def test_two_processes_with_one_target_are_one(families, draft_dir, door, launch, undrawn):
    """Distilled rows, losses and decoded tokens; a rank that is killed resumes. Teacher rows are
    rounded sums, which differ in shares.
    """
    jobs: list[dict[str, Any]] = []
    for kind in FAMILIES:
        one = Road(families, draft_dir, kind, "one")
        two = Road(families, draft_dir, kind, "two")
        what = f"--draft {draft_dir}"
        if kind == "llama":
            what = f"{EAGLE3} {families}/features-"
        door.ok(*one.distill())
        jobs.append({"words": [*two.distill(), "--target_parallel", "2"], "stop_at": None})
        if kind not in TRAINED:
            continue
        door.ok(*one.train(what + "one" * (kind == "llama")))
        train = [*two.train(what + "two" * (kind == "llama")), "--target_parallel", "2"]
        if kind == "llama":
            jobs.append({"words": train, "stop_at": 2})
        jobs.append({"words": train, "stop_at": None})
    door.ok(*Road(families, draft_dir, "llama", "one").evaluate())
    evaluation = Road(families, draft_dir, "llama", "two").evaluate()
    jobs.append({"words": [*evaluation, "--target_parallel", "2"], "stop_at": None})
    alignment = Road(families, draft_dir, "llama", "two").align()
    door.ok(*Road(families, draft_dir, "llama", "one").align())
    for stop_at in (2, None):
        jobs.append({"words": [*alignment, "--target_parallel", "2"], "stop_at": stop_at})
    (families / "driver.py").write_text(KILLED)
    (families / "jobs.json").write_text(json.dumps(jobs))
    launch(["--config_file", CONFIGS / "cpu2.yaml"], families / "driver.py", families / "jobs.json")

    def said(job, what):
        return [(families / f"{job}.{rank}.{what}").read_text() for rank in (0, 1)]

    for number, job in enumerate(jobs):
        killed = job["stop_at"] is not None
        assert (said(number, "code") == ["0", "0"]) is not killed, said(number, "err")
    for kind in FAMILIES:
        parts = [sorted((families / f"{kind}-{how}").glob("part-*")) for how in ("one", "two")]
        for here, there in zip(*parts, strict=True):
            rows, again = (pq.read_table(part).to_pylist() for part in (here, there))
            for row, other in zip(rows, again, strict=True):
                ids_RK, logprobs_RK, _ = unpack(row.pop(COLUMN))
                same_RK, close_RK, _ = unpack(other.pop(COLUMN))
                assert row == other and (ids_RK == same_RK).mean() > 0.98
                assert abs(logprobs_RK - close_RK).max() < 2e-2
    for kind in TRAINED:
        one, two = (families / f"{kind}-{how}-draft" for how in ("one", "two"))
        close(two, one, atol=2e-4)
        for here, there in zip(metrics(two), metrics(one), strict=True):
            assert here == pytest.approx(there, rel=1e-3, abs=1e-5)
    one, two = (families / f"llama-{how}-align" for how in ("one", "two"))
    for part in (one / "distilled").glob("part-*"):
        assert pq.read_table(two / "distilled" / part.name) == pq.read_table(part)
    close(two / "jsd", one / "jsd", atol=1e-3)
    alone, both = (counted(families / f"llama-{how}-eval") for how in ("one", "two"))
    assert len(alone) == 8 and alone.keys() == both.keys()
    for name, cell in alone.items():
        given = json.loads((families / "llama-two-eval" / "cells" / name).read_text())
        assert outcome(given) == cell
