"""SSRF guard: which user-supplied addresses are connected to."""

import asyncio
import datetime
import re
import socket
import ssl
import subprocess
from collections.abc import Iterator, Sequence
from ipaddress import IPv4Network, IPv6Network, ip_address
from pathlib import Path

import pytest
from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec

from stead.repos.errors import TooLarge
from stead.repos.ssrf import (
    MAX_REDIRECTS,
    AddressRefused,
    OwnServer,
    RequestFailed,
    Resolve,
    SsrfGuard,
    git_environment,
    git_options,
    is_own,
)
from support.git_server import GitServer, Page, redirect, serving

LOOPBACK = IPv4Network("127.0.0.0/8")
PUBLIC = "93.184.215.14"


def resolver(*answers: Sequence[str]) -> Resolve:
    """A resolver that returns these answers in turn, and then repeats the last one."""
    left = list(answers)

    async def resolve(host: str, port: int) -> Sequence[str]:
        return left.pop(0) if len(left) > 1 else left[0]

    return resolve


def local(*answers: Sequence[str]) -> SsrfGuard:
    """Allows loopback; every name resolves to it unless other answers are given."""
    return SsrfGuard([LOOPBACK], resolve=resolver(*(answers or (["127.0.0.1"],))))


@pytest.fixture
def server(tmp_path: Path) -> Iterator[GitServer]:
    with serving(tmp_path) as server:
        server.pages["/file"] = Page(b"content")
        yield server


async def get(guard: SsrfGuard, url: str, **options: object) -> tuple[int, bytes]:
    limits = {"most_bytes": 1 << 20, "timeout": 10.0, **options}
    async with guard.stream_get(url, **limits) as answer:  # type: ignore[arg-type]
        return answer.status, await answer.read()


@pytest.mark.parametrize(
    "address",
    [
        "0.0.0.0",
        "0.1.2.3",
        "10.0.0.1",
        "100.64.0.1",
        "100.127.255.255",
        "127.0.0.1",
        "127.255.255.254",
        "169.254.169.254",
        "172.16.0.1",
        "172.31.255.255",
        "192.0.0.8",
        "192.0.2.1",
        "192.88.99.1",
        "192.168.1.1",
        "198.18.0.1",
        "198.51.100.7",
        "203.0.113.9",
        "224.0.0.1",
        "240.0.0.1",
        "255.255.255.255",
        "::",
        "::1",
        "::127.0.0.1",
        "::ffff:127.0.0.1",
        "::ffff:10.0.0.1",
        "::ffff:169.254.169.254",
        "64:ff9b::7f00:1",
        "64:ff9b::a9fe:a9fe",
        "64:ff9b:1::1",
        "100::1",
        "2001::1",
        "2001:2::1",
        "2001:10::1",
        "2001:db8::1",
        "2002:7f00:1::1",
        "2002:a00:1::1",
        "3fff::1",
        "5f00::1",
        "fc00::1",
        "fd12:3456::1",
        "fe80::1",
        "fe80::1%eth0",
        "fec0::1",
        "ff02::1",
    ],
)
async def test_non_public_addresses_are_refused(address: str) -> None:
    """As a name's only address, as one of several, and in the URL itself where possible."""
    for found in ([address], [PUBLIC, address], [address, PUBLIC]):
        with pytest.raises(AddressRefused, match=re.escape(str(ip_address(address.partition("%")[0])))):
            await SsrfGuard(resolve=resolver(found)).check("https://git.example/repo")
    literal = f"[{address}]" if ":" in address else address
    with pytest.raises(AddressRefused):
        await SsrfGuard().check(f"http://{literal}/")


@pytest.mark.parametrize(
    "address",
    [PUBLIC, "100.63.255.255", "100.128.0.1", "172.32.0.1", "2606:4700::1111", "64:ff9b::5db8:d70e"],
)
async def test_public_addresses_are_accepted(address: str) -> None:
    target = await SsrfGuard(resolve=resolver([address])).check("https://Git.Example/a/repo?x=1#part")
    assert target.addresses == (address,)
    assert target.url == "https://git.example/a/repo?x=1"
    assert (target.host, target.port) == ("git.example", 443)


@pytest.mark.parametrize(
    "host", ["localhost", "2130706433", "0x7f000001", "0x7f.1", "017700000001", "127.1", "127.0.0.1.", "0"]
)
async def test_other_spellings_of_loopback_are_refused(host: str) -> None:
    """Resolved by the host's own resolver."""
    with pytest.raises(AddressRefused):
        await SsrfGuard().check(f"http://{host}/")


@pytest.mark.parametrize(
    "url",
    [
        "",
        "git.example/repo",
        "//git.example/repo",
        "http:///repo",
        "http://:80/",
        "ftp://git.example/",
        "file:///etc/passwd",
        "ssh://git@git.example/repo",
        "ext::sh -c true",
        "-oProxyCommand=x",
        "http://git.example:0/",
        "http://git.example:65536/",
        "http://git.example:x/",
        "http://git example/",
        "http://git%2eexample/",
        "http://git\\example/",
        "http://git..example/",
        "http://-git.example/",
        "http://git.example\r\nX: y/",
        "http://[fe80::1%25eth0]/",
        "http://[::1/",
        f"http://{'a' * 64}.example/",
        f"http://git.example/{'a' * 5000}",
        "http://\udc80.example/",
    ],
)
async def test_invalid_urls_are_refused(url: str) -> None:
    with pytest.raises(AddressRefused):
        await SsrfGuard(resolve=resolver([PUBLIC])).check(url)


async def test_internationalized_names_are_resolved_as_punycode() -> None:
    asked = []

    async def resolve(host: str, port: int) -> Sequence[str]:
        asked.append((host, port))
        return [PUBLIC]

    target = await SsrfGuard(resolve=resolve).check("https://BÜCHER.example:8443/ä")
    assert asked == [("xn--bcher-kva.example", 8443)]
    assert target.url == "https://xn--bcher-kva.example:8443/%C3%A4"


async def test_url_credentials_need_permission_and_are_never_shown() -> None:
    guard = SsrfGuard(resolve=resolver([PUBLIC]))
    url = "https://agent:s3cret@git.example/repo?token=t0ken"
    with pytest.raises(AddressRefused) as refused:
        await guard.check(url)
    assert "s3cret" not in str(refused.value) + refused.value.url
    target = await guard.check(url, credentials=True)
    assert target.authorization == "Basic YWdlbnQ6czNjcmV0"
    for shown in (repr(target), target.url, target.shown, str(git_options(target))):
        assert "s3cret" not in shown and "YWdlbnQ" not in shown
    assert "t0ken" not in target.shown
    broken = "https://agent:s3/cret@git.example/"
    with pytest.raises(AddressRefused) as refused:
        await guard.check(broken)
    assert "cret" not in str(refused.value) + refused.value.url


async def test_allowed_private_networks_are_accepted(server: GitServer) -> None:
    assert await get(local(), f"{server.url}/file") == (200, b"content")
    with pytest.raises(AddressRefused):
        await get(SsrfGuard(), f"{server.url}/file")
    with pytest.raises(AddressRefused):
        await get(SsrfGuard([IPv4Network("127.0.0.2/32")]), f"{server.url}/file")
    mapped = f"http://[::ffff:127.0.0.1]:{server.port}/file"
    assert await get(local(), mapped) == (200, b"content")
    await SsrfGuard([IPv6Network("fd00::/8")]).check("http://[fd00::1]/")
    assert len(server.requests) == 2


async def test_connection_is_pinned_and_host_header_has_the_name(server: GitServer) -> None:
    """The name exists only in the test's resolver."""
    status, _ = await get(local(), f"http://git.stead.invalid:{server.port}/file")
    assert status == 200
    assert server.requests[-1].headers["host"] == f"git.stead.invalid:{server.port}"


async def test_dns_rebinding_has_no_effect(server: GitServer) -> None:
    """A second lookup would return another server; there is only one lookup."""
    guard = SsrfGuard([IPv4Network("127.0.0.1/32")], resolve=resolver(["127.0.0.1"], ["127.0.0.66"]))
    target = await guard.check(f"http://git.stead.invalid:{server.port}/file")
    async with guard.request("GET", target, most_bytes=100, timeout=10) as answer:
        assert await answer.read() == b"content"
    with pytest.raises(AddressRefused, match=r"127\.0\.0\.66"):
        await guard.check(f"http://git.stead.invalid:{server.port}/file")


async def test_next_address_is_tried_when_one_fails(server: GitServer) -> None:
    guard = local(["127.0.0.77", "127.0.0.1"])
    assert await get(guard, f"http://git.stead.invalid:{server.port}/file") == (200, b"content")


async def test_every_redirect_is_checked(server: GitServer) -> None:
    guard = local(["127.0.0.1"], ["127.0.0.1"], ["169.254.169.254"])
    server.pages["/moved"] = redirect("/file")
    assert await get(guard, f"{server.url}/moved") == (200, b"content")
    server.pages["/away"] = redirect(f"http://other.stead.invalid:{server.port}/file")
    assert await get(guard, f"{server.url}/away") == (200, b"content")
    for bad in (
        "http://169.254.169.254/latest/meta-data/",
        "http://[::1]/",
        "http://0x7f000001/",
        "file:///etc/passwd",
        "http://user:password@127.0.0.1/",
    ):
        server.pages["/bad"] = redirect(bad)
        with pytest.raises(AddressRefused):
            await get(guard, f"{server.url}/bad")
    with pytest.raises(AddressRefused, match=r"169\.254"):
        await get(local(["127.0.0.1"], ["169.254.169.254"]), f"http://a.invalid:{server.port}/away")


async def test_redirect_limit(server: GitServer) -> None:
    for hop in range(MAX_REDIRECTS + 1):
        server.pages[f"/{hop}"] = redirect(f"/{hop + 1}")
    server.pages[f"/{MAX_REDIRECTS + 1}"] = Page(b"far")
    assert await get(local(), f"{server.url}/1") == (200, b"far")
    with pytest.raises(RequestFailed, match=r"too many redirects \(max 5\)"):
        await get(local(), f"{server.url}/0")


async def test_credentials_are_not_sent_to_another_origin(server: GitServer, tmp_path: Path) -> None:
    with serving(tmp_path) as other:
        other.pages["/file"] = Page(b"elsewhere")
        server.pages["/near"] = redirect("/file")
        server.pages["/far"] = redirect(f"{other.url}/file")
        given = {"Authorization": "Bearer secret", "Cookie": "a=b", "X-Kept": "yes"}
        with_secret = server.url.replace("http://", "http://agent:s3cret@")
        await get(local(), f"{with_secret}/near", credentials=True)
        await get(local(), f"{with_secret}/far", credentials=True)
        await get(local(), f"{server.url}/far", headers=given)
    here = [request.headers.get("authorization") for request in server.requests]
    assert here == ["Basic YWdlbnQ6czNjcmV0"] * 3 + ["Bearer secret"]
    for request in other.requests:
        assert "authorization" not in request.headers and "cookie" not in request.headers
    assert other.requests[1].headers["x-kept"] == "yes"


async def test_response_over_content_length_limit_is_refused(server: GitServer) -> None:
    server.pages["/large"] = Page(b"x" * 5000)
    with pytest.raises(TooLarge):
        await get(local(), f"{server.url}/large", most_bytes=4999)
    assert len((await get(local(), f"{server.url}/large", most_bytes=5000))[1]) == 5000


async def test_chunked_response_over_limit_is_refused(tmp_path: Path) -> None:
    """A chunked response has no Content-Length."""
    with serving(tmp_path) as server:
        server.init("repo.git")
        with pytest.raises(TooLarge):
            await get(local(), f"{server.url}/repo.git/info/refs?service=git-upload-pack", most_bytes=20)


async def test_slow_and_silent_servers_time_out(server: GitServer) -> None:
    server.pages["/slow"] = Page(b"x" * 100_000, pause=0.05)
    server.pages["/cut"] = Page(b"x" * 100_000, complete=False)
    loop = asyncio.get_running_loop()
    begun = loop.time()
    with pytest.raises(RequestFailed, match="timed out after"):
        await get(local(), f"{server.url}/slow", timeout=0.3)
    assert loop.time() - begun < 5
    with pytest.raises(RequestFailed):
        await get(local(), f"{server.url}/cut")
    with socket.create_server(("127.0.0.1", 0)) as silent:
        with pytest.raises(RequestFailed):
            await get(local(), f"http://127.0.0.1:{silent.getsockname()[1]}/", timeout=0.3)
        port = silent.getsockname()[1]
    with pytest.raises(RequestFailed):
        await get(local(), f"http://127.0.0.1:{port}/")


async def test_unresolvable_names_are_reported() -> None:
    async def nobody(host: str, port: int) -> Sequence[str]:
        raise socket.gaierror(socket.EAI_NONAME, "unknown")

    for guard in (SsrfGuard(resolve=nobody), SsrfGuard(resolve=resolver([]))):
        with pytest.raises(RequestFailed, match=r"git\.example"):
            await guard.check("https://git.example/repo")


async def test_request_content_is_sent(server: GitServer) -> None:
    guard = local()
    target = await guard.check(f"{server.url}/file")
    async with guard.request(
        "POST", target, most_bytes=100, timeout=10, headers={"X-A": "b"}, content=b"{}"
    ) as answer:
        assert answer.status == 200
    request = server.requests[-1]
    assert (request.method, request.headers["content-length"], request.headers["x-a"]) == ("POST", "2", "b")


async def test_proxy_environment_is_ignored(server: GitServer, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("http_proxy", "HTTP_PROXY", "ALL_PROXY", "https_proxy"):
        monkeypatch.setenv(name, "http://127.0.0.1:1")
    assert await get(local(), f"{server.url}/file") == (200, b"content")


def test_own_addresses_are_recognised() -> None:
    assert is_own(ip_address("127.0.0.1"))
    assert not is_own(ip_address("192.0.2.1"))
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        try:
            probe.connect(("192.0.2.1", 9))
        except OSError:
            pytest.skip("this host has no other address")
        assert is_own(ip_address(probe.getsockname()[0]))


async def test_public_address_of_this_host_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("stead.repos.ssrf.is_own", lambda address: str(address) == PUBLIC)
    guard = SsrfGuard(resolve=resolver([PUBLIC]))
    with pytest.raises(AddressRefused, match="this host"):
        await guard.check("https://git.example/")
    await SsrfGuard([IPv4Network(f"{PUBLIC}/32")], resolve=resolver([PUBLIC])).check("https://git.example/")


def certificate(name: str, folder: Path) -> tuple[ssl.SSLContext, Path]:
    """A TLS context of a server with this name, and its certificate."""
    key = ec.generate_private_key(ec.SECP256R1())
    subject = x509.Name([x509.NameAttribute(x509.NameOID.COMMON_NAME, name)])
    now = datetime.datetime.now(datetime.UTC)
    made = (
        x509.CertificateBuilder()
        .subject_name(subject)
        .issuer_name(subject)
        .public_key(key.public_key())
        .serial_number(x509.random_serial_number())
        .not_valid_before(now - datetime.timedelta(days=1))
        .not_valid_after(now + datetime.timedelta(days=1))
        .add_extension(x509.SubjectAlternativeName([x509.DNSName(name)]), critical=False)
        .add_extension(x509.BasicConstraints(ca=True, path_length=0), critical=True)
        .sign(key, hashes.SHA256())
    )
    known, secret = folder / f"{name}.pem", folder / f"{name}.key"
    known.write_bytes(made.public_bytes(serialization.Encoding.PEM))
    secret.write_bytes(
        key.private_bytes(
            serialization.Encoding.PEM, serialization.PrivateFormat.PKCS8, serialization.NoEncryption()
        )
    )
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.load_cert_chain(known, secret)
    return context, known


# Names of this installation


class Mapped:
    """Names that this installation serves: `a.style.dev` and `app.example.com` are mapped."""

    def in_zone(self, hostname: str) -> bool:
        return f".{hostname}".endswith((".style.dev", ".stead.localhost"))

    def route(self, hostname: str) -> str | None:
        return {"a.style.dev": "vm:80", "app.example.com": "vm:81"}.get(hostname)


async def never(host: str, port: int) -> Sequence[str]:
    raise AssertionError(f"{host} was looked up")


@pytest.fixture
def own(tmp_path: Path) -> SsrfGuard:
    guard = SsrfGuard(resolve=never, own_names=Mapped())
    guard.own_server = OwnServer("127.0.0.1", 8443, ssl.create_default_context())
    return guard


@pytest.mark.parametrize(
    "url", ["https://a.style.dev/hook", "https://A.Style.dev.:8443/", "https://app.example.com:443/"]
)
async def test_mapped_names_lead_to_the_own_server_without_a_lookup(own: SsrfGuard, url: str) -> None:
    target = await own.check(url, own=True)
    assert (target.addresses, target.server) == (("127.0.0.1",), own.own_server)


@pytest.mark.parametrize("host", ["b.style.dev", "style.dev", "stead.localhost", "git.stead.localhost"])
async def test_a_name_in_a_zone_that_is_not_mapped_is_reported_and_not_looked_up(
    own: SsrfGuard, host: str
) -> None:
    with pytest.raises(RequestFailed, match=rf"{re.escape(host)} is not mapped to a VM"):
        await own.check(f"https://{host}/hook", own=True)


@pytest.mark.parametrize(
    ("url", "why"),
    [
        ("http://a.style.dev/", "use https"),
        ("http://a.style.dev:8443/", "use https"),
        ("https://a.style.dev:8600/", "served on port 8443, not on 8600"),
        ("https://a.style.dev:22/", "served on port 8443, not on 22"),
    ],
)
async def test_other_ports_of_the_host_are_refused_for_mapped_names(
    own: SsrfGuard, url: str, why: str
) -> None:
    with pytest.raises(AddressRefused, match=why):
        await own.check(url, own=True)


async def test_names_of_zones_are_for_webhooks_only(own: SsrfGuard) -> None:
    for url in ("https://a.style.dev/", "https://b.stead.localhost/"):
        with pytest.raises(AddressRefused, match="only webhooks"):
            await own.check(url)
    elsewhere = SsrfGuard(resolve=resolver([PUBLIC]), own_names=Mapped())
    for url in ("https://app.example.com/", "https://notstyle.dev/"):
        assert (await elsewhere.check(url)).addresses == (PUBLIC,), "DNS decides"


async def test_a_mapped_name_without_an_own_server_is_reported(own: SsrfGuard) -> None:
    own.own_server = None
    with pytest.raises(RequestFailed, match="does not run"):
        await own.check("https://a.style.dev/", own=True)


async def test_a_redirect_to_a_name_of_this_installation_is_refused(server: GitServer) -> None:
    guard = SsrfGuard([LOOPBACK], own_names=Mapped())
    server.pages["/away"] = redirect("https://a.style.dev/")
    with pytest.raises(AddressRefused, match="only webhooks"):
        await get(guard, f"{server.url}/away")


async def test_mapped_names_are_verified_by_the_ca_of_the_own_server_alone(tmp_path: Path) -> None:
    context, known = certificate("a.style.dev", tmp_path)
    guard = SsrfGuard(resolve=never, own_names=Mapped())
    with serving(tmp_path, tls=context) as server:
        server.pages["/hook"] = Page(b"received")
        for cafile, url in (
            (str(known), "a.style.dev"),
            (None, "a.style.dev"),
            (str(known), "app.example.com"),
        ):
            tls = ssl.create_default_context(cafile=cafile)
            guard.own_server = OwnServer("127.0.0.1", server.port, tls)
            target = await guard.check(f"https://{url}/hook", own=True)
            sending = guard.request("POST", target, most_bytes=100, timeout=10, content=b"{}")
            if cafile is not None and url == "a.style.dev":
                async with sending as answer:
                    assert await answer.read() == b"received"
                assert server.requests[-1].headers["host"] == "a.style.dev"
            else:
                with pytest.raises(RequestFailed, match="certificate"):
                    async with sending:
                        pass
    assert len(server.requests) == 1


async def test_the_refusal_of_a_private_address_names_the_setting() -> None:
    with pytest.raises(
        AddressRefused, match=r"127\.0\.0\.1 is not a public address \(STEAD_DIAL_PRIVATE sets"
    ):
        await SsrfGuard().check("http://127.0.0.1:18555/hook")


def ls_remote(url: str, *options: str, env: dict[str, str] | None = None) -> subprocess.CompletedProcess[str]:
    own = {"PATH": "/usr/bin:/bin", "HOME": "/nonexistent", "GIT_TERMINAL_PROMPT": "0", **(env or {})}
    return subprocess.run(
        ["git", *options, "ls-remote", url], env=own, capture_output=True, text=True, timeout=30
    )


async def test_certificate_is_verified_for_the_host_name(tmp_path: Path) -> None:
    """By the HTTP client and by git, although both connect to an address."""
    context, known = certificate("git.stead.invalid", tmp_path)
    tls = ssl.create_default_context(cafile=str(known))
    guard = SsrfGuard([LOOPBACK], resolve=resolver(["127.0.0.1"]), tls=tls)
    with serving(tmp_path, tls=context) as server:
        server.init("repo.git")
        server.pages["/file"] = Page(b"content")
        server.pages["/down"] = redirect(f"http://git.stead.invalid:{server.port}/file")
        good, bad = (f"https://{name}.stead.invalid:{server.port}" for name in ("git", "other"))
        assert await get(guard, f"{good}/file") == (200, b"content")
        with pytest.raises(RequestFailed, match="certificate"):
            await get(guard, f"{bad}/file")
        with pytest.raises(AddressRefused, match="https to http"):
            await get(guard, f"{good}/down")
        trust = "-c", f"http.sslCAInfo={known}"
        target = await guard.check(f"{good}/repo.git")
        assert ls_remote(target.url, *trust, *git_options(target)).returncode == 0
        target = await guard.check(f"{bad}/repo.git")
        assert "certificate" in ls_remote(target.url, *trust, *git_options(target)).stderr


async def test_git_is_pinned_to_the_checked_address(tmp_path: Path) -> None:
    with serving(tmp_path) as server:
        server.init("repo.git")
        url = f"http://git.stead.invalid:{server.port}/repo.git"
        assert ls_remote(url).returncode != 0
        target = await local().check(url)
        found = ls_remote(target.url, *git_options(target))
        assert found.returncode == 0, found.stderr
        assert server.requests[-1].headers["host"] == f"git.stead.invalid:{server.port}"
        literal = await local().check(f"{server.url}/repo.git")
        assert ls_remote(literal.url, *git_options(literal)).returncode == 0


async def test_git_is_pinned_to_ipv4_and_ipv6_addresses(tmp_path: Path) -> None:
    try:
        socket.create_server(("::1", 0), family=socket.AF_INET6).close()
    except OSError:
        pytest.skip("this host has no IPv6")
    guard = SsrfGuard([LOOPBACK, IPv6Network("::1/128")], resolve=resolver(["::1", "127.0.0.1"]))
    with serving(tmp_path) as server:
        server.init("repo.git")
        target = await guard.check(f"http://git.stead.invalid:{server.port}/repo.git")
        assert f":{server.port}:[::1],127.0.0.1" in git_options(target)[-1]
        found = ls_remote(target.url, *git_options(target))
        assert found.returncode == 0, found.stderr


async def test_git_does_not_follow_redirects(tmp_path: Path) -> None:
    with serving(tmp_path) as server:
        server.init("repo.git")
        server.pages["/moved.git/info/refs"] = redirect(
            f"{server.url}/repo.git/info/refs?service=git-upload-pack"
        )
        target = await local().check(f"{server.url}/moved.git")
        assert ls_remote(target.url).returncode == 0
        assert ls_remote(target.url, *git_options(target)).returncode != 0


async def test_git_credentials_are_not_in_its_command_line(tmp_path: Path) -> None:
    with serving(tmp_path) as server:
        server.init("repo.git")
        server.credentials = "agent:s3cret"
        target = await local().check(
            server.url.replace("http://", "http://agent:s3cret@") + "/repo.git", credentials=True
        )
        assert ls_remote(target.url, *git_options(target)).returncode != 0
        found = ls_remote(target.url, *git_options(target), env=git_environment(target))
        assert found.returncode == 0, found.stderr
