"""`vm ssh` and `vm scp` of the npm package `freestyle`, with the set-ups that docs/ssh.md has."""

import asyncio
import contextlib
import os
from collections.abc import AsyncIterator, Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from urllib.parse import urlsplit

import pytest
import pytest_asyncio

from stead.edge.ssh.gateway import GatewayLimits
from stead.errors import MachineNotFound
from stead.machines.records import Properties
from support.documents import run_by
from support.links import Side, namespace
from support.npm import Ended, Npm
from support.ssh_gateway_with_sshd import SshGatewayWithSshd, ssh_gateway_with_sshd

pytestmark = pytest.mark.usefixtures("root", "network")

_HOST = "vm-ssh.freestyle.sh"
_RESOLVE = 'mount --bind "$1" /etc/hosts; shift; exec "$@"'


@pytest_asyncio.fixture(scope="module")
async def ssh_gateway(root: None, network: None, cache: Path) -> AsyncIterator[SshGatewayWithSshd]:
    async with ssh_gateway_with_sshd(cache) as ssh_gateway:
        yield ssh_gateway


@dataclass(frozen=True)
class CommandLine:
    """The package's command line on a computer of its own."""

    ssh_gateway: SshGatewayWithSshd
    package: Npm
    environment: Mapping[str, str]
    within: tuple[str, ...] = ()

    async def __call__(self, *arguments: str, stdin: bytes = b"") -> Ended:
        return await self.package.cli(
            "vm", *arguments, environment=self.environment, stdin=stdin, within=self.within
        )

    async def identities(self) -> int:
        return (await self.ssh_gateway.api.installation.identities.list(self.ssh_gateway.api.account)).total


Computer = Callable[..., CommandLine]


@pytest.fixture
def computer(ssh_gateway: SshGatewayWithSshd, package: Npm, tmp_path: Path) -> Computer:
    """`config` is the ssh_config of its user."""

    def set_up(config: str, within: tuple[str, ...] = ()) -> CommandLine:
        known, file, programs = tmp_path / "known_hosts", tmp_path / "config", tmp_path / "bin"
        known.write_text(f"{_HOST},*.{_HOST} {ssh_gateway.gateway.host_key}\n")
        file.write_text(f"{config}\nHost *\n  UserKnownHostsFile {known}\n  BatchMode yes\n")
        programs.mkdir()
        for name in ("ssh", "scp"):
            # ssh reads the configuration in the home of the account, whatever HOME is.
            (programs / name).write_text(f'#!/bin/sh\nexec /usr/bin/{name} -F {file} "$@"\n')
            (programs / name).chmod(0o755)
        (programs / "nc").write_text(NC)
        (programs / "nc").chmod(0o755)
        key = ssh_gateway.api.callers["owner"]["Authorization"].removeprefix("Bearer ")
        environment = {
            "PATH": f"{programs}:{os.environ['PATH']}",
            "FREESTYLE_API_URL": ssh_gateway.api.url,
            "FREESTYLE_API_KEY": key,
        }
        return CommandLine(ssh_gateway, package, environment, within)

    return set_up


NC = """#!/bin/bash
exec 3<>"/dev/tcp/$1/$2"; cat <&3 & exec cat >&3
"""


def _proxied(ssh_gateway: SshGatewayWithSshd) -> str:
    """The ssh_config of the page; `nc` is a program that does what it needs of it."""
    (block,) = run_by(__file__, "docs/ssh.md")
    assert "nc 127.0.0.1 2222" in block.body
    return block.body.replace("2222", str(ssh_gateway.port))


async def test_files_and_folders_are_copied_both_ways(
    ssh_gateway: SshGatewayWithSshd, computer: Computer, tmp_path: Path, open_folder: Path
) -> None:
    freestyle, vm = computer(_proxied(ssh_gateway)), ssh_gateway.api.vm
    folder, home = tmp_path / "folder", open_folder
    home.chmod(0o777)
    (folder / "inner").mkdir(parents=True)
    (folder / "inner/with space").write_bytes(os.urandom(400_000))
    before = await freestyle.identities()
    ended = await freestyle("scp", str(folder), f"{vm}+dev:{home}/copied", "--recursive")
    assert ended.status == 0, ended.stdout + ended.stderr
    copied = home / "copied/inner/with space"
    assert copied.read_bytes() == (folder / "inner/with space").read_bytes()
    assert copied.stat().st_uid == 54321, "the Linux user dev"
    ended = await freestyle("scp", f"{vm}:{copied}", str(tmp_path / "back"))
    assert ended.status == 0, ended.stdout + ended.stderr
    assert (tmp_path / "back").read_bytes() == copied.read_bytes()
    ended = await freestyle("scp", f"{vm}:{home}/missing", str(tmp_path / "nothing"))
    assert ended.status == 1 and "No such file" in ended.stderr
    assert await freestyle.identities() == before, "it deletes what it made"


async def test_a_shell_runs_what_it_reads(ssh_gateway: SshGatewayWithSshd, computer: Computer) -> None:
    freestyle = computer(_proxied(ssh_gateway))
    before = await freestyle.identities()
    ended = await freestyle("ssh", ssh_gateway.api.vm, stdin=b"id -un\necho $((6 * 7))\nexit\n")
    assert ended.status == 0 and "root\n42\n" in ended.stdout, ended.stdout + ended.stderr
    assert "Cleanup complete" in ended.stdout
    assert await freestyle.identities() == before


async def test_the_end_of_a_shell_deletes_the_vm_on_request(
    ssh_gateway: SshGatewayWithSshd, computer: Computer
) -> None:
    machines = ssh_gateway.api.installation.machines
    machine = await machines.create(Properties(account=ssh_gateway.api.account))
    ended = await computer(_proxied(ssh_gateway))("ssh", machine.id, "--delete", stdin=b"echo in\n")
    assert ended.status == 0 and "in\n" in ended.stdout, ended.stdout + ended.stderr
    with pytest.raises(MachineNotFound):
        await machines.info(machine.id)


@contextlib.asynccontextmanager
async def _passed_on(side: Side, url: str) -> AsyncIterator[None]:
    """The API at the same address in another network namespace."""
    port = urlsplit(url).port or 0

    async def copy(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        while data := await reader.read(65536):
            writer.write(data)
        writer.close()

    async def accept(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        far = await asyncio.open_connection("127.0.0.1", port)
        await asyncio.gather(copy(reader, far[1]), copy(far[0], writer))

    async with await asyncio.start_server(accept, sock=await side.listener("127.0.0.1", port)):
        yield


async def test_the_name_may_lead_to_a_gateway_on_port_22(
    ssh_gateway: SshGatewayWithSshd, computer: Computer, tmp_path: Path
) -> None:
    """By /etc/hosts of a computer whose own sshd is elsewhere; no ssh_config is needed."""
    hosts = tmp_path / "hosts"
    hosts.write_text(f"127.0.0.1 localhost\n127.0.0.1 {_HOST}\n")
    with namespace("npm") as side:
        within = ("nsenter", f"--net={side.path}", "unshare", "--mount", "sh", "-ec", _RESOLVE, "sh")
        freestyle = computer("", (*within, str(hosts)))
        listening = await side.listener("127.0.0.1", 22)
        async with (
            ssh_gateway.limited(GatewayLimits(100), listening),
            _passed_on(side, ssh_gateway.api.url),
        ):
            ended = await freestyle("ssh", ssh_gateway.api.vm, stdin=b"echo arrived\n")
            assert ended.status == 0 and "arrived\n" in ended.stdout, ended.stdout + ended.stderr
            (tmp_path / "file").write_text("sent")
            target = ssh_gateway.sshd.folder / "by-name"
            ended = await freestyle("scp", str(tmp_path / "file"), f"{ssh_gateway.api.vm}:{target}")
            assert ended.status == 0, ended.stdout + ended.stderr
            assert target.read_text() == "sent"
