"""What shows that an engine reads an export as it was meant: its logits are ours (law 11).

Each function returns the engine with its version and the largest difference of logits in fp32.
"""

import tempfile
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from benchmarks.lib.engines import complete, llama_server, vllm_answers, work
from draftsmith.core.hidden_states import forward_with_states
from draftsmith.core.models import text_config, vocabulary_size
from draftsmith.drafts.engine_commands import SERVING
from draftsmith.drafts.heads.block import BlockHead
from draftsmith.drafts.layouts.read_back import head_logits, probe_ids
from draftsmith.drafts.load import Source, depth_limit

TOKENS = 24
TOLERANCE = 1e-4
WORKERS = Path(__file__).parent / "workers"


@dataclass(frozen=True)
class Proof:
    """An engine and its version, and the largest difference of its logits from ours."""

    engine: str
    max_difference: float


def _compared(engine: str, theirs: Tensor, ours: Tensor) -> Proof:
    # Tokens outside a draft vocabulary have minus infinity on both sides.
    given, own = (logits.nan_to_num(neginf=-1e9) for logits in (theirs, ours))
    difference = float((given - own).abs().max())
    assert difference <= TOLERANCE, f"{engine} computes other logits: off by {difference:.2g}"
    return Proof(engine, difference)


@torch.no_grad()
def proven_by_speculators(source: Source, out: Path, python: Path) -> Proof:
    """The library's logits at every position, or of a block at each of the first tokens."""
    assert source.target is not None
    head: Any = source.draft
    slots = head.config.block_size if isinstance(head, BlockHead) else 0
    ids = probe_ids(source.target, TOKENS + slots)
    _, read = forward_with_states(source.target, head.hidden_layers, input_ids=ids)
    states = list(read)
    if slots:
        # `previous` are the text's tokens before those that the slots draft.
        previous = ids[0].unfold(0, head.depths, 1)[:TOKENS]
        raw = head.raw_logits(head.drafted(ids, states, torch.arange(TOKENS)[None])[0])
        ours = head.logits(raw, previous)[..., head.target_ids_D].flatten(0, 1)[None]
    else:
        ids, states = ids[:, 1:], [state[:, :-1] for state in states]
        ours, _ = head(ids, head.fuse(states))
    with tempfile.TemporaryDirectory() as place:
        inputs, answer = Path(place) / "inputs.safetensors", Path(place) / "logits.safetensors"
        joined = torch.cat(states, dim=-1).contiguous()
        save_file({"ids": ids.contiguous(), "states": joined}, inputs)
        report = work(python, WORKERS / "speculators_logits.py", out, inputs, answer)
        theirs = load_file(answer)["logits"]
    assert report["aux"] == list(head.hidden_layers)
    return _compared(report["engine"], theirs, ours)


@torch.no_grad()
def proven_by_vllm(source: Source, out: Path, python: Path) -> Proof:
    """The logits of every draft that vLLM makes in a greedy answer, and which it accepts."""
    assert source.target is not None
    target = source.target
    head: Any = source.draft
    prompt = probe_ids(target, 8)
    # An EAGLE head drafts one token here, because later ones depend on what was drafted before.
    ahead = depth_limit(head) or 1
    draft = {
        "method": SERVING["vllm"][source.kind].method,
        "model": str(out),
        "num_speculative_tokens": ahead,
    }
    options = {
        "model": source.target_name,
        "dtype": "float32",
        "max_model_len": 64,
        "max_num_seqs": 4,
    }
    with tempfile.TemporaryDirectory() as place:
        file = str(Path(place) / "logits.safetensors")
        run = {
            "engine": options | {"speculative_config": draft},
            "prompts": prompt.tolist(),
            "ways": [{"temperature": 0}],
            "max_new_tokens": TOKENS,
            "logits": file,
        }
        found = vllm_answers(python, {"pair": run})
        answer = found["answers"]["pair"]
        assert not isinstance(answer, dict), answer
        theirs = load_file(file)["logits"]
    row = answer[0][0]
    ids = torch.cat([prompt, torch.tensor([row["tokens"][0]])], dim=1)
    result, read = forward_with_states(target, head.hidden_layers, input_ids=ids)
    first = prompt.shape[1]
    assert torch.equal(result.logits[0, first - 1 : -1].argmax(-1), ids[0, first:])
    states = list(read)
    if isinstance(head, BlockHead):
        anchors_1T = torch.arange(1, ids.shape[1])[None]
        logits_TKV = head.logits(head.raw_logits(head.drafted(ids, states, anchors_1T)[0]))
    else:
        logits_TKV = head_logits(head, ids, states)
    # The first token comes from the prompt's forward; each draft then follows the last token that
    # is known.
    drafted: list[Tensor] = []
    accepted = 0
    known = first + 1
    while known < ids.shape[1]:
        drafted.append(logits_TKV[known - 2])
        tokens = ids[0, known : known + ahead]
        right = drafted[-1].argmax(-1)[: len(tokens)] == tokens
        kept = int(right.int().cumprod(0).sum())
        accepted += min(kept, 1)
        known += kept + 1
    assert (row["drafts"], row["per_position"][0]) == (len(drafted), accepted)
    return _compared(found["engine"], theirs[: len(drafted)], torch.stack(drafted))


@torch.no_grad()
def proven_by_llama_cpp(model: Any, file: Path, server: Path) -> None:
    """llama-server's greedy answer to one prompt is the model's own."""
    limit = getattr(text_config(model), "max_position_embeddings", 2048)
    ids = probe_ids(model, min(8, vocabulary_size(model)))
    count = min(TOKENS, limit - ids.shape[1] - 1)
    ours = ids
    for _ in range(count):
        ours = torch.cat([ours, model(ours).logits[:, -1:].argmax(-1)], dim=1)
    # Plain fp32 attention and cache, as the comparison is token for token.
    words = ["-m", str(file), "-c", str(limit), "-np", "1", "-t", "1", "-fa", "off"]
    with llama_server(server, [*words, "-ctk", "f32", "-ctv", "f32"]) as port:
        theirs = complete(port, ids[0].tolist(), count)["tokens"]
    assert theirs == ours[0, ids.shape[1] :].tolist()
