"""`draftsmith decode`: the rows of the command contract, whole or absent, and text as it comes."""

import io
import json
import os
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM

from draftsmith.cli.decode_run import load, write_pieces
from draftsmith.config import DecodeConfig
from draftsmith.core.command_line import parse
from draftsmith.core.io import canonical_json
from draftsmith.core.models import eos_ids, load_model
from draftsmith.core.prompts import read_prompts
from draftsmith.core.tokenization import decode_text, load_tokenizer
from draftsmith.decode import PROPOSERS, TREES
from draftsmith.drafts.heads import HEADS, save_head
from draftsmith.outputs import Detokenizer

TEXTS = [
    "The quick brown fox jumps over the lazy dog.",
    "A draft model proposes tokens and the target accepts.",
]


def read(path):
    return [json.loads(line) for line in path.read_text(encoding="utf-8").split("\n") if line]


@pytest.mark.parametrize("drafted", [True, False])
def test_rows_are_those_of_the_contract(
    tmp_path, door, target_dir, draft_dir, prompts_file, drafted, golden
):
    out = tmp_path / "deep" / "rows.jsonl"
    words = (
        f"--target {target_dir} --prompts {prompts_file} --num_samples 2 --max_new_tokens 9".split()
    )
    words += ["--temperature", "1", "--out", str(out), "--json"]
    words += f"--draft {draft_dir} --tree kary:2,2".split() if drafted else []
    printed, said = door.ok("decode", *words)
    rows = read(out)
    assert [p.name for p in out.parent.iterdir()] == ["rows.jsonl"]
    tokenizer = load_tokenizer(target_dir)
    eos = set(eos_ids(load_model(target_dir, device="cpu")))
    for row in rows:
        assert list(row) == [
            "id",
            "sample_index",
            "prompt_ids",
            "output_ids",
            "text",
            "finish_reason",
            "stats",
        ]
        stats = row["stats"]
        assert list(stats) == [
            "target_calls",
            "proposed",
            "accepted",
            "accepted_by_depth",
            "seconds",
        ]
        ids = row["output_ids"]
        assert 1 <= len(ids) <= 9
        assert (row["finish_reason"] == "stop") == (ids[-1] in eos)
        assert not eos.intersection(ids[:-1])
        assert row["finish_reason"] == "stop" or len(ids) == 9
        assert row["text"] == decode_text(tokenizer, ids)
        assert row["prompt_ids"][0] == tokenizer.bos_token_id
        assert sum(stats["accepted_by_depth"]) == stats["accepted"] <= stats["proposed"]
        assert stats["target_calls"] <= len(ids) <= stats["accepted"] + stats["target_calls"]
        assert stats["seconds"] > 0
    assert {row["finish_reason"] for row in rows} == {"stop", "length"}
    assert any(row["stats"]["proposed"] for row in rows) == drafted
    keys = [(row["id"], row["sample_index"]) for row in rows]
    assert len(set(keys)) == len(keys) == 16
    assert ("numbers", 1) in keys
    summary = json.loads(printed.splitlines()[-1])
    assert summary["rows"] == 16
    assert summary["prompts_read"] == 9 == summary["prompts_done"] + summary["prompts_skipped"]
    assert summary["skipped"] == [{"row": 4, "reason": "key 'prompt' is empty"}]
    assert summary["tokens"] == sum(len(row["output_ids"]) for row in rows)
    assert summary["tau"] == pytest.approx(summary["tokens"] / summary["target_calls"])
    golden(said)


STORIES = (
    Path(os.environ.get("DRAFTSMITH_SHARED", Path(__file__).parents[2] / "shared"))
    / "models"
    / "stories260k"
)


@pytest.mark.skipif(not STORIES.is_dir(), reason="no pretrained model beside the clone")
def test_greedy_text_of_a_pretrained_model_is_the_published_one(door):
    found = door.summary(
        *f"decode --target {STORIES} --prompt".split(), "Once upon a time", "--max_new_tokens", 40
    )
    expected = (
        ", there was a little girl named Lily. She loved to play outside in the park. One "
        "day, she saw a big"
    )
    assert found["outputs"][0]["text"].startswith(expected)


def test_one_prompt_is_streamed(door, target_dir, draft_dir, golden):
    words = [*f"decode --target {target_dir} --draft {draft_dir} --prompt".split(), "# The quick"]
    words += "--max_new_tokens 12 --temperature 1 --json".split()
    printed, _ = door.ok(*words)
    summary = json.loads(printed.splitlines()[-1])
    assert printed.startswith(summary["outputs"][0]["text"] + "\n")
    assert (
        summary["outputs"][0]["prompt_ids"]
        == load_tokenizer(target_dir)("# The quick")["input_ids"]
    )


def test_a_draft_that_was_trained_for_another_target_is_one_warning(
    door, target_dir, draft_dir, tmp_path, monkeypatch, golden
):
    monkeypatch.setattr("draftsmith.cli.decode_run.missing_kernel", lambda device: None)
    shutil.copytree(draft_dir, tmp_path / "draft")
    record = {"kind": "draft-lm", "target": "big", "target_fingerprint": "0" * 16}
    (tmp_path / "draft" / "draftsmith.json").write_text(json.dumps(record))
    words = ["--target", target_dir, "--draft", str(tmp_path / "draft"), "--prompt", "Return"]
    _, err = door.ok("decode", *words, *"--max_new_tokens 2 --temperature 0".split())
    (line,) = [line for line in err.splitlines() if "warning" in line]
    golden(line)


def pieces(tokenizer, ids):
    """The text of ids that come two at a time, the first of them drafted."""
    text = Detokenizer(tokenizer)
    for start in range(0, len(ids), 2):
        step = ids[start : start + 2]
        yield from text.add(step, [True, False][: len(step)])
    yield text.rest(decode_text(tokenizer, ids))
    return None


class Recorder(io.StringIO):
    """Remembers what was written piece by piece."""

    def __init__(self):
        super().__init__()
        self.pieces: list[str] = []

    def write(self, text):
        self.pieces.append(text)
        return super().write(text)


@pytest.mark.parametrize(
    "text",
    [
        "a é漢🙂👩‍🚀 b",
        "tabs\tand\r\nlines\n\n end ",
        "bell \x07 and \x1b[31mred",
        "[bold]no markup[/bold]",
        "",
    ],
)
def test_what_is_streamed_is_the_text_and_no_character_is_torn(target_dir, text):
    tokenizer = load_tokenizer(target_dir)
    ids = tokenizer(text, add_special_tokens=False)["input_ids"]
    recorder = Recorder()
    write_pieces(pieces(tokenizer, ids), recorder)
    assert not any("\ufffd" in piece for piece in recorder.pieces)
    assert recorder.getvalue() == text + "\n"
    if len(text) > 10:
        assert sum(map(bool, recorder.pieces)) > 5
    # An end in the middle of a character is shown as that.
    ids, recorder = tokenizer("ab🙂", add_special_tokens=False)["input_ids"][:-1], Recorder()
    write_pieces(pieces(tokenizer, ids), recorder)
    assert recorder.getvalue() == decode_text(tokenizer, ids) + "\n"


class Terminal(Recorder):
    def isatty(self):
        return True


def test_on_a_terminal_drafted_tokens_stand_out_and_escapes_do_not_act(target_dir, monkeypatch):
    for name in ("NO_COLOR", "FORCE_COLOR", "TTY_COMPATIBLE"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("TERM", "xterm-256color")
    tokenizer = load_tokenizer(target_dir)
    ids = tokenizer("ab\x1b]0;c", add_special_tokens=False)["input_ids"]
    terminal = Terminal()
    write_pieces(pieces(tokenizer, ids), terminal)
    assert "\x1b[1;32ma" in terminal.getvalue()
    assert "\x1b]0;" not in terminal.getvalue()


@pytest.fixture(scope="module")
def heads(tmp_path_factory, target_dir):
    """An untrained head of every kind, three heads of those that come in numbers, and one of an
    unknown kind.
    """
    target = load_model(target_dir, device="cpu")
    root = tmp_path_factory.mktemp("heads")
    for kind, cls in HEADS.items():
        torch.manual_seed(5)
        fresh: Any = cls.fresh
        save_head(
            fresh(target, num_heads=3) if kind in ("medusa", "hydra") else fresh(target),
            root / kind,
        )
    (root / "alien").mkdir()
    (root / "alien" / "config.json").write_text('{"speculators_model_type": "alien"}')
    return {kind: str(root / kind) for kind in [*HEADS, "alien"]}


@pytest.fixture(scope="module")
def tree_files(tmp_path_factory):
    root = tmp_path_factory.mktemp("trees")
    contents = {
        "parents": {"parents": [-1, -1, 0]},
        "paths": [[0], [1], [0, 0]],
        "plan": {"tree": {"spec": "kary:2,1"}, "pays": True},
    }
    for name, content in contents.items():
        (root / f"{name}.json").write_text(json.dumps(content))
    (root / "torn.json").write_text('{"parents":\n [-1,')
    (root / "datastore.jsonl").write_text(
        "".join(json.dumps({"text": text}) + "\n" for text in TEXTS)
    )
    return {path.stem: str(path) for path in root.iterdir()}


# Words | what they choose: proposer | tree | verifier. {name} stands for a fixture's file.
FAMILIES = """
--draft {draft} | draft | auto | mcsd
--draft {draft} --tree kary:2,2 | draft | kary:2,2 | mcsd
--draft {draft} {other} --tree kary:3,2 | draft | kary:3,2 | specinfer
--draft {draft} --tree eagle2:depth=3,beam=2,nodes=6 | draft | eagle2:depth=3,beam=2,nodes=6 | exact
--draft {draft} --tree opt:nodes=6,depth=3 --verifier mcsd | draft | opt:nodes=6,depth=3 | mcsd
--draft {draft} --tree static:{parents} | draft | static:{parents} | mcsd
--draft {draft} --tree auto:{plan} | draft | auto:{plan} | mcsd
--draft {draft} --fast false | draft | auto | mcsd
--draft {eagle} --tree eagle2:depth=3,beam=2,nodes=6 | eagle | eagle2:depth=3,beam=2,nodes=6 | exact
--draft {eagle3} --tree kary:2,2 | eagle3 | kary:2,2 | mcsd
--draft {mtp} --tree kary:2,2 | mtp | kary:2,2 | mcsd
--draft {medusa} | medusa | auto | mcsd
--draft {hydra} --tree kary:2,2,1 | hydra | kary:2,2,1 | mcsd
--draft {medusa} --proposer blockwise --tree chain:2 | blockwise | chain:2 | speculative
--draft {dflash} | dflash | auto | mcsd
--draft {draft} --tree 3 | draft | chain:3 | speculative
--draft {medusa} --tree chain | medusa | chain:3 | speculative
--draft {dspark} --tree chain:3,stop=0.2 | dspark | chain:3,stop=0.2 | speculative
--draft {jetspec} --tree kary:2,2 | jetspec | kary:2,2 | mcsd
--proposer prompt_lookup | prompt_lookup | auto | exact
--proposer prompt_lookup --draft {draft} | prompt_lookup+draft | auto | mcsd
--draft prompt_lookup+{eagle} --tree eagle2:depth=3,beam=2,nodes=6 | prompt_lookup+eagle | eagle2:depth=3,beam=2,nodes=6 | exact
--proposer prompt_lookup --draft {dspark} --tree kary:2,2 | prompt_lookup+dspark | kary:2,2 | mcsd
--draft lookahead | lookahead | its own | exact
--draft retrieval:{datastore} --tree kary:2,2 | retrieval | kary:2,2 | exact
--proposer none | none | |
"""  # noqa: E501
ROWS = [tuple(cell.strip() for cell in line.split("|")) for line in FAMILIES.strip().splitlines()]


def test_every_proposer_and_every_kind_of_tree_is_tried():
    tried = {proposer.partition("+")[0] for _, proposer, _, _ in ROWS}
    assert tried == {*PROPOSERS, "none"}
    assert {(tree or "chain").partition(":")[0] for _, _, tree, _ in ROWS} == {
        *TREES,
        "its own",
    }


@pytest.fixture
def files(target_dir, draft_dir, other_vocabulary_dir, donor_dir, heads, tree_files):
    """Every file that options may name, by what stands for it in braces."""
    models = {
        "target": target_dir,
        "draft": draft_dir,
        "other": other_vocabulary_dir,
        "donor": donor_dir,
    }
    return {**models, **heads, **tree_files}


@pytest.mark.parametrize(("options", "proposer", "tree", "verifier"), ROWS)
def test_every_method_of_drafting_gives_the_targets_own_text(
    door, files, greedy_ids, prompts_file, options, proposer, tree, verifier
):
    words = [
        "--target",
        files["target"],
        *f"--prompts {prompts_file} --max_new_tokens 12 --batch_size 8".split(),
    ]
    summary = door.summary("decode", *words, *options.format(**files).split())
    assert [row["output_ids"] for row in summary["outputs"]] == greedy_ids
    chosen = (summary["proposer"], summary["tree"], summary["verifier"])
    assert chosen == (proposer, tree.format(**files) or None, verifier or None)
    assert summary["lossless"] is True
    if tree != "auto":
        assert (summary["proposed"] > 0) == (proposer != "none")


@pytest.fixture(scope="module")
def greedy_ids(target_dir, prompts_file):
    """What transformers itself makes of the prompts."""
    target: Any = AutoModelForCausalLM.from_pretrained(target_dir)
    found = []
    for prompt in read_prompts(prompts_file, load_tokenizer(target_dir)).prompts:
        ids = torch.tensor([prompt.ids])
        whole = target.generate(
            ids, do_sample=False, max_new_tokens=12, attention_mask=torch.ones_like(ids)
        )
        found.append(whole[0, ids.shape[1] :].tolist())
    return found


def test_tokens_behind_the_end_of_a_text_are_counted(door, target_dir, prompts_file):
    words = f"--target {target_dir} --prompts {prompts_file} --temperature 1".split()
    words += ["--max_new_tokens", "90"]
    ended = door.summary("decode", *words)
    assert ended["behind_end"] == 0
    whole = door.summary("decode", *words, "--ignore_eos")
    behind = 0
    for one, other in zip(ended["outputs"], whole["outputs"], strict=True):
        assert other["output_ids"][: len(one["output_ids"])] == one["output_ids"]
        behind += len(other["output_ids"]) - len(one["output_ids"])
    assert whole["behind_end"] == behind > 0


@pytest.mark.parametrize("verifier", ["greedy", "typical"])
def test_a_lossy_verifier_is_said(door, target_dir, draft_dir, verifier):
    words = (
        f"--target {target_dir} --draft {draft_dir} --tree kary:2,2 --verifier {verifier}".split()
    )
    printed, err = door.ok(
        "decode", *words, *"--temperature 1 --prompt a --max_new_tokens 12 --json".split()
    )
    summary = json.loads(printed.splitlines()[-1])
    assert (summary["verifier"], summary["lossless"]) == (verifier, verifier != "typical")
    assert ("lossy" in err) == (verifier == "typical") == len(err.strip().splitlines())


def test_the_summary_adds_up(tmp_path, door, target_dir, draft_dir, prompts_file):
    words = f"--target {target_dir} --draft {target_dir} --prompts {prompts_file}".split()
    words += "--tree chain:4 --max_new_tokens 12".split()
    same = door.summary(
        "decode",
        *words,
        *f"--temperature 1 --batch_size 3 --out {tmp_path}/rows.jsonl".split(),
    )
    rows = read(tmp_path / "rows.jsonl")
    # A draft that is the target is rejected by rounding only.
    assert same["accept_at"] == pytest.approx([1.0] * 4, abs=0.05)
    assert same["seconds"] == pytest.approx(sum(row["stats"]["seconds"] for row in rows))
    assert same["prefill_s"] + same["decode_s"] == pytest.approx(same["seconds"])
    assert same["peak_memory_kind"] == "process_rss" and 50e6 < same["peak_memory_bytes"] < 50e9
    alone = door.summary(
        "decode", *words[:2], "--prompt", "The quick", "--max_new_tokens", "5", "--ignore_eos"
    )
    assert (alone["proposer"], alone["tree"], alone["verifier"], alone["lossless"]) == (
        "none",
        None,
        None,
        True,
    )
    assert (alone["accept_at"], alone["alpha_mcsd"], alone["tau"], alone["tokens"]) == (
        [],
        None,
        1.0,
        5,
    )


# Options that do not go together. Drafts and proposer are compared before a model is loaded.
REFUSED_DRAFTS = [
    "--proposer eagle",
    "--draft {medusa} --proposer draft",
    "--draft {draft} {eagle}",
    "--draft {alien}",
    "--proposer retrieval",
    "--proposer lookahead --draft {draft}",
    "--draft prompt_lookup+{draft} {draft}",
    "--draft prompt_lookup --proposer lookahead",
]
REFUSED_TREES = [
    "--draft {draft} --tree static:{torn}",
    "--draft {draft} --tree eagle2 --verifier greedy",
    "--draft {draft} {other} --tree eagle2",
    "--draft {medusa} --proposer blockwise --tree kary:2",
    "--proposer prompt_lookup --tree opt",
    "--draft {draft} --max_new_tokens 9999 --out rows",
]


@pytest.mark.parametrize("options", [*REFUSED_DRAFTS, *REFUSED_TREES])
def test_what_does_not_go_together_is_refused_in_one_line(
    door, files, monkeypatch, options, golden
):
    if options in REFUSED_DRAFTS:
        monkeypatch.setattr("draftsmith.drafts.load.load_model", None)
    words = ["decode", "--target", files["target"], *"--prompt a --temperature 1".split()]
    code, out, err = door(*words, *options.format(**files).split())
    (line,) = err.strip().splitlines()
    assert (code, out) == (2, "")
    golden(line)


def test_a_run_is_continued_only_with_the_same_draft_tree_and_datastore(tmp_path, files):
    def identity(*words):
        config, _ = parse(
            DecodeConfig, "decode", ["--target", files["target"], "--prompt", "a", *words]
        )
        identity: list[Any] = load(config)[1].identity()
        return identity

    tree, store = tmp_path / "tree.json", tmp_path / "store.txt"
    tree.write_text("[[0], [1]]")
    store.write_text("The quick brown fox")
    retrieval = ["--proposer", "retrieval", "--datastore", str(store), "--tree", f"static:{tree}"]
    before = identity(*retrieval)
    assert identity(*retrieval, "--fast", "false") == before
    tree.write_text("[[0], [0, 0]]")
    changed_tree = identity(*retrieval)
    store.write_text("The lazy dog")
    found = [before, changed_tree, identity(*retrieval)]
    found += [
        identity(),
        *(identity("--draft", files[name]) for name in ("draft", "medusa", "eagle")),
    ]
    assert len({canonical_json(each) for each in found}) == len(found)
