"""LoRA (Hu et al. 2021, arXiv 2106.09685) for draft language models: peft adds the adapters and merges them."""

from pathlib import Path
from typing import Any

from torch import nn
from transformers import PreTrainedModel
from transformers.pytorch_utils import Conv1D

from draftsmith_core.errors import InputError, one_line
from draftsmith_core.io import atomic_dir
from draftsmith_core.packages import require_package
from train.config import Lora


def attach(draft: PreTrainedModel, options: Lora) -> Any:
    """Put adapters into the linear layers of a draft, in place, and freeze all else; peft's handle on them.

    The adapters change nothing until they are trained. InputError, one line, for layers that the draft does not have.
    """
    require_package("peft", "lora.rank")
    import peft

    # peft leaves out a name that fits nothing as long as another one fits.
    names = [name for name, _ in draft.named_modules()]
    for target in options.targets:
        if not any(f".{name}".endswith(f".{target}") for name in names):
            output = draft.get_output_embeddings()
            linear = (n for n, m in draft.named_modules() if isinstance(m, nn.Linear | Conv1D) and m is not output)
            known = ", ".join(dict.fromkeys(name.rpartition(".")[2] for name in linear))
            raise InputError(f"lora.targets: no layer of {draft.name_or_path} is named {target!r}; it has {known}")

    alpha: Any = 2 * options.rank if options.alpha is None else options.alpha
    config = peft.LoraConfig(
        r=options.rank,
        lora_alpha=alpha,
        lora_dropout=options.dropout,
        target_modules=options.targets or "all-linear",
        task_type="CAUSAL_LM",
    )
    try:
        adapted = peft.get_peft_model(draft, config)
    except ValueError as error:
        raise InputError(f"lora.targets: {one_line(error)}") from None
    if any(parameter.requires_grad for parameter in draft.get_output_embeddings().parameters()):
        raise InputError("lora.targets: names the output projection, which is not trained with LoRA; leave it out")
    return adapted


def write_and_merge(adapted: Any, directory: Path) -> PreTrainedModel:
    """Write the adapters alone, in peft's format, as `directory`; then fold them into the weights. The plain draft."""
    with atomic_dir(directory) as made:
        adapted.save_pretrained(made)
        (made / "README.md").unlink(missing_ok=True)  # peft's card has gaps to fill in; the draft's own says it all
    merged: PreTrainedModel = adapted.merge_and_unload()
    return merged
