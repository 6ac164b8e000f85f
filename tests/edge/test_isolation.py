"""A name reaches only its VM's port: tricks with hosts, server names, paths, headers and lengths."""

import asyncio
import contextlib
from collections.abc import AsyncIterator

import pytest
import pytest_asyncio

from support.edge_with_namespaces import Answer, EdgeWithNamespaces, FakeVm, echo_app

pytestmark = pytest.mark.root
_HOST = "app.style.dev"
_URL = f"https://{_HOST}/"


@pytest.mark.parametrize(
    "host",
    [
        "..",
        "../../etc",
        "*",
        "app.style.de?",
        "%2e%2e",
        "[::]",
        "app.style.dev/*",
        "[a]pp.style.dev",
        "ap\\\\p.style.dev",
        "nobody@app.style.dev",
        "app.style.dev, app.style.dev",
        "app.style.dev:80:80",
        "{http.request.uri}",
        "",
        "x" * 300,
    ],
)
async def test_odd_host_headers_reach_no_vm(edge_ns: EdgeWithNamespaces, vm: FakeVm, host: str) -> None:
    assert (await edge_ns.curl(_URL)).status == 200
    answer = await edge_ns.raw(f"GET / HTTP/1.1\r\nHost: {host}\r\nConnection: close\r\n\r\n".encode(), _HOST)
    assert answer.split(b" ")[1] in (b"400", b"404"), answer


async def test_headers_of_the_gate_from_a_client_have_no_effect(
    edge_ns: EdgeWithNamespaces, vm: FakeVm
) -> None:
    other = edge_ns.add_vm("victim")
    tricks = ("-H", f"X-Stead-Upstream: {other.address}:9", "-H", "X-Stead-Host: victim.style.dev")
    more = ("-H", "X-Stead-Error: dial tcp", "-H", f"X-Forwarded-Host: {other.address}")
    async with other.serving(echo_app("victim"), 9):
        for _ in range(2):
            answer = await edge_ns.curl(_URL, *tricks, *more)
            assert (answer.status, answer.json()["name"]) == (200, vm.id)
        assert (await edge_ns.curl("https://none.style.dev/", *tricks, *more)).status == 404


async def test_the_host_header_decides_not_the_server_name(edge_ns: EdgeWithNamespaces, vm: FakeVm) -> None:
    request = f"GET / HTTP/1.1\r\nHost: {_HOST}\r\nConnection: close\r\n\r\n".encode()
    answer = await edge_ns.raw(request, "other-name.style.dev")
    assert b" 200 " in answer.split(b"\r\n")[0]
    answer = await edge_ns.raw(request.replace(b"app.", b"nobody."), _HOST)
    assert b" 404 " in answer.split(b"\r\n")[0]


@pytest.mark.parametrize(
    "head",
    [
        "Content-Length: 6\r\nTransfer-Encoding: chunked",
        "Content-Length: 4\r\nContent-Length: 60",
        "Transfer-Encoding: chunked\r\nTransfer-Encoding: identity",
        "Transfer-Encoding : chunked",
        "Transfer-Encoding: xchunked",
        "Content-Length: +4",
        "X: y\r\n Content-Length: 60",
        "Content-Length: 0\r\n\tTransfer-Encoding: chunked",
        "Host: victim.style.dev",
    ],
)
async def test_ambiguous_requests_smuggle_no_second_request(
    edge_ns: EdgeWithNamespaces, vm: FakeVm, head: str
) -> None:
    """If proxy and server disagree about the end of a request, the hidden one is taken for another's."""
    edge_ns.map("raw.style.dev", vm.id, 82)
    received = bytearray()

    async def record(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        while data := await reader.read(65536):
            received.extend(data)
            if b"\r\n\r\n" in data:
                writer.write(b"HTTP/1.1 200 OK\r\nContent-Length: 2\r\n\r\nok")
        writer.close()

    hidden = "GET /smuggled HTTP/1.1\r\nHost: raw.style.dev\r\n\r\n"
    sent = f"POST / HTTP/1.1\r\nHost: raw.style.dev\r\n{head}\r\n\r\n0\r\n\r\n{hidden}"
    async with await asyncio.start_server(record, sock=await vm.side.listener("0.0.0.0", 82)):
        assert (await edge_ns.curl("https://raw.style.dev/")).body == b"ok"
        received.clear()
        answer = await edge_ns.raw(sent.encode(), "raw.style.dev", timeout=1)
    # Either refused, or both ends agree: then `/smuggled` is a request of its own, with forwarding headers.
    for request in bytes(received).split(b"GET /smuggled")[1:]:
        assert b"X-Forwarded-For: 127.0.0.1" in request.partition(b"\r\n\r\n")[0]
        assert answer.count(b"HTTP/1.1 200") == 2
    assert b"victim.style.dev" not in bytes(received)


@pytest_asyncio.fixture
async def victim(edge_ns: EdgeWithNamespaces, vm: FakeVm) -> AsyncIterator[FakeVm]:
    """Another VM, mapped to `victim.style.dev`."""
    name = f"vm{len(edge_ns.vms.found)}"
    victim = edge_ns.add_vm(name)
    edge_ns.map("victim.style.dev", name)
    async with victim.serving(echo_app(name), 80):
        yield victim


def _echoed(answer: bytes) -> tuple[str, list[str]] | None:
    """Which VM answered a raw request, and the names that it was asked for; None for another answer."""
    head, _, body = answer.partition(b"\r\n\r\n")
    if b" 200 " not in head.split(b"\r\n")[0]:
        return None
    found = Answer(200, {}, body, 0, "")
    received = found.received()
    return found.json()["name"], [*received["host"], *received["x-forwarded-host"]]


async def test_an_absolute_uri_leads_where_the_vm_sees_it(
    edge_ns: EdgeWithNamespaces, vm: FakeVm, victim: FakeVm
) -> None:
    """The URI overrides the host (RFC 9112, section 3.2.2), and the VM sees the name that the edge used."""
    for target, expected in (
        ("http://victim.style.dev/x", (victim.id, ["victim.style.dev"] * 2)),
        ("https://VICTIM.style.dev:1234/x", (victim.id, ["victim.style.dev:1234"] * 2)),
        (f"http://{victim.address}/", None),
        (f"http://{victim.address}:80/x", None),
        ("http://127.0.0.1:2019/config/", ("api", ["127.0.0.1:2019"] * 2)),
        ("http://victim.style.dev@app.style.dev/", (vm.id, [_HOST] * 2)),
        ("//victim.style.dev/x", (vm.id, [_HOST] * 2)),
    ):
        request = f"GET {target} HTTP/1.1\r\nHost: {_HOST}\r\nConnection: close\r\n\r\n"
        assert _echoed(await edge_ns.raw(request.encode(), _HOST)) == expected, target


async def test_paths_reach_the_vm_unchanged_and_nothing_else(
    edge_ns: EdgeWithNamespaces, vm: FakeVm, victim: FakeVm
) -> None:
    for path in (
        "/admit",
        "/ask?domain=victim.style.dev",
        "/load",
        "/config/",
        "/../victim.style.dev/x",
        "/..%2fvictim.style.dev",
        "/%2e%2e/%2e%2e/etc/passwd",
        "//victim.style.dev/",
        "/\\victim.style.dev",
        "/{http.request.host}",
        "/a;@victim.style.dev/",
    ):
        request = f"GET {path} HTTP/1.1\r\nHost: {_HOST}\r\nConnection: close\r\n\r\n"
        answer = await edge_ns.raw(request.encode(), _HOST)
        assert _echoed(answer) == (vm.id, [_HOST] * 2), (path, answer)
        found = Answer(200, {}, answer.partition(b"\r\n\r\n")[2], 0, "").json()
        # Characters that a URI cannot have are escaped.
        expected = path.split("?")[0].replace("\\", "%5C").replace("{", "%7B").replace("}", "%7D")
        assert found["path"] == expected


@pytest.mark.parametrize(
    "path",
    [
        "/metrics",
        "/metrics?x",
        "/%6detrics",
        "/METRICS",
        "//metrics",
        "/x/../metrics",
        "/./metrics",
        "http://localhost/metrics",
    ],
)
async def test_no_spelling_of_the_path_of_metrics_reaches_the_api(
    edge_ns: EdgeWithNamespaces, path: str
) -> None:
    asked = "GET /metric HTTP/1.1\r\nHost: stead.localhost\r\nConnection: close\r\n\r\n"
    assert _echoed(await edge_ns.raw(asked.encode(), "stead.localhost")) is not None
    asked = asked.replace("/metric", path)
    assert _echoed(await edge_ns.raw(asked.encode(), "stead.localhost")) is None


async def test_forwarding_headers_cannot_be_forged_or_removed(
    edge_ns: EdgeWithNamespaces, vm: FakeVm
) -> None:
    forged = {
        "X-Forwarded-For": "6.6.6.6",
        "X-Forwarded-Proto": "http",
        "X-Forwarded-Host": "bank.example",
        "Forwarded": "for=6.6.6.6;host=bank.example",
        "X-Real-IP": "6.6.6.6",
    }
    # Headers that are named here are for the next hop only: a proxy removes them.
    removed = {"Connection": "X-Forwarded-For, X-Forwarded-Host, X-Forwarded-Proto, X-Stead-Host"}
    for number, headers in enumerate((forged, removed, forged | removed)):
        # The first request of a name passes the gate, the second does not.
        name = f"forged{number}.style.dev"
        edge_ns.map(name, vm.id)
        options = [part for key, value in headers.items() for part in ("-H", f"{key}: {value}")]
        for _ in range(2):
            answer = await edge_ns.curl(f"https://{name}/", "--http1.1", *options)
            received = answer.received()
            assert received["x-forwarded-for"] == ["127.0.0.1"]
            assert (received["x-forwarded-proto"], received["x-forwarded-host"]) == (["https"], [name])
            assert not {"forwarded", "x-real-ip"} & received.keys()


async def test_connect_opens_no_tunnel(edge_ns: EdgeWithNamespaces, vm: FakeVm) -> None:
    answer = await edge_ns.raw(
        b"CONNECT 127.0.0.1:22 HTTP/1.1\r\nHost: 127.0.0.1:22\r\n\r\n", _HOST, timeout=2
    )
    assert b" 200 " not in answer.split(b"\r\n")[0]


def _literal(text: str) -> bytes:
    """A string of HPACK without Huffman coding."""
    data = text.encode("latin-1")
    assert len(data) < 127
    return bytes([len(data)]) + data


def _frame(kind: int, flags: int, stream: int, payload: bytes) -> bytes:
    return len(payload).to_bytes(3) + bytes([kind, flags]) + stream.to_bytes(4) + payload


async def _over_http2(edge_ns: EdgeWithNamespaces, headers: list[tuple[str, str]], body: bytes) -> None:
    """Send one request with exactly these header fields, which clients refuse to send."""
    context = edge_ns.context
    context.set_alpn_protocols(["h2"])
    fields = b"".join(b"\x00" + _literal(name) + _literal(value) for name, value in headers)
    reader, writer = await asyncio.open_connection(
        "127.0.0.1", edge_ns.public.https_port, ssl=context, server_hostname="raw.style.dev"
    )
    writer.write(b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n" + _frame(4, 0, 0, b""))
    writer.write(_frame(1, 4 if body else 5, 1, fields) + (_frame(0, 1, 1, body) if body else b""))
    try:
        async with asyncio.timeout(60):
            while True:
                length = int.from_bytes(await reader.readexactly(3))
                kind, flags = await reader.readexactly(2)
                stream = int.from_bytes(await reader.readexactly(4))
                await reader.readexactly(length)
                # The end of the stream, its reset, or the end of the connection.
                if (stream == 1 and (kind == 3 or (kind in (0, 1) and flags & 1))) or kind == 7:
                    return
    except (asyncio.IncompleteReadError, ConnectionError):
        return
    finally:
        writer.close()


_HIDDEN = "GET /smuggled HTTP/1.1\r\nHost: raw.style.dev\r\n\r\n"


@pytest.mark.parametrize(
    ("changes", "body"),
    [
        ([("content-length", "0")], _HIDDEN),
        ([("content-length", "1")], _HIDDEN),
        ([("transfer-encoding", "chunked")], f"0\r\n\r\n{_HIDDEN}"),
        ([("x", f"y\r\n\r\n{_HIDDEN}")], ""),
        ([(f"x: y\r\n\r\n{_HIDDEN}a", "b")], ""),
        ([(":path", f"/ HTTP/1.1\r\n\r\n{_HIDDEN}")], ""),
        ([(":method", f"GET / HTTP/1.1\r\n\r\n{_HIDDEN}")], ""),
        ([(":authority", f"raw.style.dev\r\n\r\n{_HIDDEN}")], ""),
        ([("host", "victim.style.dev")], ""),
        ([("connection", "x-forwarded-for")], ""),
    ],
)
async def test_http_2_requests_smuggle_nothing_into_http_1(
    edge_ns: EdgeWithNamespaces, vm: FakeVm, changes: list[tuple[str, str]], body: str
) -> None:
    edge_ns.map("raw.style.dev", vm.id, 82)
    received: list[bytes] = []

    async def record(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        with contextlib.suppress(ConnectionError):
            while piece := await reader.read(65536):
                writer.write(b"HTTP/1.1 200 OK\r\nContent-Length: 2\r\nConnection: close\r\n\r\nok")
                received.append(piece)
        writer.close()

    request = {":method": "POST", ":scheme": "https", ":authority": "raw.style.dev", ":path": "/"}
    async with await asyncio.start_server(record, sock=await vm.side.listener("0.0.0.0", 82)):
        await _over_http2(edge_ns, list(request.items()), b"plain")
        assert b"plain" in b"".join(received)
        received.clear()
        pseudo = {name: value for name, value in changes if name in request}
        others = [(name, value) for name, value in changes if name not in request]
        await _over_http2(edge_ns, [*(request | pseudo).items(), *others], body.encode())
    arrived = b"".join(received)
    # A body may arrive, but with its whole length, as a body.
    head, _, rest = arrived.partition(b"\r\n\r\n")
    assert b"smuggled" not in head and b"victim" not in head
    if rest:
        assert f"Content-Length: {len(body)}".encode() in head or b"chunked" in head
