"""The SSH gateway's own half: accepts clients, and asks the server for each of them."""

import asyncio
import logging
import socket
from collections import deque

import asyncssh
import msgspec

from stead.edge.ssh.algorithms import modern_algorithms
from stead.edge.ssh.client import Client
from stead.edge.ssh.login_places import LoginPlaces
from stead.edge.ssh.messages import NewLink, Ping, Pong, Serving, StartServing, ToGateway
from stead.edge.ssh.packets import Packets, ProtocolViolation
from stead.edge.ssh.server_link import ServerLink, VmUnreachable

_KEEPALIVE = 60.0
"""Seconds without anything from a client after which it is asked for a sign of life."""
_KEEPALIVES = 4
_DECODER = msgspec.msgpack.Decoder(ToGateway)


class Listener:
    """Serves SSH on a bound socket, as the control socket says."""

    def __init__(self, listening: socket.socket, control: socket.socket) -> None:
        self._listening = listening
        loop = asyncio.get_running_loop()
        self._start: asyncio.Future[StartServing] = loop.create_future()
        self._ended = asyncio.Event()
        self._links: deque[asyncio.Future[ServerLink]] = deque()
        """For clients that wait for their link, in the order of their requests."""
        self.clients: set[Client] = set()
        self._control: Packets[ToGateway] = Packets(
            control, _DECODER, self._received, self._lost, descriptors=True
        )

    async def serve(self) -> None:
        """Serve until the server is gone or this task is cancelled; then all connections are closed."""
        start = await self._start
        # asyncssh logs user names, which may hold tokens.
        logging.getLogger("asyncssh").setLevel(logging.CRITICAL)
        places = LoginPlaces(start.unauthenticated, start.unauthenticated_per_network)
        acceptor = await asyncssh.listen(
            sock=self._listening,
            server_factory=lambda: Client(self._new_link, places, start.vm_login_timeout, self.clients),
            server_host_keys=[asyncssh.import_private_key(start.host_key)],
            server_version="Stead",
            login_timeout=start.login_timeout,
            keepalive_interval=_KEEPALIVE,
            keepalive_count_max=_KEEPALIVES,
            encoding=None,
            line_editor=False,
            allow_scp=False,
            agent_forwarding=False,
            x11_forwarding=False,
            gss_host=None,
            **modern_algorithms(),
        )
        try:
            self._control.send(Serving())
            await self._ended.wait()
        finally:
            acceptor.close()
            left = list(self.clients)
            for client in left:
                client.end("the server is stopping")
            await asyncio.gather(*(client.closed() for client in left))
            self._control.close()

    async def _new_link(self) -> ServerLink:
        if not self._control.open:
            raise VmUnreachable("the server is restarting")
        link: asyncio.Future[ServerLink] = asyncio.get_running_loop().create_future()
        self._links.append(link)
        self._control.send(NewLink())
        return await link

    def _received(self, message: ToGateway, passed: socket.socket | None) -> None:
        if isinstance(message, StartServing):
            self._start.set_result(message)
            return
        if isinstance(message, Ping):
            self._control.send(Pong())
            return
        link = self._links.popleft() if self._links else None
        if passed is not None:
            passed.setblocking(False)
        if link is None or link.done():
            if passed is not None:
                passed.close()
            if link is None:
                raise ProtocolViolation
        elif passed is None:
            link.set_exception(VmUnreachable("too many connections are logging in: try again"))
        else:
            link.set_result(ServerLink(passed))

    def _lost(self) -> None:
        self._ended.set()
        if not self._start.done():
            self._start.cancel()
        for link in self._links:
            if not link.done():
                link.set_exception(VmUnreachable("the server is restarting"))
                link.exception()
