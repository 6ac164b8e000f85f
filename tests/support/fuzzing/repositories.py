"""What a git client or an imported archive can contain: the list of refs of a push, tar and zip."""

import contextlib
import tempfile
from collections.abc import Iterator
from pathlib import Path

from stead.repos.errors import RepoError
from stead.repos.transfer.archive_import import ArchiveTree
from stead.repos.transfer.archives import ArchiveLimits, Kind, members, reading
from stead.repos.transfer.serving import PushCommands, is_protocol
from support.fuzzing.runs import Feed, Target

_MOST_COMMANDS = 50
_BOUNDS = ArchiveLimits(entries=200, unpacked=8 << 20, ratio=200, ratio_from=1 << 20)
_SLACK = 1 << 20
"""Bytes beyond the contents: the commands of fast-import."""


def _parsed(data: bytes, size: int) -> tuple[object, ...]:
    """What a push in pieces of this size is understood as."""
    commands = PushCommands(_MOST_COMMANDS)
    after = 0
    try:
        for at in range(0, len(data), size):
            after += commands.feed(data[at : at + size])
    except RepoError as error:
        return type(error).__name__, str(error)
    assert commands.created + len(commands.superseded) <= commands.count <= _MOST_COMMANDS
    assert b"no\n" in commands.refusal("no")
    return commands.complete, commands.count, commands.created, tuple(commands.superseded), after


@contextlib.contextmanager
def _push() -> Iterator[Feed]:
    """A push is understood in the same way however its bytes arrive."""

    def feed(data: bytes) -> None:
        size = 1 + (data or b"\0")[0]
        if _parsed(data[1:], size) != _parsed(data[1:], 1 << 20):
            raise ValueError(f"understood in another way in pieces of {size} bytes")
        is_protocol(data.decode("latin-1"))

    yield feed


@contextlib.contextmanager
def _archive(kind: Kind) -> Iterator[Feed]:
    with tempfile.TemporaryDirectory() as folder:
        archive = Path(folder) / "archive"

        def feed(data: bytes) -> None:
            archive.write_bytes(data)
            tree = ArchiveTree()
            with contextlib.suppress(RepoError):
                size = 0
                with reading(kind):
                    for piece in tree.blobs(members(kind, archive, _BOUNDS)):
                        size += len(piece)
                        assert size <= _BOUNDS.unpacked + _SLACK, "more than the limit was unpacked"
                for line in tree.lines():
                    assert line.startswith(b"M ") and line.count(b"\n") == 1, line
            assert list(Path(folder).iterdir()) == [archive]

        yield feed


_PACKETS = (
    *(b"0000", b"0001", b"0004", b"0005a", b"fff0", b"ffff", b"FFFF", b"00zz", b"\0", b"refs/heads/main"),
    *(
        b"0" * 40,
        b"1" * 40 + b" ",
        b"side-band-64k",
        b"report-status",
        b"PACK\0\0\0\2",
        b"shallow ",
        b"push-cert",
    ),
)
_TAR = (
    *(
        b"ustar\x0000",
        b"ustar  \0",
        b"././@LongLink",
        b"30 mtime=1.5\n",
        b"18 path=../../etc\n",
        b"9 size=5\n",
    ),
    *(b"GNU.sparse.map=", b"0000644\0", b"\x80\0\0\0\0\0\0\xff", b"\xff" * 12, b"77777777777\0", bytes(512)),
    *(
        b"\x1f\x8b\x08\0",
        b"BZh9",
        b"\xfd7zXZ\0",
        b"\x28\xb5\x2f\xfd",
        b"L",
        b"K",
        b"x",
        b"g",
        b"1",
        b"2",
        b"5",
        b"S",
    ),
)
_ZIP = (
    *(b"PK\1\2", b"PK\3\4", b"PK\5\6", b"PK\6\6", b"PK\6\7", b"PK\7\x08", b"\xff\xff\xff\xff", b"\xff\xff"),
    *(
        b"\1\0\x18\0",
        b"../",
        b"/etc/passwd",
        b".git/config",
        b"\0\x08",
        b"\x0c\0",
        b"\xed\xa1\0\0",
        b"a/" * 300,
    ),
)

PUSHES = Target("pkt-lines", _push, _PACKETS, inputs=10_000)
TARS = Target("tar", lambda: _archive("tar"), _TAR, inputs=4000)
ZIPS = Target("zip", lambda: _archive("zip"), _ZIP, inputs=4000)
