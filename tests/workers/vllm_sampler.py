"""vLLM's sampler of its second model runner on a CPU, by Triton's interpreter; run in vLLM's
environment.

    python vllm_sampler.py REQUEST.json      # the last line is one JSON object

The request holds `target` and `draft`, the logits `[V, V]` of the next token by the last one, and
`rule`, `ahead`, `rows` and `tokens`. The answer has `texts` of that many tokens, and the `calls`
of each.
"""

import json
import os
import sys
from pathlib import Path
from types import SimpleNamespace

os.environ["TRITON_INTERPRET"] = "1"

import torch  # noqa: E402
import triton  # noqa: E402
import triton.language as tl  # noqa: E402
from triton.runtime import interpreter  # noqa: E402
from vllm import triton_utils  # noqa: E402


@triton.jit
def log1p(x):
    return tl.log(1 + x)


# Without a GPU vLLM has stand-ins for Triton. The interpreter has no `log1p`, and changes the
# language anew for each function; once is enough.
triton_utils.triton = triton
triton_utils.tl = tl
triton_utils.tldevice = SimpleNamespace(log1p=log1p)
change = interpreter._patch_lang
interpreter._patch_lang = lambda function: SimpleNamespace(restore=lambda: None)

from vllm.v1.worker.gpu.spec_decode import rejection_sampler_utils as sampler  # noqa: E402

change(sampler._rejection_kernel.fn)
change(triton.language.random.rand.fn)


def main() -> None:
    request = json.loads(Path(sys.argv[1]).read_text())
    target_VV = torch.tensor(request["target"])
    draft_VV = torch.tensor(request["draft"])
    ahead, rows, tokens = (request[key] for key in ("ahead", "rows", "tokens"))
    torch.manual_seed(0)
    texts: list[list[int]] = [[] for _ in range(rows)]
    calls = [0] * rows
    while rows_left := [row for row, text in enumerate(texts) if len(text) < tokens]:
        unfinished = [texts[row] for row in rows_left]
        count = len(unfinished)
        last = torch.tensor([(text or [0])[-1] for text in unfinished])
        read, drafted = [last], []
        for _ in range(ahead):
            logits = draft_VV[read[-1]]
            drafted.append(logits)
            read.append(torch.multinomial(logits.softmax(-1), 1)[:, 0])
        ids = torch.stack(read, 1)
        places = torch.arange(count, dtype=torch.int32)
        sampled, emitted = sampler.rejection_sample(
            target_VV[ids].flatten(0, 1),
            torch.stack(drafted, 1),
            ids.flatten().int(),
            torch.arange(count + 1, dtype=torch.int32) * (ahead + 1),
            torch.arange(ids.numel()),
            places,
            places.repeat_interleave(ahead + 1),
            torch.arange(ahead + 1, dtype=torch.int32).repeat(count),
            torch.ones(count),
            torch.randint(2**31, (count,)),
            ahead,
            use_block_verification=request["rule"] == "block",
        )
        for text, new, number in zip(unfinished, sampled.tolist(), emitted.tolist(), strict=True):
            text += new[:number]
        for row in rows_left:
            calls[row] += 1
    answer = json.dumps({"texts": [text[:tokens] for text in texts], "calls": calls})
    sys.stdout.write(f"\n{answer}\n")


if __name__ == "__main__":
    main()
