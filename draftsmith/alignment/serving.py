"""What to serve, by the decision of an evaluation, and the commands that serve it."""

import shlex
from dataclasses import dataclass
from typing import Literal

from draftsmith.alignment.config import AlignConfig
from draftsmith.core.io import read_tree_file
from draftsmith.decode import parse_tree
from draftsmith.drafts.draft_sources import JOINED
from draftsmith.drafts.engine_commands import SERVING
from draftsmith.eval.decision import decide
from draftsmith.eval.method import decode_options
from draftsmith.eval.results import Results

What = Literal["draft", "lookup", "both", "none", "undecided"]
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
    if decision.verdict in ("busy", "too_few", "not_timed"):
        return Advice("undecided", _SENTENCES["undecided"], {})
    if setting is None or decision.verdict not in ("ship", "ship_for"):
        return Advice("none", _SENTENCES["none"], {})
    model = results.document["models"][setting.draft]
    what: What = "draft"
    if results.copies(setting.draft):
        what = "lookup"
    elif results.joins(setting.draft):
        what = "both"
    options = decode_options(model, setting.tree, results.document["config"].get("compile"))
    assert decision.temperature is not None
    commands = {"draftsmith": [decode_command(config, options, decision.temperature)]}
    kind = model["kind"]
    for engine, kinds in SERVING.items() if what != "draft" else ():
        if kind in kinds:
            tokens = parse_tree(setting.tree, read_tree_file).depth
            exports, command = kinds[kind].commands(
                kind.removeprefix(JOINED), config.target, model["name"], tokens
            )
            commands[engine] = [*exports, command]
    sentence = _SENTENCES[what].format(draft=setting.draft)
    if decision.verdict == "ship_for":
        sentence += f"; measurably faster for {decision.where(decision.paying)}"
    return Advice(what, sentence, commands)


def decode_command(config: AlignConfig, options: list[str], temperature: float) -> str:
    """Return the command that decodes with these options of drafting."""
    words = ["draftsmith", "decode", "--target", config.target, *options]
    words += ["--temperature", f"{temperature:g}"]
    if config.trust_remote_code:
        words.append("--trust_remote_code")
    if config.revision:
        words += ["--revision", config.revision]
    return shlex.join([*words, "--prompt", "TEXT"])
