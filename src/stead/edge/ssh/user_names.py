"""User names of SSH logins: the VM, the Linux user, and possibly the token."""

import re
from dataclasses import dataclass, field

_MAX_LENGTH = 512
_USER_NAME = re.compile(
    r"(?P<vm>[a-z0-9]{1,20})"
    r"(?:\+(?P<user>[^:,\s]{1,256}))?"
    # scp and editors cannot have a colon in a user name, so a comma does as well.
    r"(?:[:,](?P<token>[A-Za-z0-9_-]*))?"
)


@dataclass(frozen=True)
class UserName:
    """`VM`, `VM:TOKEN`, `VM+user` or `VM+user:TOKEN`."""

    vm: str
    user: str | None = None
    token: str | None = field(default=None, repr=False)
    """None: the token is the password."""


def parse_user_name(text: str) -> UserName | None:
    """None if it has none of the forms."""
    match = _USER_NAME.fullmatch(text) if len(text) <= _MAX_LENGTH else None
    return None if match is None else UserName(match["vm"], match["user"], match["token"] or None)
