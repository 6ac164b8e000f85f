"""Options of log queries."""

from collections.abc import Mapping
from datetime import datetime
from typing import Any, TypedDict

from stead.sdk.parsing import wire_name


class LogSearch(TypedDict, total=False):
    """Options of all log queries."""

    search: str | None
    """Only lines with this text."""


class LogFilter(LogSearch, total=False):
    """Which lines: those that match every option."""

    vm_id: str | None
    """Lines about this VM."""
    vm_service: str | None
    """Lines of one systemd service of the VM."""
    build_id: str | None
    """Lines of this build."""
    request_id: str | None
    """Lines of this request."""
    instance_id: str | None
    """Lines about this instance."""
    resource_type: str | None
    """Lines about resources of this type."""


class LogPaging(LogSearch, total=False):
    """A period of time, and a page of its lines."""

    start_time: datetime | str | None
    """The first moment; a day ago by default. A time without a zone is local."""
    end_time: datetime | str | None
    """The last moment; now by default."""
    page_size: int | None
    """The most lines of a page."""
    page_token: str | None
    """`next_page_token` of the page before."""


class LogQuery(LogFilter, LogPaging, total=False):
    """Options of `stead.logs.list`."""


def log_query(options: Mapping[str, object]) -> dict[str, Any]:
    """The query of a request; times without a zone are local."""
    return {wire_name(name): _moment(value) for name, value in options.items()}


def _moment(value: object) -> object:
    if not isinstance(value, datetime):
        return value
    return (value if value.tzinfo else value.astimezone()).isoformat()
