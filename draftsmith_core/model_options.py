"""Types of options about models, without torch, so that a command can check its options before it loads anything."""

from typing import Literal

Quantize = Literal["none", "nf4"]
