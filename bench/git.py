"""Git hosting benchmark: Stead against plain `git http-backend` behind lighttpd, on the same repositories.

Runs as root. Installs lighttpd with apt-get if it is missing. The ratios are Stead's median time divided by
plain git's; at the top level stands the worse of the two repositories.
"""

import argparse
import asyncio
import contextlib
import os
import shutil
import socket
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import httpx2
from measuring import Figure, figure, report, run, say, serving, since

from stead.settings import Settings

SEARCHED = 100_000
TRANSFERS = ("clone", "push", "fetch")
REPOSITORIES = {"1k files": (1000, 20), "50k objects": (2000, 8000)}
"""Files and commits of the repositories that are cloned, pushed to and fetched from."""
BIG = 2 << 30
_WORDS = ("alpha", "beta", "gamma", "delta", "needle", "omega", "return", "import", "class", "value")
_PLAIN = """
server.document-root = "{folder}"
server.bind = "127.0.0.1"
server.port = {port}
server.upload-dirs = ("{scratch}")
server.errorlog = "{scratch}/lighttpd.log"
server.modules = ("mod_alias", "mod_setenv", "mod_cgi")
server.max-keep-alive-requests = 1000
# Stream request and response bodies.
server.stream-request-body = 1
server.stream-response-body = 1
alias.url = ("/" => "{backend}/")
cgi.assign = ("" => "")
setenv.set-environment = (
    "GIT_PROJECT_ROOT" => "{folder}", "GIT_HTTP_EXPORT_ALL" => "1", "GIT_CONFIG_NOSYSTEM" => "1",
    "GIT_CONFIG_COUNT" => "3", "GIT_CONFIG_KEY_0" => "http.receivepack", "GIT_CONFIG_VALUE_0" => "true",
    "GIT_CONFIG_KEY_1" => "gc.auto", "GIT_CONFIG_VALUE_1" => "0",
    "GIT_CONFIG_KEY_2" => "safe.directory", "GIT_CONFIG_VALUE_2" => "*"
)
"""


def git(*arguments: str | Path, cwd: Path, key: str = "", stdin: bytes = b"") -> bytes:
    environment = {
        "PATH": os.environ["PATH"],
        "HOME": "/nonexistent",
        "GIT_CONFIG_NOSYSTEM": "1",
        "GIT_TERMINAL_PROMPT": "0",
        "GIT_AUTHOR_NAME": "A",
        "GIT_AUTHOR_EMAIL": "a@example.org",
        "GIT_COMMITTER_NAME": "A",
        "GIT_COMMITTER_EMAIL": "a@example.org",
    }
    if key:
        environment |= {
            "GIT_CONFIG_COUNT": "1",
            "GIT_CONFIG_KEY_0": "http.extraHeader",
            "GIT_CONFIG_VALUE_0": f"Authorization: Bearer {key}",
        }
    done = subprocess.run(["git", *arguments], cwd=cwd, env=environment, input=stdin, capture_output=True)
    if done.returncode:
        raise RuntimeError(f"git {arguments[0]}: {done.stderr.decode(errors='replace')}")
    return done.stdout


def history(files: int, commits: int) -> Iterator[bytes]:
    """Input for fast-import: a first commit of many files, then small commits."""
    number = 0
    for commit in range(commits):
        message = b"commit %d" % commit
        yield b"commit refs/heads/main\ncommitter A <a@example.org> %d +0000\n" % (1_700_000_000 + commit)
        yield b"data %d\n%s\n" % (len(message), message)
        for _ in range(files if commit == 0 else 4):
            path = f"src/folder{number % 97}/file{number % max(files, 1)}.py"
            lines = "\n".join(
                _WORDS[(number * 7 + line) % len(_WORDS)] + f" {number} {line}" for line in range(12)
            )
            yield f"M 100644 inline {path}\ndata {len(lines)}\n{lines}\n".encode()
            number += 1


def make(folder: Path, files: int, commits: int) -> Path:
    git("init", "-q", "--bare", "-b", "main", folder, cwd=folder.parent)
    git("fast-import", "--quiet", cwd=folder, stdin=b"".join(history(files, commits)))
    git("repack", "-adq", cwd=folder)
    return folder


class Side:
    """A repository on one of the two servers."""

    def __init__(self, url: str, key: str = "") -> None:
        self.url = url
        self.key = key

    def clone(self, into: Path) -> None:
        git("clone", "-q", "--bare", self.url, into, cwd=into.parent, key=self.key)


def alternate(
    sides: list[Side], samples: int, work: Callable[[Side, int], float]
) -> tuple[float, list[float]]:
    """Measure both sides in turns: the ratio of the medians, Stead's to plain git's, and both medians."""
    times: list[list[float]] = [[], []]
    for number in range(samples):
        order = (0, 1) if number % 2 else (1, 0)
        for side in order:
            times[side].append(work(sides[side], number))
    ours, plain = (statistics.median(each) for each in times)
    return round(ours / plain, 3), [round(ours, 1), round(plain, 1)]


def transfer(folder: Path, sides: list[Side], samples: int) -> dict[str, Any]:
    """Clone, push and fetch of one repository through both servers."""

    def clone(side: Side, number: int) -> float:
        into = folder / f"clone-{number}"
        start = time.perf_counter()
        side.clone(into)
        took = since(start)
        shutil.rmtree(into)
        return took

    writers: dict[str, Path] = {}
    for side in sides:
        writers[side.url] = folder / f"writer-{len(writers)}"
        side.clone(writers[side.url])

    def commit(place: Path, number: int) -> None:
        lines = [b"commit refs/heads/main\ncommitter A <a@example.org> %d +0000\n" % (1_800_000_000 + number)]
        lines += [b"data 1\nx\nfrom refs/heads/main^0\n"]
        for each in range(100):
            text = f"{number} {each} " * 20
            lines.append(f"M 100644 inline new/{number}/{each}\ndata {len(text)}\n{text}\n".encode())
        git("fast-import", "--quiet", cwd=place, stdin=b"".join(lines))

    def push(side: Side, number: int) -> float:
        commit(writers[side.url], number)
        start = time.perf_counter()
        git("push", "-q", side.url, "main", cwd=writers[side.url], key=side.key)
        return since(start)

    readers: dict[str, Path] = {}

    def fetch(side: Side, number: int) -> float:
        if side.url not in readers:
            readers[side.url] = folder / f"reader-{len(readers)}"
            side.clone(readers[side.url])
        commit(writers[side.url], 1000 + number)
        git("push", "-q", side.url, "main", cwd=writers[side.url], key=side.key)
        start = time.perf_counter()
        git("fetch", "-q", side.url, "main", cwd=readers[side.url], key=side.key)
        return since(start)

    results: dict[str, Any] = {}
    for name, work in zip(TRANSFERS, (clone, push, fetch), strict=True):
        results[f"{name}_ratio"], results[f"{name}_ms"] = alternate(sides, samples, work)
    for place in (*writers.values(), *readers.values()):
        shutil.rmtree(place)
    return results


def lighttpd() -> str | None:
    return shutil.which("lighttpd", path=f"{os.environ['PATH']}:/usr/sbin")


def install_lighttpd() -> str:
    """Install the distribution's lighttpd without starting its service."""
    if os.geteuid() or not shutil.which("apt-get"):
        raise SystemExit("bench/git compares with git behind lighttpd: install the package lighttpd first")
    words = "bench/git: installing lighttpd with apt-get (its service is neither started nor enabled)"
    print(words, file=sys.stderr, flush=True)
    policy = Path("/usr/sbin/policy-rc.d")
    ours = not policy.exists()
    if ours:
        policy.write_text("#!/bin/sh\nexit 101\n")
        policy.chmod(0o755)
    try:
        environment = {**os.environ, "DEBIAN_FRONTEND": "noninteractive"}
        for command in (["update"], ["install", "-y", "--no-install-recommends", "lighttpd"]):
            subprocess.run(["apt-get", "-qq", *command], env=environment, stdout=sys.stderr, check=True)
    finally:
        if ours:
            policy.unlink()
    if shutil.which("systemctl"):
        subprocess.run(["systemctl", "--quiet", "disable", "lighttpd"], stdout=sys.stderr, check=False)
    if (program := lighttpd()) is None:
        raise SystemExit("apt-get installed lighttpd, but there is no such program in PATH or /usr/sbin")
    return program


@contextlib.contextmanager
def plain(folder: Path, program: str) -> Iterator[str]:
    """`git http-backend` behind lighttpd: the address of the server."""
    port = 18603
    backend = Path(subprocess.check_output(["git", "--exec-path"], text=True).strip()) / "git-http-backend"
    with tempfile.TemporaryDirectory() as scratch:
        config = Path(scratch) / "lighttpd.conf"
        config.write_text(_PLAIN.format(folder=folder, port=port, scratch=scratch, backend=backend))
        with subprocess.Popen([program, "-D", "-f", config], stdin=subprocess.DEVNULL) as process:
            try:
                _wait_for(port)
                yield f"http://127.0.0.1:{port}"
            finally:
                process.terminate()
                process.wait(60)


def _wait_for(port: int) -> None:
    for _ in range(100):
        with contextlib.suppress(OSError), socket.create_connection(("127.0.0.1", port), 1):
            return
        time.sleep(0.05)
    raise RuntimeError("lighttpd did not start")


async def many(samples: int, work: Callable[[int], Any]) -> Figure:
    times = []
    for number in range(samples + 2):
        start = time.perf_counter()
        await work(number)
        times.append(since(start))
    return figure(times[2:])


async def by_api(http: httpx2.AsyncClient, samples: int) -> dict[str, Any]:
    async def call(method: str, path: str, **options: Any) -> Any:
        answer = await http.request(method, path, **options)
        if answer.status_code != 200:
            raise RuntimeError(f"{method} {path}: {answer.text}")
        return answer.json()

    async def commit(number: int, count: int) -> None:
        files = [
            {"path": f"c{count}/{number}/{each}", "content": f"{number} {each}"} for each in range(count)
        ]
        await call("POST", f"{root}/commits", json={"message": "m", "files": files})

    repo = (await call("POST", "/git/v1/repo"))["repoId"]
    root = f"/git/v1/repo/{repo}"
    results = {"repo_create_ms": await many(samples, lambda _: call("POST", "/git/v1/repo"))}
    results["commit_1_file_ms"] = await many(samples, lambda number: commit(number, 1))
    results["commit_100_files_ms"] = await many(samples // 4, lambda number: commit(number, 100))
    files = [{"path": f"flat/{each}", "content": f"{each}"} for each in range(1000)]
    await call("POST", f"{root}/commits", json={"message": "m", "files": files})
    results["read_file_ms"] = await many(
        samples, lambda number: call("GET", f"{root}/contents/flat/{number}")
    )
    results["list_tree_1k_ms"] = await many(samples, lambda _: call("GET", f"{root}/contents/flat"))
    return results


async def searching(http: httpx2.AsyncClient, repo: str, place: Path, samples: int) -> dict[str, Any]:
    """The same words by `git grep` and by API in turns; then by API again, from its cache."""
    cold: list[float] = []
    again: list[float] = []
    grep: list[float] = []
    for number in range(samples):
        word = f"needle {number * 7 + 4} "
        start = time.perf_counter()
        await asyncio.to_thread(_grep, word, place)
        grep.append(since(start))
        for times in (cold, again):
            start = time.perf_counter()
            found = await http.get(f"/git/v1/repo/{repo}/search", params={"query": word}, timeout=120)
            times.append(since(start))
            if found.status_code != 200:
                raise RuntimeError(found.text)
    base = statistics.median(grep)
    return {
        "git_grep_ms": figure(grep),
        "search_ratio": round(statistics.median(cold) / base, 3),
        "search_again_ratio": round(statistics.median(again) / base, 4),
    }


def _grep(word: str, place: Path) -> None:
    subprocess.run(
        ["git", "grep", "-I", "-n", "-i", "-F", "-e", word, "main"], cwd=place, capture_output=True
    )


def big_push(pid: int, url: str, key: str, folder: Path) -> dict[str, Any]:
    """Push 2 GiB of incompressible data, and measure the server's memory."""
    place = folder / "big"
    git("init", "-q", "-b", "main", place, cwd=folder)
    with (place / "big.bin").open("wb") as file:
        for _ in range(BIG >> 24):
            file.write(os.urandom(1 << 24))
    git("-c", "core.bigFileThreshold=1m", "-c", "core.compression=0", "add", "big.bin", cwd=place)
    git("commit", "-q", "-m", "big", cwd=place)
    before = _memory(pid, "VmRSS")
    Path(f"/proc/{pid}/clear_refs").write_text("5")
    start = time.perf_counter()
    git("push", "-q", url, "main", cwd=place, key=key)
    took = since(start)
    shutil.rmtree(place)
    return {
        "rss_2gb_push_mb": round(_memory(pid, "VmHWM"), 1),
        "rss_before_mb": round(before, 1),
        "push_2gb_s": round(took / 1000, 1),
    }


def _memory(pid: int, name: str) -> float:
    lines = Path(f"/proc/{pid}/status").read_text().splitlines()
    return int(next(line for line in lines if line.startswith(f"{name}:")).split()[1]) / 1024


def worst(repositories: dict[str, dict[str, Any]]) -> dict[str, float]:
    """For each transfer, the ratio of the repository that does worse."""
    names = [f"{transfer}_ratio" for transfer in TRANSFERS]
    return {name: max(each[name] for each in repositories.values()) for name in names}


async def measure(samples: int, program: str, *, big: bool) -> dict[str, Any]:
    version = (await asyncio.to_thread(git, "--version", cwd=Path("/"))).decode().strip()
    host = {"cores": os.cpu_count(), "git": version.split()[-1], "host_kernel": os.uname().release}
    results: dict[str, Any] = {}
    repositories: dict[str, dict[str, Any]] = {}
    with tempfile.TemporaryDirectory(prefix="stead-bench-", dir="/var/tmp") as name:
        folder = Path(name)
        folder.chmod(0o711)
        data, served, work = (folder / each for each in ("data", "plain", "work"))
        for each in (data, served, work):
            each.mkdir(mode=0o711)
        async with serving(Settings.load().replace(data=data, pool=0)) as server:
            key = server.key
            headers = {"Authorization": f"Bearer {key}"}
            async with httpx2.AsyncClient(base_url=server.url, headers=headers, timeout=300) as http:

                async def hosted(place: Path) -> str:
                    repo = (await http.post("/git/v1/repo")).json()["repoId"]
                    url = f"{server.url}/{repo}"
                    await asyncio.to_thread(git, "push", "-q", "--mirror", url, cwd=place, key=key)
                    # Let the maintenance after a push finish.
                    await asyncio.sleep(10)
                    return str(repo)

                with plain(served, program) as root:
                    for title, (files, commits) in REPOSITORIES.items():
                        say(f"clone, push and fetch: repository of {title}")
                        place = make(served / f"{files}.git", files, commits)
                        repo = await hosted(place)
                        sides = [Side(f"{server.url}/{repo}", key), Side(f"{root}/{files}.git")]
                        repositories[title] = await asyncio.to_thread(transfer, work, sides, samples)
                say("API: create repositories, commit, read")
                results |= await by_api(http, samples * 4)
                say(f"search: {SEARCHED} files")
                place = make(work / "searched.git", SEARCHED, 1)
                results |= await searching(http, await hosted(place), place, samples)
                if big:
                    say("push of 2 GiB")
                    repo = (await http.post("/git/v1/repo")).json()["repoId"]
                    url = f"{server.url}/{repo}"
                    results |= await asyncio.to_thread(big_push, server.pid, url, key, work)
    return worst(repositories) | results | repositories | {"host": host}


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--json", action="store_true", help="print one JSON object")
    parser.add_argument("--samples", type=int, default=15, help="clones, pushes and fetches per repository")
    parser.add_argument("--no-big", action="store_true", help="skip the push of 2 GiB")
    arguments = parser.parse_args()
    program = lighttpd() or install_lighttpd()
    results = run(measure(arguments.samples, program, big=not arguments.no_big))
    report(results, as_json=arguments.json)


if __name__ == "__main__":
    main()
