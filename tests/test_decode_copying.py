"""Proposers without a network: prompt lookup, retrieval, lookahead, and the trie and index they
share.
"""

import random

import pytest
import torch
from hypothesis import given, strategies as st

from draftsmith.core.sampling import Sampling
from draftsmith.decode.propose.lookahead import LookaheadProposer, LookaheadSession, Window
from draftsmith.decode.propose.prompt_lookup import NgramIndex, PromptLookupProposer
from draftsmith.decode.propose.protocol import Outcome, SessionSetup
from draftsmith.decode.propose.retrieval import RetrievalProposer
from draftsmith.decode.suffix_index import SuffixIndex
from draftsmith.decode.tree import DynamicTree, Tree
from draftsmith.decode.tree_spec import parse_tree
from tests.tiny_models import random_llama

CPU = torch.device("cpu")
GREEDY = Sampling(temperature=0.0)
VOCAB = 17


def hashed(text):
    """Depends on the last three tokens and the parity of the place, so a misplaced context
    shows.
    """
    last = [*[0] * 3, *text][-3:]
    return (last[0] * 7 + last[1] * 5 + last[2] * 3 + len(text) % 2 + last[1] * last[2]) % VOCAB


def start(proposer, prompts, tree):
    setup = SessionSetup(
        prompts=prompts,
        tree=tree,
        drawing="deterministic",
        sampling=GREEDY,
        max_new_tokens=100,
        hidden_BTH=(),
        device=CPU,
        vocabulary=VOCAB,
    )
    return proposer.start(setup)


def paths(proposal, row):
    """The tokens from the root to every node of a row, in M indexing."""
    parents = proposal.tree.parents_RN[row if proposal.tree.rows > 1 else 0].tolist()
    tokens = proposal.tokens_BM[row].tolist()
    found: list[tuple[int, ...]] = [()]
    for node, parent in enumerate(parents, 1):
        found.append((*found[parent + 1], tokens[node]))
    return [path for path, token in zip(found, tokens, strict=True) if token >= 0 or not path]


def judge(proposal, texts, target):
    """What a greedy verifier makes of a proposal: walk down while a child carries the target's
    token.
    """
    p_BMV = torch.zeros(*proposal.tokens_BM.shape, VOCAB)
    accepted: list[list[int]] = []
    emitted: list[list[int]] = []
    for row, text in enumerate(texts):
        tree = proposal.tree
        children = tree.children_RMK[row if tree.rows > 1 else 0].tolist()
        tokens = proposal.tokens_BM[row].tolist()
        for node, path in enumerate(paths(proposal, row)):
            p_BMV[row, node, target([*text, *path])] = 1
        node, out, walked = 0, list[int](), list[int]()
        while True:
            out.append(target([*text, *out]))
            below = [child for child in children[node] if child and tokens[child] == out[-1]]
            assert len(below) < 2, "siblings carry the same token"
            if not below:
                break
            node = below[0]
            walked.append(node)
        accepted.append(walked)
        emitted.append(out)
    return Outcome(accepted, emitted, [[]] * len(texts), lambda: p_BMV)


@given(
    st.lists(st.integers(0, 2), max_size=40),
    st.integers(1, 4),
    st.integers(1, 4),
    st.integers(0, 40),
)
def test_the_index_agrees_with_a_rescan(text, one, other, cut):
    longest, shortest = max(one, other), min(one, other)
    index = NgramIndex(longest, shortest)
    index.read(text[:cut])
    index.read(text[cut:])
    expected: list[int] = []
    for n in range(longest, shortest - 1, -1):
        places = [
            at
            for at in range(len(text) - 1, n - 1, -1)
            if text[at - n : at] == text[len(text) - n :]
        ]
        expected += [at for at in places if at not in expected and len(text) >= n]
    assert list(index.matches()) == expected


@pytest.mark.parametrize("period", [1, 2, 3, 7])
@pytest.mark.parametrize("spec", ["chain:6", "kary:2,1,1,1,1,1"])
def test_periodic_text_is_accepted_whole(period, spec):
    def target(text):
        return int(text[-period])

    prompt = list(range(period)) + [0]
    session, text = start(PromptLookupProposer(), [prompt], parse_tree(spec)), list(prompt)
    for _ in range(5):
        outcome = judge(session.propose(None), [text], target)
        assert len(outcome.tokens[0]) == 7
        text += outcome.tokens[0]
        session.commit(outcome)


def test_the_longest_match_wins_then_the_most_recent():
    #          1 2 3 -> 4 (longest)    9 3 -> 5, then 8 3 -> 6 (shorter, more recent)
    prompt = [1, 2, 3, 4, 0, 9, 3, 5, 0, 8, 3, 6, 0, 1, 2, 3]
    chain = start(PromptLookupProposer(), [prompt], parse_tree("chain:2")).propose(None)
    assert chain.tokens_BM.tolist() == [[-1, 4, 0]]
    branches = start(PromptLookupProposer(), [prompt], parse_tree("kary:3,1")).propose(None)
    assert branches.tokens_BM.tolist() == [[-1, 4, 6, 5, 0, 0, 0]]
    assert branches.tree.parents_RN.tolist() == [[-1, -1, -1, 0, 1, 2]]
    two = start(PromptLookupProposer(), [prompt], parse_tree("kary:2,1")).propose(None)
    assert two.tokens_BM.tolist() == [[-1, 4, 6, 0, 0]]
    assert (
        start(PromptLookupProposer(3, 2), [prompt], parse_tree("kary:3,1"))
        .propose(None)
        .tokens_BM.shape[1]
        == 3
    )


def test_a_stop_copies_what_most_matches_go_on_with():
    # After 1 2 came 3 4 5, 3 4 6, 3 7 and, most recently, 8.
    prompt = [1, 2, 3, 4, 5, 1, 2, 3, 4, 6, 1, 2, 3, 7, 9, 1, 2, 8, 1, 2]

    def copied(stop):
        tree = Tree((-1, 0, 1), stop=stop)
        proposal = start(PromptLookupProposer(2, 2), [prompt], tree).propose(None)
        return proposal.tokens_BM[0, 1:].tolist()

    assert copied(0.0) == [8, 1, 2]
    # Chances: 3 of 5, then 2 of 5, then 1 of 5; of equals the most recent.
    assert copied(0.2) == copied(0.4) == [3, 4, 6]
    assert copied(0.41) == copied(0.6) == [3, 4]
    assert copied(0.61) == [3]
    once = start(PromptLookupProposer(), [[5, 6, 7, 5]], Tree((-1, 0, 1), stop=0.5)).propose(None)
    assert once.tokens_BM.tolist() == [[-1, 6, 7, 5]]
    once = start(PromptLookupProposer(), [[5, 6, 7, 5]], Tree((-1, 0, 1), stop=0.6)).propose(None)
    assert once.tokens_BM.tolist() == [[-1, 6]]


def test_nothing_found_costs_no_cells():
    tree = parse_tree("kary:2,1,1")
    session = start(PromptLookupProposer(), [[1, 2, 3], [4, 5, 6]], tree)
    proposal = session.propose(None)
    assert proposal.tokens_BM.tolist() == [[-1], [-1]] and proposal.tree.depth == 0
    session.commit(Outcome([[], []], [[7], [4]], [[], []], lambda: torch.zeros(2, 1, VOCAB)))
    proposal = session.propose(None)
    assert (
        proposal.tokens_BM.tolist() == [[-1, -1, -1, -1], [-1, 5, 6, 4]]
        and proposal.tree.depth == 3
    )
    # The row that found something leaves, and with it the cells.
    session.commit(Outcome([[], []], [[8], [1]], [[], []], lambda: torch.zeros(2, 4, VOCAB)))
    session.select_rows([0])
    assert session.propose(None).tokens_BM.tolist() == [[-1]]


def test_retrieval_keeps_the_most_frequent_prefixes():
    documents = [[1, 2, 3, 3]] * 3 + [[1, 2, 4, 5]] * 4 + [[1, 2, 4, 6]] * 2 + [[0, 2, 7, 7]] * 20
    proposer = RetrievalProposer(SuffixIndex.build(documents), max_suffix=4, min_suffix=1)
    # 4 (6 times), 4 5 (4 times), 3 (3), 3 3 (3), 4 6 (2); the row's 1 2 is longer than the frequent
    # 2 -> 7.
    bounds = Tree((-1, -1, 0, 0))
    proposal = start(proposer, [[9, 1, 2]], bounds).propose(None)
    assert set(paths(proposal, 0)) == {(), (4,), (3,), (4, 5), (3, 3)}
    assert proposal.tokens_BM[0, 1:3].tolist() == [4, 3]
    chain = start(proposer, [[9, 1, 2]], parse_tree("chain:2")).propose(None)
    assert chain.tokens_BM.tolist() == [[-1, 4, 5]]
    assert start(proposer, [[8, 2]], parse_tree("chain:2")).propose(None).tokens_BM.tolist() == [
        [-1, 7, 7]
    ]
    strict = RetrievalProposer(proposer.index, max_suffix=4, min_suffix=2)
    assert start(strict, [[8, 2]], parse_tree("chain:2")).propose(None).tokens_BM.tolist() == [[-1]]


def test_a_retrieved_chain_is_the_beginning_of_a_longer_one():
    """As predictions of several lengths from one reading take it."""
    pick = random.Random(0)
    documents = [pick.choices(range(4), k=60) for _ in range(8)]
    proposer = RetrievalProposer(SuffixIndex.build(documents), max_suffix=2)
    longest = 6
    trees = [parse_tree(f"chain:{length}") for length in range(1, longest + 1)]
    prompts = [[a, b] for a in range(4) for b in range(4)]
    whole = start(proposer, prompts, trees[-1]).propose(None).tokens_BM
    assert (whole >= 0).sum() > longest * len(prompts) / 2
    for tree in trees:
        found = start(proposer, prompts, tree).propose(None).tokens_BM
        assert found.tolist() == whole[:, : tree.depth + 1].tolist()


class Definition:
    """The window and the harvest of section 3, written down cell by cell and without a tree."""

    def __init__(self, levels):
        self.cells = {
            (level, j): token for level, row in enumerate(levels) for j, token in enumerate(row)
        }
        self.depth, self.width, self.steps = len(levels), len(levels[0]), 0

    def step(self, text, target, last):
        """Every column's n-gram; the cells move on."""
        grams = []
        for j in range(self.width):
            column = [self.cells[level, j] for level in range(self.depth)]
            context = text + [self.cells[0, k] for k in range(1, j + 1)] + column[1:]
            grams.append((*column, target(context)))
        self.cells = {
            (level, j): gram[level + 1]
            for j, gram in enumerate(grams)
            for level in range(self.depth)
        }
        self.cells[0, 0] = last
        self.steps += 1
        return grams if self.steps >= self.depth else []


@pytest.mark.parametrize(
    ("window", "ngram", "candidates"), [(5, 4, 3), (3, 2, 2), (1, 4, 1), (1, 2, 1), (6, 3, 4)]
)
def test_lookahead_harvests_what_the_definition_says(window, ngram, candidates):
    proposer = LookaheadProposer(window, ngram, candidates, from_text=False)
    text = [3, 1, 4, 1, 5]
    session = start(proposer, [text], proposer.default_tree())
    assert isinstance(session, LookaheadSession)
    row = session.rows[0]
    assert isinstance(row, Window)
    definition = Definition(row.levels)
    pool: dict[int, list[tuple[int, ...]]] = {}
    harvested, several = 0, 0
    for _ in range(60):
        proposal = session.propose(None)
        drafted = paths(proposal, 0)
        for rest in pool.get(text[-1], []):
            assert rest in drafted, "a candidate of the pool was not drafted"
        outcome = judge(proposal, [text], hashed)
        session.commit(outcome)
        grams = definition.step(text, hashed, outcome.tokens[0][-1])
        assert definition.cells == {
            (at, j): token for at, level in enumerate(row.levels) for j, token in enumerate(level)
        }
        for gram in grams:
            rests = [rest for rest in pool.get(gram[0], []) if rest != gram[1:]]
            pool[gram[0]] = [gram[1:], *rests][:candidates]
        assert all(row.pool.get(token) == pool.get(token, []) for token in range(VOCAB))
        text += outcome.tokens[0]
        harvested += len(grams)
        several += len(outcome.tokens[0]) > 1
    assert harvested == window * (60 - ngram + 2)
    assert several or window == 1


def test_what_cannot_be_drafted_is_refused(golden):
    target, retrieval = (
        random_llama(0, VOCAB, eos=2),
        RetrievalProposer(SuffixIndex.build([[3, 17]])),
    )
    for proposer, shape in (
        (PromptLookupProposer(), DynamicTree(depth=2, beam=2, nodes=4)),
        (PromptLookupProposer(), Tree((-1, -1), stop=0.1)),
        (retrieval, Tree((-1, 0), stop=0.1)),
        (LookaheadProposer(), parse_tree("chain:60")),
        (retrieval, parse_tree("chain:4")),
    ):
        with golden.raises(ValueError):
            proposer.check(target, shape)
