"""TXT records that prove the ownership of a domain."""

import asyncio
import contextlib
from collections.abc import AsyncIterator, Callable, Sequence
from typing import Any

import dns.asyncresolver
import dns.flags
import dns.message
import dns.rcode
import dns.rdatatype
import dns.resolver
import dns.rrset
import pytest

from stead.domains import verification
from stead.domains.errors import DnsUnavailable, LookupsBusy, VerificationFailed
from stead.domains.hostnames import MAX_NAME
from stead.domains.verification import LABEL, MAX_RECORDS, Verifier, lookup_txt, record_names
from support.waiting import until

CODE = "stead-0123456789"


def test_records_are_looked_up_at_the_domain_and_its_nearest_parents() -> None:
    assert record_names("a.example.com") == [f"{LABEL}.a.example.com", f"{LABEL}.example.com"]
    deep = record_names(".".join("abcdefghijklmnop") + ".example.com")
    assert len(deep) == MAX_RECORDS
    assert deep[0] == f"{LABEL}.{'.'.join('abcdefghijklmnop')}.example.com"


def test_record_names_are_never_too_long_for_dns() -> None:
    longest = ".".join(["a" * 61] * 4) + ".abcd"
    names = record_names(longest)
    assert names and all(len(name) <= MAX_NAME for name in names)
    assert names[0] == f"{LABEL}.{'.'.join(['a' * 61] * 3)}.abcd"


@pytest.mark.parametrize("where", ["a.b.example.com", "b.example.com", "example.com"])
@pytest.mark.parametrize("records", [[CODE], ["v=spf1 -all", f"  {CODE}\t", "x"]])
async def test_record_at_the_domain_or_a_parent_verifies_it(where: str, records: list[str]) -> None:
    async def lookup(name: str) -> Sequence[str]:
        return records if name == f"{LABEL}.{where}" else ()

    await Verifier(lookup).check("account", "a.b.example.com", CODE)


@pytest.mark.parametrize("records", [[], [""], [CODE[:-1]], [CODE + "0"], [CODE.upper()], [f"{CODE} x"]])
async def test_other_records_do_not_verify_a_domain(records: list[str]) -> None:
    asked = []

    async def lookup(name: str) -> Sequence[str]:
        asked.append(name)
        return records

    with pytest.raises(VerificationFailed, match=r"_freestyle_custom_hostname\.a\.example\.com"):
        await Verifier(lookup).check("account", "a.example.com", CODE)
    assert asked == record_names("a.example.com")


async def test_failed_lookup_is_not_a_missing_record() -> None:
    async def lookup(name: str) -> Sequence[str]:
        if name == f"{LABEL}.a.example.com":
            raise DnsUnavailable(name, "SERVFAIL")
        return found

    found: list[str] = []
    verifier = Verifier(lookup)
    with pytest.raises(DnsUnavailable):
        await verifier.check("account", "a.example.com", CODE)
    found.append(CODE)
    await verifier.check("account", "a.example.com", CODE)


async def test_endless_lookup_ends(monkeypatch: pytest.MonkeyPatch) -> None:
    asked = []

    async def lookup(name: str) -> Sequence[str]:
        asked.append(name)
        await asyncio.Event().wait()
        return ()

    monkeypatch.setattr(verification, "_TIMEOUT", 0.01)
    with pytest.raises(DnsUnavailable):
        await Verifier(lookup).check("account", "a.example.com", CODE)
    assert asked == record_names("a.example.com")


async def test_lookups_of_one_account_leave_room_for_others(monkeypatch: pytest.MonkeyPatch) -> None:
    answer = asyncio.Event()
    asked: list[str] = []

    async def lookup(name: str) -> Sequence[str]:
        asked.append(name)
        await answer.wait()
        return [CODE]

    monkeypatch.setattr(verification, "_MAX_WAIT", 0.05)
    verifier = Verifier(lookup)
    many = [asyncio.create_task(verifier.check("greedy", f"d{n}.example.com", CODE)) for n in range(20)]
    other = asyncio.create_task(verifier.check("modest", "other.example.com", CODE))
    await until(lambda: sum(task.done() for task in many) == 18, 60)
    assert all(isinstance(task.exception(), LookupsBusy) for task in many if task.done())
    assert f"{LABEL}.other.example.com" in asked
    answer.set()
    await other
    await asyncio.gather(*many, return_exceptions=True)


# A real resolver against a real name server


Answer = Callable[[dns.message.Message], dns.message.Message | None]


class _Server(asyncio.DatagramProtocol):
    def __init__(self, answer: Answer) -> None:
        self._answer = answer
        self.asked: list[str] = []

    def connection_made(self, transport: Any) -> None:
        self._transport = transport

    def datagram_received(self, data: bytes, address: Any) -> None:
        query = dns.message.from_wire(data)
        self.asked.append(query.question[0].name.to_text())
        answer = self._answer(query)
        if answer is not None:
            self._transport.sendto(answer.to_wire(), address)


@contextlib.asynccontextmanager
async def name_server(monkeypatch: pytest.MonkeyPatch, answer: Answer) -> AsyncIterator[_Server]:
    """A name server that the resolver of this host asks."""
    loop = asyncio.get_running_loop()
    transport, server = await loop.create_datagram_endpoint(
        lambda: _Server(answer), local_addr=("127.0.0.1", 0)
    )

    def resolver() -> dns.asyncresolver.Resolver:
        made = real(configure=False)
        made.nameservers = ["127.0.0.1"]
        made.port = transport.get_extra_info("sockname")[1]
        made.search = [dns.name.from_text("corp.example.")]
        return made

    real = dns.asyncresolver.Resolver
    monkeypatch.setattr(dns.asyncresolver, "Resolver", resolver)
    try:
        yield server
    finally:
        transport.close()


def reply(query: dns.message.Message, *texts: str, code: dns.rcode.Rcode = dns.rcode.NOERROR) -> Any:
    made = dns.message.make_response(query, recursion_available=True)
    made.set_rcode(code)
    if texts:
        name = query.question[0].name
        made.answer.append(dns.rrset.from_text(name, 60, "IN", "TXT", *texts))
    return made


async def test_txt_records_are_read_from_dns(monkeypatch: pytest.MonkeyPatch) -> None:
    def answer(query: dns.message.Message) -> Any:
        assert query.question[0].rdtype == dns.rdatatype.TXT
        return reply(query, f'"{CODE[:6]}" "{CODE[6:]}"', '"v=spf1 -all"', '"\\255\\000"')

    async with name_server(monkeypatch, answer) as server:
        found = await lookup_txt("_x.example.com")
    assert sorted(found) == sorted([CODE, "v=spf1 -all", "\ufffd\x00"])
    assert server.asked == ["_x.example.com."]


@pytest.mark.parametrize("code", [dns.rcode.NXDOMAIN, dns.rcode.NOERROR])
async def test_missing_name_or_type_is_no_record(
    monkeypatch: pytest.MonkeyPatch, code: dns.rcode.Rcode
) -> None:
    async with name_server(monkeypatch, lambda query: reply(query, code=code)) as server:
        assert list(await lookup_txt("_x.example.com")) == []
    assert server.asked == ["_x.example.com."]


@pytest.mark.parametrize("silent", [True, False])
async def test_resolver_that_fails_or_is_silent_is_an_error(
    monkeypatch: pytest.MonkeyPatch, silent: bool
) -> None:
    monkeypatch.setattr(verification, "_TIMEOUT", 0.5)

    def answer(query: dns.message.Message) -> Any:
        return None if silent else reply(query, code=dns.rcode.SERVFAIL)

    async with name_server(monkeypatch, answer) as server:
        with pytest.raises(DnsUnavailable, match=r"_x\.example\.com"):
            await lookup_txt("_x.example.com")
    assert server.asked
