"""`kill -9` of the server while VMs of a VPC talk to each other and a laptop talks to them."""

import asyncio
import json
import os
import signal
import socket
import time
from pathlib import Path

import pytest

from stead import AsyncStead, Nic
from stead.addresses import wireguard_link
from stead.host.image import BaseImage
from stead.host.wireguard import _is_bound
from stead.sdk import AsyncVm
from stead.settings import Settings
from support.installations import other_settings
from support.laptop import Laptop, laptop
from support.links import ip
from support.serve_process import end, start
from support.waiting import until

pytestmark = [pytest.mark.slow, pytest.mark.timeout(1800)]

FIXED, FREE, PORT = "192.168.10.10", "192.168.10.1", 7000
ECHO = f"""
import socket, threading
def serve(link):
    while data := link.recv(100):
        link.sendall(data)
with socket.create_server(("", {PORT})) as server:
    while True:
        threading.Thread(target=serve, args=(server.accept()[0],)).start()
"""
# One connection, which says how often it was answered, and that it is the only one.
TALK = f"""
import socket, time
with socket.create_connection(("{FIXED}", {PORT})) as link:
    for count in range(10 ** 9):
        link.sendall(b"hello")
        assert link.recv(5) == b"hello"
        open("/run/count.new", "w").write(str(count))
        __import__("os").rename("/run/count.new", "/run/count")
        time.sleep(0.05)
"""


async def run_in(vm: AsyncVm, name: str, program: str) -> None:
    await vm.fs.write_text(f"/root/{name}.py", program)
    await vm.exec(f"systemd-run --quiet --unit={name} python3 /root/{name}.py", check=True)


async def count_of(vm: AsyncVm) -> int:
    return int((await vm.exec("cat /run/count 2>/dev/null || echo -1", check=True)).stdout)


def free_port() -> int:
    """A UDP port, below those that the kernel gives to others."""
    return next(port for port in range(20_000 + os.getpid() % 5000, 32_000) if not _is_bound(port))


def on_host(settings: Settings) -> dict[str, object]:
    """What an installation with one VPC has on this host."""
    instance = settings.instance
    device = wireguard_link(instance, 1)
    processes = [
        path.parent.name
        for path in Path("/proc").glob("[0-9]*/cmdline")
        if f"wireguard-go\0-f\0{device}\0" in _text(path)
    ]
    names = sorted(path.name for path in Path("/run/netns").glob(f"stead-{instance}*"))
    links = {name: _links(name) for name in names}
    tables = {
        name: ip("netns", "exec", name, "nft", "list", "tables").count("table inet stead\n") for name in names
    }
    sockets = [path.name for path in Path("/var/run/wireguard").glob(f"{device}*")]
    return {
        "wireguard-go": len(processes),
        "namespaces": names,
        "links": links,
        "tables": tables,
        "sockets": sockets,
    }


def _text(path: Path) -> str:
    try:
        return path.read_text()
    except OSError:
        return ""


def _links(namespace: str) -> list[str]:
    return sorted(each["ifname"] for each in json.loads(ip("-n", namespace, "-json", "link")) if each)


class Talk:
    """Echoes of a laptop over its tunnel, again and again; a connection that fails is replaced."""

    def __init__(self, computer: Laptop) -> None:
        self._computer = computer
        self.answered = 0

    async def run(self) -> None:
        while True:
            try:
                link = await self._computer.side.connect(FIXED, PORT)
            except (OSError, TimeoutError):
                continue
            with link:
                await self._talk(link)

    async def _talk(self, link: socket.socket) -> None:
        loop = asyncio.get_running_loop()
        try:
            while True:
                async with asyncio.timeout(3):
                    await loop.sock_sendall(link, b"hello")
                    if not await loop.sock_recv(link, 5):
                        return
                self.answered += 1
                await asyncio.sleep(0.05)
        except (OSError, TimeoutError):
            return

    async def goes_on(self, limit: float) -> float:
        """Wait for ten more answers; returns how long the first took."""
        begun, seconds = self.answered, time.monotonic()
        await until(lambda: self.answered > begun, limit)
        seconds = time.monotonic() - seconds
        await until(lambda: self.answered > begun + 10, 30)
        return seconds


async def test_server_kill_under_traffic(settings: Settings, image: BaseImage, tmp_path: Path) -> None:
    with other_settings(settings) as other, laptop() as computer:
        variables = {"STEAD_WIREGUARD_HOST": str(computer.host), "STEAD_WIREGUARD_PORT": str(free_port())}
        process, said = await start(other, **variables)
        key = said["key"]
        try:
            async with AsyncStead(key, base_url=said["url"]) as stead:
                vpc = await stead.vpcs.create("192.168.10.0/24")
                fixed, free = await asyncio.gather(
                    stead.vms.create(nics=[Nic(vpc.id, FIXED)], idle_timeout_seconds=None),
                    stead.vms.create(nics=[Nic(vpc.id)], idle_timeout_seconds=None),
                )
                await run_in(fixed, "echo", ECHO)
                await until(lambda: _listens(fixed), 60)
                await run_in(free, "talk", TALK)
                session = await stead.vpcs.connect(vpc.id)
            config = tmp_path / f"wg-{session.id}.conf"
            config.touch(mode=0o600)
            config.write_text(session.client_config)
            async with computer.joined(config):
                talk = Talk(computer)
                talking = asyncio.create_task(talk.run())
                try:
                    await talk.goes_on(60)
                    async with AsyncStead(key, base_url=said["url"]) as stead:
                        await until(lambda: _counts(stead.vms.ref(free.id), 10), 60)
                    before = on_host(other)
                    await end(process, signal.SIGKILL)
                    # wireguard-go ends with the server; nothing of the VMs does.
                    await until(lambda: on_host(other)["wireguard-go"] == 0, 30)
                    process, said = await start(other, **variables)
                    restarted = time.monotonic()
                    async with AsyncStead(key, base_url=said["url"]) as stead:
                        vms = [stead.vms.ref(each.id) for each in (fixed, free)]
                        assert [(await vm.info()).state for vm in vms] == ["running", "running"]
                        assert [(await vm.info()).nics[0].ipv4 for vm in vms] == [FIXED, FREE]
                        # The same connection, in the same process of the guest, all the time.
                        count = await count_of(vms[1])
                        await until(lambda: _counts(vms[1], count + 10), 60)
                        # The same device, with the same file: the client finds the new tunnel by itself.
                        await talk.goes_on(150)
                        seconds = time.monotonic() - restarted
                        print(f"the tunnel was back {seconds:.1f} s after the start of the server")
                        assert on_host(other) == before
                        await vms[1].exec("ping -c1 -W5 " + session.client_tunnel_ip, check=True)
                finally:
                    talking.cancel()
            # And up again, as a user would.
            async with computer.joined(config):
                talk = Talk(computer)
                talking = asyncio.create_task(talk.run())
                try:
                    await talk.goes_on(30)
                finally:
                    talking.cancel()
            async with AsyncStead(key, base_url=said["url"]) as stead:
                for vm in (fixed, free):
                    await stead.vms.delete(vm.id)
                await stead.vpcs.delete(vpc.id)
            left = on_host(other)
            assert (left["wireguard-go"], left["sockets"]) == (0, [])
            assert left["namespaces"] == [f"stead-{other.instance}"]
        finally:
            await end(process)


async def _counts(vm: AsyncVm, least: int) -> bool:
    return await count_of(vm) >= least


async def _listens(vm: AsyncVm) -> bool:
    return (await vm.exec(f"ss -Htln sport = :{PORT} | grep -q .")).ok
