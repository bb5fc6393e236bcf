"""Layouts of heads on disk: `layouts.yaml` holds their tensor names and shapes, this file what
differs otherwise.

To add a layout, enter it in `layouts.yaml`, in the order of recognition, and in `_FUNCTIONS`.

Legend: V target vocabulary, D draft vocabulary, H hidden size.
"""

import logging
import re
from collections.abc import Callable, Mapping, Sequence, Set
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from typing import Any, TypeVar

import torch
import yaml
from torch import Tensor

from drafts.draft_vocabulary import from_offsets, offsets
from draftsmith_core.errors import InputError

log = logging.getLogger(__name__)
Values = Mapping[str, Any]
# The names of all tensors; calling it may load a pickle.
Names = Callable[[], Set[str]]
T = TypeVar("T")
_DATA = yaml.safe_load(Path(__file__).with_name("layouts.yaml").read_text(encoding="utf-8"))
_FIELDS = {"i": r"\d+", "j": r"\d+", "part": "weight|bias", "rest": ".+"}


@dataclass(kw_only=True)
class HeadFiles:
    """Config and tensors of a head. `lm_head_VH` is its target's output projection."""

    values: dict[str, Any]
    tensors: dict[str, Tensor]
    lm_head_VH: Tensor

    def count(self, pattern: str) -> tuple[int, int]:
        """One more than the largest number in both groups of `pattern`, over the tensors; zeros
        without a match.
        """
        numbers = [
            (int(m[1]), int(m[2])) for m in map(re.compile(pattern).fullmatch, self.tensors) if m
        ]
        return 1 + max((i for i, _ in numbers), default=-1), 1 + max(
            (j for _, j in numbers), default=-1
        )


@dataclass(frozen=True, kw_only=True)
class Layout:
    """A layout of one kind of head; `layouts.yaml` says what its data mean."""

    title: str
    kind: str
    names: Mapping[str, str] = field(default_factory=dict)
    prefix: str = ""
    format: str | None = None
    proven_in: str | None = None
    embedding: str = "never"
    known: Callable[[Values, Names], bool] = lambda values, names: False
    """Whether config.json describes such a head; asks for tensor names only if the config does not
    tell.
    """
    read: Callable[[HeadFiles], None] = lambda files: None
    """Complete config and tensors after renaming. Raises InputError for a variant that cannot be
    run.
    """
    config: Callable[[dict[str, Any], Any], dict[str, Any]] = lambda ours, source: ours
    """config.json of the layout, from ours and the `Source` of the export."""

    def expected(self, config: Values, embedding: bool) -> dict[str, tuple[int, ...]]:
        """Names and shapes of a file with this config.json."""
        config = config | config.get("transformer_layer_config", {})
        hidden, size, blocks = (
            config["hidden_size"],
            config.get("head_dim", 0),
            config["num_hidden_layers"],
        )
        sizes = {
            "H": hidden,
            "2H": 2 * hidden,
            "3H": 3 * hidden,
            "F": config.get("intermediate_size"),
        }
        sizes |= {
            "V": config["vocab_size"],
            "D": config.get("draft_vocab_size", config["vocab_size"]),
        }
        sizes |= {
            "Q": config.get("num_attention_heads", 0) * size,
            "K": config.get("num_key_value_heads", 0) * size,
        }
        sizes |= {
            "A": size,
            "TH": hidden * len(_target_layers(config)),
            "R": config.get("markov_rank", 0),
            "1": 1,
        }
        sizes |= {"HR": hidden + sizes["R"]}
        conditions = {
            "": True,
            "bias": config.get("bias"),
            "reduced": sizes["D"] < sizes["V"],
            "embedding": embedding,
        }
        conditions |= {"markov": sizes["R"], "confidence": config.get("enable_confidence_head")}
        rules = {name: rule.partition(" if ") for name, rule in _DATA["shapes"][self.kind].items()}
        shapes = {
            name.format(i=i, j=j, blocks=blocks): tuple(sizes[letter] for letter in shape.split())
            for name, (shape, _, condition) in rules.items()
            if conditions[condition]
            for i in range(config.get("num_heads", 1))
            for j in range(blocks)
        }
        return renamed(shapes, inverted(self.names))


def renamed(tensors: Mapping[str, T], names: Mapping[str, str], prefix: str = "") -> dict[str, T]:
    """Tensors, or shapes, under the names that the first matching pattern of `names` gives them,
    else under their own.

    A `{j}` that only the new name has is the number of blocks: one more than the largest `{j}` of
    the other names.
    """
    matched: list[tuple[T, str, dict[str, str]]] = []
    for key, tensor in tensors.items():
        name = key.removeprefix(prefix)
        fits = (
            (new, match)
            for pattern, new in names.items()
            if (match := _compiled(pattern).fullmatch(name))
        )
        new, fields = next(
            ((new, match.groupdict()) for new, match in fits), ("{rest}", {"rest": name})
        )
        matched.append((tensor, new, fields))
    blocks = 1 + max((int(fields["j"]) for _, _, fields in matched if "j" in fields), default=0)
    return {new.format(**{"j": blocks, **fields}): tensor for tensor, new, fields in matched}


def inverted(names: Mapping[str, str]) -> dict[str, str]:
    """Our name -> the first of theirs."""
    return {ours: theirs for theirs, ours in reversed(list(names.items()))}


@cache
def _compiled(pattern: str) -> re.Pattern[str]:
    escaped = re.escape(pattern)
    for name, expression in _FIELDS.items():
        escaped = escaped.replace(re.escape(f"{{{name}}}"), f"(?P<{name}>{expression})")
    return re.compile(escaped)


# --- EAGLE-1/2

# Heads for Mixtral and Qwen 2 carry those families' model_type; the layer is a LLaMA layer all the
# same.
_EAGLE_FAMILIES = ("llama", "mistral", "mixtral", "qwen2", "qwen3")


def _is_eagle(values: Values, names: Names) -> bool:
    one_layer = (
        values.get("num_hidden_layers") == 1
        and values.get("model_type", "llama") in _EAGLE_FAMILIES
    )
    named = "Eagle" in str(values.get("architectures"))
    return named or (one_layer and ("bias" in values or "fc.weight" in names()))


def _read_eagle(files: HeadFiles) -> None:
    # From the tensors: the authors' code draws biases that a file lacks at random.
    files.values |= _biases(files, "layers.0.") | {"bias": "fc.bias" in files.tensors}


def _biases(files: HeadFiles, prefix: str) -> dict[str, bool]:
    return {
        "qkv_bias": f"{prefix}self_attn.q_proj.bias" in files.tensors,
        "attention_bias": f"{prefix}self_attn.o_proj.bias" in files.tensors,
    }


def _authors_config(ours: dict[str, Any], source: Any) -> dict[str, Any]:
    scaling = ours["rope_scaling"]
    # The authors' code asks for the older key.
    old = None if scaling is None else scaling | {"type": scaling["rope_type"]}
    return ours | {"architectures": ["LlamaForCausalLM"], "rope_scaling": old}


# --- EAGLE-3

_EMBEDDING = "embed_tokens.weight"
_EAGLE3_FLAGS = {"norm_before_fc", "norm_output", "norm_before_residual"}


def _is_eagle3(values: Values, names: Names) -> bool:
    named = "draft_vocab_size" in values or "Eagle3" in str(values.get("architectures"))
    one_layer = values.get("num_hidden_layers", 1) == 1
    return named or (
        one_layer and any(name.endswith("midlayer.hidden_norm.weight") for name in names())
    )


def _read_eagle3(files: HeadFiles) -> None:
    """Fill what a file leaves out as the engines do: `t2d` from `d2t`, `lm_head` from the target's
    rows.
    """
    tensors, values = files.tensors, files.values
    # Training checkpoints of speculators hold copies of the target's own.
    for name in ("verifier_norm.weight", "verifier_lm_head.weight"):
        tensors.pop(name, None)
    inner = values.get("eagle_config") or {}
    if inner.get("use_aux_hidden_state") is False:
        raise InputError(
            "'use_aux_hidden_state' is false; only heads that read several of the target's "
            "layers can run"
        )
    for key in _EAGLE3_FLAGS & inner.keys():
        values.setdefault(key, inner[key])
    size = values.get("vocab_size") or len(files.lm_head_VH)
    drafted = tensors.get("d2t", tensors.get("lm_head.weight"))
    if values.get("draft_vocab_size") is None:
        values["draft_vocab_size"] = size if drafted is None else len(drafted)
    ids_D = _read_draft_vocabulary(files, size)
    if "lm_head.weight" not in tensors:
        tensors["lm_head.weight"] = files.lm_head_VH.detach().cpu()[ids_D]
    values |= _biases(files, "midlayer.")
    values["qk_norm"] = "midlayer.self_attn.q_norm.weight" in tensors
    values["fc_norm"] = "fc_norm.0.weight" in tensors
    values["norm_before_fc"] = "input_norm.weight" in tensors
    trained = values.get("embed_requires_grad") is True
    other_width = (
        _EMBEDDING in tensors and tensors[_EMBEDDING].shape[-1] != files.lm_head_VH.shape[-1]
    )
    values["embed_requires_grad"] = _EMBEDDING in tensors and (trained or other_width)


def _read_draft_vocabulary(files: HeadFiles, size: int) -> Tensor:
    """The drafted tokens. Leaves `d2t` as offsets and `t2d` as a mask; neither if every token can
    be drafted.
    """
    d2t, t2d = files.tensors.pop("d2t", None), files.tensors.pop("t2d", None)
    if d2t is None and t2d is not None:
        d2t = offsets(t2d.bool().nonzero().flatten())
    if files.values["draft_vocab_size"] == size or d2t is None:
        return torch.arange(size)
    ids_D, mask = from_offsets(d2t, size), torch.zeros(size, dtype=torch.bool)
    if ids_D is not None:
        mask[ids_D.long()] = True
    if ids_D is None or not torch.equal(mask if t2d is None else t2d.bool(), mask):
        raise InputError(
            f"'d2t' and 't2d' do not describe one set of tokens below {size}; export it again"
        )
    files.tensors |= {"d2t": d2t, "t2d": mask}
    return ids_D


def _sglang_eagle3_config(ours: dict[str, Any], source: Any) -> dict[str, Any]:
    # SGLang names a layer by its output, which is the state that enters the next one. vLLM prefers
    # our own key.
    ids = [layer - 1 for layer in source.draft.hidden_layers]
    return ours | {
        "eagle_config": {"eagle_aux_hidden_state_layer_ids": ids, "use_aux_hidden_state": True}
    }


def _read_speculators(files: HeadFiles) -> None:
    layer = files.values.pop("transformer_layer_config")
    window = layer.get("sliding_window") if layer.get("use_sliding_window", True) else None
    kinds = layer.get("layer_types") or ["sliding_attention" if window else "full_attention"]
    if kinds[0] == "sliding_attention":
        raise InputError("its layer attends to a window; only full attention can be run")
    # The library's defaults.
    files.values = {"norm_before_residual": False, "num_hidden_layers": 1} | layer | files.values
    _read_eagle3(files)


def _speculators_config(ours: dict[str, Any], source: Any) -> dict[str, Any]:
    outside = ("draft_vocab_size", "eagle_aux_hidden_state_layer_ids", "norm_before_residual")
    more = {key: ours[key] for key in outside} | {"norm_before_fc": False}
    return _speculators("Eagle3Speculator", "eagle3", 3, ours, more, source)


def _speculators(
    architecture: str,
    algorithm: str,
    tokens: int,
    ours: dict[str, Any],
    more: dict[str, Any],
    source: Any,
) -> dict[str, Any]:
    """config.json of a speculator that drafts `tokens` tokens; `more` stands beside its layers'
    config.
    """
    greedy = {
        "proposal_type": "greedy",
        "speculative_tokens": tokens,
        "verifier_accept_k": 1,
        "accept_tolerance": 0.0,
    }
    path = Path(source.target_name)
    return {
        "architectures": [architecture],
        "speculators_model_type": algorithm,
        # Later versions add flags that must stay off for heads of the original form.
        "speculators_version": "0.7.0",
        "speculators_config": {
            "algorithm": algorithm,
            "default_proposal_method": "greedy",
            "proposal_methods": [greedy],
            "verifier": {
                # vLLM loads the target by this name from wherever it is started.
                "name_or_path": str(path.resolve()) if path.is_dir() else source.target_name,
                "architectures": list(
                    source.target.config.architectures or [type(source.target).__name__]
                ),
            },
        },
        "transformer_layer_config": {
            k: v for k, v in ours.items() if k not in ("architectures", *more)
        },
        **more,
        "target_hidden_size": None,
        "tie_word_embeddings": False,
        "torch_dtype": str(source.dtype).removeprefix("torch."),
    }


# --- Block drafters


def _target_layers(values: Values) -> Sequence[int]:
    """The layers of a target whose outputs a block drafter reads; speculators names each by the
    next one's number.
    """
    if (entering := values.get("aux_hidden_state_layer_ids")) is not None:
        return [layer - 1 for layer in entering]
    inner = values.get("dflash_config") or {}
    return inner.get("target_layer_ids") or values.get("target_layer_ids") or ()


def _is_block(values: Values, names: Names) -> bool:
    return "dflash_config" in values or "DFlash" in str(values.get("architectures"))


def _is_jetspec(values: Values, names: Names) -> bool:
    causal = (values.get("dflash_config") or values).get("causal", values.get("causal_head"))
    return _is_block(values, names) and bool(causal)


def _read_block(files: HeadFiles) -> None:
    """Check what stands for the target's own: a reduced output projection must be rows of the
    target's.
    """
    values, tensors = files.values, files.tensors
    kinds = set(values.get("layer_types") or ())
    if len(kinds) > 1:
        raise InputError(
            "some of its layers attend to a window and some do not; only layers that are alike "
            "can run"
        )
    if kinds == {"sliding_attention"}:
        window = {"use_swa": True, "swa_window_size": values["sliding_window"]}
        # By default engines make layers with a window causal.
        values["dflash_config"] = (
            {"causal": True} | window | dict(values.get("dflash_config") or {})
        )
    size = values.get("vocab_size") or len(files.lm_head_VH)
    values["draft_vocab_size"] = values.get("draft_vocab_size") or size
    rows_DH = tensors.pop("lm_head.weight", None)
    ids_D = _read_draft_vocabulary(files, size)
    if rows_DH is not None:
        own_DH = files.lm_head_VH.detach().cpu()[ids_D].float()
        # Rounding to bf16 changes it by 0.4 %.
        if (
            rows_DH.shape != own_DH.shape
            or (rows_DH.float() - own_DH).norm() > 0.01 * own_DH.norm()
        ):
            raise InputError(
                "'lm_head.weight' is not the target's own; use the target it was trained for"
            )


def _dflash_config(ours: dict[str, Any], source: Any) -> dict[str, Any]:
    # DeepSpec keeps these two outside.
    inner = ours["dflash_config"]
    beside = (
        {key: inner[key] for key in ("mask_token_id", "target_layer_ids")}
        if "markov_rank" in ours
        else {}
    )
    return ours | beside | {"dtype": str(source.dtype).removeprefix("torch.")}


_DSPARK_KEYS = (
    "markov_rank",
    "markov_head_type",
    "enable_confidence_head",
    "confidence_head_with_markov",
)


def _speculators_block_config(ours: dict[str, Any], source: Any) -> dict[str, Any]:
    head, inner = source.draft, ours["dflash_config"]
    outside = ("draft_vocab_size", "block_size", "sample_from_anchor", *_DSPARK_KEYS)
    more = {key: ours[key] for key in outside if key in ours} | {
        "mask_token_id": inner["mask_token_id"]
    }
    # vLLM makes all layers causal where the last is false, the library only those with a window.
    more |= {
        "aux_hidden_state_layer_ids": list(head.hidden_layers),
        "sliding_window_non_causal": True,
    }
    names = {"dflash": "DFlashSpeculator", "dspark": "DSparkSpeculator"}
    return _speculators(names[head.kind], head.kind, head.depths, ours, more, source)


def _read_speculators_block(files: HeadFiles) -> None:
    layer, values = files.values.pop("transformer_layer_config"), files.values
    inner = {
        "mask_token_id": values["mask_token_id"],
        "target_layer_ids": list(_target_layers(values)),
    }
    # The library makes only layers with a window causal, and those unless told otherwise.
    windowed = "sliding_attention" in (layer.get("layer_types") or ())
    inner["causal"] = windowed and not values.get("sliding_window_non_causal", False)
    architecture = (
        "DFlashDraftModel" if values["speculators_model_type"] == "dflash" else "Qwen3DSparkModel"
    )
    values.setdefault("sample_from_anchor", values["speculators_model_type"] == "dspark")
    files.values = layer | values | {"dflash_config": inner, "architectures": [architecture]}
    for name in ("verifier_norm.weight", "verifier_lm_head.weight", _EMBEDDING):
        files.tensors.pop(name, None)
    _read_block(files)


# --- Medusa and Hydra

_MEDUSA_BLOCK = r"(\d+)\.(\d+)\.linear\.weight"


def _is_medusa(values: Values, names: Names) -> bool:
    return "medusa_num_heads" in values or values.get("model_type") == "medusa"


def _read_medusa(files: HeadFiles) -> None:
    """Keep the heads only, and count them: published configs say two heads where their files hold
    five.
    """
    tensors = {
        name: tensor for name, tensor in files.tensors.items() if re.match(r"\d+\.\d+\.", name)
    }
    if others := len(files.tensors) - len(tensors):
        log.warning("Medusa: ignoring %d tensors of its base model", others)
    files.tensors = tensors
    heads, layers = files.count(_MEDUSA_BLOCK)
    for name, weight in list(tensors.items()):
        if name.endswith("linear.weight"):
            tensors.setdefault(
                name.replace("weight", "bias"), torch.zeros(len(weight), dtype=weight.dtype)
            )
    if heads and not any(f"{i}.{layers}.weight" in tensors for i in range(heads)):
        log.warning("Medusa: its heads have no output projections; they start from the target's")
        tensors |= {f"{i}.{layers}.weight": files.lm_head_VH.detach().cpu() for i in range(heads)}
    if (declared := files.values.get("medusa_num_heads", heads)) != heads:
        log.warning(
            "Medusa: its config says %s heads, its file holds %d; using those", declared, heads
        )
    files.values |= {"medusa_num_heads": heads, "medusa_num_layers": layers}


def _read_vllm_medusa(files: HeadFiles) -> None:
    tensors, values = files.tensors, files.values
    if "token_map" in tensors or values.get("truncated_vocab_size") not in (
        None,
        len(files.lm_head_VH),
    ):
        raise InputError(
            "Medusa heads with a reduced vocabulary cannot be run; use the checkpoint with the "
            "full one"
        )
    heads, layers = files.count(_MEDUSA_BLOCK)
    shared = tensors.pop("lm_head.weight", None)
    if shared is None and values.get("original_lm_head") is True:
        shared = tensors.get(f"0.{layers}.weight")
    if shared is not None:
        tensors |= {f"{i}.{layers}.weight": shared for i in range(heads)} | tensors
    _read_medusa(files)


# Another value means another network.
_HYDRA_PLAIN = {"hydra_head_arch": "mlp", "grounded_heads": True, "hidden_state_offset": 0}


def _read_hydra(files: HeadFiles) -> None:
    heads, layers = files.count(r"heads\.(\d+)\.(\d+)\..+")
    if "projections.0.weight" not in files.tensors or "hydra_own_projection" in files.values:
        return  # our own layout
    # Their config's default for an absent `grounded_heads` is false.
    values = {**_HYDRA_PLAIN, "grounded_heads": False, **files.values}
    if changed := next((key for key, plain in _HYDRA_PLAIN.items() if values[key] != plain), None):
        raise InputError(
            f"'{changed}' is {values[changed]!r}; only Hydra's MLP heads that read drafted "
            "tokens can run"
        )
    files.values |= {"hidden_size": files.lm_head_VH.shape[-1], "vocab_size": len(files.lm_head_VH)}
    files.values |= {"hydra_num_heads": heads, "hydra_num_layers": layers}
    files.values |= {"hydra_own_projection": True, "hydra_skip_bias": True}


# --- The table


def _is_vllm_medusa(values: Values, names: Names) -> bool:
    return _is_medusa(values, names) and any("blocks.0.layers.0." in name for name in names())


_BLOCK = {"read": _read_block, "config": _dflash_config}
_FUNCTIONS: dict[str, dict[str, Any]] = {
    "speculators": {
        "known": lambda values, names: values.get("speculators_model_type") == "eagle3",
        "read": _read_speculators,
        "config": _speculators_config,
    },
    **{
        f"speculators-{kind}": {
            "known": lambda values, names, kind=kind: values.get("speculators_model_type") == kind,
            "read": _read_speculators_block,
            "config": _speculators_block_config,
        }
        for kind in ("dflash", "dspark")
    },
    # Without the first key vLLM builds the blocks without a bias and ignores ours.
    "vllm-medusa": {
        "known": _is_vllm_medusa,
        "read": _read_vllm_medusa,
        "config": lambda ours, source: ours | {"medusa_fc_bias": True, "original_lm_head": False},
    },
    "medusa": {"known": _is_medusa, "read": _read_medusa},
    "dspark": _BLOCK
    | {"known": lambda values, names: "DSpark" in str(values.get("architectures"))},
    "jetspec": _BLOCK | {"known": _is_jetspec},
    "dflash": _BLOCK | {"known": _is_block},
    "hydra": {"known": lambda values, names: "hydra_num_heads" in values, "read": _read_hydra},
    "eagle3": {"known": _is_eagle3, "read": _read_eagle3, "config": _authors_config},
    "sglang-eagle3": {"config": _sglang_eagle3_config},
    "eagle": {"known": _is_eagle, "read": _read_eagle, "config": _authors_config},
    # SGLang's `fc` always has a bias, and one that is not in the file stays as it was drawn.
    "sglang-eagle": {
        "config": lambda ours, source: (
            ours | {"architectures": ["LlamaForCausalLMEagle"], "bias": True}
        )
    },
}
LAYOUTS = {name: Layout(**data, **_FUNCTIONS[name]) for name, data in _DATA["layouts"].items()}


def layout_of(values: Values, names: Names) -> Layout | None:
    """The layout of a directory with these values in config.json; None for a language model."""
    library = "speculators_model_type" in values
    layouts = (
        layout for name, layout in LAYOUTS.items() if name.startswith("speculators") or not library
    )
    return next((layout for layout in layouts if layout.known(values, names)), None)


def may_be_head(values: Values) -> bool:
    """Whether a config.json can be that of a head, before its tensors are downloaded."""
    return values.get("num_hidden_layers") == 1 or any(
        layout.known(values, set) for layout in LAYOUTS.values()
    )
