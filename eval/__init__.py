"""Measures what alignment bought, in distribution (ID) and out of it (OOD): acceptance, tokens per
call and speed.
"""
