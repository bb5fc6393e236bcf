"""Laws 1, 2 and 4 for every proposer, every tree and every verifier that claims to be lossless.

Worlds of five tokens. At temperature 0 outputs equal the target's own token for token; above it a
chi-square test against the enumerated distribution; a row's output never depends on its batch
mates. Each test runs a covering array: every valid pair of proposer, tree, verifier and batch
occurs in one of its rows (`rows_of`).
"""

import copy
import itertools
from collections.abc import Callable
from dataclasses import replace
from functools import cache
from typing import Any

import pytest
import torch
from torch._dynamo.utils import counters

import draftsmith.decode.propose.static_tree
from draftsmith.core.sampling import Sampling, draw_with_replacement, generator, probs
from draftsmith.decode import (
    PROPOSERS,
    VERIFIERS,
    DraftModelProposer,
    HeadProposer,
    LookaheadProposer,
    LookupFirst,
    PromptLookupProposer,
    Proposer,
    SpeculativeDecoder,
    Tree,
    parse_tree,
)
from draftsmith.decode.propose.network_proposer import NetworkProposer
from draftsmith.decode.propose.retrieval import RetrievalProposer
from draftsmith.decode.suffix_index import SuffixIndex
from draftsmith.drafts.draft_vocabulary import trim
from draftsmith.drafts.heads import HEADS, Head
from draftsmith.drafts.vocabulary import VocabularyMap, attach
from tests.chi_square import chi_square, counts_of, exact_distribution
from tests.tiny_models import random_llama, stirred

VOCAB = 5
LENGTH = 3
DRAWS = 4_000
PROMPT = [1, 3]
PROMPTS = [[1, 3], [2], [4, 0, 3, 3, 1], [0, 1, 0, 1, 0]]
NEW_TOKENS = 12
GREEDY = Sampling(temperature=0.0)
SAMPLED = Sampling(temperature=0.8, top_p=0.95)
SAMPLINGS = {
    "T=1": Sampling(temperature=1.0),
    "T=0.6": Sampling(temperature=0.6),
    "top_k=3": Sampling(temperature=1.0, top_k=3),
    "top_p=0.7": Sampling(temperature=1.3, top_p=0.7),
}


@cache
def llama(seed, vocabulary=VOCAB, layers=2):
    return random_llama(
        seed, vocabulary, hidden=8, layers=layers, heads=1, positions=48, spread=0.45
    )


def head(kind, **options):
    fresh: Callable[..., Head] = HEADS[kind].fresh
    return HeadProposer(stirred(fresh(llama(2), **options).eval(), 0.25, seed=11))


def block(kind, **options):
    return head(kind, num_layers=2, block_size=4, target_layers=[0, 1], **options)


def retrieval():
    noise = torch.Generator().manual_seed(5)
    index = SuffixIndex.build(
        [torch.randint(VOCAB, (60,), generator=noise).tolist() for _ in range(3)]
    )
    return RetrievalProposer(index)


def of_another_vocabulary():
    """A draft of seven tokens that shares four with the target; the target's token 2 is two of its
    own.
    """
    draft = llama(7, VOCAB + 2)
    attach(draft, words())
    return DraftModelProposer(draft)


def of_a_part():
    """A draft with output rows for three of the five tokens."""
    draft = copy.deepcopy(llama(7))
    trim(draft, torch.tensor([0, 2, 3]))
    return DraftModelProposer(draft)


def words():
    """Token 2 of the target is two tokens of the draft."""
    shared = torch.tensor([2, 0, 5, 6]), torch.tensor([0, 1, 3, 4])
    return VocabularyMap(*shared, ((2,), (0,), (1, 4), (5,), (6,)), VOCAB)


def lookup_first(variant):
    drafting = VARIANTS[variant]()
    assert isinstance(drafting, NetworkProposer)
    return LookupFirst(drafting, alone=3, beside=True)


VARIANTS: dict[str, Callable[[], Proposer]] = {
    "draft": lambda: DraftModelProposer(llama(7)),
    "draft, padded": lambda: DraftModelProposer(llama(7, VOCAB + 3)),
    "draft, fewer tokens": lambda: DraftModelProposer(llama(7, VOCAB - 1)),
    "draft, of another vocabulary": of_another_vocabulary,
    "draft, of a part of the vocabulary": of_a_part,
    "several drafts": lambda: DraftModelProposer([llama(7), llama(8, VOCAB + 3, 1)]),
    "eagle": lambda: head("eagle"),
    "eagle3": lambda: head("eagle3", draft_vocab=[0, 1, 3, 4]),
    "mtp": lambda: head("mtp"),
    "medusa": lambda: head("medusa"),
    "hydra": lambda: head("hydra"),
    "dflash": lambda: block("dflash"),
    "dspark": lambda: block("dspark", draft_vocab=[0, 1, 3, 4]),
    "jetspec": lambda: block("jetspec", window=5),
    "blockwise": lambda: HeadProposer(head("medusa").head, chains_only=True),
    "prompt_lookup": PromptLookupProposer,
    "prompt_lookup, then draft": lambda: lookup_first("draft"),
    "prompt_lookup, then several drafts": lambda: lookup_first("several drafts"),
    "prompt_lookup, then another vocabulary": lambda: lookup_first("draft, of another vocabulary"),
    "prompt_lookup, then eagle3": lambda: lookup_first("eagle3"),
    "prompt_lookup, then medusa": lambda: lookup_first("medusa"),
    "prompt_lookup, then dspark": lambda: lookup_first("dspark"),
    "lookahead": lambda: LookaheadProposer(window=3, ngram=3, candidates=3),
    "retrieval": retrieval,
}
TREES = [
    "chain:3",
    "chain:3,stop=0.3",
    "kary:3,2",
    "kary:3,2,1,stop=0.15",
    "eagle2:depth=3,beam=2,nodes=5",
    "opt:nodes=4,depth=3,gain=0.3",
]
# The same with two levels each.
SHORT = dict(
    zip(
        TREES,
        [
            "chain:2",
            "chain:2,stop=0.5",
            "kary:2,2",
            "kary:2,2,stop=0.15",
            "eagle2:depth=2,beam=2,nodes=4",
            "opt:nodes=3,depth=2,gain=0.3",
        ],
        strict=True,
    )
)
LOSSLESS = [name for name, verifier in VERIFIERS.items() if verifier.lossless]


SOME_ROWS = [3, 1, 0, 2]
BATCHES = ([0], SOME_ROWS, [2, 0])
Row = tuple[str, str, list[int]]


@cache
def proposer(variant):
    return VARIANTS[variant]()


def decoder(variant, tree, verifier):
    drafting = proposer(variant)
    shape = drafting.default_tree() if isinstance(drafting, LookaheadProposer) else tree
    return SpeculativeDecoder(llama(2), drafting, shape, verifier)


@cache
def valid(variant):
    """The pairs of tree and verifier that this proposer takes; a refusal is one line with a
    reason.
    """
    pairs = []
    for tree, verifier in itertools.product(TREES, LOSSLESS):
        try:
            decoder(variant, tree, verifier)
        except ValueError as error:
            assert "\n" not in str(error) and len(str(error)) > 20, error
            continue
        pairs.append((tree, verifier))
    return pairs


@cache
def covering_array():
    """Rows (variant, tree, verifier, batch) that hold every valid pair of two values, chosen
    greedily.
    """

    def pairs(row):
        return set(itertools.combinations(enumerate(row), 2))

    rows = {
        row: pairs(row)
        for v in VARIANTS
        for t, n in valid(v)
        for b in range(len(BATCHES))
        if (row := (v, t, n, b))
    }
    missing, chosen = set[Any]().union(*rows.values()), []
    while missing:
        chosen.append(max(rows, key=lambda row: len(rows[row] & missing)))
        missing -= rows[chosen[-1]]
    return chosen


def rows_of(variant):
    return [
        (tree, verifier, BATCHES[batch])
        for v, tree, verifier, batch in covering_array()
        if v == variant
    ]


def run(made, rows, sampling):
    batch = made.generate(
        [PROMPTS[r] for r in rows], sampling, NEW_TOKENS, [generator(r) for r in rows]
    )
    return batch.generations


@cache
def own_greedy(row):
    prompt = torch.tensor([PROMPTS[row]])
    output = llama(2).generate(
        prompt,
        attention_mask=torch.ones_like(prompt),
        do_sample=False,
        max_new_tokens=NEW_TOKENS,
        eos_token_id=None,
        pad_token_id=0,
    )
    return [int(token) for token in output[0, len(PROMPTS[row]) :]]


# The trees of those that do not take all `TREES`.
FEWER_TREES = {
    "several drafts": TREES[:4],
    "prompt_lookup, then several drafts": TREES[:4],
    "blockwise": TREES[:2],
    "prompt_lookup": TREES[:3],
    "retrieval": ["chain:3", "kary:3,2"],
}


def allowed(variant):
    """The pairs of tree and verifier that a proposer should take by the table of rules."""
    copies = variant in PROPOSERS and not PROPOSERS[variant].draws
    pairs = set()
    for text, name in itertools.product(FEWER_TREES.get(variant, TREES), LOSSLESS):
        tree, rule = parse_tree(text), VERIFIERS[name]
        if rule.chains_only and not (tree.is_chain and variant != "lookahead"):
            continue
        if (copies or tree.grows) and "deterministic" not in rule.drawings:
            continue
        if rule.several_drafts or "several drafts" not in variant:
            pairs.add((text, name))
    return pairs


def test_every_proposer_and_every_verifier_is_here():
    kinds = {variant.split(",")[0] for variant in VARIANTS} - {"several drafts"}
    assert kinds == set(PROPOSERS)
    assert {verifier for variant in VARIANTS for _, verifier in valid(variant)} == set(LOSSLESS)
    assert {variant: set(valid(variant)) for variant in VARIANTS} == {
        variant: allowed(variant) for variant in VARIANTS
    }


@pytest.mark.parametrize("variant", VARIANTS)
def test_greedy_is_the_targets_own(variant):
    accepted = 0
    for tree, verifier, rows in rows_of(variant):
        generations = run(decoder(variant, tree, verifier), rows, GREEDY)
        assert [g.output_ids for g in generations] == [own_greedy(r) for r in rows], (
            tree,
            verifier,
        )
        accepted += sum(g.stats.accepted for g in generations)
    assert accepted > 0, "nothing was ever accepted, so nothing was tried"


@pytest.mark.parametrize("variant", VARIANTS)
def test_a_row_does_not_depend_on_its_batch_mates(variant):
    for number, (tree, verifier, _) in enumerate(rows_of(variant)):
        together = run(decoder(variant, tree, verifier), SOME_ROWS, SAMPLED)
        place = number % len(SOME_ROWS)
        alone = run(decoder(variant, tree, verifier), [SOME_ROWS[place]], SAMPLED)[0]
        assert (alone.output_ids, alone.stats) == (
            together[place].output_ids,
            together[place].stats,
        ), (tree, verifier)


@pytest.mark.parametrize(
    "variant", ["draft", "another vocabulary", "eagle3", "medusa", "dspark", "several drafts"]
)
def test_after_copies_a_draft_drafts_as_if_it_had_read_the_whole_text(variant, monkeypatch):
    session = draftsmith.decode.propose.static_tree.StaticTreeSession
    propose = session.propose
    text: list[int] = []
    seen: list[tuple[list[int], list[int]]] = []

    def recorded(self, u_BN):
        proposal = propose(self, u_BN)
        seen.append((list(text), proposal.tokens_BM[0].tolist()))
        return proposal

    monkeypatch.setattr(session, "propose", recorded)
    joined = decoder(f"prompt_lookup, then {variant}", "kary:2,1", "exact")
    assert isinstance(joined.proposer, LookupFirst)
    alone = SpeculativeDecoder(llama(2), joined.proposer.draft, "kary:2,1", "exact")
    copied = skipped = 0
    # After a prompt of one token an EAGLE head has read that token, without a state before it.
    for prompt in [prompt for prompt in PROMPTS if len(prompt) > 1]:
        text[:] = prompt
        batch = joined.generate(
            [prompt], GREEDY, NEW_TOKENS, eos_ids=(), on_tokens=lambda _, ids, __: text.extend(ids)
        )
        stats = batch.generations[0].stats
        steps = list(seen)
        # Where a copy stands alone the draft is not asked.
        assert 0 < len(steps) <= stats.target_calls
        for before, tokens in steps:
            seen.clear()
            alone.generate([before], GREEDY, 1)
            assert seen[0][1] == tokens
        seen.clear()
        copied += stats.copied_accepted
        skipped += stats.target_calls - len(steps)
    assert copied and skipped


@pytest.mark.parametrize("variant", [*VARIANTS, "none"])
def test_greedy_steps_on_the_host_are_those_of_tensors(variant, monkeypatch):
    """Greedily on a CPU, and where nothing is drafted, lists stand for the tensors of verification
    and of drafting a chain: outputs and counts are those of the functions of tensors, which a rule
    that is not in the table and a recorded session go through.
    """
    rule = replace(VERIFIERS["exact"], name="one of my own")
    session = draftsmith.decode.propose.static_tree.StaticTreeSession
    rows = [0, 1, 2, 3]
    if variant == "none":
        made = SpeculativeDecoder(llama(2))
        both = run(made, rows, GREEDY), run(made, rows, SAMPLED)
        made.verifier = rule
        assert (run(made, rows, GREEDY), run(made, rows, SAMPLED)) == both
        return
    for tree in (
        "chain:3",
        "chain:3,stop=0.3",
        "kary:3,2,1,stop=0.15",
        "eagle2:depth=3,beam=2,nodes=5",
    ):
        try:
            found = run(decoder(variant, tree, "exact"), rows, GREEDY)
        except ValueError:
            continue  # not every proposer takes every tree
        with monkeypatch.context() as patch:
            patch.setattr(
                session, "_most_probable_chain", lambda self: session.of_tensors(self, None)
            )
            drafting = proposer(variant)
            shape = drafting.default_tree() if isinstance(drafting, LookaheadProposer) else tree
            assert run(SpeculativeDecoder(llama(2), drafting, shape, rule), rows, GREEDY) == found


def statistic(made, sampling, draws=DRAWS, significance=1e-5):
    """Chi-square of decoded rows against the exact distribution over its critical value; inf if
    impossible.
    """
    generators = [generator(1000 + row) for row in range(draws)]
    batch = made.generate([PROMPT] * draws, sampling, LENGTH, generators)
    counts = counts_of([g.output_ids for g in batch.generations], VOCAB)
    return chi_square(counts, exact_distribution(llama(2), PROMPT, LENGTH, sampling), significance)


# The fast tests hold every verifier and nearly every proposer once; the slow ones every pair.
def is_quick(variant, verifier):
    """Whether the fast tests hold it."""
    others = ("draft,", "several", "dspark", "jetspec", "lookahead", "prompt_lookup, then")
    return variant == "draft" or verifier == "exact" and not variant.startswith(others)


@pytest.mark.parametrize(
    ("variant", "verifier"),
    [
        pytest.param(
            variant,
            verifier,
            marks=[] if is_quick(variant, verifier) else [pytest.mark.slow],
        )
        for variant, verifier in itertools.product(VARIANTS, LOSSLESS)
    ],
)
def test_output_distribution_is_the_targets(variant, verifier):
    trees = sorted({tree for tree, name, _ in rows_of(variant) if name == verifier})
    if not trees:
        pytest.skip(f"{variant} gives nothing that {verifier} is valid for")
    for tree in trees:
        assert statistic(decoder(variant, tree, verifier), SAMPLED) < 1, tree


# Verifiers and ways to sample meet in one function's distributions, so that each is tried, and not
# every two.
@pytest.mark.slow
@pytest.mark.parametrize(
    ("verifier", "sampling"), list(zip(LOSSLESS, itertools.cycle(SAMPLINGS), strict=False))
)
def test_every_way_to_sample_is_the_targets(verifier, sampling):
    for tree in ("chain:3", "kary:2,2,2"):
        if tree == "chain:3" or not VERIFIERS[verifier].chains_only:
            assert (
                statistic(decoder("draft", tree, verifier), SAMPLINGS[sampling], 6_000, 1e-4) < 1
            ), tree


@pytest.mark.slow
@pytest.mark.parametrize(("verifier", "tree"), [("speculative", "chain:3"), ("mcsd", "kary:3,2")])
def test_output_distribution_is_the_targets_in_a_large_sample(verifier, tree):
    assert statistic(decoder("draft", tree, verifier), SAMPLINGS["T=1"], 30_000, 1e-4) < 1


def test_the_distributions_differ_enough_to_tell():
    for sampling in SAMPLINGS.values():
        p, q = (exact_distribution(llama(seed), PROMPT, LENGTH, sampling) for seed in (2, 7))
        assert 0.1 < float(torch.minimum(p, q).sum()) < 0.8
        assert int((p * DRAWS > 8).sum()) >= 6 and abs(float(p.sum()) - 1) < 1e-5


@pytest.mark.parametrize("verifier", ["exact", "mcsd", "greedy"])
@pytest.mark.parametrize(
    "parents",
    [
        (-1, -1, 1, 2),
        pytest.param((-1, -1, 0, 1, 3), marks=pytest.mark.slow),
        pytest.param((-1, -1, -1, 0, 1, 2, 3, 4, 5), marks=pytest.mark.slow),
    ],
)
def test_below_a_node_that_does_not_exist_there_is_nothing(verifier, parents):
    """With fewer tokens than siblings a node is missing, and so is all that hangs below it, however
    deep.
    """
    made = SpeculativeDecoder(llama(2), proposer("draft"), Tree(parents), verifier)
    for sampling in (Sampling(temperature=1.0, top_k=1), Sampling(temperature=1.3, top_k=2)):
        assert statistic(made, sampling) < 1 or sampling.top_k == 1
        for row in run(made, [0, 1, 2, 3], sampling):
            assert all(0 <= token < VOCAB for token in row.output_ids)
            if sampling.top_k == 1:
                # One chain exists at each step: the tree's first child everywhere.
                chain = Tree(parents).children
                length, at = 0, 0
                while chain[at]:
                    at, length = chain[at][0], length + 1
                assert row.stats.proposed == length * row.stats.target_calls


@pytest.mark.slow
def test_a_broken_rule_is_rejected(monkeypatch):
    """The same test, with one thing wrong at a time."""
    made = decoder("draft", "kary:3,2", "mcsd")
    assert statistic(made, SAMPLED, 8_000) < 1
    with monkeypatch.context() as patch:
        # Children drawn with replacement under the rule for draws without.
        patch.setattr(
            draftsmith.decode.propose.static_tree, "draw_without_replacement", draw_with_replacement
        )
        assert statistic(made, SAMPLED, 8_000) > 1.5
    with monkeypatch.context() as patch:
        # A greedy draft that the verifier believes was sampled (transformers issue 32867).
        patch.setattr(draftsmith.decode.propose.static_tree, "draw", lambda q, u: q.argmax(-1))
        assert statistic(decoder("draft", "chain:3", "speculative"), SAMPLED, 8_000) > 1.5
    with monkeypatch.context() as patch:
        # After a refusal, a draw from p instead of (p - q)+.
        patch.setattr("draftsmith.decode.verify.chains.refuse", lambda p, q, share: (p, None))
        assert statistic(decoder("draft", "chain:3", "speculative"), SAMPLED, 8_000) > 1.5
    with monkeypatch.context() as patch:
        # The target's distribution without its temperature.
        patch.setattr(
            "draftsmith.decode.step.probs",
            lambda logits, sampling: probs(1.5 * logits, sampling),
        )
        assert statistic(made, SAMPLED, 8_000) > 1.5
    with monkeypatch.context() as patch:
        # Drawn nodes pruned afterwards, the improbable first.
        whole = draftsmith.decode.propose.static_tree.StaticTreeSession._proposal

        def pruned(self, tokens_BM, *rest):
            kept = tokens_BM.masked_fill(tokens_BM % 2 == 0, -1)
            return whole(self, kept, *rest)

        patch.setattr(draftsmith.decode.propose.static_tree.StaticTreeSession, "_proposal", pruned)
        assert statistic(made, SAMPLED, 8_000) > 1.5


@pytest.mark.slow
def test_a_confidence_may_only_use_what_precedes_its_token(monkeypatch):
    """Stopping by a block drafter's confidence is lossless; the length with the greatest confidence
    of a whole drawn chain is not, because the confidence behind a token depends on that token
    (DSpark, arXiv 2607.05147, appendix).
    """
    drafting = block("dspark")
    with torch.no_grad():
        # It depends on the token before its slot alone.
        drafting.head.get_parameter("markov_head.markov_w1.weight")[:, 0] = torch.tensor(
            [2.0, -2, 1, 0, -1]
        )
        drafting.head.get_parameter("confidence_head.proj.weight").zero_()[:, 8] = 2
    made = SpeculativeDecoder(llama(2), drafting, "chain:3,stop=0.3", "speculative")
    assert statistic(made, SAMPLED, 8_000) < 1
    drafted = [(g.stats.proposed, g.stats.target_calls) for g in run(made, [0, 1, 2, 3], SAMPLED)]
    assert all(calls < proposed < 3 * calls for proposed, calls in drafted)
    session = draftsmith.decode.propose.static_tree.StaticTreeSession
    whole = session._proposal

    def looking_ahead(self, tokens_BM, *rest):
        network = self.network
        above_BD = torch.cat([network.roots_B1, tokens_BM[:, 1:-1]], dim=1)
        sure_BD = torch.cat(
            [network._sure(slot, above_BD[:, slot : slot + 1]) for slot in range(2)], dim=1
        )
        cut_BM = torch.arange(3) > sure_BD.argmax(1, keepdim=True)
        return whole(self, tokens_BM.masked_fill(cut_BM, -1), *rest)

    monkeypatch.setattr(session, "_proposal", looking_ahead)
    made = SpeculativeDecoder(llama(2), drafting, "chain:2", "speculative")
    assert statistic(made, SAMPLED, 8_000) > 1.5


def pair_of(variant, tree, verifier, backend):
    """A decoder that compiles its steps, and one that does not."""
    proposer, other = VARIANTS[variant](), VARIANTS[variant]()
    shape = proposer.default_tree() if isinstance(proposer, LookaheadProposer) else tree
    return (
        SpeculativeDecoder(llama(2), proposer, shape, verifier, compile=backend),
        SpeculativeDecoder(llama(2), other, shape, verifier, fast=False),
    )


def told(generations):
    return [(each.output_ids, each.from_draft, each.stats) for each in generations]


def check_as_without(variant, tree, verifier):
    static, eager = pair_of(variant, tree, verifier, "inductor")
    for sampling in (GREEDY, SAMPLED):
        # Rows leave the batch in the first call; the second is another batch in the same memory.
        for rows in (SOME_ROWS, [0, 2]):
            assert told(run(static, rows, sampling)) == told(run(eager, rows, sampling)), (
                tree,
                verifier,
                rows,
            )


@pytest.mark.usefixtures("replayed")
@pytest.mark.parametrize("variant", [variant for variant in VARIANTS if "," not in variant])
def test_every_proposer_decodes_as_without_compiling(variant):
    check_as_without(variant, *valid(variant)[-1])


@pytest.mark.slow
@pytest.mark.usefixtures("replayed")
@pytest.mark.parametrize("variant", VARIANTS)
def test_every_pair_decodes_as_without_compiling(variant):
    for tree, verifier, _ in rows_of(variant):
        check_as_without(variant, tree, verifier)


@pytest.mark.parametrize(
    ("variant", "tree", "verifier"),
    [
        ("draft", "chain:2", "speculative"),
        pytest.param("eagle3", "kary:2,2", "mcsd", marks=pytest.mark.slow),
    ],
)
def test_a_step_is_one_graph(variant, tree, verifier):
    check_one_graph(variant, tree, verifier, "eager", SAMPLED)


@pytest.mark.slow(15)
@pytest.mark.parametrize("variant", VARIANTS)
def test_every_step_is_one_graph(variant):
    # Tracing takes a second a step. How a tree is drafted is the same code for every network, and a
    # verifier is the same code whatever proposed: proposers take turns with the trees, two each,
    # and one, which drafts outside of steps, meets every verifier. A third level is traced as the
    # second. Other vocabularies of a draft, and a network behind lookup, meet one tree.
    last = list(dict(valid(variant)).items())
    turn = list(VARIANTS).index(variant)
    chosen = {last[turn % len(last)]}
    if "," not in variant:
        chosen.add(last[(turn + len(last) // 2) % len(last)])
    if variant == "medusa":
        for name in LOSSLESS:
            chosen.add(("chain:3" if VERIFIERS[name].chains_only else "kary:3,2", name))
    # What is traced does not depend on the backend. That AOTAutograd takes it too, in which half of
    # the time went, is seen at one tree of each network.
    for index, (tree, verifier) in enumerate(sorted(chosen)):
        is_first = index == 0 and "lookup, then" not in variant
        backend = "aot_eager" if is_first else "eager"
        check_one_graph(variant, SHORT[tree], verifier, backend, SAMPLED)


def check_one_graph(variant, tree, verifier, backend, sampling):
    torch._dynamo.reset()
    counters.clear()
    static, eager = pair_of(variant, tree, verifier, backend)
    # One row, so that there are few shapes, and each takes a second to trace.
    first, expected = (made.generate([PROMPTS[0]], sampling, 6, seed=1) for made in (static, eager))
    assert told(first.generations) == told(expected.generations), (tree, verifier)
    assert static.compile_s == first.compile_s > 0
    assert not counters["graph_break"]
    # One graph a step: nothing is compiled twice, because nothing it was compiled for has changed.
    assert (
        counters["stats"]["unique_graphs"] == sum(steps.count for steps in static.every_steps) > 0
    )
    again = static.generate([PROMPTS[0]], sampling, 6, seed=1)
    assert told(first.generations) == told(again.generations) and again.compile_s == 0
