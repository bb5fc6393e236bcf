"""`doctor --served` against servers with one fault each: the right judgement, and the right reason
first.
"""

import json
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedModel

import draftsmith as ds
from draftsmith.serving.report import in_words
from tests import samplers
from tests.conftest import tiny_tokenizer
from tests.drafting_server import drafting
from tests.tiny_models import near, redrawn

PROMPT_TOKENS, TOKENS = 7, 48
FEW, MANY = 64, 512
WINDOW = 4
FAST = {
    *("lossless", "a tenth unverified", "unverified, greedy", "nothing accepted"),
    *("synthetic counts", "synthetic, and told", "cache of the draft in 4 bits, and told"),
}


@dataclass(frozen=True)
class Place:
    """A pair on disk with prompts, and what the server is asked."""

    path: Path
    pair: ds.Pair
    prompts: list[list[int]]


def save(path: Path, model: LlamaForCausalLM) -> None:
    model.save_pretrained(path)
    tiny_tokenizer().save_pretrained(path)


@pytest.fixture(scope="module")
def place(tmp_path_factory):
    path = tmp_path_factory.mktemp("samplers")
    config = LlamaConfig(
        vocab_size=290,
        hidden_size=32,
        intermediate_size=64,
        num_hidden_layers=2,
        num_attention_heads=2,
        max_position_embeddings=128,
        bos_token_id=0,
        eos_token_id=1,
        tie_word_embeddings=False,
    )
    torch.manual_seed(1)
    target = redrawn(LlamaForCausalLM(config), 0.25)
    save(path / "target", target)
    save(path / "draft", near(target, 0.03, seed=2))
    pair = ds.load_pair(
        str(path / "target"), draft={"draft": str(path / "draft")}, device="cpu", fast=False
    )
    random = torch.Generator().manual_seed(5)
    texts: dict[str, list[int]] = {}
    while len(texts) < MANY:
        letters = torch.randint(97, 123, (PROMPT_TOKENS - 1,), generator=random).tolist()
        text = "".join(map(chr, letters))
        ids = pair.encode(text, raw=True)
        if len(ids) == PROMPT_TOKENS:
            texts[text] = ids
    rows = [json.dumps({"prompt": text}) + "\n" for text in texts]
    (path / "prompts.jsonl").write_text("".join(rows))
    return Place(path, pair, list(texts.values()))


Logits = Callable[[Tensor], Tensor]


def cached(model: PreTrainedModel) -> Logits:
    """The next token's logits of texts that grow by a token a call."""
    cache: dict[str, Any] = {"past": None}

    def logits(ids_PT: Tensor) -> Tensor:
        new = ids_PT if cache["past"] is None else ids_PT[:, -1:]
        out = model(new, past_key_values=cache["past"], use_cache=True, logits_to_keep=1)
        cache["past"] = out.past_key_values
        return out.logits[:, -1]

    return logits


def in_four_bits(model: PreTrainedModel) -> Logits:
    """A draft whose keys and values are rounded to seven values on either side of 0."""

    def rounded(module: Any, args: Any, out: Tensor) -> Tensor:
        scale = out.abs().amax() / 7
        return (out / scale).round() * scale

    for name, module in model.named_modules():
        if name.endswith(("k_proj", "v_proj")):
            module.register_forward_hook(rounded)
    return cached(model)


def windowed(model: PreTrainedModel) -> Logits:
    """A draft that sees `WINDOW` tokens."""

    def logits(ids_PT: Tensor) -> Tensor:
        places_T = torch.arange(ids_PT.shape[1])
        away_TT = places_T[:, None] - places_T
        sees_TT = (away_TT >= 0) & (away_TT < WINDOW)
        return model(ids_PT, attention_mask=sees_TT[None, None]).logits[:, -1]

    return logits


def copies(model: PreTrainedModel) -> Logits:
    """A draft of another method: it repeats the last token."""

    def logits(ids_PT: Tensor) -> Tensor:
        return 9.0 * torch.nn.functional.one_hot(ids_PT[:, -1], 290)

    return logits


def retrained(model: Any) -> Logits:
    """Another target."""
    return cached(near(model, 0.05, seed=9))


def flat(model: PreTrainedModel) -> Logits:
    """No model at all: any token."""
    return lambda ids_PT: torch.zeros(len(ids_PT), 290)


@dataclass(frozen=True)
class Case:
    """A server, the judgement, and how its first reason begins. server: mistakes of
    `drafting_server.Drafting`. told: of its speculative settings.
    """

    name: str
    judgement: str
    first: str
    rule: str = "lossless"
    temperature: float = 1.0
    target: Callable[[Any], Logits] = cached
    draft: Callable[[Any], Logits] = cached
    told: dict[str, Any] = field(default_factory=dict)
    server: dict[str, Any] = field(default_factory=dict)
    fresh: bool = False
    concurrency: Sequence[int] = ()
    prompts: int = FEW


OWN = "not this target's texts"
SHARE = " of the tokens are the draft's own"
CALLS = "tokens per call, alone"
CASES = [
    Case("lossless", "as predicted", ""),
    Case("lossless, greedy", "as predicted", "", temperature=0.0),
    Case("seeds ignored", "as predicted", "", fresh=True, concurrency=[8]),
    Case("a tenth unverified", OWN, SHARE, rule="a tenth unverified"),
    Case("1.5 p/q", OWN, SHARE, rule="1.5 p/q"),
    Case("p after a refusal", OWN, SHARE, rule="from p"),
    # p less the drafted token's own mass is the same law: it was refused because q is larger there.
    Case("one-hot residual", OWN, SHARE, rule="one-hot residual"),
    # It moves the share by -.03, which takes some 25,000 tokens to see nine times in ten.
    Case("shared noise", OWN, SHARE, rule="shared noise", prompts=MANY),
    Case("shared noise, few tokens", "as predicted", "", rule="shared noise"),
    Case("typical", OWN, SHARE, rule="typical"),
    Case("unverified", OWN, SHARE, rule="unverified"),
    Case("unverified, greedy", OWN, SHARE, rule="unverified", temperature=0.0),
    Case("another target", OWN, "the tokens have", target=retrained),
    Case(
        "another target, greedy",
        OWN,
        "of the tokens are not the target's choice",
        target=retrained,
        temperature=0.0,
    ),
    Case("one prompt, unverified", "cannot tell", "tokens", rule="unverified", prompts=1),
    Case("nothing accepted", "less", CALLS, server={"accepts": [0, 0, 0]}),
    Case("synthetic counts", "more", CALLS, server={"accepts": [3, 2, 3]}),
    Case(
        "synthetic counts of random texts",
        OWN,
        "the tokens have",
        target=flat,
        server={"accepts": [3, 2, 3]},
    ),
    Case(
        "synthetic, and told",
        "cannot tell",
        "rule: probabilistic, synthetic there",
        told={"rejection_sample_method": "synthetic"},
        server={"accepts": [3, 2, 3]},
    ),
    Case(
        "a rule that is not known",
        "cannot tell",
        "rule: probabilistic, relaxed there",
        told={"rejection_sample_method": "relaxed"},
    ),
    # 4 bits cost this draft 7 % of its accepted tokens, which few prompts do not show.
    Case("cache of the draft in 4 bits", "less", CALLS, draft=in_four_bits, prompts=MANY),
    Case(
        "cache of the draft in 4 bits, and told",
        "as predicted",
        "cache of the draft: q4 there",
        draft=in_four_bits,
        told={"kv_cache_dtype": "q4"},
    ),
    Case(
        "cache of the draft in 4 bits, told, many prompts",
        "less",
        "cache of the draft: q4 there",
        draft=in_four_bits,
        told={"kv_cache_dtype": "q4"},
        prompts=MANY,
    ),
    Case("window", "less", CALLS, draft=windowed),
    Case("another method", "less", "method: ngram there", draft=copies, told={"method": "ngram"}),
    Case(
        "half is lost with two in flight",
        "less",
        "tokens per call, 2 at once",
        server={"loses": 0.5, "per_request": True},
        concurrency=[2],
    ),
    Case(
        "no drafts at load",
        "less",
        "tokens per call, 2 at once",
        server={"stops": True},
        concurrency=[2],
    ),
]
SEEN = [
    pytest.param(case, id=case.name, marks=() if case.name in FAST else pytest.mark.slow)
    for case in CASES
]


def answers_of(place: Place, case: Case, seed: int) -> dict[tuple[int, ...], samplers.Answer]:
    """What the server writes to each prompt."""
    models = [
        ds.load_pair(str(place.path / name), device="cpu", fast=False).target
        for name in ("target", "draft")
    ]
    answers = samplers.write(
        case.target(models[0]),
        case.draft(models[1]),
        place.prompts[: case.prompts],
        TOKENS,
        case.rule,
        case.temperature,
        seed,
    )
    return {tuple(ids): answer for ids, answer in zip(place.prompts, answers, strict=False)}


def ask(place: Place, url: str, case: Case) -> dict[str, Any]:
    return ds.served(
        target=str(place.path / "target"),
        draft=str(place.path / "draft"),
        served=url,
        prompts=str(place.path / "prompts.jsonl"),
        max_prompts=case.prompts,
        max_new_tokens=TOKENS,
        temperature=case.temperature,
        concurrency=list(case.concurrency),
        device="cpu",
    )


@pytest.mark.parametrize("case", SEEN)
def test_a_server_with_one_fault(place, case):
    speculative = {"draft_sample_method": "probabilistic"} | case.told
    cache = {"cache_dtype": "auto"}
    told = {"vllm_config": {"cache_config": cache, "speculative_config": speculative}}
    with drafting("vllm", place.pair, told=told, **case.server) as (url, server):
        server.written = [answers_of(place, case, seed) for seed in range(3 if case.fresh else 1)]
        found = ask(place, url, case)
    assert found["judgement"] == case.judgement, found["acceptance"]
    assert case.first in "".join(found["because"][:1]) and bool(case.first) == bool(
        found["because"]
    )
    assert not any(row["fits"] for row in found["replays"]) or case.draft is not cached
    lines, missed = in_words(found)
    assert (missed is None) == (case.judgement == "as predicted")
    assert {"settings", "texts"} < {line.split("  ")[0] for line in lines}
    assert any("one prompt" in line for line in lines) == (case.prompts == 1)


def test_answers_that_end_at_once_at_load_are_refused(place):
    """Alone, they are whole."""
    case = Case("", "", "", concurrency=[8])
    whole = answers_of(place, case, 0)
    ended = {prompt: samplers.Answer(answer.ids[:1]) for prompt, answer in whole.items()}
    with drafting("vllm", place.pair) as (url, server):
        server.written = [whole, whole, ended]
        with pytest.raises(ds.InputError, match="ends with its first token .8 at once"):
            ask(place, url, case)
