"""Secrets stay where they belong: not in a copy of the database, the journal, the log or a process list."""

import asyncio
import contextlib
import json
import re
import socket
import sqlite3
import stat
import subprocess
from collections.abc import AsyncIterator
from pathlib import Path

import httpx2
import pytest
import pytest_asyncio

from stead.host.vm import running_machines
from stead.installation import open_machines
from stead.machines import Machines
from stead.machines.states import State
from stead.settings import Settings
from stead.store.database import seal_secrets
from stead.store.sealing import SealingError, SealingKeys
from support.databases import migrate
from support.documents import commands, run_by
from support.domain_calls import calling
from support.fake_api import FakeApi, fake_api
from support.installations import delete_all, other_settings
from support.run_cli import PROGRAM, Result, Shell, environment_of, stead
from support.scripted_server import Reply, scripted

SECRET = re.compile(r"stead_[A-Za-z0-9_-]{43}")


# The first API key


async def test_first_key_is_in_a_file_of_root_and_not_in_the_journal(
    settings: Settings, image: object
) -> None:
    pipe = asyncio.subprocess.PIPE
    with other_settings(settings) as other:
        variables = environment_of(other, STEAD_LISTEN="127.0.0.1:0", STEAD_POOL="0")
        process = await asyncio.create_subprocess_exec(
            PROGRAM, "serve", "--log-json", stdout=pipe, stderr=pipe, env=variables
        )
        try:
            assert process.stdout is not None and process.stderr is not None
            said, logged = "", ""
            async with asyncio.timeout(300):
                while "Try it" not in said:
                    said += (await process.stdout.readline()).decode()
            url = re.findall(r"export STEAD_API_URL=(\S+)", said)[0]
            async with httpx2.AsyncClient(base_url=url) as http:
                foreign = await http.get("/x-access-token:ghp_0123456789abcdef@github.com/owner/repo.git")
                assert foreign.status_code in {401, 404}
            async with asyncio.timeout(300):
                while '"prepared"' not in logged or '"event": "call"' not in logged:
                    logged += (await process.stderr.readline()).decode()
            path = other.data / "first-api-key"
            assert f"  export STEAD_API_KEY=$(cat {path})\n" in said
            secret = path.read_text().strip()
            assert SECRET.fullmatch(secret)
            assert stat.S_IMODE(path.stat().st_mode) == 0o600
            assert not SECRET.search(said + logged)
            assert "ghp_0123456789abcdef" not in logged and "/x-access-token:***@github.com" in logged
            warned = [json.loads(line) for line in logged.splitlines() if "does not promise" in line]
            assert len(warned) == logged.count("kvm not used"), "once, and only in emulation"
            await Shell(url, secret).run("whoami")
            (key,) = json.loads(stead("keys", "list", "--json", settings=other).stdout)["keys"]
            assert stead("keys", "revoke", key["id"], settings=other).returncode == 0
            assert not path.exists()
        finally:
            process.terminate()
            await process.communicate()


# A copy of the database


@pytest.fixture
def without_server(root: None, tmp_path: Path) -> Settings:
    """Settings of an installation without a server."""
    return Settings(data=tmp_path / "data")


def secrets(settings: Settings, *arguments: str, key: Path) -> Result:
    return stead("secrets", *arguments, settings=settings, STEAD_SEALING_KEY=str(key))


def sealed(settings: Settings) -> list[str]:
    with sqlite3.connect(settings.data / "stead.db") as connection:
        rows = connection.execute("SELECT private_key, webhook_secret FROM github_apps").fetchall()
    connection.close()
    return [value for row in rows for value in row]


def test_keys_of_secrets_are_rotated_and_forgotten(without_server: Settings, tmp_path: Path) -> None:
    key = tmp_path / "etc" / "key"
    environment = {"STEAD_SEALING_KEY": str(key)}
    assert stead("keys", "create", settings=without_server, **environment).returncode == 0
    assert stat.S_IMODE(key.stat().st_mode) == 0o600
    with sqlite3.connect(without_server.data / "stead.db") as connection:
        connection.execute(
            "INSERT INTO github_apps SELECT id, '7', 'the PEM', 'the hook', 'u', 'a', 1 FROM accounts"
        )
    connection.close()
    # As after an upgrade: the next process with the lock seals what is in clear.
    shown = stead("github", "show", "--json", settings=without_server, **environment)
    assert json.loads(shown.stdout)["app_id"] == "7", shown.stderr
    before = sealed(without_server)
    assert all(value.startswith("sealed1.") for value in before) and len(before) == 2
    copied = b"".join(path.read_bytes() for path in without_server.data.iterdir() if path.is_file())
    assert b"the PEM" not in copied and b"the hook" not in copied

    rotated = secrets(without_server, "rotate", "--json", key=key)
    assert json.loads(rotated.stdout)["resealed"] == 2, rotated.stderr
    after = sealed(without_server)
    assert {value.split(".")[1] for value in after} == {json.loads(rotated.stdout)["key"]}
    assert len(key.read_text().split()) == 2

    kept = secrets(without_server, "forget", key=key)
    assert "nothing to forget" in kept.stdout
    key.unlink()
    shown = stead("github", "show", "--json", settings=without_server, **environment)
    assert json.loads(shown.stdout)["app_id"] == "7", "what needs no secret works"
    assert not key.exists()
    forgotten = secrets(without_server, "forget", key=key)
    assert "forgot github_apps.private_key" in forgotten.stdout, forgotten.stderr
    assert sealed(without_server) == []
    assert "stead github connect" in forgotten.stderr


def test_no_file_has_a_secret_in_clear_after_an_upgrade(without_server: Settings, tmp_path: Path) -> None:
    """The copy from before the migration is sealed too, and has a way back to the earlier release."""
    key, data = tmp_path / "etc" / "key", without_server.data
    data.mkdir()
    migrate(data / "stead.db", "0023")
    with contextlib.closing(sqlite3.connect(data / "stead.db")) as connection:
        connection.execute("PRAGMA journal_mode=WAL")
        connection.execute("INSERT INTO installation VALUES ('0123456789abcdef')")
        connection.execute("INSERT INTO accounts (id, name, created_at) VALUES ('a', 'default', 1)")
        connection.execute(
            "INSERT INTO github_apps SELECT id, '7', 'the PEM', 'the hook', 'u', 'a', 1 FROM accounts"
        )
        connection.commit()
        # In pages that are free now.
        connection.execute(
            "CREATE TABLE freed AS SELECT 'the PEM' || hex(randomblob(100)) FROM alembic_version"
        )
        connection.execute("DROP TABLE freed")
        connection.commit()
    (data / ".stead.db.0022.new").write_bytes(b"the PEM of a start that was killed")
    assert "the PEM" in contents(data)
    shown = stead("github", "show", "--json", settings=without_server, STEAD_SEALING_KEY=str(key))
    assert json.loads(shown.stdout)["app_id"] == "7", shown.stderr
    copy = data / "stead.db.0023"
    assert copy.exists()
    assert "the PEM" not in contents(data) and "the hook" not in contents(data)

    (block,) = run_by(__file__, "docs/operate.md")
    unseal, *move = (each.line.replace("/var/lib/stead", str(data)) for each in commands(block.body))
    words = unseal.split()
    assert words == ["stead", "secrets", "unseal", str(copy)]
    unsealed = secrets(without_server, *words[2:], key=key)
    assert unsealed.stdout == f"2 secrets are in clear in {copy}\n", unsealed.stderr
    with contextlib.closing(sqlite3.connect(copy)) as connection:
        assert connection.execute("SELECT version_num FROM alembic_version").fetchall() == [("0023",)]
        assert connection.execute("SELECT private_key, webhook_secret FROM github_apps").fetchall() == [
            ("the PEM", "the hook")
        ]
        assert connection.execute("PRAGMA integrity_check").fetchall() == [("ok",)]
    # The database of this release is left alone, and what is no database is refused.
    assert "nothing to unseal" in secrets(without_server, "unseal", str(data / "stead.db"), key=key).stdout
    assert "the PEM" not in (data / "stead.db").read_bytes().decode(errors="replace")
    assert "there is no database" in secrets(without_server, "unseal", str(data / "none"), key=key).stderr

    # With the copy in its place, the upgrade is repeated.
    for line in move:
        subprocess.run(line.split(), check=True)
    assert not copy.exists()
    shown = stead("github", "show", "--json", settings=without_server, STEAD_SEALING_KEY=str(key))
    assert json.loads(shown.stdout)["app_id"] == "7", shown.stderr
    assert "the PEM" not in contents(data)


def test_a_copy_that_cannot_be_sealed_is_named(without_server: Settings, tmp_path: Path) -> None:
    key = str(tmp_path / "key")
    assert stead("keys", "create", settings=without_server, STEAD_SEALING_KEY=key).returncode == 0
    copy = without_server.data / "stead.db.0022"
    copy.write_bytes(b"no database, but it may hold secrets" * 100)
    with pytest.raises(SealingError, match=r"stead\.db\.0022 may hold secrets in clear: remove it"):
        seal_secrets(without_server.data / "stead.db", SealingKeys([Path(key)]))
    assert stead("keys", "list", settings=without_server, STEAD_SEALING_KEY=key).returncode == 0


def contents(folder: Path) -> str:
    files = (path for path in folder.rglob("*") if path.is_file())
    return "".join(path.read_bytes().decode(errors="replace") for path in files)


# Tokens of identities


@pytest_asyncio.fixture
async def api(tmp_path: Path) -> AsyncIterator[FakeApi]:
    async with fake_api(tmp_path) as opened:
        yield opened


async def test_identity_cannot_create_a_vm_again_that_its_owner_deleted(api: FakeApi) -> None:
    machines = api.installation.machines
    async with calling(api) as ours:
        vm = (await ours.create({"recreate": True}))["id"]
        identities, friend = api.installation.identities, api.keys["identity"]
        await identities.grant(api.account, friend, vm)
        async with calling(api, "granted") as granted:
            await granted.succeed("POST", f"/v1/vms/{vm}/start")
            await ours.succeed("DELETE", f"/v1/vms/{vm}")
            assert (await machines.info(vm)).state is State.DELETED
            command = {"command": "true"}
            for method, path, body in (
                ("POST", f"/v1/vms/{vm}/start", {}),
                ("POST", f"/v1/vms/{vm}/exec-await", command),
                ("GET", f"/v1/vms/{vm}/files/%2Fetc%2Fhostname", None),
                ("GET", f"/v1/vms/{vm}", None),
            ):
                await granted.fail(404, "VM_NOT_FOUND", method, path, body)
            listed = await granted.succeed("GET", "/v1/vms?includeDeleted=true")
            assert vm not in [each["id"] for each in listed["vms"]]
            assert (await machines.info(vm)).state is State.DELETED
            await ours.succeed("POST", f"/v1/vms/{vm}/start")
            await granted.succeed("POST", f"/v1/vms/{vm}/start")


# Process lists and networks


def test_key_of_a_file_is_sent(tmp_path: Path) -> None:
    key = tmp_path / "key"
    key.write_text("stead_secret\n")
    named: list[str] = ["--key-file", str(key)]
    with scripted(*[Reply(content={"accountId": "a"})] * 2) as script:
        for options, variables in ((named, {}), ([], {"STEAD_API_KEY_FILE": str(key)})):
            done = subprocess.run(
                [PROGRAM, "whoami", *options],
                capture_output=True,
                text=True,
                timeout=60,
                env={"PATH": "/usr/bin:/bin", "STEAD_API_URL": script.url, **variables},
                check=False,
            )
            assert done.returncode == 0, done.stderr
    assert [request.headers["authorization"] for request in script.seen] == ["Bearer stead_secret"] * 2


def test_key_as_an_argument_warns_and_a_file_does_not(tmp_path: Path) -> None:
    key = tmp_path / "key"
    key.write_text("stead_secret\n")
    url = ("--url", "http://127.0.0.1:9")

    def said(*arguments: str, **variables: str) -> str:
        environment = {"PATH": "/usr/bin:/bin", **variables}
        done = subprocess.run(
            [PROGRAM, *arguments], capture_output=True, text=True, timeout=60, env=environment, check=False
        )
        assert done.returncode == 1 and "connection refused" in done.stderr, done.stderr
        assert "stead_secret" not in done.stderr
        return done.stderr

    warning = "other users can see --key"
    assert warning in said(*url, "--key", "stead_secret", "whoami")
    assert warning in said(*url, "whoami", "--key", "stead_secret")
    assert warning not in said(*url, "--key-file", str(key), "whoami")
    assert warning not in said(*url, "whoami", "--key-file", str(key))
    assert warning not in said(*url, "whoami", STEAD_API_KEY_FILE=str(key))
    assert warning not in said(*url, "whoami", STEAD_API_KEY="stead_secret")


def test_key_over_plain_http_to_another_host_warns_once() -> None:
    program = (
        "from stead import Stead\n"
        "for url in ('http://192.0.2.1:8600', 'http://192.0.2.1:8600', 'https://192.0.2.1',"
        " 'http://127.0.0.1:1', 'http://localhost:1'):\n"
        "    Stead('stead_secret', base_url=url).close()\n"
    )
    done = subprocess.run(
        [PROGRAM.parent / "python", "-c", program], capture_output=True, text=True, timeout=60, check=True
    )
    assert done.stderr.count("unencrypted") == 1
    assert "192.0.2.1:8600" in done.stderr and "stead_secret" not in done.stderr


@pytest.mark.parametrize(("host", "warned"), [("0.0.0.0", True), ("127.0.0.1", False)])
def test_mcp_server_without_tls_warns_unless_it_is_on_loopback(host: str, warned: bool) -> None:
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    command = [str(PROGRAM), "mcp", "--http", f"{host}:{port}"]
    with subprocess.Popen(command, stderr=subprocess.PIPE, text=True) as process:
        try:
            assert process.stderr is not None
            said = ""
            while "/mcp" not in said:
                said += (line := process.stderr.readline())
                assert line, said
        finally:
            process.terminate()
    assert f"http://{host}:{port}/mcp" in said
    assert ("unencrypted" in said) == warned


# Memory of the template


def memory_files(pid: int, size: int) -> set[tuple[str, str]]:
    """Name and inode of the files behind the RAM of a QEMU."""
    found = set()
    for line in Path(f"/proc/{pid}/maps").read_text().splitlines():
        parts = line.split(maxsplit=5)
        start, end = (int(part, 16) for part in parts[0].split("-"))
        if end - start >= size // 4 and parts[4] != "0":
            found.add((parts[5], parts[4]))
    return found


async def test_vms_have_no_page_of_their_template_in_common(settings: Settings, machines: Machines) -> None:
    with other_settings(settings, share_template_memory=False, pool=0) as other:
        async with open_machines(other) as opened:
            pair = [await opened.create() for _ in range(2)]
            size = other.default_size.memory_mib << 20
            files = [memory_files(pid, size) for pid in running_machines(other)]
            assert len(files) == 2 and all(files)
            assert files[0].isdisjoint(files[1]), files
            assert all(name.startswith("/memfd:") for each in files for name, _ in each), files
            first, _ = pair
            await first.exec("echo kept > /run/memory")
            (fork,) = await first.fork()
            await first.suspend()
            for machine in (fork, first):
                assert (await machine.exec("cat /run/memory")).stdout == b"kept\n"
            files = [memory_files(pid, size) for pid in running_machines(other)]
            assert len(files) == 3
            assert sum(map(len, files)) == len(set[tuple[str, str]]().union(*files)), files
            await delete_all(opened)
