"""`distill --engine ray`: a local cluster of two processors; workers that die cost nothing but time."""

import importlib.util
import json
import logging
import os
import signal
import socket
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from distill.config import DistillConfig
from distill.generate import distill
from draftsmith_core.errors import InputError

Door = Callable[..., tuple[int, str, str]]
NEEDS_RAY = pytest.mark.skipif(importlib.util.find_spec("ray") is None, reason="ray is not installed")
OPTIONS: dict[str, Any] = {"num_samples": 2, "max_new_tokens": 9, "batch_size": 3, "part_rows": 2, "seed": 4}


@pytest.fixture(scope="module")
def cluster() -> Iterator[None]:
    import ray

    ray.init(num_cpus=2, include_dashboard=False, logging_level=logging.WARNING)
    yield
    ray.shutdown()


def parts(directory: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in sorted(directory.glob("part-*"))}


@pytest.fixture
def prompts(tmp_path: Path) -> str:
    chat = [{"role": "user", "content": "Who jumps?"}, {"role": "assistant", "content": "-"}]
    rows: list[dict[str, Any]] = [{"prompt": f"The quick brown {number}" * (1 + number % 3)} for number in range(9)]
    rows += [{"messages": [*chat, {"role": "user", "content": f"Number {number}"}]} for number in range(3)]
    (tmp_path / "prompts.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    (tmp_path / "chat.jinja").write_text("{% for m in messages %}{{ m.role }}: {{ m.content }}\n{% endfor %}model:")
    return str(tmp_path / "prompts.jsonl")


@NEEDS_RAY
@pytest.mark.slow
def test_workers_make_what_one_process_makes_also_when_they_die(
    cluster: None, target_dir: str, prompts: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    import ray

    from distill.engines.ray import RayEngine

    common: dict[str, Any] = {"target": target_dir, "prompts": prompts, "device": "cpu", "teacher_top_k": 4, **OPTIONS}
    common["chat_template"] = str(Path(prompts).parent / "chat.jinja")
    one = distill(DistillConfig(out=str(tmp_path / "hf"), **common), "x")
    run = RayEngine.run
    killed: list[int] = []

    def dying(self: RayEngine, groups: Any, done: Any) -> None:
        processes = ray.get([worker.process.remote() for worker in self._workers])
        assert len(set(processes)) == 2

        def after(request: Any, answer: Any) -> Any:
            if not killed:
                killed.extend(processes)
                for process in processes:
                    os.kill(process, signal.SIGKILL)
            return done(request, answer)

        run(self, groups, after)
        again = ray.get([worker.process.remote() for worker in self._workers])
        assert not set(again) & set(killed), "the workers that answered are not those that died"

    monkeypatch.setattr(RayEngine, "run", dying)
    many = distill(DistillConfig(out=str(tmp_path / "ray"), engine="ray", workers=2, **common), "x")
    assert len(killed) == 2
    assert {key: one[key] for key in one if key != "out"} == {key: many[key] for key in many if key != "out"}
    assert one["rows"] == 30 and len(parts(tmp_path / "hf")) == 12
    assert parts(tmp_path / "ray") == parts(tmp_path / "hf")


@NEEDS_RAY
@pytest.mark.slow
def test_a_killed_run_continues_on_the_same_cluster(
    cluster: None, target_dir: str, prompts: str, tmp_path: Path, spawn: Callable[..., Any]
) -> None:
    """Two kills, each as a part is written: a run takes seconds to start its worker."""
    import ray

    from tests.test_distill_generate import KILL_IN_PART

    common: dict[str, Any] = {"target": target_dir, "prompts": prompts, "device": "cpu", **OPTIONS}
    common["chat_template"] = str(Path(prompts).parent / "chat.jinja")
    distill(DistillConfig(out=str(tmp_path / "hf"), **common), "x")
    common |= {"out": str(tmp_path / "ray"), "engine": "ray", "workers": 1}
    common["address"] = ray.get_runtime_context().gcs_address
    words = ["distill", *(word for key, value in common.items() for word in (f"--{key}", value))]
    for part in (2, 5):
        assert spawn(*words, cwd=tmp_path, patch=KILL_IN_PART.format(count=part)).wait()[0] == -signal.SIGKILL
    made = parts(tmp_path / "ray")
    assert 5 <= len(made) < 12
    code, _, err = spawn(*words, cwd=tmp_path).wait()
    assert code == 0, err
    assert parts(tmp_path / "ray") == parts(tmp_path / "hf")
    counts = json.loads((tmp_path / "ray/manifest.json").read_text())["counts"]
    assert (counts["prompts_read"], counts["prompts_done"]) == (12, 12)
    assert counts["prompts_skipped"] == counts["prompts_failed"] == 0


@NEEDS_RAY
@pytest.mark.slow
def test_one_worker_drafts_as_one_process_does(
    cluster: None, target_dir: str, draft_dir: str, prompts_file: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from distill.engines.hf import HFEngine
    from distill.engines.ray import RayEngine

    for engine in (HFEngine, RayEngine):
        monkeypatch.setattr(engine, "seconds_per_token", lambda self, requests: {"": 2.0, "chain:2": 1.0})
    common: dict[str, Any] = {"target": target_dir, "prompts": prompts_file, "draft": draft_dir, **OPTIONS}
    for name in ("hf", "ray"):
        distill(DistillConfig(out=str(tmp_path / name), engine=name, device="cpu", **common), "x")
    assert json.loads((tmp_path / "ray" / "manifest.json").read_text())["drafted"] == "chain:2"
    assert parts(tmp_path / "ray") == parts(tmp_path / "hf")


@NEEDS_RAY
@pytest.mark.slow
def test_what_is_wrong_with_a_target_is_one_line(
    cluster: None, target_dir: str, prompts_file: str, tmp_path: Path
) -> None:
    import shutil

    broken = tmp_path / "target"
    shutil.copytree(target_dir, broken)
    (broken / "model.safetensors").write_bytes(b"no tensors")
    config = DistillConfig(target=str(broken), prompts=prompts_file, out=str(tmp_path / "set"), engine="ray")
    with pytest.raises(InputError, match=str(broken)):
        distill(config, "x")
    assert not (tmp_path / "set").exists()


@NEEDS_RAY
def test_an_address_where_nothing_answers_is_refused_at_once(
    target_dir: str, prompts_file: str, door: Door, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("ray.is_initialized", lambda: False)
    with socket.socket() as bound:  # and listens to nobody
        bound.bind(("127.0.0.1", 0))
        address = f"127.0.0.1:{bound.getsockname()[1]}"
        words = f"distill --target {target_dir} --prompts {prompts_file} --out {tmp_path}/set --engine ray".split()
        for each in (address, f"ray://{address}"):
            code, _, err = door(*words, "--address", each)
            assert code == 2 and f"draftsmith distill: address: no Ray cluster at {each}: " in err
            assert len(err.strip().splitlines()) == 1


def test_without_ray_it_says_how_to_install_it(
    target_dir: str, prompts_file: str, tmp_path: Path, door: Door, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("draftsmith_core.packages.is_installed", lambda package: package != "ray")
    words = f"distill --target {target_dir} --prompts {prompts_file} --out {tmp_path}/set --engine ray".split()
    code, _, err = door(*words)
    assert code == 2
    assert err.strip() == (
        "draftsmith distill: --engine ray: needs ray, which is not installed; pip install 'draftsmith[ray]'"
    )


def test_options_of_another_engine_are_refused(target_dir: str, prompts_file: str, door: Door, tmp_path: Path) -> None:
    words = f"distill --target {target_dir} --prompts {prompts_file} --out {tmp_path}/set".split()
    for option, said in (("--workers 2", "workers: is for ray"), ("--address auto", "address: is for ray")):
        code, _, err = door(*words, *option.split())
        assert code == 2 and f"{said}; add --engine ray, or leave it out" in err
    code, _, err = door(*words, "--engine", "ray", "--workers", "0")
    assert code == 2 and "workers: 0 must be at least 1" in err
