"""Measures what alignment bought: acceptance, tokens per target call and speed, at home (ID) and away
(OOD)."""

from eval.config import EvalConfig
from eval.evaluate import evaluate

__all__ = ["EvalConfig", "evaluate"]
