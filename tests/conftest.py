"""Real machines for tests: one image and one small template for the whole run, kept outside the checkout.

Several processes may share the tests: each is then an installation of its own, beside the others.
"""

import os
import secrets
import signal
import tempfile
import threading
from collections.abc import AsyncIterator, Iterator
from ipaddress import IPv4Network
from pathlib import Path

import hypothesis
import pytest
import pytest_asyncio

from stead.host.image import BaseImage, ensure_image
from stead.installation import bind, open_installation, serve
from stead.installation_parts import Installation
from stead.machines import Machine, Machines
from stead.machines.events import MachineEvent
from stead.settings import Settings
from stead.store.sealing import SealingKeys
from support import laptop
from support.git_client import GitClient
from support.git_hosting import RepoHosting, open_hosting
from support.installations import Server, delete_all, leftovers, small_installation
from support.internals import inside
from support.npm import Npm, install
from support.reaper import reaped

if threading.current_thread() is threading.main_thread():
    # A shell may have had SIGINT ignored for what it runs in the background, and programs inherit that.
    signal.signal(signal.SIGINT, signal.default_int_handler)

# How long an example takes depends on what else the machine does.
hypothesis.settings.register_profile(
    "stead", deadline=None, suppress_health_check=[hypothesis.HealthCheck.too_slow]
)
hypothesis.settings.load_profile("stead")

pytest_plugins = ["support.api_calls", "support.durations", "support.sdk_clients", "support.webhooks"]


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Mark tests by what they need: `root`, `qemu` and `network` are fixtures that others build on."""
    for item in items:
        for need in {"root", "qemu", "network"}.intersection(getattr(item, "fixturenames", ())):
            item.add_marker(need)


@pytest.fixture(scope="session", autouse=True)
def sealing_key(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """Installations of tests take their sealing key from here, and not from /etc of the host."""
    folder = tmp_path_factory.mktemp("credentials")
    SealingKeys([folder / "stead-sealing-key"]).ensure()
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("CREDENTIALS_DIRECTORY", str(folder))
        yield


@pytest.fixture(scope="session")
def root() -> None:
    """For mounts, other users' files, network namespaces, and the cache of the host."""
    if os.geteuid() != 0:
        pytest.skip("needs root")


@pytest.fixture(scope="session")
def qemu(root: None) -> None:
    """For VMs."""


@pytest.fixture(scope="session")
def network() -> None:
    """For packages from Debian and the npm registry."""


@pytest.fixture(scope="session")
def cache() -> Path:
    """Where the image and templates are kept from one run to the next."""
    return Path(os.environ.get("STEAD_CACHE", "/var/lib/stead/cache"))


@pytest.fixture(scope="session")
def settings(root: None, cache: Path) -> Iterator[Settings]:
    with (
        tempfile.TemporaryDirectory(prefix="stead-test-", dir="/var/tmp") as folder,
        reaped(Path(folder)),
    ):
        yield small_installation(Path(folder), cache).replace(
            dial_private=(IPv4Network("127.0.0.1/32"),),
            wireguard_host=str(laptop.link()[1]),
            # Processes that share the tests have ports of their own, below those of outgoing connections.
            wireguard_port=10_000 + os.getpid() % 200 * 100,
        )


@pytest.fixture
def open_folder(root: None) -> Iterator[Path]:
    """A folder that git reaches although it is another user; those of the tests are closed to all others."""
    with tempfile.TemporaryDirectory(prefix="stead-test-", dir="/var/tmp") as folder:
        yield Path(folder)


@pytest_asyncio.fixture(scope="session")
async def package(network: None, cache: Path, tmp_path_factory: pytest.TempPathFactory) -> Npm:
    """The npm package `freestyle` in a folder with the scripts of tests/conformance."""
    return await install(cache, tmp_path_factory.mktemp("npm"))


@pytest_asyncio.fixture(scope="session")
async def image(qemu: None, settings: Settings) -> BaseImage:
    return await ensure_image(settings)


@pytest_asyncio.fixture(scope="session")
async def installation(settings: Settings, image: BaseImage) -> AsyncIterator[Installation]:
    """An installation, open for the whole run; whatever tests leave is an error at the end."""
    async with open_installation(settings) as installation:
        await installation.machines.template()
        yield installation
        await delete_all(installation.machines)
    assert leftovers(settings) == []


@pytest.fixture(scope="session")
def machines(installation: Installation) -> Machines:
    return installation.machines


@pytest.fixture
def events(machines: Machines, monkeypatch: pytest.MonkeyPatch) -> list[MachineEvent]:
    """The lifecycle events of VMs during a test."""
    listener, seen = inside(machines).events._on_event, list[MachineEvent]()

    def listen(event: MachineEvent) -> None:
        seen.append(event)
        listener(event)

    monkeypatch.setattr(inside(machines).events, "_on_event", listen)
    return seen


@pytest_asyncio.fixture(scope="session")
async def server(installation: Installation, settings: Settings) -> AsyncIterator[Server]:
    """The API, the edge and the SSH gateway over the installation of this run, on ports of their own."""
    anywhere = "127.0.0.1:0"
    local = settings.replace(
        listen=anywhere, https_listen=anywhere, http_listen=anywhere, ssh_listen=anywhere
    )
    with bind(local) as listeners:
        async with serve(installation, listeners) as served:
            account = await installation.accounts.create("tests")
            _, key = await installation.accounts.create_key(account.id)
            yield Server(served.url, key, account.id, installation, served.edge.https_port)


@pytest_asyncio.fixture(scope="module")
async def shared(machines: Machines) -> AsyncIterator[Machine]:
    """One machine for all tests of a module that leave it as they found it."""
    machine = await machines.create()
    yield machine
    await machine.delete()


@pytest_asyncio.fixture
async def machine(machines: Machines) -> AsyncIterator[Machine]:
    """A machine for one test, which may do anything to it."""
    machine = await machines.create()
    yield machine
    if any(info.id == machine.id for info in await machines.list()):
        await machine.delete()


@pytest_asyncio.fixture
async def folder(shared: Machine) -> AsyncIterator[str]:
    """A folder of the shared VM that every user may write to, for one test."""
    path = f"/srv/{secrets.token_hex(8)}"
    await shared.files().make_folder(path, mode=0o777)
    yield path
    await shared.files().remove(path, recursive=True)


@pytest_asyncio.fixture
async def hosting(tmp_path: Path) -> AsyncIterator[RepoHosting]:
    """Repositories without VMs."""
    async with open_hosting(tmp_path) as hosting:
        yield hosting


@pytest.fixture
def git(tmp_path: Path) -> GitClient:
    (tmp_path / "home").mkdir()
    return GitClient(tmp_path / "home")
