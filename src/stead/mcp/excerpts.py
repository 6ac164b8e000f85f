"""Bounded output: what a model reads of a long text, with a mark where it was cut."""

import base64
import codecs


class Excerpt:
    """The first quarter and the last three quarters of a text of any length, within a limit of characters."""

    def __init__(self, limit: int) -> None:
        self._head_limit = limit // 4
        self._tail_limit = limit - self._head_limit
        self._head = ""
        self._tail = ""
        self.left_out = 0
        """Characters between the two parts."""

    def add(self, text: str) -> None:
        room = self._head_limit - len(self._head)
        self._head += text[:room] if room else ""
        tail = self._tail + text[room:]
        self._tail = tail[-self._tail_limit :]
        self.left_out += len(tail) - len(self._tail)

    @property
    def last_line(self) -> str:
        return (self._tail or self._head).rstrip().rpartition("\n")[2]

    def __str__(self) -> str:
        mark = f"\n[... {self.left_out} characters left out ...]\n" if self.left_out else ""
        return self._head + mark + self._tail


def decoded(data: bytes, *, at_end: bool) -> tuple[str, str, int]:
    """Bytes as content for a model: its encoding ("utf-8" or "base64"), the content, and the bytes it covers.

    If more bytes follow, a character that is cut at the end of the data is left to the next read.
    """
    decoder = codecs.getincrementaldecoder("utf-8")()
    try:
        text = decoder.decode(data, final=at_end)
    except UnicodeDecodeError:
        return "base64", base64.b64encode(data).decode(), len(data)
    rest = len(decoder.getstate()[0])
    if "\0" in text or (data and rest == len(data)):
        return "base64", base64.b64encode(data).decode(), len(data)
    return "utf-8", text, len(data) - rest


def encoded(content: str, encoding: str) -> bytes:
    """The bytes of content that a model wrote."""
    if encoding == "utf-8":
        return content.encode()
    try:
        return base64.b64decode(content, validate=True)
    except ValueError as error:
        raise ValueError(f"content is not valid base64: {error}") from None
