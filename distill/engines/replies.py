"""What a server sends, shown without the key that it may repeat."""

import os
import re
from typing import Any
from urllib.parse import urlsplit

from draftsmith.core.errors import without_secrets

# Letters of a server's text: shown, and searched for the key, whose replacement is not longer.
_SHOWN = 300
_SEARCHED = 2**14
# A shorter word is no secret, and would be found in every text.
_SHORTEST = 4


def key_of(variable: str) -> str:
    """Return the key in an environment variable; "" without one."""
    # Of other characters httpx would complain, and show the key.
    return "".join(letter for letter in os.environ.get(variable, "") if "!" <= letter <= "~")


def client_options(url: str, key: str) -> dict[str, Any]:
    """Options of an httpx client of a server: the key, and whether to use proxies."""
    return {
        "headers": {"Authorization": f"Bearer {key}"} if key else {},
        # A server on this machine is asked directly, not through a proxy of the environment.
        "trust_env": urlsplit(url).hostname not in ("localhost", "127.0.0.1", "::1"),
    }


def said(text: str, key: str) -> str:
    """Return what a server said, to print or keep: one line, cut, and without the key or
    queries.
    """
    text = " ".join(text[:_SEARCHED].split())
    if len(key) >= _SHORTEST:
        # Before the text is cut to what is shown, so that no half of it stays.
        text = re.sub(re.escape(key), "(key)", text, flags=re.IGNORECASE)
    return str(without_secrets(text[: 2 * _SHOWN]))[:_SHOWN]
