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
from vllm import _custom_ops  # noqa: E402
from vllm.engine.arg_utils import EngineArgs  # noqa: E402
from vllm.model_executor.models.qwen3_dflash import DFlashQwen3Model  # noqa: E402
from vllm.utils import cpu_triton_utils  # noqa: E402

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

    def expand(out: Any, values: Any, ends: Any, replaced: Any, by: Any, *most: Any) -> None:
        counts = torch.diff(ends, prepend=ends.new_zeros(1)).long()
        out.copy_(torch.where(values == replaced, by, values).repeat_interleave(counts))

    def normalize(self: Any, keys: Any) -> Any:
        normed = torch.empty_like(keys)
        for layer, weight in enumerate(self._k_norm_weights):
            _custom_ops.rms_norm(normed[layer], keys[layer], weight, self._rms_norm_eps)
        return normed

    cpu_triton_utils._expand_kernel_impl = expand
    DFlashQwen3Model._normalize_context_k = normalize


def counts(llm: Any) -> dict[str, Any]:
    """What vLLM has counted so far."""
    metrics = {
        metric.name.removeprefix("vllm:spec_decode_"): metric for metric in llm.get_metrics()
    }
    found = {name: metrics[theirs] for name, theirs in COUNTS.items() if theirs in metrics}
    return {
        name: list(metric.values) if name == "per_position" else metric.value
        for name, metric in found.items()
    }


def row(llm: Any, prompt: list[int], options: dict[str, Any]) -> dict[str, Any]:
    """The answers to one prompt, and what was counted meanwhile."""
    before = counts(llm)
    started = time.perf_counter()
    params = vllm.SamplingParams(**{"ignore_eos": True, "detokenize": False} | options)
    (output,) = llm.generate([{"prompt_token_ids": prompt}], params, use_tqdm=False)
    seconds = time.perf_counter() - started
    after = counts(llm)
    found: dict[str, Any] = {
        "tokens": [list(answer.token_ids) for answer in output.outputs],
        "seconds": seconds,
    }
    for name, now in after.items():
        then = before[name]
        found[name] = (
            [a - b for a, b in zip(now, then, strict=True)]
            if name == "per_position"
            else now - then
        )
    return found


def recorded(llm: Any, prompt: list[int], options: dict[str, Any]) -> torch.Tensor:
    """The draft's logits `[step, drafted token, V]` while it drafts behind a prompt."""
    steps = []

    def record(worker: Any) -> None:
        model = worker.model_runner.drafter.model
        compute = model.compute_logits

        def noted(*states: Any) -> Any:
            logits = compute(*states)
            # Medusa gives a list, one for each head.
            steps.append(torch.cat(logits) if isinstance(logits, list) else logits.clone())
            return logits

        model.compute_logits = noted

    llm.collective_rpc(record)
    row(llm, prompt, options)
    return torch.stack(steps).float()


def answer(run: dict[str, Any], pipe: Any) -> None:
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
        rows = [[row(llm, prompt, most | way) for prompt in prompts] for way in run["ways"]]
        if "logits" in run:
            save_file({"logits": recorded(llm, prompts[0], most | run["ways"][0])}, run["logits"])
        pipe.send(rows)
    except Exception as error:
        pipe.send({"refused": f"{type(error).__name__}: {error}"})


def main() -> None:
    """Each run in a process of its own, because vLLM's state is global; a fork saves the seconds of
    the import.
    """
    runs = json.loads(Path(sys.argv[1]).read_text())["runs"]
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
    sys.stdout.write(
        "\n" + json.dumps({"engine": f"vllm {vllm.__version__}", "answers": answers}) + "\n"
    )


if __name__ == "__main__":
    main()
