"""The npm package `freestyle` 0.1.63, its library and its command line, as its users run them."""

import asyncio
import errno
import json
import os
import re
import shutil
import socket
import subprocess
from collections.abc import AsyncIterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import httpx2
import pytest
import pytest_asyncio

from stead.api import calls
from stead.api.error_codes import STATUSES
from stead.api.server import running
from stead.builds.errors import BuildBudgetExceeded
from stead.errors import CapacityExceeded, DiskSpaceExceeded, HostError, StartFailed
from stead.host.commands import run
from stead.machines import Machine, State
from stead.machines.templates import Templates
from stead.settings import Settings
from support import npm
from support.api_calls import new_account
from support.documents import Session, commands, run_by
from support.flaky_proxy import FlakyProxy
from support.git_server import serving
from support.github import playing_github
from support.installations import Server
from support.internals import inside
from support.npm import Ended, Npm
from support.run_cli import PROGRAM, environment_of
from support.waiting import until


@dataclass(frozen=True)
class User:
    """A user of the npm package with an account and a VM."""

    npm: Npm
    server: Server
    account: str
    key: str
    vm: str

    def environment(self, **more: str) -> dict[str, str]:
        return {
            "FREESTYLE_API_URL": self.server.url,
            "FREESTYLE_API_KEY": self.key,
            "ACCOUNT": self.account,
            "VM_ID": self.vm,
            **more,
        }

    async def script(self, name: str, limit: float = 300, **more: str) -> str:
        return await self.npm.script(name, self.environment(**more), limit)

    async def cli(self, *arguments: str, **more: str) -> Ended:
        return await self.npm.cli(*arguments, environment=self.environment(**more))

    async def machines(self) -> list[str]:
        """The account's VMs, without the shared one."""
        found = await self.server.installation.machines.list(self.account)
        return [info.id for info in found if info.id != self.vm]

    async def everything(self) -> list[str]:
        """The same, including VMs of running builds."""
        found = await inside(self.server.installation.machines).store.list(account=self.account)
        return [row.id for row in found if row.id != self.vm and row.state != State.DELETED]


@pytest_asyncio.fixture(scope="module")
async def someone(server: Server, package: Npm) -> AsyncIterator[User]:
    account, key = await new_account(server, "npm")
    async with httpx2.AsyncClient(base_url=server.url, headers={"Authorization": f"Bearer {key}"}) as client:
        answer = await client.post("/v1/vms", json={"name": "shared"}, timeout=120)
        vm = answer.json()["id"]
        yield User(package, server, account, key, vm)
        await client.delete(f"/v1/vms/{vm}", timeout=120)


@pytest_asyncio.fixture
async def user(someone: User) -> AsyncIterator[User]:
    """Deletes what a failed test left behind."""
    yield someone
    for machine in await someone.machines():
        await someone.server.installation.machines.delete(machine, forget=True)


# The library


async def test_all_error_codes_are_known_to_the_npm_client(user: User) -> None:
    """For every error code, the package has a class with the same status."""
    await user.script("errors", STATUSES=json.dumps(STATUSES))


async def test_npm_create_variants(user: User) -> None:
    """Creates with names, users, files, services, layered specs and sizes; refused ones leave nothing."""
    await user.script("creation")


async def test_npm_lifecycle(user: User) -> None:
    """List, suspend, wake, kill, resize, boot and delete a VM; invalid operations are refused."""
    await user.script("lifecycle")


async def test_npm_exec(user: User) -> None:
    """Output and exit code of commands; the error of a timeout has the output so far."""
    await user.script("exec")


async def test_npm_files(user: User) -> None:
    """Any name and content; folders, stat, and file watching."""
    await user.script("files")


async def test_npm_systemd_services(user: User) -> None:
    """Create, inspect, stop, start and remove a service."""
    await user.script("systemd")


async def test_npm_terminals(user: User) -> None:
    """Output recorded under a name can be read afterwards."""
    await user.script("terminals")


async def test_npm_pty_sessions(user: User) -> None:
    """The page about PTY sessions, on Node.js 22: users, refusals and a socket that breaks included."""
    await user.npm.script("pty", user.environment(), interpreter=user.npm.node22)


async def test_npm_pty_sessions_survive_suspend_and_fork(user: User) -> None:
    """Suspend evicts and an attach wakes; forks inherit; a stop ends. On Node.js 22."""
    await user.npm.script("pty-lifecycle", user.environment(), interpreter=user.npm.node22)


TERMINALS = """
import assert from "node:assert/strict";
import test from "node:test";
import {{ shared as vm, until }} from "./client.mjs";

const {{ FREESTYLE_API_URL: api, FREESTYLE_API_KEY: key }} = process.env;
const headers = {{ Authorization: `Bearer ${{key}}`, "Content-Type": "application/json" }};

test("the page about terminals", {{ timeout: 240_000 }}, async () => {{
  {package}
  assert.equal(again.sessionId, session.sessionId);

  const body = JSON.stringify({{ kind: "pty", sessionId: session.sessionId }});
  const url = `${{api}}/v1/vms/${{vm.vmId}}/tickets`;
  const {{ ticket, path }} = await (await fetch(url, {{ method: "POST", headers, body }})).json();
  let screen = "", type, resize;
  const term = {{
    cols: 80,
    rows: 24,
    write: (bytes) => (screen += new TextDecoder().decode(bytes)),
    onData: (listener) => (type = listener),
    onResize: (listener) => (resize = listener),
  }};
  {browser}
  await until(() => screen.includes("uname -a"), 60);
  again.detach();
  resize({{ cols: 70, rows: 20 }});
  await until(async () => (await vm.pty.list()).sessions[0].cols === 70, 60);
  type("echo $(stty size); exit\\n");
  await until(() => screen.includes("20 70"), 60);
  await until(() => socket.readyState === WebSocket.CLOSED, 60);
}});
"""


async def test_programs_of_the_page_about_terminals(user: User) -> None:
    """That of the package, and that of a web page with a terminal of xterm.js's interface, on Node.js 22."""
    package, browser = (block.body for block in run_by(__file__, "docs/terminals.md"))
    here = user.server.url.replace("http", "ws", 1)
    browser = browser.replace("wss://stead.example.com", here)
    program = TERMINALS.format(package=package, browser=browser)
    (user.npm.folder / "page.mjs").write_text(program)
    await user.npm.script("page", user.environment(), interpreter=user.npm.node22)


async def test_npm_package_is_installed_and_run_as_in_the_readme(user: User, tmp_path: Path) -> None:
    (block,) = run_by(__file__, "README.md")
    variables = {"STEAD_API_URL": user.server.url, "STEAD_API_KEY": user.key}
    for name in ("npm", "npx"):
        (tmp_path / name).symlink_to(npm.node().parents[1] / f"lib/node_modules/npm/bin/{name}-cli.js")
    programs = f"{tmp_path}:{npm.node().parent}:{os.environ['PATH']}"
    shell = await Session.open(tmp_path, {**os.environ, "PATH": programs, **variables})
    try:
        for command in commands(block.body):
            status, printed = await shell.run(command.line)
            assert status == 0, f"{command.line}\n{printed}"
    finally:
        await shell.close()
    assert "Linux" in printed
    assert await user.machines() == []


async def test_claude_agent_sdk_drives_a_cli_in_a_vm(user: User) -> None:
    """The bridge of the guide, over a terminal: long lines, UTF-8, a tool that needs permission."""
    await user.script("claude")


@pytest.mark.slow
async def test_web_terminal_in_a_browser(user: User, settings: Settings, pictures: Path) -> None:
    """xterm.js in Chromium, through a proxy and with tickets; `make trial-browser` installs Chromium."""
    chromium = shutil.which("chromium")
    if chromium is None:
        pytest.skip("needs chromium: run `make trial-browser`")
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    other = settings.replace(listen="127.0.0.1:0", origins=(f"http://127.0.0.1:{port}",))
    async with running(other, replace(user.server.installation, settings=other)) as url:
        await user.script(
            "web-terminal",
            FREESTYLE_API_URL=url,
            CHROMIUM=chromium,
            PICTURES=str(pictures),
            PORT=str(port),
        )
    assert {path.name for path in pictures.iterdir()} >= {"proxy.png", "replay.png", "editor.png"}


async def test_pages_of_a_vm_over_https(user: User) -> None:
    """Node's fetch and a WebSocket client at a preview name, with a certificate of the installation's CA."""
    root = user.server.installation.settings.data / "edge" / "root.crt"
    await user.script("preview", NODE_EXTRA_CA_CERTS=str(root), HTTPS_PORT=str(user.server.https_port))


@pytest.mark.slow
async def test_page_of_a_vm_in_a_browser(user: User, tmp_path: Path, pictures: Path) -> None:
    """Chromium, which trusts the installation's CA as a user makes it do so: with `certutil`."""
    chromium = shutil.which("chromium")
    if chromium is None or shutil.which("certutil") is None:
        pytest.skip("needs chromium and certutil: run `make trial-browser`")
    home, settings = tmp_path / "home", user.server.installation.settings
    store = home / ".pki" / "nssdb"
    store.mkdir(parents=True)
    await run("certutil", "-d", f"sql:{store}", "-N", "--empty-password")  # as the browser does it
    (block,) = run_by(__file__, "docs/public-installation.md")
    path = f"{PROGRAM.parent}:{os.environ['PATH']}"
    environment = environment_of(settings, PATH=path, HOME=str(home))
    for command in commands(block.body):
        await run("sh", "-c", command.line, env=environment, cwd=home)
    await user.script(
        "preview-browser", CHROMIUM=chromium, PICTURES=str(pictures), TRUSTING_HOME=str(tmp_path / "home")
    )
    assert {path.name for path in pictures.iterdir()} >= {"preview.png", "preview-waiting.png"}


@pytest.fixture
def pictures(tmp_path: Path) -> Path:
    """Where screenshots are saved; `STEAD_PICTURES` names a folder that stays."""
    folder = Path(os.environ.get("STEAD_PICTURES", tmp_path))
    folder.mkdir(parents=True, exist_ok=True)
    return folder


async def test_npm_linux_users(user: User) -> None:
    """Commands and files run as the Linux user, with its permissions."""
    await user.script("users")


async def test_npm_snapshots_and_forks(user: User) -> None:
    """With memory; snapshots are listed, renamed, used and deleted."""
    await user.script("snapshots")


async def test_npm_builds(user: User) -> None:
    """One build per spec, with a record, also of a failed one."""
    await user.script("builds")


async def test_npm_background_requests(user: User) -> None:
    """A client with a logger gets 202, polls the log, and gets the final answer."""
    await user.script("background")


async def test_npm_identities(user: User) -> None:
    """All sixteen identity calls, and whoami."""
    managed = await user.server.installation.identities.create(user.account, managed=True)
    await user.script("identities", MANAGED=managed.id)


async def test_npm_browser_sessions(user: User) -> None:
    """A token reaches the granted VM as the allowed Linux users, and nothing else."""
    await user.script("sessions")


async def test_npm_logs(user: User) -> None:
    """Logs of VMs and services: by text, by time, in pages, and as a stream."""
    await user.script("logs")


async def test_npm_samples_of_the_vm_docs(user: User) -> None:
    """Every sample of the public guides about VMs."""
    await user.script("docs")


async def test_repositories(user: User, tmp_path: Path) -> None:
    """Made, filled, listed, read, written, paged, searched, packed, granted, kept in step, deleted."""
    for name in ("elsewhere", "github"):
        (tmp_path / name).mkdir()
    with serving(tmp_path / "elsewhere") as elsewhere, playing_github(tmp_path / "github") as github:
        origin = elsewhere.init("origin.git")
        for number, message in enumerate(("one", "two"), 1):
            _add_commit(origin, message, f"{number}\n".encode())
        github.create("octo/web")
        await user.server.installation.links.apps.connect(user.account, github.app)
        await user.script("git", ORIGIN=f"{elsewhere.url}/origin.git", GITHUB=github.url("octo/web"))


def _add_commit(origin: Path, message: str, content: bytes) -> None:
    """One that writes `folder/file`."""
    lines = b"commit refs/heads/main\ncommitter C <c@example.org> now\n"
    lines += b"data %d\n%s\nM 100644 inline folder/file\n" % (len(message), message.encode())
    lines += b"data %d\n%s\n" % (len(content), content)
    if message != "one":
        lines = lines.replace(b"M 100644", b"from refs/heads/main^0\nM 100644")
    command = ["git", "fast-import", "--quiet", "--date-format=now"]
    subprocess.run(command, input=lines, cwd=origin, check=True, timeout=60)


async def _clone_by_the_command_line(user: User, repo: str, place: Path) -> None:
    """It has another host's name in it, which git replaces as its user was told to set it up."""
    names = {
        "GIT_CONFIG_COUNT": "1",
        "GIT_CONFIG_KEY_0": f"url.{user.server.url}/x-access-token:stid_.insteadOf",
        "GIT_CONFIG_VALUE_0": "https://x-access-token:stid_",
    }
    cloned = await user.cli("git", "clone", repo, str(place), **names)
    assert cloned.status == 0, cloned
    config = (place / ".git" / "config").read_text()
    found = await user.server.installation.identities.list(user.account)
    assert any(each.id in config for each in found.items), config


async def test_repositories_by_the_command_line(user: User, tmp_path: Path) -> None:
    created = await user.cli("git", "create", "--name", "by-cli", "--public", "--default-branch", "trunk")
    assert created.status == 0, created
    repo = re.search(r"[0-9a-f]{8}-[0-9a-f-]{27}", created.stdout)
    assert repo is not None, created.stdout
    listed = await user.cli("git", "list", "--limit", "20")
    assert repo[0] in listed.stdout and "trunk" in listed.stdout
    as_json = json.loads((await user.cli("git", "list", "--json")).stdout)
    assert repo[0] in json.dumps(as_json)
    await _clone_by_the_command_line(user, repo[0], tmp_path / "clone")
    deleted = await user.cli("git", "delete", repo[0])
    assert deleted.status == 0, deleted
    assert repo[0] not in (await user.cli("git", "list", "--json")).stdout


async def test_npm_unimplemented_calls_are_readable_errors(user: User) -> None:
    """DNS records, serverless, cron: refused at once and in known classes."""
    await user.script("absent")


async def test_npm_vpcs(user: User) -> None:
    """Private networks: created with a range, refused with the reason."""
    await user.script("networks")


# What a client must not try again


async def test_npm_does_not_retry_a_refused_create(user: User) -> None:
    """After a wrong key or an invalid request, the package gives up at the first answer."""
    await user.script("refusals")
    assert await user.machines() == []


async def test_npm_sees_a_busy_server(user: User, settings: Settings) -> None:
    """Overload is an error with a known code, so the package does not retry without end."""
    busy = settings.replace(listen="127.0.0.1:0", max_calls=1)
    installation = replace(user.server.installation, settings=busy)
    headers = {"Authorization": f"Bearer {user.key}"}
    async with (
        running(busy, installation) as url,
        httpx2.AsyncClient(base_url=url, headers=headers, timeout=60) as client,
    ):
        body = {"command": "until test -e /tmp/enough; do sleep 0.1; done"}
        long = asyncio.create_task(client.post(f"/v1/vms/{user.vm}/exec-await", json=body))

        async def taken() -> bool:
            return (await client.get("/v1/vms")).status_code == 503

        await until(taken, 60)
        await user.script("refused", CODE="SERVICE_UNAVAILABLE", FREESTYLE_API_URL=url)
        machine = Machine(user.server.installation.machines, user.vm)
        await machine.exec("touch /tmp/enough")
        assert (await long).json()["statusCode"] == 0
    await machine.exec("rm /tmp/enough")


@pytest.mark.parametrize(
    ("failure", "code"),
    [
        (RuntimeError("the secret"), "INTERNAL"),
        (HostError("qemu is not there"), "INTERNAL_ERROR"),
        (OSError(errno.ENOSPC, "no space"), "NO_LOCAL_STORAGE_CAPACITY"),
        (DiskSpaceExceeded("no disk space"), "NO_LOCAL_STORAGE_CAPACITY"),
        (CapacityExceeded("there is not enough memory"), "SERVICE_UNAVAILABLE"),
        (StartFailed("qemu has ended"), "VM_EXIT_DURING_START"),
        (BuildBudgetExceeded("services", 1800), "BUILD_BUDGET_EXCEEDED"),
    ],
    ids=lambda value: value if isinstance(value, str) else type(value).__name__,
)
async def test_npm_sees_server_errors(
    user: User, monkeypatch: pytest.MonkeyPatch, failure: Exception, code: str
) -> None:
    """Every failure has a code; details of unexpected exceptions are not sent to the client."""

    def broken(*_: object, **__: object) -> None:
        raise failure

    monkeypatch.setattr(Templates, "held", broken)
    output = await user.script("refused", CODE=code)
    assert "secret" not in output


@pytest.mark.parametrize(
    ("limits", "code"),
    [
        ({"vms": 0}, "TOTAL_VM_LIMIT_EXCEEDED"),
        ({"running": 0}, "VM_LIMIT_EXCEEDED"),
        ({"vcpus": 1}, "VCPU_OVER_PLAN_LIMIT"),
        ({"memory_gib": 0}, "MEM_OVER_PLAN_LIMIT"),
        ({"disk_gib": 10}, "ROOTFS_OVER_PLAN_LIMIT"),
        ({"total_memory_gib": 0}, "MEMORY_STORAGE_QUOTA_EXCEEDED"),
        ({"total_disk_gib": 10}, "ROOTFS_STORAGE_QUOTA_EXCEEDED"),
    ],
)
async def test_npm_sees_account_limits(user: User, limits: dict[str, int], code: str) -> None:
    """Each account limit has its code, for VMs and for builds."""
    accounts = user.server.installation.accounts
    account = (await accounts.create(f"limited-{code}", limits)).id
    _, key = await accounts.create_key(account)
    await user.script("refused", CODE=code, FREESTYLE_API_KEY=key)


async def test_npm_sees_the_snapshot_limit(user: User) -> None:
    """An account at its snapshot limit."""
    accounts = user.server.installation.accounts
    await accounts.set_limits(user.account, {"snapshots": 0})
    try:
        await user.script("kept")
    finally:
        await accounts.set_limits(user.account, {}, unset=["snapshots"])


@pytest.mark.parametrize("slow", ["", "1"], ids=["made", "built"])
async def test_npm_connection_lost_during_create_leaves_one_vm(user: User, slow: str) -> None:
    """The connection is lost during a create or build; the package retries; one VM exists."""
    async with FlakyProxy(user.server.url) as cutter:
        environment = user.environment(FREESTYLE_API_URL=cutter.url, SLOW=slow)
        task = asyncio.create_task(
            npm.run([str(npm.node()), "create.mjs"], user.npm.folder, environment, 120)
        )
        await until(user.everything, 60)
        cutter.cut()
        ended = await task
        assert cutter.connections == 2
    assert ended.status == 0, ended.stderr
    assert "retrying" in ended.stderr

    async def settled() -> bool:
        return await user.everything() == [ended.stdout.strip()]

    await until(settled, 60)


# Patience


@pytest.fixture
def soon(monkeypatch: pytest.MonkeyPatch) -> None:
    """The server sends 102 Processing after half a second, and every half second."""
    monkeypatch.setattr(calls, "_PROCESSING_AFTER", 0.5)
    monkeypatch.setattr(calls, "_PROCESSING_EVERY", 0.5)


async def test_npm_waits_while_102_processing_arrives(user: User, soon: None) -> None:
    """Node's fetch gives up without headers; each `102 Processing` resets its timeout."""
    await user.script("waiting", SLEEP="7000", HEADERS_TIMEOUT="3000")


async def test_npm_gives_up_without_102_processing(user: User) -> None:
    """Control: the same call without `102 Processing` fails."""
    await user.script("waiting", SLEEP="3000", HEADERS_TIMEOUT="1000", GIVES_UP="1")


@pytest.mark.slow
async def test_npm_exec_of_more_than_five_minutes(user: User) -> None:
    """Longer than Node's own timeout, with the default settings."""
    await user.script("waiting", SLEEP="330000", limit=400)


# The command line


async def test_npm_cli_creates_runs_and_deletes(user: User) -> None:
    """`vm create --exec ... --delete`: one VM, nothing left."""
    ended = await user.cli("vm", "create", "--exec", "uname -a", "--delete")
    assert ended.status == 0, ended.stderr
    assert ended.stderr == ""
    assert re.search(r"VM ID: [a-z0-9]{20}\n", ended.stdout)
    assert re.search(r"Exec output:\nLinux .*GNU/Linux\n", ended.stdout)
    assert "Exec exit code: 0" in ended.stdout
    assert "✓ VM deleted" in ended.stdout
    assert await user.machines() == []


async def test_npm_cli_lists_execs_and_deletes_a_vm(user: User) -> None:
    """The commands for an existing VM."""
    created = await user.cli("vm", "create", "--name", "discriminator")
    assert created.status == 0, created.stderr
    match = re.search(r"VM ID: ([a-z0-9]{20})\n", created.stdout)
    assert match is not None, created.stdout
    vm = match[1]

    listed = await user.cli("vm", "list")
    assert re.search(rf"^{vm}  running  .*20\d\d", listed.stdout, re.MULTILINE), listed.stdout
    rows = json.loads((await user.cli("vm", "list", "--json")).stdout)
    assert {row["id"] for row in rows["vms"]} == {vm, user.vm}

    ran = await user.cli("vm", "exec", vm, "echo out; echo err >&2; exit 4")
    assert "Output:\nout\n" in ran.stdout
    assert "Exit code: 4" in ran.stdout
    assert "Errors:\nerr\n" in ran.stderr
    as_json = await user.cli("vm", "exec", vm, "pwd", "--json")
    assert _json_in(as_json.stdout)["stdout"] == "/\n"

    deleted = await user.cli("vm", "delete", vm)
    assert "VM deleted successfully" in deleted.stdout
    again = await user.cli("vm", "delete", vm)
    assert again.status == 1
    assert again.stderr.startswith("Error: VM_NOT_FOUND: ")


def _json_in(text: str) -> Any:
    return json.loads(text[text.index("{") :])


async def test_npm_cli_snapshots(user: User) -> None:
    """A snapshot is listed, shown, renamed, booted and deleted."""
    taken = await user.server.installation.machines.snapshot(user.vm, name="from here")
    listed = await user.cli("vm", "snapshot", "list")
    assert re.search(rf"^{taken.id}  from here +{user.vm}  ready ", listed.stdout, re.MULTILINE), (
        listed.stdout
    )
    rows = json.loads((await user.cli("vm", "snapshot", "list", "--json")).stdout)
    assert taken.id in {row["snapshotId"] for row in rows["snapshots"]}

    renamed = await user.cli("vm", "snapshot", "rename", taken.id, "--name", "renamed")
    assert "Snapshot renamed" in renamed.stdout
    shown = json.loads((await user.cli("vm", "snapshot", "get", taken.id)).stdout)
    assert shown["name"] == "renamed"

    booted = await user.cli("vm", "snapshot", "boot", taken.id)
    assert re.search(r"VM [a-z0-9]{20} created", booted.stdout), booted
    used = await user.cli("vm", "create", "--snapshot", taken.id, "--exec", "hostname", "--delete")
    assert "Exec exit code: 0" in used.stdout, used

    assert "Snapshot deleted" in (await user.cli("vm", "snapshot", "delete", taken.id)).stdout
    gone = await user.cli("vm", "create", "--snapshot", taken.id)
    assert gone.status == 1
    assert gone.stderr.startswith("Error: SOURCE_SNAPSHOT_DELETED: ")
    missing = await user.cli("vm", "snapshot", "get", taken.id)
    assert missing.status == 1
    assert "404" in missing.stderr


async def test_npm_cli_installs_packages_with_progress(user: User) -> None:
    """`vm create --apt`, and the record of the build that it took."""
    # It is in the image: what is installed is not fetched, and the network is not this test's matter.
    created = await user.cli("vm", "create", "--apt", "curl", "git", "--exec", "curl --version")
    assert created.status == 0, created.stderr
    match = re.search(r"VM ID: ([a-z0-9]{20})\n", created.stdout)
    assert match is not None, created.stdout
    vm = match[1]
    assert "Exec output:\ncurl " in created.stdout

    record = json.loads((await user.cli("vm", "build", "get", vm)).stdout)
    assert record["state"] == "succeeded"
    assert "packages" in record["plannedPhases"]
    waited = json.loads((await user.cli("vm", "build", "wait", vm)).stdout)
    assert waited == record
    phases = json.loads((await user.cli("vm", "build", "phases", vm, "--json")).stdout)
    assert [phase["name"] for phase in phases] == record["plannedPhases"]
    table = (await user.cli("vm", "build", "phases", vm)).stdout
    assert re.search(r"^bph-[a-z0-9]{20}  packages ", table, re.MULTILINE), table

    refused = await user.cli("vm", "create", "--apt", "no package")
    assert refused.status == 1
    assert refused.stderr.startswith("Error: VALIDATION_ERROR: "), refused.stderr


async def test_npm_cli_whoami_and_logs(user: User) -> None:
    """`whoami` and `logs`."""
    assert (await user.cli("whoami")).stdout == f"Account ID: {user.account}\n"
    logs = await user.cli("logs", "--vm", user.vm, "--search", "created")
    assert logs.status == 0, logs.stderr
    assert re.search(
        rf"^\d{{4}}-\S+Z \[vm:{user.vm}.*\] VM {user.vm} created.*$", logs.stdout, re.MULTILINE
    ), logs.stdout
    entries = json.loads(
        (await user.cli("logs", "--vm", user.vm, "--since", "1h", "--limit", "5", "--json")).stdout
    )
    assert 0 < len(entries["logs"]) <= 5


@pytest.mark.parametrize(
    "command",
    [["vm", "create"], ["vm", "list"], ["vm", "exec", "x", "pwd"], ["whoami"], ["logs", "--vm", "x"]],
    ids=lambda command: " ".join(command),
)
async def test_npm_cli_with_a_wrong_key_fails(user: User, command: list[str]) -> None:
    """One line on standard error, exit code 1, no retry."""
    ended = await user.npm.cli(
        *command, environment=user.environment(FREESTYLE_API_KEY="stead_nonsense"), limit=20
    )
    assert ended.status == 1
    assert re.match(r"Error: (UNAUTHORIZED_ERROR: |.*401)", ended.stderr), ended.stderr
    assert "retrying" not in ended.stderr


async def test_npm_cli_reports_unimplemented_commands(user: User) -> None:
    """Commands that need unimplemented calls fail at once."""
    ended = await user.cli("cron", "list")
    assert ended.status == 1
    assert ended.stderr.startswith("Error: NOT_FOUND: ")
    assert "retrying" not in ended.stderr.lower()
