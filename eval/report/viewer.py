"""The token viewer: texts of the target, every token coloured by the acceptance of the drafted token at its place.

For a draft that is a language model, the candidates of the tokens after it hang below, as long as the text's own token
is among them. A head drafts further tokens from other states than it starts with at the next place, so it shows one
level.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from eval.report.formats import number
from eval.results import Results
from eval.schema import ViewedText

# Tokens on the page for each draft and in all (about 600 bytes each), levels of candidates below each, and colours.
MOST_OF_DRAFT, MOST_TOKENS, DEEPEST, LEVELS = 480, 1920, 4, 5
RETURN = "\N{DOWNWARDS ARROW WITH CORNER LEFTWARDS}"


@dataclass(frozen=True)
class Token:
    """One token: its text, acceptance from 0 to 4, tooltip, and candidates by depth (tooltip, taken by the text)."""

    text: str
    level: int
    tooltip: str
    tree: list[list[tuple[str, bool]]]


def viewed_texts(results: Results, first: str) -> list[tuple[str, list[Token]]]:
    """(title, tokens) of a text of every set, the highest temperature first, under each draft in turn."""
    drafts, domains = sorted(results.drafts, key=lambda draft: draft != first), results.domains()

    def order(row: ViewedText) -> tuple[float, int, int]:
        return -row["temperature"], domains.index(row["domain"]), drafts.index(row["draft"])

    texts: list[tuple[str, list[Token]]] = []
    left = dict.fromkeys(drafts, min(MOST_OF_DRAFT, MOST_TOKENS // len(drafts)))
    for row in sorted(results.document["texts"], key=order):
        deepest = DEEPEST if results.document["models"][row["draft"]]["kind"] == "draft" else 1
        shown = min(left[row["draft"]], len(row["tokens"]))
        left[row["draft"]] -= shown
        if shown:
            title = f"{row['draft']} on {row['domain']}, T = {row['temperature']:g}, prompt {row['prompt_id']}"
            texts.append((title, [_token(row["tokens"][place : place + deepest]) for place in range(shown)]))
    return texts


def _token(tokens: Sequence[dict[str, Any]]) -> Token:
    """The first of some tokens, with the candidates below it."""
    first, levels = tokens[0], []
    for token in tokens:
        levels.append([(f"{_visible(guess['text'])} {_chances(guess)}", guess["taken"]) for guess in token["guesses"]])
        if not any(guess["taken"] for guess in token["guesses"]):
            break
    return Token(
        # The page keeps white space, so that lines end where the text's do.
        text=first["text"].replace("\n", f"{RETURN}\n"),
        level=min(LEVELS - 1, int(first["alpha"] * LEVELS)),
        tooltip=f"{_visible(first['text'])}: acceptance {_short(first['alpha'])}, {_chances(first)}",
        tree=levels,
    )


def _chances(token: dict[str, Any]) -> str:
    return f"p {_short(token['p'])}, q {_short(token['q'])}"


def _short(value: float) -> str:
    return number(value, 2).removeprefix("0")


def _visible(text: str) -> str:
    return text.replace("\n", RETURN).replace("\t", "\N{RIGHTWARDS ARROW TO BAR}").replace(" ", "\N{OPEN BOX}")
