"""Files on the host."""

import os
from pathlib import Path

from stead.files import write_atomically


def test_an_atomic_write_replaces_content_and_mode_under_any_umask(tmp_path: Path) -> None:
    path = tmp_path / "file"
    before = os.umask(0o077)
    try:
        write_atomically(path, b"first", 0o644)
        assert (path.read_bytes(), path.stat().st_mode & 0o777) == (b"first", 0o644)
        write_atomically(path, b"second")
        assert (path.read_bytes(), path.stat().st_mode & 0o777) == (b"second", 0o600)
    finally:
        os.umask(before)
    assert [each.name for each in tmp_path.iterdir()] == ["file"]
