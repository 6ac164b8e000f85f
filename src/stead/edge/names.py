"""The resolver of VMs: dnsmasq in the namespace of the taps, at the gateway address.

Names of this Stead resolve to the gateway, where Caddy listens for VMs. Names of VMs in VPCs are answered
beside dnsmasq, by who asks (`private_names.py`). The host's resolvers are asked for all other names; dnsmasq
reads a list of them that follows the host's.

Mapped names are files that the running dnsmasq reads again. It cannot do so for the addresses of wildcards,
only for the servers that it asks about a domain, so a second dnsmasq on loopback has the gateway's address
for every name, and the first asks it about names below mapped wildcards.
"""

import asyncio
import contextlib
import shutil
import signal
from collections.abc import AsyncIterator, Callable, Collection, Sequence
from ipaddress import IPv4Address
from typing import Self

from stead import addresses, landlock
from stead.deadlines import scaled
from stead.edge.private_names import NoNames, VisibleNames, serving_private_names
from stead.errors import HostError
from stead.files import write_atomically
from stead.host.network import Network, namespace_path
from stead.host.resolvers import changes_of_resolvers, resolv_conf
from stead.landlock import RANDOM, USERS, FileAccess
from stead.launcher import Launch
from stead.logs import get_logger
from stead.processes import kill, of_user
from stead.settings import Settings
from stead.supervision import Backoff, ProcessCommand, SupervisedProcess, keep_running
from stead.tasks import TaskSet, finished, in_thread

_PORT = 53
_START_TIMEOUT = scaled(10.0)
_POLL = 0.01
_RESTART = Backoff(shortest=0.1, longest=5.0, healthy=10.0)
_FOLLOW_AGAIN = Backoff(shortest=1.0, longest=60.0, healthy=60.0)
_RELOAD_RESTART = Backoff(shortest=1.0, longest=30.0, healthy=60.0)
_CACHED = 2000
_CONCURRENT = 5000
"""Queries that wait for the host's resolvers, of all VMs together; one VM sends 200 in a second."""
_TTL = 5
"""Seconds for which VMs may cache the names of this Stead."""
_WILDCARD_SERVER, _WILDCARD_PORT = "127.0.0.1", 55
"""Where the second dnsmasq listens. Below 1024: the first asks from random ports above."""
_RELOAD_INTERVAL = 10.0
"""Seconds between two reloads for changed wildcards: each clears the cache, which all VMs share."""
_HOSTS, _SERVERS, _WILDCARDS = "mapped", "servers", "wildcards"
_READABLE = 0o644
"""Mode of files that the resolver's user reads."""
_CAPABILITY = "-all,+net_bind_service"

log = get_logger("stead.names")


class GuestResolver:
    """Two dnsmasq processes, which end with this process, however that ends, and are restarted."""

    def __init__(self, settings: Settings, network: Network, zones: Sequence[str]) -> None:
        self._settings = settings
        self._network = network
        self._zones = tuple(zones)
        self._mapped: frozenset[str] = frozenset()
        self._wildcards: tuple[str, ...] = ()
        self._wildcards_changed = asyncio.Event()
        self._folder = settings.runtime / "names" / settings.instance
        self._hosts = self._folder / "hosts"
        self._dnsmasq = SupervisedProcess(
            "dnsmasq, the resolver of VMs,",
            self._command,
            lambda: self._listens(addresses.GATEWAY, _PORT),
            _RESTART,
            start_timeout=_START_TIMEOUT,
            clean_up=self._kill_others,
        )
        self._wildcard_server = SupervisedProcess(
            "dnsmasq for wildcards",
            self._wildcard_command,
            lambda: self._listens(IPv4Address(_WILDCARD_SERVER), _WILDCARD_PORT),
            _RESTART,
            start_timeout=_START_TIMEOUT,
        )

    @classmethod
    @contextlib.asynccontextmanager
    async def running(
        cls,
        settings: Settings,
        network: Network,
        zones: Sequence[str] = (),
        names: VisibleNames | None = None,
    ) -> AsyncIterator[Self]:
        """Serve DNS to VMs during a block. `zones` are names of this Stead, with all names below them.

        `names` are those of VMs in VPCs.
        """
        resolver = cls(settings, network, zones)
        resolver._hosts.mkdir(parents=True, exist_ok=True)
        for folder in (resolver._folder.parent, resolver._folder, resolver._hosts):
            folder.chmod(0o755)
        resolver._write_hosts(())
        resolver._write_wildcards(())
        resolver._write_servers(addresses.resolvers())
        async with serving_private_names(network, names or NoNames(), resolver._is_own):
            try:
                await resolver._kill_others()
                await resolver._wildcard_server.start()
                await resolver._dnsmasq.start()
                await network.serve_dns(True)
                async with TaskSet() as tasks:
                    following = keep_running("servers of dnsmasq", resolver._follow_servers, _FOLLOW_AGAIN)
                    tasks.start(following, "follow the host's name servers")
                    reloading = keep_running("reload of dnsmasq", resolver._reload_wildcards, _RELOAD_RESTART)
                    tasks.start(reloading, "reload dnsmasq")
                    yield resolver
            finally:
                await finished(resolver._close())

    async def publish(self, names: Collection[str]) -> None:
        """Let these host names, and no other ones than the zones, lead to the gateway too.

        `*.example.com` stands for all names below it. Changes of wildcards are collected: they take effect
        within 10 s.
        """
        suffixes = tuple(f".{zone}" for zone in self._zones)
        others = sorted(name for name in names if not f".{name}".endswith(suffixes))
        self._mapped = frozenset(others)
        await in_thread(self._write_hosts, [name for name in others if not name.startswith("*.")])
        wildcards = tuple(name for name in others if name.startswith("*."))
        if wildcards != self._wildcards:
            self._wildcards = wildcards
            self._wildcards_changed.set()

    async def _reload_wildcards(self, serving: Callable[[], None]) -> None:
        serving()
        while True:
            await self._wildcards_changed.wait()
            if not self._dnsmasq.serving:
                # A signal would end what is about to become dnsmasq.
                await asyncio.sleep(_POLL)
                continue
            written = self._wildcards
            await in_thread(self._write_wildcards, written)
            if written is self._wildcards:
                self._wildcards_changed.clear()
            self._dnsmasq.send(signal.SIGHUP)
            await asyncio.sleep(_RELOAD_INTERVAL)

    def _is_own(self, name: str) -> bool:
        """Whether a name leads to the gateway."""
        zones = tuple(f".{zone}" for zone in self._zones)
        parent = f"*.{name.partition('.')[2]}"
        return f".{name}".endswith(zones) or name in self._mapped or parent in self._mapped

    def _write_hosts(self, names: Collection[str]) -> None:
        # dnsmasq watches the folder, and ignores names that begin with a dot.
        lines = "".join(f"{addresses.GATEWAY} {name}\n" for name in names)
        write_atomically(self._hosts / _HOSTS, lines.encode(), _READABLE)

    def _write_wildcards(self, wildcards: Collection[str]) -> None:
        server = f"{_WILDCARD_SERVER}#{_WILDCARD_PORT}"
        lines = "".join(f"server=/{name}/{server}\n" for name in wildcards)
        write_atomically(self._folder / _WILDCARDS, lines.encode(), _READABLE)

    def _write_servers(self, servers: Sequence[IPv4Address]) -> None:
        write_atomically(self._folder / _SERVERS, resolv_conf(servers).encode(), _READABLE)

    async def _follow_servers(self, serving: Callable[[], None]) -> None:
        # dnsmasq looks at the file before a query, at most once in a second.
        async for servers in changes_of_resolvers():
            await in_thread(self._write_servers, servers)
            serving()

    def _command(self) -> ProcessCommand:
        gateway = addresses.GATEWAY
        return self._dnsmasq_command(
            f"--hostsdir={self._hosts}",
            f"--resolv-file={self._folder / _SERVERS}",
            f"--servers-file={self._folder / _WILDCARDS}",
            *(f"--listen-address={gateway}", f"--port={_PORT}"),
            *(f"--cache-size={_CACHED}", f"--dns-forward-max={_CONCURRENT}"),
            # A VM outside of VPCs sees no names there, and the host's resolvers are not asked for them.
            f"--local=/{addresses.PRIVATE_ZONE}/",
            # Types other than A are answered here as well: there are none.
            *(arg for name in self._zones for arg in (f"--address=/{name}/{gateway}", f"--local=/{name}/")),
        )

    def _wildcard_command(self) -> ProcessCommand:
        return self._dnsmasq_command(
            "--no-resolv",
            *(f"--listen-address={_WILDCARD_SERVER}", f"--port={_WILDCARD_PORT}", "--cache-size=0"),
            *(f"--address=/#/{addresses.GATEWAY}", "--local=/#/"),
        )

    def _dnsmasq_command(self, *options: str) -> ProcessCommand:
        user = str(self._settings.resolver_uid)
        program = Launch(
            [
                *("dnsmasq", "--keep-in-foreground", "--conf-file=/dev/null", "--pid-file=", "--user=root"),
                *("--log-facility=-", "--no-hosts", "--bind-interfaces", f"--local-ttl={_TTL}"),
                *options,
            ],
            rules=tuple(FileAccess(read=(self._folder, *USERS, *RANDOM)).rules(landlock.version())),
        )
        return ProcessCommand(
            [
                *("nsenter", f"--net={namespace_path(self._settings)}"),
                *("setpriv", f"--reuid={user}", f"--regid={user}", "--clear-groups", "--no-new-privs"),
                *(f"--inh-caps={_CAPABILITY}", f"--ambient-caps={_CAPABILITY}", "--pdeathsig=KILL", "--"),
                *program.arguments,
            ]
        )

    async def _listens(self, address: IPv4Address, port: int) -> None:
        while True:
            try:
                (await self._network.dial(address, port)).close()
            except OSError:
                await asyncio.sleep(_POLL)
            else:
                return

    async def _close(self) -> None:
        # VMs outlive this process: they ask the host's resolver until the next start.
        try:
            await self._network.serve_dns(False)
        except HostError as error:
            log.error("cannot let VMs ask the host's resolver", error=str(error))
        await self._dnsmasq.close()
        await self._wildcard_server.close()
        shutil.rmtree(self._folder, ignore_errors=True)

    async def _kill_others(self) -> None:
        """Kill processes of the resolver's user: children for TCP connections, or left by a crash."""
        for process in await in_thread(lambda: list(of_user(self._settings.resolver_uid))):
            if process.pid not in (self._dnsmasq.pid, self._wildcard_server.pid):
                await kill(process)
