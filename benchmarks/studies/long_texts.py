"""What a head loses behind the length it was trained on: acceptance after prompts of 256 to 8,000
tokens, of a head, and of the same head trained on for as many tokens in short or in long rows.

    python -m benchmarks.studies.long_texts --target DIR --draft heads/smollm2-135m-eagle3 \
        --data DIR --out out/long

--data holds wiki.jsonl, whose articles are joined to long documents: the last ones are measured on.
A killed call goes on where it was.
"""

from collections.abc import Iterable
from dataclasses import field
from pathlib import Path

from benchmarks.lib.places import ROOT
from benchmarks.lib.study_command import main
from benchmarks.studies import figures
from draftsmith.core.errors import InputError
from draftsmith.core.io import write_rows
from draftsmith.core.options import options
from draftsmith.core.prompt_rows import iterate_rows
from draftsmith.core.tokenization import load_tokenizer
from draftsmith.eval.config import EvalConfig
from draftsmith.eval.evaluate import evaluate
from draftsmith.train.config import HeadOptions, Optim, TrainConfig
from draftsmith.train.training_run import train

COMMAND = "benchmarks/studies/long_texts.py"
SHORT = 256
# Tokens of the answers that are measured.
MEASURED = 64


@options
class Options:
    """Train a head on in short and in long rows, and compare three heads by length."""

    target: str
    """The target: a local directory or hub name."""
    draft: str
    """The head to begin with."""
    data: str
    """The directory with wiki.jsonl."""
    out: str
    """Everything that is made."""
    lengths: list[int] = field(default_factory=lambda: [256, 512, 1024, 2048, 4096, 8000])
    """Tokens of the prompts."""
    documents: int = 8
    """Documents to measure on, each at every length."""
    long: int = 2048
    """Tokens of a long row; a short one has 256."""
    steps: int = 40
    """Steps, of two long rows or as many tokens in short ones."""


def documents(file: Path, target: str, tokens: int) -> list[list[int]]:
    """Join articles to documents of `tokens` tokens each."""
    tokenizer = load_tokenizer(target)
    made: list[list[int]] = []
    ids: list[int] = []
    for row in iterate_rows(str(file)):
        ids += tokenizer(f"{row['text']}\n\n").input_ids
        if len(ids) >= tokens:
            made.append(ids[:tokens])
            ids = []
    return made


def write_texts(config: Options, place: Path) -> None:
    """Documents to train on as text, prompts of every length as tokens."""
    tokenizer = load_tokenizer(config.target)
    longest = max(config.lengths)
    found = documents(Path(config.data, "wiki.jsonl"), config.target, longest)
    training = found[: -config.documents]
    if not training:
        raise InputError(f"--documents {config.documents}: wiki.jsonl has {len(found)}")
    write_rows(place / "train.jsonl", [{"text": tokenizer.decode(ids)} for ids in training])
    for length in config.lengths:
        prompts: Iterable[dict[str, list[int]]] = (
            {"prompt_ids": ids[:length]} for ids in found[-config.documents :]
        )
        write_rows(place / f"tokens{length}.jsonl", prompts)


def trained(config: Options, name: str, length: int) -> str:
    """OUT/NAME: the head after as many tokens in rows of this length."""
    out = Path(config.out) / name
    tokens = 2 * config.long
    train(
        TrainConfig(
            target=config.target,
            data=[str(Path(config.out) / "train.jsonl")],
            kind="eagle3",
            draft=config.draft,
            out=str(out),
            objective="jsd:beta=0.5",
            head=HeadOptions(test_steps=4),
            max_length=length,
            batch_size=tokens // length,
            steps=config.steps,
            eval_every=config.steps,
            optim=Optim(name="adamw", lr=3e-4, warmup_steps=4),
            precision="bf16",
            dtype="bfloat16",
            device="cpu",
        ),
        COMMAND,
    )
    return str(out)


def run(config: Options) -> None:
    """Train and measure."""
    place = Path(config.out)
    if not (place / "train.jsonl").exists():
        write_texts(config, place)
    drafts = [f"kept={config.draft}"]
    for name, length in (("short", SHORT), ("long", config.long)):
        drafts.append(f"{name}={trained(config, name, length)}")
    first, *longer = [f"{n}={place / f'tokens{n}.jsonl'}" for n in config.lengths]
    evaluate(
        EvalConfig(
            target=config.target,
            draft=drafts,
            id=[first],
            ood=longer,
            out=str(place / "eval"),
            tree=["none"],
            temperature=[1.0],
            max_prompts=config.documents,
            max_new_tokens=MEASURED,
            batch_size=1,
            dtype="bfloat16",
            device="cpu",
        )
    )
    public = {config.out: "out/long", f"{ROOT}/": "", config.data: "data"}
    public[config.target] = "HuggingFaceTB/SmolLM2-135M-Instruct"
    figures.keep(ROOT, "real-long-texts", place / "eval" / "results.json", public)


if __name__ == "__main__":
    main(Options, COMMAND, run)
