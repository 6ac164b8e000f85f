"""Algorithms of SSH connections, and how often a peer may ask for new keys."""

from typing import Any

import asyncssh
from asyncssh.constants import MSG_KEXINIT
from asyncssh.kex import get_kex_algs

from stead.shares import RateLimit

# A key exchange over a finite field takes the gateway 20 ms, and a hostile client nothing; over a curve 1 ms.
_KEY_EXCHANGES = ("mlkem768x25519-sha256", "curve25519-sha256", "curve25519-sha256@libssh.org")
_CIPHERS = (
    "chacha20-poly1305@openssh.com",
    "aes256-gcm@openssh.com",
    "aes128-gcm@openssh.com",
    "aes256-ctr",
    "aes192-ctr",
    "aes128-ctr",
)
_MACS = (
    "hmac-sha2-256-etm@openssh.com",
    "hmac-sha2-512-etm@openssh.com",
    # Older versions of libssh2 and paramiko have no other with AES in counter mode.
    "hmac-sha2-256",
    "hmac-sha2-512",
)
_SIGNATURES = (
    "ssh-ed25519",
    "ecdsa-sha2-nistp256",
    "ecdsa-sha2-nistp384",
    "ecdsa-sha2-nistp521",
    "rsa-sha2-512",
    "rsa-sha2-256",
)
_BURST, _INTERVAL = 20, 3.0
"""New keys at once, and seconds between two after that: clients ask for some after each 512 MiB or 1 GiB."""


def modern_algorithms() -> dict[str, Any]:
    """Options of a connection of asyncssh."""
    # The first needs OpenSSL 3.5 or liboqs.
    available = {name.decode() for name in get_kex_algs()}
    return {
        "kex_algs": [name for name in _KEY_EXCHANGES if name in available],
        "encryption_algs": _CIPHERS,
        "mac_algs": _MACS,
        "signature_algs": _SIGNATURES,
        "compression_algs": ["none"],
    }


def limit_key_exchanges(connection: Any) -> None:
    """End a connection whose peer asks for new keys before the login, or too often after it.

    asyncssh accepts any number at any time. Call it before the first packet arrives.
    """
    handlers = connection._packet_handlers
    exchanges = RateLimit(_BURST, _INTERVAL)
    begun = False

    def checked(connection: Any, kind: int, number: int, packet: Any) -> Any:
        nonlocal begun
        if begun and not connection._auth_complete:
            raise asyncssh.ProtocolError("new keys are not exchanged before the login")
        if begun and exchanges.allow(None):
            raise asyncssh.ProtocolError(f"keys were exchanged too often: max {_BURST} in a minute")
        begun = True
        return handlers[MSG_KEXINIT](connection, kind, number, packet)

    connection._packet_handlers = {**handlers, MSG_KEXINIT: checked}
