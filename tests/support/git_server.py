"""A git server for tests: `git http-backend` behind a small web server that records requests."""

import base64
import contextlib
import os
import ssl
import subprocess
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import IO

_CHUNK = 256 << 10


@dataclass(frozen=True)
class Request:
    method: str
    target: str
    headers: Mapping[str, str]
    """Names are in lower case."""
    status: int

    @property
    def path(self) -> str:
        return self.target.partition("?")[0]


@dataclass(frozen=True)
class Page:
    """A scripted response: a file, a redirect, an error."""

    content: bytes = b""
    status: int = 200
    headers: Mapping[str, str] = field(default_factory=dict)
    complete: bool = True
    """If False, the connection is closed in the middle."""
    pause: float = 0.0
    """Seconds between pieces of 1 KiB."""


@dataclass(frozen=True)
class Question:
    """A request before its response; its body can be read once."""

    method: str
    path: str
    headers: Mapping[str, str]
    """Names are in lower case."""
    read: Callable[[], bytes]


def redirect(location: str, status: int = 302) -> Page:
    return Page(status=status, headers={"Location": location})


@dataclass
class GitServer:
    """Serves the bare repositories in a folder; all fields can be changed while it runs."""

    folder: Path
    url: str = ""
    credentials: str | None = None
    """`name:password` required from all clients."""
    pages: dict[str, Page | Callable[[], Page]] = field(default_factory=dict)
    """Scripted responses by path."""
    old: bool = False
    """Speak protocol version 0 only."""
    config: dict[str, str] = field(default_factory=dict)
    """Git settings."""
    requests: list[Request] = field(default_factory=list)
    judge: Callable[[Question], Page | None] | None = None
    """Answers requests instead of git."""
    done: Callable[[str], None] | None = None
    """Called with the path after each response of git."""

    def forget(self, folder: Path) -> None:
        """Reset, with the repositories of another folder."""
        fresh = GitServer(folder, self.url)
        self.__dict__.update(fresh.__dict__)

    @property
    def port(self) -> int:
        return int(self.url.rpartition(":")[2])

    def init(self, name: str, branch: str = "main") -> Path:
        """A new empty repository, served at `url/name`."""
        place = self.folder / name
        subprocess.run(["git", "init", "-q", "--bare", "-b", branch, place], check=True)
        return place

    def environment(self) -> dict[str, str]:
        settings = {"http.receivepack": "true", "gc.auto": "0", **self.config}
        told = {"GIT_CONFIG_COUNT": str(len(settings))}
        for place, (name, value) in enumerate(settings.items()):
            told |= {f"GIT_CONFIG_KEY_{place}": name, f"GIT_CONFIG_VALUE_{place}": value}
        return {
            "PATH": os.environ["PATH"],
            "HOME": "/nonexistent",
            "GIT_CONFIG_NOSYSTEM": "1",
            "GIT_PROJECT_ROOT": str(self.folder),
            "GIT_HTTP_EXPORT_ALL": "1",
            **told,
        }


class _Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    server: "_Listener"

    def do_GET(self) -> None:
        self._answer()

    def do_POST(self) -> None:
        self._answer()

    def do_PUT(self) -> None:
        self._answer()

    def log_message(self, *_: object) -> None:
        pass

    def _answer(self) -> None:
        told = self.server.told
        path, _, query = self.path.partition("?")
        with contextlib.suppress(ConnectionError, ssl.SSLError):
            if told.credentials is not None and not self._known(told.credentials):
                self._drain()
                challenge = {"WWW-Authenticate": 'Basic realm="git"'}
                self._page(Page(b"who are you?", 401, challenge))
            elif path in told.pages:
                self._drain()
                page = told.pages[path]
                self._page(page if isinstance(page, Page) else page())
            elif (judged := self._judged(path)) is not None:
                self._page(judged)
            else:
                self._git(path, query)
                if told.done is not None:
                    told.done(path)
            return
        self.close_connection = True

    def _judged(self, path: str) -> Page | None:
        judge = self.server.told.judge
        if judge is None:
            return None
        read = False

        def body() -> bytes:
            nonlocal read
            read = True
            return b"".join(self._body())

        headers = {name.lower(): value for name, value in self.headers.items()}
        page = judge(Question(self.command, path, headers, body))
        if page is not None and not read:
            self._drain()
        return page

    def _known(self, credentials: str) -> bool:
        wanted = base64.b64encode(credentials.encode()).decode()
        return self.headers.get("Authorization") == f"Basic {wanted}"

    def _note(self, status: int) -> None:
        headers = {name.lower(): value for name, value in self.headers.items()}
        self.server.told.requests.append(Request(self.command, self.path, headers, status))

    def _page(self, page: Page) -> None:
        self._note(page.status)
        self.send_response(page.status)
        for name, value in page.headers.items():
            self.send_header(name, value)
        self.send_header("Content-Length", str(len(page.content)))
        self.end_headers()
        if page.pause:
            for place in range(0, len(page.content), 1024):
                self.wfile.write(page.content[place : place + 1024])
                time.sleep(page.pause)
        else:
            self.wfile.write(page.content if page.complete else page.content[: len(page.content) // 2])
        if not page.complete:
            self.close_connection = True

    def _git(self, path: str, query: str) -> None:
        environment = self.server.told.environment() | {
            "REQUEST_METHOD": self.command,
            "PATH_INFO": path,
            "QUERY_STRING": query,
            "CONTENT_TYPE": self.headers.get("Content-Type", ""),
            "CONTENT_LENGTH": self.headers.get("Content-Length", ""),
            "HTTP_CONTENT_ENCODING": self.headers.get("Content-Encoding", ""),
            "GIT_PROTOCOL": "" if self.server.told.old else self.headers.get("Git-Protocol", ""),
            "REMOTE_ADDR": self.client_address[0],
        }
        if not environment["CONTENT_LENGTH"]:
            del environment["CONTENT_LENGTH"]
        with subprocess.Popen(
            ["git", "http-backend"],
            env=environment,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
        ) as process:
            assert process.stdin is not None and process.stdout is not None
            feeder = threading.Thread(target=self._feed, args=(process.stdin,))
            feeder.start()
            try:
                self._relay(process.stdout)
            except BaseException:
                process.kill()
                raise
            finally:
                feeder.join()

    def _feed(self, stdin: IO[bytes]) -> None:
        with contextlib.suppress(OSError), stdin:
            for piece in self._body():
                stdin.write(piece)

    def _drain(self) -> None:
        for _ in self._body():
            pass

    def _body(self) -> Iterator[bytes]:
        if self.headers.get("Transfer-Encoding", "").lower() == "chunked":
            while size := int(self.rfile.readline().split(b";")[0] or b"0", 16):
                yield self.rfile.read(size)
                self.rfile.readline()
            self.rfile.readline()
            return
        left = int(self.headers.get("Content-Length") or 0)
        while left and (piece := self.rfile.read(min(left, _CHUNK))):
            left -= len(piece)
            yield piece

    def _relay(self, stdout: IO[bytes]) -> None:
        status, headers = 200, []
        while line := stdout.readline().strip():
            name, _, value = line.decode("latin-1").partition(": ")
            if name.lower() == "status":
                status = int(value.split()[0])
            else:
                headers.append((name, value))
        self._note(status)
        self.send_response(status)
        for name, value in headers:
            self.send_header(name, value)
        self.send_header("Transfer-Encoding", "chunked")
        self.end_headers()
        while piece := stdout.read1(_CHUNK):  # type: ignore[attr-defined]  # a pipe is buffered
            self.wfile.write(b"%x\r\n%s\r\n" % (len(piece), piece))
        self.wfile.write(b"0\r\n\r\n")


class _Listener(ThreadingHTTPServer):
    daemon_threads = True

    def __init__(self, address: str, port: int, told: GitServer) -> None:
        self.told = told
        super().__init__((address, port), _Handler)

    def handle_error(self, request: object, client_address: object) -> None:
        """Ignore disconnected clients: tests check the client side."""


@contextlib.contextmanager
def serving(
    folder: Path, *, address: str = "127.0.0.1", port: int = 0, tls: ssl.SSLContext | None = None
) -> Iterator[GitServer]:
    """Serve the repositories in this folder until the end of the block."""
    told = GitServer(folder)
    with _Listener(address, port, told) as listener:
        if tls is not None:
            listener.socket = tls.wrap_socket(listener.socket, server_side=True)
        scheme = "http" if tls is None else "https"
        told.url = f"{scheme}://{address}:{listener.server_address[1]}"
        thread = threading.Thread(target=listener.serve_forever, args=(0.02,), daemon=True)
        thread.start()
        try:
            yield told
        finally:
            listener.shutdown()
            thread.join()
