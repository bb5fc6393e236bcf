"""Speculative decoding from Python: load a pair, decode with it, distil, train, evaluate, align.

    import draftsmith as ds
    pair = ds.load_pair("TARGET", draft="DRAFT")
    out = pair.generate("Return the", tree="kary:3,2", temperature=0.7, max_new_tokens=64, seed=0)
    out.text, out.output_ids, out.finish_reason, out.stats.tau

Importing this package imports neither torch nor transformers: a name is resolved when it is first used (PEP 562).
Everything raised on purpose is a `DraftsmithError`: `InputError` for what the caller can mend (the commands exit with
2), `RunError` for a run that could not finish although its input was good (exit 1), `RequirementError` for results that
miss what was required of them (exit 3).
"""

import ast
import importlib
from pathlib import Path
from typing import TYPE_CHECKING, Any

from draftsmith_core import __version__

if TYPE_CHECKING:
    from decode import SpeculativeDecoder as SpeculativeDecoder
    from distill.config import DistillConfig as DistillConfig
    from distill.config import ScoreConfig as ScoreConfig
    from distill.generate import distill as distill
    from distill.score import score_set as score_set
    from drafts.config import DoctorConfig as DoctorConfig
    from drafts.config import ExportConfig as ExportConfig
    from drafts.config import MergeConfig as MergeConfig
    from drafts.doctor import examine as doctor
    from drafts.layouts.export import export as export
    from drafts.merge import merge as merge
    from draftsmith.alignment.config import AlignConfig as AlignConfig
    from draftsmith.alignment.stages import align as align
    from draftsmith.config import InitConfig as InitConfig
    from draftsmith.config import ServedConfig as ServedConfig
    from draftsmith.pair import Output as Output
    from draftsmith.pair import Pair as Pair
    from draftsmith.pair import load_pair as load_pair
    from draftsmith.served_acceptance import served as served
    from draftsmith.starting import init as init
    from draftsmith_core.errors import DraftsmithError as DraftsmithError
    from draftsmith_core.errors import InputError as InputError
    from draftsmith_core.errors import RequirementError as RequirementError
    from draftsmith_core.errors import RunError as RunError
    from eval.config import EvalConfig as EvalConfig
    from eval.config import PlanConfig as PlanConfig
    from eval.decision import decide as decide
    from eval.evaluate import evaluate as evaluate
    from eval.plan import plan as plan
    from eval.results import Results as Results
    from train.config import TrainConfig as TrainConfig
    from train.losses import LOSSES as losses  # noqa: N811
    from train.training_run import train as train


def _public() -> dict[str, tuple[str, str]]:
    """Module and attribute of every name that is imported above for type checkers."""
    block = next(
        node for node in ast.parse(Path(__file__).read_text(encoding="utf-8")).body if isinstance(node, ast.If)
    )
    imports = [node for node in block.body if isinstance(node, ast.ImportFrom)]
    return {alias.asname or alias.name: (node.module or "", alias.name) for node in imports for alias in node.names}


_PUBLIC = _public()
# Type checkers export the names that an import keeps; renamed ones stand here.
__all__ = ["__version__", "doctor", "losses"]
__all__ += [name for name in _PUBLIC if name not in __all__]


if not TYPE_CHECKING:  # a type checker that saw this function would take any name for a public one

    def __getattr__(name: str) -> Any:
        if name not in _PUBLIC:
            raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
        module, attribute = _PUBLIC[name]
        value = globals()[name] = getattr(importlib.import_module(module), attribute)
        return value


def __dir__() -> list[str]:
    return sorted(__all__)
