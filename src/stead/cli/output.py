"""Output of the commands: tables, facts, JSON, errors and progress."""

import contextlib
import inspect
import json
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from datetime import UTC, datetime, timedelta
from typing import TYPE_CHECKING, Annotated, Any, NoReturn

import typer

if TYPE_CHECKING:
    from rich.text import Text

_json = False


def use_json(wanted: bool) -> bool:
    """Print errors of the command that runs as JSON, or as text again."""
    global _json
    _json = wanted
    return wanted


def json_wanted() -> bool:
    return _json


Json = Annotated[
    bool,
    typer.Option("--json", callback=use_json, is_eager=True, help="Print the result, or the error, as JSON."),
]

_NARROWEST_NAME = 8
_COLUMN_GAP = 2
_LONGEST_STEP = 70
_SHOWN_AFTER = 2.0
"""Seconds after which a progress line shows how long it has been there."""
_SHOWN_IN_SECONDS = 10.0
_STATE_COLOURS = {
    "running": "green",
    "ready": "green",
    "building": "yellow",
    "starting": "yellow",
    "suspending": "yellow",
    "suspended": "blue",
    "stopped": "bright_black",
    "succeeded": "green",
    "pending": "yellow",
    "failed": "red",
    "lost": "red",
}


def fail(
    message: str,
    *,
    code: str = "FAILED",
    trace_id: str | None = None,
    named: bool = False,
    exit_code: int = 1,
    details: Mapping[str, object] | None = None,
) -> NoReturn:
    """End the command with an error message: one line of text, or of JSON after `--json`.

    The text has the code and the trace id only if `named` is set; JSON always has them.
    """
    if json_wanted():
        print_json_error(message, code, trace_id, details)
        raise typer.Exit(exit_code)
    typer.secho("error: ", fg="red", err=True, nl=False)
    suffix = ", ".join(filter(None, (code, trace_id and f"trace {trace_id}"))) if named else ""
    typer.echo(printable_lines(message) + (f" ({suffix})" if suffix else ""), err=True)
    raise typer.Exit(exit_code)


def os_error_text(error: OSError) -> str:
    return f"{error.strerror}: {error.filename}" if error.filename else error.strerror or str(error)


def print_json_error(
    message: str, code: str, trace_id: str | None = None, details: Mapping[str, object] | None = None
) -> None:
    error = {"code": code, "message": message, "traceId": trace_id, **(details or {})}
    typer.echo(_dumped({"error": to_plain(error)}), err=True)


def note(text: str) -> None:
    """Print a message for the user to standard error."""
    typer.secho(text, dim=True, err=True)


def print_json(value: object, *, line: bool = False) -> None:
    """Print a JSON document, indented, or on one line."""
    typer.echo(_dumped(to_plain(value), indent=None if line else 2))


def _dumped(value: object, indent: int | None = None) -> str:
    """JSON as text. Bytes of file names that are no text are escapes there, so that the JSON is valid."""
    text = json.dumps(value, indent=indent, ensure_ascii=False)
    return text if text.isascii() or _encodable(text) else json.dumps(value, indent=indent)


def _encodable(text: str) -> bool:
    try:
        text.encode(sys.stdout.encoding or "utf-8", "strict")
    except UnicodeEncodeError:
        return False
    return True


def write_bytes(stream: str, data: bytes) -> None:
    """Write output of a program to standard output or standard error, as it is."""
    target = sys.stdout.buffer if stream == "stdout" else sys.stderr.buffer
    target.write(data)
    target.flush()


def to_plain(value: Any) -> Any:
    """Models, dataclasses, times and tuples as JSON types. A `size` that is computed is included."""
    if names := getattr(value, "__struct_fields__", ()) or getattr(value, "__dataclass_fields__", ()):
        plain = {name: to_plain(getattr(value, name)) for name in names}
        if isinstance(size := inspect.getattr_static(value, "size", None), property) and size.fget:
            plain["size"] = size.fget(value)
        return plain
    if isinstance(value, dict):
        return {key: to_plain(each) for key, each in value.items()}
    if isinstance(value, list | tuple):
        return [to_plain(each) for each in value]
    return value.isoformat() if isinstance(value, datetime) else value


def print_table(headings: Sequence[str], rows: Sequence[Sequence[object]], when_empty: str) -> None:
    """Print rows under headings: in colours on a terminal, else as aligned text."""
    if not rows:
        note(when_empty)
        return
    texts = [["" if cell is None else printable(str(cell)) for cell in row] for row in rows]
    if sys.stdout.isatty():
        _print_rich_table(headings, texts)
        return
    widths = [max(map(len, column)) for column in zip(headings, *texts, strict=True)]
    for row in [list(headings), *texts]:
        cells = (cell.ljust(width) for cell, width in zip(row, widths, strict=True))
        typer.echo("  ".join(cells).rstrip())


def _print_rich_table(headings: Sequence[str], rows: Sequence[Sequence[str]]) -> None:
    from rich.console import Console
    from rich.table import Table
    from rich.text import Text

    # Ids are never wrapped or cut, so that they can be copied: only names wrap. Where that is not enough, the
    # lines are longer than the terminal is wide.
    table = Table(box=None, pad_edge=False, header_style="bold")
    least = 0
    for heading, *cells in zip(headings, *rows, strict=True):
        width = _NARROWEST_NAME if heading == "name" else max(map(len, (heading, *cells)))
        least += width + _COLUMN_GAP
        table.add_column(heading, no_wrap=heading != "name", overflow="fold")
    for row in rows:
        table.add_row(*(Text(cell, _STATE_COLOURS.get(cell, "")) for cell in row))
    Console(width=max(Console().width, least)).print(table)


def print_facts(facts: Sequence[tuple[str, object]]) -> None:
    """Print each fact that is known; further lines of a value are indented."""
    known = [
        (name, printable_lines(str(value))) for name, value in facts if value is not None and value != ""
    ]
    width = max(len(name) for name, _ in known)
    for name, value in known:
        colour = _STATE_COLOURS.get(value) if name == "state" else None
        text = value.replace("\n", "\n" + " " * (width + 2))
        typer.echo(typer.style(name.ljust(width), bold=True) + "  " + typer.style(text, fg=colour))


def printable(text: str) -> str:
    """Text with control characters escaped: names and messages of others must not control the terminal."""
    return "".join(each if each.isprintable() else repr(each)[1:-1] for each in text)


def printable_lines(text: str) -> str:
    """The same for text of several lines."""
    return "\n".join(printable(line) for line in text.splitlines())


def ago(moment: datetime | None) -> str:
    """The time since a moment, for example `5m ago`."""
    return "" if moment is None else f"{_span(datetime.now(UTC) - moment)} ago"


def until(moment: datetime | None) -> str:
    """The time until a moment, for example `in 6d`; `never` without one."""
    return "never" if moment is None else f"in {_span(moment - datetime.now(UTC))}"


def _span(time: timedelta) -> str:
    seconds = max(0, int(time.total_seconds()))
    for unit, length in (("d", 86400), ("h", 3600), ("m", 60)):
        if seconds >= 2 * length:
            return f"{seconds // length}{unit}"
    return f"{seconds}s"


def bytes_text(size: float | None) -> str:
    """A number of bytes in short form: 640K, 1.5M."""
    if size is None:
        return ""
    for unit in ("", "K", "M", "G"):
        if size < 999.5:
            return f"{size:.3g}{unit}"
        size /= 1024
    return f"{size:.3g}T"


def local_time(moment: datetime | None) -> str | None:
    """A moment in the time zone of this host."""
    return None if moment is None else f"{moment.astimezone():%Y-%m-%d %H:%M:%S %Z}"


def duration_text(seconds: float) -> str:
    """A duration in milliseconds, or in seconds from 10 s on."""
    return f"{seconds:.1f} s" if seconds >= _SHOWN_IN_SECONDS else f"{seconds * 1000:.1f} ms"


class ProgressLine:
    """The progress of a command on standard error: one line that changes on a terminal, else a line for each
    step."""

    def __init__(self, text: str, *, on_terminal: bool) -> None:
        self._text = self._shown = text
        self._on_terminal = on_terminal
        self._step = ""
        self._started = time.monotonic()

    def __call__(self, step: object) -> None:
        """Report the current step. With `--json` it is not printed: there may be hundreds of lines."""
        self._shown, self._step = self._text, printable(str(step))[:_LONGEST_STEP]
        if not self._on_terminal and not json_wanted():
            note(printable_lines(str(step)))

    def wait_for(self, what: object) -> None:
        """Report that the command waits for something else than its name says; with `--json` too."""
        self._shown, self._step = printable(str(what)), ""
        if not self._on_terminal:
            note(self._shown)

    def __rich__(self) -> "Text":
        from rich.text import Text

        line = Text(self._shown, no_wrap=True, overflow="ellipsis")
        if self._step:
            line.append(f" {self._step}", "dim")
        seconds = time.monotonic() - self._started
        if seconds >= _SHOWN_AFTER:
            line.append(f" ({seconds:.0f} s)")
        return line


@contextlib.contextmanager
def show_progress(text: str) -> Iterator[ProgressLine]:
    """Show progress on a terminal; without one, print a line for each step that is reported."""
    on_terminal = sys.stderr.isatty() and not json_wanted()
    line = ProgressLine(text, on_terminal=on_terminal)
    if not on_terminal:
        yield line
        return
    from rich.console import Console

    with Console(stderr=True).status(line):
        yield line
