"""Serve two pairs: answers whole or streamed. A client that leaves ends its stream's decoding.

pip install fastapi uvicorn
PAIRS="code=TARGET,DRAFT chat=TARGET,DRAFT" uvicorn --app-dir examples service:app
curl localhost:8000/code/stream -H "content-type: application/json" -d '{"prompt": "Return the"}'
"""

import os
from collections.abc import AsyncIterator, Iterator
from contextlib import closing
from typing import Any

from fastapi import Body, FastAPI, Request
from fastapi.concurrency import iterate_in_threadpool
from fastapi.responses import JSONResponse, StreamingResponse

import draftsmith as ds

sources = dict(words.split("=") for words in os.environ["PAIRS"].split())
pairs = {name: ds.load_pair(*source.split(",")) for name, source in sources.items()}
app = FastAPI()


@app.exception_handler(ds.InputError)
def refuse(request: Request, error: ds.InputError) -> JSONResponse:
    """Answer a wrong request with its reason."""
    return JSONResponse({"error": str(error)}, status_code=400)


@app.post("/{name}/generate")
def generate(name: str, prompt: str = Body(), max_new_tokens: int = Body(64)) -> dict[str, Any]:
    """Return a whole answer. FastAPI runs this in a thread."""
    output = _pair(name).generate(prompt, max_new_tokens=max_new_tokens)
    return {"text": output.text, "finish_reason": output.finish_reason, "tau": output.stats.tau}


@app.post("/{name}/stream")
def stream(name: str, prompt: str = Body(), max_new_tokens: int = Body(64)) -> StreamingResponse:
    """Send an answer piece by piece."""
    pieces = _pair(name).stream(prompt, max_new_tokens=max_new_tokens)
    return StreamingResponse(_until_the_client_leaves(pieces), media_type="text/plain")


async def _until_the_client_leaves(pieces: Iterator[str]) -> AsyncIterator[str]:
    with closing(pieces):
        async for piece in iterate_in_threadpool(pieces):
            yield piece


def _pair(name: str) -> ds.Pair:
    if name not in pairs:
        raise ds.InputError(f"{name}: no such pair; there are {', '.join(pairs)}")
    return pairs[name]
