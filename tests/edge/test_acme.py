"""Certificates of own domains, from a local ACME server (`pebble`)."""

import asyncio
import contextlib
import os
import signal
import ssl
import tempfile
from collections.abc import AsyncIterator, Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest
import pytest_asyncio
from cryptography import x509

from stead.edge.caddy import Caddy
from stead.edge.certificates import issued_in
from support.acme_server import HTTP, TLS_ALPN, AcmeServer
from support.edge_with_namespaces import EdgeWithNamespaces, echo_app, edge_with_namespaces
from support.waiting import until

pytestmark = pytest.mark.root
_HOST = "app.example.com"
_DOMAIN = "stead.example.com"


@dataclass(frozen=True)
class EdgeWithAcme:
    acme: AcmeServer
    edge_ns: EdgeWithNamespaces

    async def presented(self, name: str) -> x509.Certificate:
        """The certificate that a client gets who trusts only the ACME server's CA."""
        context = ssl.create_default_context(cafile=str(self.acme.roots))
        _, writer = await asyncio.open_connection(
            "127.0.0.1", self.edge_ns.public.https_port, ssl=context, server_hostname=name
        )
        try:
            found = writer.get_extra_info("ssl_object").getpeercert(binary_form=True)
        finally:
            writer.close()
        return x509.load_der_x509_certificate(found)

    async def serial(self, name: str) -> int | None:
        """Of a valid certificate; None if none is presented."""
        try:
            return (await self.presented(name)).serial_number
        except (ssl.SSLError, ConnectionError):
            return None


@contextlib.asynccontextmanager
async def _scene(acme: AcmeServer) -> AsyncIterator[EdgeWithAcme]:
    async with edge_with_namespaces(acme.running, domain=_DOMAIN) as edge_ns:
        try:
            yield EdgeWithAcme(acme, edge_ns)
        finally:
            # Shown if a test fails.
            print((edge_ns.settings.data / "edge" / "caddy.log").read_text()[-20_000:])


@contextlib.contextmanager
def _folder() -> Iterator[Path]:
    """A folder that Caddy's user can read."""
    with tempfile.TemporaryDirectory(prefix="stead-test-", dir="/var/tmp") as name:
        Path(name).chmod(0o755)
        yield Path(name)


@pytest.fixture
def folder(root: None) -> Iterator[Path]:
    with _folder() as folder:
        yield folder


@pytest_asyncio.fixture(scope="module")
async def acme_edge(root: None) -> AsyncIterator[EdgeWithAcme]:
    with _folder() as folder:
        async with _scene(AcmeServer(folder)) as acme_edge:
            yield acme_edge


def _names(certificate: x509.Certificate) -> list[str]:
    names = certificate.extensions.get_extension_for_class(x509.SubjectAlternativeName).value
    return names.get_values_for_type(x509.DNSName)


async def test_names_of_the_installation_have_certificates(acme_edge: EdgeWithAcme) -> None:
    for name in (_DOMAIN, f"api.{_DOMAIN}", f"git.{_DOMAIN}"):
        await until(lambda name=name: acme_edge.serial(name), 60)  # type: ignore[misc]
        assert _names(await acme_edge.presented(name)) == [name]
    roots = ("--cacert", str(acme_edge.acme.roots))
    assert (await acme_edge.edge_ns.curl(f"https://{_DOMAIN}/", *roots)).json()["name"] == "api"


@pytest.mark.parametrize("name", [_HOST, f"preview.{_DOMAIN}"])
async def test_a_certificate_is_ordered_once_and_only_for_a_mapped_name(
    acme_edge: EdgeWithAcme, name: str
) -> None:
    edge_ns = acme_edge.edge_ns
    await test_names_of_the_installation_have_certificates(acme_edge)
    before, issued = acme_edge.acme.orders, acme_edge.acme.issued
    assert 0 < issued <= before
    with pytest.raises(ssl.SSLError):
        await acme_edge.presented(name)
    assert acme_edge.acme.orders == before
    vm = edge_ns.add_vm(name)
    edge_ns.map(name, name)
    first = await acme_edge.presented(name)
    assert _names(first) == [name]
    async with vm.serving(echo_app("vm"), 80):
        answer = await edge_ns.curl(f"https://{name}/", "--cacert", str(acme_edge.acme.roots))
    assert (answer.status, answer.json()["name"]) == (200, "vm")
    again = await asyncio.gather(*(acme_edge.presented(name) for _ in range(5)))
    assert {each.serial_number for each in again} == {first.serial_number}
    assert acme_edge.acme.issued == issued + 1


async def test_each_name_of_a_wildcard_gets_a_certificate_when_it_is_used(acme_edge: EdgeWithAcme) -> None:
    edge_ns, pattern = acme_edge.edge_ns, "*.wild.example.com"
    await test_names_of_the_installation_have_certificates(acme_edge)  # these are counted too
    vm = edge_ns.add_vm("wild")
    edge_ns.map(pattern, "wild")
    async with vm.serving(echo_app("wild"), 80):
        for name in ("a.wild.example.com", "b.wild.example.com"):
            issued = acme_edge.acme.issued
            assert _names(await acme_edge.presented(name)) == [name]
            assert acme_edge.acme.issued == issued + 1
            assert issued_in(edge_ns.settings.data / "edge" / "certificates")(name)
            answer = await edge_ns.curl(f"https://{name}/", "--cacert", str(acme_edge.acme.roots))
            assert (answer.status, answer.json()["name"]) == (200, "wild")
    before = acme_edge.acme.orders
    for name in ("wild.example.com", "a.b.wild.example.com", "a.other.example.com"):
        assert await acme_edge.serial(name) is None
    edge_ns.unmap(pattern)
    assert await acme_edge.serial("c.wild.example.com") is None
    assert acme_edge.acme.orders == before


@pytest.mark.parametrize("challenge", [HTTP, TLS_ALPN])
async def test_one_kind_of_challenge_is_enough(folder: Path, challenge: str) -> None:
    """Only one of the ports 80 and 443 may be reachable from the ACME server."""
    async with _scene(AcmeServer(folder, challenges=[challenge])) as acme_edge:
        acme_edge.edge_ns.add_vm("vm")
        acme_edge.edge_ns.map(_HOST, "vm")
        await until(lambda: acme_edge.serial(_HOST), 60)


async def test_an_account_that_was_not_saved_is_registered_again(folder: Path) -> None:
    async with _scene(AcmeServer(folder)) as acme_edge:
        await until(lambda: acme_edge.serial(_DOMAIN), 60)
        (account,) = (acme_edge.edge_ns.settings.data / "edge" / "certificates" / "acme").glob("*/users/*")
        files = list(account.iterdir())
        assert len(files) == 2
        for file in files:
            file.unlink()
        await _restart(acme_edge.edge_ns.edge.caddy)
        acme_edge.edge_ns.add_vm("vm")
        acme_edge.edge_ns.map(_HOST, "vm")
        assert _names(await acme_edge.presented(_HOST)) == [_HOST]


async def _restart(caddy: Caddy) -> None:
    before = caddy.pid
    assert before is not None
    os.kill(before, signal.SIGKILL)
    await until(lambda: caddy.pid not in (None, before), 60)


async def test_certificates_are_renewed_before_their_end_while_their_name_is_mapped(folder: Path) -> None:
    async with _scene(AcmeServer(folder, lifetime=9)) as acme_edge:
        edge_ns = acme_edge.edge_ns
        # Caddy looks every 10 minutes, which suits lifetimes of days. It reads the interval when it starts.
        edge_ns.edge.caddy.configuration["apps"]["tls"]["automation"]["renew_interval"] = "1s"
        await _restart(edge_ns.edge.caddy)
        edge_ns.add_vm("vm")
        edge_ns.map(_HOST, "vm")
        first = (await acme_edge.presented(_HOST)).serial_number
        own = await until(lambda: acme_edge.serial(_DOMAIN), 60)

        async def renewed() -> bool:
            # Raises if a connection fails meanwhile.
            return (await acme_edge.presented(_HOST)).serial_number != first

        await until(renewed, 60)

        async def own_renewed() -> bool:
            return await acme_edge.serial(_DOMAIN) not in (None, own)

        await until(own_renewed, 60)
        edge_ns.unmap(_HOST)

        async def ended() -> bool:
            return await acme_edge.serial(_HOST) is None

        await until(ended, 60)
