"""One evaluation from its configuration to results.json, report.html and plots/."""

import platform
import resource
import shlex
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import MISSING, asdict, dataclass, fields
from functools import partial
from pathlib import Path
from typing import Any, TypeVar

import torch
from transformers import PreTrainedModel

from drafts.load import Draft, check_draft_vocabulary, draft_fingerprint, kind_of, load_draft
from draftsmith_core.errors import InputError
from draftsmith_core.io import read_json, remove_leftovers, write_json_atomic
from draftsmith_core.models import (
    check_tokenizer,
    context_length,
    dtype_name,
    eos_ids,
    load_model,
    memory_bytes,
    parameter_count,
    quantization,
    vocabulary_size,
)
from draftsmith_core.progress import Advance, Tick, progress
from draftsmith_core.provenance import provenance
from draftsmith_core.sampling import Sampling
from draftsmith_core.tokenization import load_tokenizer
from eval import assemble, measure
from eval.config import EvalConfig, Request, check
from eval.estimate import alpha_sums
from eval.measurement_cache import CellStore
from eval.report.page import write_report
from eval.results import Results
from eval.schema import ModelRow, Training
from eval.suites import Suite, fit, load_suites
from eval.tracking import check_tracker, track

T = TypeVar("T", bound=Mapping[str, Any])


def evaluate(config: EvalConfig) -> Results:
    """Measure every draft on every suite; writes results.json, report.html and plots/ and returns the results.

    Everything that can be wrong with the input is found before the first measurement. A run that was killed
    continues: finished measurements are in OUT/cells. Raises InputError (input) or RunError (while running).
    """
    started = time.time()
    request = check(config)
    check_tracker(config)
    out = Path(config.out)
    try:
        out.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise InputError(f"--out {out}: cannot be made a directory ({error.strerror})") from None
    for directory in (out, out / "plots"):
        remove_leftovers(directory)
    _forget_peak_memory()
    suites, target, drafts = _load(config, request)
    cells = CellStore(out / "cells")
    models = {"target": _model_row(config.target, target)}
    models |= {name: _model_row(request.drafts[name], draft) for name, draft in drafts.items()}
    measured = _measure(config, request, suites, target, drafts, models, cells)
    setting = assemble.Setting(
        suites=suites,
        drafts=list(drafts),
        base=request.base,
        temperatures=config.temperature,
        methods=request.methods,
        bootstrap=config.bootstrap,
        seed=config.seed,
    )
    document = assemble.assemble(
        setting,
        measured,
        config=asdict(config),
        models=models,
        provenance=provenance(command(config), asdict(config)),
        clock=_clock(started, cells, target),
    )
    write_json_atomic(out / "results.json", document)
    found = Results.load(out)
    write_report(found)
    track(config, found)
    return found


def render(directory: str | Path) -> Path:
    """Draw the report again from DIR/results.json. Raises InputError when there is none of this schema."""
    return write_report(Results.load(directory))


def _load(config: EvalConfig, request: Request) -> tuple[list[Suite], PreTrainedModel, dict[str, Draft]]:
    """Prompts first, because they are cheap to find wrong; then all models; then whether they fit
    together."""
    tokenizer = load_tokenizer(config.target, config.trust_remote_code)
    suites = load_suites(
        request.id_sets,
        request.ood_sets,
        tokenizer,
        prompt_tokens=config.prompt_tokens,
        limit=config.max_prompts,
    )

    target = load_model(
        config.target,
        device=config.device,
        dtype=config.dtype,
        trust_remote_code=config.trust_remote_code,
        quantize=config.quantize,
    )
    check_tokenizer(config.target, target, tokenizer)
    drafts: dict[str, Draft] = {}
    for name, source in request.drafts.items():
        drafts[name] = load_draft(
            source,
            target,
            device=config.device,
            # Left to itself each draft would run in the dtype it was saved in, and the clock would compare those.
            dtype=dtype_name(target) if config.dtype == "auto" else config.dtype,
            trust_remote_code=config.trust_remote_code,
            quantize=config.quantize_draft or config.quantize,
        )
        check_draft_vocabulary(source, drafts[name], target, tokenizer, config.trust_remote_code)
    for method in request.methods:
        for name, draft in drafts.items():
            try:
                measure.decoder_of(target, draft, method)
            except ValueError as error:
                raise InputError(f"--draft {name}: {error}") from None
    contexts = {"the target": context_length(target)}
    contexts |= {
        f"draft {name}": context_length(draft) for name, draft in drafts.items() if isinstance(draft, PreTrainedModel)
    }
    return fit(suites, config.max_new_tokens, contexts), target, drafts


def _measure(
    config: EvalConfig,
    request: Request,
    suites: Sequence[Suite],
    target: PreTrainedModel,
    drafts: dict[str, Draft],
    models: dict[str, ModelRow],
    cells: CellStore,
) -> assemble.Measured:
    """Every cell, from disk where it is there."""
    pairs = [(suite, sampling) for suite in suites for sampling in request.samplings]
    per_prompt = 1 + len(drafts) * (1 + len(request.methods))
    timed = [min(config.speed_prompts, len(suite.prompts)) for suite, _ in pairs]
    ways = 1 + len(drafts) * len(request.methods)
    total = sum(len(suite.prompts) for suite, _ in pairs) * per_prompt + sum(timed) * ways
    measured = assemble.Measured({}, {}, {}, {})
    with progress("eval", total) as advance:
        bench = Bench(config, request, target, drafts, models, cells, advance)
        for suite, sampling in pairs:
            _count(bench, suite, sampling, measured)
        if config.speed_prompts:
            for suite, sampling in pairs:
                measured.speeds[suite.name, sampling.temperature] = _timed(bench, suite, sampling)
    return measured


@dataclass(frozen=True)
class Bench:
    """What every measurement of a run has in common."""

    config: EvalConfig
    request: Request
    target: PreTrainedModel
    drafts: dict[str, Draft]
    models: dict[str, ModelRow]
    cells: CellStore
    advance: Advance

    def cell(self, asked: dict[str, Any], units: int, note: str, run: Callable[[Tick], T]) -> T:
        """The outcome of one measurement of `units` steps of progress, kept or made now."""
        reused = self.cells.reused
        outcome = self.cells.get(asked, lambda: run(lambda count: self.advance(count, note)))
        if self.cells.reused > reused:
            self.advance(units, note)
        return outcome

    def common(self, suite: Suite, sampling: Sampling) -> dict[str, Any]:
        """What decides the outcome of every measurement on a suite under a sampling law."""
        return {
            "suite": suite.digest,
            "sampling": asdict(sampling),
            "eos": list(eos_ids(self.target)),
            "target": _identity(self.models["target"]),
            "max_new_tokens": self.config.max_new_tokens,
            "seed": self.config.seed,
        }


def _count(bench: Bench, suite: Suite, sampling: Sampling, measured: assemble.Measured) -> None:
    """The target's continuations, and every draft's alpha and decoding counts on them."""
    config, eos, prompts = bench.config, eos_ids(bench.target), suite.prompts
    where = f"{suite.name}, T={sampling.temperature:g}"
    common = {**bench.common(suite, sampling), "batch_size": config.batch_size}
    batch_size = config.batch_size
    alone = partial(
        measure.baseline,
        bench.target,
        prompts,
        sampling,
        eos,
        max_new_tokens=config.max_new_tokens,
        batch_size=batch_size,
        seed=config.seed,
    )
    continued = bench.cell({"what": "baseline", **common}, len(prompts), f"target alone: {where}", _ticking(alone))
    measured.baselines[suite.name, sampling.temperature] = continued
    rows = measure.continuations(prompts, continued)
    for name, draft in bench.drafts.items():
        own = {**common, "draft": _identity(bench.models[name])}
        estimate = partial(alpha_sums, bench.target, draft, rows, sampling, batch_size=batch_size)
        measured.alphas[suite.name, sampling.temperature, name] = bench.cell(
            {"what": "alpha", **own}, len(prompts), f"alpha of {name}: {where}", _ticking(estimate)
        )
        for method in bench.request.methods:
            decode = partial(
                measure.decoding,
                bench.target,
                draft,
                method,
                prompts,
                continued,
                sampling,
                eos,
                max_new_tokens=config.max_new_tokens,
                batch_size=batch_size,
                seed=config.seed,
            )
            measured.decodings[suite.name, sampling.temperature, name, method] = bench.cell(
                {
                    "what": "decoding",
                    **own,
                    "tree": method.tree,
                    "shape": asdict(method.shape),
                    "verifier": method.verifier,
                },
                len(prompts),
                f"{name}, {method.tree}: {where}",
                _ticking(decode),
            )


def _timed(bench: Bench, suite: Suite, sampling: Sampling) -> measure.SpeedCell:
    """The clock comes last, when all else is warm and known."""
    config, methods = bench.config, bench.request.methods
    prompts = suite.prompts[: config.speed_prompts]
    asked = {
        "what": "speed",
        "prompts": config.speed_prompts,
        "drafts": {name: _identity(bench.models[name]) for name in bench.drafts},
        "methods": [[method.tree, asdict(method.shape), method.verifier] for method in methods],
        "machine": machine(bench.target),
        **bench.common(suite, sampling),
    }
    run = partial(
        measure.speed,
        bench.target,
        bench.drafts,
        methods,
        prompts,
        sampling,
        eos_ids(bench.target),
        max_new_tokens=config.max_new_tokens,
        seed=config.seed,
    )
    units = len(prompts) * (1 + len(bench.drafts) * len(methods))
    return bench.cell(asked, units, f"timing: {suite.name}, T={sampling.temperature:g}", _ticking(run))


def _ticking(measurement: Callable[..., T]) -> Callable[[Tick], T]:
    return lambda tick: measurement(tick=tick)


def _model_row(name: str, model: Draft) -> ModelRow:
    weight = next(model.parameters())
    if isinstance(model, PreTrainedModel):
        family, vocabulary, context = str(model.config.model_type), vocabulary_size(model), context_length(model)
        dtype = dtype_name(model)
    else:
        family, vocabulary, context = model.kind, model.vocab_size, None
        dtype = str(weight.dtype).removeprefix("torch.")
    return ModelRow(
        name=name,
        kind=kind_of(model),
        fingerprint=draft_fingerprint(model),
        model_type=family,
        parameters=parameter_count(model),
        memory_bytes=memory_bytes(model),
        vocabulary=vocabulary,
        context=context,
        dtype=dtype,
        quantize=quantization(model),
        device=str(weight.device),
        training=_training(Path(name)),
    )


def _training(checkpoint: Path) -> Training | None:
    """What the checkpoint's own record says of its alignment; None for hub names and foreign directories."""
    record = checkpoint / "draftsmith.json"
    if not record.is_file():
        return None
    values = read_json(record, "the record of a draft checkpoint")
    try:
        tokens, steps = values["data"]["response_tokens"], values["steps"]
        batch = values["config"]["batch_size"] * values["config"]["accumulation"] * values["processes"]
        return Training(
            objective=values["objective"],
            response_tokens=tokens,
            epochs=steps * batch / values["data"]["training"]["rows"],
            steps=steps,
            best_step=values["best_step"],
        )
    except KeyError:
        return None  # the shipped base draft, say: trained on text, not aligned


def _identity(model: ModelRow) -> list[str]:
    """What makes two models give the same numbers: weights, arithmetic, and where it is done."""
    return [model["fingerprint"], model["dtype"], model["device"]]


def machine(model: PreTrainedModel) -> dict[str, Any]:
    """Where the clock ran."""
    on_gpu = model.device.type == "cuda"
    return {
        "cpu": _cpu_name(),
        "threads": torch.get_num_threads(),
        "gpu": torch.cuda.get_device_name(model.device) if on_gpu else None,
        "system": platform.system(),
    }


def _cpu_name() -> str:
    info = Path("/proc/cpuinfo")
    if info.is_file():
        for line in info.read_text(encoding="utf-8", errors="replace").splitlines():
            if line.startswith("model name"):
                return line.partition(":")[2].strip()
    return platform.processor() or platform.machine()


def command(config: EvalConfig) -> str:
    """The command line that asks for this evaluation; options left at their defaults are left out."""
    words = ["draftsmith", "eval"]
    for field in fields(config):
        value = getattr(config, field.name)
        default = field.default_factory() if field.default_factory is not MISSING else field.default
        if value == default:
            continue
        words.append(f"--{field.name}")
        words += [str(item) for item in (value if isinstance(value, list) else [value])]
    return shlex.join(words)


def _forget_peak_memory() -> None:
    if torch.cuda.is_available():
        torch.cuda.reset_peak_memory_stats()


def _peak_memory_bytes(target: PreTrainedModel) -> int:
    """The most that PyTorch held on the target's GPU in this run; on a CPU, the most that this process ever held."""
    if target.device.type == "cuda":
        return torch.cuda.max_memory_allocated(target.device)
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    # Linux counts in KiB, macOS in bytes.
    return peak if sys.platform == "darwin" else peak * 1024


def _clock(started: float, cells: CellStore, target: PreTrainedModel) -> dict[str, Any]:
    finished = time.time()
    return {
        "started": _utc(started),
        "finished": _utc(finished),
        "seconds": round(finished - started, 3),
        "cells_reused": cells.reused,
        "cells_measured": cells.measured,
        "machine": machine(target),
        "peak_memory_bytes": _peak_memory_bytes(target),
    }


def _utc(seconds: float) -> str:
    return time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime(seconds))
