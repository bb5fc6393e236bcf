"""`draftsmith decode` behind its options: load, decode, write or print."""

import dataclasses
import json
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from decode import PROPOSERS, TreeShape
from drafts.load import draft_kind
from draftsmith.cli.decode_options import DecodeConfig
from draftsmith.cli.decode_summary import in_words, summarise
from draftsmith.cli.token_stream import Stream
from draftsmith.datastore import read_index
from draftsmith.drafting import choose_method, planned_without_a_draft
from draftsmith.outputs import Output, OutputRequest, Settings
from draftsmith.pair import Decoding, Pair, load_pair
from draftsmith_core.errors import InputError
from draftsmith_core.generation_defaults import sampling_options
from draftsmith_core.io import canonical_json, hash_json, jsonl, write_text_atomic, writing
from draftsmith_core.model_options import loading
from draftsmith_core.models import resolve_device
from draftsmith_core.processes import require_single_process, say, terminable
from draftsmith_core.progress import progress
from draftsmith_core.prompts import Prompt, PromptSet, read_prompts
from draftsmith_core.run_directory import hold, keeping
from draftsmith_core.sources import check_source
from draftsmith_core.tokenization import load_tokenizer

# Options that change outputs by rounding at most, and those that are in the identity of a run by what they name.
_NOT_IDENTITY = (
    "out",
    "device",
    "fast",
    "compile",
    "target",
    "draft",
    "proposer",
    "tree",
    "verifier",
    "datastore",
    "index",
    "prompts",
)


@dataclass(frozen=True)
class DecodeRun:
    """Everything that the batches of one command share."""

    config: DecodeConfig
    pair: Pair
    decoding: Decoding
    settings: Settings
    requests: list[OutputRequest]


def decode(config: DecodeConfig) -> tuple[dict[str, Any], list[str]]:
    """Decode what the options ask for; returns the summary of `--json`, and lines for a person."""
    require_single_process("decode")
    pair, decoding = _load(config)
    if not decoding.lossless and decoding.method is not None:
        _say(
            f"warning: verifier {decoding.method.verifier.name} is lossy; above temperature 0 the outputs do not "
            f"follow the target's distribution"
        )
    prompts = _prompts(config, pair)
    sampling = pair.sampling(**sampling_options(config))
    settings = pair.settings(
        sampling.sampling,
        max_new_tokens=config.max_new_tokens,
        seed=config.seed,
        stop=config.stop,
        ignore_eos=config.ignore_eos,
    )
    requests = [OutputRequest(prompt, k) for prompt in prompts.prompts for k in range(config.num_samples)]
    work = DecodeRun(config, pair, decoding, settings, requests)
    streamed = config.prompt is not None and config.out is None and config.num_samples == 1
    if config.out is not None:
        outputs = _to_file(Path(config.out), _identity(work, prompts), work)
    elif streamed:
        outputs = _to_terminal(work)
    else:
        outputs = list(_outputs(work))
    summary = summarise(config, decoding, sampling, prompts, outputs)
    return summary, in_words(summary, streamed)


def _say(line: str) -> None:
    say(f"draftsmith decode: {line}")


def _load(config: DecodeConfig) -> tuple[Pair, Decoding]:
    """The pair and its decoder; what can be refused from the options and small files is refused before loading."""
    if config.compile and resolve_device(config.device).type != "cuda":
        raise InputError("compile: CUDA graphs need a CUDA device, and there is none here; leave it out")
    kinds = {}
    for name in config.draft:
        check_source(name)
        kinds[f"{name}#2" if name in kinds else name] = draft_kind(name)
    tree = None if config.tree == "auto" else config.tree
    method = choose_method(kinds, config.proposer, tree, config.verifier, datastore=config.datastore is not None)
    if config.tree == "auto" and (len(config.draft) != 1 or config.proposer is not None):
        raise InputError("tree: auto plans for one --draft, without --proposer; name one, or write a tree")
    if method is None and tree is not None and planned_without_a_draft(tree):
        _say(f"{tree}: no draft is faster here, so the target decodes alone")
        tree = None
    drafts = config.draft if method is not None else []
    if method is not None and drafts and PROPOSERS[method.proposer].needs not in ("models", "head"):
        raise InputError(
            f"proposer: {method.proposer} uses no draft, and --draft {drafts[0]} was given; leave out one of them"
        )
    if config.quantize_draft is not None and (method is None or PROPOSERS[method.proposer].needs != "models"):
        raise InputError("quantize_draft: applies to draft models, and none drafts here; leave it out")
    if config.index is not None and config.datastore is None:
        raise InputError("index: keeps what was made of --datastore; name that too, or leave out --index")
    tokenizer = load_tokenizer(config.target, config.trust_remote_code, config.chat_template)
    index = None if config.datastore is None else read_index(config.datastore, config.index, tokenizer)
    pair = load_pair(
        config.target,
        drafts,
        **loading(config),
        quantize=config.quantize,
        quantize_draft=config.quantize_draft,
        tokenizer=tokenizer,
        heterogeneous_vocab=config.heterogeneous_vocab,
        fast=config.fast,
        compile=config.compile,
    )
    shape = _plan(config, pair) if config.tree == "auto" else tree
    if method is None or (config.tree == "auto" and shape is None):
        return pair, pair.decoding(proposer="none")
    return pair, pair.decoding(proposer=config.proposer, tree=shape, verifier=config.verifier, datastore=index)


def _plan(config: DecodeConfig, pair: Pair) -> TreeShape | None:
    """Plan on the first prompts, say what was found, and return its tree; None where no draft is faster."""
    from eval.plan import Planner, plan_now, planned_now, planned_tree

    sampling = pair.sampling(**sampling_options(config)).sampling
    (draft,) = pair.drafts.values()
    prompts, tokens = _prompts(config, pair).prompts, config.max_new_tokens
    found = plan_now(Planner(pair.target, draft, prompts, sampling, config.batch_size, tokens, config.seed))
    _say(f"{planned_now(found)}; `draftsmith plan` keeps a plan")
    return None if found["pays"] is False else planned_tree(found)


def _prompts(config: DecodeConfig, pair: Pair) -> PromptSet:
    room = pair.room(config.max_new_tokens)
    if config.prompts is not None:
        limits: dict[str, Any] = {"max_tokens": room, "limit": config.max_prompts}
        return read_prompts(config.prompts, pair.tokenizer, prompt_tokens=config.prompt_tokens, **limits)
    assert config.prompt is not None
    chat = pair.tokenizer.chat_template is not None and not config.raw
    ids = pair.encode([{"role": "user", "content": config.prompt}] if chat else config.prompt)
    if not ids:
        raise InputError("--prompt: is empty and the tokenizer adds no BOS; write some text")
    if room is not None and len(ids) > room:
        raise InputError(f"--prompt: has {len(ids)} tokens, more than the {room} that fit")
    if chat:
        _say("--prompt is asked as a user's turn of the chat template; --raw continues it")
    return PromptSet("--prompt", (Prompt("prompt", "default", tuple(ids)),), (), 1)


def _outputs(work: DecodeRun, finished: int = 0) -> Iterator[Output]:
    """Outputs of all requests from `finished` on, in order, batch by batch."""
    size = work.config.batch_size
    with progress("decode", len(work.requests), finished) as advance:
        for start in range(finished, len(work.requests), size):
            requests = work.requests[start : start + size]
            yield from work.pair.decode_batch(work.decoding.decoder, requests, work.settings)
            advance(len(requests), "")


def _identity(work: DecodeRun, prompts: PromptSet) -> str:
    """What a run that was interrupted must agree in with the one that continues it."""
    options = {key: value for key, value in dataclasses.asdict(work.config).items() if key not in _NOT_IDENTITY}
    options |= dataclasses.asdict(work.settings.sampling)
    return hash_json([options, prompts.digest, work.decoding.identity()])


def _to_file(out: Path, identity: str, work: DecodeRun) -> list[Output]:
    """Outputs go to `.OUT.partial` batch by batch; their rows become OUT at the end. A killed run continues it."""
    partial = out.with_name(f".{out.name}.partial")

    def kept() -> bool:
        return partial.is_file() and len(partial.read_bytes().splitlines()) > 1

    with terminable(), hold(out, file=True), keeping(kept):
        outputs = _finished(partial, identity, work.config.batch_size)
        head = canonical_json({"identity": identity}) + "\n"
        write_text_atomic(partial, head + jsonl(dataclasses.asdict(output) for output in outputs))
        with writing(out), partial.open("a", encoding="utf-8") as file:
            for output in _outputs(work, len(outputs)):
                outputs.append(output)
                file.write(jsonl([dataclasses.asdict(output)]))
                file.flush()
        write_text_atomic(out, jsonl(output.row() for output in outputs))
        partial.unlink()
    return outputs


def _finished(partial: Path, identity: str, batch_size: int) -> list[Output]:
    """Outputs of whole batches that an interrupted run of the same command left."""
    if not partial.exists():
        return []
    lines = partial.read_text(encoding="utf-8", errors="replace").split("\n")
    if lines[0] != canonical_json({"identity": identity}):
        return []
    outputs = [Output.from_json(json.loads(line)) for line in lines[1:-1]]
    return outputs[: len(outputs) // batch_size * batch_size]


def _to_terminal(work: DecodeRun) -> list[Output]:
    stream = Stream(work.pair.tokenizer, sys.stdout)

    def show(row: int, ids: list[int], from_draft: list[bool]) -> None:
        stream.add(ids, from_draft)

    outputs = list(work.pair.decode_batch(work.decoding.decoder, work.requests, work.settings, show))
    stream.close()
    return outputs
