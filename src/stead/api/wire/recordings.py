"""Wire models of recordings; the wire calls them terminals."""

from typing import Literal

from stead.api.wire import Time, Wire
from stead.guest.recordings import LogLine, RecordingInfo


class Recording(Wire):
    name: str
    status: Literal["running", "exited"]
    created: Time

    @classmethod
    def of(cls, info: RecordingInfo) -> "Recording":
        return cls(name=info.name, status=info.status, created=info.created_at)


class RecordingList(Wire):
    terminals: list[Recording]


class RecordingLine(Wire):
    line: str
    timestamp: Time

    @classmethod
    def of(cls, line: LogLine) -> "RecordingLine":
        return cls(line=line.text, timestamp=line.at)


class RecordingLogs(Wire):
    logs: list[RecordingLine]


class RecordingOutput(Wire):
    output: str
