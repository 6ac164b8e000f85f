"""`stead keys` and `stead accounts`."""

import asyncio
import json
import os
import pty
import re
import stat
import subprocess
import sys
from collections.abc import AsyncIterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import fields
from pathlib import Path
from typing import Any

import pytest
import pytest_asyncio
from typer.testing import CliRunner, Result

from stead.cli.main import app
from stead.identity.accounts import Accounts
from stead.identity.callers import Caller, Callers
from stead.identity.identities import Identities
from stead.limits import Limits
from stead.store.database import open_database

SECRET = re.compile(r"stead_[A-Za-z0-9_-]{43}")
PROGRAM = Path(sys.executable).parent / "stead"


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The data directory of an installation; the first command creates it."""
    return tmp_path_factory.mktemp("installation") / "below" / "data"


def stead(data: Path, *arguments: str, **options: Any) -> subprocess.CompletedProcess[str]:
    """Run a command in a new process."""
    return subprocess.run(
        [PROGRAM, *arguments],
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
        env={**os.environ, "STEAD_DATA": str(data)},
        **options,
    )


async def run(data: Path, *arguments: str) -> Result:
    """Run a command in this process, which is faster."""
    return await asyncio.to_thread(CliRunner().invoke, app, arguments, env={"STEAD_DATA": str(data)})


async def succeed(data: Path, *arguments: str) -> str:
    result = await run(data, *arguments)
    assert result.exit_code == 0, result.output
    return result.stdout


async def answer(data: Path, *arguments: str) -> Any:
    return json.loads(await succeed(data, *arguments, "--json"))


@pytest_asyncio.fixture
async def beside(data: Path) -> AsyncIterator[tuple[Accounts, Callers]]:
    """The accounts and callers of a server that uses the same database."""
    database = await open_database(data / "stead.db")
    callers = Callers(database)
    yield Accounts(database), callers
    await callers.close()
    await database.dispose()


async def test_the_first_key_creates_the_installation(tmp_path: Path) -> None:
    """Commands come at the same time, before there is anything; the umask of the shell does not matter."""
    data = tmp_path / "var" / "stead"
    with ThreadPoolExecutor() as threads:
        results = list(threads.map(lambda _: stead(data, "keys", "create", umask=0o077), range(3)))
    assert [result.returncode for result in results] == [0, 0, 0], results
    assert len({result.stdout for result in results}) == 3
    for result in results:
        assert SECRET.fullmatch(result.stdout.removesuffix("\n")), "nothing else is on stdout"
        assert "cannot be shown again" in result.stderr
    assert stat.S_IMODE(data.stat().st_mode) == 0o711
    assert stat.S_IMODE((data / "stead.db").stat().st_mode) == 0o600
    (account,) = (await answer(data, "accounts", "list"))["accounts"]
    assert account["name"] == "default"
    assert len((await answer(data, "keys", "list", "--account", "default"))["keys"]) == 3


async def test_a_key_works_from_creation_to_revocation(data: Path, beside: tuple[Accounts, Callers]) -> None:
    """While a server uses the same database."""
    accounts, callers = beside
    made = await answer(data, "keys", "create", "--name", "for [bold]tests[/bold]")
    assert SECRET.fullmatch(made["key"])
    assert made["name"] == "for [bold]tests[/bold]"
    assert await callers.authenticate(made["key"]) == Caller((await accounts.default()).id)
    await callers.close()

    (listed,) = (key for key in (await answer(data, "keys", "list"))["keys"] if key["id"] == made["id"])
    assert listed["hint"] == made["key"][:10]
    assert listed["used_at"] is not None
    table = await succeed(data, "keys", "list")
    assert made["id"] in table and "for [bold]tests[/bold]" in table
    assert made["key"] not in table and "key" not in listed

    assert made["id"] in await succeed(data, "keys", "revoke", made["id"][:8])
    assert await callers.authenticate(made["key"]) is None
    assert made["id"] not in await succeed(data, "keys", "list")
    (listed,) = (
        key for key in (await answer(data, "keys", "list", "--all"))["keys"] if key["id"] == made["id"]
    )
    assert listed["revoked_at"] is not None


async def test_accounts_have_their_own_keys_and_limits(data: Path, beside: tuple[Accounts, Callers]) -> None:
    accounts, callers = beside
    made = await answer(data, "accounts", "create", "acme")
    key = (await succeed(data, "keys", "create", "--account", "acme")).strip()
    assert await callers.authenticate(key) == Caller(made["id"])

    changed = await answer(
        data, "accounts", "limits", "acme", "--vms", "3", "--total-memory-gib", "64", "--running", "unlimited"
    )
    assert changed["own_limits"] == {"vms": 3, "total_memory_gib": 64, "running": None}
    assert (await accounts.get(made["id"])).limits == Limits(vms=3, total_memory_gib=64)
    changed = await answer(data, "accounts", "limits", "acme", "--vms", "default")
    assert changed["own_limits"] == {"total_memory_gib": 64, "running": None}
    assert changed["limits"]["vms"] == 10_000
    shown = await succeed(data, "accounts", "limits", "acme")
    assert re.search(r"total_memory_gib +64 +own", shown)
    assert re.search(r"vms +10000 +default", shown)
    assert re.search(r"acme .*total_memory_gib 64", await succeed(data, "accounts", "list"))


async def test_every_limit_is_an_option(data: Path) -> None:
    names = [each.name for each in fields(Limits)]
    options = [f"--{name.replace('_', '-')}={number}" for number, name in enumerate(names, 1)]
    await succeed(data, "accounts", "create", "every-limit")
    changed = await answer(data, "accounts", "limits", "every-limit", *options)
    assert changed["own_limits"] == {name: number for number, name in enumerate(names, 1)}


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (("keys", "create", "--account", "nobody"), "no account nobody (ACCOUNT_NOT_FOUND)"),
        (("keys", "create", "--name", ""), "invalid name ''"),
        (("keys", "list", "--account", "nobody"), "no account nobody (ACCOUNT_NOT_FOUND)"),
        (("keys", "revoke", "0123456789"), "(KEY_NOT_FOUND)"),
        (("accounts", "create", "two words"), "invalid account name"),
        (("accounts", "limits", "nobody"), "(ACCOUNT_NOT_FOUND)"),
        (("accounts", "limits", "default", "--vms", "many"), "invalid --vms"),
        (("accounts", "limits", "default", "--vms", "-1"), "invalid --vms"),
    ],
)
async def test_an_error_is_one_line_and_an_exit_code(
    data: Path, arguments: tuple[str, ...], words: str
) -> None:
    result = await run(data, *arguments)
    assert result.exit_code == 1
    assert result.stdout == ""
    assert words in result.stderr
    assert "Traceback" not in result.stderr


async def test_an_existing_account_is_not_created_again(data: Path) -> None:
    await succeed(data, "accounts", "create", "once")
    result = await run(data, "accounts", "create", "once")
    assert (result.exit_code, result.stdout) == (1, "")
    assert "account once exists already (ACCOUNT_EXISTS)" in result.stderr


def test_a_file_that_is_not_a_database_is_not_changed(tmp_path: Path) -> None:
    file = tmp_path / "stead.db"
    file.write_text("something else entirely, and long enough to be looked at " * 20)
    before = file.read_bytes()
    result = stead(tmp_path, "keys", "create")
    assert result.returncode == 1
    assert "cannot open the database" in result.stderr
    assert "Traceback" not in result.stderr
    assert file.read_bytes() == before


def test_the_key_is_printed_on_a_terminal(data: Path) -> None:
    leader, terminal = pty.openpty()
    environment = {**os.environ, "STEAD_DATA": str(data)}
    with subprocess.Popen(
        [PROGRAM, "keys", "create"], stdout=terminal, stderr=terminal, stdin=terminal, env=environment
    ) as process:
        os.close(terminal)
        shown = b""
        try:
            while chunk := os.read(leader, 4096):
                shown += chunk
        except OSError:
            pass  # the other end is closed
    os.close(leader)
    assert process.returncode == 0
    assert SECRET.search(shown.decode())
    assert b"cannot be shown again" in shown


async def test_an_account_is_deleted_when_it_owns_nothing(data: Path) -> None:
    account = await answer(data, "accounts", "create", "leaving")
    await succeed(data, "keys", "create", "--account", "leaving")
    database = await open_database(data / "stead.db")
    try:
        identities = Identities(database, {}.__contains__)  # type: ignore[arg-type]  # no VMs here
        identity = await identities.create(account["id"])
        refused = await run(data, "accounts", "delete", "leaving")
        assert refused.exit_code == 1
        assert "still owns 1 identities" in refused.stderr and "(ACCOUNT_NOT_EMPTY)" in refused.stderr
        assert "leaving" in await succeed(data, "accounts", "list")
        await identities.delete(account["id"], identity.id)
    finally:
        await database.dispose()
    assert await succeed(data, "accounts", "delete", "leaving") == "deleted account leaving\n"
    assert "leaving" not in await succeed(data, "accounts", "list")
    assert "leaving" not in await succeed(data, "keys", "list")
    assert "(ACCOUNT_NOT_FOUND)" in (await run(data, "accounts", "delete", "leaving")).stderr
