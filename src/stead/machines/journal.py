"""What the services inside a machine wrote into its journal."""

import json
from dataclasses import dataclass
from typing import Any

from stead.errors import GuestUnreachable, InvalidRequest
from stead.machines.machine import Machine

_TIMEOUT = 60.0
_LEVELS = ("emerg", "alert", "crit", "error", "warning", "notice", "info", "debug")


@dataclass(frozen=True)
class Entry:
    """One line of the journal; `at` in seconds, to the microsecond, and never another when asked again."""

    at: float
    message: str
    unit: str | None
    priority: str | None
    """As syslog has it, from 0 to 7."""

    @property
    def level(self) -> str:
        number = int(self.priority or 6)
        return _LEVELS[number] if 0 <= number < len(_LEVELS) else "info"


async def read_journal(
    machine: Machine,
    unit: str | None = None,
    *,
    since: float | None = None,
    until: float | None = None,
    search: str | None = None,
    limit: int = 1000,
    user: str | None = None,
) -> list[Entry]:
    """The newest lines that fit, oldest first."""
    command = ["journalctl", "--output=json", "--no-pager", "--quiet", f"--lines={limit}"]
    fields = "MESSAGE,_SYSTEMD_UNIT,UNIT,PRIORITY,SYSLOG_IDENTIFIER"
    command.append(f"--output-fields={fields}")
    if unit is not None:
        command.append(f"--unit={unit if '.' in unit else f'{unit}.service'}")
    if since is not None:
        command.append(f"--since=@{max(0.0, since):.6f}")
    if until is not None:
        command.append(f"--until=@{max(0.0, until):.6f}")
    result = await machine.exec(command, user=user, timeout=_TIMEOUT)
    if result.timed_out:
        raise GuestUnreachable("the machine's journal was not read in time")
    if not result.ok and result.stderr.strip():
        raise InvalidRequest(f"the journal cannot be read: {result.stderr.decode(errors='replace').strip()}")
    entries = parse(result.stdout)
    wanted = search.lower() if search else ""
    return [entry for entry in entries if wanted in entry.message.lower()]


def parse(output: bytes) -> list[Entry]:
    """What `journalctl --output=json` printed."""
    return [_entry(json.loads(line)) for line in output.splitlines() if line.startswith(b"{")]


def _entry(found: dict[str, Any]) -> Entry:
    unit = found.get("UNIT") or found.get("_SYSTEMD_UNIT")
    return Entry(
        at=int(found["__REALTIME_TIMESTAMP"]) / 1e6,
        message=_message(found.get("MESSAGE")),
        unit=None if unit is None else str(unit),
        priority=found.get("PRIORITY"),
    )


def _message(message: Any) -> str:
    """The journal gives text that is not UTF-8 as a list of bytes, and text that is too long as null."""
    if isinstance(message, list):
        return bytes(message).decode(errors="replace")
    return message or ""
