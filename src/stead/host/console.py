"""The serial console of a guest: the end of its output, as text without control characters."""

import base64
import binascii
import re
from pathlib import Path

from stead.errors import HostError

SIZE = 64 << 10
"""Bytes that QEMU holds, and that are kept here of what was read from it."""
_ESCAPES = re.compile(r"\x1b(?:\[[0-?]*[ -/]*[@-~]|\][^\x07\x1b]*(?:\x07|\x1b\\)|[ -/]*[0-~])?")
"""Sequences that control a terminal: colours, titles, moves of the cursor."""


class ConsoleFile:
    """What was read of the console of one run. QEMU forgets what it has handed out, so it is kept here."""

    def __init__(self, path: Path) -> None:
        self._path = path

    def append(self, encoded: object) -> None:
        """Add the answer of QEMU: bytes of the guest, in base64."""
        try:
            data = base64.b64decode(encoded if isinstance(encoded, str) else "", validate=True)
        except (binascii.Error, ValueError) as error:
            raise HostError(f"console not readable: {error}") from error
        if data:
            self._path.write_bytes((self._bytes() + data)[-SIZE:])

    def text(self) -> str:
        return clean(self._bytes())

    def _bytes(self) -> bytes:
        try:
            return self._path.read_bytes()
        except FileNotFoundError:
            return b""


def clean(data: bytes) -> str:
    """Bytes of a guest as lines of text that are safe to print."""
    text = data.decode(errors="replace").replace("\r\n", "\n").replace("\r", "\n").replace("\t", " ")
    return "".join(
        each if each.isprintable() or each == "\n" else "\ufffd" for each in _ESCAPES.sub("", text)
    )
