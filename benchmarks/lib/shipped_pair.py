"""The shipped pair and prompts for it, and how a benchmark that runs on them reads its options and
answers.
"""

import json
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any, TypeVar

from draftsmith.core.command_line import parse
from draftsmith.core.io import write_json_atomic
from draftsmith.core.prompts import Prompt
from draftsmith.core.tokenization import Tokenizer, encode_text
from draftsmith.demo import corpus

Config = TypeVar("Config")
ROOT = Path(__file__).resolve().parents[2]
PAIR = ROOT / "draftsmith" / "demo" / "pair"
LARGER_DRAFT = ROOT / "configs" / "bench" / "draft"


def heldout_prompts(tokenizer: Tokenizer, count: int) -> list[Prompt]:
    """Beginnings, of 32 tokens, of prose that the pair was not trained on."""
    rows = corpus.passages("prose", corpus.split("prose").heldout, 300)[:count]
    return [
        Prompt(row["id"], "prose", tuple(encode_text(tokenizer, row["text"])[:32])) for row in rows
    ]


def answer(options: type[Config], name: str, run: Callable[[Config], dict[str, Any]]) -> None:
    """Run with the options of the command line; the outcome goes to standard output and to the file
    `out`.
    """
    config, _ = parse(options, name, sys.argv[1:])
    found = run(config)
    sys.stdout.write(json.dumps(found, indent=1) + "\n")
    if out := getattr(config, "out", None):
        write_json_atomic(Path(out), found)
