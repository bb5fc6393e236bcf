"""What the docs say of each causal architecture of transformers holds: made again for some, of
which most have recurrent or convolution layers, or none that others have.
"""

import pytest

from benchmarks.lib.places import ROOT
from benchmarks.lib.tiny_types import causal_types
from benchmarks.studies.causal_types import CHECKS, examine
from benchmarks.studies.figures import kept

# Drafts with a state and MTP heads have tests of their own.
CHECKED = [check for check in CHECKS if check not in ("teach MTP", "draft chains")]
QUICK = ["bert", "bloom", "deepseek_v3", "jamba", "lfm2", "mamba"]
OTHERS = [
    "bamba",
    "falcon_h1",
    "gemma3n_text",
    "granitemoehybrid",
    "hy_v4",
    "kimi_linear",
    "llama4_text",
    "mamba2",
    "minimax",
    "nemotron_h",
    "qwen3_5_text",
    "qwen3_next",
    "recurrent_gemma",
    "rwkv",
    "zamba2",
]


@pytest.fixture(scope="module")
def types():
    return kept(ROOT, "causal-types")["types"]


def test_every_causal_type_was_tried(types):
    """Of the transformers that is installed: an older one has fewer."""
    assert [name for name in types if name in causal_types()] == causal_types()


@pytest.mark.parametrize(
    "name", [*QUICK, *(pytest.param(name, marks=pytest.mark.slow) for name in OTHERS)]
)
def test_the_table_of_the_docs_is_made_again(name, types):
    kept_reasons = {check: types[name][check] for check in ("tiny", *CHECKED)}
    assert _works(examine(name, CHECKED)) == _works(kept_reasons)


def _works(reasons):
    return {check: not reason for check, reason in reasons.items()}


@pytest.mark.parametrize("check", ["distil", "score", "train", "be trained", "measure"])
def test_what_needs_no_tree_works_for_every_type_that_runs(check, types):
    """A type that cannot be made, or that does not run alike twice, has no such entry."""
    assert [name for name, reasons in types.items() if reasons.get(check)] == []
