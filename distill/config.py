"""The options of `draftsmith distill`."""

import math
from dataclasses import dataclass, field
from typing import Any, Literal
from urllib.parse import urlsplit

from decode.tree_spec import parse_tree
from draftsmith_core.errors import InputError
from draftsmith_core.io import read_tree_file
from draftsmith_core.option_types import check_least, check_range, check_types
from draftsmith_core.sampling_options import check_sampling


def magpie(prompts: str) -> int | None:
    """N of `magpie:N`, None for other prompts; InputError for what is no number."""
    kind, colon, count = prompts.partition(":")
    if kind != "magpie" or not colon:
        return None
    if not (count.isascii() and count.isdecimal() and int(count)):
        raise InputError(f"prompts: {prompts!r}: expected magpie:N, such as magpie:1000")
    return int(count)


@dataclass(frozen=True, kw_only=True)
class DistillConfig:
    """Let the target answer prompts, and keep its tokens as a distilled set."""

    target: str
    """The target: a local directory or hub name."""
    prompts: str
    """Prompts: a .jsonl or .parquet file, here or in a store (s3://...), a hub dataset as owner/name[:split], or what
    the target writes by itself: self:N is N texts from the first token on, token:N from any one token of the vocabulary
    on, magpie:N is N turns of the user of its chat template."""
    out: str
    """The distilled set: a directory of part-*.parquet and manifest.json."""
    engine: Literal["hf", "openai", "vllm", "ray"] = "hf"
    """Where the target runs: `hf` in this process, through transformers; `openai` on servers, see `endpoint`; `vllm` in
    this process, on vLLM; `ray` on workers of a Ray cluster, each of which does as `hf` does."""
    endpoint: list[str] = field(default_factory=list)
    """Servers with OpenAI's API that all serve the target (vLLM, SGLang, llama-server, hosted ones), such as
    http://localhost:8000/v1. `target` then gives the tokenizer and needs no weights."""
    served_model: str | None = None
    """What the servers call the target. Default: the one model that each of them lists."""
    api_key_env: str = "OPENAI_API_KEY"
    """The environment variable that holds the key of the servers; no other place is read."""
    concurrency: int = 64
    """Most requests at a time to each server; less while it says that they are too many."""
    timeout_s: float = 600.0
    """Seconds that a server has for one answer."""
    max_requests: int | None = None
    """Stop after so many requests to servers; the same command continues."""
    max_tokens: int | None = None
    """Stop after so many tokens of prompts and answers, as the servers count them; the same command continues."""
    address: str | None = None
    """The Ray cluster, such as HOST:6379 or ray://HOST:10001. Default: that of RAY_ADDRESS, else a local one."""
    workers: int | None = None
    """Copies of the target on the Ray cluster. Default: one for each GPU, or where there is none one for each node."""
    tensor_parallel_size: int = 1
    """GPUs that vLLM divides the target among."""
    turns: Literal["all", "last"] = "all"
    """Of a chat, `all`: the target writes every assistant turn anew, each after its own earlier answers, a row a turn;
    turns that call tools stay. `last`: it answers once, after the turns as they are."""
    chat_template: str | None = None
    """A Jinja file with the chat template, where the target's tokenizer has none or another is wanted."""
    thinking: Literal["keep", "drop"] = "keep"
    """Of a target that thinks before it answers. `keep`: its thinking is part of its answers, as its chat template has
    it. `drop`: the template's switch tells it not to think, and answers that do all the same are left out."""
    num_samples: int = 1
    """Answers per prompt; several samples of one prompt are worth more than one."""
    max_new_tokens: int = 256
    """The longest answer, in tokens."""
    temperature: float | None = None
    """Sample as you will serve; 0 is greedy. Default: of the target's generation_config.json, else 1."""
    temperatures: list[str] = field(default_factory=list)
    """Or a mixture of them, TEMPERATURE:SHARE each, such as 0.0:0.2 0.7:0.4 1.0:0.4: each sample draws its own."""
    top_p: float | None = None
    """Keep the smallest set of tokens with this mass; 1 keeps all. Default: of that file, else 1."""
    top_k: int | None = None
    """Keep the k most probable tokens; 0 keeps all. Default: of that file, else 0."""
    min_p: float | None = None
    """Keep tokens of at least this share of the greatest probability; 0 keeps all. Default: of that file, else 0."""
    seed: int = 0
    """Of every draw; each output has its own from it."""
    batch_size: int = 32
    """Rows that are generated together; the next prompt takes the place of one that has ended."""
    draft: str | None = None
    """Generate speculatively with this draft, a model or a head: the same distribution, in less time where drafts are
    accepted. Measured when a set is begun, and switched off where the target alone takes no longer. For `hf` and
    `ray`."""
    tree: str | None = None
    """What the draft drafts at each step, such as chain:4 or kary:4,2,2. Default: the fastest of chain:1, chain:2 and
    chain:4."""
    part_rows: int = 1024
    """About so many rows per Parquet file: a file has the answers to part_rows / num_samples prompts, at least to one.
    A killed run loses at most the files in the making; `openai` keeps every answer."""
    strict: bool = False
    """End at the first row that cannot be read. Without it the row is skipped and counted, with its reason."""
    max_prompts: int | None = None
    """Use only the first rows of the prompts."""
    teacher_top_k: int = 0
    """Also keep the target's distribution at every token of an answer: its so many likeliest tokens and the mass of
    the rest. `train` can then use fkl and its like without the target. About 4 k bytes per token; 0 keeps none."""
    decontaminate: list[str] = field(default_factory=list)
    """Prompt sets of the evaluation, as NAME=P: a prompt that shares 13 words in a row with one of theirs is skipped,
    and counted."""
    split: float | None = None
    """Ask only this share of the prompts, such as 0.9, chosen by the hash of their tokens; the others are skipped and
    written to heldout.jsonl for `eval`."""
    drop: list[Literal["empty", "truncated", "repetitive"]] = field(default_factory=list)
    """Answers to leave out: `empty`, without any text; `truncated`, at max_new_tokens; `repetitive`, half of whose runs
    of four tokens stood in it before."""
    min_response_tokens: int | None = None
    """Leave out answers of fewer tokens."""
    max_response_tokens: int | None = None
    """Leave out answers of more tokens."""
    prompt_tokens: int = 32
    """For rows with `text`: how many of its first tokens make the prompt."""
    domain: str = "default"
    """The domain of rows that do not name their own."""
    ignore_eos: bool = False
    """Go on to max_new_tokens even when the target ends."""
    push_to_hub: str | None = None
    """Upload the finished set to this data set on the hub, owner/name, with the token in HF_TOKEN; made private where
    it does not exist."""
    copy_to: str | None = None
    """Copy the finished set to this directory of a store that fsspec knows, such as s3://BUCKET/DIR."""
    device: str = "auto"
    """auto, cpu, cuda or cuda:N."""
    dtype: str = "auto"
    """Of the models: auto (float32 on a CPU, else the checkpoint's own), float32, bfloat16 or float16."""
    trust_remote_code: bool = False
    """Run model code that comes with a checkpoint."""

    def __post_init__(self) -> None:
        check_types(self)
        magpie(self.prompts)
        check_least(self, 1, "num_samples", "max_new_tokens", "batch_size", "part_rows", "prompt_tokens", "max_prompts")
        check_least(self, 1, "concurrency", "tensor_parallel_size", "max_requests", "max_tokens", "workers")
        check_least(self, 1, "min_response_tokens", "max_response_tokens")
        check_range(self, "(0, inf)", "timeout_s")
        check_range(self, "[0, 65535]", "teacher_top_k")
        self._check_engine()
        self._check_draft()
        if self.split is not None and not 0 < self.split < 1:
            raise InputError(f"split: {self.split} must be between 0 and 1, such as 0.9")
        if self.split is not None and self.prompts.startswith("self:"):
            raise InputError("split: texts of self:N begin with one and the same prompt; leave it out, or use token:N")
        if (self.min_response_tokens or 1) > min(self.max_response_tokens or math.inf, self.max_new_tokens):
            raise InputError(f"min_response_tokens: {self.min_response_tokens} is more than an answer may have")
        if not self.domain:
            raise InputError("domain: is empty; give it a name")
        check_sampling(self.temperature, self.top_k, self.top_p, self.min_p)
        if self.temperatures and self.temperature is not None:
            raise InputError("temperatures: are a mixture in place of --temperature; leave out one of them")
        for value, _ in self.mixture():
            check_sampling(value, None, None)

    def mixture(self) -> list[tuple[float, float]]:
        """(temperature, share) of each part of `temperatures`; shares add up to 1. InputError for what is neither."""
        pairs = []
        for each in self.temperatures:
            value, _, share = each.partition(":")
            try:
                pairs.append((float(value), float(share)))
            except ValueError:
                raise InputError(f"temperatures: {each!r}: expected TEMPERATURE:SHARE, such as 0.7:0.4") from None
            if not 0 < pairs[-1][1] < math.inf:
                raise InputError(f"temperatures: {each!r}: its share must be above 0")
        total = sum(share for _, share in pairs)
        return [(value, share / total) for value, share in pairs]

    def _check_draft(self) -> None:
        if self.draft is None:
            if self.tree is not None:
                raise InputError("tree: is what a draft drafts; add --draft, or leave it out")
            return
        if self.engine not in ("hf", "ray"):
            raise InputError(f"draft: is for --engine hf or ray; leave it out with --engine {self.engine}")
        if self.tree is not None:
            try:
                parse_tree(self.tree, read_tree_file)
            except InputError:
                raise
            except ValueError as error:
                raise InputError(str(error)) from None

    def _check_engine(self) -> None:
        """Options that only one engine has are refused with another."""
        of_servers: dict[str, Any] = {"endpoint": [], "served_model": None, "max_requests": None, "max_tokens": None}
        only: dict[str, dict[str, Any]] = {
            "openai": of_servers,
            "ray": {"address": None, "workers": None},
            "vllm": {"tensor_parallel_size": 1},
        }
        for engine, defaults in only.items():
            given = [key for key, default in defaults.items() if getattr(self, key) != default]
            if given and self.engine != engine:
                whose = "servers" if engine == "openai" else engine
                raise InputError(f"{given[0]}: is for {whose}; add --engine {engine}, or leave it out")
        if self.engine == "openai":
            self._check_servers()

    def _check_servers(self) -> None:
        if not self.endpoint:
            raise InputError("endpoint: --engine openai needs at least one, such as http://localhost:8000/v1")
        if self.teacher_top_k:
            raise InputError("teacher_top_k: servers give no whole distributions; leave it out with --engine openai")
        for url in self.endpoint:
            try:
                parts = urlsplit(url)
                usable = parts.scheme in ("http", "https") and parts.hostname and parts.port != 0
            except ValueError:  # no port, no IPv6 address
                usable = False
            if not usable or not url.isprintable() or " " in url:
                known = url.rpartition("@")[2]  # before that a password can stand
                raise InputError(f"endpoint: {known!r} is no URL; write it as http://localhost:8000/v1")
            if parts.username or parts.password or parts.query:
                raise InputError(
                    f"endpoint: a URL on {parts.hostname} holds a password or a query; put the key into the "
                    f"environment variable {self.api_key_env}"
                )
        if len(set(self.endpoint)) < len(self.endpoint):
            raise InputError("endpoint: names a server twice; --concurrency is how much each is asked at a time")
