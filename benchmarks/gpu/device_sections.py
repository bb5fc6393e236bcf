"""The sections of `device_check.py`. Each takes a `Check` and reports every figure as soon as it
has it, so that what was measured before an error or the end of its time is kept.

Legend: B rows of a batch, T tokens of a row; s seconds; memory is the most that was held at once,
in GB.
"""

import statistics
import subprocess
import sys
import tempfile
from collections.abc import Callable
from functools import partial
from itertools import product

import torch
import torch.nn.functional as F
from transformers import LlamaForCausalLM, PreTrainedModel

from benchmarks.gpu.device_greedy import GREEDY, greedy
from benchmarks.gpu.device_measure import Check
from benchmarks.gpu.device_models import enlarged, random_model, shapes
from benchmarks.lib.places import DRAFT, ROOT, TARGET
from benchmarks.speed.methods import Pair, build, decoder
from draftsmith.core.errors import RunError, is_installed
from draftsmith.core.io import JsonObject
from draftsmith.core.sampling import Sampling
from draftsmith.core.tokenization import encode_text, load_tokenizer
from draftsmith.decode import SpeculativeDecoder
from draftsmith.demo import corpus
from draftsmith.drafts.heads.eagle3 import Eagle3Head
from draftsmith.train.batch import Batch
from draftsmith.train.objective import parse_objective
from draftsmith.train.trainees.head import Eagle3Trainee
from draftsmith.train.trainees.lm import LMTrainee

# Dense bf16 arithmetic without sparsity, from NVIDIA's data sheets, by a part of the device's name.
PEAK_FLOPS = {"H100": 989e12, "H200": 989e12, "A100": 312e12}
TREES = ("chain:4", "chain:8,stop=0.3", "kary:4,2,2", "eagle2:depth=4,beam=4,nodes=16")


def gpu_tests(check: Check) -> None:
    """(a) The tests marked `gpu`."""
    if not is_installed("pytest"):
        check.report("skipped", "pytest is not installed; pip install pytest")
        return
    words = "-m pytest --noconftest -q -m gpu -p no:cacheprovider -rs tests/test_gpu.py".split()
    done = subprocess.run([sys.executable, *words], cwd=ROOT, capture_output=True, text=True)
    check.report("exit_code", done.returncode)
    check.report("output", done.stdout[-4000:] + done.stderr[-1000:])
    if done.returncode:
        raise RunError("tests marked gpu failed; see their output")


def passages(check: Check, count: int, tokens: int) -> list[list[int]]:
    """`count` held-out prompts of `tokens` tokens each; repeated where there are not so many."""
    tokenizer = load_tokenizer(str(TARGET))
    if check.tiny:  # reading the corpus takes longer than all the rest
        return [list(range(begin, begin + tokens)) for begin in range(2, 2 + count)]
    texts = corpus.passages("prose", corpus.split("prose").heldout)
    rows = [encode_text(tokenizer, row["text"])[:tokens] for row in texts]
    found = [ids for ids in rows if len(ids) == tokens][:count]
    return [found[index % len(found)] for index in range(count)]


def decoding(check: Check) -> None:
    """(c) A target of Llama-3.1-8B's shape with a draft of Llama-3.2-1B's, greedy, by batch, eager
    and compiled.
    """
    target_shape, draft_shape = shapes(check)
    target = enlarged(TARGET, target_shape, check.device, check.dtype)
    pair = Pair(target, enlarged(DRAFT, draft_shape, check.device, check.dtype))
    sizes = [model.num_parameters() for model in (pair.target, pair.draft)]
    check.report("parameters", sizes)
    check.report("dtype", str(check.dtype))
    new, length, trees = (8, 16, TREES[:1]) if check.tiny else (64, 128, TREES)
    for batch in (1,) if check.tiny else (1, 8, 32):
        prompts = passages(check, batch, length)
        forward = _behind(pair.target, prompts)
        raw = {queries: 1e3 * check.seconds(partial(forward, queries)) for queries in (1, 5, 17)}
        check.report(
            f"batch {batch}, raw forward behind {length} tokens, ms by tokens per row", raw
        )
        ways: list[tuple[str, bool | str]] = [("hf", False)]
        if batch == 1:
            ways.append(("hf-assisted", False))
        ways += product(("ar", *trees), (False, check.backend))
        if check.device.type == "cuda" and batch == 32:
            # Last, because compiling takes most of a minute.
            ways += [("ar", "inductor"), ("chain:4", "inductor")]
        alone: list[list[int]] = []
        for name, backend in ways:
            if check.late():
                check.report("cut", f"out of time before batch {batch}, {name}")
                return
            figures, outputs = _speed(check, pair, name, backend, prompts, new)
            if name == "ar" and not alone:
                alone = outputs
            if alone and not name.startswith("hf"):
                # In half precision a near tie may fall the other way; everything behind it then
                # differs.
                equal = [a == b for a, b in zip(outputs, alone, strict=True)]
                figures["outputs_equal_to_ar"] = sum(equal) / batch
                figures["ties_per_token"] = _ties(outputs, alone)
            compiled = f", compiled ({backend})" if backend else ""
            check.report(f"batch {batch}, {name}{compiled}", figures)
    for parameter in target.parameters():
        torch.nn.init.normal_(parameter, std=0.02)
    forward = _behind(target, passages(check, 1, length))
    check.report(
        "raw forward of random weights, batch 1, ms", 1e3 * check.seconds(partial(forward, 1))
    )


@torch.inference_mode()
def _behind(model: PreTrainedModel, prompts: list[list[int]]) -> Callable[[int], None]:
    """What forwards a number of tokens per row through the model, behind prompts that are cached
    once.
    """
    rows = torch.tensor(prompts, device=model.device)
    cache = model(rows, use_cache=True, logits_to_keep=1).past_key_values

    @torch.inference_mode()
    def forward(queries: int) -> None:
        model(rows[:, :queries], past_key_values=cache, use_cache=True)
        cache.crop(-queries)

    return forward


def _speed(
    check: Check, pair: Pair, name: str, backend: bool | str, prompts: list[list[int]], new: int
) -> tuple[JsonObject, list[list[int]]]:
    tokens = len(prompts) * new
    with check.memory() as memory:
        if name.startswith("hf"):
            method = build(name, pair, 0.0, new)
            outputs: list[list[int]] = method.decode(prompts, 0)
            seconds = check.seconds(lambda: method.decode(prompts, 0), 1)
            return {"tokens_per_s": tokens / seconds, **memory}, outputs
        made = _compiled(name, pair, backend)
        first = made.generate(prompts, GREEDY, new, eos_ids=())
        repeats = 1 if check.tiny else 3
        batches = [made.generate(prompts, GREEDY, new, eos_ids=()) for _ in range(repeats)]
    decode_s = statistics.median(batch.decode_s for batch in batches)
    prefill_s = statistics.median(batch.prefill_s for batch in batches)
    answers = batches[-1].generations
    stats = [answer.stats for answer in answers]
    steps = max(each.target_calls for each in stats)
    recorded = sum(steps.count for steps in made.every_steps)
    figures = {
        "tokens_per_s": tokens / (decode_s + prefill_s),
        "decode_tokens_per_s": tokens / decode_s,
        "ms_per_step": 1e3 * decode_s / steps,
        "tau": sum(stats[1:], stats[0]).tau,
        "recording_s": first.compile_s,
        "recorded_steps": recorded,
        **memory,
    }
    return figures, [answer.output_ids for answer in answers]


def _compiled(name: str, pair: Pair, backend: bool | str) -> SpeculativeDecoder:
    if name == "ar":
        return SpeculativeDecoder(pair.target, compile=backend)
    plain = decoder(name, pair)
    return SpeculativeDecoder(
        pair.target, plain.proposer, plain.tree, plain.verifier, compile=backend
    )


def _ties(outputs: list[list[int]], alone: list[list[int]]) -> float:
    """Divergences per token that was compared: a row is compared up to its first difference."""
    compared = diverged = 0
    for row, other in zip(outputs, alone, strict=True):
        equal = [a == b for a, b in zip(row, other, strict=True)]
        same = [*equal, False].index(False)
        diverged += same < len(row)
        compared += min(same + 1, len(row))
    return diverged / compared


def training(check: Check) -> None:
    """(d) One step of training an LM draft (chunked, and plain) and an EAGLE-3 head, behind a
    target of that shape.
    """
    target_shape, draft_shape = shapes(check)
    target = random_model(target_shape, check.device, check.dtype)
    rows, length = (1, 32) if check.tiny else (2, 1024)
    ids = torch.randint(target_shape.vocabulary, (rows, length), device=check.device)
    batch = Batch(ids, ids.roll(-1, 1))
    check.report("tokens of a step", ids.numel())
    _lm_drafts(check, random_model(draft_shape, check.device, torch.float32), target, batch)
    if check.late():
        check.report("cut", "out of time before EAGLE-3")
        return
    _eagle3(check, target, batch, "EAGLE-3")


def _eagle3(check: Check, target: LlamaForCausalLM, batch: Batch, name: str) -> None:
    vocabulary = list(range(0, target.config.vocab_size, 4))
    head = torch.nn.Module.to(Eagle3Head.fresh(target, draft_vocab=vocabulary), check.device)
    head.float().train()
    depths = 2 if check.tiny else 7
    trainee = Eagle3Trainee(
        head,
        parse_objective("fkl"),
        target,
        packing=False,
        test_steps=depths,
    ).train()
    size = sum(parameter.numel() for parameter in _trained(head))
    flops = _flops(batch, target, depths * size)
    _step(check, f"{name}, {depths} depths", head, lambda each: trainee(each).loss, batch, flops)


def _trained(draft: torch.nn.Module) -> list[torch.nn.Parameter]:
    return [parameter for parameter in draft.parameters() if parameter.requires_grad]


def _flops(batch: Batch, target: LlamaForCausalLM, trained: int) -> float:
    """Multiply-adds, twice, of a step: the target reads, and `trained` parameters learn."""
    return batch.ids_BT.numel() * (2 * target.num_parameters() + 6 * trained)


def _lm_drafts(
    check: Check, draft: LlamaForCausalLM, target: LlamaForCausalLM, batch: Batch
) -> None:
    """The draft's step: as this project makes it, as one writes it first, and that over a mesh of
    one device.
    """
    draft.train()
    objective = parse_objective("fkl")
    trainee = LMTrainee(draft, objective, target).train()

    def plain(batch: Batch) -> torch.Tensor:
        with torch.no_grad():
            target_BTV = target(input_ids=batch.ids_BT, use_cache=False).logits
        draft_BTV = draft(input_ids=batch.ids_BT, use_cache=False).logits
        log_q = draft_BTV.float().log_softmax(-1)
        log_p = target_BTV.float().log_softmax(-1)
        return F.kl_div(log_q, log_p, reduction="sum", log_target=True)

    flops = _flops(batch, target, draft.num_parameters())
    _step(check, "LM draft, chunked", draft, lambda each: trainee(each).loss, batch, flops)
    _step(check, "LM draft, plain", draft, plain, batch, flops)
    if check.late():
        check.report("cut", "out of time before FSDP2")
        return
    from torch.distributed import destroy_process_group, init_process_group
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard

    with tempfile.TemporaryDirectory() as directory:
        backend = "nccl" if check.device.type == "cuda" else "gloo"
        init_process_group(backend, init_method=f"file://{directory}/meeting", rank=0, world_size=1)
        try:
            mesh = init_device_mesh(check.device.type, (1,))
            for layer in draft.model.layers:
                fully_shard(layer, mesh=mesh)
            fully_shard(draft, mesh=mesh)
            _step(check, "LM draft, plain, FSDP2 over one device", draft, plain, batch, flops)
        finally:
            destroy_process_group()


def _step(
    check: Check,
    name: str,
    draft: torch.nn.Module,
    loss: Callable[[Batch], torch.Tensor],
    batch: Batch,
    flops: float,
) -> None:
    """Seconds, memory and MFU (multiply-adds of the linear layers alone) of one step with AdamW
    under autocast.
    """
    optimizer = torch.optim.AdamW(_trained(draft), lr=1e-5, foreach=True)

    def step() -> float:
        with torch.autocast(check.device.type, torch.bfloat16, enabled=check.device.type == "cuda"):
            value = loss(batch) / batch.ids_BT.numel()
        value.backward()
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        return float(value.detach())

    try:
        with check.memory() as memory:
            value = step()
            seconds = check.seconds(step, 3)
    except torch.OutOfMemoryError:
        check.report(name, "out of memory")
        return
    peak = _peak(check)
    mfu = None if peak is None else flops / seconds / peak
    rate = batch.ids_BT.numel() / seconds
    figures = {"s": seconds, "tokens_per_s": rate, "mfu": mfu, "loss": value}
    check.report(name, figures | memory)


def _peak(check: Check) -> float | None:
    device = torch.cuda.get_device_name(check.device) if check.device.type == "cuda" else ""
    return next((figure for part, figure in PEAK_FLOPS.items() if part in device), None)


def distillation(check: Check) -> None:
    """(e) Answers of a target of that shape at temperature 1 and batch 64: ours, compiled,
    transformers, vLLM.
    """
    target = enlarged(TARGET, shapes(check)[0], check.device, check.dtype)
    rows, length, new = (4, 16, 8) if check.tiny else (64, 64, 128)
    prompts = passages(check, rows, length)
    sampling = Sampling(temperature=1.0)
    for backend in (False, check.backend):
        made = SpeculativeDecoder(target, compile=backend)
        with check.memory() as memory:
            made.generate(prompts, sampling, new, eos_ids=(), seed=1)
            batch = made.generate(prompts, sampling, new, eos_ids=(), seed=2)
        figures = {"tokens_per_s": rows * new / (batch.prefill_s + batch.decode_s), **memory}
        check.report(f"ours{', compiled' if backend else ''}", figures)
        del made
    method = build("hf", Pair(target, target), 1.0, new)
    with check.memory() as memory:
        seconds = check.seconds(lambda: method.decode(prompts, 1), 1)
    check.report("transformers generate", {"tokens_per_s": rows * new / seconds, **memory})
    if not is_installed("vllm") or check.device.type != "cuda":
        why = "not installed" if check.device.type == "cuda" else "needs a CUDA device"
        check.report("vllm", f"skipped: {why}")
        return
    with tempfile.TemporaryDirectory() as directory:
        target.save_pretrained(directory)
        del target
        torch.cuda.empty_cache()
        from vllm import LLM, SamplingParams  # type: ignore[import-not-found, unused-ignore]

        engine = LLM(
            model=directory,
            skip_tokenizer_init=True,
            max_model_len=length + new,
            gpu_memory_utilization=0.8,
        )
        asked = SamplingParams(
            temperature=1.0, max_tokens=new, ignore_eos=True, detokenize=False, seed=1
        )
        inputs = [{"prompt_token_ids": prompt} for prompt in prompts]
        seconds = check.seconds(lambda: engine.generate(inputs, asked, use_tqdm=False), 1)
    check.report("vllm", {"tokens_per_s": rows * new / seconds})


# Name -> the function and its time limit in seconds; with starting their processes, they take
# together at most 9 minutes.
Section = Callable[[Check], None]
SECTIONS: dict[str, tuple[Section, int]] = {
    "tests": (gpu_tests, 60),
    "greedy": (greedy, 80),
    "decoding": (decoding, 190),
    "training": (training, 100),
    "distillation": (distillation, 80),
}
