"""The API key of the first start, in a file that only root reads: a journal is read by more users."""

from dataclasses import dataclass
from pathlib import Path

from stead.errors import HostError
from stead.files import write_atomically
from stead.identity.accounts import Accounts

_NAME = "first-api-key"
_MAX_SECRET = 200


@dataclass(frozen=True)
class FirstKey:
    secret: str
    path: Path


async def create_first_key(accounts: Accounts, data: Path) -> FirstKey | None:
    """Create a key for the account `default` unless there is any key; HostError if it cannot be written."""
    if await accounts.keys():
        return None
    owner = await accounts.default()
    info, secret = await accounts.create_key(owner.id, "first")
    path = data / _NAME
    try:
        write_atomically(path, f"{secret}\n".encode())
    except OSError as error:
        await accounts.revoke_key(info.id)
        raise HostError(
            f"cannot write the first API key to {path}: {error.strerror}. Create one with `stead keys create`"
        ) from error
    return FirstKey(secret, path)


async def remove_revoked_first_key(accounts: Accounts, data: Path) -> None:
    """Remove the file of the first key once the key is revoked."""
    path = data / _NAME
    try:
        with path.open(errors="replace") as file:
            secret = file.read(_MAX_SECRET).strip()
    except FileNotFoundError:
        return
    if not await accounts.is_valid_key(secret):
        path.unlink(missing_ok=True)
