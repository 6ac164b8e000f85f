"""Times as users type them: a date, or a span such as 5m."""

import re
from datetime import UTC, datetime, timedelta
from typing import Annotated, TypedDict

import typer

_SPAN = re.compile(r"(\d{1,9})([smhdw])", re.ASCII)
_UNITS = {"s": "seconds", "m": "minutes", "h": "hours", "d": "days", "w": "weeks"}


def parse_span(text: str) -> timedelta | None:
    """A span such as 30s, 5m, 2h, 1d or 2w; None if the text is something else."""
    match = _SPAN.fullmatch(text)
    try:
        return None if match is None else timedelta(**{_UNITS[match[2]]: int(match[1])})
    except OverflowError:
        return None


def parse_date(text: str) -> datetime | None:
    """A date or time, local unless it has a zone; None if the text is something else."""
    try:
        moment = datetime.fromisoformat(text)
    except ValueError:
        return None
    return moment if moment.tzinfo else moment.astimezone()


def parse_past(text: str, option: str) -> datetime:
    """A time, or the time that was a span ago."""
    span = parse_span(text)
    moment = parse_date(text) if span is None else None
    try:
        if span is not None:
            moment = datetime.now(UTC) - span
    except OverflowError:
        pass
    if moment is None:
        wrong = f"invalid time {text!r}: expected for example 2026-01-31T12:00:00Z or 5m"
        raise typer.BadParameter(wrong, param_hint=option)
    return moment


class Lifetime(TypedDict, total=False):
    """The arguments of the SDK for a lifetime."""

    ttl: timedelta
    expires_at: datetime | None


def parse_lifetime(text: str) -> Lifetime:
    """A lifetime from `--expires`: a span, a date, or `never`."""
    if text == "never":
        return Lifetime(expires_at=None)
    if (span := parse_span(text)) is not None:
        return Lifetime(ttl=span)
    if (moment := parse_date(text)) is not None:
        return Lifetime(expires_at=moment)
    wrong = f"invalid expiry {text!r}: expected for example 7d, 12h, 2026-01-31T12:00:00Z or never"
    raise typer.BadParameter(wrong, param_hint="--expires")


Expires = Annotated[
    str,
    typer.Option(
        metavar="TIME", help="When the server deletes it by itself: after 12h, 7d, 2w, at a date, or never."
    ),
]
