"""Specs and templates as clients send them; anything may be null, and what is not known is let pass."""

from typing import Annotated, Any, Literal

from pydantic import AliasChoices, BeforeValidator, Field

from stead.api.wire import Wire
from stead.api.wire.numbers import Count, Gigabytes, Rounded
from stead.api.wire.systemd import NewService, ServiceFields
from stead.api.wire.vms import PersistenceModel
from stead.builds.errors import InvalidSpec
from stead.builds.spec import File, GitUser, Group, Layer, Port, Repository, Service, ServicePatch, User
from stead.machines.machine import UNCHANGED

Size = Annotated[Gigabytes | None, Field(allow_inf_nan=False)]
Seconds = Annotated[float | None, Field(allow_inf_nan=False)]
MAX_DEPTH = 64


class GroupModel(Wire):
    name: str
    gid: Count | None = None
    system: bool | None = None

    def group(self) -> Group:
        return Group(self.name, self.gid, bool(self.system))


class UserModel(Wire):
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


class FileModel(Wire):
    content: str = ""
    encoding: str | None = None
    executable: bool | None = None

    def file(self, path: str) -> File:
        return File.encoded(path, self.content, self.encoding, bool(self.executable))


class ServicePatchModel(ServiceFields):
    """What is to be changed of a service; what is missing or null stays."""

    mode: Literal["oneshot", "service"] | None = None
    exec: list[str] | None = None

    def patch(self) -> ServicePatch:
        commands = None if self.exec is None else tuple(self.exec)
        return ServicePatch(**self.fields(), mode=self.mode, exec=commands)


class SystemdModel(Wire):
    services: list[NewService] | None = None
    patched_services: list[ServicePatchModel] | None = None

    def made(self) -> tuple[Service, ...]:
        return tuple(each.service() for each in self.services or ())

    def patches(self) -> tuple[ServicePatch, ...]:
        return tuple(each.patch() for each in self.patched_services or ())


class RepositoryModel(Wire):
    repo: str = Field(description="Its URL, or the id of a repository of this Stead.")
    path: str
    rev: str | None = None

    def repository(self) -> Repository:
        return Repository(self.repo, self.path, self.rev)


class GitUserModel(Wire):
    name: str | None = None
    email: str | None = None
    signingkey: str | None = None


class GitConfigModel(Wire):
    user: GitUserModel | None = None


class GitModel(Wire):
    config: GitConfigModel | None = None
    repos: list[RepositoryModel] | None = None

    def user(self) -> GitUser | None:
        user = None if self.config is None else self.config.user
        return None if user is None else GitUser(user.name, user.email, user.signingkey)


class PortModel(Wire):
    port: Count
    target_port: Count
    protocol: str | None = None

    def as_port(self) -> Port:
        return Port(self.port, self.target_port, self.protocol or "tcp")


class BaseImageModel(Wire):
    dockerfile_content: str = Field(default="", description="`FROM debian:trixie-slim`, and RUN commands.")


class LayerFields(Wire):
    """What a layer can say; a request for a machine can say the same beside its spec."""

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
    ports: list[PortModel] | None = None
    systemd: SystemdModel | None = None
    users: list[UserModel] | None = None
    groups: list[GroupModel] | None = None
    additional_files: dict[str, FileModel] | None = None
    git: GitModel | None = None
    git_repos: list[RepositoryModel] | None = None
    apt_deps: list[str] | None = None
    discriminator: str | None = None
    skip_cache: bool | None = None

    def fields(self) -> dict[str, Any]:
        """As the builder knows them, without the layer below."""
        systemd, git = self.systemd or SystemdModel(), self.git or GitModel()
        if self.git_repos and git.repos:
            text = "repositories are named twice, in gitRepos and in git.repos; use git.repos"
            raise InvalidSpec("invalid_git_repo_spec_error", text)
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
    """Refuse a nest that no builder makes before it is walked into."""
    depth, below = 0, value
    while isinstance(below, dict):
        below = below.get("snapshot") or below.get("template")
        depth += 1
        if depth > MAX_DEPTH:
            raise ValueError(f"more than {MAX_DEPTH} layers")
    return value


class LayerModel(LayerFields):
    """A layer of a spec or a template; `snapshot` is what it stands on, and is built once."""

    name: str | None = None
    snapshot: "LayerModel | None" = Field(default=None, validation_alias=AliasChoices("snapshot", "template"))
    persistence: PersistenceModel | None = Field(
        default=None, description="Of a template: how long it is kept."
    )

    def layer(self) -> Layer:
        below = None if self.snapshot is None else self.snapshot.layer()
        return Layer(snapshot=below, **self.fields())


Spec = Annotated[LayerModel, BeforeValidator(_not_too_deep)]
"""A whole chain of layers, outermost first."""
