"""DNS server for `NAME.internal` and for reverse lookups of private addresses; answers depend on the VM.

The rules of the namespace send exactly these queries of VMs in VPCs here (`host/dns_matches.py`); dnsmasq,
which has one answer for all VMs, gets the others. The source address of a query is the VM's, because packets
with another one are dropped.
"""

import asyncio
import contextlib
import socket
import struct
from collections.abc import AsyncIterator, Callable, Iterable, Sequence
from dataclasses import dataclass
from ipaddress import AddressValueError, IPv4Address
from typing import Protocol

from stead import addresses
from stead.host.firewall import PRIVATE_NAMES_PORT
from stead.host.network import Network

_ZONE = addresses.PRIVATE_ZONE.encode()
_REVERSE = (b"in-addr", b"arpa")
_MAX_QUERY = 1500
_SO_RCVBUFFORCE = 33  # not in Python's socket
_BUFFER = 4 << 20
"""Bytes of queries that wait: the bursts of several accounts, so that none loses those of another."""
_HEADER = struct.Struct("!HHHHHH")
_RECORD = struct.Struct("!HHHIH")
_NAME_OF_QUESTION = 0xC00C
"""A pointer to the name in the question."""
_TTL = 0
"""Seconds for which VMs may cache an answer: the next query sees every change."""
_RESPONSE, _AUTHORITATIVE, _RECURSION_DESIRED, _RECURSION_AVAILABLE = 0x8000, 0x0400, 0x0100, 0x0080
_OPCODE = 0x7800
_A, _PTR, _OPT, _ANY = 1, 12, 41, 255
_IN = 1
_NO_ERROR, _FORMAT_ERROR, _NO_SUCH_NAME, _NOT_IMPLEMENTED, _REFUSED = 0, 1, 3, 4, 5
_EDNS = b"\0" + struct.pack("!HHIH", _OPT, 1232, 0, 0)


class VisibleNames(Protocol):
    """Names of VMs, as the VM in a slot may see them."""

    def addresses(self, slot: int, label: str) -> Sequence[IPv4Address]: ...
    def name(self, slot: int, address: IPv4Address) -> str | None: ...


class NoNames:
    """For a resolver without VPCs."""

    def addresses(self, slot: int, label: str) -> Sequence[IPv4Address]:
        return ()

    def name(self, slot: int, address: IPv4Address) -> str | None:
        return None


@dataclass(frozen=True)
class _Question:
    labels: tuple[bytes, ...]
    kind: int
    family: int
    end: int
    """Where it ends in the query."""


@contextlib.asynccontextmanager
async def serving_private_names(
    network: Network, names: VisibleNames, is_own: Callable[[str], bool]
) -> AsyncIterator[None]:
    """Answer queries during a block. Names that are this Stead's own lead to the gateway."""
    listening = await network.datagram_socket(addresses.GATEWAY, PRIVATE_NAMES_PORT)
    listening.setsockopt(socket.SOL_SOCKET, _SO_RCVBUFFORCE, _BUFFER)

    def read() -> None:
        with contextlib.suppress(OSError):
            query, source = listening.recvfrom(_MAX_QUERY)
            slot = addresses.slot_of_address(IPv4Address(source[0]))
            if slot is not None and (made := answer(query, slot, names, is_own)) is not None:
                # Never blocks: what does not fit into the buffer is lost, and asked again.
                listening.sendto(made, socket.MSG_DONTWAIT, source)

    loop = asyncio.get_running_loop()
    loop.add_reader(listening, read)
    try:
        yield
    finally:
        loop.remove_reader(listening)
        listening.close()


def answer(query: bytes, slot: int, names: VisibleNames, is_own: Callable[[str], bool]) -> bytes | None:
    """The answer to a query of the VM in a slot; None for what is not a query."""
    if len(query) < _HEADER.size:
        return None
    ident, flags, questions, answers, authorities, additional = _HEADER.unpack_from(query)
    if flags & _RESPONSE:
        return None
    records: list[bytes] = []
    question = _parsed(query) if (questions, answers, authorities) == (1, 0, 0) else None
    if flags & _OPCODE:
        code = _NOT_IMPLEMENTED
    elif question is None:
        code = _FORMAT_ERROR
    elif question.family not in (_IN, _ANY):
        code = _REFUSED
    else:
        code, records = _looked_up(question, slot, names, is_own)
    echoed = b"" if question is None else query[_HEADER.size : question.end]
    extended = question is not None and additional and query[question.end :].startswith(b"\0\0\x29")
    about = _RESPONSE | _AUTHORITATIVE | _RECURSION_AVAILABLE | flags & (_OPCODE | _RECURSION_DESIRED) | code
    head = _HEADER.pack(ident, about, question is not None, len(records), 0, bool(extended))
    return head + echoed + b"".join(records) + (_EDNS if extended else b"")


def _parsed(query: bytes) -> _Question | None:
    """The one question of a query; None if it is malformed. Its name is never compressed."""
    labels = []
    at = _HEADER.size
    while at < len(query) and 0 < (size := query[at]) <= 63:
        labels.append(query[at + 1 : at + 1 + size].lower())
        at += 1 + size
    end = at + 5
    if end > len(query) or query[at] or at - _HEADER.size > 254:
        return None
    kind, family = struct.unpack_from("!HH", query, at + 1)
    return _Question(tuple(labels), kind, family, end)


def _looked_up(
    question: _Question, slot: int, names: VisibleNames, is_own: Callable[[str], bool]
) -> tuple[int, list[bytes]]:
    """A response code and records. A name without a record of the type that is asked for is no error."""
    labels = question.labels
    if len(labels) == 2 and labels[1] == _ZONE:
        label = labels[0].decode(errors="replace")
        found = names.addresses(slot, label)
        # Second: a domain of another account must not take the place of a VM.
        if not found and is_own(f"{label}.{addresses.PRIVATE_ZONE}"):
            found = [addresses.GATEWAY]
        return _records(question, _A, [each.packed for each in found])
    if len(labels) == 6 and labels[4:] == _REVERSE:
        with contextlib.suppress(AddressValueError, UnicodeDecodeError):
            address = IPv4Address(b".".join(reversed(labels[:4])).decode("ascii"))
            name = names.name(slot, address)
            return _records(question, _PTR, [] if name is None else [_encoded(name)])
    return _NO_SUCH_NAME, []


def _records(question: _Question, kind: int, found: Iterable[bytes]) -> tuple[int, list[bytes]]:
    records = [_RECORD.pack(_NAME_OF_QUESTION, kind, _IN, _TTL, len(data)) + data for data in found]
    if not records:
        return _NO_SUCH_NAME, []
    return _NO_ERROR, records if question.kind in (kind, _ANY) else []


def _encoded(name: str) -> bytes:
    return b"".join(bytes([len(label)]) + label.encode() for label in name.split(".")) + b"\0"
