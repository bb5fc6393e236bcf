"""Training beside servers that write the target's states while it reads them."""

import itertools
import json
import shlex
from contextlib import contextmanager
from types import SimpleNamespace
from typing import Any

import pytest
from transformers import AutoConfig

from benchmarks.lib.engines import vllm_server
from draftsmith.core.errors import RunError
from draftsmith.core.options import command_line
from draftsmith.core.records import read_record
from draftsmith.distill.config import StatesConfig
from draftsmith.distill.engines import openai
from draftsmith.distill.states import write_states
from draftsmith.drafts.heads.eagle3 import aux_layers
from draftsmith.train import states_ahead
from draftsmith.train.config import HeadOptions, Optim, TrainConfig
from draftsmith.train.training_run import train
from tests import test_distill_vllm
from tests.conftest import ROOT
from tests.distilled import write_rows
from tests.door import forget_processes
from tests.openvino_ir import engine
from tests.serving import serving
from tests.test_states_engine import writer
from tests.train_laws import BEFORE, close

ROWS = 48
# Requests before the first row: the trial, one text alone, and two together.
FIRST = 4
# Less than a fifth of what the rows take.
SMALL = 4e-5
RUN: dict[str, Any] = {
    "kind": "eagle3",
    "objective": "fkl",
    "max_length": 48,
    "batch_size": 4,
    "heldout_fraction": 0.2,
    "steps": 18,
    "eval_every": 9,
    "save_every": 4,
    "device": "cpu",
}


HEAD = HeadOptions(test_steps=2)


def trained(out, **options):
    forget_processes()
    train(TrainConfig(**RUN | {"head": HEAD} | options, out=str(out)))
    return out


def words_of(out, **options):
    config = TrainConfig(**RUN | {"head": HEAD} | options, out=str(out))
    return shlex.split(command_line("train", config))[1:]


def same(found, wanted):
    for name in ("model.safetensors", "run/metrics.jsonl"):
        assert (found / name).read_bytes() == (wanted / name).read_bytes()


@pytest.fixture(scope="module")
def pair(quiet_dir, distilled):
    return {"target": quiet_dir, "data": [distilled]}


@pytest.fixture(scope="module")
def whole(pair, tmp_path_factory, tokenizer):
    """A finished set of states."""
    place = tmp_path_factory.mktemp("far")
    states = str(place / "states")
    target = pair["target"]
    with serving("vllm", tokenizer, states=writer(target, place)) as server:
        asked = {"target": target, "engine": "openai", "endpoint": [server.url]}
        write_states(StatesConfig(**asked, states=states, states_of=pair["data"]))
    return states


@pytest.fixture(scope="module")
def far(pair, tmp_path_factory, whole):
    """The draft that a finished set of states trains."""
    return trained(tmp_path_factory.mktemp("far") / "draft", **pair, states=whole)


def watched(states, place, sizes):
    """Writes states, and notes how much is on disk then."""

    def write(given):
        path = states(given)
        total = 0
        for file in [*place.glob("served/*"), *place.glob("states/online-*/*/*")]:
            try:
                total += file.stat().st_size
            except FileNotFoundError:
                continue
        sizes.append(total)
        return path

    return write


@pytest.mark.parametrize(
    ("gib", "least", "most"), [(None, ROWS, ROWS), (SMALL, ROWS + 1, 2 * ROWS)]
)
def test_states_are_read_while_they_are_written(
    gib, least, most, pair, far, tokenizer, tmp_path, capsys
):
    """As from a finished set. Each row is asked for once; with less room, when it comes back, and
    the room holds all that is there.
    """
    sizes: list[int] = []
    states = watched(writer(pair["target"], tmp_path), tmp_path, sizes)
    with serving("vllm", tokenizer, states=states) as server:
        place = {"states": str(tmp_path / "states"), "states_gib": gib}
        trained(tmp_path / "near", **pair, **place, states_from=[server.url])
        assert least + FIRST <= len(server.bodies) <= most + FIRST
    same(tmp_path / "near", far)
    assert max(sizes) < (gib or 1) * 2**30 and not list(tmp_path.glob("states/online-*"))
    assert not list(tmp_path.glob("served/*"))
    assert "waited" in capsys.readouterr().err


# Layers that each reads, and options.
OTHERS: dict[str, tuple[tuple[int, ...], dict[str, Any]]] = {
    # Its steps read no states, only evaluations do.
    "ce": ((2,), {"kind": "lm", "objective": "ce", "head": HeadOptions()}),
    # Reads held-out rows once more in the end.
    "dspark": ((1, 2), {"kind": "dspark", "head": HeadOptions(num_layers=1, target_layers=[0])}),
    "packed": ((0, 1, 2), {"packing": True, "accumulation": 2, "patience": 1}),
}


@pytest.mark.slow(8)
@pytest.mark.parametrize("name", OTHERS)
def test_what_is_read_is_asked_for_in_that_order(name, pair, whole, draft_dir, tokenizer, tmp_path):
    layers, own = OTHERS[name]
    options = pair | own | ({"draft": draft_dir} if name == "ce" else {})
    trained(tmp_path / "far", **options, states=whole)
    with serving("vllm", tokenizer, states=writer(pair["target"], tmp_path, layers)) as server:
        place = {"states": str(tmp_path / "states"), "states_gib": SMALL}
        trained(tmp_path / "near", **options, **place, states_from=[server.url])
    same(tmp_path / "near", tmp_path / "far")


def test_it_learns_as_beside_the_target(pair, far, tmp_path):
    close(trained(tmp_path / "local", **pair), far)


@pytest.fixture
def dying(tokenizer, monkeypatch):
    """`dying(states)`: a server that is gone after some rows."""
    monkeypatch.setattr(openai, "LONGEST_PAUSE_S", 0.02)
    monkeypatch.setattr(states_ahead, "_CONCURRENCY", 4)

    @contextmanager
    def dies(states):
        def misbehave(number):
            if number < FIRST + 20:
                return None
            server.server_close()
            return "reset"

        with serving("vllm", tokenizer, states=states, misbehave=misbehave) as server:
            yield server

    return dies


def test_a_server_that_dies_is_left_out(pair, far, tokenizer, tmp_path, capsys, dying, golden):
    states = writer(pair["target"], tmp_path)
    with serving("vllm", tokenizer, states=states) as lives, dying(states) as dead:
        place = {"states": str(tmp_path / "states"), "states_gib": SMALL}
        trained(tmp_path / "near", **pair, **place, states_from=[lives.url, dead.url])
        same(tmp_path / "near", far)
        said = capsys.readouterr().err
        assert said.count(f"draftsmith: {dead.url}: ") == 1
        golden(said, having="others")


@pytest.mark.slow(20)
def test_a_run_that_ends_early_goes_on_to_the_same_draft(
    pair, far, tokenizer, tmp_path, door, spawn, dying, monkeypatch
):
    """Killed in a step; then all servers are gone. A minute passes whenever the engine looks."""
    minutes = itertools.count(step=60)
    monkeypatch.setattr(openai, "time", SimpleNamespace(monotonic=lambda: next(minutes)))
    states = writer(pair["target"], tmp_path)

    def words(server):
        place = {"states": str(tmp_path / "states"), "states_gib": SMALL}
        return words_of(tmp_path / "near", **pair, **place, states_from=[server.url])

    with serving("vllm", tokenizer, states=states) as server:
        patch = BEFORE + "before(draftsmith.train.loop, 'learning_rate', 7, KILL)"
        spawn(*words(server), cwd=tmp_path, patch=patch).wait(-9)
        assert list(tmp_path.glob("states/online-*/0/*"))
    with dying(states) as server:
        door.refused(*words(server), code=1)
    with serving("vllm", tokenizer, states=states) as server:
        door.ok(*words(server))
    same(tmp_path / "near", far)


@pytest.mark.slow(30)
def test_each_process_asks_for_its_own_rows(pair, whole, tokenizer, tmp_path, launch):
    sgd = pair | {"optim": Optim(name="sgd", lr=0.5)}
    one = trained(tmp_path / "one", **sgd, states=whole)
    sizes: list[int] = []
    states = watched(writer(pair["target"], tmp_path), tmp_path, sizes)
    with serving("vllm", tokenizer, states=states) as server:
        place = {"states": str(tmp_path / "states"), "states_gib": SMALL, "batch_size": 2}
        words = words_of(tmp_path / "two", **sgd | place, states_from=[server.url])
        launch(f"--config_file {ROOT}/configs/accelerate/cpu2.yaml -m draftsmith".split(), *words)
    close(tmp_path / "two", one)
    assert max(sizes) < SMALL * 2**30 and not list(tmp_path.glob("states/online-*"))


def test_what_cannot_be_used_is_one_line(pair, far, tokenizer, tmp_path, golden):
    place: dict[str, Any] = {"states": str(tmp_path / "states")}
    with golden.raises():
        TrainConfig(**RUN, **pair, out="o", states_from=["http://here"])
    with golden.raises():
        TrainConfig(**RUN, **pair, **place, out="o", states_gib=1)
    with golden.raises():
        trained(tmp_path / "near", **pair, **place, states_from=["http://127.0.0.1:1"])
    with golden.raises():
        trained(tmp_path / "near", **pair, **place, states_from=["http://1"], states_gib=1e-6)
    states = writer(pair["target"], tmp_path)
    with serving("vllm", tokenizer, states=states) as server:
        half = {"states_from": [server.url], "dtype": "bfloat16"}
        with golden.raises(RunError):
            trained(tmp_path / "near", **pair, **place, **half)
    assert not (tmp_path / "near").exists()


@pytest.mark.engines
def test_a_head_learns_beside_vllm(tmp_path, door, monkeypatch):
    """As beside the local target; the files are vLLM's own."""
    monkeypatch.chdir(ROOT)
    target = test_distill_vllm.REAL
    prompts = write_rows(
        tmp_path / "p.jsonl", *({"prompt": f"If the lock {number} is not"} for number in range(40))
    )
    there = f"distill --target {target} --prompts {prompts} --out {tmp_path}/set".split()
    door.ok(*there, *"--dtype float32 --max_new_tokens 24".split())
    last = AutoConfig.from_pretrained(target).num_hidden_layers
    layers = {"eagle_aux_hidden_state_layer_ids": [*aux_layers(last), last]}
    drafting = {
        "method": "extract_hidden_states",
        "num_speculative_tokens": 1,
        "draft_model_config": {"hf_config": layers},
    }
    transfer = {
        "kv_connector": "CPUConnector",
        "kv_connector_module_path": "tests.vllm_states_on_cpu",
        "kv_role": "kv_producer",
        "kv_connector_extra_config": {"shared_storage_path": str(tmp_path / "served")},
    }
    words = f"--model {target} --dtype float32 --enforce-eager --max-num-seqs 8".split()
    words += ["--speculative-config", json.dumps(drafting)]
    words += ["--kv-transfer-config", json.dumps(transfer)]
    options = {"target": target, "data": [str(tmp_path / "set")]}
    with vllm_server(engine("vllm"), words) as port:
        place = {"states": str(tmp_path / "states"), "states_gib": 1e-3}
        address = f"http://127.0.0.1:{port}/v1"
        trained(tmp_path / "near", **options, **place, states_from=[address])
    trained(tmp_path / "local", **options)
    alphas = [read_record(tmp_path / name)["heldout_alpha"] for name in ("near", "local")]
    assert alphas[0] == pytest.approx(alphas[1], abs=0.002)
