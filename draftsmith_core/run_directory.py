"""Old names of `draftsmith_core.runs`; import from there."""

from draftsmith_core.runs import claim as claim
from draftsmith_core.runs import hold as hold
from draftsmith_core.runs import keeping as keeping
