"""The commands that serve a target with a draft on other engines."""

import json
import shlex
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from types import MappingProxyType

from draftsmith.core.io import JsonObject
from draftsmith.drafts.tables import read_table

DRAFT_TOKENS = 4
_NOTHING: Mapping[str, object] = MappingProxyType({})


@dataclass(frozen=True)
class Support:
    """What an engine does with a pair.

    loads: it loads the pair without an error. serves: it loads, and token ids mean the same to
    both models. known: whether that follows from its sources or a run; what is not known is not
    said to load. exports: commands that write what the engine reads, in order, if it does not read
    these directories. by_export: `draftsmith export` cannot write the pair for it, which says
    nothing of the engine.
    """

    engine: str
    reason: str
    loads: bool = False
    serves: bool = False
    known: bool = True
    command: str | None = None
    exports: tuple[str, ...] = ()
    by_export: bool = False


@dataclass(frozen=True)
class Serving:
    """How one engine serves one kind of draft; `serving.yaml` has the table."""

    shell: str = ""
    python: str = ""
    note: str = ""
    method: str = ""
    draft_format: str | None = None
    target_format: str | None = None
    classes: str = "text"
    asked: str | None = None
    unwritten: str = ""
    refused: str = ""
    norms: str = ""

    def commands(
        self,
        kind: str,
        target: str,
        draft: str,
        tokens: int,
        options: Mapping[str, object] = _NOTHING,
    ) -> tuple[tuple[str, ...], str]:
        """The commands that write what the engine reads, in order, and the one that serves the
        pair.

        tokens: number drafted at a time. options: more of the engine's {config}. Every word is
        quoted for the shell.
        """
        exports = []
        named = {"draft": draft, "target": target}
        formats = {"draft": self.draft_format, "target": self.target_format}
        for role, form in formats.items():
            if form is None:
                continue
            name = named[role]
            directory = Path(name).resolve()
            out = f"{directory.name}.{form}"
            # A target and a draft of one name are two directories all the same.
            named[role] = out = f"{role}-{out}" if out in named.values() else out
            words = ["draftsmith", "export", "--draft", name]
            if form == "openvino":  # which its own tool writes
                words = ["optimum-cli", "export", form, "--model", name, "--task"]
                words += ["text-generation-with-past", "--weight-format", "fp32", out]
            else:
                if role == "draft" and kind != "draft":
                    words += ["--target", target]
                words += ["--format", form, "--out", out]
            exports.append(shlex.join(words))
        config = {"method": self.method, "model": named["draft"], "num_speculative_tokens": tokens}
        if kind == "mtp":  # part of the model that is served
            del config["model"]
        numbers = {"n": tokens, "n_and_root": tokens + 1}
        words_of_config = json.dumps(config | dict(options))
        values = named | numbers | {"method": self.method, "config": words_of_config}
        command = shlex.join([word.format(**values) for word in self.shell.split()])
        if self.python:
            quoted = {key: json.dumps(name) for key, name in named.items()}
            code = self.python.format(**quoted, **numbers)
            command = shlex.join(["python", "-c", code])
        quoted = {key: shlex.quote(name) for key, name in named.items()}
        note = self.note.format(**quoted, **numbers)
        return tuple(exports), f"{command}  # {note}" if note else command


SERVING: dict[str, dict[str, Serving]] = {}
for _engine, _kinds in read_table("serving.yaml").items():
    SERVING[_engine] = {kind: Serving(**values) for kind, values in _kinds.items()}


@dataclass(frozen=True)
class Planned:
    """What a plan says of one engine: number of drafted tokens, and options of its config."""

    draft_tokens: int
    options: Mapping[str, object] = field(default_factory=dict)


def planned(plan: JsonObject) -> dict[str, Planned]:
    """Return what a plan says, by engine."""
    found = {}
    schedule = (plan.get("schedule") or {}).get("vllm")
    for row in plan.get("engines") or ():
        options: dict[str, object] = dict(row.get("options") or {})
        tokens = row["draft_tokens"]
        if row["engine"] == "vllm" and schedule:
            tokens = max(tokens, *(most for _, _, most in schedule))
            options["num_speculative_tokens_per_batch_size"] = schedule
        found[row["engine"]] = Planned(tokens, options)
    return found


def _worth(row: JsonObject) -> str:
    worth = f"{row['tau']:.2f} tokens a step, {row['speedup']:.2f}x expected"
    return (
        f"{row['draft_tokens']} draft tokens, {worth}" if row["draft_tokens"] else "no draft pays"
    )


def setting_lines(settings: Sequence[JsonObject]) -> list[str]:
    """Say what each setting of an engine is worth, if they differ."""
    if len({round(row["tau"], 3) for row in settings}) < 2:
        return []
    return [f"{', '.join(row['options'].values()) or 'default'}: {_worth(row)}" for row in settings]


def schedule_lines(schedule: JsonObject | None) -> list[str]:
    """Say the best length at each batch size, and from which none pays."""
    if schedule is None:
        return []
    lines = ["", "by batch size, from steps timed at each:"]
    lines += [f"  batch {row['batch_size']}: {_worth(row)}" for row in schedule["batch_sizes"]]
    if (first := schedule["none_pays_from"]) is not None:
        lines.append(f"from batch {first} on no draft pays")
    return lines
