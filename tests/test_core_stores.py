"""A finished set in a store that fsspec knows."""

import json
from collections.abc import Callable
from pathlib import Path

import fsspec
import pytest

Door = Callable[..., tuple[int, str, str]]


@pytest.fixture
def words(target_dir: str, prompts_file: str, tmp_path: Path) -> list[str]:
    return f"distill --target {target_dir} --prompts {prompts_file} --out {tmp_path}/set --max_new_tokens 4".split()


def test_the_finished_set_is_copied_and_loads_from_there(words: list[str], door: Door, tmp_path: Path) -> None:
    code, out, err = door(*words, "--copy_to", "memory://bucket/set", "--json")
    assert code == 0, err
    assert json.loads(out.splitlines()[-1])["copied_to"] == "memory://bucket/set"
    store = fsspec.filesystem("memory")
    there = {path.rsplit("/", 1)[1]: store.cat(path) for path in store.ls("/bucket/set", detail=False)}
    assert there == {path.name: path.read_bytes() for path in (tmp_path / "set").iterdir()}
    assert {"part-00000.parquet", "manifest.json"} < set(there)
    # The manifest is last; the same command copies again.
    created = {path["name"].rsplit("/", 1)[1]: path["created"] for path in store.ls("/bucket/set")}
    assert max(created, key=lambda name: created[name]) == "manifest.json"
    assert door(*words, "--copy_to", "memory://bucket/set")[0] == 0


@pytest.mark.parametrize(
    ("url", "said"),
    [
        ("somewhere", "copy_to: 'somewhere' is no URL of a store; write one such as s3://BUCKET/DIR"),
        ("nonsense://bucket/set", "copy_to: nonsense://bucket/set: Protocol not known: nonsense"),
    ],
)
def test_what_is_no_store_is_refused_before_any_work(
    words: list[str], door: Door, tmp_path: Path, url: str, said: str
) -> None:
    code, _, err = door(*words, "--copy_to", url)
    assert code == 2 and said in err and len(err.strip().splitlines()) == 1
    assert not (tmp_path / "set").exists()


def test_a_store_that_fails_keeps_the_set(
    words: list[str], door: Door, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(*words: object, **options: object) -> None:
        raise PermissionError("bucket is\nread-only")

    monkeypatch.setattr(type(fsspec.filesystem("memory")), "put_file", refuse)
    code, _, err = door(*words, "--copy_to", "memory://bucket/other")
    assert code == 1
    assert f"copy_to memory://bucket/other: bucket is read-only; {tmp_path}/set is complete" in err
    assert (tmp_path / "set" / "manifest.json").exists()
