"""The token viewer: texts of the target, every token coloured by the acceptance of the drafted token at its place.

For a draft that is a language model, the candidates of the tokens after it hang below, as long as the text's own token
is among them. A head drafts further tokens from other states than it starts with at the next place, so it shows one
level.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from eval.decision import decide
from eval.report.formats import number
from eval.results import Results

# Tokens on the page in all (about 600 bytes each), levels of candidates below each, and colours.
MOST_TOKENS, DEEPEST, LEVELS = 480, 4, 5
RETURN = "\N{DOWNWARDS ARROW WITH CORNER LEFTWARDS}"


@dataclass(frozen=True)
class Token:
    """One token: its text, acceptance from 0 to 4, tooltip, and candidates by depth (tooltip, taken by the text)."""

    text: str
    level: int
    tooltip: str
    tree: list[list[tuple[str, bool]]]


@dataclass(frozen=True)
class Text:
    """One continuation with its heading."""

    title: str
    tokens: list[Token]


def viewed_texts(results: Results) -> list[Text]:
    """Texts of one draft (the decided one, else the first aligned) on every set, the highest temperature first."""
    setting = decide(results).setting
    draft = setting.draft if setting is not None else [*results.aligned, results.base][0]
    deepest = DEEPEST if results.document["models"][draft]["kind"] == "draft" else 1
    rows = [row for row in results.document["texts"] if row["draft"] == draft]
    texts: list[Text] = []
    left = MOST_TOKENS
    for row in sorted(rows, key=lambda row: -row["temperature"]):
        tokens = [_token(row["tokens"][place : place + deepest]) for place in range(min(left, len(row["tokens"])))]
        left -= len(tokens)
        if tokens:
            title = f"{row['domain']}, T = {row['temperature']:g}, {draft}, prompt {row['prompt_id']}"
            texts.append(Text(title, tokens))
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
