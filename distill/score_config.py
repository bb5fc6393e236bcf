"""The options of `draftsmith distill --score`."""

from dataclasses import dataclass

from draftsmith_core.errors import InputError
from draftsmith_core.option_types import check_least, check_range, check_types


@dataclass(frozen=True, kw_only=True)
class ScoreConfig:
    """Add the target's distributions to answers that are there already: `draftsmith distill --score SET`."""

    score: str
    """The answers: a directory that `distill` has made, or a .jsonl or .parquet file or hub data set whose rows have
    `messages` that end with the assistant's answer, or `prompt_ids` and `response_ids`."""
    target: str
    """The target: a local directory or hub name."""
    out: str
    """The scored set: a directory of part-*.parquet and manifest.json, for `train --data`."""
    teacher_top_k: int = 128
    """How many of the likeliest tokens to keep at each token of an answer: 4 k + 2 bytes, up to 6 more for a large
    vocabulary."""
    part_rows: int = 1024
    """Rows of a file that make a Parquet file; a set keeps its own. A killed run loses those in the making."""
    domain: str = "default"
    """The domain of rows of a file that do not name their own."""
    chat_template: str | None = None
    """A Jinja file with the chat template, where the target's tokenizer has none or another is wanted."""
    device: str = "auto"
    """auto, cpu, cuda or cuda:N."""
    dtype: str = "auto"
    """Of the target: auto (float32 on a CPU, else the checkpoint's own), float32, bfloat16 or float16."""
    trust_remote_code: bool = False
    """Run model code that comes with a checkpoint."""

    def __post_init__(self) -> None:
        check_types(self)
        check_range(self, "[1, 65535]", "teacher_top_k")
        check_least(self, 1, "part_rows")
        if not self.domain:
            raise InputError("domain: is empty; give it a name")
