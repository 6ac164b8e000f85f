"""The edge of a whole installation: mapped domains of a real VM, the API over HTTPS, `stead serve`."""

import asyncio
import signal
from collections.abc import AsyncIterator
from dataclasses import dataclass
from pathlib import Path

import pytest
import pytest_asyncio

from stead.edge.edge import edge_folder
from stead.host.authority import Authority
from stead.host.commands import run
from stead.machines import Machine, State
from stead.machines.events import EventKind, MachineEvent
from stead.processes import of_user
from stead.settings import Settings
from support.edge_stage import Answer
from support.installations import Server, other_settings
from support.serve_process import end, environment, start
from support.typed import PROGRAM
from support.waiting import until

_PORT = 8000


@dataclass(frozen=True)
class Site:
    root: Path
    port: int

    async def curl(self, url: str, *options: str) -> Answer:
        done = await asyncio.create_subprocess_exec(
            *("curl", "-sS", "-i", "--max-time", "120", "--cacert", str(self.root)),
            *("--connect-to", f"::127.0.0.1:{self.port}", *options, url),
            stdout=asyncio.subprocess.PIPE,
            stderr=asyncio.subprocess.PIPE,
        )
        stdout, stderr = await done.communicate()
        return Answer.parse(stdout, done.returncode or 0, stderr.decode())


@pytest.fixture(scope="module")
def site(server: Server) -> Site:
    """The edge in front of the installation of this run."""
    return Site(server.installation.settings.data / "edge" / "root.crt", server.https_port)


@pytest_asyncio.fixture(scope="module")
async def served(server: Server) -> AsyncIterator[Machine]:
    """A VM of an account that serves its folder /srv on a port."""
    machine = await server.installation.machines.create(account=server.account)
    await machine.files().write("/srv/page", b"from the VM\n")
    command = f"systemd-run --unit=site python3 -m http.server {_PORT} --directory /srv"
    assert (await machine.exec(command)).ok
    listening = f"until curl -sf http://127.0.0.1:{_PORT}/page; do sleep 0.2; done"
    assert (await machine.exec(listening, timeout=120)).ok
    yield machine
    if machine.id in {info.id for info in await server.installation.machines.list()}:
        await machine.delete()


async def test_the_api_answers_over_https_and_keeps_its_metrics_to_itself(site: Site, server: Server) -> None:
    key = ("-H", f"Authorization: Bearer {server.key}")
    answer = await site.curl("https://api.freestyle.sh/v1/vms", *key)
    assert (answer.status, "vms" in answer.json()) == (200, True)
    assert (await site.curl("https://stead.localhost/v1/vms")).status == 401
    assert (await site.curl("https://stead.localhost/metrics")).status == 404


async def test_a_mapped_domain_leads_to_its_vm_wakes_it_and_ends_with_it(
    site: Site, server: Server, served: Machine, events: list[MachineEvent]
) -> None:
    domains = server.installation.domains
    await domains.map(server.account, "live.style.dev", served.id, _PORT)
    url = "https://live.style.dev/page"
    answer = await site.curl(url)
    assert (answer.status, answer.body) == (200, b"from the VM\n")

    await served.suspend()
    answers = await asyncio.gather(*(site.curl(url) for _ in range(20)))
    assert {(answer.status, answer.body) for answer in answers} == {(200, b"from the VM\n")}
    woken = [event.reason for event in events if event.kind is EventKind.WOKEN]
    assert woken == ["request for a mapped domain"]
    assert (await served.info()).state is State.RUNNING

    await domains.map(server.account, "none.style.dev", served.id, 9)
    refused = await site.curl("https://none.style.dev/")
    assert (refused.status, refused.json()["code"]) == (502, "CONNECTION_REFUSED")

    await served.delete()
    await until(lambda: domains.route("live.style.dev") is None, 10)
    assert (await site.curl(url)).status == 404


async def test_a_server_has_https_and_leaves_no_caddy_when_it_is_killed(settings: Settings) -> None:
    with other_settings(settings) as other:
        process, said = await start(other)
        printed = await run(PROGRAM, "trust", "--print", env=environment(other))
        root = other.data / "trusted.pem"
        root.write_bytes(printed.stdout)
        assert printed.stdout == Authority.open(other).certificate
        url = f"{said['httpsUrl']}/healthz"
        found = await run("curl", "-sS", "--cacert", root, "--connect-to", "stead.localhost::127.0.0.1:", url)
        assert b'"status":"ok"' in found.stdout
        (caddy,) = of_user(other.edge_uid)
        await end(process, signal.SIGKILL)
        await until(lambda: not caddy.alive(), 10)
        process, _ = await start(other)
        assert len(list(of_user(other.edge_uid))) == 1
        assert await end(process) == 0
        assert not list(of_user(other.edge_uid))
        assert not edge_folder(other).exists()
