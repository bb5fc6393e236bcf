"""Random models and heads: their distributions are neither flat nor certain, and drafts are near
their targets.
"""

import copy
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, TypeVar

import torch
from tokenizers import Tokenizer
from tokenizers.models import WordLevel
from tokenizers.pre_tokenizers import Whitespace
from torch import Tensor, nn
from transformers import (
    LlamaConfig,
    LlamaForCausalLM,
    PreTrainedModel,
    PreTrainedTokenizerFast,
)

from draftsmith.core.sampling import Sampling
from draftsmith.decode.method import Method
from draftsmith.decode.propose.sources import AnyDraft
from draftsmith.drafts.heads import Head
from draftsmith.drafts.heads.block import DFlashHead, DSparkHead, JetSpecHead
from draftsmith.drafts.heads.eagle import EagleHead
from draftsmith.drafts.heads.eagle3 import Eagle3Head
from draftsmith.drafts.heads.medusa import HydraHeads, MedusaHeads
from draftsmith.drafts.heads.mtp import MtpHead
from draftsmith.eval.alpha import measure_alphas
from draftsmith.eval.counts import Count, of_method
from draftsmith.eval.formulas import Continuation

M = TypeVar("M", bound=nn.Module)
V = 23
HEADS: dict[str, Callable[[PreTrainedModel], Head]] = {
    "eagle": lambda target: EagleHead.fresh(target, seed=3),
    "eagle3": lambda target: Eagle3Head.fresh(target, draft_vocab=range(2, V - 3), seed=3),
    "mtp": lambda target: MtpHead.fresh(target, seed=3),
    "medusa": lambda target: MedusaHeads.fresh(target, num_heads=3),
    "hydra": lambda target: HydraHeads.fresh(target, num_heads=3),
    "dflash": lambda target: DFlashHead.fresh(target, num_layers=2, block_size=5),
    "dspark": lambda target: DSparkHead.fresh(
        target, num_layers=1, block_size=4, draft_vocab=range(2, V - 3)
    ),
}


# Of a target of 40 tokens.
DRAFT_VOCAB = [0, 1, 5, 6, 7, 11, 20, 21, 30, 37, 38, 39]
FRESH: dict[str, Callable[[PreTrainedModel], Head]] = {
    "eagle": lambda target: EagleHead.fresh(target),
    "eagle3": lambda target: Eagle3Head.fresh(target, draft_vocab=DRAFT_VOCAB, norms="eagle3"),
    "eagle3-3.1": lambda target: Eagle3Head.fresh(target, num_layers=2),
    "mtp": lambda target: MtpHead.fresh(target),
    "medusa": lambda target: MedusaHeads.fresh(target, num_heads=3, num_layers=2),
    "hydra": lambda target: HydraHeads.fresh(target, num_heads=3, num_layers=2),
    "dflash": lambda target: DFlashHead.fresh(target, num_layers=2, block_size=4),
    "dflash-part": lambda target: DFlashHead.fresh(
        target, num_layers=1, block_size=4, draft_vocab=DRAFT_VOCAB
    ),
    "jetspec": lambda target: JetSpecHead.fresh(target, num_layers=2, block_size=4, window=4),
    "dspark": lambda target: DSparkHead.fresh(target, num_layers=2, block_size=3),
}


def redrawn(model: M, spread: float) -> M:
    """The model in eval mode, every matrix drawn with this spread: outputs vary instead of
    repeating one token.
    """
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.dim() > 1:
                parameter.normal_(0.0, spread)
    return model.eval()


def tiny_llama(
    seed: int, vocabulary: int = V, layers: int = 1, spread: float = 0.6
) -> LlamaForCausalLM:
    torch.manual_seed(seed)
    config = LlamaConfig(
        vocab_size=vocabulary,
        hidden_size=16,
        intermediate_size=24,
        num_hidden_layers=layers,
        num_attention_heads=2,
        max_position_embeddings=128,
        initializer_range=spread,
        bos_token_id=1,
        eos_token_id=2,
    )
    model: LlamaForCausalLM = LlamaForCausalLM(config).eval()
    return model


def random_llama(
    seed: int,
    vocabulary: int,
    *,
    hidden: int = 16,
    layers: int = 2,
    heads: int = 2,
    positions: int = 128,
    spread: float = 0.4,
    eos: int | None = None,
) -> LlamaForCausalLM:
    """Every matrix drawn with this spread, in eval mode; no special tokens but `eos`."""
    config = LlamaConfig(
        vocab_size=vocabulary,
        hidden_size=hidden,
        intermediate_size=hidden,
        num_hidden_layers=layers,
        num_attention_heads=heads,
        max_position_embeddings=positions,
        pad_token_id=None,
        bos_token_id=None,
        eos_token_id=eos,
    )
    torch.manual_seed(seed)
    return redrawn(LlamaForCausalLM(config), spread)


def near(model: LlamaForCausalLM, noise: float, seed: int) -> LlamaForCausalLM:
    """A copy with noise on every parameter."""
    other = copy.deepcopy(model)
    torch.manual_seed(seed)
    with torch.no_grad():
        for parameter in other.parameters():
            parameter.add_(torch.randn_like(parameter), alpha=noise)
    return other


def save_word_tokenizer(directory: Path, vocabulary: int) -> None:
    """Save a tokenizer of the words w3, w4 ... and <unk>, <s>, </s>."""
    words = {"<unk>": 0, "<s>": 1, "</s>": 2} | {f"w{i}": i for i in range(3, vocabulary)}
    tokenizer = Tokenizer(WordLevel(words, unk_token="<unk>"))
    tokenizer.pre_tokenizer = Whitespace()
    special = {"unk_token": "<unk>", "bos_token": "<s>", "eos_token": "</s>"}
    PreTrainedTokenizerFast(tokenizer_object=tokenizer, **special).save_pretrained(directory)


def stirred(head: M, size: float = 0.2, seed: int = 5) -> M:
    """The module with every parameter away from where it began, so that none is zero or one."""
    random = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for parameter in head.parameters():
            parameter.add_(size * torch.randn(parameter.shape, generator=random))
    return head


def stirred_head(name: str, target: PreTrainedModel, size: float = 0.2) -> Head:
    """One of `HEADS`, in eval mode, with every parameter away from where it began."""
    return stirred(HEADS[name](target).eval(), size, seed=7)


def penalised(
    logits_V: Tensor, prompt: Sequence[int], answer: Sequence[int], penalty: dict[str, float]
) -> Tensor:
    """The logits behind an answer, one token of it after another, as the definition reads."""
    logits_V = logits_V.clone()
    for token in {*prompt, *answer}:
        factor = penalty.get("repetition_penalty", 1.0)
        logits_V[token] *= 1 / factor if logits_V[token] > 0 else factor
    for token in set(answer):
        logits_V[token] -= penalty.get("presence_penalty", 0.0)
        logits_V[token] -= penalty.get("frequency_penalty", 0.0) * answer.count(token)
    return logits_V


def alpha_sums(
    target: PreTrainedModel,
    draft: AnyDraft,
    rows: Sequence[Continuation],
    sampling: Sampling,
    **options: Any,
) -> dict[str, Sequence[float]]:
    """The counts of whole answers of a single draft, without those of predictions."""
    return of_method(measure_alphas(target, {"draft": draft}, rows, sampling, **options)["draft"])


def at_depth(counts: Sequence[Count], key: str, method: Method) -> list[Sequence[float]]:
    """A count of a method at every depth."""
    named = [count for count in counts if (count.key, count.rule) == (key, method.verifier)]
    return [count.values_P for count in named if count.tree == method.tree]
