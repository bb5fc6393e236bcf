"""`draftsmith align`: from prompts and a target to an aligned draft and what it bought, killed on
the way or not.
"""

import json
import random
import re
import shutil
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import yaml
from transformers import AutoConfig, AutoModelForCausalLM

import draftsmith as ds
from draftsmith.alignment import stages, weights_type
from draftsmith.alignment.choices import complete
from draftsmith.alignment.config import (
    AlignConfig,
    DistillChoices,
    EvalChoices,
    OptimChoices,
    TrainChoices,
)
from draftsmith.alignment.engines import in_words, support_of
from draftsmith.alignment.facts import Facts, load
from draftsmith.alignment.forecast import StepTimes
from draftsmith.alignment.prompt_split import check_unchanged, hold_out
from draftsmith.alignment.reuse import as_earlier, check_same, earlier_run
from draftsmith.alignment.stage_configs import eval_config, general_config, stages_of, train_config
from draftsmith.alignment.stages import _resumed, _write
from draftsmith.core.errors import InputError
from draftsmith.core.models import fingerprint, load_model, read_per_token
from draftsmith.core.prompts import read_prompts
from draftsmith.core.settings import ResolvedSampling, Sampling
from draftsmith.core.tokenization import load_tokenizer
from draftsmith.directory_status import status
from draftsmith.drafts.draft_vocabulary import VocabularySize
from draftsmith.drafts.engine_commands import Support
from tests.conftest import tiny_tokenizer
from tests.distilled import write_rows
from tests.results_made_up import timeless as timeless_results
from tests.tiny_models import tiny_llama
from tests.train_laws import close

CONFIGS = Path(__file__).parents[1] / "configs" / "accelerate"
SMALL: list[object] = [
    "--distill.num_samples",
    2,
    "--distill.max_new_tokens",
    10,
    "--distill.batch_size",
    4,
]
SMALL += ["--distill.part_rows", 4]
SMALL += [
    "--train.steps",
    6,
    "--train.rows_per_step",
    4,
    "--train.batch_size",
    2,
    "--train.save_every",
    2,
]
SMALL += [
    "--train.eval_every",
    2,
    "--train.heldout_fraction",
    0.25,
    "--train.optim.lr",
    1e-3,
    "--device",
    "cpu",
    "--dtype",
    "fp32",
]
SMALL += [
    "--eval.max_new_tokens",
    6,
    "--eval.speed_prompts",
    0,
    "--eval.bootstrap",
    100,
    "--policy",
    "id",
]


# One way to decode instead of those that are chosen by default, where a test is not about them.
ONE_WAY: list[object] = ["--eval.tree", "chain:1", "--eval.temperature", 1]
# As `patch` of `spawn`: what the fixture `undrawn` is to `door`.
UNDRAWN = """import draftsmith.eval.evaluate
draftsmith.eval.evaluate.write_report = lambda results: results.directory
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


COMMAND = "draftsmith align --config o.yaml"


def rows(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_text().splitlines()]


def timeless(out: Path) -> dict[str, Any]:
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


@pytest.mark.usefixtures("undrawn")
def test_from_prompts_to_a_draft_and_what_it_bought(door, files, target_dir, draft_dir, tmp_path):
    out = tmp_path / "out"
    words = [
        "--target",
        target_dir,
        "--draft",
        draft_dir,
        "--prompts",
        files["own"],
        "--out",
        out,
        *SMALL,
    ]
    words += [
        "--ood",
        files["other"],
        "--objective",
        "jsd:beta=0.5",
        "ce",
        "--eval.tree",
        "chain:1",
    ]
    printed, err = door.ok("align", *words, "--json")
    # A fifth of the prompts is held out, no prompt is on both sides, and every row is on one.
    train, heldout = rows(out / "prompts" / "train.jsonl"), rows(out / "prompts" / "heldout.jsonl")
    assert len(train) + len(heldout) == 24
    assert {row["prompt"] for row in heldout}.isdisjoint(row["prompt"] for row in train)
    assert len({row["prompt"] for row in heldout}) == 4
    # Each card has the figures of the evaluation.
    for name in ("jsd", "ce"):
        card = (out / name / "README.md").read_text()
        assert f"compared as `{name}` with `base`" in card and "| other (OOD) | 1.0 | " in card
    # A file has every choice with its reason and leaves nothing open; what is printed before the
    # work is short.
    text = (out / "align.yaml").read_text()
    chosen = [line.removeprefix("#   ") for line in text.splitlines() if line.startswith("#   ")]
    written = yaml.safe_load(text)
    for line in chosen:
        value: Any = written
        for key in line.split()[0].split("."):
            value = value[key]
        assert value is not None and line.endswith(")"), line
    before_work = err.partition("1/3 distil")[0].strip().splitlines()
    before_work = [line for line in before_work if line and not line.startswith("align: ")]
    assert "prompts: 4 are held out to measure on, which shows that the road works" in err
    assert "6 steps" in before_work[-3] and before_work[-2].startswith("pays: from ")
    forecast = [line for line in before_work if line.startswith("expected at most: ")]
    assert len(forecast) == 1 and "(--train.steps), evaluate " in forecast[0]
    assert "engines: such a draft runs in transformers, vllm" in err
    assert f"{len(chosen)} chosen" in before_work[-1] and len(before_work) <= 8
    named = {line.split()[0] for line in chosen}
    assert {
        "heldout_prompts",
        "distill.temperature",
        "train.max_length",
        "train.optim.warmup_steps",
    } <= named
    assert not named & {"train.steps", "distill.num_samples", "train.optim.lr"}
    for section in ("distill", "train", "eval"):
        assert None not in written[section].values() and [] not in written[section].values()
    # Two drafts at equal steps, measured in and out of distribution against the one they started
    # from.
    results = ds.Results.load(out / "eval")
    assert (results.drafts, results.base) == (["base", "jsd", "ce", "lookup"], "base")
    assert {name: results.kind(name) for name in results.domains()} == {"own": "id", "other": "ood"}
    assert {
        json.loads((out / name / "draftsmith.json").read_text())["steps"] for name in ("jsd", "ce")
    } == {6}
    summary = json.loads(printed.splitlines()[-1])
    assert summary["best"] in ("jsd", "ce")
    assert summary["id"]["alpha"]["value"] == results.alpha(summary["best"], "id")["value"]
    assert (
        summary["ood"]["tau"]["value"]
        == results.tau(summary["best"], "ood", tree=summary["tree"])["value"]
    )
    assert "in distribution: alpha " in printed and "out of distribution: alpha " in printed
    # The command that it ends with decodes with the checkpoint that it names.
    assert f"with this draft alone: {summary['decode']}" in printed
    decode = [word.strip("'") for word in summary["decode"].split()[1:]]
    assert decode[:5] == ["decode", "--target", target_dir, "--draft", str(out / summary["best"])]
    assert door(*decode, "--max_new_tokens", 4)[0] == 0
    # The same command finds all done; align.yaml asks for the same again. No clock is kept.
    assert not (out / "step_times.json").exists()
    before = timeless(out)
    assert door("align", *words)[0] == 0
    assert timeless(out) == before
    # What contradicts the run that was begun is refused.
    assert "distill.temperature is 1.0, now it is 0.5" in door.refused(
        "align", *words, "--distill.temperature", 0.5
    )


@pytest.mark.usefixtures("undrawn")
def test_a_draft_that_cannot_pay_is_not_evaluated_for_long(
    door, target_dir, draft_dir, tmp_path, monkeypatch
):
    """Nor decoded; and the type of weights that was faster when a run began is kept."""
    out = tmp_path / "out"
    timed = ("bfloat16", "dtype: bfloat16; float32 takes 2.00 times as long here.")
    monkeypatch.setattr(weights_type, "faster_type", lambda *_: timed)
    times = StepTimes(1.0, 1.0, 1.0, 1.0, 1.0, pays_from=50.0)
    monkeypatch.setattr(stages, "time_steps", lambda *_: times)
    target = tmp_path / "target"
    shutil.copytree(target_dir, target)
    load_model(target_dir, device="cpu", dtype="bfloat16").save_pretrained(target)
    words: list[object] = ["--target", target, "--draft", draft_dir, "--out", out]
    # Prompts that differ, so that the few that are measured have intervals.
    drawn = random.Random(0)
    texts = ["".join(drawn.choices("abcdefghij ", k=30)) for _ in range(24)]
    prompts = write_rows(tmp_path / "own.jsonl", *({"prompt": text} for text in texts))
    words += ["--prompts", prompts, *SMALL[: SMALL.index("--dtype")], "--policy", "id"]
    words += ["--heldout_prompts", 8, "--eval.bootstrap", 100, "--eval.max_new_tokens", 6]
    printed, err = door.ok("align", *words)
    assert (
        timed[1] in err
        and "and the cheapest tree needs 50.00 here\nonly acceptance is measured" in err
    )
    assert "Do not ship: jsd cannot pay here: needs 50.00 tokens per target call, has" in printed
    assert "How many more steps of training that takes is unknown." in printed
    assert "serve: none of them" in printed and "--time_again" not in printed
    results = ds.Results.load(out / "eval")
    assert not results.methods and not results.document["conditions"]
    written = yaml.safe_load((out / "align.yaml").read_text())
    assert written["dtype"] == "bfloat16"
    assert (written["eval"]["tree"], written["eval"]["pays_from"]) == (["none"], 50.0)
    monkeypatch.delattr(weights_type, "faster_type")
    before = timeless(out)
    door.ok("align", *words)
    assert timeless(out) == before
    assert 'dtype is "bfloat16", now it is' in door.refused("align", *words, "--dtype", "fp32")


@pytest.mark.slow
@pytest.mark.usefixtures("undrawn")
def test_the_file_of_a_run_is_run_again_by_hand(
    door, files, target_dir, draft_dir, tmp_path, monkeypatch
):
    words = ["--target", target_dir, "--draft", draft_dir, "--prompts", files["own"], *SMALL]
    found = []
    for name, given in (("one", words), ("two", ["--config", "../one/out/align.yaml"])):
        (tmp_path / name).mkdir()
        monkeypatch.chdir(tmp_path / name)
        _, err = door.ok("align", *given, "--out", "out")
        assert (" 0 chosen with" in err) == (name == "two")
        found.append(timeless(tmp_path / name / "out"))
    del (
        found[0]["align.yaml"],
        found[1]["align.yaml"],
    )  # the reasons behind choices are in the first alone
    assert found[0] == found[1]
    # Edited in place it goes on with what is still true, and says which part is not.
    file = Path("out/align.yaml")
    file.write_text(file.read_text().replace("bootstrap: 100", "bootstrap: 120"))
    assert door("align", "--config", file)[0] == 0
    assert json.loads(Path("out/eval/results.json").read_text())["config"]["bootstrap"] == 120
    file.write_text(file.read_text().replace("steps: 6", "steps: 8"))
    said = "was trained for 6 steps and is finished; train longer: draftsmith train "
    assert said in door.refused("align", "--config", file)


def test_a_run_that_has_begun_takes_fewer_steps_and_another_evaluation(tmp_path, capsys):
    file = tmp_path / "align.yaml"
    usual = AlignConfig(target="t", draft="d", prompts="p", out=str(tmp_path))
    begun, chosen = complete(usual, facts())
    _write(file, "# Chosen:\n" + "".join(f"#   {line}\n" for line in chosen), begun)
    shorter = TrainChoices(steps=begun.train.steps - 1)
    other = EvalChoices(max_prompts=7, tree=["chain:1"])
    given = replace(usual, train=shorter, eval=other)
    whole = _resumed(given, file, COMMAND)
    assert (whole.train, whole.eval.max_prompts) == (replace(begun.train, steps=shorter.steps), 7)
    said = f"train.steps: {shorter.steps} in place of {begun.train.steps}; "
    assert said in capsys.readouterr().err
    # It is kept, and what was chosen is no longer said of it.
    text = file.read_text()
    assert _resumed(usual, file, COMMAND) == whole == _resumed(given, file, COMMAND)
    assert f"# Begun by: {COMMAND}\n" in text
    assert "#   train.steps" not in text and "#   distill.max_prompts" in text
    # More steps, an evaluation that has begun, and all that answers depend on: another --out.
    (tmp_path / "eval").mkdir()
    for changed in (
        {"train": TrainChoices(steps=begun.train.steps)},
        {"eval": EvalChoices(max_prompts=8)},
        {"distill": DistillChoices(temperature=0.5)},
    ):
        hint = f"name another --out, to which --config {file} gives the other options"
        with pytest.raises(InputError, match=re.escape(hint)):
            _resumed(replace(usual, **changed), file, COMMAND)
    assert file.read_text() == text


@pytest.mark.slow
@pytest.mark.usefixtures("undrawn")
def test_a_run_goes_on_where_it_was_moved_to(door, files, target_dir, draft_dir, tmp_path):
    before, after = tmp_path / "before", tmp_path / "after"
    shutil.copytree(target_dir, before / "target")
    shutil.copytree(draft_dir, before / "draft")
    shutil.copy(files["own"], before / "own.jsonl")

    def words(place: Path) -> list[object]:
        named = ["--target", place / "target", "--draft", place / "draft"]
        named += ["--prompts", place / "own.jsonl", "--out", place / "out"]
        return [*named, *SMALL, *ONE_WAY]

    def found() -> list[bytes]:
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
    _, err = door.ok("align", *words(after))
    assert "continuing what was begun here" in err
    assert found() == whole and weights.stat().st_mtime_ns == written
    # Other prompts are told by their content.
    own = after / "own.jsonl"
    own.write_text(own.read_text().replace("quick", "slow"))
    assert "has changed since this run began" in door.refused("align", *words(after))


@pytest.mark.slow
@pytest.mark.usefixtures("undrawn")
def test_deleted_answers_are_written_again_and_the_draft_of_them_stays(
    door, files, target_dir, draft_dir, tmp_path
):
    words = ["--target", target_dir, "--draft", draft_dir, "--prompts", files["own"]]
    words += ["--out", tmp_path / "out", *SMALL, *ONE_WAY]
    door.ok("align", *words)
    whole = timeless(tmp_path / "out")
    weights = tmp_path / "out" / "jsd" / "model.safetensors"
    written = weights.stat().st_mtime_ns
    shutil.rmtree(tmp_path / "out" / "distilled")
    door.ok("align", *words)
    assert timeless(tmp_path / "out") == whole and weights.stat().st_mtime_ns == written


# Kills within a stage are tests of the stages; this one comes when the second draft is to be
# trained.
KILL = """
import os, signal
import draftsmith.alignment.stages as module
train, calls = module.train, []
def dying(*words, **more):
    calls.append(1)
    if len(calls) == 2:
        os.kill(os.getpid(), signal.SIGKILL)
    return train(*words, **more)
module.train = dying
"""


@pytest.mark.slow
def test_killed_between_stages_ends_as_if_it_had_not_been(
    spawn, files, target_dir, draft_dir, tmp_path
):
    words = [
        "align",
        "--target",
        target_dir,
        "--draft",
        draft_dir,
        "--prompts",
        files["own"],
        "--out",
        "out",
        *SMALL,
    ]
    words += ["--objective", "ce", "jsd:beta=0.5", "--ood", f"other={files['other']}", *ONE_WAY]
    killed, whole = tmp_path / "killed", tmp_path / "whole"
    killed.mkdir()
    whole.mkdir()
    for place, patch, expected in ((whole, "", 0), (killed, KILL, -9), (killed, "", 0)):
        spawn(*words, cwd=place, patch=UNDRAWN + patch).wait(expected)
    assert timeless(killed / "out") == timeless(whole / "out")


@pytest.mark.slow(25)
def test_all_stages_on_two_processes(spawn, launch, files, target_dir, draft_dir, tmp_path):
    """The answers are those of one process, and both train a draft."""
    words = [
        "align",
        "--target",
        target_dir,
        "--draft",
        draft_dir,
        "--prompts",
        files["own"],
        *SMALL,
        *ONE_WAY,
    ]
    words += ["--policy", "balanced", "--ood", f"other={files['other']}", "--out"]
    done = launch(["--config_file", CONFIGS / "cpu2.yaml", "-m", "draftsmith"], *words, "two")
    assert (
        done.stdout.count("with this draft alone: ") == 1 and done.stderr.count("3/3 evaluate") == 1
    )
    two, one = tmp_path / "two", tmp_path / "one"
    spawn(*words, "one", cwd=tmp_path, patch=UNDRAWN).wait()
    parts = sorted(path.name for path in (one / "distilled").glob("part-*.parquet"))
    assert len(parts) > 2
    for name in parts:
        assert (two / "distilled" / name).read_bytes() == (one / "distilled" / name).read_bytes()
    assert (
        "accelerate.commands.launch --config_file"
        in status(directory=str(two))["held"][0]["made_by"]
    )
    record = json.loads((two / "jsd-balanced" / "draftsmith.json").read_text())
    assert (record["processes"], record["sharing"], record["steps"]) == (2, "ddp", 12)
    assert ds.Results.load(two / "eval").drafts == ["base", "jsd-balanced", "lookup", "both"]
    # Drafts that were trained on the same rows by two processes are the same but for rounding.
    close(two / "jsd-balanced", one / "jsd-balanced", atol=1e-3)


@pytest.mark.slow
@pytest.mark.usefixtures("undrawn")
def test_without_a_draft_a_fresh_head_is_trained(door, files, target_dir, tmp_path):
    out = tmp_path / "out"
    printed, err = door.ok(
        "align",
        "--target",
        target_dir,
        "--prompts",
        files["own"],
        "--out",
        out,
        *SMALL,
        "--policy",
        "balanced",
    )
    record = json.loads((out / "jsd-balanced" / "draftsmith.json").read_text())
    assert (record["kind"], record["steps"]) == ("eagle3", 12)
    assert record["config"]["replay"] == [str(out / "general")]
    # The tests' target is nearly all vocabulary. What is started and how long it takes is said
    # before it begins.
    begun = err.partition("1/3 distil")[0] + printed.partition("1/3 distil")[0]
    assert (
        "draft: a fresh EAGLE-3 head that drafts" in begun
        and "one pruned layer with the whole vocabulary" in begun
    )
    assert re.search(
        r"expected at most: distil \d+ \w+ \(--distill.max_prompts\), train \d+ \w+ \(--train",
        begun,
    )
    assert not (out / "features").exists()
    assert (
        "jsd-balanced (jsd:beta=0.5) at temperature 1" in printed
        and "over the draft" not in printed
    )


def facts(**changed: Any) -> Facts:
    usual: dict[str, Any] = {
        "rows": "text",
        "own_chats": False,
        "prompts": 1000,
        "longest_prompt": 32,
        "context": 2048,
        "on_gpu": False,
        "gpu_bytes": 0,
        "cache_bytes": 131_072,
        "processes": 1,
        "target_parameters": 7_000_000_000,
        "target_read": 7_000_000_000,
        "draft_parameters": 68_000_000,
        "sampling": ResolvedSampling(Sampling(temperature=1.0), {}),
    }
    return Facts(**usual | changed)


def test_a_fifth_of_what_prompts_ask_is_held_out_and_not_of_their_rows():
    config = AlignConfig(target="t", draft="d", prompts="p", out="o")
    whole, _ = complete(config, facts(prompts=80, different=8))
    assert whole.heldout_prompts == 1
    with pytest.raises(InputError, match="80 usable prompts, which all ask the same, are too few"):
        complete(config, facts(prompts=80, different=1))
    assert complete(replace(config, id=["x=x"]), facts(prompts=80, different=1))


def test_a_gpu_answers_as_many_prompts_together_as_its_memory_holds():
    config = AlignConfig(target="t", draft="d", prompts="p", out="o")

    def together(**changed: Any) -> int:
        whole, _ = complete(config, facts(**changed))
        return whole.distill.batch_size

    assert together() == 16 and together(target_parameters=135_000_000) == 64
    card: dict[str, Any] = {"on_gpu": True, "gpu_bytes": 80 << 30}
    large = together(**card)
    assert 64 < large < 512
    # An eighth of the memory, with prompts and answers as long as they may be.
    longest, _ = complete(config, facts(**card))
    assert large * 131_072 * longest.train.max_length <= 10 << 30
    assert together(**card, target_parameters=135_000_000, cache_bytes=23_040) == 512
    assert together(on_gpu=True, gpu_bytes=1 << 30) == 16


def _rows(config: AlignConfig) -> int:
    """All rows that are trained on."""
    return config.train.steps * config.train.rows_per_step


def test_choices_follow_what_is_given():
    config = AlignConfig(target="t", draft="d", prompts="p", out="o")

    def chosen(**changed: Any) -> AlignConfig:
        whole, lines = complete(config, facts(**changed))
        assert len(lines) == len({line.split()[0] for line in lines}) > 15
        assert complete(whole, facts(**changed)) == (whole, [])
        return whole

    usual = chosen()
    assert usual.train.optim.lr == 2e-4 and usual.eval.temperature == [0.0, 1.0]
    assert (usual.heldout_prompts, usual.distill.max_prompts) == (40, 960)
    # A larger draft learns at a smaller rate, in smaller batches.
    large = chosen(draft_parameters=2_600_000_000, on_gpu=True)
    assert large.train.optim.lr == 3e-5 and large.train.gradient_checkpointing
    assert large.train.batch_size < usual.train.batch_size
    # Chats have longer answers, and nothing is longer than the context.
    assert chosen(rows="chat").distill.max_new_tokens > usual.distill.max_new_tokens
    # Those that are held out are also asked under other templates.
    assert eval_config(usual).ood == []
    assert eval_config(chosen(rows="chat")).ood == ["p-template=template:o/prompts/heldout.jsonl"]
    assert chosen(context=96).distill.max_new_tokens == 48
    assert chosen(context=96, longest_prompt=90).train.max_length == 96
    # Few prompts are answered more often, and fewer of them are held out.
    few = chosen(prompts=20)
    assert (few.heldout_prompts, few.distill.num_samples) == (4, 4)
    assert chosen(prompts=20_000, on_gpu=True).distill.num_samples == 1
    with pytest.raises(ds.InputError, match="prompts: 2 usable prompts are too few"):
        chosen(prompts=2)
    # A fresh head drafts a part of a vocabulary that is dear, and takes fewer passes on a CPU.
    config = AlignConfig(target="t", prompts="p", out="o")
    fresh: dict[str, Any] = {
        "fresh_head": True,
        "vocabulary": 49_152,
        "draft_parameters": 4_600_000,
        "drafted": VocabularySize(tokens=8192, missing=0.01, cost=0.06),
    }
    dear = chosen(**fresh, projection_share=0.2)
    assert dear.train.draft_vocab_size == 8192
    assert chosen(**fresh, projection_share=0.05).train.draft_vocab_size == 8192
    # EAGLE-3 where an engine takes it, EAGLE-1 where one takes that alone.
    support = {kind: [Support("any", "", serves=kind == "eagle")] for kind in ("eagle3", "eagle")}
    alone = chosen(**fresh, support=support)
    assert (dear.kind, alone.kind, alone.train.draft_vocab_size) == ("eagle3", "eagle", None)
    support["eagle3"] = support["eagle"]
    assert chosen(**fresh, support=support).kind == "eagle3"
    # A kind by name; the rate of one whose size is not known here is left to training.
    config = replace(config, kind="medusa")
    named = chosen(**fresh, support=support)
    assert train_config(named, "jsd-balanced").kind == "medusa" and named.train.optim.lr is None
    config = replace(config, kind=None)
    large_steps = chosen(**fresh, projection_share=0.2, on_gpu=True)
    assert _rows(dear) < _rows(large_steps)
    # Small steps pay on a CPU.
    assert (dear.train.rows_per_step, large_steps.train.rows_per_step) == (4, 32)
    # A run of few steps is saved several times, too.
    for steps, save_every in ((3, 1), (30, 6), (1000, 50)):
        short = replace(config, train=TrainChoices(steps=steps))
        assert complete(short, facts())[0].train.save_every == save_every
    # Measuring takes a small part of a run, also of few steps on many answers.
    for steps, eval_every in ((30, 10), (100, 33), (3000, 200)):
        measured = replace(
            config, train=TrainChoices(steps=steps), distill=DistillChoices(num_samples=4)
        )
        assert complete(measured, facts())[0].train.eval_every == eval_every
    # The rows of a step are shared by the processes.
    for on_gpu in (False, True):
        shared = chosen(processes=8, on_gpu=on_gpu).train
        assert shared.rows_per_step % (8 * shared.batch_size) == 0
    # Every draft replays what the target writes by itself: chats, if chats are served.
    for changed in ({}, fresh):
        whole = chosen(**changed)
        assert (whole.policy, whole.train.replay_fraction) == ("balanced", 0.5)
        assert general_config(whole).prompts == "token:1920"
    assert general_config(chosen(rows="chat", own_chats=True)).prompts == "magpie:1920"
    config = AlignConfig(target="t", draft="d", prompts="p", out="o", policy="id")
    alone = chosen()
    assert (alone.train.replay_fraction, alone.distill.general_texts) == (0.0, 0)
    greedy = chosen(sampling=ResolvedSampling(Sampling(temperature=0.0), {"temperature": 0.0}))
    assert greedy.eval.temperature == [0.0]


def test_answers_of_an_earlier_run_are_taken_if_this_one_would_write_the_same(tmp_path):
    target = tiny_llama(0)
    first = str(tmp_path)
    with pytest.raises(InputError, match="align.yaml: no such file; name the --out of an earlier"):
        earlier_run(first)
    begun, _ = complete(AlignConfig(target="t", draft="d", prompts="p", out=first), facts())
    _write(tmp_path / "align.yaml", "", begun)
    with pytest.raises(InputError, match="has not distilled all answers; finish it first"):
        earlier_run(first)
    (tmp_path / "distilled").mkdir()
    manifest = {"identity": {"target_fingerprint": fingerprint(target)}}
    (tmp_path / "distilled" / "manifest.json").write_text(json.dumps(manifest))
    earlier = earlier_run(first)

    def checked(seed: int = 0, weights: int = 0, **given: Any) -> AlignConfig:
        config = AlignConfig(target="t", prompts="p", out="o", distilled=first, seed=seed, **given)
        # Other facts choose other options, but not of the answers.
        whole, _ = complete(as_earlier(config, earlier), facts(prompts=700, fresh_head=True))
        check_same(whole, earlier, tiny_llama(weights))
        return whole

    whole = checked(kind="eagle", eval=EvalChoices(max_prompts=7))
    assert (whole.distill, whole.heldout_prompts) == (earlier.distill, earlier.heldout_prompts)
    # Another policy replays other texts.
    assert checked(policy="id").distill.general_texts == 0
    for given, said in (
        ({"distill": DistillChoices(temperature=0.5)}, "temperature 1.0, now it is 0.5"),
        ({"seed": 3}, "seed 0, now it is 3; give the same, or leave --distilled out"),
        ({"weights": 1}, "answers of other weights than t"),
        ({"id": ["x"]}, "has no --id"),
    ):
        with pytest.raises(InputError, match=said):
            checked(**given)


@pytest.mark.slow
@pytest.mark.usefixtures("undrawn")
def test_a_second_draft_is_compared_on_the_answers_of_the_first(
    door, files, target_dir, draft_dir, tmp_path
):
    prompts = Path(shutil.copy(files["own"], tmp_path))
    words = ["--target", target_dir, "--prompts", prompts, *SMALL, "--eval.tree", "chain:1"]
    first, second = tmp_path / "first", tmp_path / "second"
    door.ok("align", *words, "--draft", draft_dir, "--out", first)
    again = [*words, "--init", "prune", "--distilled", first, "--train.draft_vocab_size", 40]
    again += ["--eval.max_prompts", 3, "--out", second]
    _, err = door.ok("align", *again)
    assert f"distilled: takes the answers of {first}, and the prompts that it held out" in err
    assert "expected at most: distil 0 s" in err
    parts = sorted((first / "distilled").glob("part-*.parquet"))
    for file in (first / "prompts" / "heldout.jsonl", *parts):
        assert file.read_bytes() == (second / file.relative_to(first)).read_bytes()
    # The draft's cost counts its vocabulary.
    model = load_model(str(second / "start"), device="cpu")
    whole = read_per_token(model)
    assert f"({whole - 250 * model.config.hidden_size:,} parameters read per token)" in err
    before = timeless(second)
    assert door("align", *again)[0] == 0 and timeless(second) == before
    prompts.write_text(prompts.read_text().replace("quick", "slow"))
    said = f"has changed since the run in {first} began; name another --out"
    assert said in door.refused("align", *again[:-1], tmp_path / "third")


@pytest.mark.parametrize(
    ("given", "said"),
    [
        ({"kind": "lm"}, "kind: lm needs a model to start from; add --init prune, or --draft"),
        ({"kind": "eagle", "init": "prune"}, "kind: --init prune makes a language model"),
        ({"kind": "eagle4"}, "eagle3"),
    ],
)
def test_a_kind_that_cannot_be_is_refused(given, said):
    with pytest.raises(InputError, match=said):
        AlignConfig(target="t", prompts="p", out="o", **given)


def test_a_kind_beside_a_draft_is_that_of_the_draft(draft_dir):
    config = AlignConfig(target="t", draft=draft_dir, prompts="p", out="o", kind="eagle")
    whole, _ = complete(config, facts())
    with pytest.raises(InputError, match=f"kind: {draft_dir} is of kind lm; leave --kind out"):
        train_config(whole, "jsd-balanced")
    assert train_config(replace(whole, kind="lm"), "jsd-balanced").kind == "lm"


def test_engines_that_will_take_a_draft_are_named_before_it_is_made(tmp_path):
    """An EAGLE-3 head of Gemma 3 runs in no engine; a pruned draft does."""
    sizes = {"vocab_size": 290, "hidden_size": 32, "intermediate_size": 24, "head_dim": 32}
    sizes |= {"num_hidden_layers": 8, "num_attention_heads": 1, "num_key_value_heads": 1}
    said = {}
    for family in ("llama", "gemma3_text"):
        target: Any = AutoModelForCausalLM.from_config(AutoConfig.for_model(family, **sizes))
        target.save_pretrained(tmp_path / family)
        tiny_tokenizer().save_pretrained(tmp_path / family)
        config = AlignConfig(
            target=str(tmp_path / family), out=str(tmp_path / "out"), prompts="p", device="cpu"
        )
        support = support_of(config, load(config))
        assert set(support) == {"lm", "eagle3", "eagle"}
        said[family] = in_words(support, "eagle3")
    assert said["llama"].startswith("such a draft runs in ") and "vllm" in said["llama"]
    assert said["gemma3_text"].startswith("no engine loads such a draft (")
    assert "Gemma3ForCausalLM has no SupportsEagle3" in said["gemma3_text"]
    assert "; a pruned one (--init prune) in transformers, vllm" in said["gemma3_text"]


def test_options_of_a_stage_reach_it(draft_dir):
    given = TrainChoices(optim=OptimChoices(warmup_steps=3), batch_size=4)
    config = AlignConfig(target="t", draft=draft_dir, prompts="p", out="o", plain=True, train=given)
    whole, _ = complete(config, facts())
    kept, plain = (train_config(whole, name) for name in ("jsd-balanced", "jsd-plain"))
    assert (kept.optim.warmup_steps, kept.batch_size) == (3, 4)
    assert (kept.accumulation, kept.optim.lr, kept.replay) == (
        1,
        whole.train.optim.lr,
        ["o/general"],
    )
    assert (plain.replay, plain.replay_fraction, plain.optim) == ([], 0.0, kept.optim)
    # Where nothing is decoded, nothing is timed.
    undecoded, _ = complete(replace(config, eval=EvalChoices(tree=["none"])), facts())
    assert eval_config(undecoded).speed_prompts == 0
    # One option tracks both stages.
    stages = stages_of(replace(whole, tracker="wandb"))
    assert {each.tracker for each in stages.training.values()} == {"wandb"}
    assert kept.tracker == "none"
    assert stages.evaluation.tracker == "wandb"


def test_names_of_drafts_say_their_objective():
    def names(*objectives: str) -> list[str]:
        return list(
            AlignConfig(target="t", prompts="p", out="o", objective=list(objectives)).drafts()
        )

    assert names("ce", "jsd:beta=0.5") == ["ce", "jsd"]
    assert names("jsd:beta=0.5", "jsd:beta=0.1") == ["jsd-beta-0.5", "jsd-beta-0.1"]
    assert names("0.9*fkl+0.1*ce") == ["0.9-fkl-0.1-ce"]


@pytest.mark.slow
@pytest.mark.usefixtures("undrawn")
def test_init_makes_the_draft_to_start_from_once_and_the_best_draft_is_uploaded(
    door, files, target_dir, tmp_path, monkeypatch
):
    uploads: list[tuple[Path, str, str]] = []

    def push(directory: Path, name: str, kind: str) -> str:
        assert "compared as" in (directory / "README.md").read_text(), (
            "the card is complete by then"
        )
        uploads.append((directory, name, kind))
        return f"https://hub/{name}"

    out = tmp_path / "out"
    words = [
        "--target",
        target_dir,
        "--init",
        "prune",
        "--prompts",
        files["own"],
        "--out",
        out,
        *SMALL,
    ]
    assert (
        "HF_TOKEN" in door.refused("align", *words, "--push_to_hub", "org/draft")
        and not out.exists()
    )
    monkeypatch.setattr("draftsmith.core.hub.push", push)
    monkeypatch.setattr("draftsmith.core.hub.constants.HF_HUB_OFFLINE", False)
    monkeypatch.setenv("HF_TOKEN", "hf_secret")
    _, err = door.ok("align", *words, "--push_to_hub", "org/draft")
    assert uploads == [(out / "jsd", "org/draft", "model")]
    assert "uploaded: https://hub/org/draft" in err and "hf_secret" not in err
    assert "layers 0 of the target's 2, chosen as even" in err and "alpha:" in err
    assert yaml.safe_load((out / "align.yaml").read_text())["draft"] == str(out / "start")
    weights = (out / "start" / "model.safetensors").read_bytes()
    _, err = door.ok("align", *words)
    assert "init:" not in err and (out / "start" / "model.safetensors").read_bytes() == weights


def test_prompts_that_change_after_a_run_began_are_not_used_in_silence(target_dir, tmp_path):
    source, divided = tmp_path / "own.jsonl", tmp_path / "out" / "prompts"
    source.write_text(
        "".join(json.dumps({"prompt": f"The quick brown {i}"}) + "\n" for i in range(6))
    )
    hold_out(str(source), read_prompts(str(source), load_tokenizer(target_dir)), 2, divided)
    assert len(rows(divided / "heldout.jsonl")) == 2 and len(rows(divided / "train.jsonl")) == 4
    check_unchanged(str(source), divided)
    source.write_text(source.read_text().replace("quick", "slow"))
    with pytest.raises(ds.InputError, match="has changed since this run began"):
        check_unchanged(str(source), divided)
    source.unlink()
    check_unchanged(str(source), divided)


def test_a_chat_and_its_first_question_are_on_one_side(target_dir, tmp_path):
    tokenizer = load_tokenizer(target_dir)
    tokenizer.chat_template = "{% for m in messages %}[{{ m.role }}]{{ m.content }}{% endfor %}"
    chats = []
    for number in range(6):
        first = [{"role": "user", "content": f"The quick {number}"}]
        answered = [*first, {"role": "assistant", "content": "fox"}]
        chats += [first, [*answered, {"role": "user", "content": "lazy"}]]
    source = write_rows(tmp_path / "p.jsonl", *({"messages": chat} for chat in chats))
    sides = []
    for day in ("26", "27"):
        read = read_prompts(source, tokenizer)
        hold_out(source, read, 2, tmp_path / day)
        sides.append(rows(tmp_path / day / "heldout.jsonl"))
        tokenizer.chat_template = day + str(tokenizer.chat_template)
    held = [row["messages"] for row in sides[0]]
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
    with pytest.raises(InputError, match=r"all 3 prompts ask the same, or are turns of one chat"):
        hold_out(source, read_prompts(source, tokenizer), 1, tmp_path / "divided")
    assert not (tmp_path / "divided").exists()


@pytest.mark.parametrize(
    ("given", "named"),
    [
        ({"policy": "id", "plain": True}, "plain: is not read: every draft is trained so"),
        ({"policy": "id", "distill": {"general_texts": 5}}, "policy: id replays nothing"),
        ({"id": ["a.jsonl"], "heldout_prompts": 3}, "heldout_prompts: --id names the prompts"),
    ],
)
def test_an_option_that_nothing_reads_is_refused(given, named):
    with pytest.raises(ds.InputError, match=named):
        AlignConfig(target="t", prompts="p", out="o", **given)
