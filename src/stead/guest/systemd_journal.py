"""A guest's systemd journal: queries for journalctl, and its output parsed as hostile input."""

import json
import re
import string
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from stead.deadlines import scaled
from stead.errors import GuestUnreachable, InvalidRequest
from stead.guest.agent import Agent
from stead.guest.execution import ExecRequest, collect
from stead.shares import Reserve, unlimited
from stead.tasks import Threads

_TIMEOUT = scaled(60.0)
_LEVELS = ("emerg", "alert", "crit", "error", "warning", "notice", "info", "debug")
_FIELDS = "MESSAGE,_SYSTEMD_UNIT,UNIT,PRIORITY,SYSLOG_IDENTIFIER"
_LITERAL = frozenset(string.ascii_letters + string.digits)
_LATEST = 253_402_300_799_999_999
"""The last microsecond of the year 9999, which is as far as dates go."""
_CURSOR = re.compile(r"[a-z]=[0-9a-f]{1,40}(;[a-z]=[0-9a-f]{1,40}){0,9}")
_TOO_LONG = "(message too long: read it with journalctl in the VM)"


@dataclass(frozen=True)
class Entry:
    """One line of the journal."""

    micros: int
    """Microseconds since the epoch, by the guest's clock; the same in every query."""
    message: str
    unit: str | None
    priority: str | None
    """As in syslog: "0" (emerg) to "7" (debug)."""
    cursor: str = ""
    """The position in the journal, for `JournalQuery.after`."""

    @property
    def at(self) -> float:
        return self.micros / 1e6

    @property
    def level(self) -> str:
        return _LEVELS[int(self.priority)] if self.priority is not None else "info"


@dataclass(frozen=True)
class JournalQuery:
    """Which lines to read: the oldest `limit` ones in a window of microseconds, both ends included."""

    since: int
    until: int
    limit: int
    after: str | None = None
    """Only lines after this cursor; takes the place of `since`."""
    unit: str | None = None
    search: str | None = None
    """Only messages that contain this text; ASCII letters match in either case."""

    @property
    def command(self) -> list[str]:
        command = ["journalctl", "--output=json", "--no-pager", "--quiet", f"--output-fields={_FIELDS}"]
        command += [f"--lines=+{self.limit}", f"--until={_moment(self.until)}"]
        # journalctl refuses both.
        command.append(
            f"--since={_moment(self.since)}" if self.after is None else f"--after-cursor={self.after}"
        )
        if self.unit is not None:
            command.append(f"--unit={self.unit if '.' in self.unit else f'{self.unit}.service'}")
        if self.search:
            command += ["--case-sensitive=no", f"--grep={_literal(self.search)}"]
        return command


@dataclass(frozen=True)
class JournalPage:
    """Lines in the journal's order. Unless `complete`, there are more after the last one."""

    entries: Sequence[Entry]
    complete: bool


async def read_journal(
    agent: Agent, query: JournalQuery, user: str | None = None, reserve: Reserve = unlimited
) -> JournalPage:
    """What `journalctl` shows to a Linux user (root by default).

    A user who may not open any journal file sees no lines. `reserve` is asked for the memory of the output.
    """
    request = ExecRequest(query.command, user=user, timeout=_TIMEOUT)
    result = await collect(agent, request, reserve=reserve)
    entries = await Threads.PARSING.run(parse, result.stdout, query.limit)
    if result.timed_out and not entries:
        raise GuestUnreachable(f"journalctl did not finish within {_TIMEOUT:g} s")
    if not entries and not result.ok and user is None and result.stderr.strip():
        reason = result.stderr[:500].decode(errors="replace").strip()
        raise InvalidRequest(f"cannot read the journal: {reason}")
    cut = result.timed_out or result.stdout_truncated
    return JournalPage(entries, complete=not entries or not (cut or len(entries) >= query.limit))


def is_cursor(text: str) -> bool:
    return _CURSOR.fullmatch(text) is not None


def parse(output: bytes, most: int = 1 << 20) -> list[Entry]:
    """The first `most` lines that `journalctl --output=json` printed, without those that are no entries."""
    lines = output.split(b"\n", most)
    # The last part is empty, an entry that was cut off, or more lines than were asked for.
    return [entry for line in lines[:-1] if (entry := _entry(line)) is not None]


def _entry(line: bytes) -> Entry | None:
    try:
        found = json.loads(line)
        micros = int(found["__REALTIME_TIMESTAMP"])
        cursor = str(found.get("__CURSOR", ""))
        message = _message(found)
        unit = found.get("UNIT") or found.get("_SYSTEMD_UNIT")
        priority = found.get("PRIORITY")
    except (ValueError, TypeError, KeyError, AttributeError, ArithmeticError, RecursionError):
        return None
    if not 0 <= micros <= _LATEST or (cursor and not is_cursor(cursor)):
        return None
    return Entry(
        micros=micros,
        message=message,
        unit=_clean(unit) if isinstance(unit, str) else None,
        priority=priority if isinstance(priority, str) and re.fullmatch("[0-7]", priority) else None,
        cursor=cursor,
    )


def _message(found: dict[str, Any]) -> str:
    """journalctl prints text that is not UTF-8 as a list of bytes, and text over 4096 bytes as null."""
    if "MESSAGE" not in found:
        return ""
    message = found["MESSAGE"]
    if message is None:
        return _TOO_LONG
    return _clean(bytes(message).decode(errors="replace") if isinstance(message, list) else str(message))


def _clean(text: str) -> str:
    """Replaces lone surrogates, which JSON can carry and UTF-8 cannot."""
    return text.encode(errors="replace").decode()


def _moment(micros: int) -> str:
    micros = max(0, micros)
    return f"@{micros // 1_000_000}.{micros % 1_000_000:06d}"


def _literal(text: str) -> str:
    """A PCRE2 pattern that matches this text and nothing else."""
    return "".join(
        character if character in _LITERAL or ord(character) > 127 else f"\\{character}" for character in text
    )
