"""A target and its drafts are loaded and checked in one place."""

import shutil

from draftsmith.core.tokenization import load_tokenizer
from draftsmith.drafts.load import load_models


def test_a_pair_by_name_by_source_and_with_the_same_draft_twice(target_dir, draft_dir):
    pair = load_models(target_dir, {"mine": draft_dir}, device="cpu")
    assert pair.target_name == target_dir
    assert list(pair.drafts) == ["mine"]
    assert pair.models == [pair.target, pair.drafts["mine"]]
    assert len(pair.tokenizer) == 290
    assert list(load_models(target_dir, [draft_dir], device="cpu").drafts) == [draft_dir]
    twice = load_models(target_dir, [draft_dir, draft_dir], device="cpu").drafts
    assert list(twice) == [draft_dir, f"{draft_dir}#2"]
    assert twice[draft_dir] is not twice[f"{draft_dir}#2"]
    tokenizer = load_tokenizer(target_dir)
    assert load_models(target_dir, device="cpu", tokenizer=tokenizer).tokenizer is tokenizer


def test_a_draft_larger_than_its_target_is_remarked_once(
    target_dir, draft_dir, tmp_path, caplog, golden
):
    # A copy, because a test before this one may have loaded the same pair in this process.
    larger = str(shutil.copytree(target_dir, tmp_path / "larger"))
    draft_dir = str(shutil.copytree(draft_dir, tmp_path / "draft"))
    for _ in range(2):
        load_models(draft_dir, [larger, draft_dir], device="cpu")
    assert [record.getMessage().partition(" (")[0] for record in caplog.records] == [
        f"{larger}: reads more than the target",
        f"{draft_dir}: is the target itself; drafting with it cannot pay",
    ]
    same = str(shutil.copytree(draft_dir, tmp_path / "same"))
    load_models(draft_dir, [same], device="cpu")
    golden(caplog.records[-1].getMessage())


def test_what_does_not_belong_together_is_refused_by_name(
    target_dir, other_vocabulary_dir, tmp_path, golden
):
    assert load_models(target_dir, [other_vocabulary_dir], device="cpu").drafts
    bare = shutil.copytree(
        other_vocabulary_dir, tmp_path / "bare", ignore=shutil.ignore_patterns("tokenizer*")
    )
    with golden.raises():
        load_models(target_dir, {"other": str(bare)}, device="cpu")
    with golden.raises():
        load_models(target_dir, [str(tmp_path / "absent")], device="cpu")
