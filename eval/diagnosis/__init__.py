"""Explain why drafted tokens are accepted or not."""
