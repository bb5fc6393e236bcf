"""Cards say what the records say and no more; an upload to a stand-in of the hub arrives, or fails
in one line.
"""

import ast
import json
import re
import shutil
import subprocess
import threading
from typing import Any

import huggingface_hub
import pytest
import yaml
from huggingface_hub import HfApi, RepoUrl, constants

from draftsmith.__main__ import main
from draftsmith.core import hub, sources
from draftsmith.core.errors import RunError
from draftsmith.core.prompt_rows import check_rows
from draftsmith.drafts import cards
from draftsmith.drafts.engine_commands import SERVING
from tests.results_made_up import BASE, BOTH, made_up

RECORD: dict[str, Any] = {
    "kind": "draft-lm",
    "objective": "jsd",
    "target": "org/target-7b",
    "target_fingerprint": "aafe824dcea51827",
    "data": {"training": {"rows": 224}, "response_tokens": 10752},
    "steps": 112,
    "best_step": 100,
    "heldout_alpha": 0.19922767082850137,
    "heldout_tau": 1.2487163107449692,
    "fingerprint": "2d7f81d7d7a69fba",
    "config": {
        "out": "/somewhere/out",
        "draft": "org/small",
        "data": [],
        "optim": {"lr": 0.004},
        "seed": 3,
    },
    "versions": {"draftsmith": "0.1.0", "torch": "2.13.0"},
}


def split(card):
    assert card.startswith("---\n")
    header, _, body = card[4:].partition("\n---\n")
    values = yaml.safe_load(header)
    assert isinstance(values, dict)
    return values, body


@pytest.fixture
def uploads(monkeypatch):
    """What was committed to each repository of a stand-in of the hub."""
    committed: dict[str, dict[str, bytes]] = {}

    def create_repo(api, name, *, repo_type, private, exist_ok):
        assert private and exist_ok and api.token == "hf_secret"
        return RepoUrl(
            f"https://huggingface.co/{'datasets/' if repo_type == 'dataset' else ''}{name}"
        )

    def create_commit(api, name, operations, **options):
        committed[name] = {}
        for operation in operations:
            with operation.as_file() as file:
                committed[name][operation.path_in_repo] = file.read()

    monkeypatch.setattr(HfApi, "create_repo", create_repo)
    monkeypatch.setattr(HfApi, "create_commit", create_commit)
    monkeypatch.setenv("HF_TOKEN", "hf_secret")
    return committed


@pytest.fixture
def checkpoint(tmp_path, target_dir):
    """A directory as `train` leaves it: a model, its card, a run beside it."""
    directory = tmp_path / "draft"
    shutil.copytree(target_dir, directory)
    (directory / "run" / "checkpoints").mkdir(parents=True)
    (directory / "run" / "metrics.jsonl").write_text("{}\n")
    (directory / ".hidden").write_text("no")
    (directory / "README.md").write_text(cards.checkpoint_card(RECORD))
    (directory / "draftsmith.json").write_text(json.dumps(RECORD))
    return directory


def test_a_hub_that_does_not_answer_is_known_in_seconds(monkeypatch, tmp_path, golden):
    """Its client would retry for a minute. A cached repository is read without it."""

    ended = threading.Event()

    class Silent:
        def head(self, url, timeout):
            ended.wait()  # whoever waited for an answer would wait for ever

    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", False)
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path))
    monkeypatch.setattr(huggingface_hub, "get_session", Silent)
    monkeypatch.setattr(sources, "_HUB_ANSWERS_S", 0.05)
    sources._answers.cache_clear()
    with golden.raises():
        sources.check_source("org/model")
    with golden.raises():
        check_rows("org/prompts:test")
    (tmp_path / "models--org--model").mkdir()
    sources.check_source("org/model")
    with hub.offline_if_unreachable("org/model"):
        assert constants.HF_HUB_OFFLINE
    with hub.offline_if_unreachable(str(tmp_path)):
        assert not constants.HF_HUB_OFFLINE
    ended.set()
    sources._answers.cache_clear()


def test_header_of_a_draft_has_what_the_hub_reads(golden):
    header, body = split(cards.checkpoint_card(RECORD))
    assert header == {
        "base_model": "org/small",
        "library_name": "transformers",
        "pipeline_tag": "text-generation",
        "tags": ["speculative-decoding", "draft-model", "draftsmith"],
    }
    golden(body)
    assert "/somewhere/out" not in body
    # A head belongs to its target.
    header, body = split(
        cards.checkpoint_card(RECORD | {"kind": "eagle3", "config": {"draft": None}})
    )
    golden(body)
    assert (header["base_model"], header["library_name"]) == ("org/target-7b", "draftsmith")
    assert "eagle3" in header["tags"]
    assert "from_pretrained" not in body and "vllm serve" not in body


def test_paths_do_not_pass_for_hub_names_and_datasets_are_those_that_the_prompts_came_from(
    tmp_path,
):
    (tmp_path / "manifest.json").write_text(
        json.dumps({"config": {"prompts": "org/prompts:train"}})
    )
    mine = {"draft": str(tmp_path), "data": ["out/mine/data"]}
    header, _ = split(cards.checkpoint_card(RECORD | {"target": str(tmp_path), "config": mine}))
    assert "base_model" not in header and "datasets" not in header
    assert [sources.is_hub_name(name) for name in ("a/b", "a", "a/b/c", "./b", "/b", "~/b")] == [
        True,
        *[False] * 5,
    ]
    header, _ = split(
        cards.checkpoint_card(
            RECORD | {"config": {"data": [str(tmp_path)], "replay": ["org/general"]}}
        )
    )
    assert header["datasets"] == ["org/general", "org/prompts"]


@pytest.mark.parametrize(
    ("target", "draft", "header"),
    [("mit", "mit", "mit"), ("mit", "apache-2.0", None), ("mit", None, None), (None, None, None)],
)
def test_licence_only_where_all_models_agree(tmp_path, target, draft, header):
    names = {}
    for name, licence in (("target", target), ("draft", draft)):
        directory = tmp_path / name
        directory.mkdir()
        names[name] = str(directory)
        (directory / "README.md").write_text(
            "# license: in the text\n"
            if licence is None
            else f"---\na: 1\nlicense: {licence}\n---\n#"
        )
    record = RECORD | {"target": names["target"], "config": {"draft": names["draft"]}}
    values, body = split(cards.checkpoint_card(record))
    assert values.get("license") == header
    assert ("Not set" in body) == (header is None)
    assert all(
        f"`{names[n]}`: {licence or 'none that can'}" in body
        for n, licence in (("target", target), ("draft", draft))
    )


def test_results_of_an_evaluation_replace_those_of_training(checkpoint, tmp_path, golden):
    results = made_up({"base": BASE, "mine": {"id": 0.1, "ood": 0.1}}, BOTH)
    results["remarks"] = [{"about": "busy_machine", "text": "the machine was busy"}]
    results["provenance"]["command"] = "draftsmith eval --target T --dtype bfloat16"
    mine = [row for row in results["rows"] if row["draft"] == "mine"]
    unmeasured = next(row for row in mine if row["figure"] == "tau")
    unmeasured |= {"value": None, "low": None, "high": None}
    file = tmp_path / "results.json"
    file.write_text(json.dumps(results))
    cards.add_results(checkpoint, file, "mine")
    _, body = split((checkpoint / "README.md").read_text())
    golden(body)
    assert "0.1992" not in body and "held out while training" not in body
    with golden.raises():
        cards.add_results(str(checkpoint), str(file), "other")
    for part in ("base", "drafts", "suites", "rows", "remarks", "provenance"):
        file.write_text(json.dumps({key: results[key] for key in results.keys() - {part}}))
        with golden.raises():
            cards.add_results(checkpoint, file, "mine")
    file.write_text(json.dumps(results | {"schema_version": 6}))
    with golden.raises():
        cards.add_results(checkpoint, file, "mine")


def test_the_example_for_transformers_runs(target_dir, draft_dir, capsys):
    card = cards.checkpoint_card(RECORD | {"target": target_dir}).replace(
        hub.PLACEHOLDER, draft_dir
    )
    (code,) = re.findall(r"^```python\n(.*?)^```", card, flags=re.MULTILINE | re.DOTALL)
    exec(code, {})  # noqa: S102
    assert capsys.readouterr().out.strip()


def words_of_shell(command, cwd):
    return subprocess.check_output(
        ["sh", "-c", f"printf '%s\\0' {command}"], cwd=cwd, text=True
    ).split("\0")[:-1]


def test_commands_and_code_that_are_printed_hold_any_path(tmp_path):
    """A space, both quotes and a command of the shell, as words of a shell, in JSON and in
    Python.
    """
    target, draft = "my target/$(touch x)", 'it\'s "my" draft/`touch x`'
    for engine, kinds in SERVING.items():
        for kind, serving in kinds.items():
            exports, command = serving.commands(kind, target, draft, 3)
            for line in exports:
                assert {target, draft} & set(words_of_shell(line, tmp_path)), (engine, line)
            if serving.python:
                *python, code = words_of_shell(command, tmp_path)
                literals = [
                    node.value
                    for node in ast.walk(ast.parse(code))
                    if isinstance(node, ast.Constant)
                ]
                assert python == ["python", "-c"]
                outs = {words_of_shell(line, tmp_path)[-1] for line in exports}
                assert outs <= set(literals)
                continue
            words = words_of_shell(command.partition("  # ")[0], tmp_path)
            if engine == "vllm":
                config = json.loads(words[-1])
                exported = words_of_shell(exports[0], tmp_path)[-1] if exports else draft
                # MTP layers are exported in the target's checkpoint, which is served.
                unnamed = {"mtp": (exported, None), "prompt_lookup": (target, None)}
                served, drafting = unnamed.get(kind, (target, exported))
                assert words[:3] == ["vllm", "serve", served]
                assert config.get("model") == drafting
    assert list(tmp_path.iterdir()) == []


def test_a_refusal_is_one_line(uploads, checkpoint, monkeypatch, golden):
    def refuse(*_, **__):
        raise OSError("403 Forbidden\nfor this token")

    monkeypatch.setattr(HfApi, "create_commit", refuse)
    with golden.raises(RunError):
        hub.push(checkpoint, "org/draft", "model")


def test_distill_and_train_push_what_they_made_and_again_when_asked_again(
    uploads, tmp_path, target_dir, draft_dir, prompts_file, capsys, golden
):
    data, draft = tmp_path / "data", tmp_path / "draft"
    words = (
        f"distill --target {target_dir} --prompts {prompts_file} --out {data} "
        "--max_new_tokens 6 --num_samples 4"
    )
    assert main([*words.split(), "--push_to_hub", "org/set", "--json"]) == 0
    assert json.loads(capsys.readouterr().out.splitlines()[-1])["pushed"].endswith(
        "/datasets/org/set"
    )
    assert {"README.md", "errors.jsonl", "manifest.json", "part-00000.parquet"} == set(
        uploads["org/set"]
    )
    header, body = split(uploads["org/set"]["README.md"].decode())
    assert header["task_categories"] == ["text-generation"] and "source_datasets" not in header
    assert header["configs"] == [{"config_name": "default", "data_files": "part-*.parquet"}]
    golden(body)
    words = (
        f"train --target {target_dir} --draft {draft_dir} --data {data} --out {draft} "
        "--steps 2 --max_length 64"
    )
    assert main(words.split()) == 0
    assert "org/draft" not in uploads
    whole = {file.name: file.read_bytes() for file in draft.iterdir() if file.is_file()}
    # The run is finished: nothing is trained again, its files are uploaded.
    assert main([*words.split(), "--push_to_hub", "org/draft"]) == 0
    assert {file.name: file.read_bytes() for file in draft.iterdir() if file.is_file()} == whole
    assert set(uploads["org/draft"]) == {name for name in whole if name[0] != "."} - {"run.json"}
    header, body = split(uploads["org/draft"]["README.md"].decode())
    # The examples of a published card name the repository.
    assert (
        "org/draft" in body
        and hub.PLACEHOLDER not in body
        and hub.PLACEHOLDER.encode() in whole["README.md"]
    )
    assert header["library_name"] == "transformers"
    golden(body)
    assert str(draft) not in body
    assert main([*words.split(), "--push_to_hub", "draft"]) == 2
    golden(capsys.readouterr().err, having="owner")
