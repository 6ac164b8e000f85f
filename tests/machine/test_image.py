"""The base image: what is in it, and that building it never leaves a half-made one behind."""

import asyncio
import os
import re
import shutil
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from stead.errors import ImageError
from stead.files import try_lock
from stead.guest_agent import agent_path
from stead.host import image as image_module
from stead.host.bootstrap import OutputReader, explain, read_packages
from stead.host.commands import run
from stead.host.image import BaseImage, ensure_image, find_image, image_key
from stead.host.interface import Progress
from stead.host.templates import image_build
from stead.machines import Machine
from stead.settings import Settings

CLOSED_MIRROR = "http://127.0.0.1:9/debian"


def debugfs(image: BaseImage, request: str) -> str:
    command = ["debugfs", "-R", request, str(image.disk)]
    return subprocess.run(command, capture_output=True, text=True, check=True).stdout


def names(image: BaseImage, folder: str) -> set[str]:
    return {line.split("/")[5] for line in debugfs(image, f"ls -p {folder}").splitlines() if "/" in line}


def link(image: BaseImage, path: str) -> str:
    match = re.search(r'Fast link dest: "(.*)"', debugfs(image, f"stat {path}"))
    assert match, f"{path} is no link"
    return match[1]


def leftovers(cache: Path) -> list[Path]:
    return list((cache / "images").glob(".building-*"))


def test_node_is_found_without_path(image: BaseImage) -> None:
    """`env node` with an empty environment searches only /bin and /usr/bin; `npm -g` uses /usr/local."""
    for command in ("node", "npm", "npx", "corepack"):
        assert link(image, f"/usr/bin/{command}") == f"../local/bin/{command}"
    assert link(image, "/usr/local/bin/npm") == "../lib/node_modules/npm/bin/npm-cli.js"
    assert "Type: regular    Mode:  0755" in debugfs(image, "stat /usr/local/bin/node")
    assert "Type: regular    Mode:  0755" in debugfs(
        image, "stat /usr/local/lib/node_modules/npm/bin/npm-cli.js"
    )


HELLO = b"""#include <stdio.h>
int main(void) { puts("hello from C"); return 0; }
"""


async def say(machine: Machine, command: str) -> str:
    """What a command that must succeed prints."""
    result = await machine.exec(command, timeout=120)
    assert result.ok, (command, result.exit_code, result.stdout, result.stderr)
    return result.stdout.decode().strip()


async def test_programs_of_the_image_run(shared: Machine) -> None:
    await shared.files().write("/root/build/hello.c", HELLO)
    await shared.files().write("/root/build/Makefile", b"hello: hello.c\n\tgcc -O1 -o $@ $<\n")
    assert (await say(shared, "make --silent -C ~/build && ~/build/hello")) == "hello from C"
    assert await say(shared, """echo '{"a": [1, 2]}' | jq -c '.a | add'""") == "3"
    assert await say(shared, "echo packed | xz | xz -d") == "packed"
    zipped = "import zipfile; zipfile.ZipFile('/root/a.zip', 'w').writestr('inside', 'zipped')"
    assert await say(shared, f'python3 -c "{zipped}" && unzip -p ~/a.zip inside') == "zipped"
    for program in ("pip", "uv", "uvx", "gcc", "make", "jq", "node", "git", "curl", "rg"):
        assert re.search(r"\d+\.\d+", await say(shared, f"{program} --version")), program
    await say(shared, "which pip3")


async def test_pip_and_uv_install_without_a_virtual_environment(shared: Machine) -> None:
    """Neither refuses with "externally-managed-environment", and the commands they install are on PATH."""
    await shared.files().write(
        "/root/package/pyproject.toml",
        b"""[build-system]
requires = []
build-backend = "backend"
backend-path = ["."]
[project]
name = "greeting"
version = "1.0"
""",
    )
    await shared.files().write("/root/package/backend.py", BACKEND)
    await say(shared, "pip install --quiet --no-build-isolation ~/package")
    assert await say(shared, "greet; which greet") == "hello from Python\n/usr/local/bin/greet"
    await say(shared, "uv pip uninstall --quiet --system greeting; ! which greet")
    await say(shared, "uv pip install --quiet --system --offline --no-build-isolation ~/package")
    assert await say(shared, "greet") == "hello from Python"
    await say(shared, "uv pip uninstall --quiet --system greeting")
    await say(shared, "uv tool install --quiet --offline --no-build-isolation ~/package")
    assert await say(shared, "greet; which greet") == "hello from Python\n/root/.local/bin/greet"


BACKEND = b"""
import base64, hashlib, zipfile

FILES = {
    "greeting.py": "def main():\\n    print('hello from Python')\\n",
    "greeting-1.0.dist-info/METADATA": "Metadata-Version: 2.1\\nName: greeting\\nVersion: 1.0\\n",
    "greeting-1.0.dist-info/WHEEL": "Wheel-Version: 1.0\\nRoot-Is-Purelib: true\\nTag: py3-none-any\\n",
    "greeting-1.0.dist-info/entry_points.txt": "[console_scripts]\\ngreet = greeting:main\\n",
}


def build_wheel(folder, config_settings=None, metadata_directory=None):
    name = "greeting-1.0-py3-none-any.whl"
    record = "greeting-1.0.dist-info/RECORD"
    with zipfile.ZipFile(f"{folder}/{name}", "w") as wheel:
        for path, content in FILES.items():
            wheel.writestr(path, content)
        wheel.writestr(record, "".join(f"{path},,\\n" for path in (*FILES, record)))
    return name
"""


async def test_packages_can_be_installed_without_an_update_first(shared: Machine) -> None:
    """The lists are part of the image, and apt's index of them is up to date: it need not be made again."""
    index = "stat -c %Y.%i /var/cache/apt/pkgcache.bin"
    before = await say(shared, index)
    assert re.search(r"^Inst sl ", await say(shared, "apt-get install --simulate sl"), re.MULTILINE)
    assert await say(shared, index) == before
    await say(shared, "! test -e /var/lib/apt/stead-lists-tried")


@pytest.mark.slow
async def test_old_package_lists_are_refreshed_before_they_are_used(shared: Machine) -> None:
    """The mirror refuses connections: the old lists are used then, and it is asked once an hour."""
    await say(
        shared,
        "rm -f /etc/apt/sources.list.d/*; echo 'deb [trusted=yes] http://127.0.0.1:9/debian trixie main'"
        " > /etc/apt/sources.list; touch -d '8 days ago' /var/lib/apt/stead-lists-updated",
    )
    asked = "connect to 127.0.0.1:9"
    command = "apt-get -o Dpkg::Use-Pty=0 install --simulate jq 2>&1"
    assert asked in await say(shared, command)
    assert asked not in await say(shared, command)
    await say(shared, "rm /var/lib/apt/stead-lists-tried")
    assert asked not in await say(shared, "apt-get remove --simulate jq 2>&1")
    assert asked in await say(shared, command.replace("apt-get", "apt"))
    await say(shared, "rm /var/lib/apt/stead-lists-tried")
    await say(shared, "touch /var/lib/apt/stead-lists-updated")
    assert asked not in await say(shared, command)


def test_the_image_has_no_machine_id_keys_or_seed(image: BaseImage) -> None:
    """Each machine gets its own; an empty machine-id is not a first boot, a missing one would be."""
    assert re.search(r"User: +0 +Group: +0 .*Size: 0$", debugfs(image, "stat /etc/machine-id"), re.MULTILINE)
    assert not {name for name in names(image, "/etc/ssh") if name.startswith("ssh_host")}
    assert "random-seed" not in names(image, "/var/lib/systemd")
    assert "machine-id" not in names(image, "/var/lib/dbus")
    assert debugfs(image, "cat /etc/hostname") == "stead\n"
    assert re.search(r"^root:[*!]", debugfs(image, "cat /etc/shadow"), re.MULTILINE), "root has a password"


def test_settings_of_the_guest(image: BaseImage) -> None:
    assert '"\\C-^": self-insert' in debugfs(image, "cat /etc/inputrc").splitlines()
    assert "user_allow_other" in debugfs(image, "cat /etc/fuse.conf").splitlines()
    assert debugfs(image, "cat /etc/resolv.conf") == "nameserver 169.254.0.1\n"
    assert debugfs(image, "cat /etc/fstab").startswith("/dev/vda / ext4 ")


def test_the_agent_is_installed_and_enabled(image: BaseImage, tmp_path: Path) -> None:
    debugfs(image, f"dump /usr/lib/stead/agent {tmp_path / 'agent'}")
    assert (tmp_path / "agent").read_bytes() == agent_path().read_bytes()
    assert "Mode:  0755" in debugfs(image, "stat /usr/lib/stead/agent")
    assert "stead-agent.service" in names(image, "/etc/systemd/system/sysinit.target.wants")


def test_timers_consoles_and_network_managers_are_off(image: BaseImage) -> None:
    """No timer, console login, network manager or second ssh server; ssh starts with a connection."""
    for unit in ("apt-daily.timer", "systemd-tmpfiles-clean.timer", "systemd-networkd.service", "tmp.mount"):
        assert link(image, f"/etc/systemd/system/{unit}") == "/dev/null"
    assert "ssh.socket" in names(image, "/etc/systemd/system/sockets.target.wants")
    command = "AuthorizedKeysCommand /usr/local/bin/fetch-ssh-keys"
    assert command in debugfs(image, "cat /etc/ssh/sshd_config.d/stead.conf").splitlines()
    assert "Mode:  0755" in debugfs(image, "stat /usr/local/bin/fetch-ssh-keys")
    wanted = names(image, "/etc/systemd/system/multi-user.target.wants")
    assert not wanted & {"ssh.service", "systemd-networkd.service"}
    assert not any(
        name.startswith("getty@") for name in names(image, "/etc/systemd/system/getty.target.wants")
    )


def test_host_certificates_are_copied(image: BaseImage, settings: Settings) -> None:
    carried = [name for name, _ in image_module._certificates(settings)]
    if not carried:
        pytest.skip("this host has no certificates of its own")
    assert set(carried) <= names(image, "/usr/local/share/ca-certificates")
    assert "cafile=/etc/ssl/certs/ca-certificates.crt" in debugfs(image, "cat /usr/local/etc/npmrc")


def test_the_file_system_is_clean_and_below_its_size_limit(image: BaseImage) -> None:
    subprocess.run(["e2fsck", "-fn", image.disk], check=True, capture_output=True)
    assert image.disk.stat().st_size == 20 << 30
    assert image.disk.stat().st_blocks * 512 < 1_500_000_000
    assert image.initrd.stat().st_size < 4_000_000
    # An image that an older version built has no build id.
    assert {path.name for path in image.folder.iterdir()} - {"build"} == {"disk.raw", "initrd", "kernel"}


async def test_a_built_image_is_reused(image: BaseImage, settings: Settings) -> None:
    inode = image.disk.stat().st_ino
    async with asyncio.timeout(60):
        again = await ensure_image(settings)
    assert again == image
    assert again.disk.stat().st_ino == inode
    assert find_image(settings, image.key) == image


async def test_an_image_is_identified_by_a_build_id_not_by_its_times(
    settings: Settings, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """`tar` and `cp` keep the file, but times only to the second or not at all."""

    async def build(_: Settings, __: Path, folder: Path, ___: object) -> None:
        for name in ("disk.raw", "kernel", "initrd"):
            (folder / name).touch()

    monkeypatch.setattr(image_module, "_build", build)
    mine = settings.replace(cache=tmp_path)
    image = await ensure_image(mine)
    built = image_build(image)
    restored = BaseImage(image.key, tmp_path / "restored")
    shutil.copytree(image.folder, restored.folder)
    os.utime(restored.disk, (1_700_000_000, 1_700_000_000))
    assert image_build(restored) == built
    shutil.rmtree(image.folder)
    assert image_build(await ensure_image(mine)) != built


def test_an_image_without_a_build_id_is_identified_by_its_time(tmp_path: Path) -> None:
    """It was built by an older version, whose templates recorded that time."""
    image = BaseImage("key", tmp_path)
    image.disk.touch()
    os.utime(image.disk, ns=(1, 1_700_000_000_123_456_789))
    assert image_build(image) == 1_700_000_000_123_456_789


def test_the_key_depends_on_every_input(
    settings: Settings, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    agent = tmp_path / "agent"
    agent.write_bytes(b"one")
    keys = [image_key(settings, agent), image_key(settings, agent)]
    assert len(set(keys)) == 1

    agent.write_bytes(b"two")
    keys.append(image_key(settings, agent))
    keys.append(image_key(settings.replace(mirror=CLOSED_MIRROR), agent))
    certificates = tmp_path / "certificates"
    (certificates / "deep").mkdir(parents=True)
    (certificates / "deep" / "own.crt").write_text("a certificate")
    monkeypatch.setattr(image_module, "HOST_CERTIFICATES", certificates)
    keys.append(image_key(settings, agent))
    without = settings.replace(host_certificates=False)
    assert [name for name, _ in image_module._certificates(settings)] == ["deep/own.crt"]
    assert list(image_module._certificates(without)) == []
    keys.append(image_key(without, agent))
    files = tmp_path / "files"
    shutil.copytree(image_module.FILES, files)
    monkeypatch.setattr(image_module, "FILES", files)
    assert image_key(settings, agent) == keys[-2], "where the files are does not matter"
    with (files / "packages.txt").open("a") as packages:
        packages.write("sl\n")
    keys.append(image_key(settings, agent))
    assert len(set(keys)) == len(keys) - 1


async def test_the_second_of_two_builders_waits_and_builds_nothing(
    settings: Settings, tmp_path: Path
) -> None:
    mine = settings.replace(cache=tmp_path, mirror=CLOSED_MIRROR)
    images = tmp_path / "images"
    images.mkdir()
    key = image_key(mine, agent_path())
    lock = try_lock(images / ".lock")
    assert lock is not None
    second = asyncio.create_task(ensure_image(mine))
    done, _ = await asyncio.wait([second], timeout=0.5)
    assert not done
    (images / key).mkdir()
    for name in ("disk.raw", "kernel", "initrd"):
        assert find_image(mine, key) is None, "an image with a part missing is none"
        (images / key / name).touch()
    os.close(lock)
    async with asyncio.timeout(60):
        assert (await second).folder == images / key


async def test_an_unreachable_mirror_is_a_one_line_error(settings: Settings, tmp_path: Path) -> None:
    mine = settings.replace(cache=tmp_path, mirror=CLOSED_MIRROR)
    async with asyncio.timeout(60):
        with pytest.raises(
            ImageError, match=r"cannot download Debian packages: .*(onnection refused|Unable to connect)"
        ) as raised:
            await ensure_image(mine)
    assert "\n" not in str(raised.value)
    assert not leftovers(tmp_path)


async def test_free_disk_space_is_checked_before_the_build(settings: Settings, tmp_path: Path) -> None:
    await run("mount", "-t", "tmpfs", "-o", "size=64m", "stead-test", tmp_path)
    try:
        with pytest.raises(ImageError, match=r"needs 4 GiB free in .*, which has 0\.1 GiB"):
            await ensure_image(settings.replace(cache=tmp_path, mirror=CLOSED_MIRROR))
        assert not leftovers(tmp_path)
    finally:
        await run("umount", tmp_path)


async def test_missing_tools_are_named(
    settings: Settings, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(ImageError, match="needs mmdebstrap, mke2fs"):
        await ensure_image(settings.replace(cache=tmp_path))


BUILD = """
import asyncio, sys
from pathlib import Path
from stead.host.image import ensure_image
from stead.settings import Settings
show = lambda progress: print(progress.phase, progress.fraction, flush=True)
asyncio.run(ensure_image(Settings(cache=Path(sys.argv[1])), show))
"""


async def test_a_killed_build_leaves_no_process_no_mount_and_no_image(
    settings: Settings, tmp_path: Path
) -> None:
    """The builder is killed while dpkg unpacks inside mmdebstrap's mounts; the next one cleans up."""
    builder = await asyncio.create_subprocess_exec(
        *(sys.executable, "-c", BUILD, str(tmp_path)), stdout=asyncio.subprocess.PIPE
    )
    assert builder.stdout
    async with asyncio.timeout(60):
        async for line in builder.stdout:
            if line.startswith(b"install"):
                break
    assert leftovers(tmp_path) and using(tmp_path)
    builder.send_signal(signal.SIGKILL)
    await builder.wait()

    async with asyncio.timeout(60):
        while using(tmp_path):  # noqa: ASYNC110  # nothing tells of the end of other processes
            await asyncio.sleep(0.05)
    assert str(tmp_path) not in Path("/proc/self/mountinfo").read_text()
    with pytest.raises(ImageError):
        await ensure_image(settings.replace(cache=tmp_path, mirror=CLOSED_MIRROR))
    assert [path.name for path in (tmp_path / "images").iterdir()] == [".lock"]


def using(folder: Path) -> list[str]:
    """Processes that name a folder in their arguments or see something mounted below it."""
    found = []
    for process in Path("/proc").glob("[0-9]*"):
        try:
            arguments = (process / "cmdline").read_bytes().decode(errors="replace")
            mounts = (process / "mountinfo").read_text()
        except OSError:
            continue
        if str(folder / "images") in arguments or str(folder / "images") in mounts:
            found.append(arguments)
    return found


def test_errors_name_the_first_cause() -> None:
    reader = OutputReader()
    reader.feed("E: Unable to locate package no-such-thing")
    reader.feed("E: setup failed: E: apt-get --yes install no-such-thing failed")
    reader.feed("E: mmdebstrap failed to run")
    assert explain(reader) == "Debian has no package no-such-thing"

    reader = OutputReader()
    reader.feed("cp: cannot stat '/nothing': No such file or directory")
    reader.feed("E: setup failed: E: command failed: sh customize.sh")
    assert (
        explain(reader)
        == "cannot build the base image: cp: cannot stat '/nothing': No such file or directory"
    )


def test_progress_never_decreases() -> None:
    reader = OutputReader()
    steps: list[Progress] = []
    for line in (
        "I: running apt-get update...",
        "Get:1 mirror trixie InRelease [43.4 kB]",
        "I: downloading packages with apt...",
        "0 upgraded, 59 newly installed, 0 to remove and 0 not upgraded.",
        "I: extracting archives...",
        "I: installing essential packages...",
        "Setting up libc6:amd64 (2.41-12) ...",
        "I: installing remaining packages inside the chroot...",
        "0 upgraded, 2 newly installed, 0 to remove and 0 not upgraded.",
        "Get:1 mirror trixie/main amd64 git amd64 1:2.47.3-0 [8862 kB]",
        "Unpacking git (1:2.47.3-0) ...",
        "Setting up git (1:2.47.3-0) ...",
        "I: running --customize-hook in shell: ...",
    ):
        if step := reader.feed(line):
            steps.append(step)
    fractions = [step.fraction for step in steps if step.fraction is not None]
    assert len(fractions) == len(steps)
    assert fractions == sorted(fractions)
    assert fractions[-1] < 1
    assert [step.detail for step in steps if step.phase == "install"][-1] == "git"


def test_the_package_list_is_readable() -> None:
    packages = read_packages(image_module.FILES / "packages.txt")
    assert "linux-image-cloud-amd64" in packages
    assert all(re.fullmatch(r"[a-z0-9][a-z0-9+.-]+", package) for package in packages)
