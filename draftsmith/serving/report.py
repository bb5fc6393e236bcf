"""What `draftsmith doctor --served` prints."""

from draftsmith.core.errors import RequirementError
from draftsmith.core.io import JsonObject
from draftsmith.eval.formats import with_interval
from draftsmith.eval.schema import Estimate

# Suspects that are printed; --json has all.
_SHOWN = 6


def in_words(found: JsonObject) -> tuple[list[str], RequirementError | None]:
    """Return the lines, and the error of exit code 3 if less is accepted than predicted."""
    served = found["served"]
    predicted = found["predicted"]
    lines = [
        f"{found['engine']} at {found['url']} drafts {found['draft_tokens']} tokens; "
        f"{found['prompts']} prompts, temperature {found['temperature']:g}; "
        f"predicted by rule {found['rule']}",
        f"{'':<18}{'served':<24}predicted",
        _row("tokens per call", served["tokens_per_call"], predicted["tokens_per_call"]),
    ]
    for depth in range(found["draft_tokens"]):
        counted = served["by_depth"] and served["by_depth"][depth]
        lines.append(_row(f"position {depth + 1}", counted, predicted["by_depth"][depth]))
    names = found["definitions"]
    lines.append(
        f"by other definitions: mean of requests {names['mean_of_requests']:.3f}; accept_length of "
        f"SGLang and SpecForge {names['accept_length']:.3f}; draft acceptance rate of llama.cpp "
        f"{names['draft_acceptance_rate']:.3f}"
    )
    lines += _by_length(found["by_length"])
    lines += [f"remark: {remark}" for remark in found["remarks"]]
    lines += _other_texts(found["other_texts"], found["prompts"])
    lines += _tried(found["tried"][:_SHOWN])
    if found["other_target"]:
        lines.append(f"suspect: {found['other_target']}")
    verdict = _verdict(found)
    if found["verdict"] == "as predicted":
        return [*lines, verdict], None
    return lines, RequirementError([verdict])


def _row(name: str, served: Estimate | None, predicted: Estimate) -> str:
    return f"{name:<18}{with_interval(served):<24}{with_interval(predicted)}"


def _by_length(rows: list[JsonObject]) -> list[str]:
    """Return the table, if it has several rows."""
    if len(rows) < 2:
        return []
    lines = [f"{'prompt tokens':<18}{'served':<24}{'predicted':<24}prompts"]
    for row in rows:
        figures = _row(f"up to {row['up_to']}", row["served"], row["predicted"])
        lines.append(f"{figures:<66}{row['prompts']}")
    return lines


def _other_texts(others: list[JsonObject], prompts: int) -> list[str]:
    """Say where greedy answers begin to differ from the target's own, which no draft may do."""
    if not others:
        return []
    first = min(others, key=lambda other: other["prompt_tokens"] + other["token"])
    return [
        f"greedy answers: {len(others)} of {prompts} are not the target's own, first at token "
        f"{first['token']} of row {first['row']} ({first['prompt_tokens']} tokens of prompt); no "
        "draft may change them: ask the server without its draft; if they stay, it is rounding"
    ]


def _tried(tried: list[JsonObject]) -> list[str]:
    if not tried:
        return []
    names = [f"{row['suspect']}: {row['detail']}" for row in tried]
    width = 4 + max(map(len, names))
    lines = [f"{'tried':<{width}}tokens per call  texts  misfit"]
    for name, row in zip(names, tried, strict=True):
        mark = "*" if row["fits"] else " "
        marked = f"{mark} {name}"
        figures = f"{row['tokens_per_call']:>15.3f}{row['likelihood']:>7.0%}{row['misfit']:>8.3f}"
        lines.append(f"{marked:<{width}}{figures}")
    return lines


def _verdict(found: JsonObject) -> str:
    verdict: str = found["verdict"]
    if not found["own_texts"]:
        share = f"{found['likelihood']['value']:.0%}"
        verdict += (
            f", but not this target's texts (their tokens have {share} of the probability expected "
            "of its own)"
        )
    if found["cause"]:
        return f"{verdict}; likely cause: {found['cause']}; {found['remedy']}"
    if found["tried"]:
        closest = found["tried"][0]["suspect"]
        return f"{verdict}; no suspect fits, the closest is '{closest}'"
    return verdict
