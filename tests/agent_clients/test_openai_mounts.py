"""Mounts without a VM: which are refused, in which order the VM is asked, and what is left of credentials."""

import json
import signal
import subprocess
import threading
import uuid
from collections.abc import AsyncGenerator, Sequence
from pathlib import Path
from typing import Any, cast

import pytest
from agents.sandbox import Manifest, SandboxPathGrant
from agents.sandbox.entries import (
    AzureBlobMount,
    DockerVolumeMountStrategy,
    GCSMount,
    InContainerMountStrategy,
    Mount,
    MountpointMountPattern,
    R2Mount,
    RcloneMountPattern,
    S3Mount,
)
from agents.sandbox.errors import MountConfigError, WorkspaceArchiveReadError
from agents.sandbox.snapshot import NoopSnapshot

from stead import Exited, Output
from stead.agents.openai import SteadSandboxClient, SteadSandboxSession, SteadSandboxSessionState, mounts
from stead.agents.openai.mount_scripts import DETACH, LIST, NEEDS, Lack
from stead.sdk import ExecEvent
from support.local_vm import LocalBackend, LocalVm

KEY, SECRET = "the-access-key", "the-secret-of-the-bucket"
RCLONE = InContainerMountStrategy(pattern=RcloneMountPattern())
SCRIPTS = {DETACH: "detach", NEEDS: "needs", LIST: "list"}


class MountingVm(LocalVm):
    """Records the programs of mounts instead of running them; everything else runs on this computer."""

    def __init__(self) -> None:
        super().__init__()
        self.commands: list[tuple[str, list[str]]] = []
        self.ends: dict[str, tuple[int, bytes]] = {}
        """Exit code and output by kind; success without output if there is none."""
        self.id = "local"

    @property
    def kinds(self) -> list[str]:
        return [kind for kind, _ in self.commands]

    async def _events(self, command: Sequence[str], **options: Any) -> AsyncGenerator[ExecEvent]:
        kind = _kind(command)
        if kind is None:
            async for event in super()._events(command, **options):
                yield event
            return
        self.commands.append((kind, list(command)))
        code, output = self.ends.get(kind, (0, b""))
        yield Output("stdout", output, "")
        yield Exited(code)

    async def snapshot(self, name: str, **lifetime: Any) -> Any:
        self.commands.append(("snapshot", []))
        return type("Snapshot", (), {"id": "sc-1"})

    async def fork(self, count: int) -> list[Any]:
        self.commands.append(("fork", []))
        return [self] * count

    async def suspend(self) -> None:
        self.commands.append(("suspend", []))

    async def delete(self) -> None:
        self.commands.append(("delete", []))


def _kind(command: Sequence[str]) -> str | None:
    if command[:2] == ["sh", "-c"]:
        return SCRIPTS.get(command[2])
    if command[0] == "rclone":
        return "mount"
    if command[:2] == ["sh", "-lc"]:
        return next(
            kind
            for word, kind in {"command -v": "tool", "fusermount3": "unmount", "pkill": "kill"}.items()
            if word in command[2]
        )
    return None


def s3(**changes: Any) -> S3Mount:
    return S3Mount(
        **{
            "bucket": "bucket",
            "access_key_id": KEY,
            "secret_access_key": SECRET,
            "mount_strategy": RCLONE,
            **changes,
        }
    )


def manifest_of(entries: dict[str | Path, Mount], root: Path, **more: Any) -> Manifest:
    made = Manifest(entries=dict(entries), root=str(root), **more)
    return made.with_in_container_mount_credential_exposure_acknowledged(*entries)


def session_of(vm: MountingVm, manifest: Manifest, **changes: Any) -> SteadSandboxSession:
    state = SteadSandboxSessionState(
        session_id=uuid.uuid4(), snapshot=NoopSnapshot(id="none"), manifest=manifest, vm_id="local", **changes
    )
    return SteadSandboxSession(state, LocalBackend(vm))


@pytest.fixture
def vm() -> MountingVm:
    return MountingVm()


@pytest.fixture
def root(tmp_path: Path) -> Path:
    return tmp_path / "workspace"


ATTACHED = ["tool", "mount"]
DETACHED = ["unmount", "kill"]


async def test_mounts_are_checked_attached_and_listed(root: Path, vm: MountingVm) -> None:
    session = session_of(vm, manifest_of({"data": s3(), "out/deep": s3(read_only=False)}, root))
    await session.start()
    assert vm.kinds == ["detach", "needs", "needs", *ATTACHED, *ATTACHED, "list", "list"]
    first, second = [command for kind, command in vm.commands if kind == "mount"]
    remote = f"sandbox_s3_{session.state.session_id.hex}:bucket"
    assert first[:5] == ["rclone", "mount", remote, str(root / "data"), "--read-only"]
    assert second[3] == str(root / "out/deep") and "--read-only" not in second
    assert SECRET not in str(vm.commands)
    (written,) = root.glob(".sandbox-rclone-config/*/*.conf")
    assert SECRET in written.read_text() and written.stat().st_mode & 0o777 == 0o600


async def test_mounts_of_an_earlier_start_are_replaced(root: Path, vm: MountingVm) -> None:
    session = session_of(vm, manifest_of({"data": s3()}, root))
    await session.start()
    vm.commands.clear()
    session._set_start_state_preserved(True)
    await session.start()
    assert vm.kinds == ["detach", "needs", *ATTACHED, "list"]


async def test_mounts_are_detached_while_a_snapshot_is_saved(root: Path, vm: MountingVm) -> None:
    session = session_of(vm, manifest_of({"data": s3()}, root))
    await session.start()
    vm.commands.clear()
    await session.persist_workspace()
    assert vm.kinds == [*DETACHED, "detach", "snapshot", *ATTACHED]


async def test_mounts_are_not_in_an_archive(root: Path, vm: MountingVm) -> None:
    session = session_of(vm, manifest_of({"data": s3()}, root), workspace_persistence="tar")
    await session.start()
    (root / "data/object").write_text("in the bucket")
    (root / "kept").write_text("in the workspace")
    with await session.persist_workspace() as archive:
        content = archive.read()
    assert b"in the workspace" in content
    assert b"in the bucket" not in content and SECRET.encode() not in content


async def test_nothing_is_saved_while_a_mount_cannot_be_detached(root: Path, vm: MountingVm) -> None:
    session = session_of(vm, manifest_of({"data": s3()}, root))
    await session.start()
    vm.commands.clear()
    vm.ends["detach"] = (1, b"")
    with pytest.raises(WorkspaceArchiveReadError):
        await session.persist_workspace()
    assert "snapshot" not in vm.kinds and vm.kinds[-2:] == ATTACHED


async def test_forks_have_mounts_of_their_own(root: Path, vm: MountingVm) -> None:
    session = session_of(vm, manifest_of({"data": s3()}, root))
    await session.start()
    vm.commands.clear()
    client = SteadSandboxClient(api_key="none", base_url="http://127.0.0.1:9")
    forks = await client.fork(client._wrap(session), 2)
    own = ["detach", "needs", *ATTACHED, "list"]
    assert vm.kinds == [*DETACHED, "detach", "fork", *ATTACHED, *own, *own]
    remotes = {command[2] for kind, command in vm.commands if kind == "mount"}
    assert len(remotes) == 3 and forks[0].state.session_id.hex in str(remotes)
    vm.commands.clear()
    vm.ends["list"] = (1, b"AccessDenied")
    with pytest.raises(MountConfigError, match="refused the credentials"):
        await client.fork(client._wrap(session), 1)
    assert vm.kinds[-1] == "delete"


async def test_a_suspended_vm_has_no_credentials(root: Path, vm: MountingVm) -> None:
    session = session_of(vm, manifest_of({"data": s3()}, root), pause_on_exit=True)
    await session.start()
    vm.commands.clear()
    await session.persist_workspace()
    assert vm.kinds == []
    await session.shutdown()
    assert vm.kinds == ["detach", "suspend"]


async def test_a_vm_whose_mounts_fail_after_a_snapshot_is_not_deleted(root: Path, vm: MountingVm) -> None:
    session = session_of(vm, manifest_of({"data": s3()}, root))
    await session.start()
    vm.commands.clear()
    vm.ends["mount"] = (1, b"")
    with pytest.raises(WorkspaceArchiveReadError):
        await session.persist_workspace()
    assert "snapshot" in vm.kinds and vm.kinds[-2:] == ["detach", "suspend"]


def test_state_has_no_credentials(root: Path) -> None:
    manifest = manifest_of(
        {
            "s3": s3(session_token=f"{SECRET}-1"),
            "r2": R2Mount(
                bucket="b",
                account_id="a",
                access_key_id=KEY,
                secret_access_key=f"{SECRET}-2",
                mount_strategy=RCLONE,
            ),
            "gcs": GCSMount(
                bucket="b", access_id=KEY, secret_access_key=f"{SECRET}-3", mount_strategy=RCLONE
            ),
            "azure": AzureBlobMount(
                account="a", container="c", account_key=f"{SECRET}-4", mount_strategy=RCLONE
            ),
        },
        root,
    )
    client = SteadSandboxClient()
    payload = json.dumps(client.serialize_session_state(session_of(MountingVm(), manifest).state))
    assert SECRET not in payload and KEY not in payload and "bucket" in payload
    state = client.deserialize_session_state(json.loads(payload))
    with pytest.raises(ValueError, match="cannot be resumed"):
        state.assert_path_grants_rebound()
    again = state.rebind_persisted_mount_authority(manifest, provider_backend_id="stead")
    assert cast(S3Mount, again.manifest.entries["s3"]).secret_access_key == SECRET


@pytest.mark.parametrize(
    ("mount", "reason"),
    [
        (
            s3(mount_strategy=DockerVolumeMountStrategy(driver="rclone")),
            "DockerVolumeMountStrategy is for another sandbox: use InContainerMountStrategy",
        ),
        (s3(mount_path=Path("/mnt/data")), "invalid path: use a path below"),
    ],
)
async def test_what_no_vm_can_mount_is_refused_before_one_is_created(
    root: Path, mount: Mount, reason: str
) -> None:
    manifest = Manifest(entries={"data": mount}, root=str(root))
    async with SteadSandboxClient(api_key="none", base_url="http://127.0.0.1:9") as client:
        with pytest.raises(MountConfigError, match=reason) as caught:
            await client.create(manifest=manifest)
        assert "cannot mount s3_mount at /" in str(caught.value) and SECRET not in str(caught.value)
        with pytest.raises(MountConfigError, match="explicitly acknowledge exposure"):
            await client.create(manifest=Manifest(entries={"data": s3()}))


def test_granted_paths_can_be_mounted(root: Path) -> None:
    def manifest(path: str) -> Manifest:
        entries: dict[str | Path, Mount] = {"data": s3(mount_path=Path(path))}
        return manifest_of(entries, root, extra_path_grants=(SandboxPathGrant(path="/mnt"),))

    mounts.refuse_unsupported(manifest("/mnt/data"))
    for path in ("/mnt/../etc", "/mntdata"):
        with pytest.raises(MountConfigError, match="invalid path"):
            mounts.refuse_unsupported(manifest(path))


@pytest.mark.parametrize(
    ("pattern", "end", "reason"),
    [
        (MountpointMountPattern(), (41, b"mount-s3"), "the VM has no mount-s3: use InContainerMountStrategy"),
        (RcloneMountPattern(), (41, b"/dev/fuse"), "the VM has no /dev/fuse: its kernel has no FUSE"),
        (RcloneMountPattern(mode="nfs"), (41, b"mount.nfs"), "the VM has no mount.nfs: use mode='fuse'"),
        (RcloneMountPattern(), (41, SECRET.encode()), "the VM has no program for it"),
        (RcloneMountPattern(), (42, b""), "the folder is not empty"),
    ],
)
async def test_what_the_vm_lacks_is_reported(
    root: Path, vm: MountingVm, pattern: Any, end: tuple[int, bytes], reason: str
) -> None:
    vm.ends["needs"] = end
    strategy = InContainerMountStrategy(pattern=pattern)
    session = session_of(vm, manifest_of({"data": s3(mount_strategy=strategy)}, root))
    with pytest.raises(MountConfigError) as caught:
        await session.start()
    assert reason in caught.value.message and SECRET not in str(caught.value)
    assert vm.kinds == ["detach", "needs"]


@pytest.mark.parametrize(
    ("code", "said", "reason", "retryable"),
    [
        (1, "AccessDenied: Access Denied. status code: 403", "the storage refused the credentials", False),
        (1, "RESPONSE 403: Server failed AuthenticationFailed", "the storage refused the credentials", False),
        (3, "error listing: directory not found", "the bucket does not exist", False),
        (1, "NoSuchBucket: The specified bucket does not exist", "the bucket does not exist", False),
        (1, "dial tcp 10.0.0.1:80: connect: connection refused", "the VM cannot reach the endpoint", True),
        (1, "dial tcp: lookup s3.invalid: no such host", "the VM cannot reach the endpoint", True),
        (
            1,
            "x509: certificate signed by unknown authority",
            "does not trust the endpoint's certificate",
            False,
        ),
        (7, f"something else with {SECRET}", "rclone cannot list it (exit code 7)", False),
        (43, "", "rclone does not mount it", False),
    ],
)
async def test_a_failed_mount_names_the_reason_and_no_credentials(
    root: Path, vm: MountingVm, code: int, said: str, reason: str, retryable: bool
) -> None:
    vm.ends["list"] = (code, f"{said} {SECRET}".encode())
    session = session_of(vm, manifest_of({"data": s3()}, root))
    for _ in range(2):  # as a new session, and as one that is resumed
        with pytest.raises(MountConfigError) as caught:
            await session.start()
        assert f"cannot mount s3_mount at {root}/data: " in caught.value.message
        assert reason in caught.value.message and SECRET not in str(caught.value)
        assert caught.value.retryable is retryable
        assert vm.kinds[-2:] == ["list", "detach"]
        session._set_start_state_preserved(True)


async def test_a_failed_command_is_explained_by_a_listing(root: Path, vm: MountingVm) -> None:
    vm.ends = {"mount": (1, b""), "list": (1, b"no such host")}
    session = session_of(vm, manifest_of({"data": s3()}, root))
    with pytest.raises(MountConfigError, match="the VM cannot reach the endpoint"):
        await session.start()
    assert vm.kinds == ["detach", "needs", *ATTACHED, "list", "detach"]


async def test_a_prefix_without_objects_can_be_mounted(root: Path, vm: MountingVm) -> None:
    """Nor does a listing that takes too long prevent it: the mount itself has succeeded."""
    for entry, end in ((s3(prefix="new"), (3, b"directory not found")), (s3(), (124, b""))):
        vm.commands.clear()
        vm.ends["list"] = end
        await session_of(vm, manifest_of({"data": entry}, root)).start()
        assert vm.kinds == ["detach", "needs", *ATTACHED, "list"]


def test_detaching_ends_programs_and_deletes_configuration(tmp_path: Path) -> None:
    """The program itself, on this computer. There is no mount, and no other program may be ended."""
    root = tmp_path / "work (1)"
    for folder in (*mounts.CONFIGURATIONS, "data", "database"):
        (root / folder).mkdir(parents=True)
        (root / folder / "file").touch()
    served, other = (
        subprocess.Popen([f"rclone mount r:b {root}/{name} --daemon", "600"], executable="/bin/sleep")
        for name in ("data", "database")
    )
    try:
        # Popen returns after exec, so both have their names.
        command = ["sh", "-c", DETACH, "sh", str(root), " ".join(mounts.CONFIGURATIONS), f"{root}/data"]
        thread = threading.Thread(target=served.wait)  # a zombie would still be found
        thread.start()
        assert subprocess.run(command, timeout=60).returncode == 0
        thread.join(10)
        assert served.returncode == -signal.SIGTERM and other.poll() is None
        assert sorted(path.name for path in root.iterdir()) == ["data", "database"]
        assert (root / "data/file").exists()
    finally:
        for each in (served, other):
            each.kill()
            each.wait()


def test_a_vm_is_asked_for_programs_and_an_empty_folder(tmp_path: Path) -> None:
    def ask(empty: str, *needs: str) -> tuple[int, bytes]:
        end = subprocess.run(
            ["sh", "-c", NEEDS, "sh", str(tmp_path / "data"), empty, *needs],
            capture_output=True,
            timeout=30,
        )
        return end.returncode, end.stdout

    assert ask("1", "sh", "/dev/null") == (0, b"")
    assert ask("1", "sh", "no-such-program", "cat") == (Lack.MISSING, b"no-such-program")
    assert ask("1", "/dev/no-such-device") == (Lack.MISSING, b"/dev/no-such-device")
    (tmp_path / "data").mkdir()
    assert ask("1", "sh") == (0, b"")
    (tmp_path / "data/file").touch()
    assert ask("1", "sh") == (Lack.NOT_EMPTY, b"")
    assert ask("", "sh") == (0, b"")
