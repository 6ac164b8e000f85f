"""Backup, a rehearsal of the restore, and uninstalling, with the commands of docs/operate.md."""

import re
import socket
from pathlib import Path

import pytest

from stead.host.image import BaseImage
from stead.settings import Settings
from support.documents import Session, commands, run_by
from support.installations import leftovers, other_settings
from support.run_cli import PROGRAM
from support.serve_process import environment

pytestmark = [pytest.mark.slow, pytest.mark.timeout(1800)]

SYSTEMCTL = """#!/bin/bash
# In the place of systemd: one server, without its VMs, as KillMode=process does it.
set -eu
case "$1" in
  start) stead serve --json > "$HOME/said" 2> "$HOME/log" & echo $! > "$HOME/pid"
    timeout 300 bash -c 'until [ -s "$HOME/said" ]; do sleep 0.1; done' ;;
  stop|disable) kill "$(cat "$HOME/pid")"
    timeout 300 bash -c 'while kill -0 $(cat "$HOME/pid") 2> /dev/null; do sleep 0.1; done' ;;
  *) exit 1 ;;
esac
"""


def free_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as free:
        return int(free.getsockname()[1])


class Administrator:
    """A shell with the paths of the page below one folder."""

    def __init__(self, shell: Session, folder: Path, ports: dict[str, str]) -> None:
        self._shell = shell
        self._folder = folder
        self._ports = ports

    async def type(self, line: str) -> str:
        for path in ("/var/lib", "/backup", "/srv", "/etc", "/usr/local", "/run/stead", "/opt"):
            line = re.sub(rf"(?<=[ =]){path}(?=[ /])", f"{self._folder}{path}", line)
        for shown, port in self._ports.items():
            line = line.replace(f":{shown}", f":{port}")
        status, printed = await self._shell.run(line)
        assert status == 0, f"{line}\n{printed}\n{self._folder}"
        return printed


async def test_backup_is_restored_in_a_rehearsal_and_all_is_removed(
    settings: Settings, image: BaseImage
) -> None:
    blocks = [commands(block.body) for block in run_by(__file__, "docs/operate.md")]
    suspend, sizes, backup, unpack, compare, use, clean_up, uninstall = blocks
    with other_settings(settings) as parent:
        parent.data.chmod(0o711)
        data, ports = parent.data / "var/lib/stead", {"8600": str(free_port()), "8601": str(free_port())}
        for folder in (data, parent.data / "backup", parent.data / "srv", parent.data / "bin"):
            folder.mkdir(parents=True)
        (parent.data / "bin/systemctl").write_text(SYSTEMCTL)
        (parent.data / "bin/systemctl").chmod(0o755)
        variables = environment(parent.replace(data=data)) | {
            "HOME": str(parent.data),
            "STEAD_LISTEN": f"127.0.0.1:{ports['8600']}",
            "STEAD_API_URL": f"http://127.0.0.1:{ports['8600']}",
        }
        variables["PATH"] = f"{parent.data}/bin:{PROGRAM.parent}:{variables['PATH']}"
        shell = await Session.open(parent.data, variables)
        root = Administrator(shell, parent.data, ports)
        try:
            await root.type("systemctl start stead")
            await root.type('export STEAD_API_KEY=$(cat "$(jq -r .keyFile said)")')
            await root.type("stead vm create --name worker --exec 'echo kept > /dev/shm/note'")
            await root.type("stead vm snapshot worker --name ready")
            await root.type("stead git create --name site && stead git clone site first")
            author = "-c user.name=Ann -c user.email=ann@example.com"
            await root.type(f"cd first && echo hello > page && git add . && git {author} commit -qm one")
            await root.type("git push -q && cd ..")
            for command in suspend:
                await root.type(command.line)
            await root.type("systemctl start stead")
            assert await root.type("stead vm exec worker cat /dev/shm/note") == "kept\n"
            for command in sizes:
                assert "total" in await root.type(command.line)
            for command in backup:
                await root.type(command.line)

            *unpacking, serve = unpack
            for command in unpacking:
                await root.type(command.line)
            await root.type(f"({serve.line} > copy.said 2> copy.log & echo $! > copy.pid)")
            await root.type("timeout 300 bash -c 'until grep -q listening copy.said; do sleep 0.1; done'")
            for command in compare:
                here = await root.type(command.line.replace(":8601", ":8600"))
                there = await root.type(command.line)
                names = re.findall(r"\b(worker|ready|site)\b", here)
                assert names and re.findall(r"\b(worker|ready|site)\b", there) == names, there
                assert "lost" not in there
            uptime, get, _, clone = [await root.type(command.line) for command in use]
            assert "load average" in uptime and "reason" not in get and clone
            copied = await root.type("stead --url http://127.0.0.1:8601 vm exec worker cat /dev/shm/note")
            assert copied == "kept\n", "its memory was in the backup"
            assert (parent.data / "site/page").read_text() == "hello\n"
            remove, delete = clean_up
            await root.type(remove.line)
            await root.type(
                "kill $(cat copy.pid); while kill -0 $(cat copy.pid) 2> /dev/null; do sleep 0.1; done"
            )
            copy = parent.replace(data=parent.data / "srv/rehearsal/stead")
            assert [each for each in leftovers(copy) if not each.startswith(("layers", "checkpoints"))] == []
            await root.type(delete.line)

            assert await root.type("stead vm exec worker cat /dev/shm/note") == "kept\n"
            for command in uninstall:
                await root.type(command.line)
            assert not data.exists()
            assert leftovers(parent.replace(data=data)) == []
        finally:
            await shell.close()
