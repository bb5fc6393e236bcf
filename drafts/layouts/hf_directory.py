"""A language model as transformers' own directory, which vLLM, SGLang and the builders of other formats read."""

import importlib.metadata
from pathlib import Path

import torch
from transformers import AutoModelForCausalLM, PreTrainedModel

from drafts.draft_vocabulary import draft_vocabulary, write_draft_vocabulary
from drafts.layouts.source import Proof, Source, compared, language_model
from draftsmith_core.io import read_json, write_json_atomic
from draftsmith_core.models import vocabulary_size


def save(source: Source, model: PreTrainedModel, out: Path) -> None:
    """Write the directory, and prove nothing."""
    # Tied weights stay one tensor, which save_pretrained writes once.
    stored = {tensor.data_ptr(): tensor.to(source.dtype) for tensor in model.state_dict().values()}
    model.save_pretrained(out, state_dict={name: stored[t.data_ptr()] for name, t in model.state_dict().items()})
    # save_pretrained writes the dtype of the model in memory.
    config = read_json(out / "config.json", "the config of a model")
    write_json_atomic(out / "config.json", config | {"dtype": str(source.dtype).removeprefix("torch.")})
    if (ids_D := draft_vocabulary(model)) is not None:
        write_draft_vocabulary(out, ids_D)
    if source.tokenizer is not None:
        source.tokenizer.save_pretrained(out)


def probe_ids(model: PreTrainedModel, count: int = 24) -> torch.Tensor:
    """Token ids `[1, T]` spread over the vocabulary, for comparing logits."""
    size = vocabulary_size(model)
    return (torch.arange(count) * max(1, size // count) + 7)[None] % size


@torch.no_grad()
def write(source: Source, out: Path) -> Proof:
    """Write config, weights, generation config and tokenizer; returns what proves them."""
    model = language_model(source, "hf")
    save(source, model, out)
    again = AutoModelForCausalLM.from_pretrained(out, dtype=torch.float32, use_safetensors=True).eval()
    ids = probe_ids(model)
    engine = f"transformers {importlib.metadata.version('transformers')}"
    return compared(out, engine, again(ids).logits, model(ids).logits, "tokens compared")
