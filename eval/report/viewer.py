"""The token viewer: continuations of the target, every token coloured by how likely the draft's was to be accepted,
with the draft's candidates there and below.

Of a draft that is a language model, candidates are shown along the text: those of a token, those after it, and so on
for as long as the text's own token is among them. Heads draft further tokens from other states than those they begin
with at the next place, so that of a head the first level is shown.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from eval.decision import decide
from eval.report.formats import number
from eval.results import Results
from eval.schema import ViewedText

# Tokens on the page in all: about 600 bytes each. Levels of candidates below each.
MOST_TOKENS = 480
DEEPEST = 4
LEVELS = 5
RETURN = "\N{DOWNWARDS ARROW WITH CORNER LEFTWARDS}"


@dataclass(frozen=True)
class Token:
    """One token: how it is shown, a level of acceptance from 0 to 4, what is said of it, and the candidates by depth:
    what is said of each, and whether the text goes on with it, else it was refused. Those of a depth hang below the one
    that was taken above them.
    """

    text: str
    level: int
    said: str
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
        if left > 0:
            texts.append(_text(row, left, deepest))
            left -= len(texts[-1].tokens)
    return texts


def _text(row: ViewedText, most: int, deepest: int) -> Text:
    tokens = [
        Token(
            # The page keeps white space, so that lines end where the text's do.
            text=token["text"].replace("\n", f"{RETURN}\n"),
            level=min(LEVELS - 1, int(token["alpha"] * LEVELS)),
            said=f"{_visible(token['text'])}: acceptance {_short(token['alpha'])}, {_chances(token)}",
            tree=_tree(row["tokens"][place : place + deepest]),
        )
        for place, token in enumerate(row["tokens"][:most])
    ]
    return Text(f"{row['domain']}, T = {row['temperature']:g}, {row['draft']}, prompt {row['prompt_id']}", tokens)


def _tree(tokens: Sequence[dict[str, Any]]) -> list[list[tuple[str, bool]]]:
    levels: list[list[tuple[str, bool]]] = []
    for token in tokens:
        level = []
        for guess in token["guesses"]:
            level.append((f"{_visible(guess['text'])} {_chances(guess)}", bool(guess["taken"])))
        levels.append(level)
        if not any(taken for _, taken in level):
            break
    return levels


def _chances(of: dict[str, Any]) -> str:
    return f"p {_short(of['p'])}, q {_short(of['q'])}"


def _short(value: float) -> str:
    return number(value, 2).removeprefix("0")


def _visible(text: str) -> str:
    """A token with its white space seen."""
    return text.replace("\n", RETURN).replace("\t", "\N{RIGHTWARDS ARROW TO BAR}").replace(" ", "\N{OPEN BOX}")
