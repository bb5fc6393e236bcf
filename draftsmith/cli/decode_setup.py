"""The options of `draftsmith decode`, and the decoder that they stand for.

What can be refused from the options and small files alone is refused before a model is loaded.
"""

import dataclasses
import difflib
from collections.abc import Collection
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from transformers import PreTrainedModel

from decode import (
    PROPOSERS,
    VERIFIERS,
    DraftModelProposer,
    Growth,
    Proposer,
    Shape,
    SpeculativeDecoder,
    default_tree,
    default_verifier,
    parse_tree,
)
from decode.propose.candidate_trie import check_static
from decode.suffix_index import SuffixIndex, read_documents
from drafts.heads import HEADS
from drafts.heads.hydra import HydraHeads
from drafts.heads.medusa import MedusaHeads
from drafts.load import Draft, check_draft_vocabulary, draft_fingerprint, draft_kind, load_draft
from draftsmith_core.errors import InputError
from draftsmith_core.io import read_tree_file
from draftsmith_core.models import Quantize, check_tokenizer, dtype_name, fingerprint, load_model
from draftsmith_core.sampling import Sampling
from draftsmith_core.sources import check_source
from draftsmith_core.tokenization import Tokenizer, load_tokenizer


@dataclass(frozen=True, kw_only=True)
class DecodeConfig:
    """Generate with a target and a way of drafting; with a lossless verifier the output law is the target's own."""

    target: str
    """The target: a local directory or hub name."""
    draft: list[str] = field(default_factory=list)
    """A draft model (local directory or hub name), several of them, or a head (local directory)."""
    proposer: str | None = None
    """What drafts; the table below lists them. Default: what --draft is, else none (the target alone)."""
    tree: str | None = None
    """What is drafted per step; see below. Default: chain:4 (fewer for fewer heads), for lookahead its own."""
    verifier: str | None = None
    """What is kept of it; see below. Default: speculative on a chain, mcsd on a tree, specinfer for several drafts,
    exact where nothing is drawn."""
    datastore: str | None = None
    """For --proposer retrieval: a .jsonl, .parquet or .txt file, or hub dataset, of text to draft from."""
    prompt: str | None = None
    """A text to continue."""
    prompts: str | None = None
    """Or a .jsonl/.parquet file or hub dataset of prompts."""
    out: str | None = None
    """Write one JSON object per output to this .jsonl file; a killed run then continues."""
    num_samples: int = 1
    """Outputs per prompt."""
    max_new_tokens: int = 128
    stop: list[str] = field(default_factory=list)
    """Texts that end an output: it is cut behind the token that completes one."""
    temperature: float = 0.0
    """0 is greedy."""
    top_p: float = 1.0
    top_k: int = 0
    """0 keeps the whole vocabulary."""
    seed: int = 0
    batch_size: int = 1
    """Rows that are decoded together."""
    prompt_tokens: int = 32
    """For rows with `text`: how many of its first tokens make the prompt."""
    max_prompts: int | None = None
    """Use only the first rows of the prompts."""
    ignore_eos: bool = False
    """Go on to max_new_tokens even when the target ends."""
    fast: bool = True
    """false: the models' own forward instead of packed weights and the lean one; outputs differ by rounding only."""
    quantize: Quantize = "none"
    """nf4: the target's weights in four bits (bitsandbytes). The output then keeps the law of the rounded model."""
    quantize_draft: Quantize | None = None
    """The same for draft models. Default: as --quantize."""
    device: str = "auto"
    dtype: str = "auto"
    trust_remote_code: bool = False

    def __post_init__(self) -> None:
        for key in ("num_samples", "max_new_tokens", "batch_size", "prompt_tokens"):
            if getattr(self, key) < 1:
                raise InputError(f"{key}: {getattr(self, key)} must be at least 1")
        if self.max_prompts is not None and self.max_prompts < 1:
            raise InputError(f"max_prompts: {self.max_prompts} must be at least 1")
        if (self.prompt is None) == (self.prompts is None):
            raise InputError("prompt: give either --prompt TEXT or --prompts FILE")
        _check_name("proposer", self.proposer, [*PROPOSERS, "none"])
        _check_name("verifier", self.verifier, VERIFIERS)
        if any(not text for text in self.stop):
            raise InputError("stop: an empty text would end every output at once; give at least one character")
        if self.out is not None and Path(self.out).is_dir():
            raise InputError(f"out: {self.out} is a directory; name a .jsonl file")
        try:
            self.sampling()
        except ValueError as error:
            raise InputError(str(error)) from None

    def sampling(self) -> Sampling:
        """The law of the output."""
        return Sampling(temperature=self.temperature, top_k=self.top_k, top_p=self.top_p)


@dataclass(frozen=True)
class Choice:
    """What was chosen: names of a proposer and a verifier, and the tree. `spec` is how the tree is shown."""

    proposer: str
    spec: str
    shape: Shape
    verifier: str


@dataclass(frozen=True)
class Setup:
    """A decoder ready to run. `choice` is None for the target alone; `drafts` are names and what was loaded."""

    decoder: SpeculativeDecoder
    tokenizer: Tokenizer
    target: PreTrainedModel
    choice: Choice | None
    drafts: tuple[tuple[str, Draft], ...]
    index: SuffixIndex | None

    @property
    def lossless(self) -> bool:
        """Whether the outputs keep the target's law."""
        return self.choice is None or VERIFIERS[self.choice.verifier].lossless

    @property
    def models(self) -> list[PreTrainedModel]:
        """The language models: their contexts bound what fits."""
        return [self.target, *(draft for _, draft in self.drafts if isinstance(draft, PreTrainedModel))]

    def identity(self) -> list[Any]:
        """What tells setups apart that may give other outputs; reads all weights."""
        choice = self.choice
        return [
            None if choice is None else [choice.proposer, dataclasses.asdict(choice.shape), choice.verifier],
            fingerprint(self.target),
            dtype_name(self.target),
            [draft_fingerprint(draft) for _, draft in self.drafts],
            None if self.index is None else self.index.digest,
        ]


def set_up(config: DecodeConfig) -> Setup:
    """Choose, load and put together. Raises InputError, one line with the fix, for what does not go together."""
    choice = choose(config)
    tokenizer = load_tokenizer(config.target, config.trust_remote_code)
    index = None if config.datastore is None else SuffixIndex.build(read_documents(config.datastore, tokenizer))
    target = load_model(
        config.target,
        device=config.device,
        dtype=config.dtype,
        trust_remote_code=config.trust_remote_code,
        quantize=config.quantize,
    )
    check_tokenizer(config.target, target, tokenizer)
    drafts = [] if choice is None else [_load_draft(config, name, target, tokenizer) for name in config.draft]
    try:
        if choice is None:
            decoder = SpeculativeDecoder(target, fast=config.fast)
        else:
            proposer = _proposer(choice.proposer, drafts, index, config.fast)
            choice = _within_heads(choice, drafts, config.tree is None)
            decoder = SpeculativeDecoder(target, proposer, choice.shape, choice.verifier, fast=config.fast)
    except ValueError as error:
        raise InputError(str(error)) from None
    named = tuple(zip(config.draft, drafts, strict=True)) if drafts else ()
    return Setup(decoder, tokenizer, target, choice, named, index)


def choose(config: DecodeConfig) -> Choice | None:
    """The way of drafting that the options name, None for the target alone; reads small files only."""
    name = config.proposer or _usual_proposer(config.draft)
    try:
        shape = default_tree() if config.tree is None else parse_tree(config.tree, read_tree_file)
        _check_needs(config, name)
        if name == "none":
            return None
        if config.tree is None:
            shape = default_tree(name)
        draws = PROPOSERS[name].draws
        verifier = config.verifier or default_verifier(shape, draws=draws, drafts=len(config.draft))
        _check_together(name, config.draft, shape, verifier)
    except ValueError as error:
        raise InputError(str(error)) from None
    spec = config.tree or ("its own" if name == "lookahead" else f"chain:{shape.depth}")
    return Choice(name, spec, shape, verifier)


def _check_name(key: str, name: str | None, known: Collection[str]) -> None:
    if name is not None and name not in known:
        near = difflib.get_close_matches(name, known, 1)
        fix = f"did you mean {near[0]}?" if near else f"use one of {', '.join(known)}"
        raise InputError(f"{key}: {name!r} is unknown; {fix}")


def _usual_proposer(drafts: list[str]) -> str:
    return _kind(drafts[0]) if drafts else "none"


def _kind(draft: str) -> str:
    """The proposer that a draft is made for."""
    kind = draft_kind(draft)
    if kind not in PROPOSERS:
        raise InputError(f"--draft {draft}: is a head of kind {kind!r}; heads that draft here are {', '.join(HEADS)}")
    return kind


def _check_needs(config: DecodeConfig, proposer: str) -> None:
    """Refuse a proposer without what it drafts from, and what it would not use."""
    names = config.draft
    needs = "nothing" if proposer == "none" else PROPOSERS[proposer].needs
    if needs == "index" and config.datastore is None:
        raise InputError(f"proposer: {proposer} drafts from a text of yours; add --datastore FILE")
    if needs != "index" and config.datastore is not None:
        raise InputError("datastore: only --proposer retrieval reads it; use that, or leave out --datastore")
    if proposer != "none" and needs in ("nothing", "index") and names:
        raise InputError(f"proposer: {proposer} uses no draft, and --draft {names[0]} was given; leave out one of them")
    if needs in ("models", "head"):
        _check_drafts(names, proposer, needs)
    if needs != "models" and config.quantize_draft is not None:
        raise InputError("quantize_draft: applies to draft models, and none drafts here; leave it out")


def _check_drafts(names: list[str], proposer: str, needs: str) -> None:
    wanted = "medusa" if proposer == "blockwise" else proposer
    what = "a language model" if needs == "models" else f"a head of kind {wanted}"
    if not names:
        raise InputError(f"proposer: `{proposer}` needs --draft, {what}")
    for name in names:
        check_source(name)
        kind = _kind(name)
        if kind != wanted:
            found = "a language model" if kind == "draft" else f"a head of kind {kind}"
            if len(names) > 1:
                raise InputError(f"--draft {name}: is {found}, and {names[0]} is not; draft with one of them")
            raise InputError(
                f"--draft {name}: is {found}, and --proposer {proposer} needs {what}; use --proposer {kind}"
            )
    if needs == "head" and len(names) > 1:
        raise InputError(f"draft: {len(names)} heads were given, and only language models draft together; give one")


def _check_together(proposer: str, drafts: list[str], shape: Shape, verifier: str) -> None:
    """What can be known without the models; the decoder checks the rest once they are there."""
    copies = not PROPOSERS[proposer].draws
    if copies:
        check_static(proposer, shape)
    if isinstance(shape, Growth) and len(drafts) > 1:
        raise InputError(
            f"tree: {len(drafts)} drafts cannot grow one tree; use one draft, or a tree such as kary:4,2,2"
        )
    if proposer == "blockwise" and not shape.is_chain:
        raise InputError("tree: blockwise drafts chains only; use chain:4, or --proposer medusa")
    rule = VERIFIERS[verifier]
    if len(drafts) > 1:
        rule.check(shape, "with_replacement", len(drafts))
    else:
        rule.check(shape, "deterministic" if copies or isinstance(shape, Growth) else None)


def _load_draft(config: DecodeConfig, name: str, target: PreTrainedModel, tokenizer: Tokenizer) -> Draft:
    draft = load_draft(
        name,
        target,
        device=config.device,
        dtype=dtype_name(target) if config.dtype == "auto" else config.dtype,
        trust_remote_code=config.trust_remote_code,
        quantize=config.quantize_draft or config.quantize,
    )
    check_draft_vocabulary(name, draft, target, tokenizer, config.trust_remote_code)
    return draft


def _proposer(name: str, drafts: list[Draft], index: SuffixIndex | None, fast: bool) -> Proposer:
    kind = PROPOSERS[name]
    match kind.needs:
        case "models":
            return DraftModelProposer([draft for draft in drafts if isinstance(draft, PreTrainedModel)], fast=fast)
        case "head":
            return kind.make(drafts[0])
        case "index":
            return kind.make(index)
        case "nothing":
            return kind.make(None)


def _within_heads(choice: Choice, drafts: list[Draft], usual: bool) -> Choice:
    """The usual chain is no longer than there are heads."""
    if not (usual and drafts and isinstance(drafts[0], MedusaHeads | HydraHeads)):
        return choice
    shape = default_tree(heads=drafts[0].config.num_heads)
    return dataclasses.replace(choice, spec=f"chain:{shape.depth}", shape=shape)
