"""Where the user says nothing, the target's generation_config.json decides; what is not followed in
it is named.
"""

import logging
from types import SimpleNamespace
from typing import cast

import pytest
from transformers import GenerationConfig, PreTrainedModel

from draftsmith.core import settings
from draftsmith.core.io import read_words
from draftsmith.core.settings import Sampling, ignored_keys, resolve_sampling


def target(**keys):
    return cast(PreTrainedModel, SimpleNamespace(generation_config=GenerationConfig(**keys)))


LLAMA = target(do_sample=True, temperature=0.6, top_p=0.9, eos_token_id=[1, 2], max_length=4096)
QUIET = target(temperature=0.8, top_k=20, min_p=0.1)


@pytest.mark.parametrize(
    "model, default, given, sampling, taken",
    [
        (target(), 0.0, {}, Sampling(temperature=0.0), {}),
        (target(), 1.0, {}, Sampling(temperature=1.0), {}),
        (LLAMA, 0.0, {}, Sampling(temperature=0.6, top_p=0.9), {"temperature": 0.6, "top_p": 0.9}),
        (LLAMA, 1.0, {}, Sampling(temperature=0.6, top_p=0.9), {"temperature": 0.6, "top_p": 0.9}),
        (LLAMA, 0.0, {"temperature": 0.0}, Sampling(temperature=0.0), {}),
        (LLAMA, 0.0, {"temperature": 1.3}, Sampling(temperature=1.3, top_p=0.9), {"top_p": 0.9}),
        (
            LLAMA,
            0.0,
            {"top_p": 1.0, "top_k": 5},
            Sampling(temperature=0.6, top_k=5),
            {"temperature": 0.6},
        ),
        # Without `do_sample` generate is greedy, and samples with these when it is told to.
        (QUIET, 0.0, {}, Sampling(temperature=0.0), {}),
        (
            QUIET,
            0.0,
            {"temperature": 0.5},
            Sampling(temperature=0.5, top_k=20, min_p=0.1),
            {"top_k": 20, "min_p": 0.1},
        ),
        (
            QUIET,
            1.0,
            {"min_p": 0.0},
            Sampling(temperature=0.8, top_k=20),
            {"temperature": 0.8, "top_k": 20},
        ),
        (
            cast(PreTrainedModel, SimpleNamespace(generation_config=None)),
            0.0,
            {},
            Sampling(temperature=0.0),
            {},
        ),
    ],
)
def test_what_is_given_goes_before_the_file_and_the_file_before_the_default(
    model, default, given, sampling, taken
):
    found = resolve_sampling("t", model, given, default_temperature=default)
    assert found.sampling == sampling
    assert found.from_target == taken


def test_what_comes_from_the_file_is_said(golden):
    golden(resolve_sampling("t", LLAMA, {}).note)
    assert resolve_sampling("t", target(), {}).note == ""
    with golden.raises():
        resolve_sampling("t", target(do_sample=True, top_p=1.5), {})


def test_every_key_that_is_not_followed_is_named_once(caplog):
    keys = {
        "repetition_penalty": 1.1,
        "suppress_tokens": [3],
        "min_length": 2,
        "forced_bos_token_id": 0,
    }
    with caplog.at_level(logging.WARNING):
        for _ in range(2):
            resolve_sampling("some/model", target(**keys), {})
    named = "forced_bos_token_id=0, min_length=2, repetition_penalty=1.1, suppress_tokens=[3]"
    warning = (
        f"some/model: its generation_config.json sets {named}; this is ignored here, and "
        "`generate` follows it"
    )
    assert [
        record.getMessage() for record in caplog.records if record.name.startswith("draftsmith")
    ] == [warning]
    off = {
        "repetition_penalty": 1.0,
        "no_repeat_ngram_size": 0,
        "num_beams": 1,
        "suppress_tokens": [],
        "min_length": 0,
    }
    assert ignored_keys(target(**off, use_cache=True, max_new_tokens=20, pad_token_id=0)) == {}
    assert ignored_keys(LLAMA) == {}
    # Every key is one of the installed transformers.
    assert read_words(settings.__file__)["ignored"].keys() <= vars(GenerationConfig()).keys()
