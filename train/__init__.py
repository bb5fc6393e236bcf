"""Fits draft models to data: objectives, the loop, exact checkpoints."""
