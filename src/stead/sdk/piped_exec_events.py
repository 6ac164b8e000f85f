"""Decoder of the messages of a command over a WebSocket, without IO."""

from collections.abc import Iterator

from stead.sdk.errors import UnexpectedAnswer
from stead.sdk.events import ExecEvents
from stead.sdk.models import ExecEvent
from stead.sdk.sockets import parse_frame


class PipedExecEvents:
    """The events of one command whose standard input is written while it runs. `taken` counts its bytes."""

    def __init__(self) -> None:
        self._events = ExecEvents()
        self.taken = 0

    @property
    def finished(self) -> bool:
        """The command has ended."""
        return self._events.finished

    def feed(self, message: str | bytes) -> Iterator[ExecEvent]:
        """The events in a message of the WebSocket."""
        if isinstance(message, bytes):
            if not message or message[0] not in (1, 2):
                raise UnexpectedAnswer(f"invalid message of a command: unknown stream in {message[:20]!r}")
            yield self._events.output("stdout" if message[0] == 1 else "stderr", message[1:])
            return
        frame = parse_frame(message)
        taken = frame.get("bytes")
        if frame.get("type") == "taken" and isinstance(taken, int):
            self.taken += taken
        yield from self._events.event(frame)
