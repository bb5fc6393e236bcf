"""What a server sends: bounded in bytes and time, and shown without the key that it may repeat."""

import asyncio
import base64
import html
import os
import re
import time
import zlib
from typing import Any
from urllib.parse import urlsplit

import httpx

from draftsmith.core.errors import without_secrets

# Of a reply, beside the tokens that it was asked for.
REPLY_BYTES = 2**24
# Letters of a server's text: shown, and searched for the key, whose replacement is not longer.
_SHOWN = 300
_SEARCHED = 2**14
# A shorter word is no secret, and would be found in every text.
_SHORTEST = 4
# What may stand between the letters of a key: line breaks of texts, and of JSON in texts.
_BETWEEN = r"(?:\s|\0|\\{1,4}[nrt]){0,8}"


class ReplyTooLong(ValueError):
    """A reply of more bytes, as it came or decompressed, or seconds than an answer can take."""


def key_of(variable: str) -> str:
    """Return the key in an environment variable; "" without one."""
    # Of other characters httpx would complain, and show the key.
    return "".join(letter for letter in os.environ.get(variable, "") if "!" <= letter <= "~")


def client_options(url: str, key: str) -> dict[str, Any]:
    """Options of an httpx client of a server: the key, and whether to use proxies."""
    headers = {"Accept-Encoding": "gzip"}
    return {
        "headers": headers | {"Authorization": f"Bearer {key}"} if key else headers,
        # A server on this machine is asked directly, not through a proxy of the environment.
        "trust_env": urlsplit(url).hostname not in ("localhost", "127.0.0.1", "::1"),
    }


class _Body:
    """The bytes of a reply as they come."""

    def __init__(self, reply: httpx.Response, most: int) -> None:
        self._reply = reply
        self._most = most
        self._bytes = bytearray()
        compressed = reply.headers.get("content-encoding", "").lower() in ("gzip", "deflate")
        self._gzip = zlib.decompressobj(wbits=47) if compressed else None

    def add(self, chunk: bytes) -> None:
        if self._gzip is not None:
            try:
                chunk = self._gzip.decompress(chunk, self._most + 1 - len(self._bytes))
            except zlib.error as error:
                raise httpx.DecodingError(str(error)) from None
        self._bytes += chunk
        if len(self._bytes) > self._most:
            raise ReplyTooLong(f"the reply has more than {self._most} bytes")

    def response(self) -> httpx.Response:
        headers = httpx.Headers(self._reply.headers)
        for name in ("content-encoding", "content-length", "transfer-encoding"):
            headers.pop(name, None)
        return httpx.Response(
            self._reply.status_code,
            headers=headers,
            content=bytes(self._bytes),
            request=self._reply.request,
        )


async def fetch(
    client: httpx.AsyncClient, method: str, url: str, *, most: int, seconds: float, **what: Any
) -> httpx.Response:
    """Return a whole reply. Raise ReplyTooLong or TimeoutError if there is no end to it."""
    # httpx bounds the wait for the next bytes only, and a server can send some without end.
    async with asyncio.timeout(seconds), client.stream(method, url, **what) as reply:
        body = _Body(reply, most)
        async for chunk in reply.aiter_raw():
            body.add(chunk)
    return body.response()


def fetch_now(
    client: httpx.Client, method: str, url: str, *, most: int, seconds: float, **what: Any
) -> httpx.Response:
    """`fetch` without asyncio."""
    end = time.monotonic() + seconds
    with client.stream(method, url, **what) as reply:
        body = _Body(reply, most)
        for chunk in reply.iter_raw():
            body.add(chunk)
            if time.monotonic() > end:
                raise ReplyTooLong(f"the reply takes more than {seconds:.0f} s")
    return body.response()


def said(text: str, key: str) -> str:
    """Return what a server said, to print or keep: one line, cut, and without the key or queries.

    The key is found however it is spelled: with other cases, in URLs, JSON, HTML, hex and base64.
    """
    # The key is replaced before the text is cut to what is shown, so that no half of it stays.
    text = " ".join(text[:_SEARCHED].split())
    if len(key) >= _SHORTEST:
        text = re.sub(_spellings(key), "(key)", text, flags=re.IGNORECASE | re.VERBOSE)
    return str(without_secrets(text[: 2 * _SHOWN]))[:_SHOWN]


def _spellings(key: str) -> str:
    """A pattern of all ways to write a key. Of a long one each half counts, so that a cut one
    does.
    """
    half = len(key) // 2
    forms = [key[:half], key[half:]] if half >= 8 else [key]
    forms += [key.encode().hex()]
    for skipped in range(3):
        coded = base64.b64encode(bytes(skipped) + key.encode()).decode()
        # Without the letters that neighbours of the key decide too.
        forms.append(coded[-(-skipped * 8 // 6) : (skipped + len(key)) * 8 // 6])
    return "|".join(_BETWEEN.join(map(_letter, form)) for form in forms if form)


def _letter(letter: str) -> str:
    code = f"{ord(letter):02x}"
    # base64 of URLs has two letters of its own.
    plain = {"+": "[+-]", "/": "[/_]"}.get(letter, re.escape(letter))
    return rf"""(?:
        \\{{0,4}}{plain}
        | {re.escape(html.escape(letter))}
        | %(?:25){{0,3}}{code}
        | \\{{1,4}}(?:u00|x){code}
        | &\#(?:0{{0,4}}{ord(letter)}|x0{{0,4}}{code});
    )"""
