"""Law 7 in one table: each stage is killed, stopped, left without room on the disk, and its files
damaged, at every moment at which they change. Started again, it ends with the bytes of a run that
nothing happened to, or names the damaged file.
"""

import errno
import json
import os
import random
import shutil
import signal
from contextlib import contextmanager
from pathlib import Path

import pytest

from draftsmith.core.runs import Journal
from tests.distilled import write_rows
from tests.results_made_up import timeless

# Training draws random numbers at every step.
DATA = "--data SET OTHER --mixing_temperature 3 --max_length 48"
TRAIN = f"{DATA} --batch_size 2 --steps 4 --eval_every 2 --save_every 2 --keep 1"
EVAL = "--max_new_tokens 4 --max_prompts 3 --tree chain:2 --temperature 1 --speed_prompts 0"
PAIR = "--target TARGET --draft DRAFT"
SAMPLED = "--prompts PROMPTS --num_samples 2 --temperature 1 --batch_size 1 --max_new_tokens 5"
STAGES = {
    "distill": f"distill --target TARGET {SAMPLED} --part_rows 4 --out out",
    "score": "distill --target TARGET --score SET --teacher_top_k 5 --out out",
    "train": f"train --draft DROPOUT {TRAIN} --optim.name muon --optim.schedule wsd --out out",
    "head": f"train --kind eagle --head.noise 0.2 --target TARGET {TRAIN} --out out",
    "eval": f"eval --target TARGET --draft a=DRAFT --id b=PROMPTS {EVAL} --bootstrap 100 --out out",
    "decode": f"decode {PAIR} {SAMPLED} --out out/rows.jsonl",
}
OUT = Path("out")
Files = dict[str, bytes]


@pytest.fixture
def start(target_dir, draft_dir, dropout_dir, answers, tmp_path, monkeypatch, door, undrawn):
    """`start(stage)` runs it: exit code and standard error."""
    monkeypatch.chdir(tmp_path)
    prompts = write_rows("p.jsonl", *({"prompt": f"The {n}"} for n in range(5)), "no row")
    names = {
        "TARGET": target_dir,
        "DRAFT": draft_dir,
        "DROPOUT": dropout_dir,
        "SET": answers("The quick brown fox", 1, 1, 6),
        "OTHER": answers("Numbers such as 12", 1, 1, 6),
        "PROMPTS": prompts,
    }

    def run(stage):
        words = STAGES[stage]
        for name, value in names.items():
            words = words.replace(name, value)
        code, _, err = door(*words.split())
        return code, err

    return run


def before(patch, owner, name, action):
    work = getattr(owner, name)

    def watched(*given, **options):
        action()
        return work(*given, **options)

    patch.setattr(owner, name, watched)


# What keeps a line of a journal, what brings a file onto the disk, and what changes a name there.
CHANGES = ("append", "fsync", "replace", "rename", "mkdir", "rmdir", "unlink")


@contextmanager
def at_each(names, action):
    """Do it before each of these calls."""
    with pytest.MonkeyPatch.context() as patch:
        for name in names:
            before(patch, Journal if name == "append" else os, name, action)
        yield


def found():
    """Every file by its name."""
    paths = [path for path in OUT.rglob("*") if path.is_file()]
    return {str(path): path.read_bytes() for path in sorted(paths)}


def made():
    """What a run made, without its clock."""
    files = found()
    if (OUT / "results.json").exists():
        results = timeless(json.loads(files.pop("out/results.json")))
        del results["provenance"]
        files["results"] = json.dumps(results).encode()
    if (OUT / "rows.jsonl").exists():
        rows = [json.loads(line) for line in files["out/rows.jsonl"].splitlines()]
        for row in rows:
            del row["stats"]["seconds"]
        # A last file that was not yet renamed stays beside the rows.
        return {"rows": json.dumps(rows).encode()}
    return files


def put_back(files):
    """The directory of a run that was killed, by a process of another number."""
    shutil.rmtree(OUT)
    for name, content in files.items():
        path = Path(name.replace(f"-tmp{os.getpid()}", "-tmp1"))
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(content)


LONG = ("train", "head")


every_stage = pytest.mark.parametrize(
    "stage",
    [pytest.param(stage, marks=pytest.mark.slow(20) if stage in LONG else ()) for stage in STAGES],
)


def moments_of(stage, start):
    """Run it; what lay on the disk at each moment at which a file changed."""
    moments: dict[int, Files] = {}

    def keep():
        files = found()
        moments.setdefault(hash(tuple(files.items())), files)

    with at_each(CHANGES, keep):
        assert start(stage)[0] == 0
    assert len(moments) > 1
    return list(moments.values())


@every_stage
def test_killed_at_any_moment(stage, start):
    """What a process leaves when it is killed is what lies on the disk at that moment."""
    moments = moments_of(stage, start)
    whole = made()
    for files in moments:
        put_back(files)
        code, err = start(stage)
        assert code == 0, err
        assert made() == whole, sorted(files)


# Files that a later run trusts; a person reads the others.
TRUSTED = (".safetensors", ".parquet", ".npy", ".json", ".sha256", ".partial", ".answers.jsonl")
FLIPS = 20


@pytest.mark.slow(20)
@pytest.mark.parametrize("stage", STAGES)
def test_a_flipped_bit_is_made_good_or_named(stage, start):
    """At any moment, in any file that a later run trusts."""
    moments = [*moments_of(stage, start), found()]
    whole = made()
    draw = random.Random(0)
    for _ in range(FLIPS):
        files = dict(draw.choice(moments))
        names = [name for name in files if name.endswith(TRUSTED) and files[name]]
        if not names:
            continue
        name = draw.choice(names)
        content = bytearray(files[name])
        content[draw.randrange(len(content))] ^= 1 << draw.randrange(8)
        put_back(files | {name: bytes(content)})
        code, err = start(stage)
        if code:
            # Of checkpoints, when none of them is whole, the directory.
            place = name if "/checkpoints/" not in name else "out/run/checkpoints"
            assert place in err.splitlines()[-1], f"{name}: {err}"
        else:
            assert made() == whole, name


def full():
    raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))


def interrupt():
    signal.raise_signal(signal.SIGINT)


# At which calls, what happens, the exit code, and what is said.
STOPS = {
    "Ctrl-C": (CHANGES, interrupt, 130, ": interrupted"),
    "full disk": (("fsync",), full, 1, "(No space left on device); fix that and run the same"),
}
# `decode` would still hold its lock in this process.
STOPPED = [(stage, how) for how in STOPS for stage in STAGES]
STOPPED.remove(("decode", "Ctrl-C"))


@pytest.mark.slow(10)
@pytest.mark.parametrize(("stage", "how"), STOPPED)
def test_stopped_ever_later(stage, how, start):
    """At its first call, then, started again, at its second, its fourth, and so on to the end."""
    assert start(stage)[0] == 0
    whole = made()
    shutil.rmtree(OUT)
    names, stop, wanted, said = STOPS[how]
    for count in (2**power for power in range(12)):
        actions = iter([*[lambda: None] * (count - 1), stop])
        with at_each(names, lambda: next(actions, lambda: None)()):  # noqa: B023
            code, err = start(stage)
        if code == 0:
            break
        assert code == wanted and said in err.splitlines()[-1], err
    assert count > 1 and made() == whole
