"""Rewrites paths that git's `insteadOf` makes from the clone URLs of published examples.

`insteadOf` replaces a URL's prefix. If the URL has credentials before the host name, they end up in the path:
`/x-access-token:SECRET@HOST/REPO`.
"""

import base64
import re
from urllib.parse import quote

from starlette.types import ASGIApp, Receive, Scope, Send

from stead.identity.credentials import credential_kind

_PATH = re.compile(r"/(?P<login>x-access-token:(?P<secret>[^@/]+))@[^/]+(?P<rest>/.*)")


class CredentialsInPath:
    """ASGI middleware that removes the secret from the path before the request is logged."""

    def __init__(self, app: ASGIApp) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        found = _PATH.fullmatch(scope["path"]) if scope["type"] == "http" else None
        if found is not None and credential_kind(found["secret"]) is not None:
            login = base64.b64encode(found["login"].encode())
            others = [(name, value) for name, value in scope["headers"] if name != b"authorization"]
            scope["headers"] = [*others, (b"authorization", b"Basic " + login)]
            scope["path"] = found["rest"]
            scope["raw_path"] = quote(found["rest"]).encode()
        await self._app(scope, receive, send)
