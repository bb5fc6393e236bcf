"""`distill --engine vllm`: a stand-in that dies and aborts; then vLLM itself, in process and
served, if it is here.
"""

import json
import os
import signal
import subprocess
import sys
import time
from importlib.machinery import ModuleSpec
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

from benchmarks.lib.engines import VLLM_ON_A_CPU, vllm_server
from draftsmith.__main__ import main
from draftsmith.core.errors import InputError, RunError
from draftsmith.core.models import load_model
from draftsmith.core.sampling import Sampling, probs
from draftsmith.core.teacher_rows import unpack
from draftsmith.decode import SpeculativeDecoder
from draftsmith.distill.config import DistillConfig
from draftsmith.distill.generate import distill
from tests.distilled import rows_of, write_rows
from tests.openvino_ir import engine


class LLM:
    """Runs the tiny target one prompt after the other, under vLLM's names."""

    made: "list[LLM]" = []

    def __init__(self, model, *, tensor_parallel_size, **options):
        if "broken" in model:
            raise ValueError("No such\nmodel")
        self._decoder = SpeculativeDecoder(load_model(model, device="cpu"))
        self.tensor_parallel_size = tensor_parallel_size
        config = SimpleNamespace(max_model_len=128, dtype=torch.float32, get_vocab_size=lambda: 290)
        self.llm_engine = SimpleNamespace(model_config=config)
        LLM.made.append(self)

    def generate(self, prompts, sampling_params, *, use_tqdm=True):
        assert len(prompts) == len(sampling_params) and not use_tqdm
        asked = zip(prompts, sampling_params, strict=True)
        return [self._answer(prompt["prompt_token_ids"], params) for prompt, params in asked]

    def _answer(self, prompt, params):
        sampling = Sampling(temperature=params.temperature)
        made = self._decoder.generate(
            [prompt], sampling, params.max_tokens, seed=params.seed, eos_ids=params.stop_token_ids
        ).generations[0]
        output = SimpleNamespace(
            index=0, text="", token_ids=made.output_ids, finish_reason=made.finish_reason
        )
        return SimpleNamespace(prompt_token_ids=prompt, prompt_logprobs=None, outputs=[output])


@pytest.fixture
def vllm(monkeypatch):
    module: Any = ModuleType("vllm")
    module.LLM, module.SamplingParams, module.__spec__ = (
        LLM,
        SimpleNamespace,
        ModuleSpec("vllm", None),
    )
    monkeypatch.setitem(sys.modules, "vllm", module)
    monkeypatch.delitem(sys.modules, "draftsmith.distill.engines.vllm", raising=False)
    LLM.made.clear()


def test_an_engine_that_dies_and_answers_that_are_aborted(
    vllm, target_dir, prompts_file, tmp_path, monkeypatch, golden
):
    """What was answered before the death is kept; asked = done + failed + skipped."""
    import draftsmith.distill.engines.vllm as module

    monkeypatch.setattr(module, "_TOGETHER", 4)
    common: dict[str, Any] = {
        "target": target_dir,
        "prompts": prompts_file,
        "engine": "vllm",
        "max_new_tokens": 8,
    }
    (tmp_path / "broken").symlink_to(target_dir)
    with golden.raises():
        distill(
            DistillConfig(
                **common | {"target": str(tmp_path / "broken"), "out": str(tmp_path / "set")}
            ),
            "x",
        )
    assert not (tmp_path / "set").exists()
    whole = distill(
        DistillConfig(out=str(tmp_path / "whole"), **common, tensor_parallel_size=2), "x"
    )
    assert LLM.made[0].tensor_parallel_size == 2
    answer, asked = LLM._answer, list[int]()

    def faulty(self, prompt, params):
        asked.append(params.seed)
        if len(asked) == 7:
            raise RuntimeError("EngineCore died\nunexpectedly")
        output = answer(self, prompt, params)
        if len(asked) == 2:
            output.outputs[0].finish_reason = "abort"
        return output

    monkeypatch.setattr(LLM, "_answer", faulty)
    config = DistillConfig(out=str(tmp_path / "set"), **common)
    with golden.raises(RunError):
        distill(config, "x")
    found = distill(config, "x")
    assert (found["prompts_done"], found["prompts_failed"], found["prompts_skipped"]) == (8, 0, 1)
    # The first batch of four but for the aborted answer was kept; the second was lost.
    assert len(asked) == 7 + 5 and rows_of(tmp_path / "set") == rows_of(tmp_path / "whole")
    asked.clear()
    monkeypatch.setattr(module, "_TOGETHER", 4096)
    again = distill(DistillConfig(out=str(tmp_path / "aborted"), **common, max_prompts=5), "x")
    assert again["failed_because"] == ["1 failed: vLLM ended it with 'abort' (row 2)"]
    assert (
        again["prompts_done"] + again["prompts_failed"] + again["prompts_skipped"]
        == again["prompts_read"]
        == 5
    )
    assert whole["prompts_done"] == 8


# draftsmith in vLLM's environment, which may lack some of its packages: those of this one then
# stand in.
INSIDE = """
import json, sys
sys.path[:0] = [sys.argv[1]]
sys.path += json.loads(sys.argv[2])
from draftsmith.__main__ import main
sys.exit(max(main(words) for words in json.loads(sys.argv[3])))
"""
REAL = str(Path(__file__).parents[1] / "draftsmith" / "demo" / "pair" / "target")


def inside(*commands):
    """Run commands in a process of vLLM's environment."""
    root, others = (
        str(Path(__file__).parents[1]),
        [path for path in sys.path if path.endswith("site-packages")],
    )
    words = [[str(word) for word in command] for command in commands]
    command = [str(engine("vllm")), "-I", "-c", INSIDE, root, json.dumps(others), json.dumps(words)]
    return subprocess.Popen(
        command,
        env=VLLM_ON_A_CPU | os.environ,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
    )


@pytest.fixture(scope="module")
def asked(tmp_path_factory):
    """Words of `distill` for 12 prompts and 6 chats of two turns."""
    place = tmp_path_factory.mktemp("asked")
    rows: list[dict[str, Any]] = [
        {"prompt": f"If the lock {number} is not"} for number in range(12)
    ]
    turn = [{"role": "user", "content": "Return the"}, {"role": "assistant", "content": "-"}]
    rows += [
        {"messages": [*turn, {"role": "user", "content": f"Raise {number}"}, turn[1]]}
        for number in range(6)
    ]
    source = write_rows(place / "p.jsonl", *rows)
    (place / "chat.jinja").write_text(
        "{% for m in messages %}{{ m.role }}: {{ m.content }}\n{% endfor %}model:"
    )
    asked = f"distill --target {REAL} --prompts {source} --part_rows 4"
    return f"{asked} --chat_template {place}/chat.jinja".split()


GREEDY = "--temperature 0 --max_new_tokens 24 --dtype float32 --teacher_top_k 8".split()
SAMPLED = "--temperatures 0.7:0.5 1.0:0.5 --top_p 0.9 --top_k 20 --min_p 0.02".split()
SAMPLED += "--num_samples 3 --max_new_tokens 16 --dtype float32 --seed 5".split()


def compare_with_hf(made, ours):
    """Greedy rows with teacher rows, and sampled rows, whose every token the options must allow."""
    key = ("id", "turn", "prompt_ids", "response_ids", "finish_reason")
    theirs, own = (
        sorted(rows_of(path / "greedy"), key=lambda row: (row["id"], row["turn"]))
        for path in (made, ours)
    )
    assert [[row[name] for name in key] for row in theirs] == [
        [row[name] for name in key] for row in own
    ]
    for their, mine in zip(theirs, own, strict=True):
        (ids, logprobs, tail), (own_ids, own_logprobs, own_tail) = (
            unpack(their["teacher"]),
            unpack(mine["teacher"]),
        )
        assert (ids == own_ids).mean() > 0.99
        assert np.allclose(
            logprobs[ids == own_ids], own_logprobs[ids == own_ids], rtol=2**-9, atol=1e-3
        )
        assert np.allclose(tail, own_tail, rtol=2**-9, atol=1e-3)
    model, likelihoods = load_model(REAL, device="cpu", dtype="float32"), []
    theirs, own = rows_of(made / "sampled"), rows_of(ours / "sampled")
    # The second turn of a chat has the first answer in its prompt, and so another id and seed.
    seeds = [
        {(row["id"], row["seed"]) for row in rows if not row["turn"]} for rows in (theirs, own)
    ]
    assert seeds[0] == seeds[1] and len(theirs) == len(own) == 3 * 24
    for row in theirs:
        ids_1T = torch.tensor([row["prompt_ids"] + row["response_ids"]])
        sampling = Sampling(temperature=row["temperature"], top_k=20, top_p=0.9, min_p=0.02)
        with torch.inference_mode():
            p_TV = probs(model(ids_1T).logits[0, len(row["prompt_ids"]) - 1 : -1], sampling)
        drawn_T = p_TV.gather(1, torch.tensor(row["response_ids"])[:, None])[:, 0]
        # Rounding may move a token across the edge of the nucleus.
        assert (drawn_T == 0).sum() <= 1
        likelihoods.append(
            (drawn_T.clamp_min(1e-9).log() - (p_TV * p_TV.clamp_min(1e-30).log()).sum(-1)).mean()
        )
    # The mean log-likelihood is minus the entropy of what is drawn from.
    away = torch.stack(likelihoods)
    assert abs(float(away.mean())) < 4 * float(away.std()) / len(away) ** 0.5


@pytest.fixture(scope="module")
def ours(asked, tmp_path_factory):
    out = tmp_path_factory.mktemp("ours")
    for name, options in (("greedy", GREEDY), ("sampled", SAMPLED)):
        assert (
            main([str(word) for word in (*asked, *options, "--device", "cpu", "--out", out / name)])
            == 0
        )
    return out


@pytest.mark.engines
def test_vllm_in_this_process_gives_the_rows_of_hf_and_goes_on_after_a_kill(asked, ours, tmp_path):
    greedy = [*asked, *GREEDY, *f"--engine vllm --out {tmp_path}/greedy".split()]
    sampled = [*asked, *SAMPLED, *f"--engine vllm --out {tmp_path}/sampled".split()]
    killed = inside(greedy)
    assert killed.stderr is not None
    while killed.poll() is None and not list(tmp_path.rglob("part-*")):
        time.sleep(0.01)
    os.killpg(killed.pid, signal.SIGKILL)
    killed.wait()
    again = inside(greedy, sampled)
    assert again.communicate()[1] and again.returncode == 0
    compare_with_hf(tmp_path, ours)


@pytest.mark.engines
def test_vllm_served_gives_the_rows_of_hf_and_goes_on(asked, ours, tmp_path):
    words = (
        f"--model {REAL} --dtype float32 --enforce-eager --max-logprobs 8 --max-num-seqs 8".split()
    )
    with vllm_server(engine("vllm"), words) as port:
        served = f"--engine openai --endpoint http://127.0.0.1:{port}/v1".split()

        def command(*options):
            return main([str(word) for word in (*asked, *served, *options)])

        greedy = [*GREEDY[:4], *f"--teacher_top_k 8 --out {tmp_path}/greedy".split()]
        assert command(*greedy, "--max_requests", 9) == 1
        assert command(*greedy) == 0
        options = [word for word in SAMPLED if word not in ("--dtype", "float32")]
        assert command(*options, "--out", tmp_path / "sampled") == 0
        with pytest.raises(InputError, match="max-logprobs"):
            distill(
                DistillConfig(
                    target=REAL,
                    prompts="-",
                    out=str(tmp_path / "x"),
                    engine="openai",
                    teacher_top_k=9,
                    endpoint=[f"http://127.0.0.1:{port}/v1"],
                ),
                "x",
            )
    compare_with_hf(tmp_path, ours)
