"""Systemd services on the wire."""

from typing import Any, Literal

from pydantic import Field, field_validator

from stead.api.wire import Time, Wire
from stead.api.wire.numbers import Count
from stead.api.wire.unknown import Tracked
from stead.builds.services import Outcome
from stead.builds.spec import Restart, Service
from stead.guest.systemd_journal import Entry


class RestartPolicy(Tracked):
    policy: Literal["no", "on-failure", "always", "on-abnormal"]
    restart_sec: float | None = None
    start_limit_burst: Count | None = None
    start_limit_interval_sec: float | None = None

    def restart(self) -> Restart:
        return Restart(self.policy, self.restart_sec, self.start_limit_burst, self.start_limit_interval_sec)


class ServiceFields(Tracked):
    """Fields that a new service and a change of a service have in common."""

    name: str
    env: dict[str, str] | None = None
    user: str | None = None
    group: str | None = None
    workdir: str | None = None
    after: list[str] | None = None
    requires: list[str] | None = None
    on_failure: list[str] | None = None
    wanted_by: list[str] | None = None
    enable: bool | None = None
    timeout_sec: float | None = None
    delete_after_success: bool | None = None
    ready_signal: bool | None = None
    watchdog_sec: float | None = None
    restart_policy: RestartPolicy | None = None

    def fields(self) -> dict[str, Any]:
        """The arguments of a `Service` or a `ServicePatch`."""
        return {
            "name": self.name,
            "env": self.env or {},
            "user": self.user,
            "group": self.group,
            "workdir": self.workdir,
            "after": tuple(self.after or ()),
            "requires": tuple(self.requires or ()),
            "on_failure": tuple(self.on_failure or ()),
            "wanted_by": None if self.wanted_by is None else tuple(self.wanted_by),
            "enable": self.enable,
            "timeout": self.timeout_sec,
            "delete_after_success": bool(self.delete_after_success),
            "ready_signal": self.ready_signal,
            "watchdog": self.watchdog_sec,
            "restart": None if self.restart_policy is None else self.restart_policy.restart(),
        }


class NewService(ServiceFields):
    """A new service; fields that are missing or null have systemd's defaults."""

    mode: Literal["oneshot", "service"] = "service"
    exec: list[str] = Field(default_factory=list, description="Complete command lines, run in order.")
    remain_after_exit: bool | None = None

    def service(self) -> Service:
        remain = self.remain_after_exit is not False
        return Service(**self.fields(), mode=self.mode, exec=tuple(self.exec), remain_after_exit=remain)


class ServiceRow(Wire):
    name: str


class ServiceList(Wire):
    services: list[ServiceRow]


class ServiceCreated(Wire):
    success: bool = True
    message: str
    service_name: str
    active_state: str
    sub_state: str


class ServiceDeleted(Wire):
    success: bool = True
    message: str


class ServiceState(Wire):
    """State of a service, with systemd's names for it."""

    name: str
    active_state: str
    sub_state: str
    load_state: str
    description: str


class ServiceLogEntry(Wire):
    message: str
    timestamp: Time
    priority: str | None = None
    unit: str | None = None

    @classmethod
    def of(cls, entry: Entry) -> "ServiceLogEntry":
        return cls(message=entry.message, timestamp=entry.at, priority=entry.priority, unit=entry.unit)


class ServiceLogs(Wire):
    logs: list[ServiceLogEntry]


class ServiceId(Wire):
    id: str

    @field_validator("id")
    @classmethod
    def _whole(cls, text: str) -> str:
        """The answer repeats it, and cannot encode a lone surrogate."""
        text.encode()
        return text


class ServiceIds(Wire):
    services: list[ServiceId]


class ServiceResult(Wire):
    service_id: str
    success: bool
    message: str

    @classmethod
    def of(cls, outcome: Outcome) -> "ServiceResult":
        return cls(service_id=outcome.service, success=outcome.ok, message=outcome.message)


class ServiceResults(Wire):
    results: list[ServiceResult]
