"""What a server has logged, as training data and as prompts to measure on. Text of rows never gets into messages."""

import re
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from datetime import datetime
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq

from draftsmith_core.errors import InputError
from draftsmith_core.io import atomic_dir, sha256_file, write_json_atomic, write_rows
from draftsmith_core.prompt_rows import iterate_records, parse_record
from draftsmith_core.prompts import Reasons, content_id
from draftsmith_core.tokenization import Tokenizer, decode_text
from eval.watch import logged_tokens

REDACTED = "matches a pattern of --redact"


@dataclass(frozen=True)
class Logged:
    """One request with its answer. prompt: its row for a prompt file. time: seconds, None where the log has none."""

    prompt: dict[str, Any]
    prompt_ids: tuple[int, ...]
    response_ids: tuple[int, ...]
    time: float | None

    @property
    def ids(self) -> tuple[tuple[int, ...], tuple[int, ...]]:
        """Token ids of the prompt and of the answer."""
        return self.prompt_ids, self.response_ids

    @property
    def key(self) -> str:
        """What tells one prompt from another."""
        return content_id(self.prompt_ids)


def read_log(source: str, tokenizer: Tokenizer, redact: Sequence[str]) -> tuple[list[Logged], list[str]]:
    """(rows in the order of time, what to say of the others): every row is taken, or counted with its reason.

    A row that one of the patterns of `redact` matches anywhere, also in the text of logged token ids, is left out.
    Without a time in every row, the order is the file's.
    """
    patterns = [re.compile(pattern) for pattern in redact]
    models: set[str] = set()
    rows: list[Logged] = []
    left_out = Reasons()
    for record in iterate_records(source):
        where = f"{source}:{record.number}"
        try:
            row = parse_record(record, source)
            if _matches(patterns, _strings(row)):
                left_out.add(record.number, REDACTED)
                continue
            logged = _logged(row, where, tokenizer)
            # Logged as ids, a text is not yet seen; and what is trained on is what the tokens say.
            if patterns and _matches(patterns, (decode_text(tokenizer, list(ids)) for ids in logged.ids)):
                left_out.add(record.number, REDACTED)
                continue
            rows.append(logged)
            models |= _model(row)
        except InputError as error:
            left_out.add(record.number, _untold(str(error).removeprefix(f"{where}: ")))
        except RecursionError:
            left_out.add(record.number, "nested too deeply to be a row")
    said = [f"{source}: {line}" for line in left_out.lines("rows left out")]
    if len(models) > 1:
        said.append(f"{source}: names {len(models)} models; answers of another than the target teach the draft wrongly")
    if any(row.time is None for row in rows):
        return rows, [*said, f"{source}: not every row has a time; taken in the order of the file"]
    return sorted(rows, key=lambda row: row.time or 0.0), said


def _matches(patterns: Sequence[re.Pattern[str]], texts: Iterable[str]) -> bool:
    return any(pattern.search(text) for text in texts for pattern in patterns)


def _model(row: dict[str, Any]) -> set[str]:
    """The name of the model that answered, where a row has it; the request may name it otherwise."""
    response = row.get("response")
    name = (response.get("model") if isinstance(response, dict) else None) or row.get("model")
    return {name} if isinstance(name, str) else set()


def _untold(reason: str) -> str:
    """A reason without what a chat template says of a turn, which may quote it."""
    return reason.partition(" (")[0] if "chat template refuses" in reason else reason


def _strings(value: Any) -> Iterator[str]:
    """Every text in a row, keys included. Numbers are times and counts, and none is written anywhere."""
    if isinstance(value, str):
        yield value
    elif isinstance(value, dict):
        for key, inner in value.items():
            yield from (str(key), *_strings(inner))
    elif isinstance(value, list):
        for inner in value:
            yield from _strings(inner)


def _logged(row: dict[str, Any], where: str, tokenizer: Tokenizer) -> Logged:
    prompt_ids, response_ids = logged_tokens(row, where, tokenizer)
    if not all(isinstance(each, int) and 0 <= each < len(tokenizer) for each in (*prompt_ids, *response_ids)):
        raise InputError(f"{where}: holds ids that are not tokens of the target")
    if isinstance(row.get("prompt_ids"), list) and isinstance(row.get("output_ids"), list):
        prompt = {"prompt": decode_text(tokenizer, prompt_ids)}
    else:
        prompt = {key: row[key] for key in ("messages", "tools", "prompt") if row.get(key) is not None}
        if _finish(row) == "stop" and tokenizer.eos_token_id is not None:
            response_ids.append(int(tokenizer.eos_token_id))
    if not prompt_ids or not response_ids:
        raise InputError(f"{where}: the prompt or the answer is empty")
    return Logged(prompt, tuple(prompt_ids), tuple(response_ids), _time(row, where))


def _finish(row: dict[str, Any]) -> str | None:
    """Why an answer ended, as OpenAI's API says it."""
    response = row.get("response")
    choices = response.get("choices") if isinstance(response, dict) else None
    return choices[0].get("finish_reason") if isinstance(choices, list) and choices else None


def _time(row: dict[str, Any], where: str) -> float | None:
    response = row.get("response")
    for part in (row, response if isinstance(response, dict) else {}):
        for key in ("created", "timestamp", "time"):
            value = part.get(key)
            if isinstance(value, int | float) and not isinstance(value, bool):
                if not abs(value) < 1e300:
                    raise InputError(f"{where}: key {key!r} is no time; write seconds, or as in ISO 8601")
                return float(value)
            if isinstance(value, str):
                try:
                    return datetime.fromisoformat(value).timestamp()
                except ValueError:
                    raise InputError(f"{where}: key {key!r} is no time; write seconds, or as in ISO 8601") from None
    return None


def divided_by_time(rows: Sequence[Logged], fraction: float) -> tuple[list[Logged], list[Logged]]:
    """(to train on, to measure on): the latest `fraction` is measured on, one row a prompt, none that is trained on."""
    cut = len(rows) - round(fraction * len(rows))
    earlier = list(rows[:cut])
    known = {row.key for row in earlier}
    fresh = {row.key: row for row in rows[cut:] if row.key not in known}
    # Not the first of them only, where fewer are measured: in an order that does not follow the time.
    return earlier, [fresh[key] for key in sorted(fresh)]


def write_traffic(earlier: Sequence[Logged], recent: Sequence[Logged], directory: Path) -> None:
    """DIRECTORY/prompts (train.jsonl, recent.jsonl) and, as a distilled set, DIRECTORY/distilled; each whole or not."""
    if not (directory / "prompts").is_dir():
        with atomic_dir(directory / "prompts") as made:
            write_rows(made / "train.jsonl", [row.prompt for row in earlier])
            write_rows(made / "recent.jsonl", [row.prompt for row in recent])
    if (directory / "distilled").is_dir():
        return
    ids = pa.list_(pa.int32())
    schema = pa.schema([("prompt_ids", ids), ("response_ids", ids), ("prompt_hash", pa.string())])
    columns = {
        "prompt_ids": [row.prompt_ids for row in earlier],
        "response_ids": [row.response_ids for row in earlier],
        "prompt_hash": [row.key for row in earlier],
    }
    with atomic_dir(directory / "distilled") as made:
        part = made / "part-00000.parquet"
        pq.write_table(pa.table(columns, schema=schema), part)
        listed = [{"file": part.name, "rows": len(earlier), "sha256": sha256_file(part)}]
        write_json_atomic(made / "manifest.json", {"complete": True, "parts": listed})
