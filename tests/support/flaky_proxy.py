"""A network that fails when it is told to."""

import asyncio
import contextlib


class FlakyProxy:
    """A proxy that cuts the first connection when it is told to; later ones pass."""

    def __init__(self, url: str) -> None:
        self._to = url.removeprefix("http://").split(":")
        self._server: asyncio.Server | None = None
        self._writers: list[asyncio.StreamWriter] = []
        self.connections = 0
        self.url = ""

    async def __aenter__(self) -> "FlakyProxy":
        self._server = await asyncio.start_server(self._serve, "127.0.0.1", 0)
        self.url = f"http://127.0.0.1:{self._server.sockets[0].getsockname()[1]}"
        return self

    async def __aexit__(self, *_: object) -> None:
        assert self._server is not None
        self.cut()
        self._server.close()
        await self._server.wait_closed()

    def cut(self) -> None:
        for writer in self._writers:
            writer.transport.abort()
        self._writers.clear()

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.connections += 1
        upstream, downstream = await asyncio.open_connection(self._to[0], int(self._to[1]))
        self._writers += [writer, downstream]
        await asyncio.gather(_pass(reader, downstream), _pass(upstream, writer))


async def _pass(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    with contextlib.suppress(ConnectionError):
        while data := await reader.read(65536):
            writer.write(data)
            await writer.drain()
    writer.close()
