"""Routes into a guest: commands and files."""

import base64
import codecs
import contextlib
import json
import os
import posixpath
from collections.abc import AsyncGenerator, AsyncIterator, Iterator, Sequence
from typing import Annotated, Any
from urllib.parse import unquote_to_bytes

from fastapi import APIRouter, Depends, Query
from pydantic import TypeAdapter, ValidationError
from starlette.requests import Request
from starlette.responses import Response, StreamingResponse

from stead.api.answer_memory import SMALL_ANSWER
from stead.api.bodies import MANY_VALUES, MAX_BODY, check_values, json_body
from stead.api.callers import CurrentCall, Guest, GuestAccess
from stead.api.calls import Call
from stead.api.declared import SMALL_BODY, invalid_code, large_body, streamed_body
from stead.api.errors import ApiError, from_product
from stead.api.large_answers import Base64, Serialized, Text, large_answer, reserved_object
from stead.api.wire import Nothing
from stead.api.wire.guests import (
    Directory,
    Exec,
    Executed,
    FileFacts,
    Move,
    Unpacked,
    VmDirectoryEntry,
    VmFileContent,
    WriteFile,
    decoded,
)
from stead.api.wire.sessions import exit_status
from stead.errors import GuestError, InvalidRequest, SteadError
from stead.guest import recordings
from stead.guest.errors import GuestFileNotFound, InvalidGuestPath
from stead.guest.execution import Ended, Output
from stead.guest.files import FileInfo, GuestFiles
from stead.machines.events import Use
from stead.shares import MemoryReservation
from stead.tasks import Threads

router = APIRouter(prefix="/v1/vms/{vm_id}", tags=["guests"])

MAX_WHOLE_FILE = 64 << 20
"""Largest file in bytes that is sent inside JSON, which is held in memory."""
_MAX_PARENTS = 64
_DECODED = 1 << 20
"""Bytes of a file that are decoded at once: other threads wait meanwhile."""
_ENTRIES = TypeAdapter(list[VmDirectoryEntry])
_RAW = "application/octet-stream"
_TAR = "application/x-tar"
_NDJSON = "application/x-ndjson"
_Exec = Annotated[Exec, json_body(Exec)]
_Mode = Annotated[str | None, Query(pattern="^[0-7]{1,4}$", description="Permissions in octal, such as 644.")]


@router.post("/exec-await", response_model=Executed)
@large_body(MAX_BODY, MANY_VALUES)
async def exec_await(guest: Guest, wanted: _Exec, call: CurrentCall) -> Response:
    """Run a command and answer when it has exited. Any exit code is a success; a timeout is an error (408).

    If the client disconnects, the command is killed.
    """
    arguments = command_options(guest, wanted)
    await _wake(guest, call)
    if wanted.terminal:
        async with guest.machine.using(Use.TERMINAL) as agent:
            result = await recordings.run(
                agent, wanted.terminal, wanted.command, **arguments, reserve=call.reserve_output
            )
    else:
        result = await guest.machine.exec(wanted.command, **arguments, reserve=call.reserve_output)
    output: dict[str, Any] = {"stdout": Text(result.stdout), "stderr": Text(result.stderr)}
    if result.timed_out:
        text = f"command timed out after {wanted.timeout_ms} ms and was killed (timeoutMs)"
        error = ApiError("EXEC_TIMED_OUT", text, timeoutMs=wanted.timeout_ms, **output)
        return await reserved_object(error.body(), error.status, error.headers)
    model = Executed(
        stdout="",
        stderr="",
        status_code=exit_status(result.exit_code, result.signal),
        signal=result.signal,
        duration_ms=round(result.duration * 1000, 3),
        stdout_truncated=result.stdout_truncated,
        stderr_truncated=result.stderr_truncated,
    )
    return await reserved_object({**model.model_dump(by_alias=True), **output})


async def _wake(guest: GuestAccess, call: Call) -> None:
    """Bring the VM up. Failures up to here can be retried; after it, the command may have started."""
    await guest.machine.ensure_up(Use.COMMAND)
    call.not_retryable()


def command_options(guest: GuestAccess, wanted: Exec) -> dict[str, Any]:
    """Options of a command for `Machine.exec` and `Machine.stream`."""
    return {
        "cwd": wanted.cwd or guest.info.workdir or "/",
        "env": wanted.env,
        "stdin": None if wanted.stdin is None else _decoded(wanted.stdin, "stdin"),
        "user": guest.user,
        "timeout": None if wanted.timeout_ms is None else wanted.timeout_ms / 1000,
    }


def _decoded(text: str, what: str) -> bytes:
    try:
        return decoded(text, what)
    except ValueError as error:
        raise InvalidRequest(str(error)) from None


@router.post("/exec-stream", response_class=StreamingResponse)
@large_body(MAX_BODY, MANY_VALUES)
async def exec_stream(guest: Guest, wanted: _Exec, call: CurrentCall) -> StreamingResponse:
    """Run a command and stream its output as JSON lines while it runs; the last line is an `exit` event.

    If the VM is lost or the server stops, the last line is an `error` event with `code` and `message`. If the
    client disconnects, the command is killed.
    """
    arguments = command_options(guest, wanted)
    await _wake(guest, call)
    stream = guest.machine.stream(wanted.command, **arguments)
    # A command that cannot be started is an error answer, not a stream.
    first = await anext(stream)
    call.streaming(error_event)

    async def lines() -> AsyncIterator[bytes]:
        async with contextlib.aclosing(stream):
            try:
                yield _line(first)
                async for event in stream:
                    yield _line(event)
            except SteadError as error:
                yield error_event(from_product(error))

    return StreamingResponse(lines(), media_type=_NDJSON)


def error_event(failure: ApiError) -> bytes:
    """The last line of a stream of JSON lines that could not be completed."""
    return _json({"type": "error", "code": failure.code, "message": failure.message})


def _line(event: Output | Ended) -> bytes:
    if isinstance(event, Output):
        return _json({"type": event.stream, "data": base64.b64encode(event.data).decode()})
    return _json(exit_facts(event))


def exit_facts(event: Ended) -> dict[str, object]:
    """The last event of a command."""
    status = exit_status(event.exit_code, event.signal)
    facts = {"statusCode": status, "signal": event.signal, "timedOut": event.timed_out}
    return {"type": "exit", **facts, "durationMs": round(event.duration * 1000, 3)}


def _json(value: object) -> bytes:
    return json.dumps(value).encode() + b"\n"


# Files


async def guest_path(request: Request) -> str:
    """The path inside the VM, byte for byte: percent-encoded as one segment, or as many segments."""
    raw = request.scope.get("raw_path", request.url.path.encode()).partition(b"?")[0]
    prefix = request.scope["root_path"].encode()
    # /v1/vms/<id>/<noun>/<path>
    parts = raw.removeprefix(prefix).split(b"/", 5)
    path = os.fsdecode(unquote_to_bytes(parts[5])) if len(parts) == 6 else ""
    path = path if path.startswith("/") else f"/{path}"
    if "\0" in path:
        raise InvalidGuestPath("path must not contain NUL characters")
    return path


GuestPath = Annotated[str, Depends(guest_path)]


def _files(guest: GuestAccess) -> GuestFiles:
    return guest.machine.files(guest.user)


@contextlib.contextmanager
def _naming_in_errors(path: str) -> Iterator[None]:
    """Adds the path to a not-found error."""
    try:
        yield
    except GuestError as error:
        if error.code == "not_found":
            raise GuestFileNotFound(_shown(path)) from None
        raise


def _shown(path: str) -> str:
    return os.fsencode(path).decode(errors="replace")


@router.get("/files/{path:path}", response_model=VmFileContent | Directory)
@invalid_code("FILES_BAD_REQUEST")
async def read_file(guest: Guest, path: GuestPath, request: Request, call: CurrentCall) -> Response:
    """Read a file, or list a folder.

    With `Accept: application/octet-stream` the answer is plain bytes of any size; JSON holds up to 64 MiB.
    """
    files = _files(guest)
    with _naming_in_errors(path):
        found = await files.stat(path)
        if request.headers.get("accept", "").startswith(_RAW):
            if found.kind == "directory":
                raise InvalidRequest(f"{_shown(path)} is a folder, not a file")
            return await _streamed(files.stream(path), _RAW)
        if found.kind == "directory":
            listed = await _listed(files, path, call)
            return await large_answer(call, Directory(files=[]), {"files": listed})
        if found.size > MAX_WHOLE_FILE:
            most = MAX_WHOLE_FILE >> 20
            text = f"file too large for JSON: {found.size} bytes (max {most} MiB); use Accept: {_RAW}"
            raise ApiError("FILES_BAD_REQUEST", text, 413)
        if found.size > SMALL_ANSWER:
            await call.reserve(found.size)
        content = await files.read(path, length=MAX_WHOLE_FILE, reserve=call.reserve, reserved=found.size)
    as_text = await _is_text(content)
    file = VmFileContent(content="", encoding="utf8" if as_text else "base64")
    return await large_answer(call, file, {"content": Text(content) if as_text else Base64(content)})


async def _listed(files: GuestFiles, path: str, call: Call) -> Serialized:
    """The entries of a folder. Only their JSON is held, which is a part of what the guest sends."""
    pieces, memory = list[bytes](), MemoryReservation(call.reserve)
    async with contextlib.aclosing(files.batches(path, _serialized_entries)) as batches:
        async for piece in batches:
            await memory.add(len(piece))
            pieces.append(piece)
    return Serialized(pieces)


def _serialized_entries(entries: Sequence[FileInfo]) -> bytes:
    models = [VmDirectoryEntry(name=_shown(each.name), kind=_kind(each)) for each in entries]
    return _ENTRIES.dump_json(models)[1:-1]


async def _is_text(content: bytes) -> bool:
    def is_utf8() -> bool:
        decode = codecs.getincrementaldecoder("utf-8")().decode
        try:
            for start in range(0, len(content), _DECODED):
                decode(content[start : start + _DECODED], start + _DECODED >= len(content))
        except UnicodeDecodeError:
            return False
        return True

    return is_utf8() if len(content) <= SMALL_ANSWER else await Threads.PARSING.run(is_utf8)


def _kind(entry: FileInfo) -> Any:
    """The wire format has only files and folders: everything that is not a folder is a file."""
    return "directory" if entry.kind == "directory" else "file"


async def _streamed(chunks: AsyncGenerator[bytes, None], media_type: str) -> StreamingResponse:
    """A streamed response. It waits for the first chunk, so that a failure until then is an error answer."""
    first = await anext(chunks, b"")

    async def content() -> AsyncIterator[bytes]:
        async with contextlib.aclosing(chunks):
            yield first
            async for chunk in chunks:
                yield chunk

    return StreamingResponse(content(), media_type=media_type)


_WRITE_BODY = {
    "requestBody": {
        "required": True,
        "content": {
            "application/json": {"schema": WriteFile.model_json_schema()},
            _RAW: {"schema": {"type": "string", "format": "binary"}},
        },
    }
}


@router.put("/files/{path:path}", openapi_extra=_WRITE_BODY)
@invalid_code("FILES_BAD_REQUEST")
@streamed_body(_RAW)
@large_body(MAX_BODY)
async def write_file(guest: Guest, path: GuestPath, request: Request, mode: _Mode = None) -> Nothing:
    """Write a file atomically and create its parent folders. If the write fails, the old file stays.

    The body is JSON with `content`, or plain bytes with `Content-Type: application/octet-stream`.
    """
    files = _files(guest)
    permissions = None if mode is None else int(mode, 8)
    size = None
    content: bytes | AsyncIterator[bytes]
    if request.headers.get("content-type", "").startswith(_RAW):
        length = request.headers.get("content-length")
        size, content = int(length) if length else None, request.stream()
    else:
        content = await _written(request)
    with _naming_in_errors(path):
        try:
            await files.write(path, content, mode=permissions, size=size)
        except GuestError as error:
            # Parents are created, so the file itself cannot be: in /proc and /sys, for example.
            if error.code == "not_found" and await _exists(files, path):
                folder = _shown(posixpath.dirname(path) or "/")
                text = f"cannot replace {_shown(path)}: no file can be created in {folder}"
                raise InvalidRequest(f"{text}; write to it with a command") from None
            raise
    return Nothing()


async def _written(request: Request) -> bytes:
    body = await request.body()
    try:
        return _content(body) if len(body) <= SMALL_BODY else await Threads.PARSING.run(_content, body)
    except ValidationError as error:
        problem = error.errors()[0]
        where = ".".join(str(part) for part in problem["loc"])
        raise InvalidRequest(f"invalid request: {where}: {problem['msg']}") from None
    except ValueError as error:
        raise InvalidRequest(str(error)) from None


def _content(body: bytes) -> bytes:
    # The content type says nothing here: clients send JSON without it.
    check_values(body)
    return WriteFile.model_validate_json(body).data()


@router.delete("/files/{path:path}")
@invalid_code("FILES_BAD_REQUEST")
async def remove_file(guest: Guest, path: GuestPath, recursive: bool = False) -> Nothing:
    """Delete a file or an empty folder; with `recursive`, a folder and everything in it."""
    with _naming_in_errors(path):
        await _files(guest).remove(path, recursive=recursive)
    return Nothing()


@router.get("/stat/{path:path}")
async def stat_file(guest: Guest, path: GuestPath, follow: bool = True) -> FileFacts:
    """Get type, size, owner, permissions and times of a file or folder."""
    with _naming_in_errors(path):
        found = await _files(guest).stat(path, follow=follow)
    return FileFacts(
        name=_shown(found.name),
        kind=found.kind,
        size=found.size,
        mode=found.mode,
        uid=found.uid,
        gid=found.gid,
        user=found.user,
        group=found.group,
        mtime_ms=found.mtime_ns / 1e6,
        target=None if found.target is None else _shown(found.target),
    )


@router.post("/move")
@invalid_code("FILES_BAD_REQUEST")
async def move_file(guest: Guest, wanted: Move) -> Nothing:
    """Move or rename a file or folder inside the VM; an existing target is kept unless `overwrite` is true.

    A rename within one file system is atomic; across file systems the source is copied, then removed.
    """
    source, target = _path_field(wanted.source, "from"), _path_field(wanted.target, "to")
    await _files(guest).move(source, target, overwrite=wanted.overwrite)
    return Nothing()


def _path_field(path: str, field: str) -> str:
    """A path from a JSON body: absolute, valid UTF-8, no NUL."""
    try:
        path.encode()
    except UnicodeEncodeError as error:
        text = f"{field} must be valid UTF-8 (lone surrogate at offset {error.start})"
        raise InvalidRequest(text) from None
    if not path.startswith("/") or "\0" in path:
        raise InvalidRequest(f"{field} must be an absolute path without NUL, got {path!r}")
    return path


@router.post("/directories/{path:path}")
async def make_directory(guest: Guest, path: GuestPath, parents: bool = False) -> Nothing:
    """Create a folder. With `parents`, create its parents too; an existing folder is not an error then."""
    files = _files(guest)
    with _naming_in_errors(path):
        try:
            await files.make_folder(path, parents=parents)
        except GuestError as error:
            if error.code == "not_found" and (missing := await _missing_parent(files, path)) is not None:
                text = f"cannot create {_shown(path)}: no such folder: {_shown(missing)}"
                text += "; create it first, or use `parents`"
                raise GuestFileNotFound(_shown(missing), text) from None
            raise
    return Nothing()


async def _missing_parent(files: GuestFiles, path: str) -> str | None:
    """The uppermost parent folder of a path that does not exist."""
    missing, parent = None, posixpath.dirname(path.rstrip("/"))
    for _ in range(_MAX_PARENTS):
        if await _exists(files, parent):
            break
        missing, parent = parent, posixpath.dirname(parent)
    return missing


async def _exists(files: GuestFiles, path: str) -> bool:
    try:
        await files.stat(path)
    except GuestError:
        return False
    return True


@router.get("/archives/{path:path}", response_class=StreamingResponse)
async def read_archive(guest: Guest, path: GuestPath) -> StreamingResponse:
    """Download the contents of a folder as a tar archive."""
    with _naming_in_errors(path):
        return await _streamed(_files(guest).download_tar(path), _TAR)


_ARCHIVE_BODY = {
    "requestBody": {"required": True, "content": {_TAR: {"schema": {"type": "string", "format": "binary"}}}}
}


@router.put("/archives/{path:path}", openapi_extra=_ARCHIVE_BODY)
@streamed_body(_TAR, _RAW)
async def write_archive(guest: Guest, path: GuestPath, request: Request) -> Unpacked:
    """Unpack a tar archive into a folder, which is created if it does not exist."""
    with _naming_in_errors(path):
        return Unpacked(files=await _files(guest).upload_tar(path, request.stream()))
