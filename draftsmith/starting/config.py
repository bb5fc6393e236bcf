"""The options of `draftsmith init`; needs no torch."""

from dataclasses import dataclass, field
from typing import Literal

from draftsmith_core.errors import InputError
from draftsmith_core.option_types import check_least, check_types

# Options that only some methods read.
_READ_BY = {
    "donor": ("transplant",),
    "num_layers": ("prune", "transplant"),
    "keep": ("prune", "transplant"),
    "intermediate_size": ("prune",),
    "num_heads": ("prune",),
    "cost": ("fresh",),
    "cost_by": ("fresh",),
}


@dataclass(frozen=True, kw_only=True)
class InitConfig:
    """Make a draft for a target: cut out of it, moved from another model, or a fresh shape."""

    target: str
    """The target: a local directory or hub name."""
    out: str
    """Directory for the draft: an ordinary Hugging Face directory with the target's tokenizer."""
    method: Literal["prune", "transplant", "fresh"]
    """prune: layers of the target. transplant: --donor with the target's vocabulary. fresh: untrained, by --cost."""
    donor: str | None = None
    """transplant: the model to move, of any tokenizer; a local directory or hub name."""
    num_layers: int | None = None
    """prune, transplant: layers to keep. Without it prune keeps a quarter, transplant all."""
    keep: Literal["first", "last", "even", "measured"] | None = None
    """prune, transplant: which layers stay; evenly spaced ones without it. measured (prune): those without which
    alpha on --prompts falls most."""
    intermediate_size: int | None = None
    """prune: neurons of a feed-forward block, those that do most on --prompts."""
    num_heads: int | None = None
    """prune: attention heads, those that do most on --prompts."""
    cost: float | None = None
    """fresh: the largest cost of a forward, as a share of the target's; 0.1 without it."""
    cost_by: Literal["clock", "parameters"] | None = None
    """fresh: what costs: time on this machine (without it), or parameters read per token."""
    draft_vocab_size: int | None = None
    """How many tokens are drafted, the commonest in --data; the others are not, and their output rows not read."""
    data: list[str] = field(default_factory=list)
    """For --draft_vocab_size: distilled sets, or .jsonl/.parquet files. Without it the answers to --prompts."""
    prompts: str | None = None
    """What you will serve, for the starting alpha and for what prune measures: a .jsonl or .parquet file, or a hub
    dataset as owner/name[:split]."""
    max_prompts: int = 16
    """Prompts to read."""
    max_new_tokens: int = 48
    """Length of the target's answers that alpha is measured on."""
    prompt_tokens: int = 32
    """For rows with `text`: how many of its first tokens make the prompt."""
    temperature: float = 1.0
    """Of the answers and of alpha."""
    seed: int = 0
    """Of answers and fresh weights."""
    device: str = "auto"
    """auto, cpu or cuda."""
    dtype: str = "auto"
    """auto, float32, bfloat16 or float16."""
    trust_remote_code: bool = False
    """Run model code that comes with a checkpoint."""

    def __post_init__(self) -> None:
        check_types(self)
        for key, methods in _READ_BY.items():
            if getattr(self, key) is not None and self.method not in methods:
                raise InputError(f"{key}: --method {self.method} does not read it; leave it out")
        if self.data and self.draft_vocab_size is None:
            raise InputError("data: is read for --draft_vocab_size only; add that, or leave it out")
        if self.draft_vocab_size is not None and not self.data and self.prompts is None:
            raise InputError("draft_vocab_size: the commonest tokens are counted in texts; add --data, or --prompts")
        if self.method == "transplant" and self.donor is None:
            raise InputError("donor: --method transplant moves a model; name it with --donor")
        if self.method == "transplant" and self.keep == "measured":
            raise InputError("keep: measured is for --method prune; use first, last or even")
        if self.cost is not None and not 0 < self.cost < 1:
            raise InputError(f"cost: {self.cost} must lie between 0 and 1, as a share of the target's")
        if self.method == "transplant" and self.keep is not None and self.num_layers is None:
            raise InputError(
                "keep: --method transplant keeps all layers of the donor; add --num_layers, or leave it out"
            )
        check_least(self, 1, "max_prompts", "max_new_tokens", "prompt_tokens")
        check_least(self, 1, "num_layers", "intermediate_size", "num_heads", "draft_vocab_size")
        check_least(self, 0, "temperature")
        reads = [key for key in ("intermediate_size", "num_heads") if getattr(self, key) is not None]
        reads += ["keep measured"] if self.keep == "measured" else []
        if reads and self.prompts is None:
            raise InputError(f"{reads[0].partition(' ')[0]}: chosen by what happens on texts; add --prompts")
