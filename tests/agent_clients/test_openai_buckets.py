"""Buckets in the workspaces of agents: rclone in a VM mounts those of real servers on another host."""

import hashlib
import io
import json
import random
from collections.abc import AsyncIterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import pytest_asyncio
from agents.editor import ApplyPatchOperation
from agents.sandbox import Manifest
from agents.sandbox.entries import (
    AzureBlobMount,
    GCSMount,
    InContainerMountStrategy,
    Mount,
    MountpointMountPattern,
    R2Mount,
    RcloneMountPattern,
    S3Mount,
)
from agents.sandbox.errors import MountConfigError
from agents.sandbox.snapshot import LocalSnapshotSpec

from stead import AsyncStead
from stead.agents.openai import SteadSandboxClient, SteadSandboxClientOptions, SteadSession
from stead.host.image import BaseImage
from stead.settings import Settings, Size
from support.installations import other_settings
from support.remote_host import remote_host
from support.serve_process import serving
from support.storage import Storage, storage

pytestmark = [pytest.mark.slow, pytest.mark.timeout(2400)]

RCLONE = InContainerMountStrategy(pattern=RcloneMountPattern())
BIG = random.Random(1).randbytes(32 << 20)
NAMES = ("azure", "gcs", "nested/s3", "r2", "s3")


def manifest_of(**entries: Mount) -> Manifest:
    made = Manifest(entries={name.replace("__", "/"): entry for name, entry in entries.items()})
    paths = [name.replace("__", "/") for name in entries]
    return made.with_in_container_mount_credential_exposure_acknowledged(*paths)


def s3_of(storage: Storage, **changes: Any) -> S3Mount:
    return S3Mount(
        **{
            "bucket": "bucket",
            "endpoint_url": storage.s3_url,
            "s3_provider": "SeaweedFS",
            "access_key_id": storage.access_key,
            "secret_access_key": storage.secret_key,
            "mount_strategy": RCLONE,
            **changes,
        }
    )


def every_kind(storage: Storage) -> Manifest:
    keys: dict[str, Any] = {"secret_access_key": storage.secret_key, "mount_strategy": RCLONE}
    return manifest_of(
        s3=s3_of(storage, read_only=False),
        nested__s3=s3_of(storage, prefix="folder"),
        r2=R2Mount(
            bucket="bucket",
            account_id="none",
            custom_domain=storage.s3_url,
            access_key_id=storage.access_key,
            **keys,
        ),
        gcs=GCSMount(bucket="bucket", access_id=storage.access_key, endpoint_url=storage.s3_url, **keys),
        azure=AzureBlobMount(
            account=storage.account,
            container="container",
            endpoint=storage.azure_url,
            account_key=storage.account_key,
            mount_strategy=RCLONE,
            read_only=False,
        ),
    )


@dataclass(frozen=True)
class BucketServers:
    """A server of Stead and one of each kind of storage."""

    storage: Storage
    url: str
    key: str

    def client(self) -> SteadSandboxClient:
        return SteadSandboxClient(api_key=self.key, base_url=self.url)


@pytest_asyncio.fixture(scope="module")
async def buckets(
    settings: Settings, image: BaseImage, network: None, cache: Path
) -> AsyncIterator[BucketServers]:
    # Each mount is a process of rclone with its buffers.
    size = Size.parse("2x1Gx20G")
    with remote_host([]) as host, other_settings(settings, default_size=size) as other:
        async with (
            storage(host, cache) as found,
            serving(other, STEAD_ALLOW_PRIVATE=str(host.network)) as (_, said),
        ):
            for remote in ("s3:bucket", "azure:container"):
                await found.rclone("mkdir", remote)
                for name in ("note", "folder/note"):
                    await found.rclone("rcat", f"{remote}/{name}", stdin=f"{name} in a bucket\n".encode())
                await found.rclone("rcat", f"{remote}/big", stdin=BIG)
            yield BucketServers(found, said["url"], said["key"])
            async with AsyncStead(said["key"], base_url=said["url"]) as stead:
                for vm in await stead.vms.list():
                    await stead.vms.ref(vm.id).delete()
                for snapshot in await stead.vms.snapshots.list():
                    await stead.vms.snapshots.delete(snapshot.id)


@pytest_asyncio.fixture(scope="module")
async def client(buckets: BucketServers) -> AsyncIterator[SteadSandboxClient]:
    async with buckets.client() as client:
        yield client


@pytest_asyncio.fixture(scope="module")
async def session(
    buckets: BucketServers, client: SteadSandboxClient, tmp_path_factory: pytest.TempPathFactory
) -> SteadSession:
    session = await client.create(
        manifest=every_kind(buckets.storage),
        snapshot=LocalSnapshotSpec(base_path=tmp_path_factory.mktemp("saved")),
    )
    await session.start()
    return session


async def said(session: SteadSession, command: str) -> str:
    end = await session.exec(command, timeout=300)
    assert end.exit_code == 0, (command, end.stdout, end.stderr)
    return end.stdout.decode()


async def assert_mounted(session: SteadSession) -> None:
    for name in NAMES:
        found = await said(session, f"mountpoint -q {name} && cat {name}/note")
        assert found == ("folder/note in a bucket\n" if name == "nested/s3" else "note in a bucket\n"), name


async def test_buckets_of_every_kind_are_listed_and_read(session: SteadSession) -> None:
    await assert_mounted(session)
    for name in ("s3", "r2", "gcs", "azure"):
        listed = {Path(entry.path).name for entry in await session.ls(Path(name))}
        assert {"note", "folder", "big"} <= listed
        assert (await session.read(Path(name, "folder/note"))).read() == b"folder/note in a bucket\n"
        assert (await said(session, f"sha256sum < {name}/big")).split()[0] == hashlib.sha256(BIG).hexdigest()
    assert (await session.read_range("azure/big", offset=20 << 20, length=100)) == BIG[20 << 20 :][:100]


@pytest.mark.parametrize(("name", "remote"), [("s3", "s3:bucket"), ("azure", "azure:container")])
async def test_writable_buckets_are_written(
    session: SteadSession, buckets: BucketServers, name: str, remote: str
) -> None:
    def patch(kind: Any, diff: str) -> ApplyPatchOperation:
        return ApplyPatchOperation(type=kind, path=f"{name}/new/code.py", diff=diff)

    await session.write(Path(name, "new/small"), io.BytesIO(b"\0 small \xff"))
    await session.write(Path(name, "new/small"), io.BytesIO(b"\0 changed \xff"))
    await session.write(Path(name, "new/large"), io.BytesIO(BIG))
    await said(session, f"cp {name}/note {name}/new/copy && mv {name}/new/copy {name}/new/moved")
    await session.apply_patch(patch("create_file", "+print(1)\n"))
    await session.apply_patch(patch("update_file", "-print(1)\n+print(2)\n"))
    assert await buckets.storage.rclone("cat", f"{remote}/new/small") == b"\0 changed \xff"
    assert await buckets.storage.rclone("cat", f"{remote}/new/large") == BIG
    assert await buckets.storage.rclone("cat", f"{remote}/new/moved") == b"note in a bucket\n"
    assert (await buckets.storage.rclone("cat", f"{remote}/new/code.py")).strip() == b"print(2)"
    await session.rm(Path(name, "new"), recursive=True)
    assert b"new/" not in await buckets.storage.rclone("lsf", "--recursive", "--files-only", remote)


async def test_read_only_buckets_refuse_changes(session: SteadSession, buckets: BucketServers) -> None:
    for name in ("r2", "gcs", "nested/s3"):
        end = await session.exec(f"echo changed > {name}/note")
        assert end.exit_code != 0 and b"Read-only file system" in end.stderr
    assert await buckets.storage.rclone("cat", "s3:bucket/note") == b"note in a bucket\n"


async def test_other_users_see_a_bucket_that_allows_them(
    session: SteadSession, buckets: BucketServers
) -> None:
    await session.exec("useradd -m bob")
    assert (await session.exec("cat s3/note", user="bob")).exit_code != 0
    strategy = InContainerMountStrategy(pattern=RcloneMountPattern(extra_args=["--allow-other"]))
    manifest = manifest_of(shared=s3_of(buckets.storage, mount_strategy=strategy))
    async with buckets.client() as client:
        other = await client.create(
            manifest=manifest, options=SteadSandboxClientOptions(key=(await session.vm.info()).name)
        )
        await other.start()
        assert (await other.exec("cat shared/note", user="bob")).stdout == b"note in a bucket\n"
        await said(other, "umount shared && rmdir shared")


async def test_buckets_survive_the_sleep_of_the_vm(session: SteadSession) -> None:
    await session.vm.suspend()
    await assert_mounted(session)


async def test_snapshots_contain_neither_buckets_nor_credentials(
    session: SteadSession, buckets: BucketServers
) -> None:
    # A program that uses a bucket does not keep it mounted.
    await session.pty_exec_start("cd s3/folder && exec sleep 100000", yield_time_s=0.25)
    assert b"snapshotId" in (await session.persist_workspace()).read()
    await assert_mounted(session)
    saved = session._stead.state.saved_snapshot_id
    assert saved is not None
    vm = await session._stead.backend.stead.vms.create(snapshot_id=saved)
    try:
        look = "cd /workspace && ls -A && ls -A s3/ azure/ | grep -v / ; grep -c /workspace /proc/mounts"
        found = (await vm.exec(look)).stdout.split()
        assert sorted(found) == ["0", *sorted({name.partition("/")[0] for name in NAMES})]
        assert (await vm.exec("pgrep rclone")).status_code == 1
        for secret in (buckets.storage.secret_key, buckets.storage.account_key):
            end = await vm.exec("grep -rF -f - /workspace /root /tmp /etc", stdin=secret, timeout=300)
            assert end.status_code == 1, end.stdout
    finally:
        await vm.delete()


async def test_forks_mount_the_buckets_too(session: SteadSession, buckets: BucketServers) -> None:
    (fork,) = await session.fork(1)
    try:
        await assert_mounted(fork)
        await assert_mounted(session)
        await fork.write(Path("s3/from-the-fork"), io.BytesIO(b"written"))
        assert await buckets.storage.rclone("cat", "s3:bucket/from-the-fork") == b"written"
    finally:
        await fork.shutdown()


async def test_failures_name_the_reason(session: SteadSession, buckets: BucketServers) -> None:
    options = SteadSandboxClientOptions(key=(await session.vm.info()).name)
    address = buckets.storage.host.address
    nfs, mountpoint = RcloneMountPattern(mode="nfs"), MountpointMountPattern()
    cases = {
        "the storage refused the credentials": s3_of(buckets.storage, secret_access_key="wrong"),
        "the bucket does not exist": s3_of(buckets.storage, bucket="missing"),
        "the VM cannot reach the endpoint": s3_of(buckets.storage, endpoint_url=f"http://{address}:9"),
        "the VM has no mount-s3": s3_of(
            buckets.storage, mount_strategy=InContainerMountStrategy(pattern=mountpoint)
        ),
        "the VM has no mount.nfs": s3_of(
            buckets.storage, mount_strategy=InContainerMountStrategy(pattern=nfs)
        ),
    }
    async with buckets.client() as client:
        for reason, mount in cases.items():
            other = await client.create(manifest=manifest_of(bad=mount), options=options)
            with pytest.raises(MountConfigError, match=reason) as caught:
                await other.start()
            assert "cannot mount s3_mount at /workspace/bad: " in caught.value.message
            assert (await session.exec("mountpoint -q bad")).exit_code != 0
    await assert_mounted(session)


async def test_sessions_are_resumed_with_their_buckets(session: SteadSession, buckets: BucketServers) -> None:
    """By another client, in the VM that is running, and then in a new one from what was saved."""
    await session.exec("echo kept > file")
    await session.stop()
    manifest = every_kind(buckets.storage)
    async with buckets.client() as other:
        payload = json.loads(json.dumps(other.serialize_session_state(session.state)))
        assert buckets.storage.secret_key not in str(payload)
        state = other.deserialize_session_state(payload)
        with pytest.raises(ValueError, match="cannot be resumed"):
            await other.resume(state)
        state = state.rebind_persisted_mount_authority(manifest, provider_backend_id="stead")
        again = await other.resume(state)
        await again.start()
        assert again.vm.id == session.vm.id
        await assert_mounted(again)
        await again.stop()
        await again.vm.delete()
        fresh = await other.resume(again.state)
        await fresh.start()
        assert fresh.vm.id != session.vm.id
        await assert_mounted(fresh)
        assert await said(fresh, "cat file") == "kept\n"
