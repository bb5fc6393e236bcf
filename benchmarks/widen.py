"""Gives a small trained LLaMA the cost of a large one without changing what it computes (`drafts.make.widen`).

    python benchmarks/widen.py --model DIR --out DIR --hidden_size 768 --intermediate_size 2432 --num_hidden_layers 12

How true it is that zeros cost what any other numbers do on the machine at hand, `cost_of_zeros` in the output of
`decode.py` says.
"""

import sys
from dataclasses import dataclass

from transformers import LlamaForCausalLM

from drafts.make.widen import SIZES, widen
from draftsmith_core.command_line import parse
from draftsmith_core.errors import InputError
from draftsmith_core.models import load_model
from draftsmith_core.tokenization import load_tokenizer


@dataclass(frozen=True, kw_only=True)
class Options:
    """Widen `model` to a shape; what is not given stays as it is."""

    model: str
    """A LLaMA: a local directory or hub name."""
    out: str
    """Where the result goes, with the model's tokenizer."""
    hidden_size: int | None = None
    intermediate_size: int | None = None
    num_hidden_layers: int | None = None
    max_position_embeddings: int | None = None


def main() -> None:
    """Widen and save."""
    options, _ = parse(Options, "widen", sys.argv[1:])
    model = load_model(options.model, device="cpu", dtype="float32")
    if not isinstance(model, LlamaForCausalLM):
        raise InputError(f"{options.model}: is a {type(model).__name__}; only LLaMAs can be widened")
    wide = widen(model, **{key: size for key in SIZES if (size := getattr(options, key)) is not None})
    wide.save_pretrained(options.out)
    load_tokenizer(options.model).save_pretrained(options.out)
    sys.stderr.write(f"{options.out}: {wide.num_parameters():,} parameters, from {model.num_parameters():,}\n")


if __name__ == "__main__":
    main()
