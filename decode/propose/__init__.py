"""Ways of drafting: `PROPOSERS` maps the name a user writes to what it needs, where it is valid, and how it is made."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Literal

from decode.propose.draft_model import DraftModelProposer
from decode.propose.head_proposers import HeadProposer
from decode.propose.lookahead import LookaheadProposer
from decode.propose.prompt_lookup import PromptLookupProposer
from decode.propose.protocol import Drawing, Outcome, Proposal, Proposer, Session
from decode.propose.retrieval import RetrievalProposer


@dataclass(frozen=True)
class ProposerKind:
    """A way of drafting. `make` takes what it `needs`: a list of language models, a head, a suffix index, or None."""

    title: str
    trees: str
    paper: str
    needs: Literal["models", "head", "index", "nothing"]
    make: Callable[[Any], Proposer]


PROPOSERS: dict[str, ProposerKind] = {
    "draft": ProposerKind(
        "a small language model; several of them take turns among siblings",
        "any; several drafts: chain, kary, static",
        "Leviathan et al. 2023, arXiv 2211.17192; SpecInfer, arXiv 2305.09781",
        "models",
        DraftModelProposer,
    ),
    "eagle": ProposerKind(
        "EAGLE-1/2 head: the target's next top feature", "any", "Li et al. 2024, arXiv 2401.15077", "head", HeadProposer
    ),
    "eagle3": ProposerKind(
        "EAGLE-3 head: fused low, middle and high features",
        "any",
        "Li et al. 2025, arXiv 2503.01840",
        "head",
        HeadProposer,
    ),
    "medusa": ProposerKind(
        "independent heads, one a depth",
        "depth up to the heads",
        "Cai et al. 2024, arXiv 2401.10774",
        "head",
        HeadProposer,
    ),
    "hydra": ProposerKind(
        "heads that see the tokens drafted before them",
        "depth up to the heads",
        "Ankner et al. 2024, arXiv 2402.05109",
        "head",
        HeadProposer,
    ),
    "blockwise": ProposerKind(
        "independent heads on a chain: blockwise parallel decoding",
        "chain, up to the heads",
        "Stern et al. 2018, arXiv 1811.03115",
        "head",
        lambda head: HeadProposer(head, chains_only=True),
    ),
    "prompt_lookup": ProposerKind(
        "what followed the same n-gram earlier in the text",
        "chain, kary, static",
        "Saxena 2023; Yang et al. 2023, arXiv 2304.04487",
        "nothing",
        lambda _: PromptLookupProposer(),
    ),
    "lookahead": ProposerKind(
        "a Jacobi window and the n-grams it has produced",
        "its own",
        "Fu et al. 2024, arXiv 2402.02057",
        "nothing",
        lambda _: LookaheadProposer(),
    ),
    "retrieval": ProposerKind(
        "what followed the same suffix in a text of yours",
        "chain, kary, static",
        "REST, He et al. 2023, arXiv 2311.08252",
        "index",
        RetrievalProposer,
    ),
}

__all__ = [
    "PROPOSERS",
    "DraftModelProposer",
    "Drawing",
    "HeadProposer",
    "LookaheadProposer",
    "Outcome",
    "PromptLookupProposer",
    "Proposal",
    "Proposer",
    "ProposerKind",
    "RetrievalProposer",
    "Session",
]
