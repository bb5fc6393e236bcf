"""Law 11: other engines run our exports; their greedy output is the target's own, and they accept
what we accept.
"""

from collections.abc import Callable
from typing import Any

import pytest
from transformers import (
    LlamaConfig,
    LlamaForCausalLM,
    MistralConfig,
    MistralForCausalLM,
    Qwen2Config,
    Qwen2ForCausalLM,
    Qwen3Config,
    Qwen3ForCausalLM,
)

import draftsmith as ds
from benchmarks.lib.engines import ask, complete, llama_server
from draftsmith.core.models import load_model
from draftsmith.core.tokenization import load_tokenizer
from draftsmith.drafts.heads import Head, save_head
from draftsmith.drafts.heads.block import DFlashHead, DSparkHead
from draftsmith.drafts.heads.eagle3 import Eagle3Head
from draftsmith.drafts.layouts.gguf_file import FILE
from draftsmith.drafts.layouts.table import LAYOUTS
from draftsmith.drafts.load import load_source
from tests.conftest import ROOT
from tests.engine_proofs import proven_by_llama_cpp, proven_by_speculators
from tests.learnt_heads import AHEAD, TOKENS, learn
from tests.openvino_ir import engine
from tests.tiny_models import stirred

PAIR = ROOT / "draftsmith" / "demo" / "pair"
TEXTS = [
    "Return the value of the",
    "def __init__(self, name",
    "If the file is not found,",
    "class Error(Exception):\n    ",
    "import os\nimport 12",
    "The list of all",
]

pytestmark = pytest.mark.engines


@pytest.fixture(scope="module")
def pair():
    return ds.load_pair(
        str(PAIR / "target"), draft=str(PAIR / "base"), device="cpu", dtype="float32"
    )


@pytest.fixture(scope="module")
def prompts(pair):
    return [pair.encode(text) for text in TEXTS]


@pytest.fixture(scope="module")
def ours(pair, prompts):
    return decoded(pair, prompts, TOKENS)


@pytest.fixture(scope="module")
def after_one(pair, prompts, ours):
    """Ours where the first token is given: some engines take it from the prompt's forward and draft
    only then.
    """
    longer = [prompt + out.output_ids[:1] for prompt, out in zip(prompts, ours, strict=True)]
    return decoded(pair, longer, TOKENS - 1)


def decoded(pair, prompts, tokens):
    options: dict[str, Any] = {"temperature": 0, "max_new_tokens": tokens, "ignore_eos": True}
    # One by one: the statistics of a row are then those of its own calls.
    return [pair.generate(prompt, tree=f"chain:{AHEAD}", **options) for prompt in prompts]


@pytest.fixture(scope="module")
def exports(tmp_path_factory):
    """The pair in a format, made once."""
    place, made = tmp_path_factory.mktemp("exports"), {}

    def export(form):
        for role in ("target", "base"):
            out = place / f"{role}.{form}"
            if out not in made:
                config = ds.ExportConfig(
                    draft=str(PAIR / role),
                    format=form,
                    out=str(out),
                    dtype="float32",
                )
                made[out] = ds.export(config)
        return {role: place / f"{role}.{form}" for role in ("target", "base")}

    return export


def accepted(outputs):
    return [out.stats.accepted for out in outputs]


def equal_but_for_the_last_step(theirs, ours):
    """Engines draft no token that could not be emitted, and count the last one as the target's own
    instead.
    """
    return all(mine - its in (0, 1) for its, mine in zip(theirs, ours, strict=True))


def test_llama_cpp(exports, pair, prompts, ours, after_one):
    server = engine("llama-server")
    models = {role: str(path / "model.gguf") for role, path in exports("gguf").items()}
    words = f"--spec-type draft-simple --spec-draft-n-max {AHEAD} -c 512 -np 1 -t 1 -fa off".split()
    words += [
        "-m",
        models["target"],
        "-md",
        models["base"],
        *"-ctk f32 -ctv f32 -ctkd f32 -ctvd f32".split(),
    ]
    with llama_server(server, words) as port:
        rows = [complete(port, prompt, TOKENS) for prompt in prompts]
        texts = [*TEXTS, "naïve façade 3.14, 2^10; don't\n\n\n\tx = {'a': [1]}  # ünïcödé"]
        cut = [
            ask(port, "tokenize", {"content": text, "add_special": True})["tokens"]
            for text in texts
        ]
    assert [row["tokens"] for row in rows] == [out.output_ids for out in ours]
    # It takes the first token from the prompt's forward, without a draft.
    assert equal_but_for_the_last_step(
        [row["timings"]["draft_n_accepted"] for row in rows], accepted(after_one)
    )
    assert cut == [pair.encode(text) for text in texts]


@pytest.fixture(scope="module")
def learnt(tmp_path_factory):
    """An EAGLE-3 head that has learnt the target's own answers to the prompts, so that some of its
    drafts are right.
    """
    return learn(
        "eagle3",
        str(PAIR / "target"),
        TEXTS,
        tmp_path_factory.mktemp("learnt"),
        draft_vocab_size=2048,
    )


def test_llama_cpp_accepts_of_an_eagle3_head_what_we_accept(
    learnt, exports, prompts, ours, tmp_path
):
    server = engine("llama-server")
    target = str(PAIR / "target")
    config = ds.ExportConfig(
        draft=str(learnt), target=target, format="gguf", out=str(tmp_path / "head"), dtype="float32"
    )
    ds.export(config)
    pair = ds.load_pair(target, draft=str(learnt), device="cpu", dtype="float32")
    longer = [prompt + out.output_ids[:1] for prompt, out in zip(prompts, ours, strict=True)]
    mine = decoded(pair, longer, TOKENS - 1)
    words = [
        "-m",
        str(exports("gguf")["target"] / "model.gguf"),
        "-md",
        str(tmp_path / "head" / "model.gguf"),
    ]
    words += "-c 512 -np 1 -t 1 -fa off -ctk f32 -ctv f32 -ctkd f32".split()
    words += (
        f"-ctvd f32 --spec-type draft-eagle3 --spec-draft-n-max {AHEAD} --spec-draft-p-min 0"
    ).split()
    with llama_server(server, words) as port:
        rows = [complete(port, prompt, TOKENS) for prompt in prompts]
    assert [row["tokens"] for row in rows] == [out.output_ids for out in ours]
    # As with a language model: the first token comes from the prompt's forward, without a draft.
    assert equal_but_for_the_last_step(
        [row["timings"]["draft_n_accepted"] for row in rows], accepted(mine)
    )
    assert sum(accepted(mine)) > len(TEXTS), "hardly anything was accepted, so nothing was compared"


SHAPE: dict[str, Any] = dict(
    hidden_size=64,
    intermediate_size=96,
    num_hidden_layers=3,
    num_attention_heads=4,
    num_key_value_heads=2,
    vocab_size=4096,
    max_position_embeddings=256,
    bos_token_id=0,
    eos_token_id=1,
    initializer_range=0.3,
)
LLAMA3: dict[str, Any] = dict(
    rope_type="llama3", rope_theta=1e4, factor=8.0, low_freq_factor=1.0, high_freq_factor=4.0
)
LLAMA3 |= {"original_max_position_embeddings": 32}
FAMILIES: dict[str, Any] = {
    "qwen2": lambda: Qwen2ForCausalLM(Qwen2Config(**SHAPE)),
    "qwen3": lambda: Qwen3ForCausalLM(Qwen3Config(**SHAPE, head_dim=32)),
    "mistral": lambda: MistralForCausalLM(MistralConfig(**SHAPE, sliding_window=None)),
    "llama3 rope": lambda: LlamaForCausalLM(LlamaConfig(**SHAPE, rope_parameters=LLAMA3)),
    "linear rope": lambda: LlamaForCausalLM(
        LlamaConfig(
            **SHAPE, rope_parameters={"rope_type": "linear", "rope_theta": 1e4, "factor": 4.0}
        )
    ),
}


@pytest.mark.parametrize("family", FAMILIES)
def test_llama_cpp_continues_as_models_of_every_family_do(family, tmp_path):
    server = engine("llama-server")
    model = stirred(FAMILIES[family](), 0.3)
    model.save_pretrained(tmp_path / "model")
    load_tokenizer(str(PAIR / "target")).save_pretrained(tmp_path / "model")
    config = ds.ExportConfig(
        draft=str(tmp_path / "model"), format="gguf", out=str(tmp_path / "out")
    )
    ds.export(config)
    proven_by_llama_cpp(model.eval(), tmp_path / "out" / FILE, server)


SPECULATORS_HEADS: dict[str, Callable[[Any], Head]] = {
    "eagle3": lambda target: Eagle3Head.fresh(
        target, draft_vocab=range(0, 4096, 2), norms="eagle3"
    ),
    "eagle3.1": lambda target: Eagle3Head.fresh(target),
    "dflash": lambda target: DFlashHead.fresh(target, num_layers=2, block_size=4),
    "dspark": lambda target: DSparkHead.fresh(target, num_layers=2, block_size=4),
}


@pytest.mark.parametrize("kind", SPECULATORS_HEADS)
def test_speculators(kind, tmp_path):
    python, out = engine("speculators"), tmp_path / "out"
    target = str(PAIR / "target")
    head = SPECULATORS_HEADS[kind](load_model(target, device="cpu"))
    save_head(stirred(head, 0.02), tmp_path / "head")
    draft = str(tmp_path / "head")
    ds.export(
        ds.ExportConfig(
            draft=draft, format="speculators", out=str(out), target=target, dtype="float32"
        )
    )
    proof = proven_by_speculators(load_source(draft, target, "float32"), out, python)
    assert proof.engine == LAYOUTS["speculators-dspark"].proven_in
