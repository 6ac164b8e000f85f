"""VM specs: descriptions of VMs in layers. The server builds each layer once and caches it as a snapshot."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Self, Unpack

from msgspec import structs

from stead.sdk.arguments import checks_arguments
from stead.sdk.exceptions import InvalidArgument
from stead.sdk.parsing import serialise, wire_name
from stead.sdk.sizes import Size, SizeParts, wanted_size
from stead.sdk.spec_parts import (
    FileContent,
    FileLike,
    Git,
    Group,
    RepoRef,
    Service,
    User,
    file_to_wire,
    services_to_wire,
)

RUN = "stead-run-command"
WAIT = "stead-wait-for"


@checks_arguments
@dataclass(frozen=True)
class VmSpec:
    """The description of a VM. Specs are immutable: each method returns a new one.

        spec = VmSpec().apt("git", "make").repo("https://example.com/app.git", "/srv/app").snapshot()
        spec = spec.run("make -C /srv/app").service(Service(name="app", command="/srv/app/serve"))
        vm = stead.vms.create(spec=spec)

    Everything before `snapshot()` becomes a layer that the server builds once and uses for all VMs whose spec
    starts with the same layer.
    """

    _options: Mapping[str, Any] | None = None
    _apt: tuple[str, ...] = ()
    _users: tuple[User, ...] = ()
    _groups: tuple[Group, ...] = ()
    _files: Mapping[str, FileLike] | None = None
    _git: Git | None = None
    _services: tuple[Service, ...] = ()
    _last_step: str | None = None
    _inner: "VmSpec | None" = None

    def apt(self, *packages: str) -> Self:
        """Install Debian packages."""
        return replace(self, _apt=(*self._apt, *packages))

    def run(self, *commands: str, user: str | None = None, workdir: str = "/root") -> Self:
        """Run commands with bash, one after the other. A command that fails, fails the build."""
        spec = self
        for command in commands:
            name = f"{RUN}-{spec._steps(RUN) + 1}"
            service = Service(
                name=name,
                mode="oneshot",
                bash=f"set -eo pipefail\n{command}",
                user=user,
                workdir=workdir,
                env={"HOME": "/root"} if user is None else None,
                delete_after_success=True,
            )
            spec = spec._step(service)
        return spec

    def wait_for(self, command: str, *, interval: float = 2.0, timeout: float | None = None) -> Self:
        """Wait until a command succeeds, for example a health check; it runs every `interval` seconds."""
        if interval <= 0:
            raise InvalidArgument(f"invalid interval {interval:g}: must be greater than 0")
        service = Service(
            name=f"{WAIT}-{self._steps(WAIT) + 1}",
            mode="oneshot",
            bash=f"until (\n{command}\n); do\n  sleep {interval:g}\ndone",
            timeout_sec=timeout or 0,
        )
        return self._step(service)

    def file(self, path: str, content: str | bytes, *, executable: bool = False) -> Self:
        """Write a file."""
        return self.files({path: FileContent(content, executable)})

    def files(self, files: Mapping[str, FileLike]) -> Self:
        """Write several files, by path."""
        return replace(self, _files={**(self._files or {}), **files})

    def user(
        self,
        name: str,
        *,
        uid: int | None = None,
        groups: Sequence[str] | None = None,
        home: str | None = None,
        shell: str | None = None,
        gecos: str | None = None,
        system: bool | None = None,
    ) -> Self:
        """Create a Linux user."""
        user = User(name, uid, None if groups is None else tuple(groups), home, shell, gecos, system)
        return replace(self, _users=(*self._users, user))

    def group(self, name: str, *, gid: int | None = None, system: bool | None = None) -> Self:
        """Create a Linux group."""
        return replace(self, _groups=(*self._groups, Group(name, gid, system)))

    def service(self, service: Service) -> Self:
        """Create and start a systemd service, after the commands before it in this layer."""
        return replace(self, _services=(*self._services, self._chained(service)))

    def repo(self, repo: str, path: str, *, rev: str | None = None) -> Self:
        """Clone a Git repository, given by its URL or id, to a path in the VM."""
        git = self._git or Git()
        return replace(
            self, _git=structs.replace(git, repos=(*git.repos, RepoRef(repo=repo, path=path, rev=rev)))
        )

    def git_user(self, name: str, email: str, *, signing_key: str | None = None) -> Self:
        """Set the Git user name and email in the VM."""
        git = self._git or Git()
        return replace(
            self, _git=structs.replace(git, user_name=name, user_email=email, signing_key=signing_key)
        )

    def workdir(self, path: str) -> Self:
        """Set the default working directory of commands."""
        return self._with(workdir=path)

    def idle_timeout(self, seconds: int) -> Self:
        """Suspend the VM after this time without network traffic."""
        return self._with(idle_timeout_seconds=seconds)

    def ready_signal(self, *, timeout: float | None = None) -> Self:
        """Make create return only when the VM's services are ready."""
        return self._with(wait_for_ready_signal=True, ready_signal_timeout_seconds=timeout)

    def discriminator(self, value: str) -> Self:
        """Make this layer different from equal layers with another value: it is cached separately."""
        return self._with(discriminator=value)

    def skip_cache(self) -> Self:
        """Build this layer even if it is cached."""
        return self._with(skip_cache=True)

    def size(self, size: str | Size | None = None, **parts: Unpack[SizeParts]) -> Self:
        """Set the VM's size, for all layers: `size("2x4Gx20G")`, or `size(cpu=2, memory="4G", disk=20)`.

        Args:
            size: vCPUs x memory x disk.
            parts: `cpu`, `memory` and `disk`, instead of the whole: see `SizeParts`.
        """
        return self._at_base(**wanted_size(size, parts).to_wire())

    def from_snapshot(self, snapshot_id: str) -> Self:
        """Start from a snapshot instead of the default image: an id, a unique id prefix, or a unique name."""
        return self._at_base(snapshot_id=snapshot_id)

    def base_image(self, dockerfile: str) -> Self:
        """Start from a Dockerfile: `FROM debian:trixie-slim` and RUN commands. Others are refused."""
        return self._at_base(base_image={"dockerfileContent": dockerfile})

    def snapshot(self) -> Self:
        """End a layer: the server builds everything so far once and caches it; the rest is built on top."""
        return type(self)(_inner=self)

    def to_wire(self) -> dict[str, Any]:
        """The spec in the server's format: the outermost layer, with the layers below it under `snapshot`."""
        services, files = services_to_wire(self._services, self._files or {})
        wire: dict[str, Any] = dict(self._options or {})
        if self._apt:
            wire["aptDeps"] = list(self._apt)
        if self._users:
            wire["users"] = serialise(self._users)
        if self._groups:
            wire["groups"] = serialise(self._groups)
        if files:
            wire["additionalFiles"] = {path: file_to_wire(file) for path, file in files.items()}
        if self._git is not None:
            wire["git"] = self._git.to_wire()
        if services:
            wire["systemd"] = {"services": services}
        if self._inner is not None:
            wire["snapshot"] = self._inner.to_wire()
        return wire

    def _with(self, **options: Any) -> Self:
        given = {wire_name(name): value for name, value in options.items() if value is not None}
        return replace(self, _options={**(self._options or {}), **given})

    def _at_base(self, **options: Any) -> Self:
        """Set options on the innermost layer, the only one where the server accepts them."""
        if self._inner is None:
            return self._with(**options)
        return replace(self, _inner=self._inner._at_base(**options))

    def _steps(self, kind: str) -> int:
        """The number of generated services of a kind in all layers: their names must be unique."""
        own = sum(service.name.startswith(f"{kind}-") for service in self._services)
        return own + (self._inner._steps(kind) if self._inner is not None else 0)

    def _step(self, service: Service) -> Self:
        return replace(self, _services=(*self._services, self._chained(service)), _last_step=service.name)

    def _chained(self, service: Service) -> Service:
        """The service with a dependency on the generated one before it in this layer."""
        if self._last_step is None:
            return service
        return structs.replace(
            service,
            after=(*(service.after or ()), self._last_step),
            requires=(*(service.requires or ()), self._last_step),
        )
