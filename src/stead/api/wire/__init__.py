"""Base classes of the wire models: camelCase names, unknown keys are ignored."""

from datetime import datetime, timedelta
from typing import Annotated

from pydantic import BaseModel, ConfigDict, PlainSerializer, WithJsonSchema
from pydantic.alias_generators import to_camel

LARGEST = 2**53
"""The largest integer that JavaScript clients can represent exactly."""
_EPOCH = datetime(1970, 1, 1)  # all times are UTC, and a zone would be written out each time


class Wire(BaseModel):
    model_config = ConfigDict(
        alias_generator=to_camel, populate_by_name=True, extra="ignore", from_attributes=True
    )


class Nothing(Wire):
    """An empty JSON object: the answer of calls that return nothing."""


def rfc3339(seconds: float) -> str:
    """A time as text. Truncated, never rounded up: clients poll again from the newest time they have seen."""
    moment = _EPOCH + timedelta(microseconds=int(seconds * 1_000_000))
    return moment.isoformat(timespec="microseconds") + "Z"


Time = Annotated[
    float,
    PlainSerializer(rfc3339),
    WithJsonSchema({"type": "string", "format": "date-time"}, mode="serialization"),
]
"""Seconds since the epoch in Python, RFC 3339 on the wire."""


def _rfc3339_micros(micros: int) -> str:
    return (_EPOCH + timedelta(microseconds=micros)).isoformat(timespec="microseconds") + "Z"


Micros = Annotated[
    int,
    PlainSerializer(_rfc3339_micros),
    WithJsonSchema({"type": "string", "format": "date-time"}, mode="serialization"),
]
"""Microseconds since the epoch in Python, RFC 3339 on the wire: exact, unlike a float of seconds."""
