"""Keys of the SSH gateway: its host key, one for an installation, and those by which it logs in to VMs."""

import struct
from pathlib import Path

from cryptography.exceptions import UnsupportedAlgorithm
from cryptography.hazmat.primitives import serialization
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey, Ed25519PublicKey

from stead.errors import HostError
from stead.files import write_atomically

_FILE = "ssh-host-key"
_ALGORITHM = b"ssh-ed25519"
_USERAUTH_REQUEST = 50


def load_host_key(folder: Path) -> tuple[bytes, str]:
    """The private key in this folder, in OpenSSH's format, and its public half as in known_hosts.

    It is created if there is none; only its owner can read it.
    """
    path = folder / _FILE
    if not path.exists():
        write_atomically(path, _private_text(Ed25519PrivateKey.generate()), 0o600)
    text = path.read_bytes()
    try:
        key = serialization.load_ssh_private_key(text, password=None)
    except (ValueError, TypeError, UnsupportedAlgorithm) as error:
        raise HostError(f"{path} is not a private key: delete it to create a new one") from error
    return text, f"{_public_text(key.public_key())} Stead"


def _private_text(key: Ed25519PrivateKey) -> bytes:
    return key.private_bytes(
        serialization.Encoding.PEM,
        serialization.PrivateFormat.OpenSSH,
        serialization.NoEncryption(),
    )


def _public_text(key: serialization.SSHPublicKeyTypes) -> str:
    return key.public_bytes(serialization.Encoding.OpenSSH, serialization.PublicFormat.OpenSSH).decode()


class VmKey:
    """A key by which the gateway logs in to one run of a VM. It stays in the server.

    The gateway has only what it signs: the login of one Linux user. With the key itself, a gateway that was
    broken into could log in as every user of the VM, and so could all who get the key from it.
    """

    def __init__(self) -> None:
        self._key = Ed25519PrivateKey.generate()

    @property
    def public_line(self) -> str:
        """As in authorized_keys."""
        return f"{_public_text(self._key.public_key())} stead-gateway"

    @property
    def public_data(self) -> bytes:
        """As in SSH messages."""
        return _public_data(self._key.public_key())

    def sign_login(self, data: bytes, user: str) -> bytes | None:
        """The signature for a login with this key as this user; None if `data` is not the request for one.

        It is the identifier of a session and a request (RFC 4252, section 7).
        """
        request = bytes([_USERAUTH_REQUEST]) + b"".join(
            (
                _string(user.encode()),
                _string(b"ssh-connection"),
                _string(b"publickey"),
                b"\x01",
                _string(_ALGORITHM),
                _string(self.public_data),
            )
        )
        identifier = data[4 : len(data) - len(request)]
        if not 16 <= len(identifier) <= 64 or data != _string(identifier) + request:
            return None
        return _string(_ALGORITHM) + _string(self._key.sign(data))


def _public_data(key: Ed25519PublicKey) -> bytes:
    return _string(_ALGORITHM) + _string(key.public_bytes_raw())


def _string(value: bytes) -> bytes:
    return struct.pack(">I", len(value)) + value
