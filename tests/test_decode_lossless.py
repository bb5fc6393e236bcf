"""Laws 1, 2 and 4 as one table: proposer x tree x rule x runner, with `decode.reference` as oracle.

A world has five tokens. A model in it runs by its own forward, by the lean one, in the kernel, as
recorded steps, or (a target with a state) from its own cache. At temperature 0 outputs are those of
the reference, which knows no cache, no tree and no batch; above it a chi-square test compares them
with the enumerated distribution, and no row depends on its batch mates or on the runner. Every
valid pair of proposer, tree and rule occurs in a row of the table (`rows_of`), and every runner
with each of them.
"""

import copy
import itertools
from collections.abc import Callable
from dataclasses import dataclass
from functools import cache
from typing import Any, NamedTuple

import pytest
import torch
from torch._dynamo.utils import counters
from transformers import PreTrainedModel

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
    reference,
    take_over,
)
from draftsmith.decode.native import kernel
from draftsmith.decode.propose.network_proposer import NetworkProposer
from draftsmith.decode.propose.retrieval import RetrievalProposer
from draftsmith.decode.suffix_index import SuffixIndex
from draftsmith.drafts.draft_vocabulary import trim
from draftsmith.drafts.heads import HEADS
from draftsmith.drafts.vocabulary import VocabularyMap, attach
from tests.chi_square import chi_square, counts_of, exact_distribution
from tests.hybrid_models import HYBRIDS, SOME_HYBRIDS, hybrid
from tests.tiny_models import penalised, random_llama, stirred
from tests.train_laws import FAMILIES, tiny_family

VOCAB = 5
LENGTH = 3
DRAWS = 4_000
PROMPT = [1, 3]
PROMPTS = [[1, 3], [2], [4, 0, 3, 3, 1], [0, 1, 0, 1, 0]]
LONGER = [[3, 1, 4, 1, 5, 9, 2, 6, 5], [7], [2, 7, 1, 8]]
NEW_TOKENS = 12
PENALTIES: dict[str, Any] = {
    "repetition_penalty": 0.8,
    "presence_penalty": 0.3,
    "frequency_penalty": 0.3,
}
GREEDY = Sampling(temperature=0.0)
PENALISED = Sampling(temperature=0.0, **PENALTIES)
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


@dataclass(frozen=True)
class World:
    """A target, and how it and its drafts run."""

    target: PreTrainedModel
    fast: bool = True
    compile: str = ""
    packed: bool = False
    chains_only: bool = False

    def owned(self, model):
        """A copy of a model or head that the kernel may take."""
        if self.packed:
            model = copy.deepcopy(model)
            take_over(model)
        return model

    def drafts(self, *models):
        return DraftModelProposer([self.owned(model) for model in models], fast=self.fast)

    def head(self, kind, *, only_chains=False, **options):
        fresh: Callable[..., Any] = HEADS[kind].fresh
        head = self.owned(stirred(fresh(self.target, **options).eval(), 0.25, seed=11))
        return HeadProposer(head, chains_only=only_chains, fast=self.fast)

    def block(self, kind, **options):
        return self.head(kind, num_layers=2, block_size=4, target_layers=[0, 1], **options)

    def lookup_first(self, variant):
        drafting = VARIANTS[variant](self)
        assert isinstance(drafting, NetworkProposer)
        # Beside a chain is a branch, which a target with a state cannot verify.
        return LookupFirst(drafting, alone=3, beside=not self.chains_only)


@cache
def world(runner):
    if runner == "own cache":
        return World(hybrid("mamba2", vocabulary=VOCAB), chains_only=True)
    if runner == "kernel":
        target = copy.deepcopy(llama(2))
        take_over(target)
        return World(target, packed=True)
    compiled = "inductor" if runner == "recorded" else ""
    return World(llama(2), fast=runner != "plain", compile=compiled)


RUNNERS = [*(["kernel"] if kernel() else []), "lean", "recorded", "own cache", "plain"]


@pytest.fixture(autouse=True)
def _small_models_too(monkeypatch):
    """The kernel takes models of any size."""
    monkeypatch.setattr("draftsmith.decode.llama_forward.SMALLEST_MODEL", 0)
    monkeypatch.setattr("draftsmith.decode.head_forward.SMALLEST_MODEL", 0)


def retrieval(_):
    noise = torch.Generator().manual_seed(5)
    index = SuffixIndex.build(
        [torch.randint(VOCAB, (60,), generator=noise).tolist() for _ in range(3)]
    )
    return RetrievalProposer(index)


def of_another_vocabulary():
    """A draft of seven tokens that shares four with the target; the target's token 2 is two of its
    own.
    """
    draft = copy.deepcopy(llama(7, VOCAB + 2))
    shared = torch.tensor([2, 0, 5, 6]), torch.tensor([0, 1, 3, 4])
    attach(draft, VocabularyMap(*shared, ((2,), (0,), (1, 4), (5,), (6,)), VOCAB))
    return draft


def of_a_part():
    """A draft with output rows for three of the five tokens."""
    draft = copy.deepcopy(llama(7))
    trim(draft, torch.tensor([0, 2, 3]))
    return draft


VARIANTS: dict[str, Callable[[World], Proposer]] = {
    "draft": lambda it: it.drafts(llama(7)),
    "draft, padded": lambda it: it.drafts(llama(7, VOCAB + 3)),
    "draft, fewer tokens": lambda it: it.drafts(llama(7, VOCAB - 1)),
    "draft, of another vocabulary": lambda it: it.drafts(of_another_vocabulary()),
    "draft, of a part of the vocabulary": lambda it: it.drafts(of_a_part()),
    "several drafts": lambda it: it.drafts(llama(7), llama(8, VOCAB + 3, 1)),
    "eagle": lambda it: it.head("eagle"),
    "eagle3": lambda it: it.head("eagle3", draft_vocab=[0, 1, 3, 4]),
    "mtp": lambda it: it.head("mtp"),
    "medusa": lambda it: it.head("medusa"),
    "hydra": lambda it: it.head("hydra"),
    "dflash": lambda it: it.block("dflash"),
    "dspark": lambda it: it.block("dspark", draft_vocab=[0, 1, 3, 4]),
    "jetspec": lambda it: it.block("jetspec", window=5),
    "blockwise": lambda it: it.head("medusa", only_chains=True),
    "prompt_lookup": lambda _: PromptLookupProposer(),
    "prompt_lookup, then draft": lambda it: it.lookup_first("draft"),
    "prompt_lookup, then several drafts": lambda it: it.lookup_first("several drafts"),
    "prompt_lookup, then another vocabulary": lambda it: it.lookup_first(
        "draft, of another vocabulary"
    ),
    "prompt_lookup, then eagle3": lambda it: it.lookup_first("eagle3"),
    "prompt_lookup, then medusa": lambda it: it.lookup_first("medusa"),
    "prompt_lookup, then dspark": lambda it: it.lookup_first("dspark"),
    "lookahead": lambda _: LookaheadProposer(window=3, ngram=3, candidates=3),
    "retrieval": retrieval,
}
# Each with its short form, of two levels.
TREES = {
    "chain:3": "chain:2",
    "chain:3,stop=0.3": "chain:2,stop=0.5",
    "kary:3,2": "kary:2,2",
    "kary:3,2,1,stop=0.15": "kary:2,2,stop=0.15",
    "eagle2:depth=3,beam=2,nodes=5": "eagle2:depth=2,beam=2,nodes=4",
    "opt:nodes=4,depth=3,gain=0.3": "opt:nodes=3,depth=2,gain=0.3",
}
LOSSLESS = [name for name, verifier in VERIFIERS.items() if verifier.lossless]
# The trees of those that do not take all `TREES`.
FEWER_TREES = {
    "several drafts": list(TREES)[:4],
    "prompt_lookup, then several drafts": list(TREES)[:4],
    "blockwise": list(TREES)[:2],
    "prompt_lookup": list(TREES)[:3],
    "retrieval": ["chain:3", "kary:3,2"],
}
# Prompts, and the tokens that end a row.
SOME_ROWS = [3, 1, 0, 2]
BATCHES: list[tuple[list[int], tuple[int, ...]]] = [([0], ()), (SOME_ROWS, (4,)), ([2, 0], ())]


def allowed(variant):
    """The pairs of tree and rule that a proposer takes."""
    copies = variant in PROPOSERS and not PROPOSERS[variant].draws
    pairs = []
    for text, name in itertools.product(FEWER_TREES.get(variant, TREES), LOSSLESS):
        tree, rule = parse_tree(text), VERIFIERS[name]
        if rule.chains_only and not (tree.is_chain and variant != "lookahead"):
            continue
        if (copies or tree.grows) and "deterministic" not in rule.drawings:
            continue
        if rule.several_drafts or "several drafts" not in variant:
            pairs.append((text, name))
    return pairs


@cache
def table():
    """Rows (variant, tree, rule, runner) that hold every valid pair of two values."""
    rows = {}
    for variant, runner in itertools.product(VARIANTS, RUNNERS):
        for tree, rule in allowed(variant):
            chain = parse_tree(tree).is_chain and variant != "lookahead"
            if chain or runner != "own cache":
                row = (variant, tree, rule, runner)
                rows[row] = set(itertools.combinations(enumerate(row), 2))
    missing, chosen = set[Any]().union(*rows.values()), []
    while missing:
        chosen.append(max(rows, key=lambda row: len(rows[row] & missing)))
        missing -= rows[chosen[-1]]
    return chosen


class Row(NamedTuple):
    """One case of the table."""

    tree: str
    rule: str
    runner: str
    prompts: list[int]
    ends: tuple[int, ...]
    sampling: Sampling


@cache
def rows_of(variant):
    """The rows of a proposer, with batches and ways to be greedy in turn."""
    turns = zip(itertools.cycle(BATCHES), itertools.cycle((GREEDY, PENALISED)), strict=False)
    rows = [row[1:] for row in table() if row[0] == variant]
    found = []
    for (tree, rule, runner), ((prompts, ends), how) in zip(rows, turns, strict=False):
        found.append(Row(tree, rule, runner, prompts, ends, how))
    return found


@cache
def proposer(variant, runner="lean"):
    return VARIANTS[variant](world(runner))


def decoder(variant, tree, rule, runner="lean", compile=False):  # noqa: A002
    it = world(runner)
    backend = compile or it.compile or False
    # What a proposer records is one decoder's.
    drafting = VARIANTS[variant](it) if backend else proposer(variant, runner)
    shape = drafting.default_tree() if isinstance(drafting, LookaheadProposer) else tree
    return SpeculativeDecoder(it.target, drafting, shape, rule, fast=it.fast, compile=backend)


def run(made, rows, sampling, ends=()):
    prompts = [PROMPTS[row] for row in rows]
    streams = [generator(row) for row in rows]
    return made.generate(prompts, sampling, NEW_TOKENS, streams, eos_ids=ends).generations


def told(generations):
    return [(each.output_ids, each.from_draft, each.stats) for each in generations]


@cache
@torch.inference_mode()
def logits(runner, text):
    """Behind a text, by one forward of the whole of it."""
    return world(runner).target(input_ids=torch.tensor([text]), use_cache=False).logits[0, -1]


@cache
def oracle(runner, prompt, sampling):
    """The target's own greedy output by the reference, which is given no draft."""
    own = PENALTIES if sampling.penalises else {}

    def target(text):
        answer = text[len(prompt) :]
        return probs(penalised(logits(runner, tuple(text)), prompt, answer, own), GREEDY)

    steps = reference.decode(target, target, prompt, (), NEW_TOKENS, generator(0))
    return [token for (token,) in steps]


def test_the_table_is_whole():
    """Every proposer and every rule; what is not allowed is refused in a line."""
    kinds = {variant.split(",")[0] for variant in VARIANTS} - {"several drafts"}
    assert kinds == set(PROPOSERS)
    assert {rule for _, _, rule, _ in table()} == set(LOSSLESS)
    for variant, tree, rule in itertools.product(VARIANTS, TREES, LOSSLESS):
        if (tree, rule) not in allowed(variant):
            with pytest.raises(ValueError, match=r"^[^\n]{20,}$"):
                decoder(variant, tree, rule)


@pytest.mark.usefixtures("replayed")
@pytest.mark.parametrize("variant", VARIANTS)
def test_greedy_is_the_references_own(variant):
    accepted = 0
    for row in rows_of(variant):
        made = decoder(variant, row.tree, row.rule, row.runner)
        found = run(made, row.prompts, row.sampling, row.ends)
        for each, number in zip(found, row.prompts, strict=True):
            own = oracle(row.runner, tuple(PROMPTS[number]), row.sampling)
            end = next((at for at, token in enumerate(own, 1) if token in row.ends), None)
            assert each.output_ids == own[:end], row
            assert each.finish_reason == ("length" if end is None else "stop")
            accepted += each.stats.accepted
    assert accepted > 0, "nothing was ever accepted, so nothing was tried"


@pytest.mark.usefixtures("replayed")
@pytest.mark.parametrize("variant", VARIANTS)
def test_a_row_is_drawn_alike_in_any_company_and_by_any_runner(variant):
    """Tokens, which of them were drafted, and counts."""
    for number, row in enumerate(rows_of(variant)):
        made = decoder(variant, row.tree, row.rule, row.runner)
        one = decoder(
            variant, row.tree, row.rule, "own cache" if row.runner == "own cache" else "plain"
        )
        # Rows leave the batch in the first call; the second is another batch in the same memory.
        calls = [(SAMPLED, SOME_ROWS, row.ends)]
        if row.runner == "recorded":
            calls += [(SAMPLED, [2, 0], ()), (row.sampling, [2, 0], ())]
        for sampling, rows, ends in calls:
            place = number % len(rows)
            together = told(run(made, rows, sampling, ends))[place]
            assert told(run(one, [rows[place]], sampling, ends)) == [together], row


# Families beside those of `tests.train_laws`, and every kind of model with a state.
OWN_FAMILIES: dict[str, tuple[str, dict[str, Any]]] = {
    "llama, eager": ("llama", {"attn_implementation": "eager"}),
    "qwen2, mixed": (
        "qwen2",
        {
            "num_key_value_heads": 1,
            "use_sliding_window": True,
            "sliding_window": 5,
            "max_window_layers": 1,
        },
    ),
}
TARGETS = [
    *FAMILIES,
    *OWN_FAMILIES,
    *SOME_HYBRIDS,
    *(pytest.param(kind, marks=pytest.mark.slow) for kind in HYBRIDS if kind not in SOME_HYBRIDS),
]


@torch.inference_mode()
def steps_of_reference(target, draft, prompt, widths):
    """The tokens of each target call, by full forwards."""

    def of(model):
        return lambda text: probs(
            model(input_ids=torch.tensor([text]), use_cache=False).logits[0, -1],
            GREEDY if model is target else Sampling(),
        )

    return reference.decode(of(target), of(draft), prompt, widths, NEW_TOKENS, generator(0))


def steps_of(made, prompts, sampling, new_tokens):
    """The tokens of each target call of a decoder, by prompt."""
    steps: list[list[tuple[int, ...]]] = [[] for _ in prompts]

    def on_tokens(row, ids, _):
        steps[row].append(tuple(ids))

    made.generate(prompts, sampling, new_tokens, eos_ids=(), on_tokens=on_tokens)
    return steps


def most_probable_tree(draft, text, widths, _):
    """`reference.draft_tree` with the most probable siblings: independent draws of a one-hot q are
    one token, where the decoder offers several.
    """
    siblings: dict[reference.Branch, list[int]] = {}
    q_of: dict[reference.Branch, Any] = {}
    level: list[reference.Branch] = [()]
    for width in widths:
        for path in level:
            q_V = draft([*text, *path])
            siblings[path] = q_V.topk(width).indices.tolist()
            # Accepted where p is one-hot at it.
            q_of[path] = torch.zeros_like(q_V).index_fill(0, torch.tensor(siblings[path]), 1e-9)
        level = [(*path, token) for path in level for token in siblings[path]]
    return siblings | {leaf: [] for leaf in level}, q_of


@pytest.mark.usefixtures("replayed")
@pytest.mark.parametrize("name", TARGETS)
def test_greedily_each_call_takes_the_tokens_of_the_reference(name, monkeypatch):
    """A draft near the target, for every family and by every way to run: what is drafted from a
    cache is what is drafted from the whole text.
    """
    monkeypatch.setattr(reference, "draft_tree", most_probable_tree)
    with_state = name in HYBRIDS
    family, changes = OWN_FAMILIES.get(name, (name, {}))
    sizes = {"vocab_size": 17, "max_position_embeddings": 64}
    target = hybrid(name) if with_state else tiny_family(family, 1, 0.4, **sizes, **changes)
    # Some keep the states of a forward, which cannot be copied.
    fresh = hybrid.__wrapped__(name) if with_state else copy.deepcopy(target)
    draft = stirred(fresh, 0.05, seed=3)
    lengths = set()
    runners = ["own cache"] if with_state else [each for each in RUNNERS if each != "own cache"]
    for widths in [(1, 1, 1)] if with_state else [(1, 1, 1), (2, 1, 2)]:
        expected = [steps_of_reference(target, draft, each, widths) for each in LONGER]
        lengths |= {len(step) for steps in expected for step in steps}
        for runner in runners:
            it = World(target, fast=runner != "plain", packed=runner == "kernel")
            made = SpeculativeDecoder(
                it.owned(target),
                it.drafts(draft),
                widths,
                "exact",
                fast=it.fast,
                compile="inductor" if runner == "recorded" else False,
            )
            assert steps_of(made, LONGER, GREEDY, NEW_TOKENS) == expected, (runner, widths)
    assert len(lengths) > 1, "calls that all accept as much show nothing"


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


def statistic(made, sampling, draws=DRAWS, significance=1e-5):
    """Chi-square of decoded rows against the exact distribution over its critical value; inf if
    impossible.
    """
    streams = [generator(1000 + row) for row in range(draws)]
    batch = made.generate([PROMPT] * draws, sampling, LENGTH, streams, eos_ids=())
    counts = counts_of([each.output_ids for each in batch.generations], VOCAB)
    exact = exact_distribution(made.target, PROMPT, LENGTH, sampling)
    return chi_square(counts, exact, significance)


# The fast tests hold every rule and nearly every proposer once; the slow ones every pair.
def is_quick(variant, rule):
    """Whether the fast tests hold it."""
    others = ("draft,", "several", "dspark", "jetspec", "lookahead", "prompt_lookup, then")
    return variant == "draft" or rule == "exact" and not variant.startswith(others)


PAIRS = list(dict.fromkeys((variant, rule) for variant, _, rule, _ in table()))


@pytest.mark.parametrize(
    ("variant", "rule"),
    [
        pytest.param(*pair, marks=[] if is_quick(*pair) else [pytest.mark.slow])
        for pair in sorted(PAIRS)
    ],
)
def test_output_distribution_is_the_targets(variant, rule):
    for tree in {row.tree for row in rows_of(variant) if row.rule == rule}:
        assert statistic(decoder(variant, tree, rule), SAMPLED) < 1, tree


@pytest.mark.slow(25)
@pytest.mark.parametrize("variant", ["draft", "prompt_lookup, then draft", "eagle"])
@pytest.mark.parametrize("kind", ["mamba", "qwen3_next", "lfm2", "falcon_h1"])
def test_output_distribution_of_a_target_with_a_state(variant, kind):
    it = World(hybrid(kind, vocabulary=VOCAB), chains_only=True)
    made = SpeculativeDecoder(it.target, VARIANTS[variant](it), "chain:2", "speculative")
    assert statistic(made, SAMPLED, 1_200, 1e-4) < 1


def test_the_distributions_differ_enough_to_tell():
    for sampling in SAMPLINGS.values():
        p, q = (exact_distribution(llama(seed), PROMPT, LENGTH, sampling) for seed in (2, 7))
        assert 0.1 < float(torch.minimum(p, q).sum()) < 0.8
        assert int((p * DRAWS > 8).sum()) >= 6 and abs(float(p.sum()) - 1) < 1e-5


@pytest.mark.slow
@pytest.mark.parametrize(
    ("tree", "rule", "place", "broken"),
    [
        # Children drawn with replacement under the rule for draws without.
        (
            "kary:3,2",
            "mcsd",
            "propose.static_tree.draw_without_replacement",
            draw_with_replacement,
        ),
        # A greedy draft that the verifier believes was sampled (transformers issue 32867).
        ("chain:3", "speculative", "propose.static_tree.draw", lambda q, u: q.argmax(-1)),
        # After a refusal, a draw from p instead of (p - q)+.
        ("chain:3", "speculative", "verify.chains.refuse", lambda p, q, share: (p, None)),
        # The target's distribution without its temperature.
        ("kary:3,2", "mcsd", "step.probs", lambda logits, how: probs(1.5 * logits, how)),
    ],
)
def test_a_broken_rule_is_rejected(tree, rule, place, broken, monkeypatch):
    made = decoder("draft", tree, rule)
    assert statistic(made, SAMPLED, 8_000) < 1
    monkeypatch.setattr(f"draftsmith.decode.{place}", broken)
    assert statistic(made, SAMPLED, 8_000) > 1.5


@pytest.mark.slow
def test_a_stop_by_the_confidence_of_a_block_drafter_is_lossless():
    """A confidence that differs from token to token may use what precedes its token alone (DSpark,
    arXiv 2607.05147, appendix).
    """
    drafting: Any = VARIANTS["dspark"](world("lean"))
    with torch.no_grad():
        # It depends on the token before its slot alone.
        drafting.head.get_parameter("markov_head.markov_w1.weight")[:, 0] = torch.tensor(
            [2.0, -2, 1, 0, -1]
        )
        drafting.head.get_parameter("confidence_head.proj.weight").zero_()[:, 8] = 2
    made = SpeculativeDecoder(llama(2), drafting, "chain:3,stop=0.3", "speculative")
    assert statistic(made, SAMPLED, 8_000) < 1
    for each in run(made, [0, 1, 2, 3], SAMPLED):
        assert each.stats.target_calls < each.stats.proposed < 3 * each.stats.target_calls


@pytest.mark.parametrize("rule", ["exact", "mcsd", "greedy"])
@pytest.mark.parametrize(
    "parents",
    [
        (-1, -1, 1, 2),
        pytest.param((-1, -1, 0, 1, 3), marks=pytest.mark.slow),
        pytest.param((-1, -1, -1, 0, 1, 2, 3, 4, 5), marks=pytest.mark.slow),
    ],
)
def test_below_a_node_that_does_not_exist_there_is_nothing(rule, parents):
    """With fewer tokens than siblings a node is missing, and so is all that hangs below it, however
    deep.
    """
    made = decoder("draft", Tree(parents), rule)
    assert statistic(made, Sampling(temperature=1.3, top_k=2)) < 1
    # One chain exists at each step: the tree's first child everywhere.
    length, at = 0, 0
    while below := Tree(parents).children[at]:
        at, length = below[0], length + 1
    for row in run(made, [0, 1, 2, 3], Sampling(temperature=1.0, top_k=1)):
        assert all(0 <= token < VOCAB for token in row.output_ids)
        assert row.stats.proposed == length * row.stats.target_calls


@pytest.mark.parametrize(
    ("variant", "tree", "rule"),
    [
        ("draft", "chain:2", "speculative"),
        pytest.param("eagle3", "kary:2,2", "mcsd", marks=pytest.mark.slow),
    ],
)
def test_a_step_is_one_graph(variant, tree, rule):
    check_one_graph(variant, tree, rule, "eager")


@pytest.mark.slow(15)
@pytest.mark.parametrize("variant", VARIANTS)
def test_every_step_is_one_graph(variant):
    # Tracing takes a second a step. How a tree is drafted is the same code for every network, and a
    # verifier is the same code whatever proposed: proposers take turns with the trees, two each,
    # and one, which drafts outside of steps, meets every verifier. A third level is traced as the
    # second. Other vocabularies of a draft, and a network behind lookup, meet one tree.
    last = list(dict(allowed(variant)).items())
    turn = list(VARIANTS).index(variant)
    chosen = {last[turn % len(last)]}
    if "," not in variant:
        chosen.add(last[(turn + len(last) // 2) % len(last)])
    if variant == "medusa":
        for name in LOSSLESS:
            chosen.add(("chain:3" if VERIFIERS[name].chains_only else "kary:3,2", name))
    # What is traced does not depend on the backend. That AOTAutograd takes it too, in which half of
    # the time went, is seen at one tree of each network.
    for index, (tree, rule) in enumerate(sorted(chosen)):
        is_first = index == 0 and "lookup, then" not in variant
        check_one_graph(variant, TREES[tree], rule, "aot_eager" if is_first else "eager")


def check_one_graph(variant, tree, rule, backend):
    torch._dynamo.reset()
    counters.clear()
    static = decoder(variant, tree, rule, compile=backend)
    eager = decoder(variant, tree, rule, "plain")
    # One row, so that there are few shapes, and each takes a second to trace.
    first, expected = (made.generate([PROMPTS[0]], SAMPLED, 6, seed=1) for made in (static, eager))
    assert told(first.generations) == told(expected.generations), (tree, rule)
    assert static.compile_s == first.compile_s > 0
    assert not counters["graph_break"]
    # One graph a step: nothing is compiled twice, because nothing it was compiled for has changed.
    assert (
        counters["stats"]["unique_graphs"] == sum(steps.count for steps in static.every_steps) > 0
    )
    again = static.generate([PROMPTS[0]], SAMPLED, 6, seed=1)
    assert told(first.generations) == told(again.generations) and again.compile_s == 0
