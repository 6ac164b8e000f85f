"""Generates systemd unit files from the services of a spec."""

from collections.abc import Collection, Iterable, Sequence

from stead.builds.spec import Service, ServicePatch
from stead.builds.validation import unit_name

FOLDER = "/etc/systemd/system"
RUNTIME_FOLDER = "/run/systemd/system"
"""Files here do not survive a reboot."""
DEFAULT_TARGET = "multi-user.target"

_SUFFIXES = (
    *(".service", ".target", ".socket", ".timer", ".path", ".mount", ".automount"),
    *(".swap", ".slice", ".scope", ".device"),
)
_TARGETS = frozenset(
    {
        *("basic", "default", "emergency", "getty", "graphical", "halt", "local-fs", "local-fs-pre"),
        *("machines", "multi-user", "network", "network-online", "network-pre", "nss-lookup", "paths"),
        *("poweroff", "reboot", "remote-fs", "remote-fs-pre", "rescue", "rpcbind", "shutdown", "slices"),
        *("sockets", "sysinit", "time-set", "time-sync", "timers", "umount"),
    }
)


def reference(name: str, own: Collection[str] = ()) -> str:
    """The unit that a name refers to: a service unless it has another suffix.

    SDKs append `.service` to every name without a dot, also to names of systemd's targets. So
    `multi-user.service` is the target, unless the spec has a service of that name (`own`).
    """
    unit = name if name.endswith(_SUFFIXES) else f"{name}.service"
    stem = unit.removesuffix(".service")
    return f"{stem}.target" if stem in _TARGETS and stem != unit and unit not in own else unit


def service_unit(service: Service, own: Collection[str] = (), passing: Collection[str] = ()) -> str:
    """The unit file of a service.

    `own` are the units of the same spec, `passing` those of them that delete themselves after success. A unit
    that requires one of these must start after a reboot too, when the required unit is gone. So it has
    `Wants=` here, and `Requires=` in a drop-in that does not survive a reboot: see `passing_requirement`.
    """
    requires = [reference(name, own) for name in service.requires]
    lasting = [unit for unit in requires if unit not in passing]
    fleeting = [unit for unit in requires if unit in passing]
    unit = [
        f"Description={_value(service.name)}",
        *_list("After", [reference(name, own) for name in service.after]),
        *_list("Requires", lasting),
        *_list("Wants", fleeting),
        *_list("OnFailure", [reference(name, own) for name in service.on_failure]),
        *_start_limit(service),
    ]
    wanted_by = [reference(name, own) for name in service.wanted_by or (DEFAULT_TARGET,)]
    oneshot = service.mode == "oneshot"
    body = [f"Type={_type(service)}", *_commands(service)]
    # A unit that deletes itself must stay active: otherwise a unit that requires it would run it again.
    if oneshot and (service.remain_after_exit or service.delete_after_success):
        body.append("RemainAfterExit=yes")
    # HOME, USER, LOGNAME and SHELL are set for root's services too, as they are in commands.
    body += ["SetLoginEnvironment=yes", *_settings(service)]
    return _text(Unit=unit, Service=body, Install=_list("WantedBy", wanted_by))


def patch_unit(patch: ServicePatch, own: Collection[str] = ()) -> str:
    """A drop-in that changes an existing service."""
    unit = [
        *_list("After", [reference(name, own) for name in patch.after]),
        *_list("Requires", [reference(name, own) for name in patch.requires]),
        *_list("OnFailure", [reference(name, own) for name in patch.on_failure]),
        *_start_limit(patch),
    ]
    body = [] if patch.mode is None and not patch.ready_signal else [f"Type={_type(patch)}"]
    if patch.exec is not None:
        body += ["ExecStart=", "ExecStartPre=", *_commands(patch)]
    elif patch.delete_after_success:
        body += _delete_after_success(patch)
    return _text(Unit=unit, Service=[*body, *_settings(patch)])


def passing_requirement(required: str) -> str:
    """A drop-in that makes a unit require one that deletes itself after success."""
    return _text(Unit=[f"Requires={required}"])


def passing_file(unit: str, required: str) -> str:
    """The path of such a drop-in; the required unit deletes it together with itself."""
    return f"{RUNTIME_FOLDER}/{unit}.d/until-{required}.conf"


def passing_units(services: Iterable[Service]) -> set[str]:
    return {unit_name(each.name) for each in services if each.delete_after_success and each.mode == "oneshot"}


def _type(service: ServicePatch) -> str:
    if service.mode == "oneshot":
        return "oneshot"
    # `exec` and not `simple`: a missing program is a failed start.
    return "notify" if service.ready_signal else "exec"


def _commands(service: ServicePatch) -> list[str]:
    lines = [_value(line.strip()) for line in service.exec or ()]
    if service.mode == "oneshot":
        commands = [f"ExecStart={line}" for line in lines]
    else:
        commands = [*(f"ExecStartPre={line}" for line in lines[:-1]), f"ExecStart={lines[-1]}"]
    return commands + (_delete_after_success(service) if service.delete_after_success else [])


def _delete_after_success(service: ServicePatch) -> list[str]:
    """Delete the files of a unit after success, without a reload: until the next one it stays active."""
    unit = unit_name(service.name)
    files = f"{FOLDER}/{unit} {FOLDER}/*.wants/{unit} {RUNTIME_FOLDER}/*.d/until-{unit}.conf"
    return [f"ExecStartPost=+-/bin/sh -c 'rm -f {files}'"] if service.mode == "oneshot" else []


def _settings(service: ServicePatch) -> list[str]:
    lines = [f'Environment="{_quoted(f"{key}={value}")}"' for key, value in service.env.items()]
    for name, value in (
        ("User", service.user),
        ("Group", service.group),
        ("WorkingDirectory", service.workdir),
    ):
        if value is not None:
            lines.append(f"{name}={_value(value)}")
    if service.timeout is not None:
        lines.append(f"TimeoutSec={_seconds(service.timeout) if service.timeout else 'infinity'}")
    if service.watchdog is not None:
        lines.append(f"WatchdogSec={_seconds(service.watchdog)}")
    if service.ready_signal or service.watchdog:
        lines.append("NotifyAccess=all")
    if service.restart is not None:
        lines.append(f"Restart={service.restart.when}")
        if service.restart.delay is not None:
            lines.append(f"RestartSec={_seconds(service.restart.delay)}")
    return lines


def _start_limit(service: ServicePatch) -> list[str]:
    restart = service.restart
    if restart is None:
        return []
    lines = []
    if restart.limit_interval is not None:
        lines.append(f"StartLimitIntervalSec={_seconds(restart.limit_interval)}")
    if restart.limit_burst is not None:
        lines.append(f"StartLimitBurst={restart.limit_burst}")
    return lines


def _list(name: str, units: Sequence[str]) -> list[str]:
    return [f"{name}={' '.join(dict.fromkeys(units))}"] if units else []


def _value(text: str) -> str:
    """Escape systemd specifiers: `%` in a spec is literal."""
    return text.replace("%", "%%")


def _quoted(text: str) -> str:
    escapes = {"\\": "\\\\", '"': '\\"', "\n": "\\n", "\t": "\\t", "%": "%%"}
    return "".join(escapes.get(character, character) for character in text)


def _seconds(value: float) -> str:
    return f"{value:.6f}".rstrip("0").rstrip(".")


def _text(**sections: list[str]) -> str:
    parts = [
        f"[{name}]\n" + "".join(f"{line}\n" for line in lines) for name, lines in sections.items() if lines
    ]
    return "\n".join(parts)
