"""Measures what alignment bought, in distribution (ID) and out of it (OOD): acceptance, tokens per
call and speed.
"""

if __name__ == "eval":
    raise ImportError("import draftsmith.eval: eval is no package of its own")
