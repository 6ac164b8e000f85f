"""API keys and tokens: made once, shown once, kept as a hash."""

import hashlib
import re
import secrets
from enum import StrEnum


class Kind(StrEnum):
    """What a secret begins with says what it is."""

    API_KEY = "stead_"
    TOKEN = "stid_"  # noqa: S105  # the beginning of every one


_SECRET = re.compile(r"(stead_|stid_)[A-Za-z0-9_-]{43}")
HINT_LENGTH = len(Kind.API_KEY) + 4


def new_secret(kind: Kind) -> str:
    return kind + secrets.token_urlsafe(32)


def kind_of(secret: str) -> Kind | None:
    """None when it is nothing that was ever handed out."""
    match = _SECRET.fullmatch(secret)
    return None if match is None else Kind(match[1])


def digest(secret: str) -> str:
    """What is kept. There is no salt and nothing slow: 256 random bits cannot be guessed from it."""
    return hashlib.sha256(secret.encode()).hexdigest()


def hint(secret: str) -> str:
    """How a key begins: enough to recognise it by, too little to use it."""
    return secret[:HINT_LENGTH]
