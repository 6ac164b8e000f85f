"""Mounts of buckets in the VM: what they need, their attachment, and their removal before the VM is saved.

The agent framework writes the configuration of rclone into the workspace and starts it there. It hides the
reason of every failure of a mount with credentials, so the VM is asked for the reason here. Only sentences of
this module are reported, never what a program in the VM printed: it knows the credentials.
"""

import logging
import re
from collections.abc import Awaitable, Callable, Sequence
from pathlib import Path, PurePosixPath
from typing import TYPE_CHECKING, TypeVar

from agents.sandbox import Manifest
from agents.sandbox._mount_security import _mark_mount_error_data_safe
from agents.sandbox.entries import (
    BaseEntry,
    FuseMountPattern,
    InContainerMountStrategy,
    Mount,
    MountpointMountPattern,
    RcloneMountPattern,
    S3FilesMountPattern,
)
from agents.sandbox.entries.mounts.patterns import RcloneMountConfig
from agents.sandbox.errors import (
    MountArtifactError,
    MountConfigError,
    SandboxError,
    WorkspaceArchiveReadError,
)
from agents.sandbox.session.mount_lifecycle import with_ephemeral_mounts_removed

from stead.agents.openai.errors import transport_error
from stead.agents.openai.guest import Finished, run
from stead.agents.openai.mount_scripts import DETACH, LIST, NEEDS, Lack
from stead.sdk import SteadException

if TYPE_CHECKING:
    from stead.agents.openai.session import SteadSandboxSession

logger = logging.getLogger(__name__)

Result = TypeVar("Result")
Target = tuple[Path, Mount]

CONFIGURATIONS = (".sandbox-rclone-config", ".sandbox-mountpoint-env", ".sandbox-blobfuse-config")
"""Folders of the workspace in which the framework writes credentials."""
_NOT_FOUND, _TIMED_OUT = 3, 124
"""Exit codes of rclone and of timeout."""
_LONGEST_CHECK = 120.0

_RCLONE_ONLY = "use InContainerMountStrategy(pattern=RcloneMountPattern())"
_HINTS = {
    "/dev/fuse": "its kernel has no FUSE",
    "mount.nfs": "use mode='fuse', or a snapshot of a VM with the Debian package nfs-common",
}
_REASONS = (
    (
        re.compile(r"NoSuchBucket|ContainerNotFound|bucket does ?n.t exist", re.IGNORECASE),
        "the bucket does not exist",
        False,
    ),
    (
        re.compile(
            r"AccessDenied|InvalidAccessKeyId|SignatureDoesNotMatch|AuthenticationFailed|AuthorizationFailure"
            r"|Forbidden|Unauthorized|invalid_grant|\b40[13]\b",
            re.IGNORECASE,
        ),
        "the storage refused the credentials",
        False,
    ),
    (
        re.compile(r"x509|certificate", re.IGNORECASE),
        "the VM does not trust the endpoint's certificate",
        False,
    ),
    (
        re.compile(
            r"connection refused|no such host|unreachable|connection reset|timeout|timed out|no route",
            re.IGNORECASE,
        ),
        "the VM cannot reach the endpoint",
        True,
    ),
)


def refuse_unsupported(manifest: Manifest) -> None:
    """Refuse what no VM can mount, before one is created."""
    root = PurePosixPath(manifest.root)
    allowed = [root, *(PurePosixPath(grant.path) for grant in manifest.extra_path_grants)]
    for mount, path in manifest.mount_targets():
        place = PurePosixPath(path.as_posix())
        if not isinstance(mount.mount_strategy, InContainerMountStrategy):
            name = type(mount.mount_strategy).__name__
            raise _refusal(mount, place, f"{name} is for another sandbox: {_RCLONE_ONLY}")
        inside = any(place.is_relative_to(each) for each in allowed) and ".." not in place.parts
        if place == root or not inside:
            hint = f"use a path below {root}, or one that extra_path_grants contains"
            raise _refusal(mount, place, f"invalid path: {hint}")


async def detached(session: "SteadSandboxSession", operation: Callable[[], Awaitable[Result]]) -> Result:
    """Run an operation while nothing is mounted and the VM has no credentials of mounts."""
    if not session.state.manifest.ephemeral_mount_targets():
        return await operation()

    async def alone() -> Result:
        await detach(session)
        return await operation()

    return await with_ephemeral_mounts_removed(
        session,
        alone,
        error_path=Path(session.state.manifest.root),
        error_cls=WorkspaceArchiveReadError,
        operation_error_context_key="snapshot_error",
    )


async def detach(session: "SteadSandboxSession") -> None:
    """Unmount what the manifest mounts, end its programs, and delete their configuration."""
    paths = [path.as_posix() for _, path in session.state.manifest.mount_targets()]
    if not paths:
        return
    root = session.state.manifest.root
    end = await _run(session, [DETACH, "sh", root, " ".join(CONFIGURATIONS), *paths])
    if end.exit_code:
        raise WorkspaceArchiveReadError(
            path=Path(root),
            context={"reason": "cannot detach the mounts: their programs do not end"},
            retryable=False,
        )


async def try_detach(session: "SteadSandboxSession") -> None:
    """Detach at the end of a session or after an error, where a failure is only logged."""
    try:
        await detach(session)
    except SandboxError as error:
        logger.warning("cannot detach the mounts of VM %s: %s", session.state.vm_id, error)


async def attach(
    session: "SteadSandboxSession",
    entries: Sequence[tuple[Path, BaseEntry]],
    apply: Callable[[], Awaitable[Result]],
) -> Result:
    """Apply entries some of which are mounts. Mounts of an earlier start are replaced."""
    targets = [
        (entry._resolve_mount_path(session, path), entry)
        for path, entry in entries
        if isinstance(entry, Mount)
    ]
    if not targets:
        return await apply()
    await detach(session)
    for target in targets:
        await _check_needs(session, target)
    try:
        try:
            result = await apply()
        except MountArtifactError:
            for target in targets:
                await _check_listing(session, target)
            raise
        for target in targets:
            await _check_listing(session, target)
    except Exception:
        # A folder without its mount would look like an empty bucket.
        await try_detach(session)
        raise
    return result


async def _check_needs(session: "SteadSandboxSession", target: Target) -> None:
    path, mount = target
    pattern = _pattern(mount)
    non_empty = isinstance(pattern, RcloneMountPattern) and "--allow-non-empty" not in pattern.extra_args
    command = [NEEDS, "sh", path.as_posix(), "1" if non_empty else "", *_needs(pattern)]
    end = await _run(session, command)
    if end.exit_code == Lack.MISSING:
        # One of the needs; what the VM prints is not trusted.
        missing = next((need for need in _needs(pattern) if need.encode() == end.stdout), "program for it")
        hint = _HINTS.get(missing, f"{_RCLONE_ONLY}, or a snapshot of a VM with {missing}")
        raise _refusal(mount, path, f"the VM has no {missing}: {hint}")
    if end.exit_code == Lack.NOT_EMPTY:
        raise _refusal(mount, path, "the folder is not empty")
    if end.exit_code:
        raise _refusal(mount, path, f"cannot check the VM (exit code {end.exit_code})")


async def _check_listing(session: "SteadSandboxSession", target: Target) -> None:
    """rclone mounts anything: wrong credentials fail each access, and a missing bucket is an empty folder."""
    path, mount = target
    pattern = _pattern(mount)
    if not isinstance(pattern, RcloneMountPattern):
        return
    config = await mount.build_in_container_mount_config(session, pattern, include_config_text=False)
    if not isinstance(config, RcloneMountConfig):
        return
    folder = PurePosixPath(session.state.manifest.root, CONFIGURATIONS[0], session.state.session_id.hex)
    file = folder / f"{config.remote_name}.conf"
    remote = f"{config.remote_name}:{config.remote_path}"
    end = await _run(session, [LIST, "sh", path.as_posix(), remote, str(file)])
    # A listing that takes long is one of many objects. Below a prefix there may be no object yet.
    if end.exit_code in (0, _TIMED_OUT) or (end.exit_code == _NOT_FOUND and "/" in config.remote_path):
        return
    reason, retryable = failure(end.exit_code, end.stdout.decode(errors="replace"))
    raise _refusal(mount, path, reason, retryable=retryable)


def failure(exit_code: int, said: str) -> tuple[str, bool]:
    """Why rclone cannot list a bucket, in a sentence that repeats nothing of its output; True to retry."""
    for pattern, reason, retryable in _REASONS:
        if pattern.search(said):
            return reason, retryable
    if exit_code == _NOT_FOUND:
        return "the bucket does not exist", False
    if exit_code == Lack.NOT_MOUNTED:
        return "rclone does not mount it", False
    return f"rclone cannot list it (exit code {exit_code})", False


def _pattern(mount: Mount) -> object:
    strategy = mount.mount_strategy
    return strategy.pattern if isinstance(strategy, InContainerMountStrategy) else None


def _needs(pattern: object) -> tuple[str, ...]:
    match pattern:
        case RcloneMountPattern(mode="nfs"):
            return ("rclone", "rclone serve nfs", "mount.nfs")
        case RcloneMountPattern():
            return ("rclone", "fusermount3", "/dev/fuse")
        case MountpointMountPattern():
            return ("mount-s3", "/dev/fuse")
        case FuseMountPattern():
            return ("blobfuse2", "/dev/fuse")
        case S3FilesMountPattern():
            return ("mount.s3files",)
    return ()


def _refusal(
    mount: Mount, path: PurePosixPath | Path, reason: str, *, retryable: bool = False
) -> MountConfigError:
    message = f"cannot mount {mount.type} at {path.as_posix()}: {reason}"
    # In a run, the framework replaces the message of any error.
    logger.warning("%s", message)
    error = MountConfigError(message=message)
    error.retryable = retryable
    _mark_mount_error_data_safe(error)
    return error


async def _run(session: "SteadSandboxSession", script: list[str]) -> Finished:
    session.files.forget()
    try:
        return await run(session.vm, ["sh", "-c", *script], harmless=True, timeout=_LONGEST_CHECK)
    except SteadException as error:
        raise transport_error(("sh", "-c", "mounts"), error) from error
