"""Requests as data: path, body, timeout, and whether they may be repeated."""

import enum
import functools
import json
import logging
import os
from collections.abc import Mapping
from dataclasses import dataclass, field
from importlib import metadata
from pathlib import Path
from typing import Any
from urllib.parse import quote, urlsplit

from stead.sdk.arguments import seconds
from stead.sdk.errors import InvalidArgument, MissingCredentials

DEFAULT_URL = "http://127.0.0.1:8600"
LINUX_USER_HEADER = "X-Freestyle-Vm-Linux-User-Id"
TOKEN_HEADER = "X-Freestyle-Identity-Access-Token"  # noqa: S105
TRACE_HEADER = "x-freestyle-trace-id"
BACKGROUND_HEADER = "x-freestyle-background-after-secs"
UNKNOWN_KEYS_HEADER = "X-Stead-Unknown-Keys"
IDEMPOTENCY_HEADER = "Idempotency-Key"
BACKGROUND_ID_HEADER = "x-freestyle-background-request-id"

DEFAULT_TIMEOUT = 60.0
LIFECYCLE_TIMEOUT = 600.0
"""Seconds to wait for a create or a change of state: a slow boot, a large memory to save."""
BUILD_TIMEOUT = 3600.0
EXEC_TIMEOUT = 3600.0
"""Seconds to wait for a command without a timeout."""
GRACE = 60.0
"""Seconds to wait beyond a timeout that the server enforces, for waking the VM and for the answer."""
CONNECT_TIMEOUT = 10.0

UNUSABLE_SEGMENTS = ("", ".", "..")
"""An empty segment would name the collection, dots would climb to a parent."""

_MAX_KEY_FILE = 4096

log = logging.getLogger("stead.sdk")

_IDEMPOTENT = frozenset({"GET", "HEAD", "OPTIONS", "PUT", "DELETE"})


class Unset(enum.Enum):
    """The default of arguments for which None is a value."""

    UNSET = "unset"

    def __repr__(self) -> str:
        return "UNSET"


UNSET = Unset.UNSET


@dataclass(frozen=True)
class Request:
    """One request. `path` is percent-encoded and starts with a slash."""

    method: str
    path: str
    query: Mapping[str, str] = field(default_factory=dict)
    json: Any = UNSET
    headers: Mapping[str, str] = field(default_factory=dict)
    timeout: float | Unset | None = UNSET
    """Seconds to wait for data from the server; UNSET for the client's timeout, None for no limit."""
    idempotent: bool = False
    """Sending it twice has the same effect as sending it once."""


def request(
    method: str,
    path: str,
    *parts: str,
    query: Mapping[str, object] | None = None,
    json: Any = UNSET,
    user: str | None = None,
    headers: Mapping[str, str] | None = None,
    timeout: float | Unset | None = UNSET,
    idempotent: bool | None = None,
    idempotency_key: str | None = None,
) -> Request:
    """A request whose `path` has a `{}` for each part. Query values that are None are omitted.

    With an idempotency key it may be repeated: the server runs it once.
    """
    if idempotency_key is not None:
        headers, idempotent = {**(headers or {}), IDEMPOTENCY_HEADER: idempotency_key}, True
    return Request(
        method=method,
        path=path.format(*(segment(part) for part in parts)),
        query={key: _text(value) for key, value in (query or {}).items() if value is not None},
        json=json,
        headers={**({} if user is None else {LINUX_USER_HEADER: check_linux_user(user)}), **(headers or {})},
        timeout=timeout,
        idempotent=method in _IDEMPOTENT if idempotent is None else idempotent,
    )


def encode_json(value: object) -> bytes:
    """JSON in ASCII: lone surrogates, which stand for bytes of file names, are escapes."""
    try:
        return json.dumps(value, allow_nan=False).encode()
    except TypeError as error:
        raise TypeError(f"an argument cannot be sent as JSON: {error}") from None
    except (ValueError, RecursionError) as error:
        raise InvalidArgument(f"an argument cannot be sent as JSON: {error}") from None


def segment(part: str) -> str:
    """One percent-encoded segment of a path; slashes in it are encoded too."""
    if part in UNUSABLE_SEGMENTS:
        raise InvalidArgument(f"invalid id or path: {part!r}")
    try:
        return quote(os.fsencode(part), safe="")
    except UnicodeEncodeError as error:
        raise InvalidArgument(f"invalid id or path: not Unicode at offset {error.start}") from None


def check_linux_user(name: str) -> str:
    """A name as the value of a header. An empty one is no default: it may be an unset variable."""
    if not name or not name.isascii() or not name.isprintable():
        raise InvalidArgument(f"invalid Linux user {name!r}: must be printable ASCII characters")
    return name


def _text(value: object) -> str:
    if isinstance(value, bool):
        return "true" if value else "false"
    return str(value)


@dataclass(frozen=True)
class ConnectionSettings:
    """The server's URL and the credentials."""

    base_url: str
    headers: Mapping[str, str] = field(repr=False)
    timeout: float | None = DEFAULT_TIMEOUT

    @property
    def loopback(self) -> bool:
        """The server is on this host."""
        return is_loopback(urlsplit(self.base_url).hostname or "")

    @property
    def encrypted(self) -> bool:
        """The connection uses TLS."""
        return self.base_url.startswith("https:")


def is_loopback(host: str) -> bool:
    return host in ("localhost", "::1") or host.endswith(".localhost") or host.startswith("127.")


def connection_settings(
    api_key: str | None, access_token: str | None, base_url: str | None, timeout: float | None
) -> ConnectionSettings:
    """The given settings, with defaults from the environment: STEAD_* first, then FREESTYLE_*."""
    if api_key and access_token:
        raise InvalidArgument("give either api_key or access_token, not both")
    if timeout is not None:
        seconds("timeout", timeout)
    url = base_url or _from_environment("API_URL") or DEFAULT_URL
    check_url(url)
    headers = {"User-Agent": f"stead-python/{version()}"}
    if access_token:
        headers[TOKEN_HEADER] = access_token
    else:
        key = (api_key or _from_environment("API_KEY") or _key_in_file() or "").strip()
        if not key:
            raise MissingCredentials("no API key: pass api_key, or set STEAD_API_KEY or STEAD_API_KEY_FILE")
        headers["Authorization"] = f"Bearer {key}"
    if not all(value.isascii() and value.isprintable() for value in headers.values()):
        raise InvalidArgument("invalid API key or token: must be printable ASCII characters")
    found = ConnectionSettings(url.rstrip("/"), headers, timeout)
    if not found.encrypted and not found.loopback:
        _warn_unencrypted(found.base_url)
    return found


def read_key_file(path: str) -> str:
    """The API key or token in a file."""
    try:
        with Path(path).open("rb") as file:
            content = file.read(_MAX_KEY_FILE + 1)
    except OSError as error:
        raise InvalidArgument(f"cannot read the API key in {path}: {error.strerror}") from None
    key = content.decode(errors="replace").strip()
    if len(content) > _MAX_KEY_FILE or not key or len(key.split()) > 1:
        raise InvalidArgument(f"{path} must hold an API key or a token, and nothing else")
    return key


def _key_in_file() -> str | None:
    path = _from_environment("API_KEY_FILE")
    return read_key_file(path) if path else None


@functools.cache
def _warn_unencrypted(url: str) -> None:
    """Once for each server. Without a configuration of `logging`, the warning goes to standard error."""
    host = urlsplit(url).netloc.rpartition("@")[2]
    log.warning(
        "the API key is sent to %s unencrypted: use https://, or a tunnel to its loopback address", host
    )


def check_url(url: str) -> None:
    text = f"invalid base URL {url!r}"
    try:
        parsed = urlsplit(url)
        port = parsed.port
    except ValueError as error:
        raise InvalidArgument(f"{text}: {error}") from None
    if parsed.scheme not in ("http", "https") or not parsed.hostname or port == 0:
        raise InvalidArgument(f"{text}: must start with http:// or https://, and name a host")
    if not url.isprintable() or " " in url:
        raise InvalidArgument(f"{text}: must have no spaces and no control characters")


def _from_environment(name: str) -> str | None:
    return os.environ.get(f"STEAD_{name}") or os.environ.get(f"FREESTYLE_{name}")


@functools.cache
def version() -> str:
    try:
        return metadata.version("stead")
    except metadata.PackageNotFoundError:
        return "0"
