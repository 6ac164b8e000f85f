"""Credentials in paths, which git's `insteadOf` makes from the clone URLs of published examples.

`insteadOf` replaces a URL's prefix. If the URL has credentials before the host name, they end up in the path:
`/x-access-token:SECRET@HOST/REPO`. Stead's own are moved to their header, and no others get into the log.
"""

import base64
import re
from urllib.parse import quote

from starlette.types import Scope

from stead.identity.credentials import credential_kind

_USER = "x-access-token:"
_PATH = re.compile(rf"/(?P<login>{_USER}(?P<secret>[^@/]+))@[^/]+(?P<rest>/.*)")
_HIDDEN = "***"
_BEFORE_A_HOST = ("", "http:", "https:")
"""Segments that a host name follows; elsewhere `@` is in names of files."""


def move_credentials(scope: Scope) -> None:
    """Move a secret from the path to the Authorization header."""
    found = _PATH.fullmatch(scope["path"]) if scope["type"] == "http" else None
    if found is not None and credential_kind(found["secret"]) is not None:
        login = base64.b64encode(found["login"].encode())
        others = [(name, value) for name, value in scope["headers"] if name != b"authorization"]
        scope["headers"] = [*others, (b"authorization", b"Basic " + login)]
        scope["path"] = found["rest"]
        scope["raw_path"] = quote(found["rest"]).encode()


def without_credentials(path: str) -> str:
    """A path for the log: what stands where URLs have a password, or a token as the user, is left out."""
    if _USER in path:
        # The secret may hold slashes: git percent-encodes them, and the path is decoded.
        start, end = path.index(_USER) + len(_USER), path.rfind("@")
        if end < start:
            end = path.find("/", start) if "/" in path[start:] else len(path)
        path = f"{path[:start]}{_HIDDEN}{path[end:]}"
    if "@" not in path:
        return path
    shown, before = [], ""
    for part in path.split("/"):
        shown.append(_hidden(part, first=before in _BEFORE_A_HOST))
        before = part or before
    return "/".join(shown)


def _hidden(part: str, *, first: bool) -> str:
    login, at, host = part.rpartition("@")
    if not login or login.endswith(_HIDDEN) or not (first or ":" in login):
        return part
    return f"{_HIDDEN}{at}{host}"
