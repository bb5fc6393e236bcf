"""A target and its drafts, loaded, checked and ready to decode:
`ds.load_pair(...).generate(...)`.
"""

import dataclasses
import os
from collections.abc import Generator, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from inspect import signature
from itertools import chain, product
from pathlib import Path
from queue import SimpleQueue
from secrets import randbits
from threading import Event, Thread, current_thread
from typing import Annotated, Any, TypedDict, TypeVar, Unpack, overload

from pydantic import BeforeValidator
from transformers import PreTrainedModel

from draftsmith.config import DecodeConfig
from draftsmith.core.errors import InputError, check_keywords
from draftsmith.core.io import read_tree_file
from draftsmith.core.models import dtype_name, eos_ids, fingerprint
from draftsmith.core.options import (
    AtLeast0,
    AtLeast1,
    PenaltyOptions,
    Seed,
    Text,
    configured,
    options,
)
from draftsmith.core.prompts import Prompt
from draftsmith.core.records import read_record
from draftsmith.core.retrieval_text import read_documents
from draftsmith.core.sampling import generator, row_seed
from draftsmith.core.settings import Sampling, resolve_sampling, sampling_options
from draftsmith.core.tokenization import decode_text
from draftsmith.decode import (
    PROPOSERS,
    Proposer,
    SpeculativeDecoder,
    StopStrings,
    TreeShape,
    Verifier,
    Written,
    parse_tree,
    take_over,
    tree_spec,
)
from draftsmith.decode.batch_run import OnTokens
from draftsmith.decode.method import OWN_TREE, Method
from draftsmith.decode.propose.choosing import UNKNOWN, ChoosingProposer, Costs, chooser
from draftsmith.decode.propose.sources import choose_proposer, make_proposer
from draftsmith.decode.suffix_index import SuffixIndex
from draftsmith.decode.verify import find_verifier
from draftsmith.drafts.draft_sources import JOINED
from draftsmith.drafts.load import Draft, LoadedModels, draft_fingerprint, kind_of, load_models
from draftsmith.kept_costs import kept_costs
from draftsmith.outputs import Detokenizer, Output, Piece, cut_at_stop
from draftsmith.python_prompts import OnePrompt, PromptEncoder

PathOrName = str | os.PathLike[str]
Request = tuple[Prompt, int]  # a prompt and the index of its sample


class GenerateOptions(TypedDict, total=False):
    """The options of `Pair.generate`."""

    draft: str | Sequence[str] | None
    proposer: str | Proposer | None
    tree: Written | TreeShape | None
    verifier: str | Verifier | None
    datastore: str | SuffixIndex | None
    raw: bool
    chat_template: str | None
    tools: list[object] | None
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
    include_stop: bool
    eos_token_id: int | Sequence[int] | None
    ignore_eos: bool
    batch_size: int
    on_tokens: OnTokens | None


T = TypeVar("T")
_Several = Annotated[
    list[T], BeforeValidator(lambda value: [value] if isinstance(value, str | int) else value)
]


@options
class GenerateConfig(PenaltyOptions):
    """Options of `generate`, within the bounds of the command."""

    draft: _Several[str] | None = None
    proposer: Any = None
    tree: Any = None
    verifier: Any = None
    datastore: Any = None
    raw: bool = False
    chat_template: str | None = None
    tools: list[object] | None = None
    max_new_tokens: AtLeast1 = 128
    num_samples: AtLeast1 | None = None
    batch_size: AtLeast1 = 8
    seed: Seed = field(default_factory=partial(randbits, 63))
    stop: _Several[Text] | None = None
    include_stop: bool = False
    eos_token_id: _Several[AtLeast0] | None = None
    ignore_eos: bool = False
    on_tokens: OnTokens | None = None


@dataclass(frozen=True)
class Decoding:
    """A decoder and what drafts in it.

    name: "none" for the target alone, which has no method. index: text that retrieval drafts from.
    """

    decoder: SpeculativeDecoder
    name: str = "none"
    method: Method | None = None
    drafts: Sequence[Draft] = ()
    index: SuffixIndex | None = None

    @property
    def lossless(self) -> bool:
        """Whether the outputs follow the target's own distribution."""
        return self.method is None or self.method.lossless

    def identity(self) -> list[object]:
        """Return hashes of everything that may change outputs. This reads all weights."""
        target = self.decoder.target
        decoder = self.decoder
        return [
            [self.name, dataclasses.asdict(decoder.tree), decoder.verifier.name],
            fingerprint(target),
            dtype_name(target),
            [draft_fingerprint(draft) for draft in self.drafts],
            self.index and self.index.digest,
        ]


@dataclass(frozen=True)
class Job:
    """What one call decodes, and how."""

    decoder: SpeculativeDecoder
    requests: Sequence[Request]
    sampling: Sampling
    options: DecodeConfig | GenerateConfig

    def check(self) -> None:
        """Raise InputError for a request that does not fit."""
        prompts = [prompt.ids for prompt, _ in self.requests]
        try:
            self.decoder.check(prompts, self.options.max_new_tokens)
        except ValueError as error:
            raise InputError(str(error)) from None


def load_pair(
    target: PathOrName,
    draft: PathOrName | Sequence[PathOrName] | Mapping[str, PathOrName] = (),
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
    lossless). Raise InputError for what cannot be loaded or does not fit the target.
    """
    sources: Mapping[str, str] | list[str]
    if isinstance(draft, Mapping):
        sources = {name: os.fspath(source) for name, source in draft.items()}
    else:
        several = [draft] if isinstance(draft, str | os.PathLike) else draft
        sources = [os.fspath(source) for source in several]
    known = ["draft", *list(signature(load_models).parameters)[2:]]
    check_keywords(options, known, "load_pair")
    return Pair(load_models(os.fspath(target), sources, **options), fast=fast, compile=compile)


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
        self._compile = compile
        self._costs: dict[tuple[str, ...], Costs] = {}
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
    def generate(
        self, prompts: OnePrompt | Sequence[OnePrompt], **options: object
    ) -> Output | list[Output]:
        """Continue one prompt, or each of a list. Return an `Output`, or a list of them in order.

        With the same seed, `draftsmith decode` gives the same outputs. An output does not depend on
        its batch. Raise InputError for an empty prompt and for options that do not go together.

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
        stop: texts; the output's text ends before the first one, or behind it with include_stop.
        eos_token_id: tokens that end an output; default the target's own. ignore_eos: none does.
        max_new_tokens: the longest output, 128. seed: drawn by default; `Output.seed` has it.
        batch_size: prompts decoded together, 8.
        on_tokens(row of its batch, ids, from_draft): called after each step with its new tokens.
        """
        config = configured(GenerateConfig, None, dict(options))
        requests, one = self._requests(prompts, config)
        job = self._job(requests, config)
        outputs = list(chain.from_iterable(self.decode(job, config.on_tokens)))
        return outputs[0] if one and config.num_samples is None else outputs

    def stream(
        self, prompt: OnePrompt, **options: Unpack[GenerateOptions]
    ) -> Generator[Piece, None, Output]:
        """Continue one prompt as `generate` does; yield its text piece by piece, and return its
        output.

        for piece in pair.stream("Return the"): print(piece, end="")

        Raise InputError for several prompts or outputs.
        """
        config = configured(GenerateConfig, None, dict(options))
        requests, one = self._requests(prompt, config)
        if not one or len(requests) > 1:
            raise InputError("prompt: stream yields the text of one output; use generate")
        if config.on_tokens is not None:
            raise InputError("on_tokens: stream yields the pieces; use generate")
        return self.pieces(self._job(requests, config))

    def _requests(self, prompts: Any, config: GenerateConfig) -> tuple[list[Request], bool]:
        encoder = PromptEncoder(self.tokenizer, config.raw, config.chat_template, config.tools)
        encoded, one = encoder.read(prompts)
        return list(product(encoded, range(config.num_samples or 1))), one

    def _job(self, requests: Sequence[Request], config: GenerateConfig) -> Job:
        decoder = self.decoding(
            draft=config.draft,
            proposer=config.proposer,
            tree=config.tree,
            verifier=config.verifier,
            datastore=config.datastore,
        ).decoder
        given = sampling_options(config)
        sampling = resolve_sampling(self.target_name, self.target, given).sampling
        job = Job(decoder, requests, sampling, config)
        job.check()
        return job

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
            kind = PROPOSERS.get(proposer) if isinstance(proposer, str) else None
            drafting = kind is None or kind.draws or proposer == "prompt_lookup"
            draft = list(self.drafts) if drafting and proposer != "none" else []
        names = [draft] if isinstance(draft, str) else list(draft)
        for name in names:
            if name not in self.drafts:
                known = ", ".join(self.drafts) or "none"
                raise InputError(f"draft: {name!r} is not a draft of this pair; it has {known}")
        key = (*names, proposer, tree, verifier, datastore)
        if self._last is not None and self._last[0] == key:
            return self._last[1]
        self._last = None
        if isinstance(proposer, str | None):
            kinds = {name: kind_of(self.drafts[name]) for name in names}
            proposer = choose_proposer(kinds, proposer, retrieves=datastore is not None)
        decoding = self.decoding_by(proposer, names, tree, verifier, datastore)
        self._last = key, decoding
        return decoding

    def decoding_by(
        self,
        chosen: str | Proposer,
        names: Sequence[str] = (),
        tree: Written | TreeShape | None = None,
        verifier: str | Verifier | None = None,
        datastore: str | SuffixIndex | None = None,
    ) -> Decoding:
        """Return a decoder for what `choose_proposer` returned, over the drafts of these names.
        Raise InputError for a tree or rule that does not fit.
        """
        drafts = [self.drafts[name] for name in names]
        if isinstance(datastore, str):
            datastore = SuffixIndex.build(read_documents(datastore, self.tokenizer))
        if chosen == "none" or planned_without_a_draft(tree, self.target, drafts):
            if chosen == "none" and tree is not None:
                raise InputError("tree: needs a proposer; add --draft or --proposer")
            return Decoding(self._decoder(verifier=verifier))
        try:
            if isinstance(chosen, str):
                name = chosen
                proposer = make_proposer(chosen, drafts, datastore, fast=self._fast)
            else:
                name = type(chosen).__name__
                proposer = chosen
            if tree is None or tree == "auto":
                # A proposer of the caller's own drafts as it was made.
                named = isinstance(chosen, str)
                found = self._chooser(proposer, names, drafts, verifier) if named else None
                tree = None if found is None else "auto"
                proposer = found or proposer
            shape = None if tree == "auto" else tree
            if shape is not None and not isinstance(shape, TreeShape):
                tree = tree_spec(shape, proposer.deepest)
                shape = parse_tree(tree, read_tree_file)
            decoder = self._decoder(proposer, shape, verifier)
        except ValueError as error:
            raise InputError(str(error)) from None
        shape = decoder.tree
        if tree is None:
            tree = f"chain:{shape.depth}" if shape.is_chain else OWN_TREE
        written = tree if isinstance(tree, str) else f"{shape.size} nodes"
        method = Method(written, shape, decoder.verifier)
        return Decoding(decoder, name, method, drafts, datastore)

    def _chooser(
        self,
        proposer: Proposer,
        names: Sequence[str],
        drafts: Sequence[Draft],
        verifier: str | Verifier | None,
    ) -> ChoosingProposer | None:
        if self._compile:
            return None
        pair = (proposer.name, *names)
        if pair not in self._costs:
            self._costs[pair] = kept_costs(self.target, drafts, proposer)
        rule = None if verifier is None else find_verifier(verifier)
        card = read_record(Path(names[0])) if names else {}
        prior = card.get("heldout_alpha_1") or UNKNOWN
        return chooser(proposer, self.target, rule, self._costs[pair], prior)

    def decode(self, job: Job, on_tokens: OnTokens | None = None) -> Iterator[list[Output]]:
        """Decode the requests batch by batch; yield the outputs of each batch in order. Raise
        InputError for a request that does not fit.
        """
        options = job.options
        ends: Sequence[int] = eos_ids(self.target)
        if isinstance(options, GenerateConfig) and options.eos_token_id is not None:
            ends = options.eos_token_id
        stop = StopStrings(self.tokenizer, options.stop) if options.stop else None
        for start in range(0, len(job.requests), options.batch_size):
            rows = job.requests[start : start + options.batch_size]
            seeds = [row_seed(options.seed, f"{prompt.id}/{sample}") for prompt, sample in rows]
            try:
                batch = job.decoder.generate(
                    [prompt.ids for prompt, _ in rows],
                    job.sampling,
                    options.max_new_tokens,
                    generators=[generator(seed) for seed in seeds],
                    eos_ids=() if options.ignore_eos else ends,
                    on_tokens=on_tokens,
                    stop=stop,
                )
            except ValueError as error:
                raise InputError(str(error)) from None
            outputs = []
            for (prompt, sample), generation in zip(rows, batch.generations, strict=True):
                text = decode_text(self.tokenizer, generation.output_ids)
                output = Output(
                    id=prompt.id,
                    sample_index=sample,
                    seed=options.seed,
                    prompt_ids=list(prompt.ids),
                    output_ids=generation.output_ids,
                    text=cut_at_stop(text, options.stop or (), include=options.include_stop),
                    finish_reason=generation.finish_reason,
                    from_draft=generation.from_draft,
                    stats=generation.stats,
                    prefill_s=batch.prefill_s / len(rows),
                    decode_s=batch.decode_s / len(rows),
                )
                outputs.append(output)
            yield outputs

    def pieces(self, job: Job) -> Generator[Piece, None, Output]:
        """Decode one request in a thread; yield its text piece by piece, and return its output.
        Raise what the decoder raises.
        """
        pieces: SimpleQueue[Piece | Output | BaseException] = SimpleQueue()
        text = Detokenizer(self.tokenizer, job.options.stop or ())
        abandoned = Event()

        def put(row: int, ids: list[int], from_draft: list[bool]) -> None:
            if abandoned.is_set():
                raise GeneratorExit
            for piece in text.add(ids, from_draft):
                pieces.put(piece)

        def decode() -> None:
            try:
                ((output,),) = self.decode(job, put)
                pieces.put(text.rest(output.text))
                pieces.put(output)
            except BaseException as error:
                pieces.put(error)

        thread = Thread(target=decode, daemon=True)
        thread.start()
        try:
            while True:
                piece = pieces.get()
                if isinstance(piece, Output):
                    return piece
                if isinstance(piece, BaseException):
                    raise piece
                if piece:
                    yield piece
        finally:
            abandoned.set()
            # The thread itself may collect a stream that was dropped.
            if current_thread() is not thread:
                thread.join()


def planned_without_a_draft(tree: object, target: PreTrainedModel, drafts: Sequence[Draft]) -> bool:
    """Whether `tree` is a plan (`auto:FILE`) by which the target alone is faster. Raise InputError
    for the plan of another pair.
    """
    if not isinstance(tree, str) or not tree.startswith("auto:"):
        return False
    plan = read_tree_file(tree.removeprefix("auto:"))
    if not isinstance(plan, dict):
        return False
    here = {"target": fingerprint(target)}
    if drafts:
        here["draft"] = draft_fingerprint(drafts[0])
    for what, row in plan.get("models", {}).items():
        planned = row["fingerprint"].removeprefix(JOINED) if row["parameters"] else None
        if planned != here.get(what):
            raise InputError(
                f"tree: {tree} was planned for another {what}, {row['name']}; plan for this pair"
            )
    return plan.get("pays") is False
