"""Old names of `draftsmith_core.runs`; import from there."""

from draftsmith_core.runs import RECORD as RECORD
from draftsmith_core.runs import command_line as command_line
from draftsmith_core.runs import difference as difference
from draftsmith_core.runs import git_commit as git_commit
from draftsmith_core.runs import provenance as provenance
from draftsmith_core.runs import read_record as read_record
from draftsmith_core.runs import versions as versions
