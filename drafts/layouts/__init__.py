"""Layouts of drafts on disk other than our own: `published` are read, `FORMATS` of `export.py` are written."""
