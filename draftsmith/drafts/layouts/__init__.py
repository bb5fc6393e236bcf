"""Layouts of drafts on disk: `table.py` lists those of heads, `export.py` writes them and those of
language models.
"""
