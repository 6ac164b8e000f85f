"""Systemd services of a running VM: list, create, delete, start, stop, status and logs."""

import json
from collections.abc import Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from typing import Literal

from stead.builds.spec import Service
from stead.builds.units import FOLDER, service_unit
from stead.builds.validation import OWN_UNITS, check_service, check_service_name, unit_name
from stead.deadlines import scaled
from stead.errors import GuestError, InvalidRequest, SteadError
from stead.guest.execution import ExecResult
from stead.guest.systemd_journal import Entry, parse
from stead.machines.machine import Machine
from stead.shares import Reserve, unlimited
from stead.tasks import Threads

Verb = Literal["start", "stop", "restart"]

DEFAULT_LINES = 1000
MAX_LINES = 10_000
_TIMEOUT = scaled(120.0)
_JOB_TIMEOUT = scaled(120.0)
"""Seconds to wait for a start or a stop; systemd continues with it after that."""
_NEW_TIMEOUT = scaled(30.0)
"""The same for a new service: a oneshot may be a job of hours, and its creator does not wait for that."""
_LOG_LIMIT = 64 << 20
_OUTPUT_LIMIT = 2 << 20
"""Bytes of systemctl's output: thousands of units."""
_EXISTS = 17
_DENIED = 13
_OVERDUE = 124
"""The exit code of timeout(1)."""
_REFUSALS = ("authentication", "access denied", "permission denied", "insufficient permissions")


class ServiceNotFound(SteadError):
    def __init__(self, name: str) -> None:
        super().__init__(f"service {name} not found")
        self.name = name


class ServiceExists(SteadError):
    def __init__(self, name: str) -> None:
        super().__init__(f"service {name} already exists")
        self.name = name


class ServicesBusy(SteadError):
    """The VM is overloaded, or systemd in it does not answer: try again."""


@dataclass(frozen=True)
class ServiceStatus:
    """State of a service, with systemd's names for it."""

    name: str
    active_state: str
    sub_state: str
    load_state: str
    description: str


@dataclass(frozen=True)
class Outcome:
    """Result of a start, stop or restart."""

    service: str
    ok: bool
    message: str


@dataclass(frozen=True)
class CreatedService:
    """A new service: what was done, and its state after that."""

    message: str
    active_state: str
    sub_state: str


class GuestServices:
    """The services of one VM, as a Linux user; most changes need root."""

    def __init__(self, machine: Machine, user: str | None = None) -> None:
        self._machine = machine
        self._user = user

    async def list(self) -> list[str]:
        """Names of the services that systemd has loaded, and of those that were added to the VM."""
        answer = await self._script(_LIST)
        loaded, _, added = answer.stdout.partition(b"\0")
        names = {entry["unit"] for entry in json.loads(loaded or b"[]") if entry["load"] == "loaded"}
        names |= {name for name in added.decode(errors="replace").splitlines() if "@." not in name}
        return sorted(_short(name) for name in names if not _own(name))

    async def create(self, service: Service) -> CreatedService:
        """Create a service, and start it, now and at every boot, unless `enable` is False.

        Waits until the service is active, or has failed, but not for ever: the answer says which. It exists
        although it fails.
        """
        check_service(service)
        unit, name = unit_name(service.name), _short(unit_name(service.name))
        enable = service.enable is not False
        content = service_unit(service, {unit}).encode()
        limit = f"{_NEW_TIMEOUT:g}"
        done = await self._script(_CREATE, unit, "1" if enable else "", limit, stdin=content)
        result, active_state, sub_state = (*done.stdout.decode(errors="replace").split("\n"), "", "")[:3]
        match result:
            case "created":
                message = f"service {name} created"
            case "started":
                message = f"service {name} created and started"
            case "starting":
                message = f"service {name} created; it is still starting after {limit} s"
            case _:
                message = f"service {name} created, but cannot start: {_reason(done)}"
        return CreatedService(message, active_state, sub_state)

    async def delete(self, name: str) -> None:
        """Stop a service that was added to the VM, and delete it."""
        unit = _unit(name)
        facts = await self._show(unit)
        if not facts["FragmentPath"].startswith(f"{FOLDER}/"):
            raise InvalidRequest(
                f"service {_short(unit)} is part of the system and cannot be deleted; stop it instead"
            )
        await self._script(_DELETE, unit, timeout=_JOB_TIMEOUT)

    async def status(self, name: str) -> ServiceStatus:
        unit = _unit(name)
        facts = await self._show(unit)
        return ServiceStatus(
            name=_short(unit),
            active_state=facts["ActiveState"],
            sub_state=facts["SubState"],
            load_state=facts["LoadState"],
            description=facts["Description"],
        )

    async def logs(
        self, name: str, lines: int | None = None, since: str | None = None, reserve: Reserve = unlimited
    ) -> Sequence[Entry]:
        """The last log lines of a service, and systemd's messages about it.

        `since` is a time in ISO 8601, or in journalctl's syntax. `reserve` is asked for memory.
        """
        unit = _unit(name)
        count = min(DEFAULT_LINES if lines is None else lines, MAX_LINES)
        command = ["journalctl", f"--unit={unit}", f"--lines={count}", "--output=json", "--quiet"]
        command.append("--output-fields=MESSAGE,PRIORITY,UNIT,_SYSTEMD_UNIT")
        if since is not None:
            command.append(f"--since={_parse_time(since)}")
        done = await self._exec(command, timeout=_TIMEOUT, output_limit=_LOG_LIMIT, reserve=reserve)
        if b"parse timestamp" in done.stderr:
            raise InvalidRequest(f"since: {since!r} is not a time like 2026-01-31T12:00:00Z")
        if not done.ok:
            # journalctl also fails when there are no lines yet.
            self._refuse(done)
        entries = await Threads.PARSING.run(parse, done.stdout, count)
        if not entries:
            await self._show(unit)
        return entries

    async def change(self, verb: Verb, names: Sequence[str]) -> Sequence[Outcome]:
        """Change services one after the other, in the order given; a failure does not stop the others."""
        return [await self._change_one(verb, name) for name in names]

    async def _change_one(self, verb: Verb, name: str) -> Outcome:
        try:
            unit = _unit(name)
        except SteadError as error:
            return Outcome(name, False, str(error))
        command = ["systemctl", verb, unit]
        done = await self._exec(command, timeout=_JOB_TIMEOUT)
        if done.timed_out:
            return Outcome(
                name,
                False,
                f"{verb} of {name} takes longer than {_JOB_TIMEOUT:g} s; systemd continues with it",
            )
        past = {"start": "started", "stop": "stopped", "restart": "restarted"}[verb]
        return Outcome(name, done.ok, f"service {name} {past}" if done.ok else _reason(done))

    async def _show(self, unit: str) -> dict[str, str]:
        properties = "LoadState,ActiveState,SubState,Description,FragmentPath"
        done = await self._exec(["systemctl", "show", f"--property={properties}", unit], timeout=_TIMEOUT)
        self._check(done)
        text = done.stdout.decode(errors="replace")
        facts = dict(line.split("=", 1) for line in text.splitlines() if "=" in line)
        if facts.get("LoadState", "not-found") == "not-found":
            raise ServiceNotFound(_short(unit))
        return facts

    async def _script(
        self, script: str, unit: str = "", *arguments: str, stdin: bytes = b"", timeout: float = _TIMEOUT
    ) -> ExecResult:
        command = ["/bin/sh", "-c", script, "sh", unit, *arguments]
        done = await self._exec(command, stdin=stdin, timeout=timeout)
        if done.exit_code == _EXISTS:
            raise ServiceExists(_short(unit))
        self._check(done)
        return done

    async def _exec(
        self,
        command: Sequence[str],
        *,
        timeout: float,
        stdin: bytes | None = None,
        output_limit: int = _OUTPUT_LIMIT,
        reserve: Reserve = unlimited,
    ) -> ExecResult:
        try:
            return await self._machine.exec(
                command,
                user=self._user,
                stdin=stdin,
                timeout=timeout,
                output_limit=output_limit,
                reserve=reserve,
            )
        except GuestError as error:
            if error.code == "busy":
                raise ServicesBusy(str(error)) from None
            raise

    def _check(self, done: ExecResult) -> None:
        if done.timed_out:
            raise ServicesBusy(f"systemd in the VM did not answer in {_TIMEOUT:g} s")
        if not done.ok:
            self._refuse(done)
            raise GuestError("internal", _reason(done))

    def _refuse(self, done: ExecResult) -> None:
        said = done.stderr.decode(errors="replace").lower()
        if done.exit_code == _DENIED or any(word in said for word in _REFUSALS):
            who = self._user or "root"
            raise GuestError("permission_denied", f"Linux user {who} may not do this: {_reason(done)}")


_LIST = f"""
set -e
systemctl list-units --type=service --all --output=json --no-pager
printf '\\0'
find {FOLDER} -maxdepth 1 -name '*.service' -type f -printf '%f\\n'
"""

_CREATE = f"""
set -e
state=$(systemctl show --property=LoadState --value "$1")
[ "$state" = not-found ] || exit {_EXISTS}
[ -w {FOLDER} ] || {{ echo "{FOLDER} is not writable" >&2; exit {_DENIED}; }}
umask 022
set -C
true >"{FOLDER}/$1" || exit {_EXISTS}
set +C
cat >"{FOLDER}/$1" || {{ rm -f "{FOLDER}/$1"; exit 1; }}
if [ -z "$2" ]; then
    systemctl daemon-reload
    echo created
elif systemctl --quiet enable "$1" && timeout "$3" systemctl start "$1"; then
    echo started
elif [ $? = {_OVERDUE} ]; then
    echo starting
else
    echo failed
fi
systemctl show --property=ActiveState --property=SubState --value "$1"
"""

_DELETE = f"""
systemctl stop "$1" || exit
rm -rf "{FOLDER}/$1" "{FOLDER}/$1.d" "{FOLDER}"/*.wants/"$1" || exit
systemctl daemon-reload || exit
systemctl --quiet reset-failed "$1" 2>/dev/null || true
"""


def _unit(name: str) -> str:
    """The unit of a name. Stead's own services are hidden."""
    check = unit_name(name)
    if _own(check):
        raise ServiceNotFound(name)
    check_service_name(name)
    return check


def _own(unit: str) -> bool:
    return unit in OWN_UNITS


def _short(unit: str) -> str:
    return unit.removesuffix(".service")


def _reason(done: ExecResult) -> str:
    """The first line of systemctl's error output; the rest are hints for a terminal."""
    lines = done.stderr.decode(errors="replace").strip().splitlines()
    return lines[0] if lines else f"systemctl exited with {done.exit_code or done.signal}"


def _parse_time(since: str) -> str:
    try:
        moment = datetime.fromisoformat(since)
    except ValueError:
        if not since or not since.isprintable():
            raise InvalidRequest(f"since: {since!r} is not a time like 2026-01-31T12:00:00Z") from None
        return since
    if moment.tzinfo is None:
        moment = moment.replace(tzinfo=UTC)
    return f"@{moment.timestamp():.6f}"
