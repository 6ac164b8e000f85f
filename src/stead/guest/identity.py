"""Guest identity: gives a restored clone its own names, keys, clock, network and entropy; verifies them."""

import base64
import json
import os
import secrets
import time
from dataclasses import dataclass
from ipaddress import IPv4Address
from typing import Any

from cryptography.hazmat.primitives.asymmetric import ec, ed25519
from cryptography.hazmat.primitives.serialization import Encoding, NoEncryption, PrivateFormat, PublicFormat

from stead.addresses import DATA_MAC, GATEWAY
from stead.errors import GuestError, GuestUnreachable, StartFailed
from stead.guest.agent import Agent, parsing

_ENTROPY = 64
CLOCK_TOLERANCE = 0.5
_KEY_LENGTH = 640
"""Bytes of a file with a private key, filled up with empty lines: ECDSA keys differ in length by a few bytes,
and the agent writes a file of the same length in place."""


@dataclass(frozen=True)
class GuestIdentity:
    machine: str
    hostname: str
    machine_id: str
    address: IPv4Address


@dataclass(frozen=True)
class Confirmed:
    """What the guest reports after applying its identity."""

    kernel: str
    boot_id: str
    random: str
    ssh_host_keys: tuple[str, ...]
    clock_error: float


def new_machine_id() -> str:
    return secrets.token_hex(16)


def ssh_host_keys(comment: str) -> dict[str, str]:
    """Fresh host keys. Made here because key generation is slow inside an emulated guest."""
    keys: dict[str, ed25519.Ed25519PrivateKey | ec.EllipticCurvePrivateKey] = {
        "ed25519": ed25519.Ed25519PrivateKey.generate(),
        "ecdsa": ec.generate_private_key(ec.SECP256R1()),
    }
    files = {}
    for kind, key in keys.items():
        private = key.private_bytes(Encoding.PEM, PrivateFormat.OpenSSH, NoEncryption())
        public = key.public_key().public_bytes(Encoding.OpenSSH, PublicFormat.OpenSSH)
        files[f"ssh_host_{kind}_key"] = private.decode().ljust(_KEY_LENGTH, "\n")
        files[f"ssh_host_{kind}_key.pub"] = f"{public.decode()} {comment}\n"
    return files


def _network(address: IPv4Address) -> dict[str, object]:
    return {
        "mac": DATA_MAC,
        "address": str(address),
        "gateway": str(GATEWAY),
        "dns": [str(GATEWAY)],
        "mtu": 1500,
    }


async def prepare(agent: Agent) -> None:
    """Have the guest of a template do what every clone would have to do before its identity."""
    request = {"network": _network(IPv4Address(0)), "ssh_host_keys": list(ssh_host_keys(""))}
    await agent.call("POST", "/v1/prepare", body=json.dumps(request).encode())


async def confer(
    agent: Agent, identity: GuestIdentity, *, timeout: float, new_keys: bool = True
) -> Confirmed:
    """Give a guest its identity; StartFailed unless every part of it is confirmed."""
    nonce = secrets.token_hex(16)
    keys = ssh_host_keys(f"root@{identity.hostname}") if new_keys else {}
    request = {
        "nonce": nonce,
        "machine": identity.machine,
        "hostname": identity.hostname,
        "machine_id": identity.machine_id,
        "entropy": base64.b64encode(os.urandom(_ENTROPY)).decode(),
        "network": _network(identity.address),
        "ssh_host_keys": keys,
    }
    try:
        # The connection is made first, so that the time in the request is not older than one trip.
        await agent.call("GET", "/v1/health", timeout=timeout, connect_timeout=timeout)
        sent = time.time_ns()
        body = json.dumps(request | {"time_ns": sent}).encode()
        answer = await agent.call("POST", "/v1/identity", body=body, timeout=timeout)
        received = time.time_ns()
        with parsing("POST /v1/identity"):
            return _confirmed(answer, identity, nonce, keys, sent, received)
    except GuestError as error:
        raise StartFailed(f"the guest rejected its identity: {error}") from error
    except GuestUnreachable as error:
        raise StartFailed(f"guest did not confirm its identity: {error}") from error


def _confirmed(
    answer: dict[str, Any],
    identity: GuestIdentity,
    nonce: str,
    keys: dict[str, str],
    sent: int,
    received: int,
) -> Confirmed:
    expected = {
        "nonce": nonce,
        "machine": identity.machine,
        "hostname": identity.hostname,
        "machine_id": identity.machine_id,
        "address": str(identity.address),
    }
    wrong = sorted(name for name, value in expected.items() if answer.get(name) != value)
    public = {name: text.strip() for name, text in keys.items() if name.endswith(".pub")}
    shown = {name: str(text).strip() for name, text in answer.get("ssh_host_keys", {}).items()}
    if any(shown.get(name) != text for name, text in public.items()):
        wrong.append("ssh_host_keys")
    random = str(answer.get("random", ""))
    if len(random) != 64:
        wrong.append("random")
    clock_error = _clock_error(int(answer.get("time_ns", 0)), sent, received)
    if clock_error > CLOCK_TOLERANCE:
        wrong.append("clock")
    if wrong:
        raise StartFailed(f"the guest did not confirm its {', '.join(wrong)}")
    return Confirmed(
        kernel=str(answer.get("kernel", "")),
        boot_id=str(answer.get("boot_id", "")),
        random=random,
        ssh_host_keys=tuple(shown.values()),
        clock_error=clock_error,
    )


def _clock_error(guest: int, sent: int, received: int) -> float:
    """How far the guest's clock is outside of the interval in which it was read, in seconds."""
    return max(sent - guest, guest - received, 0) / 1e9
