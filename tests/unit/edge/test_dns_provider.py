"""Providers of TXT records: their files, and acme-dns over HTTP."""

import asyncio
import contextlib
import json
from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from stead.edge.acme import AcmeError
from stead.edge.dns_provider import AcmeDns, UpdatedZone, read_provider
from stead.errors import InvalidRequest
from support.documents import run_by

_SECRET = "aHVudGVyMg=="
_ZONE = (
    'type = "rfc2136"\nserver = "203.0.113.53"\nzone = "example.com"\nkey_name = "k"\n'
    f'key_secret = "{_SECRET}"\n'
)


def _file(folder: Path, text: str, mode: int = 0o600) -> Path:
    path = folder / "dns.toml"
    path.write_text(text)
    path.chmod(mode)
    return path


def test_a_provider_is_read_from_its_file(tmp_path: Path) -> None:
    found = read_provider(_file(tmp_path, _ZONE))
    assert isinstance(found, UpdatedZone)
    assert (found.server, found.port, found.key_algorithm, found.wait) == (
        "203.0.113.53",
        53,
        "hmac-sha256",
        10,
    )


@pytest.mark.parametrize(
    ("text", "mode", "message"),
    [
        (_ZONE, 0o640, "chmod 600"),
        ("nonsense", 0o600, "is not TOML"),
        ('type = "route53"', 0o600, "is invalid"),
        (_ZONE + "port = 0", 0o600, "port"),
        (_ZONE + "other = 1", 0o600, "other"),
        (_ZONE + f'key_algorithm = "{_SECRET}"', 0o600, "key_algorithm"),
        ("#" * 70_000, 0o600, "bytes"),
    ],
)
def test_an_invalid_file_is_refused_without_its_secret(
    tmp_path: Path, text: str, mode: int, message: str
) -> None:
    with pytest.raises(InvalidRequest, match=message) as refused:
        read_provider(_file(tmp_path, text, mode))
    assert _SECRET not in str(refused.value)


def test_the_files_of_the_page_about_public_installations_are_valid(tmp_path: Path) -> None:
    written = run_by(__file__, "docs/public-installation.md")
    found = [read_provider(_file(tmp_path, block.body)) for block in written]
    assert [type(each) for each in found] == [UpdatedZone, AcmeDns]


def test_a_missing_file_is_named(tmp_path: Path) -> None:
    with pytest.raises(InvalidRequest, match="missing"):
        read_provider(tmp_path / "missing.toml")


@contextlib.asynccontextmanager
async def _acme_dns(status: int) -> AsyncIterator[tuple[str, list[bytes]]]:
    """Answers every request with this status; yields its URL and what it was sent."""
    seen: list[bytes] = []

    async def answer(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        head = await reader.readuntil(b"\r\n\r\n")
        length = next(line for line in head.lower().split(b"\r\n") if line.startswith(b"content-length:"))
        seen.extend([head, await reader.readexactly(int(length.partition(b":")[2]))])
        writer.write(f"HTTP/1.1 {status} X\r\ncontent-length: 2\r\nconnection: close\r\n\r\n{{}}".encode())
        writer.close()

    async with await asyncio.start_server(answer, "127.0.0.1", 0) as server:
        host, port = server.sockets[0].getsockname()
        yield f"http://{host}:{port}/", seen


def _provider(url: str) -> AcmeDns:
    return AcmeDns(type="acme-dns", url=url, subdomain="sub", username="user", password="pass", wait=0)


async def test_acme_dns_gets_the_record() -> None:
    async with _acme_dns(200) as (url, seen), _provider(url).published("_acme-challenge.example.com", "text"):
        head, body = seen
    assert head.startswith(b"POST /update ")
    assert b"x-api-user: user" in head.lower() and b"x-api-key: pass" in head.lower()
    assert json.loads(body) == {"subdomain": "sub", "txt": "text"}


async def test_a_refusal_of_acme_dns_is_reported() -> None:
    async with _acme_dns(401) as (url, _):
        with pytest.raises(AcmeError, match="401"):
            async with _provider(url).published("_acme-challenge.example.com", "text"):
                pytest.fail("the record was refused")
    with pytest.raises(AcmeError, match="cannot reach acme-dns"):
        async with _provider("http://127.0.0.1:9").published("_acme-challenge.example.com", "text"):
            pytest.fail("there is no server")


async def test_a_name_server_that_does_not_answer_is_reported() -> None:
    provider = UpdatedZone(
        type="rfc2136", server="127.0.0.1", port=9, zone="example.com", key_name="k", key_secret=_SECRET
    )
    with pytest.raises(AcmeError, match=r"cannot update _acme-challenge.example.com at 127.0.0.1"):
        async with provider.published("_acme-challenge.example.com", "text"):
            pytest.fail("there is no server")
