"""Request bodies of creates: options in the server's format."""

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from stead.sdk.exceptions import InvalidArgument
from stead.sdk.lifetimes import lifetime_to_wire
from stead.sdk.parsing import serialise, wire_name
from stead.sdk.requests import UNKNOWN_KEYS_HEADER, UNSET
from stead.sdk.sizes import SizeParts, wanted_size
from stead.sdk.spec import VmSpec
from stead.sdk.spec_parts import (
    FileLike,
    Git,
    Nic,
    file_to_wire,
    group_to_wire,
    persistence_to_wire,
    services_to_wire,
    user_to_wire,
)
from stead.sdk.vm_options import SnapshotOptions, SpecLike, VmOptions

REFUSE_UNKNOWN_KEYS = {UNKNOWN_KEYS_HEADER: "refuse"}
"""Makes the server refuse a key that it does not know, instead of a warning in the log: a typo would be
ignored."""

_NULLABLE = "idle_timeout_seconds"
"""None is a value of this option: never."""
_OF_A_LAYER = SizeParts.__annotations__.keys() | {"size", "snapshot_id", "spec", "template"}
"""Options that a create sends as keys of a layer."""
_LAYERS = ("template", "spec", "snapshot")
"""Keys under which a body has a layer."""


def to_wire(options: Mapping[str, object]) -> dict[str, Any]:
    """Options in the server's format, without those that are None."""
    wire = {wire_name(name): _value(name, value) for name, value in options.items() if value is not None}
    wire = {key: value for key, value in wire.items() if value is not None}
    return {**wire, wire_name(_NULLABLE): options[_NULLABLE]} if _NULLABLE in options else wire


def vm_body(options: VmOptions) -> dict[str, Any]:
    """The body of a create. If there is a spec, the size and the snapshot go to its innermost layer."""
    size = wanted_size(options.get("size"), options).to_wire()
    name, snapshot_id = options.get("name"), options.get("snapshot_id")
    spec, template = options.get("spec"), options.get("template")
    base = size if snapshot_id is None else {**size, "snapshotId": snapshot_id}
    body = to_wire(_with_scripts({key: value for key, value in options.items() if key not in _OF_A_LAYER}))
    if spec is not None:
        if template is not None:
            raise InvalidArgument("give either spec or template, not both")
        return {**body, "spec": {**spec_body(spec, base), "name": name}}
    if size or template is not None:
        return {**body, "template": {**serialise(template or {}), **base}}
    return {**body, **base}


def spec_body(spec: SpecLike, base: Mapping[str, Any]) -> dict[str, Any]:
    """A spec in the server's format, with `base` set on its innermost layer."""
    wire: dict[str, Any] = spec.to_wire() if isinstance(spec, VmSpec) else serialise(spec)
    layer = wire
    while isinstance(layer.get("snapshot"), dict):
        layer = layer["snapshot"]
    layer.update(base)
    return wire


def snapshot_body(spec: SpecLike | None, options: SnapshotOptions) -> dict[str, Any]:
    """The body that creates a snapshot from a spec."""
    expires_at = options.get("expires_at")
    lifetime = lifetime_to_wire(options.get("ttl"), UNSET if expires_at is None else expires_at)
    body = to_wire({name: value for name, value in options.items() if name not in ("ttl", "expires_at")})
    return {**body, **lifetime} if spec is None else {**body, **lifetime, "spec": spec_body(spec, {})}


def snapshot_references(body: Mapping[str, Any]) -> list[str]:
    """The values of `snapshotId` in a create's body, its template and the layers of its spec."""
    own = body.get("snapshotId")
    found = [own] if isinstance(own, str) else []
    for key in _LAYERS:
        if isinstance(body.get(key), dict):
            found += snapshot_references(body[key])
    return found


def vpc_references(body: Mapping[str, Any]) -> list[str]:
    """The VPCs that the NICs in a create's body name."""
    return [nic["vpc"] for nic in body.get("nics", ())]


def with_ids(
    body: Mapping[str, Any], *, vpcs: Mapping[str, str], snapshots: Mapping[str, str]
) -> dict[str, Any]:
    """A create's body with ids instead of the references to VPCs and snapshots."""
    changed = _with_snapshot_ids(body, snapshots)
    if "nics" in body:
        changed["nics"] = [{**nic, "vpc": vpcs[nic["vpc"]]} for nic in body["nics"]]
    return changed


def _with_snapshot_ids(body: Mapping[str, Any], ids: Mapping[str, str]) -> dict[str, Any]:
    changed = dict(body)
    if isinstance(body.get("snapshotId"), str):
        changed["snapshotId"] = ids[body["snapshotId"]]
    for key in _LAYERS:
        if isinstance(body.get(key), dict):
            changed[key] = _with_snapshot_ids(body[key], ids)
    return changed


def _with_scripts(options: Mapping[str, Any]) -> Mapping[str, Any]:
    """The options with services in the server's format, and their scripts added to the files."""
    systemd = options.get("systemd")
    if systemd is None or isinstance(systemd, Mapping):
        return options
    services, files = services_to_wire(systemd, options.get("additional_files") or {})
    return {**options, "systemd": {"services": services}, "additional_files": files}


def _value(name: str, value: object) -> Any:
    return _FORMS[name](value) if name in _FORMS else value


def _files(files: Mapping[str, FileLike]) -> dict[str, Any] | None:
    return {path: file_to_wire(file) for path, file in files.items()} or None


def _git(git: Git | Mapping[str, Any]) -> Mapping[str, Any]:
    return git.to_wire() if isinstance(git, Git) else git


def _nic(nic: Nic | Mapping[str, Any]) -> dict[str, Any]:
    return nic.to_wire() if isinstance(nic, Nic) else dict(nic)


def _domains(domains: Mapping[str, int] | Sequence[str]) -> list[dict[str, Any]]:
    if isinstance(domains, Mapping):
        return [{"domain": domain, "vmPort": port} for domain, port in domains.items()]
    return [{"domain": domain} for domain in domains]


_FORMS: Mapping[str, Callable[[Any], Any]] = {
    "persistence": persistence_to_wire,
    "users": lambda users: [user_to_wire(each) for each in users],
    "groups": lambda groups: [group_to_wire(each) for each in groups],
    "additional_files": _files,
    "git": _git,
    "apt_deps": list,
    "domains": _domains,
    "nics": lambda nics: [_nic(each) for each in nics],
    "template": serialise,
}
"""Options whose value has another form in the server's format."""
