"""One certificate for the preview zone, ordered from `pebble` with TXT records at a name server, knot."""

import asyncio
import contextlib
import ssl
import tempfile
from collections.abc import AsyncIterator, Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest
from cryptography import x509

from stead.edge import wildcard
from stead.edge.wildcard import WildcardCertificate
from support.acme_server import AcmeServer
from support.edge_with_namespaces import EdgeWithNamespaces, echo_app, edge_with_namespaces
from support.remote_host import RemoteHost, remote_host
from support.updated_zone import UpdatedZone
from support.waiting import until

_ZONE = "previews.example.com"


@dataclass(frozen=True)
class EdgeWithDns:
    acme: AcmeServer
    zone: UpdatedZone
    name_server: contextlib.AsyncExitStack
    """Ends the name server."""
    edge_ns: EdgeWithNamespaces

    async def presented(self, name: str) -> x509.Certificate | None:
        """The certificate that a client gets who trusts only the ACME server's CA."""
        context = ssl.create_default_context(cafile=str(self.acme.roots))
        try:
            _, writer = await asyncio.open_connection(
                "127.0.0.1", self.edge_ns.public.https_port, ssl=context, server_hostname=name
            )
        except (ssl.SSLError, ConnectionError):
            return None
        try:
            found = writer.get_extra_info("ssl_object").getpeercert(binary_form=True)
        finally:
            writer.close()
        return x509.load_der_x509_certificate(found)

    async def serial(self) -> int | None:
        found = await self.presented(f"any.{_ZONE}")
        return None if found is None else found.serial_number


@pytest.fixture
def folder(root: None, network: None) -> Iterator[Path]:
    with tempfile.TemporaryDirectory(prefix="stead-test-", dir="/var/tmp") as name:
        Path(name).chmod(0o755)
        yield Path(name)


@pytest.fixture
def host(root: None) -> Iterator[RemoteHost]:
    """A host of the ACME server and the name server, which the server reaches."""
    with remote_host([_ZONE]) as host:
        yield host


@contextlib.asynccontextmanager
async def _edge(folder: Path, cache: Path, host: RemoteHost) -> AsyncIterator[EdgeWithDns]:
    zone = UpdatedZone(_ZONE, folder, host.address)
    acme = AcmeServer(folder, address=host.address, name_server=f"{host.address}:53")
    provider = folder / "acme-dns.toml"
    provider.write_text(zone.provider())
    provider.chmod(0o600)
    async with contextlib.AsyncExitStack() as name_server, acme.running(host.side) as settings:
        await name_server.enter_async_context(zone.running(cache, host.side))
        changes = settings | {"domain": "stead.example.com", "preview_domain": _ZONE, "acme_dns": provider}
        async with edge_with_namespaces(**changes) as edge_ns:
            yield EdgeWithDns(acme, zone, name_server, edge_ns)


async def test_all_names_of_the_preview_zone_share_one_certificate(
    folder: Path, cache: Path, host: RemoteHost
) -> None:
    async with _edge(folder, cache, host) as dns_edge:
        edge_ns = dns_edge.edge_ns
        await until(dns_edge.serial, 60)
        orders = dns_edge.acme.orders
        assert orders == 1
        vm = edge_ns.add_vm("vm")
        async with vm.serving(echo_app("vm"), 80):
            for number in range(30):
                edge_ns.map(f"app{number}.{_ZONE}", vm.id)
                found = await dns_edge.presented(f"app{number}.{_ZONE}")
                assert found is not None
                names = found.extensions.get_extension_for_class(x509.SubjectAlternativeName).value
                assert names.get_values_for_type(x509.DNSName) == [f"*.{_ZONE}"]
            roots = ("--cacert", str(dns_edge.acme.roots))
            assert (await edge_ns.curl(f"https://app7.{_ZONE}/", *roots)).json()["name"] == "vm"
        assert dns_edge.acme.orders == orders
        key = edge_ns.settings.data / "edge" / "wildcard.pem"
        assert (key.stat().st_mode & 0o777, key.stat().st_uid) == (0o600, edge_ns.settings.edge_uid)
        zone = (dns_edge.zone.folder / "zone").read_text()
        assert "_acme-challenge" not in zone, "the record is removed after the validation"


async def test_the_certificate_is_renewed_and_kept_when_that_fails(
    folder: Path,
    cache: Path,
    host: RemoteHost,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    due: list[bool] = []

    def is_due(certificate: WildcardCertificate) -> bool:
        return bool(due) or not certificate.exists()

    monkeypatch.setattr(wildcard, "_CHECK", 0.2)
    monkeypatch.setattr(WildcardCertificate, "is_due", is_due)
    async with _edge(folder, cache, host) as dns_edge:

        async def serial() -> int:
            found = await dns_edge.serial()
            assert found is not None, "a valid certificate is presented all the time"
            return found

        first = await until(dns_edge.serial, 60)
        due.append(True)

        async def renewed() -> bool:
            return await serial() != first

        await until(renewed, 60)
        due.clear()
        await dns_edge.name_server.aclose()
        second = await serial()
        due.append(True)
        await until(lambda: f"order of the certificate for *.{_ZONE} failed" in caplog.text, 60)
        assert await serial() == second
