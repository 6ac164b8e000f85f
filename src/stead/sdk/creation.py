"""Request bodies of creates."""

from collections.abc import Mapping, Sequence
from typing import Any

from stead.sdk.exceptions import InvalidArgument
from stead.sdk.parsing import serialise
from stead.sdk.requests import UNKNOWN_KEYS_HEADER, UNSET, Unset
from stead.sdk.sizes import Size
from stead.sdk.spec import VmSpec
from stead.sdk.spec_parts import (
    FileLike,
    Git,
    Group,
    Nic,
    PersistenceLike,
    Service,
    User,
    file_to_wire,
    group_to_wire,
    persistence_to_wire,
    services_to_wire,
    user_to_wire,
)

SpecLike = VmSpec | Mapping[str, Any]

REFUSE_UNKNOWN_KEYS = {UNKNOWN_KEYS_HEADER: "refuse"}
"""Makes the server refuse a key that it does not know, instead of a warning in the log: a typo would be
ignored."""


def vm_body(
    *,
    name: str | None,
    snapshot_id: str | None,
    spec: SpecLike | None,
    template: Mapping[str, Any] | None,
    idle_timeout_seconds: int | Unset | None,
    activity_threshold_bytes: int | None,
    persistence: PersistenceLike | None,
    users: Sequence[User | str] | None,
    groups: Sequence[Group | str] | None,
    additional_files: Mapping[str, FileLike] | None,
    git: Git | Mapping[str, Any] | None,
    systemd: Sequence[Service] | Mapping[str, Any] | None,
    apt_deps: Sequence[str] | None,
    workdir: str | None,
    size: Size,
    recreate: bool | None,
    wait_for_ready_signal: bool | None,
    ready_signal_timeout_seconds: float | None,
    domains: Mapping[str, int] | Sequence[str] | None,
    git_access: str | None,
    nics: Sequence[Nic | Mapping[str, Any]] | None,
) -> dict[str, Any]:
    """The body of a create. If there is a spec, the size and the snapshot go to its innermost layer."""
    base = size.to_wire()
    sized = bool(base)
    if snapshot_id is not None:
        base["snapshotId"] = snapshot_id
    files = dict(additional_files or {})
    if systemd is not None and not isinstance(systemd, Mapping):
        services, files = services_to_wire(systemd, files)
        systemd = {"services": services}
    body: dict[str, Any] = {
        "name": name,
        "activityThresholdBytes": activity_threshold_bytes,
        "persistence": None if persistence is None else persistence_to_wire(persistence),
        "users": None if users is None else [user_to_wire(user) for user in users],
        "groups": None if groups is None else [group_to_wire(group) for group in groups],
        "additionalFiles": {path: file_to_wire(file) for path, file in files.items()} or None,
        "git": git.to_wire() if isinstance(git, Git) else git,
        "systemd": systemd,
        "aptDeps": None if apt_deps is None else list(apt_deps),
        "workdir": workdir,
        "recreate": recreate,
        "waitForReadySignal": wait_for_ready_signal,
        "readySignalTimeoutSeconds": ready_signal_timeout_seconds,
        "domains": None if domains is None else _domains(domains),
        "gitAccess": git_access,
        "nics": None if nics is None else [_nic(each) for each in nics],
    }
    body = {key: value for key, value in body.items() if value is not None}
    if idle_timeout_seconds is not UNSET:
        body["idleTimeoutSeconds"] = idle_timeout_seconds
    if spec is not None:
        if template is not None:
            raise InvalidArgument("give either spec or template, not both")
        body["spec"] = {**spec_body(spec, base), "name": name}
    elif sized or template is not None:
        body["template"] = {**serialise(template or {}), **base}
    elif snapshot_id is not None:
        body["snapshotId"] = snapshot_id
    return body


def spec_body(spec: SpecLike, base: Mapping[str, Any]) -> dict[str, Any]:
    """A spec in the server's format, with `base` set on its innermost layer."""
    wire: dict[str, Any] = spec.to_wire() if isinstance(spec, VmSpec) else serialise(spec)
    layer = wire
    while isinstance(layer.get("snapshot"), dict):
        layer = layer["snapshot"]
    layer.update(base)
    return wire


def snapshot_references(body: Mapping[str, Any]) -> list[dict[str, Any]]:
    """The objects of a create's body that have a `snapshotId`: the body, its template, its spec's layers."""
    found = []
    for each in (body, body.get("template"), body.get("spec")):
        layer = each
        while isinstance(layer, dict):
            if isinstance(layer.get("snapshotId"), str):
                found.append(layer)
            layer = layer.get("snapshot")
    return found


def snapshot_body(
    name: str | None,
    spec: SpecLike | None,
    template: Mapping[str, Any] | None,
    persistence: PersistenceLike | None,
    lifetime: Mapping[str, Any] | None = None,
) -> dict[str, Any]:
    """The body that creates a snapshot from a spec."""
    body = {
        "name": name,
        "spec": None if spec is None else spec_body(spec, {}),
        "template": None if template is None else serialise(template),
        "persistence": None if persistence is None else persistence_to_wire(persistence),
        **(lifetime or {}),
    }
    return {key: value for key, value in body.items() if value is not None}


def _nic(nic: Nic | Mapping[str, Any]) -> dict[str, Any]:
    return nic.to_wire() if isinstance(nic, Nic) else dict(nic)


def _domains(domains: Mapping[str, int] | Sequence[str]) -> list[dict[str, Any]]:
    if isinstance(domains, Mapping):
        return [{"domain": domain, "vmPort": port} for domain, port in domains.items()]
    return [{"domain": domain} for domain in domains]
