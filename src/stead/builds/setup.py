"""Applies one layer to a running VM, phase by phase."""

import shlex
from collections.abc import Awaitable, Callable, Sequence

from stead.builds import repositories
from stead.builds.errors import BuildError, SetupFailed
from stead.builds.layer_services import LayerServices, ReadyWait
from stead.builds.programs import run_program
from stead.builds.records import Part
from stead.builds.spec import File, Group, Layer, User
from stead.errors import SteadError
from stead.machines.machine import Machine
from stead.repos.transfer.bundles import Bundles

_RUN_FILE = "/run/stead-build-command"
_INSTALL = """
exec 2>&1
export DEBIAN_FRONTEND=noninteractive
fetched=
installed() {
    for each; do
        status=$(dpkg-query --show --showformat '${db:Status-Status}' "$each" 2>/dev/null)
        [ "$status" = installed ] || return 1
    done
}
get() {
    apt-get --quiet --assume-yes -o Dpkg::Use-Pty=0 -o Acquire::Retries=3 -o DPkg::Lock::Timeout=120 \\
        -o Dpkg::Options::=--force-confdef -o Dpkg::Options::=--force-confold "$@"
}
update() {
    fetched=1
    get update -o Acquire::Languages=none
}
installed "$@" && exit 0
ls /var/lib/apt/lists/*_Packages* >/dev/null 2>&1 || update || exit
get install -- "$@" && exit 0
status=$?
[ -z "$fetched" ] || exit "$status"
# The package lists in the image or in a layer below may be too old.
update && get install -- "$@"
"""


def planned(layer: Layer) -> tuple[str, ...]:
    """The phases of a layer, in order."""
    work = layer.work
    named = {
        "image": "commands" in work,
        "groups": "groups" in work,
        "users": "users" in work,
        "files": "files" in work,
        "packages": "packages" in work,
        "repositories": "git_user" in work or "repositories" in work or "workdir" in work,
        "services": "services" in work or "patches" in work,
    }
    return tuple(name for name, wanted in named.items() if wanted)


async def apply(machine: Machine, layer: Layer, part: Part, waiting: ReadyWait, bundles: Bundles) -> None:
    """Apply a layer to a VM; BuildError says which phase failed, and why."""
    phases: dict[str, Callable[[], Awaitable[None]]] = {
        "image": lambda: _run_commands(machine, part, layer.commands),
        "groups": lambda: _create_groups(machine, part, layer.groups),
        "users": lambda: _create_users(machine, part, layer.users),
        "files": lambda: _write_files(machine, part, _files_outside_repositories(layer)),
        "packages": lambda: _install(machine, part, layer.packages),
        "repositories": lambda: _clone(machine, part, layer, bundles),
        "services": lambda: _start_services(machine, part, layer, waiting),
    }
    for phase in planned(layer):
        await part.start(phase)
        try:
            await phases[phase]()
        except BuildError:
            raise
        except SteadError as error:
            raise SetupFailed(phase, str(error)) from error


async def _run_commands(machine: Machine, part: Part, commands: Sequence[str]) -> None:
    for command in commands:
        argv: Sequence[str] = ["/bin/sh", "-c", command]
        if command.startswith("#!"):
            await machine.files().write(_RUN_FILE, command.encode(), mode=0o700)
            argv = [_RUN_FILE]
        what = next((line for line in command.splitlines() if line.strip()), command)[:200]
        await part.note(f"+ {what}")
        await run_program(machine, part, f"{what!r}", argv, {"HOME": "/root"})


async def _create_groups(machine: Machine, part: Part, groups: Sequence[Group]) -> None:
    script = ["set -e"]
    for group in groups:
        options = [*_option("--gid", group.gid), *(["--system"] if group.system else [])]
        script.append(_unless_exists("group", group.name, 3, group.gid, ["groupadd", *options, group.name]))
    await run_program(machine, part, "groupadd", ["/bin/sh", "-c", "\n".join(script)])


async def _create_users(machine: Machine, part: Part, users: Sequence[User]) -> None:
    """Create users; an existing user only gets the additional groups."""
    script = ["set -e"]
    for user in users:
        home = user.home or ("/" if user.system else f"/home/{user.name}")
        shell = user.shell or ("/usr/sbin/nologin" if user.system else "/bin/bash")
        command = ["useradd", "--home-dir", home, "--shell", shell]
        command += [*_option("--uid", user.uid), *_option("--comment", user.gecos)]
        command += ["--no-create-home"] if home == "/" else ["--create-home"]
        command += ["--system"] if user.system else []
        # A group of the same name may exist.
        alone = shlex.join([*command, "--user-group", user.name])
        joined = shlex.join([*command, "--gid", user.name, user.name])
        make = f"if getent group {user.name} >/dev/null; then {joined}; else {alone}; fi"
        script.append(_unless_exists("passwd", user.name, 3, user.uid, make))
        for group in user.groups:
            script.append(f"getent group {shlex.quote(group)} >/dev/null || groupadd {shlex.quote(group)}")
        if user.groups:
            script.append(shlex.join(["usermod", "--append", "--groups", ",".join(user.groups), user.name]))
    await run_program(machine, part, "useradd", ["/bin/sh", "-c", "\n".join(script)])


def _unless_exists(
    database: str, name: str, column: int, number: int | None, make: Sequence[str] | str
) -> str:
    """A script that creates a user or group unless it exists; an existing one must have the same number."""
    check = ":"
    if number is not None:
        found = f"$(getent {database} {name} | cut -d: -f{column})"
        check = f'[ "{found}" = {number} ] || {{ echo "{name} exists with the id {found}" >&2; exit 1; }}'
    make = make if isinstance(make, str) else shlex.join(make)
    return f"if getent {database} {name} >/dev/null; then\n{check}\nelse\n{make}\nfi"


def _option(name: str, value: object) -> list[str]:
    return [] if value is None else [name, str(value)]


def _files_outside_repositories(layer: Layer, *, within: bool = False) -> list[File]:
    """Files outside repositories, or those inside; git clones only into an empty folder."""
    folders = tuple(f"{each.path.rstrip('/')}/" for each in layer.repositories)
    return [file for file in layer.files if file.path.startswith(folders) == within]


async def _write_files(machine: Machine, part: Part, files: Sequence[File]) -> None:
    guest = machine.files()
    for file in files:
        await guest.write(file.path, file.content, mode=0o755 if file.executable else None)
        await part.note(f"wrote {file.path} ({len(file.content)} bytes)")


async def _install(machine: Machine, part: Part, packages: Sequence[str]) -> None:
    await run_program(machine, part, "apt-get", ["/bin/sh", "-c", _INSTALL, "sh", *packages])


async def _clone(machine: Machine, part: Part, layer: Layer, bundles: Bundles) -> None:
    if layer.git_user is not None:
        await repositories.configure(machine, part, layer.git_user)
    for repository in layer.repositories:
        await repositories.clone(machine, part, repository, bundles)
    await _write_files(machine, part, _files_outside_repositories(layer, within=True))
    if layer.workdir is not None and layer.workdir.rstrip("/"):
        await machine.files().make_folder(layer.workdir, parents=True)


async def _start_services(machine: Machine, part: Part, layer: Layer, waiting: ReadyWait) -> None:
    files = {file.path: file.content for file in layer.files}
    services = LayerServices(machine, layer.services, layer.patches, files)
    await services.install()
    await services.start(part, waiting)
