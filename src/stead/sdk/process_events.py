"""Decoder of the messages of an attached process, without IO."""

import codecs
from typing import Literal

from stead.sdk.errors import UnexpectedAnswer
from stead.sdk.models import Exited, Output, OutputCut, ProcessEvent, ProcessInfo
from stead.sdk.parsing import parse
from stead.sdk.sockets import parse_frame

Stream = Literal["stdout", "stderr"]
_STREAMS: dict[int, Stream] = {1: "stdout", 2: "stderr"}


class ProcessEvents:
    """Turns messages into events and counts the bytes of output: `offset` is where a client continues."""

    def __init__(self, offset: int) -> None:
        self.offset = offset
        self.info: ProcessInfo | None = None
        """The process as the server last described it."""
        self.finished = False
        decoder = codecs.getincrementaldecoder("utf-8")
        self._decoders: dict[Stream, codecs.IncrementalDecoder] = {
            "stdout": decoder(errors="replace"),
            "stderr": decoder(errors="replace"),
        }

    def feed(self, message: str | bytes) -> list[ProcessEvent]:
        """The events in a message of the WebSocket."""
        if isinstance(message, bytes):
            return [self._output(message)]
        frame = parse_frame(message)
        match frame.get("type"):
            case "process":
                self.info = parse(ProcessInfo, frame)
            case "cut":
                cut = parse(OutputCut, frame)
                self.offset = cut.end
                return [cut]
            case "exited":
                self.finished = True
                self.info = parse(ProcessInfo, frame)
                code = self.info.exit_code
                return [
                    *self._undecoded(),
                    Exited(-1 if code is None else code, self.info.signal, self.info.timed_out),
                ]
        return []

    def _output(self, message: bytes) -> Output:
        stream = _STREAMS.get(message[0]) if message else None
        if stream is None:
            raise UnexpectedAnswer(f"invalid message of a process: unknown stream in {message[:20]!r}")
        data = message[1:]
        self.offset += len(data)
        return Output(stream, data, self._decoders[stream].decode(data))

    def _undecoded(self) -> list[ProcessEvent]:
        """Incomplete characters at the end of the output."""
        texts = {stream: decoder.decode(b"", final=True) for stream, decoder in self._decoders.items()}
        return [Output(stream, b"", text) for stream, text in texts.items() if text]
