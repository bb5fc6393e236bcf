"""The section `ledger` of `device_check.py`: where the time of one step goes.

A recorded step is timed with its host and without: the graph alone, 100 times in a row. A profile
of it separates products from other kernels; what neither holds are the gaps between kernels. On a
CPU, which records nothing, the step itself stands for the graph, and no share means anything.

Legend: B rows, q tokens of a row.
"""

import re
from collections.abc import Callable
from functools import partial
from typing import Any
from unittest import mock

import torch
import torch.nn.functional as F
from torch import Tensor
from torch._C._autograd import DeviceType
from torch.profiler import ProfilerActivity, profile
from transformers import GenerationConfig, LlamaForCausalLM, PreTrainedModel, StaticCache

from benchmarks.gpu.device_measure import Check
from benchmarks.gpu.device_models import random_model, shapes
from benchmarks.lib.timing import bandwidth, between_s, bytes_per_token, mark, synchronise
from draftsmith.core.io import JsonObject
from draftsmith.core.models import context_length
from draftsmith.core.sampling import Sampling
from draftsmith.decode import SpeculativeDecoder
from draftsmith.decode.llama_forward import LeanForward
from draftsmith.decode.recorded import make_runner
from draftsmith.decode.recorded.steps import StaticSteps
from draftsmith.decode.runner import Block
from draftsmith.decode.supported_models import ability

# Bytes per second of the memory, from NVIDIA's data sheets, by a part of the device's name.
PEAK_BYTES = {"H100": 3.35e12, "H200": 4.8e12, "A100": 2.039e12}
_REPLAYS = 100
_PROFILED = 10
_PROMPT = 128
# Names of kernels, and on a CPU of operations.
_PRODUCTS = re.compile("gemm|gemv|cutlass|nvjet|splitk|cublas|aten::(addmm|bmm|mm)", re.IGNORECASE)

Call = Callable[[], object]


def ledger(check: Check) -> None:
    """(f) One step of the target and one level of the draft, by parts; then two others' steps."""
    bytes_per_s = _bytes_per_s(check)
    check.report("bytes_per_s", bytes_per_s)
    target_shape, draft_shape = shapes(check)
    draft = random_model(draft_shape, check.device, check.dtype)
    _steps(check, "draft level", draft, ((1, 1), (1, 4)), bytes_per_s)
    del draft
    target = random_model(target_shape, check.device, check.dtype)
    sizes = ((1, 1), (1, 5), (1, 17), (8, 1), (32, 1))
    _steps(check, "target", target, sizes, bytes_per_s)
    _engine(check, target)
    limit_ms = 1e3 * bytes_per_token(target) / bytes_per_s
    for name, measure in (("transformers, static cache", _hf), ("raw forward", _raw)):
        if check.late():
            check.report("cut", f"out of time before {name}")
            return
        ms = measure(check, target)
        check.report(f"{name}, compiled", {"ms": ms, "of_limit": limit_ms / ms})


def _bytes_per_s(check: Check) -> float:
    on_cuda = check.device.type == "cuda"
    name = torch.cuda.get_device_name(check.device) if on_cuda else ""
    known = [figure for part, figure in PEAK_BYTES.items() if part in name]
    return known[0] if known else bandwidth(check.device)


def _steps(
    check: Check,
    name: str,
    model: LlamaForCausalLM,
    sizes: tuple[tuple[int, int], ...],
    bytes_per_s: float,
) -> None:
    """Report the parts of steps of (B, q); also with norms of one kernel, which round once."""
    limit_ms = 1e3 * bytes_per_token(model) / bytes_per_s
    for rows, queries in sizes[: 2 if check.tiny else None]:
        parts = _parts(check, step_of(check, model, rows, queries))
        check.report(f"{name}, {rows} rows of {queries}", _figures(parts, limit_ms))
    with mock.patch.object(LeanForward, "_norm", _norm_in_one):
        parts = _parts(check, step_of(check, model, 1, 1))
    check.report(f"{name}, 1 rows of 1, norms in one", _figures(parts, limit_ms))


def _norm_in_one(lean: LeanForward, x: Tensor, weight: Tensor) -> Tensor:
    return F.rms_norm(x, (x.shape[-1],), weight, lean.sizes.eps)


def _figures(parts: JsonObject, limit_ms: float) -> JsonObject:
    """The parts of a step in ms, and over the time that its bytes take."""
    over_limit = {key: value / limit_ms for key, value in parts.items() if key != "kernels"}
    return {"limit_ms": limit_ms, "ms": parts, "over_limit": over_limit}


@torch.inference_mode()
def step_of(check: Check, model: LlamaForCausalLM, rows: int, queries: int) -> Call:
    """Return a step behind a prompt that is cached once: its tables, its forward and its tokens."""
    steps = StaticSteps(model, check.backend)
    runner = make_runner(model, ability(model), context_length(model), None, steps)
    prompt = list(range(2, 2 + (16 if check.tiny else _PROMPT)))
    runner.prefill([prompt] * rows, queries + 1)
    offsets_1q = torch.arange(queries, device=check.device).unsqueeze(0)
    sees_1qq = torch.ones(1, queries, queries, dtype=torch.bool, device=check.device).tril_()
    block = Block(offsets_1q, sees_1qq, static=True)
    tokens_Bq = torch.full((rows, queries), 2, device=check.device)

    @torch.inference_mode()
    def step() -> object:
        runner.open()
        forward = runner.bind(block, queries)
        logits_BqV, _ = runner.call(forward.name, forward.run, tokens_Bq, forward.inputs)
        runner.keep([[]] * rows)
        return logits_BqV.argmax(-1).tolist()

    step()
    return step


def _graph_of(check: Check, step: Call) -> Call:
    """Return the replay of the graph that a step replays; the step itself on a CPU."""
    if check.device.type != "cuda":
        return step
    graphs: list[torch.cuda.CUDAGraph] = []
    with mock.patch.object(torch.cuda.CUDAGraph, "replay", lambda graph: graphs.append(graph)):
        step()
    return graphs[-1].replay


def _parts(check: Check, step: Call) -> JsonObject:
    """Milliseconds of a step: in products, in other kernels, between kernels, and of its host."""
    replay = _graph_of(check, step)
    calls = 3 if check.tiny else _REPLAYS
    replay_ms = 1e3 * _per_call_s(check, replay, calls)
    step_ms = 1e3 * check.seconds(step, 20)
    products_ms, others_ms, kernels = _profiled(check, replay)
    return {
        "step": step_ms,
        "replay": replay_ms,
        "products": products_ms,
        "other_kernels": others_ms,
        "gaps": replay_ms - products_ms - others_ms,
        "host": step_ms - replay_ms,
        "kernels": kernels,
    }


def _per_call_s(check: Check, call: Call, calls: int) -> float:
    call()
    synchronise(check.device)
    start = mark(check.device)
    for _ in range(calls):
        call()
    end = mark(check.device)
    synchronise(check.device)
    return between_s(start, end) / calls


def _profiled(check: Check, call: Call) -> tuple[float, float, float]:
    """Milliseconds of products and of other kernels in one call, and the number of both."""
    on_cuda = check.device.type == "cuda"
    activity = ProfilerActivity.CUDA if on_cuda else ProfilerActivity.CPU
    calls = 1 if check.tiny else _PROFILED
    with profile(activities=[activity]) as profiler:
        for _ in range(calls):
            call()
        synchronise(check.device)
    sums = {True: 0.0, False: 0.0}
    kernels = 0
    for event in profiler.key_averages():
        if on_cuda != (event.device_type == DeviceType.CUDA):
            continue
        microseconds = event.self_device_time_total if on_cuda else event.self_cpu_time_total
        sums[bool(_PRODUCTS.search(event.key))] += microseconds
        kernels += event.count
    return sums[True] / 1e3 / calls, sums[False] / 1e3 / calls, kernels / calls


def _engine(check: Check, target: LlamaForCausalLM) -> None:
    """Report whole steps of the engine by rows and temperature."""
    prompt = list(range(2, 2 + (16 if check.tiny else _PROMPT)))
    tokens = 4 if check.tiny else 64
    decoder = SpeculativeDecoder(target, compile=check.backend)
    for rows in (1,) if check.tiny else (1, 8, 32):
        for temperature in (0.0, 1.0):
            generate = partial(
                decoder.generate,
                [prompt] * rows,
                Sampling(temperature=temperature),
                tokens,
                eos_ids=(),
            )
            generate()
            ms = 1e3 * generate().decode_s / tokens
            check.report(f"engine, {rows} rows, T={temperature:g}", {"ms_per_step": ms})


def _hf(check: Check, target: PreTrainedModel) -> float:
    """Milliseconds per token of `generate` with a static cache, which it compiles on a GPU; the
    prompt included.
    """
    tokens = 4 if check.tiny else 256
    ids_1T = torch.arange(2, 18, device=check.device).unsqueeze(0)
    config = GenerationConfig(
        max_new_tokens=tokens, do_sample=False, pad_token_id=0, cache_implementation="static"
    )
    generate: Any = target.generate
    seconds = check.seconds(lambda: generate(ids_1T, generation_config=config), 3)
    return 1e3 * seconds / tokens


@torch.inference_mode()
def _raw(check: Check, target: LlamaForCausalLM) -> float:
    """Milliseconds of the model's own forward of one token with a static cache, compiled as fast
    as torch can.
    """
    calls = 3 if check.tiny else _REPLAYS
    # The cache counts what it holds, and is never put back.
    cache = StaticCache(config=target.config, max_cache_len=_PROMPT + 2 * calls)
    ids_1T = torch.arange(2, 18, device=check.device).unsqueeze(0)
    target(input_ids=ids_1T, past_key_values=cache, use_cache=True)
    how = {"mode": "max-autotune"} if check.device.type == "cuda" else {"backend": "eager"}
    compiled = torch.compile(target, **how)  # type: ignore[call-overload]
    token_11 = ids_1T[:, :1].clone()

    @torch.inference_mode()
    def step() -> object:
        return compiled(input_ids=token_11, past_key_values=cache, use_cache=True).logits

    for _ in range(3):  # compiles, and records its own graph
        step()
    return 1e3 * _per_call_s(check, step, calls)
