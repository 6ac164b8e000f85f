"""The server's log on standard error, as logfmt or JSON lines."""

import enum
import json
import logging
from datetime import UTC, datetime
from typing import Any


class Level(enum.StrEnum):
    DEBUG = "debug"
    INFO = "info"
    WARNING = "warning"
    ERROR = "error"


def write_logs(level: Level, *, as_json: bool = False) -> None:
    """Log to standard error; of libraries only warnings and errors."""
    handler = logging.StreamHandler()
    handler.setFormatter(JsonFormatter() if as_json else LogfmtFormatter())
    logging.basicConfig(level=logging.WARNING, handlers=[handler], force=True)
    logging.getLogger("stead").setLevel(level.value.upper())
    # qemu.qmp logs every closed monitor as an error; Stead logs failures of VMs itself.
    logging.getLogger("qemu.qmp").setLevel(logging.CRITICAL)


def _facts(formatter: logging.Formatter, record: logging.LogRecord) -> dict[str, Any]:
    """A record as fields, in output order."""
    moment = datetime.fromtimestamp(record.created, UTC).isoformat(timespec="milliseconds")
    own: dict[str, Any] = getattr(record, "fields", {"event": record.getMessage()})
    facts = {
        "time": moment.replace("+00:00", "Z"),
        "level": record.levelname.lower(),
        "logger": record.name,
        **own,
    }
    if record.exc_info:
        facts["traceback"] = formatter.formatException(record.exc_info)
    return facts


class JsonFormatter(logging.Formatter):
    def format(self, record: logging.LogRecord) -> str:
        return json.dumps(_facts(self, record), default=str)


class LogfmtFormatter(logging.Formatter):
    def format(self, record: logging.LogRecord) -> str:
        import structlog

        render = structlog.processors.LogfmtRenderer(key_order=["time", "level", "logger", "event"])
        return render(None, "", _facts(self, record))
