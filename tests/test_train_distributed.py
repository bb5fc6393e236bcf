"""Law 6 in one table: what divides the rows of a step (accumulation, and every way to share weights
between two processes) x drafts, compared with one process that has them all; and runs that are
handed over.
"""

import importlib.util
import json
import shutil
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from draftsmith.core.errors import DraftsmithError
from draftsmith.train.config import Optim, TrainConfig
from draftsmith.train.world import make_world
from tests.conftest import ROOT
from tests.small_targets import made
from tests.train_laws import BEFORE, SGD, close, metrics, weights

CONFIGS = ROOT / "configs" / "accelerate"
NO_DEEPSPEED = pytest.mark.skipif(
    importlib.util.find_spec("deepspeed") is None or shutil.which("g++") is None,
    reason="needs DeepSpeed (pip install -e '.[deepspeed]'), and g++, with which it "
    "compiles on CPUs",
)

# Run by both processes of one launch: commands in turn, each in a fork of its own, because a launch
# spends most of its time on imports. Their rendezvous is the launcher's store, where each command
# has keys of its own. A command may be told to stop by SIGTERM at a step. Leaves JOB.RANK.out, .err
# and .code.
DRIVER = """
import gc, json, os, signal, sys
from importlib.util import find_spec
import torch.distributed
import draftsmith.distill.generate, draftsmith.distill.engines.hf, draftsmith.eval.run
import draftsmith.train.training_run
import draftsmith.train.loop
from draftsmith.__main__ import main
if find_spec("deepspeed"):
    import deepspeed  # accelerate imports it in every run
    # Sums in shared memory, which it would first compile for most of a minute; gloo has them too.
    deepspeed.ops.__compatible_ops__["deepspeed_shm_comm"] = False

gc.freeze()

rendezvous = sys.modules["torch.distributed.rendezvous"]  # a function hides it in torch.distributed
store = rendezvous._create_c10d_store
rate = draftsmith.train.loop.learning_rate
rank = os.environ["RANK"]
for number, job in enumerate(json.load(open(sys.argv[1]))):
    pid = os.fork()
    if pid:
        code = os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
        with open(f"{number}.{rank}.code", "w") as file:
            file.write(str(code))
        continue
    for descriptor, name in ((1, "out"), (2, "err")):
        os.dup2(os.open(f"{number}.{rank}.{name}", os.O_WRONLY | os.O_CREAT), descriptor)
    # DeepSpeed names the memory that processes share after the address: one address a command.
    os.environ["MASTER_ADDR"] = f"127.0.0.{number + 1}"
    rendezvous._create_c10d_store = lambda *words, **more: torch.distributed.PrefixStore(
        f"job {number}", store(*words, **more)
    )
    def watched(optim, step, steps):
        if step == job["stop_at"] and rank == "1":
            os.kill(os.getpid(), signal.SIGTERM)
        return rate(optim, step, steps)
    draftsmith.train.loop.learning_rate = watched
    sys.exit(main(job["words"]))
"""


@pytest.fixture(scope="module")
def distilled(answers):
    return answers("A draft model proposes tokens and the target", 3, 2, 20)


def words(distilled, draft_dir, target_dir, out, size, accumulation):
    """Eight rows a step, however they are divided."""
    return (
        f"train --out {out} --data {distilled} --heldout {distilled} --draft {draft_dir} "
        f"--target {target_dir} "
        "--objective fkl --max_length 48 --steps 8 --eval_every 4 --save_every 4 --batch_size "
        f"{size} "
        f"--accumulation {accumulation}"
    ).split()


CLIPPED = [*SGD, "--optim.clip_norm", "0.2"]
ADAM = ["--optim.lr", "0.01", "--optim.weight_decay", "0.1"]


def agree(found, expected, start=None):
    """The same weights and figures but for rounding, far from where they began."""
    if start is not None:
        begin, end = (load_file(path / "model.safetensors") for path in (start, expected))
        assert max(float((end[name] - begin[name]).abs().max()) for name in end) > 1e-2
    close(found, expected)
    for a, b in zip(metrics(found), metrics(expected), strict=True):
        assert a == pytest.approx(b, rel=1e-4, abs=1e-6)


# Rows of unequal length, domains that are drawn unequally, and blocks that each row draws.
ALONE = {
    "plain": "--draft {draft} --data {data}",
    "domains": "--draft {draft} --data {data} {small} --mixing_temperature 3",
    "blocks": "--kind dspark --head.block_size 3 --head.anchors 5 --target {target} --data {data}",
}


@pytest.mark.parametrize("drawn", ALONE)
def test_batches_that_are_accumulated_are_one(
    drawn, answers, distilled, draft_dir, target_dir, tmp_path, door
):
    small = answers("Numbers such as 12, 345", 1, 1, 9)
    names = {"draft": draft_dir, "data": distilled, "small": small, "target": target_dir}
    run = f"train {ALONE[drawn]} --max_length 40 --steps 3 --eval_every 3 --save_every 3"
    found = []
    for size in (8, 4, 1):
        out = tmp_path / str(size)
        more = f" --batch_size {size} --accumulation {8 // size} --out {out}"
        door.ok(*(run.format(**names) + more).split(), *SGD)
        found.append(weights(out, 3))
    for other in found[1:]:
        torch.testing.assert_close(other, found[0], atol=1e-6, rtol=1e-5)


# A head and a part of the vocabulary, by the ways to share weights.
EAGLE3 = "--kind eagle3 --draft_vocab_size 120 --head.test_steps 3"
DSPARK = "--kind dspark --head.block_size 4 --head.num_layers 2 --draft_vocab_size 120"
MUON = "--optim.name muon"
# Both processes are one group, which has all rows.
DIVIDED = "--target {divided} --target_parallel 2"
COMPILED = "--torch_compile" if shutil.which("g++") else ""
OTHERS = {
    "cpu2": [
        f"{DSPARK} --head.anchors 3",
        f"--kind eagle --head.noise 0 {MUON}",
    ],
    "cpu2_fsdp2": [
        f"{DSPARK} {MUON}",
        f"--draft {{draft}} --draft_vocab_size 120 {COMPILED} {DIVIDED}",
    ],
    "cpu2_zero2": [f"--kind hydra --head.num_heads 3 {DIVIDED}"],
    "cpu2_zero3": [f"{EAGLE3} {DIVIDED}"],
}


@pytest.mark.slow(60)
@pytest.mark.parametrize(
    ("config", "sharing"),
    [
        ("cpu2", "ddp"),
        ("cpu2_fsdp2", "fsdp"),
        pytest.param("cpu2_zero2", "zero2", marks=NO_DEEPSPEED),
        pytest.param("cpu2_zero3", "zero3", marks=NO_DEEPSPEED),
    ],
)
def test_two_processes_are_one(
    config, sharing, distilled, draft_dir, target_dir, tmp_path, door, spawn, launch
):
    """Law 6 with SGD, for each kind of draft; and a run that goes from one process to two and back
    (AdamW).
    """

    def run(out, size, accumulation):
        return words(distilled, draft_dir, target_dir, tmp_path / out, size, accumulation)

    def other(options, out, size, accumulation):
        where = run(out, size, accumulation)
        at = where.index("--draft")  # the target is next
        kept = where[at + 4 :] if "--target " in options else where[at + 2 :]
        options = options.format(draft=draft_dir, divided=tmp_path / "divided")
        changed = [*where[:at], *kept, *options.split()]
        return changed if MUON in options else [*changed, *CLIPPED]

    others = OTHERS[config]
    made("llama", tmp_path / "divided")
    for name, optim in (("sgd1", CLIPPED), ("adam1", ADAM)):
        door.ok(*run(name, 8, 1), *optim)
    for index, options in enumerate(others):
        alone = options.replace("--target_parallel 2", "").replace("--torch_compile", "")
        door.ok(*other(alone, f"other{index}-1", 8, 1))
    # One process for two steps, stopped by SIGTERM ...
    stop = BEFORE + "before(draftsmith.train.loop, 'learning_rate', 2, send(signal.SIGTERM))"
    spawn(*run("adam2", 4, 2), *ADAM, cwd=tmp_path, patch=stop).wait(143)
    # ... two processes for three, stopped too ...
    jobs = [
        {"words": [*run("sgd2", 2, 2), *CLIPPED], "stop_at": None},
        {"words": [*run("adam2", 2, 2), *ADAM], "stop_at": 4},
        *(
            {"words": other(each, f"other{i}-2", 2, 4 if DIVIDED in each else 2), "stop_at": None}
            for i, each in enumerate(others)
        ),
    ]
    (tmp_path / "driver.py").write_text(DRIVER)
    (tmp_path / "jobs.json").write_text(json.dumps(jobs))
    launch(
        ["--config_file", CONFIGS / f"{config}.yaml"],
        tmp_path / "driver.py",
        tmp_path / "jobs.json",
    )

    def said(job, what):
        return [(tmp_path / f"{job}.{rank}.{what}").read_text() for rank in (0, 1)]

    codes = [said(job, "code") for job in range(len(jobs))]
    assert codes == [["0", "0"], ["143", "143"], *[["0", "0"]] * len(others)], [
        said(i, "err") for i in range(len(jobs))
    ]
    assert "".join(said(0, "out") + said(1, "out")).count("held-out") == 1
    continuing = (
        f"continuing a run of 4 x 2 x 1 processes (single) as 2 x 2 x 2 processes ({sharing})"
    )
    assert continuing in "".join(said(1, "err"))
    record = json.loads((tmp_path / "sgd2" / "draftsmith.json").read_text())
    assert (record["processes"], record["sharing"]) == (2, sharing)
    agree(tmp_path / "sgd2", tmp_path / "sgd1", Path(draft_dir))
    # ... and one process to the end.
    assert sorted(path.name for path in (tmp_path / "adam2/run/checkpoints").iterdir()) == [
        "step_00000004",
        "step_00000005",
    ]
    _, err = door.ok(*run("adam2", 1, 8), *ADAM)
    agree(tmp_path / "adam2", tmp_path / "adam1", Path(draft_dir))
    for index in range(len(others)):
        one, two = (tmp_path / f"other{index}-{processes}" for processes in (1, 2))
        assert ["8/8" in each for each in said(2 + index, "err")].count(True) == 1  # one speaks
        assert json.loads((two / "draftsmith.json").read_text())["processes"] == 2
        agree(two, one)
        judged = [line["heldout_loss"] for line in metrics(two, "heldout_loss")]
        assert judged[-1] < 0.98 * judged[0]


FSDP = {"ACCELERATE_USE_FSDP": "true", "FSDP_VERSION": "1", "WORLD_SIZE": "2"}


IGNORED = {
    "fp16": {"ACCELERATE_MIXED_PRECISION": "fp16"},
    "accumulation": {"ACCELERATE_GRADIENT_ACCUMULATION_STEPS": "4"},
    "FSDP 1": FSDP,
    # Nobody else can be found: each would train a copy of its own.
    "one of two": {"WORLD_SIZE": "2"},
    "alone": {"ACCELERATE_MIXED_PRECISION": "no", "MASTER_ADDR": "127.0.0.1"},
}


@pytest.mark.parametrize("case", IGNORED)
@pytest.mark.usefixtures("door")  # which makes accelerate forget its state
def test_a_launcher_that_would_be_ignored_is_refused(case, monkeypatch, golden):
    environment = IGNORED[case]
    # accelerate leaves marks of its own in the environment; all is put back.
    for name in (
        *environment,
        "RANK",
        "LOCAL_RANK",
        "LOCAL_WORLD_SIZE",
        "MASTER_PORT",
        "WORLD_SIZE",
    ):
        monkeypatch.setenv(name, environment.get(name, "0"))
        if name not in environment:
            monkeypatch.delenv(name)
    with golden.raises(DraftsmithError):
        make_world(TrainConfig(out="o", data=["d"], draft="d", device="cpu"))


def test_muon_is_refused_before_deepspeed_starts(monkeypatch, golden):
    pytest.importorskip("deepspeed")
    monkeypatch.setenv("ACCELERATE_USE_DEEPSPEED", "true")
    config = TrainConfig(out="o", data=["d"], draft="d", device="cpu", optim=Optim(name="muon"))
    with golden.raises():
        make_world(config)


@pytest.mark.parametrize("path", sorted(CONFIGS.glob("*.yaml")), ids=lambda path: path.name)
def test_launch_files_say_how_they_are_called(path):
    from accelerate.commands.config.config_args import load_config_from_file

    config = load_config_from_file(str(path))
    assert config.num_processes == 2
    assert config.mixed_precision == "no"
    assert path.name in path.read_text()
