"""What goes over the wire: names in camel case, whatever a client adds is let pass."""

from datetime import datetime, timedelta
from typing import Annotated

from pydantic import BaseModel, ConfigDict, PlainSerializer, WithJsonSchema
from pydantic.alias_generators import to_camel

LARGEST = 2**53
"""The largest number that every client can say without rounding."""
_EPOCH = datetime(1970, 1, 1)  # all times are UTC, and a zone would be written out each time


class Wire(BaseModel):
    model_config = ConfigDict(alias_generator=to_camel, populate_by_name=True, extra="ignore")


class Nothing(Wire):
    """An answer that says no more than that it was done: clients expect a body of JSON all the same."""


def rfc3339(seconds: float) -> str:
    """A time as text. Cut, never rounded up: clients ask again from the newest time that they have seen."""
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
