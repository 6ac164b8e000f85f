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
from support.edge_stage import EdgeStage, echo_app, edge_stage
from support.waiting import until

pytestmark = pytest.mark.root
_HOST = "app.example.com"
_DOMAIN = "stead.example.com"


@dataclass(frozen=True)
class Scene:
    acme: AcmeServer
    stage: EdgeStage

    async def presented(self, name: str) -> x509.Certificate:
        """The certificate that a client gets who trusts only the ACME server's CA."""
        context = ssl.create_default_context(cafile=str(self.acme.roots))
        _, writer = await asyncio.open_connection(
            "127.0.0.1", self.stage.public.https_port, ssl=context, server_hostname=name
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
async def _scene(acme: AcmeServer) -> AsyncIterator[Scene]:
    async with edge_stage(acme.running, domain=_DOMAIN) as stage:
        try:
            yield Scene(acme, stage)
        finally:
            # Shown if a test fails.
            print((stage.settings.data / "edge" / "caddy.log").read_text()[-20_000:])


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
async def scene(root: None) -> AsyncIterator[Scene]:
    with _folder() as folder:
        async with _scene(AcmeServer(folder)) as scene:
            yield scene


def _names(certificate: x509.Certificate) -> list[str]:
    names = certificate.extensions.get_extension_for_class(x509.SubjectAlternativeName).value
    return names.get_values_for_type(x509.DNSName)


async def test_names_of_the_installation_have_certificates(scene: Scene) -> None:
    for name in (_DOMAIN, f"api.{_DOMAIN}", f"git.{_DOMAIN}"):
        await until(lambda name=name: scene.serial(name), 60)  # type: ignore[misc]
        assert _names(await scene.presented(name)) == [name]
    roots = ("--cacert", str(scene.acme.roots))
    assert (await scene.stage.curl(f"https://{_DOMAIN}/", *roots)).json()["name"] == "api"


@pytest.mark.parametrize("name", [_HOST, f"preview.{_DOMAIN}"])
async def test_a_certificate_is_ordered_once_and_only_for_a_mapped_name(scene: Scene, name: str) -> None:
    stage = scene.stage
    await test_names_of_the_installation_have_certificates(scene)
    before, issued = scene.acme.orders, scene.acme.issued
    assert 0 < issued <= before
    with pytest.raises(ssl.SSLError):
        await scene.presented(name)
    assert scene.acme.orders == before
    vm = stage.add_vm(name)
    stage.map(name, name)
    first = await scene.presented(name)
    assert _names(first) == [name]
    async with vm.serving(echo_app("vm"), 80):
        answer = await stage.curl(f"https://{name}/", "--cacert", str(scene.acme.roots))
    assert (answer.status, answer.json()["name"]) == (200, "vm")
    again = await asyncio.gather(*(scene.presented(name) for _ in range(5)))
    assert {each.serial_number for each in again} == {first.serial_number}
    assert scene.acme.issued == issued + 1


async def test_each_name_of_a_wildcard_gets_a_certificate_when_it_is_used(scene: Scene) -> None:
    stage, pattern = scene.stage, "*.wild.example.com"
    await test_names_of_the_installation_have_certificates(scene)  # these are counted too
    vm = stage.add_vm("wild")
    stage.map(pattern, "wild")
    async with vm.serving(echo_app("wild"), 80):
        for name in ("a.wild.example.com", "b.wild.example.com"):
            issued = scene.acme.issued
            assert _names(await scene.presented(name)) == [name]
            assert scene.acme.issued == issued + 1
            assert issued_in(stage.settings.data / "edge" / "certificates")(name)
            answer = await stage.curl(f"https://{name}/", "--cacert", str(scene.acme.roots))
            assert (answer.status, answer.json()["name"]) == (200, "wild")
    before = scene.acme.orders
    for name in ("wild.example.com", "a.b.wild.example.com", "a.other.example.com"):
        assert await scene.serial(name) is None
    stage.unmap(pattern)
    assert await scene.serial("c.wild.example.com") is None
    assert scene.acme.orders == before


@pytest.mark.parametrize("challenge", [HTTP, TLS_ALPN])
async def test_one_kind_of_challenge_is_enough(folder: Path, challenge: str) -> None:
    """Only one of the ports 80 and 443 may be reachable from the ACME server."""
    async with _scene(AcmeServer(folder, challenges=[challenge])) as scene:
        scene.stage.add_vm("vm")
        scene.stage.map(_HOST, "vm")
        await until(lambda: scene.serial(_HOST), 60)


async def test_an_account_that_was_not_saved_is_registered_again(folder: Path) -> None:
    async with _scene(AcmeServer(folder)) as scene:
        await until(lambda: scene.serial(_DOMAIN), 60)
        (account,) = (scene.stage.settings.data / "edge" / "certificates" / "acme").glob("*/users/*")
        files = list(account.iterdir())
        assert len(files) == 2
        for file in files:
            file.unlink()
        await _restart(scene.stage.edge.caddy)
        scene.stage.add_vm("vm")
        scene.stage.map(_HOST, "vm")
        assert _names(await scene.presented(_HOST)) == [_HOST]


async def _restart(caddy: Caddy) -> None:
    before = caddy.pid
    assert before is not None
    os.kill(before, signal.SIGKILL)
    await until(lambda: caddy.pid not in (None, before), 60)


async def test_certificates_are_renewed_before_their_end_while_their_name_is_mapped(folder: Path) -> None:
    async with _scene(AcmeServer(folder, lifetime=9)) as scene:
        stage = scene.stage
        # Caddy looks every 10 minutes, which suits lifetimes of days. It reads the interval when it starts.
        stage.edge.caddy.configuration["apps"]["tls"]["automation"]["renew_interval"] = "1s"
        await _restart(stage.edge.caddy)
        stage.add_vm("vm")
        stage.map(_HOST, "vm")
        first = (await scene.presented(_HOST)).serial_number
        own = await until(lambda: scene.serial(_DOMAIN), 60)

        async def renewed() -> bool:
            # Raises if a connection fails meanwhile.
            return (await scene.presented(_HOST)).serial_number != first

        await until(renewed, 60)

        async def own_renewed() -> bool:
            return await scene.serial(_DOMAIN) not in (None, own)

        await until(own_renewed, 60)
        stage.unmap(_HOST)

        async def ended() -> bool:
            return await scene.serial(_HOST) is None

        await until(ended, 60)
