"""WireGuard tunnels into VPCs: one device for each VPC that has clients.

The device is made in the host's namespace, where its UDP socket stays, and moved into that of the VPC. It is
the kernel's where there is one, else `wireguard-go`, which ends with this process, however that ends, and is
restarted when it dies.
"""

import asyncio
import contextlib
import os
import re
import socket
import struct
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from stead import addresses, landlock
from stead.deadlines import scaled
from stead.errors import HostError
from stead.host.commands import run
from stead.host.interface import WireGuardTunnel
from stead.host.namespaces import namespace_of
from stead.host.taps import NO_PACKET_INFORMATION, SET_MTU, TUN, VIRTIO_HEADER, open_tun, set_mtu
from stead.landlock import FileAccess
from stead.launcher import Launch
from stead.settings import Settings
from stead.shares import KeyedLock
from stead.supervision import Backoff, ProcessCommand, SupervisedProcess
from stead.tasks import finished

_MTU = 1420
_START_TIMEOUT = scaled(10.0)
_POLL = 0.02
_RESTART = Backoff(shortest=0.2, longest=5.0, healthy=10.0)
_SOCKETS = Path("/var/run/wireguard")
_FIRST_UNPRIVILEGED_PORT = 1024
_BULK_SINCE = 20230223
_UDP_SOCKETS = Path("/proc/net/udp"), Path("/proc/net/udp6")


@dataclass(eq=False)
class _Device:
    tunnel: WireGuardTunnel
    process: SupervisedProcess | None = None
    """wireguard-go; None for a device of the kernel."""

    @property
    def number(self) -> int:
        return self.tunnel.network.number


class WireGuard:
    """The WireGuard devices of an installation. `namespace` names the namespace of a VPC by its number."""

    def __init__(self, settings: Settings, namespace: Callable[[int], str]) -> None:
        self._settings = settings
        self._namespace = namespace
        self._devices: dict[int, _Device] = {}
        self._locks = KeyedLock()

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
        elif device is None or (device.process is not None and not device.process.serving):
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
        for number in list(self._devices):
            with contextlib.suppress(HostError):
                await self._remove(number)

    def _name(self, number: int) -> str:
        return addresses.wireguard_link(self._settings.instance, number)

    async def _create(self, tunnel: WireGuardTunnel) -> None:
        device = _Device(tunnel)
        _refuse_bound_port(tunnel)
        try:
            await run("ip", "link", "add", self._name(device.number), "type", "wireguard")
        except HostError:
            await self._start_program(device)
        else:
            try:
                await self._set_up(device)
            except BaseException:
                await self._delete(device.number)
                raise
        self._devices[device.number] = device

    async def _start_program(self, device: _Device) -> None:
        """Let wireguard-go make the device, also again when it ends."""
        name = self._name(device.number)
        uid = self._settings.tunnel_uid(device.number)
        flags = await _tun_flags()

        async def ready() -> None:
            await _answers(_socket_of(name))
            _refuse_bound_port(device.tunnel)
            await self._set_up(device)
            # It notices only after a while that its device is up.
            await _until(lambda: _is_bound(device.tunnel.port))

        device.process = SupervisedProcess(
            f"wireguard-go of VPC {device.tunnel.network.id}",
            lambda: _program(name, uid, device.tunnel.port, flags),
            ready,
            _RESTART,
            start_timeout=_START_TIMEOUT,
            clean_up=lambda: self._delete(device.number),
        )
        await device.process.start()

    async def _set_up(self, device: _Device) -> None:
        """Move a new device into its VPC, give it its address and configure it."""
        name, namespace = self._name(device.number), self._namespace(device.number)
        await run("ip", "link", "set", name, "netns", namespace)
        commands = f"""
addr replace {addresses.TUNNEL_SERVER}/{addresses.TUNNELS.prefixlen} dev {name}
link set {name} mtu {_MTU} up
"""
        await run("ip", "-n", namespace, "-batch", "-", stdin=commands.encode())
        await self._configure(device.tunnel)

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
        if device is not None and device.process is not None:
            await device.process.close()
        else:
            await self._delete(number)

    async def _delete(self, number: int) -> None:
        """Delete a device of the kernel, also one that is not in the VPC yet, and wireguard-go's socket."""
        name = self._name(number)
        _socket_of(name).unlink(missing_ok=True)
        for namespace in ([], ["-n", self._namespace(number)]):
            with contextlib.suppress(HostError):
                await run("ip", *namespace, "link", "delete", name)


def _mtu_is_set() -> bytes:
    """A seccomp filter by which an ioctl that sets an MTU returns 0 and does nothing."""
    load, equal, answer = 0x20, 0x15, 0x06  # BPF_LD | BPF_W | BPF_ABS, BPF_JMP | BPF_JEQ | BPF_K, BPF_RET
    ioctl, allow, error_0 = 16, 0x7FFF0000, 0x00050000
    instructions = (
        (load, 0, 0, 4),  # the architecture
        (equal, 0, 5, 0xC000003E),  # x86-64
        (load, 0, 0, 0),  # the number of the system call
        (equal, 0, 3, ioctl),
        (load, 0, 0, 24),  # its second argument
        (equal, 0, 1, SET_MTU),
        (answer, 0, 0, error_0),
        (answer, 0, 0, allow),
    )
    return b"".join(struct.pack("HBBI", *each) for each in instructions)


_MTU_IS_SET = _mtu_is_set()


def _socket_of(name: str) -> Path:
    """Where `wg` looks for the process of a device."""
    return _SOCKETS / f"{name}.sock"


def _program(name: str, uid: int, port: int, flags: int) -> ProcessCommand:
    """wireguard-go as a user that owns nothing, with its device and its socket as descriptors.

    It insists on setting the MTU of its device, for which it would have to be allowed to change all devices
    and rules of the host. So the device has that MTU already, and the attempt succeeds without effect.
    """
    may = "-all" + (",+net_bind_service" if port < _FIRST_UNPRIVILEGED_PORT else "")
    rules = tuple(FileAccess().rules(landlock.version()))
    program = Launch(["wireguard-go", "-f", name], rules=rules, system_calls=_MTU_IS_SET)
    with contextlib.ExitStack() as undo:
        device = open_tun(name, flags)
        undo.callback(os.close, device)
        set_mtu(name, _MTU)
        listener = _listen(_socket_of(name), uid)
        undo.pop_all()
    return ProcessCommand(
        [
            *("setpriv", f"--reuid={uid}", f"--regid={uid}", "--clear-groups", "--no-new-privs"),
            *(f"--bounding-set={may}", f"--inh-caps={may}", f"--ambient-caps={may}"),
            *("--pdeathsig=KILL", "--", *program.arguments),
        ],
        environment={
            "LOG_LEVEL": "error",
            "WG_PROCESS_FOREGROUND": "1",
            "WG_TUN_FD": str(device),
            "WG_UAPI_FD": str(listener),
        },
        handed_over=(device, listener),
    )


def _listen(path: Path, uid: int) -> int:
    """The socket through which `wg` configures a device."""
    path.parent.mkdir(mode=0o755, exist_ok=True)
    path.unlink(missing_ok=True)
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as listener:
        listener.bind(str(path))
        path.chmod(0o600)
        # wireguard-go watches it.
        os.chown(path, uid, uid)
        listener.listen()
        return listener.detach()


async def _tun_flags() -> int:
    """How wireguard-go wants its device, which it would make so itself.

    From 2023 on it sends and receives segments in bulk; before, with four bytes in front of each packet.
    """
    completed = await run("wireguard-go", "--version", timeout=_START_TIMEOUT)
    found = re.search(rb"v0\.0\.(\d{8})\b", completed.stdout + completed.stderr)
    if found is not None and int(found[1]) < _BULK_SINCE:
        return TUN
    return TUN | NO_PACKET_INFORMATION | VIRTIO_HEADER


async def _answers(path: Path) -> None:
    """Wait until wireguard-go has set its device up and answers on its socket."""
    reader, writer = await asyncio.open_unix_connection(path)
    try:
        writer.write(b"get=1\n\n")
        if not await reader.readline():
            raise HostError("wireguard-go closed its socket")
    finally:
        writer.close()


async def _until(condition: Callable[[], bool]) -> None:
    while True:
        if condition():
            return
        await asyncio.sleep(_POLL)


def _refuse_bound_port(tunnel: WireGuardTunnel) -> None:
    if _is_bound(tunnel.port):
        raise HostError(
            f"UDP port {tunnel.port}, for tunnels into VPC {tunnel.network.id}, is in use by another"
            " program: stop it, or set STEAD_WIREGUARD_PORT"
        )


def _is_bound(port: int) -> bool:
    """Whether a UDP socket of the host has this port. From /proc: binding it as a probe could conflict."""
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
