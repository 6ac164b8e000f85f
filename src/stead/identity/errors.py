"""What can be wrong with accounts, keys, identities, tokens and permissions."""

from stead.errors import SteadError


class AccountNotFound(SteadError):
    code = "account_not_found"

    def __init__(self, account: str) -> None:
        super().__init__(f"no account {account}")
        self.account = account


class AccountExists(SteadError):
    code = "account_exists"

    def __init__(self, name: str) -> None:
        super().__init__(f"there is an account {name} already")
        self.name = name


class KeyNotFound(SteadError):
    code = "key_not_found"

    def __init__(self, key: str) -> None:
        super().__init__(f"no valid API key whose id is {key} or begins so")
        self.key = key


class IdentityNotFound(SteadError):
    """There is no such identity, or it is another account's: nobody can tell which."""

    code = "identity_not_found"

    def __init__(self, identity: str) -> None:
        super().__init__(f"no identity {identity}")
        self.identity = identity


class ManagedIdentity(SteadError):
    """The identity belongs to Stead itself and stays."""

    code = "managed_identity"

    def __init__(self, identity: str) -> None:
        super().__init__(f"identity {identity} is managed and cannot be deleted")
        self.identity = identity


class TokenNotFound(SteadError):
    code = "token_not_found"

    def __init__(self, token: str) -> None:
        super().__init__(f"no token {token} of this identity")
        self.token = token


class PermissionNotFound(SteadError):
    """The identity has no permission on the machine, which need not exist."""

    code = "permission_not_found"

    def __init__(self, identity: str, machine: str) -> None:
        super().__init__(f"identity {identity} has no permission on machine {machine}")
        self.identity = identity
        self.machine = machine


class PermissionExists(SteadError):
    code = "permission_exists"

    def __init__(self, identity: str, machine: str) -> None:
        super().__init__(f"identity {identity} has a permission on machine {machine} already")
        self.identity = identity
        self.machine = machine


class UserNotAllowed(SteadError):
    """The permission does not extend to this Linux user."""

    code = "user_not_allowed"

    def __init__(self, machine: str, user: str | None, allowed: tuple[str, ...]) -> None:
        names = ", ".join(allowed) or "none"
        wish = "say which Linux user to act as" if user is None else f"not as the Linux user {user}"
        super().__init__(f"on machine {machine}, {wish}; allowed: {names}")
        self.machine = machine
        self.user = user
