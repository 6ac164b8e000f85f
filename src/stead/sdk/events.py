"""Decoders of NDJSON event streams, without IO."""

import base64
import binascii
import codecs
import json
from collections.abc import Iterator
from typing import Any, Literal

from stead.sdk.error_answers import api_error
from stead.sdk.errors import ServerUnreachable, SteadApiError, UnexpectedAnswer
from stead.sdk.models import ExecEvent, Exited, FileEvent, Output
from stead.sdk.parsing import parse


class JsonLines:
    """Splits bytes into JSON objects. Empty lines are keepalives and ignored."""

    def __init__(self) -> None:
        self._rest = b""

    def feed(self, data: bytes) -> Iterator[dict[str, Any]]:
        """The objects that these bytes complete."""
        *lines, self._rest = (self._rest + data).split(b"\n")
        for line in lines:
            yield from _object(line)

    def end(self) -> Iterator[dict[str, Any]]:
        """The last line, if it lacks only its newline; an incomplete object means that the stream was cut."""
        line, self._rest = self._rest, b""
        try:
            yield from _object(line)
        except UnexpectedAnswer:
            raise ServerUnreachable(f"the stream was cut in the middle of a line: {line[:100]!r}") from None


def _object(line: bytes) -> Iterator[dict[str, Any]]:
    if not line.strip():
        return
    try:
        found = json.loads(line)
    except ValueError:
        raise UnexpectedAnswer(f"invalid line in the stream: not JSON: {line[:100]!r}") from None
    if not isinstance(found, dict):
        raise UnexpectedAnswer(f"invalid line in the stream: not an object: {line[:100]!r}")
    yield found


class ExecEvents:
    """The events of one command. Unknown types of events are ignored."""

    def __init__(self) -> None:
        self._lines = JsonLines()
        decoder = codecs.getincrementaldecoder("utf-8")
        self._decoders = {"stdout": decoder(errors="replace"), "stderr": decoder(errors="replace")}
        self.finished = False

    def feed(self, data: bytes) -> Iterator[ExecEvent]:
        """The events that these bytes complete."""
        for line in self._lines.feed(data):
            yield from self.event(line)

    def end(self) -> Iterator[ExecEvent]:
        """The remaining events after the last byte. A stream without an exit event was cut."""
        for line in self._lines.end():
            yield from self.event(line)
        if not self.finished:
            raise ServerUnreachable("the stream was cut before the command ended", sent=True)

    def event(self, line: dict[str, Any]) -> Iterator[ExecEvent]:
        """The events of one JSON object."""
        match line.get("type"):
            case "stdout":
                yield self.output("stdout", _bytes(line))
            case "stderr":
                yield self.output("stderr", _bytes(line))
            case "exit":
                self.finished = True
                yield from self._undecoded()
                yield parse_exit(line)
            case "error":
                self.finished = True
                raise _stream_error(line)

    def output(self, stream: Literal["stdout", "stderr"], data: bytes) -> Output:
        """Output with its text: a character that is cut is completed by the next output."""
        return Output(stream, data, self._decoders[stream].decode(data))

    def _undecoded(self) -> Iterator[Output]:
        """Incomplete characters at the end of the output."""
        if text := self._decoders["stdout"].decode(b"", final=True):
            yield Output("stdout", b"", text)
        if text := self._decoders["stderr"].decode(b"", final=True):
            yield Output("stderr", b"", text)


def _bytes(line: dict[str, Any]) -> bytes:
    try:
        return base64.b64decode(line.get("data", ""), validate=True)
    except (binascii.Error, TypeError):
        raise UnexpectedAnswer("invalid output in the stream: not base64") from None


def _stream_error(line: dict[str, Any]) -> SteadApiError:
    """The error of an error event: the server stopped, or lost the VM, after the request had started."""
    error = api_error(0, line, "", None)
    error.retryable = False
    return error


def parse_exit(line: dict[str, Any]) -> Exited:
    code, signal, taken = line.get("statusCode"), line.get("signal"), line.get("durationMs")
    return Exited(
        status_code=code if isinstance(code, int) else -1,
        signal=str(signal) if signal is not None else None,
        timed_out=line.get("timedOut") is True,
        duration=taken / 1000 if isinstance(taken, int | float) else None,
    )


class FileEvents:
    """The events of a file watch."""

    def __init__(self) -> None:
        self._lines = JsonLines()

    def feed(self, data: bytes) -> Iterator[FileEvent]:
        """The events that these bytes complete."""
        for line in self._lines.feed(data):
            yield _file_event(line)

    def end(self) -> Iterator[FileEvent]:
        """The remaining events after the last byte."""
        for line in self._lines.end():
            yield _file_event(line)


def _file_event(line: dict[str, Any]) -> FileEvent:
    if line.get("type") == "error":
        raise _stream_error(line)
    return parse(FileEvent, line)
