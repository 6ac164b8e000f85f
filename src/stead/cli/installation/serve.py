"""`stead serve`: the API server of this installation."""

import asyncio
import contextlib
import ipaddress
import json
import shlex
import signal
import socket
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from stead.cli.installation.terminal import run, settings
from stead.cli.log_lines import Level, write_logs
from stead.cli.output import Json

if TYPE_CHECKING:
    from stead.host.interface import Progress
    from stead.identity.first_key import FirstKey
    from stead.installation import Served
    from stead.installation_parts import Installation
    from stead.limits import Limits
    from stead.settings import Settings

app = typer.Typer()

_SIGNALS = (signal.SIGINT, signal.SIGTERM)
_REPORT_EVERY = 5.0
"""Seconds after which progress is logged again within the same phase."""


@app.command()
def serve(
    listen: Annotated[
        str | None,
        typer.Option(metavar="HOST:PORT", help="Address and port. Default: STEAD_LISTEN, or 127.0.0.1:8600."),
    ] = None,
    data: Annotated[
        Path | None,
        typer.Option(metavar="DIR", help="Data directory. Default: STEAD_DATA, or /var/lib/stead."),
    ] = None,
    log_level: Annotated[
        Level, typer.Option(help="The lowest level that is logged to standard error.")
    ] = Level.INFO,
    log_json: Annotated[bool, typer.Option("--log-json", help="Log JSON lines.")] = False,
    as_json: Json = False,
) -> None:
    """Run the API server until Ctrl-C or SIGTERM. VMs keep running without the server.

    The first start creates an API key, in a file that only root reads. It is printed too if standard output
    is a terminal. With `--json`, the URL, the key and its file are one line of JSON; `key` is null elsewhere.
    """
    write_logs(log_level, as_json=log_json)
    changes: dict[str, Any] = {"listen": listen, "data": data}
    changes = {name: value for name, value in changes.items() if value is not None}
    if sys.version_info < (3, 12):
        # The default of Python 3.12: no thread for each child process.
        asyncio.get_event_loop_policy().set_child_watcher(asyncio.PidfdChildWatcher())
    run(_serve(settings(), changes, as_json))


async def _serve(settings: "Settings", changes: dict[str, Any], as_json: bool) -> None:
    from stead.host.local import require_root
    from stead.installation import bind, open_server
    from stead.processes import PROTECTED, set_oom_score
    from stead.tasks import TaskSet

    require_root()
    set_oom_score("self", PROTECTED)
    settings = settings.replace(**changes)
    with _end_by_signal(), bind(settings) as listeners, _explain_lock_timeout(settings):
        async with open_server(settings, listeners) as served, TaskSet() as tasks:
            tasks.start(_greet(served, listeners.api, as_json), "print the address")
            tasks.start(_prepare(served.installation), "prepare the template")
            await served.api.until_signal()


@contextlib.contextmanager
def _end_by_signal() -> Iterator[None]:
    """Cancel the start cleanly on a signal. Once the server runs, it handles signals itself."""
    task = asyncio.current_task()
    loop = asyncio.get_running_loop()
    signalled = False

    def end() -> None:
        nonlocal signalled
        signalled = True
        if task is not None:
            task.cancel()

    for each in _SIGNALS:
        loop.add_signal_handler(each, end)
    try:
        yield
    except asyncio.CancelledError:
        if not signalled:
            raise
    finally:
        for each in _SIGNALS:
            loop.remove_signal_handler(each)


@contextlib.contextmanager
def _explain_lock_timeout(settings: "Settings") -> Iterator[None]:
    """A lock timeout means that another server uses the data directory: say so."""
    from stead.errors import HostError
    from stead.files import LockTimeout

    try:
        yield
    except LockTimeout as error:
        raise HostError(
            f"another Stead process uses {settings.data}: stop it, or give this server another --data"
        ) from error


def public_url(settings: "Settings", port: int) -> str:
    """The URL of the API over HTTPS."""
    return f"https://{settings.api_names[0]}" + ("" if port == 443 else f":{port}")


async def _greet(served: "Served", listening: socket.socket, as_json: bool) -> None:
    """Print the address of the server, and where the first API key is if there was none.

    The key itself is printed on a terminal only: a journal or the log of a container is read by other users
    and kept for long.
    """
    from importlib.metadata import version

    from stead.logs import get_logger
    from stead.settings import sources

    log = get_logger("stead.serve")
    installation, url = served.installation, served.url
    https = public_url(installation.settings, served.edge.https_port)
    log.info("settings", **sources())
    log.info(
        "listening", url=url, https=https, data=str(installation.settings.data), version=version("stead")
    )
    address = ipaddress.ip_address(listening.getsockname()[0])
    if not address.is_loopback:
        log.warning(
            "the API is open to other hosts without TLS: listen on loopback, and let them use HTTPS",
            address=str(address),
        )
    key = await _first_key(installation, log)
    reachable = _reachable(url, address)
    if as_json:
        facts = {"url": reachable, "httpsUrl": https, "key": None, "keyFile": None}
        if key is not None:
            facts |= {"key": key.secret if sys.stdout.isatty() else None, "keyFile": str(key.path)}
        typer.echo(json.dumps(facts))
        return
    typer.echo(f"Stead {version('stead')} is listening on {url}, data in {installation.settings.data}")
    typer.echo(f"HTTPS, also for mapped domains: {https}")
    if key is not None:
        shown = key.secret if sys.stdout.isatty() else f"$(cat {shlex.quote(str(key.path))})"
        typer.echo(
            "\nCreated the first API key, for the account `default`."
            f" It is in {key.path}, which only root reads.\n\n"
            f"  export STEAD_API_URL={reachable}\n"
            f"  export STEAD_API_KEY={shown}\n\n"
            "FREESTYLE_API_URL and FREESTYLE_API_KEY work as well.\n\n"
            "Try it in another terminal: stead vm create --exec 'uname -a' --delete\n\n"
            f"{_limit_lines(installation.accounts.defaults)}"
        )


def _limit_lines(limits: "Limits") -> str:
    """The limits of accounts, as an operator sets them."""
    from dataclasses import asdict

    lines = [
        f"  STEAD_LIMIT_{name.upper()}={'' if value is None else value}"
        for name, value in asdict(limits).items()
    ]
    told = "Limits of an account, from the size of this host. Set others, or nothing for no limit:"
    return "\n".join([told, *lines])


async def _first_key(installation: "Installation", log: Any) -> "FirstKey | None":
    from stead.errors import HostError
    from stead.identity.first_key import create_first_key, remove_revoked_first_key

    accounts, data = installation.accounts, installation.settings.data
    await remove_revoked_first_key(accounts, data)
    try:
        return await create_first_key(accounts, data)
    except HostError as error:
        log.error("no first API key", error=str(error))
        return None


def _reachable(url: str, address: ipaddress.IPv4Address | ipaddress.IPv6Address) -> str:
    """A URL that clients can call: 0.0.0.0 and :: are not addresses to connect to."""
    if not address.is_unspecified:
        return url
    host = "127.0.0.1" if address.version == 4 else "[::1]"
    return f"http://{host}:{url.rpartition(':')[2]}"


async def _prepare(installation: "Installation") -> None:
    """Build the image and the template now, so that the first create is fast. An error is only logged."""
    from stead.errors import SteadError
    from stead.logs import get_logger

    log = get_logger("stead.serve")
    try:
        template = await installation.machines.template(report=_ProgressLog(log))
    except SteadError as error:
        log.error("prepare_failed", error=str(error))
        return
    log.info("prepared", size=template.size.compute)


class _ProgressLog:
    """Logs the progress of a build: every phase, and every few seconds within a phase."""

    def __init__(self, log: Any) -> None:
        self._log = log
        self._phase = ""
        self._last = 0.0

    def __call__(self, step: "Progress") -> None:
        now = time.monotonic()
        if step.title == self._phase and now - self._last < _REPORT_EVERY:
            return
        self._phase, self._last = step.title, now
        percent = None if step.fraction is None else round(step.fraction * 100)
        self._log.info("preparing", phase=step.title, detail=step.detail, percent=percent)
