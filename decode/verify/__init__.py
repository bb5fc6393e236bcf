"""Verification rules: `VERIFIERS` maps the name a user writes to the rule and its domain."""

from decode.verify.exact import EXACT
from decode.verify.mcsd import MCSD
from decode.verify.rule import Verdict, Verifier
from decode.verify.speculative import SPECULATIVE

VERIFIERS: dict[str, Verifier] = {"exact": EXACT, "speculative": SPECULATIVE, "mcsd": MCSD}

__all__ = ["VERIFIERS", "Verdict", "Verifier"]
