"""Hand-made packs that no git would write: tiny, with huge contents."""

import hashlib
import struct
import zlib
from collections.abc import Iterator

_COMMIT, _TREE, _BLOB, _DELTA = 1, 2, 3, 6
_KINDS = {_COMMIT: "commit", _TREE: "tree", _BLOB: "blob"}
_COPY = 0xFFFFFF
"""Maximum bytes of one copy instruction in a delta."""


class Pack:
    """A sequence of objects, in which later ones may refer to earlier ones."""

    def __init__(self) -> None:
        self._parts: list[bytes] = []
        self._size = 12
        self._count = 0

    def _add(self, kind: int, size: int, packed: bytes, before: bytes = b"") -> None:
        entry = _head(kind, size) + before + packed
        self._parts.append(entry)
        self._size += len(entry)
        self._count += 1

    def _object(self, kind: int, content: bytes) -> str:
        self._add(kind, len(content), zlib.compress(content, 1))
        return hashlib.sha1(f"{_KINDS[kind]} {len(content)}\0".encode() + content).hexdigest()

    def zeros(self, size: int) -> str:
        """A blob of zeros, a thousand times smaller in the pack."""
        packing = zlib.compressobj(9)
        hashed = hashlib.sha1(f"blob {size}\0".encode())
        parts = []
        for piece in _zeros(size):
            hashed.update(piece)
            parts.append(packing.compress(piece))
        self._add(_BLOB, size, b"".join([*parts, packing.flush()]))
        return hashed.hexdigest()

    def copies(self, size: int) -> None:
        """A delta that copies another blob many times."""
        start = self._size
        self.zeros(_COPY + 1)
        times = size // _COPY
        delta = _number(_COPY + 1) + _number(times * _COPY) + (b"\xf0" + b"\xff" * 3) * times
        self._add(_DELTA, len(delta), zlib.compress(delta), _distance(self._size - start))

    def blob(self, content: bytes) -> str:
        return self._object(_BLOB, content)

    def tree(self, entries: dict[str, str], *, folders: bool = False) -> str:
        """A tree of blobs or folders by name."""
        mode = "40000" if folders else "100644"
        lines = [f"{mode} {name}\0".encode() + bytes.fromhex(sha) for name, sha in sorted(entries.items())]
        return self._object(_TREE, b"".join(lines))

    def commit(self, tree: str) -> str:
        who = "tests <tests@stead.invalid> 1700000000 +0000"
        return self._object(_COMMIT, f"tree {tree}\nauthor {who}\ncommitter {who}\n\nbomb\n".encode())

    @property
    def data(self) -> bytes:
        data = b"".join([b"PACK", struct.pack(">II", 2, self._count), *self._parts])
        return data + hashlib.sha1(data).digest()


def _zeros(size: int) -> Iterator[bytes]:
    block = bytes(1 << 20)
    for place in range(0, size, len(block)):
        yield block[: size - place]


def _head(kind: int, size: int) -> bytes:
    """The header of an entry: type and size, four bits first and then seven at a time."""
    first = (kind << 4) | (size & 15)
    return bytes([first]) if size < 16 else bytes([first | 128]) + _number(size >> 4)


def _number(value: int) -> bytes:
    out = bytearray()
    while value > 127:
        out.append(value & 127 | 128)
        value >>= 7
    return bytes([*out, value])


def _distance(value: int) -> bytes:
    """The backwards offset of a delta's base; each further byte adds one."""
    out = [value & 127]
    while value := value >> 7:
        value -= 1
        out.insert(0, 128 | (value & 127))
    return bytes(out)
