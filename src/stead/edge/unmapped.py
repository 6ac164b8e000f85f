"""Names that are not mapped, as files that Caddy answers from, so that the gate is asked once for each."""

import contextlib
import os
import shutil
from collections.abc import Collection
from pathlib import Path

from stead.edge.routes import HostsByName, RouteSource, private_folder
from stead.shares import SharedEntries

MAX_UNMAPPED = 5000
"""Names with a file. Clients choose them, so each network of clients has a share."""


class UnmappedFiles:
    """An empty file per name, removed when the name is mapped."""

    def __init__(self, folder: Path, source: RouteSource, group: int, most: int = MAX_UNMAPPED) -> None:
        """`group` is the Linux group of Caddy, which alone reads the folder."""
        self._folder = folder
        self._source = source
        self._names: SharedEntries[str] = SharedEntries(most)
        self._hosts = HostsByName()
        private_folder(folder, group)

    def put(self, host: str, client: str) -> None:
        """Let Caddy answer requests for a name that is not mapped. A client's names are its share."""
        if host in self._names:
            return
        os.close(os.open(self._folder / host, os.O_WRONLY | os.O_CREAT | os.O_CLOEXEC, 0o644))
        self._hosts.add(host)
        oldest = self._names.add(host, client)
        if oldest is not None:
            self._remove(oldest)

    def recheck(self, changed: Collection[str] | None = None) -> None:
        """Remove the files of names that are mapped by now. Call it after each change of the mappings, with
        the names and wildcards that changed; None for all."""
        hosts = list(self._names) if changed is None else self._hosts.matching(changed)
        for host in hosts:
            if self._source.route(host) is not None:
                self._remove(host)

    def close(self) -> None:
        shutil.rmtree(self._folder, ignore_errors=True)

    def _remove(self, host: str) -> None:
        self._names.remove(host)
        self._hosts.remove(host)
        with contextlib.suppress(FileNotFoundError):
            (self._folder / host).unlink()
