"""The token viewer: continuations of the target, every token coloured by how likely the draft's was to be accepted."""

from dataclasses import dataclass

from eval.decision import decide
from eval.report.formats import number
from eval.results import Results
from eval.schema import ViewedText

# Tokens on the page in all: about 400 bytes each.
MOST_TOKENS = 600
LEVELS = 5
RETURN = "\N{DOWNWARDS ARROW WITH CORNER LEFTWARDS}"


@dataclass(frozen=True)
class Token:
    """One token: how it is shown, a level of acceptance from 0 to 4, and what is said of it."""

    text: str
    level: int
    said: str


@dataclass(frozen=True)
class Text:
    """One continuation with its heading."""

    title: str
    tokens: list[Token]


def viewed_texts(results: Results) -> list[Text]:
    """Texts of one draft (the decided one, else the first aligned) on every set, the highest temperature first."""
    diagnosis = results.document["diagnosis"]
    if diagnosis is None:
        return []
    setting = decide(results).setting
    draft = setting.draft if setting is not None else [*results.aligned, results.base][0]
    rows = [row for row in diagnosis["viewed"] if row["draft"] == draft]
    texts: list[Text] = []
    left = MOST_TOKENS
    for row in sorted(rows, key=lambda row: -row["temperature"]):
        if left > 0:
            texts.append(_text(row, left))
            left -= len(texts[-1].tokens)
    return texts


def _text(row: ViewedText, most: int) -> Text:
    tokens = [
        Token(
            # The page keeps white space, so that lines end where the text's do.
            text=token["text"].replace("\n", f"{RETURN}\n"),
            level=min(LEVELS - 1, int(token["alpha"] * LEVELS)),
            said=f"{_visible(token['text'])}: acceptance {number(token['alpha'], 2)}, p {number(token['p'])}, "
            f"q {number(token['q'])}. {row['draft']} would draft "
            + ", ".join(f"{_visible(g['text'])} (q {number(g['q'])}, p {number(g['p'])})" for g in token["guesses"]),
        )
        for token in row["tokens"][:most]
    ]
    return Text(f"{row['domain']}, T = {row['temperature']:g}, {row['draft']}, prompt {row['prompt_id']}", tokens)


def _visible(text: str) -> str:
    """A token with its white space seen."""
    return text.replace("\n", RETURN).replace("\t", "\N{RIGHTWARDS ARROW TO BAR}")
