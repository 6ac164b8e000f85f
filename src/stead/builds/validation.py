"""Validation of specs: every rule is checked before anything is created."""

import re
from collections.abc import Iterable, Sequence
from urllib.parse import urlsplit

from stead.builds.errors import InvalidSpec, Rule
from stead.builds.spec import (
    LEAF_FIELDS,
    Clone,
    File,
    GitUser,
    Group,
    Layer,
    Port,
    Service,
    ServicePatch,
    User,
    chain,
)
from stead.repos.transfer.bundles import is_id
from stead.settings import Size, SizeProblem

MAX_DEPTH = 32
MAX_NAME = 32
MAX_SERVICE_NAME = 200
MAX_ID = 65_535
MAX_SYSTEM_ID = 999
MAX_SECONDS = 10 * 365 * 24 * 3600
MAX_FILES_BYTES = 64 << 20
DEFAULT_PORT = Port(443, 3000)
MAX_PORT = 65535
SCHEMES = ("https", "http", "ssh", "git", "file")
"""URL schemes of repositories. `file` is the VM's own disk."""

_SHORT_NAME = re.compile(r"[a-z_][a-z0-9_-]*")
_ACCOUNT_NAME = re.compile(r"[A-Za-z0-9_][A-Za-z0-9_.-]*\$?")
_UNIT = re.compile(r"[A-Za-z0-9:_.@\\-]+")
_VARIABLE = re.compile(r"[A-Za-z_][A-Za-z0-9_]*")
_PACKAGE = re.compile(r"[a-z0-9][a-z0-9+.-]*[a-z0-9+.](:[a-z0-9-]+)?(=[A-Za-z0-9.+~:-]+)?(/[a-z0-9-]+)?")
_SCP_LIKE = re.compile(r"[A-Za-z0-9_.-]+@[A-Za-z0-9_.-]+:[^\s]+")
_SNAPSHOT_ID = re.compile(r"sc-[a-z0-9]{1,20}")
_CONTROL = re.compile(r"[\x00-\x1f\x7f\ud800-\udfff]")
_RESERVED_GROUPS = frozenset({"root", "daemon", "bin", "sys", "nogroup"})
OWN_UNITS = frozenset({"stead-agent.service", "stead.slice"})
_HUGE_GB = 1 << 21


def check(layer: Layer) -> None:
    """Raise InvalidSpec for the first rule that a layer or one below it breaks; depth 0 is the outermost."""
    layers = chain(layer)
    if len(layers) > MAX_DEPTH:
        raise _invalid(f"the spec has {len(layers)} layers (max {MAX_DEPTH})")
    for depth, each in enumerate(layers):
        check_sources(each, depth)
        check_content(each)
    check_size(layers[-1].vcpus, layers[-1].memory_gb, layers[-1].disk_gb)


def check_sources(layer: Layer, depth: int) -> None:
    """A layer has one base; sizes belong to the innermost layer."""
    given = {"snapshot": layer.snapshot, "snapshot_id": layer.snapshot_id, "base_image": layer.base_image}
    named = [name for name, value in given.items() if value is not None]
    if len(named) > 1:
        raise conflict(depth, named[0], named[1])
    if layer.snapshot_id is not None and not _SNAPSHOT_ID.fullmatch(layer.snapshot_id):
        text = f"{layer.snapshot_id[:40]!r} is not a snapshot id: ids start with sc-"
        raise InvalidSpec("invalid_snapshot_id", text)
    if layer.snapshot is not None:
        for name in LEAF_FIELDS:
            if getattr(layer, name) is not None:
                text = (
                    f"{{field}} is allowed on the innermost layer only, not at depth {depth} (0: outermost)"
                )
                raise InvalidSpec("misplaced_field", text, depth=depth, field=name)


def conflict(depth: int, first: str, second: str) -> InvalidSpec:
    text = f"both {{field}} and {{other}} are given at depth {depth} (0: outermost); use one of them"
    return InvalidSpec("conflicting_sources", text, depth=depth, field=first, other=second)


def check_size(vcpus: int | None, memory_gb: float | None, disk_gb: float | None) -> None:
    """Check each given part of a size."""
    for problem in Size.problems(vcpus, None if memory_gb is None else memory_gb * 1024, disk_gb):
        raise _invalid_size(problem)


def _invalid_size(problem: SizeProblem) -> InvalidSpec:
    got, low, high = problem.got, problem.low, problem.high
    match problem.part, problem.kind:
        case "vcpus", "out_of_range":
            text = f"{{field}} must be from {low} to {high}, not {got}"
            return InvalidSpec("vcpus_out_of_range", text, field="vcpus", got=got, highest=high)
        case "vcpus", _:
            text = f"{{field}} must be a power of two, not {got}"
            return InvalidSpec("vcpus_not_power_of_two", text, field="vcpus", got=got)
        case "memory", _ if got > _HUGE_GB * 1024:
            text = f"{{field}} must be at most {high / 1024:g}, not {got / 1024:g}"
            return InvalidSpec("memory_too_large", text, field="memory_gb", got=got / 1024)
        case "memory", "out_of_range":
            text = f"{{field}} must be from {low / 1024:g} to {high / 1024:g}, not {got / 1024:g}"
            return InvalidSpec(
                "memory_out_of_range", text, field="memory_gb", got=got, lowest=low, highest=high
            )
        case "memory", _:
            text = f"{{field}} must be a power of two (0.5, 1, 2, 4, ... GiB), not {got / 1024:g}"
            return InvalidSpec("memory_not_power_of_two", text, field="memory_gb", got=got)
        case "disk", _ if got > _HUGE_GB:
            text = f"{{field}} must be at most {high}, not {got:g}"
            return InvalidSpec("disk_too_large", text, field="disk_gb", got=got)
        case _:
            return disk_out_of_range(f"must be a whole number from {low} to {high}, not {got:g}", got, low)


def disk_out_of_range(problem: str, disk_gb: float, lowest_gb: int) -> InvalidSpec:
    got, lowest, highest = disk_gb * 1024, lowest_gb * 1024, Size.MAX_DISK_GIB * 1024
    text = f"{{field}} {problem}"
    return InvalidSpec("disk_out_of_range", text, field="disk_gb", got=got, lowest=lowest, highest=highest)


def check_content(layer: Layer) -> None:
    """Check everything in a layer but its base."""
    check_groups(layer.groups)
    check_users(layer.users)
    check_files(layer.files)
    for name in layer.packages:
        if not _PACKAGE.fullmatch(name):
            raise _invalid(f"{name!r} is not a valid Debian package name")
    if layer.git_user is not None:
        _check_git_user(layer.git_user)
    check_repositories(layer.repositories)
    check_services(layer.services)
    check_patches(layer.patches)
    if layer.workdir is not None:
        if not layer.workdir:
            raise InvalidSpec("workdir_empty", "workdir is empty")
        _check_path(layer.workdir, "workdir", "invalid_value")
    _check_ports(layer.ports or ())
    if layer.ready_timeout is not None and not 0 < layer.ready_timeout <= MAX_SECONDS:
        raise _invalid(f"{{field}} must be greater than 0, not {layer.ready_timeout:g}", "ready_timeout")
    if isinstance(layer.idle_timeout, int) and not 0 < layer.idle_timeout <= MAX_SECONDS:
        raise _invalid(
            f"{{field}} must be at least 1, not {layer.idle_timeout}; null is never", "idle_timeout"
        )


# Users and groups


def check_groups(groups: Sequence[Group]) -> None:
    for group in groups:
        name = group.name
        if not name:
            raise InvalidSpec("group_name_empty", "a group has an empty name")
        if len(name) > MAX_NAME:
            text = f"the group name {name[:40]!r} is longer than {MAX_NAME} characters"
            raise InvalidSpec("group_name_too_long", text)
        if not _SHORT_NAME.fullmatch(name):
            text = f"the group name {name!r} must consist of a-z, 0-9, _ and -, and start with a letter or _"
            raise InvalidSpec("group_name_invalid_chars", text)
        if name in _RESERVED_GROUPS or name.startswith("systemd-"):
            raise InvalidSpec("group_name_reserved", f"the group name {name} is reserved for the system")
        if group.gid is not None and not 0 <= group.gid <= MAX_ID:
            raise _invalid(f"the gid of group {name} must be from 0 to {MAX_ID}, not {group.gid}")
        if group.system and group.gid is not None and group.gid > MAX_SYSTEM_ID:
            text = f"the gid of system group {name} must be at most {MAX_SYSTEM_ID}, not {group.gid}"
            raise _invalid(text)
    _check_unique("duplicate_group_name", "group", [group.name for group in groups])


def check_users(users: Sequence[User]) -> None:
    for user in users:
        name = user.name
        if not _SHORT_NAME.fullmatch(name) or len(name) > MAX_NAME:
            text = f"the user name {name[:40]!r} must consist of 1 to {MAX_NAME} of a-z, 0-9, _ and -"
            raise _invalid(f"{text}, and start with a letter or _")
        if any(not group for group in user.groups):
            raise InvalidSpec("user_group_empty", f"the user {name} has a group with an empty name")
        for group in user.groups:
            if not _ACCOUNT_NAME.fullmatch(group) or len(group) > MAX_NAME:
                raise _invalid(f"the group {group[:40]!r} of user {name} is not a valid name")
        if user.uid is not None and not 0 <= user.uid <= MAX_ID:
            text = f"the uid of user {name} must be from 0 to {MAX_ID}, not {user.uid}"
            raise InvalidSpec("user_uid_out_of_range", text)
        if user.system and user.uid is not None and user.uid > MAX_SYSTEM_ID:
            text = f"the uid of system user {name} must be at most {MAX_SYSTEM_ID}, not {user.uid}"
            raise InvalidSpec("user_system_flag_mismatch", text)
        _check_user_path(user.home, f"the home of user {name}", "user_home_invalid")
        _check_user_path(user.shell, f"the shell of user {name}", "user_shell_invalid")
        if user.gecos is not None and (":" in user.gecos or _CONTROL.search(user.gecos)):
            raise _invalid(f"gecos of user {name} must not contain a colon or a line break")
    _check_unique("duplicate_user_name", "user", [user.name for user in users])


def _check_user_path(path: str | None, what: str, rule: Rule) -> None:
    if path is not None and (not path.startswith("/") or ":" in path or _CONTROL.search(path)):
        raise InvalidSpec(rule, f"{what} must be an absolute path, not {path!r}")


# Files and repositories


def check_files(files: Sequence[File]) -> None:
    for file in files:
        _check_path(file.path, "the path of a file", "invalid_file")
        if file.path.endswith("/"):
            raise InvalidSpec("invalid_file", f"{file.path} ends with /: it must be the path of a file")
    total = sum(len(file.content) for file in files)
    if total > MAX_FILES_BYTES:
        text = f"the files of a layer have {total >> 20} MiB together (max {MAX_FILES_BYTES >> 20} MiB)"
        raise InvalidSpec("invalid_file", text)
    _check_unique("invalid_file", "file", [file.path for file in files])


def check_repositories(repositories: Sequence[Clone]) -> None:
    for each in repositories:
        if not is_id(each.repo):
            clone_url(each.repo)
        _check_path(each.path, "the path of a repository", "invalid_repository")
        if not each.path.strip("/"):
            raise InvalidSpec("invalid_repository", "a repository cannot be cloned to /: choose another path")
        rev = each.rev
        if rev is not None and (not rev or rev.startswith("-") or _CONTROL.search(rev) or " " in rev):
            raise InvalidSpec(
                "invalid_repository",
                f"rev {rev!r} of the repository at {each.path} is not a valid branch, tag or commit",
            )
    paths = [each.path.rstrip("/") for each in repositories]
    _check_unique("invalid_repository", "path of a repository", paths)


def clone_url(repo: str) -> str:
    """Check the URL of a repository and return it."""
    bad = not repo or repo.startswith("-") or " " in repo or _CONTROL.search(repo)
    if not bad and _SCP_LIKE.fullmatch(repo):
        return repo
    try:
        url = urlsplit(repo)
        url.port  # noqa: B018  # raises when it is not a number
    except ValueError:
        bad = True
    if bad or (url.scheme in SCHEMES and not (url.hostname or (url.scheme == "file" and url.path))):
        raise InvalidSpec("invalid_repository", "the URL of a repository is malformed")
    if not url.scheme or "://" not in repo:
        text = f"{repo!r} is neither a repository id nor a URL: use an id or an https:// URL"
        raise InvalidSpec("invalid_repository", text)
    if url.scheme not in SCHEMES:
        text = f"the scheme of a repository URL must be one of {', '.join(SCHEMES)}, not {url.scheme}"
        raise InvalidSpec("invalid_repository", text)
    return repo


def _check_git_user(user: GitUser) -> None:
    for value in (user.name, user.email, user.signing_key):
        if value is not None and _CONTROL.search(value):
            raise _invalid("{field}: values must not contain line breaks or control characters", "git_user")


# Services


def unit_name(name: str) -> str:
    return name if name.endswith(".service") else f"{name}.service"


def check_services(services: Sequence[Service]) -> None:
    for service in services:
        check_service(service)
    _check_unique("service_exists", "service", [unit_name(service.name) for service in services])


def check_patches(patches: Sequence[ServicePatch]) -> None:
    for patch in patches:
        check_service(patch)
    _check_unique("service_exists", "patched service", [unit_name(patch.name) for patch in patches])


def check_service(service: ServicePatch) -> None:
    """Check a service, or the changes of one."""
    check_service_name(service.name)
    name = service.name
    if service.exec is not None:
        if not service.exec or any(not line.strip() for line in service.exec):
            raise InvalidSpec("exec_empty", f"exec of service {name} is empty or has an empty line")
        _check_single_line(f"exec of service {name}", service.exec)
    for key, value in service.env.items():
        if not key:
            raise InvalidSpec("env_key_empty", f"env of service {name} has a variable with an empty name")
        if "=" in key:
            text = f"env of service {name}: the variable name {key!r} must not contain ="
            raise InvalidSpec("env_key_contains_equals", text)
        if not _VARIABLE.fullmatch(key):
            raise _invalid(f"env of service {name}: {key!r} is not a valid variable name")
        if _CONTROL.search(value.replace("\n", "").replace("\t", "")):
            raise _invalid(f"env of service {name}: the value of {key} contains control characters")
    if service.user == "":
        raise InvalidSpec("user_empty", f"user of service {name} is empty")
    if service.group == "":
        raise InvalidSpec("group_empty", f"group of service {name} is empty")
    for who in (service.user, service.group):
        if who is not None and not _ACCOUNT_NAME.fullmatch(who):
            raise _invalid(f"{who!r} of service {name} is not a valid user or group name")
    if service.workdir is not None:
        if not service.workdir:
            raise InvalidSpec("workdir_empty", f"workdir of service {name} is empty")
        if service.workdir != "~":
            _check_path(service.workdir, f"workdir of service {name}", "invalid_value")
        _check_single_line(f"workdir of service {name}", [service.workdir])
    _check_units(name, service.after, "after_unit_empty")
    _check_units(name, service.requires, "requires_unit_empty")
    _check_units(name, service.on_failure, "on_failure_unit_empty")
    _check_units(name, service.wanted_by or (), "wanted_by_empty")
    if service.wanted_by is not None and not service.wanted_by:
        text = f"{{field}} of service {name} is empty: leave it out for multi-user.target"
        raise InvalidSpec("wanted_by_empty", text, field="wanted_by")
    _check_times(service)


def check_service_name(name: str) -> None:
    if not name.removesuffix(".service"):
        raise InvalidSpec("service_name_empty", "a service has an empty name")
    if len(name) > MAX_SERVICE_NAME:
        text = f"the service name {name[:40]!r}... is longer than {MAX_SERVICE_NAME} characters"
        raise InvalidSpec("service_name_too_long", text)
    if name[0] in ".-":
        raise InvalidSpec(
            "service_name_invalid_prefix", f"the service name {name!r} must not start with {name[0]}"
        )
    if not _UNIT.fullmatch(name) or "\\" in name:
        text = f"the service name {name!r} must consist of letters, digits and : _ . @ -"
        raise InvalidSpec("service_name_invalid_chars", text)
    if unit_name(name) in OWN_UNITS:
        text = f"the service name {name} is reserved for Stead"
        raise InvalidSpec("service_exists", text, service=name)


def _check_times(service: ServicePatch) -> None:
    restart = service.restart
    times = [service.timeout, service.watchdog]
    if restart is not None:
        times += [restart.delay, restart.limit_interval, restart.limit_burst]
    if any(time is not None and not 0 <= time <= MAX_SECONDS for time in times):
        raise _invalid(f"times and limits of service {service.name} must be from 0 to {MAX_SECONDS}")
    if service.mode == "oneshot" and restart is not None and restart.when == "always":
        raise _invalid(
            f"service {service.name} is a oneshot: {{field}} always is not allowed for oneshots", "restart"
        )


def _check_units(service: str, units: Iterable[str], rule: Rule) -> None:
    for unit in units:
        if not unit.strip():
            raise InvalidSpec(rule, f"service {service} refers to a unit with an empty name")
        if not _UNIT.fullmatch(unit) or unit[0] in ".-" or len(unit) > MAX_SERVICE_NAME + len(".service"):
            raise _invalid(f"service {service} refers to {unit[:80]!r}, which is not a valid unit name")


# Shared checks


def _check_single_line(what: str, lines: Iterable[str]) -> None:
    for line in lines:
        if _CONTROL.search(line.replace("\t", "")):
            raise _invalid(f"{what} must not contain line breaks or control characters")
        if line.endswith("\\"):
            raise _invalid(f"{what} must not end with a backslash")


def _check_path(path: str, what: str, rule: Rule) -> None:
    if not path.startswith("/") or "\0" in path or len(path) > 4000:
        text = f"{what} must be an absolute path of at most 4000 characters, not {path[:80]!r}"
        raise InvalidSpec(rule, text)
    try:
        path.encode()
    except UnicodeEncodeError:
        raise InvalidSpec(rule, f"{what} must be valid UTF-8, not {path[:80]!r}") from None


def _check_ports(ports: Sequence[Port]) -> None:
    """Accept one target of port 443: domains are HTTPS, and each can name a port of its own."""
    for port in ports:
        shown = f"ports: {port.port} -> {port.target_port}/{port.protocol}"
        if port.port != DEFAULT_PORT.port or port.protocol != DEFAULT_PORT.protocol:
            raise _invalid(f"{shown}: only 443/tcp can be mapped; map a domain to each further port")
        if not 1 <= port.target_port <= MAX_PORT:
            raise _invalid(f"{shown}: the target must be a port from 1 to {MAX_PORT}")
    if len(ports) > 1:
        raise _invalid("ports: 443 is mapped twice; map a domain to each further port")


def _check_unique(rule: Rule, what: str, names: list[str]) -> None:
    seen: set[str] = set()
    for name in names:
        if name in seen:
            service = name if rule == "service_exists" else None
            raise InvalidSpec(rule, f"the {what} {name} is given twice", service=service)
        seen.add(name)


def _invalid(message: str, field: str | None = None) -> InvalidSpec:
    return InvalidSpec("invalid_value", message, field=field)
