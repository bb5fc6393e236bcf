"""A target and its drafts, loaded, checked and ready to decode: `ds.load_pair(...).generate(...)`."""

import dataclasses
import os
import time
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TypedDict, Unpack, overload

from transformers import PreTrainedModel

from decode import (
    PROPOSERS,
    DynamicTree,
    Proposer,
    SpeculativeDecoder,
    StopStrings,
    Tree,
    TreeShape,
    Verifier,
    take_over,
)
from decode.batch_run import OnTokens
from decode.suffix_index import SuffixIndex
from drafts.load import Draft, LoadedPair, depth_limit, draft_fingerprint, kind_of
from drafts.load import load_pair as load_models
from draftsmith.datastore import read_documents
from draftsmith.drafting import DraftingMethod, choose_method
from draftsmith.outputs import Output, OutputRequest, Settings, make_output
from draftsmith.pair_inputs import (
    check_flags,
    check_integers,
    check_loading,
    check_sampling_numbers,
    is_integer,
    is_one_prompt,
    source_text,
    texts,
)
from draftsmith_core.errors import InputError
from draftsmith_core.generation_defaults import ResolvedSampling, resolve_sampling
from draftsmith_core.model_options import Quantize
from draftsmith_core.models import dtype_name, eos_ids, fingerprint, vocabulary_size
from draftsmith_core.prompt_rows import whole
from draftsmith_core.prompts import Prompt, check_messages, content_id, unique_id
from draftsmith_core.sampling import generator, row_seed
from draftsmith_core.sampling_options import Sampling, check_seed
from draftsmith_core.tokenization import Tokenizer, encode_messages, encode_text

# A text, token ids, or a chat (a list of {"role", "content"}), which goes through the tokenizer's chat template.
OnePrompt = str | Sequence[int] | Sequence[Mapping[str, str]]


class GenerateOptions(TypedDict, total=False):
    """The options of `Pair.generate`, for type checkers."""

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


@dataclass(frozen=True)
class Decoding:
    """A decoder, and how it drafts: `method` is None for the target alone; `index` is what retrieval drafts from."""

    decoder: SpeculativeDecoder
    method: DraftingMethod | None
    drafts: dict[str, Draft]
    index: SuffixIndex | None

    @property
    def lossless(self) -> bool:
        """Whether the outputs follow the target's own distribution."""
        return self.method is None or self.decoder.verifier.lossless

    def identity(self) -> list[Any]:
        """What tells apart decodings that may give other outputs; reads all weights."""
        method, target = self.method, self.decoder.target
        return [
            None if method is None else [method.proposer, dataclasses.asdict(method.shape), method.verifier.name],
            fingerprint(target),
            dtype_name(target),
            [draft_fingerprint(draft) for draft in self.drafts.values()],
            None if self.index is None else self.index.digest,
        ]


def load_pair(
    target: str | os.PathLike[str],
    draft: str
    | os.PathLike[str]
    | Sequence[str | os.PathLike[str]]
    | Mapping[str, str | os.PathLike[str]]
    | None = None,
    *,
    device: str = "auto",
    dtype: str = "auto",
    quantize: Quantize = "none",
    quantize_draft: Quantize | None = None,
    trust_remote_code: bool = False,
    tokenizer: Tokenizer | None = None,
    heterogeneous_vocab: bool = False,
    fast: bool = True,
    compile: bool | str = False,  # noqa: A002 (as in torch.compile)
) -> "Pair":
    """Load a target and any number of drafts, and check that they belong together.

    target, draft: local directories or hub names; a draft is a language model or a head. Several language models
    draft together; `{name: source}` gives them names. device: auto, cpu, cuda or cuda:N. dtype: auto (float32 on a
    CPU, else the checkpoint's own), float32, bfloat16 or float16. quantize: "nf4" for four-bit weights. tokenizer: the
    target's, where it is loaded already. heterogeneous_vocab: accept drafts of another tokenizer, which then draft the
    tokens that both have (lossless). fast: packed weights and the lean Llama forward on a CPU, which change outputs
    by rounding only. compile: record every step as a CUDA graph (True), or compile it first by a torch.compile backend
    (its name); the first outputs then take longer.
    Raises InputError, one line, for what cannot be loaded or does not fit the target.
    """
    flags = {"trust_remote_code": trust_remote_code, "heterogeneous_vocab": heterogeneous_vocab, "fast": fast}
    check_loading(tokenizer, compile, **flags)
    sources: Sequence[str] | dict[str, str]
    if isinstance(draft, Mapping):
        sources = {name: source_text("draft", each) for name, each in draft.items()}
    elif isinstance(draft, Sequence) and not isinstance(draft, str):
        sources = [source_text("draft", each) for each in draft]
    else:
        sources = [] if draft is None else [source_text("draft", draft)]
    return Pair(
        load_models(
            source_text("target", target),
            sources,
            device=device,
            dtype=dtype,
            quantize=quantize,
            quantize_draft=quantize_draft,
            trust_remote_code=trust_remote_code,
            tokenizer=tokenizer,
            heterogeneous_vocab=heterogeneous_vocab,
        ),
        fast=fast,
        compile=compile,
    )


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
        draft: str | Sequence[str] | None = None,
        proposer: str | Proposer | None = None,
        tree: str | TreeShape | None = None,
        verifier: str | Verifier | None = None,
        datastore: str | SuffixIndex | None = None,
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
    ) -> Output | list[Output]:
        """Continue one prompt, or each of a list: an `Output`, or a list of them in the same order.

        prompts: texts, token ids or chats. One prompt draws what `draftsmith decode --prompt` draws with this seed,
        a list what the command draws for a file of these prompts; an output does not depend on its batch mates.
        draft: which of the pair's drafts, by name; all unless given. proposer, tree, verifier: names as the command
        takes them (`draftsmith decode --help` lists them), or objects of your own; what is left out is chosen to
        suit. datastore: a file to retrieve from. temperature (0 is greedy), top_p, top_k (0 keeps every token) and
        min_p: where None, as the target's generation_config.json says, else greedy.
        stop: texts that end an output behind the token that completes one. batch_size: prompts decoded together.
        on_tokens(row of its batch, ids, from_draft): called after each step with the tokens just added.
        Raises InputError, one line, for what is not possible.
        """
        check_integers(max_new_tokens=max_new_tokens, seed=seed, batch_size=batch_size)
        check_sampling_numbers(temperature=temperature, top_p=top_p, top_k=top_k, min_p=min_p)
        check_flags(ignore_eos=ignore_eos)
        stops = texts("stop", stop)
        if on_tokens is not None and not callable(on_tokens):
            raise InputError(f"on_tokens: expected a function, got {on_tokens!r}")
        decoding = self.decoding(draft=draft, proposer=proposer, tree=tree, verifier=verifier, datastore=datastore)
        if batch_size < 1:
            raise InputError(f"batch_size: {batch_size} must be at least 1")
        check_seed(seed)
        try:
            settings = self.settings(
                self.sampling(temperature=temperature, top_k=top_k, top_p=top_p, min_p=min_p).sampling,
                max_new_tokens=max_new_tokens,
                seed=seed,
                stop=stops,
                ignore_eos=ignore_eos,
            )
        except ValueError as error:
            raise InputError(str(error)) from None
        one = is_one_prompt(prompts)
        if one:
            named = [Prompt("prompt", "default", tuple(self.encode(prompts)))]  # type: ignore[arg-type]
        else:
            repeats: Counter[str] = Counter()
            encoded = [self.encode(each, f"prompts[{i}]") for i, each in enumerate(prompts)]  # type: ignore[arg-type]
            named = [Prompt(unique_id(content_id(ids), repeats), "default", tuple(ids)) for ids in encoded]
        room = self.room(max_new_tokens)
        for number, prompt in enumerate(named):
            where = "prompt" if one else f"prompts[{number}]"
            if not prompt.ids:
                raise InputError(f"{where}: is empty and the tokenizer adds no BOS; write some text")
            if room is not None and len(prompt.ids) > room:
                raise InputError(f"{where}: has {len(prompt.ids)} tokens, more than the {room} that fit")
        outputs: list[Output] = []
        for start in range(0, len(named), batch_size):
            requests = [OutputRequest(prompt) for prompt in named[start : start + batch_size]]
            outputs += self.decode_batch(decoding.decoder, requests, settings, on_tokens)
        return outputs[0] if one else outputs

    def encode(self, prompt: OnePrompt, where: str = "prompt") -> list[int]:
        """Token ids of a text (with the special tokens that the tokenizer adds), of a chat, or as they are."""
        if isinstance(prompt, str):
            return encode_text(self.tokenizer, whole(prompt, "prompt", where))
        items: Any = prompt.tolist() if hasattr(prompt, "tolist") else prompt  # an array or tensor of ids
        size = vocabulary_size(self.target)
        if isinstance(items, Sequence) and not isinstance(items, bytes):
            if items and isinstance(items[0], Mapping):
                return encode_messages(self.tokenizer, check_messages(list(items), where), where)
            if all(is_integer(item) and 0 <= item < size for item in items):
                return [int(item) for item in items]
        raise InputError(f"{where}: expected a text, a chat or token ids from 0 to {size - 1}")

    def room(self, max_new_tokens: int) -> int | None:
        """The longest prompt, in tokens, that leaves room for `max_new_tokens` in every model; None without a limit."""
        if self.context is None:
            return None
        if self.context <= max_new_tokens:
            raise InputError(f"max_new_tokens: {max_new_tokens} leaves no room in a context of {self.context}")
        return self.context - max_new_tokens

    def sampling(
        self, *, temperature: float | None, top_k: int | None, top_p: float | None, min_p: float | None
    ) -> ResolvedSampling:
        """The distribution to draw from: what is None is as the target's generation_config.json says, else greedy."""
        return resolve_sampling(
            self.target_name, self.target, temperature=temperature, top_k=top_k, top_p=top_p, min_p=min_p
        )

    def settings(
        self, sampling: Sampling, *, max_new_tokens: int, seed: int, stop: Sequence[str], ignore_eos: bool
    ) -> Settings:
        """Settings with the target's own EOS ids, unless they are to be ignored."""
        if max_new_tokens < 1:
            raise InputError(f"max_new_tokens: {max_new_tokens} must be at least 1")
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
        """A decoder for this method of drafting, chosen as `generate` says; the last call's where it is the same."""
        names = None if draft is None else tuple(texts("draft", draft))
        key = (names, proposer, tree, verifier, datastore)
        if self._last is None or self._last[0] != key:
            self._last = None
            self._last = (key, self._decoding(self._chosen(names), proposer, tree, verifier, datastore))
        return self._last[1]

    def _chosen(self, names: Sequence[str] | None) -> dict[str, Draft]:
        if names is None:
            return self.drafts
        for name in names:
            if name not in self.drafts:
                raise InputError(
                    f"draft: {name!r} is not a draft of this pair; it has {', '.join(self.drafts) or 'none'}"
                )
        return {name: self.drafts[name] for name in names}

    def _decoding(
        self,
        drafts: dict[str, Draft],
        proposer: str | Proposer | None,
        tree: str | TreeShape | None,
        verifier: str | Verifier | None,
        datastore: str | SuffixIndex | None,
    ) -> Decoding:
        how: dict[str, Any] = {"fast": self._fast, "compile": self._compile}
        if not (tree is None or isinstance(tree, str | Tree | DynamicTree)):
            raise InputError(f"tree: expected a spec such as chain:4, or a Tree, got {tree!r}")
        if not (verifier is None or isinstance(verifier, str | Verifier)):
            raise InputError(
                f"verifier: expected a name, or a Verifier with your function as its `run`, got {verifier!r}"
            )
        if isinstance(proposer, type) or not (
            proposer is None or isinstance(proposer, str) or hasattr(proposer, "start")
        ):
            raise InputError(f"proposer: expected a name, or an object that follows decode.Proposer, got {proposer!r}")
        try:
            if proposer is None or isinstance(proposer, str):
                kinds = {name: kind_of(each) for name, each in drafts.items()}
                heads = min((count for each in drafts.values() if (count := depth_limit(each))), default=None)
                method = choose_method(kinds, proposer, tree, verifier, datastore=datastore is not None, heads=heads)
                if method is None:
                    return Decoding(SpeculativeDecoder(self.target, **how), None, {}, None)
                index = datastore
                if isinstance(index, str):
                    index = SuffixIndex.build(read_documents(index, self.tokenizer))
                made = _make_proposer(method.proposer, list(drafts.values()), index, self._fast)
                decoder = SpeculativeDecoder(self.target, made, method.shape, method.verifier, **how)
            else:
                index = None
                decoder = SpeculativeDecoder(self.target, proposer, tree, verifier, **how)
                spec = tree if isinstance(tree, str) else f"{decoder.tree.size} nodes"
                method = DraftingMethod(type(proposer).__name__, spec, decoder.tree, decoder.verifier)
        except ValueError as error:
            raise InputError(str(error)) from None
        return Decoding(decoder, method, drafts, index)

    def decode_batch(
        self,
        decoder: SpeculativeDecoder,
        requests: Sequence[OutputRequest],
        settings: Settings,
        on_tokens: OnTokens | None = None,
    ) -> Iterator[Output]:
        """Outputs of requests that are decoded together, in their order."""
        ends = [0.0] * len(requests)

        def note(row: int, ids: list[int], from_draft: list[bool]) -> None:
            ends[row] = time.perf_counter()
            if on_tokens is not None:
                on_tokens(row, ids, from_draft)

        seeds = [row_seed(settings.seed, f"{each.prompt.id}/{each.sample_index}") for each in requests]
        began = time.perf_counter()
        batch = decoder.generate(
            [each.prompt.ids for each in requests],
            settings.sampling,
            settings.max_new_tokens,
            [generator(seed) for seed in seeds],
            settings.eos,
            note,
            settings.stop,
        )
        for request, generation, end in zip(requests, batch.generations, ends, strict=True):
            yield make_output(request, generation, batch, end - began - batch.prefill_s, self.tokenizer)


def _make_proposer(name: str, drafts: list[Draft], index: SuffixIndex | None, fast: bool) -> Proposer:
    kind = PROPOSERS[name]
    match kind.needs:
        case "models":
            return kind.make(drafts, fast=fast)
        case "head":
            return kind.make(drafts[0], fast=fast)
        case "index" | "nothing":
            return kind.make(index)
