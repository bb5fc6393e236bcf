"""The commands that serve a target with a draft, by draftsmith and on other engines."""

import json
import shlex
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from draftsmith.drafts.draft_sources import NATIVE
from draftsmith.drafts.tables import read_table

DRAFT_TOKENS = 4
# What `decode` takes of an evaluation or a plan: without it, other models are run, or otherwise.
_TAKEN = """
    device dtype revision trust_remote_code chat_template target_device_map quantize
    top_k top_p min_p repetition_penalty presence_penalty frequency_penalty
    quantize_draft heterogeneous_vocab
""".split()


def decode_command(
    target: str, measured_by: str, options: Sequence[str], prompt: str = "TEXT"
) -> str:
    """The `draftsmith decode` that runs what was measured. measured_by: the command that did it, as
    `core.options.command_line` writes it.
    """
    words = ["draftsmith", "decode", "--target", target, *options]
    given = shlex.split(measured_by)
    # Alone, a target takes no options of drafts.
    for key in _TAKEN if options else _TAKEN[:-2]:
        option = f"--{key}"
        if option in given:
            words += [option, given[given.index(option) + 1]]
    return shlex.join([*words, "--prompt", prompt])


@dataclass(frozen=True)
class Support:
    """What an engine does with a pair.

    loads: it loads the pair without an error. serves: it loads, and token ids mean the same to
    both models. known: whether that follows from its sources or a run; what is not known is not
    said to load. exports: commands that write what the engine reads, in order, if it does not read
    these directories. by_export: `draftsmith export` cannot write the pair for it, which says
    nothing of the engine. gpu_only: it does not run the pair on a CPU.
    """

    engine: str
    reason: str
    loads: bool = False
    serves: bool = False
    known: bool = True
    command: str | None = None
    exports: tuple[str, ...] = ()
    by_export: bool = False
    gpu_only: bool = False


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
    ) -> tuple[tuple[str, ...], str]:
        """The commands that write what the engine reads, in order, and the one that serves the
        pair.

        tokens: number drafted at a time. Every word is quoted for the shell.
        """
        exports = []
        named = {"draft": draft, "target": target}
        formats = {"draft": self.draft_format, "target": self.target_format}
        if draft == NATIVE:
            # The engine reads the layer in the target's own checkpoint.
            formats["draft"] = None
            named["draft"] = target
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
        values = named | numbers | {"method": self.method, "config": json.dumps(config)}
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
