"""A target and its drafts, loaded, checked and ready to decode:
`ds.load_pair(...).generate(...)`.
"""

import dataclasses
import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import chain, product
from queue import SimpleQueue
from threading import Event, Thread, current_thread
from typing import Annotated, Any, Protocol, TypedDict, TypeVar, Unpack, overload

from pydantic import BeforeValidator

from draftsmith.config import DecodeConfig
from draftsmith.core.documents import read_documents
from draftsmith.core.errors import InputError
from draftsmith.core.io import JsonObject
from draftsmith.core.models import dtype_name, eos_ids, fingerprint
from draftsmith.core.options import AtLeast0, AtLeast1, PenaltyOptions, Seed, Text, options
from draftsmith.core.prompts import Prompt
from draftsmith.core.sampling import generator, row_seed
from draftsmith.core.settings import Sampling, resolve_sampling, sampling_options
from draftsmith.core.tokenization import decode_text
from draftsmith.decode import (
    PROPOSERS,
    DecodeStats,
    LookupFirst,
    Proposer,
    SpeculativeDecoder,
    StopStrings,
    TreeShape,
    Verifier,
    Written,
    take_over,
)
from draftsmith.decode.batch_run import OnTokens
from draftsmith.decode.propose.network_proposer import NetworkProposer
from draftsmith.decode.suffix_index import SuffixIndex
from draftsmith.detokenizer import Detokenizer, Piece
from draftsmith.drafting import DraftingMethod, choose_method, reads_drafts
from draftsmith.drafts.load import (
    Draft,
    LoadedModels,
    depth_limit,
    draft_fingerprint,
    kind_of,
    load_models,
)
from draftsmith.given_prompts import OnePrompt, PromptEncoder
from draftsmith.transformers_names import takes_their_names

PathOrName = str | os.PathLike[str]
Request = tuple[Prompt, int]  # a prompt and the index of its sample


class Listed(Protocol):
    """An array, a tensor or a series."""

    def tolist(self) -> Any:
        """Return it as a list."""


class GenerateOptions(TypedDict, total=False):
    """The options of `Pair.generate`, and those of transformers that are read under their names."""

    draft: str | Sequence[str] | None
    proposer: str | Proposer | None
    tree: Written | TreeShape | None
    verifier: str | Verifier | None
    datastore: str | SuffixIndex | None
    raw: bool
    chat_template: str | None
    tools: list[object] | None
    do_sample: bool | None
    temperature: float | None
    top_p: float | None
    top_k: int | None
    min_p: float | None
    repetition_penalty: float | None
    presence_penalty: float | None
    frequency_penalty: float | None
    max_new_tokens: int
    seed: int
    stop: str | Sequence[str] | None
    eos_token_id: int | Sequence[int] | None
    ignore_eos: bool
    batch_size: int
    on_tokens: OnTokens | None
    attention_mask: object
    generation_config: object
    pad_token_id: int | None
    stop_strings: str | Sequence[str]
    use_cache: bool


def _listed(value: object) -> object:
    alone = isinstance(value, str | int) and not isinstance(value, bool)
    return [value] if alone else value


T = TypeVar("T")
_Several = Annotated[list[T], BeforeValidator(_listed)]


@options
class _Generate(PenaltyOptions):
    """Options of `generate`, within the bounds of the command."""

    draft: _Several[str] | None = None
    proposer: Any = None
    tree: Any = None
    verifier: Any = None
    datastore: Any = None
    raw: bool = False
    chat_template: str | None = None
    tools: list[object] | None = None
    do_sample: bool | None = None
    max_new_tokens: AtLeast1 = 128
    num_samples: AtLeast1 | None = None
    batch_size: AtLeast1 = 8
    seed: Seed = 0
    stop: _Several[Text] | None = None
    eos_token_id: _Several[AtLeast0] | None = None
    ignore_eos: bool = False
    on_tokens: OnTokens | None = None


# Takes what `generate` takes, which pydantic converts.
_checked: Callable[..., _Generate] = _Generate


@dataclass(frozen=True)
class _Job:
    """What one call of `generate` or `stream` decodes, and how."""

    decoder: SpeculativeDecoder
    requests: list[Request]
    sampling: Sampling
    options: _Generate
    one: bool


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

    def row(self) -> JsonObject:
        """Return the row of `draftsmith decode --out`."""
        keys = ("id", "sample_index", "prompt_ids", "output_ids", "text", "finish_reason")
        row: JsonObject = {key: getattr(self, key) for key in keys}
        row["stats"] = {
            "target_calls": self.stats.target_calls,
            "proposed": self.stats.proposed,
            "accepted": self.stats.accepted,
            "accepted_by_depth": list(self.stats.accepted_by_depth),
            "seconds": self.prefill_s + self.decode_s,
        }
        return row


@dataclass(frozen=True)
class Decoding:
    """A decoder and how it drafts.

    method: None for the target alone. index: text that retrieval drafts from.
    """

    decoder: SpeculativeDecoder
    method: DraftingMethod | None = None
    drafts: dict[str, Draft] = dataclasses.field(default_factory=dict)
    index: SuffixIndex | None = None

    @property
    def lossless(self) -> bool:
        """Whether the outputs follow the target's own distribution."""
        return self.method is None or self.decoder.verifier.lossless

    def identity(self) -> list[object]:
        """Return hashes of everything that may change outputs. This reads all weights."""
        target = self.decoder.target
        how = None
        if (method := self.method) is not None:
            how = [method.name, dataclasses.asdict(method.shape), method.verifier.name]
        return [
            how,
            fingerprint(target),
            dtype_name(target),
            [draft_fingerprint(draft) for draft in self.drafts.values()],
            self.index and self.index.digest,
        ]


@takes_their_names(load_models)
def load_pair(
    target: PathOrName,
    draft: PathOrName | Sequence[PathOrName] | Mapping[str, PathOrName] | None = None,
    *,
    fast: bool = True,
    compile: bool | str = False,  # noqa: A002 (as in torch.compile)
    **options: Any,
) -> "Pair":
    """Load a target and any number of drafts, and check that they belong together.

    target, draft: local directories or hub names; a draft is a language model or a head. Several
    language models draft together; `{name: source}` gives them names. To copy beside the
    draft: `generate(..., proposer="prompt_lookup")`. fast: use packed weights and the lean
    Llama forward on a CPU; outputs change by rounding only. compile: record every step as a CUDA
    graph (True), or compile it first with a torch.compile backend (its name); the first outputs
    then take longer.

    options: `device` (auto, cpu, cuda or cuda:N), `dtype` (auto: float32 on a CPU, else the
    checkpoint's own; float32, bfloat16 or float16), `quantize` and `quantize_draft` ("nf4" for
    four-bit weights), `trust_remote_code`, `revision` (of the target on the hub), `chat_template`
    (a Jinja file in place of the target's own), `tokenizer` (the target's, if loaded already),
    `heterogeneous_vocab` (accept drafts of another tokenizer; they draft the tokens that both have,
    lossless). Those of transformers that mean something here, such as `device_map` and
    `torch_dtype`, are read. Raise InputError for what cannot be loaded or does not fit the target.
    """
    of_drafts: Any = () if draft is None else draft
    if not isinstance(draft, Mapping | list | tuple | None):
        of_drafts = [draft]
    elif isinstance(draft, Mapping):
        of_drafts = draft.values()
    sources = []
    for source in (target, *of_drafts):
        if not isinstance(source, str | os.PathLike):
            raise InputError(
                f"load_pair: expected names or directories, got {type(source).__name__}; pass "
                "models that you loaded to ds.SpeculativeDecoder"
            )
        sources.append(os.fspath(source))
    drafts: Mapping[str, str] | list[str] = sources[1:]
    if isinstance(draft, Mapping):
        drafts = dict(zip(draft, sources[1:], strict=True))
    return Pair(load_models(sources[0], drafts, **options), fast=fast, compile=compile)


class Pair:
    """A target, its tokenizer and its drafts by name, ready to decode. Made by `load_pair`."""

    def __init__(
        self,
        loaded: LoadedModels,
        *,
        fast: bool = True,
        compile: bool | str = False,  # noqa: A002
    ) -> None:
        self.target_name = loaded.target_name
        self.target = loaded.target
        self.tokenizer = loaded.tokenizer
        self.drafts = loaded.drafts
        self.context = loaded.context
        self._fast = fast
        self._decoder = partial(SpeculativeDecoder, self.target, fast=fast, compile=compile)
        if fast and not compile:
            take_over(self.target, *self.drafts.values())
        self._last: tuple[object, Decoding] | None = None

    def __repr__(self) -> str:
        kinds = {name: kind_of(draft) for name, draft in self.drafts.items()}
        return f"Pair({self.target_name!r}, drafts={kinds})"

    @overload
    def generate(  # type: ignore[overload-overlap]  # a text is also a sequence of texts
        self, prompts: OnePrompt, **options: Unpack[GenerateOptions]
    ) -> Output: ...
    @overload
    def generate(
        self, prompts: Sequence[OnePrompt], **options: Unpack[GenerateOptions]
    ) -> list[Output]: ...
    @overload
    def generate(
        self,
        prompts: OnePrompt | Sequence[OnePrompt],
        *,
        num_samples: int,
        **options: Unpack[GenerateOptions],
    ) -> list[Output]: ...
    @overload
    def generate(
        self,
        prompts: OnePrompt | Sequence[OnePrompt],
        *,
        num_return_sequences: int,
        **options: Unpack[GenerateOptions],
    ) -> list[Output]: ...
    @overload
    def generate(
        self, *, messages: Sequence[Mapping[str, object]], **options: Unpack[GenerateOptions]
    ) -> Output: ...
    @overload
    def generate(self, prompts: Listed, **options: Unpack[GenerateOptions]) -> Any: ...
    @overload
    def generate(
        self, *, input_ids: Listed | Sequence[object], **options: Unpack[GenerateOptions]
    ) -> Any: ...
    @takes_their_names(_Generate)  # type: ignore[misc]  # and so do the overloads
    def generate(
        self, prompts: OnePrompt | Sequence[OnePrompt], **options: object
    ) -> Output | list[Output]:
        """Continue one prompt, or each of a list. Return an `Output`, or a list of them in order.

        With the same seed, `draftsmith decode` gives the same outputs. An output does not depend on
        its batch. Options of transformers' `generate` that mean something here are read, and so is
        what a tokenizer returns. Raise InputError for options that do not go together.

        prompts: texts, token ids or chats, which are lists of {"role", "content"} or dicts with
        `messages`. To a target with a chat template, a text is what the user says.
        raw: continue texts as they are, without the chat template.
        chat_template, tools: a Jinja file or its text in place of the target's, and the tools of
        chats.
        num_samples: outputs per prompt, in a list; default one, without a list.
        draft: names of the pair's drafts to use; default all, [] for none.
        proposer, tree, verifier: names as in `draftsmith decode --help`, or objects of your own;
        default: what suits the drafts. prompt_lookup copies beside the drafts. A tree may be a
        depth, or a tuple of children by level.
        datastore: file to retrieve from.
        temperature, top_p, top_k, min_p: default as in the target's generation_config.json, else
        greedy. Temperature 0 is greedy; top_k 0 keeps every token.
        repetition_penalty, presence_penalty, frequency_penalty: of tokens in prompt and answer (as
        transformers), and in the answer (as vLLM); default as in generation_config.json, else off.
        do_sample: False is temperature 0; True is temperature 1 if nothing else names one.
        stop: texts; an output ends after the token that completes one.
        eos_token_id: tokens that end an output; default the target's own. ignore_eos: none does.
        max_new_tokens: the longest output, 128. seed: of the outputs, 0.
        batch_size: prompts decoded together, 8.
        on_tokens(row of its batch, ids, from_draft): called after each step with its new tokens.
        """
        job = self._job(prompts, options)
        on_tokens = job.options.on_tokens
        batches = self.decode(job.decoder, job.requests, job.sampling, job.options, on_tokens)
        outputs = list(chain.from_iterable(batches))
        return outputs[0] if job.one and job.options.num_samples is None else outputs

    @overload
    def stream(
        self, prompts: OnePrompt | Listed, **options: Unpack[GenerateOptions]
    ) -> Iterator[Piece]: ...
    @overload
    def stream(
        self, *, messages: Sequence[Mapping[str, object]], **options: Unpack[GenerateOptions]
    ) -> Iterator[Piece]: ...
    @takes_their_names(_Generate)  # type: ignore[misc]  # as above
    def stream(self, prompts: OnePrompt, **options: Unpack[GenerateOptions]) -> Iterator[Piece]:
        """Continue one prompt as `generate` does; yield its text piece by piece.

        for piece in pair.stream("Return the"): print(piece, end="")

        Raise InputError for several prompts or outputs, and for `on_tokens`.
        """
        job = self._job(prompts, options)
        if len(job.requests) != 1 or job.options.on_tokens is not None:
            raise InputError(
                "prompts, num_samples, on_tokens: stream yields the text of one output; "
                "use generate"
            )
        return self._pieces(job)

    def _job(self, prompts: Any, asked: Mapping[str, object]) -> _Job:
        """Return what to decode. Raise InputError for whatever is wrong with it."""
        options = _checked(**asked)
        given = sampling_options(options)
        if options.do_sample is False:
            if options.temperature:
                raise InputError(
                    f"do_sample: False goes with temperature 0, not {options.temperature:g}"
                )
            given["temperature"] = 0.0
        decoder = self.decoding(
            draft=options.draft,
            proposer=options.proposer,
            tree=options.tree,
            verifier=options.verifier,
            datastore=options.datastore,
        ).decoder
        sampling = resolve_sampling(
            self.target_name,
            self.target,
            given,
            default_temperature=1.0 if options.do_sample else 0.0,
        ).sampling
        encoder = PromptEncoder(self.tokenizer, options.raw, options.chat_template, options.tools)
        encoded, one = encoder.read(prompts)
        try:
            decoder.check([prompt.ids for prompt in encoded], options.max_new_tokens)
        except ValueError as error:
            raise InputError(str(error)) from None
        requests = list(product(encoded, range(options.num_samples or 1)))
        return _Job(decoder, requests, sampling, options, one)

    def _pieces(self, job: _Job) -> Iterator[Piece]:
        pieces: SimpleQueue[Piece | BaseException | None] = SimpleQueue()
        text = Detokenizer(self.tokenizer)
        abandoned = Event()

        def put(row: int, ids: list[int], from_draft: list[bool]) -> None:
            if abandoned.is_set():
                raise GeneratorExit
            for piece in text.add(ids, from_draft):
                pieces.put(piece)

        def decode() -> None:
            try:
                list(self.decode(job.decoder, job.requests, job.sampling, job.options, put))
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
            # The thread itself may collect a stream that was dropped.
            if current_thread() is not thread:
                thread.join()

    def encode(self, prompt: OnePrompt, *, raw: bool = False) -> list[int]:
        """Return the token ids of a prompt, as `generate` reads it. Raise InputError for what is no
        prompt.
        """
        return PromptEncoder(self.tokenizer, raw).encode(prompt)

    def decoding(
        self,
        *,
        draft: str | Sequence[str] | None = None,
        proposer: str | Proposer | None = None,
        tree: Written | TreeShape | None = None,
        verifier: str | Verifier | None = None,
        datastore: str | SuffixIndex | None = None,
    ) -> Decoding:
        """Return a decoder for this method of drafting, as `generate` describes it.

        The last decoder is kept and returned again if the method is the same. Raise InputError for
        parts that do not go together.
        """
        if draft is None:
            draft = list(self.drafts) if reads_drafts(proposer) else []
        names = [draft] if isinstance(draft, str) else list(draft)
        for name in names:
            if name not in self.drafts:
                known = ", ".join(self.drafts) or "none"
                raise InputError(f"draft: {name!r} is not a draft of this pair; it has {known}")
        key = (*names, proposer, tree, verifier, datastore)
        if self._last is not None and self._last[0] == key:
            return self._last[1]
        self._last = None
        drafts = {name: self.drafts[name] for name in names}
        try:
            if proposer is None or isinstance(proposer, str):
                kinds = {name: kind_of(draft) for name, draft in drafts.items()}
                limits = [depth_limit(draft) for draft in drafts.values()]
                heads = min(filter(None, limits), default=None)
                retrieves = datastore is not None
                named = choose_method(
                    kinds, proposer, tree, verifier, datastore=retrieves, heads=heads
                )
                decoding = self._drafting(named, drafts, datastore)
            else:
                decoder = self._decoder(proposer, tree, verifier)
                spec = tree if isinstance(tree, str) else f"{decoder.tree.size} nodes"
                name = type(proposer).__name__
                method = DraftingMethod(name, spec, decoder.tree, decoder.verifier)
                decoding = Decoding(decoder, method, drafts)
        except ValueError as error:
            raise InputError(str(error)) from None
        self._last = key, decoding
        return decoding

    def _drafting(
        self,
        method: DraftingMethod | None,
        drafts: dict[str, Draft],
        datastore: str | SuffixIndex | None,
    ) -> Decoding:
        if method is None:
            return Decoding(self._decoder())
        if not isinstance(datastore, str | SuffixIndex | None):
            raise InputError(f"datastore: expected a file or a SuffixIndex, got {datastore!r}")
        if isinstance(datastore, str):
            datastore = SuffixIndex.build(read_documents(datastore, self.tokenizer))
        kind = PROPOSERS[method.proposer]
        models = list(drafts.values())
        if kind.needs in ("models", "head"):
            network = models if kind.needs == "models" else models[0]
            drafter = kind.make(network, fast=self._fast)
        else:
            drafter = kind.make(datastore)
        if method.lookup_first:
            assert isinstance(drafter, NetworkProposer)
            drafter = LookupFirst(drafter)
        decoder = self._decoder(drafter, method.shape, method.verifier)
        return Decoding(decoder, method, drafts, datastore)

    def decode(
        self,
        decoder: SpeculativeDecoder,
        requests: Sequence[Request],
        sampling: Sampling,
        options: DecodeConfig | _Generate,
        on_tokens: OnTokens | None = None,
    ) -> Iterator[list[Output]]:
        """Decode requests batch by batch; yield the outputs of each batch in order. Raise
        InputError for a request that does not fit.
        """
        ends = eos_ids(self.target)
        if isinstance(options, _Generate) and options.eos_token_id is not None:
            ends = tuple(options.eos_token_id)
        for start in range(0, len(requests), options.batch_size):
            rows = requests[start : start + options.batch_size]
            seeds = [row_seed(options.seed, f"{prompt.id}/{sample}") for prompt, sample in rows]
            try:
                batch = decoder.generate(
                    [prompt.ids for prompt, _ in rows],
                    sampling,
                    options.max_new_tokens,
                    generators=[generator(row) for row in seeds],
                    eos_ids=() if options.ignore_eos else ends,
                    on_tokens=on_tokens,
                    stop=StopStrings(self.tokenizer, options.stop) if options.stop else None,
                )
            except ValueError as error:
                raise InputError(str(error)) from None
            outputs = []
            for (prompt, sample), generation in zip(rows, batch.generations, strict=True):
                output = Output(
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
                outputs.append(output)
            yield outputs
