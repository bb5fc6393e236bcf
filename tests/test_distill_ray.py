"""`distill --engine ray`: a local cluster of two processors; workers that die cost nothing but time."""

import importlib.util
import json
import logging
import os
import secrets
import shutil
import signal
import socket
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from distill.config import DistillConfig
from distill.engines import AnswerRequest
from distill.generate import distill
from draftsmith_core.errors import InputError, RunError
from draftsmith_core.tokenization import load_tokenizer

Door = Callable[..., tuple[int, str, str]]
NEEDS_RAY = pytest.mark.skipif(importlib.util.find_spec("ray") is None, reason="ray is not installed")
OPTIONS: dict[str, Any] = {"num_samples": 2, "max_new_tokens": 9, "batch_size": 3, "part_rows": 2, "seed": 4}


TOKEN = ("RAY_AUTH_MODE", "RAY_AUTH_TOKEN")


@pytest.fixture(scope="module")
def cluster() -> Iterator[None]:
    """A cluster of this process alone. Its token is its own: two that begin at the same time would both write the one
    of the user's home.
    """
    import ray

    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("RAY_AUTH_TOKEN", secrets.token_hex(32))
        patch.setenv("RAY_AUTH_MODE", "")  # to be put back: `ray.init` sets it
        patch.delenv("RAY_AUTH_MODE")
        ray.init(address="local", num_cpus=2, include_dashboard=False, logging_level=logging.WARNING)
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
    token = {name: os.environ[name] for name in TOKEN}  # spawn's processes are of an older environment than this one
    for part in (2, 5):
        patch = KILL_IN_PART.format(count=part)
        code, _, err = spawn(*words, cwd=tmp_path, env=token, patch=patch).wait()
        assert code == -signal.SIGKILL, err
    made = parts(tmp_path / "ray")
    assert 5 <= len(made) < 12
    code, _, err = spawn(*words, cwd=tmp_path, env=token).wait()
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
def test_an_engine_gives_back_what_it_held_however_it_ends(
    cluster: None, target_dir: str, prompts_file: str, tmp_path: Path
) -> None:
    """Each of these needs both processors; what is left of the ones before is still referred to."""
    from distill.engines.ray import RayEngine

    broken = tmp_path / "target"
    shutil.copytree(target_dir, broken)
    (broken / "model.safetensors").write_bytes(b"no tensors")
    common: dict[str, Any] = {"prompts": prompts_file, "engine": "ray", "device": "cpu", **OPTIONS}
    with pytest.raises(InputError, match=str(broken)) as refused:
        distill(DistillConfig(target=str(broken), out=str(tmp_path / "set"), **common), "x")
    assert not (tmp_path / "set").exists()
    config = DistillConfig(target=target_dir, out=str(tmp_path / "set"), **common)
    engine = RayEngine(config, load_tokenizer(target_dir))
    workers = list(engine._workers)
    engine.close()
    assert distill(config, "x")["rows"] == 16
    assert len(workers) == 1 and refused.tb is not None


@NEEDS_RAY
@pytest.mark.slow
def test_more_workers_than_there_is_room_for_are_said_and_not_waited_for(
    cluster: None, target_dir: str, prompts_file: str, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    from distill.engines.ray import RayEngine

    common: dict[str, Any] = {"target": target_dir, "prompts": prompts_file, "engine": "ray", "device": "cpu"}
    config = DistillConfig(out=str(tmp_path / "set"), workers=4, **common, **OPTIONS)
    assert distill(config, "x")["rows"] == 16
    said = "the cluster has room for 2 of 4 workers, each of which needs {'num_cpus': 1}; the others start when it has"
    assert [line.startswith(said) for line in caplog.messages] == [True]
    engine = RayEngine(config, load_tokenizer(target_dir))
    engine._workers.insert(0, engine._workers.pop())  # that which has started need not be the first
    assert engine.seconds_per_token([AnswerRequest((1, 0, 0), (5, 6, 7), 1)]).keys() == {""}
    engine.close()


@NEEDS_RAY
@pytest.mark.slow
def test_a_worker_that_dies_whenever_it_starts_is_an_error(
    cluster: None, target_dir: str, prompts_file: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    import ray.cloudpickle

    import distill.engines.ray as module

    monkeypatch.setattr(module, "_RESTARTS", 1)
    monkeypatch.setattr(module.Worker, "__init__", lambda self, config, tokenizer: os._exit(1))
    ray.cloudpickle.register_pickle_by_value(module)  # else the worker imports the class, which can start
    try:
        with pytest.raises(RunError, match=r"a worker died .* or 2 times in all .*; the same command continues"):
            common: dict[str, Any] = {"target": target_dir, "prompts": prompts_file, "device": "cpu"}
            distill(DistillConfig(out=str(tmp_path / "set"), engine="ray", **common), "x")
    finally:
        ray.cloudpickle.unregister_pickle_by_value(module)


@NEEDS_RAY
@pytest.mark.parametrize(
    ("nodes", "workers", "each"),
    [
        ([2], 1, 2),
        ([2], 2, 1),
        ([2], 5, 1),
        ([64, 2], 2, 32),
        ([8, 8], 2, 8),
        ([8, 8], 3, 4),
        ([0, 16], 1, 16),
        ([], 1, 1),
    ],
)
def test_processors_are_shared_so_that_all_workers_find_room(nodes: list[int], workers: int, each: int) -> None:
    """A worker that asked for more than any node has would be waited for without end."""
    from distill.engines.ray import processors_each

    assert processors_each(nodes, workers) == each


@NEEDS_RAY
def test_a_cluster_that_nobody_named_is_not_joined(
    target_dir: str, prompts_file: str, door: Door, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Ray by itself joins whichever cluster was begun on this machine."""
    asked: list[str] = []

    def init(address: str, **options: Any) -> None:
        asked.append(address)
        raise ConnectionError("not today")

    monkeypatch.setattr("ray.is_initialized", lambda: False)
    monkeypatch.setattr("ray.init", init)
    monkeypatch.delenv("RAY_ADDRESS", raising=False)
    monkeypatch.delenv("RAY_AUTH_MODE", raising=False)
    words = f"distill --target {target_dir} --prompts {prompts_file} --out {tmp_path}/set --engine ray".split()
    code, _, err = door(*words)
    assert code == 1
    assert err.strip() == "draftsmith distill: ray: no local cluster could be started (not today)"
    monkeypatch.setenv("RAY_ADDRESS", "ray://head")
    code, _, err = door(*words)
    assert code == 2
    said = "address: no Ray cluster at {}: not today; if it wants a token, set RAY_AUTH_MODE=token"
    assert err.strip() == f"draftsmith distill: {said.format('ray://head')}"
    code, _, err = door(*words, "--address", "auto")
    assert code == 2 and said.format("auto") in err
    assert asked == ["local", "ray://head", "auto"]


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
