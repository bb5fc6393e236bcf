"""`draftsmith align`: from prompts and a target to an aligned draft and what it bought, killed on
the way or not.
"""

import json
import re
import shutil
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

import draftsmith as ds
from draftsmith.alignment import choices
from draftsmith.alignment.config import AlignConfig
from draftsmith.alignment.facts import Facts
from draftsmith.alignment.prompt_split import hold_out
from draftsmith.alignment.stage_files import CONFIGS, files_of, relocate
from draftsmith.core import models
from draftsmith.core.errors import InputError
from draftsmith.core.prompts import read_prompts
from draftsmith.core.tokenization import load_tokenizer
from draftsmith.distill.config import DistillConfig
from draftsmith.drafts.draft_vocabulary import FILE, VocabularySize
from draftsmith.train.config import TrainConfig
from tests.distilled import write_rows
from tests.results_made_up import timeless as timeless_results
from tests.terminal import longest_silence_s

CONFIG = Path(__file__).parents[1] / "configs" / "accelerate" / "cpu2.yaml"
SMALL = """--distill.num_samples 2 --distill.max_new_tokens 10 --distill.batch_size 4
    --distill.part_rows 4 --train.steps 6 --train.batch_size 2 --train.accumulation 2
    --train.save_every 2 --train.eval_every 2 --train.heldout_fraction 0.25 --train.optim.lr 1e-3
    --device cpu --dtype float32 --eval.max_new_tokens 6 --eval.speed_prompts 0 --eval.bootstrap 100
    --policy id""".split()
# One way to decode instead of those that are chosen by default, where a test is not about them.
ONE_WAY = ["--eval.tree", "chain:1", "--eval.temperature", "1"]
# As `patch` of `spawn`: what the fixture `undrawn` is to `door`.
UNDRAWN = """import draftsmith.eval.run
draftsmith.eval.run.write_report = lambda results: results.directory
"""


@pytest.fixture(scope="module")
def files(tmp_path_factory):
    """Prompts of two domains: 24 of one, the first of them twice, and 4 of the other."""
    root = tmp_path_factory.mktemp("align")
    own = [{"prompt": f"The quick brown fox jumps {i} times over the lazy dog"} for i in range(23)]
    other = [{"prompt": f"Numbers such as {i} and"} for i in range(4)]
    return {
        "own": write_rows(root / "own.jsonl", *own, own[0]),
        "other": write_rows(root / "other.jsonl", *other),
    }


def rows(path):
    return [json.loads(line) for line in path.read_text().splitlines()]


def timeless(out):
    """Every file that must not depend on how a run went: bytes, and the results without clock
    times.
    """
    found: dict[str, Any] = {}
    for path in sorted(out.rglob("*")):
        name = str(path.relative_to(out))
        if path.is_file() and not name.startswith("eval/") and "/run/" not in name:
            found[name] = path.read_bytes()
    results = json.loads((out / "eval" / "results.json").read_text())
    found["results"] = timeless_results(results)
    return found


@pytest.fixture
def words(files, target_dir, draft_dir, tmp_path):
    """An alignment in small into `out`."""
    named = ["--target", target_dir, "--draft", draft_dir, "--prompts", files["own"]]
    return ["align", *named, "--out", str(tmp_path / "out"), *SMALL]


@pytest.mark.usefixtures("undrawn")
def test_from_prompts_to_a_draft_and_what_it_bought(door, files, words, target_dir, tmp_path):
    out = tmp_path / "out"
    words += [
        "--ood",
        files["other"],
        "--objective",
        "jsd:beta=0.5",
        "ce",
        "--eval.tree",
        "chain:1",
    ]
    printed, err = door.ok(*words, "--json")
    # A fifth of the prompts is held out, no prompt is on both sides, and every row is on one.
    train, heldout = rows(out / "prompts" / "train.jsonl"), rows(out / "prompts" / "heldout.jsonl")
    assert len(train) + len(heldout) == 24
    assert {row["prompt"] for row in heldout}.isdisjoint(row["prompt"] for row in train)
    assert len({row["prompt"] for row in heldout}) == 4
    # Each card has the figures of the evaluation.
    for name in ("jsd", "ce"):
        card = (out / name / "README.md").read_text()
        assert f"compared as `{name}` with `base`" in card and "| other (OOD) | 1.0 | " in card
    # What is printed before the work is short, and each stage begins with its command.
    before, *begun = err.split(f"draftsmith distill --config {out}/distill.yaml\n")
    assert len(begun) == 1 and 1 <= len(before.strip().splitlines()) <= 3
    assert f"{out}: edit " in before and "train-ce.yaml" in before
    # A file has what was given and chosen, with the reasons of what was chosen.
    text = (out / "train-jsd.yaml").read_text()
    assert "steps: 6\n" in text and "  # longest prompt and answer\n" in text
    assert "optim: {lr: 0.001, warmup_steps: 1}  # 6 steps on answers\n" in text
    # Two drafts at equal steps, measured in and out of distribution against the one they started
    # from.
    results = ds.Results.load(out / "eval")
    assert (results.drafts, results.base) == (["base", "jsd", "ce", "lookup"], "base")
    kinds = {suite["name"]: suite["kind"] for suite in results.document["suites"]}
    assert kinds == {"heldout": "id", "other": "ood"}
    records = [json.loads((out / name / "draftsmith.json").read_text()) for name in ("jsd", "ce")]
    assert {record["steps"] for record in records} == {6}
    # The end is that of an evaluation.
    summary = json.loads(printed.splitlines()[-1])
    assert summary["out"] == str(out) and summary["base"] == "base"
    assert f"report: {out}/eval/report.html" in printed
    # The same command finds all done.
    made = timeless(out)
    door.ok(*words, "--json")
    assert timeless(out) == made
    # What contradicts the run that was begun is refused.
    said = door.refused(*words, "--distill.temperature", 0.5)
    assert "distill.temperature" in said and "choose another --out" in said


@pytest.mark.usefixtures("undrawn")
def test_an_edited_file_is_obeyed_and_one_that_ran_asks_for_another_place(door, words, tmp_path):
    out = tmp_path / "out"
    words += ONE_WAY
    printed, _ = door.ok(*words, "--print_config")
    files = [out / f"{name}.yaml" for name in ("distill", "train", "eval")]
    assert printed.split() == list(map(str, files)) and not (out / "distilled").exists()
    file = out / "train.yaml"
    file.write_text(file.read_text().replace("steps: 6", "steps: 4"))
    door.ok(*words)
    assert json.loads((out / "jsd" / "draftsmith.json").read_text())["steps"] == 4
    # An evaluation is made again; a draft stays, unless it is asked for.
    evaluation = out / "eval.yaml"
    evaluation.write_text(evaluation.read_text().replace("bootstrap: 100", "bootstrap: 120"))
    door.ok(*words)
    assert ds.Results.load(out / "eval").document["config"]["bootstrap"] == 120
    file.write_text(file.read_text().replace("steps: 4", "steps: 5"))
    said = door.refused(*words)
    assert f"{file}: has changed since it ran: " in said and "--fresh train" in said
    # What no run made stays.
    (out / "mine").mkdir()
    text = evaluation.read_text()
    evaluation.write_text(text.replace(f"{out}/eval\n", f"{out}/mine\n"))
    door.ok(*words, "--fresh", "train", "--print_config")
    assert (out / "jsd" / "draftsmith.json").exists()
    (out / "mine" / "notes").touch()
    door.ok(*words, "--fresh", "train")
    assert (out / "mine" / "notes").exists()
    assert "--fresh" not in json.loads((out / "run.json").read_text())["command"]
    evaluation.write_text(text)
    assert json.loads((out / "jsd" / "draftsmith.json").read_text())["steps"] == 5
    # Another place keeps what is there.
    file.write_text(file.read_text().replace(f"{out}/jsd\n", f"{out}/longer\n"))
    evaluation.write_text(evaluation.read_text().replace(f"{out}/jsd", f"{out}/longer"))
    door.ok(*words)
    assert "compared as `jsd` with `base`" in (out / "longer" / "README.md").read_text()
    # A key that its command does not have is named with its line.
    file.write_text(file.read_text().replace("steps: 5", "stepz: 5"))
    assert re.search(
        r"train.yaml:\d+: stepz: unknown key; did you mean steps?", door.refused(*words)
    )


@pytest.mark.slow
@pytest.mark.usefixtures("undrawn")
def test_commands_on_the_files_do_what_align_does(door, words, tmp_path):
    out = tmp_path / "out"
    words += ONE_WAY
    door.ok(*words)
    whole = timeless(out)
    shutil.rmtree(out)
    door.ok(*words, "--print_config")
    for name in ("distill", "train", "eval"):
        door.ok(name, "--config", out / f"{name}.yaml")
    weights = out / "jsd" / "model.safetensors"
    assert weights.read_bytes() == whole["jsd/model.safetensors"]
    door.ok(*words)
    assert timeless(out)["results"] == whole["results"]


@pytest.mark.slow
@pytest.mark.usefixtures("undrawn")
def test_the_target_is_loaded_once_before_the_stages_and_once_in_each(
    door, words, target_dir, monkeypatch
):
    loads = []
    load = models.load_model

    def counted(name, *more, **options):
        loads.append(name)
        return load(name, *more, **options)

    for module in ("core.models", "drafts.load", "train.training_run", "distill.engines.hf"):
        monkeypatch.setattr(f"draftsmith.{module}.load_model", counted, raising=False)
    door.ok(*words, *ONE_WAY, "--policy", "balanced", "--print_config")
    assert loads.count(target_dir) == 1
    door.ok(*words, *ONE_WAY, "--policy", "balanced")
    assert loads.count(target_dir) == 5  # distill, general, train, eval


@pytest.mark.slow
@pytest.mark.usefixtures("undrawn")
def test_a_run_goes_on_where_it_was_moved_to(door, files, target_dir, draft_dir, tmp_path):
    before, after = tmp_path / "before", tmp_path / "after"
    shutil.copytree(target_dir, before / "target")
    shutil.copytree(draft_dir, before / "draft")
    shutil.copy(files["own"], before / "own.jsonl")
    shutil.copy(files["other"], before / "other.jsonl")

    def words(place):
        named = ["--target", place / "target", "--draft", place / "draft"]
        named += ["--prompts", place / "own.jsonl", "--out", place / "out"]
        named += ["--ood", place / "other.jsonl"]
        return [*named, *SMALL, *ONE_WAY]

    def found():
        """All files, as if they had been made where they are now."""
        made = timeless(after / "out")
        made["results"] = json.dumps(made["results"]).encode()
        moved = [data.replace(bytes(before), bytes(after)) for data in made.values()]
        # Checksums of records cover the paths in them.
        return [re.sub(rb'"checksum": ".*"', b"", data) for data in moved]

    door.ok("align", *words(before))
    before.rename(after)
    weights = after / "out" / "jsd" / "model.safetensors"
    whole, written = found(), weights.stat().st_mtime_ns
    door.ok("align", *words(after))
    assert found() == whole and weights.stat().st_mtime_ns == written
    # And once more, back again.
    after.rename(before)
    door.ok("align", *words(before))
    before.rename(after)
    assert found() == whole and weights.stat().st_mtime_ns == written
    # What is refused leaves the files as they are.
    file = after / "out" / "eval.yaml"
    text = file.read_text()
    door.refused("align", *words(after), "--ood", f"more={files['other']}")
    assert file.read_text() == text
    door.ok("align", *words(after))
    # Other prompts are told by their content.
    own = after / "own.jsonl"
    own.write_text(own.read_text().replace("quick", "slow"))
    assert "prompts changed since" in door.refused("align", *words(after))


def test_names_stay_where_a_moved_draft_was_called_like_one(tmp_path):
    config = config_of(draft=r"./base\1", kind=None, policy="id", out=str(tmp_path))
    for file in files_of(config).values():
        file.write_text("target: t\ndraft: [base=base, jsd=o/jsd]\nout: o/eval\n")
    relocate(config, {"inputs": {"target": "t", "draft": "base", "id": [], "out": "o"}})
    assert file.read_text() == (
        f"target: t\ndraft: [base=./base\\1, jsd={tmp_path}/jsd]\nout: {tmp_path}/eval\n"
    )


@pytest.mark.slow
@pytest.mark.usefixtures("undrawn")
def test_deleted_answers_are_written_again_and_the_draft_of_them_stays(door, words, tmp_path):
    words += ONE_WAY
    door.ok(*words)
    whole = timeless(tmp_path / "out")
    weights = tmp_path / "out" / "jsd" / "model.safetensors"
    written = weights.stat().st_mtime_ns
    shutil.rmtree(tmp_path / "out" / "distilled")
    door.ok(*words)
    assert timeless(tmp_path / "out") == whole and weights.stat().st_mtime_ns == written


@pytest.mark.slow
def test_something_moves_in_stages_that_take_long(words):
    program = f"""import sys, time
import draftsmith.alignment.facts as facts, draftsmith.train.loop as loop
from draftsmith.__main__ import main
def slow(module, name):
    work = getattr(module, name)
    def taking(*words, **options):
        time.sleep(10)
        return work(*words, **options)
    setattr(module, name, taking)
slow(facts, "load_models")
slow(loop, "evaluate")
print("begins", flush=True)
sys.exit(main({list(map(str, [*words, *ONE_WAY, "--train.eval_every", 6]))}))
"""
    assert longest_silence_s(UNDRAWN + program) < 8


# Kills within a stage are tests of the stages. These come when the second file is written, and when
# the second draft is to be trained.
KILL = """
import os, signal
import draftsmith.alignment.{module} as module
work, calls = module.{name}, []
def dying(*words, **more):
    calls.append(1)
    if len(calls) == 2:
        os.kill(os.getpid(), signal.SIGKILL)
    return work(*words, **more)
module.{name} = dying
"""


@pytest.mark.slow
def test_killed_between_stages_ends_as_if_it_had_not_been(
    spawn, files, target_dir, draft_dir, tmp_path
):
    words = ["align", "--target", target_dir, "--draft", draft_dir, "--prompts", files["own"]]
    words += ["--out", "out", *SMALL, *ONE_WAY]
    words += ["--objective", "ce", "jsd:beta=0.5", "--ood", f"other={files['other']}"]
    killed, whole = tmp_path / "killed", tmp_path / "whole"
    killed.mkdir()
    whole.mkdir()
    writing = KILL.format(module="stage_files", name="write_text_atomic")
    training = KILL.format(module="stages", name="train")
    for place, patch, expected in (
        (whole, "", 0),
        (killed, writing, -9),
        (killed, training, -9),
        (killed, "", 0),
    ):
        spawn(*words, cwd=place, patch=UNDRAWN + patch).wait(expected)
    assert timeless(killed / "out") == timeless(whole / "out")


@pytest.mark.slow(25)
def test_all_stages_on_two_processes(spawn, launch, files, target_dir, draft_dir, tmp_path):
    """The answers are those of one process, and both train a draft."""
    words = ["align", "--target", target_dir, "--draft", draft_dir, "--prompts", files["own"]]
    words += [*SMALL, *ONE_WAY, "--policy", "balanced", "--ood", f"other={files['other']}", "--out"]
    done = launch(["--config_file", CONFIG, "-m", "draftsmith"], *words, "two")
    assert done.stdout.count("report: ") == 1 and done.stderr.count("draftsmith eval") == 1
    two, one = tmp_path / "two", tmp_path / "one"
    spawn(*words, "one", cwd=tmp_path, patch=UNDRAWN).wait()
    parts = sorted(path.name for path in (one / "distilled").glob("part-*.parquet"))
    assert len(parts) > 2
    for name in parts:
        assert (two / "distilled" / name).read_bytes() == (one / "distilled" / name).read_bytes()
    record = json.loads((two / "jsd-balanced" / "draftsmith.json").read_text())
    assert (record["processes"], record["sharing"], record["steps"]) == (2, "ddp", 6)
    assert ds.Results.load(two / "eval").drafts == ["base", "jsd-balanced", "lookup", "both"]


@pytest.mark.slow
@pytest.mark.usefixtures("undrawn")
def test_without_a_draft_a_fresh_head_is_trained(door, files, target_dir, tmp_path):
    out = tmp_path / "out"
    words = ["--target", target_dir, "--prompts", files["own"], "--out", out, *SMALL]
    door.ok("align", *words, "--policy", "balanced")
    record = json.loads((out / "jsd-balanced" / "draftsmith.json").read_text())
    assert (record["kind"], record["steps"]) == ("eagle3", 6)
    assert record["config"]["replay"] == [str(out / "general")]
    assert not (out / "features").exists()


@pytest.mark.slow
@pytest.mark.usefixtures("undrawn")
def test_a_balanced_draft_replays_and_is_compared_with_a_plain_one(door, words, tmp_path):
    out = tmp_path / "out"
    words += [*ONE_WAY, "--policy", "balanced", "--plain", "true", "--train.steps", 12]
    door.ok(*words)
    # General text is replayed; the plain draft beside it is trained alike but for that.
    kept, plain = (
        json.loads((out / name / "draftsmith.json").read_text())["config"]
        for name in ("jsd-balanced", "jsd-plain")
    )
    assert (kept["replay"], kept["replay_fraction"]) == ([str(out / "general")], 0.5)
    differ = {key for key in kept if kept[key] != plain[key]}
    assert differ == {"out", "replay", "replay_fraction"}
    assert kept["steps"] == 12
    manifest = json.loads((out / "general" / "manifest.json").read_text())
    written = manifest["config"]
    assert (written["prompts"][:6], written["temperature"]) == ("token:", 1.0)
    assert ds.Results.load(out / "eval").drafts == ["base", "jsd-plain", "jsd-balanced", "lookup"]


@pytest.mark.slow
@pytest.mark.usefixtures("undrawn")
def test_a_draft_takes_a_part_of_the_vocabulary(door, words, tmp_path):
    out = tmp_path / "out"
    words += [*ONE_WAY, "--train.draft_vocab_size", 120]
    door.ok(*words)
    record = json.loads((out / "jsd" / "draftsmith.json").read_text())
    assert record["config"]["draft_vocab_size"] == 120
    assert (out / "jsd" / FILE).is_file()


def test_the_help_is_short_and_points_at_the_commands_of_the_stages(door):
    for words in ("--help=all", "--help"):
        printed, _ = door.ok("align", words)
        for name in ("distill", "train", "eval"):
            assert f"--{name}.KEY VALUE" in printed and f"`draftsmith {name}`" in printed
    assert len(re.findall(r"^  -", printed, re.MULTILINE)) <= 20


def facts(**changed):
    usual: dict[str, Any] = {
        "chats": False,
        "own_chats": False,
        "split": {},
        "prompts": 1000,
        "longest_prompt": 32,
        "context": 2048,
        "gpu_bytes": 0,
        "cache_bytes": 131_072,
        "draft_parameters": 68_000_000,
        "temperature": 1.0,
    }
    return Facts(**usual | changed)


CARD: dict[str, Any] = {"gpu_bytes": 80 << 30}


def chosen(config, **changed):
    """The options of every stage."""
    found: dict[str, Any] = {}
    for name in files_of(config):
        made = choices.choose(name, config, facts(**changed), found.get("distill"))
        found[name] = CONFIGS[name.partition("-")[0]](**made.values)
        # What was chosen is there, and is chosen once.
        again = choices.Choices(made.values)
        assert all(again.choose(key, None, "") is not None for key in made.reasons)
    return found


def config_of(**given):
    return AlignConfig(**{"target": "t", "prompts": "p", "out": "o", "kind": "eagle3"} | given)


def test_a_fifth_of_what_prompts_ask_is_held_out_and_not_of_their_rows(target_dir, tmp_path):
    asked = [{"prompt": f"The quick {number % 12} brown"} for number in range(80)]
    source = write_rows(tmp_path / "p.jsonl", *asked)
    read = read_prompts(source, load_tokenizer(target_dir))
    for most, held in ((64, 2), (1, 1)):
        split = hold_out(source, read, most)
        assert len({row["prompt"] for row in split["heldout"]}) == held
        assert len(split["train"]) + len(split["heldout"]) == 80
    with pytest.raises(InputError):
        chosen(config_of(), prompts=1)


def test_a_gpu_answers_as_many_prompts_together_as_its_memory_holds():
    def together(**changed):
        distill: DistillConfig = chosen(config_of(), **changed)["distill"]
        return distill.batch_size

    assert together() == 64
    large = together(**CARD)
    assert 64 < large < 512
    # An eighth of the memory, with prompts and answers as long as they may be.
    longest = chosen(config_of(), **CARD)["train"].max_length
    assert large * 131_072 * longest <= 10 << 30
    assert together(**CARD, cache_bytes=23_040) == 512
    assert together(gpu_bytes=1 << 30) == 16


def test_choices_follow_what_is_given():
    usual = chosen(config_of())
    train: TrainConfig = usual["train"]
    assert usual["eval"].temperature == [0.0, 1.0] and usual["distill"].max_prompts == 1000
    # Every draft replays what the target writes by itself: chats, if chats are served.
    assert (train.replay, train.replay_fraction) == (["o/general"], 0.5)
    assert usual["general"].prompts == "token:2000"
    chats = chosen(config_of(), chats=True, own_chats=True)
    assert chats["general"].prompts == "magpie:2000"
    # A larger draft takes smaller batches, in as large steps. Small steps pay on a CPU.
    large = chosen(config_of(), draft_parameters=2_600_000_000, **CARD)["train"]
    assert (large.batch_size, large.accumulation) == (2, 16)
    assert (train.batch_size, train.accumulation) == (4, 1)
    # Nothing is longer than the context.
    assert chosen(config_of(), context=96)["distill"].max_new_tokens == 48
    assert chosen(config_of(), context=96, longest_prompt=90)["train"].max_length == 96
    # Chats that are held out are also asked under other templates.
    assert chats["eval"].ood == ["heldout-template=template:o/prompts/heldout.jsonl"]
    assert usual["eval"].ood == []
    # Few prompts are answered more often.
    assert chosen(config_of(), prompts=20)["distill"].num_samples == 4
    assert chosen(config_of(), prompts=20_000, **CARD)["distill"].num_samples == 1
    # A fresh EAGLE-3 head drafts a part of the vocabulary.
    drafted = VocabularySize(tokens=8192, missing=0.01, cost=0.06)
    assert chosen(config_of(), drafted=drafted)["train"].draft_vocab_size == 8192
    # Steps are those that every training takes, with replay or without; what depends on them goes
    # by those on answers.
    for steps, every in ((60, 10), (200, 33), (6000, 200)):
        given = config_of(train={"steps": steps}, distill={"num_samples": 4})
        balanced = chosen(given)["train"]
        assert (balanced.steps, balanced.eval_every) == (steps, every)
        assert chosen(replace(given, policy="id"))["train"].steps == steps
    assert 2 * chosen(config_of(policy="id"))["train"].steps == train.steps
    assert 3 * chosen(config_of(train={"epochs": 1}))["train"].steps == train.steps
    assert chosen(config_of(), temperature=0.0)["eval"].temperature == [0.0]


def test_options_of_a_stage_reach_it(draft_dir):
    given = {"optim": {"warmup_steps": 3}, "batch_size": 2, "tracker": "wandb"}
    config = config_of(draft=draft_dir, kind=None, plain=True, train=given)
    found = chosen(config)
    kept, plain = found["train-jsd-balanced"], found["train-jsd-plain"]
    assert (kept.optim.warmup_steps, kept.batch_size, kept.accumulation) == (3, 2, 2)
    assert kept.tracker == "wandb" and kept.kind == "lm"
    assert (plain.replay, plain.replay_fraction, plain.optim) == ([], 0.0, kept.optim)
    # Where no steps are given, both are trained on as many answers.
    assert kept.steps == 2 * plain.steps
    found = chosen(replace(config, train=given | {"steps": 60}))
    assert {found[name].steps for name in ("train-jsd-plain", "train-jsd-balanced")} == {60}
    with pytest.raises(InputError, match="must be greater than or equal to 1"):
        config_of(train={"batch_size": 0})
    served = {"engine": "openai", "endpoint": ["http://h/v1"], "temperatures": ["0:0.5", "1:0.5"]}
    found = chosen(config_of(distill=served, train={"replay": ["more"], "steps": None}))
    assert found["distill"].temperature is None and found["train"].steps is not None
    assert (found["general"].engine, found["general"].endpoint) == ("openai", ["http://h/v1"])
    assert found["train"].replay == ["o/general", "more"]
    own = {"replay": ["more"], "replay_fraction": 0.2}
    kept = chosen(config_of(policy="id", train=own))["train"]
    assert (kept.replay, kept.replay_fraction) == (["more"], 0.2)


@pytest.mark.parametrize(
    ("given", "said"),
    [
        ({"kind": "eagle4"}, "eagle3"),
        ({"kind": "eagle", "draft": "d"}, "draft: give one of --draft, --init and --kind"),
        ({"ood": ["a=https://h/x.jsonl?sig=1"]}, "ood: no file keeps the secrets of a URL"),
        ({"train": {"objective": "ce"}}, "train.objective: is set by align"),
    ],
)
def test_what_cannot_be_is_refused(given, said):
    with pytest.raises(InputError, match=said):
        config_of(**given)


def test_names_of_drafts_say_their_objective():
    def names(*objectives):
        config = config_of(objective=list(objectives), policy="id")
        return [draft.name for draft in config.trained()]

    assert names("ce", "jsd:beta=0.5") == ["ce", "jsd"]
    assert names("jsd:beta=0.5", "jsd:beta=0.1") == ["jsd-beta-0.5", "jsd-beta-0.1"]
    assert names("0.9*fkl+0.1*ce") == ["0.9-fkl-0.1-ce"]


@pytest.mark.slow
@pytest.mark.usefixtures("undrawn")
def test_init_makes_the_draft_to_start_from_once(door, files, target_dir, tmp_path):
    out = tmp_path / "out"
    words = ["align", "--target", target_dir, "--init", "prune", "--prompts", files["own"]]
    words += ["--out", out, *SMALL, *ONE_WAY]
    door.ok(*words)
    assert f"base={out}/start" in (out / "eval.yaml").read_text()
    weights = (out / "start" / "model.safetensors").read_bytes()
    door.ok(*words)
    assert (out / "start" / "model.safetensors").read_bytes() == weights


def test_a_chat_and_its_first_question_are_on_one_side(target_dir, tmp_path):
    tokenizer = load_tokenizer(target_dir)
    tokenizer.chat_template = "{% for m in messages %}[{{ m.role }}]{{ m.content }}{% endfor %}"
    chats = []
    for number in range(10):
        first = [{"role": "user", "content": f"The quick {number}"}]
        answered = [*first, {"role": "assistant", "content": "fox"}]
        chats += [first, [*answered, {"role": "user", "content": "lazy"}]]
    source = write_rows(tmp_path / "p.jsonl", *({"messages": chat} for chat in chats))
    sides = []
    for day in ("26", "27"):
        read = read_prompts(source, tokenizer)
        sides.append(hold_out(source, read, 9)["heldout"])
        tokenizer.chat_template = day + str(tokenizer.chat_template)
    held: list[Any] = [row["messages"] for row in sides[0]]
    assert [row["messages"] for row in sides[1]] == held
    assert sorted(len(chat) for chat in held) == [1, 1, 3, 3]
    assert {chat[0]["content"] for chat in held if len(chat) == 1} == {
        chat[0]["content"] for chat in held if len(chat) == 3
    }


def test_turns_of_one_chat_cannot_be_divided(target_dir, tmp_path):
    tokenizer = load_tokenizer(target_dir)
    tokenizer.chat_template = "{% for m in messages %}[{{ m.role }}]{{ m.content }}{% endfor %}"
    chat = [
        {"role": ("user", "assistant")[turn % 2], "content": f"dog {turn}"} for turn in range(5)
    ]
    source = write_rows(tmp_path / "p.jsonl", *({"messages": chat[:end]} for end in (1, 3, 5)))
    with pytest.raises(InputError, match=r"its prompts ask the same, or are turns of one chat"):
        hold_out(source, read_prompts(source, tokenizer), 1)
