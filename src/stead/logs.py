"""Logs with fields, through Python's own logging: the program that uses Stead decides where they go."""

import logging
from typing import Any

import structlog

_LOGFMT = structlog.processors.LogfmtRenderer(key_order=["event"])


def _rendered(logger: Any, method: str, event: dict[str, Any]) -> tuple[tuple[str], dict[str, Any]]:
    """A text for every handler there is, and beside it the fields for those that format them otherwise."""
    failure = event.pop("exc_info", None)
    return (_LOGFMT(logger, method, dict(event)),), {"extra": {"fields": event}, "exc_info": failure}


_PROCESSORS: list[Any] = [
    structlog.stdlib.filter_by_level,
    structlog.contextvars.merge_contextvars,
    _rendered,
]


def get_logger(name: str) -> Any:
    """A logger that takes fields: `log.warning("machine ended", machine=..., reason=...)`."""
    return structlog.wrap_logger(
        logging.getLogger(name), processors=_PROCESSORS, wrapper_class=structlog.stdlib.BoundLogger
    )
