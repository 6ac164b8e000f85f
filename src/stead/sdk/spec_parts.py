"""Parts of a VM's description: users, groups, files, services, repositories."""

import base64
from collections.abc import Mapping, Sequence
from typing import Any, Literal

from stead.sdk.exceptions import InvalidArgument
from stead.sdk.models import Persistence
from stead.sdk.parsing import Model, serialise

SCRIPTS = "/opt/stead/scripts"
"""The folder of service scripts in a VM."""

PersistenceLike = Persistence | Literal["persistent", "sticky", "ephemeral"]


class User(Model, frozen=True):
    """A Linux user. Unless it is a `system` user, its home is `/home/<name>` and its shell is bash."""

    name: str
    uid: int | None = None
    groups: tuple[str, ...] | None = None
    home: str | None = None
    shell: str | None = None
    gecos: str | None = None
    system: bool | None = None


class Group(Model, frozen=True):
    """A Linux group."""

    name: str
    gid: int | None = None
    system: bool | None = None


class Nic(Model, frozen=True):
    """A NIC in a VPC, given by id, unique id prefix or unique name.

    `ipv4` is an address of the VPC, or True for the lowest free one.
    """

    vpc: str
    ipv4: str | Literal[True] = True

    def to_wire(self) -> dict[str, Any]:
        """The NIC in the server's format."""
        return {"vpc": self.vpc, "mode": "routed", "ipv4": self.ipv4, "default": True}


class RestartPolicy(Model, frozen=True):
    """When systemd restarts a service that has ended."""

    policy: Literal["no", "on-failure", "always", "on-abnormal"]
    restart_sec: float | None = None
    start_limit_burst: int | None = None
    start_limit_interval_sec: float | None = None


class RepoRef(Model, frozen=True, kw_only=True):
    """A Git repository to clone: its URL or id, and the path in the VM."""

    repo: str
    path: str
    rev: str | None = None


class Git(Model, frozen=True, kw_only=True):
    """Repositories to clone, and the Git user of the VM."""

    repos: tuple[RepoRef, ...] = ()
    user_name: str | None = None
    user_email: str | None = None
    signing_key: str | None = None

    def to_wire(self) -> dict[str, Any]:
        """The repositories and the user in the server's format."""
        who = {"name": self.user_name, "email": self.user_email, "signingkey": self.signing_key}
        who = {key: value for key, value in who.items() if value is not None}
        wire: dict[str, Any] = {"config": {"user": who} if who else {}}
        if self.repos:
            wire["repos"] = serialise(self.repos)
        return wire


class Service(Model, frozen=True, kw_only=True):
    """A systemd service: either `command` (one or more command lines, run in order) or `bash` (a script).

    `mode="oneshot"` runs once. Names of other units need no `.service` suffix.
    """

    name: str
    command: str | Sequence[str] | None = None
    bash: str | None = None
    mode: Literal["service", "oneshot"] = "service"
    env: Mapping[str, str] | None = None
    user: str | None = None
    group: str | None = None
    workdir: str | None = None
    after: Sequence[str] | None = None
    requires: Sequence[str] | None = None
    on_failure: Sequence[str] | None = None
    wanted_by: Sequence[str] | None = None
    enable: bool | None = None
    timeout_sec: float | None = None
    delete_after_success: bool | None = None
    remain_after_exit: bool | None = None
    ready_signal: bool | None = None
    watchdog_sec: float | None = None
    restart_policy: RestartPolicy | None = None

    def __post_init__(self) -> None:
        if (self.command is None) == (self.bash is None):
            raise InvalidArgument(f"service {self.name}: give either command or bash, not both or neither")

    @property
    def script_path(self) -> str:
        """The path of its script in the VM."""
        return f"{SCRIPTS}/{self.name}.sh"

    @property
    def script(self) -> str | None:
        """The content of its script; None if it has a command."""
        if self.bash is None or self.bash.startswith("#!"):
            return self.bash
        return f"#!/bin/bash\n{self.bash}"

    def to_wire(self) -> dict[str, Any]:
        """The service in the server's format; its script belongs at `script_path`."""
        wire: dict[str, Any] = {"mode": self.mode, **serialise(self)}
        wire.pop("command", None)
        wire.pop("bash", None)
        if self.command is None:
            wire["exec"] = [f"/bin/bash {self.script_path}"]
        else:
            wire["exec"] = [self.command] if isinstance(self.command, str) else list(self.command)
        for key in ("after", "requires", "wantedBy"):
            if key in wire:
                wire[key] = [name if "." in name else f"{name}.service" for name in wire[key]]
        return wire


class FileContent(Model, frozen=True):
    """A file to write into a VM."""

    content: str | bytes
    executable: bool = False


FileLike = FileContent | str | bytes


def file_to_wire(file: FileLike) -> dict[str, Any]:
    given = file if isinstance(file, FileContent) else FileContent(file)
    if isinstance(given.content, str):
        wire: dict[str, Any] = {"content": given.content, "encoding": "utf-8"}
    else:
        wire = {"content": base64.b64encode(given.content).decode(), "encoding": "base64"}
    if given.executable:
        wire["executable"] = True
    return wire


def user_to_wire(user: User | str) -> dict[str, Any]:
    wire: dict[str, Any] = serialise(User(user) if isinstance(user, str) else user)
    return wire


def group_to_wire(group: Group | str) -> dict[str, Any]:
    wire: dict[str, Any] = serialise(Group(group) if isinstance(group, str) else group)
    return wire


def persistence_to_wire(persistence: PersistenceLike) -> dict[str, Any]:
    given = Persistence(persistence) if isinstance(persistence, str) else persistence
    wire: dict[str, Any] = serialise(given)
    return wire


def services_to_wire(
    services: Sequence[Service], files: Mapping[str, FileLike]
) -> tuple[list[dict[str, Any]], dict[str, FileLike]]:
    """The services in the server's format, and the files with their scripts added."""
    scripts: dict[str, FileLike] = {
        service.script_path: service.script for service in services if service.script is not None
    }
    return [service.to_wire() for service in services], {**files, **scripts}
