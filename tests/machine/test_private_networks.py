"""Two VMs in a VPC: what they reach of each other and of the rest, asleep and awake, forked and rebooted."""

import asyncio
from collections.abc import AsyncIterator
from dataclasses import dataclass, replace
from pathlib import Path

import httpx2
import pytest
import pytest_asyncio

from stead.errors import AddressTaken
from stead.machines import Machine, State
from stead.machines.nics import NicRequest
from stead.machines.records import Properties
from stead.networks.errors import ForkUnsupported, VpcInUse
from support.guests import sh
from support.installations import Server
from support.laptop import laptop
from support.waiting import until

SERVE = "systemd-run --quiet --unit=web python3 -m http.server 8080 --directory /srv"

_RECEIVE = """
import socket
link = socket.socket(socket.AF_INET, socket.SOCK_DGRAM)
link.bind(("0.0.0.0", 7001))
open("{}", "wb").write(link.recv(100))
"""


@dataclass
class Pair:
    server: Server
    vpc: str
    fixed: Machine
    free: Machine


@pytest_asyncio.fixture(scope="module")
async def pair(server: Server) -> AsyncIterator[Pair]:
    machines, networks = server.installation.machines, server.installation.networks
    vpc = (await networks.create(server.account, "192.168.10.0/24")).id
    fixed, free = await asyncio.gather(
        machines.create(
            Properties(account=server.account, name="My DB"), nic=NicRequest(vpc, "192.168.10.10")
        ),
        machines.create(Properties(account=server.account), nic=NicRequest(vpc)),
    )
    await sh(fixed, f"echo private > /srv/index.html; {SERVE}")
    yield Pair(server, vpc, fixed, free)
    with pytest.raises(VpcInUse):
        await networks.delete(server.account, vpc)
    for machine in (fixed, free):
        await machine.delete()
    await networks.delete(server.account, vpc)


async def test_vms_of_a_vpc_reach_each_other(pair: Pair) -> None:
    assert await sh(pair.fixed, "ip -4 -brief address show eth0 | awk '{print $3}'") == "192.168.10.10/32"
    assert await sh(pair.free, "hostname -I") == "192.168.10.1"
    await sh(pair.free, "ping -c1 -W5 192.168.10.10")
    await sh(pair.fixed, "ping -c1 -W5 192.168.10.1")
    assert (
        await sh(pair.free, "curl -sS -m 20 --retry 5 --retry-connrefused http://192.168.10.10:8080/")
        == "private"
    )


async def test_a_vm_is_reached_by_its_name(pair: Pair) -> None:
    machines, account = pair.server.installation.machines, pair.server.account
    name = "my-db.internal"
    assert (await sh(pair.free, f"getent hosts {name}")).split() == ["192.168.10.10", name]
    assert (await sh(pair.free, f"getent hosts {pair.fixed.id}.internal")).startswith("192.168.10.10 ")
    assert (await sh(pair.free, "getent hosts 192.168.10.10")).split() == ["192.168.10.10", name]
    fetch = f"curl -sS -m 60 --retry 5 --retry-connrefused http://{name}:8080/"
    assert await sh(pair.free, fetch, timeout=90) == "private"
    await machines.rename(pair.fixed.id, "store")
    assert (await sh(pair.free, "getent hosts store.internal")).startswith("192.168.10.10 ")
    unknown = 2
    assert (await pair.free.exec(f"getent hosts {name}")).exit_code == unknown
    other = (await pair.server.installation.networks.create(account, "192.168.10.0/24")).id
    strangers = await asyncio.gather(
        machines.create(Properties(account=account), nic=NicRequest(other)),
        machines.create(Properties(account=account)),
    )
    for stranger in strangers:
        assert "api.freestyle.sh" in await sh(stranger, "getent hosts api.freestyle.sh")
        assert (await stranger.exec("getent hosts store.internal")).exit_code == unknown
    for stranger in strangers:
        await stranger.delete()
    await pair.server.installation.networks.delete(account, other)


async def test_a_vm_in_a_vpc_reaches_what_any_vm_reaches(pair: Pair) -> None:
    """Names and its own Stead, which are at the gateway; and not the host, nor other VMs' addresses."""

    async def resolved() -> bool:
        """Not while dnsmasq is restarted: it is when names are mapped."""
        return b"api.freestyle.sh" in (await pair.fixed.exec("getent hosts api.freestyle.sh")).stdout

    await until(resolved, 60)
    await sh(pair.fixed, "curl -sS -m 20 https://api.freestyle.sh/healthz")
    other = (await pair.free.info()).address
    for target in (f"http://{other}:8080/", "http://169.254.0.1:22/", pair.server.url):
        assert not (await pair.fixed.exec(f"curl -sS -m 3 {target}")).ok


async def test_the_host_reaches_a_vm_in_a_vpc(pair: Pair) -> None:
    """Mapped domains, SSH and forwarded ports go through the VM's address outside of the VPC."""
    domains = pair.server.installation.domains
    mapping = await domains.map(pair.server.account, "private.style.dev", pair.fixed.id, 8080)
    url = f"https://127.0.0.1:{pair.server.https_port}/"
    async with httpx2.AsyncClient(verify=False) as client:
        answer = await client.get(
            url, timeout=60, headers={"Host": mapping.domain}, extensions={"sni_hostname": mapping.domain}
        )
    assert answer.text == "private\n"
    with await pair.server.installation.machines.dial(pair.fixed.id, 22) as link:
        assert (await asyncio.get_running_loop().sock_recv(link, 4)) == b"SSH-"
    await domains.unmap(pair.server.account, mapping.domain)


async def test_a_packet_wakes_a_suspended_vm(pair: Pair) -> None:
    await pair.fixed.suspend()
    assert (await pair.fixed.info()).state is State.SUSPENDED
    assert await sh(pair.free, "curl -sS -m 60 http://192.168.10.10:8080/", timeout=90) == "private"
    # The guest may answer before its wake has ended.
    await until(lambda: _is_running(pair.fixed), 60)


async def test_the_packet_that_wakes_a_vm_is_delivered(pair: Pair) -> None:
    """One echo request, and one datagram: neither is sent again."""
    received = "/srv/datagram"
    await sh(pair.fixed, f"systemd-run --quiet --unit=udp python3 -c '{_RECEIVE.format(received)}'")
    await sh(pair.fixed, "until ss -Huln | grep -q :7001; do sleep 0.2; done", timeout=60)
    await pair.fixed.suspend()
    await sh(pair.free, "ping -c1 -W30 192.168.10.10", timeout=60)
    await pair.fixed.suspend()
    await sh(pair.free, "bash -c 'echo morning > /dev/udp/192.168.10.10/7001'")
    await until(lambda: _is_running(pair.fixed), 60)
    assert await sh(pair.fixed, f"until grep . {received}; do sleep 0.2; done", timeout=60) == "morning"


async def _is_running(machine: Machine) -> bool:
    return (await machine.info()).state is State.RUNNING


async def test_a_laptop_joins_with_wireguard_and_wakes_a_vm(pair: Pair, tmp_path: Path) -> None:
    tunnels, account = pair.server.installation.tunnels, pair.server.account
    session = await tunnels.create(account, pair.vpc)
    url = "http://192.168.10.10:8080/"
    fetch = ("curl", "-sS", "-m", "60", "--retry", "9", "--retry-connrefused", url)
    with laptop() as computer:
        config = tmp_path / f"wg-{session.id}.conf"
        config.touch(mode=0o600)
        config.write_text(replace(session, endpoint=str(computer.host)).config)
        async with computer.joined(config):
            assert await computer.run(*fetch) == "private\n"
            # And back, to the address of the tunnel.
            await sh(pair.fixed, f"ping -c1 -W5 {session.address}")
            await pair.fixed.suspend()
            assert (await pair.fixed.info()).state is State.SUSPENDED
            assert await computer.run(*fetch) == "private\n"
            await until(lambda: _is_running(pair.fixed), 60)
            await tunnels.delete(account, pair.vpc, session.id)
            with pytest.raises(AssertionError, match="curl"):
                await computer.run("curl", "-sS", "-m", "3", url)


async def test_forks_have_their_own_address_or_are_refused(pair: Pair) -> None:
    with pytest.raises(ForkUnsupported):
        await pair.fixed.fork()
    (child,) = await pair.free.fork()
    try:
        assert await sh(child, "hostname -I") == "192.168.10.2"
        await sh(child, "ping -c1 -W5 192.168.10.10")
        await sh(child, "ping -c1 -W5 192.168.10.1")
    finally:
        await child.delete()
    with pytest.raises(AddressTaken):
        await pair.server.installation.machines.create(
            Properties(account=pair.server.account), nic=NicRequest(pair.vpc, "192.168.10.10")
        )


@pytest.mark.slow
async def test_the_address_survives_stop_and_start(pair: Pair) -> None:
    await pair.free.stop()
    await pair.free.start()
    assert await sh(pair.free, "hostname -I") == "192.168.10.1"
    await sh(pair.fixed, "ping -c1 -W5 192.168.10.1")
