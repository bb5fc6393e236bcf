"""Where the target runs. An engine is built from the options and answers requests."""

from collections.abc import Callable

from distill.config import DistillConfig
from distill.engines.protocol import Answer, AnswerRequest, Done, DraftingEngine, Engine, Failed, at_temperature
from draftsmith_core.packages import require_package
from draftsmith_core.tokenization import Tokenizer


def _hf(config: DistillConfig, tokenizer: Tokenizer) -> Engine:
    from distill.engines.hf import HFEngine

    return HFEngine(config, tokenizer)


def _openai(config: DistillConfig, tokenizer: Tokenizer) -> Engine:
    require_package("httpx", "--engine openai")
    from distill.engines.openai import OpenAIEngine

    return OpenAIEngine(config, tokenizer)


def _vllm(config: DistillConfig, tokenizer: Tokenizer) -> Engine:
    require_package("vllm", "--engine vllm", "serve the target with it and use --engine openai")
    from distill.engines.vllm import VLLMEngine

    return VLLMEngine(config, tokenizer)


def _ray(config: DistillConfig, tokenizer: Tokenizer) -> Engine:
    require_package("ray", "--engine ray")
    from distill.engines.ray import RayEngine

    return RayEngine(config, tokenizer)


ENGINES: dict[str, Callable[[DistillConfig, Tokenizer], Engine]] = {
    "hf": _hf,
    "openai": _openai,
    "vllm": _vllm,
    "ray": _ray,
}

__all__ = ["ENGINES", "Engine", "DraftingEngine", "AnswerRequest", "Answer", "Done", "Failed", "at_temperature"]
