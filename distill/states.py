"""States of an engine: is it to be trusted, and what do the rows of a set lack.

Legend: T tokens, L layers, H hidden size.
"""

from collections.abc import Iterable, Iterator, Sequence
from contextlib import closing
from itertools import chain, count, islice
from pathlib import Path
from statistics import mean

import torch
from torch import Tensor

from draftsmith.core.distilled_sets import set_rows
from draftsmith.core.errors import RunError
from draftsmith.core.hidden_states import body_states, layout_of
from draftsmith.core.io import JsonObject, read_manifest
from draftsmith.core.models import load_model
from draftsmith.core.ranks import is_main, on_main, say
from draftsmith.core.settings import Sampling, loading, tokenizing
from draftsmith.core.state_store import StateFiles, checkpoint_files
from draftsmith.core.tokenization import check_vocabulary, encode_text, load_tokenizer
from draftsmith.distill.config import DistillConfig, StatesConfig
from draftsmith.distill.engines import ENGINES, Answer, AnswerRequest, Engine, Failed, Key

# A text to compare states on, its tokens, and those of a piece.
_TEXT = "The states of a text depend on its tokens alone, not on who else is read beside them. " * 8
_TOKENS = 80
_PIECE = 64
# A larger target is not loaded for a comparison.
_LARGEST = 16 * 2**30
_TOGETHER = 1024
_GREEDY = Sampling(temperature=0.0)


def ask(engine: Engine, groups: Iterable[Sequence[Sequence[int]]], first: int = 1) -> None:
    """Let the engine read groups of rows, and write the states of all but their last token. Of an
    empty group there is nothing to ask yet.

    first: number of the first row; below 0 for `probes`. Raise RunError for a row without states.
    """
    states = engine.states
    assert states is not None
    numbers = count(first)

    def requests() -> Iterator[Sequence[AnswerRequest]]:
        for group in groups:
            rows = {next(numbers): ids for ids in group}
            states.rows |= rows
            yield [
                AnswerRequest(Key(number, 0, 0), tuple(ids[:-1]), 0, _GREEDY, 1)
                for number, ids in rows.items()
            ]

    def done(request: AnswerRequest, answer: Answer | Failed) -> None:
        if isinstance(answer, Failed):
            tokens = len(request.prompt_ids) + 1
            raise RunError(f"states: a row of {tokens} tokens has none: {answer.reason}")

    engine.run(requests(), done)


def servers(config: DistillConfig, layers: Sequence[int], files: StateFiles) -> Engine:
    """Servers that write states of these layers into `files`, checked by every process.

    layers: ascending; the last is the raw last one.
    """
    engine = ENGINES[config.engine](config, load_tokenizer(config.target, **tokenizing(config)))
    assert engine.states is not None
    engine.states.layers = list(layers)
    engine.states.files = files
    # One after the other: a row that is asked for alone must be alone.
    on_main(lambda: check(config, engine))
    if not is_main():
        check(config, engine, local=False)
    return engine


def check(config: DistillConfig, engine: Engine, *, local: bool = True) -> None:
    """Begin to keep states. Raise RunError unless those of a text are the same from every server,
    whole and in pieces, and those of a local forward where the target is small (`local`).
    """
    states = engine.states
    assert states is not None
    whole = encode_text(load_tokenizer(config.target, **tokenizing(config)), _TEXT)[:_TOKENS]
    first: Tensor | None = None
    for server in engine.one_by_one():
        ask(engine, [[whole]], first=-1)
        ask(engine, [[whole, whole[:_PIECE]]], first=-3)
        alone, beside, piece = [states.probes[number] for number in (-1, -3, -2)]
        first = alone if first is None else first
        # Of 16 bits, which round; another layer's states are further away.
        tolerance = 1e-3 if alone.dtype == torch.float32 else 0.05
        read = {"beside another": beside, "in a piece": piece, "by the first server": first}
        for how, other in read.items():
            apart = float(_apart(other, alone[:, : other.shape[1]]).max())
            if apart > tolerance:
                raise RunError(
                    f"states: {server}: differ by {apart:.0%} from those read {how}; serve one "
                    "model everywhere, with --max-num-seqs 1 or another version"
                )
    states.open(alone.dtype)
    files = checkpoint_files(config.target, config.revision)
    size = sum(file.stat().st_size for file in files)
    if size > _LARGEST:
        say(f"states: are not compared with a local forward of {size / 2**30:.0f} GiB")
    elif local:
        _compare(config, states.layers, whole, alone, tolerance)


def _compare(
    config: DistillConfig,
    layers: Sequence[int],
    ids: Sequence[int],
    states_LTH: Tensor,
    tolerance: float,
) -> None:
    """Raise RunError unless states are those of a local forward."""
    dtype = str(states_LTH.dtype).removeprefix("torch.")
    model = load_model(config.target, **loading(config) | {"device": "cpu", "dtype": dtype})
    names = [*range(layout_of(model).count), -1]
    with torch.no_grad():
        local = body_states(model, names, input_ids=torch.tensor([ids[:-1]]))
    for layer, state_TH in zip(layers, states_LTH, strict=True):
        away = [float(_apart(state_TH, other[0]).median()) for other in local]
        nearest = names[away.index(min(away))]
        if nearest != layer or away[layer] > tolerance:
            what = "the final norm's" if nearest == -1 else f"layer {nearest}'s"
            raise RunError(
                f"states: layer {layer} is not that of the target: its state differs by "
                f"{away[layer]:.1%} and is nearest to {what}"
            )


def _apart(a_TH: Tensor, b_TH: Tensor) -> Tensor:
    """By token, because a few are a thousand times as long as the others."""
    a_TH = a_TH.float()
    b_TH = b_TH.float()
    return (a_TH - b_TH).norm(dim=-1) / b_TH.norm(dim=-1).clamp_min(1e-9)


def complete(engine: Engine, sets: Sequence[str | Path]) -> JsonObject:
    """Ask for the states that rows of distilled sets lack; return how many rows there are and were
    asked, and the mean and worst share of what their last states claim that the tokens bear out.
    """
    states = engine.states
    assert states is not None and states.files is not None
    asked = 0

    def rows() -> Iterator[list[int]]:
        columns = ["prompt_ids", "response_ids"]
        for row in chain.from_iterable(set_rows(directory, columns) for directory in sets):
            yield [*row["prompt_ids"], *row["response_ids"]]

    def lacking() -> Iterator[list[int]]:
        nonlocal asked
        for ids in rows():
            if not states.has(ids):
                asked += 1
                yield ids

    missing = lacking()
    ask(engine, iter(lambda: list(islice(missing, _TOGETHER)), []))
    shares = [states.files.share(ids) for ids in rows()]
    return {"rows": len(shares), "asked": asked, "measured": summed(shares)}


def summed(shares: Sequence[float | None]) -> JsonObject:
    """What is printed of the shares of documents, None of one that was not measured."""
    known = [share for share in shares if share is not None]
    return {
        "not_measured": len(shares) - len(known),
        "mean_share": mean(known) if known else None,
        "worst_share": min(known, default=None),
    }


def write_states(config: StatesConfig) -> JsonObject:
    """Write the states of sets that exist; return what was done."""
    asking = config.asking()
    tokenizer = load_tokenizer(config.target, **tokenizing(config))
    with closing(ENGINES[config.engine](asking, tokenizer)) as engine:
        for directory in config.states_of:
            vocabulary = read_manifest(Path(directory)).get("vocabulary", {})
            check_vocabulary(tokenizer, vocabulary, directory)
        check(asking, engine)
        return {"states": config.states, **complete(engine, config.states_of)}
