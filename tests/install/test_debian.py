"""The wheel in fresh Debian systems: the client as an ordinary user, the server without a checkout."""

import json
import shutil
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest

from support import ROOT, client_tests
from support.debian_root import USER, DebianRoot
from support.documents import commands, run_by

from .conftest import Dist

pytestmark = [
    pytest.mark.slow,
    pytest.mark.timeout(5400),
    pytest.mark.usefixtures("root", "network"),
]
CLIENT, PACKAGE, DEBIAN_PACKAGES = run_by(__file__, "docs/install.md")
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


def test_client_of_an_ordinary_user(debian: DebianRoot, dist: Dist) -> None:
    for command in commands(CLIENT.body):
        told = debian.done("sh", "-c", command.line, user=USER)
    assert told.strip() in dist.wheel.name
    refused = debian.run("venv/bin/stead", "serve", user=USER)
    assert (refused.returncode, refused.stderr.count("\n")) == (2, 1)
    assert "needs the extra `server`" in refused.stderr
    debian.done("venv/bin/pip", "install", "--quiet", *client_tests.PACKAGES, user=USER)
    debian.give(ROOT / "tests", "checkout/tests")
    debian.give(ROOT / "pyproject.toml", "checkout/pyproject.toml")
    tests = ["../venv/bin/python", "-m", "pytest", *client_tests.ARGUMENTS, *client_tests.client_tests()]
    script = 'cd checkout && exec "$@"'
    told = debian.done("sh", "-c", script, "sh", *tests, user=USER, variables=client_tests.ENVIRONMENT)
    print(told.splitlines()[-1])


def test_server_without_a_checkout(debian: DebianRoot, dist: Dist) -> None:
    """The data of the installation is in a folder of its own, beside other installations of this host."""
    variables = {
        "STEAD_DATA": f"/srv/{debian.folder.parent.name}",
        "STEAD_DEFAULT_SIZE": "2x512Mx20G",
        "STEAD_HTTPS_LISTEN": "127.0.0.1:0",
        "STEAD_HTTP_LISTEN": "127.0.0.1:0",
        "STEAD_SSH_LISTEN": "127.0.0.1:0",
    }
    shutil.copy(dist.wheel, debian.folder / "root")
    (debian.folder / "etc/apt/apt.conf.d/yes").write_text('APT::Get::Assume-Yes "true";\n')
    for command in commands(PACKAGE.body):
        debian.done("sh", "-c", command.line)
    apt, demo = commands(DEBIAN_PACKAGES.body)
    before = debian.run("stead", "doctor", "--json", variables=variables)
    remedies = [finding["remedy"] for finding in json.loads(before.stdout)["findings"]]
    named = {word for text in remedies if text.startswith("apt-get install ") for word in text.split()[2:]}
    assert before.returncode == 1
    assert {"qemu-system-x86", "mmdebstrap", "nftables", "git"} <= named <= set(apt.line.split())
    debian.done("apt-get", "update", "-qq")
    debian.done("sh", "-c", apt.line, variables={"DEBIAN_FRONTEND": "noninteractive"})
    after = debian.run("stead", "doctor", "--json", variables=variables)
    assert after.returncode == 0, after.stdout
    told = debian.done("sh", "-c", demo.line, seconds=3600, variables=variables)
    print(told)
    assert "create a VM from the snapshot" in told and "no agent: it needs the extra `openai-agents`" in told
