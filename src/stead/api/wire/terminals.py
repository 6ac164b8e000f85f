"""Wire models of named terminals."""

from typing import Literal

from stead.api.wire import Time, Wire
from stead.guest.terminals import LogLine, TerminalInfo


class Terminal(Wire):
    name: str
    status: Literal["running", "exited"]
    created: Time

    @classmethod
    def of(cls, info: TerminalInfo) -> "Terminal":
        return cls(name=info.name, status=info.status, created=info.created_at)


class TerminalList(Wire):
    terminals: list[Terminal]


class TerminalLine(Wire):
    line: str
    timestamp: Time

    @classmethod
    def of(cls, line: LogLine) -> "TerminalLine":
        return cls(line=line.text, timestamp=line.at)


class TerminalLogs(Wire):
    logs: list[TerminalLine]


class TerminalOutput(Wire):
    output: str
