"""Teacher rows: the target's top-k tokens and the remaining mass at every token of an answer,
without generating.

Legend: P prompt tokens, R response tokens, C positions of a chunk, V vocabulary, K kept tokens.
"""

from collections.abc import Callable, Iterator, Sequence
from functools import partial
from itertools import accumulate, islice
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import torch
from transformers import PreTrainedModel

from distill.config import ScoreConfig
from distill.manifest import RECORDS, SET_FORMAT, check_empty, finish
from distill.parts import SCHEMA, TEACHER, check_digest, write_part
from draftsmith_core.errors import InputError, RunError, without_secrets
from draftsmith_core.io import hash_json, read_json, sha256_file
from draftsmith_core.launcher import join_processes
from draftsmith_core.models import (
    check_tokenizer,
    context_length,
    dtype_name,
    eos_ids,
    fingerprint,
    load_model,
    vocabulary_size,
)
from draftsmith_core.options import configured
from draftsmith_core.progress import progress
from draftsmith_core.prompt_rows import (
    Record,
    count_rows,
    digest_of,
    iterate_records,
    parse_record,
    text_of,
)
from draftsmith_core.prompts import answered, content_id
from draftsmith_core.ranks import on_main
from draftsmith_core.runs import Run, command_line
from draftsmith_core.settings import loading, tokenizing
from draftsmith_core.teacher_rows import COLUMN, bytes_per_token, pack
from draftsmith_core.tokenization import Tokenizer, check_vocabulary, load_tokenizer

# Bounds the memory of the float64 copy of a chunk's logits.
_CHUNK_VALUES = 2**24


@torch.inference_mode()
def score(
    model: PreTrainedModel, prompt_ids: Sequence[int], response_ids: Sequence[int], k: int
) -> bytes:
    """Return the top k tokens at every token of an answer, packed as in
    `draftsmith_core.teacher_rows`.

    Log-probabilities are at temperature 1 over the whole vocabulary. Rows do not depend on a batch.
    Without a prompt nothing predicts the first token; its row, which training skips, repeats the
    second's. Raise RunError if logits are not finite.
    """
    ids_1T = torch.tensor([[*prompt_ids, *response_ids]], device=model.device)
    # The last position predicts what follows the answer. Some models ignore `logits_to_keep` and
    # return all positions.
    logits_TV = model(
        input_ids=ids_1T, use_cache=False, logits_to_keep=len(response_ids) + 1
    ).logits[0]
    logits_RV = (
        logits_TV[-len(response_ids) - 1 : -1]
        if prompt_ids
        else logits_TV[[0, *range(len(response_ids) - 1)]]
    )
    if not logits_RV.amax(-1).isfinite().all():
        raise RunError(
            f"{model.name_or_path}: gives logits that are NaN or infinite on an answer; try "
            "--dtype float32"
        )
    vocabulary = logits_RV.shape[-1]
    chunks = []
    for logits_CV in logits_RV.split(max(1, _CHUNK_VALUES // vocabulary)):
        top = logits_CV.double().log_softmax(-1).topk(min(k, vocabulary), dim=-1)
        tail_C = (1 - top.values.exp().sum(-1)).clamp_min(0)
        chunks.append((top.indices.cpu().numpy(), top.values.cpu().numpy(), tail_C.cpu().numpy()))
    ids_RK, logprobs_RK, tail_R = (np.concatenate(chunk) for chunk in zip(*chunks, strict=True))
    return pack(ids_RK, logprobs_RK, tail_R, vocabulary)


# Rows with their number in the source; a row that cannot be read is the reason.
Rows = list[tuple[int, dict[str, Any] | str]]
# Digest and reader of each part.
Parts = Iterator[tuple[str, Callable[[], Rows]]]


def score_set(
    config: ScoreConfig | None = None, command: str | None = None, **options: Any
) -> dict[str, Any]:
    """Write the scored set, or resume a killed run's; return its summary. command: the command line
    to record.
    """
    config = configured(ScoreConfig, config, options)
    with Run(config.out) as run:
        processes, out = join_processes(config.device), run.out
        tokenizer = load_tokenizer(config.target, **tokenizing(config))
        model = load_model(config.target, **loading(config))
        check_tokenizer(config.target, model, tokenizer)
        scored, count, values, source = (_of_set if Path(config.score).is_dir() else _of_file)(
            config, tokenizer, model
        )
        size = vocabulary_size(model)
        identity = {
            "config": values | {"target": config.target, "teacher_top_k": config.teacher_top_k},
            "scored": scored,
            "target_fingerprint": fingerprint(model),
            "target_dtype": dtype_name(model),
        }
        on_main(lambda: check_empty(out))
        run.begin(identity, RECORDS)
        parts = 0
        with progress("score", count if processes.num_processes == 1 else None) as advance:
            for index, (digest, read) in enumerate(source):
                parts += 1
                if index % processes.num_processes != processes.process_index:
                    continue
                if (finished := check_digest(out, index, digest, config.score)) is None:
                    rows = read()
                    _write_scored(out, index, digest, rows, model, config.teacher_top_k)
                    finished = len(rows)
                advance(finished, "")
        processes.wait_for_everyone()
        on_main(
            lambda: finish(
                out, parts, identity, command or command_line("distill", config), tokenizer
            )
        )
        manifest = read_json(out / "manifest.json", "the manifest that this run has written")
        token_bytes = bytes_per_token(min(config.teacher_top_k, size), size)
        sums = {key: manifest[key] for key in ("response_tokens", "skipped_because")}
        return {"out": config.out, **manifest["counts"], **sums, "bytes_per_token": token_bytes}


def _write_scored(
    out: Path, index: int, digest: str, rows: Rows, model: PreTrainedModel, k: int
) -> None:
    skipped: list[tuple[int, str]] = []
    scored = []
    limit, size = context_length(model), vocabulary_size(model)
    for number, row in rows:
        if isinstance(row, str):
            skipped.append((number, row))
            continue
        prompt, response = row["prompt_ids"], row["response_ids"]
        if not response:
            skipped.append((number, "no answer"))
        elif limit is not None and len(prompt) + len(response) > limit:
            skipped.append(
                (number, f"{len(prompt) + len(response)} tokens, more than the {limit} that fit")
            )
        elif not all(0 <= token < size for token in [*prompt, *response]):
            skipped.append((number, f"holds a token that the target, with {size}, does not have"))
        else:
            scored.append({**row, COLUMN: score(model, prompt, response, k)})
    record = {
        "read": len(rows),
        "digest": digest,
        "skipped": skipped,
        "failed": [],
        "shortened": [],
    }
    write_part(out, index, record, scored, pa.schema([*SCHEMA, *TEACHER]))


# A source of answers: its identity, its number of rows (None if unknown), its options and its
# parts.
Source = tuple[dict[str, Any], int | None, dict[str, Any], Parts]


def _of_set(config: ScoreConfig, tokenizer: Tokenizer, model: PreTrainedModel) -> Source:
    directory = Path(config.score)
    manifest = read_json(directory / "manifest.json", "the manifest of a finished distilled set")
    if manifest.get("format") != SET_FORMAT:
        raise InputError(f"{directory}: its manifest.json is not that of a distilled set")
    check_vocabulary(tokenizer, manifest.get("vocabulary", {}), str(directory))

    def read(path: Path, digest: str, start: int) -> Rows:
        if not path.is_file() or sha256_file(path) != digest:
            raise InputError(f"{path}: is not the file that the manifest describes; copy it again")
        rows = [
            {name: row.get(name) for name in SCHEMA.names}
            for row in pq.read_table(path).to_pylist()
        ]
        return list(enumerate(rows, start))

    starts = list(accumulate((part["rows"] for part in manifest["parts"]), initial=1))
    parts = (
        (part["sha256"], partial(read, directory / part["file"], part["sha256"], start))
        for part, start in zip(manifest["parts"], starts, strict=False)
    )
    identity = {
        "set": hash_json(manifest["parts"]),
        "target_fingerprint": manifest.get("identity", {}).get("target_fingerprint"),
    }
    return identity, starts[-1] - 1, dict(manifest.get("config", {})), parts


def _of_file(config: ScoreConfig, tokenizer: Tokenizer, model: PreTrainedModel) -> Source:
    ends = eos_ids(model)

    def parts() -> Parts:
        records = iterate_records(config.score)
        while group := list(islice(records, config.part_rows)):
            yield digest_of(group), partial(read, group)

    def read(group: list[Record]) -> Rows:
        return [(record.number, _row(record, config, tokenizer, ends)) for record in group]

    keys = ("num_samples", "max_new_tokens", "temperature", "top_p", "top_k", "seed")
    name = without_secrets(config.score)
    values = dict.fromkeys(keys) | {
        "prompts": name,
        "part_rows": config.part_rows,
        "domain": config.domain,
    }
    return {"file": name}, count_rows(config.score), values, parts()


def _row(
    record: Record, config: ScoreConfig, tokenizer: Tokenizer, ends: Sequence[int]
) -> dict[str, Any] | str:
    """Return the answer in a row of a file, or why it cannot be read."""
    source = without_secrets(config.score)
    where = f"{source}:{record.number}"
    try:
        stored = parse_record(record, source)
        own_id = text_of(stored, "id")
        if stored.get("messages") is not None:
            prompt, response = answered(
                stored["messages"], where, tokenizer, stored.get("tools") or None
            )
        else:
            sides: list[Any] = [stored.get("prompt_ids"), stored.get("response_ids")]
            for ids in sides:
                if not isinstance(ids, list) or not all(
                    type(token) is int and 0 <= token < 2**31 for token in ids
                ):
                    needs = "needs `messages` that end with the assistant's answer, or token ids in"
                    raise InputError(f"{where}: {needs} prompt_ids and response_ids")
            prompt, response = sides
    except InputError as error:
        return str(error).removeprefix(f"{where}: ")
    return {
        "id": own_id or content_id([*prompt, *response]),
        "prompt_id": own_id or content_id(prompt),
        "prompt_hash": content_id(prompt),
        "domain": text_of(stored, "domain") or config.domain,
        "prompt_ids": prompt,
        "response_ids": response,
        "finish_reason": "stop" if response and response[-1] in ends else "length",
        "temperature": None,
        "seed": None,
        "sample_index": 0,
        "turn": 0,
        "tokens_from": "target" if stored.get("messages") is None else "text",
    }
