"""`stead vm logs`: events of a VM and the output of its services, or the output of one background process."""

from datetime import datetime
from typing import TYPE_CHECKING, Annotated

import typer

from stead.cli.connection import connected
from stead.cli.output import Json, note, print_json, printable_lines
from stead.cli.processes import print_output
from stead.cli.references import Vm
from stead.cli.times import parse_past

if TYPE_CHECKING:
    from stead.sdk import Vm as Handle
    from stead.sdk.log_options import LogFilter
    from stead.sdk.models import LogEntry

_PAGE = 1000
_LINES = 100


def logs(
    vm: Vm,
    process: Annotated[
        str | None,
        typer.Argument(metavar="[PROCESS]", help="Print the output of this background process instead."),
    ] = None,
    follow: Annotated[
        bool, typer.Option("--follow", "-f", help="Print new lines as they appear, until Ctrl-C.")
    ] = False,
    service: Annotated[str | None, typer.Option(help="Only lines of this systemd service.")] = None,
    search: Annotated[str | None, typer.Option(help="Only lines that contain this text.")] = None,
    since: Annotated[
        str | None,
        typer.Option(metavar="TIME", help="Only newer lines: RFC 3339 time, or 5m, 2h, 1d. Default: all."),
    ] = None,
    limit: Annotated[
        int | None,
        typer.Option("--limit", "-l", min=0, metavar="N", help="Only the newest N lines. Default: 100."),
    ] = None,
    as_json: Json = False,
) -> None:
    """Print the events of a VM and the output of its services, oldest first; or with PROCESS the output of a
    background process, as far as the VM holds it.

    With `--follow --json` each line is a JSON document.
    """
    if process is not None:
        if (service, search, since, limit) != (None, None, None, None):
            wrong = "--service, --search, --since and --limit select log lines, not the output of a process"
            raise typer.BadParameter(wrong, param_hint="PROCESS")
        with connected() as stead:
            print_output(stead.vms.find(vm), process, follow=follow, as_json=as_json)
        return
    limit = _LINES if limit is None else limit
    asked = None if since is None else parse_past(since, "--since")
    with connected() as stead:
        handle = stead.vms.find(vm)
        start = _created_at(handle) if asked is None else asked
        found = _newest(handle, service, search, start, limit)
        if as_json and not follow:
            print_json({"logs": found})
            return
        for entry in found:
            print_entry(entry, as_json)
        if not follow:
            if not found:
                note("no log lines")
            return
        seen = set(found)
        options: LogFilter = {"vm_id": handle.id, "vm_service": service, "search": search}
        with stead.logs.stream(**options, include_existing=True, interval=1.0) as entries:
            for entry in entries:
                if entry not in seen and _after(entry, found):
                    print_entry(entry, as_json)


def console(vm: Vm, as_json: Json = False) -> None:
    """Print what the kernel of a VM wrote to its serial console; after a crash, what it wrote before that.

    It does not wake the VM.
    """
    with connected() as stead:
        handle = stead.vms.find(vm)
        text = handle.console()
    if as_json:
        print_json({"id": handle.id, "console": text})
    elif text:
        typer.echo(printable_lines(text))
    else:
        note("nothing on the console")


def _created_at(vm: "Handle") -> datetime | None:
    """When the VM was created. Older lines of its journal come from the template. None for a deleted VM."""
    from stead.sdk.errors import VmNotFound

    try:
        return vm.info().created_at
    except VmNotFound:
        return None


def _newest(
    vm: "Handle", service: str | None, search: str | None, start: datetime | None, limit: int
) -> "list[LogEntry]":
    """The newest lines, oldest first."""
    found: list[LogEntry] = []
    token = None
    while True:
        page = vm.logs(service=service, search=search, start_time=start, page_size=_PAGE, page_token=token)
        found = sorted((*found, *page), key=lambda entry: entry.timestamp)
        found = found[max(0, len(found) - limit) :]
        token = page.next_page_token
        if token is None:
            return found


def _after(entry: "LogEntry", known: "list[LogEntry]") -> bool:
    """Whether a line is not older than the oldest printed one: `--limit` left the older ones out."""
    return not known or entry.timestamp >= known[0].timestamp


def print_entry(entry: "LogEntry", as_json: bool) -> None:
    if as_json:
        print_json(entry, line=True)
        return
    moment = entry.time
    time = entry.timestamp if moment is None else f"{moment.astimezone():%Y-%m-%d %H:%M:%S}"
    where = entry.vm_service or entry.source or ""
    colour = {"error": "red", "warning": "yellow"}.get(entry.level or "")
    typer.echo(
        f"{typer.style(time, dim=True)} {typer.style(where, fg='cyan')} "
        + typer.style(printable_lines(entry.message), fg=colour)
    )
