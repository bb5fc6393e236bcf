"""Where the target runs. An engine is built from the options and answers batches of requests."""

from distill.engines.hf import HFEngine
from distill.engines.protocol import Answer, AnswerRequest, Engine

ENGINES: dict[str, type[HFEngine]] = {"hf": HFEngine}

__all__ = ["ENGINES", "Engine", "HFEngine", "AnswerRequest", "Answer"]
