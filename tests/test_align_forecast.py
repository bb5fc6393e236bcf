"""What `align` says before it begins: from when a draft pays, and how long it takes."""

import json
import math
from dataclasses import asdict, replace
from itertools import accumulate
from typing import Any

import pytest
import torch

from draftsmith.alignment import stages
from draftsmith.alignment.choices import complete
from draftsmith.alignment.config import AlignConfig, DistillChoices, EvalChoices, TrainChoices
from draftsmith.alignment.forecast import (
    StepTimes,
    duration,
    expected,
    most_tokens,
    pays,
    short_evaluation,
    step_costs,
    time_steps,
    untrained,
)
from draftsmith.alignment.stage_configs import stages_of
from draftsmith.alignment.time_budget import bought, within
from draftsmith.alignment.weights_type import faster_type, with_type
from draftsmith.core.errors import InputError
from draftsmith.core.models import load_model
from draftsmith.drafts.draft_vocabulary import trim
from draftsmith.drafts.heads.medusa import MedusaHeads
from draftsmith.drafts.load import LoadedModels
from tests.test_align import facts
from tests.tiny_models import stirred_head, tiny_llama


def test_it_says_from_when_a_draft_pays():
    cheap = {0.0: 1.4, 1.0: 1.5}
    assert pays(cheap) == (
        "pays: from 1.40 tokens per call at T = 0, 1.50 at T = 1, on chain:2 here (its step was "
        "timed)"
    )
    assert "wake more of the experts" in pays(cheap, mixture=True)
    dear = {0.0: 3.4}
    assert pays(dear).endswith(": more than it can bring, so no draft pays on it")


def test_a_step_of_an_untrained_draft_is_timed():
    target = tiny_llama(0, layers=3)
    models = LoadedModels("target", target, None, {})  # type: ignore[arg-type]
    costs = step_costs(models, stirred_head("eagle", target), [3, 4, 5], [0.0, 1.0])
    assert list(costs) == [0.0, 1.0]
    assert all(ratio > 0 for ratio in costs.values())
    assert step_costs(models, MedusaHeads.fresh(target, num_heads=1), [3, 4, 5], [0.0]) == {}


def test_the_faster_type_is_taken_and_what_it_costs_is_said():
    """Clocks are injected."""
    target = tiny_llama(0)
    prompts = [[3, 4, 5], [6, 7]]

    def timed(*rounds: tuple[float, float]) -> tuple[str, str]:
        # The first round packs weights, and does not count.
        rounds = ((1.0, 9.0), *rounds)
        ends = accumulate(step for whole, half in rounds for step in (1.0, whole, half))
        return faster_type(target, target, prompts, lambda: next(ends))

    assert timed((3.0, 2.0), (6.0, 2.0), (3.0, 2.0)) == (
        "bfloat16",
        "dtype: bfloat16; float32 takes 1.50 times as long here. 2 of 2 greedy answers of 16 "
        "tokens are equal in both; --dtype fp32 keeps float32",
    )
    said = "dtype: float32; bfloat16 is not clearly faster here"
    for last in ((2.0, 4.0), (2.0, 1.9)):
        assert timed((3.0, 1.0), (3.0, 1.0), last) == ("float32", said)


def test_a_type_that_is_given_is_taken():
    target = tiny_llama(0)
    given = replace(options(), dtype="float32")
    assert with_type(given, target, [[3]]) == given


@pytest.mark.parametrize(
    ("alpha", "trees", "most"),
    [
        (0.0, ["chain:2"], 1.0),
        (0.5, ["chain:2"], 2.0),
        (0.1, ["chain:2", "kary:3,2"], 1 + 3 * 0.1 + 6 * 0.01),
        (0.5, ["kary:3,2"], 3.0),
        (0.1, ["eagle2:depth=3,beam=4,nodes=9"], math.inf),
    ],
)
def test_an_alpha_bounds_what_a_tree_can_bring(alpha, trees, most):
    assert most_tokens(alpha, trees) == pytest.approx(most)


def test_only_drafts_that_cannot_pay_are_evaluated_by_acceptance_alone(tmp_path, capsys):
    config, _ = complete(replace(options(), out=str(tmp_path)), facts())
    (name,) = config.trained()
    times = StepTimes(1.0, 1.0, 1.0, 1.0, 1.0, pays_from=1.3)

    def trained(**figures: float) -> None:
        (tmp_path / name).mkdir(exist_ok=True)
        (tmp_path / name / "draftsmith.json").write_text(json.dumps(figures))

    trained(heldout_alpha=0.05)
    short = short_evaluation(config, times)
    assert short is not None
    own = short.eval
    assert (own.tree, own.speed_prompts, own.max_prompts, own.pays_from) == (["none"], 0, 8, 1.3)
    said = f"{name}: held-out alpha 0.050 gives at most 1.165 tokens per target call, and "
    assert said + "the cheapest tree needs 1.30 here" in capsys.readouterr().err
    trained(heldout_alpha=0.3)
    assert short_evaluation(config, times) is None
    trained(heldout_loss=2.0)
    assert short_evaluation(config, times) is None
    trained(heldout_alpha=0.05)
    assert short_evaluation(config, replace(times, pays_from=None)) is None


def stage_times(config: AlignConfig) -> dict[str, float]:
    """An answer takes a second, a step two, and a prompt that is measured 20."""
    return {
        "distil": config.distill.max_prompts * config.distill.num_samples,
        "train": 2 * config.train.steps,
        "evaluate": 20 * config.eval.max_prompts + 10 * config.eval.speed_prompts,
    }


def options(**given: Any) -> AlignConfig:
    return AlignConfig(target="t", draft="d", prompts="p", out="o", **given)


@pytest.mark.parametrize("limit_m", [10, 30, 120])
@pytest.mark.parametrize(
    "given",
    [
        {},
        {"train": TrainChoices(steps=20)},
        {"distill": DistillChoices(max_prompts=100), "eval": EvalChoices(speed_prompts=3)},
    ],
)
def test_a_time_budget_chooses_what_is_open(limit_m, given):
    config = options(time_budget=f"{limit_m}m", **given)
    limit_s = 60 * limit_m
    whole, lines = within(config, facts(), stage_times, limit_s)
    seconds = stage_times(whole)
    assert 0.3 * limit_s < sum(seconds.values()) <= limit_s or whole == complete(config, facts())[0]
    assert seconds["evaluate"] <= max(seconds["train"], 300) and seconds["evaluate"] <= limit_s / 3
    if given:
        (group,) = list(given)[:1]
        own = asdict(given[group])
        kept = asdict(getattr(whole, group))
        assert all(kept[key] == value for key, value in own.items() if isinstance(value, int))
    # A line for each choice, and which of them the budget made.
    assert len({line.split()[0] for line in lines}) == len(lines)
    shortened = sum(f"   (time_budget {limit_m}m; steps were timed)" in line for line in lines)
    assert shortened or limit_m == 120
    # What is held out does not depend on it. What is kept is taken again, also on a slower machine.
    assert whole.heldout_prompts == complete(options(), facts())[0].heldout_prompts
    slow = {"distil": 1e9, "train": 1e9, "evaluate": 1e9}
    assert within(whole, facts(), lambda _: slow, limit_s) == (whole, [])
    said = bought(config, facts(), stage_times, whole)
    assert said.startswith(f"time_budget {limit_m}m: ") and "; twice the time would buy " in said
    assert "more than that" in bought(whole, facts(), lambda _: slow, whole)


def test_twice_the_time_buys_more_until_all_is_used():
    short = options(time_budget="30m")
    whole, _ = within(short, facts(), stage_times, 30 * 60)
    more = bought(short, facts(), stage_times, whole).split("twice the time would buy ")[1]
    assert int(more.split()[0]) > whole.distill.max_prompts * whole.distill.num_samples
    ample = options(time_budget="9h")
    whole, _ = within(ample, facts(), stage_times, 9 * 3600)
    assert bought(ample, facts(), stage_times, whole).endswith("would buy no more")


def test_an_evaluation_takes_no_longer_than_the_training():
    usual, _ = complete(options(), facts())

    def slow(config: AlignConfig) -> dict[str, float]:
        return {"distil": 1.0, "train": 600.0, "evaluate": 60.0 * config.eval.max_prompts}

    whole, lines = within(options(), facts(), slow)
    assert 8 <= whole.eval.max_prompts <= 10 and whole.train == usual.train
    assert lines[0].endswith("(no longer than the training; steps were timed)")
    # A choice of one's own stays, and a short evaluation is left alone.
    own = options(eval=EvalChoices(max_prompts=30))
    assert within(own, facts(), slow)[0].eval.max_prompts == 30
    quick = {"distil": 1.0, "train": 1.0, "evaluate": 299.0}
    assert within(options(), facts(), lambda _: quick) == complete(options(), facts())
    said = expected(slow(usual))
    assert said.startswith("expected at most: distil 1 s (--distill.max_prompts), train 10 min (")
    assert "evaluate 40 min (--eval.max_prompts)" in said


def test_a_run_that_goes_on_has_a_forecast_of_what_it_does_now(tmp_path, capsys):
    begun, _ = complete(options(), facts())
    stages._write(tmp_path / "align.yaml", "", replace(begun, out=str(tmp_path)))
    times = StepTimes(answer_s=1.0, read_s=0.0, train_s=6.0, counted_s=1.0, timed_s=0.0)
    (tmp_path / "step_times.json").write_text(json.dumps(asdict(times)))
    for steps, hours in ((begun.train.steps, None), (300, "4.7 h")):
        shorter = replace(options(train=TrainChoices(steps=steps)), out=str(tmp_path))
        stages._settle(shorter, "draftsmith align", 0.0)
        hours = hours or duration(times.of_stages(begun)["train"])
        said = capsys.readouterr().err
        assert "of the whole run, expected at most: distil " in said
        assert f", train {hours} (--train.steps), evaluate 40 s" in said


def test_a_budget_that_nothing_fits_is_refused_with_what_would():
    """What is spent before the work counts, and steps that are timed anew may take longer."""
    with pytest.raises(InputError, match="90s is too short here; the shortest run .* into 9m"):
        within(options(time_budget="90s"), facts(), stage_times, 90, 200)
    whole, _ = within(options(time_budget="9m"), facts(), stage_times, 540, 240)
    assert sum(stage_times(whole).values()) <= 300 and whole.eval.tree == ["chain:2"]
    for wrong in ("half an hour", "0m", "30", "-1h"):
        with pytest.raises(InputError, match="time_budget: .*such as 30m, 2h or 90s"):
            options(time_budget=wrong)


@pytest.mark.parametrize(
    ("kind", "size", "has"),
    [
        ("lm", None, None),
        ("lm", 40, None),
        ("lm", None, 50),
        ("eagle3", 40, None),
        ("medusa", None, None),
        ("dspark", None, None),
    ],
)
def test_a_row_of_every_kind_is_timed_as_it_is_trained(kind, size, has, target_dir, draft_dir):
    """size: the draft vocabulary that is asked for; has: the one that the draft has already."""
    is_head = kind != "lm"
    config = options(train=TrainChoices(draft_vocab_size=size), device="cpu", kind=kind)
    config = replace(config, target=target_dir, draft=None if is_head else draft_dir)
    whole, _ = complete(config, facts(fresh_head=is_head, vocabulary=290))
    configs = stages_of(whole)
    drafts: dict[str, Any] = {}
    if not is_head:
        drafts["d"] = load_model(draft_dir, device="cpu")
        if has:
            trim(drafts["d"], torch.arange(7, 7 + has))
    target = load_model(target_dir, device="cpu")
    models = LoadedModels("target", target, None, drafts)  # type: ignore[arg-type]
    draft = untrained(models, configs)
    if drafts and (size or has):
        assert drafts["d"].get_output_embeddings().weight.shape[0] == (size or has)
    costs = {} if kind == "medusa" else step_costs(models, draft, [3, 4, 5], [0.0])
    times = time_steps(configs, models, draft, [[3, 4, 5]], costs)
    assert min(times.answer_s, times.read_s, times.train_s, times.counted_s) > 0
    assert all(seconds > 0 for seconds in times.of_stages(whole).values())
