"""Adapt a served draft to what its server logged, and switch to the new draft only if it is better.

    python examples/adapt.py --log requests.jsonl --target T --served drafts/current \
        --out drafts/rounds \
        --keep code=code.jsonl

`--served` is a symlink to the draft's directory; the server loads the draft through it. A row of
the log has `messages` or `prompt` (or both under `request`) and the target's `response`: a text, or
the body that an OpenAI-compatible server returned. The latest fifth measures the draft, the rest
trains it. The same call continues a round that was killed.
"""

import argparse
import hashlib
import json
import sys
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
from transformers import AutoTokenizer, PreTrainedTokenizerBase

import draftsmith as ds

Row = tuple[dict, list[int], list[int]]  # a row for a prompt file, prompt ids, response ids


def read_log(path: Path, tokenizer: PreTrainedTokenizerBase) -> list[Row]:
    """Every row with a prompt and an answer, oldest first."""
    rows, skipped = [], 0
    for line in path.read_text(encoding="utf-8").splitlines():
        try:
            row = json.loads(line)
            request, response, reason = row.get("request", row), row["response"], "stop"
            if isinstance(response, dict):
                choice = response["choices"][0]
                reason = choice.get("finish_reason")
                response = choice["text"] if "text" in choice else choice["message"]["content"]
            answer = tokenizer.encode(response, add_special_tokens=False)
            if reason == "stop" and tokenizer.eos_token_id is not None:
                answer.append(tokenizer.eos_token_id)
            if "messages" in request:
                prompt = {"messages": request["messages"]}
                ids = tokenizer.apply_chat_template(
                    request["messages"],
                    add_generation_prompt=True,
                    tokenize=True,
                    return_dict=False,
                )
            else:
                prompt = {"prompt": request["prompt"]}
                ids = tokenizer.encode(request["prompt"])
        except (ValueError, KeyError, IndexError, TypeError, AttributeError):
            skipped += 1
            continue
        rows.append((prompt, ids, answer))
    print(f"{path}: {len(rows)} rows read, {skipped} without prompt and answer", file=sys.stderr)
    return rows


def write_set(directory: Path, rows: list[Row]) -> None:
    """A distilled set of the logged answers, as `draftsmith train` reads it; the manifest comes
    last.
    """
    directory.mkdir(exist_ok=True)
    ids = pa.list_(pa.int32())
    schema = pa.schema([("prompt_ids", ids), ("response_ids", ids)])
    columns = {
        "prompt_ids": [ids for _, ids, _ in rows],
        "response_ids": [answer for _, _, answer in rows],
    }
    part = directory / "part-00000.parquet"
    pq.write_table(pa.table(columns, schema=schema), part)
    digest = hashlib.sha256(part.read_bytes()).hexdigest()
    manifest = {
        "complete": True,
        "parts": [{"file": part.name, "rows": len(rows), "sha256": digest}],
    }
    (directory / "manifest.json").write_text(json.dumps(manifest), encoding="utf-8")


def main(argv: list[str] | None = None) -> bool:
    """Make one round. Return whether the served draft was switched."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    for name in ("log", "target", "served", "out"):
        parser.add_argument(f"--{name}", required=True)
    parser.add_argument(
        "--keep", nargs="*", default=[], help="NAME=PROMPTS: sets on which nothing may be lost"
    )
    parser.add_argument("--require", nargs="+", default=["gain[recent] > 0", "gain >= -0.02"])
    parser.add_argument("--steps", type=int, default=400, help="half of each is replayed text")
    parser.add_argument("--lr", type=float, default=1e-4)
    parser.add_argument(
        "--max_new_tokens", type=int, default=64, help="of the texts that are replayed and measured"
    )
    options = parser.parse_args(argv)
    log, served = Path(options.log), Path(options.served)
    out = Path(options.out).resolve() / hashlib.sha256(log.read_bytes()).hexdigest()[:12]
    old, new = out / "old", out / "new"
    if (
        not old.is_symlink()
    ):  # a round that is continued still starts from the draft that it began with
        out.mkdir(parents=True, exist_ok=True)
        old.symlink_to(served.resolve())
    rows = read_log(log, AutoTokenizer.from_pretrained(options.target))
    cut = len(rows) * 4 // 5
    trained = {tuple(ids) for _, ids, _ in rows[:cut]}
    write_set(out / "logged", rows[:cut])
    recent = [
        json.dumps(prompt) + "\n" for prompt, ids, _ in rows[cut:] if tuple(ids) not in trained
    ]
    (out / "recent.jsonl").write_text("".join(recent), encoding="utf-8")

    # What the target writes by itself, replayed so that the draft keeps what it knew
    # (docs/robust.md).
    common, general = {"target": options.target}, str(out / "general")
    texts = {
        "prompts": f"token:{cut}",
        "temperature": 1.0,
        "max_new_tokens": options.max_new_tokens,
    }
    ds.distill(ds.DistillConfig(**common, **texts, out=general))
    training = {
        "objective": "jsd:beta=0.5",
        "steps": options.steps,
        "optim": ds.Optim(lr=options.lr),
    }
    training |= {"max_length": min(2048, max(len(ids) + len(answer) for _, ids, answer in rows))}
    data = {
        "data": [str(out / "logged")],
        "heldout_fraction": 0.1,
        "replay": [general],
        "replay_fraction": 0.5,
    }
    ds.train(ds.TrainConfig(**common, **training, **data, draft=str(old), out=str(new)))

    drafts = {
        "draft": [f"old={old}", f"new={new}"],
        "id": [f"recent={out / 'recent.jsonl'}"],
        "ood": options.keep,
    }
    measure = {"temperature": [1.0], "max_new_tokens": options.max_new_tokens, "speed_prompts": 0}
    try:
        ds.evaluate(
            ds.EvalConfig(
                **common, **drafts, **measure, require=options.require, out=str(out / "eval")
            )
        )
    except ds.RequirementError as error:
        print(*error.unmet, f"{served}: stays as it was", sep="\n")
        return False
    link = served.with_name(f".{served.name}.next")
    link.unlink(missing_ok=True)
    link.symlink_to(new)
    link.replace(served)  # one rename: whoever opens it finds the old draft or the new one
    print(f"{served}: now {new}; back with `ln -sfn {old.resolve()} {served}`")
    return True


if __name__ == "__main__":
    main()
