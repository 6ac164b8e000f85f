"""Specs and templates on the wire; every value may be null, and unknown keys are kept to be reported."""

import base64
import binascii
from typing import Annotated, Any, Literal

from pydantic import BeforeValidator, Field

from stead.api.wire.numbers import Count, Gigabytes, Rounded
from stead.api.wire.systemd import NewService, ServiceFields
from stead.api.wire.unknown import Tracked
from stead.api.wire.vms import PersistenceModel
from stead.builds.errors import InvalidSpec
from stead.builds.spec import Clone, File, GitUser, Group, Layer, Port, Service, ServicePatch, User
from stead.machines.unchanged import UNCHANGED

Size = Annotated[Gigabytes | None, Field(allow_inf_nan=False)]
Seconds = Annotated[float | None, Field(allow_inf_nan=False)]
MAX_DEPTH = 64
WIRE_NAMES = {
    "snapshot_id": "snapshotId",
    "spec.snapshot_id": "spec.snapshotId",
    "base_image": "baseImage",
    "vcpus": "vcpuCount",
    "memory_gb": "memSizeGb",
    "disk_gb": "rootfsSizeGb",
    "ready_timeout": "readySignalTimeoutSeconds",
    "idle_timeout": "idleTimeoutSeconds",
    "git_user": "git.config.user",
    "wanted_by": "wantedBy",
    "restart": "restartPolicy",
}
"""Fields of `Layer` and `Service` that have another name on the wire."""


class GroupModel(Tracked):
    name: str
    gid: Count | None = None
    system: bool | None = None

    def group(self) -> Group:
        return Group(self.name, self.gid, bool(self.system))


class UserModel(Tracked):
    name: str
    uid: Count | None = None
    gecos: str | None = None
    groups: list[str] | None = None
    home: str | None = None
    shell: str | None = None
    system: bool | None = None

    def user(self) -> User:
        return User(
            self.name,
            uid=self.uid,
            gecos=self.gecos,
            groups=tuple(self.groups or ()),
            home=self.home,
            shell=self.shell,
            system=bool(self.system),
        )


class FileModel(Tracked):
    content: str = ""
    encoding: str | None = None
    executable: bool | None = None

    def file(self, path: str) -> File:
        return File(path, self._bytes(path), bool(self.executable))

    def _bytes(self, path: str) -> bytes:
        match (self.encoding or "utf-8").lower():
            case "utf-8" | "utf8":
                try:
                    return self.content.encode()
                except UnicodeEncodeError:
                    problem = "content must be valid UTF-8; use encoding base64 for other bytes"
            case "base64":
                try:
                    return base64.b64decode(self.content, validate=True)
                except (binascii.Error, ValueError):
                    problem = "content is not valid base64"
            case _:
                problem = f"encoding must be utf-8 or base64, not {self.encoding!r}"
        raise InvalidSpec("invalid_file", f"{path}: {problem}")


class ServicePatchModel(ServiceFields):
    """Changes of an existing service; fields that are missing or null stay as they are."""

    mode: Literal["oneshot", "service"] | None = None
    exec: list[str] | None = None

    def patch(self) -> ServicePatch:
        commands = None if self.exec is None else tuple(self.exec)
        return ServicePatch(**self.fields(), mode=self.mode, exec=commands)


class SystemdModel(Tracked):
    services: list[NewService] | None = None
    patched_services: list[ServicePatchModel] | None = None

    def made(self) -> tuple[Service, ...]:
        return tuple(each.service() for each in self.services or ())

    def patches(self) -> tuple[ServicePatch, ...]:
        return tuple(each.patch() for each in self.patched_services or ())


class RepositoryModel(Tracked):
    repo: str = Field(description="URL, or the id of a repository on this server.")
    path: str
    rev: str | None = None

    def repository(self) -> Clone:
        return Clone(self.repo, self.path, self.rev)


class GitUserModel(Tracked):
    name: str | None = None
    email: str | None = None
    signingkey: str | None = None


class GitConfigModel(Tracked):
    user: GitUserModel | None = None


class GitModel(Tracked):
    config: GitConfigModel | None = None
    repos: list[RepositoryModel] | None = None

    def user(self) -> GitUser | None:
        user = None if self.config is None else self.config.user
        return None if user is None else GitUser(user.name, user.email, user.signingkey)


class PortModel(Tracked):
    port: Count
    target_port: Count
    protocol: str | None = None

    def as_port(self) -> Port:
        return Port(self.port, self.target_port, self.protocol or "tcp")


class BaseImageModel(Tracked):
    dockerfile_content: str = Field(
        default="", description="A Dockerfile with `FROM debian:trixie-slim` and RUN commands."
    )


class LayerFields(Tracked):
    """The fields of a layer; POST /v1/vms takes the same ones beside `spec`."""

    snapshot_id: str | None = None
    base_image: BaseImageModel | None = None
    vcpu_count: Count | None = None
    mem_size_gb: Size = None
    rootfs_size_gb: Size = None
    workdir: str | None = None
    idle_timeout_seconds: Rounded | None = Field(
        default=None,
        description="Suspend after this many seconds without traffic; null: never; missing: the default.",
    )
    wait_for_ready_signal: bool | None = None
    ready_signal_timeout_seconds: Seconds = None
    ports: list[PortModel] | None = Field(
        default=None,
        description="The port in the VM of `domains` without a `vmPort`: the target of port 443."
        " Default: 3000; `[]`: 443 itself.",
    )
    systemd: SystemdModel | None = None
    users: list[UserModel] | None = None
    groups: list[GroupModel] | None = None
    additional_files: dict[str, FileModel] | None = None
    git: GitModel | None = None
    git_repos: list[RepositoryModel] | None = None
    apt_deps: list[str] | None = None
    discriminator: str | None = Field(
        default=None, description="Layers that are equal but for this value are cached apart."
    )
    skip_cache: bool | None = Field(default=None, description="Build this layer again although it is cached.")

    def fields(self) -> dict[str, Any]:
        """The arguments of a `Layer`, without the layer below."""
        systemd, git = self.systemd or SystemdModel(), self.git or GitModel()
        if self.git_repos and git.repos:
            text = "both gitRepos and git.repos are given: use git.repos only"
            raise InvalidSpec("invalid_repository", text)
        idle = self.idle_timeout_seconds if "idle_timeout_seconds" in self.model_fields_set else UNCHANGED
        return {
            "snapshot_id": self.snapshot_id,
            "base_image": None if self.base_image is None else self.base_image.dockerfile_content or None,
            "vcpus": self.vcpu_count,
            "memory_gb": self.mem_size_gb,
            "disk_gb": self.rootfs_size_gb,
            "groups": tuple(each.group() for each in self.groups or ()),
            "users": tuple(each.user() for each in self.users or ()),
            "files": tuple(file.file(path) for path, file in (self.additional_files or {}).items()),
            "packages": tuple(dict.fromkeys(self.apt_deps or ())),
            "git_user": git.user(),
            "repositories": tuple(each.repository() for each in git.repos or self.git_repos or ()),
            "services": systemd.made(),
            "patches": systemd.patches(),
            "workdir": self.workdir,
            "ports": None if self.ports is None else tuple(each.as_port() for each in self.ports),
            "idle_timeout": idle,
            "wait_for_ready": self.wait_for_ready_signal,
            "ready_timeout": self.ready_signal_timeout_seconds,
            "discriminator": self.discriminator,
            "skip_cache": bool(self.skip_cache),
        }


def _not_too_deep(value: Any) -> Any:
    """Limit the nesting depth before the recursive model is validated."""
    depth, below = 0, value
    while isinstance(below, dict):
        below = below.get("snapshot") or below.get("template")
        depth += 1
        if depth > MAX_DEPTH:
            raise ValueError(f"too many nested layers (max {MAX_DEPTH})")
    return value


class LayerModel(LayerFields):
    """A layer of a spec or a template; `snapshot` is the layer below, which is built once and cached."""

    name: str | None = None
    snapshot: "LayerModel | None" = None
    template: "LayerModel | None" = Field(default=None, description="The older name of `snapshot`.")
    persistence: PersistenceModel | None = Field(
        default=None, description="Retention of the snapshot that is built of this layer."
    )

    def layer(self) -> Layer:
        if self.snapshot is not None and self.template is not None:
            text = "a layer has both snapshot and template: use snapshot only"
            raise InvalidSpec("conflicting_sources", text, field="snapshot", other="template")
        below = self.snapshot or self.template
        kept = None if self.persistence is None else self.persistence.of_snapshot()
        return Layer(snapshot=None if below is None else below.layer(), persistence=kept, **self.fields())


Spec = Annotated[LayerModel, BeforeValidator(_not_too_deep)]
"""A chain of layers, outermost first."""
