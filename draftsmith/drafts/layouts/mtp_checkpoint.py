"""`export --format mtp`: the target's checkpoint with an MTP head in it, as engines read it.

The head's tensors get the names of the family's own MTP layer, in a file beside the target's. The
target's weights are hard links where the file system allows it. An MTP layer that the checkpoint
had before is replaced.
"""

import itertools
import json
import os
import shutil
from pathlib import Path

import torch
from safetensors import safe_open
from safetensors.torch import save_file
from torch import Tensor

from draftsmith.core.errors import InputError
from draftsmith.core.io import read_json
from draftsmith.core.models import text_config
from draftsmith.core.records import RECORD
from draftsmith.drafts.heads.mtp import MtpHead
from draftsmith.drafts.heads.store import checkpoint_directory
from draftsmith.drafts.layouts.mtp import NativeLayer, find_layers, written_for
from draftsmith.drafts.layouts.read_back import Check, check_head
from draftsmith.drafts.load import Source

_INDEX = "model.safetensors.index.json"
_SINGLE = "model.safetensors"
# transformers reads no index where a file of the former name lies.
_RENAMED = {_SINGLE: "model-00001-of-00001.safetensors"}
_FILE = "model-mtp.safetensors"


@torch.no_grad()
def write(source: Source, out: Path) -> Check:
    """Write the checkpoint and read the head back from it."""
    head = source.draft
    target = source.target
    assert isinstance(head, MtpHead) and target is not None
    config = text_config(target)
    layer = written_for(config.model_type)
    assert layer is not None
    directory = checkpoint_directory(target)
    shards = sorted(directory.glob("*.safetensors"))
    if not shards:
        raise InputError(f"{directory}: holds no safetensors; save the target as such first")
    tensors = _named(head, layer, int(config.num_hidden_layers), source.dtype)
    save_file(tensors, out / _FILE, metadata={"format": "pt"})
    weight_map = dict.fromkeys(tensors, _FILE)
    names_of: dict[Path, set[str]] = {}
    for shard in shards:
        with safe_open(shard, framework="pt") as opened:
            names_of[shard] = set(opened.keys())
    old = find_layers(itertools.chain.from_iterable(names_of.values()))
    for shard, names in names_of.items():
        file = out / _RENAMED.get(shard.name, shard.name)
        kept = names if old is None else names - old.every(names)
        _put(shard, names, kept, file)
        weight_map |= dict.fromkeys(kept, file.name)
    size = sum(file.stat().st_size for file in out.glob("*.safetensors"))
    index = {"metadata": {"total_size": size}, "weight_map": dict(sorted(weight_map.items()))}
    (out / _INDEX).write_text(json.dumps(index, indent=2) + "\n")
    values = read_json(directory / "config.json", "the config of the target")
    (values.get("text_config") or values)[layer.counts[config.model_type]] = 1
    (out / "config.json").write_text(json.dumps(values, indent=2) + "\n")
    written = {_INDEX, "config.json", RECORD, *(shard.name for shard in shards)}
    for file in directory.iterdir():
        if file.is_file() and file.name not in written and not file.name.startswith("."):
            shutil.copyfile(file, out / file.name)
    if source.tokenizer is not None and not (out / "tokenizer_config.json").exists():
        source.tokenizer.save_pretrained(out)
    return check_head(out, head, target, layer.title, source=f"mtp:{out}")


def _named(head: MtpHead, layer: NativeLayer, layers: int, dtype: torch.dtype) -> dict[str, Tensor]:
    """The head's tensors under the checkpoint's names. Buffers, which routers have, keep their
    dtype.
    """
    start = layer.start.format(layers=layers)
    tensors = head.on_disk()
    buffers = {name for name, _ in head.named_buffers()}
    if "embed_tokens" in layer.names:
        # Published checkpoints hold both, and vLLM reads them from here.
        tensors["embed_tokens.weight"] = head.borrowed.embedding_weight
        tensors["lm_head.weight"] = head.borrowed.projection.weight_VH.detach()
    named = {}
    for name, tensor in tensors.items():
        theirs = layer.names.get(name.removesuffix(".weight"))
        whole = f"{theirs}.weight" if theirs else layer.block + name.removeprefix("layers.0.")
        stored = tensor if name in buffers else tensor.to(dtype)
        named[start + whole] = stored.contiguous().clone()
    return named


def _put(shard: Path, names: set[str], kept: set[str], file: Path) -> None:
    """Put a file of the target at `file`, with the `kept` ones of its tensors."""
    if kept == names:
        try:
            os.link(shard.resolve(), file)
        except OSError:
            # Another file system, or one without hard links.
            shutil.copyfile(shard, file)
    elif kept:
        with safe_open(shard, framework="pt") as opened:
            tensors = {name: opened.get_tensor(name) for name in kept}
        save_file(tensors, file, metadata={"format": "pt"})
