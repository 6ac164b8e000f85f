"""Workspaces of agents without a VM: how many requests they take, and which errors they raise."""

import dataclasses
import io
import os
import tarfile
import uuid
from datetime import UTC, datetime, timedelta
from pathlib import Path

import pytest
from agents.editor import ApplyPatchOperation
from agents.sandbox import Manifest, SandboxPathGrant, SandboxRunConfig
from agents.sandbox.entries import BaseEntry, Dir, File, GitRepo, LocalDir, LocalFile
from agents.sandbox.errors import (
    ApplyPatchDiffError,
    ApplyPatchPathError,
    ExecTransportError,
    InvalidManifestPathError,
    LocalDirReadError,
    WorkspaceArchiveReadError,
    WorkspaceArchiveWriteError,
    WorkspaceStartError,
)
from agents.sandbox.session import SandboxSessionState
from agents.sandbox.snapshot import LocalSnapshot, NoopSnapshot
from agents.sandbox.types import FileMode, Group, Permissions, User

from stead import AsyncStead, ServerUnreachable, VmNotFound
from stead.agents.openai import (
    SteadSandboxClient,
    SteadSandboxClientOptions,
    SteadSandboxSession,
    SteadSandboxSessionState,
)
from stead.agents.openai.accounts import accounts_script
from stead.agents.openai.backend import Backend
from stead.agents.openai.references import WorkspaceReference, parse_reference, saved_reference
from stead.sdk import NoAnswerInTime
from support.local_vm import LocalBackend, LocalVm
from support.scripted_server import Reply, scripted

Entries = dict[str | Path, BaseEntry]


def local_session(root: Path, vm: LocalVm, manifest: Manifest | None = None) -> SteadSandboxSession:
    found = (manifest or Manifest()).model_copy(update={"root": str(root)})
    state = SteadSandboxSessionState(
        session_id=uuid.uuid4(), snapshot=NoopSnapshot(id="none"), manifest=found, vm_id="local"
    )
    return SteadSandboxSession(state, LocalBackend(vm))


@pytest.fixture
def vm() -> LocalVm:
    return LocalVm()


@pytest.fixture
def session(tmp_path: Path, vm: LocalVm) -> SteadSandboxSession:
    root = tmp_path / "workspace"
    root.mkdir()
    (root / "notes.txt").write_text("one\ntwo\nthree\n")
    return local_session(root, vm)


async def test_manifest_with_30_files_takes_one_request(
    tmp_path: Path, vm: LocalVm, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = tmp_path / "folder"
    for number in range(20):
        place = folder / f"sub{number % 4}" / f"file{number}"
        place.parent.mkdir(parents=True, exist_ok=True)
        place.write_bytes(os.urandom(1000))
    (folder / "sub0" / "file0").chmod(0o700)
    monkeypatch.chdir(tmp_path)
    entries: Entries = {
        f"notes/{number}.txt": File(content=f"note {number}".encode()) for number in range(10)
    }
    manifest = Manifest(entries={**entries, "copy": LocalDir(src=Path("folder"))})
    root = tmp_path / "workspace"
    session = local_session(root, vm, manifest)
    await session.start()
    assert vm.calls == ["upload"]
    assert (root / "notes/7.txt").read_text() == "note 7"
    assert (root / "notes/7.txt").stat().st_mode & 0o777 == 0o755
    copied = {path.relative_to(root / "copy"): path.read_bytes() for path in (root / "copy").rglob("*/*")}
    assert copied == {path.relative_to(folder): path.read_bytes() for path in folder.rglob("*/*")}
    assert (root / "copy/sub0/file0").stat().st_mode & 0o777 == 0o755
    assert (root / "copy/sub1/file1").stat().st_mode & 0o777 == 0o644


async def test_only_ephemeral_entries_are_applied_again(tmp_path: Path, vm: LocalVm) -> None:
    entries: Entries = {
        "kept": File(content=b"from the manifest"),
        "folder": Dir(children={"again": File(content=b"again", ephemeral=True), "kept": File(content=b"x")}),
    }
    session = local_session(tmp_path / "workspace", vm, Manifest(entries=entries))
    await session.start()
    (tmp_path / "workspace/kept").write_text("changed by the agent")
    (tmp_path / "workspace/folder/again").unlink()
    session._set_start_state_preserved(True)
    await session.start()
    assert (tmp_path / "workspace/kept").read_text() == "changed by the agent"
    assert (tmp_path / "workspace/folder/again").read_text() == "again"
    assert vm.calls == ["upload", "upload"]


async def test_vm_that_does_not_answer_is_not_taken_for_an_empty_one(tmp_path: Path, vm: LocalVm) -> None:
    root = tmp_path / "workspace"
    root.mkdir()
    (root / "kept").write_text("changed by the agent")
    session = local_session(root, vm, Manifest(entries={"kept": File(content=b"from the manifest")}))
    session._set_start_state_preserved(True)
    vm.failures = [NoAnswerInTime("no answer", sent=True)]
    with pytest.raises(WorkspaceStartError):
        await session.start()
    await session.start()
    assert (root / "kept").read_text() == "changed by the agent"
    assert vm.calls == ["test", "test"]


async def test_groups_and_permissions_of_entries(tmp_path: Path, vm: LocalVm) -> None:
    mode = Permissions(owner=FileMode.READ | FileMode.WRITE, group=FileMode.READ)
    root_user = User(name="root")
    entries: Entries = {
        "private": File(content=b"x", permissions=mode, group=Group(name="root", users=[root_user]))
    }
    session = local_session(tmp_path / "workspace", vm, Manifest(entries=entries))
    await session.start()
    assert (tmp_path / "workspace/private").stat().st_mode & 0o777 == 0o640
    assert vm.calls == ["upload", "sh"]


async def test_local_folders_outside_the_grants_are_refused(tmp_path: Path, vm: LocalVm) -> None:
    session = local_session(tmp_path / "w", vm, Manifest(entries={"etc": LocalDir(src=Path("/etc/ssl"))}))
    with pytest.raises(LocalDirReadError):
        await session.start()
    assert vm.calls == []


async def test_local_files_of_grants_are_copied(tmp_path: Path, vm: LocalVm) -> None:
    (tmp_path / "data").write_bytes(b"\xff\0")
    manifest = Manifest(
        entries={"copy": LocalFile(src=tmp_path / "data")},
        extra_path_grants=(SandboxPathGrant(path=str(tmp_path)),),
    )
    await local_session(tmp_path / "w", vm, manifest).start()
    assert (tmp_path / "w/copy").read_bytes() == b"\xff\0"


async def test_repositories_are_cloned_in_the_vm_after_the_upload(tmp_path: Path, vm: LocalVm) -> None:
    entries: Entries = {
        "file": File(content=b"x"),
        "repo": GitRepo(host="host.invalid", repo="owner/name", ref="main"),
    }
    session = local_session(tmp_path / "w", vm, Manifest(entries=entries))
    with pytest.raises(Exception, match=r"git|clone|exited"):
        await session.start()
    assert vm.calls[0] == "upload" and len(vm.calls) > 1


def patch(kind: str, path: str, diff: str | None = None, move_to: str | None = None) -> ApplyPatchOperation:
    return ApplyPatchOperation(type=kind, path=path, diff=diff, move_to=move_to)  # type: ignore[arg-type]


async def test_patches_take_at_most_two_requests_for_each_file(
    session: SteadSandboxSession, vm: LocalVm
) -> None:
    root = Path(session.state.manifest.root)
    await session.apply_patch(patch("update_file", "notes.txt", " one\n-two\n+TWO\n three\n"))
    assert (root / "notes.txt").read_text() == "one\nTWO\nthree\n"
    assert vm.calls == ["read", "write"]
    vm.calls.clear()
    await session.apply_patch(patch("create_file", "new/deep.txt", "+created\n"))
    assert (root / "new/deep.txt").read_text() == "created"
    assert vm.calls == ["create"]
    vm.calls.clear()
    await session.apply_patch(patch("delete_file", "new/deep.txt"))
    assert vm.calls == ["read", "rm"]
    vm.calls.clear()
    await session.apply_patch(patch("update_file", "notes.txt", " one\n-TWO\n+2\n three\n", "new/moved.txt"))
    assert (root / "new/moved.txt").read_text() == "one\n2\nthree\n" and not (root / "notes.txt").exists()
    assert vm.calls == ["read", "same-entry", "write", "rm"]  # two files


async def test_patch_does_not_overwrite_a_file_that_it_creates(session: SteadSandboxSession) -> None:
    with pytest.raises(ApplyPatchDiffError, match="already exists"):
        await session.apply_patch(patch("create_file", "notes.txt", "+other\n"))
    assert (Path(session.state.manifest.root) / "notes.txt").read_text().startswith("one")


async def test_folder_is_made_if_something_happened_since_it_was_seen(
    session: SteadSandboxSession, vm: LocalVm
) -> None:
    await session.write(Path("sub/file"), io.BytesIO(b"x"))
    await session.read(Path("sub/file"))
    await session.rm("sub", recursive=True)
    await session.mkdir("sub", parents=True)
    assert (Path(session.state.manifest.root) / "sub").is_dir()


async def test_paths_outside_are_refused(session: SteadSandboxSession, vm: LocalVm) -> None:
    for path in ("../secret", "/etc/passwd"):
        with pytest.raises(InvalidManifestPathError):
            await session.read(Path(path))
    assert vm.calls == []
    (Path(session.state.manifest.root) / "link").symlink_to("/etc/passwd")
    with pytest.raises(InvalidManifestPathError):
        await session.read(Path("link"))
    assert vm.calls == ["read"]


@pytest.mark.parametrize(
    "path", ["file", "folder", "folder/file", "folder/new", "dangling", "up", "chain", "root"]
)
@pytest.mark.parametrize("kind", ["create_file", "update_file", "delete_file", "move_to", "move_from"])
async def test_patches_through_links_out_of_the_workspace_are_refused(
    session: SteadSandboxSession, tmp_path: Path, kind: str, path: str
) -> None:
    """As the clients of the Agents SDK itself do, with the path that the model gave."""
    root, out = Path(session.state.manifest.root), tmp_path / "out"
    out.mkdir()
    (out / "file").write_text("one\ntwo\nthree\n")
    links = {
        "file": "../out/file",
        "folder": "../out",
        "dangling": "../out/a/b",
        "up": "..",
        "chain": "file",
        "root": "/",
    }
    for name, target in links.items():
        (root / name).symlink_to(target)
    change = " one\n-two\n+TWO\n three\n"
    operation = {
        "create_file": patch("create_file", path, "+new\n"),
        "move_to": patch("update_file", "notes.txt", change, path),
        "move_from": patch("update_file", path, change, "moved.txt"),
    }.get(kind) or patch(kind, path, change)
    with pytest.raises(InvalidManifestPathError, match=rf"must not escape root: {path}$"):
        await session.apply_patch(operation)
    with pytest.raises(InvalidManifestPathError, match=rf"must not escape root: {path}$"):
        absolute = dataclasses.replace(
            operation,
            path=str(root / operation.path),
            move_to=None if operation.move_to is None else str(root / operation.move_to),
        )
        await session.apply_patch(absolute)
    assert {each.name: each.read_text() for each in out.iterdir()} == {"file": "one\ntwo\nthree\n"}
    assert (root / "notes.txt").exists() and (root / path).is_symlink() == ("/" not in path)


@pytest.mark.parametrize("path", ["../out", "sub/../../out", "/etc/passwd", "/workspace-2/x"])
@pytest.mark.parametrize("kind", ["create_file", "update_file", "delete_file", "move_to"])
async def test_patches_of_paths_outside_are_refused_without_a_request(
    session: SteadSandboxSession, vm: LocalVm, kind: str, path: str
) -> None:
    moved = kind == "move_to"
    change = " one\n-two\n+TWO\n three\n"
    operation = patch("update_file", "notes.txt", change, path) if moved else patch(kind, path, change)
    with pytest.raises(ApplyPatchPathError):
        await session.apply_patch(operation)
    assert vm.calls == (["read"] if moved else [])


@pytest.mark.parametrize("path", ["inner", "inner-folder", "inner-dangling", "inner-folder/file"])
async def test_patch_does_not_create_a_file_through_a_link_of_the_workspace(
    session: SteadSandboxSession, path: str
) -> None:
    root = Path(session.state.manifest.root)
    (root / "real").mkdir()
    (root / "real/file").write_text("kept")
    links = {"inner": "real/file", "inner-folder": "real", "inner-dangling": "missing/nowhere"}
    for name, target in links.items():
        (root / name).symlink_to(target)
    with pytest.raises(ApplyPatchDiffError, match="already exists"):
        await session.apply_patch(patch("create_file", path, "+new\n"))
    assert (root / "real/file").read_text() == "kept" and not (root / "missing").exists()


async def test_broken_connections_are_survived_where_a_repetition_is_safe(
    session: SteadSandboxSession, vm: LocalVm
) -> None:
    vm.failures = [ServerUnreachable("cut", sent=True), ServerUnreachable("refused", sent=False)]
    assert (await session.read(Path("notes.txt"))).read() == b"one\ntwo\nthree\n"
    vm.failures = [ServerUnreachable("cut", sent=True)]
    await session.write(Path("notes.txt"), io.BytesIO(b"new"))
    vm.failures = [ServerUnreachable("refused", sent=False)]
    assert (await session.exec("echo ran")).stdout == b"ran\n"


async def test_errors_say_truthfully_if_they_can_be_retried(
    session: SteadSandboxSession, vm: LocalVm
) -> None:
    vm.failures = [ServerUnreachable("cut", sent=True)]
    with pytest.raises(ExecTransportError) as caught:
        await session.exec("touch once")
    assert caught.value.retryable is False and caught.value.context["retry_safe"] is False
    assert vm.calls == ["sh"]
    vm.failures = [VmNotFound("no VM", code="VM_NOT_FOUND", status=404)]
    with pytest.raises(WorkspaceArchiveWriteError) as refused:
        await session.write(Path("x"), io.BytesIO(b""))
    assert refused.value.retryable is False


def test_options_have_defaults_and_are_validated() -> None:
    client = SteadSandboxClient()
    assert client.supports_default_options and client.backend_id == "stead"
    assert SandboxRunConfig(client=client).options is None
    assert SteadSandboxClientOptions(size="2x4Gx20G").size == "2x4Gx20G"
    assert SteadSandboxClientOptions().snapshot_ttl_days == 7
    assert SteadSandboxClientOptions(snapshot_ttl_days=None).snapshot_ttl_days is None
    for days in (0, -1, 3651, float("nan")):
        with pytest.raises(ValueError, match="snapshot_ttl_days"):
            SteadSandboxClientOptions(snapshot_ttl_days=days)
    with pytest.raises(ValueError, match="workspace_persistence"):
        SteadSandboxClientOptions(workspace_persistence="other")  # type: ignore[arg-type]


def test_state_is_restored_from_json(tmp_path: Path) -> None:
    state = SteadSandboxSessionState(
        session_id=uuid.uuid4(),
        snapshot=LocalSnapshot(id="x", base_path=tmp_path),
        manifest=Manifest(),
        vm_id="abc",
        commands={1234: 56},
        snapshot_ttl_days=None,
    )
    client = SteadSandboxClient()
    again = client.deserialize_session_state(client.serialize_session_state(state))
    assert isinstance(again, SteadSandboxSessionState)
    assert (again.vm_id, again.commands, again.session_id) == ("abc", {1234: 56}, state.session_id)
    assert again.snapshot_ttl_days is None
    assert isinstance(SandboxSessionState.parse(state.model_dump(mode="json")), SteadSandboxSessionState)
    # A state of a release without lifetimes.
    payload = client.serialize_session_state(state)
    del payload["snapshot_ttl_days"]
    old = client.deserialize_session_state(payload)
    assert isinstance(old, SteadSandboxSessionState) and old.snapshot_ttl_days == 7


@pytest.mark.parametrize(
    ("ends_in", "days", "sent"),
    [
        (1, 7, {"ttlSeconds": 7 * 86400}),
        (1, None, {"expiresAt": None}),
        (30, 7, None),
        (None, 7, None),
    ],
)
async def test_saved_snapshot_lasts_anew_but_never_shorter(
    ends_in: int | None, days: float | None, sent: dict[str, object] | None
) -> None:
    snapshot = "sc-" + "x" * 20
    ends = None if ends_in is None else (datetime.now(UTC) + timedelta(days=ends_in)).isoformat()
    row = Reply(content={"snapshotId": snapshot, "expiresAt": ends})
    with scripted(row, Reply(), row) as server:
        async with AsyncStead("key", base_url=server.url) as stead:
            await Backend(stead).extend(snapshot, days)
    assert [seen.json for seen in server.seen if seen.method == "PATCH"] == ([] if sent is None else [sent])


async def test_saved_snapshot_that_is_gone_does_not_prevent_a_resume() -> None:
    gone = Reply(404, {"code": "SNAPSHOT_NOT_FOUND", "message": "gone"})
    with scripted(gone, Reply(500, {"code": "INTERNAL", "message": "no"})) as server:
        async with AsyncStead("key", base_url=server.url, max_retries=0) as stead:
            for _ in range(2):
                await Backend(stead).extend("sc-" + "x" * 20, 7)
            await Backend(stead).extend(None, 7)
    assert len(server.seen) == 2


async def test_references_are_told_from_archives(tmp_path: Path) -> None:
    for reference in (WorkspaceReference(snapshot_id="sc-1"), WorkspaceReference(vm_id="v")):
        assert parse_reference(reference.stream().read()) == reference
    assert parse_reference(b"\0" * 512) is None
    magic = WorkspaceReference(vm_id="v").stream().read().partition(b"\n")[0] + b"\n"
    for broken in (b"", b"{}", b"[]", b'{"vmId": 3}', b'{"vmId": "a", "snapshotId": "b"}'):
        with pytest.raises(ValueError, match="invalid workspace reference"):
            parse_reference(magic + broken)
    saved = LocalSnapshot(id="x", base_path=tmp_path)
    state = SteadSandboxSessionState(
        session_id=uuid.uuid4(), snapshot=saved, manifest=Manifest(), vm_id="local"
    )
    assert await saved_reference(state, None) is None
    await saved.persist(WorkspaceReference(snapshot_id="sc-2").stream())
    assert await saved_reference(state, None) == WorkspaceReference(snapshot_id="sc-2")


@pytest.mark.parametrize(
    ("mode", "saved_as", "taken"),
    [
        ("snapshot", None, True),
        ("snapshot", "reference", True),
        ("snapshot", "archive", False),
        ("tar", None, False),
        ("tar", "archive", False),
    ],
)
async def test_reference_is_taken_only_from_a_session_that_wrote_one(
    tmp_path: Path, mode: str, saved_as: str | None, taken: bool
) -> None:
    saved = LocalSnapshot(id="x", base_path=tmp_path)
    await saved.persist(WorkspaceReference(vm_id="of-another-session").stream())
    state = SteadSandboxSessionState.model_validate(
        {
            "session_id": uuid.uuid4(),
            "snapshot": saved,
            "manifest": Manifest(),
            "vm_id": "local",
            "workspace_persistence": mode,
            "saved_as": saved_as,
        }
    )
    assert (await saved_reference(state, None) is not None) == taken


@pytest.mark.parametrize("sent", [WorkspaceReference(vm_id="victim").stream().read(), b"no archive " * 100])
async def test_program_in_the_vm_cannot_save_something_else_as_the_archive(
    session: SteadSandboxSession, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, sent: bytes
) -> None:
    """A program of another session could be forked with the bytes that stand for `tar` in this one."""
    session.state.workspace_persistence = "tar"
    packed = await session.persist_workspace()
    assert session.state.saved_as == "archive"
    with packed, tarfile.open(fileobj=packed) as archive:
        assert "./notes.txt" in archive.getnames()
    (tmp_path / "sent").write_bytes(sent)
    (tmp_path / "tar").write_text(f"#!/bin/sh\ncat {tmp_path}/sent\n")
    (tmp_path / "tar").chmod(0o755)
    monkeypatch.setenv("PATH", str(tmp_path), prepend=":")
    with pytest.raises(WorkspaceArchiveReadError, match="archive"):
        await session.persist_workspace()
    with pytest.raises(WorkspaceArchiveWriteError):
        await session.hydrate_workspace(io.BytesIO(sent))
    assert session.state.vm_id == "local"


def test_accounts_are_one_script() -> None:
    assert accounts_script(Manifest()) is None
    bob = User(name="bob; rm -rf /")
    script = accounts_script(Manifest(users=[bob], groups=[Group(name="team", users=[bob])]))
    assert script is not None and script.startswith("set -e\n") and "'bob; rm -rf /'" in script
