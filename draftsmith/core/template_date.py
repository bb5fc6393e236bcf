"""The date that a chat template prints: one for all prompts of a set, whatever the day is.

Llama 3.2 and 3.3, SmolLM 3 and gpt-oss ask for today's date by `strftime_now`. A date that a
template sets itself, as that of Llama 3.1 does, stays as a server leaves it, unless one is given.
"""

from datetime import date, datetime
from typing import Any

from draftsmith.core.errors import InputError
from draftsmith.core.ranks import from_main
from draftsmith.core.tokenization import Tokenizer

_CLOCK = "strftime_now"
_NAME = "date_string"
_CODES = ("-d", "-e", "-m", *"aAbBcdeFHIjmMpSuUVwWxXyYZ")


def fix_date(tokenizer: Tokenizer, given: str | None, kept: str | None = None) -> str | None:
    """Let the chat template print one date from now on: `given`, else `kept`, else today's.

    Return it as YYYY-MM-DD; None if the template prints none. Raise InputError for one that is
    given in vain. Every process calls this.
    """
    source = str(tokenizer.chat_template or "")
    if given is not None and _CLOCK not in source and _NAME not in source:
        raise InputError("date: is not read: the chat template prints none; leave it out")
    chosen = given or kept
    if _CLOCK in source:
        chosen = chosen or from_main(lambda: date.today().isoformat())
    elif _NAME not in source:
        return None
    tokenizer.template_date = chosen
    return chosen


def date_of(tokenizer: Tokenizer) -> str | None:
    """Return the date that `fix_date` chose; None if it chose none."""
    return getattr(tokenizer, "template_date", None)


def dated_template(tokenizer: Tokenizer, tools: Any) -> str | None:
    """Return the chat template with the date that `fix_date` chose; None if it chose none."""
    chosen = date_of(tokenizer)
    if chosen is None:
        return None
    source = str(tokenizer.get_chat_template(tools=tools))
    day = datetime.fromisoformat(chosen)
    if _CLOCK not in source:
        shown = day.strftime("%d %b %Y")
        return f"{{% set {_NAME} = {_NAME} | default({shown!r}) %}}\n{source}"
    # A template cannot call Python's function: transformers passes plain values only.
    codes = [f"%{code}" for code in _CODES]
    replaced = "".join(f" | replace({code!r}, {day.strftime(code)!r})" for code in codes)
    return f"{{% macro {_CLOCK}(format) %}}{{{{ format{replaced} }}}}{{% endmacro %}}\n{source}"
