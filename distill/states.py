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
from draftsmith.core.hidden_states import body_states
from draftsmith.core.io import JsonObject, read_manifest
from draftsmith.core.models import load_model
from draftsmith.core.ranks import on_main, say
from draftsmith.core.settings import Sampling, loading, tokenizing
from draftsmith.core.state_store import StateFiles, checkpoint_files
from draftsmith.core.tokenization import check_vocabulary, encode_text, load_tokenizer
from draftsmith.distill.config import DistillConfig, StatesConfig
from draftsmith.distill.engines import ENGINES, Answer, AnswerRequest, Engine, Failed, Key

# A text to compare states on before there are others.
_TEXT = "The states of a text depend on its tokens alone, not on who else is read beside them. " * 8
_TOKENS = 80
# Tokens of a place where readings may differ: most of them then do.
_PLACE = 8
_FIRST = "from the first server"
# A larger target is not loaded for a comparison.
_LARGEST = 16 * 2**30
_TOGETHER = 1024
_GREEDY = Sampling(temperature=0.0)


def ask(engine: Engine, groups: Iterable[Sequence[Sequence[int]]]) -> None:
    """Let the engine read groups of rows, and write the states of all but their last token. Of an
    empty group there is nothing to ask yet. Raise RunError for a row without states.
    """
    states = engine.states
    assert states is not None
    numbers = count(1)

    def requests() -> Iterator[Sequence[AnswerRequest]]:
        for group in groups:
            rows = {next(numbers): ids for ids in group}
            states.rows |= rows
            yield [_request(number, ids[:-1]) for number, ids in rows.items()]

    engine.run(requests(), _done)


def _request(number: int, prompt_ids: Sequence[int], new_tokens: int = 1) -> AnswerRequest:
    return AnswerRequest(Key(number, 0, 0), tuple(prompt_ids), 0, _GREEDY, new_tokens)


def _done(request: AnswerRequest, answer: Answer | Failed) -> None:
    if isinstance(answer, Failed):
        tokens = len(request.prompt_ids) + 1
        raise RunError(f"states: a row of {tokens} tokens has none: {answer.reason}")


def servers(
    config: DistillConfig, layers: Sequence[int], files: StateFiles, text: Sequence[int]
) -> Engine:
    """Servers that write states of these layers into `files`, checked with a text.

    layers: ascending; the last is the raw last one.
    """
    engine = ENGINES[config.engine](config, load_tokenizer(config.target, **tokenizing(config)))
    assert engine.states is not None
    engine.states.layers = list(layers)
    engine.states.files = files
    on_main(lambda: check(config, engine, text))
    return engine


def check(
    config: DistillConfig,
    engine: Engine,
    text: Sequence[int] = (),
    kept_LTH: Tensor | None = None,
) -> None:
    """Begin to keep states. Raise RunError unless those of a text are the same from every server,
    whole and in pieces, as they were `kept`, and in a local forward if the target is small.
    """
    states = engine.states
    assert states is not None
    if not text:
        text = encode_text(load_tokenizer(config.target, **tokenizing(config)), _TEXT)[:_TOKENS]
    half = len(text) // 2
    others = {} if kept_LTH is None else {"as it was kept": kept_LTH}
    for server in engine.one_by_one():
        # The other half is read token by token, as it is written.
        ((written, pieces_LTH),) = _read(engine, [_request(-1, text[:half], len(text) - half)])
        both = [_request(-1, text[:-1]), _request(-2, written[:-1])]
        (_, whole_LTH), (_, beside_LTH) = _read(engine, both)
        if _FIRST not in others:
            states.open(whole_LTH.dtype)
            others |= _locally(config, states.layers, text, whole_LTH.dtype)
            others[_FIRST] = whole_LTH
        pairs = {how: (whole_LTH, other_LTH) for how, other_LTH in others.items()}
        pairs["in pieces"] = (beside_LTH, pieces_LTH)
        for how, (one_LTH, other_LTH) in pairs.items():
            away_L = _away(one_LTH, other_LTH)
            worst = int(away_L.argmax())
            # Of 16 bits, which round; another layer's states are further away.
            if away_L[worst] > (1e-3 if whole_LTH.dtype == torch.float32 else 0.05):
                raise RunError(
                    f"states: {server}: layer {states.layers[worst]} of {len(text)} tokens differs "
                    f"by {away_L[worst]:.1%} from that {how}; serve layers {states.layers} of one "
                    "model everywhere, with --max-num-seqs 1 or another version, and delete "
                    f"{config.states}"
                )


def _read(engine: Engine, requests: Sequence[AnswerRequest]) -> list[tuple[Sequence[int], Tensor]]:
    """Return the tokens of requests that are asked together, and their states."""
    engine.run(iter([requests]), _done)
    assert engine.states is not None
    return [engine.states.probes[request.key.row] for request in requests]


def _locally(
    config: DistillConfig, layers: Sequence[int], text: Sequence[int], dtype: torch.dtype
) -> dict[str, Tensor]:
    """The states of a local forward, unless the target is large."""
    files = checkpoint_files(config.target, config.revision)
    size = sum(file.stat().st_size for file in files)
    if size > _LARGEST:
        say(f"states: are not compared with a local forward of {size / 2**30:.0f} GiB")
        return {}
    name = str(dtype).removeprefix("torch.")
    model = load_model(config.target, **loading(config) | {"device": "cpu", "dtype": name})
    with torch.no_grad():
        local = body_states(model, layers, input_ids=torch.tensor([text[:-1]]))
    return {"of a local forward": torch.cat(local)}


def _away(a_LTH: Tensor, b_LTH: Tensor) -> Tensor:
    """How far apart the states of two readings are, by layer, where they differ most."""
    length = min(a_LTH.shape[1], b_LTH.shape[1])
    a_LTH = a_LTH[:, :length].float()
    b_LTH = b_LTH[:, :length].float()
    away_LT = (a_LTH - b_LTH).norm(dim=-1) / b_LTH.norm(dim=-1).clamp_min(1e-9)
    # A single token may be a thousand times as long as the others.
    return away_LT.unfold(1, min(_PLACE, length), 1).median(-1).values.amax(1)


def complete(config: DistillConfig, engine: Engine, sets: Sequence[str | Path]) -> JsonObject:
    """Ask for the states that rows of distilled sets lack, and check the longest row; return how
    many rows there are and were asked, and the mean and worst share of what their last states claim
    that the tokens bear out.
    """
    states = engine.states
    assert states is not None and states.files is not None

    def rows() -> Iterator[list[int]]:
        columns = ["prompt_ids", "response_ids"]
        for row in chain.from_iterable(set_rows(directory, columns) for directory in sets):
            yield [*row["prompt_ids"], *row["response_ids"]]

    before = states.taken
    missing = (ids for ids in rows() if not states.has(ids))
    ask(engine, iter(lambda: list(islice(missing, _TOGETHER)), []))
    asked = states.taken - before
    longest = max(rows(), key=len)
    kept = None if config.states_8bit else states.files.get(longest, states.layers)
    check(config, engine, longest, kept)
    shares = [states.files.share(ids) for ids in rows()]
    known = [share for share in shares if share is not None]
    measured = {}
    if known:
        measured = {"rows": len(known), "mean_share": mean(known), "worst_share": min(known)}
    return {"rows": len(shares), "asked": asked, "measured": measured}


def write_states(config: StatesConfig) -> JsonObject:
    """Write the states of sets that exist; return what was done."""
    asking = config.asking()
    tokenizer = load_tokenizer(config.target, **tokenizing(config))
    with closing(ENGINES[config.engine](asking, tokenizer)) as engine:
        for directory in config.states_of:
            vocabulary = read_manifest(Path(directory)).get("vocabulary", {})
            check_vocabulary(tokenizer, vocabulary, directory)
        check(asking, engine)
        return {"states": config.states, **complete(asking, engine, config.states_of)}
