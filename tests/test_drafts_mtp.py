"""MTP layers as models ship them: read from a checkpoint, they draft as transformers does where it
can run them, and compute the published formula where it cannot.

Legend: B rows, T tokens, H hidden size.
"""

import json
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor
from transformers import AutoModelForCausalLM

from benchmarks.lib.tiny_types import tiny_config
from draftsmith.core.models import load_model
from draftsmith.core.sampling import Sampling
from draftsmith.core.tokenization import load_tokenizer
from draftsmith.decode import HeadProposer, SpeculativeDecoder
from draftsmith.drafts.doctor import examine
from draftsmith.drafts.heads import head_kind, load_head, save_head
from draftsmith.drafts.heads.mtp import MtpHead
from tests.test_drafts_heads import inputs, make_target, reference_layer, rms
from tests.tiny_models import redrawn, stirred
from tests.train_laws import tiny_family

V, H = 40, 32
PROMPTS = [[3, 1, 4, 1, 5], [9, 2, 6], [17, 30, 8, 8, 21, 0]]
NEW_TOKENS = 24


def drawn(shape, seed, spread=0.2):
    return spread * torch.randn(shape, generator=torch.Generator().manual_seed(seed))


def join_tensors(names, hidden=H, centre=1.0):
    """The tensors outside of the decoder layer, drawn at random. The norms are around `centre`."""
    tensors = {}
    for seed, (part, name) in enumerate(names.items()):
        shape = (hidden, 2 * hidden) if part == "fc" else (hidden,)
        tensors[name] = drawn(shape, seed) + (0.0 if part == "fc" else centre)
    return tensors


def model_of(kind, **changes):
    config: Any = tiny_config(kind)
    special = dict.fromkeys(("pad_token_id", "bos_token_id", "eos_token_id"))
    for name, value in (special | changes).items():
        setattr(config, name, value)
    torch.manual_seed(3)
    return stirred(redrawn(AutoModelForCausalLM.from_config(config).float(), 0.2), 0.05)


def write_nextn(kind, out, layers=2, **changes):
    """A checkpoint as DeepSeek and GLM publish theirs: the layer behind the last has an MTP
    layer's tensors too.
    """
    model_of(
        kind, num_hidden_layers=layers + 1, first_k_dense_replace=1, **changes
    ).save_pretrained(out)
    values = json.loads((out / "config.json").read_text())
    values |= {"num_hidden_layers": layers, "num_nextn_predict_layers": 1}
    (out / "config.json").write_text(json.dumps(values))
    tensors = load_file(out / "model.safetensors")
    start = f"model.layers.{layers}."
    names = {
        "embedding": f"{start}enorm.weight",
        "hidden": f"{start}hnorm.weight",
        "fc": f"{start}eh_proj.weight",
        "norm": f"{start}shared_head.norm.weight",
    }
    tensors |= join_tensors(names)
    tensors[f"{start}embed_tokens.weight"] = tensors["model.embed_tokens.weight"].clone()
    tensors[f"{start}shared_head.head.weight"] = tensors["lm_head.weight"].clone()
    save_file(tensors, out / "model.safetensors", metadata={"format": "pt"})
    return out


@pytest.fixture(scope="module", params=["deepseek_v3", "glm4_moe"])
def nextn(request, tmp_path_factory):
    return write_nextn(request.param, tmp_path_factory.mktemp(request.param))


@pytest.fixture
def transformers_knows(nextn, monkeypatch):
    """transformers finds the layer by the numbers that it has in the published sizes."""
    target: Any = type(load_model(str(nextn), device="cpu"))
    monkeypatch.setattr(target, "_keys_to_ignore_on_load_unexpected", [r"model\.layers\.2\."])


@pytest.mark.usefixtures("transformers_knows")
def test_a_native_layer_drafts_as_in_transformers(nextn):
    """Greedy tokens and the number of target calls are those of `generate(use_mtp=True)`, whose
    first call drafts nothing: ours begins behind the token that it gave.
    """
    target: Any = load_model(str(nextn), device="cpu")
    decoder = SpeculativeDecoder(target, HeadProposer(load_head("mtp", target)), "chain:1")
    accepted = 0
    for prompt in PROMPTS:
        calls: list[int] = []
        hook = target.model.register_forward_hook(lambda *_, calls=calls: calls.append(1))
        output = target.generate(
            torch.tensor([prompt]),
            attention_mask=torch.ones(1, len(prompt), dtype=torch.long),
            use_mtp=True,
            do_sample=False,
            max_new_tokens=NEW_TOKENS,
        )[0].tolist()
        hook.remove()
        begun = len(prompt) + 1
        batch = decoder.generate(
            [output[:begun]], Sampling(temperature=0.0), NEW_TOKENS - 1, eos_ids=()
        )
        stats = batch.generations[0].stats
        assert batch.generations[0].output_ids == output[begun:]
        assert stats.target_calls == len(calls) - 1
        accepted += stats.accepted
    assert 0 < accepted < len(PROMPTS) * NEW_TOKENS / 2


def test_a_directory_may_hold_the_layer_alone(nextn, tmp_path, golden):
    target = load_model(str(nextn), device="cpu")
    tensors = load_file(nextn / "model.safetensors")
    alone = {name: value for name, value in tensors.items() if ".layers.2." in name}
    (tmp_path / "config.json").write_bytes((nextn / "config.json").read_bytes())
    save_file(alone, tmp_path / "mtp.safetensors")
    assert head_kind(nextn) is None
    assert head_kind(tmp_path) == "mtp"
    head, native = load_head(tmp_path, target), load_head("mtp", target)
    for name, value in native.state_dict().items():
        assert torch.equal(head.state_dict()[name], value), name
    broken = dict(alone)
    broken.pop("model.layers.2.mlp.experts.1.up_proj.weight")
    save_file(broken, tmp_path / "mtp.safetensors")
    with golden.raises():
        load_head(tmp_path, target)
    save_file(alone | {"model.layers.2.strange": torch.ones(2)}, tmp_path / "mtp.safetensors")
    with golden.raises():
        load_head(tmp_path, target)
    name = "model.layers.2.self_attn.o_proj.weight"
    eight = alone | {name: (alone[name] * 100).to(torch.float8_e4m3fn)}
    save_file(eight, tmp_path / "mtp.safetensors")
    with golden.raises():
        load_head(tmp_path, target)
    save_file(eight | {f"{name}_scale_inv": torch.tensor([[0.01]])}, tmp_path / "mtp.safetensors")
    read = load_head(tmp_path, target).state_dict()["layers.0.self_attn.o_proj.weight"]
    torch.testing.assert_close(read, alone[name], atol=1e-4, rtol=0.07)


QWEN = {
    "embedding": "mtp.pre_fc_norm_embedding.weight",
    "hidden": "mtp.pre_fc_norm_hidden.weight",
    "fc": "mtp.fc.weight",
    "norm": "mtp.norm.weight",
}


def write_qwen(out, experts, kind="qwen3_next"):
    """A checkpoint as Qwen3-Next's: `mtp.*` beside the model; the layer is its last one's copy."""
    model = model_of(kind, num_experts=experts)
    model.save_pretrained(out)
    tensors = load_file(out / "model.safetensors")
    last = "model.layers.3."
    for name in [name for name in tensors if name.startswith(last)]:
        tensors[f"mtp.layers.0.{name.removeprefix(last)}"] = tensors[name].clone()
    save_file(
        tensors | join_tensors(QWEN, centre=0.0),
        out / "model.safetensors",
        metadata={"format": "pt"},
    )
    return out


@torch.no_grad()
def test_qwen3_next_computes_its_published_layer(tmp_path):
    """The embedding comes first, norms are around one, and the layer is a copy of the last."""
    target: Any = load_model(str(write_qwen(tmp_path, experts=0)), device="cpu")
    head: Any = load_head("mtp", target)
    t = load_file(tmp_path / "model.safetensors")
    ids_BT, _ = inputs()
    features_BTH = target.model(ids_BT).last_hidden_state

    def norm(name, states):
        scale = torch.rsqrt(states.pow(2).mean(-1, keepdim=True) + target.config.rms_norm_eps)
        return states * scale * (1 + t[name])

    embedded = norm(QWEN["embedding"], t["model.embed_tokens.weight"][ids_BT])
    joined = torch.cat([embedded, norm(QWEN["hidden"], features_BTH)], -1) @ t["mtp.fc.weight"].T
    length = ids_BT.shape[1]
    turned = target.model.rotary_emb(joined, torch.arange(length)[None])
    causal = torch.ones(1, 1, length, length, dtype=torch.bool).tril()
    states = target.model.layers[3](joined, position_embeddings=turned, attention_mask=causal)
    expected = norm("mtp.norm.weight", states)
    logits, after = head(ids_BT, features_BTH)
    torch.testing.assert_close(after, expected, atol=1e-5, rtol=1e-5)
    torch.testing.assert_close(logits, target.lm_head(expected), atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("kind", ["qwen3_next", "qwen3_5_moe_text"])
def test_experts_of_a_native_layer_are_read_one_by_one(kind, tmp_path):
    target: Any = load_model(str(write_qwen(tmp_path, 4, kind)), device="cpu")
    head: Any = load_head("mtp", target)
    last = target.model.layers[3].state_dict()
    assert "mlp.experts.gate_up_proj" in last
    for name, value in last.items():
        assert torch.equal(head.layers[0].state_dict()[name], value), name


@torch.no_grad()
def test_mimo_computes_its_published_layer(tmp_path):
    """The hidden state comes first, and the layer is Qwen 2's, with biases."""
    target: Any = make_target()
    qwen2: Any = tiny_family("qwen2", num_attention_heads=4, num_key_value_heads=2)
    layer = qwen2.model.layers[0].state_dict()
    assert "self_attn.k_proj.bias" in layer
    start = "model.mtp_layers.0."
    names = {
        "embedding": f"{start}token_layernorm.weight",
        "hidden": f"{start}hidden_layernorm.weight",
        "fc": f"{start}input_proj.weight",
        "norm": f"{start}final_layernorm.weight",
    }
    tensors = join_tensors(names, hidden=16)
    for seed, (name, values) in enumerate(layer.items(), 10):
        tensors[start + name] = drawn(values.shape, seed, 0.4)
    save_file(tensors, tmp_path / "model.safetensors")
    values = {"architectures": ["MiMoForCausalLM"], "model_type": "mimo"}
    (tmp_path / "config.json").write_text(json.dumps(values | {"num_nextn_predict_layers": 1}))
    head: Any = load_head(tmp_path, target)
    ids_BT, features_BTH = inputs()
    embedded = rms(target.get_input_embeddings()(ids_BT), tensors[names["embedding"]])
    hidden = rms(features_BTH, tensors[names["hidden"]])
    joined = torch.cat([hidden, embedded], -1) @ tensors[names["fc"]].T
    x = rms(joined, tensors[f"{start}input_layernorm.weight"])
    expected = rms(reference_layer(tensors, start, x, joined), tensors[names["norm"]])
    logits, after = head(ids_BT, features_BTH)
    torch.testing.assert_close(after, expected, atol=1e-5, rtol=1e-5)
    torch.testing.assert_close(logits, target.lm_head(expected), atol=1e-5, rtol=1e-5)
    save_head(head, tmp_path / "ours")
    again: Any = load_head(tmp_path / "ours", target)
    assert torch.equal(again(ids_BT, features_BTH)[0], logits)


def without_layer(checkpoint, out):
    """The checkpoint as fine-tuning saves it: transformers drops the layer."""
    model = AutoModelForCausalLM.from_pretrained(checkpoint)
    model.save_pretrained(out, max_shard_size="60KB")
    assert len(list(out.glob("*.safetensors"))) > 1
    return out


@torch.no_grad()
@pytest.mark.usefixtures("transformers_knows")
def test_a_lost_layer_is_attached_again_as_it_was(nextn, tmp_path, door):
    """The names, shapes and values of the published file, beside the target's own."""
    lost = without_layer(nextn, tmp_path / "lost")
    out = tmp_path / "whole"
    words = ["export", "--target", lost, "--format", "mtp", "--out", out]
    door.ok(*words, "--draft", f"mtp:{nextn}")
    published = load_file(nextn / "model.safetensors")
    index = json.loads((out / "model.safetensors.index.json").read_text())["weight_map"]
    assert index.keys() == published.keys()
    for name, value in published.items():
        assert torch.equal(load_file(out / index[name])[name], value), name
    assert json.loads((out / "config.json").read_text())["num_nextn_predict_layers"] == 1
    first = sorted(lost.glob("*.safetensors"))[0]
    assert (out / first.name).samefile(first)
    assert head_kind(out) is None
    target = load_model(str(out), device="cpu")
    native = load_head(f"mtp:{nextn}", target).state_dict()
    for name, value in load_head("mtp", target).state_dict().items():
        assert torch.equal(native[name], value), name


@torch.no_grad()
def test_a_tuned_layer_replaces_the_native_one(tmp_path, door):
    """In every shard that held some of it. `config.json` says that there is one."""
    checkpoint = write_qwen(tmp_path / "next", experts=4)
    tensors = load_file(checkpoint / "model.safetensors")
    (checkpoint / "model.safetensors").unlink()
    halves = [dict(list(tensors.items())[part::2]) for part in range(2)]
    for part, half in enumerate(halves, 1):
        save_file(half, checkpoint / f"model-0000{part}-of-00002.safetensors", {"format": "pt"})
    files = {
        name: f"model-0000{part}-of-00002.safetensors"
        for part, half in enumerate(halves, 1)
        for name in half
    }
    (checkpoint / "model.safetensors.index.json").write_text(
        json.dumps({"metadata": {}, "weight_map": files})
    )
    target = load_model(str(checkpoint), device="cpu")
    tuned: Any = stirred(load_head("mtp", target), 0.1)
    save_head(tuned, tmp_path / "tuned")
    out = tmp_path / "out"
    door.ok(
        *f"export --draft {tmp_path}/tuned --target {checkpoint} --format mtp --out".split(), out
    )
    held: dict[str, Tensor] = {}
    for file in out.glob("*.safetensors"):
        more = load_file(file)
        assert not held.keys() & more.keys()
        held |= more
    assert held.keys() == tensors.keys()
    for name, value in tensors.items():
        assert torch.equal(held[name], value) == (not name.startswith("mtp.")), name
    assert json.loads((out / "config.json").read_text())["num_nextn_predict_layers"] == 1
    again: Any = load_head("mtp", load_model(str(out), device="cpu"))
    for name, value in tuned.state_dict().items():
        assert torch.equal(again.state_dict()[name], value), name


def test_doctor_knows_who_reads_the_layer(nextn, tmp_path, request, target_dir, golden):
    def verdicts(target, draft):
        found = examine(target=str(target), draft=str(draft))
        return {verdict["engine"]: verdict for verdict in found["verdicts"]}

    native = verdicts(nextn, "mtp")
    assert {engine for engine in native if native[engine]["serves"]} == {"vllm", "sglang"}
    golden(native["vllm"]["command"])
    assert not native["vllm"]["exports"]
    golden(native["transformers"]["reason"])
    request.getfixturevalue("transformers_knows")
    save_head(load_head("mtp", load_model(str(nextn), device="cpu")), tmp_path / "head")
    ours = verdicts(nextn, tmp_path / "head")
    golden(ours["vllm"]["command"])
    golden(ours["vllm"]["exports"][0])
    golden(ours["sglang"]["command"])
    assert "use_mtp=True" in ours["transformers"]["command"]
    save_head(MtpHead.fresh(load_model(target_dir, device="cpu")), tmp_path / "fresh")
    reason = verdicts(target_dir, tmp_path / "fresh")["vllm"]["reason"]
    golden(reason)


def test_a_target_without_the_layer_says_how_to_get_one(target_dir, golden):
    target = load_model(target_dir, device="cpu")
    with golden.raises():
        load_head("mtp", target)
    with golden.raises():
        load_head("mtp", make_target())
    with golden.raises():
        load_head("mtp:/not/here", target)


@pytest.mark.parametrize(
    ("kind", "layer"),
    [("llama", "llama"), ("qwen3", "qwen3"), ("cohere", "cohere"), ("gpt2", "llama")],
)
def test_a_fresh_layer_is_of_the_targets_own_kind(kind, layer):
    """GPT-2's layers take no rotary embedding from outside: a LLaMA layer serves it."""
    head = MtpHead.fresh(tiny_family(kind, vocab_size=V))
    assert head.config.layer["model_type"] == layer
    assert len(head.layers) == 1


def test_a_head_of_another_family_is_refused(tmp_path, golden):
    save_head(MtpHead.fresh(tiny_family("qwen3", vocab_size=V)), tmp_path)
    with golden.raises():
        load_head(tmp_path, tiny_family("llama", vocab_size=V))


@pytest.fixture(scope="module")
def served(tmp_path_factory, target_dir):
    """A GLM with a native layer and a tokenizer."""
    out = write_nextn("glm4_moe", tmp_path_factory.mktemp("glm") / "glm", vocab_size=290)
    load_tokenizer(target_dir).save_pretrained(out)
    return str(out)


def test_the_native_layer_drafts_and_is_trained_by_name(served, distilled, tmp_path, door):
    words = ["--target", served, "--prompt", "Numbers", "--max_new_tokens", 16]
    alone = door.summary("decode", *words)
    drafted = door.summary("decode", *words, "--draft", "mtp", "--tree", "kary:2,2")
    assert drafted["outputs"][0]["output_ids"] == alone["outputs"][0]["output_ids"]
    run = (
        f"train --kind mtp --draft mtp --objective fkl --target {served} --data {distilled} "
        f"--max_length 40 --steps 4 --batch_size 4 --device cpu --out {tmp_path}/tuned"
    )
    door.ok(*run.split())
    target = load_model(served, device="cpu")
    tuned, native = load_head(tmp_path / "tuned", target), load_head("mtp", target)
    assert tuned.config == native.config
    apart = [
        not torch.equal(a, b) for a, b in zip(tuned.parameters(), native.parameters(), strict=True)
    ]
    assert any(apart)
    door.refused("decode", *words, "--draft", f"mtp:{tmp_path / 'tuned'}")
