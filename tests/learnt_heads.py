"""Drafts that have learnt a target's own greedy answers to a few prompts, so that some of what they
draft is right.
"""

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import draftsmith as ds
from draftsmith.train.config import HeadOptions, Optim

# Tokens drafted at a time, and tokens of an answer.
AHEAD, TOKENS = 4, 40


def learn(
    kind: Any, target: str, texts: Sequence[str], place: Path, steps: int = 80, **options: Any
) -> Path:
    """Train a draft of one kind in `place`; the set of answers there is made once."""
    data = place / "set"
    if not data.exists():
        (place / "p.jsonl").write_text(
            "".join(json.dumps({"prompt": text}) + "\n" for text in texts)
        )
        ds.distill(
            ds.DistillConfig(
                target=target,
                prompts=str(place / "p.jsonl"),
                out=str(data),
                max_new_tokens=TOKENS,
                temperature=0,
                device="cpu",
            )
        )
    out, head = (
        place / str(kind),
        {
            "eagle3": HeadOptions(test_steps=AHEAD, norms="eagle3"),
            "medusa": HeadOptions(num_heads=AHEAD),
        },
    )
    head |= dict.fromkeys(("dflash", "jetspec"), HeadOptions(num_layers=2, block_size=AHEAD + 1))
    common: dict[str, Any] = {
        "batch_size": len(texts),
        "max_length": 96,
        "optim": Optim(lr=3e-3),
        "device": "cpu",
    }
    common |= {"steps": steps, "eval_every": steps, "objective": "fkl"} | (
        {"head": head[kind]} if kind in head else {}
    )
    ds.train(
        ds.TrainConfig(
            kind=kind,
            target=target,
            data=[str(data)],
            heldout=[str(data)],
            out=str(out),
            **common | options,
        )
    )
    return out
