"""Speculative decoding: load a pair, decode with it, distil, train, evaluate, align.

    import draftsmith as ds
    pair = ds.load_pair("TARGET", draft="DRAFT")
    out = pair.generate("Return the", tree="kary:3,2", temperature=0.7, max_new_tokens=64, seed=0)
    out.text, out.output_ids, out.finish_reason, out.stats.tau

load_pair    a target with its drafts          align        the whole road: the next three
distill      the target's answers to prompts   score_set    its distributions for answers
train        fit a draft                       evaluate     measure drafts; Results reads it
decide       whether to ship a draft           plan         the fastest tree on this machine
init         a draft to start from             export       a draft for another engine
doctor       the engines that load a pair      served       what a running server accepts
status       what a directory holds            add_results  figures for a model card

Options are keywords, ds.train(target=...), or a config, ds.train(ds.TrainConfig(target=...)).
SpeculativeDecoder, decoding and losses are for parts of your own.

Raises InputError for what the caller can mend (a command exits with 2), RunError for a run that
failed on good input (1), RequirementError for results that miss what was required (3); all are
DraftsmithError. Importing this loads neither torch nor transformers: names load at first use.
"""

import importlib
import sys
from pathlib import Path
from pkgutil import resolve_name
from typing import TYPE_CHECKING, Any

from draftsmith.core import __version__
from draftsmith.core.environment import brief_waiting, environment

if TYPE_CHECKING:
    from draftsmith import decoding as decoding
    from draftsmith.alignment.config import AlignConfig as AlignConfig
    from draftsmith.alignment.stages import align as align
    from draftsmith.config import (
        InitConfig as InitConfig,
        ServedConfig as ServedConfig,
        StatusConfig as StatusConfig,
    )
    from draftsmith.core.errors import (
        DraftsmithError as DraftsmithError,
        InputError as InputError,
        RequirementError as RequirementError,
        RunError as RunError,
    )
    from draftsmith.decode import SpeculativeDecoder as SpeculativeDecoder
    from draftsmith.directory_status import status as status
    from draftsmith.distill.config import DistillConfig as DistillConfig, ScoreConfig as ScoreConfig
    from draftsmith.distill.generate import distill as distill
    from draftsmith.distill.score import score_set as score_set
    from draftsmith.drafts.cards import add_results as add_results
    from draftsmith.drafts.config import (
        DoctorConfig as DoctorConfig,
        ExportConfig as ExportConfig,
    )
    from draftsmith.drafts.doctor import examine as doctor
    from draftsmith.drafts.layouts.export import export as export
    from draftsmith.eval.config import EvalConfig as EvalConfig, PlanConfig as PlanConfig
    from draftsmith.eval.decision import decide as decide
    from draftsmith.eval.plan import plan as plan
    from draftsmith.eval.results import Results as Results
    from draftsmith.eval.run import evaluate as evaluate
    from draftsmith.init_run import init as init
    from draftsmith.outputs import Output as Output
    from draftsmith.pair import Pair as Pair, load_pair as load_pair
    from draftsmith.serving.acceptance import served as served
    from draftsmith.train.config import (
        HeadOptions as HeadOptions,
        Optim as Optim,
        TrainConfig as TrainConfig,
    )
    from draftsmith.train.losses import LOSSES as losses  # noqa: N811
    from draftsmith.train.training_run import train as train

# What is public, beside the packages below: where each name is, within this package.
_PUBLIC = {
    "AlignConfig": "alignment.config:AlignConfig",
    "DistillConfig": "distill.config:DistillConfig",
    "DoctorConfig": "drafts.config:DoctorConfig",
    "DraftsmithError": "core.errors:DraftsmithError",
    "EvalConfig": "eval.config:EvalConfig",
    "ExportConfig": "drafts.config:ExportConfig",
    "HeadOptions": "train.config:HeadOptions",
    "InitConfig": "config:InitConfig",
    "InputError": "core.errors:InputError",
    "Optim": "train.config:Optim",
    "Output": "outputs:Output",
    "Pair": "pair:Pair",
    "PlanConfig": "eval.config:PlanConfig",
    "RequirementError": "core.errors:RequirementError",
    "Results": "eval.results:Results",
    "RunError": "core.errors:RunError",
    "ScoreConfig": "distill.config:ScoreConfig",
    "ServedConfig": "config:ServedConfig",
    "SpeculativeDecoder": "decode:SpeculativeDecoder",
    "StatusConfig": "config:StatusConfig",
    "TrainConfig": "train.config:TrainConfig",
    "add_results": "drafts.cards:add_results",
    "align": "alignment.stages:align",
    "decide": "eval.decision:decide",
    "doctor": "drafts.doctor:examine",
    "evaluate": "eval.run:evaluate",
    "export": "drafts.layouts.export:export",
    "init": "init_run:init",
    "load_pair": "pair:load_pair",
    "losses": "train.losses:LOSSES",
    "plan": "eval.plan:plan",
    "score_set": "distill.score:score_set",
    "served": "serving.acceptance:served",
    "status": "directory_status:status",
}
if not Path(__file__).with_name("decode").is_dir():
    sys.exit(
        "draftsmith: the symbolic links of this checkout are gone; "
        "git config core.symlinks true && git checkout draftsmith"
    )
# Public packages. `distill` and `train` are also functions: `ds.train(config)`.
_PACKAGES = ("decoding", "distill", "train")
__all__ = ["__version__", "doctor", "losses"]
__all__ += [name for name in (*_PUBLIC, *_PACKAGES) if name not in __all__]

if not TYPE_CHECKING:  # a type checker that saw this function would take any name for a public one

    def __getattr__(name: str) -> Any:
        if name in _PACKAGES:
            return importlib.import_module(f"draftsmith.{name}")
        if name not in _PUBLIC:
            raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
        # Many of them import torch.
        with environment(**brief_waiting()):
            value = globals()[name] = resolve_name(f"draftsmith.{_PUBLIC[name]}")
        return value


def __dir__() -> list[str]:
    return sorted(__all__)
