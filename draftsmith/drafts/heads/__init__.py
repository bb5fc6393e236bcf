"""Heads that draft from a target's own hidden states: EAGLE, EAGLE-3, Medusa, Hydra, block
drafters.

A head holds the parameters that are trained; embedding and output projection are borrowed from the
target by reference.
"""

from draftsmith.drafts.heads.store import (
    HEADS,
    Head,
    head_kind,
    load_head,
    save_head,
    write_head,
)

__all__ = ["HEADS", "Head", "head_kind", "load_head", "save_head", "write_head"]
