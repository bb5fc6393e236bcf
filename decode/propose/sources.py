"""What may draft, and its proposer: models, heads, methods without weights, and prompt lookup
beside a model.
"""

from collections.abc import Sequence
from dataclasses import dataclass

from transformers import PreTrainedModel

from draftsmith.decode.propose import PROPOSERS
from draftsmith.decode.propose.lookup_first import LookupFirst
from draftsmith.decode.propose.network_proposer import NetworkProposer
from draftsmith.decode.propose.protocol import Proposer
from draftsmith.decode.suffix_index import SuffixIndex
from draftsmith.drafts.load import Draft, kind_of


@dataclass(frozen=True, eq=False)
class CopyingDraft:
    """A method of drafting without weights. kind: its name in `PROPOSERS`. index: what retrieval
    drafts from.
    """

    kind: str
    index: SuffixIndex | None = None

    @property
    def reads_text(self) -> bool:
        """Whether what it proposes follows from the text. Lookahead's window also depends on the
        steps before.
        """
        return self.kind != "lookahead"


@dataclass(frozen=True, eq=False)
class JoinedDraft:
    """Prompt lookup beside a model, or alone after a long match."""

    model: Draft


AnyDraft = Draft | CopyingDraft | JoinedDraft


def proposer_of(
    draft: AnyDraft | Sequence[PreTrainedModel], kind: str | None = None, *, fast: bool = True
) -> Proposer:
    """Return the proposer of a draft, or of several language models together. kind: its name in
    `PROPOSERS`, if not that of the draft.
    """
    if isinstance(draft, CopyingDraft):
        return PROPOSERS[draft.kind].make(draft.index)
    if isinstance(draft, JoinedDraft):
        proposer = proposer_of(draft.model, kind, fast=fast)
        assert isinstance(proposer, NetworkProposer)
        return LookupFirst(proposer)
    if isinstance(draft, Sequence):
        return PROPOSERS["draft"].make(draft, fast=fast)
    return PROPOSERS[kind or kind_of(draft)].make(draft, fast=fast)
