"""API keys and tokens: random secrets, stored as hashes only."""

import hashlib
import re
import secrets
from enum import StrEnum


class CredentialKind(StrEnum):
    """The kind of a secret, by its prefix."""

    API_KEY = "stead_"
    TOKEN = "stid_"  # noqa: S105  # a prefix, not a secret
    TICKET = "stt_"
    """In the URL of a WebSocket only, once."""


_SECRET = re.compile(r"(stead_|stid_)[A-Za-z0-9_-]{43}")
HINT_LENGTH = len(CredentialKind.API_KEY) + 4


def new_secret(kind: CredentialKind) -> str:
    return kind + secrets.token_urlsafe(32)


def credential_kind(secret: str) -> CredentialKind | None:
    """The kind of a secret; None if it does not have the format of one."""
    match = _SECRET.fullmatch(secret)
    return None if match is None else CredentialKind(match[1])


def digest(secret: str) -> str:
    """The hash to store. Without salt or a slow hash, because 256 random bits cannot be guessed."""
    return hashlib.sha256(secret.encode()).hexdigest()


def hint(secret: str) -> str:
    """The first characters of a key: enough to recognise it, too few to use it."""
    return secret[:HINT_LENGTH]
