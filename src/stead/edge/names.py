"""The resolver of VMs: dnsmasq in the namespace of the taps, at the gateway address.

Names of this Stead resolve to the gateway, where Caddy listens for VMs. Names of VMs in VPCs are answered
beside dnsmasq, by who asks (`private_names.py`). The host's resolvers are asked for all other names; dnsmasq
reads a list of them that follows the host's.
"""

import asyncio
import contextlib
import shutil
from collections.abc import AsyncIterator, Collection, Sequence
from ipaddress import IPv4Address
from typing import Self

from stead import addresses
from stead.deadlines import scaled
from stead.edge.private_names import NoNames, VisibleNames, serving_private_names
from stead.errors import HostError
from stead.files import write_atomically
from stead.host.network import Network, namespace_path
from stead.host.resolvers import changes_of_resolvers, resolv_conf
from stead.logs import get_logger
from stead.processes import kill, of_user
from stead.settings import Settings
from stead.supervision import Backoff, ProcessCommand, SupervisedProcess
from stead.tasks import TaskSet, finished, in_thread

_PORT = 53
_START_TIMEOUT = scaled(10.0)
_POLL = 0.01
_RESTART = Backoff(shortest=0.1, longest=5.0, healthy=10.0)
_CACHED = 2000
_CONCURRENT = 5000
"""Queries that wait for the host's resolvers, of all VMs together; one VM sends 200 in a second."""
_TTL = 5
"""Seconds for which VMs may cache the names of this Stead."""
_HOSTS, _SERVERS = "mapped", "servers"
_READABLE = 0o644
"""Mode of files that the resolver's user reads."""
_CAPABILITY = "-all,+net_bind_service"

log = get_logger("stead.names")


class GuestResolver:
    """A dnsmasq process that ends with this process, however that ends, and is restarted when it dies."""

    def __init__(self, settings: Settings, network: Network, zones: Sequence[str]) -> None:
        self._settings = settings
        self._network = network
        self._zones = tuple(zones)
        self._mapped: frozenset[str] = frozenset()
        self._wildcards: tuple[str, ...] = ()
        self._folder = settings.runtime / "names" / settings.instance
        self._hosts = self._folder / "hosts"
        self._dnsmasq = SupervisedProcess(
            "dnsmasq, the resolver of VMs,",
            self._command,
            self._listens,
            _RESTART,
            start_timeout=_START_TIMEOUT,
            clean_up=self._kill_all,
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
        resolver._write_servers(addresses.resolvers())
        async with serving_private_names(network, names or NoNames(), resolver._is_own):
            try:
                await resolver._kill_all()
                await resolver._dnsmasq.start()
                await network.serve_dns(True)
                async with TaskSet() as tasks:
                    tasks.start(resolver._follow_servers(), "follow the host's name servers")
                    yield resolver
            finally:
                await finished(resolver._close())

    async def publish(self, names: Collection[str]) -> None:
        """Let these host names, and no other ones than the zones, lead to the gateway too.

        `*.example.com` stands for all names below it. A change of wildcards restarts dnsmasq.
        """
        suffixes = tuple(f".{zone}" for zone in self._zones)
        others = sorted(name for name in names if not f".{name}".endswith(suffixes))
        self._mapped = frozenset(others)
        await in_thread(self._write_hosts, [name for name in others if not name.startswith("*.")])
        wildcards = tuple(name for name in others if name.startswith("*."))
        if wildcards != self._wildcards:
            self._wildcards = wildcards
            self._dnsmasq.restart()

    def _is_own(self, name: str) -> bool:
        """Whether a name leads to the gateway."""
        zones = tuple(f".{zone}" for zone in self._zones)
        parent = f"*.{name.partition('.')[2]}"
        return f".{name}".endswith(zones) or name in self._mapped or parent in self._mapped

    def _write_hosts(self, names: Collection[str]) -> None:
        # dnsmasq watches the folder, and ignores names that begin with a dot.
        lines = "".join(f"{addresses.GATEWAY} {name}\n" for name in names)
        write_atomically(self._hosts / _HOSTS, lines.encode(), _READABLE)

    def _write_servers(self, servers: Sequence[IPv4Address]) -> None:
        write_atomically(self._folder / _SERVERS, resolv_conf(servers).encode(), _READABLE)

    async def _follow_servers(self) -> None:
        # dnsmasq looks at the file before a query, at most once in a second.
        async for servers in changes_of_resolvers():
            await in_thread(self._write_servers, servers)

    def _command(self) -> ProcessCommand:
        user = str(self._settings.resolver_uid)
        gateway = addresses.GATEWAY
        own = [*self._zones, *self._wildcards]
        arguments = [
            *("nsenter", f"--net={namespace_path(self._settings)}"),
            *("setpriv", f"--reuid={user}", f"--regid={user}", "--clear-groups", "--no-new-privs"),
            *(f"--inh-caps={_CAPABILITY}", f"--ambient-caps={_CAPABILITY}", "--pdeathsig=KILL", "--"),
            *("dnsmasq", "--keep-in-foreground", "--conf-file=/dev/null", "--pid-file=", "--user=root"),
            *("--log-facility=-", "--no-hosts", f"--hostsdir={self._hosts}"),
            f"--resolv-file={self._folder / _SERVERS}",
            *("--bind-interfaces", f"--listen-address={gateway}", f"--port={_PORT}"),
            *(f"--cache-size={_CACHED}", f"--dns-forward-max={_CONCURRENT}", f"--local-ttl={_TTL}"),
            # A VM outside of VPCs sees no names there, and the host's resolvers are not asked for them.
            f"--local=/{addresses.PRIVATE_ZONE}/",
            # Types other than A are answered here as well: there are none.
            *(option for name in own for option in (f"--address=/{name}/{gateway}", f"--local=/{name}/")),
        ]
        return ProcessCommand(arguments)

    async def _listens(self) -> None:
        while True:
            try:
                (await self._network.dial(addresses.GATEWAY, _PORT)).close()
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
        shutil.rmtree(self._folder, ignore_errors=True)

    async def _kill_all(self) -> None:
        """Kill processes of the resolver's user: children for TCP connections, or left by a crash."""
        for process in await in_thread(lambda: list(of_user(self._settings.resolver_uid))):
            await kill(process)
