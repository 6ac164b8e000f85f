"""Fuzzing: answers match the OpenAPI description for valid and invalid input."""

import asyncio
import os
import random
from typing import Any

import httpx2
import pytest
import requests
import schemathesis
from hypothesis import HealthCheck, Phase, Verbosity, given, settings
from schemathesis.checks import not_a_server_error
from schemathesis.generation import GenerationMode
from schemathesis.specs.openapi.checks import (
    content_type_conformance,
    response_schema_conformance,
    status_code_conformance,
)

from stead.machines.records import Properties
from stead.repos.committing import Change, commit
from support.installations import Server

CHECKS = [
    not_a_server_error,
    status_code_conformance,
    content_type_conformance,
    response_schema_conformance,
]
QUICK = 200
ALL = 10_000
ROUNDS = 10
DEADLY = ("delete_vm", "stop", "suspend", "kill", "fork", "snapshot", "resize", "await")
"""Calls that are not made on the real VM: they end it, or take long."""


@schemathesis.serializer("application/x-tar")
def _tar(_: Any, value: Any) -> bytes:
    return value if isinstance(value, bytes) else repr(value).encode()


def _safe(operation: Any) -> bool:
    fatal = ("DELETE /v1/vms/{vm_id}", "DELETE /git/v1/repo/{repo_id}")
    return not operation.path.endswith(DEADLY) and operation.label not in fatal


class Fuzzing:
    """Sends valid and invalid requests for existing and invented resources."""

    def __init__(self, server: Server, key: str, machine: str, repo: str) -> None:
        self.cases = 0
        self._session = requests.Session()
        self._session.headers["Authorization"] = f"Bearer {key}"
        self._url = server.url
        self._machine = machine
        self._repo = repo
        self._random = random.Random(20261116)

    def run(self, schema: Any, cases: int) -> None:
        """All calls, in rounds, until enough cases were sent: some calls have few variants."""
        operations = [found.ok() for found in schema.get_all_operations()]
        modes = (GenerationMode.POSITIVE, GenerationMode.NEGATIVE)
        for _ in range(ROUNDS):
            examples = 1 + max(0, cases - self.cases) // (len(modes) * len(operations))
            for operation in operations:
                for mode in modes:
                    self._fuzz(operation, mode, examples)
            if self.cases >= cases:
                break
        self._session.close()

    def _fuzz(self, operation: Any, mode: GenerationMode, examples: int) -> None:
        @settings(
            max_examples=examples,
            deadline=None,
            database=None,
            phases=(Phase.generate,),
            suppress_health_check=list(HealthCheck),
            verbosity=Verbosity.quiet,
        )
        @given(case=operation.as_strategy(mode))
        def one(case: Any) -> None:
            self._send(case)

        try:
            one()
        except Exception as error:
            if "Unsatisfiable" in type(error).__name__ or "NonCheckError" in type(error).__name__:
                return  # a call without parameters has nothing that could be wrong
            raise

    def _send(self, case: Any) -> None:
        self.cases += 1
        operation = case.operation
        real = "vm_id" in (case.path_parameters or {}) and _safe(operation)
        if real and self._random.random() < (0.1 if "/systemd/" in operation.path else 0.5):
            # systemd takes seconds for an answer in an emulated machine.
            case.path_parameters["vm_id"] = self._machine
        if "repo_id" in (case.path_parameters or {}) and _safe(operation) and self._random.random() < 0.7:
            case.path_parameters["repo_id"] = self._repo
        if operation.path.endswith(("exec-await", "exec-stream")) and isinstance(case.body, dict):
            # What it runs is the machine's business; that it ends is ours.
            case.body.update(command="true", timeoutMs=20_000)
        if operation.path.endswith("/start") and isinstance(case.body, dict):
            # A machine that is not ready in no time is no failure of the server's.
            case.body.pop("readySignalTimeoutSeconds", None)
        if operation.path.endswith("watch-files"):
            case.path_parameters["vm_id"] = "nobodys"
        case.call_and_validate(base_url=self._url, session=self._session, checks=CHECKS, timeout=120)


async def fuzz(server: Server, cases: int) -> int:
    """Runs in a thread: the server is in this one."""
    # One machine, and no room for another: what is sent at random must not fill the host.
    name = f"fuzz-{os.urandom(4).hex()}"
    account = await server.installation.accounts.create(name, {"vms": 1, "snapshots": 0, "repos": 9})
    _, key = await server.installation.accounts.create_key(account.id)
    machine = await server.installation.machines.create(Properties(account=account.id))
    async with httpx2.AsyncClient(base_url=server.url) as http:
        description = (await http.get("/openapi.json")).json()
    repo = (await server.installation.repos.create(account.id)).id
    await commit(server.installation.repos.repository(repo), [Change("a/file", b"text\n")], "first")
    fuzzing = Fuzzing(server, key, machine.id, repo)
    try:
        await asyncio.to_thread(fuzzing.run, schemathesis.openapi.from_dict(description), cases)
        # After all of it the server and the machine are as before.
        assert (await machine.exec("echo well")).stdout == b"well\n"
        repository = server.installation.repos.repository(repo)
        await repository.git.run(repository.path, "fsck", "--strict")
    finally:
        for each in (await server.installation.repos.list(account.id, limit=100)).items:
            await server.installation.repos.delete(each.id)
        for info in await server.installation.machines.list(account.id):
            await server.installation.machines.delete(info.id, forget=True)
    return fuzzing.cases


async def test_fuzzed_calls_match_the_openapi_schema(server: Server) -> None:
    assert await fuzz(server, QUICK) >= QUICK


@pytest.mark.slow
@pytest.mark.timeout(7200)
async def test_ten_thousand_fuzzed_calls_match_the_openapi_schema(server: Server) -> None:
    assert await fuzz(server, ALL) >= ALL
