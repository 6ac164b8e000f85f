"""The middleware around every call and WebSocket: trace id, error answers, cancellation when the client
disconnects or the server stops.
"""

import asyncio
import contextlib
import secrets
import time
from collections.abc import Awaitable, Callable
from dataclasses import dataclass

import structlog
from starlette.types import ASGIApp, Message, Receive, Scope, Send
from starlette.websockets import WebSocketDisconnect
from uvicorn.protocols.utils import ClientDisconnected

from stead.addresses import network_of
from stead.api.admission import Admission
from stead.api.answer_memory import AnswerMemory, AnswerReservation
from stead.api.bodies import RequestBody, limit_bytes_in_flight
from stead.api.credentials_in_path import move_credentials, without_credentials
from stead.api.declared import BodyLimit
from stead.api.errors import ApiError, from_anything, from_product
from stead.api.metrics import observe, open_websockets
from stead.api.pace import MIN_RATE, STRANGER_RATE, Pace
from stead.api.protocol import EXTENSION, Connection
from stead.api.websocket_protocol import SocketConnection
from stead.errors import SteadError
from stead.guest.watchdog import works_on
from stead.identity.callers import Caller
from stead.logs import get_logger
from stead.shares import Release
from stead.supervision import repeat
from stead.tasks import TaskSet, finished, work_for

TRACE_HEADER = "x-freestyle-trace-id"
_TICK = 0.25
STALLED_BODY = 30.0
STALLED_ANSWER = 60.0
"""Seconds in which a client has to send, or to take, a number of bytes while the server waits for it: 1 KiB a
second, and 16 of an answer for a client without a credential."""
PERMISSION_CHECK = 15.0
"""Seconds between two checks that the callers of long calls are still permitted."""
_PROCESSING_AFTER = 60.0
_PROCESSING_EVERY = 60.0
"""Keep-alive for Node, which aborts a call after 300 s without headers: it gets a 102 response every 60 s."""
_LAST_PIECE_TIMEOUT = 5.0
_UNDERSTAND_PROCESSING = (b"freestyle-sdk", b"node", b"undici")
SWITCHING = 101
GOING_AWAY = 1001
POLICY_VIOLATION = 1008
INTERNAL_ERROR = 1011
_MAX_REASON = 123
"""Bytes of a close frame's reason."""

log = get_logger("stead.access")


Check = Callable[[], Awaitable[object]]
"""Raises an error when the caller has lost its permission."""


@dataclass(frozen=True)
class _Outliving:
    """Work that continues after its call."""

    checks: tuple[Check, ...]
    running: Callable[[], bool]
    cancel: Callable[[], Awaitable[object]]


class Call:
    """One request that is being handled, or one WebSocket from its handshake to its end.

    Routes say what becomes of it when it is interrupted; the middleware reports its progress.
    """

    def __init__(
        self, scope: Scope, admission: Admission, answers: AnswerMemory, outliving: list[_Outliving]
    ) -> None:
        self.trace = secrets.token_hex(16)
        self.started = time.monotonic()
        self.address = address_of(scope)
        """Of the client; empty if it is unknown."""
        self.caller: Caller | None = None
        self.sent = 0
        """Bytes of the answer's body."""
        self.body: RequestBody | None = None
        self._scope = scope
        self._admission = admission
        self._outliving = outliving
        self._place: Release | None = None
        self._memory = AnswerReservation(answers)
        self._checks: list[Check] = []
        self._body_pace, self._answer_pace = Pace(STALLED_BODY), Pace(STALLED_ANSWER)
        self.connection: Connection | SocketConnection | None = scope.get("extensions", {}).get(EXTENSION)
        self._status = 0
        self._complete = False
        self._cancelled_by: ApiError | None = None
        self._undo: Callable[[], Awaitable[object]] | None = None
        self._last_piece: Callable[[ApiError], bytes] | None = None
        self._endless = False
        self._retryable = True
        self._task = asyncio.current_task()
        agent = next((value for name, value in scope["headers"] if name == b"user-agent"), b"")
        self._hears_processing = agent.lower().startswith(_UNDERSTAND_PROCESSING)
        self._last_processing = self.started

    def __str__(self) -> str:
        """Method and route, as the log names a call that holds the event loop."""
        path = getattr(self._scope.get("route"), "path", None) or self._scope["path"]
        return f"{self._scope.get('method', 'WEBSOCKET')} {path}"

    # For authentication

    @property
    def share(self) -> str:
        """Whose share of the server it uses: an account's, or an address's."""
        return network_of(self.address) if self.caller is None else self.caller.account

    async def admit(self, caller: Caller) -> None:
        """Take a place among the calls of the caller's account until the end. ApiError if there is none."""
        self.caller = caller
        work_for(caller.account)
        self._admission.count(caller)
        self._place = await self._admission.place(caller)

    async def admit_anonymous(self) -> None:
        """Take a place among the calls without a caller, by the address of the client. Count it before."""
        self._place = await self._admission.anonymous_place(self.address)

    async def admit_webhook(self) -> None:
        """Take a place among the webhooks of GitHub, which strangers on other pages cannot fill."""
        self._place = await self._admission.webhook_place(self.address)

    def count(self, caller: Caller) -> None:
        """Count a WebSocket of an account, which takes no place of a call. ApiError if there are too many."""
        self.caller = caller
        work_for(caller.account)
        self._admission.count(caller)

    def count_anonymous(self) -> None:
        """Count a call without a valid credential. ApiError if its address makes too many."""
        self._admission.count_anonymous(self.address)

    def count_health(self) -> None:
        """Count a health check, which takes no place. ApiError if another host makes too many."""
        self._admission.count_health(self.address)

    def check_unproven(self, was_valid: bool) -> None:
        """Before work for a credential: ApiError if its address makes too many calls without a valid one.

        A credential that `was_valid` is looked for all the same: its holder may share an address (a NAT)
        with the one who makes up others. A valid one that is used for the first time is refused meanwhile.
        """
        if not was_valid:
            self._admission.check_anonymous(self.address)

    def require(self, check: Check) -> None:
        """Call `check` again and again while the call lasts: an error ends it."""
        self._checks.append(check)

    # For routes

    def outlived_by(self, running: Callable[[], bool], cancel: Callable[[], Awaitable[object]]) -> None:
        """Work continues after the call while it is `running`; it is cancelled like the call would be."""
        self._outliving.append(_Outliving(tuple(self._checks), running, cancel))

    async def reserve(self, amount: int) -> bool:
        """Reserve memory for the answer until the end of the call. ApiError if there is none within 10 s.

        Answers of up to 64 KiB need none.
        """
        return await self._memory.reserve(self.share, amount)

    async def reserve_output(self, amount: int) -> bool:
        """Reserve memory for the output of a command; False if there is none within 30 s."""
        return await self._memory.reserve_output(self.share, amount)

    def on_undelivered(self, undo: Callable[[], Awaitable[object]]) -> None:
        """Roll back with `undo` if the client disconnects before it has the answer."""
        self._undo = undo

    def delivered(self) -> None:
        """The client knows what was made: keep it from now on."""
        self._undo = None

    def streaming(self, last_piece: Callable[[ApiError], bytes], *, endless: bool = False) -> None:
        """The response is streamed in a format that can carry an error: `last_piece` ends one that fails.

        An `endless` response never ends by itself: a stopping server cancels it without a grace period.
        """
        self._last_piece = last_piece
        self._endless = endless

    def not_retryable(self) -> None:
        """A command may have run: an error must not ask the client to retry."""
        self._retryable = False

    # For the middleware

    @property
    def status(self) -> int:
        """The status of the response; 0 before it has begun."""
        return self._status

    @property
    def complete(self) -> bool:
        return self._complete

    @property
    def endless(self) -> bool:
        return self._endless

    @property
    def retryable(self) -> bool:
        return self._retryable

    @property
    def lost(self) -> bool:
        return self.connection is not None and self.connection.lost

    @property
    def is_open(self) -> bool:
        """It is a WebSocket that was accepted."""
        return self._status == SWITCHING

    def respond(self, status: int) -> None:
        """The response has begun. An open WebSocket never ends by itself."""
        self._status = status
        self._endless = self._endless or self.is_open

    def finish(self) -> None:
        """The whole response was sent to a client that is still there."""
        self._complete = True

    def cancel(self, why: ApiError) -> None:
        if self._cancelled_by is None and self._task is not None:
            self._cancelled_by = why
            self._task.cancel()

    def cancelled(self) -> ApiError | None:
        """Why `cancel` ended it; None if something else did. Its task continues, with the answer."""
        if self._cancelled_by is not None and self._task is not None:
            self._task.uncancel()
        return self._cancelled_by

    def who(self) -> dict[str, str]:
        """Client, account and identity, as far as they are known, for the log."""
        caller = self.caller
        found = {
            "client": self.address,
            "account": "" if caller is None else caller.account,
            "identity": "" if caller is None else caller.identity or "",
        }
        return {name: value for name, value in found.items() if value}

    def release(self) -> None:
        """The call has ended: give its place and the bytes of its body and its answer back."""
        if self._place is not None:
            self._place()
        self._memory.release()
        if self.body is not None:
            self.body.release()

    def stalled(self, now: float) -> ApiError | None:
        """Why it ends when its client sends no body, or takes no answer, at a minimum rate."""
        body, connection = self.body, self.connection
        if body is not None and self._body_pace.too_slow(now, body.received, waiting=body.waiting):
            return body_stalled()
        if not isinstance(connection, Connection) or not self._status:
            return None
        taken = self.sent - connection.unsent
        rate = STRANGER_RATE if self.caller is None else MIN_RATE
        slow = self._answer_pace.too_slow(now, taken, waiting=connection.full, rate=rate)
        return answer_stalled(rate) if slow else None

    async def check_permission(self) -> None:
        """Raises an error if the caller is no longer permitted."""
        for check in self._checks:
            await check()

    async def roll_back(self) -> None:
        """Undo what was made, unless it was delivered."""
        if self._undo is not None and not self._complete:
            with contextlib.suppress(SteadError):
                await finished(self._undo())

    def last_piece(self, failure: ApiError) -> bytes | None:
        """The end of a streamed response that fails; None if its format can carry no error."""
        return None if self._last_piece is None else self._last_piece(failure)

    def keep_alive(self, now: float) -> None:
        """Tell a client that understands it that its call is being processed."""
        if self._status or not self._hears_processing or self.connection is None:
            return
        waiting = now - self.started > _PROCESSING_AFTER
        if waiting and now - self._last_processing > _PROCESSING_EVERY:
            self._last_processing = now
            self.connection.processing()


class Calls:
    """ASGI middleware that knows all requests being handled, and a timer for the slow ones.

    Open WebSockets have a limit of their own (`Installation.sockets`): they would take the places of calls.
    """

    def __init__(
        self,
        app: ASGIApp,
        admission: Admission,
        body_limit: Callable[[Scope], BodyLimit] = lambda _: BodyLimit(),
    ) -> None:
        self._app = app
        self._admission = admission
        self._body_limit = body_limit
        self._in_flight = limit_bytes_in_flight()
        self.answers = AnswerMemory()
        self._calls: set[Call] = set()
        self._sockets: set[Call] = set()
        """The open WebSockets among them."""
        self._outliving: list[_Outliving] = []
        self._tasks = TaskSet()
        self._clock: asyncio.Task[None] | None = None
        self._idle = asyncio.Event()
        self._idle.set()

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if "@" in scope["path"]:
            move_credentials(scope)
        call = Call(scope, self._admission, self.answers, self._outliving)
        scope.setdefault("state", {})["call"] = call
        if self._clock is None:
            self._clock = self._tasks.start(
                repeat("timer of slow calls", self._watch_calls, _TICK), "timer of slow calls"
            )
            self._tasks.start(
                repeat("check of permissions", self._check_permissions, PERMISSION_CHECK),
                "permissions of long calls",
            )
        if scope["type"] == "websocket":
            answer = self._answer_socket(call, send)
        else:
            answer = self._answer(call, send)
            call.body = RequestBody(scope, receive, self._body_limit, self._in_flight)
            receive = call.body.receive
        self._calls.add(call)
        self._idle.clear()
        try:
            with structlog.contextvars.bound_contextvars(trace=call.trace):
                works_on(call)
                await self._run(call, scope, receive, answer)
        finally:
            call.release()
            self._calls.discard(call)
            self._sockets.discard(call)
            open_websockets.set(len(self._sockets))
            if not self._calls:
                self._idle.set()
            seconds = time.monotonic() - call.started
            observe(scope, call.status, seconds)
            log.info(
                "call",
                method=scope.get("method", "WEBSOCKET"),
                path=without_credentials(scope["path"]),
                status=call.status,
                ms=round(seconds * 1000, 1),
                **call.who(),
                trace=call.trace,
            )

    async def _run(self, call: Call, scope: Scope, receive: Receive, send: Send) -> None:
        try:
            await self._app(scope, receive, send)
        except asyncio.CancelledError:
            cancelled = call.cancelled()
            if cancelled is None:
                raise
            failure = cancelled
        except ApiError as error:
            failure = error
        except (WebSocketDisconnect, ClientDisconnected):
            failure = client_left()
        except Exception as error:
            if call.complete:
                return
            failure = from_anything(error)
        else:
            if not (call.lost and not call.complete):
                return
            failure = client_left()
        await call.roll_back()
        if not call.status:
            with contextlib.suppress(ClientDisconnected):
                await _send(failure, scope, send)
        elif not call.complete and call.connection is not None:
            if call.is_open:
                await self._close_socket(call.connection, failure, send)
            else:
                await self._abort_response(call, call.connection, failure, send)

    async def _close_socket(
        self, connection: Connection | SocketConnection, failure: ApiError, send: Send
    ) -> None:
        """Close a WebSocket with a reason; one whose client does not read is aborted."""
        code = GOING_AWAY if failure.code == "SERVICE_UNAVAILABLE" else INTERNAL_ERROR
        close = {"type": "websocket.close", "code": code, "reason": close_reason(failure.message)}
        with contextlib.suppress(TimeoutError, ClientDisconnected):
            async with asyncio.timeout(_LAST_PIECE_TIMEOUT):
                await send(close)
                return
        await connection.cut()

    async def _abort_response(
        self, call: Call, connection: Connection | SocketConnection, failure: ApiError, send: Send
    ) -> None:
        """End a response that has begun: by an error event in its stream, else by closing the connection.

        Plain bytes (a file, an archive) cannot carry an error, and a proper end would make them look whole.
        """
        piece = call.last_piece(failure)
        if piece is not None and not call.lost:
            last = {"type": "http.response.body", "body": piece, "more_body": False}
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(_LAST_PIECE_TIMEOUT):
                    await send(last)
                    return
        await connection.cut()

    def _answer(self, call: Call, send: Send) -> Send:
        trace = (TRACE_HEADER.encode(), call.trace.encode())

        async def answer(message: Message) -> None:
            if message["type"] == "http.response.start":
                call.respond(message["status"])
                headers = message.get("headers", [])
                if not call.retryable:
                    headers = [each for each in headers if each[0].lower() != b"retry-after"]
                message["headers"] = [*headers, trace]
                await send(message)
                return
            call.sent += len(message.get("body", b""))
            await send(message)
            if not message.get("more_body") and not call.lost:
                call.finish()

        return answer

    def _answer_socket(self, call: Call, send: Send) -> Send:
        trace = (TRACE_HEADER.encode(), call.trace.encode())

        async def answer(message: Message) -> None:
            match message["type"]:
                case "websocket.accept":
                    await send({**message, "headers": [*message.get("headers", []), trace]})
                    call.respond(SWITCHING)
                    self._sockets.add(call)
                    open_websockets.set(len(self._sockets))
                    return
                case "websocket.http.response.start":
                    call.respond(message["status"])
                    message = {**message, "headers": [*message.get("headers", []), trace]}
                case "websocket.http.response.body":
                    if not message.get("more_body"):
                        call.finish()
                case "websocket.close":
                    call.finish()
            await send(message)

        return answer

    async def _watch_calls(self) -> None:
        now = time.monotonic()
        for call in tuple(self._calls):
            try:
                _watch(call, now)
            except Exception as error:
                log.error("cannot watch a call", trace=call.trace, error=repr(error), exc_info=error)
                call.cancel(from_anything(error))

    async def _check_permissions(self) -> None:
        """End calls, and work that outlives them, whose callers have lost their permission.

        WebSockets are checked where they are relayed, which tells the client why.
        """
        oldest = time.monotonic() - PERMISSION_CHECK
        for call in tuple(self._calls - self._sockets):
            if call.started < oldest and (lost := await _permission_lost(call.check_permission)):
                call.cancel(lost)
        self._outliving[:] = [work for work in self._outliving if work.running()]
        for work in tuple(self._outliving):
            for check in work.checks:
                if await _permission_lost(check):
                    await _cancel(work)
                    break

    async def stop(self, grace: float) -> None:
        """Let calls finish; cancel those that do not within `grace` seconds, with an error answer."""
        for call in tuple(self._calls):
            if call.endless:
                call.cancel(stopping(call))
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(grace):
                await self._idle.wait()
        for call in tuple(self._calls):
            call.cancel(stopping(call))

    async def close(self) -> None:
        await self._tasks.close()
        self._clock = None


def stopping(call: Call) -> ApiError:
    if not call.retryable:
        text = "the server is stopping; the command was started and has been killed"
        return ApiError("SERVICE_UNAVAILABLE", text, retryable=False)
    return ApiError("SERVICE_UNAVAILABLE", "the server is stopping; retry when it is back")


def close_reason(text: str) -> str:
    """As much of a text as a close frame can carry."""
    return text.encode()[:_MAX_REASON].decode(errors="ignore")


def body_stalled() -> ApiError:
    text = f"request body too slow: less than 1 KiB a second for {STALLED_BODY:g} s"
    return ApiError("BAD_REQUEST", text, 408, headers={"Connection": "close"})


def answer_stalled(rate: int) -> ApiError:
    text = f"the client took less than {rate >> 10} KiB of the answer a second for {STALLED_ANSWER:g} s"
    return ApiError("BAD_REQUEST", text, 408)


def _watch(call: Call, now: float) -> None:
    if call.lost and not call.complete:
        call.cancel(client_left())
    elif (stalled := call.stalled(now)) is not None:
        call.cancel(stalled)
    else:
        call.keep_alive(now)


async def _cancel(work: _Outliving) -> None:
    """Cancel work; one whose cancellation fails is cancelled again at the next check."""
    try:
        await work.cancel()
    except Exception as error:
        log.error("cannot cancel a background request", error=repr(error), exc_info=error)


async def _permission_lost(check: Check) -> ApiError | None:
    try:
        await check()
    except ApiError as error:
        return error
    except SteadError as error:
        return from_product(error)
    except Exception as error:
        # A check that cannot be made, as without memory, proves nothing.
        log.warning("cannot check a permission", error=repr(error))
    return None


def address_of(scope: Scope) -> str:
    client = scope.get("client")
    return client[0] if client else ""


def client_left() -> ApiError:
    return ApiError("BAD_REQUEST", "client disconnected before the response was complete", 499)


async def _send(error: ApiError, scope: Scope, send: Send) -> None:
    async def nothing() -> Message:
        return {"type": "http.disconnect"}

    await error.response()(scope, nothing, send)
