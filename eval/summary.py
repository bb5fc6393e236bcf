"""What an evaluation says in words: the verdict, what decides it, what to do next, and what
alignment changed. The terminal, the report and `--json` have it from here.
"""

import shlex
from dataclasses import dataclass
from typing import Any

from draftsmith.decode.method import OWN_TREE
from draftsmith.drafts.draft_sources import JOINED
from draftsmith.drafts.engine_commands import SERVING, decode_command
from draftsmith.eval.decision import Decision, decide
from draftsmith.eval.formats import (
    KIND_TITLES,
    named_set,
    number,
    text_table,
    times,
    tree_name,
    with_interval,
    with_seeds,
)
from draftsmith.eval.report import said
from draftsmith.eval.report.tables import MOST_ROWS, first_rows, of_figures
from draftsmith.eval.results_table import ResultsTable
from draftsmith.eval.schema import TARGET, ModelRow

# Texts are listed where one of them repeats itself, and where prompts are hardly text: to
# SmolLM2-135M, tokens of random words have about 7 nats, those of chats and articles 2 to 5.
_REMARKABLE = {"looping": 0.0, "prompt_nats": 6.0}


@dataclass(frozen=True)
class Lead:
    """The head of a report. serve: with which engine and setting, and the command; empty where none
    pays. command: what `todo` says, ready to paste. changes: a title, and a line for each kind of
    sets. remarks: reasons to trust the figures less.
    """

    decision: Decision
    headline: str
    decided: str
    serve: tuple[str, str]
    todo: str
    command: str
    robust: str
    changes: list[str]
    lossless: str
    temperature: float
    remarks: list[str]


def lead(results: ResultsTable) -> Lead:
    """Put the verdict on an evaluation in words."""
    decision = decide(results)
    pays_at = decision.temperature
    temperature = results.top_temperature if pays_at is None else pays_at
    todo, command = _next(results, decision)
    return Lead(
        decision=decision,
        headline=_headline(results, decision),
        decided=_decided(results, decision),
        serve=_serve(results, decision),
        todo=said("todo", todo),
        command=command,
        robust=_robust(decision),
        changes=_changes(results, decision, temperature),
        lossless=_lossless(results),
        temperature=temperature,
        remarks=[remark["text"] for remark in results.document["remarks"]],
    )


def lines(results: ResultsTable) -> list[str]:
    """Return what `eval` prints: the verdict, the table of figures, and what alignment changed."""
    head = lead(results)
    return [*verdict(head), *table(results, head), *head.changes]


def verdict(head: Lead) -> list[str]:
    """Return the verdict, what decides it, and what to do next."""
    found = [head.headline, head.decided]
    for what, command in (head.serve, (head.todo, head.command)):
        found.append(f"{what}: {command}" if command else "")
    return list(filter(None, [*found, head.robust]))


def table(results: ResultsTable, head: Lead) -> list[str]:
    """Return the table of figures."""
    rows = first_rows(results, head.decision, head.temperature)
    found = text_table(f"temperature {head.temperature:g}, 95 % intervals", rows[:MOST_ROWS])
    more = len(rows) - MOST_ROWS
    if more > 0:
        found.append(f" and {more} more rows in the report")
    of_texts = results.select(*_REMARKABLE)
    if any((row["value"] or 0.0) > _REMARKABLE[row["figure"]] for row in of_texts):
        texts = of_figures(results, "texts")
        found += text_table(texts.title, texts.rows)
    return found


def summary(results: ResultsTable) -> dict[str, Any]:
    """Files, the verdict, and the main figures with their intervals."""
    head = lead(results)
    decision = head.decision
    return {
        "results": str(results.directory / "results.json"),
        "report": str(results.directory / "report.html"),
        "base": results.base,
        "decision": {
            "verdict": decision.verdict,
            "setting": decision.setting._asdict() if decision.setting else None,
            "temperature": decision.temperature,
            "row": decision.row,
            "headline": head.headline,
            "serve": head.serve[1],
            "todo": head.todo,
            "command": head.command,
        },
        "remarks": head.remarks,
        "peak_memory_bytes": results.document["clock"]["peak_memory_bytes"],
        "rows": results.select("alpha", "gain", "transfer", "tau", "tau_predicted", "speedup"),
    }


def _headline(results: ResultsTable, decision: Decision) -> str:
    values = {"draft": "", "speed": "", "where": decision.where}
    if decision.setting is not None:
        speeds = [row["value"] for row in decision.paying] or [0.0]
        rough = any(results.busy(row["set"], row["temperature"]) for row in decision.paying)
        low, high = times(min(speeds), rough), times(max(speeds), rough)
        values["draft"] = decision.setting.draft
        values["speed"] = low if low == high else f"{low} to {high}"
    elsewhere = "" if results.domains("ood") else said("elsewhere")
    key = "saves_nothing" if decision.needed else decision.verdict
    return said("headlines", key, elsewhere=elsewhere, **values)


def _decided(results: ResultsTable, decision: Decision) -> str:
    row = decision.row
    if row is None:
        return said("decided", "lossy" if results.methods else "nothing")
    key = "speed" if row["figure"] == "speedup" else "untimed"
    return said(
        "decided",
        "tokens" if decision.needed else key,
        setting=f"{row['draft']} with {tree_name(row['tree'])} and {row['rule']}",
        where=f"{named_set(row)}, T = {row['temperature']:g}",
        speed=with_interval(row, 2),
        tau=with_interval(row, 2),
        how=said("predicted") if row["figure"] == "tau_predicted" else "",
        needed=number(decision.needed, 2),
        prompts=row["n"],
        count=decision.comparisons,
    )


def _serve(results: ResultsTable, decision: Decision) -> tuple[str, str]:
    """The setting that an engine has, and the commands that serve it."""
    setting = decision.served
    if setting is None:
        return "", ""
    model = results.models[setting.draft]
    engine = str(model["engine"])
    serving = SERVING[engine][model["kind"]]
    tokens = int(setting.tree.removeprefix("chain:"))
    target = results.models[TARGET]["name"]
    exports, command = serving.commands(model["kind"], target, model["name"], tokens)
    what = said("serve", engine=engine, draft=setting.draft, tree=setting.tree)
    return what, " && ".join([*exports, command])


def _next(results: ResultsTable, decision: Decision) -> tuple[str, str]:
    """What to do next, by its key, and the command that does it."""
    document = results.document
    target = document["models"]["target"]["name"]
    command = document["provenance"]["command"]
    config = document["config"]
    if decision.setting and decision.temperature is not None:
        setting = decision.setting
        model = document["models"][setting.draft]
        options = decode_options(model, setting.tree, config.get("compile"))
        options += ["--verifier", setting.rule, "--temperature", f"{decision.temperature:g}"]
        return decision.verdict, decode_command(target, command, options)
    if decision.verdict == "reject":
        return "reject", decode_command(target, command, [])
    if not results.methods:
        return "undecoded", _again(_again(command, "--tree", "chain:2"), "--speed_prompts", "8")
    if decision.row is None:
        return "lossy", _again(command, "--verifier", "exact")
    if decision.setting is None and config.get("speed_prompts"):
        return "looping", _again(command, "--temperature", "1")
    if decision.setting is None:
        return "untimed", _again(command, "--speed_prompts", "8")
    if decision.busy:
        out = config.get("out", "DIR")
        return "busy", shlex.join(["draftsmith", "eval", "--time_again", out])
    timed = config["speed_prompts"]
    more = _again(command, "--speed_prompts", f"{4 * timed}")
    if any(suite["done"] > timed for suite in document["suites"]):
        return "unsure", more
    return "few", _again(more, "--max_prompts", f"{4 * timed}")


def decode_options(model: ModelRow, tree: str, recorded: object) -> list[str]:
    """Return the options of `decode` that draft this tree as a draft of an evaluation or a plan
    does. recorded: whether its steps were.
    """
    source = model["name"]
    if not model["parameters"]:
        source = f"retrieval:{source}" if model["kind"] == "retrieval" else model["kind"]
    elif model["kind"].startswith(JOINED):
        source = JOINED + source
    options = ["--draft", source]
    if tree != OWN_TREE:
        options += ["--tree", tree]
    return [*options, "--compile"] if recorded else options


def _again(command: str, option: str, value: str) -> str:
    """A command with another value of an option."""
    words = shlex.split(command)
    if option in words:
        words[words.index(option) + 1] = value
    else:
        words += [option, value]
    return shlex.join(words)


def _robust(decision: Decision) -> str:
    row = decision.robust
    return said("robust", draft=row["draft"], alpha=with_interval(row)) if row else ""


def _changes(results: ResultsTable, decision: Decision, temperature: float) -> list[str]:
    """What alignment changed in the decided draft, or in the one that gained most."""
    decided = decision.setting.draft if decision.setting else ""
    draft = decided if decided in results.aligned else results.best_aligned
    found = [f"{draft} at temperature {temperature:g}:"]
    for kind in results.kinds:
        alpha = results.alpha(draft, kind, temperature)
        parts = [f"alpha {with_seeds(alpha)}"]
        if gain := results.gain(draft, kind, temperature):
            gained = with_seeds(gain, sign=True)
            parts.append(said("gained", gain=gained, base=results.base))
        gains = [results.gain(draft, domain, temperature) for domain in results.domains(kind)]
        rows = [row for row in gains if row]
        if kind == "ood" and len(rows) > 1:
            worst = min(rows, key=lambda row: row["value"] or 0.0)
            lost = with_interval(worst, sign=True)
            parts.append(said("worst", set=worst["set"], gain=lost))
        found.append(f"  {KIND_TITLES[kind]}: {'; '.join(parts)}")
    return found


def _lossless(results: ResultsTable) -> str:
    """Whether outputs are the target's own."""
    rules = sorted({rule for _, rule in results.methods})
    lossy = [rule for rule in rules if not results.lossless(rule)]
    parts = [said("lossy", names=", ".join(lossy))] if lossy else []
    counts = results.counts
    own = counts[counts["rule"].isin(set(rules) - set(lossy))]
    by_key = own.groupby("key", observed=True)
    sums = by_key["value"].sum()
    if "outputs" in sums:
        same, total = int(sums["identical"]), int(sums["outputs"])
        parts.append(said("identical", same=same, total=total))
    elif len(lossy) < len(rules):
        parts.append(said("not_compared"))
    return " ".join(parts)
