"""The wheel in fresh Debian systems: the client as an ordinary user, the server without a checkout."""

import json
import re
import shutil
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest

from support import client_tests
from support.client_tests import ROOT
from support.debian_root import USER, DebianRoot

from .conftest import Dist

pytestmark = [
    pytest.mark.slow,
    pytest.mark.timeout(5400),
    pytest.mark.usefixtures("root", "network"),
]
SUITES = {"bookworm": "3.11", "trixie": "3.13"}


@pytest.fixture(params=SUITES)
def debian(request: pytest.FixtureRequest, dist: Dist) -> Iterator[DebianRoot]:
    folder = Path(tempfile.mkdtemp(prefix="stead-debian-", dir="/var/tmp"))
    try:
        root = DebianRoot(folder / "root", request.param)
        assert root.done("python3", "-V").startswith(f"Python {SUITES[request.param]}.")
        root.give(dist.wheel, dist.wheel.name)
        yield root
    finally:
        shutil.rmtree(folder)


def install(debian: DebianRoot, wheel: str, *more: str, user: str = "root") -> None:
    """The commands of docs/install.md."""
    debian.done("python3", "-m", "venv", "venv", user=user)
    debian.done("venv/bin/pip", "install", "--quiet", wheel, *more, user=user)


def test_client_of_an_ordinary_user(debian: DebianRoot, dist: Dist) -> None:
    install(debian, f"./{dist.wheel.name}", *client_tests.PACKAGES, user=USER)
    assert debian.done("venv/bin/stead", "--version", user=USER).strip() in dist.wheel.name
    refused = debian.run("venv/bin/stead", "serve", user=USER)
    assert (refused.returncode, refused.stderr.count("\n")) == (2, 1)
    assert "needs the extra `server`" in refused.stderr
    debian.give(ROOT / "tests", "checkout/tests")
    debian.give(ROOT / "pyproject.toml", "checkout/pyproject.toml")
    command = ["../venv/bin/python", "-m", "pytest", *client_tests.ARGUMENTS, *client_tests.client_tests()]
    script = 'cd checkout && exec "$@"'
    told = debian.done("sh", "-c", script, "sh", *command, user=USER, variables=client_tests.ENVIRONMENT)
    print(told.splitlines()[-1])


def test_server_without_a_checkout(debian: DebianRoot, dist: Dist) -> None:
    """`stead demo` of an installation whose data is in a folder of its own, beside others of this host."""
    [packages] = re.findall(
        r"^# apt-get install --no-install-recommends ((?:.*\\\n)*.*)$",
        (ROOT / "docs/install.md").read_text(),
        re.M,
    )
    install(debian, f"/home/{USER}/{dist.wheel.name}[server]")
    data = f"/srv/{debian.folder.parent.name}"
    variables = {
        "STEAD_DATA": data,
        "STEAD_DEFAULT_SIZE": "2x512Mx20G",
        "STEAD_HTTPS_LISTEN": "127.0.0.1:0",
        "STEAD_HTTP_LISTEN": "127.0.0.1:0",
        "STEAD_SSH_LISTEN": "127.0.0.1:0",
    }
    before = debian.run("venv/bin/stead", "doctor", "--json", variables=variables)
    remedies = [finding["remedy"] for finding in json.loads(before.stdout)["findings"]]
    named = {word for text in remedies if text.startswith("apt-get install ") for word in text.split()[2:]}
    assert before.returncode == 1
    assert {"qemu-system-x86", "mmdebstrap", "nftables", "git"} <= named <= set(packages.split())
    quiet = {"DEBIAN_FRONTEND": "noninteractive"}
    debian.done("apt-get", "update", "-qq")
    words = packages.replace("\\\n", " ").split()
    debian.done("apt-get", "install", "-y", "-qq", "--no-install-recommends", *words, variables=quiet)
    after = debian.run("venv/bin/stead", "doctor", "--json", variables=variables)
    assert after.returncode == 0, after.stdout
    times = json.loads(debian.done("venv/bin/stead", "demo", "--json", seconds=3600, variables=variables))
    print(times)
    assert {"prepare_ms", "create_ms", "fork_ms", "wake_ms", "create_from_snapshot_ms"} <= set(times)
