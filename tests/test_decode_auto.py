"""What `--tree auto` drafts: the laws hold while it changes its mind, and it does what pays."""

import pytest
import torch

from draftsmith import load_pair
from draftsmith.core.sampling import Sampling, generator
from draftsmith.decode import (
    VERIFIERS,
    DraftModelProposer,
    HeadProposer,
    LookupFirst,
    SpeculativeDecoder,
)
from draftsmith.decode.batch_run import BatchRun
from draftsmith.decode.propose import acceptance, choosing
from draftsmith.decode.propose.choosing import chooser, name_of, relative_cost
from draftsmith.decode.propose.prompt_lookup import PromptLookupProposer
from draftsmith.decode.propose.retrieval import RetrievalProposer
from draftsmith.decode.step_costs import StepCosts, fit, measure
from draftsmith.decode.suffix_index import SuffixIndex
from draftsmith.drafts.heads import HEADS
from tests.chi_square import chi_square, counts_of, exact_distribution
from tests.tiny_models import random_llama, stirred

TARGET = "draftsmith/demo/pair/target"
VOCAB = 5
PROMPTS = [[1, 3], [2], [4, 0, 3, 3, 1], [0, 1, 0, 1, 0]]
NEW_TOKENS = 24
GREEDY = Sampling(temperature=0.0)
SAMPLED = Sampling(temperature=0.9)
CHEAP = StepCosts({1: 1.0, 2: 1.02, 3: 1.05, 5: 1.1, 9: 1.2}, 0.1, {1: 0.05, 4: 0.08})
NEAR = StepCosts({1: 1.0, 2: 1.15, 3: 1.3, 5: 1.6, 9: 2.2}, 0.2, {1: 0.15, 4: 0.2})
# A draft that pays only if most of it is accepted.
SLOW = StepCosts(NEAR.target, 0.7, {1: 0.7, 4: 0.7})
DEAR = StepCosts({1: 1.0, 2: 2.0, 3: 3.0, 5: 5.0, 9: 9.0}, 0.5, {1: 0.5, 4: 0.5})


def llama(seed, layers=2):
    return random_llama(seed, VOCAB, hidden=8, layers=layers, heads=1, positions=96, spread=0.45)


def head(kind, **options):
    return HeadProposer(stirred(HEADS[kind].fresh(llama(2), **options).eval(), 0.25, seed=11))


PROPOSERS = {
    "draft": lambda: DraftModelProposer(llama(3)),
    "itself": lambda: DraftModelProposer(llama(2)),
    "several": lambda: DraftModelProposer([llama(3), llama(4)]),
    "eagle3": lambda: head("eagle3", draft_vocab=range(VOCAB)),
    "medusa": lambda: head("medusa", num_heads=3),
    "dflash": lambda: head("dflash", num_layers=2, block_size=4, target_layers=[0, 1]),
    "prompt_lookup": PromptLookupProposer,
    "both": lambda: LookupFirst(DraftModelProposer(llama(3))),
}


@pytest.fixture
def wavering(monkeypatch):
    """Little is believed in advance, and pauses are short: choices follow the newest places."""
    monkeypatch.setattr(acceptance, "PRIOR", 0.3)
    monkeypatch.setattr(choosing, "GAIN", 1.0)
    monkeypatch.setattr(choosing, "TRIAL", 10.0)
    monkeypatch.setattr(choosing, "LONGEST_PAUSE", 3)


def decoder(name, costs=NEAR, verifier=None):
    rule = verifier and VERIFIERS[verifier]
    made = chooser(PROPOSERS[name](), llama(2), rule, lambda sampling: costs, 0.5)
    return SpeculativeDecoder(llama(2), made, verifier=verifier)


def run(made, prompts, sampling, seeds):
    generators = [generator(seed) for seed in seeds]
    return made.generate(prompts, sampling, NEW_TOKENS, generators, eos_ids=()).generations


@pytest.mark.usefixtures("wavering")
@pytest.mark.parametrize("name", PROPOSERS)
def test_greedy_is_the_targets_own_whatever_is_chosen(name):
    alone = run(SpeculativeDecoder(llama(2)), PROMPTS, GREEDY, range(4))
    for costs in (CHEAP, NEAR, DEAR):
        for rows in ([0], [3], [0, 1, 2, 3]):
            found = run(decoder(name, costs), [PROMPTS[r] for r in rows], GREEDY, rows)
            assert [each.output_ids for each in found] == [alone[r].output_ids for r in rows]
            assert all(sum(e.stats.chosen.values()) == e.stats.target_calls for e in found)


@pytest.mark.usefixtures("wavering")
@pytest.mark.parametrize(
    ("name", "verifier"), [*((name, None) for name in PROPOSERS), ("draft", "greedy")]
)
def test_above_temperature_0_a_row_chooses_by_itself(name, verifier):
    made = decoder(name, verifier=verifier)
    together = run(made, PROMPTS, SAMPLED, range(4))
    again = run(made, PROMPTS, SAMPLED, range(4))
    assert [e.output_ids for e in again] == [e.output_ids for e in together]
    for row in range(4):
        (alone,) = run(made, [PROMPTS[row]], SAMPLED, [row])
        assert alone.output_ids == together[row].output_ids
        assert alone.stats == together[row].stats
    chosen = {name for each in together for name in each.stats.chosen}
    assert len(chosen) > 1


@pytest.mark.usefixtures("wavering")
@pytest.mark.parametrize("verifier", ["exact", "naive", "block", "mcsd", "speculative", "kseq"])
def test_steps_without_a_tree_are_judged_on_the_host_as_by_the_rule(monkeypatch, verifier):
    made = decoder("both", SLOW, verifier=verifier)
    found = run(made, PROMPTS, SAMPLED, range(4))
    assert any("lookup" in name for each in found for name in each.stats.chosen)
    monkeypatch.setattr(BatchRun, "_follows", lambda *_: False)
    assert run(made, PROMPTS, SAMPLED, range(4)) == found


@pytest.mark.usefixtures("wavering")
@pytest.mark.parametrize(
    ("name", "verifier"),
    [
        ("draft", None),
        ("draft", "exact"),
        ("draft", "greedy"),
        ("eagle3", None),
        ("both", None),
        ("several", None),
    ],
)
def test_outputs_follow_the_targets_law_while_choices_follow_the_text(name, verifier):
    draws = 4000
    made = decoder(name, verifier=verifier)
    generators = [generator(1000 + row) for row in range(draws)]
    batch = made.generate([[1, 3, 1, 3]] * draws, SAMPLED, 3, generators, eos_ids=())
    assert len({name for row in batch.generations for name in row.stats.chosen}) > 1
    counts = counts_of([row.output_ids for row in batch.generations], VOCAB)
    exact = exact_distribution(llama(2), [1, 3, 1, 3], 3, SAMPLED)
    assert chi_square(counts, exact, 1e-5) < 1


def simulated(alpha, costs, steps, seed=0):
    """Choices against a draft whose tokens stay with chance `alpha`, and the rate that results."""
    random = torch.Generator().manual_seed(seed)
    past = choosing.Past(0.5)
    prices = choosing.prices_of(costs, choosing.menu(None, chains_only=False))
    names = []
    tokens = seconds = 0.0
    for _ in range(steps):
        past.step(prices)
        choice = past.choose(0, False, prices)
        names.append(choice.name)
        seconds += costs.step(choice.widths)
        for depth, _ in enumerate(choice.widths):
            stays = float(torch.rand(1, generator=random)) < alpha
            past.draft.read(depth, float(stays))
            if not stays:
                past.draft.read_siblings(1.0, (0.1, 0.15, 0.2))
                break
            tokens += 1
        tokens += 1
    return names, tokens / seconds * costs.step(())


def test_a_hopeless_draft_costs_next_to_nothing():
    names, rate = simulated(0.02, NEAR, 400)
    assert rate > 0.97 and names.count("no draft") > 370


def test_a_good_draft_is_drafted_deep():
    names, rate = simulated(0.9, CHEAP, 400)
    _, best = simulated(0.9, CHEAP, 1)
    assert len(set(names[-100:])) <= 2 and rate > 3


def test_at_break_even_it_seldom_changes_its_mind():
    """`chain:1` costs 1.35, and .35 of its tokens stay."""
    names, rate = simulated(0.35, NEAR, 1000)
    switches = sum(before != after for before, after in zip(names, names[1:], strict=False))
    assert switches < 90 and rate > 0.97


def test_a_cost_is_that_of_the_rows_and_of_the_levels():
    drafting = {(): 0.0, (1,): 0.4, (1, 1, 1): 0.9, (4,): 0.4, (4, 1): 1.0}
    target = {(): 1.0, (1,): 1.1, (1, 1, 1): 1.3, (4,): 1.4, (4, 1): 1.8}
    costs = fit(target, drafting)
    assert costs.step(()) == 1.0
    assert costs.step((1,)) == pytest.approx(1.5)
    assert costs.step((1, 1, 1)) == pytest.approx(2.2)
    assert costs.step((4, 1)) == pytest.approx(2.8)
    assert costs.step((1,) * 4, drafts=False) == pytest.approx(1.4)
    assert costs.step((), rows=5) == pytest.approx(1.4)
    prices = choosing.prices_of(costs, [(1,)])
    assert relative_cost({"chain:1": 1, "no draft": 1, "lookup:4": 2}, prices) == pytest.approx(
        1.325
    )
    assert relative_cost({}, prices) is None


def test_costs_are_measured_for_every_kind_of_pair():
    for name in ("draft", "medusa"):
        costs = measure(llama(2), PROPOSERS[name](), SAMPLED, trees=True)
        sizes = [costs.step((1,) * count) for count in range(4)]
        assert sizes == sorted(sizes) and sizes[0] > 0
    assert measure(llama(2), None, GREEDY, trees=True).first == 0


def test_only_what_can_choose_is_asked_to():
    index = SuffixIndex.build([[1, 2, 3]])
    assert chooser(RetrievalProposer(index), llama(2), None, lambda s: NEAR, 0.5) is None
    chains = chooser(PROPOSERS["draft"](), llama(2), None, lambda s: NEAR, 0.5)
    assert chains is not None and "kary:4" in map(name_of, chains.menu)


@pytest.mark.parametrize("sampling", [GREEDY, SAMPLED])
def test_a_copy_is_longer_than_a_short_head_drafts(sampling, monkeypatch):
    """Copies promise so much that eight tokens are copied, beside heads of three levels."""
    monkeypatch.setattr(choosing, "COPY_PRIOR", (1.0, 1.0))
    period = [1, 3, 0, 4, 2, 2, 0, 1, 4, 3, 1]
    (row,) = run(decoder("medusa", CHEAP), [period * 3], sampling, [0])
    assert "lookup:8" in row.stats.chosen


def test_a_proposer_of_ones_own_drafts_as_it_was_made():
    own = PromptLookupProposer(max_ngram=2)
    decoding = load_pair(TARGET).decoding(proposer=own)
    assert decoding.decoder.proposer is own
    assert decoding.method is not None and decoding.method.tree == "chain:4"


def test_a_damaged_table_of_costs_is_measured_again(tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))

    def costs():
        proposer = load_pair(TARGET).decoding(proposer="prompt_lookup").decoder.proposer
        assert isinstance(proposer, choosing.ChoosingProposer)
        return proposer.costs(GREEDY)

    measured = costs()
    (file,) = tmp_path.rglob("*.json")
    for damage in ('{"target": 3}', '{"target": {}, "first": 0, "more": {}}', "["):
        file.write_text(damage)
        assert costs().target.keys() == measured.target.keys()
