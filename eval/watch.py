"""`eval --watch FILE`: follows a growing log of prompts and answers, and tells when acceptance has left its band."""

import json
import os
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np
from transformers import PreTrainedModel

from drafts.load import Draft, draft_fingerprint, load_pair
from draftsmith_core.errors import InputError, RequirementError
from draftsmith_core.model_options import loading
from draftsmith_core.models import context_length, vocabulary_size
from draftsmith_core.processes import say
from draftsmith_core.prompt_rows import whole
from draftsmith_core.prompts import check_messages, check_tools
from draftsmith_core.sampling import Sampling
from draftsmith_core.tokenization import Tokenizer, encode_messages, encode_text
from eval.acceptance import Continuation
from eval.change_test import Band, ChangeTest
from eval.config import WatchConfig
from eval.estimate import alpha_sums
from eval.results import Results

POLL_S = 1.0
BATCH = 8


@dataclass(frozen=True)
class Baseline:
    """What the baseline measured: of which draft, on what, and where the mean acceptance of an answer lies."""

    results: Results
    draft: str
    domain: str
    sampling: Sampling
    band: Band


def read_baseline(config: WatchConfig) -> Baseline:
    """InputError, one line, for results that do not say what is to be watched."""
    results = Results.load(config.baseline)
    draft = config.draft
    if draft is None:
        named = results.aligned or results.drafts
        if len(named) > 1:
            raise InputError(f"--draft: {config.baseline} has several; name one of {', '.join(results.drafts)}")
        draft = named[0]
    temperature = results.top_temperature if config.temperature is None else config.temperature
    domains = results.domains("id") if config.domain == "id" and "id" not in results.domains() else [config.domain]
    means: list[float] = []
    for domain in domains:
        row = results.alpha_row(draft, domain, temperature)
        if row["per_prompt"] is None:
            raise InputError(f"--domain {config.domain}: name a prompt set, or leave it out for all ID sets")
        means += [
            total / count for total, count in zip(row["per_prompt"]["sum"], row["per_prompt"]["count"], strict=True)
        ]
    measured = results.document["config"]
    sampling = Sampling(
        temperature=temperature, top_k=measured["top_k"], top_p=measured["top_p"], min_p=measured.get("min_p") or 0.0
    )
    return Baseline(results, draft, config.domain, sampling, Band.of(np.array(means), config.rate))


def watch(config: WatchConfig) -> dict[str, Any]:
    """Follow the log until its end (`follow` false) or until interrupted, saying what is seen on standard error.

    Returns the summary. Raises RequirementError when the log has ended and acceptance has left the band.
    """
    log = Path(config.watch)
    if not log.is_file():
        raise InputError(f"--watch {log}: no such file; name a .jsonl file that requests and responses are written to")
    baseline = read_baseline(config)
    target_row, draft_row = (baseline.results.document["models"][name] for name in ("target", baseline.draft))
    pair = load_pair(target_row["name"], {baseline.draft: draft_row["name"]}, **loading(config))
    draft = pair.drafts[baseline.draft]
    for row, model in ((target_row, pair.target), (draft_row, draft)):
        if draft_fingerprint(model) != row["fingerprint"]:
            raise InputError(
                f"{row['name']}: is not the model that --baseline {config.baseline} measured; evaluate again"
            )
    watched = _Watched(config, baseline, pair.target, draft)
    band = baseline.band
    say(
        f"watch: {baseline.draft} at T={baseline.sampling.temperature:g}; in the baseline ({baseline.domain}) an "
        f"answer's mean acceptance "
        f"is {band.mean:.3f}, band [{band.low:.3f}, {band.high:.3f}]; at most {config.rate:.1%} of streams that stay "
        f"in it are ever called changed"
    )
    pending: list[Continuation] = []
    for line in _lines(log, config.follow):
        answer = None
        if line is not None:
            watched.rows += 1
            answer = _answer(line, f"{log}:{watched.rows}", pair.tokenizer, pair.target, draft, watched.skipped)
        if answer is not None:
            pending.append(answer)
        # None: nothing more is there for now, so that what has come is looked at.
        if pending and (line is None or len(pending) == BATCH):
            watched.add(pending)
            pending = []
    watched.close()
    summary = watched.summary()
    if watched.said is not None:
        raise RequirementError([watched.said])
    return summary


class _Watched:
    """What has been seen of a log so far."""

    def __init__(self, config: WatchConfig, baseline: Baseline, target: PreTrainedModel, draft: Draft) -> None:
        self.config, self.baseline, self.target, self.draft = config, baseline, target, draft
        self.rows, self.skipped, self.said = 0, [], None  # type: int, list[str], str | None
        band = baseline.band
        self.test = ChangeTest(np.array([band.low]), np.array([band.high]), config.rate)
        self.sums: list[float] = []
        self.counts: list[int] = []

    def add(self, answers: list[Continuation]) -> None:
        found = alpha_sums(self.target, self.draft, answers, self.baseline.sampling, batch_size=BATCH)
        for total, count in zip(found["sum"], found["count"], strict=True):
            self.sums.append(total)
            self.counts.append(count)
            self.test.update(np.array([min(1.0, total / count)]))
            if len(self.sums) % self.config.window == 0:
                self._window(len(self.sums) - self.config.window)
            if self.test.alarm_S[0] and self.said is None:
                where = "below" if self.test.alarm_S[0] < 0 else "above"
                self.said = (
                    f"{self.config.watch}: acceptance has left the band of {self.baseline.domain} and is {where} "
                    f"[{self.baseline.band.low:.3f}, {self.baseline.band.high:.3f}], since about answer "
                    f"{int(self.test.since_S[0])}; known at answer {len(self.sums)}"
                )
                say(f"watch: CHANGED: {self.said}")

    def _window(self, start: int) -> None:
        count = sum(self.counts[start:])
        say(f"watch: answers {start + 1} to {len(self.sums)}: alpha {sum(self.sums[start:]) / count:.3f}")

    def close(self) -> None:
        start = len(self.sums) // self.config.window * self.config.window
        if start < len(self.sums):
            self._window(start)
        if self.skipped:
            say(f"watch: {len(self.skipped)} of {self.rows} rows skipped: {self.skipped[0]} (the first)")

    def summary(self) -> dict[str, Any]:
        return {
            "rows": self.rows,
            "answers": len(self.sums),
            "skipped": len(self.skipped),
            "alpha": sum(self.sums) / sum(self.counts) if self.counts else None,
            "band": [self.baseline.band.low, self.baseline.band.high],
            "changed": self.said,
        }


def _lines(log: Path, follow: bool) -> Iterator[str | None]:
    """Whole lines of a growing file, and None whenever its end is reached. As `tail -F`: where another file takes its
    name, or it is cut to be written anew, that is read from its beginning. A last line without an end of line counts
    only when nothing more is waited for.
    """
    while True:
        with log.open("rb") as file:
            part, anew = b"", False
            while True:
                if line := file.readline():
                    part += line
                    if part.endswith(b"\n"):
                        yield part.decode(errors="replace")
                        part = b""
                elif anew:
                    break
                elif not follow:
                    if part.strip():
                        yield part.decode(errors="replace")
                    yield None
                    return
                else:
                    yield None
                    # A file that was renamed may have got lines since; they are read first.
                    anew = _begun_anew(log, file)
                    if not anew:
                        time.sleep(POLL_S)
        say(f"watch: {log} was begun anew; reading it from its beginning")


def _begun_anew(log: Path, file: BinaryIO) -> bool:
    """Whether a name is another file's by now, or its file shorter than what was read of it."""
    try:
        now = log.stat()
    except FileNotFoundError:
        return False  # renamed, and the next one is not there yet
    return not os.path.samestat(now, os.fstat(file.fileno())) or now.st_size < file.tell()


def _answer(
    line: str, where: str, tokenizer: Tokenizer, target: PreTrainedModel, draft: Draft, skipped: list[str]
) -> Continuation | None:
    """One row: `prompt_ids` and `output_ids`, or `messages` or `prompt` with a `response` (a text, or the body that an
    OpenAI-compatible server answered with). None, with its reason in `skipped`, where it is not one.
    """
    try:
        row = json.loads(line)
        if not isinstance(row, dict):
            raise InputError(f"{where}: is not a JSON object")
        prompt, output = logged_tokens(row, where, tokenizer)
        if not prompt or not output:
            raise InputError(f"{where}: the prompt or the answer is empty")
        limits = [context_length(m) for m in (target, draft) if isinstance(m, PreTrainedModel)]
        if any(limit is not None and len(prompt) + len(output) > limit for limit in limits):
            raise InputError(f"{where}: {len(prompt) + len(output)} tokens are more than the models' context")
        if not all(isinstance(i, int) and 0 <= i < vocabulary_size(target) for i in (*prompt, *output)):
            raise InputError(f"{where}: holds ids that are not tokens of the target")
    except (ValueError, RecursionError) as error:  # a number of 5,000 digits, brackets 100,000 deep
        skipped.append(str(error) if isinstance(error, InputError) else f"{where}: is not valid JSON")
        return None
    return Continuation(where, prompt, output)


def logged_tokens(row: dict[str, Any], where: str, tokenizer: Tokenizer) -> tuple[list[int], list[int]]:
    """(prompt, answer) of a row of a log, as `_answer` has it, in the target's tokens; InputError where it has none."""
    if isinstance(row.get("prompt_ids"), list) and isinstance(row.get("output_ids"), list):
        return list(row["prompt_ids"]), list(row["output_ids"])
    if "messages" in row:
        prompt = encode_messages(tokenizer, check_messages(row["messages"], where), where, check_tools(row, where))
    elif isinstance(row.get("prompt"), str):
        prompt = encode_text(tokenizer, whole(row["prompt"], "prompt", where))
    else:
        raise InputError(f"{where}: needs prompt_ids and output_ids, or messages or prompt with a response")
    response = row.get("response")
    if isinstance(response, dict):
        choices = response.get("choices")
        first = choices[0] if isinstance(choices, list) and choices and isinstance(choices[0], dict) else {}
        message = first.get("message")
        response = message.get("content") if isinstance(message, dict) else first.get("text")
    if not isinstance(response, str):
        raise InputError(f"{where}: has no response with a text")
    return prompt, list(tokenizer.encode(whole(response, "response", where), add_special_tokens=False))
