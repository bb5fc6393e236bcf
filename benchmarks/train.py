"""One training step with a live teacher, side by side: this project's chunked method, and the plain one.

    python benchmarks/train.py --out FILE.json [--vocabulary 32000 --sequence 1024 --batch 4 --objective fkl]

Plain is what one writes first: both models' logits for the whole batch, `torch.nn.functional.kl_div` (for an objective
other than fkl: this project's own loss function on them), backward. Both make the same step: target forward, draft
forward and backward, optimizer; random weights and tokens, every position predicted. The draft has the shape of
LLaMA-68M (2 layers of 768), the target is a small Llama.

Seconds: one process, one warm-up each, the two methods in turn, medians. On a shared machine the seconds of the
processor (CPU only) say more than those of the clock; both are written. The chunked one also measures alpha, as it does
in training. Memory: a fresh process for each method, the highest it rose in its second step above what it held before
it: on CUDA `max_memory_allocated`, on a CPU the kernel's high-water mark of resident memory, reset before the step (an
allocator that returns memory late can only raise it). Quote the ratios.
"""

import json
import statistics
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass, replace
from pathlib import Path

# This file has the name of the package that it measures; its own directory must not be searched for it.
sys.path[:] = [entry for entry in sys.path if Path(entry).resolve() != Path(__file__).resolve().parent]

import torch  # noqa: E402
import torch.nn.functional as F  # noqa: E402
from transformers import LlamaConfig, LlamaForCausalLM  # noqa: E402

from draftsmith_core.memory import peak_memory, reset_peak_memory  # noqa: E402
from draftsmith_core.models import resolve_device  # noqa: E402
from draftsmith_core.options import parse  # noqa: E402
from train.batch import Batch  # noqa: E402
from train.objective import parse_objective  # noqa: E402
from train.trainees.lm import LMTrainee  # noqa: E402

METHODS = ("plain", "chunked")
StepFunction = Callable[[], float]


@dataclass(frozen=True, kw_only=True)
class Options:
    """What to measure, and at what shape."""

    out: str
    objective: str = "fkl"
    vocabulary: int = 32000
    sequence: int = 1024
    batch: int = 4
    target_layers: int = 4
    target_hidden: int = 1024
    repeats: int = 5
    chunk: int | None = None
    """Tokens whose logits are held at once; default: what suits the device."""
    bf16: bool = False
    """Autocast to bf16 in both."""
    device: str = "auto"
    only: str = ""
    """Used by itself: measure the memory of this method and print it."""


def llama(hidden: int, layers: int, vocabulary: int, sequence: int) -> LlamaForCausalLM:
    """A Llama with random weights, heads of 64, and an MLP four times as wide."""
    config = LlamaConfig(
        vocab_size=vocabulary,
        hidden_size=hidden,
        intermediate_size=4 * hidden,
        num_hidden_layers=layers,
        num_attention_heads=hidden // 64,
        max_position_embeddings=max(2048, sequence),
        tie_word_embeddings=False,
    )
    return LlamaForCausalLM(config)


def make_steps(options: Options) -> dict[str, StepFunction]:
    """The two methods as functions that make one step and return its loss per token."""
    device = resolve_device(options.device)
    torch.manual_seed(0)
    target = llama(options.target_hidden, options.target_layers, options.vocabulary, options.sequence)
    target.to(device).eval()  # type: ignore[arg-type]
    draft = llama(768, 2, options.vocabulary, options.sequence).to(device)  # type: ignore[arg-type]
    objective = parse_objective(options.objective)
    trainee = LMTrainee(draft, objective, target, chunk=options.chunk).train()
    ids_BT = torch.randint(options.vocabulary, (options.batch, options.sequence), device=device)
    batch = Batch(ids_BT, ids_BT.roll(-1, 1))
    tokens_N = batch.labels_BT.flatten()
    optimizer = torch.optim.SGD(draft.parameters(), lr=1e-3)

    def plain() -> torch.Tensor:
        with torch.no_grad():
            target_NV = target(input_ids=ids_BT, use_cache=False).logits.flatten(0, 1)
        draft_NV = draft(input_ids=ids_BT, use_cache=False).logits.flatten(0, 1)
        if options.objective != "fkl":
            return objective.loss(draft_NV, target_NV, tokens_N).sum()
        log_q, log_p = draft_NV.float().log_softmax(-1), target_NV.float().log_softmax(-1)
        return F.kl_div(log_q, log_p, reduction="sum", log_target=True)

    def chunked() -> torch.Tensor:
        loss: torch.Tensor = trainee(batch).loss
        return loss

    def step(forward: Callable[[], torch.Tensor]) -> float:
        with torch.autocast(device.type, torch.bfloat16, enabled=options.bf16):
            loss = forward() / tokens_N.numel()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        return float(loss.detach())

    return {"plain": lambda: step(plain), "chunked": lambda: step(chunked)}


def memory_of(method: str, options: Options) -> dict[str, int]:
    """Bytes held before a step, and by how much it rose; run in a process of its own."""
    step = make_steps(options)[method]
    device = resolve_device(options.device)
    step()
    reset_peak_memory(device)
    before, _ = peak_memory(device)
    step()
    return {"before": before, "rise": peak_memory(device)[0] - before}


def measured_memory(method: str) -> dict[str, int]:
    """`memory_of` in a fresh process with this command's options."""
    words = [sys.executable, __file__, *sys.argv[1:], "--only", method]
    done = subprocess.run(words, check=True, stdout=subprocess.PIPE, text=True)
    found: dict[str, int] = json.loads(done.stdout.splitlines()[-1])
    return found


def timed(step: StepFunction) -> tuple[float, float]:
    """Seconds of one step: by the clock, and of all this process's cores together."""
    started, busy = time.perf_counter(), time.process_time()
    step()
    if torch.cuda.is_available():
        torch.cuda.synchronize()
    return time.perf_counter() - started, time.process_time() - busy


def main() -> None:
    """Measure and write the JSON."""
    options, _ = parse(Options, "benchmarks/train.py", sys.argv[1:])
    if options.only:
        sys.stdout.write(json.dumps(memory_of(options.only, options)) + "\n")
        return
    memory = {method: measured_memory(method) for method in METHODS}
    steps = make_steps(options)
    losses = {method: steps[method]() for method in METHODS}
    seconds: dict[str, list[tuple[float, float]]] = {method: [] for method in METHODS}
    for repeat in range(options.repeats):
        for method in METHODS if repeat % 2 == 0 else METHODS[::-1]:
            seconds[method].append(timed(steps[method]))
    tokens = options.batch * options.sequence
    speed = {method: tokens / statistics.median(clock for clock, _ in seconds[method]) for method in METHODS}
    busy = {method: statistics.median(spent for _, spent in seconds[method]) for method in METHODS}
    result = {
        "options": asdict(replace(options, out="")),
        "device": str(resolve_device(options.device)),
        "threads": torch.get_num_threads(),
        "torch": torch.__version__,
        "loss": losses,
        "memory_bytes": memory,
        "seconds": {method: [clock for clock, _ in seconds[method]] for method in METHODS},
        "processor_seconds": {method: [spent for _, spent in seconds[method]] for method in METHODS},
        "tokens_per_s": speed,
        "memory_ratio": memory["chunked"]["rise"] / memory["plain"]["rise"],
        "speed_ratio": speed["chunked"] / speed["plain"],
        "processor_ratio": busy["chunked"] / busy["plain"],
    }
    Path(options.out).write_text(json.dumps(result, indent=1) + "\n")


if __name__ == "__main__":
    main()
