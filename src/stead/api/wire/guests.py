"""Wire models of commands and files."""

import base64
import binascii
from collections.abc import Mapping
from typing import Annotated, Literal

from pydantic import BeforeValidator, Field

from stead.api.wire import Wire
from stead.api.wire.numbers import Rounded

MAX_TIMEOUT_MS = 24 * 3600 * 1000


_PIECE = 4 << 20
"""Characters of base64 that are decoded at once, a multiple of four."""


def decoded(text: str, what: str) -> bytes:
    """Decode base64, a long text in pieces: other threads wait while one is decoded."""
    try:
        if len(text) <= _PIECE:
            return base64.b64decode(text, validate=True)
        if text.find("=", 0, len(text) - 2) >= 0:
            raise ValueError("padding before the end")
        starts = range(0, len(text), _PIECE)
        return b"".join(base64.b64decode(text[start : start + _PIECE], validate=True) for start in starts)
    except (binascii.Error, ValueError):
        raise ValueError(f"{what} must be base64") from None


class Exec(Wire):
    """A command to run."""

    command: str | list[str] = Field(description="A string for `sh -c`, or a program and its arguments.")
    terminal: str | None = Field(default=None, description="Record the output in the VM under this name.")
    timeout_ms: Rounded | None = Field(
        default=None, gt=0, le=MAX_TIMEOUT_MS, description="Kill the command after this many milliseconds."
    )
    cwd: str | None = None
    env: Mapping[str, str] | None = None
    stdin: str | None = Field(default=None, description="Standard input, base64.")


class Executed(Wire):
    stdout: str
    stderr: str
    status_code: int
    signal: str | None = None
    duration_ms: float
    stdout_truncated: bool = False
    stderr_truncated: bool = False


Encoding = Annotated[
    Literal["utf8", "base64"], BeforeValidator(lambda text: "utf8" if text in ("utf-8", "UTF-8") else text)
]


class WriteFile(Wire):
    content: str
    encoding: Encoding | None = None

    def data(self) -> bytes:
        if self.encoding == "base64":
            return decoded(self.content, "content")
        return self.content.encode()


class VmFileContent(Wire):
    content: str
    encoding: Literal["utf8", "base64"]


class VmDirectoryEntry(Wire):
    name: str
    kind: Literal["file", "directory"]


class Directory(Wire):
    files: list[VmDirectoryEntry]


class FileFacts(Wire):
    """Type, size, owner, permissions and times of a file or folder."""

    name: str
    kind: Literal["file", "directory", "symlink", "fifo", "socket", "device"]
    size: int
    mode: int
    uid: int
    gid: int
    user: str
    group: str
    mtime_ms: float
    target: str | None = None


class Move(Wire):
    """A rename inside the VM."""

    source: str = Field(alias="from", description="Absolute path of the file or folder to move.")
    target: str = Field(alias="to", description="Absolute path that it gets; its parent must exist.")
    overwrite: bool = Field(default=False, description="Replace a file that is already at `to`.")


class Unpacked(Wire):
    files: int
