"""A whole evaluation on tiny models: its counts, what it resumes from, and what it refuses."""

import json
import shutil
from dataclasses import replace
from itertools import product
from pathlib import Path
from typing import Any

import pytest
import torch

from draftsmith.cli.commands import run
from draftsmith.core.errors import RequirementError, RunError
from draftsmith.core.prompts import Prompt
from draftsmith.decode import SpeculativeDecoder
from draftsmith.eval.alpha import prompt_nats
from draftsmith.eval.config import EvalConfig
from draftsmith.eval.results import Results
from draftsmith.eval.run import evaluate
from draftsmith.eval.summary import lines, summary as summarise
from tests.results_made_up import timeless
from tests.tiny_models import near, save_word_tokenizer, tiny_llama

VOCAB = 17
ROOT = Path(__file__).parents[1]


@pytest.fixture(scope="module")
def world(tmp_path_factory):
    """A target, a poor and a good draft, and two prompt sets."""
    root = tmp_path_factory.mktemp("world")
    target = tiny_llama(0, VOCAB)
    for name, model in (
        ("target", target),
        ("poor", near(target, 0.5, 1)),
        ("good", near(target, 0.09, 2)),
    ):
        model.save_pretrained(root / name)
    save_word_tokenizer(root / "target", VOCAB)
    for name, shift in (("prose", 0), ("code", 5)):
        rows = [
            {
                "id": f"{name}{i}",
                "prompt": " ".join(f"w{3 + (i * k + shift) % 14}" for k in range(1, 4 + i % 3)),
            }
            for i in range(6)
        ]
        rows += [{"id": "empty", "prompt": " "}, {"id": "long", "prompt": "w3 " * 120}]
        (root / f"{name}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    return EvalConfig(
        target=str(root / "target"),
        draft=[f"poor={root / 'poor'}", f"good={root / 'good'}"],
        id=[f"prose={root / 'prose.jsonl'}"],
        ood=[f"code={root / 'code.jsonl'}"],
        out=str(root / "out"),
        tree=["chain:3", "kary:2,2"],
        max_new_tokens=10,
        speed_prompts=2,
        batch_size=4,
        bootstrap=200,
        device="cpu",
    )


@pytest.fixture(scope="module")
def summary(world):
    return summarise(evaluate(world))


def _results(config):
    loaded: dict[str, Any] = json.loads((Path(config.out) / "results.json").read_text())
    return loaded


def test_every_row_read_is_accounted_for(world, summary, golden):
    for suite in _results(world)["suites"]:
        assert (suite["read"], suite["done"], suite["skipped"], suite["failed"]) == (8, 6, 2, 0)
        assert "empty" in suite["skipped_rows"][0]["reason"]
        golden(suite["skipped_rows"][1]["reason"])


def test_counts_add_up(world, summary):
    results = Results.load(world.out)
    counts = results.counts[results.counts["part"].isna()]
    keys = ["draft", "set", "temperature", "key", "tree", "rule"]
    counts = counts[keys].astype(object).fillna("").assign(value=counts["value"])
    sums = counts.groupby(keys)["value"].sum()

    def total(key, draft, domain, temperature, *how):
        tree, rule = how or ("", "")
        return float(sums[draft, domain, temperature, key, tree, rule])

    for draft, domain, temperature in product(("poor", "good"), ("prose", "code"), (0.0, 1.0)):
        where = (draft, domain, temperature)
        positions = total("positions", *where)
        assert positions == total("tokens", "target", domain, temperature)
        row: Any = results.alpha(*where)
        assert row["value"] == pytest.approx(total("alpha", *where) / positions)
        assert row["low"] <= row["value"] <= row["high"]
        assert (results.gain(*where) is None) == (draft == results.base == "poor")
        for how in results.methods:
            calls, emitted = total("calls", *where, *how), total("emitted", *where, *how)
            accepted = total("accepted", *where, *how)
            # A call of the target adds one token of its own, unless the output was cut on a draft
            # token.
            assert accepted <= emitted <= accepted + calls
            assert results.tau(*where, *how)["value"] == pytest.approx(emitted / calls)
            assert total("accepted_here", *where, *how) == accepted


def test_the_counts_of_parts_are_those_of_the_whole(world, summary):
    counts = Results.load(world.out).counts
    parts = counts[counts["part"].astype(str).str.startswith("place in the answer")]
    keys = ["draft", "set", "temperature", "prompt", "key"]
    of_parts = parts.groupby(keys, observed=True)["value"].sum()
    whole = counts[counts["part"].isna() & counts["key"].isin(["alpha", "positions"])]
    assert len(of_parts) == 2 * 2 * 2 * 6 * 2
    of_whole = whole.groupby(keys, observed=True)["value"].sum()
    assert of_parts.to_numpy() == pytest.approx(of_whole[of_parts.index].to_numpy())


def test_greedy_outputs_are_the_targets(world, summary):
    rows = Results.load(world.out).select("identical")
    assert len(rows) == 16 and {row["temperature"] for row in rows} == {0.0}
    assert all(row["value"] == 1 for row in rows)


def test_the_better_draft_is_found_better(world, summary):
    results = Results.load(world.out)
    assert {row["draft"] for row in results.select("gain")} == {"good"}
    assert all((row["value"] or 0) > 0 for row in results.select("gain"))
    assert {row["set"] for row in results.select("transfer")} == {"code", None}
    timed = [row["value"] for row in results.select("speedup")]
    assert len(timed) == 2 * 2 * 2 * 4 and all(value and value > 0 for value in timed)


def test_without_a_tree_nothing_is_decoded_and_acceptance_is_the_same(
    world, summary, tmp_path, golden
):
    results, decoded = (
        evaluate(replace(world, out=str(tmp_path), tree=["none"], verifier=[], speed_prompts=0)),
        Results.load(world.out),
    )
    assert not results.select("tau", "accept", "speedup", "identical")
    for figure in ("alpha", "gain", "transfer"):
        assert results.select(figure) == decoded.select(figure)
    for draft in ("poor", "good"):
        row = results.figure("tau_predicted", draft, "prose", 1.0, "chain:3", "speculative")
        assert row is not None and row == decoded.figure(
            "tau_predicted", draft, "prose", 1.0, "chain:3", "speculative"
        )
    _, decided, todo, *_ = lines(results)
    assert "--tree" in todo
    golden(decided)


def test_files_are_written(world, summary):
    out = Path(world.out)
    assert summary["report"] == str(out / "report.html") and Path(summary["report"]).is_file()
    # Two gains are a row of a table, not a figure.
    assert sorted(path.stem for path in (out / "plots").iterdir()) == ["alpha", "tau"]


def _without_clocks(config):
    results = timeless(_results(config))
    del results["config"], results["provenance"]
    return results


@pytest.mark.usefixtures("undrawn")
def test_remarks_are_in_results_and_stop_a_strict_run_before_it_measures(
    world, tmp_path, capsys, golden
):
    same = replace(
        world,
        draft=[*world.draft, f"whole={world.target}"],
        ood=[f"code={world.id[0].partition('=')[2]}"],
        out=str(tmp_path / "loose"),
        temperature=[0.0],
        tree=["chain:2"],
        speed_prompts=0,
    )
    found = evaluate(same)
    assert found.document["remarks"][0]["about"] == "same_prompts"
    golden(" ".join(capsys.readouterr().err.split()))
    assert summarise(found)["remarks"] == [remark["text"] for remark in found.document["remarks"]]
    with golden.raises():
        evaluate(replace(same, out=str(tmp_path / "strict"), strict=True))
    assert not (tmp_path / "strict" / "cells").exists()


@pytest.mark.usefixtures("undrawn")
def test_a_file_written_three_times_has_the_intervals_of_one(world, tmp_path):
    rows = Path(world.id[0].partition("=")[2]).read_text().splitlines()[:6]
    found = []
    for copies in (1, 3):
        given = [json.loads(row) for row in rows for _ in range(copies)]
        file = tmp_path / f"{copies}.jsonl"
        file.write_text("".join(json.dumps({"prompt": row["prompt"]}) + "\n" for row in given))
        once = replace(world, id=[f"prose={file}"], ood=[], out=str(tmp_path / f"out{copies}"))
        once = replace(once, tree=["chain:2"], temperature=[0.0], speed_prompts=3 * copies)
        found.append(evaluate(once))
    alone, copied = found
    assert copied.alpha("good", "prose") == alone.alpha("good", "prose")
    assert copied.tau("good", "id") == alone.tau("good", "id")
    speeds = [results.figure("speedup", "good", "prose") for results in found]
    assert speeds[0] and speeds[1] and speeds[0]["n"] == speeds[1]["n"] <= 3
    groups = alone.alpha("good", "prose")["n"]
    said = f"prose: {18 - groups} of 18 prompts repeat others, or nearly; "
    assert any(each["text"].startswith(said) for each in copied.document["remarks"])
    low = copied.alpha("good", "prose")["low"] or 0.0
    for results in found:
        with pytest.raises(RequirementError):
            results.require(f"alpha[prose draft=good] >= {low + 1e-3:.6f}")


@pytest.mark.usefixtures("undrawn")
def test_a_strict_run_on_a_busy_machine_fails_after_it_has_measured(
    world, tmp_path, monkeypatch, golden
):
    monkeypatch.setattr("os.getloadavg", lambda: (99.0, 1.0, 1.0))
    once = replace(
        world, draft=world.draft[1:], ood=[], out=str(tmp_path), temperature=[0.0], tree=["chain:2"]
    )
    busy = replace(once, speed_prompts=1, strict=True)
    with golden.raises(RunError):
        evaluate(busy)
    found = Results.load(tmp_path).document
    assert "busy_machine" in {remark["about"] for remark in found["remarks"]}
    assert found["conditions"][0]["load"] == [99.0, 99.0]


def test_a_report_is_drawn_again_from_its_results(world, summary, tmp_path, capsys, golden):
    shutil.copy(Path(world.out) / "results.json", tmp_path)
    run("eval", ["--render", str(tmp_path), "--json"])
    said = json.loads(capsys.readouterr().out.splitlines()[-1])
    assert said == {"report": str(tmp_path / "report.html")}
    assert (tmp_path / "report.html").read_bytes() == Path(summary["report"]).read_bytes()
    assert (tmp_path / "plots" / "alpha.png").is_file()
    with golden.raises():
        run("eval", ["--render", str(tmp_path), "--tree", "chain:4"])


@pytest.mark.slow
def test_an_evaluation_is_timed_again_and_all_else_is_kept(world, summary, tmp_path):
    shutil.copytree(world.out, again := tmp_path / "again")
    run("eval", ["--time_again", str(again)])
    found = _results(replace(world, out=str(again)))
    # The timings of two sets at two temperatures.
    assert found["clock"]["cells_measured"] == 4 and found["clock"]["cells_reused"] > 4
    assert _without_clocks(replace(world, out=str(again))) == _without_clocks(world)
    speeds = [
        [row["value"] for row in _results(c)["rows"] if row["figure"] == "speedup"]
        for c in (world, replace(world, out=str(again)))
    ]
    assert speeds[0] != speeds[1]


@pytest.mark.slow(30)
def test_two_processes_find_the_same_bytes(world, tmp_path, launch, spawn):
    """But for the clock, and for what is said of it."""
    words = [
        "--target",
        world.target,
        "--draft",
        *world.draft,
        "--id",
        *world.id,
        "--ood",
        *world.ood,
    ]
    words += [
        "--tree",
        *world.tree,
        "--max_new_tokens",
        "10",
        "--batch_size",
        "2",
        "--bootstrap",
        "100",
    ]
    words += ["--speed_prompts", "1", "--device", "cpu", "--out", "out", "--max_prompts", "2"]
    found = []
    for launcher in ([], ["--multi_gpu", "--num_processes", "2"]):
        there = tmp_path / str(len(launcher))
        there.mkdir()
        if launcher:
            run = launch(launcher, "-m", "draftsmith", "eval", *words, cwd=there)
            out, err = run.stdout, run.stderr
        else:
            out, err = spawn("eval", *words, cwd=there).wait()
        assert out.count("report:") == 1
        assert err.count("remark: few prompts") == 1
        document = json.loads((there / "out" / "results.json").read_text())
        found.append(timeless(document))
        cells = [
            path
            for path in (there / "out" / "cells").glob("*.json")
            if '"load"' not in path.read_text()
        ]
        found.append({path.name: path.read_bytes() for path in cells})
    assert found[0] == found[2] and found[1] == found[3] and len(found[1]) > 8


def test_steps_are_timed_as_they_are_served(world, summary, tmp_path, monkeypatch, golden):
    """Recorded steps need a GPU, which is said before the work; a timing of eager steps is not
    taken for one of recorded ones.
    """
    recorded = replace(world, out=str(tmp_path / "out"), compile=True)
    with golden.raises():
        evaluate(recorded)
    assert not (tmp_path / "out").exists()
    ran: list[object] = []

    class Recorder(SpeculativeDecoder):
        def __init__(self, *args, compile=False):  # noqa: A002
            super().__init__(*args)
            self.asked = compile

        def generate(self, *args, **options):
            ran.append(self.asked)
            return super().generate(*args, **options)

    monkeypatch.setattr("draftsmith.eval.run.check_backend", lambda *_: None)
    monkeypatch.setattr("draftsmith.eval.timing.SpeculativeDecoder", Recorder)
    shutil.copytree(world.out, recorded.out)
    timed = [path for path in Path(recorded.out).glob("cells/*") if "decode_s" in path.read_text()]
    evaluate(recorded)
    # The counts are those that were found before; the clock ran again.
    assert set(ran) == {True}
    cells = Path(recorded.out).glob("cells/*")
    assert sum("decode_s" in path.read_text() for path in cells) == 2 * len(timed)


def test_texts_that_repeat_themselves_are_counted_and_not_timed(world, tmp_path, monkeypatch):
    # In place of the rule.
    monkeypatch.setattr("draftsmith.eval.cells.repeats", lambda ids: ids[0] % 2 == 0)
    options = {"draft": world.draft[1:], "tree": ["chain:2"], "speed_prompts": 4}
    results = evaluate(replace(world, out=str(tmp_path), **options))
    counts = results.counts[results.counts["draft"] == "target"]
    keys = ["set", "temperature", "prompt"]
    looping = counts[counts["key"] == "looping"].set_index(keys)
    timed = counts[counts["key"] == "timed_tokens"].set_index(keys)
    loops = looping["value"] > 0
    assert loops.any() and not loops.all()
    assert not loops[timed.index].any()
    assert (timed["group"] == looping["group"][timed.index]).all()
    for name, temperature in product(("prose", "code"), (0.0, 1.0)):
        others = int((~loops[name, temperature]).sum())
        here = timed.index.isin([name], level=0) & timed.index.isin([temperature], level=1)
        assert here.sum() == min(4, others)
        tokens = counts[(counts["key"] == "tokens") & (counts["set"] == name)]
        tokens = tokens[tokens["temperature"] == temperature]["value"].sum()
        row = results.figure("looping", "target", name, temperature)
        assert row and row["value"] == looping["value"][name, temperature].sum() / tokens


@pytest.mark.parametrize("figure", ["looping", "prompt_nats"])
def test_texts_are_listed_where_they_are_hardly_text(world, summary, figure):
    results = Results.load(world.out)
    rows: list[Any] = results.select("looping", "prompt_nats")
    for row in rows:
        row["value"] = {"looping": 0.0, "prompt_nats": 4.0}[row["figure"]]
    assert "Texts" not in lines(results)
    row = next(row for row in rows if row["figure"] == figure)
    row["value"] = 7.0
    assert "Texts" in lines(results)


def test_prompts_have_the_nats_that_they_have_under_the_target(world):
    target = tiny_llama(0, VOCAB)
    target.lm_head.weight.data *= 40
    written = target.generate(torch.tensor([[3], [4], [5]]), max_new_tokens=20, do_sample=False)
    random = torch.randint(3, VOCAB, written.shape, generator=torch.Generator().manual_seed(0))
    nats = []
    for ids in (written, random):
        prompts = [Prompt(str(n), "default", tuple(row)) for n, row in enumerate(ids.tolist())]
        found, tokens = prompt_nats(target, prompts)
        assert tokens.values_P == [ids.shape[1] - 1] * 3
        logprobs = target(input_ids=ids).logits.log_softmax(-1)
        own = logprobs[:, :-1].gather(2, ids[:, 1:, None]).sum((1, 2))
        assert found.values_P == pytest.approx((-own).tolist(), rel=1e-4)
        nats.append(sum(found.values_P) / sum(tokens.values_P))
    assert 2 * nats[0] < nats[1]
