"""Rebuild the nano pair that ships with the project: corpus, tokenizer, target, base draft, their
perplexities.

python -m benchmarks.studies.rebuild_pair DIR
"""

import json
import math
import sys
from collections.abc import Iterable
from pathlib import Path

import torch
from safetensors.torch import load_file, save_file
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, processors, trainers
from transformers import PreTrainedTokenizerFast

from draftsmith.cli.commands import run
from draftsmith.core.io import (
    JsonObject,
    atomic_dir,
    hash_json,
    read_json,
    write_json_atomic,
    write_rows,
)
from draftsmith.core.models import fingerprint, load_model
from draftsmith.core.progress import track
from draftsmith.core.tokenization import load_tokenizer
from draftsmith.demo import corpus
from draftsmith.demo.demo_run import RECIPES
from draftsmith.train.batch import IGNORE
from draftsmith.train.batches import collate
from draftsmith.train.data import load_examples
from draftsmith.train.losses import cross_entropy

BLOCK = 256
MEMBERS = ("target", "base")
VOCABULARY = 4096
BOS = "<s>"
EOS = "</s>"


def rebuild(recipes: Path, out: Path, device: str) -> Path:
    """Make everything in `out` from nothing (about an hour on two cores); return the directory of
    the pair.

    Finished steps are skipped, and training resumes where it was killed.
    """
    texts = out / "corpus"
    tokenizer = out / "tokenizer"
    if not texts.is_dir():
        with atomic_dir(texts) as directory:
            write_corpus(directory)
    if not tokenizer.is_dir():
        rows = []
        for domain in corpus.DOMAINS:
            text = Path(texts, f"{domain}.train.jsonl").read_text(encoding="utf-8")
            rows += [json.loads(line)["text"] for line in text.splitlines()]
        with atomic_dir(tokenizer) as directory:
            train_tokenizer(rows, len(rows), model_max_length=512).save_pretrained(directory)
    for member in MEMBERS:
        words = ["--config", f"{recipes}/{member}.yaml", "--tokenizer", str(tokenizer)]
        words += ["--draft_config", f"{recipes}/{member}.config.json"]
        words += ["--out", f"{out}/{member}-run", "--device", device]
        for option, side in (("--data", "train"), ("--heldout", "heldout")):
            files = [f"{texts}/{domain}.{side}.jsonl" for domain in corpus.DOMAINS]
            words += [option, *files]
        run("train", words)
    for member in MEMBERS:
        ship(out / f"{member}-run", texts, recipes / f"{member}.yaml", out / "pair" / member)
    return out / "pair"


def write_corpus(directory: Path) -> None:
    """Write `DOMAIN.train.jsonl` and `DOMAIN.heldout.jsonl` for every domain of the corpus."""
    for domain in corpus.DOMAINS:
        train, heldout = corpus.split(domain)
        write_rows(directory / f"{domain}.train.jsonl", corpus.passages(domain, train))
        write_rows(directory / f"{domain}.heldout.jsonl", corpus.passages(domain, heldout))


def train_tokenizer(
    texts: Iterable[str], length: int, model_max_length: int
) -> PreTrainedTokenizerFast:
    """A byte-level BPE tokenizer (it can spell any text) of 4,096 tokens that puts BOS in front."""
    tokenizer = Tokenizer(models.BPE())
    # Digits one by one; indentation of code stays together as runs of spaces.
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Digits(individual_digits=True),
            pre_tokenizers.ByteLevel(add_prefix_space=False),
        ]
    )
    tokenizer.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    options: JsonObject = {
        "special_tokens": [BOS, EOS],
        "initial_alphabet": alphabet,
        "show_progress": False,
    }
    tokenizer.train_from_iterator(
        texts, trainers.BpeTrainer(vocab_size=VOCABULARY, **options), length=length
    )
    bos = (BOS, tokenizer.token_to_id(BOS))
    tokenizer.post_processor = processors.TemplateProcessing(
        single=f"{BOS} $A", special_tokens=[bos]
    )
    options = {"bos_token": BOS, "eos_token": EOS, "model_max_length": model_max_length}
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, clean_up_tokenization_spaces=False, **options
    )


def ship(run_directory: Path, texts: Path, recipe: Path, destination: Path) -> None:
    """Write a trained member as it is committed: fp16 weights, and a record with its held-out
    perplexity per domain.
    """
    with atomic_dir(destination) as directory:
        for name in ("generation_config.json", "tokenizer_config.json"):
            (directory / name).write_bytes((run_directory / name).read_bytes())
        # Without indentation the file is half the size.
        tokenizer = read_json(run_directory / "tokenizer.json", "a tokenizer")
        compact = json.dumps(tokenizer, ensure_ascii=False, separators=(",", ":"))
        (directory / "tokenizer.json").write_text(compact, encoding="utf-8")
        config = read_json(run_directory / "config.json", "a model config")
        write_json_atomic(directory / "config.json", config | {"dtype": "float16"})
        trained = load_file(run_directory / "model.safetensors")
        weights = {name: value.half() for name, value in trained.items()}
        save_file(weights, directory / "model.safetensors", metadata={"format": "pt"})
        record = read_json(run_directory / "draftsmith.json", "the record of a training run")
        shipped: JsonObject = {
            key: record[key] for key in ("kind", "objective", "data", "steps", "best_step")
        }
        shipped |= {
            "recipe": recipe.name,
            "recipe_hash": hash_json(recipe.read_text(encoding="utf-8")),
            "versions": record["versions"],
            "fingerprint": fingerprint(load_model(str(directory), device="cpu")),
            "heldout_perplexity": {
                domain: perplexity(directory, texts, domain) for domain in corpus.DOMAINS
            },
            "perplexity_definition": "exp of the mean of -log p per token, fp16 weights run in "
            "fp32, "
            f"held-out passages packed into blocks of {BLOCK} tokens",
        }
        write_json_atomic(directory / "draftsmith.json", shipped)


@torch.inference_mode()
def perplexity(checkpoint: Path, texts: Path, domain: str) -> float:
    """Perplexity on the held-out side of a domain."""
    model = load_model(str(checkpoint), dtype="float32")
    tokenizer = load_tokenizer(str(checkpoint))
    examples = load_examples([f"{texts}/{domain}.heldout.jsonl"], tokenizer, BLOCK)
    rows = len(examples.rows)
    total = 0.0
    count = 0
    starts = range(0, rows, 8)
    for start in track(starts, f"perplexity on {domain}", len(starts)):
        some = range(start, min(start + 8, rows))
        batch = collate(examples, some).to(model.device)
        valid = batch.labels_BT != IGNORE
        logits_BTV = model(input_ids=batch.ids_BT, use_cache=False).logits
        losses_N = cross_entropy(logits_BTV[valid], None, batch.labels_BT[valid]).double()
        total += float(losses_N.sum())
        count += int(valid.sum())
    return round(math.exp(total / count), 3)


if __name__ == "__main__":
    if len(sys.argv) != 2:
        sys.exit(
            "benchmarks/studies/rebuild_pair.py: name the directory to write: python -m "
            "benchmarks.studies.rebuild_pair DIR"
        )
    rebuild(RECIPES, Path(sys.argv[1]), "auto")
