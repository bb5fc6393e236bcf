"""A target and its drafts, loaded, checked and ready to decode: `ds.load_pair(...).generate(...)`."""

import dataclasses
import os
import time
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from numbers import Integral
from typing import Any, TypedDict, Unpack, overload

from transformers import PreTrainedModel

from decode import PROPOSERS, Proposer, SpeculativeDecoder, StopCondition, StopStrings, TreeShape, Verifier, take_over
from decode.batch_run import OnTokens
from decode.suffix_index import SuffixIndex
from drafts.load import Draft, LoadedPair, depth_limit, draft_fingerprint, kind_of
from drafts.load import load_pair as load_models
from draftsmith.datastore import read_documents
from draftsmith.drafting import DraftingMethod, choose_method
from draftsmith.outputs import Output
from draftsmith_core.errors import InputError
from draftsmith_core.models import dtype_name, eos_ids, fingerprint
from draftsmith_core.prompts import Prompt, check_messages, content_id, unique_id
from draftsmith_core.sampling import generator, row_seed
from draftsmith_core.settings import Sampling, resolve_sampling
from draftsmith_core.tokenization import Tokenizer, decode_text, encode_messages, encode_text

# A text, token ids, or a chat (a list of {"role", "content"}), which goes through the tokenizer's chat template.
OnePrompt = str | Sequence[int] | Sequence[Mapping[str, str]]
Source = str | os.PathLike[str]


class MethodOptions(TypedDict, total=False):
    """The options of `Pair.generate` that say how to draft, for type checkers."""

    draft: str | Sequence[str] | None
    proposer: str | Proposer | None
    tree: str | TreeShape | None
    verifier: str | Verifier | None
    datastore: str | SuffixIndex | None


class GenerateOptions(MethodOptions, total=False):
    """The options of `Pair.generate`, for type checkers."""

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


@dataclass(frozen=True)
class Decoding:
    """A decoder, and how it drafts. `method` is None for the target alone; retrieval drafts from `index`."""

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
            None if method is None else [method.proposer, dataclasses.asdict(method.shape), method.verifier.name],
            fingerprint(target),
            dtype_name(target),
            [draft_fingerprint(draft) for draft in self.drafts.values()],
            None if self.index is None else self.index.digest,
        ]


@dataclass(frozen=True)
class Settings:
    """How outputs are drawn and where they end."""

    sampling: Sampling
    max_new_tokens: int
    seed: int
    eos: tuple[int, ...]
    stop: StopCondition | None


def load_pair(
    target: Source,
    draft: Source | Sequence[Source] | Mapping[str, Source] | None = None,
    *,
    fast: bool = True,
    compile: bool | str = False,  # noqa: A002 (as in torch.compile)
    **options: Any,
) -> "Pair":
    """Load a target and any number of drafts, and check that they belong together.

    target, draft: local directories or hub names; a draft is a language model or a head. Several language models
    draft together; `{name: source}` gives them names. fast: use packed weights and the lean Llama forward on a CPU;
    outputs change by rounding only. compile: record every step as a CUDA graph (True), or compile it first with a
    torch.compile backend (its name); the first outputs then take longer.

    options: `device` (auto, cpu, cuda or cuda:N), `dtype` (auto: float32 on a CPU, else the checkpoint's own; float32,
    bfloat16 or float16), `quantize` and `quantize_draft` ("nf4" for four-bit weights), `trust_remote_code`,
    `tokenizer` (the target's, if loaded already), `heterogeneous_vocab` (accept drafts of another tokenizer; they
    draft the tokens that both have, lossless). Raise InputError for what cannot be loaded or does not fit the target.
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
        loaded: LoadedPair,
        *,
        fast: bool = True,
        compile: bool | str = False,  # noqa: A002 (as in torch.compile)
    ) -> None:
        self.target_name: str = loaded.target_name
        self.target: PreTrainedModel = loaded.target
        self.tokenizer: Tokenizer = loaded.tokenizer
        self.drafts: dict[str, Draft] = loaded.drafts
        self.models: list[PreTrainedModel] = loaded.models
        self.context: int | None = loaded.context
        self._fast, self._compile = fast, compile
        if fast and not compile:
            take_over(self.target, *self.drafts.values())
        self._last: tuple[object, Decoding] | None = None

    @overload
    def generate(  # type: ignore[overload-overlap]  # a text is also a sequence of texts
        self, prompts: OnePrompt, **options: Unpack[GenerateOptions]
    ) -> Output: ...
    @overload
    def generate(self, prompts: Sequence[OnePrompt], **options: Unpack[GenerateOptions]) -> list[Output]: ...
    def generate(
        self,
        prompts: OnePrompt | Sequence[OnePrompt],
        *,
        temperature: float | None = None,
        top_p: float | None = None,
        top_k: int | None = None,
        min_p: float | None = None,
        max_new_tokens: int = 128,
        seed: int = 0,
        stop: str | Sequence[str] = (),
        ignore_eos: bool = False,
        batch_size: int = 8,
        on_tokens: OnTokens | None = None,
        **method: Unpack[MethodOptions],
    ) -> Output | list[Output]:
        """Continue one prompt, or each of a list. Return an `Output`, or a list of them in the same order.

        prompts: texts, token ids or chats. With the same seed, `draftsmith decode` gives the same outputs for
        one --prompt, or for a file of these prompts. An output does not depend on its batch mates.
        temperature (0 is greedy), top_p, top_k (0 keeps every token), min_p: None takes the target's
        generation_config.json, and greedy without one. stop: texts; an output ends after the token that completes one.
        batch_size: prompts decoded together. on_tokens(row of its batch, ids, from_draft): called after each step
        with its new tokens.

        method: `draft` (which of the pair's drafts, by name; all by default), `proposer`, `tree` and `verifier` (names
        as in `draftsmith decode --help`, or objects of your own; chosen to suit where left out), `datastore` (a file to
        retrieve from). Raise InputError for an invalid combination.
        """
        decoding = self.decoding(**method)
        one = _is_one_prompt(prompts)
        sampling = resolve_sampling(
            self.target_name, self.target, temperature=temperature, top_k=top_k, top_p=top_p, min_p=min_p
        ).sampling
        stops = [stop] if isinstance(stop, str) else list(stop)
        if one:
            named = [Prompt("prompt", "default", tuple(self.encode(prompts)))]  # type: ignore[arg-type]
        else:
            repeats: Counter[str] = Counter()
            encoded = [self.encode(prompt, f"prompts[{i}]") for i, prompt in enumerate(prompts)]  # type: ignore[arg-type]
            named = [Prompt(unique_id(content_id(ids), repeats), "default", tuple(ids)) for ids in encoded]
        outputs: list[Output] = []
        try:
            settings = self.settings(sampling, max_new_tokens, seed, stops, ignore_eos)
            for start in range(0, len(named), batch_size):
                requests = [(prompt, 0) for prompt in named[start : start + batch_size]]
                outputs += self.decode_batch(decoding.decoder, requests, settings, on_tokens)
        except ValueError as error:
            raise InputError(str(error)) from None
        return outputs[0] if one else outputs

    def encode(self, prompt: OnePrompt, where: str = "prompt") -> list[int]:
        """Token ids of a text (with the special tokens that the tokenizer adds), of a chat, or as they are."""
        if isinstance(prompt, str):
            return encode_text(self.tokenizer, prompt)
        items: Any = prompt.tolist() if hasattr(prompt, "tolist") else list(prompt)  # an array or tensor of ids
        if items and isinstance(items[0], Mapping):
            return encode_messages(self.tokenizer, check_messages(items, where), where)
        return [int(item) for item in items]

    def settings(
        self, sampling: Sampling, max_new_tokens: int, seed: int, stop: Sequence[str], ignore_eos: bool
    ) -> Settings:
        """Settings with the target's own EOS ids, unless they are to be ignored."""
        eos = () if ignore_eos else eos_ids(self.target)
        return Settings(sampling, max_new_tokens, seed, eos, StopStrings(self.tokenizer, stop) if stop else None)

    def decoding(
        self,
        *,
        draft: str | Sequence[str] | None = None,
        proposer: str | Proposer | None = None,
        tree: str | TreeShape | None = None,
        verifier: str | Verifier | None = None,
        datastore: str | SuffixIndex | None = None,
    ) -> Decoding:
        """A decoder for this method of drafting, as `generate` describes it; the last one if the method is the same."""
        names = tuple(self.drafts) if draft is None else (draft,) if isinstance(draft, str) else tuple(draft)
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
        proposer: str | Proposer | None,
        tree: str | TreeShape | None,
        verifier: str | Verifier | None,
        datastore: str | SuffixIndex | None,
    ) -> Decoding:
        how: dict[str, Any] = {"fast": self._fast, "compile": self._compile}
        if proposer is not None and not isinstance(proposer, str):
            decoder = SpeculativeDecoder(self.target, proposer, tree, verifier, **how)
            spec = tree if isinstance(tree, str) else f"{decoder.tree.size} nodes"
            method = DraftingMethod(type(proposer).__name__, spec, decoder.tree, decoder.verifier)
            return Decoding(decoder, method, drafts)
        kinds = {name: kind_of(draft) for name, draft in drafts.items()}
        heads = min((count for draft in drafts.values() if (count := depth_limit(draft))), default=None)
        chosen = choose_method(kinds, proposer, tree, verifier, datastore=datastore is not None, heads=heads)
        if chosen is None:
            return Decoding(SpeculativeDecoder(self.target, **how))
        index = (
            SuffixIndex.build(read_documents(datastore, self.tokenizer)) if isinstance(datastore, str) else datastore
        )
        kind, models = PROPOSERS[chosen.proposer], list(drafts.values())
        if kind.needs in ("models", "head"):
            drafter = kind.make(models if kind.needs == "models" else models[0], fast=self._fast)
        else:
            drafter = kind.make(index)
        decoder = SpeculativeDecoder(self.target, drafter, chosen.shape, chosen.verifier, **how)
        return Decoding(decoder, chosen, drafts, index)

    def decode_batch(
        self,
        decoder: SpeculativeDecoder,
        requests: Sequence[tuple[Prompt, int]],
        settings: Settings,
        on_tokens: OnTokens | None = None,
    ) -> list[Output]:
        """Decode requests (prompt, sample index) together; return their outputs in order."""
        ends = [0.0] * len(requests)

        def note(row: int, ids: list[int], from_draft: list[bool]) -> None:
            ends[row] = time.perf_counter()
            if on_tokens is not None:
                on_tokens(row, ids, from_draft)

        began = time.perf_counter()
        batch = decoder.generate(
            [prompt.ids for prompt, _ in requests],
            settings.sampling,
            settings.max_new_tokens,
            [generator(row_seed(settings.seed, f"{prompt.id}/{sample}")) for prompt, sample in requests],
            settings.eos,
            note,
            settings.stop,
        )
        return [
            Output(
                id=prompt.id,
                sample_index=sample,
                prompt_ids=list(prompt.ids),
                output_ids=generation.output_ids,
                text=decode_text(self.tokenizer, generation.output_ids),
                finish_reason=generation.finish_reason,
                from_draft=generation.from_draft,
                stats=generation.stats,
                prefill_s=batch.prefill_s / len(requests),
                decode_s=batch.decode_s / len(requests),
                waited_s=end - began - batch.prefill_s,
            )
            for (prompt, sample), generation, end in zip(requests, batch.generations, ends, strict=True)
        ]


def _is_one_prompt(prompts: Any) -> bool:
    """Whether this is a single prompt (a text, a chat, token ids) and no list of prompts."""
    if isinstance(prompts, str):
        return True
    if shape := getattr(prompts, "shape", None):
        return len(shape) == 1
    return len(prompts) > 0 and (_is_integer(prompts[0]) or isinstance(prompts[0], Mapping))


def _is_integer(item: object) -> bool:
    return isinstance(item, Integral) and not isinstance(item, bool)
