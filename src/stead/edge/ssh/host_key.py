"""The host key of the SSH gateway: one for an installation, made at its first start."""

from pathlib import Path

import asyncssh

from stead.errors import HostError
from stead.files import write_atomically

_FILE = "ssh-host-key"


def load_host_key(folder: Path) -> asyncssh.SSHKey:
    """Load the key from this folder, or create it; only its owner can read it."""
    path = folder / _FILE
    if not path.exists():
        key = asyncssh.generate_private_key("ssh-ed25519", comment="Stead")
        write_atomically(path, key.export_private_key(), 0o600)
    try:
        return asyncssh.read_private_key(path)
    except (asyncssh.KeyImportError, asyncssh.KeyEncryptionError) as error:
        raise HostError(f"{path} is not a private key: delete it to create a new one") from error


def public_line(key: asyncssh.SSHKey) -> str:
    """The public key as one line, as in known_hosts and authorized_keys."""
    return key.export_public_key().decode().strip()
