"""What the command line says when something is wrong, against a scripted server."""

import json
import socket
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest
from typer.testing import CliRunner, Result

from stead.cli.main import app
from stead.sdk import errors
from support.any_server import SNAPSHOT, UUID, VM, VPC
from support.scripted_server import Reply, scripted
from support.sdk_clients import Client, attempt

RUNNING = Reply(content={"id": VM, "state": "running"})
SESSION = {
    "sessionId": "s1",
    "vpcId": VPC,
    "vpcCidr": "10.0.0.0/16",
    "clientConfig": "[Interface]",
    "clientTunnelIp": "10.0.255.2",
    "endpointPort": 51821,
}
REPO = {"id": UUID, "name": "site", "branches": {}, "tags": {}}


def run(url: str, *line: str) -> Result:
    return CliRunner().invoke(app, line, env={"STEAD_API_URL": url, "STEAD_API_KEY": "key"})


def said(url: str, *line: str, code: int = 1) -> str:
    """The one line of an error."""
    result = run(url, *line)
    assert result.exit_code == code, (result.stdout, result.stderr)
    (text,) = result.stderr.splitlines()
    return text


@pytest.mark.parametrize("reference", ["", ".", ".."])
@pytest.mark.parametrize(
    "line",
    [
        ("vm", "exec", "{}", "ls"),
        ("vm", "get", "{}"),
        ("vm", "delete", "{}"),
        ("vm", "logs", "{}"),
        ("vm", "fs", "ls", "{}"),
        ("git", "get", "{}"),
        ("git", "clone", "{}"),
        ("snapshot", "get", "{}"),
        ("identity", "delete", "{}"),
        ("vpc", "get", "{}"),
        ("domains", "map", "a.example.com", "{}", "80"),
    ],
)
def test_empty_and_dotted_references_are_not_found(line: tuple[str, ...], reference: str) -> None:
    """`stead vm exec "$VM" ls` without the variable."""
    lists = {"vms": [], "repositories": [], "snapshots": [], "identities": [], "vpcs": [], "total": 0}
    words = [each.format(reference) for each in line]
    with scripted(*[Reply(content=lists)] * 2) as script:
        assert "NOT_FOUND" in said(script.url, *words)
        place = 2 if line[0] == "vm" and line[1] in ("exec",) else len(words)
        as_json = [*words[:place], "--json", *words[place:]]
        assert json.loads(said(script.url, *as_json))["error"]["code"].endswith("NOT_FOUND")


def test_a_wait_that_times_out_says_that_the_vm_still_runs() -> None:
    late = Reply(content={"exitStatus": "stopped"}, after=5)
    with scripted(late, RUNNING) as script:
        text = said(script.url, "vm", "await", VM, "--timeout", "0.5", code=124)
    assert text == f"error: VM {VM} is still running after 0.5 seconds"
    with scripted(late) as script:
        assert "INTERNAL" in said(script.url, "vm", "await", VM, "--timeout", "0.5", "--json")


async def test_both_clients_raise_wait_timed_out(client: Client) -> None:
    late = Reply(content={"exitStatus": "stopped"}, after=5)
    error, _ = await attempt(
        client, lambda stead: stead.vms.ref(VM).wait_for_exit(timeout=0.5), late, RUNNING
    )
    assert isinstance(error, errors.WaitTimedOut) and "still running" in str(error)


@pytest.fixture
def plain_port() -> Iterator[int]:
    """A server that answers in plain text, as the HTTP port of Stead does to TLS."""
    with socket.create_server(("127.0.0.1", 0)) as listener:

        def serve() -> None:
            while True:
                try:
                    link, _ = listener.accept()
                except OSError:
                    return
                with link:
                    link.recv(1000)
                    link.sendall(b"HTTP/1.1 400 Bad Request\r\n\r\n")

        threading.Thread(target=serve, daemon=True).start()
        yield listener.getsockname()[1]
        listener.shutdown(socket.SHUT_RDWR)


def test_an_unreachable_server_is_explained_by_its_cause(plain_port: int) -> None:
    text = said(f"https://127.0.0.1:{plain_port}", "whoami")
    assert "TLS failed" in text and "use http://" in text and "running?" not in text
    text = said("http://no-such-host.invalid", "whoami")
    assert "no-such-host.invalid cannot be resolved" in text and "running?" not in text
    assert "connection refused: is `stead serve` running?" in said("http://127.0.0.1:9", "whoami")


@pytest.mark.parametrize(
    ("line", "hint"),
    [("exec web ls", "stead vm exec"), ("create", "stead vm create"), ("clone site", "stead git clone")],
)
def test_a_command_without_its_group_is_hinted_at(line: str, hint: str) -> None:
    result = run("http://127.0.0.1:9", *line.split())
    assert result.exit_code == 2 and f"`{hint}`" in " ".join(result.stderr.replace("│", " ").split())


def test_git_get_is_flat_in_json() -> None:
    with scripted(Reply(content=REPO)) as script:
        facts = json.loads(run(script.url, "git", "get", UUID, "--json").stdout)
    assert (facts["id"], facts["name"]) == (UUID, "site")
    assert facts["clone_url"] == f"{script.url}/{UUID}"


def test_several_identities_are_deleted_after_all_are_found() -> None:
    other = UUID.replace("0", "1")
    with scripted(Reply(), Reply()) as script:
        assert run(script.url, "identity", "delete", UUID, other).stdout.split("\n")[:2] == [
            f"deleted {UUID}",
            f"deleted {other}",
        ]
    with scripted(Reply(content={"identities": [], "total": 0})) as script:
        assert "IDENTITY_NOT_FOUND" in said(script.url, "identity", "delete", UUID, "nobody")
    assert [each.method for each in script.seen] == ["GET"]


@pytest.mark.parametrize(
    ("text", "seconds"), [("300", 300), ("90s", 90), ("5m", 300), ("2h", 7200), ("never", None)]
)
def test_idle_timeouts_are_durations(text: str, seconds: int | None) -> None:
    with scripted(Reply()) as script:
        assert run(script.url, "vm", "start", VM, "--idle-timeout", text).exit_code == 0
    assert script.seen[0].json == {"idleTimeoutSeconds": seconds}


@pytest.mark.parametrize("text", ["0", "5x", "0m", "-5", "9999999999d", ""])
def test_invalid_idle_timeouts_are_refused(text: str) -> None:
    result = run("http://127.0.0.1:9", "vm", "start", VM, "--idle-timeout", text)
    assert result.exit_code == 2 and "never" in result.stderr


def test_forwarding_to_a_used_port_is_explained() -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken, scripted() as script:
        port = taken.getsockname()[1]
        text = said(script.url, "vm", "forward", VM, f"80:{port}")
    assert text == (
        f"error: local port {port} is in use: choose another one with PORT:LOCAL, or a free one with PORT:0"
    )


def test_a_wireguard_file_is_not_replaced_without_force(tmp_path: Path) -> None:
    file = tmp_path / "office.conf"
    file.write_text("a private key")
    with scripted(Reply(content=SESSION)) as script:
        assert "--force" in said(script.url, "vpc", "connect", VPC, "--file", str(file))
        assert (file.read_text(), script.seen) == ("a private key", [])
        assert run(script.url, "vpc", "connect", VPC, "--file", str(file), "--force").exit_code == 0
    assert file.read_text() == "[Interface]"


def test_snapshot_ids_are_used_without_a_lookup() -> None:
    with scripted(Reply(404, {"code": "SNAPSHOT_NOT_FOUND", "message": "gone"})) as script:
        assert "SNAPSHOT_NOT_FOUND" in said(script.url, "snapshot", "get", SNAPSHOT)
    assert [each.target for each in script.seen] == [f"/v1/vms/snapshots/{SNAPSHOT}"]
