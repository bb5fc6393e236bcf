"""Reading the values of a head's config.json; what Medusa and Hydra configs share."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, ClassVar, Self, TypeVar

from transformers import PreTrainedModel

from drafts.heads.borrowed import borrow
from draftsmith_core.errors import InputError

T = TypeVar("T", int, float, str, bool, dict[str, Any], list[Any])


def setting(values: Mapping[str, Any], key: str, kind: type[T], where: str, default: T | None = None) -> T:
    """`values[key]` as a `kind`; `default` where it is absent or null. InputError, one line, names file and key."""
    value = values.get(key)
    if value is None:
        if default is None:
            raise InputError(f"{where}: lacks the key '{key}'; add it, it must be of type {kind.__name__}")
        return default
    if kind is float and isinstance(value, int) and not isinstance(value, bool):
        value = float(value)
    if not isinstance(value, kind) or (kind is int and isinstance(value, bool)):
        raise InputError(f"{where}: '{key}' is {value!r}; it must be of type {kind.__name__}")
    found: T = value
    return found


def count(values: Mapping[str, Any], key: str, where: str, default: int | None = None) -> int:
    """A whole number of at least one."""
    value = setting(values, key, int, where, default)
    if value < 1:
        raise InputError(f"{where}: '{key}' is {value}; it must be at least 1")
    return value


def check_equal(where: str, key: str, here: int, target: int) -> None:
    """InputError unless a head's size is its target's."""
    if here != target:
        raise InputError(f"{where}: '{key}' is {here} and the target's is {target}; use the target it was trained for")


@dataclass(frozen=True, kw_only=True)
class HeadsConfig:
    """How many heads, and how many residual blocks each has."""

    kind: ClassVar[str]
    architecture: ClassVar[str]

    hidden_size: int
    vocab_size: int
    num_heads: int = 4
    num_layers: int = 1

    @classmethod
    def from_json(cls, values: Mapping[str, Any], where: str, target: PreTrainedModel) -> Self:
        """Read and checked against the target; InputError, one line, names file and key."""
        parts = borrow(target)
        # The authors' own Medusa files leave the sizes to the target.
        hidden, vocabulary = (parts.hidden_size, parts.vocab_size) if cls.kind == "medusa" else (None, None)
        config = cls(
            hidden_size=count(values, "hidden_size", where, hidden),
            vocab_size=count(values, "vocab_size", where, vocabulary),
            num_heads=count(values, f"{cls.kind}_num_heads", where),
            num_layers=count(values, f"{cls.kind}_num_layers", where, 1),
        )
        check_equal(where, "hidden_size", config.hidden_size, parts.hidden_size)
        check_equal(where, "vocab_size", config.vocab_size, parts.vocab_size)
        return config

    def to_json(self) -> dict[str, Any]:
        """The whole config.json."""
        return {
            "architectures": [self.architecture],
            "model_type": self.kind,
            "hidden_size": self.hidden_size,
            "vocab_size": self.vocab_size,
            f"{self.kind}_num_heads": self.num_heads,
            f"{self.kind}_num_layers": self.num_layers,
        }

    @classmethod
    def fresh(cls, target: PreTrainedModel, num_heads: int, num_layers: int) -> Self:
        """For untrained heads on this target."""
        if num_heads < 1 or num_layers < 1:
            raise InputError(f"num_heads {num_heads}, num_layers {num_layers}: {cls.kind} needs at least one of each")
        parts = borrow(target)
        return cls(
            hidden_size=parts.hidden_size, vocab_size=parts.vocab_size, num_heads=num_heads, num_layers=num_layers
        )
