"""Verification rules: `VERIFIERS` maps the name a user writes to the rule and its domain."""

from decode.verify.block import BLOCK
from decode.verify.exact import EXACT
from decode.verify.greedy import GREEDY
from decode.verify.kseq import KSEQ
from decode.verify.mcsd import MCSD
from decode.verify.naive import NAIVE
from decode.verify.rule import Verdict, Verifier
from decode.verify.specinfer import MCSD_REPLACEMENT, SPECINFER
from decode.verify.speculative import SPECULATIVE
from decode.verify.traversal import TRAVERSAL
from decode.verify.typical import TYPICAL

VERIFIERS: dict[str, Verifier] = {
    "exact": EXACT,
    "naive": NAIVE,
    "speculative": SPECULATIVE,
    "mcsd": MCSD,
    "mcsd_replacement": MCSD_REPLACEMENT,
    "specinfer": SPECINFER,
    "kseq": KSEQ,
    "greedy": GREEDY,
    "block": BLOCK,
    "traversal": TRAVERSAL,
    "typical": TYPICAL,
}

__all__ = ["VERIFIERS", "Verdict", "Verifier"]
