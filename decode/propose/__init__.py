"""Ways of drafting: `PROPOSERS` maps the name a user writes to the class that does it."""

from decode.propose.draft_model import DraftModelProposer
from decode.propose.protocol import Drawing, Proposal, Proposer, Session

PROPOSERS = {"draft": DraftModelProposer}

__all__ = ["PROPOSERS", "DraftModelProposer", "Drawing", "Proposal", "Proposer", "Session"]
