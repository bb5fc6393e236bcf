"""What a server says of itself, beside what the prediction assumes."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from draftsmith.config import ServedConfig
from draftsmith.core.errors import InputError
from draftsmith.core.io import JsonObject
from draftsmith.core.models import dtype_name
from draftsmith.core.sampling import Sampling
from draftsmith.drafts.engine_commands import SERVING
from draftsmith.drafts.load import kind_of, other_targets
from draftsmith.pair import Pair
from draftsmith.serving.asking import Load
from draftsmith.serving.running_server import NAMES, RunningServer

_DRAFTS = "vllm_config.speculative_config."
# How engines call a setting.
_CALLED = {
    "method": (f"{_DRAFTS}method", "speculative_algorithm", "speculative.types"),
    "draft_sample_method": (f"{_DRAFTS}draft_sample_method",),
    "rejection_sample_method": (f"{_DRAFTS}rejection_sample_method",),
    "longest text": ("model.max_model_len", "default_generation_settings.n_ctx", "context_length"),
    "dtype": ("vllm_config.model_config.dtype", "dtype", "model_ftype"),
    "cache": ("vllm_config.cache_config.cache_dtype", "kv_cache_dtype"),
    "cache of the draft": (f"{_DRAFTS}kv_cache_dtype",),
    "at once": ("vllm_config.scheduler_config.max_num_seqs", "total_slots", "max_running_requests"),
    "draft": (f"{_DRAFTS}model", "speculative_draft_model_path"),
    "target": ("model.root", "model_path"),
    "version": ("version", "build_info"),
}
# Of these an engine needs so many at least.
_ROOMS = ("longest text", "at once")
# What differs elsewhere can be why less is accepted, or why texts are others.
_TOLD = ("dtype", "at once", "draft", "target", "version")
# SGLang accepts more than its rule would below 1.
_LENIENT = ("speculative_accept_threshold_single", "speculative_accept_threshold_acc")
_SAMPLING = {
    "temperature": "temperature",
    "repeat_penalty": "repetition_penalty",
    "presence_penalty": "presence_penalty",
    "frequency_penalty": "frequency_penalty",
    "top_k": "top_k",
    "top_p": "top_p",
    "min_p": "min_p",
}
_OPTIONS = ("draft_sample_method", "rejection_sample_method")
_RULES = {"standard": "speculative", "block": "block"}
_SPELLED = {"all-f32": "float32", "f16": "float16", "bf16": "bfloat16"}


@dataclass(frozen=True)
class Settings:
    """The table's rows, and our verifiers for the rules that the server may follow; none if its
    rule is not known.
    """

    rows: list[JsonObject]
    rules: Sequence[str]

    @property
    def differing(self) -> list[str]:
        """What may explain a finding, in words."""
        return [
            f"{row['setting']}: {row['server']} there, {row['assumed']} here"
            for row in self.rows
            if row["state"] == "differs" and row["setting"] not in _TOLD
        ]

    @property
    def untold(self) -> str:
        return ", ".join(row["setting"] for row in self.rows if row["state"] == "not told")


def measure_settings(
    server: RunningServer,
    pair: Pair,
    config: ServedConfig,
    sampling: Sampling,
    load: Load,
) -> Settings:
    """Compare the settings. Raise InputError for an option of another engine."""
    answer = load.answers[0]
    told = answer.told | server.facts
    said = {name: next(filter(None, map(told.get, keys)), None) for name, keys in _CALLED.items()}
    for option in _OPTIONS:
        if given := getattr(config, option):
            said[option] = given
            if server.engine != "vllm":
                raise InputError(f"{option}: is vLLM's; this is {NAMES[server.engine]}")
    kind = kind_of(pair.drafts["draft"])
    serving = SERVING[NAMES[server.engine].lower()].get(kind)
    for name in _LENIENT:
        if told.get(name, 1.0) != 1.0:
            said["rejection_sample_method"] = f"{name} {told[name]}"
    rules = _rules(server.engine, kind, said)
    said["rule"] = ", ".join(str(said[option]) for option in _OPTIONS if said[option]) or None
    drawn = {name: told[name] for name in _SAMPLING if name in answer.told}
    said["sampling"] = _short(drawn) or None
    read = [answer.prompt_ids for answer in load.answers]
    others = sum(list(prompt.ids) != ids for prompt, ids in zip(load.prompts, read, strict=True))
    said["prompts"] = f"{others} of {len(read)} read as other tokens"
    said["draft's target"] = "; ".join(other_targets([config.draft], pair.target)) or config.target
    assumed: JsonObject = {
        "method": _spelled(serving.method if serving else kind),
        "rule": said["rule"] or " or ".join(rules) if rules else "none known",
        "sampling": _short({name: getattr(sampling, _SAMPLING[name]) for name in drawn}),
        "prompts": f"0 of {len(read)} read as other tokens",
        "longest text": max(len(text.ids) for text in load.texts),
        "draft's target": config.target,
        "dtype": dtype_name(pair.target),
        "cache": "auto",
        "cache of the draft": "auto",
        "at once": max([1, *config.concurrency]),
        "draft": config.draft,
        "target": config.target,
        "version": said["version"],
    }
    for name in ("method", "dtype"):
        said[name] = _spelled(said[name])
    return Settings([_row(name, said[name], value) for name, value in assumed.items()], rules)


def _row(name: str, said: object, assumed: object) -> JsonObject:
    state = "same" if said == assumed else "differs"
    if name in _ROOMS and isinstance(said, int) and said >= int(str(assumed)):
        state = "same"
    if said is None:
        state = "not told"
    return {"setting": name, "server": said, "assumed": assumed, "state": state}


def _spelled(said: object) -> str | None:
    """Spell a method or dtype as vLLM does."""
    word = str(said or "").lower().replace("_", "-").replace(" ", "-")
    word = word.removeprefix("none,").removeprefix("torch.")
    return _SPELLED.get(word, word) or None


def _rules(engine: str, kind: str, said: Mapping[str, object]) -> Sequence[str]:
    """Return our verifiers for the server's rule: two if vLLM does not tell whether its drafts are
    greedy, none for a rule that is not known.
    """
    rule = _RULES.get(str(said["rejection_sample_method"] or "standard"))
    how = said["draft_sample_method"]
    if rule is None:
        return ()
    # vLLM 0.32 takes the likeliest tokens of Medusa heads whatever its settings say.
    if engine != "vllm" or kind == "medusa" or how == "greedy":
        return ("naive",)
    return (rule,) if how else ("naive", rule)


def _short(values: JsonObject) -> str:
    return ", ".join(f"{name} {value:.4g}" for name, value in values.items())
