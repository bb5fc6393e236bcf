"""What we assume of transformers holds in the version that is installed; the test that fails has
the assumption's name.
"""

import re
from inspect import signature

import pytest
import transformers
from transformers import LlamaForCausalLM
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

from benchmarks.lib.places import ROOT
from benchmarks.studies.figures import kept
from draftsmith.core import transformers_api as api

ROOMS = ("draftsmith/core", "draftsmith/drafts", "draftsmith", "distill", "train", "decode", "eval")
INNER = re.compile(r"^ *(from|import) transformers\.", re.MULTILINE)
FORWARD = ("input_ids", "attention_mask", "position_ids", "logits_to_keep")


def taken(function):
    return list(signature(function).parameters)


@pytest.fixture(scope="module")
def drafting_trees():
    """The classes of the types that the docs list as drafting trees."""
    types = kept(ROOT, "causal-types")["types"]
    able = [name for name, reasons in types.items() if reasons.get("tree") == ""]
    # An older transformers has fewer.
    known = [name for name in able if name in MODEL_FOR_CAUSAL_LM_MAPPING_NAMES]
    return [getattr(transformers, MODEL_FOR_CAUSAL_LM_MAPPING_NAMES[name]) for name in known]


def test_inner_modules_are_imported_in_one_place():
    files = [path for room in ROOMS for path in (ROOT / room).rglob("*.py")]
    found = {path.resolve() for path in files if INNER.search(path.read_text(encoding="utf-8"))}
    assert found == {(ROOT / "draftsmith/core/transformers_api.py").resolve()}


@pytest.mark.parametrize("argument", FORWARD)
def test_a_type_that_drafts_trees_takes(argument, drafting_trees):
    lacking = [kind.__name__ for kind in drafting_trees if argument not in taken(kind.forward)]
    assert len(drafting_trees) > 100 and lacking == []


def test_a_type_that_drafts_trees_takes_a_cache(drafting_trees):
    name = api.cache_name(LlamaForCausalLM.forward)
    others = [kind.__name__ for kind in drafting_trees if api.cache_name(kind.forward) != name]
    assert others == []
