"""Rewrites paths that git's `insteadOf` makes from the clone URLs of published examples.

`insteadOf` replaces a URL's prefix. If the URL has credentials before the host name, they end up in the path:
`/x-access-token:SECRET@HOST/REPO`.
"""

import base64
import re
from urllib.parse import quote

from starlette.types import Scope

from stead.identity.credentials import credential_kind

_PATH = re.compile(r"/(?P<login>x-access-token:(?P<secret>[^@/]+))@[^/]+(?P<rest>/.*)")


def move_credentials(scope: Scope) -> None:
    """Move a secret from the path to the Authorization header, before the request is logged."""
    found = _PATH.fullmatch(scope["path"]) if scope["type"] == "http" else None
    if found is not None and credential_kind(found["secret"]) is not None:
        login = base64.b64encode(found["login"].encode())
        others = [(name, value) for name, value in scope["headers"] if name != b"authorization"]
        scope["headers"] = [*others, (b"authorization", b"Basic " + login)]
        scope["path"] = found["rest"]
        scope["raw_path"] = quote(found["rest"]).encode()
