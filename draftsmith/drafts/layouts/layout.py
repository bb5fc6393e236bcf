"""What a layout of heads on disk consists of: names and shapes of its tensors, and functions for
what differs otherwise.

Legend: V target vocabulary, D draft vocabulary, H hidden size.
"""

import re
from collections.abc import Callable, Mapping, Sequence, Set
from dataclasses import dataclass, field
from functools import cache
from typing import Literal, TypeAlias, TypeVar

import torch
from torch import Tensor

from draftsmith.core.errors import InputError
from draftsmith.core.io import JsonObject
from draftsmith.drafts.draft_vocabulary import from_offsets, offsets

# The names of all tensors; calling it may load a pickle.
Names: TypeAlias = Callable[[], Set[str]]
T = TypeVar("T")
EMBEDDING = "embed_tokens.weight"
# Tensors with a row for each token of a draft vocabulary.
_DRAFTED_ROWS = {"lm_head.weight", "markov_head.markov_w2.weight"}
_FIELDS = {"i": r"\d+", "j": r"\d+", "part": "weight|bias", "rest": ".+"}


@dataclass(kw_only=True)
class HeadFiles:
    """Config and tensors of a head. `lm_head_VH` is its target's output projection."""

    values: JsonObject
    tensors: dict[str, Tensor]
    lm_head_VH: Tensor

    def count_heads_and_layers(self, pattern: str) -> tuple[int, int]:
        """Count heads and layers by the two indices in `pattern`."""
        heads = layers = 0
        for name in self.tensors:
            if match := re.fullmatch(pattern, name):
                heads = max(heads, int(match[1]) + 1)
                layers = max(layers, int(match[2]) + 1)
        return heads, layers

    def target_rows(self, ids_D: Tensor) -> Tensor:
        """Rows `[D, H]` of the target's output projection, on the CPU."""
        return self.lm_head_VH.detach().cpu()[ids_D]

    def read_draft_vocabulary(self, size: int) -> Tensor:
        """Return the drafted tokens. Leave `d2t` as offsets and `t2d` as a mask; neither if every
        token can be drafted.

        Engines follow a `d2t` in any order. Ours ascends, so the rows of the tokens are sorted too.
        """
        d2t = self.tensors.pop("d2t", None)
        t2d = self.tensors.pop("t2d", None)
        if d2t is None and t2d is not None:
            (drafted_D,) = t2d.nonzero(as_tuple=True)
            d2t = offsets(drafted_D)
        drafted = self.values["draft_vocab_size"]
        if drafted == size:
            return torch.arange(size)
        if d2t is None:
            raise InputError(
                f"the head drafts {drafted} of {size} tokens, and the file has neither 'd2t' nor "
                "'t2d', which name them; export it again"
            )
        ids_D = from_offsets(d2t, size)
        mask = torch.zeros(size, dtype=torch.bool)
        if ids_D is not None:
            mask[ids_D.long()] = True
        if ids_D is None or not torch.equal(mask if t2d is None else t2d.bool(), mask):
            raise InputError(
                f"'d2t' and 't2d' do not describe one set of tokens below {size}; export it again"
            )
        order_D = ids_D.argsort()
        for name in _DRAFTED_ROWS & self.tensors.keys():
            self.tensors[name] = self.tensors[name][order_D]
        self.tensors |= {"d2t": offsets(ids_D[order_D]), "t2d": mask}
        return ids_D[order_D]


@dataclass(frozen=True, kw_only=True)
class ExportedHead:
    """What the config.json of an export is made of. `values` is config.json of our own layout."""

    values: JsonObject
    kind: str
    hidden_layers: Sequence[int]
    depths: int | None
    """Number of tokens that a block or a set of heads drafts; None without a limit."""
    dtype: str
    target_name: str
    target_architectures: list[str]


@dataclass(frozen=True, kw_only=True)
class Functions:
    """What a layout does beside renaming tensors."""

    known: Callable[[JsonObject, Names], bool] = lambda *_: False
    """Whether config.json describes such a head. Asks for tensor names only if the config does not
    tell.
    """
    read: Callable[[HeadFiles], None] = lambda _: None
    """Complete config and tensors after renaming. Raises InputError for a variant that cannot be
    run.
    """
    config: Callable[[ExportedHead], JsonObject] = lambda head: head.values
    """Return config.json of the layout."""


@dataclass(frozen=True, kw_only=True)
class Layout(Functions):
    """A layout of one kind of head: its row of `layouts.yaml`, with its functions."""

    title: str
    kind: str
    names: Mapping[str, str] = field(default_factory=dict)
    """Name in the file -> name in our state dict. If several stand for one of ours, the first is
    written.
    """
    prefix: str = ""
    """Removed from the names in a file."""
    shapes: Mapping[str, str] = field(default_factory=dict)
    """Our name -> sizes of the tensor that the readers' loaders look for, and a condition after
    `if`. `_sizes` explains the letters.
    """
    format: str | None = None
    """The `export --format` that writes the layout."""
    proven_in: str | None = None
    """Engine and version that loaded an export in our tests and computed its logits as we do."""
    embedding: Literal["never", "always", "scaled"] = "never"
    """When to write the target's embedding. `scaled`: if the target scales it (the Gemma
    family).
    """

    def expected(self, config: JsonObject, embedding: bool) -> dict[str, tuple[int, ...]]:
        """Names and shapes of a file with this config.json."""
        config = config | config.get("transformer_layer_config", {})
        sizes = _sizes(config)
        blocks = config["num_hidden_layers"]
        conditions = {
            "": True,
            "bias": config.get("bias"),
            "reduced": sizes["D"] < sizes["V"],
            "embedding": embedding,
            "deeper": blocks > 1,
            "fc_norm": config.get("fc_norm"),
            "norm_before_fc": config.get("norm_before_fc"),
            "markov": sizes["R"],
            "confidence": config.get("enable_confidence_head"),
        }
        shapes = {}
        for name, rule in self.shapes.items():
            letters, _, condition = rule.partition(" if ")
            if not conditions[condition]:
                continue
            shape = tuple(sizes[letter] for letter in letters.split())
            for i in range(config.get("num_heads", 1)):
                for j in range(blocks):
                    # k: of layers behind the first.
                    shapes[name.format(i=i, j=j, k=max(j, 1), blocks=blocks)] = shape
        return renamed(shapes, inverted(self.names))


def _sizes(config: JsonObject) -> dict[str, int]:
    hidden = config["hidden_size"]
    attention_head = config.get("head_dim", 0)
    markov_rank = config.get("markov_rank", 0)
    return {
        "1": 1,
        "V": config["vocab_size"],
        "D": config.get("draft_vocab_size", config["vocab_size"]),
        "H": hidden,
        "2H": 2 * hidden,
        "3H": 3 * hidden,
        # All states of the target that are read, side by side.
        "TH": hidden * len(target_layers(config)),
        "F": config.get("intermediate_size", 0),
        "A": attention_head,
        # Rows of queries, and of keys.
        "Q": config.get("num_attention_heads", 0) * attention_head,
        "K": config.get("num_key_value_heads", 0) * attention_head,
        "R": markov_rank,
        "HR": hidden + markov_rank,
    }


def target_layers(values: JsonObject) -> Sequence[int]:
    """Layers of a target whose outputs a block drafter reads. speculators names each by the next
    one's number.
    """
    entering: Sequence[int] | None = values.get("aux_hidden_state_layer_ids")
    if entering is not None:
        return [layer - 1 for layer in entering]
    inner = values.get("dflash_config") or {}
    return inner.get("target_layer_ids") or values.get("target_layer_ids") or ()


def renamed(tensors: Mapping[str, T], names: Mapping[str, str], prefix: str = "") -> dict[str, T]:
    """Tensors, or shapes, under the names that the first matching pattern of `names` gives them,
    else under their own.

    A `{j}` that only the new name has is the number of blocks: one more than the largest `{j}` of
    the other names.
    """
    matches = {key: _match(key.removeprefix(prefix), names) for key in tensors}
    blocks = 1 + max((int(fields.get("j", 0)) for _, fields in matches.values()), default=0)
    result = {}
    for key, (new, fields) in matches.items():
        result[new.format(**{"j": str(blocks)} | fields)] = tensors[key]
    return result


def _match(name: str, names: Mapping[str, str]) -> tuple[str, dict[str, str]]:
    for pattern, new in names.items():
        if match := _compiled(pattern).fullmatch(name):
            return new, match.groupdict()
    return "{rest}", {"rest": name}


def inverted(names: Mapping[str, str]) -> dict[str, str]:
    """Our name -> the first of theirs."""
    result: dict[str, str] = {}
    for theirs, ours in names.items():
        result.setdefault(ours, theirs)
    return result


@cache
def _compiled(pattern: str) -> re.Pattern[str]:
    escaped = re.escape(pattern)
    for name, expression in _FIELDS.items():
        escaped = escaped.replace(re.escape(f"{{{name}}}"), f"(?P<{name}>{expression})")
    return re.compile(escaped)
