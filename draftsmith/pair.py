"""A target and its drafts, loaded, checked and ready to decode:
`ds.load_pair(...).generate(...)`.
"""

import dataclasses
import os
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from numbers import Integral
from queue import SimpleQueue
from threading import Event, Thread
from typing import Any, TypedDict, Unpack, overload

from transformers import PreTrainedModel

from decode import (
    PROPOSERS,
    DecodeStats,
    Proposer,
    SpeculativeDecoder,
    StopStrings,
    TreeShape,
    Verifier,
    take_over,
)
from decode.batch_run import OnTokens
from decode.suffix_index import SuffixIndex
from drafts.load import (
    Draft,
    LoadedModels,
    depth_limit,
    draft_fingerprint,
    kind_of,
    load_models,
)
from draftsmith.detokenizer import Detokenizer, Piece
from draftsmith.drafting import DraftingMethod, choose_method, read_documents
from draftsmith_core.errors import InputError, nearest
from draftsmith_core.models import dtype_name, eos_ids, fingerprint
from draftsmith_core.prompts import Prompt, check_messages, content_id, unique_id
from draftsmith_core.sampling import generator, row_seed
from draftsmith_core.settings import Sampling, resolve_sampling
from draftsmith_core.tokenization import Tokenizer, decode_text, encode_messages, encode_text

# A text, token ids, or a chat (a list of {"role", "content"}), which goes through the tokenizer's
# chat template.
OnePrompt = str | Sequence[int] | Sequence[Mapping[str, str]]
Source = str | os.PathLike[str]
Request = tuple[Prompt, int]  # a prompt and the index of its sample


class GenerateOptions(TypedDict, total=False):
    """The options of `Pair.generate`."""

    draft: str | Sequence[str] | None
    proposer: str | Proposer | None
    tree: str | TreeShape | None
    verifier: str | Verifier | None
    datastore: str | SuffixIndex | None
    temperature: float | None
    top_p: float | None
    top_k: int | None
    min_p: float | None
    max_new_tokens: int
    seed: int
    stop: str | Sequence[str]
    ignore_eos: bool
    batch_size: int
    on_tokens: OnTokens | None


# Options of transformers' `generate` that have another name here.
_THEIRS = {
    "do_sample": "temperature (0 is greedy)",
    "num_return_sequences": "a list that holds the prompt that often",
    "stop_strings": "stop",
    "max_length": "max_new_tokens",
    "streamer": "on_tokens, or Pair.stream",
    "eos_token_id": "stop, or ignore_eos",
    "num_assistant_tokens": "tree='chain:N'",
}


@dataclass(frozen=True, repr=False)
class Output:
    """One continuation of one prompt.

    output_ids: new tokens only, EOS included if the model ended. finish_reason: "stop" (EOS or a
    stop text) or "length". from_draft[i]: whether token i was drafted and accepted, or added by the
    target. stats: counts of this output alone; `stats.tau` is tokens per target call. prefill_s,
    decode_s: this output's share of its batch's wall clock.
    """

    id: str
    sample_index: int
    prompt_ids: list[int]
    output_ids: list[int]
    text: str
    finish_reason: str
    from_draft: list[bool]
    stats: DecodeStats
    prefill_s: float
    decode_s: float

    def __repr__(self) -> str:
        tau = "-" if self.stats.tau is None else f"{self.stats.tau:.2f}"
        text = self.text if len(self.text) <= 60 else self.text[:59] + "…"
        return f"Output({text!r}, {len(self.output_ids)} tokens, {self.finish_reason}, tau {tau})"

    def row(self) -> dict[str, Any]:
        """The row of `draftsmith decode --out`."""
        keys = ("id", "sample_index", "prompt_ids", "output_ids", "text", "finish_reason")
        stats: dict[str, Any] = {
            key: getattr(self.stats, key) for key in ("target_calls", "proposed", "accepted")
        }
        stats["accepted_by_depth"] = list(self.stats.accepted_by_depth)
        stats["seconds"] = self.prefill_s + self.decode_s
        return {key: getattr(self, key) for key in keys} | {"stats": stats}


@dataclass(frozen=True)
class Decoding:
    """A decoder, and how it drafts. `method` is None for the target alone; retrieval drafts from
    `index`.
    """

    decoder: SpeculativeDecoder
    method: DraftingMethod | None = None
    drafts: dict[str, Draft] = dataclasses.field(default_factory=dict)
    index: SuffixIndex | None = None

    @property
    def lossless(self) -> bool:
        """Whether the outputs follow the target's own distribution."""
        return self.method is None or self.decoder.verifier.lossless

    def identity(self) -> list[Any]:
        """Everything that may change outputs, hashed; reads all weights."""
        method, target = self.method, self.decoder.target
        return [
            None
            if method is None
            else [method.proposer, dataclasses.asdict(method.shape), method.verifier.name],
            fingerprint(target),
            dtype_name(target),
            [draft_fingerprint(draft) for draft in self.drafts.values()],
            None if self.index is None else self.index.digest,
        ]


def load_pair(
    target: Source,
    draft: Source | Sequence[Source] | Mapping[str, Source] | None = None,
    *,
    fast: bool = True,
    compile: bool | str = False,  # noqa: A002 (as in torch.compile)
    **options: Any,
) -> "Pair":
    """Load a target and any number of drafts, and check that they belong together.

    target, draft: local directories or hub names; a draft is a language model or a head. Several
    language models draft together; `{name: source}` gives them names. fast: use packed weights and
    the lean Llama forward on a CPU; outputs change by rounding only. compile: record every step as
    a CUDA graph (True), or compile it first with a torch.compile backend (its name); the first
    outputs then take longer.

    options: `device` (auto, cpu, cuda or cuda:N), `dtype` (auto: float32 on a CPU, else the
    checkpoint's own; float32, bfloat16 or float16), `quantize` and `quantize_draft` ("nf4" for
    four-bit weights), `trust_remote_code`, `revision` (of the target on the hub), `chat_template`
    (a Jinja file in place of the target's own), `tokenizer` (the target's, if loaded already),
    `heterogeneous_vocab` (accept drafts of another tokenizer; they draft the tokens that both have,
    lossless). Raise InputError for what cannot be loaded or does not fit the target.
    """
    drafts: Mapping[str, str] | list[str]
    if isinstance(draft, Mapping):
        drafts = {name: os.fspath(source) for name, source in draft.items()}
    elif draft is None or isinstance(draft, str | os.PathLike):
        drafts = [] if draft is None else [os.fspath(draft)]
    else:
        drafts = [os.fspath(source) for source in draft]
    return Pair(load_models(os.fspath(target), drafts, **options), fast=fast, compile=compile)


class Pair:
    """A target, its tokenizer and its drafts (by name), ready to decode. `load_pair` makes one."""

    def __init__(
        self,
        loaded: LoadedModels,
        *,
        fast: bool = True,
        compile: bool | str = False,  # noqa: A002
    ) -> None:
        self.target_name: str = loaded.target_name
        self.target: PreTrainedModel = loaded.target
        self.tokenizer: Tokenizer = loaded.tokenizer
        self.drafts: dict[str, Draft] = loaded.drafts
        self.context: int | None = loaded.context
        self._how: dict[str, Any] = {"fast": fast, "compile": compile}
        if fast and not compile:
            take_over(self.target, *self.drafts.values())
        self._last: tuple[object, Decoding] | None = None

    def __repr__(self) -> str:
        return (
            f"Pair({self.target_name!r}, "
            f"drafts={ {name: kind_of(draft) for name, draft in self.drafts.items()} })"
        )

    @overload
    def generate(  # type: ignore[overload-overlap]  # a text is also a sequence of texts
        self, prompts: OnePrompt, **options: Unpack[GenerateOptions]
    ) -> Output: ...
    @overload
    def generate(
        self, prompts: Sequence[OnePrompt], **options: Unpack[GenerateOptions]
    ) -> list[Output]: ...
    def generate(
        self, prompts: OnePrompt | Sequence[OnePrompt], **options: Any
    ) -> Output | list[Output]:
        """Continue one prompt, or each of a list. Return an `Output`, or a list of them in the same
        order.

        prompts: texts, token ids or chats. With the same seed, `draftsmith decode` gives the same
        outputs for one --prompt, or for a file of these prompts. An output does not depend on its
        batch mates.
        draft: which of the pair's drafts, by name; all by default. proposer, tree, verifier: names
        as in `draftsmith decode --help`, or objects of your own; chosen to suit where left out.
        datastore: a file to retrieve from. temperature (0 is greedy), top_p, top_k (0 keeps every
        token), min_p: None takes the target's generation_config.json, and greedy without one. stop:
        texts; an output ends after the token that completes one.
        max_new_tokens: 128 by default. batch_size: prompts decoded together, 8 by default.
        on_tokens(row of its batch, ids, from_draft): called after each step with its new tokens.
        Raise InputError for an invalid combination.
        """
        for name in [name for name in options if name not in GenerateOptions.__annotations__]:
            fix = (
                f"use {_THEIRS[name]}"
                if name in _THEIRS
                else nearest(name, GenerateOptions.__annotations__)
            )
            raise TypeError(f"generate: no option {name!r}; {fix}")
        methods = ("draft", "proposer", "tree", "verifier", "datastore")
        decoding = self.decoding(**{key: options.pop(key, None) for key in methods})
        chosen = {key: options.pop(key, None) for key in ("temperature", "top_k", "top_p", "min_p")}
        sampling = resolve_sampling(self.target_name, self.target, **chosen).sampling
        one, repeats = _is_one_prompt(prompts), Counter[str]()
        if one:
            named = [Prompt("prompt", "default", tuple(self.encode(prompts)))]  # type: ignore[arg-type]
        else:
            encoded = [self.encode(prompt, f"prompts[{i}]") for i, prompt in enumerate(prompts)]  # type: ignore[arg-type]
            named = [
                Prompt(unique_id(content_id(ids), repeats), "default", tuple(ids))
                for ids in encoded
            ]
        batches = self.decode(
            decoding.decoder, [(prompt, 0) for prompt in named], sampling, **options
        )
        outputs = [output for batch in batches for output in batch]
        return outputs[0] if one else outputs

    def stream(self, prompt: OnePrompt, **options: Unpack[GenerateOptions]) -> Iterator[Piece]:
        """Continue one prompt as `generate` does; yield its text piece by piece as it is decoded.

        for piece in pair.stream("Return the"): print(piece, end="")
        """
        pieces: SimpleQueue[Piece | BaseException | None] = SimpleQueue()
        text, abandoned = Detokenizer(self.tokenizer), Event()

        def put(row: int, ids: list[int], from_draft: list[bool]) -> None:
            if abandoned.is_set():
                raise GeneratorExit
            for piece in text.add(ids, from_draft):
                pieces.put(piece)

        def decode() -> None:
            try:
                self.generate(prompt, **options | {"on_tokens": put})
                pieces.put(text.rest())
                pieces.put(None)
            except BaseException as error:
                pieces.put(error)

        thread = Thread(target=decode, daemon=True)
        thread.start()
        try:
            while (piece := pieces.get()) is not None:
                if isinstance(piece, BaseException):
                    raise piece
                if piece:
                    yield piece
        finally:
            abandoned.set()
            thread.join()

    def encode(self, prompt: OnePrompt, where: str = "prompt") -> list[int]:
        """Token ids of a text (with the special tokens that the tokenizer adds), of a chat, or as
        they are.
        """
        if isinstance(prompt, str):
            return encode_text(self.tokenizer, prompt)
        items: Any = (
            prompt.tolist() if hasattr(prompt, "tolist") else list(prompt)
        )  # an array or tensor of ids
        if items and isinstance(items[0], Mapping):
            return encode_messages(self.tokenizer, check_messages(items, where), where)
        return [int(item) for item in items]

    def decoding(
        self,
        *,
        draft: str | Sequence[str] | None = None,
        proposer: str | Proposer | None = None,
        tree: str | TreeShape | None = None,
        verifier: str | Verifier | None = None,
        datastore: str | SuffixIndex | None = None,
    ) -> Decoding:
        """A decoder for this method of drafting, as `generate` describes it; the last one if the
        method is the same.
        """
        names = (
            tuple(self.drafts)
            if draft is None
            else (draft,)
            if isinstance(draft, str)
            else tuple(draft)
        )
        if unknown := [name for name in names if name not in self.drafts]:
            known = ", ".join(self.drafts) or "none"
            raise InputError(f"draft: {unknown[0]!r} is not a draft of this pair; it has {known}")
        key = (names, proposer, tree, verifier, datastore)
        if self._last is None or self._last[0] != key:
            self._last = None
            drafts = {name: self.drafts[name] for name in names}
            try:
                self._last = (key, self._decoding(drafts, proposer, tree, verifier, datastore))
            except ValueError as error:
                raise InputError(str(error)) from None
        return self._last[1]

    def _decoding(
        self,
        drafts: dict[str, Draft],
        proposer: Any,
        tree: Any,
        verifier: Any,
        datastore: str | SuffixIndex | None,
    ) -> Decoding:
        if proposer is not None and not isinstance(proposer, str):
            decoder = SpeculativeDecoder(self.target, proposer, tree, verifier, **self._how)
            spec = tree if isinstance(tree, str) else f"{decoder.tree.size} nodes"
            method = DraftingMethod(type(proposer).__name__, spec, decoder.tree, decoder.verifier)
            return Decoding(decoder, method, drafts)
        kinds = {name: kind_of(draft) for name, draft in drafts.items()}
        heads = min(
            (count for draft in drafts.values() if (count := depth_limit(draft))), default=None
        )
        chosen = choose_method(
            kinds, proposer, tree, verifier, datastore=datastore is not None, heads=heads
        )
        if chosen is None:
            return Decoding(SpeculativeDecoder(self.target, **self._how))
        if isinstance(datastore, str):
            datastore = SuffixIndex.build(read_documents(datastore, self.tokenizer))
        kind, models = PROPOSERS[chosen.proposer], list(drafts.values())
        if kind.needs in ("models", "head"):
            drafter = kind.make(
                models if kind.needs == "models" else models[0], fast=self._how["fast"]
            )
        else:
            drafter = kind.make(datastore)
        decoder = SpeculativeDecoder(
            self.target, drafter, chosen.shape, chosen.verifier, **self._how
        )
        return Decoding(decoder, chosen, drafts, datastore)

    def decode(
        self,
        decoder: SpeculativeDecoder,
        requests: Sequence[Request],
        sampling: Sampling,
        *,
        max_new_tokens: int = 128,
        seed: int = 0,
        stop: str | Sequence[str] = (),
        ignore_eos: bool = False,
        batch_size: int = 8,
        on_tokens: OnTokens | None = None,
    ) -> Iterator[list[Output]]:
        """Decode requests batch by batch; yield the outputs of each batch in order."""
        for start in range(0, len(requests), batch_size):
            rows = requests[start : start + batch_size]
            try:
                batch = decoder.generate(
                    [prompt.ids for prompt, _ in rows],
                    sampling,
                    max_new_tokens,
                    [generator(row_seed(seed, f"{prompt.id}/{sample}")) for prompt, sample in rows],
                    () if ignore_eos else eos_ids(self.target),
                    on_tokens,
                    StopStrings(self.tokenizer, [stop] if isinstance(stop, str) else stop)
                    if stop
                    else None,
                )
            except ValueError as error:
                raise InputError(str(error)) from None
            yield [
                Output(
                    id=prompt.id,
                    sample_index=sample,
                    prompt_ids=list(prompt.ids),
                    output_ids=generation.output_ids,
                    text=decode_text(self.tokenizer, generation.output_ids),
                    finish_reason=generation.finish_reason,
                    from_draft=generation.from_draft,
                    stats=generation.stats,
                    prefill_s=batch.prefill_s / len(rows),
                    decode_s=batch.decode_s / len(rows),
                )
                for (prompt, sample), generation in zip(rows, batch.generations, strict=True)
            ]


def _is_one_prompt(prompts: Any) -> bool:
    if isinstance(prompts, str):
        return True
    if shape := getattr(prompts, "shape", None):
        return len(shape) == 1
    return len(prompts) > 0 and isinstance(prompts[0], Integral | Mapping)
