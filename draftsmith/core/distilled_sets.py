"""Finished distilled sets: their files, whole as the manifest describes them, and their rows."""

from collections.abc import Iterator, Sequence
from pathlib import Path

from draftsmith.core.errors import InputError
from draftsmith.core.io import JsonObject, read_manifest, sha256_file

# Tokens of a run, and the fewest of an answer that can repeat itself.
_RUN = 4
_LEAST = 32


def repeats(ids: Sequence[int]) -> bool:
    """Whether half of an answer's runs of tokens occurred earlier in it."""
    runs = [tuple(ids[start : start + _RUN]) for start in range(len(ids) - _RUN + 1)]
    return len(ids) >= _LEAST and 2 * len(set(runs)) <= len(runs)


def described(manifest: JsonObject) -> list[str]:
    """What a set is, in lines; one of an older version was not measured."""
    lines = []
    if differ := manifest.get("tokens_from", {}).get("text_differs"):
        lines.append(
            f"{differ} rows are a server's text, in tokens that the target did not draw; "
            "serve it with vLLM or llama-server for its own"
        )
    if not (texts := manifest.get("texts")):
        return [*lines, "its texts were not measured when it was made"]
    rows = manifest["counts"]["rows"]
    if not rows:
        return [*lines, "it has no rows"]
    different = f"{texts['different']} different answers"
    if texts["different"] == texts["prompts"] < rows:
        different += " (the samples of each prompt are equal"
        different += ": `seed` is ignored)" if manifest["config"]["temperature"] else ")"
    tokens = manifest["response_tokens"]
    ended = manifest["finish_reasons"]["stop"] / rows
    lines += [
        f"{texts['prompts']} prompts, {rows} rows, {different}, {tokens} response tokens",
        f"{ended:.0%} ended by themselves, {texts['repeating'] / rows:.0%} repeat themselves",
    ]
    if teacher := texts["teacher"]:
        lines.append(
            f"teacher: {teacher['nats'] / tokens:.2f} nats, {teacher['one_token'] / tokens:.0%} of "
            f"positions with one token; {teacher['mass'] / tokens:.2f} for the answers' tokens"
        )
    return lines + of_states(manifest.get("states", {}))


def of_states(measured: JsonObject) -> list[str]:
    """What was measured of the states of a set, if anything was, in a line."""
    if not measured:
        return []
    mean = f"{measured['mean_share']:.0%} on the mean, {measured['worst_share']:.0%} at worst"
    return [f"of what states claim of the next token, {measured['rows']} texts bear out {mean}"]


def set_file(directory: Path, part: JsonObject) -> Path:
    """Return the file of a part; InputError unless it is the one that the manifest describes."""
    path = directory / part["file"]
    if not path.is_file() or sha256_file(path) != part["sha256"]:
        raise InputError(
            f"{path}: is missing, or not the file in the manifest; copy the whole directory again"
        )
    return path


def set_rows(directory: str | Path, columns: list[str] | None = None) -> Iterator[JsonObject]:
    """Yield the rows of a set, one part in memory; InputError as `set_file`."""
    import pyarrow.parquet as pq

    directory = Path(directory)
    for part in read_manifest(directory)["parts"]:
        yield from pq.read_table(set_file(directory, part), columns=columns).to_pylist()
