"""Names that users give what they create: labels, which need not be unique."""

from stead.errors import InvalidRequest

MAX_NAME = 200


def check_name(name: str | None, longest: int = MAX_NAME) -> None:
    """Raise InvalidRequest for a blank, too long or unprintable name; None is no name."""
    if name is not None and (not name.strip() or len(name) > longest or not name.isprintable()):
        raise InvalidRequest(f"invalid name {name[:longest]!r}: must be 1 to {longest} printable characters")
