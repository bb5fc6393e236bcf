"""Fits draft models to data: objectives, the loop, exact checkpoints."""

if __name__ == "train":
    raise ImportError("import draftsmith.train: train is no package of its own")
