"""Methods of drafting: `PROPOSERS` maps the name a user writes to a `ProposerKind`.

Needs no torch; a proposer's code is imported when it is made. To add one, write a file of this
package (see `protocol`; with a network `network`, copying from text `text_proposer`) and enter it
in the table. From Python, pass a `Proposer` to `SpeculativeDecoder`; it needs no table.
"""

from dataclasses import dataclass
from importlib import import_module
from typing import TYPE_CHECKING, Literal

from draftsmith.decode.tree import CHAIN as CHAIN

if TYPE_CHECKING:
    from draftsmith.decode.propose.protocol import Proposer


@dataclass(frozen=True)
class ProposerKind:
    """A method of drafting. title, trees and paper are shown to users.

    needs: what `make` takes. proposer: module and class. usual: for a proposer of chains only, the
    one that drafts with the same kind of head on any tree.
    """

    title: str
    trees: str
    paper: str
    needs: Literal["models", "head", "index", "nothing"] = "head"
    proposer: str = "head_proposers.HeadProposer"
    usual: str | None = None

    @property
    def draws(self) -> bool:
        """Whether it can draw tokens at random; what copies from a text cannot."""
        return self.needs in ("models", "head")

    def make(self, thing: object, **options: bool) -> "Proposer":
        """Return the proposer for a list of language models, a head, a suffix index, or None.

        options: for models and heads, `fast`.
        """
        module, name = self.proposer.split(".")
        proposer: type = getattr(import_module(f"draftsmith.decode.propose.{module}"), name)
        if self.usual is not None:
            options |= {"chains_only": True}
        return proposer() if thing is None else proposer(thing, **options)


PROPOSERS: dict[str, ProposerKind] = {
    "draft": ProposerKind(
        "a small language model; of several, each drafts some of a node's children in turn",
        "any; several drafts: chain, kary, static",
        "Leviathan et al. 2023, arXiv 2211.17192; SpecInfer, arXiv 2305.09781",
        "models",
        "draft_model.DraftModelProposer",
    ),
    "eagle": ProposerKind(
        "EAGLE-1/2 head: the target's next top feature", "any", "Li et al. 2024, arXiv 2401.15077"
    ),
    "eagle3": ProposerKind(
        "EAGLE-3 head: fused low, middle and high features",
        "any",
        "Li et al. 2025, arXiv 2503.01840",
    ),
    "mtp": ProposerKind(
        "multi-token-prediction layer: the target's own, or a fresh one like it",
        "any",
        "DeepSeek-V3 2024, arXiv 2412.19437",
    ),
    "medusa": ProposerKind(
        "independent heads, one per depth",
        "depth up to the heads",
        "Cai et al. 2024, arXiv 2401.10774",
    ),
    "hydra": ProposerKind(
        "heads that see the tokens drafted before them",
        "depth up to the heads",
        "Ankner et al. 2024, arXiv 2402.05109",
    ),
    "dflash": ProposerKind(
        "block drafter: all tokens from one forward",
        "depth up to the block",
        "DFlash 2026, arXiv 2602.06036",
    ),
    "dspark": ProposerKind(
        "block drafter with a Markov head and a confidence",
        "depth up to the block",
        "DSpark 2026, arXiv 2607.05147",
    ),
    "jetspec": ProposerKind(
        "block drafter, causal within its block",
        "depth up to the block",
        "JetSpec 2026, arXiv 2606.18394",
    ),
    "blockwise": ProposerKind(
        "independent heads on a chain: blockwise parallel decoding",
        "chain, up to the heads",
        "Stern et al. 2018, arXiv 1811.03115",
        usual="medusa",
    ),
    "prompt_lookup": ProposerKind(
        "what followed the same n-gram earlier in the text",
        "chain, kary, static",
        "Saxena 2023; Yang et al. 2023, arXiv 2304.04487",
        "nothing",
        "prompt_lookup.PromptLookupProposer",
    ),
    "lookahead": ProposerKind(
        "a Jacobi window and the n-grams it has produced",
        "its own",
        "Fu et al. 2024, arXiv 2402.02057",
        "nothing",
        "lookahead.LookaheadProposer",
    ),
    "retrieval": ProposerKind(
        "what followed the same suffix in a text of yours",
        "chain, kary, static",
        "REST, He et al. 2023, arXiv 2311.08252",
        "index",
        "retrieval.RetrievalProposer",
    ),
}
