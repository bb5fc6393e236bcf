"""The methods of decoding that the benchmarks set side by side, by the words that name them.

hf                        transformers' generate
hf-assisted               its assisted generation as it comes: up to 20 tokens, stopped by the
draft's confidence hf-constant:N             assisted with N tokens at every step and no confidence
stop
ar                        this engine without a draft
TREE[/VERIFIER]           this engine with the draft model on a tree such as chain:4,
eagle2:depth=4,beam=4,nodes=16
                          or auto:FILE of a plan
head@TREE[/VERIFIER]      this engine with the head
PROPOSER@TREE[/VERIFIER]  another proposer that needs no weights, such as prompt_lookup@chain:6
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial

import torch
from transformers import GenerationConfig, PreTrainedModel

from draftsmith.core.errors import InputError
from draftsmith.core.io import JsonObject, read_tree_file
from draftsmith.core.sampling import Sampling, generator, row_seed
from draftsmith.decode import (
    PROPOSERS,
    VERIFIERS,
    DraftModelProposer,
    Proposer,
    SpeculativeDecoder,
    parse_tree,
)
from draftsmith.drafts.heads import Head

# `hf-assisted`: tokens and confidence, the defaults of transformers' own generation config, written
# out so that they are fixed here.
ASSISTED = (20, 0.4)
Prompts = Sequence[Sequence[int]]
Decode = Callable[[Prompts, int], list[list[int]]]


@dataclass(frozen=True)
class Method:
    """`decode(prompts, seed)` returns the new tokens of every prompt.

    `prefills` of its target forwards come before the first step; in transformers the first step is
    the prefill.
    """

    name: str
    prefills: int
    decode: Decode


@dataclass(frozen=True)
class Pair:
    """A target, a draft and perhaps a head that never end a text: every method then emits as many
    tokens.
    """

    target: PreTrainedModel
    draft: PreTrainedModel
    head: Head | None = None


def endless(model: PreTrainedModel) -> PreTrainedModel:
    """The same model without an EOS token, so that generate does not stop at one."""
    for config in (model.config, model.generation_config):
        config.eos_token_id = None
        config.pad_token_id = 0
    return model


def build(name: str, pair: Pair, temperature: float, max_new_tokens: int) -> Method:
    """The method that a name stands for. Raises InputError, one line, for a name that means
    nothing.
    """
    sampling = Sampling(temperature=temperature)
    if name == "hf":
        return Method(name, 0, _hugging_face(pair, sampling, max_new_tokens, None))
    if name == "hf-assisted":
        return Method(name, 0, _hugging_face(pair, sampling, max_new_tokens, ASSISTED))
    kind, _, ahead = name.partition(":")
    if kind == "hf-constant" and ahead.isdecimal():
        return Method(name, 0, _hugging_face(pair, sampling, max_new_tokens, (int(ahead), 0.0)))
    if name.startswith("hf"):
        raise InputError(f"--methods {name}: use hf, hf-assisted or hf-constant:N")
    if name == "ar":
        return Method(name, 1, _ours(SpeculativeDecoder(pair.target), sampling, max_new_tokens))
    return Method(name, 1, _ours(decoder(name, pair), sampling, max_new_tokens))


def decoder(name: str, pair: Pair) -> SpeculativeDecoder:
    """Our decoder for `[PROPOSER@]TREE[/VERIFIER]`; the verifier is `default_verifier` when not
    named.
    """
    proposer_name, _, rest = name.rpartition("@")
    tree, _, verifier = rest.rpartition("/")
    if verifier not in VERIFIERS:
        tree = rest
        verifier = ""
    makers: dict[str, Callable[[], Proposer]] = {
        each: partial(kind.make, None)
        for each, kind in PROPOSERS.items()
        if kind.needs == "nothing"
    }
    if (head := pair.head) is not None:
        makers["head"] = partial(PROPOSERS[head.kind].make, head)
    if proposer_name and proposer_name not in makers:
        raise InputError(
            f"--methods {name}: '{proposer_name}' is not among {', '.join(makers)}; --head gives "
            "a head"
        )
    try:
        proposer = makers[proposer_name]() if proposer_name else DraftModelProposer(pair.draft)
        return SpeculativeDecoder(
            pair.target, proposer, parse_tree(tree, read_tree_file), verifier or None
        )
    except ValueError as error:
        raise InputError(f"--methods {name}: {error}") from None


def _ours(engine: SpeculativeDecoder, sampling: Sampling, max_new_tokens: int) -> Decode:
    def decode(prompts: Prompts, seed: int) -> list[list[int]]:
        generators = [generator(row_seed(seed, str(row))) for row in range(len(prompts))]
        batch = engine.generate(prompts, sampling, max_new_tokens, generators)
        return [generation.output_ids for generation in batch.generations]

    return decode


def _hugging_face(
    pair: Pair, sampling: Sampling, max_new_tokens: int, assisted: tuple[int, float] | None
) -> Decode:
    settings: JsonObject = {"do_sample": False}
    if not sampling.greedy:
        # Without top_k=0 generate keeps the 50 most probable tokens.
        settings = {
            "do_sample": True,
            "temperature": sampling.temperature,
            "top_k": 0,
            "top_p": 1.0,
        }
    config = GenerationConfig(max_new_tokens=max_new_tokens, pad_token_id=0, **settings)
    extra = {} if assisted is None else {"assistant_model": pair.draft}
    generate: Callable[..., torch.Tensor] = pair.target.generate  # type: ignore[assignment]

    def decode(prompts: Prompts, seed: int) -> list[list[int]]:
        if assisted is not None:
            # Ways share the draft, so each call sets its own.
            drafting = pair.draft.generation_config
            drafting.num_assistant_tokens, drafting.assistant_confidence_threshold = assisted
            drafting.num_assistant_tokens_schedule = "constant"
        torch.manual_seed(seed)
        ids_BT = torch.tensor(prompts, device=pair.target.device)
        out_BT = generate(
            ids_BT, attention_mask=torch.ones_like(ids_BT), generation_config=config, **extra
        )
        width = ids_BT.shape[1]
        found: list[list[int]] = out_BT[:, width:].tolist()
        return found

    return decode
