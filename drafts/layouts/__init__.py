"""Layouts of drafts on disk other than our own."""
