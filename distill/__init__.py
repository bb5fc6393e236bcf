"""Produces training data from the target: its own outputs, row by row accounted for.

Also a function: `ds.distill(target=..., prompts=..., out=...)`. `help(ds.distill.function)` says
what it returns and raises.
"""

if __name__ == "distill":
    raise ImportError("import draftsmith.distill: distill is no package of its own")

from draftsmith.core.callable_package import make_callable

make_callable(__name__, "generate")
