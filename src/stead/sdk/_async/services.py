"""systemd services of a VM."""

import builtins
from datetime import datetime
from typing import Any

from stead.sdk._async.connection import AsyncConnection
from stead.sdk._async.files import AsyncFiles
from stead.sdk.arguments import checks_arguments
from stead.sdk.models import ServiceLogLine, ServiceName, ServiceResult, ServiceStatus
from stead.sdk.parsing import parse, parse_list, parse_object
from stead.sdk.requests import LIFECYCLE_TIMEOUT, request
from stead.sdk.spec_parts import Service


@checks_arguments
class AsyncServices:
    """The systemd services of a VM, by name."""

    def __init__(self, connection: AsyncConnection, vm_id: str, user: str | None, files: AsyncFiles) -> None:
        self._connection = connection
        self._vm_id = vm_id
        self._user = user
        self._files = files

    async def create(self, service: Service) -> str:
        """Create a service; returns its name. A `bash` script is first written to a file in the VM."""
        if service.script is not None:
            await self._files.write_text(service.script_path, service.script)
        answer = await self._call("POST", "services", json=service.to_wire())
        return str(parse_object(answer).get("serviceName", service.name))

    async def delete(self, name: str) -> None:
        """Stop and delete a service."""
        await self._call("DELETE", "services/{}", name)

    async def status(self, name: str) -> ServiceStatus:
        """The state of a service; `ServiceNotFound` if there is none."""
        return parse(ServiceStatus, await self._call("GET", "services/{}/status", name))

    async def logs(
        self, name: str, *, lines: int | None = None, since: str | datetime | None = None
    ) -> builtins.list[ServiceLogLine]:
        """The last lines that a service logged; `since` is a time."""
        moment = since.isoformat() if isinstance(since, datetime) else since
        query = {"lines": lines, "since": moment}
        answer = await self._call("GET", "services/{}/logs", name, query=query)
        return parse_list(ServiceLogLine, answer, "logs")

    async def start(self, *names: str) -> builtins.list[ServiceResult]:
        """Start services; returns one result for each."""
        return await self._control("start", names)

    async def stop(self, *names: str) -> builtins.list[ServiceResult]:
        """Stop services; returns one result for each."""
        return await self._control("stop", names)

    async def restart(self, *names: str) -> builtins.list[ServiceResult]:
        """Restart services; returns one result for each."""
        return await self._control("restart", names)

    async def _control(self, action: str, names: tuple[str, ...]) -> builtins.list[ServiceResult]:
        body = {"services": [{"id": name} for name in names]}
        return parse_list(ServiceResult, await self._call("POST", action, json=body), "results")

    async def _call(self, method: str, path: str, *parts: str, **options: Any) -> Any:
        call = request(
            method,
            f"/v1/vms/{{}}/systemd/{path}",
            self._vm_id,
            *parts,
            user=self._user,
            timeout=LIFECYCLE_TIMEOUT,
            **options,
        )
        return await self._connection.call(call)

    # Last: the name shadows the built-in `list` in annotations below it.
    async def list(self) -> builtins.list[str]:
        """The names of the services."""
        answer = await self._call("GET", "services")
        return [each.name for each in parse_list(ServiceName, answer, "services")]
