"""Specs: layers of users, files, packages, repositories and services."""

import hashlib
import json
from collections.abc import Callable, Iterable, Mapping
from dataclasses import asdict, dataclass, field, fields, replace
from typing import Any, Literal, TypeVar

from stead.machines.persistence import SnapshotPersistence
from stead.machines.unchanged import UNCHANGED, Unchanged
from stead.repos.transfer.bundles import Bundle

_FORMAT = 1
"""Increase this when the same spec is set up in another way, to invalidate cached layers."""

Mode = Literal["oneshot", "service"]
RestartWhen = Literal["no", "on-failure", "always", "on-abnormal"]
T = TypeVar("T")


@dataclass(frozen=True)
class Group:
    name: str
    gid: int | None = None
    system: bool = False


@dataclass(frozen=True)
class User:
    name: str
    uid: int | None = None
    gecos: str | None = None
    groups: tuple[str, ...] = ()
    home: str | None = None
    shell: str | None = None
    system: bool = False


@dataclass(frozen=True)
class File:
    path: str
    content: bytes = b""
    executable: bool = False


@dataclass(frozen=True)
class Restart:
    when: RestartWhen = "no"
    delay: float | None = None
    limit_burst: int | None = None
    limit_interval: float | None = None


@dataclass(frozen=True)
class ServicePatch:
    """Changes of an existing service; None leaves a field as it is."""

    name: str
    mode: Mode | None = None
    exec: tuple[str, ...] | None = None
    env: Mapping[str, str] = field(default_factory=dict)
    user: str | None = None
    group: str | None = None
    workdir: str | None = None
    after: tuple[str, ...] = ()
    requires: tuple[str, ...] = ()
    on_failure: tuple[str, ...] = ()
    wanted_by: tuple[str, ...] | None = None
    enable: bool | None = None
    timeout: float | None = None
    """Seconds; 0 is no limit."""
    delete_after_success: bool = False
    ready_signal: bool | None = None
    watchdog: float | None = None
    restart: Restart | None = None


@dataclass(frozen=True)
class Service(ServicePatch):
    """A new systemd service. Unless `enable` is False it starts now and at every boot."""

    mode: Mode = "service"
    exec: tuple[str, ...] = ()
    remain_after_exit: bool = True


@dataclass(frozen=True)
class GitUser:
    name: str | None = None
    email: str | None = None
    signing_key: str | None = None


@dataclass(frozen=True)
class Clone:
    """A Git repository, by URL or id, to clone to a path."""

    repo: str
    path: str
    rev: str | None = None
    bundle: Bundle | None = None
    """For a repository on this server: the content to clone; then `repo` is its URL."""


@dataclass(frozen=True)
class Port:
    port: int
    target_port: int
    protocol: str = "tcp"


@dataclass(frozen=True)
class Layer:
    """One layer of a VM; `snapshot` is the layer below it.

    `base_image` is the text of a Dockerfile; `commands` run before anything else.
    """

    snapshot: "Layer | None" = None
    snapshot_id: str | None = None
    base_image: str | None = None
    vcpus: int | None = None
    memory_gb: float | None = None
    disk_gb: float | None = None

    commands: tuple[str, ...] = ()
    groups: tuple[Group, ...] = ()
    users: tuple[User, ...] = ()
    files: tuple[File, ...] = ()
    packages: tuple[str, ...] = ()
    git_user: GitUser | None = None
    repositories: tuple[Clone, ...] = ()
    services: tuple[Service, ...] = ()
    patches: tuple[ServicePatch, ...] = ()
    workdir: str | None = None

    ports: tuple[Port, ...] | None = None
    idle_timeout: int | Unchanged | None = UNCHANGED
    wait_for_ready: bool | None = None
    ready_timeout: float | None = None

    discriminator: str | None = None
    skip_cache: bool = False
    persistence: SnapshotPersistence | None = None
    """Retention of the snapshot that is built of this layer; None is the default of layers, sticky."""

    @property
    def work(self) -> dict[str, Any]:
        """The fields that change a VM; empty when the layer changes nothing."""
        found = {name: getattr(self, name) for name in _WORK if getattr(self, name)}
        if self.workdir is not None and self.workdir.rstrip("/"):
            found["workdir"] = self.workdir
        if self.git_user == GitUser():
            found.pop("git_user", None)
        return found


_WORK = (
    "commands",
    "groups",
    "users",
    "files",
    "packages",
    "git_user",
    "repositories",
    "services",
    "patches",
)
LEAF_FIELDS = ("snapshot_id", "base_image", "vcpus", "memory_gb", "disk_gb")
"""Fields that only the innermost layer may have."""


def chain(layer: Layer) -> list[Layer]:
    """A layer and all below it, outermost first."""
    found = [layer]
    while (below := found[-1].snapshot) is not None:
        found.append(below)
    return found


def combine(below: Layer, above: Layer) -> Layer:
    """One layer that does what both do; the upper one wins where both define the same thing."""
    merged: dict[str, Any] = {
        "commands": below.commands + above.commands,
        "groups": _by(lambda group: group.name, below.groups, above.groups),
        "users": _by(lambda user: user.name, below.users, above.users),
        "files": _by(lambda file: file.path, below.files, above.files),
        "packages": _by(lambda name: name, below.packages, above.packages),
        "repositories": _by(lambda repository: repository.path, below.repositories, above.repositories),
        "services": _by(lambda service: service.name, below.services, above.services),
        "patches": _by(lambda patch: patch.name, below.patches, above.patches),
        "idle_timeout": below.idle_timeout if above.idle_timeout is UNCHANGED else above.idle_timeout,
        "skip_cache": below.skip_cache or above.skip_cache,
    }
    for each in fields(Layer):
        if each.name not in merged:
            mine = getattr(above, each.name)
            merged[each.name] = getattr(below, each.name) if mine is None else mine
    return Layer(**merged)


def _by(name: Callable[[T], str], below: Iterable[T], above: Iterable[T]) -> tuple[T, ...]:
    return tuple({name(each): each for each in (*below, *above)}.values())


def bare(layer: Layer) -> Layer:
    """A layer without its base and size."""
    nothing: dict[str, Any] = dict.fromkeys(LEAF_FIELDS)
    return replace(layer, snapshot=None, **nothing)


def layer_hash(account: str, parent: str, layer: Layer) -> str:
    """Cache key of a layer: equal for the same account, the same parent and the same content.

    Fields that do not change a snapshot's content are left out: idle timeout, ports, names, retention.
    """
    content = {name: _plain(value) for name, value in layer.work.items()}
    text = json.dumps(
        [_FORMAT, account, parent, layer.discriminator, content], sort_keys=True, ensure_ascii=True
    )
    return hashlib.sha256(text.encode()).hexdigest()


def _plain(value: Any) -> Any:
    match value:
        case File():
            digest = hashlib.sha256(value.content).hexdigest()
            return [value.path, digest, value.executable]
        case Clone():
            named = {"repo": value.repo, "path": value.path, "rev": value.rev}
            return named if value.bundle is None else named | {"bundle": value.bundle.digest}
        case tuple():
            return [_plain(each) for each in value]
        case str() | int() | float() | None:
            return value
        case _:
            return asdict(value)
