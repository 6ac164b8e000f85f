"""Routes that Caddy reads from files: a folder per host name, with one empty file named ADDRESS:PORT.

Caddy's file matcher finds the file at each request, so a change takes effect at once, without a reload of its
configuration and without a call of this process. A name without a file is admitted by the gate first.
"""

import asyncio
import contextlib
import os
import re
import shutil
from collections import defaultdict
from collections.abc import Callable, Collection, Iterable
from dataclasses import dataclass
from functools import partial
from ipaddress import IPv4Address
from pathlib import Path
from typing import Protocol

from stead.logs import get_logger
from stead.machines.processes import Eviction
from stead.shares import SharedEntries

log = get_logger("stead.edge")

MAX_ROUTES = 20_000
"""Host names with a file. A wildcard may stand for any number of names, so each account has a share."""
_HOST = re.compile(r"[a-z0-9](?:[a-z0-9.-]{0,251}[a-z0-9])?")


class MappedPort(Protocol):
    """Where requests for a host name go."""

    @property
    def domain(self) -> str:
        """The name that is mapped, or the wildcard."""

    @property
    def account(self) -> str: ...
    @property
    def machine(self) -> str: ...
    @property
    def port(self) -> int: ...


class RouteSource(Protocol):
    """The mappings."""

    def route(self, hostname: str) -> MappedPort | None:
        """The VM and port of a mapped name; None for any other."""


def host_of(text: str) -> str | None:
    """A host name as clients send it, in the form of the mappings: lower case, without a dot at its end."""
    host = text.lower().removesuffix(".")
    return host if _HOST.fullmatch(host) and ".." not in host else None


def private_folder(folder: Path, group: int) -> None:
    """An empty folder that root writes and a group reads: local users do not learn the names in it."""
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir(parents=True)
    os.chown(folder, -1, group)
    folder.chmod(0o750)


class HostsByName:
    """Host names, found by mapped names: `*.example.com` finds all that are one label longer."""

    def __init__(self) -> None:
        self._hosts: set[str] = set()
        self._by_parent: defaultdict[str, set[str]] = defaultdict(set)

    def add(self, host: str) -> None:
        self._hosts.add(host)
        self._by_parent[host.partition(".")[2]].add(host)

    def remove(self, host: str) -> None:
        self._hosts.discard(host)
        parent = host.partition(".")[2]
        self._by_parent[parent].discard(host)
        if not self._by_parent[parent]:
            del self._by_parent[parent]

    def matching(self, names: Iterable[str]) -> list[str]:
        found: set[str] = set()
        for name in names:
            if name.startswith("*."):
                found |= self._by_parent.get(name.removeprefix("*."), set())
            elif name in self._hosts:
                found.add(name)
        return list(found)


@dataclass(frozen=True)
class _Entry:
    machine: str
    port: int
    upstream: str


@dataclass(eq=False)
class AwakeVm:
    """A VM that is up."""

    address: IPv4Address
    eviction: "asyncio.Future[Eviction]"
    """Done when this run of the VM ends or the VM is suspended."""


class RouteFiles:
    """The files of VMs that are up. All of a VM's files are removed when its run ends."""

    def __init__(
        self,
        folder: Path,
        source: RouteSource,
        ended: Callable[[str, IPv4Address], None],
        group: int,
        most: int = MAX_ROUTES,
    ) -> None:
        """`ended` is called with a VM and its address after the removal of its files, when its run ends.

        `group` is the Linux group of Caddy, which alone reads the folder.
        """
        self._folder = folder
        self._source = source
        self._ended = ended
        self._entries: dict[str, _Entry] = {}
        self._shares: SharedEntries[str] = SharedEntries(most)
        self._hosts = HostsByName()
        self._by_machine: defaultdict[str, set[str]] = defaultdict(set)
        self._watched: dict[str, asyncio.Future[Eviction]] = {}
        self._closed = False
        private_folder(folder, group)

    def put(self, host: str, route: MappedPort, awake: AwakeVm) -> None:
        """Let requests for a host name go straight to a VM, until its run ends or the mapping changes."""
        entry = _Entry(route.machine, route.port, f"{awake.address}:{route.port}")
        before = self._entries.get(host)
        if before == entry and self._watched.get(route.machine) is awake.eviction:
            return
        self._write(host, before, entry)
        if before is not None:
            self._forget(host, before)
        self._entries[host] = entry
        self._hosts.add(host)
        oldest = self._shares.add(host, route.account)
        if oldest is not None:
            self.remove(oldest)
        self._by_machine[route.machine].add(host)
        if self._watched.get(route.machine) is not awake.eviction:
            self._watched[route.machine] = awake.eviction
            awake.eviction.add_done_callback(partial(self._evict, route.machine, awake.address))

    def remove(self, host: str) -> None:
        entry = self._entries.pop(host, None)
        if entry is None:
            return
        folder = self._folder / host
        with contextlib.suppress(FileNotFoundError):
            (folder / entry.upstream).unlink()
        with contextlib.suppress(FileNotFoundError):
            folder.rmdir()
        self._forget(host, entry)

    def recheck(self, changed: Collection[str] | None = None) -> None:
        """Remove the files whose mapping has changed. Call it after each change of the mappings, with the
        names and wildcards that changed; None for all."""
        for host in list(self._entries) if changed is None else self._hosts.matching(changed):
            entry, route = self._entries[host], self._source.route(host)
            if route is None or (route.machine, route.port) != (entry.machine, entry.port):
                self.remove(host)

    def close(self) -> None:
        """Remove all files. `ended` is not called any more."""
        self._closed = True
        for host in list(self._entries):
            self.remove(host)
        shutil.rmtree(self._folder, ignore_errors=True)

    def _write(self, host: str, before: _Entry | None, entry: _Entry) -> None:
        folder = self._folder / host
        if before is not None:
            # Rename is atomic: Caddy sees exactly one file.
            (folder / before.upstream).rename(folder / entry.upstream)
            return
        folder.mkdir(mode=0o755)
        folder.chmod(0o755)
        os.close(os.open(folder / entry.upstream, os.O_WRONLY | os.O_CREAT | os.O_CLOEXEC, 0o644))

    def _forget(self, host: str, entry: _Entry) -> None:
        self._hosts.remove(host)
        self._shares.remove(host)
        hosts = self._by_machine[entry.machine]
        hosts.discard(host)
        if not hosts:
            del self._by_machine[entry.machine]

    def _evict(self, machine: str, address: IPv4Address, eviction: "asyncio.Future[Eviction]") -> None:
        if self._watched.get(machine) is eviction:
            del self._watched[machine]
            for host in list(self._by_machine.get(machine, ())):
                self.remove(host)
        if not self._closed:
            self._ended(machine, address)
