"""What is not as it was written is never trusted: at every byte of a record, a line and a file."""

import json
import logging
import shutil

import pytest
from safetensors.torch import load_file, save_file

from draftsmith.core.errors import InputError
from draftsmith.core.io import is_whole, read_json, sealed_file, sealed_json, write_sealed
from draftsmith.core.runs import Run
from draftsmith.core.state_store import checkpoint_digest
from draftsmith.core.tokenization import load_tokenizer, tokenizer_digest

RECORD = {"identity": {"seed": 1, "text": "é"}, "accept": 0.83}


def flipped(content, place, bit=0):
    changed = bytearray(content)
    changed[place] ^= 1 << bit
    return bytes(changed)


def test_a_flipped_bit_anywhere_in_a_record_is_refused_by_name(tmp_path, golden):
    file = tmp_path / "run.json"
    write_sealed(file, RECORD)
    assert read_json(file, "a record", ["accept"]) == RECORD
    whole = file.read_bytes()
    for place in range(len(whole) - 1):  # the line break at the end says nothing
        file.write_bytes(flipped(whole, place, place % 8))
        with pytest.raises(InputError, match="run.json"):
            read_json(file, "a record")
    file.write_bytes(whole.replace(b"0.83", b"0.93"))
    with pytest.raises(InputError) as refused:
        read_json(file, "a record")
    golden(str(refused.value))


def test_a_record_without_a_checksum_is_read_and_one_without_its_keys_refused(tmp_path, golden):
    file = tmp_path / "run.json"
    file.write_text(json.dumps(RECORD))
    assert read_json(file, "a record", ["identity"]) == RECORD
    file.write_text("{}")
    with golden.raises():
        read_json(file, "a record", ["identity"])
    file.write_text(sealed_json({}))
    assert read_json(file, "a record") == {}


def test_a_damaged_step_is_named_and_made_again(tmp_path, caplog, golden):
    def write(file):
        file.write_text("rows")

    with Run(tmp_path) as run:
        for _ in range(2):
            assert run.step("cells/a.json", lambda: {"accept": 0.83}) == {"accept": 0.83}
            assert run.step("rows.txt", write).read_text() == "rows"
        assert not caplog.records
        cell = tmp_path / "cells/a.json"
        for content in (cell.read_bytes().replace(b"0.83", b"1.83"), b"{}", b"", b"\xff"):
            cell.write_bytes(content)
            assert not run.finished("cells/a.json")
            assert run.step("cells/a.json", lambda: {"accept": 0.83}) == {"accept": 0.83}
        (tmp_path / "rows.txt").write_text("rowz")
        assert run.step("rows.txt", write).read_text() == "rows"
    golden(caplog.messages)


def test_a_journal_ends_before_a_damaged_line(tmp_path, caplog):
    rows = [[1, "é"], [2, "b"], [3, "c"]]
    with Run(tmp_path) as run:
        with run.journal("rows", "head") as journal:
            for row in rows:
                journal.append(row)
        file = tmp_path / "rows"
        whole = file.read_bytes()
        ends = [place for place, byte in enumerate(whole) if byte == ord("\n")]
        for place in range(len(whole)):
            file.write_bytes(flipped(whole, place, place % 8))
            before = sum(end < place for end in ends)
            with run.journal("rows", "head") as journal:
                assert journal.rows == rows[: max(0, before - 1)]
                for row in rows[len(journal.rows) :]:
                    journal.append(row)
            assert file.read_bytes() == whole
    assert any(f"{file}:2: is damaged; making again" in line for line in caplog.messages)


def test_a_file_is_known_by_the_checksum_of_when_it_was_written(tmp_path, caplog, golden):
    caplog.set_level(logging.WARNING)
    file = tmp_path / "part"
    with sealed_file(file) as temporary:
        temporary.write_bytes(b"rows")
    assert is_whole(file)
    for place in range(4):
        file.write_bytes(flipped(b"rows", place))
        assert not is_whole(file) and not file.exists()
        golden(caplog.messages[-1])
    assert not is_whole(file)


def test_a_tokenizer_is_known_by_its_content(target_dir, tmp_path):
    tokenizer = load_tokenizer(target_dir)
    digest = tokenizer_digest(tokenizer)
    tokenizer(["a", "and so on"], padding=False, truncation=True, max_length=1)
    tokenizer.save_pretrained(tmp_path)
    assert tokenizer_digest(tokenizer) == digest == tokenizer_digest(load_tokenizer(str(tmp_path)))
    tokenizer.chat_template = "{{ messages }}"
    assert tokenizer_digest(tokenizer) != digest
    other = load_tokenizer(target_dir)
    other.add_tokens(["quick"])
    assert tokenizer_digest(other) != digest


@pytest.mark.parametrize("row", [0, 1, 2, 3, -1])
def test_a_checkpoint_is_told_by_rows_of_every_matrix(row, target_dir, tmp_path):
    """By five of the head's, the first and the last among them."""
    shutil.copytree(target_dir, tmp_path / "copy")
    assert checkpoint_digest(str(tmp_path / "copy")) == checkpoint_digest(target_dir)
    file = tmp_path / "copy" / "model.safetensors"
    tensors = load_file(file)
    head_VH = tensors["lm_head.weight"]
    head_VH[row if row < 0 else row * (len(head_VH) - 1) // 4] += 1
    save_file(tensors, file)
    assert checkpoint_digest(str(tmp_path / "copy")) != checkpoint_digest(target_dir)
