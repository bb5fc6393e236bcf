"""Two nodes on one machine, each with its own launcher, directory, data and options: what differs
between them is named on both before anything is done.
"""

import json
import os
import socket
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from tests.distilled import write_rows

ROOT = Path(__file__).parents[1]
# Run by both nodes: commands in turn, each in a fork of its own, because a launch spends most of
# its time on imports. Their rendezvous is the launcher's store, where each command has keys of its
# own. Leaves JOB.RANK.err and .code beside the jobs.
DRIVER = """
import gc, json, os, sys
from importlib.util import find_spec
from pathlib import Path
import torch.distributed
import draftsmith.alignment.stages, draftsmith.distill.engines.hf
from draftsmith.__main__ import main
from draftsmith.core import runs
if find_spec("deepspeed"):
    import deepspeed  # accelerate imports it in every run

gc.freeze()
runs._SHOWN_S = 1
rendezvous = sys.modules["torch.distributed.rendezvous"]  # a function hides it in torch.distributed
store = rendezvous._create_c10d_store
rank = int(os.environ["RANK"])
jobs = Path(sys.argv[1])
for number, words in enumerate(json.loads(jobs.read_text())):
    there = jobs.parent / f"{number}.{rank}"
    pid = os.fork()
    if pid:
        code = os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
        Path(f"{there}.code").write_text(str(code))
        continue
    os.dup2(os.open(f"{there}.err", os.O_WRONLY | os.O_CREAT), 2)
    rendezvous._create_c10d_store = lambda *words, **more: torch.distributed.PrefixStore(
        f"job {number}", store(*words, **more)
    )
    sys.exit(main(words[rank]))
"""
ALIKE = "; give every process the same options, files and versions"


@pytest.fixture
def nodes(tmp_path, target_dir, draft_dir, dropout_dir, answers):
    """The directories of two nodes: the same names, other content."""
    texts = ("A draft model proposes tokens", "Numbers such as 12, 345")
    for node, (text, draft) in enumerate(zip(texts, (draft_dir, dropout_dir), strict=True)):
        place = tmp_path / f"node{node}"
        place.mkdir()
        rows: list[dict[str, Any]] = [{"prompt": text[: 5 + number]} for number in range(16)]
        write_rows(place / "prompts.jsonl", *rows)
        (place / "set").symlink_to(answers(text, 2, 1, 12))
        (place / "draft").symlink_to(draft)
    write_rows(tmp_path / "whole.jsonl", *rows)
    rows[6] = {"nothing": 1}
    write_rows(tmp_path / "broken.jsonl", *rows)
    return tmp_path


def launch_nodes(there, jobs):
    """Run the jobs on two nodes."""
    (there / "driver.py").write_text(DRIVER)
    (there / "jobs.json").write_text(json.dumps(jobs))
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    launchers = []
    for node in (0, 1):
        command = (
            f"{sys.executable} -m accelerate.commands.launch --multi_gpu --num_processes 2 "
            f"--num_machines 2 --machine_rank {node} --main_process_ip 127.0.0.1 "
            f"--main_process_port {port} {there}/driver.py {there}/jobs.json"
        )
        env = os.environ | {"PYTHONPATH": str(ROOT)}
        launchers.append(subprocess.Popen(command.split(), cwd=there / f"node{node}", env=env))
    assert [launcher.wait() for launcher in launchers] == [0, 0]


@pytest.mark.slow(60)
def test_nodes_that_differ_are_refused_on_both(nodes, target_dir, draft_dir):
    same = f"--target {target_dir} --device cpu"
    data = (nodes / "node0" / "set").readlink()
    train = f"train {same} --objective fkl --max_length 32 --steps 2 --optim.lr 1e-3"
    train_draft = f"{train} --draft {draft_dir}"
    distill = f"distill {same} --max_new_tokens 8 --part_rows 4 --batch_size 2"
    # The options, what the second node has in place of a word, exit codes, and what both say.
    cases: list[tuple[str, dict[str, str], list[int], str]] = [
        (
            f"{train_draft} --data {data}",
            {"1e-3": "5e-3"},
            [2, 2],
            f"optim.lr is 0.001, on rank 1 it is 0.005{ALIKE}",
        ),
        (f"{train_draft} --data set", {}, [2, 2], f"data differs on rank 1{ALIKE}"),
        (
            f"{train} --data {data} --draft draft",
            {},
            [2, 2],
            f"initial fingerprint differs on rank 1{ALIKE}",
        ),
        (f"{distill} --prompts prompts.jsonl", {}, [2, 2], f"prompts differs on rank 1{ALIKE}"),
        (
            f"eval {same} --draft d={draft_dir} --id x=prompts.jsonl",
            {},
            [2, 2],
            f"prompts.x differs on rank 1{ALIKE}",
        ),
        (
            f"align {same} --draft {draft_dir} --prompts prompts.jsonl",
            {},
            [2, 2],
            f"prompts differs on rank 1{ALIKE}",
        ),
        (f"{distill} --strict --prompts {nodes}/broken.jsonl", {}, [1, 2], "rank 1: "),
        (f"{distill} --prompts {nodes}/whole.jsonl", {}, [0, 0], ""),
    ]
    jobs: list[list[list[str]]] = []
    for number, (options, others, _, _) in enumerate(cases):
        words = f"{options} --out {nodes}/{number}".split()
        jobs.append([words, [others.get(word, word) for word in words]])
    # Each node would write into a directory of its own.
    words = f"{distill} --prompts {nodes}/whole.jsonl --out here".split()
    cases.append(("", {}, [2, 2], "rank 1: --out: here lacks what rank 0 wrote there"))
    jobs.append([words, words])
    launch_nodes(nodes, jobs)
    for number, (options, _, codes, reason) in enumerate(cases):
        said = [(nodes / f"{number}.{rank}.err").read_text() for rank in (0, 1)]
        found = [int((nodes / f"{number}.{rank}.code").read_text()) for rank in (0, 1)]
        assert found == codes, (options, said)
        for text in said if reason else ():
            assert text.splitlines()[-1].partition(": ")[2].startswith(reason), (options, said)
            assert "Traceback" not in text, text
        assert (nodes / str(number)).exists() == (codes != [2, 2]), options
    assert not (nodes / "node0" / "here").exists()
