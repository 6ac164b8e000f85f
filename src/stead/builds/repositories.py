"""Git repositories in a guest: cloned with the guest's own git, without leaving credentials behind."""

from dataclasses import dataclass, field
from urllib.parse import unquote, urlsplit, urlunsplit

from stead.builds.programs import run_program
from stead.builds.records import Record
from stead.builds.spec import GitUser, Repository
from stead.builds.validation import SCHEMES, clone_url
from stead.machines.machine import Machine

_ENVIRONMENT = {
    "HOME": "/root",
    "GIT_TERMINAL_PROMPT": "0",
    "GIT_ALLOW_PROTOCOL": ":".join(SCHEMES),
    "GIT_SSH_COMMAND": "ssh -o BatchMode=yes -o StrictHostKeyChecking=accept-new",
}
_CLONE = """
set -e
url=$1 path=$2 rev=$3
if [ -z "$rev" ]; then
    exec git clone -- "$url" "$path"
fi
git clone --no-checkout -- "$url" "$path"
cd "$path"
if git rev-parse --quiet --verify "refs/remotes/origin/$rev" >/dev/null; then
    git checkout --quiet -B "$rev" --track "origin/$rev"
elif git rev-parse --quiet --verify "$rev^{commit}" >/dev/null; then
    git checkout --quiet --detach "$rev"
else
    git fetch --quiet origin "$rev"
    git checkout --quiet --detach FETCH_HEAD
fi
"""
_HELPER = '!f() { test "$1" = get && echo "username=$STEAD_USER" && echo "password=$STEAD_PASSWORD"; }; f'


@dataclass(frozen=True)
class Source:
    """Where a repository is cloned from: an address without secrets, and git's environment with them."""

    url: str
    environment: dict[str, str] = field(default_factory=dict, repr=False)


def source_of(repo: str) -> Source:
    """Take the credentials out of a URL. Git gets them from a helper that answers for this host alone."""
    address = clone_url(repo)
    url = urlsplit(address) if "://" in address else None
    # The machine's own repositories may belong to any of its users.
    settings = {"safe.directory": "*"}
    environment = dict(_ENVIRONMENT)
    if url is not None and url.scheme in ("http", "https") and "@" in url.netloc:
        host = url.netloc.rpartition("@")[2]
        address = urlunsplit(url._replace(netloc=host))
        settings[f"credential.{url.scheme}://{host}.helper"] = _HELPER
        environment |= {
            "STEAD_USER": unquote(url.username or ""),
            "STEAD_PASSWORD": unquote(url.password or ""),
        }
    elif url is not None and url.password is not None:
        user = f"{url.username}@" if url.username else ""
        address = urlunsplit(url._replace(netloc=user + url.netloc.rpartition("@")[2]))
    for number, (key, value) in enumerate(settings.items()):
        environment |= {f"GIT_CONFIG_KEY_{number}": key, f"GIT_CONFIG_VALUE_{number}": value}
    return Source(address, environment | {"GIT_CONFIG_COUNT": str(len(settings))})


async def configure(machine: Machine, record: Record, user: GitUser) -> None:
    """Who commits, for all users of the machine."""
    settings = {"user.name": user.name, "user.email": user.email, "user.signingkey": user.signing_key}
    for key, value in settings.items():
        if value is not None:
            await run_program(machine, record, "git config", ["git", "config", "--system", key, value])


async def clone(machine: Machine, record: Record, repository: Repository) -> None:
    source = source_of(repository.repo)
    at = "" if repository.rev is None else f" at {repository.rev}"
    await record.note(f"cloning {source.url}{at} to {repository.path}")
    argv = ["/bin/sh", "-c", _CLONE, "sh", source.url, repository.path, repository.rev or ""]
    await run_program(machine, record, f"git clone of {source.url}", argv, source.environment)
