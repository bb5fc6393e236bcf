r"""Decoding side by side: this engine, transformers' generate and assisted generation, and the raw
forward beneath.

    python benchmarks/speed/decode.py [--out FILE.json] [--sections forwards methods ...] \
        [--device cuda --dtype bfloat16]

Prints one JSON object. Without arguments it needs nothing but the clone: the target is
draftsmith/demo/pair/target and the draft configs/bench/draft, both widened
(`draftsmith.demo.widen`) to the cost of a 99 M and a 7 M model; the prompts are held-out passages
of the demo's corpus.
README.md in this directory says what the sections hold and how to read them.
"""

# ruff: noqa: E402
import sys
from pathlib import Path

if __name__ == "__main__":
    # Python puts this directory first.
    sys.path[0] = str(Path(__file__).parents[2])

import copy
import json
import os
import time
from collections.abc import Callable
from dataclasses import asdict, field, replace
from itertools import chain

import torch
from transformers import LlamaForCausalLM, PreTrainedModel

from benchmarks.lib.places import DRAFT, TARGET
from benchmarks.speed import peers, sections
from benchmarks.speed.methods import Pair, endless
from benchmarks.speed.sections import Bench
from draftsmith.core.command_line import parse
from draftsmith.core.devices import resolve_device
from draftsmith.core.errors import InputError
from draftsmith.core.io import JsonObject, write_text_atomic
from draftsmith.core.models import dtype_name, load_model, vocabulary_size
from draftsmith.core.options import options
from draftsmith.core.records import git_commit, versions
from draftsmith.core.tokenization import Tokenizer, encode_text, load_tokenizer
from draftsmith.decode import take_over
from draftsmith.decode.native import kernel
from draftsmith.demo import corpus
from draftsmith.demo.widen import widen
from draftsmith.drafts.draft_vocabulary import read_draft_vocabulary, trim
from draftsmith.drafts.heads import load_head
from draftsmith.eval.facts import machine

# Positions beyond the trained 512 cost what they cost anywhere; what the models say there does not
# matter.
POSITIONS = 8192
TARGET_SHAPE = {"hidden_size": 768, "intermediate_size": 2432, "num_hidden_layers": 12}
DRAFT_SHAPE = {"hidden_size": 384, "intermediate_size": 768, "num_hidden_layers": 4}
PASSAGE_CHARACTERS = 400
# What is measured by default.
BY_DEFAULT = ["forwards", "methods"]
METHODS = (
    "hf ar hf-assisted hf-constant:4 chain:2 chain:4 chain:6 chain:8,stop=0.4 kary:4,2,2 "
    "kary:2,2,1 eagle2:depth=4,beam=4,nodes=16 prompt_lookup@chain:6"
).split()


@options
class Options:
    """Time methods of decoding with a target and a draft."""

    target: str | None = None
    """A local directory or hub name, used as it is; with `draft`. Default: the demo's target,
    widened.
    """
    draft: str | None = None
    head: str | None = None
    """An EAGLE-3 head of `target`, for the methods head@TREE and for peers."""
    sections: list[str] = field(default_factory=BY_DEFAULT.copy)
    """Any of forwards, methods, peers."""
    methods: list[str] = field(default_factory=METHODS.copy)
    """Ways to set side by side (benchmarks/speed/methods.py); `hf` and `ar` are always timed."""
    temperature: list[float] = field(default_factory=lambda: [0.0, 1.0])
    rounds: int = 5
    """Every round has other prompts and, above temperature 0, another seed."""
    prompts: int = 3
    """Prompts of one round, taken from the domains in turn."""
    prompt_tokens: int = 64
    max_new_tokens: int = 64
    threads: int = 2
    """CPU threads of torch."""
    peers: bool = False
    """Also the section `peers`: other engines on the same models and prompts
    (benchmarks/speed/peers.py).
    """
    device: str = "auto"
    dtype: str = "auto"
    out: str | None = None
    """Also write the JSON to this file."""

    def __post_init__(self) -> None:
        if unknown := sorted(set(self.sections) - set(SECTIONS)):
            raise InputError(f"--sections {unknown[0]}: use any of {', '.join(SECTIONS)}")
        if (self.target is None) != (self.draft is None):
            raise InputError(
                "--target and --draft go together; without both, the shipped pair is used"
            )
        if self.head is not None and self.target is None:
            raise InputError("--head: belongs to one target; name it with --target, and a --draft")
        for key in ("rounds", "prompts", "prompt_tokens", "max_new_tokens", "threads"):
            if getattr(self, key) < 1:
                raise InputError(f"--{key}: {getattr(self, key)} must be at least 1")


Section = Callable[[Bench, Options], JsonObject]
SECTIONS: dict[str, Section] = {
    "forwards": lambda bench, options: sections.forwards(bench, sections.FORWARD_CONTEXTS),
    "methods": lambda bench, options: sections.methods(
        bench, options.methods, options.temperature, options.rounds
    ),
    "peers": lambda bench, options: peers.compare(bench, asked(bench, options)),
}


def load_bench(options: Options) -> Bench:
    """Models and prompts."""
    loading: JsonObject = {"device": options.device, "dtype": options.dtype}
    target = load_model(options.target or str(TARGET), **loading)
    draft = load_model(options.draft or str(DRAFT), **loading)
    apart = Pair(endless(target), endless(draft))
    if options.target is None:
        apart = Pair(_wide(target, TARGET_SHAPE), _wide(draft, DRAFT_SHAPE))
    tokenizer = tokenizer_of(options)
    pair = copy.deepcopy(apart)
    ids_D = read_draft_vocabulary(options.draft or str(DRAFT), vocabulary_size(draft))
    if ids_D is not None:
        # Other engines load the draft whole, as it is on disk.
        trim(pair.draft, ids_D)
    if options.head is not None:
        head = load_head(options.head, pair.target)
        take_over(head)
        pair = replace(pair, head=head)
    take_over(pair.target, pair.draft)
    count = options.rounds * options.prompts
    return Bench(
        pair=pair,
        apart=apart,
        prompts=prompts(tokenizer, count, options.prompt_tokens),
        text=long_text(tokenizer, max(sections.FORWARD_CONTEXTS)),
        max_new_tokens=options.max_new_tokens,
    )


def asked(bench: Bench, options: Options) -> peers.Asked:
    """What other engines are asked."""
    return peers.Asked(
        pair=bench.apart,
        tokenizer=tokenizer_of(options),
        head=options.head,
        rounds=bench.rounds(options.rounds),
        temperatures=options.temperature,
        max_new_tokens=bench.max_new_tokens,
        threads=options.threads,
    )


def tokenizer_of(options: Options) -> Tokenizer:
    """The tokenizer of the pair."""
    return load_tokenizer(options.target or str(TARGET))


def _wide(model: PreTrainedModel, shape: dict[str, int]) -> PreTrainedModel:
    assert isinstance(model, LlamaForCausalLM)
    return widen(model, **shape, max_position_embeddings=POSITIONS)


def prompts(tokenizer: Tokenizer, count: int, tokens: int) -> list[list[int]]:
    """`count` prompts of exactly `tokens` tokens from held-out passages, the domains in turn."""
    by_domain: list[list[list[int]]] = []
    characters = max(PASSAGE_CHARACTERS, 8 * tokens)
    for domain in corpus.DOMAINS:
        rows = corpus.passages(domain, corpus.split(domain).heldout, characters)
        encoded = [encode_text(tokenizer, row["text"])[:tokens] for row in rows]
        whole = [ids for ids in encoded if len(ids) == tokens]
        by_domain.append(whole)
    found = list(chain.from_iterable(zip(*by_domain, strict=False)))
    if len(found) < count:
        raise InputError(
            f"--prompts: {count} in all; only {len(found)} passages have {tokens} tokens; ask "
            "for fewer"
        )
    return found[:count]


def long_text(tokenizer: Tokenizer, tokens: int) -> list[int]:
    """Held-out prose one passage after another, `tokens` tokens of it."""
    ids: list[int] = []
    for row in corpus.passages("prose", corpus.split("prose").heldout):
        ids += encode_text(tokenizer, row["text"])
        if len(ids) >= tokens:
            return ids[:tokens]
    raise ValueError(f"the held-out prose has only {len(ids)} tokens")


def setting(options: Options, bench: Bench) -> JsonObject:
    """Where and on what this was measured."""
    target = bench.pair.target
    draft = bench.pair.draft
    memory = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    return {
        "device": device_name(target),
        "cores": os.cpu_count(),
        "memory_GB": memory / 1e9,
        "native_kernel": kernel() is not None,
        "dtype": dtype_name(target),
        "threads": torch.get_num_threads(),
        "load_average_before": os.getloadavg(),
        "versions": versions(),
        "git_commit": git_commit(),
        "target_parameters": target.num_parameters(),
        "draft_parameters": draft.num_parameters(),
        "options": asdict(options),
    }


def device_name(model: PreTrainedModel) -> str:
    """What the GPU or the processor calls itself."""
    found = machine(model)
    return str(found["gpu"] or found["cpu"])


def main() -> None:
    """Run the sections that were asked for and print the JSON."""
    options, _ = parse(Options, "decode", sys.argv[1:])
    torch.set_num_threads(options.threads)
    resolve_device(options.device)
    bench = load_bench(options)
    result: JsonObject = {"setting": setting(options, bench)}
    for name in dict.fromkeys([*options.sections, *(["peers"] if options.peers else [])]):
        started = time.monotonic()
        result[name] = SECTIONS[name](bench, options)
        seconds = time.monotonic() - started
        sys.stderr.write(f"{name}: {seconds:.0f} s\n")
        if options.out is not None:
            write_text_atomic(Path(options.out), json.dumps(result, indent=2) + "\n")
    sys.stdout.write(json.dumps(result, indent=2) + "\n")


if __name__ == "__main__":
    try:
        main()
    except InputError as error:
        sys.exit(f"benchmarks/speed/decode.py: {error}")
