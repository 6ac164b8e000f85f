"""Names that users give VMs and snapshots."""

from stead.errors import InvalidRequest

MAX_NAME = 200


def check_name(name: str | None) -> None:
    if name is not None and (not name.strip() or len(name) > MAX_NAME or not name.isprintable()):
        raise InvalidRequest(
            f"invalid name {name[:MAX_NAME]!r}: must be 1 to {MAX_NAME} printable characters"
        )
