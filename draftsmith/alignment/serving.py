"""What to serve, by the decision of an evaluation, and the commands that serve it."""

import json
import shlex
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Literal

from decode import parse_tree
from decode.propose.lookup_first import LEAST_MATCH
from draftsmith.alignment.config import AlignConfig
from draftsmith_core.engine_commands import SERVING
from draftsmith_core.io import read_tree_file
from eval.decision import Setting, decide
from eval.method import decode_options
from eval.results import Results
from eval.schema import JOINED

What = Literal["draft", "lookup", "both", "none", "undecided"]
# Longest match that prompt lookup looks for; engines have an option for it.
_LONGEST_MATCH = 3
_SENTENCES: dict[What, str] = {
    "draft": "the draft {draft}",
    "lookup": "prompt lookup, no draft",
    "both": "both: prompt lookup, and the draft where it finds nothing (vLLM and transformers do "
    "not join them)",
    "none": "none of them: nothing was measurably faster than the target alone",
    "undecided": "not decided; until then, the target alone",
}


@dataclass(frozen=True)
class Advice:
    """What to serve. commands: shell lines in order, by engine."""

    what: What
    sentence: str
    commands: dict[str, list[str]]

    def lines(self) -> list[str]:
        """Return the advice as lines for a person."""
        found = [f"serve: {self.sentence}"]
        for engine, commands in self.commands.items():
            found += [f"  {engine}: {command}" for command in commands]
        return found


def advise(config: AlignConfig, results: Results) -> Advice:
    """Return what the decision says to serve: a draft, lookup, both, or none."""
    decision = decide(results)
    setting = decision.setting
    if setting is None or decision.verdict in ("busy", "too_few", "not_timed"):
        return Advice("undecided", _SENTENCES["undecided"], {})
    if decision.verdict not in ("ship", "ship_for"):
        return Advice("none", _SENTENCES["none"], {})
    model = results.document["models"][setting.draft]
    what: What = "draft"
    if results.copies(setting.draft):
        what = "lookup"
    elif results.joins(setting.draft):
        what = "both"
    options = decode_options(model, setting.tree)
    commands = {"draftsmith": [decode_command(config, options, results.top_temperature)]}
    kind = model["kind"].removeprefix(JOINED)
    if what == "lookup":
        commands |= _lookup_elsewhere(config.target, setting)
    elif what == "both" and kind in SERVING["llama.cpp"]:
        commands["llama.cpp"] = _joined_in_llama(config.target, model["name"], kind, setting)
    return Advice(what, _SENTENCES[what].format(draft=setting.draft), commands)


def decode_command(config: AlignConfig, options: list[str], temperature: float) -> str:
    """Return the command that decodes with these options of drafting."""
    words = ["draftsmith", "decode", "--target", config.target, *options]
    words += ["--temperature", f"{temperature:g}"]
    if config.trust_remote_code:
        words.append("--trust_remote_code")
    if config.revision:
        words += ["--revision", config.revision]
    return shlex.join([*words, "--prompt", "TEXT"])


def _tokens(setting: Setting) -> int:
    return parse_tree(setting.tree, read_tree_file).depth


def _lookup_elsewhere(target: str, setting: Setting) -> dict[str, list[str]]:
    """Return the commands of prompt lookup in other engines."""
    tokens = _tokens(setting)
    ngram = {"method": "ngram", "num_speculative_tokens": tokens}
    ngram["prompt_lookup_max"] = _LONGEST_MATCH
    vllm = ["vllm", "serve", target, "--speculative-config", json.dumps(ngram)]
    gguf = f"{Path(target).resolve().name}.gguf"
    export = ["draftsmith", "export", "--draft", target, "--format", "gguf", "--out", gguf]
    llama = ["llama-server", "-m", f"{gguf}/model.gguf", "--spec-type", "ngram-simple"]
    return {
        "vLLM": [shlex.join(vllm)],
        "transformers": [f"model.generate(..., prompt_lookup_num_tokens={tokens})"],
        "llama.cpp": [
            shlex.join(export),
            shlex.join([*llama, *_ngram_options(_LONGEST_MATCH, tokens)]),
        ],
    }


def _joined_in_llama(target: str, draft: str, kind: str, setting: Setting) -> list[str]:
    """Return the commands of llama.cpp, which takes several kinds of drafts in order."""
    tokens = _tokens(setting)
    alone = SERVING["llama.cpp"][kind]
    joined = replace(alone, method=f"ngram-simple,{alone.method}")
    exports, command = joined.commands(kind, target, draft, tokens)
    options = shlex.join(_ngram_options(LEAST_MATCH, tokens))
    return [*exports, f"{command} {options}"]


def _ngram_options(match: int, tokens: int) -> list[str]:
    """Return llama.cpp's options: tokens that must match, and tokens to copy."""
    options = ["--spec-ngram-simple-size-n", str(match)]
    return [*options, "--spec-ngram-simple-size-m", str(tokens)]
