"""WireGuard tunnels into VPCs: one device for each VPC that has clients.

The device is made in the host's namespace, where its UDP socket stays, and moved into that of the VPC. It is
the kernel's where there is one, else `wireguard-go`, which ends with this process, however that ends, and is
restarted when it dies.
"""

import asyncio
import contextlib
import os
from asyncio.subprocess import DEVNULL, Process
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from stead import addresses
from stead.deadlines import scaled
from stead.errors import HostError
from stead.host.commands import run
from stead.host.interface import WireGuardTunnel
from stead.host.namespaces import namespace_of
from stead.logs import get_logger
from stead.settings import Settings
from stead.tasks import KeyedLock, TaskSet, finished

log = get_logger("stead.wireguard")

_MTU = 1420
_START_TIMEOUT = scaled(10.0)
_POLL = 0.02
_RESTART = 0.2, 5.0
"""The shortest and the longest delay before a restart, in seconds; it doubles with each."""
_HEALTHY = 10.0
"""Seconds after which a start counts as a success."""
_SOCKETS = Path("/var/run/wireguard")
_UDP_SOCKETS = Path("/proc/net/udp"), Path("/proc/net/udp6")


@dataclass(eq=False)
class _Device:
    tunnel: WireGuardTunnel
    process: Process | None
    """wireguard-go; None for a device of the kernel."""
    since: float
    delay: float
    """Seconds before a restart, when it dies at once."""


class WireGuard:
    """The WireGuard devices of an installation. `namespace` names the namespace of a VPC by its number."""

    def __init__(self, settings: Settings, namespace: Callable[[int], str]) -> None:
        self._settings = settings
        self._namespace = namespace
        self._devices: dict[int, _Device] = {}
        self._locks = KeyedLock()
        self._tasks = TaskSet()

    async def set(self, tunnel: WireGuardTunnel) -> None:
        """Make a VPC's tunnel have exactly these peers; without any, it has none."""
        number = tunnel.network.number
        async with self._locks.hold(str(number)):
            await finished(self._set(tunnel))

    async def _set(self, tunnel: WireGuardTunnel) -> None:
        number = tunnel.network.number
        device = self._devices.get(number)
        if not tunnel.peers:
            await self._remove(number)
        elif device is None or (device.process is not None and device.process.returncode is not None):
            await self._remove(number)
            await self._create(tunnel)
        else:
            device.tunnel = tunnel
            await self._configure(tunnel)

    async def remove(self, number: int) -> None:
        """Remove the tunnel of a VPC, if it has one."""
        async with self._locks.hold(str(number)):
            await finished(self._remove(number))

    async def close(self) -> None:
        await self._tasks.close()
        for number in list(self._devices):
            with contextlib.suppress(HostError):
                await self._remove(number)

    def _name(self, number: int) -> str:
        return addresses.wireguard_link(self._settings.instance, number)

    async def _create(self, tunnel: WireGuardTunnel, delay: float = _RESTART[0]) -> None:
        number = tunnel.network.number
        name, namespace = self._name(number), self._namespace(number)
        if _is_bound(tunnel.port):
            raise HostError(
                f"UDP port {tunnel.port}, for tunnels into VPC {tunnel.network.id}, is in use by another"
                " program: stop it, or set STEAD_WIREGUARD_PORT"
            )
        process = None
        try:
            await run("ip", "link", "add", name, "type", "wireguard")
        except HostError:
            process = await self._start_program(name)
        try:
            await run("ip", "link", "set", name, "netns", namespace)
            commands = f"""
addr replace {addresses.TUNNEL_SERVER}/{addresses.TUNNELS.prefixlen} dev {name}
link set {name} mtu {_MTU} up
"""
            await run("ip", "-n", namespace, "-batch", "-", stdin=commands.encode())
            await self._configure(tunnel)
            if process is not None:
                await self._wait_until_bound(tunnel, process)
        except BaseException:
            await self._end(process)
            await self._delete(number)
            raise
        device = _Device(tunnel, process, asyncio.get_running_loop().time(), delay)
        self._devices[number] = device
        if process is not None:
            self._tasks.start(self._watch(device), f"watch WireGuard of VPC {tunnel.network.id}")

    async def _start_program(self, name: str) -> Process:
        """Start wireguard-go and wait until it is ready for its configuration."""
        (_SOCKETS / f"{name}.sock").unlink(missing_ok=True)
        try:
            process = await asyncio.create_subprocess_exec(
                *("setpriv", "--bounding-set=-all,+net_admin", "--no-new-privs", "--pdeathsig=KILL", "--"),
                *("wireguard-go", "-f", name),
                stdin=DEVNULL,
                stdout=DEVNULL,
                stderr=DEVNULL,
                env={
                    "PATH": os.environ.get("PATH", os.defpath),
                    "LOG_LEVEL": "error",
                    "WG_PROCESS_FOREGROUND": "1",
                },
                cwd="/",
                start_new_session=True,
            )
        except FileNotFoundError as error:
            raise HostError(f"{error.filename} is not installed on this host") from error
        try:
            async with asyncio.timeout(_START_TIMEOUT):
                while not (_SOCKETS / f"{name}.sock").exists():
                    if process.returncode is not None:
                        raise HostError(
                            f"wireguard-go does not start (status {process.returncode}):"
                            " are wireguard-go and wireguard-tools installed?"
                        )
                    await asyncio.sleep(_POLL)
        except BaseException as error:
            await self._end(process)
            if isinstance(error, TimeoutError):
                raise HostError(f"wireguard-go did not start in {_START_TIMEOUT:g} s") from error
            raise
        return process

    async def _wait_until_bound(self, tunnel: WireGuardTunnel, process: Process) -> None:
        """wireguard-go notices only after a while that its device is up."""
        deadline = asyncio.get_running_loop().time() + _START_TIMEOUT
        while not _is_bound(tunnel.port):
            if process.returncode is not None or asyncio.get_running_loop().time() > deadline:
                raise HostError(f"wireguard-go does not listen on UDP port {tunnel.port}")
            await asyncio.sleep(_POLL)

    async def _configure(self, tunnel: WireGuardTunnel) -> None:
        number = tunnel.network.number
        lines = ["[Interface]", f"PrivateKey = {tunnel.private_key}", f"ListenPort = {tunnel.port}"]
        for peer in tunnel.peers:
            lines += ["[Peer]", f"PublicKey = {peer.public_key}", f"AllowedIPs = {peer.address}/32"]
        path = namespace_of(self._namespace(number))
        text = "\n".join([*lines, ""])
        # Peers that stay keep their state.
        await run(
            *("nsenter", f"--net={path}", "wg", "syncconf", self._name(number), "/dev/stdin"),
            stdin=text.encode(),
        )

    async def _remove(self, number: int) -> None:
        device = self._devices.pop(number, None)
        if device is not None:
            await self._end(device.process)
        await self._delete(number)

    async def _delete(self, number: int) -> None:
        """Delete a device of the kernel, also one that is not in the VPC yet, and wireguard-go's socket."""
        name = self._name(number)
        (_SOCKETS / f"{name}.sock").unlink(missing_ok=True)
        for place in ([], ["-n", self._namespace(number)]):
            with contextlib.suppress(HostError):
                await run("ip", *place, "link", "delete", name)

    async def _end(self, process: Process | None) -> None:
        if process is not None and process.returncode is None:
            with contextlib.suppress(ProcessLookupError):
                process.kill()
            await process.wait()

    async def _watch(self, device: _Device) -> None:
        """Start wireguard-go again when it dies."""
        shortest, longest = _RESTART
        number = device.tunnel.network.number
        if device.process is None:
            return
        status = await device.process.wait()
        healthy = asyncio.get_running_loop().time() - device.since > _HEALTHY
        delay = shortest if healthy else device.delay
        while self._devices.get(number) is device:
            log.warning("wireguard-go ended, restarting", vpc=device.tunnel.network.id, status=status)
            await asyncio.sleep(delay)
            delay = min(2 * delay, longest)
            try:
                async with self._locks.hold(str(number)):
                    if self._devices.get(number) is device:
                        await finished(self._create(device.tunnel, delay))
                        return
            except HostError as error:
                log.error("cannot restart wireguard-go", vpc=device.tunnel.network.id, error=str(error))


def _is_bound(port: int) -> bool:
    """Whether a UDP socket of the host has this port. Read: a probe that binds it could be in the way."""
    for path in _UDP_SOCKETS:
        with contextlib.suppress(FileNotFoundError):
            for line in path.read_text().splitlines()[1:]:
                if int(line.split()[1].rpartition(":")[2], 16) == port:
                    return True
    return False


def remove_sockets(settings: Settings) -> None:
    """Remove what killed processes of an installation left."""
    for path in _SOCKETS.glob(f"{addresses.wireguard_link(settings.instance, 0)[:-1]}*.sock"):
        path.unlink(missing_ok=True)
