"""Names of transformers' `from_pretrained` and `generate`: what each does here, in one table."""

import functools
import inspect
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass
from inspect import Parameter
from typing import Any, ParamSpec, TypeVar

from draftsmith.core.errors import nearest
from draftsmith.core.option_names import nearest_option

P = ParamSpec("P")
R = TypeVar("R")
Options = dict[str, Any]


def _as_it_is(value: object, given: Options) -> object:
    return value


def _device(value: object, given: Options) -> object:
    if isinstance(value, Mapping):
        raise TypeError("device_map: a model is on one device here; write device='cuda:0'")
    return f"cuda:{value}" if isinstance(value, int) else str(value)


def _dtype(value: object, given: Options) -> object:
    return str(value).removeprefix("torch.")


def _ids(value: object, given: Options) -> object:
    """Return token ids as lists, without those that the attention mask hides."""
    ids = _as_list(value)
    mask = given.get("attention_mask")
    if mask is None or not ids:
        return ids
    if not isinstance(ids[0], list):
        return _seen(ids, _as_list(mask))
    return [_seen(row, of_row) for row, of_row in zip(ids, _as_list(mask), strict=True)]


def _as_list(ids: Any) -> list[Any]:
    return list(ids.tolist() if hasattr(ids, "tolist") else ids)


def _seen(ids: list[int], mask: list[int]) -> list[int]:
    return [token for token, seen in zip(ids, mask, strict=True) if seen]


@dataclass(frozen=True)
class Taken:
    """A name whose value is read. ours: our option; None if the value means nothing here."""

    ours: str | None
    value: Callable[[object, Options], object] = _as_it_is


_LEAVE_OUT = "leave it out, it changes nothing here"
_NOT_HERE = "leave it out: a draft and its target sample from the same plain distribution"
# What takes a value, or what to write instead.
NAMES: dict[str, Taken | str] = {
    # load_pair
    "device_map": Taken("device", _device),
    "torch_dtype": Taken("dtype", _dtype),
    "dtype": Taken("dtype", _dtype),
    "model": "name the target in load_pair(target)",
    "assistant_model": "name the draft in load_pair(target, draft=...)",
    "attn_implementation": _LEAVE_OUT,
    "cache_dir": "set the environment variable HF_HOME",
    "load_in_4bit": "use quantize='nf4'",
    "load_in_8bit": "use quantize='nf4'",
    "local_files_only": "set the environment variable HF_HUB_OFFLINE=1",
    "low_cpu_mem_usage": _LEAVE_OUT,
    "quantization_config": "use quantize='nf4'",
    "token": "set the environment variable HF_TOKEN",
    # generate
    "messages": Taken("prompts"),
    "input_ids": Taken("prompts", _ids),
    "inputs": Taken("prompts", _ids),
    "attention_mask": Taken(None),
    "num_return_sequences": Taken("num_samples"),
    "pad_token_id": Taken(None),
    "stop_strings": Taken("stop"),
    "use_cache": Taken(None),
    "eos_token_id": "use stop=TEXT, or ignore_eos=True",
    "logits_processor": _NOT_HERE,
    "max_length": "use max_new_tokens, which does not count the prompt",
    "no_repeat_ngram_size": _NOT_HERE,
    "num_assistant_tokens": "use tree='chain:N'",
    "num_beams": _NOT_HERE,
    "prompt_lookup_num_tokens": "use proposer='prompt_lookup' and tree='chain:N'",
    "output_scores": "leave it out; Output has the tokens and counts of drafts",
    "repetition_penalty": _NOT_HERE,
    "return_dict_in_generate": "leave it out; generate returns an Output",
    "stopping_criteria": "use stop=TEXT",
    "streamer": "use on_tokens, or Pair.stream",
    "token_type_ids": _LEAVE_OUT,
}
# Keys of a generation config that describe the model; they are read from the target.
_OF_THE_MODEL = (
    "bos_token_id",
    "eos_token_id",
    "pad_token_id",
    "transformers_version",
    "_from_model_config",
)
_SAMPLING = ("temperature", "top_k", "top_p", "min_p")
_BY_PLACE = (Parameter.POSITIONAL_ONLY, Parameter.POSITIONAL_OR_KEYWORD)


def in_our_names(where: str, given: Options, known: Collection[str]) -> Options:
    """Return options in our names.

    Raise TypeError, beginning with `where`, for an option that is not `known` and not taken.
    """
    ours: Options = {}
    for name, value in given.items():
        rule = NAMES.get(name, Taken(name))
        if isinstance(rule, str):
            raise TypeError(f"{where}: no option {name!r}; {rule}")
        if rule.ours is None:
            continue
        if rule.ours not in known:
            near = nearest_option(name, list(known))
            fix = f"did you mean {near}?" if near else nearest(name, known)
            raise TypeError(f"{where}: no option {name!r}; {fix}")
        if rule.ours in ours:
            raise TypeError(f"{where}: {rule.ours} is given twice, under two names; keep one")
        ours[rule.ours] = rule.value(value, given)
    return ours


def _of_config(config: Any) -> Options:
    """Return what a generation config sets, by transformers' names."""
    values: Options = dict(config if isinstance(config, Mapping) else config.to_diff_dict())
    values.setdefault("do_sample", False)
    # transformers reads those only if it samples.
    left_out = _OF_THE_MODEL if values["do_sample"] else (*_OF_THE_MODEL, *_SAMPLING)
    # None and False ask for nothing; a model's own config has many of them.
    silent = [name for name, value in values.items() if value is None or value is False]
    left_out = (*left_out, *(name for name in silent if name != "do_sample"))
    return {name: value for name, value in values.items() if name not in left_out}


def takes_their_names(*inner: Callable[..., object]) -> Callable[[Callable[P, R]], Callable[P, R]]:
    """Decorate a function so that it takes options by transformers' names too.

    inner: functions that the decorated one passes the rest of its options to. What they take by
    place it gives them itself.
    """

    def decorate(function: Callable[P, R]) -> Callable[P, R]:
        name = function.__name__
        parameters = inspect.signature(function).parameters.values()
        known = [each.name for each in parameters if each.kind is not Parameter.VAR_KEYWORD]
        by_place = [each.name for each in parameters if each.kind in _BY_PLACE]
        for each in inner:
            parameters = inspect.signature(each).parameters.values()
            known += [option.name for option in parameters if option.kind is Parameter.KEYWORD_ONLY]
        known = [option for option in known if option != "self"]

        @functools.wraps(function)
        def call(*args: P.args, **options: P.kwargs) -> R:
            given: Options = dict(options)
            config = given.pop("generation_config", None)
            ours = in_our_names(name, given, known)
            for placed in by_place[: len(args)]:
                if placed in ours:
                    raise TypeError(f"{name}: {placed} is given twice, once by place; keep one")
            if config is not None:
                ours = in_our_names(f"{name}: generation_config", _of_config(config), known) | ours
            return function(*args, **ours)

        return call

    return decorate
