"""Clones Git repositories in a guest with the guest's own git, and leaves no credentials there.

The clone needs no token in the guest: the pack of a repository on this server is copied through the guest
agent into a bare repository, which `url.insteadOf` substitutes for the repository's URL during the clone.
"""

import asyncio
from collections.abc import AsyncIterator, Mapping
from dataclasses import dataclass, field, replace
from urllib.parse import unquote, urlsplit, urlunsplit

from stead.builds.errors import InvalidSpec
from stead.builds.programs import run_program
from stead.builds.records import Part
from stead.builds.spec import Clone, GitUser, Layer
from stead.builds.validation import SCHEMES, clone_url
from stead.machines.machine import Machine
from stead.machines.records import new_id
from stead.repos.errors import AmbiguousRevision, InvalidRevision, ReferenceNotFound, RepoNotFound
from stead.repos.transfer.bundles import Bundle, Bundles, is_id

_PROGRESS = 5.0
"""Seconds between two progress lines of a copy."""
_ENVIRONMENT = {
    "HOME": "/root",
    "GIT_TERMINAL_PROMPT": "0",
    "GIT_ALLOW_PROTOCOL": ":".join(SCHEMES),
    "GIT_SSH_COMMAND": "ssh -o BatchMode=yes -o StrictHostKeyChecking=accept-new",
}
# Repositories on the VM's own disk may belong to any of its users.
_SETTINGS = {"safe.directory": "*"}
_CLONE = """
set -e
url=$1 path=$2 rev=$3
if [ -z "$rev" ]; then
    git clone -- "$url" "$path"
    exit
fi
git clone --no-checkout -- "$url" "$path"
cd "$path"
if git rev-parse --quiet --verify "refs/remotes/origin/$rev" >/dev/null; then
    git checkout --quiet -B "$rev" --track "origin/$rev"
elif git rev-parse --quiet --verify "$rev^{commit}" >/dev/null; then
    git checkout --quiet --detach "$rev"
else
    git fetch --quiet --update-shallow origin "$rev"
    git checkout --quiet --detach FETCH_HEAD
fi
"""
_RECEIVE = """
set -e
source=$4 head=$5 refs=$6 shallow=$7
trap 'rm -rf "$source"' EXIT
GIT_DEFAULT_HASH=sha1 GIT_DEFAULT_REF_FORMAT=files \\
    git init --quiet --bare --template= --initial-branch="$head" "$source"
if [ "$refs" -gt 0 ]; then
    head -c "$refs" >"$source/packed-refs"
    [ "$shallow" -eq 0 ] || head -c "$shallow" >"$source/shallow"
    git -C "$source" index-pack --stdin >/dev/null
fi
"""
_HELPER = '!f() { test "$1" = get && echo "username=$STEAD_USER" && echo "password=$STEAD_PASSWORD"; }; f'


@dataclass(frozen=True)
class CloneSource:
    """A clone source: a URL without secrets, and the environment of git with them."""

    url: str
    environment: dict[str, str] = field(default_factory=dict, repr=False)


def source_of(repo: str) -> CloneSource:
    """Move credentials from a URL to a credential helper that answers for this host only."""
    address = clone_url(repo)
    url = urlsplit(address) if "://" in address else None
    settings = dict(_SETTINGS)
    secrets = {}
    if url is not None and url.scheme in ("http", "https") and "@" in url.netloc:
        host = url.netloc.rpartition("@")[2]
        address = urlunsplit(url._replace(netloc=host))
        settings[f"credential.{url.scheme}://{host}.helper"] = _HELPER
        secrets = {
            "STEAD_USER": unquote(url.username or ""),
            "STEAD_PASSWORD": unquote(url.password or ""),
        }
    elif url is not None and url.password is not None:
        user = f"{url.username}@" if url.username else ""
        address = urlunsplit(url._replace(netloc=user + url.netloc.rpartition("@")[2]))
    return CloneSource(address, _environment(settings) | secrets)


def _environment(settings: Mapping[str, str]) -> dict[str, str]:
    """The environment of git, with settings passed by GIT_CONFIG_*."""
    environment = _ENVIRONMENT | {"GIT_CONFIG_COUNT": str(len(settings))}
    for number, (key, value) in enumerate(settings.items()):
        environment |= {f"GIT_CONFIG_KEY_{number}": key, f"GIT_CONFIG_VALUE_{number}": value}
    return environment


async def pin_repositories(layer: Layer, account: str, bundles: Bundles) -> Layer:
    """The layer with the present content of this server's repositories; InvalidSpec if one does not exist."""
    if not layer.repositories:
        return layer
    return replace(
        layer, repositories=tuple([await _pin(each, account, bundles) for each in layer.repositories])
    )


async def _pin(repository: Clone, account: str, bundles: Bundles) -> Clone:
    name = repository.repo if is_id(repository.repo) else source_of(repository.repo).url
    try:
        bundle = await bundles.find(account, repository.repo, repository.rev)
    except RepoNotFound:
        text = f"repository {name} not found, or this account may not read it"
        raise InvalidSpec("invalid_repository", text) from None
    except (ReferenceNotFound, InvalidRevision, AmbiguousRevision) as error:
        raise InvalidSpec("invalid_repository", f"repository {name}: {error}") from None
    return repository if bundle is None else replace(repository, repo=bundle.url, bundle=bundle)


async def configure(machine: Machine, part: Part, user: GitUser) -> None:
    """Set the identity of commits for all users of the VM."""
    settings = {"user.name": user.name, "user.email": user.email, "user.signingkey": user.signing_key}
    for key, value in settings.items():
        if value is not None:
            await run_program(machine, part, "git config", ["git", "config", "--system", key, value])


async def clone(machine: Machine, part: Part, repository: Clone, bundles: Bundles) -> None:
    source = source_of(repository.repo)
    at = "" if repository.rev is None else f" at {repository.rev}"
    await part.note(f"cloning {source.url}{at} to {repository.path}")
    if repository.bundle is not None:
        await _clone_bundle(machine, part, repository.path, repository.bundle, bundles)
        return
    argv = ["/bin/sh", "-c", _CLONE, "sh", source.url, repository.path, repository.rev or ""]
    await run_program(machine, part, f"git clone of {source.url}", argv, source.environment)


async def _clone_bundle(machine: Machine, part: Part, path: str, bundle: Bundle, bundles: Bundles) -> None:
    """Clone a repository on this server. Git LFS files stay pointers."""
    # On the same disk, so that git hard-links the pack into the clone.
    folder = f"/var/tmp/stead-clone-{new_id()}"
    settings = _SETTINGS | {f"url.{folder}.insteadOf": bundle.url}
    environment = _environment(settings) | {"GIT_LFS_SKIP_SMUDGE": "1"}
    argv = ["/bin/sh", "-c", _RECEIVE + _CLONE, "sh", bundle.url, path, bundle.branch or bundle.commit or ""]
    argv += [folder, bundle.head, str(len(bundle.refs)), str(len(bundle.shallow))]
    async with bundles.packed(bundle) as pack:
        copied = _copied_bundle(part, bundle, pack)
        await run_program(machine, part, f"git clone of {bundle.url}", argv, environment, copied)


async def _copied_bundle(part: Part, bundle: Bundle, pack: AsyncIterator[bytes]) -> AsyncIterator[bytes]:
    yield bundle.refs + bundle.shallow
    clock = asyncio.get_running_loop().time
    size, logged = 0, clock()
    async for piece in pack:
        yield piece
        size += len(piece)
        if clock() - logged >= _PROGRESS:
            logged = clock()
            await part.note(f"copied {size / (1 << 20):.1f} MiB of {bundle.url} to the VM")
