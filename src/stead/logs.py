"""Structured logging through the standard library: the application configures the handlers."""

import logging
from typing import Any

import structlog

_LOGFMT = structlog.processors.LogfmtRenderer(key_order=["event"])


def _rendered(logger: Any, method: str, event: dict[str, Any]) -> tuple[tuple[str], dict[str, Any]]:
    """Render a record as logfmt text, with its fields in `extra` for other formatters."""
    failure = event.pop("exc_info", None)
    return (_LOGFMT(logger, method, dict(event)),), {"extra": {"fields": event}, "exc_info": failure}


_PROCESSORS: list[Any] = [
    structlog.stdlib.filter_by_level,
    structlog.contextvars.merge_contextvars,
    _rendered,
]


def get_logger(name: str) -> Any:
    """A logger that takes fields: `log.warning("VM ended", vm=..., reason=...)`."""
    return structlog.wrap_logger(
        logging.getLogger(name), processors=_PROCESSORS, wrapper_class=structlog.stdlib.BoundLogger
    )
