"""Errors of accounts, API keys, identities, tokens and permissions."""

from collections.abc import Mapping

from stead.errors import SteadError


class AccountNotFound(SteadError):
    def __init__(self, account: str) -> None:
        super().__init__(f"no account {account}")
        self.account = account


class AccountNotEmpty(SteadError):
    """The account owns something, so it cannot be deleted."""

    def __init__(self, name: str, left: Mapping[str, int]) -> None:
        listed = ", ".join(f"{count} {what}" for what, count in left.items())
        super().__init__(f"account {name} still owns {listed}: delete them first with a key of the account")
        self.left = dict(left)


class AccountExists(SteadError):
    def __init__(self, name: str) -> None:
        super().__init__(f"account {name} exists already")
        self.name = name


class KeyNotFound(SteadError):
    def __init__(self, key: str) -> None:
        super().__init__(f"no valid API key with the id or id prefix {key}")
        self.key = key


class IdentityNotFound(SteadError):
    """The identity does not exist, or belongs to another account: the error is the same for both."""

    def __init__(self, identity: str) -> None:
        super().__init__(f"no identity {identity}")
        self.identity = identity


class ManagedIdentity(SteadError):
    """Stead uses the identity itself; it cannot be deleted."""

    def __init__(self, identity: str) -> None:
        super().__init__(f"identity {identity} is managed and cannot be deleted")
        self.identity = identity


class TokenNotFound(SteadError):
    def __init__(self, token: str) -> None:
        super().__init__(f"the identity has no token {token}")
        self.token = token


class PermissionNotFound(SteadError):
    """The identity has no permission for the VM, which may not exist."""

    def __init__(self, identity: str, machine: str) -> None:
        super().__init__(f"identity {identity} has no permission for VM {machine}")
        self.identity = identity
        self.machine = machine


class PermissionExists(SteadError):
    def __init__(self, identity: str, machine: str) -> None:
        super().__init__(f"identity {identity} already has a permission for VM {machine}; update it instead")
        self.identity = identity
        self.machine = machine


class UserNotAllowed(SteadError):
    """The permission does not allow this Linux user."""

    def __init__(self, machine: str, user: str | None, allowed: tuple[str, ...]) -> None:
        names = ", ".join(allowed) or "none"
        refused = "name a Linux user" if user is None else f"Linux user {user} is not allowed"
        super().__init__(f"VM {machine}: {refused}; allowed users: {names}")
        self.machine = machine
        self.user = user
