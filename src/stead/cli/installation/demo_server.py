"""The server of the demo: a running one, or one that is started for the demo."""

import asyncio
import contextlib
import json
import subprocess
import sys
import threading
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import IO, Any

from stead.cli.connection import Target
from stead.cli.installation.host import ProgressDisplay
from stead.cli.installation.keys import open_accounts
from stead.cli.installation.terminal import run
from stead.cli.output import fail
from stead.cli.signals import ignore_repeated_signals

ACCOUNT = "demo"
_STOP_TIMEOUT = 60.0


@dataclass
class DemoServer:
    url: str
    key: str
    prepared: threading.Event = field(default_factory=threading.Event)
    """Set when the image and the template are ready; never set for a server that was already running."""
    own: bool = False


@contextlib.contextmanager
def server(given: Target) -> Iterator[DemoServer]:
    """A server for the demo. A process or key that was created for the demo is removed at the end."""
    if given.key is not None and (found := _running_server(given.url, given.key)) is not None:
        yield found
        return
    with _own_key() as key:
        if (found := _running_server(given.url, key)) is not None:
            yield found
            return
        with _own_server(key) as found:
            yield found


def _running_server(url: str | None, key: str) -> DemoServer | None:
    """The server at the URL if it accepts this key."""
    from stead.sdk import Stead
    from stead.sdk.errors import SteadException

    with Stead(key, base_url=url, timeout=5.0, max_retries=0) as stead:
        try:
            stead.whoami()
        except SteadException:
            return None
        return DemoServer(stead.base_url, key)


@contextlib.contextmanager
def _own_key() -> Iterator[str]:
    """A key of the account `demo`, revoked at the end."""
    from stead.identity.errors import AccountExists

    created: list[tuple[str, str]] = []

    async def make() -> None:
        async with open_accounts() as accounts:
            with contextlib.suppress(AccountExists):
                await accounts.create(ACCOUNT)
            info, secret = await accounts.create_key((await accounts.by_name(ACCOUNT)).id, "demo")
        created.append((info.id, secret))

    async def revoke() -> None:
        async with open_accounts() as accounts:
            await accounts.revoke_key(created[0][0])

    run(make())
    try:
        yield created[0][1]
    finally:
        with ignore_repeated_signals():
            asyncio.run(revoke())


@contextlib.contextmanager
def _own_server(key: str) -> Iterator[DemoServer]:
    """`stead serve` on a free port, in a session of its own: Ctrl-C reaches only the demo, which stops it."""
    command = (
        sys.executable,
        "-m",
        "stead.cli.main",
        "serve",
        "--listen",
        "127.0.0.1:0",
        "--json",
        "--log-json",
    )
    with subprocess.Popen(
        command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, start_new_session=True
    ) as process:
        logs = _Logs(process.stderr)
        try:
            line = process.stdout.readline() if process.stdout is not None else ""
            if not line:
                process.wait(_STOP_TIMEOUT)
                logs.join()
                fail(logs.last_error or "the server of the demo ended during its start")
            yield DemoServer(json.loads(line)["url"], key, logs.prepared, own=True)
        finally:
            with ignore_repeated_signals():
                _end(process)
                logs.join()


def _end(process: "subprocess.Popen[str]") -> None:
    process.terminate()
    try:
        process.wait(_STOP_TIMEOUT)
    except subprocess.TimeoutExpired:
        process.kill()


class _Logs(threading.Thread):
    """Reads the log of the server: shows the progress of its preparation and records the last error."""

    def __init__(self, lines: IO[str] | None) -> None:
        super().__init__(daemon=True)
        self.prepared = threading.Event()
        self.last_error = ""
        self._lines = lines
        self.start()

    def run(self) -> None:
        display = ProgressDisplay()
        for line in self._lines or ():
            try:
                entry: dict[str, Any] = json.loads(line)
            except ValueError:
                self.last_error = line.strip().removeprefix("error: ")
                continue
            if "event" not in entry:
                self.last_error = str(entry.get("error", {}).get("message", line.strip()))
                continue
            if entry["event"] == "preparing":
                display.show(entry["phase"], entry["detail"], (entry["percent"] or 0) / 100)
                continue
            if entry["level"] == "error":
                self.last_error = f"{entry['event']}: {entry.get('error', '')}"
            if entry["event"] == "prepared" or entry["level"] == "error":
                display.close()
                self.prepared.set()
        display.close()
        self.prepared.set()
