"""Tokens as text: what two tokenizers have in common, and one's tokens in pieces of the other.

Token texts are bytes, so that pieces of one character can be compared. A space is a space, whether
a tokenizer writes it as SentencePiece's bar or as a letter of GPT-2's byte alphabet.
"""

import itertools
import json
import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from functools import cached_property

import torch
from torch import Tensor, nn

from draftsmith.core.errors import InputError
from draftsmith.core.io import JsonObject
from draftsmith.core.tokenization import Tokenizer
from draftsmith.core.transformers_api import bytes_to_unicode
from draftsmith.drafts.draft_vocabulary import to_target

_ROLES = (
    "bos_token_id",
    "eos_token_id",
    "pad_token_id",
    "unk_token_id",
    "sep_token_id",
    "cls_token_id",
)
BYTE = re.compile(r"<0x([0-9A-Fa-f]{2})>")


def backend_of(tokenizer: Tokenizer) -> JsonObject:
    """A fast tokenizer as the JSON of its file; empty for a slow one."""
    fast = getattr(tokenizer, "backend_tokenizer", None)
    return {} if fast is None else dict(json.loads(fast.to_str()))


def token_texts(tokenizer: Tokenizer) -> dict[int, bytes]:
    """The bytes that each token stands for; without special tokens, which stand for none.

    In the order in which tokens of the same text are preferred: by id, but the bytes of byte
    fallback (`<0x41>`) last, since a model only writes those where no other token has the
    character.
    """
    byte_level = '"ByteLevel"' in json.dumps(backend_of(tokenizer).get("decoder"))
    letters = {letter: byte for byte, letter in bytes_to_unicode().items()} if byte_level else None
    added = tokenizer.added_tokens_decoder
    texts = {}
    fallback = {}
    for token, token_id in sorted(tokenizer.get_vocab().items(), key=lambda item: item[1]):
        if token_id in added:
            # Written as it stands: runs of spaces (GPT-NeoX, Phi), or marks that are shown
            # (<think>).
            texts[token_id] = b"" if added[token_id].special else token.encode()
        elif letters is not None:
            if all(letter in letters for letter in token):
                texts[token_id] = bytes(letters[letter] for letter in token)
        elif match := BYTE.fullmatch(token):
            fallback[token_id] = bytes([int(match[1], 16)])
        else:
            texts[token_id] = token.replace("\u2581", " ").encode()
    return {token_id: text for token_id, text in (texts | fallback).items() if text}


def pieces(text: bytes, known: Mapping[bytes, int], longest: int) -> list[int] | None:
    """Token ids whose texts join to `text`, longest match first; None if a byte is in no token."""
    ids = []
    while text:
        size = next(
            (size for size in range(min(longest, len(text)), 0, -1) if text[:size] in known), 0
        )
        if not size:
            return None
        ids.append(known[text[:size]])
        text = text[size:]
    return ids


@dataclass(frozen=True, eq=False)
class VocabularyMap:
    """A draft's tokens beside a target's. `draft_ids` and `target_ids` are the shared tokens, pair
    by pair.

    `in_draft[t]` are the draft's tokens for target token t: its partner if it is shared, else
    pieces of the same text, else the draft's end of text or token 0.
    """

    draft_ids: Tensor
    target_ids: Tensor
    in_draft: tuple[tuple[int, ...], ...]
    target_size: int

    @property
    def shared(self) -> int:
        return len(self.draft_ids)

    @cached_property
    def draft_of_V(self) -> Tensor:
        """The draft's token for every shared target token; 0 for the others."""
        return torch.zeros(self.target_size, dtype=torch.long).index_copy_(
            0, self.target_ids, self.draft_ids
        )

    def translate(self, ids: Iterable[int]) -> list[int]:
        """Target tokens as tokens of the draft."""
        return list(itertools.chain.from_iterable(self.in_draft[token] for token in ids))

    def to_target(self, logits: Tensor) -> Tensor:
        """Logits `[..., draft vocabulary]` as logits over the target's: -inf for tokens that are
        not shared.
        """
        return to_target(
            logits[..., self.draft_ids.to(logits.device)], self.target_ids, self.target_size
        )


def map_vocabulary(
    target: Tokenizer, draft: Tokenizer, target_size: int, draft_size: int, *, source: str = "draft"
) -> VocabularyMap:
    """Which tokens two tokenizers share: by their text; special tokens by name, then by role.

    Sizes are those of the models, which may be padded. Raises InputError if nothing is shared.
    """
    theirs = {t: text for t, text in token_texts(target).items() if t < target_size}
    ours: dict[bytes, int] = {}
    for d, text in token_texts(draft).items():
        if d < draft_size:
            ours.setdefault(text, d)
    pairs = {t: ours[text] for t, text in theirs.items() if text in ours}
    if not pairs:
        raise InputError(
            f"{source}: its tokenizer shares no token with the target's; see "
            "docs/choosing-a-draft.md"
        )
    added = draft.get_added_vocab()
    special = {t: added[token] for token, t in target.get_added_vocab().items() if token in added}
    for role in _ROLES:
        in_target = getattr(target, role, None)
        in_draft = getattr(draft, role, None)
        if in_target is not None and in_draft is not None:
            special.setdefault(in_target, in_draft)
    pairs |= {t: d for t, d in special.items() if t < target_size and d < draft_size}
    longest = max(map(len, ours))
    eos = draft.eos_token_id
    end = [eos] if eos is not None and eos < draft_size else [0]
    spelled = []
    for t in range(target_size):
        ids = [pairs[t]] if t in pairs else pieces(theirs.get(t, b""), ours, longest)
        spelled.append(tuple(ids or end))
    # One draft token stands for one target token only: of two target tokens of one text the first
    # is drafted.
    first: dict[int, int] = {}
    for t in [*(t for t in theirs if t in pairs), *sorted(pairs.keys() - theirs.keys())]:
        first.setdefault(pairs[t], t)
    shared = sorted((t, d) for d, t in first.items())
    return VocabularyMap(
        torch.tensor([d for _, d in shared]),
        torch.tensor([t for t, _ in shared]),
        tuple(spelled),
        target_size,
    )


_KEY = "draftsmith_vocabulary_map"


def attach(draft: nn.Module, mapping: VocabularyMap) -> None:
    """Attach a vocabulary map to the draft, so that drafting and measuring translate its token ids
    to the target's.
    """
    draft.__dict__[_KEY] = mapping


def vocabulary_map(draft: nn.Module) -> VocabularyMap | None:
    """The map of a draft of another vocabulary; None for a draft of the target's own."""
    return draft.__dict__.get(_KEY)
