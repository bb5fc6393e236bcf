"""Where the target runs. An engine is built from the options and answers requests."""

from collections.abc import Callable

from distill.config import DistillConfig
from distill.engines.protocol import Answer, AnswerRequest, Done, Engine, Failed, at_temperature
from draftsmith_core.packages import require_package
from draftsmith_core.tokenization import Tokenizer


def _hf(config: DistillConfig, tokenizer: Tokenizer) -> Engine:
    from distill.engines.hf import HFEngine

    return HFEngine(config, tokenizer)


def _openai(config: DistillConfig, tokenizer: Tokenizer) -> Engine:
    require_package("httpx", "--engine openai")
    from distill.engines.openai import OpenAIEngine

    return OpenAIEngine(config, tokenizer)


ENGINES: dict[str, Callable[[DistillConfig, Tokenizer], Engine]] = {"hf": _hf, "openai": _openai}

__all__ = ["ENGINES", "Engine", "AnswerRequest", "Answer", "Done", "Failed", "at_temperature"]
