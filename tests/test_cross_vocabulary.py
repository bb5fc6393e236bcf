"""A draft of another tokenizer drafts the tokens that both have. Law 1 for it is in tests/test_decode_lossless.py."""

import json
import logging
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from drafts.load import load_pair
from drafts.vocabulary import map_vocabulary, vocabulary_map
from draftsmith_core.errors import InputError
from draftsmith_core.tokenization import load_tokenizer
from eval.acceptance import model_logits

Door = Callable[..., tuple[int, str, str]]


def test_it_is_refused_unless_asked_for_and_the_refusal_says_what_to_do(target_dir: str, donor_dir: str) -> None:
    with pytest.raises(
        InputError, match=r"token 3 is '<0x00>' to it .*--heterogeneous_vocab true .*choosing-a-draft\.md"
    ):
        load_pair(target_dir, [donor_dir], device="cpu")


def test_it_is_loaded_with_its_map_and_what_is_shared_is_said(
    target_dir: str, draft_dir: str, donor_dir: str, caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level(logging.WARNING):
        pair = load_pair(target_dir, {"own": draft_dir, "foreign": donor_dir}, device="cpu", heterogeneous_vocab=True)
    words = vocabulary_map(pair.drafts["foreign"])
    assert words is not None and vocabulary_map(pair.drafts["own"]) is None
    assert f"shares {words.shared} of the target's 290 tokens, and drafts those only" in caplog.text
    target, draft = load_tokenizer(target_dir), load_tokenizer(donor_dir)
    assert words.coverage([[2, 289], [2, 3]]).endswith("; 2 of 2 texts can be written in its tokens without loss")
    text = "the dog & the é"
    ids = target.encode(text, add_special_tokens=False)
    assert str(draft.decode(words.translate(ids))).strip() == text


@torch.inference_mode()
def test_its_logits_are_those_behind_every_token_of_the_text(target_dir: str, donor_dir: str) -> None:
    """In one piece and in chunks of columns, against a forward of each prefix alone."""
    pair = load_pair(target_dir, [donor_dir], device="cpu", heterogeneous_vocab=True)
    draft = pair.drafts[donor_dir]
    words = vocabulary_map(draft)
    assert words is not None
    texts = ("The quick brown fox", "dogs é mind")
    rows = [pair.tokenizer.encode(text) for text in texts]
    columns = min(map(len, rows))
    ids_BT = torch.tensor([row[:columns] for row in rows])
    whole, _ = model_logits(draft, ids_BT, 0, None, 0)  # type: ignore[arg-type]
    assert whole.shape == (2, columns, 290)
    assert int(whole[0, 0].isfinite().sum()) == words.shared
    for row in range(2):
        for column in range(columns):
            own = words.translate(ids_BT[row, : column + 1].tolist())
            alone = draft(input_ids=torch.tensor([own])).logits[0, -1]
            torch.testing.assert_close(whole[row, column], words.to_target(alone), atol=1e-5, rtol=0)
    cache, parts = None, []
    for start, stop in ((0, 2), (2, 5), (5, columns)):
        keep = 1 if stop == 2 else 0
        logits, cache = model_logits(draft, ids_BT[:, start:stop], start, cache, keep)  # type: ignore[arg-type]
        parts.append(logits)
    torch.testing.assert_close(torch.cat(parts, dim=1), whole[:, 1:], atol=1e-5, rtol=0)


def test_the_command_decodes_as_the_target_alone(
    door: Door, target_dir: str, donor_dir: str, prompts_file: str, tmp_path: Path
) -> None:
    found = []
    foreign = ("--draft", donor_dir, "--heterogeneous_vocab", "true")
    for name, words in {"alone": (), "shared": foreign, "text": (*foreign, "--proposer", "string_match")}.items():
        out = tmp_path / f"{name}.jsonl"
        code, _, err = door(
            *("decode", "--target", target_dir, "--prompts", prompts_file, "--out", out, "--temperature", 0),
            *("--max_new_tokens", 16, "--device", "cpu", *words),
        )
        assert code == 0, err
        found.append([json.loads(line) for line in out.read_text().splitlines()])
    for drafted in found[1:]:
        assert [row["output_ids"] for row in found[0]] == [row["output_ids"] for row in drafted]
        assert sum(row["stats"]["proposed"] for row in drafted) > 0
    code, _, err = door("decode", "--target", target_dir, "--prompt", "a", "--draft", donor_dir, "--device", "cpu")
    assert code == 2 and "--heterogeneous_vocab true" in err


@pytest.mark.slow
def test_eval_gives_its_alpha(
    door: Door, target_dir: str, draft_dir: str, donor_dir: str, prompts_file: str, tmp_path: Path
) -> None:
    """Beside the measured acceptance, which must agree with it."""
    code, _, err = door(
        *("eval", "--target", target_dir, "--draft", f"own={draft_dir}", f"foreign={donor_dir}"),
        *("--id", f"p={prompts_file}", "--out", tmp_path / "eval", "--heterogeneous_vocab", "true"),
        *("--temperature", 1.0, "--tree", "chain:2", "--max_new_tokens", 24, "--speed_prompts", 0),
        *("--bootstrap", 100, "--device", "cpu"),
    )
    assert code == 0, err
    results = json.loads((tmp_path / "eval" / "results.json").read_text())
    assert "eval: draft foreign has another tokenizer: of the prompts" in err and "8 of 8 texts can be written" in err
    rows = {row["draft"]: row for row in results["alpha"]}
    assert 0 < rows["foreign"]["alpha"]["value"] < 1


def test_drafted_text_is_spelled_as_the_target_would(target_dir: str, donor_dir: str) -> None:
    """Behind the last token of the text, in the target's tokens, up to a token of the draft that has no text."""
    target, draft = load_tokenizer(target_dir), load_tokenizer(donor_dir)
    words = map_vocabulary(target, draft, 290, len(draft))
    written = draft.encode("dog and", add_special_tokens=False)
    before = target.encode("the ", add_special_tokens=False)[-1]
    spelled = words.spell(before, [*written, draft.eos_token_id, *written])
    assert str(target.decode(spelled)).strip() == "dog and"
    assert words.spell(before, [draft.eos_token_id, *written]) == []
    # Half a character is not spelled until it is whole.
    accent = draft.encode("\u00e9", add_special_tokens=False)[-2:]
    assert target.decode(words.spell(before, accent)) == "\u00e9" and words.spell(before, accent[:1]) == []
    # The other way round: a tokenizer that puts a space before any text.
    back = map_vocabulary(draft, target, len(draft), 290)
    ids = back.spell(draft.encode("the", add_special_tokens=False)[-1], target.encode(" dog", add_special_tokens=False))
    assert str(draft.decode(ids)).strip() == "dog"


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (("--draft", "{own}", "--proposer", "string_match"), "string_match is for a draft of another tokenizer"),
        (
            ("--draft", "{donor}", "--heterogeneous_vocab", "true", "--proposer", "string_match", "--tree", "kary:2,2"),
            "tree: string_match drafts chains only; use chain:4",
        ),
        (("--draft", "{donor}", "{own}", "--heterogeneous_vocab", "true"), "cannot draft together; use one"),
    ],
)
def test_what_does_not_go_together_is_refused_in_one_line(
    words: tuple[str, ...], message: str, door: Door, target_dir: str, draft_dir: str, donor_dir: str
) -> None:
    named = [word.format(own=draft_dir, donor=donor_dir) for word in words]
    code, out, err = door("decode", "--target", target_dir, "--prompt", "a", "--device", "cpu", *named)
    assert (code, out) == (2, "") and message in err
