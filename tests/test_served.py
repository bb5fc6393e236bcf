"""`doctor --served`: servers that draft as asked are as predicted, and each planted mistake is
named.
"""

import json
from collections.abc import Callable
from contextlib import AbstractContextManager
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import GenerationConfig, LlamaConfig, LlamaForCausalLM

import draftsmith as ds
from benchmarks.lib.engines import llama_server, vllm_server
from draftsmith.serving.running_server import count_steps
from draftsmith.train.config import HeadOptions, Optim
from tests.conftest import ROOT, SENTENCES, tiny_tokenizer
from tests.drafting_server import PLACES, Drafting, drafting
from tests.openvino_ir import engine
from tests.tiny_models import near, redrawn

TOKENS = 32
SLOW = pytest.mark.slow
DEMO = ROOT / "draftsmith" / "demo" / "pair"
DEMO_TEXTS = [
    "Return the value of the",
    "def __init__(self, name",
    "If the file is not found,",
    "import os\nimport 12",
    "The list of all",
    "class Reader:\n    def",
    "for key in sorted(",
    "with open(path) as",
]
DEMO_ROWS = "".join(json.dumps({"prompt": text}) + "\n" for text in DEMO_TEXTS)
CHATML = (
    "{{ bos_token }}{% for m in messages %}{{ '<' + m.role + '>' + m.content }}{% endfor "
    "%}{{ '<assistant>' }}"
)


def save(path: Path, model: LlamaForCausalLM) -> str:
    model.save_pretrained(path)
    tokenizer = tiny_tokenizer()
    tokenizer.chat_template = CHATML
    tokenizer.save_pretrained(path)
    return str(path)


@pytest.fixture(scope="module")
def place(tmp_path_factory):
    """`target`, a draft language model `lm`, prompts and chats."""
    path = tmp_path_factory.mktemp("served")
    config = LlamaConfig(
        vocab_size=290,
        hidden_size=32,
        intermediate_size=64,
        num_hidden_layers=6,
        num_attention_heads=2,
        max_position_embeddings=128,
        bos_token_id=0,
        eos_token_id=1,
        tie_word_embeddings=False,
        rope_parameters={"rope_type": "linear", "rope_theta": 100.0, "factor": 2.0},
    )
    torch.manual_seed(1)
    target = redrawn(LlamaForCausalLM(config), 0.25)
    target.generation_config = GenerationConfig(bos_token_id=0, eos_token_id=1)
    save(path / "target", target)
    save(path / "lm", near(target, 0.02, seed=2))
    words = " ".join(SENTENCES).split()
    texts = [" ".join(words[i : i + 3 + i % 3]) for i in range(0, 24, 2)]
    rows: dict[str, list[dict[str, Any]]] = {"prompts": [{"prompt": text} for text in texts]}
    rows["chats"] = [{"messages": [{"role": "user", "content": text}]} for text in texts]
    for name, prompts in rows.items():
        (path / f"{name}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in prompts))
    return path


@pytest.fixture(scope="module")
def head(tmp_path_factory):
    """The demo's `target` with an EAGLE-3 head `eagle3` that has learnt its answers to
    `prompts`.
    """
    path = tmp_path_factory.mktemp("head")
    (path / "target").symlink_to(DEMO / "target")
    (path / "prompts.jsonl").write_text(DEMO_ROWS)
    common: dict[str, Any] = {"target": str(path / "target"), "device": "cpu"}
    data = str(path / "set")
    ds.distill(
        prompts=str(path / "prompts.jsonl"),
        out=data,
        max_new_tokens=TOKENS,
        temperature=0.0,
        **common,
    )
    # Longer than `learn` trains: a fault must cost more than chance.
    options: dict[str, Any] = {
        "steps": 100,
        "eval_every": 100,
        "batch_size": 8,
        "max_length": 64,
        "kind": "eagle3",
    }
    options |= {"draft_vocab_size": 512, "optim": Optim(lr=3e-3)}
    # Norms of each state would make other layers cost less.
    options["head"] = HeadOptions(test_steps=3, norms="eagle3")
    ds.train(
        data=[data], heldout=[data], out=str(path / "eagle3"), objective="fkl", **common, **options
    )
    return path


def ask(
    place: Path, url: str, draft: str = "lm", prompts: str = "prompts", **options: Any
) -> dict[str, Any]:
    options |= {
        "max_new_tokens": TOKENS,
        "device": "cpu",
        "prompts": str(place / f"{prompts}.jsonl"),
    }
    return ds.served(target=str(place / "target"), draft=str(place / draft), served=url, **options)


def pair_of(place: Path, draft: str = "lm") -> ds.Pair:
    return ds.load_pair(
        str(place / "target"), draft={"draft": str(place / draft)}, device="cpu", fast=False
    )


@pytest.mark.parametrize(
    "engine", ["vllm", *(pytest.param(engine, marks=SLOW) for engine in ("llamacpp", "sglang"))]
)
@pytest.mark.parametrize("temperature", [0.0, pytest.param(1.0, marks=SLOW)])
def test_a_server_that_drafts_as_asked_is_as_predicted(place, engine, temperature):
    """vLLM counts what sampled drafts get accepted; the others draft greedily."""
    verifier = "naive" if engine != "vllm" and temperature else None
    with drafting(engine, pair_of(place), verifier=verifier) as (url, server):
        found = ask(place, url, temperature=temperature, concurrency=[4])
    assert found["judgement"] == "as predicted", found["acceptance"]
    assert not found["because"] and not found["replays"]
    assert found["draft_tokens"] == 3 and found["prompts"] == 12
    loads = [row for row in found["acceptance"] if "tokens/s" in row]
    assert len(loads) == 3
    assert temperature == 0 or server.most_active > 1
    if temperature == 0:
        assert all(row["served"]["value"] == row["predicted"]["value"] > 1.3 for row in loads)
        assert all(body.get("sampling_params", body)["temperature"] == 0 for body in server.bodies)
    position = next(row for row in found["acceptance"] if row["of"].startswith("position 1"))
    assert (position["served"]["value"] is None) == (engine == "sglang")


@pytest.mark.slow
def test_an_answer_asked_for_ten_times_is_one(place):
    rows = (place / "prompts.jsonl").read_text().splitlines()[:3]
    (place / "repeated.jsonl").write_text("\n".join(rows * 4))
    with drafting("vllm", pair_of(place)) as (url, _):
        found = ask(place, url, prompts="repeated", temperature=0)
    assert found["prompts"] == 12 and found["acceptance"][0]["served"]["n"] == 3


def earlier_layers(pair: ds.Pair, draft: Any) -> None:
    draft.hidden_layers = tuple(layer - 1 for layer in draft.hidden_layers)


def shifted(pair: ds.Pair, draft: Any) -> None:
    draft.target_ids_D = draft.d2t.roll(1) + torch.arange(len(draft.d2t))


@SLOW
@pytest.mark.parametrize(
    ("plant", "change"),
    [
        (earlier_layers, "auxiliary layers: one earlier"),
        (shifted, "vocabulary map: shifted by one row"),
    ],
)
def test_a_head_that_an_engine_reads_otherwise_is_named(head, plant, change):
    pair = pair_of(head, "eagle3")
    plant(pair, pair.drafts["draft"])
    with drafting("vllm", pair) as (url, _):
        found = ask(head, url, "eagle3", temperature=0)
    assert found["judgement"] == "less"
    assert change in [row["of"] for row in found["replays"] if row["fits"]], found["replays"]


@pytest.mark.slow
def test_the_exit_code_is_3_and_the_last_line_is_json(place, door):
    """Two of three requests find another in flight, and half of their drafts are lost."""
    with drafting("vllm", pair_of(place), per_request=True, loses=0.5) as (url, _):
        words = f"--target {place}/target --draft {place}/lm --served {url} --temperature 1 --json"
        words += f" --prompts {place}/prompts.jsonl --max_new_tokens {TOKENS} --device cpu"
        code, out, _ = door("doctor", *words.split(), "--concurrency", 2)
    found = json.loads(out.splitlines()[-1])
    assert code == 3 and found["judgement"] == "less" and "2 at once" in found["because"][0]


@SLOW
def test_a_draft_that_is_greedy_at_temperature_1_is_named(place):
    """If it tells that it samples its drafts; if it tells nothing, it may draft so."""
    told = {"vllm_config": {"speculative_config": {"draft_sample_method": "probabilistic"}}}
    with drafting("vllm", pair_of(place), verifier="naive", told=told) as (url, server):
        found = ask(place, url, temperature=1)
        server.told = {}
        untold = ask(place, url, temperature=1)
    assert found["judgement"] == "less" and "greedy draft" in found["because"][-1]
    assert untold["judgement"] == "as predicted"


@pytest.mark.slow
def test_the_server_s_own_temperature_differs(place):
    with drafting("llamacpp", pair_of(place), verifier="naive", temperature=0.7) as (url, server):
        found = ask(place, url)
    assert found["judgement"] == "not this target's texts"
    assert found["because"][0].startswith("sampling: temperature 0.7")
    assert all("temperature" not in body for body in server.bodies)


@pytest.mark.slow
@pytest.mark.parametrize("engine", ["vllm", "llamacpp"])
def test_another_chat_template_differs(place, engine):
    with drafting(engine, pair_of(place), template="Q: {messages}\nA:") as (url, _):
        found = ask(place, url, prompts="chats", temperature=0)
    assert found["judgement"] == "not this target's texts"
    assert found["because"][0].startswith("prompts: 12 of 12 ")


def count_greedy(server: Drafting, guess: Callable[[list[int]], int], ids: list[int]) -> None:
    """Count an answer with three greedy drafts a step, by a loop of its own."""
    calls, accepted, at = 0, [0] * 3, 1
    while at < len(ids):
        calls, text = calls + 1, ids[:at]
        for depth in range(min(3, len(ids) - at)):
            if guess(text) != ids[at + depth]:
                break
            accepted[depth] += 1
            text.append(ids[at + depth])
        at = len(text) + 1
    values = [calls, 3 * calls, sum(accepted), *accepted]
    names = ["drafts_total", "draft_tokens_total", "accepted_tokens_total", *PLACES[:3]]
    for name, value in zip(names, values, strict=True):
        server.counts[name] = server.counts.get(name, 0) + value


@SLOW
def test_a_draft_that_has_not_read_the_prompt_is_named(place, monkeypatch):
    """As after a prefix cache that holds the target's keys alone; the counts are of a loop of their
    own.
    """
    pair = pair_of(place)
    draft: Any = pair.drafts["draft"]

    def guess(prompt: list[int], text: list[int]) -> int:
        places = torch.arange(len(prompt), len(prompt) + len(text))[None]
        return int(draft(torch.tensor([text]), position_ids=places).logits[0, -1].argmax())

    with drafting("vllm", pair) as (url, server):
        post = server.post

        def forgetful(path: str, body: dict[str, Any]) -> dict[str, Any]:
            server.counts, before = {}, server.counts
            reply = post(path, body)
            server.counts = before
            count_greedy(server, partial(guess, body["prompt"]), reply["choices"][0]["token_ids"])
            return reply

        monkeypatch.setattr(server, "post", forgetful)
        found = ask(place, url, temperature=0)
    assert found["judgement"] == "less"
    fits = [row["of"] for row in found["replays"] if row["fits"]]
    assert "prompt: the draft has not read it" in fits, found["replays"]


@SLOW
def test_another_draft_is_accepted_less(place):
    save(place / "other", near(LlamaForCausalLM.from_pretrained(place / "lm"), 0.15, seed=9))
    with drafting("vllm", pair_of(place, "other")) as (url, _):
        found = ask(place, url, temperature=0)
    assert found["judgement"] == "less"


@pytest.mark.parametrize(
    ("engine", "mistake", "message"),
    [
        (
            "vllm",
            {"speculates": False},
            "drafts nothing, or does not count it; start it with --speculative-config",
        ),
        ("llamacpp", {"speculates": False}, "start llama-server with -md DRAFT.gguf"),
        ("sglang", {"speculates": False}, "--speculative-algorithm"),
        ("someone", {}, "is not vLLM, SGLang or llama.cpp (owned_by: 'someone')"),
        ("vllm", {"others": 50}, "counted tokens of other requests"),
    ],
)
def test_a_server_that_cannot_be_compared_says_so(place, engine, mistake, message, monkeypatch):
    """A line break in the key is left out: httpx2 would refuse it, and show the key."""
    monkeypatch.setenv("OPENAI_API_KEY", "sk-wr\nong")
    with (
        drafting(engine, pair_of(place), **mistake) as (url, _),
        pytest.raises(ds.DraftsmithError) as error,
    ):
        ask(place, url, temperature=0, max_prompts=1)
    assert message in str(error.value) and "\n" not in str(error.value)


@pytest.mark.slow
def test_counts_of_each_request_tolerate_other_traffic(place):
    with drafting("vllm", pair_of(place), per_request=True, others=50) as (url, _):
        found = ask(place, url, temperature=0)
    assert found["judgement"] == "as predicted" and found["draft_tokens"] == 3


def test_tokens_that_vllm_accepted_behind_the_end_are_not_counted():
    """Three steps give 1, 3 and 4 tokens; the sixth ends the answer, so two are left out."""
    summary = {
        "acceptance_histogram": [1, 0, 1, 1],
        "num_spec_steps": 3,
        "num_accepted_draft_tokens": 5,
        "num_draft_tokens": 9,
        "num_spec_tokens": 3,
    }
    steps = {"per_step_accepted": [0, 2, 3], "per_step_drafted": [3, 3, 3]}
    for metrics in (summary, summary | steps):
        answer = count_steps([5], [7, 8, 8, 8, 8, 8, 1], metrics)
        assert (answer.calls, answer.drafted) == (3, 9)
        assert answer.accepted_by_depth == [2, 2, 0]
        assert answer.reached_by_depth == [3, 2, 1]
    # The last step need not have accepted most; `detailed` says so.
    last = {"per_step_accepted": [3, 0, 2], "per_step_drafted": [3, 3, 3]}
    answer = count_steps([5], [7, 8, 8, 8, 8, 8, 1], summary | last)
    assert answer.accepted_by_depth == [2, 1, 1] and answer.reached_by_depth == [3, 1, 1]
    # Steps without drafts are not listed.
    assert count_steps([5], [7] * 12, summary).calls == 3 + 3


def test_nobody_answers(place):
    with pytest.raises(ds.InputError, match="does not answer .*; start the server"):
        ask(place, "http://127.0.0.1:9")


def served_by_llama(place: Path, draft: str, cache: str) -> AbstractContextManager[int]:
    """llama-server of the demo's target with a draft whose cache has this type."""
    server = engine("llama-server")
    (place / "prompts.jsonl").write_text(DEMO_ROWS)
    for role in {"target", draft}:
        (place / role).symlink_to(DEMO / role)
        out = str(place / f"{role}.gguf")
        ds.export(draft=str(DEMO / role), format="gguf", out=out, dtype="float32")
    words = ["-m", f"{place}/target.gguf/model.gguf", "-md", f"{place}/{draft}.gguf/model.gguf"]
    words += "-c 4096 -np 8 -t 1 -ctk f32 -ctv f32 --metrics --spec-type draft-simple".split()
    # It takes values in 4 bits with flash attention alone.
    words += ["-ctkd", cache, "-ctvd", cache, "-fa", "off" if cache == "f32" else "on"]
    return llama_server(server, words)


@pytest.mark.engines
def test_llama_server_as_predicted_and_at_its_own_sampling(tmp_path):
    with served_by_llama(tmp_path, "base", "f32") as port:
        url = f"http://127.0.0.1:{port}"
        greedy = ask(tmp_path, url, "base", temperature=0, concurrency=[4, 8])
        left = ask(tmp_path, url, "base")
    loads = [row for row in greedy["acceptance"] if "tokens/s" in row]
    assert len(loads) == 4 and greedy["judgement"] == "as predicted"
    assert all(row["difference"]["value"] == 0 for row in loads)
    assert left["because"][0].startswith("sampling: temperature 0.8, repeat_penalty 1, ")


@pytest.mark.engines
@pytest.mark.parametrize(("cache", "judgement"), [("f32", "as predicted"), ("q4_0", "less")])
def test_llama_server_with_a_cache_of_the_draft(cache, judgement, tmp_path):
    """The target drafts for itself, so that each loss is the cache's."""
    with served_by_llama(tmp_path, "target", cache) as port:
        found = ask(tmp_path, f"http://127.0.0.1:{port}", "target", temperature=0, concurrency=[4])
    assert found["judgement"] == judgement
    assert found["texts"][1]["value"]["value"] == 0.0
    assert ("cache of the draft" in "".join(found["because"])) == (cache != "f32")


@pytest.mark.engines
@pytest.mark.parametrize(("earlier", "judgement"), [(0, "as predicted"), (1, "less")])
def test_vllm_with_a_head_that_reads_layers_below_its_own(
    earlier, judgement, head, tmp_path, monkeypatch
):
    python = engine("vllm")
    monkeypatch.setenv("VLLM_SERVER_DEV_MODE", "1")
    out, target, key = tmp_path / "out", str(head / "target"), "eagle_aux_hidden_state_layer_ids"
    draft = str(head / "eagle3")
    ds.export(draft=draft, target=target, format="speculators", out=str(out), dtype="float32")
    config = json.loads((out / "config.json").read_text())
    config[key] = [layer - earlier for layer in config[key]]
    (out / "config.json").write_text(json.dumps(config))
    drafting = {"method": "eagle3", "model": str(out), "num_speculative_tokens": 3}
    words = ["--model", target, "--speculative-config", json.dumps(drafting)]
    words += "--enforce-eager --dtype float32 --max-model-len 256 --max-num-seqs 4".split()
    with vllm_server(python, words) as port:
        found = ask(head, f"http://127.0.0.1:{port}", "eagle3", temperature=0, concurrency=[4])
    assert found["judgement"] == judgement, found["acceptance"]
    assert not earlier or "one earlier" in found["because"][-1]
    told = {row["setting"] for row in found["settings"] if row["state"] == "same"}
    assert {"method", "rule", "prompts", "longest text", "dtype", "cache", "at once"} <= told
