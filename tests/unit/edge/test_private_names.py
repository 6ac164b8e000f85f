"""Answers to DNS queries for names in VPCs: records, codes and malformed packets."""

from collections.abc import Sequence
from ipaddress import IPv4Address

import dns.edns
import dns.exception
import dns.flags
import dns.message
import dns.opcode
import dns.rcode
import dns.rdataclass
import dns.rdatatype
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from stead.edge.private_names import answer

SLOT = 7
DB = [IPv4Address("10.0.0.2"), IPv4Address("10.0.0.3")]


class Table:
    """`db`, as the VM in one slot sees it."""

    def addresses(self, slot: int, label: str) -> Sequence[IPv4Address]:
        return DB if slot == SLOT and label == "db" else ()

    def name(self, slot: int, address: IPv4Address) -> str | None:
        return "db.internal" if slot == SLOT and address == DB[0] else None


def is_own(name: str) -> bool:
    return name in ("stead.internal", "db.internal")


def answered(wire: bytes, slot: int = SLOT) -> bytes | None:
    return answer(wire, slot, Table(), is_own)


def asked(name: str, kind: str = "A", slot: int = SLOT, **options: object) -> dns.message.Message:
    query = dns.message.make_query(name, kind, **options)  # type: ignore[arg-type]
    wire = answered(query.to_wire(), slot)
    assert wire is not None and len(wire) <= 512
    found = dns.message.from_wire(wire)
    assert query.is_response(found)
    assert found.flags & dns.flags.AA and found.flags & dns.flags.RA
    return found


def data(found: dns.message.Message) -> list[str]:
    return [str(record) for section in found.answer for record in section]


@pytest.mark.parametrize("name", ["db.internal", "DB.Internal."])
def test_address_of_a_vm(name: str) -> None:
    for kind in ("A", "ANY"):
        found = asked(name, kind)
        assert (found.rcode(), data(found)) == (dns.rcode.NOERROR, ["10.0.0.2", "10.0.0.3"])
        assert found.answer[0].ttl == 0 and str(found.answer[0].name).lower() == "db.internal."


@pytest.mark.parametrize("kind", ["AAAA", "MX", "TXT", "HTTPS", "PTR", "SOA"])
def test_an_existing_name_has_no_records_of_other_types(kind: str) -> None:
    found = asked("db.internal", kind)
    assert (found.rcode(), data(found)) == (dns.rcode.NOERROR, [])


@pytest.mark.parametrize("kind", ["A", "AAAA", "PTR"])
@pytest.mark.parametrize(
    "name",
    [
        *("web.internal", "internal", "a.db.internal", "db.internal.com", ".", "2.0.0.10.ip6.arpa"),
        *(f"{octets}.in-addr.arpa" for octets in ("4.0.0.10", "0.10", "x.0.0.10", "256.0.0.10")),
    ],
)
def test_unknown_names(name: str, kind: str) -> None:
    found = asked(name, kind)
    assert (found.rcode(), data(found)) == (dns.rcode.NXDOMAIN, [])


def test_a_vm_elsewhere_sees_nothing() -> None:
    assert asked("2.0.0.10.in-addr.arpa", "PTR", SLOT + 1).rcode() == dns.rcode.NXDOMAIN
    assert data(asked("db.internal", slot=SLOT + 1)) == ["169.254.0.1"], "the domain of this Stead"


def test_a_vm_comes_before_a_domain_of_this_stead() -> None:
    assert data(asked("db.internal")) == ["10.0.0.2", "10.0.0.3"]
    assert data(asked("stead.internal")) == ["169.254.0.1"]


def test_name_of_an_address() -> None:
    assert data(asked("2.0.0.10.IN-ADDR.arpa", "PTR")) == ["db.internal."]
    assert asked("2.0.0.10.in-addr.arpa", "A").rcode() == dns.rcode.NOERROR


def test_extended_dns() -> None:
    cookie = dns.edns.GenericOption(dns.edns.OptionType.COOKIE, b"x" * 8)
    found = asked("db.internal", use_edns=0, payload=4096, options=[cookie])
    assert (found.edns, data(found)) == (0, ["10.0.0.2", "10.0.0.3"])
    assert asked("db.internal").edns == -1


def test_other_classes_and_operations_are_refused() -> None:
    assert asked("db.internal", rdclass=dns.rdataclass.CH).rcode() == dns.rcode.REFUSED
    query = dns.message.make_query("db.internal", "A")
    query.set_opcode(dns.opcode.NOTIFY)
    wire = answered(query.to_wire())
    assert wire is not None and dns.message.from_wire(wire).rcode() == dns.rcode.NOTIMP


QUERY = dns.message.make_query("db.internal", "A").to_wire()


def is_query(packet: bytes) -> bool:
    try:
        return len(dns.message.from_wire(packet).question) == 1
    except (dns.exception.DNSException, ValueError):
        return False


@settings(deadline=None)
@given(st.binary(max_size=1500) | st.integers(0, len(QUERY)).map(lambda size: QUERY[:size]))
@example(QUERY[:12] + b"\xc0\x0c\0\1\0\1")
@example(QUERY[:12] + b"\x3f")
@example(QUERY[:4] + b"\0\2" + QUERY[6:])
@example(QUERY[:12] + b"\x3f" * 1400)
@example(QUERY[:12] + b"\x01a" * 200 + b"\0\0\1\0\1")
@example(b"\0\0\x80" + QUERY[3:])
def test_malformed_packets_get_a_short_error_or_nothing(packet: bytes) -> None:
    found = answered(packet)
    if found is not None:
        assert packet[:2] == found[:2] and not packet[2] & 0x80
        assert is_query(packet) or found[3] & 15 != dns.rcode.NOERROR
        assert len(found) <= max(12, len(packet)) or found[3] & 15 == dns.rcode.NOERROR


def test_a_truncated_query_gets_a_format_error() -> None:
    assert answered(QUERY[:11]) is None
    for size in range(12, len(QUERY)):
        found = answered(QUERY[:size])
        assert found is not None and len(found) == 12 and found[3] & 15 == dns.rcode.FORMERR
