"""Passwords and signatures of addresses (law 9) reach the store that they open, and no file or
message.
"""

import io
import json

import pytest

from draftsmith.core.errors import without_secrets

ADDRESS = "https://me:PASSWORD@store.example/rows.jsonl?sig=SIGNATURE"
# Prompts, and answers to score.
ANSWER = {"prompt_ids": [5, 6], "response_ids": [7, 8]}
ROWS = "".join(
    json.dumps({"prompt": f"The quick {number}"} | ANSWER) + "\n" for number in range(12)
).encode()


def open_store(url, mode):
    """Stand in for fsspec, which needs aiohttp for https; the store knows the password and the
    signature.
    """
    if url != ADDRESS:
        raise PermissionError(f"403, message='Forbidden', url={url!r}")
    return io.BytesIO(ROWS)


ALIGN = (
    "align --target {target} --draft {draft} --prompts {address} --out out --policy id "
    "--train.steps 2 "
    "--train.batch_size 2 --train.accumulation 2 --distill.max_new_tokens 4 "
    "--distill.num_samples 2 "
    "--distill.max_prompts 9 --eval.max_prompts 3 --eval.max_new_tokens 4 "
    "--eval.speed_prompts 0 "
    "--eval.bootstrap 100 --train.max_length 64"
)


@pytest.mark.usefixtures("undrawn")
@pytest.mark.parametrize(
    "command",
    [
        "distill --target {target} --prompts {address} --out out --max_new_tokens 4",
        "decode --target {target} --prompts {address} --out out/rows.jsonl --max_new_tokens 4 "
        "--json",
        "eval --target {target} --draft d={draft} --id s={address} --out out --max_new_tokens 4 "
        "--speed_prompts 0 "
        "--bootstrap 100 --json",
        "distill --target {target} --score {address} --out out",
        "distill --target {target} --prompts {address}x --out out --max_new_tokens 4",
        "distill --target {target} --prompts {address} --out out --engine openai --endpoint "
        "http://me:PASSWORD@127.0.0.1:9",
        pytest.param(ALIGN, marks=pytest.mark.slow),
    ],
)
def test_they_are_in_no_file_and_no_message(
    command, door, target_dir, draft_dir, tmp_path, monkeypatch
):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("fsspec.open", open_store)
    words = command.format(target=target_dir, draft=draft_dir, address=ADDRESS).split()
    code, out, err = door(*words)
    assert code == (2 if f"{ADDRESS}x" in words or "--endpoint" in words else 0), err
    texts = [
        out,
        err,
        *(path.read_text(errors="replace") for path in tmp_path.rglob("*") if path.is_file()),
    ]
    assert not [text for text in texts if "PASSWORD" in text or "SIGNATURE" in text]
    assert any("/rows.jsonl" in text or "http://127.0.0.1" in text for text in texts)
    if words[0] == "align":
        _, err = door.ok(*words)


def test_what_is_no_secret_stays(golden):
    for text in (
        "hf://datasets/owner/name@main/rows.jsonl",
        "name=s3://bucket/rows.jsonl",
        "why? me@home",
        "a/b:train",
    ):
        assert without_secrets(text) == text
    config = {"ood": ["x=https://me:a@b@c/d?e=f"], "seed": 3}
    assert without_secrets(config) == {"ood": ["x=https://c/d"], "seed": 3}
    golden(without_secrets("https://me:a@b/c.jsonl?e=f:2: not valid JSON"))
