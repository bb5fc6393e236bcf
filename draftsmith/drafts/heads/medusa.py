"""Medusa and Hydra heads: K predictions, of the tokens two, three, ... places ahead, from one
feature of the target.

Legend: B rows, T positions, K heads, d a head's number from 0, H hidden size, V vocabulary.

Medusa (arXiv 2401.10774, section 2.1): head i at position t is for token t + 2 + i (t + 1 is the
target's own). Tensor names are those of the authors' checkpoints: `{i}.{j}.linear.*` for block j of
head i, then `{i}.{blocks}.weight`.

Hydra (arXiv 2402.05109, section 3), the grounded MLP: head d also reads the embeddings of tokens t
+ 1 .. t + d + 1. Logits go through the target's own output projection; the authors' code gives
every head one of its own (V * H parameters each), and a checkpoint of theirs keeps them.

Fresh heads give the target's own logits at t: blocks begin as the identity.
"""

from dataclasses import dataclass
from typing import ClassVar, Self, cast

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from draftsmith.core.io import JsonObject
from draftsmith.drafts.heads.borrowed import Borrowed, ReadsLastState, borrow, start_as


@dataclass(frozen=True, kw_only=True)
class HeadsConfig:
    """Kind ("medusa" or "hydra") and number of heads, and number of residual blocks in each."""

    kind: str
    hidden_size: int
    vocab_size: int
    num_heads: int = 4
    num_layers: int = 1
    own_projection: bool = False
    """Every Hydra head has an output projection, with a bias; otherwise all use the target's."""
    skip_bias: bool = False
    """Hydra's map beside the first block has a bias."""

    @classmethod
    def from_json(cls, values: JsonObject, target: PreTrainedModel) -> Self:
        """Read config.json; sizes that it lacks are the target's. Raises InputError for sizes that
        are not the target's.
        """
        parts = borrow(target)
        sizes = {
            key: values.get(key) or getattr(parts, key) for key in ("hidden_size", "vocab_size")
        }
        parts.check_sizes(sizes)
        kind = "medusa" if "medusa_num_heads" in values else "hydra"
        return cls(
            kind=kind,
            **sizes,
            num_heads=values[f"{kind}_num_heads"],
            num_layers=values.get(f"{kind}_num_layers", 1),
            own_projection=bool(values.get("hydra_own_projection")),
            skip_bias=bool(values.get("hydra_skip_bias")),
        )

    def to_json(self) -> JsonObject:
        values: JsonObject = {
            "architectures": ["MedusaModel" if self.kind == "medusa" else "HydraHeads"],
            "model_type": self.kind,
            "hidden_size": self.hidden_size,
            "vocab_size": self.vocab_size,
            f"{self.kind}_num_heads": self.num_heads,
            f"{self.kind}_num_layers": self.num_layers,
        }
        if self.kind == "medusa":
            # Serving engines read the one pair of names or the other.
            values |= {"num_heads": self.num_heads, "num_hidden_layers": self.num_layers}
        if self.own_projection:
            values["hydra_own_projection"] = True
        if self.skip_bias:
            values["hydra_skip_bias"] = True
        return values


class ResBlock(nn.Module):
    """x + SiLU(Wx + b), which is the identity while W and b are zero."""

    def __init__(self, inputs: int, outputs: int) -> None:
        super().__init__()
        self.linear = nn.Linear(inputs, outputs)
        nn.init.zeros_(self.linear.weight)
        nn.init.zeros_(self.linear.bias)

    def forward(self, states: Tensor) -> Tensor:
        return states + nn.functional.silu(self.linear(states))


class ParallelHeads(ReadsLastState, nn.Module):
    """K heads side by side: residual blocks, then an output projection, its own or the target's."""

    kind: ClassVar[str]
    config_type = HeadsConfig
    borrowed: Borrowed

    @classmethod
    def fresh(cls, target: PreTrainedModel, *, num_heads: int = 4, num_layers: int = 1) -> Self:
        """Untrained heads, each the target's own output, on its device, in its dtype and in
        training mode.
        """
        values = {f"{cls.kind}_num_heads": num_heads, f"{cls.kind}_num_layers": num_layers}
        heads = cls(HeadsConfig.from_json(values, target), target)
        for linear in heads.outputs():
            start_as(cast(Tensor, linear.weight), heads.borrowed)
        return heads.to(target.device, target.dtype)

    def blocks(self, number: int) -> nn.Sequential:
        """The residual blocks of one head."""
        raise NotImplementedError

    @property
    def extra_bias_V(self) -> Tensor | None:
        """What is added to the logits of projections of their own, beside their own biases."""
        return None

    def inputs(self, features: Tensor, tokens: Tensor) -> Tensor:
        """What a head reads, `[..., I]`, of features `[..., H]` and the tokens after them `[..., d
        + 1]`.
        """
        raise NotImplementedError

    def logits_of(self, number: int, inputs: Tensor) -> Tensor:
        """Logits `[..., V]` of one head, from what it reads."""
        states = self.blocks(number)(inputs)
        outputs = self.outputs()
        if not outputs:
            return self.borrowed.project(states)
        logits = outputs[number](states)
        if self.extra_bias_V is not None:
            logits = logits + self.extra_bias_V
        return self.borrowed.projection.finish(logits)


class MedusaHeads(ParallelHeads, nn.ModuleList):
    """A list of modules, so that tensors carry the names of the authors' checkpoints."""

    kind = "medusa"

    def __init__(self, config: HeadsConfig, target: PreTrainedModel) -> None:
        super().__init__()
        hidden = config.hidden_size
        for _ in range(config.num_heads):
            head = nn.Sequential()
            for _ in range(config.num_layers):
                head.append(ResBlock(hidden, hidden))
            head.append(nn.Linear(hidden, config.vocab_size, bias=False))
            self.append(head)
        self.config = config
        self.borrowed = borrow(target)

    def blocks(self, number: int) -> nn.Sequential:
        head = cast(nn.Sequential, self[number])
        return cast(nn.Sequential, head[:-1])

    def outputs(self) -> list[nn.Module]:
        """The output projections of all heads."""
        return [list(head.children())[-1] for head in self]

    @property
    def extra_bias_V(self) -> Tensor | None:
        """The target's: the checkpoint format has no place for a bias."""
        return self.borrowed.bias_V

    def inputs(self, features: Tensor, tokens: Tensor | None = None) -> Tensor:
        """The features; tokens are not read."""
        return features.to(next(self.parameters()).dtype)

    def forward(self, features_BTH: Tensor) -> Tensor:
        """Logits `[B, T, K, V]`; `[:, t, i]` is for the token at t + 2 + i."""
        inputs_BTH = self.inputs(features_BTH)
        logits = [self.logits_of(number, inputs_BTH) for number in range(len(self))]
        return torch.stack(logits, dim=2)


class FirstBlock(ResBlock):
    """Sx + SiLU(Wx + b). S begins as the map to the first H inputs, W and b as zero."""

    def __init__(self, inputs: int, outputs: int, skip_bias: bool) -> None:
        super().__init__(inputs, outputs)
        self.skip = nn.Linear(inputs, outputs, bias=skip_bias)
        nn.init.eye_(self.skip.weight)
        if skip_bias:
            nn.init.zeros_(self.skip.bias)

    def forward(self, states: Tensor) -> Tensor:
        return self.skip(states) + nn.functional.silu(self.linear(states))


class HydraHeads(ParallelHeads):
    """K grounded heads, over the target's own output projection unless they have their own."""

    kind = "hydra"

    def __init__(self, config: HeadsConfig, target: PreTrainedModel) -> None:
        super().__init__()
        self.config = config
        self.borrowed = borrow(target)
        hidden = config.hidden_size
        self.heads = nn.ModuleList()
        for d in range(config.num_heads):
            head = nn.Sequential(FirstBlock((d + 2) * hidden, hidden, config.skip_bias))
            for _ in range(config.num_layers - 1):
                head.append(ResBlock(hidden, hidden))
            self.heads.append(head)
        if config.own_projection:
            self.projections = nn.ModuleList(
                nn.Linear(hidden, config.vocab_size) for _ in range(config.num_heads)
            )

    def blocks(self, number: int) -> nn.Sequential:
        return cast(nn.Sequential, self.heads[number])

    def outputs(self) -> list[nn.Module]:
        """The output projections of all heads; none if all use the target's."""
        return list(self.projections) if self.config.own_projection else []

    def inputs(self, features: Tensor, tokens: Tensor) -> Tensor:
        """The feature, then the tokens' embeddings: `[..., (d + 2) * H]`."""
        dtype = next(self.parameters()).dtype
        embedded = self.borrowed.embed(tokens, dtype).flatten(-2)
        return torch.cat([features.to(dtype), embedded], dim=-1)

    def forward(self, features_BTH: Tensor, tokens_BTd: Tensor) -> Tensor:
        """Logits `[B, T, V]` of head number `tokens_BTd.shape[-1] - 1`, for the token after the
        last of `tokens_BTd`.

        `tokens_BTd[:, t, 0]` is the token right after the position of `features_BTH[:, t]`.
        """
        return self.logits_of(tokens_BTd.shape[-1] - 1, self.inputs(features_BTH, tokens_BTd))
