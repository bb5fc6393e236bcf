"""Produces training data from the target: its own outputs, row by row accounted for."""
