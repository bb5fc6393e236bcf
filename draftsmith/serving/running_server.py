"""A running server of a target with a draft: its engine, its answers, and its counts of drafts.

| engine | `owned_by` | prompts | counts |
|---|---|---|---|
| vLLM | vllm | v1/completions, chats to v1/chat/completions | `metrics`, else /metrics |
| llama.cpp | llamacpp | /completion, chats by /apply-template | `timings`, /metrics by position |
| SGLang | sglang | /generate, chats by the tokenizer here | `meta_info` of the answer |

/metrics is read before and after an answer. All three engines take the first token from the
prompt's forward. From then on, a target call emits one token and the drafted tokens that it
accepts.
"""

import json
import re
import time
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass, field, replace
from functools import cached_property

import httpx2

from draftsmith.core.errors import InputError, RunError, first_line
from draftsmith.core.io import JsonObject, hash_json
from draftsmith.core.prompts import Prompt
from draftsmith.core.row_formats import ARGUMENTS, BESIDE, CONTINUES
from draftsmith.distill.engines import AnswerRequest, Key
from draftsmith.distill.engines.replies import client_options, key_of, said
from draftsmith.distill.engines.server import Completion, Dialect

NAMES = {"vllm": "vLLM", "llamacpp": "llama.cpp", "sglang": "SGLang"}
_HOW = {
    "vllm": "start it with --speculative-config and without --disable-log-stats",
    "llamacpp": "start llama-server with -md DRAFT.gguf and --spec-type",
    "sglang": "start it with --speculative-algorithm",
}
_COUNTER = re.compile(
    r"^\w+:(?:spec_decode_num_)?(\w+?)_total(?:\{([^}]*)\})? (\S+)$", re.MULTILINE
)
_ANSWER_TIMEOUT_S = 600.0
_COUNT_TIMEOUT_S = 5.0
# Keys of a request that override the server's own sampling.
_SAMPLING = (
    "temperature",
    "top_p",
    "top_k",
    "min_p",
    "repetition_penalty",
    "repeat_penalty",
    "samplers",
)
_NO_PENALTY = {"presence_penalty": 0.0, "frequency_penalty": 0.0}
# Where each engine tells its version, build and arguments.
_TELLS = {
    "vllm": ("version", "server_info?config_format=json"),
    "llamacpp": ("props",),
    "sglang": ("get_server_info",),
}
_SECRET = re.compile(r"key|secret|password|auth|credential|(^|_)token$", re.IGNORECASE)
# A longer text, such as a chat template, is told by its hash.
_LONGEST_FACT = 200


@dataclass(frozen=True)
class ServedAnswer:
    """One answer, with the prompt as the server read it.

    calls: target calls after the first token. drafted: number of drafted tokens. accepted_by_depth:
    drafted tokens that were accepted, by position; none if the server does not say.
    reached_by_depth: calls that verified a token at each position; none: those that accepted the
    one before. told: the settings of this answer, if the server tells them. counted: the number of
    answers that these counts are of; 0 if none came with it, or they are among another's.
    """

    prompt_ids: list[int]
    output_ids: list[int]
    calls: int = 0
    drafted: int = 0
    accepted_by_depth: Sequence[int] = ()
    reached_by_depth: Sequence[int] = ()
    told: JsonObject = field(default_factory=dict)
    counted: int = 1


class RunningServer:
    """A vLLM, SGLang or llama.cpp server. Raise InputError for other servers."""

    def __init__(self, url: str) -> None:
        self.url = url.rstrip("/").removesuffix("/v1")
        timeout = httpx2.Timeout(_ANSWER_TIMEOUT_S, connect=10.0)
        self._key = key_of("OPENAI_API_KEY")
        self._client = httpx2.Client(**client_options(self.url, self._key), timeout=timeout)
        models = self._json("v1/models").get("data") or [{}]
        self.model = str(models[0].get("id"))
        self._listed: JsonObject = models[0]
        self.engine = str(models[0].get("owned_by"))
        if self.engine not in NAMES:
            raise InputError(
                f"--served {url}: is not vLLM, SGLang or llama.cpp (owned_by: "
                f"{said(repr(self.engine), self._key)})"
            )

    @cached_property
    def facts(self) -> JsonObject:
        """What the server tells of itself: flat, without lists and secrets."""
        told: JsonObject = {"model": self._listed}
        for path in _TELLS[self.engine]:
            with suppress(InputError):
                told |= self._json(path)
        return dict(self._flat(told, ""))

    def _flat(self, value: object, name: str) -> Iterator[tuple[str, object]]:
        if isinstance(value, dict):
            for key, item in value.items():
                if not _SECRET.search(str(key)):
                    yield from self._flat(item, f"{name}.{key}".lstrip("."))
        elif isinstance(value, str):
            yield name, said(value, self._key) if len(value) <= _LONGEST_FACT else hash_json(value)
        elif isinstance(value, int | float):
            yield name, value

    def draft_tokens(self, answers: list[ServedAnswer]) -> int:
        """Return the number of tokens drafted at a time. Raise InputError if nothing drafts."""
        positions = max(len(answer.accepted_by_depth) for answer in answers)
        # llama.cpp drafts fewer tokens at the end of an answer.
        drafted = max(-(-answer.drafted // max(answer.calls, 1)) for answer in answers)
        if not drafted:
            raise InputError(
                f"--served {self.url}: drafts nothing, or does not count it; {_HOW[self.engine]}"
            )
        return max(positions, drafted)

    def answers(
        self, prompts: Sequence[Prompt], completion: Completion, states_sampling: bool
    ) -> list[ServedAnswer]:
        """Answer prompts that are asked at once. If not `states_sampling`, leave the sampling to
        the server.
        """
        before = self._counters()
        with ThreadPoolExecutor(len(prompts)) as pool:
            asked = [
                pool.submit(self._answer, prompt, completion, states_sampling) for prompt in prompts
            ]
            answers = [each.result() for each in asked]
        if not all(answer.counted for answer in answers):
            self._count(answers, before)
        elif len(answers) == 1 and self.engine == "llamacpp":
            by_depth = _by_depth(self._counters(before))
            answers[0] = replace(answers[0], accepted_by_depth=by_depth)
        return answers

    def _answer(
        self, prompt: Prompt, completion: Completion, states_sampling: bool
    ) -> ServedAnswer:
        if self.engine == "sglang":
            return self._sglang(list(prompt.ids), completion, states_sampling)
        vllm = self.engine == "vllm"
        dialect = Dialect("openai" if vllm else "llama.cpp")
        path = "v1/completions" if vllm else "completion"
        read = list(prompt.ids)
        chat: JsonObject = {}
        if prompt.chat and vllm:
            path = "v1/chat/completions"
            chat = _chat(prompt)
        elif prompt.chat:
            text = self._json("apply-template", _chat(prompt))["prompt"]
            tokenize = {"content": text, "add_special": True, "parse_special": True}
            read = list(self._json("tokenize", tokenize)["tokens"])
        key = Key(prompt.row, 0, 0)
        request = AnswerRequest(key, tuple(read), seed=prompt.row, sampling=completion.sampling)
        body = dialect.body(completion, request)
        if chat:
            del body["prompt"]
        if states_sampling:
            body |= _NO_PENALTY
        else:
            body = {key: value for key, value in body.items() if key not in _SAMPLING}
        reply = self._json(path, body | chat)
        read = list(reply.get("prompt_token_ids") or read)
        ids = self._ids(dialect, completion, read, reply)
        if timings := reply.get("timings"):
            return ServedAnswer(
                prompt_ids=read,
                output_ids=ids,
                calls=timings["predicted_n"] - 1 - timings.get("draft_n_accepted", 0),
                drafted=timings.get("draft_n", 0),
                told=dict(self._flat(reply["generation_settings"], "")),
            )
        steps = (reply.get("metrics") or {}).get("speculative_decoding")
        return count_steps(read, ids, steps) if steps else ServedAnswer(read, ids, counted=0)

    def _ids(
        self, dialect: Dialect, completion: Completion, read: list[int], reply: JsonObject
    ) -> list[int]:
        try:
            answered = dialect.answer(completion, read, json.dumps(reply).encode())
            return list(answered.answer.response_ids)
        except (ValueError, LookupError, TypeError) as error:
            raise RunError(
                f"{self.url}: gave no token ids ({said(first_line(error), self._key)}); use a "
                "newer server"
            ) from None

    def _sglang(
        self, ids: list[int], completion: Completion, states_sampling: bool
    ) -> ServedAnswer:
        sampling = completion.sampling
        settings: dict[str, float] = {"max_new_tokens": completion.max_new_tokens}
        if states_sampling:
            settings |= {
                "temperature": sampling.temperature,
                "top_k": sampling.top_k or -1,
                "top_p": sampling.top_p,
                "min_p": sampling.min_p,
                "repetition_penalty": 1.0,
                **_NO_PENALTY,
            }
        body: JsonObject = {"input_ids": ids, "sampling_params": settings}
        reply = self._json("generate", body)
        if (self.facts.get("speculative_eagle_topk") or 1) > 1:
            raise InputError(
                f"--served {self.url}: drafts a tree; start it with --speculative-eagle-topk 1"
            )
        answered = reply["output_ids"]
        verified = int(reply["meta_info"].get("spec_verify_ct") or 0)
        drafted = verified * int(self.facts.get("speculative_num_steps") or 0)
        return ServedAnswer(ids, answered, verified or len(answered) - 1, drafted)

    def _count(self, answers: list[ServedAnswer], before: Counter[str]) -> None:
        """Wait until vLLM's counters hold these answers, and give the longest of them all counts.

        vLLM counts after it has answered, and no step without drafts; each of them emits one token.
        """
        end = time.monotonic() + _COUNT_TIMEOUT_S
        tokens = sum(len(answer.output_ids) for answer in answers)
        left = tokens - len(answers)
        while True:
            counts = self._counters(before)
            emitted = counts["drafts"] + counts["accepted_tokens"]
            by_depth = _by_depth(counts)
            whole = emitted >= left or counts["generation_tokens"] >= tokens
            if whole or time.monotonic() > end or not by_depth:
                break
            time.sleep(0.02)
        if emitted > tokens + len(by_depth) * len(answers):
            raise RunError(
                f"{self.url}: counted tokens of other requests; let nobody else use the server "
                "meanwhile"
            )
        lengths = [len(answer.output_ids) for answer in answers]
        longest = lengths.index(max(lengths))
        answers[longest] = replace(
            answers[longest],
            calls=counts["drafts"] + max(0, left - emitted),
            drafted=counts["draft_tokens"],
            accepted_by_depth=by_depth,
            reached_by_depth=[counts["drafts"], *by_depth][: len(by_depth)],
            counted=len(answers),
        )

    def _counters(self, before: Mapping[str, int] | None = None) -> Counter[str]:
        """Return what the server's counters of drafts, summed over its engines, gained since
        `before`; empty without counters.
        """
        counts: Counter[str] = Counter()
        counts.subtract(before or {})
        for name, labels, value in _COUNTER.findall(self._fetch("metrics").text):
            position = re.search(r'position="(\d+)"', labels)
            key = f"{name} {position[1]}" if position else name
            counts[key] += int(float(value))
        return counts

    def _json(self, path: str, body: JsonObject | None = None) -> JsonObject:
        reply = self._fetch(path, body)
        try:
            reply.raise_for_status()
            value: JsonObject = reply.json()
            if not isinstance(value, dict):
                raise ValueError("no JSON object")
        except (httpx2.HTTPStatusError, ValueError, RecursionError) as error:
            raise InputError(
                f"--served {self.url}/{path}: {first_line(error)}: {said(reply.text, self._key)}"
            ) from None
        return value

    def _fetch(self, path: str, body: JsonObject | None = None) -> httpx2.Response:
        try:
            method = "GET" if body is None else "POST"
            return self._client.request(method, f"{self.url}/{path}", json=body)
        except (httpx2.HTTPError, httpx2.InvalidURL) as error:
            raise InputError(
                f"--served {self.url}: does not answer ({said(first_line(error), self._key)}); "
                "start the server, with the command that `draftsmith doctor` prints without "
                "--served"
            ) from None


def _chat(prompt: Prompt) -> JsonObject:
    assert prompt.chat is not None
    arguments = prompt.chat.arguments
    # Servers take these keys beside the others, and vLLM overrides the others by them.
    chat: JsonObject = {key: arguments[key] for key in BESIDE if key in arguments}
    if CONTINUES in arguments:
        chat.setdefault("add_generation_prompt", False)
    chat["messages"] = prompt.chat.question().messages
    if arguments:
        chat[ARGUMENTS] = arguments
    if prompt.chat.tools:
        chat["tools"] = prompt.chat.tools
    return chat


def _by_depth(counts: Counter[str]) -> list[int]:
    depths = sum(name.startswith("accepted_tokens_per_pos ") for name in counts)
    return [counts[f"accepted_tokens_per_pos {depth}"] for depth in range(depths)]


def count_steps(prompt_ids: list[int], ids: list[int], metrics: JsonObject) -> ServedAnswer:
    """Count one request of vLLM with `--per-request-spec-decode-metrics`.

    vLLM also counts what it accepted behind the end of an answer; it is left out here. `detailed`
    lists the steps in order. Of `summary`, the step that accepted most is taken for the last.
    """
    depth = metrics["num_spec_tokens"]
    steps = metrics.get("per_step_accepted")
    if steps is None:
        steps = []
        for accepted, count in enumerate(metrics["acceptance_histogram"]):
            steps += [accepted] * count
    drafted = metrics.get("per_step_drafted") or [depth] * len(steps)
    accepted_by_depth = [0] * depth
    reached_by_depth = [0] * depth
    # The first token comes from the prompt's forward.
    left = len(ids) - 1
    for accepted, proposed in zip(steps, drafted, strict=True):
        for at in range(min(accepted + 1, proposed, left)):
            reached_by_depth[at] += 1
            accepted_by_depth[at] += at < accepted
        left -= min(accepted + 1, left)
    return ServedAnswer(
        prompt_ids=prompt_ids,
        output_ids=ids,
        # vLLM lists no step without drafts; each of them emits one token.
        calls=len(steps) + left,
        drafted=metrics["num_draft_tokens"],
        accepted_by_depth=accepted_by_depth,
        reached_by_depth=reached_by_depth,
    )
