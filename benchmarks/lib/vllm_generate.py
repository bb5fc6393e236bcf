"""vLLM on a target, without and with drafts; run in its environment.

    python vllm_generate.py REQUEST.json      # the last line is one JSON object

The request holds `runs`, from a name to `engine`, the options of `vllm.LLM`, and, to generate,
`prompts` (lists of token ids), `max_new_tokens` and `ways`, each an object of sampling options such
as `temperature`, `seed` and `n`. Without `ways` vLLM only checks its configs, which reads no
weights. `threads` is torch's number of threads; `logits` names a file that gets the draft's logits
`[step, drafted token, V]` behind the first prompt.

The answer has for each run a list of ways; a way is a list of rows, one per prompt: `tokens` (n
lists), `seconds`, and with a draft `drafts`, `drafted` and `per_position`, the numbers of drafts,
of drafted tokens and of accepted tokens per position. A run that vLLM refuses is `{"refused":
MESSAGE}`.
"""

import json
import multiprocessing
import os
import sys
import time
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

# One process, so that counts are read where they are made. No thread is bound to a processor, which
# may be busy.
os.environ |= {
    "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
    "VLLM_CPU_OMP_THREADS_BIND": "nobind",
    "VLLM_LOGGING_LEVEL": "WARNING",
    "HF_HUB_OFFLINE": "1",
}
os.environ.setdefault("VLLM_CPU_KVCACHE_SPACE", "1")

import torch  # noqa: E402
import vllm  # noqa: E402
from safetensors.torch import save_file  # noqa: E402
from torch import Tensor  # noqa: E402
from vllm import _custom_ops  # noqa: E402
from vllm.engine.arg_utils import EngineArgs  # noqa: E402
from vllm.model_executor.models.qwen3_dflash import DFlashQwen3Model  # noqa: E402
from vllm.utils import cpu_triton_utils  # noqa: E402

JsonObject = dict[str, Any]
# A cached prefix would change how a prompt is computed.
OPTIONS = {"enforce_eager": True, "enable_prefix_caching": False, "disable_log_stats": False}
COUNTS = {
    "drafts": "num_drafts",
    "drafted": "num_draft_tokens",
    "per_position": "num_accepted_tokens_per_pos",
}


def mend() -> None:
    """Replace two functions of vLLM 0.32 that are wrong on a CPU. Above temperature 0 and with
    drafts, it writes each token's temperature, top-k and top-p into a copy that it drops, and
    divides the logits by whatever the memory held. In a block drafter, it norms the context's keys
    of every layer with the weights of the first.
    """

    def expand(
        out: Tensor, values: Tensor, ends: Tensor, replaced: float, by: float, *most: object
    ) -> None:
        begin = ends.new_zeros(1)
        counts = torch.diff(ends, prepend=begin).long()
        found = torch.where(values == replaced, by, values)
        out.copy_(found.repeat_interleave(counts))

    def normalize(self: DFlashQwen3Model, keys: Tensor) -> Tensor:
        normed = torch.empty_like(keys)
        for layer, weight in enumerate(self._k_norm_weights):
            _custom_ops.rms_norm(normed[layer], keys[layer], weight, self._rms_norm_eps)
        return normed

    cpu_triton_utils._expand_kernel_impl = expand
    DFlashQwen3Model._normalize_context_k = normalize


def counts(llm: vllm.LLM) -> JsonObject:
    """What vLLM has counted so far."""
    metrics = {
        metric.name.removeprefix("vllm:spec_decode_"): metric for metric in llm.get_metrics()
    }
    found = {name: metrics[theirs] for name, theirs in COUNTS.items() if theirs in metrics}
    return {
        name: list(metric.values) if name == "per_position" else metric.value
        for name, metric in found.items()
    }


def row(llm: vllm.LLM, prompt: list[int], options: JsonObject) -> JsonObject:
    """The answers to one prompt, and what was counted meanwhile."""
    before = counts(llm)
    started = time.perf_counter()
    params = vllm.SamplingParams(**{"ignore_eos": True, "detokenize": False} | options)
    (output,) = llm.generate([{"prompt_token_ids": prompt}], params, use_tqdm=False)
    seconds = time.perf_counter() - started
    after = counts(llm)
    tokens = [list(answer.token_ids) for answer in output.outputs]
    found: JsonObject = {"tokens": tokens, "seconds": seconds}
    for name, now in after.items():
        then = before[name]
        if name == "per_position":
            found[name] = [a - b for a, b in zip(now, then, strict=True)]
        else:
            found[name] = now - then
    return found


def recorded(llm: vllm.LLM, prompt: list[int], options: JsonObject) -> Tensor:
    """The draft's logits `[step, drafted token, V]` while it drafts behind a prompt."""
    steps = []

    def record(worker: Any) -> None:
        model = worker.model_runner.drafter.model
        compute = model.compute_logits

        def noted(*states: Tensor) -> Tensor | list[Tensor]:
            logits = compute(*states)
            # Medusa gives a list, one for each head.
            steps.append(torch.cat(logits) if isinstance(logits, list) else logits.clone())
            return logits

        model.compute_logits = noted

    llm.collective_rpc(record)
    row(llm, prompt, options)
    return torch.stack(steps).float()


def answer(run: JsonObject, pipe: Connection) -> None:
    """All rows of a run."""
    options = OPTIONS | run["engine"]
    if "threads" in run:
        torch.set_num_threads(run["threads"])
    try:
        if not run.get("ways"):
            EngineArgs(**options).create_engine_config()
            pipe.send([])
            return
        llm = vllm.LLM(**options)
        prompts = run["prompts"]
        most = {"max_tokens": run["max_new_tokens"]}
        ways = [most | way for way in run["ways"]]
        rows = []
        for way in ways:
            rows.append([row(llm, prompt, way) for prompt in prompts])
        if "logits" in run:
            save_file({"logits": recorded(llm, prompts[0], ways[0])}, run["logits"])
        pipe.send(rows)
    except Exception as error:
        kind = type(error).__name__
        pipe.send({"refused": f"{kind}: {error}"})


def main() -> None:
    """Each run in a process of its own, because vLLM's state is global; a fork saves the seconds of
    the import.
    """
    request = Path(sys.argv[1])
    runs = json.loads(request.read_text())["runs"]
    answers = {}
    mend()
    fork = multiprocessing.get_context("fork")
    for name, run in runs.items():
        mine, theirs = fork.Pipe(duplex=False)
        process = fork.Process(target=answer, args=(run, theirs))
        process.start()
        theirs.close()
        try:
            answers[name] = mine.recv()
        except EOFError:
            answers[name] = {"refused": "it ended without an answer"}
        process.join()
    printed = json.dumps({"engine": f"vllm {vllm.__version__}", "answers": answers})
    sys.stdout.write(f"\n{printed}\n")


if __name__ == "__main__":
    main()
