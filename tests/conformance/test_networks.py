"""The pages about VPCs and VPNs, from a laptop: the npm package, wireguard-tools, and real VMs.

The laptop is a network namespace that reaches the API and the WireGuard port of this host. With
`STEAD_GUIDES`, a folder with the text of the published pages, the programs of the pages run the same tests.
"""

import asyncio
import re
import shlex
import shutil
import signal
import subprocess
from pathlib import Path

import pytest

from stead.addresses import GATEWAY
from stead.machines import Machine
from stead.machines.nics import NicRequest
from stead.machines.records import Properties
from support.copilot import packages
from support.documents import commands, matches, run_by
from support.guests import sh
from support.guides import published
from support.npm import SCRIPTS, Npm
from support.npm_laptop import NpmLaptop
from support.run_cli import PROGRAM
from support.vpc_guests import pings
from support.waiting import until

ADDRESS = "192.168.10.10"
BY_NAME = """
sudo mkdir -p /etc/wireguard
sudo install -m 600 freestyle-vpc.conf /etc/wireguard/freestyle-vpc.conf
sudo wg-quick up freestyle-vpc
sudo wg show freestyle-vpc
curl -sS -m 60 http://192.168.10.10:8080
sudo wg-quick down freestyle-vpc
"""


@pytest.fixture(params=["ours", pytest.param("published", marks=pytest.mark.slow)])
def vpn_program(request: pytest.FixtureRequest, package: Npm) -> str:
    """The program that joins a VPC, ours or that of the page."""
    if request.param == "ours":
        return "vpn.mjs"
    (package.folder / "vpn.ts").write_text(published(r'```ts title="vpn\.ts"\n(.*?)```'))
    return "vpn.ts"


async def test_a_laptop_reaches_a_vm_and_nothing_else(npm_laptop: NpmLaptop, vpn_program: str) -> None:
    """SSH, HTTP and ping by the private address, until Ctrl-C; also by a name under /etc/wireguard."""
    async with npm_laptop.program(vpn_program) as program:
        assert program.stdout is not None
        said = await asyncio.wait_for(program.stdout.readuntil(b"Ctrl-C"), 240)
        found = re.search(r"VM ([a-z0-9]{20}) in VPC (vpc-[a-z0-9]{20})", said.decode())
        assert found is not None, said
        vm = Machine(npm_laptop.server.installation.machines, found[1])
        (config,) = (npm_laptop.folder / "tmp").glob("wg-*.conf")
        assert config.stat().st_mode & 0o777 == 0o600

        await until(lambda: pings(npm_laptop.computer.side, ADDRESS), 60)
        assert re.search(r"peer: .*transfer: [1-9]", await npm_laptop.run("sudo", "wg", "show"), re.DOTALL)
        identity = await _serve_ssh_and_http(npm_laptop, vm)
        assert await npm_laptop.run(*_SSH, f"root@{ADDRESS}", "cat /etc/machine-id") == f"{identity}\n"
        assert (
            await npm_laptop.run("curl", "-sS", "-m", "60", *_RETRY, f"http://{ADDRESS}:8080/") == "private\n"
        )
        await _reaches_nothing_else(npm_laptop, vm, config)

        await npm_laptop.run("wg-quick", "down", str(config))
        shutil.copy(config, npm_laptop.folder / "freestyle-vpc.conf")
        shown = await npm_laptop.run("sh", "-ec", BY_NAME)
        assert "interface: freestyle-vpc" in shown and "private\n" in shown
        await _commands_of_the_page(npm_laptop)

        program.send_signal(signal.SIGINT)
        assert await asyncio.wait_for(program.wait(), 60) == 130
    assert not config.exists()
    assert "wg-" not in await npm_laptop.run("ip", "link")
    # The session has ended: the file that was saved connects no more.
    await npm_laptop.run("wg-quick", "up", "./freestyle-vpc.conf")
    assert not await npm_laptop.computer.side.reaches(ADDRESS, 8080)
    await npm_laptop.run("wg-quick", "down", "./freestyle-vpc.conf")


async def _commands_of_the_page(npm_laptop: NpmLaptop) -> None:
    """With the VPC of the program in the place of the page's."""
    lasting, uses, by_file = (commands(block.body) for block in run_by(__file__, "docs/vpcs.md"))
    npm_laptop.place("stead", f'#!/bin/sh\nexec {PROGRAM} "$@"\n')
    (connect,) = lasting
    joining = await asyncio.create_subprocess_exec(
        *npm_laptop.computer.command(*shlex.split(connect.line.replace("office", "workspace-network"))),
        cwd=npm_laptop.folder,
        env=npm_laptop.environment,
        stderr=asyncio.subprocess.PIPE,
    )
    try:
        assert joining.stderr is not None
        said = await asyncio.wait_for(joining.stderr.readline(), 120)
        if b"is sent to" in said:  # the warning that this server has no TLS
            said = await asyncio.wait_for(joining.stderr.readline(), 120)
        assert matches(list(connect.output), said.decode()), said
        ping, ssh, curl = (command.line for command in uses)
        assert ping == f"ping -c1 {ADDRESS}"  # not every host has the program
        await until(lambda: pings(npm_laptop.computer.side, ADDRESS), 60)
        assert ssh == f"ssh root@{ADDRESS}"  # slow under emulation, and logged in above
        assert await npm_laptop.run("sh", "-c", curl) == "private\n"
    finally:
        joining.send_signal(signal.SIGINT)
        await asyncio.wait_for(joining.wait(), 60)
    assert "wg-" not in await npm_laptop.run("ip", "link")

    write, *others = by_file
    printed = await npm_laptop.run(
        "sh", "-c", write.line.replace("connect office", "connect workspace-network")
    )
    printed = re.sub(
        r"session \w{12} ", "session 4kq0z7m2x9ab ", printed.replace(str(npm_laptop.folder), "/home/me")
    )
    assert matches(list(write.output), printed), printed
    for command in others:
        await npm_laptop.run("sh", "-c", command.line)


_RETRY = ("--retry", "9", "--retry-connrefused")
_SSH = (
    *("ssh", "-i", "id_ed25519", "-o", "BatchMode=yes", "-o", "ConnectTimeout=60"),
    *("-o", "StrictHostKeyChecking=accept-new", "-o", "UserKnownHostsFile=known_hosts"),
)


async def _serve_ssh_and_http(npm_laptop: NpmLaptop, vm: Machine) -> str:
    """Let the user's key in, and serve a page; returns the VM's /etc/machine-id."""
    key = npm_laptop.folder / "id_ed25519"
    generate = ["ssh-keygen", "-q", "-t", "ed25519", "-N", "", "-f", str(key)]
    await asyncio.to_thread(subprocess.run, generate, check=True)
    public = key.with_suffix(".pub").read_text().strip()
    await sh(vm, f"install -d -m 700 /root/.ssh; echo '{public}' > /root/.ssh/authorized_keys")
    serve = "systemd-run --quiet --unit=web python3 -m http.server 8080 --directory /srv"
    await sh(vm, f"echo private > /srv/index.html; {serve}")
    return await sh(vm, "cat /etc/machine-id")


async def _reaches_nothing_else(npm_laptop: NpmLaptop, vm: Machine, config: Path) -> None:
    """Also with a configuration that sends everything into the tunnel."""
    side, name = npm_laptop.computer.side, config.stem
    outside = str((await vm.info()).address)
    for target in (outside, str(GATEWAY), "192.168.11.10"):
        side.ip("route", "add", f"{target}/32", "dev", name)
    (peer,) = (await npm_laptop.run("wg", "show", name, "peers")).split()
    await npm_laptop.run("wg", "set", name, "peer", peer, "allowed-ips", "0.0.0.0/0")
    closed = ((outside, 22), (outside, 8080), (str(GATEWAY), 443), ("192.168.11.10", 8080))
    assert await side.reached(*closed) == []
    # The tunnel itself has worked all the time.
    await until(lambda: side.reaches(ADDRESS, 8080), 60)


@pytest.mark.slow
@pytest.mark.timeout(3600)
async def test_copilot_sdk_drives_a_server_in_a_vm(npm_laptop: NpmLaptop, cache: Path) -> None:
    """Raw TCP with JSON-RPC by the private address: from another VM of the VPC, and over the VPN."""
    folder = await packages(npm_laptop.folder, cache)
    shutil.copy(SCRIPTS / "copilot" / "client.mjs", folder)
    installation, account = npm_laptop.server.installation, npm_laptop.account
    vpc = (await installation.networks.create(account, "192.168.10.0/24")).id
    agent, peer = await asyncio.gather(
        installation.machines.create(Properties(account=account), nic=NicRequest(vpc, ADDRESS)),
        installation.machines.create(Properties(account=account), nic=NicRequest(vpc, "192.168.10.11")),
    )
    await agent.files().write("/root/server.py", (SCRIPTS / "copilot" / "server.py").read_bytes())
    serve = "python3 /root/server.py --headless --host 0.0.0.0 --port 4321"
    await sh(agent, f"systemd-run --quiet --unit=copilot -E {_TOKEN} {serve}")
    identity = await sh(agent, "cat /etc/machine-id")
    connect = "python3 -c 'import socket; socket.create_connection((\"127.0.0.1\", 4321))'"
    await sh(agent, f"until {connect} 2> /dev/null; do sleep 0.2; done", 300)

    client, name = (str(npm_laptop.npm.node22), "client.mjs"), "COPILOT_CONNECTION_TOKEN"
    async with npm_laptop.joined(vpc):
        secret = {name: _TOKEN.partition("=")[2]}
        assert await npm_laptop.run(*client, cwd=folder, **secret) == f"{identity}\n"
        refused = await npm_laptop.run(*client, cwd=folder, **secret, REJECT="1")
        assert refused == "not permitted: cat /etc/machine-id\n"
        with pytest.raises(AssertionError, match="AUTHENTICATION_FAILED"):
            await npm_laptop.run(*client, cwd=folder, **{name: "wrong"})
    with pytest.raises(AssertionError, match="Failed to connect"):
        await npm_laptop.run(*client, cwd=folder, **secret)

    packed = await asyncio.to_thread(_packed, folder)
    await peer.files().write("/root/app.tar.gz", packed)
    await sh(peer, "mkdir /root/app && tar -xzf /root/app.tar.gz -C /root/app", 300)
    assert await sh(peer, "cat /etc/machine-id") != identity
    assert await sh(peer, f"cd /root/app && {_TOKEN} node client.mjs", 600) == identity


_TOKEN = "COPILOT_CONNECTION_TOKEN=a-shared-secret"


def _packed(folder: Path) -> bytes:
    command = ["tar", "-cz", "--dereference", "--exclude=*.d.ts", "--exclude=*.map", "-C", str(folder), "."]
    return subprocess.run(command, check=True, capture_output=True).stdout


@pytest.mark.slow
@pytest.mark.timeout(7200)
async def test_a_laptop_queries_postgresql_in_a_vm(npm_laptop: NpmLaptop) -> None:
    """A real server in the VM, and `psql` on the laptop, by the private address and over the VPN only."""
    if shutil.which("psql") is None:
        pytest.skip("needs psql")
    installation, account = npm_laptop.server.installation, npm_laptop.account
    vpc = (await installation.networks.create(account, "192.168.10.0/24")).id
    vm = await installation.machines.create(Properties(account=account), nic=NicRequest(vpc, ADDRESS))
    install = "apt-get update -q && DEBIAN_FRONTEND=noninteractive apt-get install -qy postgresql"
    await sh(vm, install, 3600)
    settings = "listen_addresses = '*'"
    allow = "host all all 100.96.0.0/16 scram-sha-256"
    await sh(vm, f'echo "{settings}" | tee -a /etc/postgresql/*/main/postgresql.conf')
    await sh(vm, f"echo '{allow}' | tee -a /etc/postgresql/*/main/pg_hba.conf")
    await sh(vm, "systemctl restart postgresql", 300)
    sql = "CREATE ROLE app LOGIN PASSWORD 'secret'; CREATE DATABASE app OWNER app"
    for statement in sql.split("; "):
        await sh(vm, f'runuser -u postgres -- psql -c "{statement}"', 300)
    query = (
        "psql",
        f"postgresql://app:secret@{ADDRESS}/app",
        "-Atc",
        "SELECT current_user, inet_server_addr()",
    )
    with pytest.raises(AssertionError, match="connection to server"):
        await npm_laptop.run(*query, PGCONNECT_TIMEOUT="3")
    async with npm_laptop.joined(vpc):
        assert await npm_laptop.run(*query, PGCONNECT_TIMEOUT="60") == f"app|{ADDRESS}\n"
