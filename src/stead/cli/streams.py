"""Standard streams of this process: closed ones, and text that they cannot encode."""

import codecs
import contextlib
import io
import os
import sys
from typing import TextIO

_ESCAPING = "stead-escape"


def prepare_streams() -> None:
    """Make standard input, output and errors usable whatever they are.

    A closed one becomes /dev/null, as in ssh: a socket would get its number otherwise. Output in a strict
    encoding shows a character that it does not have as an escape, and bytes of file names as they are.
    """
    sys.stdin = sys.stdin or _opened(0, os.O_RDONLY)
    sys.stdout = sys.stdout or _opened(1, os.O_WRONLY)
    sys.stderr = sys.stderr or _opened(2, os.O_WRONLY)
    codecs.register_error(_ESCAPING, _escaped)
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(errors=_ESCAPING)


def flush_output() -> None:
    """Flush standard output now: an error during the exit of the interpreter would be a traceback."""
    try:
        sys.stdout.flush()
    except (OSError, ValueError):
        with contextlib.suppress(OSError, ValueError):
            os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        raise


def _opened(descriptor: int, flags: int) -> TextIO:
    found = os.open(os.devnull, flags)
    try:
        os.fstat(descriptor)
    except OSError:
        os.dup2(found, descriptor)
        os.close(found)
        found = descriptor
    return os.fdopen(found, "r" if flags == os.O_RDONLY else "w", encoding="utf-8", closefd=False)


def _escaped(error: UnicodeError) -> tuple[str | bytes, int]:
    if not isinstance(error, UnicodeEncodeError):
        raise error
    codes = [ord(each) for each in error.object[error.start : error.end]]
    if all(0xDC80 <= code <= 0xDCFF for code in codes):
        return bytes(code - 0xDC00 for code in codes), error.end
    return codecs.backslashreplace_errors(error)
