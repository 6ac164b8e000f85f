"""The tools of `stead mcp` without a server: schemas, annotations, cut output, errors, refusals."""

import asyncio
import socket
from collections.abc import Iterator

import httpx2
import pytest
from mcp import Client
from mcp_types import Tool

from stead import AsyncStead, Unauthorized
from stead.mcp.commands import _new_output
from stead.mcp.excerpts import Excerpt, decoded, encoded
from stead.mcp.server import OneCaller, build_server, http_app, serve_stdio
from stead.sdk.models import OutputChunk, OutputCut, ProcessInfo, ProcessOutput

READ_ONLY = {
    "vm_list",
    "vm_get",
    "snapshot_list",
    "process_list",
    "process_output",
    "file_read",
    "file_list",
    "repo_list",
    "repo_read",
}
DESTRUCTIVE = {
    "vm_delete",
    "exec",
    "process_start",
    "process_write",
    "process_signal",
    "file_write",
    "file_edit",
    "repo_commit",
}
ADDITIVE = {
    "vm_create",
    "vm_fork",
    "vm_suspend",
    "vm_start",
    "vm_snapshot",
    "port_url",
    "repo_create",
}


@pytest.fixture
def nowhere() -> Iterator[str]:
    """The URL of a port at which nothing listens."""
    with socket.socket() as reserved:
        reserved.bind(("127.0.0.1", 0))
        yield f"http://127.0.0.1:{reserved.getsockname()[1]}"


def client(url: str) -> Client:
    return Client(build_server(OneCaller(AsyncStead("key", base_url=url, max_retries=0))))


async def tools() -> dict[str, Tool]:
    async with client("http://127.0.0.1:1") as connected:
        return {tool.name: tool for tool in (await connected.list_tools()).tools}


async def test_every_tool_is_described_and_annotated() -> None:
    found = await tools()
    assert set(found) == READ_ONLY | DESTRUCTIVE | ADDITIVE
    for name, tool in found.items():
        assert tool.title and tool.description and tool.output_schema, name
        assert tool.annotations is not None
        assert tool.annotations.read_only_hint == (name in READ_ONLY), name
        if name not in READ_ONLY:
            assert tool.annotations.destructive_hint == (name in DESTRUCTIVE), name
        for each in ("vm", "command", "path", "repo", "process"):
            if each in tool.input_schema["properties"]:
                assert tool.input_schema["properties"][each]["description"], f"{name}: {each}"


async def test_errors_reach_the_model_with_their_message(nowhere: str) -> None:
    async with client(nowhere) as connected:
        unreachable = await connected.call_tool("vm_get", {"vm": "a" * 20})
        assert unreachable.is_error
        assert "cannot connect" in unreachable.content[0].text  # type: ignore[union-attr]
        assert "can be repeated" in unreachable.content[0].text  # type: ignore[union-attr]
        relative = await connected.call_tool("file_read", {"vm": "a" * 20, "path": "etc/hosts"})
        assert relative.is_error
        assert "path" in relative.content[0].text  # type: ignore[union-attr]
        invalid = {"vm": "a" * 20, "path": "/x", "content": "%%%", "encoding": "base64"}
        bad = await connected.call_tool("file_write", invalid)
        assert bad.is_error
        assert "not valid base64" in bad.content[0].text  # type: ignore[union-attr]


async def test_invalid_arguments_are_one_sentence() -> None:
    async with client("http://127.0.0.1:1") as connected:
        for tool, given, said in (
            ("exec", {}, "exec: the argument vm is missing; the argument command is missing"),
            ("vm_get", {"vm": 3}, "vm_get: the argument vm is invalid: input should be a valid string"),
            (
                "exec",
                {"vm": "a", "command": "true", "output_limit": 200_001},
                "exec: the argument output_limit is invalid: input should be less than or equal to 200000",
            ),
            (
                "file_read",
                {"vm": "a", "path": "/x", "limit": (256 << 10) + 1},
                "file_read: the argument limit is invalid: input should be less than or equal to 262144",
            ),
        ):
            answer = await connected.call_tool(tool, given)
            assert answer.is_error
            assert answer.content[0].text == said  # type: ignore[union-attr]


async def test_http_requests_without_an_accepted_token_are_refused(nowhere: str) -> None:
    async with httpx2.AsyncClient() as upstream:
        transport = httpx2.ASGITransport(app=http_app(upstream, nowhere))
        async with httpx2.AsyncClient(transport=transport, base_url="http://mcp") as http:
            for headers in ({}, {"Authorization": "Basic eA=="}, {"Authorization": "Bearer "}):
                answer = await http.post("/mcp", json={}, headers=headers)
                assert answer.status_code == 401
                assert answer.headers["WWW-Authenticate"].startswith("Bearer")
                assert "Authorization: Bearer" in answer.json()["error_description"]
            async with asyncio.timeout(60):
                answer = await http.post("/mcp", json={}, headers={"Authorization": "Bearer key"})
            assert answer.status_code == 503
            assert "cannot connect" in answer.json()["error_description"]


def test_excerpt_keeps_both_ends_of_a_long_text() -> None:
    excerpt = Excerpt(100)
    for line in range(1000):
        excerpt.add(f"line {line}\n")
    text = str(excerpt)
    total = sum(len(f"line {line}\n") for line in range(1000))
    assert excerpt.left_out == total - 100
    assert text.startswith("line 0\nline 1\n") and text.endswith("line 999\n")
    assert f"[... {total - 100} characters left out ...]" in text
    assert excerpt.last_line == "line 999"


def test_excerpt_leaves_a_text_within_the_limit_as_it_is() -> None:
    excerpt = Excerpt(8)
    for piece in ("a", "bc", "", "defgh"):
        excerpt.add(piece)
    assert (str(excerpt), excerpt.left_out) == ("abcdefgh", 0)
    excerpt.add("i")
    assert excerpt.left_out == 1


def test_content_is_text_where_it_can_be_and_base64_otherwise() -> None:
    assert decoded(b"", at_end=True) == ("utf-8", "", 0)
    assert decoded("aé".encode(), at_end=True) == ("utf-8", "aé", 3)
    assert decoded("aé".encode()[:2], at_end=False) == ("utf-8", "a", 1)
    assert decoded("aé".encode()[:2], at_end=True) == ("base64", "YcM=", 2)
    assert decoded(b"a\0b", at_end=True)[0] == "base64"
    assert decoded(b"\xc3", at_end=False) == ("base64", "ww==", 1)
    assert encoded("ww==", "base64") == b"\xc3"
    assert encoded("é", "utf-8") == b"\xc3\xa9"


def page(*chunks: tuple[str, bytes], start: int = 0, cut: OutputCut | None = None) -> ProcessOutput:
    listed, offset = [], start
    for stream, data in chunks:
        listed.append(OutputChunk(stream, offset, data))  # type: ignore[arg-type]
        offset += len(data)
    return ProcessOutput(tuple(listed), offset, cut, None)


RUNNING = ProcessInfo(id="p")
EXITED = ProcessInfo(id="p", status="exited", exit_code=0)


def test_output_of_a_process_is_in_order_and_continues_where_it_ended() -> None:
    found = _new_output(page(("stdout", b"a"), ("stdout", b"b"), ("stderr", b"c")), RUNNING, 0)
    assert [(part.stream, part.text) for part in found.parts] == [("stdout", "ab"), ("stderr", "c")]
    assert (found.next_offset, found.more, found.lost_bytes) == (3, False, 0)


def test_output_is_cut_between_characters() -> None:
    text = "x" + "é" * 40_000
    data, seen, offset = text.encode(), "", 0
    while True:
        found = _new_output(page(("stdout", data[offset:]), start=offset), EXITED, offset)
        seen += "".join(part.text for part in found.parts)
        offset = found.next_offset
        if not found.more:
            break
    assert (seen, offset) == (text, len(data))


def test_half_a_character_of_a_running_process_waits_for_its_other_half() -> None:
    half = page(("stdout", b"a\xc3"))
    assert _new_output(half, RUNNING, 0).next_offset == 1
    assert _new_output(half, EXITED, 0).parts[0].text == "a\N{REPLACEMENT CHARACTER}"
    # Bytes that are no text are not waited for.
    assert _new_output(page(("stdout", b"\xc3")), RUNNING, 0).next_offset == 1


def test_output_that_the_vm_no_longer_holds_is_counted() -> None:
    found = _new_output(page(("stdout", b"z"), start=10, cut=OutputCut(0, 10)), RUNNING, 0)
    assert (found.lost_bytes, found.next_offset, found.parts[0].text) == (10, 11, "z")


async def test_stdio_server_does_not_start_with_a_refused_key(capsys: pytest.CaptureFixture[str]) -> None:
    """One that the API server does not answer starts: tools fail until it does."""

    def refuse(_: httpx2.Request) -> httpx2.Response:
        body = {"code": "UNAUTHORIZED_ERROR", "message": "unknown or revoked API key or token"}
        return httpx2.Response(401, json=body)

    async with httpx2.AsyncClient(transport=httpx2.MockTransport(refuse)) as http:
        stead = AsyncStead("wrong", base_url="http://stead.test", http_client=http)
        with pytest.raises(Unauthorized, match="unknown or revoked"):
            await serve_stdio(stead)
    assert capsys.readouterr().out == ""
