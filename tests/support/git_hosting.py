"""A git server on its own port for tests, and a git client."""

import asyncio
import base64
import contextlib
import os
from asyncio.subprocess import DEVNULL, PIPE
from collections.abc import AsyncIterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from starlette.responses import PlainTextResponse
from starlette.types import Receive, Scope, Send

from stead.api.calls import Calls
from stead.api.server import running_app
from stead.api.smart_http import SmartHttp
from stead.identity.accounts import Accounts
from stead.identity.identities import Identities
from stead.repos.access import Level, RepoAccess
from stead.repos.repos import RepoInfo, Repos
from stead.repos.transfer.serving import PackServer
from stead.settings import Settings
from support.git_stage import Recorder, staged

_TIMEOUT = 60.0


@dataclass(frozen=True)
class Ran:
    status: int
    stdout: bytes
    err: str

    @property
    def out(self) -> str:
        return self.stdout.decode(errors="replace")


class GitClient:
    """The real git, with an isolated configuration."""

    def __init__(self, home: Path) -> None:
        self.home = home
        # The client's own disk is not tested: skip fsync.
        (home / ".gitconfig").write_text(
            "[core]\n\tfsync = none\n\tcompression = 0\n\tbigFileThreshold = 1m\n[gc]\n\tauto = 0\n"
        )

    def environment(self) -> dict[str, str]:
        who = {
            f"GIT_{role}_{what}": "tests@stead.invalid"
            for role in ("AUTHOR", "COMMITTER")
            for what in ("NAME", "EMAIL")
        }
        own = {
            "HOME": str(self.home),
            "GIT_TERMINAL_PROMPT": "0",
            "GIT_CONFIG_NOSYSTEM": "1",
            "LC_ALL": "C.UTF-8",
        }
        return {"PATH": os.environ["PATH"], **who, **own}

    async def run(
        self,
        *arguments: str,
        cwd: Path | None = None,
        stdin: bytes = b"",
        timeout: float = _TIMEOUT,
        env: Mapping[str, str] | None = None,
    ) -> Ran:
        process = await asyncio.create_subprocess_exec(
            "git",
            *arguments,
            cwd=cwd or self.home,
            env=self.environment() | dict(env or {}),
            stdin=PIPE if stdin else DEVNULL,
            stdout=PIPE,
            stderr=PIPE,
        )
        try:
            async with asyncio.timeout(timeout):
                out, err = await process.communicate(stdin or None)
        finally:
            if process.returncode is None:
                process.kill()
                await process.wait()
        assert process.returncode is not None
        return Ran(process.returncode, out, err.decode(errors="replace"))

    async def printed(self, *arguments: str, cwd: Path | None = None, stdin: bytes = b"") -> bytes:
        """The output of git, which must succeed."""
        ran = await self.run(*arguments, cwd=cwd, stdin=stdin)
        assert ran.status == 0, f"git {' '.join(arguments)}: {ran.err}"
        return ran.stdout

    async def __call__(self, *arguments: str, cwd: Path | None = None, stdin: bytes = b"") -> str:
        return (await self.printed(*arguments, cwd=cwd, stdin=stdin)).decode(errors="replace").strip()

    async def work_tree(self, name: str, files: dict[str, str | bytes] | None = None) -> Path:
        """A new repository of the user, with one commit on main."""
        folder = self.home / name
        await self("init", "-q", "-b", "main", str(folder))
        await self.commit(folder, files or {"README": "hello\n"})
        return folder

    async def commit(self, folder: Path, files: dict[str, str | bytes], message: str = "change") -> str:
        for path, content in files.items():
            place = folder / path
            place.parent.mkdir(parents=True, exist_ok=True)
            place.write_bytes(content.encode() if isinstance(content, str) else content)
        await self("add", "-A", cwd=folder)
        await self("commit", "-q", "--allow-empty", "-m", message, cwd=folder)
        return await self("rev-parse", "HEAD", cwd=folder)


@dataclass
class Hosting:
    """An account with an API key, and the server of its repositories."""

    url: str
    accounts: Accounts
    identities: Identities
    repos: Repos
    access: RepoAccess
    account: str
    key: str
    folder: Path
    pushes: list[str] = field(default_factory=list)

    async def repo(self, *, public: bool = False) -> RepoInfo:
        return await self.repos.create(self.account, public=public)

    def path(self, repo: RepoInfo) -> Path:
        return self.repos.repository(repo.id).path

    def remote(self, repo: RepoInfo | str, secret: str | None = None, user: str = "x-access-token") -> str:
        """The clone URL, with the account's key by default."""
        repo_id = repo if isinstance(repo, str) else repo.id
        secret = self.key if secret is None else secret
        login = f"{user}:{secret}@" if secret else ""
        return self.url.replace("http://", f"http://{login}") + f"/{repo_id}"

    async def token(self, repo: RepoInfo | None = None, level: Level = "read") -> str:
        """The token of a new identity, with a permission on a repository."""
        identity = await self.identities.create(self.account)
        if repo is not None:
            await self.access.grant(self.account, identity.id, repo.id, level)
        _, token = await self.identities.create_token(self.account, identity.id)
        return token

    async def settled(self) -> None:
        """Wait for background work after a change."""
        await self.repos.quotas.flush()
        await self.repos.housekeeping.join()

    async def check_all(self, client: GitClient) -> None:
        """Every repository passes fsck and has no leftovers."""
        await self.settled()
        for path in self.folder.glob("??/*.git"):
            ran = await client.run("--git-dir", str(path), "fsck", "--strict", "--full", "--no-dangling")
            assert ran.status == 0, ran.err
            left = [str(each) for each in path.rglob("*") if each.suffix == ".lock" or "tmp_" in each.name]
            assert left == []


async def _nothing_else(scope: Scope, receive: Receive, send: Send) -> None:
    await PlainTextResponse("the API", 418)(scope, receive, send)


@contextlib.asynccontextmanager
async def hosting(folder: Path, **limits: Any) -> AsyncIterator[Hosting]:
    """Serve repositories in a folder until the end of the block."""
    max_lfs = limits.pop("max_lfs_object", 1 << 30)
    pushes = Recorder()
    async with staged(folder) as stage:
        stage.writer.subscribe(pushes)
        _, key = await stage.accounts.create_key(stage.ours)
        serving = PackServer(stage.repos, stage.writer, **limits)
        callers = stage.installation.callers
        calls = Calls(SmartHttp(_nothing_else, callers, stage.repos, stage.access, serving, max_lfs), 1000)
        async with running_app(Settings(listen="127.0.0.1:0"), calls, calls) as url:
            parts = (stage.accounts, stage.identities, stage.repos, stage.access)
            yield Hosting(url, *parts, stage.ours, key, folder / "repos", pushes)


def basic(user: str, password: str) -> str:
    return "Basic " + base64.b64encode(f"{user}:{password}".encode()).decode()


def gits_of(repository: Path) -> list[str]:
    """Git processes of a repository, except pooled readers."""
    found = []
    for process in Path("/proc").glob("[0-9]*"):
        with contextlib.suppress(OSError):
            if f"GIT_DIR={repository}\0".encode() in (process / "environ").read_bytes():
                found.append((process / "cmdline").read_bytes().replace(b"\0", b" ").decode())
    return [each for each in found if "cat-file" not in each]
