"""Access of a VM to one repository of its account: a write token for git in the VM, revoked with the VM."""

from collections.abc import Sequence

from stead.deadlines import scaled
from stead.errors import HostError, InvalidRequest
from stead.guest.execution import SMALL_OUTPUT
from stead.identity.identities import Identities
from stead.machines.machine import Machine
from stead.repos.access import RepoAccess
from stead.repos.errors import RepoNotFound
from stead.repos.repos import Repos

_TIMEOUT = scaled(60.0)
# Git LFS asks for credentials by host alone unless useHttpPath is set. Its URLs have the suffix .git.
_CONFIGURE = """
repo=$1
shift
umask 022
mkdir -p /etc/stead/git-access
cat >"/etc/stead/git-access/$repo"
for host in "$@"; do
    git config --system "credential.https://$host.useHttpPath" true
    for path in "$repo" "$repo.git"; do
        git config --system "credential.https://$host/$path.helper" \\
            "!f() { test \\"\\$1\\" = get && cat /etc/stead/git-access/$repo; }; f"
    done
done
"""


class GitAccess:
    """Gives VMs access to repositories."""

    def __init__(
        self, identities: Identities, repos: Repos, access: RepoAccess, hosts: Sequence[str]
    ) -> None:
        """`hosts` are the names under which a VM reaches the Git server."""
        self._identities = identities
        self._repos = repos
        self._access = access
        self._hosts = tuple(hosts)

    async def check(self, account: str, repo: str) -> None:
        """InvalidRequest unless the account has the repository."""
        try:
            await self._repos.owned(account, repo)
        except RepoNotFound:
            raise InvalidRequest(f"gitAccess: this account has no repository {repo!r}") from None

    async def give(self, account: str, machine: Machine, repo: str) -> None:
        """Let git in a VM fetch from and push to a repository, as all users of the VM.

        The token belongs to an identity that is deleted with the VM.
        """
        name = f"git in VM {machine.id}"
        identity = await self._identities.create(account, name=name, managed=True, machine=machine.id)
        await self._access.grant(account, identity.id, repo, "write")
        _, token = await self._identities.create_token(account, identity.id)
        result = await machine.exec(
            ["/bin/sh", "-ec", _CONFIGURE, "sh", repo, *self._hosts],
            stdin=f"username=x-access-token\npassword={token}\n".encode(),
            timeout=_TIMEOUT,
            output_limit=SMALL_OUTPUT,
        )
        if not result.ok:
            said = result.stderr.decode(errors="replace").strip()[-500:]
            raise HostError(f"cannot configure git in the VM: {said or result.exit_code}")
