"""Files are whole or absent, whatever happens while they are written."""

import pytest

from draftsmith.core.io import atomic_dir, atomic_file


def fill(temporary, text, directory):
    (temporary / "inner").write_text(text) if directory else temporary.write_text(text)


def content(path):
    return (path / "inner").read_text() if path.is_dir() else path.read_text()


@pytest.mark.parametrize(("writer", "directory"), [(atomic_file, False), (atomic_dir, True)])
def test_a_block_changes_all_or_nothing(tmp_path, writer, directory):
    path = tmp_path / "deep" / "thing"
    with pytest.raises(ZeroDivisionError), writer(path) as temporary:
        fill(temporary, "half", directory)
        raise ZeroDivisionError
    assert list(tmp_path.iterdir()) == []
    with writer(path) as temporary:
        fill(temporary, "first", directory)
        assert not path.exists()
    with pytest.raises(ZeroDivisionError), writer(path) as temporary:
        fill(temporary, "half", directory)
        raise ZeroDivisionError
    assert content(path) == "first"
    with writer(path) as temporary:
        fill(temporary, "second", directory)
    assert content(path) == "second"
    assert [p.name for p in path.parent.iterdir()] == ["thing"]
