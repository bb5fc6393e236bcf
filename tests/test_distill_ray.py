"""`distill --engine ray`: a local cluster of two processors; workers that die cost nothing but
time.
"""

import importlib.util
import logging
import os
import secrets
import shutil
import signal
import socket
from pathlib import Path
from typing import Any

import pytest

from draftsmith.distill.config import DistillConfig
from draftsmith.distill.generate import distill
from tests.distilled import files, write_rows
from tests.serving import wait_until

NEEDS_RAY = pytest.mark.skipif(
    importlib.util.find_spec("ray") is None, reason="ray is not installed"
)
OPTIONS: dict[str, Any] = {
    "num_samples": 2,
    "max_new_tokens": 9,
    "batch_size": 3,
    "part_rows": 2,
    "seed": 4,
}


@pytest.fixture(scope="module")
def cluster():
    """A cluster of this process alone, with a token of its own: two at a time would share that of
    the user's home.
    """
    import ray

    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("RAY_AUTH_TOKEN", secrets.token_hex(32))
        patch.setenv("RAY_AUTH_MODE", "")  # to be put back: `ray.init` sets it
        patch.delenv("RAY_AUTH_MODE")
        ray.init(
            address="local", num_cpus=2, include_dashboard=False, logging_level=logging.WARNING
        )
        yield
        ray.shutdown()


@pytest.fixture
def prompts(tmp_path):
    chat = [{"role": "user", "content": "Who jumps?"}, {"role": "assistant", "content": "-"}]
    rows: list[dict[str, Any]] = [
        {"prompt": f"The quick brown {number}" * (1 + number % 3)} for number in range(9)
    ]
    rows += [
        {"messages": [*chat, {"role": "user", "content": f"Number {number}"}]}
        for number in range(3)
    ]
    # As large as those of real models: Ray carries them apart from the worker's other arguments.
    (tmp_path / "chat.jinja").write_text(
        "{# " + "x" * 200_000 + " #}"
        "{% for m in messages %}{{ m.role }}: {{ m.content }}\n{% endfor %}model:"
    )
    return write_rows(tmp_path / "prompts.jsonl", *rows)


@NEEDS_RAY
@pytest.mark.slow(60)
def test_workers_make_what_one_process_makes_also_when_they_die(
    cluster, target_dir, prompts, tmp_path, monkeypatch, golden
):
    """An engine gives back what it held however it ends: the second needs both processors, and so
    would a third.
    """
    import ray

    from draftsmith.distill.engines.ray import RayEngine

    broken = shutil.copytree(target_dir, tmp_path / "target")
    (broken / "model.safetensors").write_bytes(b"no tensors")
    common: dict[str, Any] = {"prompts": prompts, "device": "cpu", "teacher_top_k": 4, **OPTIONS}
    common["chat_template"] = str(Path(prompts).parent / "chat.jinja")
    one = distill(DistillConfig(target=target_dir, out=str(tmp_path / "hf"), **common), "x")
    with golden.raises() as refused:  # what is left of it is still referred to
        distill(
            DistillConfig(target=str(broken), out=str(tmp_path / "set"), engine="ray", **common),
            "x",
        )
    assert not (tmp_path / "set").exists()
    run = RayEngine.run
    killed: list[int] = []

    def dying(self, groups, done):
        processes = ray.get(
            [worker.__ray_call__.remote(lambda self: os.getpid()) for worker in self.workers]
        )
        assert len(set(processes)) == 2

        def after(request, answer):
            if not killed:
                killed.extend(processes)
                for process in processes:
                    os.kill(process, signal.SIGKILL)
            return done(request, answer)

        run(self, groups, after)
        again = ray.get(
            [worker.__ray_call__.remote(lambda self: os.getpid()) for worker in self.workers]
        )
        assert not set(again) & set(killed), "the workers that answered are not those that died"

    with monkeypatch.context() as patch:
        patch.setattr(RayEngine, "run", dying)
        config = DistillConfig(
            target=target_dir, out=str(tmp_path / "ray"), engine="ray", workers=2, **common
        )
        many = distill(config, "x")
    assert len(killed) == 2
    assert {key: one[key] for key in one if key != "out"} == {
        key: many[key] for key in many if key != "out"
    }
    assert one["rows"] == 30 and len(files(tmp_path / "hf", "part-*")) == 12
    assert files(tmp_path / "ray", "part-*") == files(tmp_path / "hf", "part-*")
    wait_until(lambda: ray.available_resources().get("CPU") == 2)
    assert refused.tb is not None


@NEEDS_RAY
def test_no_cluster_is_joined_unasked_and_an_address_must_answer(
    target_dir, prompts_file, door, tmp_path, monkeypatch, golden
):
    """Ray by itself joins whichever cluster was begun on this machine, and tries a dead address for
    minutes.
    """
    addresses: list[str] = []

    def init(address, **options):
        addresses.append(address)
        raise ConnectionError("not today")

    monkeypatch.setattr("ray.is_initialized", lambda: False)
    monkeypatch.setattr("ray.init", init)
    monkeypatch.delenv("RAY_ADDRESS", raising=False)
    monkeypatch.delenv("RAY_AUTH_MODE", raising=False)
    words = (
        f"distill --target {target_dir} --prompts {prompts_file} --out {tmp_path}/set --engine ray"
    ).split()
    for address in ("", "auto"):
        door.refused(*words, *(["--address", address] if address else []))
    with socket.socket() as bound:  # and does not listen
        bound.bind(("127.0.0.1", 0))
        address = f"127.0.0.1:{bound.getsockname()[1]}"
        code, _, err = door(*words, "--address", address)
        assert code == 2 and len(err.strip().splitlines()) == 1
        golden(err)
    assert addresses == ["local", "auto"]
