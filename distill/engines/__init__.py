"""Where the target runs. `ENGINES` makes an engine from the options; its module is imported when it is asked for."""

from collections.abc import Callable
from importlib import import_module

from distill.config import DistillConfig
from distill.engines.protocol import Answer, AnswerRequest, Done, DraftingEngine, Engine, Failed, at_temperature
from draftsmith_core.packages import require_package
from draftsmith_core.tokenization import Tokenizer

Maker = Callable[[DistillConfig, Tokenizer], Engine]


def _in(module: str, name: str, package: str | None = None, instead: str = "") -> Maker:
    """Makes the engine `name` of a module of this package, which needs an optional package."""

    def make(config: DistillConfig, tokenizer: Tokenizer) -> Engine:
        if package is not None:
            require_package(package, f"--engine {module}", instead)
        engine: Maker = getattr(import_module(f"distill.engines.{module}"), name)
        return engine(config, tokenizer)

    return make


ENGINES: dict[str, Maker] = {
    "hf": _in("hf", "HFEngine"),
    "openai": _in("openai", "OpenAIEngine", "httpx"),
    "vllm": _in("vllm", "VLLMEngine", "vllm", "serve the target with it and use --engine openai"),
    "ray": _in("ray", "RayEngine", "ray"),
}

__all__ = ["ENGINES", "Engine", "DraftingEngine", "AnswerRequest", "Answer", "Done", "Failed", "at_temperature"]
