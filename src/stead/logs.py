"""Logs with fields, through Python's own logging: the program that uses Stead decides where they go."""

import logging
from typing import Any

import structlog

_PROCESSORS: list[Any] = [
    structlog.stdlib.filter_by_level,
    structlog.processors.LogfmtRenderer(key_order=["event"]),
]


def get_logger(name: str) -> Any:
    """A logger that takes fields: `log.warning("machine ended", machine=..., reason=...)`."""
    return structlog.wrap_logger(
        logging.getLogger(name), processors=_PROCESSORS, wrapper_class=structlog.stdlib.BoundLogger
    )
