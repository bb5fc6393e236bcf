"""A draft of another tokenizer drafts the tokens that both have. Law 1 for it is in
tests/test_decode_lossless.py.
"""

import json
import logging

import pytest
import torch

from draftsmith.core.tokenization import load_tokenizer
from draftsmith.drafts.load import load_models
from draftsmith.drafts.vocabulary import vocabulary_map
from draftsmith.eval.formulas import model_logits
from tests.distilled import write_rows


def test_it_is_loaded_with_its_map_and_what_is_shared_is_said(
    target_dir, draft_dir, donor_dir, caplog, golden
):
    with caplog.at_level(logging.WARNING):
        pair = load_models(
            target_dir,
            {"own": draft_dir, "foreign": donor_dir},
            device="cpu",
            heterogeneous_vocab=True,
        )
    words = vocabulary_map(pair.drafts["foreign"])
    assert words is not None and vocabulary_map(pair.drafts["own"]) is None
    golden("\n".join(caplog.messages), having="shares")
    target, draft = load_tokenizer(target_dir), load_tokenizer(donor_dir)
    text = "the dog & the é"
    ids = target.encode(text, add_special_tokens=False)
    assert str(draft.decode(words.translate(ids))).strip() == text


@torch.inference_mode()
def test_its_logits_are_those_behind_every_token_of_the_text(target_dir, donor_dir):
    """In one piece and in chunks of columns, against a forward of each prefix alone."""
    pair = load_models(target_dir, [donor_dir], device="cpu", heterogeneous_vocab=True)
    draft = pair.drafts[donor_dir]
    words = vocabulary_map(draft)
    assert words is not None
    texts = ("The quick brown fox", "dogs é mind")
    rows = [pair.tokenizer.encode(text) for text in texts]
    columns = min(map(len, rows))
    ids_BT = torch.tensor([row[:columns] for row in rows])
    whole = model_logits(draft, ids_BT, columns)  # type: ignore[arg-type]
    assert whole.shape == (2, columns, 290)
    assert int(whole[0, 0].isfinite().sum()) == words.shared
    for row in range(2):
        for column in range(columns):
            own = words.translate(ids_BT[row, : column + 1].tolist())
            alone = draft(input_ids=torch.tensor([own])).logits[0, -1]
            torch.testing.assert_close(
                whole[row, column], words.to_target(alone), atol=1e-5, rtol=0
            )
    torch.testing.assert_close(model_logits(draft, ids_BT, 2), whole[:, -2:])  # type: ignore[arg-type]


# What tokenizers split in ways of their own, and texts that look like special tokens, or are some.
ODD: tuple[str, ...] = (
    "  two spaces",
    "\ttab\n\nlines ",
    "\U0001f642\U0001f469\u200d\U0001f467",
    "\u6f22\u5b57\u304b\u306a",
    "e\u0301 \u00e9",
)
ODD += (
    "<s>no mark</s> it",
    "\u05e9\u05dc\u05d5\u05dd",
    "\u00a0nbsp",
    "a",
    "12,345.67%",
    "\u2581bar",
    "<0x41>A",
)


@pytest.mark.parametrize("byte_level", [True, False])
def test_the_command_decodes_as_the_target_alone(
    byte_level, door, target_dir, donor_dir, tmp_path, golden
):
    """Both ways: each tokenizer once the target's."""
    if not byte_level:
        target_dir, donor_dir = donor_dir, target_dir
    prompts_file = write_rows(tmp_path / "odd.jsonl", *({"prompt": text} for text in ODD))
    found = []
    foreign = ("--draft", donor_dir, "--heterogeneous_vocab", "true")
    for name, words in {"alone": (), "shared": foreign}.items():
        out = tmp_path / f"{name}.jsonl"
        road = f"decode --target {target_dir} --prompts {prompts_file} --out {out} --temperature 0"
        door.ok(*road.split(), *"--max_new_tokens 16 --device cpu".split(), *words)
        found.append([json.loads(line) for line in out.read_text().splitlines()])
    for drafted in found[1:]:
        assert len(drafted) == len(ODD)
        assert [row["output_ids"] for row in found[0]] == [row["output_ids"] for row in drafted]
        assert sum(row["stats"]["proposed"] for row in drafted) > 0
    alone = f"decode --target {target_dir} --prompt a --draft {donor_dir} --device cpu"
    door.refused(*alone.split())
