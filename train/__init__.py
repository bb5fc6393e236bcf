"""Fits draft models to data: objectives, the loop, exact checkpoints.

Also a function: `ds.train(target=..., draft=..., data=[...], out=...)`. `help(ds.train.function)`
says what it returns and raises.
"""

if __name__ == "train":
    raise ImportError("import draftsmith.train: train is no package of its own")

from draftsmith.core.callable_package import make_callable

make_callable(__name__, "training_run")
