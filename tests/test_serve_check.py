"""benchmarks/serve_check.py against a server that speaks as vLLM and SGLang do, since those need a GPU."""

import json
import sys
from pathlib import Path
from typing import Any

import pytest

import draftsmith as ds
from benchmarks import serve_check

PAIR = Path(__file__).parents[1] / "draftsmith" / "demo" / "pair"
PROMPTS = ["Return the value of the", "If the file is not found,"]
# Answers with the outputs of a file; it accepts what the same file says.
SERVER = """
import json, sys
from http.server import BaseHTTPRequestHandler, HTTPServer
words, known = sys.argv, json.load(open(KNOWN))
assert str(known["length"]) in " ".join(words)
class Handler(BaseHTTPRequestHandler):
    def do_GET(self):
        lines = ["# HELP x", 'vllm:spec_decode_num_drafts_total{engine="0"} %d.0' % known["drafts"]]
        self.answer(("\\n".join(lines) + "\\n").encode())
    def do_POST(self):
        body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        prompt = body.get("prompt") or body["input_ids"]
        out = known["outputs"][json.dumps(prompt)]
        one = {"choices": [{"token_ids": out}]}
        two = {"output_ids": out, "meta_info": {"spec_verify_ct": known["drafts"] / len(known["outputs"])}}
        self.answer(json.dumps(one if "prompt" in body else two).encode())
    def answer(self, value):
        self.send_response(200)
        self.end_headers()
        self.wfile.write(value)
    def log_message(self, *args):
        pass
HTTPServer(("127.0.0.1", int(words[words.index("--port") + 1])), Handler).serve_forever()
"""


@pytest.mark.parametrize("engine", ["vllm", "sglang"])
def test_a_server_is_started_asked_and_compared(engine: str, tmp_path: Path) -> None:
    pair = ds.load_pair(str(PAIR / "target"), draft=str(PAIR / "base"))
    options: dict[str, Any] = {"tree": "chain:3", "temperature": 0, "ignore_eos": True, "max_new_tokens": 20}
    outs = {json.dumps(pair.encode(text)): pair.generate(text, **options) for text in PROMPTS}
    calls = sum(out.stats.target_calls for out in outs.values())
    known = {"outputs": {key: out.output_ids for key, out in outs.items()}, "drafts": calls - 2, "length": 3}
    server, prompts = tmp_path / "server", tmp_path / "prompts.jsonl"
    prompts.write_text("".join(json.dumps({"prompt": text}) + "\n" for text in PROMPTS))
    server.write_text(f"#!{sys.executable}\nKNOWN = {str(tmp_path / 'known.json')!r}\n{SERVER}")
    server.chmod(0o755)
    words = ["--engine", engine, "--target", str(PAIR / "target"), "--draft", str(PAIR / "base")]
    words += ["--prompts", str(prompts), "--draft_tokens", "3", "--max_new_tokens", "20", "--program", str(server)]
    (tmp_path / "known.json").write_text(json.dumps(known))
    found = serve_check.check(serve_check._options(words))
    assert found["agrees"] and found["equal_outputs"] == "2 of 2" and found["theirs"]["calls"] == calls
    assert "3" in found["command"]
    (tmp_path / "known.json").write_text(json.dumps(known | {"drafts": 38}))
    found = serve_check.check(serve_check._options(words))
    assert not found["agrees"] and found["theirs"]["tokens_per_call"] == 1


def test_a_server_that_does_not_come_up_says_why(tmp_path: Path) -> None:
    server, prompts = tmp_path / "server", tmp_path / "prompts.jsonl"
    prompts.write_text('{"prompt": "Return the"}\n')
    server.write_text("#!/bin/sh\necho 'no GPU here' >&2\nexit 1\n")
    server.chmod(0o755)
    words = ["--engine", "vllm", "--target", str(PAIR / "target"), "--draft", str(PAIR / "base")]
    words += ["--max_new_tokens", "2"]
    options = serve_check._options([*words, "--prompts", str(prompts), "--program", str(server)])
    with pytest.raises(ds.RunError, match="did not serve: no GPU here"):
        serve_check.check(options)
