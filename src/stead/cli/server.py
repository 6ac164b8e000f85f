"""`stead serve`: the API of this installation."""

import asyncio
import contextlib
import ipaddress
import json
import signal
import socket
import sys
import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from stead.cli.log_lines import Level, write_logs
from stead.cli.output import Json
from stead.cli.terminal import run, settings

if TYPE_CHECKING:
    from stead.api.services import Services
    from stead.host.image import Progress
    from stead.settings import Settings

app = typer.Typer()

_SIGNALS = (signal.SIGINT, signal.SIGTERM)
_TELL_EVERY = 5.0
"""Seconds after which progress is told again although the phase is still the same."""


@app.command()
def serve(
    listen: Annotated[
        str | None, typer.Option(metavar="HOST:PORT", help="Else STEAD_LISTEN, else 127.0.0.1:8600.")
    ] = None,
    data: Annotated[
        Path | None, typer.Option(metavar="DIR", help="Else STEAD_DATA, else /var/lib/stead.")
    ] = None,
    log_level: Annotated[Level, typer.Option(help="What is logged, to standard error.")] = Level.INFO,
    log_json: Annotated[bool, typer.Option("--log-json", help="Log in lines of JSON.")] = False,
    as_json: Json = False,
) -> None:
    """Serve the API until Ctrl-C or SIGTERM. Machines outlive the server.

    An installation that has no API key is given one, and it is printed. With `--json`, the address and
    that key are one line of JSON.
    """
    write_logs(log_level, as_json=log_json)
    changes: dict[str, Any] = {"listen": listen, "data": data}
    changes = {name: value for name, value in changes.items() if value is not None}
    if sys.version_info < (3, 12):
        # As later versions do by themselves: a thread for each process takes a millisecond to begin.
        asyncio.get_event_loop_policy().set_child_watcher(asyncio.PidfdChildWatcher())
    run(_serve(settings(), changes, as_json))


async def _serve(settings: "Settings", changes: dict[str, Any], as_json: bool) -> None:
    from stead.api import server
    from stead.host.host import require_root

    require_root()
    settings = replace(settings, **changes)
    tasks: list[asyncio.Task[None]] = []

    def ready(services: "Services") -> None:
        tasks.append(asyncio.create_task(_greet(services, listening, as_json)))
        tasks.append(asyncio.create_task(_prepare(services)))

    with _end_by_signal(), server.bind(settings) as listening, _explained(settings):
        await server.serve(settings, listening, ready)


@contextlib.contextmanager
def _end_by_signal() -> Iterator[None]:
    """An installation that is still being opened is closed in order; later the server sees to it."""
    task = asyncio.current_task()
    loop = asyncio.get_running_loop()
    told = False

    def end() -> None:
        nonlocal told
        told = True
        if task is not None:
            task.cancel()

    for each in _SIGNALS:
        loop.add_signal_handler(each, end)
    try:
        yield
    except asyncio.CancelledError:
        if not told:
            raise
    finally:
        for each in _SIGNALS:
            loop.remove_signal_handler(each)


@contextlib.contextmanager
def _explained(settings: "Settings") -> Iterator[None]:
    """The engine speaks of a lock; what it means is that somebody else serves this folder."""
    from stead.errors import HostError

    try:
        yield
    except HostError as error:
        if "stead.lock" in str(error):
            raise HostError(
                f"another Stead has {settings.data} open: one server for each data folder"
            ) from error
        raise


async def _greet(services: "Services", listening: socket.socket, as_json: bool) -> None:
    """Say where the server is, once, and how to be let in if nobody could be yet."""
    from importlib.metadata import version

    from stead.api.server import url_of
    from stead.logs import get_logger

    log = get_logger("stead.serve")
    url = url_of(listening)
    log.info("listening", url=url, data=str(services.settings.data), version=version("stead"))
    address = ipaddress.ip_address(listening.getsockname()[0])
    if not address.is_loopback:
        log.warning(
            "listening beyond this host without TLS: put a proxy with TLS before it", address=str(address)
        )
    key = await _first_key(services)
    reachable = _reachable(url, address)
    if as_json:
        typer.echo(json.dumps({"url": reachable, "key": key}))
        return
    typer.echo(f"Stead {version('stead')} listens on {url}, with its data in {services.settings.data}.")
    if key is not None:
        typer.echo(
            "\nThere was no API key yet; here is one of the account `default`. It is not shown again.\n\n"
            f"  export STEAD_API_URL={reachable}\n"
            f"  export STEAD_API_KEY={key}\n\n"
            "Programs that know FREESTYLE_API_URL and FREESTYLE_API_KEY take the same in those."
        )


async def _first_key(services: "Services") -> str | None:
    if await services.accounts.keys():
        return None
    owner = await services.accounts.default()
    _, secret = await services.accounts.create_key(owner.id, "first")
    return secret


def _reachable(url: str, address: ipaddress.IPv4Address | ipaddress.IPv6Address) -> str:
    """Every address of a host is none to call."""
    if not address.is_unspecified:
        return url
    host = "127.0.0.1" if address.version == 4 else "[::1]"
    return f"http://{host}:{url.rpartition(':')[2]}"


async def _prepare(services: "Services") -> None:
    """Build image and template now, so that the first create is quick. Should it fail, that says why."""
    from stead.errors import SteadError
    from stead.logs import get_logger

    log = get_logger("stead.serve")
    try:
        template = await services.machines.template(report=_Teller(log))
    except SteadError as error:
        log.error("cannot prepare machines", error=str(error))
        return
    log.info("prepared", size=str(template.size))


class _Teller:
    """Logs how far a build is: each phase, and every few seconds."""

    def __init__(self, log: Any) -> None:
        self._log = log
        self._phase = ""
        self._last = 0.0

    def __call__(self, step: "Progress") -> None:
        now = time.monotonic()
        if step.phase == self._phase and now - self._last < _TELL_EVERY:
            return
        self._phase, self._last = step.phase, now
        percent = None if step.fraction is None else round(step.fraction * 100)
        self._log.info("preparing", phase=step.phase, detail=step.detail, percent=percent)
