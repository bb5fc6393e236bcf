"""A language model or an EAGLE-3 head as one GGUF file, which llama.cpp reads, with its tokenizer
in it.

The tokenizer avoids two traps of llama.cpp's own converter. For BPE with SentencePiece's spelling
it writes one score for all tokens, so that text is cut wrongly; here a token's score is minus the
rank of its merge. And it knows a pre-tokenizer by a hash of its output, so that it refuses
tokenizers that it could serve; here the rules are compared.
"""

import json
import re
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from transformers import PretrainedConfig, PreTrainedModel

from draftsmith.core.errors import InputError, RunError, require_package
from draftsmith.core.io import JsonObject
from draftsmith.core.models import text_config
from draftsmith.core.tokenization import Tokenizer
from draftsmith.core.transformers_api import ROPE_INIT_FUNCTIONS
from draftsmith.drafts.layouts.read_back import Check
from draftsmith.drafts.load import Source
from draftsmith.drafts.vocabulary import BYTE, backend_of

if TYPE_CHECKING:
    from gguf import GGMLQuantizationType, GGUFWriter

FILE = "model.gguf"
# transformers' model type -> llama.cpp's name.
ARCHITECTURES = {"llama": "llama", "mistral": "llama", "qwen2": "qwen2", "qwen3": "qwen3"}
# Those whose rotary embedding pairs neighbouring dimensions.
_PAIRED = ("llama", "eagle3")
ROPES = ("default", "linear", "llama3")
# What heads have and no language model: our name -> llama.cpp's.
_OF_HEADS = {
    "midlayer.hidden_norm.weight": "blk.0.attn_norm_2.weight",
    "fc.weight": "fc.weight",
    "d2t": "d2t",
}
# llama.cpp as llama-cpp-python of this version has it.
PROVEN_IN = "llama.cpp of llama-cpp-python 0.3.36"
_LLAMA3 = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}"
    r"| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
_QWEN2 = _LLAMA3.replace(r"\p{N}{1,3}", r"\p{N}")
# llama.cpp's name for the rules that cut text into words. "refact" cuts digits singly and then as
# GPT-2 does.
_RULES = {
    "gpt-2": ["bytes"],
    "refact": ["digits", "bytes"],
    "llama-bpe": [_LLAMA3],
    "qwen2": [_QWEN2],
}


def write(source: Source, out: Path, *, matrices: str | None = None) -> Check:
    """Write `model.gguf` with the tokenizer in it, and read it back.

    matrices: llama.cpp's name of their type, such as Q8_0, in place of the source's.
    """
    require_package("gguf", "--format gguf")
    import gguf

    assert source.tokenizer is not None
    file = out / FILE
    head: Any = source.draft
    if isinstance(head, PreTrainedModel):
        config = text_config(head)
        architecture = ARCHITECTURES[config.model_type]
    else:
        config = head.config.llama()
        architecture = "eagle3"
    writer = gguf.GGUFWriter(file, architecture)
    names_of_types = {torch.float32: "F32", torch.float16: "F16", torch.bfloat16: "BF16"}
    matrix_type = matrices or names_of_types[source.dtype]
    file_type = "ALL_F32" if matrix_type == "F32" else f"MOSTLY_{matrix_type}"
    writer.add_name(Path(source.name).name)
    writer.add_file_type(gguf.LlamaFileType[file_type])
    _add_shape(writer, config)
    if architecture == "eagle3":
        writer.add_array("eagle3.target_layers", list(head.hidden_layers))
        writer.add_uint32("eagle3.target_hidden_size", head.config.target_hidden_size)
        writer.add_bool("eagle3.norm_before_residual", head.config.norm_before_residual)
        writer.add_bool("eagle3.norm_before_fc", False)
    _add_tokenizer(writer, source.tokenizer, config.vocab_size)
    written = _named(source, config, paired=architecture in _PAIRED)
    types = gguf.GGMLQuantizationType
    off = 0.0
    for name, tensor in written.items():
        if not tensor.is_floating_point():
            writer.add_tensor(name, tensor.numpy())
            continue
        # llama.cpp wants its norms and biases in fp32.
        stored = types.F32 if tensor.dim() == 1 else types[matrix_type]
        values = _rounded(name, tensor, stored)
        writer.add_tensor(name, values, raw_dtype=stored)
        kept = torch.tensor(gguf.quants.dequantize(values, stored))
        if matrices is not None:
            off = max(off, float(torch.dist(kept, tensor.float(), torch.inf)))
            written[name] = kept
        elif tensor.dim() > 1:
            written[name] = tensor.to(source.dtype)
    factors = _add_rope(writer, config)
    if factors is not None:
        written["rope_freqs.weight"] = factors
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    count = _read_back(file, written)
    return Check(f"{count} tensors read back by gguf", off)


def _rounded(name: str, tensor: Tensor, kind: "GGMLQuantizationType") -> Any:
    """The values of a tensor as a file holds them. Raise InputError for rows that it cannot cut
    into blocks.
    """
    import gguf

    block, _ = gguf.GGML_QUANT_SIZES[kind]
    if tensor.shape[-1] % block:
        raise InputError(
            f"type: {name} has rows of {tensor.shape[-1]} values, and {kind.name} has blocks of "
            f"{block}; take F16"
        )
    return gguf.quants.quantize(tensor.float().contiguous().numpy(), kind)


def _head_size(config: PretrainedConfig) -> int:
    return int(
        getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
    )


def _add_shape(writer: "GGUFWriter", config: PretrainedConfig) -> None:
    size = _head_size(config)
    writer.add_context_length(config.max_position_embeddings)
    writer.add_embedding_length(config.hidden_size)
    writer.add_block_count(config.num_hidden_layers)
    writer.add_feed_forward_length(config.intermediate_size)
    writer.add_head_count(config.num_attention_heads)
    writer.add_head_count_kv(config.num_key_value_heads)
    writer.add_key_length(size)
    writer.add_value_length(size)
    writer.add_layer_norm_rms_eps(config.rms_norm_eps)
    writer.add_rope_dimension_count(size)
    writer.add_vocab_size(config.vocab_size)


def _tensors(draft: Any, config: PretrainedConfig) -> dict[str, Tensor]:
    """The tensors that a file holds, under our names."""
    tensors = dict(draft.state_dict())
    if isinstance(draft, PreTrainedModel):
        if config.tie_word_embeddings:
            tensors.pop("lm_head.weight", None)
        return tensors
    tensors.pop("t2d", None)
    if "d2t" in tensors:
        # Ours are offsets (token id less row number); llama.cpp wants the token ids themselves.
        tensors["d2t"] = draft.target_ids_D
    if draft.borrowed.scales_embedding:
        tensors["embed_tokens.weight"] = draft.borrowed.embedding_table
    return tensors


def _named(source: Source, config: PretrainedConfig, *, paired: bool) -> dict[str, Tensor]:
    """The tensors under llama.cpp's names, with queries and keys in its order."""
    import gguf

    heads = {"attn_q.": config.num_attention_heads, "attn_k.": config.num_key_value_heads}
    # Qwen 3's names include those of the other families.
    names = gguf.get_tensor_name_map(gguf.MODEL_ARCH.QWEN3, config.num_hidden_layers)
    named = {}
    for name, tensor in _tensors(source.draft, config).items():
        common = name.replace("midlayer.", "layers.0.")
        theirs = _OF_HEADS.get(name) or names.get_name(common, try_suffixes=(".weight", ".bias"))
        if theirs is None:
            raise InputError(
                f"--format gguf: {source.name}: its tensor '{name}' has no place in llama.cpp's "
                "layout"
            )
        tensor = tensor.detach().cpu()
        tensor = tensor if tensor.is_floating_point() else tensor.long()
        for part, count in heads.items():
            if paired and part in theirs:
                tensor = _paired(tensor, count)
        named[theirs] = tensor
    return named


def _read_back(file: Path, written: dict[str, Tensor]) -> int:
    """Compare the tensors of a GGUF file with what was to be written; RunError if they differ.
    Return their number.
    """
    import gguf

    types = gguf.GGMLQuantizationType
    read = {}
    for stored in gguf.GGUFReader(file).tensors:
        values = stored.data
        if stored.tensor_type not in (types.I32, types.I64):
            values = gguf.quants.dequantize(values, stored.tensor_type)
        read[stored.name] = torch.tensor(values)
    if read.keys() != written.keys():
        differing = sorted(read.keys() ^ written.keys())
        raise RunError(f"{file}: read back, its tensors differ: {', '.join(differing)}")
    for name, tensor in written.items():
        difference = float(torch.dist(read[name].float(), tensor.float(), torch.inf))
        if difference != 0:
            raise RunError(f"{file}: read back, '{name}' is off by {difference:.2g}")
    return len(read)


def _paired(weight: Tensor, heads: int) -> Tensor:
    """Rows of queries or keys in the order that pairs dimension 2i with 2i + 1; transformers pairs
    i with i + n / 2.
    """
    return weight.unflatten(0, (heads, 2, -1)).transpose(1, 2).flatten(0, 2)


def _add_rope(writer: "GGUFWriter", config: PretrainedConfig) -> Tensor | None:
    """Add the keys of the rotary embedding; return the factors `[head_dim / 2]` of llama3's form,
    which llama.cpp wants as a tensor.
    """
    import gguf

    rope = config.rope_parameters
    kind = rope.get("rope_type", "default")
    base = float(rope["rope_theta"])
    writer.add_rope_freq_base(base)
    if kind == "linear":
        writer.add_rope_scaling_type(gguf.RopeScalingType.LINEAR)
        writer.add_rope_scaling_factor(float(rope["factor"]))
    if kind == "llama3":
        scaled, _ = ROPE_INIT_FUNCTIONS["llama3"](config, torch.device("cpu"))
        size = _head_size(config)
        plain = 1.0 / (base ** (torch.arange(0, size, 2, dtype=torch.float32) / size))
        factors = plain / scaled
        writer.add_tensor("rope_freqs.weight", factors.numpy())
        return factors
    return None


@dataclass(frozen=True)
class Vocabulary:
    """A tokenizer in llama.cpp's terms. `rules` names the rules that cut text into words."""

    model: str
    rules: str
    tokens: list[str]
    merges: list[str]
    added: dict[str, int | None]
    """The token that is added before (`bos`) and behind (`eos`) a text, if any."""
    adds_space: bool


@lru_cache(maxsize=4)
def described(tokenizer: Tokenizer, size: int) -> Vocabulary:
    """A tokenizer in llama.cpp's terms; ids up to `size` that it lacks become unused ones.

    Raises InputError for a tokenizer whose text llama.cpp would cut differently.
    """
    backend = backend_of(tokenizer) or {"model": {"type": "slow"}}
    model = backend["model"]
    kind = "llama"
    name = "default"
    unknown = ""
    if model["type"] != "BPE":
        unknown = f"its tokens come from a {model['type']} model"
    elif not (model.get("byte_fallback") and any(map(BYTE.fullmatch, model["vocab"]))):
        rules = _rules(backend["pre_tokenizer"])
        ignores = bool(model.get("ignore_merges"))
        kind = "gpt2"
        name = next((name for name, known in _RULES.items() if known == rules), "")
        if not name or (name == "llama-bpe") != ignores:
            unknown = f"its pre-tokenizer cuts text by {rules} ('ignore_merges' is {ignores})"
    if unknown:
        raise InputError(
            f"{tokenizer.name_or_path}: {unknown}, and no rules of llama.cpp that are known here "
            "do the same; use --format hf and llama.cpp's own convert_hf_to_gguf.py"
        )
    empty = tokenizer("")["input_ids"]
    bos = tokenizer.bos_token_id
    eos = tokenizer.eos_token_id
    added = {
        "bos": bos if empty and empty[0] == bos else None,
        "eos": eos if empty and empty[-1] == eos != bos else None,
    }
    merges = [pair if isinstance(pair, str) else " ".join(pair) for pair in model["merges"]]
    spaces = json.dumps([backend["normalizer"], backend["pre_tokenizer"]])
    adds_space = re.search('"Prepend"|_scheme": "(always|first)"', spaces) is not None
    by_id = {i: token for token, i in tokenizer.get_vocab().items()}
    tokens = [by_id.get(i, f"[PAD{i}]") for i in range(size)]
    return Vocabulary(kind, name, tokens, merges, added, adds_space)


def _rules(pre: JsonObject | None) -> list[str]:
    """A pre-tokenizer's rules in the words of `_RULES`."""
    steps = [] if pre is None else pre["pretokenizers"] if pre["type"] == "Sequence" else [pre]
    rules = []
    for step in steps:
        if step["type"] == "Split" and step["behavior"] == "Isolated" and not step["invert"]:
            rules.append(step["pattern"].get("Regex", ""))
        elif step == {"type": "Digits", "individual_digits": True}:
            rules.append("digits")
        elif step["type"] == "ByteLevel" and not step["add_prefix_space"]:
            rules += ["bytes"] if step["use_regex"] else []
        else:
            rules.append(step["type"])
    return rules


def _add_tokenizer(writer: "GGUFWriter", tokenizer: Tokenizer, size: int) -> None:
    from gguf import TokenType

    vocabulary = described(tokenizer, size)
    known = tokenizer.get_vocab()
    declared = {
        i: TokenType.CONTROL if token.special else TokenType.USER_DEFINED
        for i, token in tokenizer.added_tokens_decoder.items()
    }
    if tokenizer.unk_token is not None:
        declared[known[tokenizer.unk_token]] = TokenType.UNKNOWN
    kinds = []
    # The tokenizer may declare tokens that the model has no row for; those stay out.
    for i, token in enumerate(vocabulary.tokens):
        kind = TokenType.BYTE if BYTE.fullmatch(token) else TokenType.NORMAL
        kinds.append(declared.get(i, kind if token in known else TokenType.UNUSED))
    writer.add_tokenizer_model(vocabulary.model)
    writer.add_tokenizer_pre(vocabulary.rules)
    if vocabulary.model == "llama":
        # llama.cpp joins the pair whose whole has the highest score; BPE joins the one whose merge
        # stands first.
        rank: dict[str, float] = {}
        for i, merge in enumerate(vocabulary.merges):
            rank.setdefault(merge.replace(" ", ""), -float(i))
        worst = -float(len(vocabulary.merges) + 1)
        pairs = zip(vocabulary.tokens, kinds, strict=True)
        writer.add_token_scores(
            [rank.get(token, worst) if kind == TokenType.NORMAL else 0.0 for token, kind in pairs]
        )
        writer.add_add_space_prefix(vocabulary.adds_space)
    else:
        writer.add_token_merges(vocabulary.merges)
    writer.add_token_list(vocabulary.tokens)
    writer.add_token_types(kinds)
    for key, value in (("bos", tokenizer.bos_token_id), ("eos", tokenizer.eos_token_id)):
        if value is not None:
            getattr(writer, f"add_{key}_token_id")(value)
        getattr(writer, f"add_add_{key}_token")(vocabulary.added[key] is not None)
    if tokenizer.chat_template is not None:
        writer.add_chat_template(tokenizer.chat_template)
