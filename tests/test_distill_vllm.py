"""`distill --engine vllm` against a stand-in with vLLM's names: what is asked of it, and what is made of its answers.

The names and signatures are those of vLLM 0.33 (`LLM.__init__`, `LLM.generate`, `SamplingParams`, `RequestOutput`,
`CompletionOutput`, `Logprob`); the stand-in refuses any other, and runs the tiny target.
"""

import sys
from collections.abc import Sequence
from dataclasses import dataclass, field
from importlib.machinery import ModuleSpec
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

from distill.config import DistillConfig
from distill.generate import distill
from draftsmith_core.errors import InputError, RunError
from draftsmith_core.models import load_model
from draftsmith_core.sampling import Sampling, draw, generator, probs
from tests.distilled import manifest, rows_of, write_rows


@dataclass(kw_only=True)
class SamplingParams:
    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = 0
    min_p: float = 0.0
    seed: int | None = None
    stop_token_ids: list[int] = field(default_factory=list)
    ignore_eos: bool = False
    max_tokens: int = 16
    prompt_logprobs: int | None = None
    detokenize: bool = True


@dataclass
class Logprob:
    logprob: float
    rank: int | None = None
    decoded_token: str | None = None


class LLM:
    made: "list[LLM]" = []

    def __init__(
        self,
        model: str,
        *,
        revision: str | None = None,
        trust_remote_code: bool = False,
        tensor_parallel_size: int = 1,
        dtype: str = "auto",
        seed: int = 0,
        enable_prefix_caching: bool | None = None,
        max_logprobs: int = 20,
        logprobs_mode: str = "raw_logprobs",
    ) -> None:
        if "broken" in model:
            raise ValueError("No such\nmodel")
        self._model = load_model(model, device="cpu")
        self.tensor_parallel_size, self.max_logprobs = tensor_parallel_size, max_logprobs
        config = SimpleNamespace(max_model_len=128, dtype=torch.float32, get_vocab_size=lambda: 290)
        self.llm_engine = SimpleNamespace(model_config=config)
        self.calls: list[list[SamplingParams]] = []
        LLM.made.append(self)

    def generate(
        self,
        prompts: Sequence[dict[str, list[int]]],
        sampling_params: SamplingParams | Sequence[SamplingParams],
        *,
        use_tqdm: bool = True,
    ) -> list[Any]:
        one = isinstance(sampling_params, SamplingParams)
        params = [sampling_params] * len(prompts) if isinstance(sampling_params, SamplingParams) else sampling_params
        assert len(params) == len(prompts) and not use_tqdm
        if not one:
            self.calls.append(list(params))
        return [self._answer(prompt["prompt_token_ids"], each) for prompt, each in zip(prompts, params, strict=True)]

    @torch.inference_mode()
    def _answer(self, prompt: list[int], params: SamplingParams) -> Any:
        assert params.ignore_eos or params.prompt_logprobs and not params.detokenize
        sampling = Sampling(temperature=params.temperature, top_k=params.top_k, top_p=params.top_p, min_p=params.min_p)
        own, ids = generator(params.seed or 0), list(prompt)
        reason = "length"
        while len(ids) < len(prompt) + params.max_tokens:
            p_1V = probs(self._model(torch.tensor([ids])).logits[:, -1], sampling)
            ids.append(int(draw(p_1V, torch.rand(1, generator=own, dtype=torch.float64))))
            if ids[-1] in params.stop_token_ids:
                reason = "stop"
                break
        rows: list[dict[int, Logprob] | None] | None = None
        if params.prompt_logprobs is not None:
            assert params.prompt_logprobs <= self.max_logprobs or self.max_logprobs == -1
            logprobs_TV = self._model(torch.tensor([prompt])).logits[0].double().log_softmax(-1)
            rows = [None]
            for token, logprobs_V in zip(prompt[1:], logprobs_TV[:-1], strict=True):
                order = logprobs_V.argsort(descending=True).tolist()
                shown = {token, *order[: params.prompt_logprobs]}
                rows.append({each: Logprob(float(logprobs_V[each]), order.index(each) + 1) for each in shown})
        output = SimpleNamespace(index=0, text="", token_ids=ids[len(prompt) :], finish_reason=reason)
        return SimpleNamespace(prompt_token_ids=prompt, prompt_logprobs=rows, outputs=[output])


@pytest.fixture
def vllm(monkeypatch: pytest.MonkeyPatch) -> None:
    module: Any = ModuleType("vllm")
    module.LLM, module.SamplingParams, module.__spec__ = LLM, SamplingParams, ModuleSpec("vllm", None)
    monkeypatch.setitem(sys.modules, "vllm", module)
    monkeypatch.delitem(sys.modules, "distill.engines.vllm", raising=False)
    LLM.made.clear()


def test_it_asks_for_what_the_options_say(vllm: None, target_dir: str, prompts_file: str, tmp_path: Path) -> None:
    options: dict[str, Any] = {"num_samples": 2, "max_new_tokens": 10, "part_rows": 4, "teacher_top_k": 5}
    config = DistillConfig(
        target=target_dir,
        prompts=prompts_file,
        out=str(tmp_path / "set"),
        engine="vllm",
        tensor_parallel_size=2,
        temperatures=["0:0.3", "0.8:0.7"],
        top_k=7,
        **options,
    )
    summary = distill(config, "x")
    assert summary["rows"] == 16 and summary["prompts_skipped"] == 1
    (llm,) = LLM.made
    assert llm.tensor_parallel_size == 2
    asked = [params for call in llm.calls for params in call]
    made = rows_of(tmp_path / "set")
    assert {params.temperature for params in asked} == {row["temperature"] for row in made} == {0.0, 0.8}
    assert sorted(params.seed or 0 for params in asked) == sorted(row["seed"] for row in made)
    assert {(params.top_k, params.max_tokens, params.detokenize) for params in asked} == {(7, 10, False)}
    ends = set(asked[0].stop_token_ids)
    for row in made:
        assert (row["finish_reason"] == "stop") == (row["response_ids"][-1] in ends)
        assert row["tokens_from"] == "target"
    assert {row["finish_reason"] for row in made} == {"stop", "length"}
    assert manifest(tmp_path / "set")["identity"]["config"]["engine"] == "vllm"
    # Teacher rows are those of `hf`, of the same answers.
    from distill.score import score
    from draftsmith_core.teacher_rows import unpack

    model = load_model(target_dir, device="cpu")
    for row in made[::3]:
        own = unpack(score(model, row["prompt_ids"], row["response_ids"], 5))
        found = unpack(row["teacher"])
        assert (found[0] == own[0]).all()
        assert all(np.allclose(found[place], own[place], rtol=2**-10, atol=1e-5) for place in (1, 2))


def test_turns_are_asked_after_the_answers_before_them(vllm: None, target_dir: str, tmp_path: Path) -> None:
    turn = [{"role": "user", "content": "Who?"}, {"role": "assistant", "content": "-"}]
    source = write_rows(tmp_path / "p.jsonl", {"messages": [*turn, *turn]})
    (tmp_path / "chat.jinja").write_text("{% for m in messages %}{{ m.role }}: {{ m.content }}\n{% endfor %}model:")
    config = DistillConfig(
        target=target_dir,
        prompts=source,
        out=str(tmp_path / "set"),
        engine="vllm",
        max_new_tokens=6,
        chat_template=str(tmp_path / "chat.jinja"),
    )
    assert distill(config, "x")["rows"] == 2
    assert [len(call) for call in LLM.made[0].calls] == [1, 1]
    assert [row["turn"] for row in rows_of(tmp_path / "set")] == [0, 1]


def test_what_vllm_does_otherwise_is_refused(vllm: None, target_dir: str, prompts_file: str, tmp_path: Path) -> None:
    options: dict[str, Any] = {"prompts": prompts_file, "out": str(tmp_path / "set"), "engine": "vllm"}
    broken = tmp_path / "broken"
    broken.symlink_to(target_dir)
    with pytest.raises(InputError, match="broken: vLLM cannot run it: No such model"):
        distill(DistillConfig(target=str(broken), **options), "x")
    assert not (tmp_path / "set").exists()


def test_an_engine_that_dies_and_answers_that_are_aborted(
    vllm: None, target_dir: str, prompts_file: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What was answered before the death is kept; asked = done + failed + skipped."""
    import distill.engines.vllm as module

    monkeypatch.setattr(module, "_TOGETHER", 4)
    common: dict[str, Any] = {"target": target_dir, "prompts": prompts_file, "engine": "vllm", "max_new_tokens": 8}
    whole = distill(DistillConfig(out=str(tmp_path / "whole"), **common), "x")
    answer, asked = LLM._answer, list[int]()

    def faulty(self: LLM, prompt: list[int], params: SamplingParams) -> Any:
        asked.append(params.seed or 0)
        if len(asked) == 7:
            raise RuntimeError("EngineCore died\nunexpectedly")
        output = answer(self, prompt, params)
        if len(asked) == 2:
            output.outputs[0].finish_reason = "abort"
        return output

    monkeypatch.setattr(LLM, "_answer", faulty)
    config = DistillConfig(out=str(tmp_path / "set"), **common)
    with pytest.raises(RunError, match="^vllm: EngineCore died unexpectedly; run the same command again"):
        distill(config, "x")
    found = distill(config, "x")
    assert (found["prompts_done"], found["prompts_failed"], found["prompts_skipped"]) == (8, 0, 1)
    # The first batch of four but for the aborted answer was kept; the second was lost.
    assert len(asked) == 7 + 5 and rows_of(tmp_path / "set") == rows_of(tmp_path / "whole")
    asked.clear()
    monkeypatch.setattr(module, "_TOGETHER", 4096)
    again = distill(DistillConfig(out=str(tmp_path / "aborted"), **common, max_prompts=5), "x")
    assert again["failed_because"] == ["1 failed: vLLM ended it with 'abort' (row 2)"]
    assert again["prompts_done"] + again["prompts_failed"] + again["prompts_skipped"] == again["prompts_read"] == 5
    assert whole["prompts_done"] == 8
