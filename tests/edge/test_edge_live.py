"""The edge of a whole installation: mapped domains of a real VM, the API over HTTPS, `stead serve`."""

import asyncio
import os
import signal
from dataclasses import dataclass
from pathlib import Path

import pytest

from stead.edge.edge import edge_folder
from stead.host.authority import Authority
from stead.host.commands import run
from stead.processes import of_user
from stead.settings import Settings
from support.documents import commands, run_by
from support.edge_with_namespaces import Answer
from support.installations import Server, other_settings
from support.run_cli import PROGRAM
from support.serve_process import end, environment, start
from support.waiting import until

_PORT = 8000


@dataclass(frozen=True)
class EdgeClient:
    root: Path
    port: int

    async def curl(self, url: str, *options: str) -> Answer:
        done = await asyncio.create_subprocess_exec(
            *("curl", "-sS", "-i", "--max-time", "120", "--cacert", str(self.root)),
            *("--connect-to", f"::127.0.0.1:{self.port}", *options, url),
            stdout=asyncio.subprocess.PIPE,
            stderr=asyncio.subprocess.PIPE,
        )
        stdout, stderr = await done.communicate()
        return Answer.parse(stdout, done.returncode or 0, stderr.decode())


@pytest.fixture(scope="module")
def edge_client(server: Server) -> EdgeClient:
    """The edge in front of the installation of this run."""
    return EdgeClient(server.installation.settings.data / "edge" / "root.crt", server.https_port)


async def test_the_api_answers_over_https_and_keeps_its_metrics_to_itself(
    edge_client: EdgeClient, server: Server
) -> None:
    key = ("-H", f"Authorization: Bearer {server.key}")
    answer = await edge_client.curl("https://api.freestyle.sh/v1/vms", *key)
    assert (answer.status, "vms" in answer.json()) == (200, True)
    assert (await edge_client.curl("https://stead.localhost/v1/vms")).status == 401
    assert (await edge_client.curl("https://stead.localhost/metrics")).status == 404


STORE = """
set -eu
for folder in /usr/local/share/ca-certificates /etc/ssl/certs; do
  cp -a "$folder" "$HOME/$(basename "$folder")"
  mount --bind "$HOME/$(basename "$folder")" "$folder"
done
"""


async def test_trust_of_the_page_makes_this_host_accept_the_certificates(
    server: Server, settings: Settings, tmp_path: Path
) -> None:
    """In a mount namespace with copies of the host's trust store."""
    (block,) = run_by(__file__, "docs/public-installation.md")
    trust, curl = (command.line for command in commands(block.body))
    (tmp_path / ".curlrc").write_text(f"connect-to = stead.localhost::127.0.0.1:{server.https_port}\n")
    path = f"{PROGRAM.parent}:{os.environ['PATH']}"
    variables = {
        "PATH": path,
        "HOME": str(tmp_path),
        "STEAD_DATA": str(settings.data),
        "STEAD_CA": str(settings.ca or ""),
    }
    refuses = f"if {curl}; then echo 'the certificate is accepted'; exit 9; fi"
    script = "\n".join((STORE, refuses, trust, curl))
    done = await run("unshare", "--mount", "bash", "-c", script, env=variables)
    assert b"this host trusts" in done.stdout and done.stdout.count(b'"status":"ok"') == 1


async def test_a_server_has_https_and_leaves_no_caddy_when_it_is_killed(settings: Settings) -> None:
    with other_settings(settings) as other:
        process, said = await start(other)
        printed = await run(PROGRAM, "trust", "--print", env=environment(other))
        root = other.data / "trusted.pem"
        root.write_bytes(printed.stdout)
        assert printed.stdout == Authority.open(other).certificate
        url = f"{said['httpsUrl']}/healthz"
        found = await run("curl", "-sS", "--cacert", root, "--connect-to", "stead.localhost::127.0.0.1:", url)
        assert b'"status":"ok"' in found.stdout
        (caddy,) = of_user(other.edge_uid)
        await end(process, signal.SIGKILL)
        await until(lambda: not caddy.alive(), 60)
        process, _ = await start(other)
        assert len(list(of_user(other.edge_uid))) == 1
        assert await end(process) == 0
        assert not list(of_user(other.edge_uid))
        assert not edge_folder(other).exists()
