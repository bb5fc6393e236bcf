"""What may draft, and its proposer: models, heads, methods without weights, and prompt lookup
beside a model.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from draftsmith.core.errors import InputError, nearest
from draftsmith.decode.propose import PROPOSERS
from draftsmith.decode.propose.lookup_first import LookupFirst
from draftsmith.decode.propose.network_proposer import NetworkProposer
from draftsmith.decode.propose.protocol import Proposer
from draftsmith.decode.suffix_index import SuffixIndex
from draftsmith.drafts.draft_sources import JOINED
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


def proposer_of(draft: AnyDraft) -> Proposer:
    """Return the proposer that drafts as `draft` does."""
    if isinstance(draft, CopyingDraft):
        return make_proposer(draft.kind, index=draft.index)
    if isinstance(draft, JoinedDraft):
        return make_proposer(JOINED + kind_of(draft.model), [draft.model])
    return make_proposer(kind_of(draft), [draft])


def make_proposer(
    name: str, drafts: Sequence[Draft] = (), index: SuffixIndex | None = None, *, fast: bool = True
) -> Proposer:
    """Return the proposer of a name that `choose_proposer` returns: over language models or a head,
    or over the text that retrieval drafts from.
    """
    kind = PROPOSERS[name.removeprefix(JOINED)]
    if not kind.draws:
        return kind.make(index)
    proposer = kind.make(drafts if kind.needs == "models" else drafts[0], fast=fast)
    if not name.startswith(JOINED):
        return proposer
    assert isinstance(proposer, NetworkProposer)
    return LookupFirst(proposer)


def choose_proposer(
    kinds: Mapping[str, str], proposer: str | None = None, *, retrieves: bool = False
) -> str:
    """Return what drafts: a name of `PROPOSERS`, behind `JOINED` if prompt lookup copies beside it,
    or "none" for the target alone.

    kinds: draft name -> "draft" for a language model, else the kind of head. proposer: by default
    the drafts choose it. retrieves: whether there is a text to draft from. Raise InputError for
    what does not go together.
    """
    joined = proposer == "prompt_lookup" and bool(kinds)
    if proposer is None or joined:
        proposer = next(iter(kinds.values()), "none")
    if proposer not in (*PROPOSERS, "none"):
        raise InputError(
            f"proposer: {proposer!r} is unknown; {nearest(proposer, [*PROPOSERS, 'none'])}"
        )
    kind = PROPOSERS.get(proposer)
    if retrieves != (kind is not None and kind.needs == "index"):
        fix = (
            "only retrieval reads --datastore; leave it out"
            if retrieves
            else "add --datastore FILE"
        )
        raise InputError(f"proposer: {proposer}: {fix}")
    if kind is None or not kind.draws:
        if kinds:
            raise InputError(
                f"draft: --proposer {proposer} does not read --draft; leave it out, or write "
                "--draft prompt_lookup+DRAFT, which looks up first"
            )
        return proposer
    wanted = "draft" if kind.needs == "models" else kind.usual or proposer
    if set(kinds.values()) != {wanted} or (wanted != "draft" and len(kinds) > 1):
        what = "language models" if wanted == "draft" else f"one head of kind {wanted}"
        given = ", ".join(f"{name} ({kinds[name]})" for name in kinds) or "missing"
        raise InputError(f"proposer: {proposer} needs {what}; --draft is {given}")
    return JOINED + proposer if joined else proposer
