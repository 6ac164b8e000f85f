"""Bundles for VMs: this host plays the guest and runs the real clone script with real git."""

import asyncio
import contextlib
import os
import shutil
import uuid
from asyncio.subprocess import PIPE, STDOUT
from collections.abc import AsyncGenerator, AsyncIterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import pytest

from stead.builds import repositories
from stead.builds.errors import InvalidSpec, ProgramFailed
from stead.builds.spec import Clone, Layer, layer_hash
from stead.guest.execution import Ended, Output
from stead.repos.errors import RepoDamaged, RepoNotFound
from stead.repos.repository import Repository
from stead.repos.transfer.bundles import Bundle, Bundles
from support.git_client import GitClient, gits_of
from support.git_hosting import RepoHosting
from support.waiting import until

pytestmark = pytest.mark.heavy

ROOT = "https://git.example.org:8443/code"
IN_VMS = "https://git.vms.example.org"
NOBODYS = "8f3c1a52-65d8-4dd0-9c0e-0f5e1a6d3a11"
SECRET = "s3cr3t"
HISTORY = (
    ("one", "tag", "-a", "v1", "-m", "the first"),
    ("two", "branch", "feature/x"),
    ("three", "tag", "light"),
)


@dataclass
class Told:
    """A build record that stores nothing."""

    step: str = "repositories"
    lines: list[str] = field(default_factory=list)

    async def note(self, line: str) -> None:
        self.lines.append(line)


@dataclass
class Here:
    """This host as a VM: guest commands run here."""

    git: GitClient
    reads: bool = True

    async def stream(
        self, argv: Sequence[str], *, env: Mapping[str, str], stdin: AsyncIterator[bytes]
    ) -> AsyncGenerator[Output | Ended, None]:
        handed_in = Path(argv[7])
        if not self.reads:
            argv = ["sleep", "60"]
        environment = {**self.git.environment(), **env, "HOME": str(self.git.home)}
        process = await asyncio.create_subprocess_exec(
            *argv, env=environment, cwd="/", stdin=PIPE, stdout=PIPE, stderr=STDOUT
        )
        feeding = asyncio.create_task(self._feed(process, stdin))
        try:
            assert process.stdout is not None
            while data := await process.stdout.read(1 << 16):
                yield Output("stdout", data)
            status = await process.wait()
            assert status < 0 or not handed_in.exists()
            if feeding.done():
                feeding.result()
            yield Ended(status, None, False, 0, None)
        finally:
            feeding.cancel()
            await asyncio.gather(feeding, return_exceptions=True)
            if process.returncode is None:
                process.kill()
                await process.wait()
            process._transport.close()  # type: ignore[attr-defined]
            # A VM that failed is deleted.
            shutil.rmtree(handed_in, ignore_errors=True)

    async def _feed(self, process: asyncio.subprocess.Process, stdin: AsyncIterator[bytes]) -> None:
        assert process.stdin is not None
        try:
            async for piece in stdin:
                process.stdin.write(piece)
                await process.stdin.drain()
        except (BrokenPipeError, ConnectionResetError):
            pass
        except Exception:
            process.kill()
            raise
        finally:
            process.stdin.close()


@pytest.fixture
def bundles(hosting: RepoHosting) -> Bundles:
    return Bundles(hosting.repos, hosting.access, ROOT, IN_VMS)


async def filled(hosting: RepoHosting, git: GitClient) -> Repository:
    """Three commits on main, two tags, and another branch."""
    repository = await hosting.repository()
    work = await git.work_tree(f"work-{repository.id}")
    for text, *then in HISTORY:
        await git.commit(work, {"file": text}, text)
        await git(*then, cwd=work)
    await git("push", "-q", "--mirror", str(repository.path), cwd=work)
    return repository


async def found(bundles: Bundles, hosting: RepoHosting, name: str, rev: str | None = None) -> Bundle:
    bundle = await bundles.find(hosting.ours, name, rev)
    assert bundle is not None
    return bundle


async def cloned(
    bundle: Bundle, bundles: Bundles, git: GitClient, here: Here | None = None, told: Told | None = None
) -> Path:
    path = git.home / f"clone-{uuid.uuid4()}"
    repository = Clone(bundle.url, str(path), None, bundle)
    machine: Any = here or Here(git)
    record: Any = told or Told()
    await repositories.clone(machine, record, repository, bundles)
    return path


# Names


async def test_repository_is_found_by_name_id_and_url(bundles: Bundles, hosting: RepoHosting) -> None:
    """By id and by URLs, with any credentials in them: always the same clone from the same URL."""
    repo = (await hosting.repository()).id
    bundle = await found(bundles, hosting, repo)
    assert bundle.url == f"{IN_VMS}/{repo}"
    for name in (
        repo.upper(),
        f"https://git.example.org:8443/code/{repo}",
        f"https://git.example.org:8443/code/{repo}.git",
        f"https://git.example.org:8443/code/{repo}/",
        f"https://GIT.example.org:8443/code/{repo.upper()}.git",
        f"https://x-access-token:{SECRET}@git.example.org:8443/code/{repo}",
        f"{IN_VMS}/{repo}.git",
        f"https://git.freestyle.sh/{repo}",
        f"https://x-access-token:{SECRET}@git.freestyle.sh:443/{repo}.git",
    ):
        assert await bundles.find(hosting.ours, name) == bundle, name
    for name in (
        f"http://git.example.org:8443/code/{repo}",
        f"https://git.example.org/code/{repo}",
        f"https://git.example.org:8443/{repo}",
        f"https://git.example.org:8443/code/more/{repo}",
        f"https://git.example.org:8443/code/{repo}?a=b",
        "https://git.example.org:8443/code/site",
        f"https://example.org/{repo}",
        f"https://git.freestyle.sh.example.org/{repo}",
        f"git@git.example.org:{repo}",
        f"file:///srv/{repo}",
    ):
        assert await bundles.find(hosting.ours, name) is None, name


async def test_inaccessible_repository_is_not_found(bundles: Bundles, hosting: RepoHosting) -> None:
    """A private repository of another account gets the same message as a missing one."""
    theirs = (await hosting.repos.create(hosting.theirs)).id
    public = (await hosting.repos.create(hosting.theirs, public=True)).id

    async def refusal(name: str, rev: str | None = None) -> str:
        layer = Layer(repositories=(Clone(name, "/a", rev),))
        with pytest.raises(InvalidSpec) as raised:
            await repositories.pin_repositories(layer, hosting.ours, bundles)
        assert raised.value.rule == "invalid_repository"
        assert SECRET not in str(raised.value)
        return str(raised.value)

    for form in ("{}", f"{ROOT}/{{}}", f"{ROOT}/{{}}.git", "https://git.freestyle.sh/{}"):
        names = [form.format(repo) for repo in (theirs, NOBODYS)]
        texts = [(await refusal(name)).replace(name, "it") for name in names]
        assert texts == ["repository it not found, or this account may not read it"] * 2
    text = await refusal(f"{ROOT.replace('://', f'://me:{SECRET}@')}/{theirs}")
    assert f"{ROOT}/{theirs}" in text
    assert (await found(bundles, hosting, public)).url == f"{IN_VMS}/{public}"
    assert (await found(bundles, hosting, f"https://git.freestyle.sh/{public}")).repo == public
    for rev in ("nothing", "a..b"):
        assert (await refusal(public, rev)).startswith(f"repository {public}: ")


# Clones


async def test_bundle_equals_git_clone(bundles: Bundles, hosting: RepoHosting, git: GitClient) -> None:
    """Refs, configuration, files and history; the transferred files are removed."""
    repository = await filled(hosting, git)
    told = Told()
    clone = await cloned(await found(bundles, hosting, repository.id), bundles, git, told=told)
    plain = git.home / "plain"
    await git("clone", "-q", str(repository.path), str(plain))

    for question in (
        ("for-each-ref", "--format=%(refname) %(objectname) %(symref) %(upstream)"),
        ("symbolic-ref", "HEAD"),
        ("log", "--all", "--format=%H %d"),
        ("status", "--short", "--branch"),
        ("ls-files", "--stage"),
    ):
        assert await git(*question, cwd=clone) == await git(*question, cwd=plain), question
    assert (clone / ".git" / "config").read_text() == (plain / ".git" / "config").read_text().replace(
        str(repository.path), f"{IN_VMS}/{repository.id}"
    )
    assert (clone / "file").read_text() == "three"
    await git("fsck", "--strict", cwd=clone)
    mine = [each for each in clone.rglob("*") if each.is_file() and b"stead-clone" in each.read_bytes()]
    assert mine == []
    assert told.lines[0] == f"cloning {IN_VMS}/{repository.id} to {clone}"


@pytest.mark.parametrize("depth", [None, 1])
async def test_bundle_checks_out_a_revision(
    bundles: Bundles, hosting: RepoHosting, git: GitClient, depth: int | None
) -> None:
    """A branch is tracked; a tag or a commit, also one on no branch, is detached. The same for shallow
    repositories.
    """
    repository = await filled(hosting, git)
    work = git.home / f"work-{repository.id}"
    second = await git("rev-parse", "feature/x", cwd=work)
    lost = await git.commit(work, {"file": "lost"})
    await git("push", "-q", str(repository.path), f"{lost}:refs/heads/lost", cwd=work)
    if depth is not None:
        source = f"file://{repository.path}"
        repository = await hosting.repository()
        refs = "refs/heads/*:refs/heads/*", "refs/tags/*:refs/tags/*"
        await git("fetch", "-q", f"--depth={depth}", source, *refs, cwd=repository.path)
    await git("update-ref", "-d", "refs/heads/lost", cwd=repository.path)

    for rev, head, text in (
        ("main", "main", "three"),
        ("feature/x", "feature/x", "two"),
        ("refs/heads/feature/x", "feature/x", "two"),
        ("v1", "HEAD", "one"),
        ("refs/tags/light", "HEAD", "three"),
        (second, "HEAD", "two"),
        (second[:10], "HEAD", "two"),
        (lost, "HEAD", "lost"),
    ):
        clone = await cloned(await found(bundles, hosting, repository.id, rev), bundles, git)
        assert (clone / "file").read_text() == text, rev
        assert await git("rev-parse", "--abbrev-ref", "HEAD", cwd=clone) == head, rev
        if head != "HEAD":
            assert await git("rev-parse", "--abbrev-ref", "@{u}", cwd=clone) == f"origin/{head}"
        assert await git("rev-parse", "--is-shallow-repository", cwd=clone) == str(depth is not None).lower()
        assert await git("remote", "get-url", "origin", cwd=clone) == f"{IN_VMS}/{repository.id}"
        await git("fsck", "--strict", cwd=clone)


async def test_bundle_of_empty_repository(bundles: Bundles, hosting: RepoHosting, git: GitClient) -> None:
    repository = await hosting.repository(default_branch="trunk")
    clone = await cloned(await found(bundles, hosting, repository.id), bundles, git)
    assert await git("symbolic-ref", "HEAD", cwd=clone) == "refs/heads/trunk"
    assert await git("remote", "get-url", "origin", cwd=clone) == f"{IN_VMS}/{repository.id}"
    await git.commit(clone, {"file": "first"})
    await git("push", "-q", str(repository.path), "trunk", cwd=clone)
    assert (await repository.branch("trunk")).sha == await git("rev-parse", "HEAD", cwd=clone)


async def test_bundle_without_default_branch(bundles: Bundles, hosting: RepoHosting, git: GitClient) -> None:
    """As git does: nothing is checked out, and the existing branches can be."""
    repository = await filled(hosting, git)
    await git("symbolic-ref", "HEAD", "refs/heads/gone", cwd=repository.path)
    clone = await cloned(await found(bundles, hosting, repository.id), bundles, git)
    assert not (clone / "file").exists()
    await git("checkout", "-q", "feature/x", cwd=clone)


async def test_bundle_with_many_refs(bundles: Bundles, hosting: RepoHosting, git: GitClient) -> None:
    repository = await filled(hosting, git)
    sha = (await repository.branch("main")).sha
    new = "".join(f"create refs/heads/many/{number} {sha}\n" for number in range(5000))
    await git("update-ref", "--stdin", cwd=repository.path, stdin=new.encode())
    clone = await cloned(await found(bundles, hosting, repository.id), bundles, git)
    branches = await git("for-each-ref", "--format=%(refname)", "refs/remotes/origin/many", cwd=clone)
    assert len(branches.splitlines()) == 5000


async def test_failed_bundle_reports_the_reason(
    bundles: Bundles, hosting: RepoHosting, git: GitClient
) -> None:
    repository = await filled(hosting, git)
    place = git.home / "taken"
    place.mkdir()
    (place / "file").write_text("mine")
    named = Clone(ROOT, str(place), None, await found(bundles, hosting, repository.id))
    with pytest.raises(ProgramFailed, match=r"git clone of \S+ exited with 128: .*not an empty directory"):
        await repositories.clone(Here(git), Told(), named, bundles)  # type: ignore[arg-type]
    assert gits_of(repository.path) == []


# Pinning


async def test_bundle_is_pinned_despite_later_pushes(
    bundles: Bundles, hosting: RepoHosting, git: GitClient
) -> None:
    """Pushes between plan and clone: new commits, a branch moved back, a branch deleted."""
    repository = await filled(hosting, git)
    work = git.home / f"work-{repository.id}"
    bundle = await found(bundles, hosting, repository.id)
    await git.commit(work, {"file": "four"})
    await git("branch", "-f", "feature/x", "main~2", cwd=work)
    await git("tag", "-d", "light", cwd=work)
    await git("push", "-q", "--mirror", "--force", str(repository.path), cwd=work)

    before = await cloned(bundle, bundles, git)
    assert (before / "file").read_text() == "three"
    assert await git("show", "origin/feature/x:file", cwd=before) == "two"
    assert await git("tag", cwd=before) == "light\nv1"
    after = await cloned(await found(bundles, hosting, repository.id), bundles, git)
    assert (after / "file").read_text() == "four"


async def test_layer_key_changes_with_the_clone(
    bundles: Bundles, hosting: RepoHosting, git: GitClient
) -> None:
    """The key is the same without pushes, by whatever name; any push to any branch or tag changes it."""
    repository = await filled(hosting, git)
    work = git.home / f"work-{repository.id}"
    url = f"{ROOT}/{repository.id}"

    async def hash_of(name: str = repository.id, rev: str | None = None, path: str = "/a") -> str:
        layer = Layer(repositories=(Clone(name, path, rev),))
        return layer_hash(
            hosting.ours, "base", await repositories.pin_repositories(layer, hosting.ours, bundles)
        )

    async def push(*refs: str) -> None:
        await git("push", "-q", "--force", str(repository.path), *refs, cwd=work)

    first = await hash_of()
    assert {first} == {
        await hash_of(name) for name in (url, f"{url}.git", f"https://git.freestyle.sh/{repository.id}")
    }
    await git.commit(work, {"file": "not pushed"})
    await git("repack", "-adq", cwd=repository.path)
    await git("pack-refs", "--all", cwd=repository.path)
    assert await hash_of() == first

    seen = [first, await hash_of(rev="feature/x"), await hash_of(rev="v1"), await hash_of(path="/b")]
    for change in (
        push("main"),
        push("main:refs/heads/new"),
        push("main:refs/tags/new"),
        repository.set_default_branch("new"),
    ):
        await change
        seen.append(await hash_of())
    assert len(set(seen)) == len(seen)
    await push("main:refs/changes/1")
    assert await hash_of() == seen[-1]
    await repository.set_default_branch("main")
    await push(":refs/tags/new", ":refs/heads/new")
    assert await hash_of() == seen[4]


async def test_deleted_repository_fails_the_bundle(
    bundles: Bundles, hosting: RepoHosting, git: GitClient
) -> None:
    """Deleted, no longer accessible, or damaged: reported, and the guest does not hang."""
    deleted, damaged = await filled(hosting, git), await filled(hosting, git)
    theirs = await hosting.repos.create(hosting.theirs, public=True)
    planned = [await found(bundles, hosting, each.id) for each in (deleted, damaged)]
    hidden = await found(bundles, hosting, theirs.id)

    await hosting.repos.delete(deleted.id)
    with pytest.raises(RepoNotFound):
        await cloned(planned[0], bundles, git)
    with pytest.raises(RepoDamaged, match="changed during the bundle"):
        lost = replace(planned[1], commit="1" * 40)
        await cloned(lost, bundles, git)
    await hosting.repos._store.update(theirs.id, public=False)
    with pytest.raises(RepoNotFound):
        await cloned(hidden, bundles, git)
    assert (gits_of(damaged.path), [each.name for each in git.home.glob("clone-*")]) == ([], [])


async def test_repository_deleted_while_packing(
    bundles: Bundles, hosting: RepoHosting, git: GitClient
) -> None:
    repository = await filled(hosting, git)
    bundle = await found(bundles, hosting, repository.id)
    async with bundles.packed(bundle) as pack:
        shutil.move(repository.path, repository.path.with_suffix(".gone"))
        with contextlib.suppress(RepoNotFound):
            # Git may have opened all files already: then the bundle is complete.
            whole = b"".join([piece async for piece in pack])
            assert whole.startswith(b"PACK")
        shutil.move(repository.path.with_suffix(".gone"), repository.path)
    assert gits_of(repository.path) == []


async def test_cancelled_bundle_leaves_no_git_process(
    bundles: Bundles, hosting: RepoHosting, git: GitClient
) -> None:
    """A guest that reads nothing blocks one git process in bounded memory; cancellation ends it."""
    repository = await filled(hosting, git)
    work = git.home / f"work-{repository.id}"
    await git.commit(work, {"large": os.urandom(32 << 20)})
    await git("push", "-q", str(repository.path), "main", cwd=work)
    bundle = await found(bundles, hosting, repository.id)

    clone = asyncio.create_task(cloned(bundle, bundles, git, Here(git, reads=False)))
    await until(lambda: any("pack-objects" in each for each in gits_of(repository.path)), 60)
    clone.cancel()
    with contextlib.suppress(asyncio.CancelledError):
        await clone
    assert gits_of(repository.path) == []
