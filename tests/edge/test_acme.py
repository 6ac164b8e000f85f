"""Certificates of own domains, from a local ACME server: another Caddy."""

import asyncio
import contextlib
import json
import shutil
import ssl
import subprocess
import tempfile
from collections.abc import AsyncIterator, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import pytest
from cryptography import x509

from stead.addresses import GATEWAY
from stead.edge.caddy import caddy_program
from support.edge_stage import EdgeStage, echo_app, edge_stage
from support.links import Side
from support.waiting import until

pytestmark = pytest.mark.root
_HOST = "app.example.com"
_PORT = 14000


def _configuration(folder: Path) -> dict[str, object]:
    challenges = ["http-01", "tls-alpn-01"]
    return {
        "admin": {"disabled": True},
        "storage": {"module": "file_system", "root": str(folder / "storage")},
        "apps": {
            "http": {
                "servers": {
                    "acme": {
                        "listen": [f"127.0.0.1:{_PORT}"],
                        "routes": [
                            {
                                "handle": [
                                    {"handler": "acme_server", "challenges": challenges, "lifetime": "1h"}
                                ]
                            }
                        ],
                        "tls_connection_policies": [{}],
                        "automatic_https": {"disable": True},
                    }
                }
            },
            "pki": {"certificate_authorities": {"local": {"install_trust": False}}},
            "tls": {
                "certificates": {"automate": ["127.0.0.1"]},
                "automation": {
                    "policies": [{"subjects": ["127.0.0.1"], "issuers": [{"module": "internal"}]}]
                },
            },
        },
    }


@contextlib.asynccontextmanager
async def _acme_server(folder: Path, side: Side) -> AsyncIterator[dict[str, Any]]:
    """An ACME server that finds `app.example.com` where VMs reach the edge; yields the settings for it."""
    hosts = Path("/etc/netns") / side.name / "hosts"
    hosts.parent.mkdir(parents=True)
    hosts.write_text(f"127.0.0.1 localhost\n{GATEWAY} {_HOST}\n")
    (folder / "caddy.json").write_text(json.dumps(_configuration(folder)))
    with (folder / "log").open("wb") as log:
        process = subprocess.Popen(  # noqa: ASYNC220
            ["ip", "netns", "exec", side.name, caddy_program(), "run", "--config", folder / "caddy.json"],
            env={"HOME": str(folder), "PATH": "/usr/sbin:/usr/bin:/sbin:/bin"},
            stderr=log,
        )
    root = folder / "storage/pki/authorities/local/root.crt"
    try:
        await until(lambda: (folder / "storage/certificates/local/127.0.0.1/127.0.0.1.crt").exists(), 20)
        # Caddy's user cannot read the folder of the other one.
        roots = folder / "roots.pem"
        roots.write_bytes(root.read_bytes())
        yield {"acme_directory": f"https://127.0.0.1:{_PORT}/acme/local/directory", "acme_roots": roots}
    finally:
        process.kill()
        process.wait()
        shutil.rmtree(hosts.parent)


@pytest.fixture
def folder(root: None) -> Iterator[Path]:
    with tempfile.TemporaryDirectory(prefix="stead-test-", dir="/var/tmp") as name:
        Path(name).chmod(0o755)
        yield Path(name)


async def _presented(stage: EdgeStage, roots: Path) -> x509.Certificate:
    """The certificate that a client sees who trusts only the ACME server's CA."""
    context = ssl.create_default_context(cafile=str(roots))
    _, writer = await asyncio.open_connection(
        "127.0.0.1", stage.public.https_port, ssl=context, server_hostname=_HOST
    )
    try:
        found = writer.get_extra_info("ssl_object").getpeercert(binary_form=True)
    finally:
        writer.close()
    return x509.load_der_x509_certificate(found)


async def test_only_a_mapped_domain_gets_a_certificate_and_keeps_it(folder: Path) -> None:
    async with edge_stage(partial(_acme_server, folder)) as stage:
        vm = stage.add_vm("vm")
        roots = folder / "roots.pem"
        with pytest.raises(ssl.SSLError):
            await _presented(stage, roots)
        stage.map(_HOST, "vm")
        first = await _presented(stage, roots)
        names = first.extensions.get_extension_for_class(x509.SubjectAlternativeName).value
        assert names.get_values_for_type(x509.DNSName) == [_HOST]
        async with vm.serving(echo_app("vm"), 80):
            answer = await stage.curl(f"https://{_HOST}/", "--cacert", str(roots))
        assert (answer.status, answer.json()["name"]) == (200, "vm")
        assert (await _presented(stage, roots)).serial_number == first.serial_number
