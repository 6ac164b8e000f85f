"""Who may log in to which VM as which Linux user, by the tokens of identities."""

from dataclasses import dataclass, field

from stead.errors import MachineNotFound
from stead.identity.callers import Caller, Callers
from stead.identity.credentials import CredentialKind, credential_kind
from stead.identity.errors import UserNotAllowed
from stead.identity.identities import Identities
from stead.machines import Machines

ROOT = "root"


@dataclass(frozen=True)
class Login:
    """An authenticated login."""

    vm: str
    user: str
    caller: Caller
    token: str = field(repr=False)


class LoginRefused(Exception):
    """The message is for the client. One that has no permission learns nothing about the VM."""


class Access:
    def __init__(self, callers: Callers, identities: Identities, machines: Machines) -> None:
        self._callers = callers
        self._identities = identities
        self._machines = machines

    async def check(self, vm: str, user: str | None, token: str) -> Login:
        """The login of a token. Raises `LoginRefused`."""
        if credential_kind(token) is CredentialKind.API_KEY:
            raise LoginRefused("API keys are not accepted here: use the token of an identity with permission")
        caller = await self._callers.authenticate(token)
        if caller is None or caller.identity is None:
            raise LoginRefused("unknown VM or token")
        try:
            info = await self._machines.info(vm)
        except MachineNotFound:
            raise LoginRefused("unknown VM or token") from None
        permission = await self._identities.permission(caller.identity, vm)
        if permission is None or not info.belongs_to(caller.account) or info.is_deleted:
            raise LoginRefused("unknown VM or token")
        try:
            return Login(vm, permission.user(user) or ROOT, caller, token)
        except UserNotAllowed as error:
            raise LoginRefused(str(error)) from None

    async def recheck(self, login: Login) -> None:
        """Raises `LoginRefused` once a login would not be accepted any more."""
        await self.check(login.vm, login.user, login.token)
