# Made by scripts/unasync from _async/services.py.
"""systemd in a machine."""

from datetime import datetime
from typing import Any

from stead.sdk._sync.connection import Connection
from stead.sdk._sync.files import Files
from stead.sdk.models import ServiceLogLine, ServiceResult, ServiceStatus
from stead.sdk.parsing import parse, parse_list
from stead.sdk.parts import Service
from stead.sdk.requests import LIFECYCLE_TIMEOUT, request


class Services:
    """The systemd services of a machine, by name."""

    def __init__(self, connection: Connection, vm_id: str, user: str | None, files: Files) -> None:
        self._connection = connection
        self._vm_id = vm_id
        self._user = user
        self._files = files

    def create(self, service: Service) -> str:
        """Make a service; returns its name. The script of one with `bash` is put into the machine first."""
        if service.script is not None:
            self._files.write_text(service.script_path, service.script)
        answer = self._call("POST", "services", json=service.to_wire())
        return str(answer.get("serviceName", service.name))

    def delete(self, name: str) -> None:
        """Stop a service and remove it."""
        self._call("DELETE", "services/{}", name)

    def status(self, name: str) -> ServiceStatus:
        return parse(ServiceStatus, self._call("GET", "services/{}/status", name))

    def logs(
        self, name: str, *, lines: int | None = None, since: str | datetime | None = None
    ) -> list[ServiceLogLine]:
        """The last lines that a service logged."""
        moment = since.isoformat() if isinstance(since, datetime) else since
        query = {"lines": lines, "since": moment}
        answer = self._call("GET", "services/{}/logs", name, query=query)
        return parse_list(ServiceLogLine, answer, "logs")

    def start(self, *names: str) -> list[ServiceResult]:
        return self._control("start", names)

    def stop(self, *names: str) -> list[ServiceResult]:
        return self._control("stop", names)

    def restart(self, *names: str) -> list[ServiceResult]:
        return self._control("restart", names)

    def _control(self, action: str, names: tuple[str, ...]) -> list[ServiceResult]:
        body = {"services": [{"id": name} for name in names]}
        return parse_list(ServiceResult, self._call("POST", action, json=body), "results")

    def _call(self, method: str, path: str, *parts: str, **options: Any) -> Any:
        call = request(
            method,
            f"/v1/vms/{{}}/systemd/{path}",
            self._vm_id,
            *parts,
            user=self._user,
            timeout=LIFECYCLE_TIMEOUT,
            **options,
        )
        return self._connection.call(call)

    # Last, because its name hides the built-in from the annotations of what follows it.
    def list(self) -> list[str]:
        """The names of the services."""
        answer = self._call("GET", "services")
        return [str(entry.get("name")) for entry in answer.get("services", [])]
