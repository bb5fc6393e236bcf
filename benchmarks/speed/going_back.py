"""What a chain costs and gains on targets with a recurrent state, whatever drafts it.

Random weights, so only time means something. The draft is a script that knows the target's greedy
tokens and gets each right with a given chance; it costs no time. `unread` is
`decode.own_cache_runner.MOST_UNREAD`: with 0 the accepted tokens are read again by a forward of
their own, with more they wait for the next step's.

    python -m benchmarks.speed.going_back [--kinds lfm2 falcon_h1] [--unread 0 8 16]
"""

import argparse
import random
import sys
from collections.abc import Sequence
from typing import Any, cast

import torch
from torch import Tensor
from transformers import AutoModelForCausalLM, PreTrainedModel
from transformers.models.auto.configuration_auto import CONFIG_MAPPING

import draftsmith.decode.own_cache_runner
from draftsmith.core.sampling import Sampling
from draftsmith.decode import Outcome, Proposal, Proposer, Session, SessionSetup, SpeculativeDecoder
from draftsmith.decode.tree import chain
from draftsmith.decode.tree_batch import TreeBatch

VOCABULARY = 8192
TOKENS = 48
ROUNDS = 2
PROMPT = [index * 37 % VOCABULARY for index in range(64)]
_SIZES: dict[str, Any] = {
    "hidden_size": 640,
    "intermediate_size": 1792,
    "num_hidden_layers": 12,
    "num_attention_heads": 10,
    "num_key_value_heads": 2,
    "head_dim": 64,
    "vocab_size": VOCABULARY,
}
_MAMBA_2 = {"mamba_n_heads": 20, "mamba_d_head": 64, "mamba_d_state": 64, "mamba_n_groups": 1}
_FOURTH = [("full_attention" if layer % 4 == 3 else "linear_attention") for layer in range(12)]
KINDS: dict[str, dict[str, Any]] = {
    "qwen3_5_text": {
        **_SIZES,
        "layer_types": _FOURTH,
        "linear_num_key_heads": 8,
        "linear_num_value_heads": 8,
        "linear_key_head_dim": 64,
        "linear_value_head_dim": 64,
    },
    "falcon_h1": {**_SIZES, **_MAMBA_2, "mamba_d_ssm": 1280},
    "granitemoehybrid": {
        **_SIZES,
        **_MAMBA_2,
        "layer_types": _FOURTH,
        "num_local_experts": 0,
        "shared_intermediate_size": 1792,
    },
    "lfm2": {
        **_SIZES,
        "layer_types": [kind.replace("linear_attention", "conv") for kind in _FOURTH],
    },
}


class Knowing(Proposer):
    """Drafts the tokens `known` behind the prompt, each right with chance `share`."""

    def __init__(self, known: Sequence[int], share: float) -> None:
        self.known = [*PROMPT, *known]
        self.share = share

    def start(self, setup: SessionSetup) -> Session:
        return _KnowingSession(self, setup)


class _KnowingSession(Session):
    def __init__(self, proposer: Knowing, setup: SessionSetup) -> None:
        self.proposer = proposer
        self.depth = setup.tree.depth
        self.tree = TreeBatch.build(chain(self.depth), setup.device)
        self.at = len(setup.prompts[0])
        self.random = random.Random(0)

    def propose(self, u_BN: Tensor | None) -> Proposal:
        tokens = [-1]
        for place in range(self.at, self.at + self.depth):
            token = self.proposer.known[place] if place < len(self.proposer.known) else 0
            right = self.random.random() < self.proposer.share
            tokens.append(token if right else (token + 1) % VOCABULARY)
        return Proposal(self.tree, torch.tensor([tokens]), None, "deterministic")

    def commit(self, outcome: Outcome) -> None:
        self.at += len(outcome.tokens[0])

    def select_rows(self, rows: Sequence[int]) -> None:
        return


def target_of(kind: str) -> PreTrainedModel:
    """One of `KINDS` with random weights, in fp32."""
    special = {"pad_token_id": None, "bos_token_id": None, "eos_token_id": None}
    config = cast(Any, CONFIG_MAPPING[kind])(**KINDS[kind], **special)
    torch.manual_seed(0)
    return cast(PreTrainedModel, AutoModelForCausalLM.from_config(config).float().eval())


def say(line: str) -> None:
    """Write a line at once."""
    sys.stdout.write(line + "\n")
    sys.stdout.flush()


def main() -> None:
    """Print one row per kind, chain, chance and `unread`."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--kinds", nargs="+", default=list(KINDS), choices=list(KINDS))
    parser.add_argument("--unread", nargs="+", type=int, default=[0, 16])
    parser.add_argument("--shares", nargs="+", type=float, default=[0.3, 0.6, 0.9])
    asked = parser.parse_args()
    greedy = Sampling(temperature=0.0)
    say("| target | M | draft | right | unread | tokens/call | tokens/s | step, of plain |")
    say("|---|---|---|---|---|---|---|---|")
    for kind in asked.kinds:
        target = target_of(kind)
        million = sum(weight.numel() for weight in target.parameters()) / 1e6
        plain = SpeculativeDecoder(target)
        known = plain.generate([PROMPT], greedy, TOKENS, eos_ids=()).generations[0].output_ids
        cells = [
            (length, share, unread)
            for length in (2, 4)
            for share in asked.shares
            for unread in asked.unread
        ]
        seconds: dict[object, list[float]] = {cell: [] for cell in [None, *cells]}
        calls: dict[object, int] = {}
        for _ in range(ROUNDS):
            for cell in seconds:
                decoder = plain
                if cell is not None:
                    length, share, draftsmith.decode.own_cache_runner.MOST_UNREAD = cast(Any, cell)
                    decoder = SpeculativeDecoder(target, Knowing(known, share), length)
                batch = decoder.generate([PROMPT], greedy, TOKENS, eos_ids=())
                seconds[cell].append(batch.decode_s)
                calls[cell] = batch.generations[0].stats.target_calls
        alone_s = min(seconds[None]) / TOKENS
        say(f"| {kind} | {million:.0f} | none | | | 1.00 | {1 / alone_s:.1f} | 1.00 |")
        for length, share, unread in cells:
            least = min(seconds[length, share, unread])
            steps = calls[length, share, unread]
            say(
                f"| {kind} | | chain:{length} | {share} | {unread} | {TOKENS / steps:.2f} "
                f"| {TOKENS / least:.1f} | {least / steps / alone_s:.2f} |"
            )


if __name__ == "__main__":
    main()
