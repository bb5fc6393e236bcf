"""A target that is too large for the memory of one process: divided over two, and by its states.

Each process may hold less private memory than the target's weights take in fp32. RLIMIT_DATA counts
it, and the pages of files that are mapped privately, as safetensors does: the driver maps them
shared, because the system can drop them.
"""

import json
import resource
import shutil

import pytest
import torch
from transformers import AutoConfig, AutoModelForCausalLM

from draftsmith.core.hidden_states import body_states
from draftsmith.core.models import memory_bytes
from draftsmith.core.records import read_record
from draftsmith.core.state_store import StateFiles, checkpoint_digest
from draftsmith.drafts.heads.eagle3 import aux_layers
from tests.conftest import tiny_tokenizer
from tests.distilled import rows_of, write_rows
from tests.small_targets import SIZES
from tests.test_target_parallel import CONFIGS, KILLED

# Many narrow layers, because a head is as wide as one.
LAYERS = 36
LARGE = {
    "hidden_size": 512,
    "intermediate_size": 2560,
    "head_dim": 128,
    "num_hidden_layers": LAYERS,
}
# Of the target's bytes: what a process may take beside its imports.
SHARE = 0.92
LIMITED = """
import re, resource, torch
from_file = torch.UntypedStorage.from_file
torch.UntypedStorage.from_file = lambda name, shared, **more: from_file(name, True, **more)
held = int(re.search(r"VmData:\\s+(\\d+)", open("/proc/self/status").read())[1]) * 1024
resource.setrlimit(resource.RLIMIT_DATA, (held + {room}, held + {room}))
"""
STAGES = {
    "distill": "distill --temperature 1 --max_new_tokens 4 --batch_size 4",
    "train": "train --kind eagle3 --objective fkl --head.test_steps 2 --max_length 40 "
    "--batch_size 3 --steps 2 --eval_every 2 --heldout_fraction 0.4 "
    "--optim.name sgd --optim.lr 0.1",
    "eval": "eval --temperature 1 --tree chain:1 --max_prompts 1 --max_new_tokens 3 "
    "--bootstrap 100 --speed_prompts 1",
}


@pytest.fixture
def target(tmp_path):
    """Its bytes in fp32; saved in bf16, so that no process can use the pages of the file."""
    torch.manual_seed(0)
    config = AutoConfig.for_model("llama", **(SIZES | LARGE))
    model = AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16)
    model.save_pretrained(tmp_path / "target")
    tiny_tokenizer().save_pretrained(tmp_path / "target")
    yield 2 * memory_bytes(model)
    shutil.rmtree(tmp_path / "target")


@pytest.fixture
def small_stacks():
    """Threads, of which an idle launch has dozens, count with their whole stack."""
    before = resource.getrlimit(resource.RLIMIT_STACK)
    resource.setrlimit(resource.RLIMIT_STACK, (2**20, before[1]))
    yield
    resource.setrlimit(resource.RLIMIT_STACK, before)


def write_states(directory):
    """As an engine does, which has more memory."""
    model = AutoModelForCausalLM.from_pretrained(directory / "target", dtype=torch.float32)
    layers = (*aux_layers(LAYERS), LAYERS)
    digest = checkpoint_digest(str(directory / "target"))
    files = StateFiles(directory / "states", digest, torch.float32)
    for row in rows_of(directory / "set"):
        ids = [*row["prompt_ids"], *row["response_ids"]]
        with torch.no_grad():
            states = body_states(model, layers, input_ids=torch.tensor([ids[:-1]]))
        files.put(ids, layers, torch.cat(states))


@pytest.mark.slow(60)
def test_two_processes_or_states_hold_what_one_cannot(
    target, small_stacks, tmp_path, launch, spawn, golden
):
    texts = [{"prompt": f"The quick brown fox {number} jumps"} for number in range(4)]
    prompts = tmp_path / "prompts.jsonl"
    write_rows(prompts, *texts)
    limit = LIMITED.format(room=int(SHARE * target))

    def words(stage, *more):
        given = f"{STAGES[stage]} --target {tmp_path / 'target'} --device cpu"
        return [*given.split(), *more]

    def alone(stage, *more, code=0):
        child = spawn(*words(stage, *more), cwd=tmp_path, patch=limit)
        return child.wait(code)[1].replace(str(tmp_path), "")

    asked = "--prompts prompts.jsonl --out set".split()
    (said,) = alone("distill", *asked, code=2).splitlines()
    golden(said)
    learnt = "--data set --out head".split()
    measured = "--draft head=head --id own=prompts.jsonl --out eval".split()
    roads = [words("distill", *asked), words("train", *learnt), words("eval", *measured)]
    jobs = [{"words": [*road, "--target_parallel", "2"], "stop_at": None} for road in roads]
    (tmp_path / "driver.py").write_text(KILLED.replace("gc.freeze()", f"{limit}\ngc.freeze()"))
    (tmp_path / "jobs.json").write_text(json.dumps(jobs))
    launch(["--config_file", CONFIGS / "cpu2.yaml"], tmp_path / "driver.py", tmp_path / "jobs.json")
    ends = sorted(tmp_path.glob("*.code"))
    assert [end.read_text() for end in ends] == ["0"] * 6, [
        end.with_suffix(".err").read_text() for end in ends
    ]
    learnt[-1:] = ["none", "--dtype", "float32"]
    (said,) = alone("train", *learnt, code=2).splitlines()
    golden(said)
    write_states(tmp_path)
    alone("train", "--data", "set", "--out", "far", "--states", "states")
    assert 0.5 < read_record(tmp_path / "far")["heldout_alpha_1"] < 1
    cells = [json.loads(cell.read_text()) for cell in tmp_path.glob("eval/cells/*")]
    assert any("counts" in cell for cell in cells)
