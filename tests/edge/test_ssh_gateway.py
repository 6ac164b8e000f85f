"""The SSH gateway with real OpenSSH clients. VMs are in memory; a real sshd stands for that of all VMs."""

import asyncio
import os
import signal
import socket
from collections.abc import AsyncIterator, Callable
from pathlib import Path

import httpx2
import pytest
import pytest_asyncio
import sqlalchemy

from stead.api.server import listen_on
from stead.edge.ssh import client_access, relay
from stead.edge.ssh.access import Access, Login
from stead.edge.ssh.gateway import GatewayLimits
from stead.host.interface import narrowed
from stead.machines import State
from stead.machines.records import Properties
from stead.settings import Settings
from support.fake_api import TOKEN
from support.fake_host import FakeHost
from support.internals import inside
from support.process_tree import own_command_lines
from support.pseudo_terminal import in_terminal
from support.run_cli import PROGRAM, Shell
from support.ssh_gateway_with_sshd import WAIT, SshGatewayWithSshd, ssh_gateway_with_sshd
from support.waiting import until

pytestmark = pytest.mark.usefixtures("root", "network")


@pytest_asyncio.fixture(scope="module")
async def ssh_gateway(root: None, network: None, cache: Path) -> AsyncIterator[SshGatewayWithSshd]:
    async with ssh_gateway_with_sshd(cache) as ssh_gateway:
        yield ssh_gateway


async def test_a_command_with_input_output_and_exit_code(ssh_gateway: SshGatewayWithSshd) -> None:
    ended = await ssh_gateway.ssh("cat; echo to-stderr >&2; exit 7", stdin=b"through the gateway")
    assert (ended.code, ended.out, ended.err) == (7, "through the gateway", "to-stderr\n")
    assert (await ssh_gateway.ssh("kill -TERM $$")).code == 255, "ssh's code for a signal"


async def test_a_public_gateway_has_ipv4_and_ipv6(ssh_gateway: SshGatewayWithSshd) -> None:
    if not socket.has_dualstack_ipv6():
        pytest.skip("this host has no IPv6")
    address = Settings(domain="stead.example.com").ssh_address
    assert address == ("::", 22)
    async with ssh_gateway.limited(GatewayLimits(100), listen_on(address[0], 0)) as public:
        for host in ("::1", "127.0.0.1"):
            ended = await public.ssh("echo $SSH_CONNECTION", host=host)
            assert ended.code == 0 and ended.out, f"{host}: {ended.err}"


async def test_no_packets_to_be_ignored_and_no_cbc_cipher(ssh_gateway: SshGatewayWithSshd) -> None:
    command = ssh_gateway.ssh_command("head -c 200000 /dev/zero")
    ended = await ssh_gateway.run(*command[:1], "-vvv", *command[1:])
    assert (ended.code, len(ended.out)) == (0, 200_000)
    assert "receive packet: type 98" in ended.err, "packets are logged"
    assert "SSH2_MSG_IGNORE" not in ended.err
    offered = [line for line in ended.err.splitlines() if "ciphers ctos:" in line][-1]
    assert "aes256-ctr" in offered and "cbc" not in offered


@pytest.mark.parametrize("separator", [":", ","])
async def test_the_user_name_selects_vm_and_linux_user(
    ssh_gateway: SshGatewayWithSshd, separator: str
) -> None:
    assert (
        await ssh_gateway.ssh("id -un", login=f"{ssh_gateway.api.vm}{separator}{ssh_gateway.token}")
    ).out == "root\n"
    assert (
        await ssh_gateway.ssh("id -un", login=f"{ssh_gateway.api.vm}+dev{separator}{ssh_gateway.token}")
    ).out == "dev\n"


async def test_a_token_as_the_password(ssh_gateway: SshGatewayWithSshd) -> None:
    for method in ("password", "keyboard-interactive"):
        ended = await ssh_gateway.ssh_with_password(
            ssh_gateway.token, "-o", f"PreferredAuthentications={method}"
        )
        assert (ended.out, ended.err) == ("in\n", "")


async def test_refused_logins_learn_nothing(
    ssh_gateway: SshGatewayWithSshd, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A wrong token, another identity's, a VM that does not exist: one answer. API keys are named as such."""
    _, allowed = await ssh_gateway.token_for("dev")
    unknown = "unknown VM or token"
    key = ssh_gateway.api.callers["owner"]["Authorization"].removeprefix("Bearer ")
    other = ssh_gateway.api.callers["ungranted"][TOKEN]
    for login, why in [
        (f"{ssh_gateway.api.vm}:{'stid_' + 'x' * 43}", unknown),
        (f"{ssh_gateway.api.vm}:{other}", unknown),
        (f"aaaaaaaaaaaaaaaaaaaa:{ssh_gateway.token}", unknown),
        (f"{ssh_gateway.api.vm}:{key}", "API keys are not accepted here"),
        (f"{ssh_gateway.api.vm}+root:{allowed}", "Linux user root is not allowed; allowed users: dev"),
        ("Root:x", "the user name must be VM"),
    ]:
        ended = await ssh_gateway.ssh("echo in", login=login)
        assert (ended.code, ended.out) == (255, ""), login
        assert why in ended.err and "(trace " in ended.err, ended.err
        assert ssh_gateway.token not in ended.err
    assert (await ssh_gateway.ssh("id -un", login=f"{ssh_gateway.api.vm}:{allowed}")).out == "dev\n", (
        "the only one allowed"
    )


async def test_an_account_that_cannot_log_in_is_explained(ssh_gateway: SshGatewayWithSshd) -> None:
    ended = await ssh_gateway.ssh("echo in", login=f"{ssh_gateway.api.vm}+nobody-here,{ssh_gateway.token}")
    assert ended.code == 255 and "does not let nobody-here log in" in ended.err


async def test_the_vm_gets_a_key_of_its_own_and_never_the_token(ssh_gateway: SshGatewayWithSshd) -> None:
    assert (await ssh_gateway.ssh("true")).code == 0
    asked = ssh_gateway.sshd.admitted[-1]
    assert asked["vm"] == ssh_gateway.api.vm
    assert asked["authorized_key"].startswith("ssh-ed25519 ")
    files = [path for path in ssh_gateway.sshd.folder.rglob("*") if path.is_file()]
    assert files and not any(ssh_gateway.token.encode() in path.read_bytes() for path in files)
    environment = await ssh_gateway.ssh("env; cat /proc/$PPID/cmdline")
    assert "SSH_CONNECTION" in environment.out and ssh_gateway.token not in environment.out


async def test_a_server_that_shows_another_host_key_is_refused(ssh_gateway: SshGatewayWithSshd) -> None:
    real = dict(ssh_gateway.sshd.host_keys)
    try:
        name = "ssh_host_ed25519_key.pub"
        (ssh_gateway.home / "other").unlink(missing_ok=True)
        await ssh_gateway.run("ssh-keygen", "-q", "-t", "ed25519", "-N", "", "-f", ssh_gateway.home / "other")
        ssh_gateway.sshd.host_keys = {name: (ssh_gateway.home / "other.pub").read_text()}
        ended = await ssh_gateway.ssh("echo in")
        assert ended.code == 255 and "the SSH server of VM" in ended.err and ended.out == ""
    finally:
        ssh_gateway.sshd.host_keys = real
    assert (await ssh_gateway.ssh("echo in")).out == "in\n"


async def test_no_version_in_the_banner(ssh_gateway: SshGatewayWithSshd) -> None:
    reader, writer = await asyncio.open_connection("127.0.0.1", ssh_gateway.port)
    assert await asyncio.wait_for(reader.readline(), 60) == b"SSH-2.0-Stead\r\n"
    writer.close()


# Terminals, files, forwarding


async def test_a_terminal_with_resize(ssh_gateway: SshGatewayWithSshd) -> None:
    command = ssh_gateway.ssh_command(
        "-tt", "stty size; echo $TERM; while read x; do stty size; done; exit 5"
    )
    environment = {**os.environ, "TERM": "xterm-special"}
    async with in_terminal(command, environment, cols=90, rows=30) as window:
        await window.raw(WAIT)
        await window.expect(b"30 90\r\nxterm-special\r\n", WAIT)
        window.resize(120, 50)

        async def resized() -> bool:
            """ssh may send a key before a size that changed earlier."""
            window.type(b"go\n")
            return b"50 120" in window.printed

        await until(resized, WAIT)
        window.type(b"\x04")
        assert await window.ended(WAIT) == 5


async def test_scp_sftp_and_rsync_copy_files_and_folders(
    ssh_gateway: SshGatewayWithSshd, tmp_path: Path
) -> None:
    source, target = tmp_path / "source", ssh_gateway.sshd.folder / "target"
    (source / "folder").mkdir(parents=True)
    (source / "folder/large").write_bytes(os.urandom(5_000_000))
    (source / "empty").touch()
    scp = ["scp", "-q", *ssh_gateway.options, "-P", str(ssh_gateway.port), "-r"]
    for old in ([], ["-O"]):
        ended = await ssh_gateway.run(*scp, *old, source, f"{ssh_gateway.login}@127.0.0.1:{target}")
        assert (ended.code, ended.err) == (0, "")
        ended = await ssh_gateway.run(
            *scp, *old, f"{ssh_gateway.login}@127.0.0.1:{target}", tmp_path / f"back{len(old)}"
        )
        assert (ended.code, ended.err) == (0, "")
        for copy in (target, tmp_path / f"back{len(old)}"):
            assert (copy / "folder/large").read_bytes() == (source / "folder/large").read_bytes()
            assert (copy / "empty").exists()
        await ssh_gateway.run("rm", "-r", target)
    batch = f"mkdir {target}\nput {source}/folder/large {target}/sent\nget {target}/sent {tmp_path}/got\n"
    batch += f"put -r {source} {target}/all\nget -r {target}/all {tmp_path}/all\nls {target}\n"
    sftp = [
        "sftp",
        "-q",
        *ssh_gateway.options,
        "-P",
        str(ssh_gateway.port),
        "-b",
        "-",
        f"{ssh_gateway.login}@127.0.0.1",
    ]
    ended = await ssh_gateway.run(*sftp, stdin=batch.encode())
    assert ended.code == 0 and f"{target}/sent" in ended.out, ended.err
    for name in ("got", "all/folder/large"):
        assert (tmp_path / name).read_bytes() == (source / "folder/large").read_bytes()
    shell = " ".join(["ssh", *ssh_gateway.options, "-p", str(ssh_gateway.port)])
    remote = f"{ssh_gateway.login}@127.0.0.1:{target}/rsync/"
    assert (await ssh_gateway.run("rsync", "-a", "-e", shell, f"{source}/", remote)).err == ""
    ended = await ssh_gateway.run("rsync", "-a", "--delete", "-e", shell, remote, tmp_path / "synced/")
    assert (ended.code, ended.err) == (0, "")
    assert (tmp_path / "synced/folder/large").read_bytes() == (source / "folder/large").read_bytes()


async def _echo(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    """Speaks first, then returns what it gets in capitals, also after the end of its input."""
    writer.write(b"hello\n")
    data = await reader.read()
    writer.write(data.upper())
    writer.close()


async def _asked(reader: asyncio.StreamReader, writer: asyncio.StreamWriter, size: int = 3) -> bytes:
    assert await asyncio.wait_for(reader.readline(), WAIT) == b"hello\n"
    writer.write(b"abc" * (size // 3))
    writer.write_eof()
    answer = await asyncio.wait_for(reader.read(), WAIT)
    writer.close()
    return answer


def _free_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as listening:
        return int(listening.getsockname()[1])


@pytest_asyncio.fixture
async def echo() -> AsyncIterator[int]:
    server = await asyncio.start_server(_echo, "127.0.0.1", 0)
    yield server.sockets[0].getsockname()[1]
    server.close()


@pytest.mark.parametrize("direction", ["-L", "-R"])
async def test_forwarded_ports_in_both_directions(
    ssh_gateway: SshGatewayWithSshd, echo: int, direction: str
) -> None:
    port = _free_port()
    async with ssh_gateway.connected(
        direction, f"127.0.0.1:{port}:127.0.0.1:{echo}", "-o", "ExitOnForwardFailure=yes"
    ):
        answers = await asyncio.gather(
            *[_asked(*await asyncio.open_connection("127.0.0.1", port), size) for size in (3, 300_000, 3)]
        )
        assert [len(answer) for answer in answers] == [3, 300_000, 3]
        assert set(b"".join(answers)) == set(b"ABC")


async def test_a_forwarded_port_that_is_closed(ssh_gateway: SshGatewayWithSshd) -> None:
    closed, port = _free_port(), _free_port()
    async with ssh_gateway.connected("-L", f"127.0.0.1:{port}:127.0.0.1:{closed}") as process:
        reader, writer = await asyncio.open_connection("127.0.0.1", port)
        assert await asyncio.wait_for(reader.read(), WAIT) == b""
        writer.close()
        assert process.stdin is not None and process.stdout is not None
        process.stdin.write(b"still here\n")
        assert await asyncio.wait_for(process.stdout.readline(), WAIT) == b"still here\n"


async def test_forwarded_unix_sockets(ssh_gateway: SshGatewayWithSshd, echo: int) -> None:
    async with ssh_gateway.connected("-R", f"{ssh_gateway.home}/far.sock:127.0.0.1:{echo}"):
        assert await _asked(*await asyncio.open_unix_connection(f"{ssh_gateway.home}/far.sock")) == b"ABC"
        async with ssh_gateway.connected("-L", f"{ssh_gateway.home}/near.sock:{ssh_gateway.home}/far.sock"):
            assert (
                await _asked(*await asyncio.open_unix_connection(f"{ssh_gateway.home}/near.sock")) == b"ABC"
            )


async def test_an_editor_installs_its_server_and_connects_to_it(ssh_gateway: SshGatewayWithSshd) -> None:
    """As Remote-SSH does: `ssh -T -D PORT HOST bash` runs a script from its input, which prints the port of a
    server that it started; the editor then connects to it through the SOCKS proxy."""
    proxy = _free_port()
    script = b"""
python3 - <<'END' & disown
import socket
server = socket.create_server(("127.0.0.1", 0))
print(f"listeningOn=={server.getsockname()[1]}==", flush=True)
connection, _ = server.accept()
connection.sendall(b"hello\\n")
connection.sendall(connection.recv(3).upper())
END
echo started
"""
    process = await ssh_gateway.start(*ssh_gateway.ssh_command("-T", "-D", str(proxy), "bash"))
    assert process.stdin is not None and process.stdout is not None
    try:
        process.stdin.write(script)
        port = None
        while port is None:
            line = (await asyncio.wait_for(process.stdout.readline(), WAIT)).decode()
            assert line, "ssh has ended"
            if line.startswith("listeningOn=="):
                port = int(line.split("==")[1])
        reader, writer = await asyncio.open_connection("127.0.0.1", proxy)
        writer.write(b"\x05\x01\x00")
        assert await reader.readexactly(2) == b"\x05\x00"
        writer.write(b"\x05\x01\x00\x01\x7f\x00\x00\x01" + port.to_bytes(2, "big"))
        assert (await reader.readexactly(10))[:2] == b"\x05\x00"
        assert await _asked(reader, writer) == b"ABC"
    finally:
        process.kill()
        await process.wait()


async def test_agent_forwarding_is_off(ssh_gateway: SshGatewayWithSshd, tmp_path: Path) -> None:
    agent = await ssh_gateway.start("ssh-agent", "-D", "-a", tmp_path / "agent")
    try:
        assert await until(lambda: asyncio.sleep(0, (tmp_path / "agent").exists()), 60)
        command = ssh_gateway.ssh_command("-A", "echo socket=$SSH_AUTH_SOCK")
        ended = await ssh_gateway.run("env", f"SSH_AUTH_SOCK={tmp_path}/agent", *command)
        assert ended.out == "socket=\n"
    finally:
        agent.kill()
        await agent.wait()


async def test_all_output_arrives_before_the_exit_code(ssh_gateway: SshGatewayWithSshd) -> None:
    """Output that is faster than its client, of a program that ends at once."""
    process = await ssh_gateway.start(*ssh_gateway.ssh_command("head -c 5000000 /dev/zero; exit 9"))
    assert process.stdout is not None
    await asyncio.sleep(1)
    total = 0
    while data := await process.stdout.read(1 << 20):
        total += len(data)
    assert (total, await process.wait()) == (5_000_000, 9)


async def test_an_exit_code_that_comes_after_the_end_of_the_output(
    ssh_gateway: SshGatewayWithSshd, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """A session of a shared connection is closed by ssh when both directions have ended."""

    def late(method: Callable[..., None]) -> Callable[..., None]:
        def call(*arguments: object) -> None:
            asyncio.get_running_loop().call_later(0.5, method, *arguments)

        return call

    for name in ("exit_status_received", "exit_signal_received", "connection_lost"):
        monkeypatch.setattr(relay._InVm, name, late(getattr(relay._InVm, name)))
    shared = ("-o", f"ControlPath={tmp_path}/control")
    async with ssh_gateway.in_this_process() as (changed, _):
        async with changed.connected("-M", *shared):
            ended = await changed.ssh(*shared, "echo out; exit 9")
            assert (ended.code, ended.out) == (9, "out\n")
        monkeypatch.setattr(relay, "_STATUS_WAIT", 0.1)
        process = await changed.start(*changed.ssh_command("echo out; exec >&- 2>&-; sleep 60"))
        assert process.stdout is not None
        read = await asyncio.wait_for(process.stdout.read(), WAIT)
        assert read == b"out\n", "it ends while the program runs"
        process.kill()
        await process.wait()


async def test_output_that_is_not_read_is_not_collected(ssh_gateway: SshGatewayWithSshd) -> None:
    """A client with an endless window that stops reading: the gateway stops reading from the VM."""
    async with ssh_gateway.in_this_process() as (here, listener):
        process = await here.start(*here.ssh_command("echo begun; exec cat /dev/zero"))
        assert process.stdout is not None
        await process.stdout.readline()
        process.send_signal(signal.SIGSTOP)

        def held() -> int:
            (found,) = [each for each in listener.clients if each._login is not None]
            return int(found._connection._transport.get_write_buffer_size())

        async def stopped() -> bool:
            first = held()
            assert first < 8 << 20
            await asyncio.sleep(1)
            return first == held()

        try:
            await asyncio.sleep(2)
            await until(stopped, 60)
        finally:
            process.kill()
            await process.communicate()


# Revocation and the life of the VM


@pytest.mark.parametrize("what", ["token", "permission", "identity"])
async def test_revocation_ends_connections(
    ssh_gateway: SshGatewayWithSshd, what: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(client_access, "_RECHECK", 0.2)
    identities, account = ssh_gateway.api.installation.identities, ssh_gateway.api.account
    identity, token = await ssh_gateway.token_for()
    command = ssh_gateway.ssh_command("cat", login=f"{ssh_gateway.api.vm},{token}")
    process = await ssh_gateway.start(*command)
    assert process.stdin is not None and process.stdout is not None
    process.stdin.write(b"begun\n")
    assert await asyncio.wait_for(process.stdout.readline(), WAIT) == b"begun\n"
    async with ssh_gateway.connected() as other:
        (info,) = await identities.tokens(account, identity)
        below = {"token": f"/tokens/{info.id}", "permission": f"/permissions/vm/{ssh_gateway.api.vm}"}
        url = f"{ssh_gateway.api.url}/identity/v1/identities/{identity}{below.get(what, '')}"
        async with httpx2.AsyncClient(headers=ssh_gateway.api.callers["owner"]) as owner:
            assert (await owner.delete(url)).status_code == 200
        _, errors = await asyncio.wait_for(process.communicate(), WAIT)
        assert process.returncode == 255 and b"unknown VM or token" in errors, errors
        assert other.stdin is not None and other.stdout is not None
        other.stdin.write(b"still here\n")
        assert await asyncio.wait_for(other.stdout.readline(), WAIT) == b"still here\n"


async def test_a_failed_check_does_not_keep_a_connection_from_being_ended(
    ssh_gateway: SshGatewayWithSshd, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(client_access, "_RECHECK", 0.2)
    identities, account = ssh_gateway.api.installation.identities, ssh_gateway.api.account
    identity, token = await ssh_gateway.token_for()
    process = await ssh_gateway.start(*ssh_gateway.ssh_command("cat", login=f"{ssh_gateway.api.vm},{token}"))
    assert process.stdin is not None and process.stdout is not None
    process.stdin.write(b"begun\n")
    assert await asyncio.wait_for(process.stdout.readline(), WAIT) == b"begun\n"
    failed = 0

    async def fail(access: Access, login: Login) -> None:
        nonlocal failed
        failed += 1
        raise sqlalchemy.exc.OperationalError("SELECT", {}, OSError("made up"))

    with monkeypatch.context() as patch:
        patch.setattr(Access, "recheck", fail)
        await until(lambda: failed >= 2, WAIT)
    assert not process.stdout.at_eof()
    await identities.delete(account, identity)
    _, errors = await asyncio.wait_for(process.communicate(), WAIT)
    assert process.returncode == 255 and b"unknown VM or token" in errors, errors


async def test_a_connection_wakes_a_suspended_vm_and_outlives_a_suspend(
    ssh_gateway: SshGatewayWithSshd, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(client_access, "_RECHECK", 0.2)
    machines, vm = ssh_gateway.api.installation.machines, ssh_gateway.api.vm
    await machines.suspend(vm)
    async with ssh_gateway.connected() as process:
        assert (await machines.info(vm)).state == State.RUNNING
        keys = len({asked["authorized_key"] for asked in ssh_gateway.sshd.admitted})
        await machines.suspend(vm)
        await asyncio.sleep(1)
        assert process.returncode is None and (await machines.info(vm)).state == State.SUSPENDED
        assert process.stdin is not None and process.stdout is not None
        process.stdin.write(b"wake up\n")
        assert await asyncio.wait_for(process.stdout.readline(), WAIT) == b"wake up\n"

        async def woken() -> bool:
            return (await machines.info(vm)).state == State.RUNNING

        assert await until(woken, WAIT)
    for _ in range(2):
        assert (await ssh_gateway.ssh("true")).code == 0
    assert len({asked["authorized_key"] for asked in ssh_gateway.sshd.admitted}) == keys + 1, (
        "one key for each run"
    )


async def test_a_login_waits_until_the_ssh_server_listens(
    ssh_gateway: SshGatewayWithSshd, monkeypatch: pytest.MonkeyPatch
) -> None:
    """After a boot it listens later than the agent answers."""
    ports = ssh_gateway.api.world.ports
    host = narrowed(inside(ssh_gateway.api.installation.machines).host, FakeHost)
    listening = ports[22]
    with socket.socket() as closed:
        closed.bind(("127.0.0.1", 0))
        ports[22] = closed.getsockname()
        try:
            with monkeypatch.context() as patch:
                patch.setattr(client_access, "_LISTEN_TIMEOUT", 0.3)
                ended = await ssh_gateway.ssh("true")
                assert ended.code == 255 and "nothing listens on port 22" in ended.err
            dials = host.calls.count("dial")
            login = asyncio.create_task(ssh_gateway.ssh("echo in"))
            await until(lambda: host.calls.count("dial") > dials, WAIT)
        finally:
            ports[22] = listening
    assert (await login).out == "in\n"


@pytest.mark.parametrize("how", ["kill", "delete"])
async def test_the_end_of_a_vm_ends_its_connections(
    ssh_gateway: SshGatewayWithSshd, how: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(client_access, "_RECHECK", 60.0)
    machines = ssh_gateway.api.installation.machines
    machine = await machines.create(Properties(account=ssh_gateway.api.account))
    _, token = await ssh_gateway.token_for(vm=machine.id)
    process = await ssh_gateway.start(*ssh_gateway.ssh_command("cat", login=f"{machine.id},{token}"))
    assert process.stdin is not None and process.stdout is not None
    process.stdin.write(b"begun\n")
    assert await asyncio.wait_for(process.stdout.readline(), WAIT) == b"begun\n"
    await (machine.kill() if how == "kill" else machine.delete())
    _, errors = await asyncio.wait_for(process.communicate(), WAIT)
    said = b"the VM was killed (trace " if how == "kill" else b"the VM was deleted (trace "
    assert process.returncode == 255 and said in errors, errors
    if how == "kill":
        await machine.delete()


# Command lines


async def test_stead_vm_ssh_has_a_token_for_its_own_length(ssh_gateway: SshGatewayWithSshd) -> None:
    """Options and the command go to ssh, and the exit code comes back; the token is in no command line."""
    here, account = ssh_gateway.api.installation, ssh_gateway.api.account
    before = (await here.identities.list(account)).total
    key = ssh_gateway.api.callers["owner"]["Authorization"].removeprefix("Bearer ")
    shell = Shell(ssh_gateway.api.url, key)
    process = await asyncio.create_subprocess_exec(
        *(PROGRAM, "vm", "ssh", "--user", "dev", ssh_gateway.api.vm, "-v", "id -un; cat; exit 6"),
        env=shell.environment,
        stdin=asyncio.subprocess.PIPE,
        stdout=asyncio.subprocess.PIPE,
        stderr=asyncio.subprocess.PIPE,
    )
    assert process.stdin is not None and process.stdout is not None
    assert await asyncio.wait_for(process.stdout.readline(), WAIT) == b"dev\n"
    assert (await here.identities.list(account)).total == before + 1
    lines = own_command_lines().values()
    assert any(line.startswith(b"ssh ") and ssh_gateway.api.vm.encode() in line for line in lines)
    assert not any(b"stid_" in line for line in lines)
    out, err = await asyncio.wait_for(process.communicate(b"to the end"), WAIT)
    assert (process.returncode, out) == (6, b"to the end")
    assert b"debug1:" in err, "-v is an option of ssh"
    assert (await here.identities.list(account)).total == before
