"""States from an engine: a stand-in that writes files as vLLM does, rightly and wrongly; then vLLM
itself.
"""

import itertools
import json
import re
import shlex
import shutil
import sys
import threading
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

from draftsmith.core.errors import RunError
from draftsmith.core.hidden_states import body_states
from draftsmith.core.models import load_model
from draftsmith.core.state_store import StoredStates, checkpoint_digest
from draftsmith.distill import states as engine_states
from draftsmith.distill.config import DistillConfig, StatesConfig
from draftsmith.distill.generate import distill
from draftsmith.distill.states import write_states
from draftsmith.drafts.state_likelihood import StateLikelihood
from tests import test_distill_vllm
from tests.conftest import save_model
from tests.distilled import rows_of, write_rows
from tests.serving import serving
from tests.test_docs import ROOT, commands

vllm = test_distill_vllm.vllm


class StatesLLM(test_distill_vllm.LLM):
    """Writes the states of each request beside its answer; `fault` is what is wrong with them."""

    fault = ""
    requests = 0

    def __init__(self, model, **options):
        drafting = options.pop("speculative_config")
        extra = options.pop("kv_transfer_config")["kv_connector_extra_config"]
        assert drafting["method"] == "extract_hidden_states"
        hf_config = drafting["draft_model_config"]["hf_config"]
        self.layers = hf_config["eagle_aux_hidden_state_layer_ids"]
        self.place = Path(extra["shared_storage_path"])
        self.model = load_model(model, device="cpu")
        self.together = 0
        super().__init__(model, **options)

    def generate(self, prompts, *arguments, **options):
        self.together = len(prompts)
        return super().generate(prompts, *arguments, **options)

    def _answer(self, prompt, params):
        output = super()._answer(prompt, params)
        asked = params.extra_args["kv_transfer_params"]["include_output_tokens"]
        given = [*prompt, *output.outputs[0].token_ids][:-1] if asked else prompt
        layers = list(self.layers)
        if self.fault == "layer":
            layers[1] -= 1
        if self.fault == "norm":
            layers[-1] = -1
        if self.fault == "width":
            layers = layers[1:]
        with torch.no_grad():
            found = body_states(self.model, layers, input_ids=torch.tensor([given]))
        states_TLH = torch.stack([state[0] for state in found], 1)
        if self.fault == "zeros" and self.together > 1:
            states_TLH[11:, -1] = 0
        if self.fault == "pieces" and len(prompt) > 30:
            states_TLH[30 : len(prompt), 1] = states_TLH[: len(prompt) - 30, 1]
        if self.fault == "later" and StatesLLM.requests > 3:
            states_TLH[:, 1] = states_TLH[:, 0]
        if self.fault == "nan":
            states_TLH[3, 1, 2] = torch.nan
        if self.fault == "short" and self.together > 1:
            given, states_TLH = given[16:], states_TLH[16:]
        if self.fault == "batch" and self.together > 1:
            states_TLH = states_TLH + 0.1 * torch.randn_like(states_TLH)
        StatesLLM.requests += 1
        path = self.place / f"{StatesLLM.requests}.safetensors"
        path.with_name(f"{path.name}.lock").touch()
        tensors = {"token_ids": torch.tensor(given), "hidden_states": states_TLH.contiguous()}
        save_file(tensors, path)
        output.kv_transfer_params = {"hidden_states_path": str(path)}
        return output


@pytest.fixture
def engine(vllm, monkeypatch):
    monkeypatch.setattr(sys.modules["vllm"], "LLM", StatesLLM)
    monkeypatch.setattr(StatesLLM, "fault", "")
    monkeypatch.setattr(StatesLLM, "requests", 0)


def words(target, prompts, states, out):
    run = f"distill --target {target} --prompts {prompts} --engine vllm --max_new_tokens 8".split()
    return [*run, *f"--states {states} --out {out}".split()]


def same_states(target, rows, states):
    """The files hold what a local forward gives, for every row of a set."""
    ends = load_model(target, device="cpu", layers=False)
    whole = load_model(target, device="cpu")
    found = StoredStates(states, ends, checkpoint_digest(target))
    texts = [[*row["prompt_ids"], *row["response_ids"]] for row in rows]
    layers = (0, 1, 2, -1)
    found.require(texts, layers, 999, "data")
    for ids in texts:
        with torch.no_grad():
            local = body_states(whole, layers, input_ids=torch.tensor([ids[:-1]]))
        torch.testing.assert_close(
            found.get(ids, layers)[:, :-1], torch.cat(local), atol=1e-5, rtol=1e-5
        )


def test_one_request_gives_the_answer_and_its_states(
    engine, quiet_dir, prompts_file, tmp_path, door
):
    """A run that goes on asks only for states that are not there. Three requests prove a text
    before, and three the longest row behind.
    """
    states, out = tmp_path / "states", tmp_path / "set"
    door.ok(*words(quiet_dir, prompts_file, states, out))
    rows = rows_of(out)
    assert StatesLLM.requests == 6 + len(rows) and not list((states / "incoming").iterdir())
    same_states(quiet_dir, rows, states)
    shutil.rmtree(next(path for path in states.iterdir() if path.name != "incoming"))
    for requests in (6 + len(rows), 6):
        before = StatesLLM.requests
        door.ok(*words(quiet_dir, prompts_file, states, out))
        assert StatesLLM.requests == before + requests
    same_states(quiet_dir, rows, states)


def writer(target, place, layers=(0, 1, 2)):
    """Writes the states of tokens as a server does."""
    model = load_model(target, device="cpu")
    count = itertools.count()
    lock = threading.Lock()
    (place / "served").mkdir()

    def states(given):
        # Hooks of a model see the forwards of all threads.
        with lock, torch.no_grad():
            found = body_states(model, layers, input_ids=torch.tensor([given]))
        path = place / "served" / f"{next(count)}.safetensors"
        states_TLH = torch.stack([state[0] for state in found], 1).contiguous()
        save_file({"token_ids": torch.tensor(given), "hidden_states": states_TLH}, path)
        return str(path)

    return states


def test_a_server_gives_states_with_its_answers(
    quiet_dir, prompts_file, tmp_path, door, tokenizer, golden
):
    with serving("vllm", tokenizer, states=writer(quiet_dir, tmp_path)) as server:
        run = [*words(quiet_dir, prompts_file, tmp_path / "states", tmp_path / "set")]
        at = run.index("vllm")
        door.ok(*run[:at], "openai", "--endpoint", server.url, *run[at + 1 :])
    same_states(quiet_dir, rows_of(tmp_path / "set"), tmp_path / "states")
    with serving("vllm", tokenizer) as server:
        said = door.refused(*run[:at], "openai", "--endpoint", server.url, *run[at + 1 :], code=1)
    golden(said)


def test_every_server_is_checked(quiet_dir, draft_dir, distilled, tmp_path, tokenizer, golden):
    (tmp_path / "other").mkdir()
    other = writer(draft_dir, tmp_path / "other", (0, 1, 1))
    with (
        serving("vllm", tokenizer, states=writer(quiet_dir, tmp_path)) as right,
        serving("vllm", tokenizer, states=other) as wrong,
    ):
        config = StatesConfig(
            target=quiet_dir,
            engine="openai",
            endpoint=[right.url, wrong.url],
            states=str(tmp_path / "states"),
            states_of=[distilled],
        )
        with golden.raises(RunError):
            write_states(config)


def test_a_set_that_is_there_gets_its_states(engine, quiet_dir, distilled, tmp_path, door, golden):
    states = tmp_path / "states"
    there = f"distill --states_of {distilled} --target {quiet_dir} --engine vllm".split()
    out, _ = door.ok(*there, "--states", states)
    golden(out)
    same_states(quiet_dir, rows_of(distilled), states)
    out, _ = door.ok(*there, "--states", tmp_path / "eight", "--states_8bit")
    golden(out)
    out, _ = door.ok(*there, "--states", tmp_path / "eight", "--states_8bit")
    golden(out)
    door.refused(*there, *f"--states {states} --states_layers 3".split())
    door.refused(*there, *f"--states {states} --temperature 0.5".split())


@pytest.mark.slow(12)
def test_a_head_learns_from_them_as_beside_the_target(engine, quiet_dir, distilled, tmp_path, door):
    states = tmp_path / "states"
    there = f"distill --states_of {distilled} --target {quiet_dir} --engine vllm".split()
    door.ok(*there, "--states", states)
    learns_the_same(quiet_dir, Path(distilled), states, tmp_path, door)


def learns_the_same(target, data, states, place, door):
    run = (
        f"train --kind eagle3 --objective fkl --target {target} --data {data} --max_length 48 "
        "--steps 12 --batch_size 4 --heldout_fraction 0.3 --head.test_steps 2 --device cpu"
    ).split()
    door.ok(*run, "--states", states, "--out", place / "far")
    door.ok(*run, "--out", place / "local")
    alphas = []
    for name in ("far", "local"):
        record = json.loads((place / name / "draftsmith.json").read_text())
        alphas.append(record["heldout_alpha"])
    assert alphas[0] == pytest.approx(alphas[1], abs=0.002)


# By fault, whether two requests tell it too, where the target is too large for a forward here.
FAULTS = {
    "layer": False,
    "norm": False,
    "nan": True,
    "short": True,
    "batch": True,
    "width": True,
    "zeros": True,
    "pieces": True,
    "later": False,
}


@pytest.mark.parametrize("fault", FAULTS)
@pytest.mark.parametrize("large", [False, True])
def test_wrong_states_are_found_and_named(
    fault, large, engine, quiet_dir, prompts_file, tmp_path, monkeypatch, golden
):
    """Before the run, but for an engine that changes."""
    if large and not FAULTS[fault]:
        pytest.skip("only a forward here tells it")
    monkeypatch.setattr(StatesLLM, "fault", fault)
    monkeypatch.setattr(engine_states, "_LARGEST", 0 if large else 2**30)
    options = {
        "target": quiet_dir,
        "prompts": prompts_file,
        "engine": "vllm",
        "max_new_tokens": 8,
    }
    config = DistillConfig(**options, states=str(tmp_path / "s"), out=str(tmp_path / "set"))
    with golden.raises(RunError):
        distill(config, "x")
    assert bool(list(tmp_path.glob("set/part-*"))) == (fault == "later")


WRONGLY_READ = {
    "zeros behind": lambda raw_TH: torch.cat([raw_TH[:41], 0 * raw_TH[41:]]),
    "all zeros": torch.zeros_like,
    "shifted": lambda raw_TH: raw_TH.roll(1, 0),
    "stale slots": lambda raw_TH: raw_TH.flip(0),
    "wrong second piece": lambda raw_TH: torch.cat([raw_TH[:40], raw_TH[:20]]),
    "of another basis": lambda raw_TH: raw_TH.roll(1, -1),
}


def test_right_states_are_told_from_wrong_ones(tmp_path):
    """By the ends of the target alone."""
    place = save_model(tmp_path / "target", 5, 2, 290)
    model = load_model(place, device="cpu")
    model.model.norm.weight.data *= 3  # As sure as a trained one.
    model.save_pretrained(place)
    drawn = model.generate(  # type: ignore[operator]
        torch.tensor([[7]]), max_new_tokens=60, do_sample=True, top_k=0, eos_token_id=None
    )
    ids = drawn[0].tolist()
    with torch.no_grad():
        raw_TH = body_states(model, [2], input_ids=drawn)[0][0, :-1]
    measure = StateLikelihood(load_model(place, device="cpu", layers=False))
    assert measure.check("s", raw_TH, ids, 60) == pytest.approx(1, abs=0.4)
    for fault, wrong in WRONGLY_READ.items():
        with pytest.raises(RunError):
            measure.check("s", wrong(raw_TH), ids, 60)
            pytest.fail(fault)
    # Of a text that the target may not have drawn, only states that say nothing are refused.
    assert measure.check("s", raw_TH.roll(1, 0), ids, 0) < 0.5
    with pytest.raises(RunError):
        measure.check("s", WRONGLY_READ["zeros behind"](raw_TH), ids, 0)


def test_states_come_from_an_engine_that_has_them(quiet_dir, golden):
    options = {"target": quiet_dir, "prompts": "p", "out": "o"}
    with golden.raises():
        DistillConfig(**options, states="s")
    with golden.raises():
        DistillConfig(**options, states_layers=[1])
    with golden.raises():
        DistillConfig(**options, engine="vllm", states="s", teacher_top_k=4)


SHORT = {
    "distill": "--max_new_tokens 8",
    "train": "--steps 2 --batch_size 4 --max_length 40 --heldout_fraction 0.3 --device cpu",
}


@pytest.mark.slow(30)
def test_small_twins_of_the_page_for_large_targets(
    engine, quiet_dir, prompts_file, tmp_path, door, tokenizer, monkeypatch
):
    """Each command as it stands, with a tiny target in place of those of 8, 32 and 70 B."""
    monkeypatch.chdir(tmp_path)
    page = (ROOT / "docs" / "large-targets.md").read_text()
    assert len(page.split()) <= 900
    with serving("vllm", tokenizer, states=writer(quiet_dir, tmp_path)) as server:
        twins = {
            r"(Qwen|meta-llama)/[\w.-]+": quiet_dir,
            "PROMPTS": prompts_file,
            r"http://localhost:800\d/v1": server.url,
            "1 16 31 46 61": "1",
            "0 15 30 45 60": "0",
        }
        lines = [line for line in commands(page) if line.startswith("draftsmith")]
        assert len(lines) >= 7
        for line in lines:
            for name, twin in twins.items():
                line = re.sub(name, twin, line)
            kind = line.split()[1]
            short = "" if "--states_of" in line else SHORT[kind]
            door.ok(*shlex.split(line)[1:], *short.split())


# Before the commands of a process with vLLM on a CPU.
ON_A_CPU = """
import functools
import vllm
import draftsmith.distill.engines.state_writer as states
vllm.LLM = functools.partial(vllm.LLM, enforce_eager=True)
states.CONNECTOR = {
    "kv_connector": "CPUConnector", "kv_connector_module_path": "tests.vllm_states_on_cpu"
}
"""


@pytest.mark.engines
def test_a_head_learns_from_vllm_as_beside_the_target(tmp_path, door, monkeypatch):
    """vLLM's own files, of answers and of rows that are there; checked against a local forward."""
    target = test_distill_vllm.REAL
    inside = test_distill_vllm.INSIDE
    before = "from draftsmith.__main__ import main\n"
    monkeypatch.setattr(test_distill_vllm, "INSIDE", inside.replace(before, before + ON_A_CPU))
    prompts = write_rows(
        tmp_path / "p.jsonl", *({"prompt": f"If the lock {number} is not"} for number in range(40))
    )
    run = words(target, prompts, tmp_path / "states", tmp_path / "set")
    # At temperature 1 its answers are no draws of the target, and refused (vLLM 0.32 on a CPU).
    run += "--dtype float32 --max_new_tokens 24 --temperature 0".split()
    there = f"distill --states_of {tmp_path}/set --target {target} --engine vllm".split()
    there += f"--dtype float32 --states {tmp_path}/again".split()
    process = test_distill_vllm.inside(run, there)
    error = process.communicate()[1]
    assert process.returncode == 0, error[-2000:]
    for states in ("states", "again"):
        place = tmp_path / f"from {states}"
        learns_the_same(target, tmp_path / "set", tmp_path / states, place, door)
