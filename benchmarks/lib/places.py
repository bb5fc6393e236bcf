"""Where the repository and the models that it holds are."""

from pathlib import Path

_HERE = Path(__file__).resolve()
ROOT = _HERE.parents[2]
TARGET = ROOT / "draftsmith" / "demo" / "pair" / "target"
DRAFT = ROOT / "configs" / "bench" / "draft"
