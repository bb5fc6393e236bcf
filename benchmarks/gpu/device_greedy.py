"""The section `greedy` of `device_check.py`: every proposer on every architecture beside
`generate`.
"""

import torch
from transformers import AutoConfig, AutoModelForCausalLM, GenerationConfig, PreTrainedModel

from benchmarks.gpu.device_measure import Check
from benchmarks.lib.tiny_types import randomise
from draftsmith.core.io import JsonObject
from draftsmith.core.sampling import Sampling
from draftsmith.decode import PROPOSERS, DraftModelProposer, Proposer, SpeculativeDecoder
from draftsmith.decode.suffix_index import SuffixIndex
from draftsmith.drafts.heads import HEADS

GREEDY = Sampling(temperature=0.0)
_SMALL: JsonObject = {
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 128,
}
_PLAIN = {
    key: value
    for key, value in _SMALL.items()
    if key not in ("intermediate_size", "num_key_value_heads")
}
ARCHITECTURES: dict[str, tuple[str, JsonObject]] = {
    "llama": ("llama", _SMALL),
    "mistral, window": ("mistral", {**_SMALL, "head_dim": 8, "sliding_window": 6}),
    "qwen2, some layers with a window": (
        "qwen2",
        {**_SMALL, "use_sliding_window": True, "sliding_window": 5, "max_window_layers": 1},
    ),
    "qwen3": ("qwen3", {**_SMALL, "head_dim": 8}),
    "gemma2": (
        "gemma2",
        {
            **_SMALL,
            "head_dim": 8,
            "sliding_window": 5,
            "query_pre_attn_scalar": 8,
            "tie_word_embeddings": False,
        },
    ),
    "opt": ("opt", _PLAIN | {"ffn_dim": 48, "word_embed_proj_dim": 32}),
    "gpt_neox": ("gpt_neox", _PLAIN | {"intermediate_size": 48}),
    "gpt2": ("gpt2", {"n_embd": 32, "n_layer": 3, "n_head": 4, "n_positions": 128}),
}
_PROMPTS = [[3, 1, 4, 1, 5, 9, 2, 6, 5], [7, 7, 2], [2, 7, 1, 8]]


def tiny_model(kind: str, options: JsonObject, seed: int, device: torch.device) -> PreTrainedModel:
    """A model of random weights, wide enough that its greedy outputs vary."""
    special: JsonObject = {"pad_token_id": None, "bos_token_id": None, "eos_token_id": None}
    config = AutoConfig.for_model(kind, vocab_size=33, **special, **options)
    torch.manual_seed(seed)
    model: PreTrainedModel = AutoModelForCausalLM.from_config(config)
    randomise(model, 0.4)
    torch.nn.Module.to(model, device=device, dtype=torch.float32)
    model.eval()
    return model


def proposers(
    target: PreTrainedModel, draft: PreTrainedModel, other: PreTrainedModel
) -> dict[str, Proposer]:
    """Every proposer, for one target; heads have random weights. ValueError of a head that a target
    cannot have is left to the caller.
    """
    found: dict[str, Proposer] = {
        "draft": DraftModelProposer(draft),
        "several": DraftModelProposer([draft, other]),
    }
    for name, kind in PROPOSERS.items():
        if kind.needs == "nothing":
            found[name] = kind.make(None)
        elif kind.needs == "index":
            texts = [list(range(33)), *_PROMPTS]
            found[name] = kind.make(SuffixIndex.build(texts))
        elif kind.needs == "head":
            trained = "medusa" if name == "blockwise" else name
            head = HEADS[trained].fresh(target)
            torch.nn.Module.to(head, target.device)
            head.eval()
            found[name] = kind.make(head)
    return found


def greedy(check: Check) -> None:
    """(b) Greedy outputs of every proposer, eager and compiled, beside `generate`, in fp32, by
    architecture.
    """
    tokens = 8 if check.tiny else 16
    for name, (kind, options) in list(ARCHITECTURES.items())[: 1 if check.tiny else None]:
        target, draft, other = (tiny_model(kind, options, seed, check.device) for seed in (1, 2, 3))
        with torch.no_grad():
            for parameter, near in zip(draft.parameters(), target.parameters(), strict=True):
                parameter.copy_(near + 0.1 * parameter)
        expected = []
        config = GenerationConfig(max_new_tokens=tokens, do_sample=False, pad_token_id=0)
        for prompt in _PROMPTS:
            ids = torch.tensor([prompt], device=check.device)
            out: torch.Tensor = target.generate(
                ids, attention_mask=torch.ones_like(ids), generation_config=config
            )  # type: ignore[operator]
            answer = out[0, len(prompt) :]
            expected.append(answer.tolist())
        results: JsonObject = {}
        for way, proposer in {"none": None, **proposers(target, draft, other)}.items():
            # Tracing takes seconds a step on a CPU.
            for backend in (
                (False, check.backend) if not check.tiny or way in ("none", "draft") else (False,)
            ):
                if check.late():
                    check.report(name, {**results, "cut": "out of time"})
                    return
                found = SpeculativeDecoder(target, proposer, compile=backend).generate(
                    _PROMPTS, GREEDY, tokens, eos_ids=()
                )
                equal = [each.output_ids for each in found.generations] == expected
                results[f"{way}{', compiled' if backend else ''}"] = equal
        different = [key for key, equal in results.items() if not equal]
        check.report(name, {"all_equal": not different, "different": different})
