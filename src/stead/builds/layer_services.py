"""Services of a layer: write unit files, start them in dependency order, wait, and diagnose failures."""

import asyncio
import contextlib
import json
import secrets
from collections.abc import AsyncIterator, Collection, Mapping, Sequence
from dataclasses import dataclass

from stead.builds.errors import Diagnostics, ServiceLog, ServiceStates, SetupFailed, last_line
from stead.builds.records import Part
from stead.builds.spec import Service, ServicePatch
from stead.builds.units import (
    FOLDER,
    passing_file,
    passing_requirement,
    passing_units,
    patch_unit,
    reference,
    service_unit,
)
from stead.builds.validation import unit_name
from stead.deadlines import scaled
from stead.errors import SteadError
from stead.guest.execution import SMALL_OUTPUT, Ended, ExecResult
from stead.machines.machine import Machine
from stead.tasks import in_background

_ASK_OUTPUT = 2 << 20
_ASK_TIMEOUT = scaled(120.0)
_DRAIN_TIMEOUT = scaled(15.0)
_LOG_LINES = 100
_LOG_CHARACTERS = 16_000
_MOST_LOGS = 8
_MAX_COMMAND = 200
_OUTPUT_LINES = 20
_EXEC_FAILED = "203"
"""Exit status that systemd gives to a program that it could not execute."""


@dataclass(frozen=True)
class ReadyWait:
    """How long to wait for services: for oneshots until they exit, for others until they are ready.

    None is no limit, 0 does not wait. `must`: whether a timeout is a failure.
    """

    timeout: float | None = None
    must: bool = True


@dataclass(frozen=True)
class UnitState:
    unit: str
    load: str
    active: str
    sub: str
    result: str
    exit_status: str
    job: str

    @property
    def failed(self) -> bool:
        """Whether it failed. A unit that deleted itself after success is active without a unit file."""
        return self.active == "failed" or (self.load != "loaded" and self.active == "inactive")

    @property
    def late(self) -> bool:
        return self.active not in ("active", "inactive") or self.job not in ("", "0")

    def describe(self, command: str = "", output: str = "") -> str:
        """The state as a failure: what ran, how it ended, and the last line that it printed."""
        what = f"{command!r} ({self.unit})" if command else self.unit
        if self.load == "not-found":
            return f"{self.unit} does not exist"
        if self.load != "loaded":
            return f"{self.unit} has an invalid unit file"
        if self.result == "exit-code":
            hint = " (systemd could not execute it)" if self.exit_status == _EXEC_FAILED else ""
            text = f"{what} exited with {self.exit_status}{hint}"
        elif self.result not in ("", "success"):
            text = f"{what} failed: {self.result}"
        else:
            text = f"{what} is {self.active} ({self.sub})"
        return f"{text}: {output}" if output else text


def late_units(states: Sequence[UnitState]) -> list[str]:
    """Units that are not ready after a timeout; on a slow host systemd may not have started any of them."""
    late = [state.unit for state in states if state.late]
    return late or [state.unit for state in states if state.active != "active"] or ["systemd is busy"]


def command_of(service: ServicePatch, files: Mapping[str, bytes]) -> str:
    """What a service runs, in one line: the command of a `run` step, or the first line of `exec`.

    SDKs write the command of a `run` step into a script and send a service that runs it with bash.
    """
    line = next((line.strip() for line in service.exec or () if line.strip()), "")
    script = files.get(line.removeprefix("/bin/bash ").strip())
    if script is not None:
        lines = [each.strip() for each in script.decode(errors="replace").splitlines()]
        lines = [each for each in lines if each and not each.startswith(("#", "set -"))]
        if lines:
            line = lines[0] if len(lines) == 1 else f"{lines[0]} ..."
    return line if len(line) <= _MAX_COMMAND else f"{line[:_MAX_COMMAND]}..."


class LayerServices:
    """The services of a layer in one VM; `files` are the layer's files, by path."""

    def __init__(
        self,
        machine: Machine,
        services: Sequence[Service],
        patches: Sequence[ServicePatch] = (),
        files: Mapping[str, bytes] | None = None,
    ) -> None:
        self._machine = machine
        self._services = services
        self._patches = patches
        self._own = {unit_name(service.name) for service in services}
        self._passing = passing_units(services)
        given = (*patches, *services)
        self._commands = {unit_name(each.name): command_of(each, files or {}) for each in given}

    async def install(self) -> None:
        """Write unit files and drop-ins, make systemd load them, and enable what starts at boot."""
        files = self._machine.files()
        for service in self._services:
            unit = unit_name(service.name)
            text = service_unit(service, self._own, self._passing)
            await files.write(f"{FOLDER}/{unit}", text.encode(), mode=0o644)
            for required in {reference(name, self._own) for name in service.requires} & self._passing:
                drop_in = passing_requirement(required).encode()
                await files.write(passing_file(unit, required), drop_in, mode=0o644)
        for patch in self._patches:
            drop_in = patch_unit(patch, self._own).encode()
            await files.write(f"{FOLDER}/{unit_name(patch.name)}.d/stead.conf", drop_in, mode=0o644)
        await self._check_patched()
        enabled = [unit_name(service.name) for service in self._services if service.enable is not False]
        enabled += [unit_name(patch.name) for patch in self._patches if patch.enable]
        # `enable` reloads the unit files by itself.
        await self._systemctl(*(("enable", *enabled) if enabled else ("daemon-reload",)))
        disabled = [unit_name(patch.name) for patch in self._patches if patch.enable is False]
        if disabled:
            await self._systemctl("disable", "--now", *disabled)
        for patch in self._patches:
            for target in patch.wanted_by or ():
                await self._systemctl("add-wants", reference(target, self._own), unit_name(patch.name))

    async def start(self, part: Part, waiting: ReadyWait) -> None:
        """Start services in dependency order; SetupFailed, with diagnostics, when one fails."""
        units = [unit_name(service.name) for service in self._services if service.enable is not False]
        units += [unit_name(patch.name) for patch in self._patches if patch.enable]
        # Restart other changed services if they run.
        changed = [unit_name(patch.name) for patch in self._patches if patch.enable is None]
        changed = [unit for unit in changed if unit not in units]
        try:
            if changed:
                await self._systemctl("try-restart", *changed)
            if units:
                await self._start(part, units, waiting)
        except SetupFailed as error:
            error.diagnostics = await self._diagnose(units + changed)
            for each in error.diagnostics.failed_logs:
                await part.note(f"log of {each.unit}:\n{each.log}", service=each.unit)
            raise

    async def _start(self, part: Part, units: list[str], waiting: ReadyWait) -> None:
        """`restart` and not `start`: a layer below may have started a service of the same name."""
        if waiting.timeout == 0:
            result = await self._run("systemctl", "restart", "--no-block", "--", *units)
            if not result.ok:
                raise _refused(result)
            await self._raise_failure(await self._states(units))
            return
        async with self._following(part, units):
            command = ["systemctl", "restart", "--", *units]
            result = await self._machine.exec(command, timeout=waiting.timeout, output_limit=SMALL_OUTPUT)
        states = await self._states(units)
        await self._raise_failure(states)
        if result.timed_out:
            text = f"not ready within {waiting.timeout:g} s: {', '.join(late_units(states))}"
            if waiting.must:
                raise SetupFailed("services", text)
            await part.note(f"{text}; continuing without it", level="warn")
        elif not result.ok:
            down = next((state for state in states if state.late), None)
            raise _refused(result) if down is None else await self._failure(down)
        else:
            await self._unload_deleted_units()

    async def _unload_deleted_units(self) -> None:
        """Unload units that deleted themselves, with the dependencies of other units on them."""
        gone = sorted(self._passing)
        if gone:
            await self._systemctl("daemon-reload")
            await self._run("systemctl", "stop", "--", *gone)

    async def _raise_failure(self, states: Sequence[UnitState]) -> None:
        failed = [state for state in states if state.failed]
        if failed:
            raise await self._failure(failed[0])

    async def _failure(self, state: UnitState) -> SetupFailed:
        command = ["journalctl", "--no-pager", "--output=cat", f"--lines={_OUTPUT_LINES}"]
        printed = await self._run(*command, f"_SYSTEMD_UNIT={state.unit}", "_TRANSPORT=stdout")
        output = last_line(printed.stdout.decode(errors="replace"))
        return SetupFailed("services", state.describe(self._commands.get(state.unit, ""), output))

    async def _check_patched(self) -> None:
        units = [unit_name(patch.name) for patch in self._patches]
        for state in await self._states(units) if units else ():
            if state.load == "not-found":
                raise SetupFailed("services", f"cannot change {state.unit}: it does not exist")

    # Queries

    async def _states(self, units: Sequence[str]) -> list[UnitState]:
        names = ("LoadState", "ActiveState", "SubState", "Result", "ExecMainStatus", "Job")
        wanted = f"--property={','.join(names)}"
        result = await self._run("systemctl", "show", "--no-pager", wanted, "--", *units)
        states = []
        for unit, block in zip(units, result.stdout.decode(errors="replace").split("\n\n"), strict=False):
            facts = dict(line.split("=", 1) for line in block.splitlines() if "=" in line)
            states.append(UnitState(unit, *(facts.get(name, "") for name in names)))
        return states

    async def _diagnose(self, units: Collection[str]) -> Diagnostics:
        """States of all services, and log tails of those that failed or did not become ready."""
        found: dict[tuple[str, str], list[str]] = {}
        logs: list[ServiceLog] = []
        with contextlib.suppress(SteadError, ValueError):
            arguments = ("list-units", "--type=service", "--all", "--no-pager", "--output=json")
            listed = json.loads((await self._run("systemctl", *arguments)).stdout)
            for each in listed:
                found.setdefault((each["active"], each["sub"]), []).append(each["unit"])
            bad = [each["unit"] for each in listed if each["active"] in ("failed", "activating")]
            bad.sort(key=lambda unit: unit not in units)
            for unit in bad[:_MOST_LOGS]:
                logs.append(ServiceLog(unit, await self._log(unit)))
        states = [ServiceStates(active, sub, sorted(names)) for (active, sub), names in sorted(found.items())]
        return Diagnostics(states, logs)

    async def _log(self, unit: str) -> str:
        command = ["journalctl", "--no-pager", "--output=cat", f"--lines={_LOG_LINES}", f"--unit={unit}"]
        result = await self._run(*command)
        return result.stdout.decode(errors="replace").strip()[-_LOG_CHARACTERS:]

    @contextlib.asynccontextmanager
    async def _following(self, part: Part, units: Sequence[str]) -> AsyncIterator[None]:
        """Copy what these units print during the block into the build's log, to the last line."""
        mark = f"stead-{secrets.token_hex(8)}"
        since = (await self._run("date", "+%s.%6N")).stdout.decode().strip()
        async with in_background(self._follow(part, units, since, mark)) as follower:
            yield
            # When the mark has been read, so has every line before it.
            await self._run("systemd-cat", "--identifier", mark, "echo", "end")
            await asyncio.wait({follower}, timeout=_DRAIN_TIMEOUT)

    async def _follow(self, part: Part, units: Sequence[str], since: str, mark: str) -> None:
        matches = [word for unit in units for word in (f"_SYSTEMD_UNIT={unit}", "+", f"UNIT={unit}", "+")]
        fields = "--output-fields=MESSAGE,SYSLOG_IDENTIFIER,_SYSTEMD_UNIT,UNIT"
        command = ["journalctl", "--follow", "--no-tail", "--output=json", fields, f"--since=@{since}"]
        rest = b""
        stream = self._machine.stream([*command, *matches, f"SYSLOG_IDENTIFIER={mark}"])
        async with contextlib.aclosing(stream) as events:
            async for event in events:
                if isinstance(event, Ended) or event.stream != "stdout":
                    continue
                *lines, rest = (rest + event.data).split(b"\n")
                for line in lines:
                    entry = _entry(line)
                    if entry.get("SYSLOG_IDENTIFIER") == mark:
                        return
                    message = _message(entry.get("MESSAGE"))
                    unit = entry.get("UNIT") or entry.get("_SYSTEMD_UNIT")
                    if message:
                        await part.note(message, service=str(unit) if unit else None)

    async def _systemctl(self, verb: str, *arguments: str) -> None:
        result = await self._run("systemctl", "--quiet", verb, *arguments)
        if not result.ok:
            raise _refused(result)

    async def _run(self, *command: str) -> ExecResult:
        return await self._machine.exec(command, timeout=_ASK_TIMEOUT, output_limit=_ASK_OUTPUT)


def _refused(result: ExecResult) -> SetupFailed:
    said = result.stderr.decode(errors="replace").strip() or f"systemd did not answer in {_ASK_TIMEOUT:g} s"
    return SetupFailed("services", said[-2000:])


def _entry(line: bytes) -> dict[str, object]:
    try:
        entry = json.loads(line)
    except ValueError:
        return {}
    return entry if isinstance(entry, dict) else {}


def _message(value: object) -> str:
    """A journal message; journalctl prints one that is not UTF-8 as a list of bytes."""
    if isinstance(value, list):
        value = bytes(number for number in value if isinstance(number, int)).decode(errors="replace")
    return str(value or "").strip()
