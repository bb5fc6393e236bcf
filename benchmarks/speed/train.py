r"""One training step with a live teacher, side by side: this project's chunked method, the plain
one, other trainers.

    python benchmarks/speed/train.py --out FILE.json \
        [--vocabulary 32000 --sequence 1024 --batch 4 --objective fkl]
    python benchmarks/speed/train.py --out FILE.json --peers true --objective jsd \
        --sequence 128 --batch 32 \
        --target draftsmith/demo/pair/target --draft draftsmith/demo/pair/base
    python benchmarks/speed/train.py --out FILE.json --objective fkl \
        --heads eagle3,dflash:3,dspark:2,jetspec:3

With `--heads` fresh heads of the target are compared with the first of them on the same tokens,
each with as many layers as its number says. A row draws the product's number of blocks. Without it,
methods of training a draft are:

Plain is what one writes first: both models' logits for the whole batch,
`torch.nn.functional.kl_div` (for an objective other than fkl: this project's own loss function on
them), backward. With `--peers true` TRL's GKD trainer and transformers' Trainer join, where they
are installed and have the objective (`train_peers.py`). All make the same step: target forward (not
for ce, which plain and chunked do without too), draft forward and backward, optimizer; random
tokens, every position but the last predicted. Without `--target` and `--draft` weights are random,
the draft has the shape of LLaMA-68M (2 layers of 768), and the target is a small Llama.
`weights_apart` is the largest difference of a weight from the chunked method's after all steps:
they really do the same.

`chunks` (on a CPU): seconds and page faults of the loss alone, by how many tokens' logits are held
at once.

Seconds: one process, one warm-up each, the methods in turn, medians. On a shared machine the
seconds of the processor (CPU only) say more than those of the clock; both are written. The chunked
one also measures alpha, as it does in training. Memory: a fresh process for each method, the
highest it rose in its second step above what it held before it: on CUDA `max_memory_allocated`, on
a CPU the kernel's high-water mark of resident memory, reset before the step (an allocator that
returns memory late can only raise it). Quote the ratios.
"""

import copy
import json
import os
import platform
import resource
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, replace
from itertools import product
from pathlib import Path
from typing import Any

if __name__ == "__main__":
    # Python puts this directory first.
    sys.path[0] = str(Path(__file__).parents[2])

import torch  # noqa: E402
import torch.nn.functional as F  # noqa: E402
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedModel  # noqa: E402

from benchmarks.lib.engines import last_json  # noqa: E402
from benchmarks.lib.timing import rotated  # noqa: E402
from draftsmith.core.command_line import parse  # noqa: E402
from draftsmith.core.devices import peak_memory, reset_peak_memory, resolve_device  # noqa: E402
from draftsmith.core.errors import InputError  # noqa: E402
from draftsmith.core.io import JsonObject  # noqa: E402
from draftsmith.core.models import load_model, parameter_count, vocabulary_size  # noqa: E402
from draftsmith.core.options import options  # noqa: E402
from draftsmith.core.records import git_commit, versions  # noqa: E402
from draftsmith.drafts.heads import HEADS  # noqa: E402
from draftsmith.train.batch import IGNORE, Batch  # noqa: E402
from draftsmith.train.chunked import Output, TokenLoss, chunk_size  # noqa: E402
from draftsmith.train.objective import parse_objective  # noqa: E402
from draftsmith.train.teacher import LiveTeacher  # noqa: E402
from draftsmith.train.trainees import TRAINEES  # noqa: E402
from draftsmith.train.trainees.lm import LMTrainee  # noqa: E402

# Beside the size that the product chooses.
CHUNKS = (64, 256, 1024, 4096)
StepFunction = Callable[[], float]


@options
class Options:
    """What to measure, and at what shape."""

    out: str
    objective: str = "fkl"
    target: str = ""
    """A target to load, with `draft`; the shape options below are then not used."""
    draft: str = ""
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
    peers: bool = False
    """Other trainers too."""
    heads: str = ""
    """Kinds of heads, KIND or KIND:LAYERS, in place of methods."""
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


def make_models(options: Options) -> tuple[PreTrainedModel, PreTrainedModel]:
    """Target and draft on the device."""
    device = resolve_device(options.device)
    torch.manual_seed(0)
    if options.target:
        loading: JsonObject = {"device": str(device), "dtype": "float32"}
        return load_model(options.target, **loading), load_model(options.draft, **loading)
    target = llama(
        options.target_hidden, options.target_layers, options.vocabulary, options.sequence
    )
    draft = llama(768, 2, options.vocabulary, options.sequence)
    return target.to(device).eval(), draft.to(device)  # type: ignore[arg-type]


def peers_of(options: Options) -> dict[str, str]:
    """By peer why it is left out, empty where it is not; none without `--peers true`."""
    if not options.peers:
        return {}
    from benchmarks.speed.train_peers import why_not

    return why_not(options.objective)


@dataclass(frozen=True)
class Step:
    """A method: one step of its own copy of the draft, which returns the loss per token."""

    draft: torch.nn.Module
    make: StepFunction


def make_steps(options: Options, methods: Sequence[str]) -> dict[str, Step]:
    """The methods, each with a copy of the draft."""
    target, first = make_models(options)
    device = target.device
    objective = parse_objective(options.objective)
    ids_BT = torch.randint(vocabulary_size(first), (options.batch, options.sequence), device=device)
    labels_BT = ids_BT.roll(-1, 1)
    labels_BT[:, -1] = IGNORE
    batch = Batch(ids_BT, labels_BT, seeds_B=torch.arange(options.batch))
    tokens_N = ids_BT[:, 1:].flatten()

    def logits_of(model: PreTrainedModel) -> torch.Tensor:
        logits_BTV: torch.Tensor = model(input_ids=ids_BT, use_cache=False).logits
        return logits_BTV[:, :-1].flatten(0, 1)

    def plain(draft: PreTrainedModel) -> torch.Tensor:
        target_NV = None
        if objective.needs_target:
            with torch.no_grad():
                target_NV = logits_of(target)
        draft_NV = logits_of(draft)
        if target_NV is None or options.objective != "fkl":
            return objective.loss(draft_NV, target_NV, tokens_N).sum()
        log_q = draft_NV.float().log_softmax(-1)
        log_p = target_NV.float().log_softmax(-1)
        return F.kl_div(log_q, log_p, reduction="sum", log_target=True)

    def trainee_of(method: str) -> torch.nn.Module:
        kind, _, layers = method.partition(":")
        if kind not in HEADS:
            return LMTrainee(copy.deepcopy(first), objective, target, chunk=options.chunk).train()
        shape: JsonObject = {"num_layers": int(layers)} if layers else {}
        head = HEADS[kind].fresh(target, **shape)
        return TRAINEES[kind](head, objective, target, chunk=options.chunk).train()

    def made(method: str) -> Step:
        trainee = trainee_of(method)
        draft: Any = trainee.draft
        optimizer = torch.optim.SGD(draft.parameters(), lr=1e-3)
        if method in ("plain", "chunked") or options.heads:

            def backward() -> torch.Tensor:
                with torch.autocast(device.type, torch.bfloat16, enabled=options.bf16):
                    loss: torch.Tensor = plain(draft) if method == "plain" else trainee(batch).loss
                loss = loss / tokens_N.numel()
                loss.backward()
                return loss.detach()
        else:
            from benchmarks.speed.train_peers import backward_of

            backward = backward_of(method, options.objective, target, draft, ids_BT, options.bf16)

        def step() -> float:
            loss = float(backward())
            optimizer.step()
            optimizer.zero_grad(set_to_none=True)
            return loss

        return Step(draft, step)

    return {method: made(method) for method in methods}


def loss_by_chunk(options: Options) -> dict[str, dict[str, float]]:
    """Seconds and page faults of output projection and loss with all gradients, by tokens held at
    once.
    """
    target, draft = make_models(options)
    objective = parse_objective(options.objective)
    count = options.batch * options.sequence
    projections = [
        LMTrainee(draft, objective, target).projection,
        LMTrainee(target, objective).projection,
    ]
    hidden = [torch.randn(count, each.weight_VH.shape[1]) for each in projections]
    teacher = LiveTeacher(hidden[1], projections[1]) if objective.needs_target else None
    tokens_N = torch.randint(vocabulary_size(draft), (count,))
    weight_VH = projections[0].weight_VH
    sizes = {str(size): size for size in CHUNKS if size <= count}
    sizes["default"] = min(chunk_size(weight_VH, teacher, None), count)
    keys = ("seconds", "processor_seconds", "page_faults")
    taken: dict[tuple[str, str], list[float]] = {each: [] for each in product(sizes, keys)}
    for repeat in range(options.repeats + 1):
        for name, size in sizes.items():
            inputs_NH = hidden[0].clone()
            inputs_NH.requires_grad_()
            faults = page_faults()

            def loss(inputs_NH: torch.Tensor = inputs_NH, size: int = size) -> float:
                output = Output(weight_VH, None, projections[0])
                losses = TokenLoss(objective, size)
                sums = losses.sums(output, inputs_NH, tokens_N, teacher=teacher)
                sums.loss.backward()
                return 0.0

            clock, busy = timed(loss)
            draft.zero_grad(set_to_none=True)
            if repeat:
                for key, value in zip(keys, (clock, busy, page_faults() - faults), strict=True):
                    taken[name, key].append(value)
    found: dict[str, dict[str, float]] = {name: {"tokens": sizes[name]} for name in sizes}
    for (name, key), values in taken.items():
        found[name][key] = statistics.median(values)
    return found


def page_faults() -> int:
    """Page faults of this process so far that read nothing."""
    return resource.getrusage(resource.RUSAGE_SELF).ru_minflt


def memory_of(method: str, options: Options) -> dict[str, int]:
    """Bytes held before a step, and by how much it rose; run in a process of its own."""
    step = make_steps(options, [method])[method].make
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
    return last_json(done.stdout)


def timed(step: StepFunction) -> tuple[float, float]:
    """Seconds of one step: by the clock, and of all this process's cores together."""
    started = time.perf_counter()
    busy = time.process_time()
    step()
    if torch.cuda.is_available():
        torch.cuda.synchronize()
    return time.perf_counter() - started, time.process_time() - busy


def main() -> None:
    """Measure and write the JSON."""
    options, _ = parse(Options, "benchmarks/speed/train.py", sys.argv[1:])
    if bool(options.target) != bool(options.draft):
        raise InputError("target: is loaded together with a draft; name both, or neither")
    if options.only:
        memory = memory_of(options.only, options)
        sys.stdout.write(json.dumps(memory) + "\n")
        return
    reasons = peers_of(options)
    skipped = {peer: reason for peer, reason in reasons.items() if reason}
    for peer, reason in skipped.items():
        sys.stderr.write(f"{peer}: left out: {reason}\n")
    methods = ["plain", "chunked"] + [peer for peer in reasons if peer not in skipped]
    if options.heads:
        methods = options.heads.split(",")
    result = {
        "options": asdict(replace(options, out="")),
        "versions": versions(),
        "git_commit": git_commit(),
        "processor": platform.processor() or platform.machine(),
        "device": str(resolve_device(options.device)),
        "threads": torch.get_num_threads(),
        "load_average": os.getloadavg(),
        "skipped": skipped,
    }
    result |= measured(options, methods)
    Path(options.out).write_text(json.dumps(result, indent=1) + "\n")


def measured(options: Options, methods: Sequence[str]) -> JsonObject:
    """Memory, seconds and losses of the methods, over the first kind of head or `chunked`."""
    base = methods[0] if options.heads else "chunked"
    memory = {method: measured_memory(method) for method in methods}
    on_cpu = str(resolve_device(options.device)) == "cpu"
    chunks = loss_by_chunk(options) if on_cpu and not options.heads else None
    steps = make_steps(options, methods)
    losses = {method: steps[method].make() for method in methods}
    clock_s: dict[str, list[float]] = {method: [] for method in methods}
    busy_s: dict[str, list[float]] = {method: [] for method in methods}
    for repeat in range(options.repeats):
        for method in rotated(methods, repeat):
            clock, busy = timed(steps[method].make)
            clock_s[method].append(clock)
            busy_s[method].append(busy)
    tokens = options.batch * (options.sequence - 1)
    seconds = {method: statistics.median(clock_s[method]) for method in methods}
    spent = {method: statistics.median(busy_s[method]) for method in methods}
    held = memory[base]["rise"]
    over = {}
    for method in methods:
        over[method] = {
            "seconds": seconds[method] / seconds[base],
            "processor_seconds": spent[method] / spent[base],
            "memory": memory[method]["rise"] / held if held else None,
        }
    compared = [] if options.heads else methods
    trained = steps[base].draft
    return {
        "loss": losses,
        "parameters": {method: parameter_count(steps[method].draft) for method in methods},
        "weights_apart": {method: apart(steps[method].draft, trained) for method in compared},
        "memory_bytes": memory,
        "seconds": clock_s,
        "processor_seconds": busy_s,
        "tokens_per_s": {method: tokens / seconds[method] for method in methods},
        f"over_{base}": over,
        "chunks": chunks,
    }


def apart(one: torch.nn.Module, other: torch.nn.Module) -> float:
    """The largest difference of a weight."""
    pairs = zip(one.parameters(), other.parameters(), strict=True)
    differences = [(a - b).detach() for a, b in pairs]
    return max(float(difference.abs().max()) for difference in differences)


if __name__ == "__main__":
    main()
