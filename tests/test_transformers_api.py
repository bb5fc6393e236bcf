"""What we assume of transformers holds in the version that is installed; the test that fails has
the assumption's name.
"""

import re
from inspect import signature

import pytest
import transformers
from transformers import LlamaForCausalLM, PreTrainedModel
from transformers.modeling_outputs import CausalLMOutputWithPast
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

from benchmarks.lib.places import ROOT
from benchmarks.studies.figures import kept
from draftsmith.core import transformers_api as api

ROOMS = ("draftsmith/core", "draftsmith/drafts", "draftsmith", "distill", "train", "decode", "eval")
INNER = re.compile(r"^ *(from|import) transformers\.", re.MULTILINE)
FORWARD = ("input_ids", "attention_mask", "position_ids", "logits_to_keep")
LAYER = ("attention_mask", "position_embeddings", api.LAYER_CACHE)


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


def test_a_model_takes_use_cache_and_gives_the_cache_under_the_name_that_it_takes():
    assert "use_cache" in taken(LlamaForCausalLM.forward)
    assert api.cache_name(LlamaForCausalLM.forward) in taken(CausalLMOutputWithPast)


@pytest.mark.parametrize("argument", LAYER)
@pytest.mark.parametrize(
    "kind",
    [api.LlamaDecoderLayer, api.LlamaAttention, api.Qwen3DecoderLayer, api.Qwen3Attention],
)
def test_a_layer_takes(argument, kind):
    assert argument in taken(kind.forward)


def test_a_cache_is_updated_with_keys_values_and_the_layers_number():
    assert taken(api.Cache.update)[1:4] == ["key_states", "value_states", "layer_idx"]
    assert taken(api.DynamicLayer.update)[1:3] == ["key_states", "value_states"]


@pytest.mark.parametrize("name", ["lazy_initialization", "get_seq_length", "crop", "is_croppable"])
def test_a_layer_of_a_cache_has(name):
    assert hasattr(api.DynamicLayer, name)


def test_attention_takes_states_mask_and_scale():
    named = ["module", "query", "key", "value", "attention_mask", "scaling"]
    assert set(named) <= set(taken(api.sdpa_attention_forward))


@pytest.mark.parametrize(
    "name",
    ["_is_stateful", "_no_split_modules", "_supports_sdpa", "base_model", "get_decoder"],
)
def test_a_model_has(name):
    assert hasattr(PreTrainedModel, name)
