"""The SSH gateway and the OpenSSH server inside a real VM."""

import asyncio
import os
from pathlib import Path

from support.installations import Server

_HOST_KEY = "cat /etc/ssh/ssh_host_ed25519_key.pub"


async def _run(*command: str | Path, stdin: bytes = b"") -> tuple[int, str]:
    pipe = asyncio.subprocess.PIPE
    process = await asyncio.create_subprocess_exec(*command, stdin=pipe, stdout=pipe, stderr=pipe)
    out, err = await asyncio.wait_for(process.communicate(stdin), 300)
    return process.returncode or 0, (out + err).decode(errors="replace")


async def test_openssh_clients_reach_a_vm_that_sleeps_and_forks(server: Server, tmp_path: Path) -> None:
    """First login, copies of files, a suspend under an open shell, and a fork, which has keys of its own."""
    here, account = server.installation, server.account
    machine = await here.machines.create(account=account, name="ssh")
    await machine.exec("useradd --create-home --shell /bin/bash dev")
    identity = await here.identities.create(account)
    await here.identities.grant(account, identity.id, machine.id)
    _, token = await here.identities.create_token(account, identity.id)
    port = str(here.ssh.port)
    known = tmp_path / "known_hosts"
    known.write_text(f"[127.0.0.1]:{port} {here.ssh.host_key}\n")
    options = ["-F", "none", "-o", f"UserKnownHostsFile={known}", "-o", "BatchMode=yes"]

    def ssh(vm: str, command: str) -> list[str]:
        return ["ssh", *options, "-p", port, f"{vm}:{token}@127.0.0.1", command]

    assert await _run(*ssh(machine.id, "cat; exit 3"), stdin=b"in") == (3, "in")
    assert await _run(*ssh(f"{machine.id}+dev", "id -un; pwd")) == (0, "dev\n/home/dev\n")
    content = os.urandom(300_000)
    (tmp_path / "file").write_bytes(content)
    place = f"{machine.id}+dev,{token}@127.0.0.1"
    scp = ["scp", "-q", *options, "-P", port]
    assert await _run(*scp, tmp_path / "file", f"{place}:copy") == (0, "")
    shell = " ".join(["ssh", *options, "-p", port])
    assert await _run("rsync", "-e", shell, f"{place}:copy", tmp_path / "back") == (0, "")
    assert (tmp_path / "back").read_bytes() == content
    await _sleeps(machine.suspend, ssh(machine.id, "cat"))
    (copy,) = await machine.fork(1)
    before = (await machine.exec("cat /run/stead/ssh-gateway-key; " + _HOST_KEY)).stdout
    assert before
    assert (await copy.exec("ls /run/stead/ssh-gateway-key")).exit_code == 2
    await here.identities.grant(account, identity.id, copy.id)
    code, shown = await _run(*ssh(copy.id, "hostname; " + _HOST_KEY))
    assert code == 0 and shown.startswith(f"{copy.id}\n")
    assert shown.splitlines()[1].encode() not in before
    await copy.delete()
    await machine.delete()


async def _sleeps(suspend: object, command: list[str]) -> None:
    """A connection continues after the VM was suspended under it: the next data wakes it."""
    pipe = asyncio.subprocess.PIPE
    process = await asyncio.create_subprocess_exec(*command, stdin=pipe, stdout=pipe)
    assert process.stdin is not None and process.stdout is not None and callable(suspend)
    process.stdin.write(b"before\n")
    assert await asyncio.wait_for(process.stdout.readline(), 120) == b"before\n"
    await suspend()
    process.stdin.write(b"after\n")
    assert await asyncio.wait_for(process.stdout.readline(), 120) == b"after\n"
    process.stdin.close()
    assert await asyncio.wait_for(process.wait(), 60) == 0
