"""Draws the results: the page, its figures and tables, and what they say in words."""
