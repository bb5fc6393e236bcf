"""Other trainers on the same models and batch, one step at a time, for `train.py --peers true`.

`trl` is TRL's GKDTrainer (`pip install trl`), for fkl, rkl and jsd; `trainer` is transformers'
Trainer, for ce. Both without generating, in the precision and with the loss per token that the
others have. What cannot be compared is left out with the reason.
"""

import os
import tempfile
from collections.abc import Callable
from typing import Any

import torch
from datasets import Dataset
from torch import Tensor
from transformers import PreTrainedModel, Trainer, TrainingArguments

from benchmarks.lib.places import TARGET
from draftsmith.core.errors import is_installed
from draftsmith.core.io import JsonObject
from draftsmith.core.tokenization import load_tokenizer

# TRL's name for a divergence is the beta of its generalised Jensen-Shannon divergence.
GKD_BETA = {"fkl": 0.0, "jsd": 0.5, "jsd:beta=0.5": 0.5, "rkl": 1.0}


def why_not(objective: str) -> dict[str, str]:
    """By peer the reason why it is left out; empty where it is not."""
    trl = "" if is_installed("trl") else "not installed; pip install trl"
    return {
        "trl": trl
        if objective in GKD_BETA
        else f"has no {objective}; it has {', '.join(GKD_BETA)}",
        "trainer": "" if objective == "ce" else f"has no {objective}; it has ce",
    }


def backward_of(
    peer: str,
    objective: str,
    target: PreTrainedModel,
    draft: PreTrainedModel,
    ids_BT: Tensor,
    bf16: bool,
) -> Callable[[], Tensor]:
    """A function that makes the gradients of a step of `draft` and returns the loss per token."""
    common: JsonObject = {
        "output_dir": tempfile.mkdtemp(),
        "report_to": "none",
        "use_cpu": ids_BT.device.type == "cpu",
        "bf16": bf16,
        "gradient_checkpointing": False,
        "per_device_train_batch_size": len(ids_BT),
        "remove_unused_columns": False,
    }
    # Both shift labels themselves.
    inputs = {"input_ids": ids_BT, "attention_mask": torch.ones_like(ids_BT), "labels": ids_BT}
    rows = Dataset.from_dict({"input_ids": ids_BT.tolist()})
    trainer: Any
    if peer == "trl":
        os.environ.setdefault("TRL_EXPERIMENTAL_SILENCE", "1")
        from trl.experimental.gkd import GKDConfig, GKDTrainer

        tokenizer = load_tokenizer(str(TARGET))
        tokenizer.pad_token = tokenizer.eos_token
        config = GKDConfig(**common, lmbda=0.0, beta=GKD_BETA[objective], temperature=1.0)
        trainer = GKDTrainer(
            draft,
            target,
            config,
            data_collator=list,
            train_dataset=rows,
            processing_class=tokenizer,
        )
    else:
        trainer = Trainer(draft, TrainingArguments(**common), train_dataset=rows)
    count = torch.tensor(ids_BT.numel() - len(ids_BT))

    def backward() -> Tensor:
        loss: Tensor = trainer.training_step(draft, dict(inputs), count)
        return loss

    return backward
