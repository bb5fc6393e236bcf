"""A pretrained model that is not ours, as a target through the same commands; skipped where it is not at hand."""

import json
import os
from pathlib import Path

import pytest

from draftsmith.__main__ import main

SHARED = Path(os.environ.get("DRAFTSMITH_SHARED", Path(__file__).parents[2] / "shared"))
STORIES = SHARED / "models" / "stories260k"

pytestmark = pytest.mark.skipif(
    not (STORIES.is_dir() and ALPACA.is_file()), reason="no pretrained model and data beside the clone"
)


def test_greedy_text_is_the_published_one(capsys: pytest.CaptureFixture[str]) -> None:
    words = ["decode", "--target", str(STORIES), "--prompt", "Once upon a time", "--max_new_tokens", "40", "--json"]
    assert main(words) == 0
    text = json.loads(capsys.readouterr().out.splitlines()[-1])["outputs"][0]["text"]
    expected = ", there was a little girl named Lily. She loved to play outside in the park. One day, she saw a big"
    assert text.startswith(expected)
