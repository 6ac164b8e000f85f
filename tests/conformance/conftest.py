"""A laptop for the tests of private networks."""

import os
from collections.abc import AsyncIterator, Iterator
from pathlib import Path

import pytest
import pytest_asyncio

from stead.api.server import running
from stead.settings import Settings
from support.api_calls import new_account
from support.installations import Server
from support.laptop import Laptop, laptop
from support.npm import Npm
from support.npm_laptop import SUDO, NpmLaptop


@pytest.fixture(scope="module")
def computer(root: None) -> Iterator[Laptop]:
    with laptop() as made:
        yield made


@pytest_asyncio.fixture
async def npm_laptop(
    server: Server, settings: Settings, package: Npm, computer: Laptop, tmp_path: Path
) -> AsyncIterator[NpmLaptop]:
    for place in ("bin", "tmp"):
        (tmp_path / place).mkdir()
    (tmp_path / "bin" / "sudo").write_text(SUDO)
    (tmp_path / "bin" / "sudo").chmod(0o755)
    (tmp_path / "bin" / "node").symlink_to(package.node22)
    account, key = await new_account(server, "laptop")
    local = settings.replace(listen=f"{computer.host}:0")
    async with running(local, server.installation) as url:
        environment = {
            "PATH": f"{tmp_path}/bin:{os.environ['PATH']}",
            "HOME": str(tmp_path),
            "TMPDIR": str(tmp_path / "tmp"),
            "FREESTYLE_API_URL": url,
            "FREESTYLE_API_KEY": key,
        }
        made = NpmLaptop(package, server, computer, tmp_path, account, environment)
        try:
            yield made
        finally:
            await made.clean_up()
