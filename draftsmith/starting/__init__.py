"""`draftsmith init`: a draft to start from, and what it is worth before any training."""
