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
from draftsmith.serving.asking import ServedPrompt
from draftsmith.serving.running_server import NAMES, RunningServer

# How engines call a setting: the end of its name in what the server tells.
_CALLED = {
    "method": ("speculative_config.method", "speculative_algorithm", "speculative.types"),
    "draft_sample_method": ("speculative_config.draft_sample_method",),
    "rejection_sample_method": ("speculative_config.rejection_sample_method",),
    "longest text": ("model.max_model_len", "default_generation_settings.n_ctx", "context_length"),
    "dtype": ("vllm_config.model_config.dtype", "dtype", "model_ftype"),
    "cache": ("cache_config.cache_dtype", "kv_cache_dtype"),
    "cache of the draft": ("speculative_config.kv_cache_dtype",),
    "at once": ("scheduler_config.max_num_seqs", "total_slots", "max_running_requests"),
    "draft": ("speculative_config.model", "speculative_draft_model_path"),
    "target": ("model.root", "model_path"),
    "version": ("version", "build_info"),
}
# Of these an engine needs so many at least.
_ROOMS = ("longest text", "at once")
# What differs here can be why less is accepted, or why texts are others.
_EXPLAIN = ("method", "rule", "sampling", "prompts", "longest text", "draft's target", "cache")
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
    """The table's rows, and our verifier for the server's rule; None if it is not known."""

    rows: list[JsonObject]
    rule: str | None

    @property
    def differing(self) -> list[str]:
        """What may explain a finding, in words."""
        return [
            f"{row['setting']}: {row['server']} there, {row['assumed']} here"
            for row in self.rows
            if row["state"] == "differs" and row["setting"] in _EXPLAIN
        ]


def measure_settings(
    server: RunningServer,
    pair: Pair,
    config: ServedConfig,
    sampling: Sampling,
    asked: Sequence[ServedPrompt],
) -> Settings:
    """Compare the settings. Raise InputError for an option of another engine."""
    answer = asked[0].answer
    told = answer.told | server.facts
    said = {name: _said(told, ends) for name, ends in _CALLED.items()}
    for option in _OPTIONS:
        if given := getattr(config, option):
            said[option] = given
            if server.engine != "vllm":
                raise InputError(f"{option}: is vLLM's; this is {NAMES[server.engine]}")
    kind = kind_of(pair.drafts["draft"])
    serving = SERVING[NAMES[server.engine].lower()].get(kind)
    lenient = [f"{name} {told[name]}" for name in _LENIENT if told.get(name, 1.0) != 1.0]
    words = [str(said[option]) for option in _OPTIONS if said[option]] + lenient
    rule = None if lenient else _rule(server.engine, kind, said)
    said["rule"] = ", ".join(words) or None
    names = [name for name in _SAMPLING if name in answer.told]
    names = names[: -3 if sampling.greedy else None]
    said["sampling"] = _short({name: told[name] for name in names}) or None
    others = sum(list(each.prompt.ids) != each.answer.prompt_ids for each in asked)
    said["prompts"] = f"{others} of {len(asked)} read as other tokens"
    said["draft's target"] = "; ".join(other_targets([config.draft], pair.target)) or None
    assumed: JsonObject = {
        "method": _spelled(serving.method if serving else kind),
        "rule": said["rule"] or rule if rule else "no rule that is known here",
        "sampling": _short({name: getattr(sampling, _SAMPLING[name]) for name in names}),
        "prompts": f"0 of {len(asked)} read as other tokens",
        "longest text": max(len(each.text.ids) for each in asked),
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
    return Settings([_row(name, said[name], value) for name, value in assumed.items()], rule)


def _row(name: str, said: object, assumed: object) -> JsonObject:
    state = "same" if said == assumed else "differs"
    if name in _ROOMS and int(str(said or 0)) >= int(str(assumed)):
        state = "same"
    if said is None:
        state = "not told"
    return {"setting": name, "server": said, "assumed": assumed, "state": state}


def _said(told: Mapping[str, object], ends: Sequence[str]) -> object:
    for end in ends:
        for key, value in told.items():
            if f".{key}".endswith(f".{end}"):
                return value
    return None


def _spelled(said: object) -> str | None:
    """Spell a method or dtype as vLLM does."""
    if said is None:
        return None
    word = str(said).lower().replace("_", "-").replace(" ", "-")
    word = word.removeprefix("none,").removeprefix("torch.")
    return _SPELLED.get(word, word)


def _rule(engine: str, kind: str, said: Mapping[str, object]) -> str | None:
    """Return our verifier for the server's rule; if it is not told, the one of the engine with
    which it can accept most; None for a rule that is not known.
    """
    rule = _RULES.get(str(said["rejection_sample_method"] or "standard"))
    # vLLM 0.32 takes the likeliest tokens of Medusa heads whatever its settings say.
    greedy = engine != "vllm" or kind == "medusa" or said["draft_sample_method"] == "greedy"
    return "naive" if greedy and rule else rule


def _short(values: JsonObject) -> str:
    return ", ".join(f"{name} {value:.4g}" for name, value in values.items())
