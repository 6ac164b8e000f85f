"""What the tools share: the API client of the caller, error messages, progress, annotations."""

import asyncio
import contextlib
import functools
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping
from typing import Any, ParamSpec, Protocol, TypeVar

from mcp.server.mcpserver import Context
from mcp.server.mcpserver.exceptions import ToolError
from mcp.server.mcpserver.tools import Tool
from mcp_types import ToolAnnotations
from pydantic import ValidationError
from pydantic_core import ErrorDetails

from stead.sdk import AsyncStead, AsyncVm, SteadException

Arguments = ParamSpec("Arguments")
Result = TypeVar("Result")

_PROGRESS_EVERY = 2.0
_LONGEST_MESSAGE = 200
"""Characters of a progress message."""


class Clients(Protocol):
    """Where the tools get their API client from."""

    def client(self, headers: Mapping[str, str] | None) -> AsyncStead:
        """The client with the credentials of a call; `headers` are those of its HTTP request."""
        ...


Call = Context[Clients, Any]
"""One call of a tool: who calls, and where its progress is reported."""


def client_of(call: Call) -> AsyncStead:
    return call.request_context.lifespan_context.client(call.headers)


async def vm_of(call: Call, vm: str, user: str | None = None) -> AsyncVm:
    """The VM with this id, unique id prefix or unique name, used as a Linux user."""
    found = await client_of(call).vms.find(vm)
    return found if user is None else found.user(user)


@contextlib.asynccontextmanager
async def progress(call: Call, message: Callable[[], str]) -> AsyncIterator[None]:
    """Report every few seconds that the work goes on, as seconds since its start, if the client asked for it.

    Clients extend their timeout when they receive progress.
    """
    started = time.monotonic()

    async def report() -> None:
        while True:
            await call.report_progress(
                round(time.monotonic() - started, 1), None, message()[-_LONGEST_MESSAGE:]
            )
            await asyncio.sleep(_PROGRESS_EVERY)

    task = asyncio.create_task(report())
    try:
        yield
    finally:
        task.cancel()
        # A client that left no longer receives progress; that does not fail the work.
        await asyncio.gather(task, return_exceptions=True)


def read_only(function: Callable[..., Awaitable[Any]], title: str) -> Tool:
    """A tool that changes nothing."""
    return _tool(function, title, ToolAnnotations(read_only_hint=True, open_world_hint=False))


def additive(function: Callable[..., Awaitable[Any]], title: str, *, idempotent: bool = False) -> Tool:
    """A tool that creates or changes something and destroys nothing."""
    annotations = ToolAnnotations(
        read_only_hint=False, destructive_hint=False, idempotent_hint=idempotent, open_world_hint=False
    )
    return _tool(function, title, annotations)


def destructive(
    function: Callable[..., Awaitable[Any]], title: str, *, idempotent: bool = False, open_world: bool = False
) -> Tool:
    """A tool that can destroy data; `open_world` if it can also reach the internet."""
    annotations = ToolAnnotations(
        read_only_hint=False,
        destructive_hint=True,
        idempotent_hint=idempotent,
        open_world_hint=open_world,
    )
    return _tool(function, title, annotations)


class _CheckedTool(Tool):
    """A tool that names its missing and invalid arguments in one sentence, without pydantic's own text."""

    async def run(self, arguments: dict[str, Any], context: Any, convert_result: bool = False) -> Any:
        try:
            return await super().run(arguments, context, convert_result)
        except ToolError as error:
            if not isinstance(error.__cause__, ValidationError):
                raise
            problems = [_problem(each) for each in error.__cause__.errors(include_url=False)]
            raise ToolError(f"{self.name}: {'; '.join(problems)}") from None


def _problem(error: ErrorDetails) -> str:
    name = ".".join(str(part) for part in error["loc"])
    if error["type"] == "missing":
        return f"the argument {name} is missing"
    return f"the argument {name} is invalid: {error['msg'][:1].lower()}{error['msg'][1:]}"


def _tool(function: Callable[..., Awaitable[Any]], title: str, annotations: ToolAnnotations) -> Tool:
    text = " ".join((function.__doc__ or "").split())
    return _CheckedTool.from_function(
        _with_error_messages(function),
        title=title,
        description=text,
        annotations=annotations,
        structured_output=True,
    )


def _with_error_messages(
    function: Callable[Arguments, Awaitable[Result]],
) -> Callable[Arguments, Awaitable[Result]]:
    """Errors of the API and of arguments reach the model with their message. Others are crashes of this
    server: they are logged, and the model sees none of their text."""

    @functools.wraps(function)
    async def call(*args: Arguments.args, **kwargs: Arguments.kwargs) -> Result:
        try:
            return await function(*args, **kwargs)
        except SteadException as error:
            again = ". The same call may succeed later, and can be repeated" if error.retryable else ""
            raise ToolError(f"{error}{again}") from error
        except (OSError, ValueError) as error:
            raise ToolError(str(error)) from error

    return call
