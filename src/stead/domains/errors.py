"""Errors of domains, verifications and mappings."""

from collections.abc import Sequence

from stead.errors import SteadError


class InvalidDomain(SteadError):
    """The name cannot be a host name, or this installation keeps it for itself."""

    def __init__(self, domain: str, reason: str) -> None:
        shown = domain if len(domain) <= 80 else f"{domain[:79]}…"
        super().__init__(f"invalid domain {shown!r}: {reason}")
        self.domain = domain[:300]


class DomainTaken(SteadError):
    """Another account has the name, or the domain that it belongs to."""

    def __init__(self, domain: str, owned: str) -> None:
        whose = "it" if domain == owned else owned
        super().__init__(f"domain {domain} is not available: {whose} belongs to another account")
        self.domain = domain


class DomainNotVerified(SteadError):
    def __init__(self, domain: str) -> None:
        # A wildcard itself cannot be verified.
        parent = domain.removeprefix("*.")
        verify = "it" if parent == domain else parent
        super().__init__(
            f"domain {domain} is not verified: verify {verify} or a parent domain first,"
            " or use a name of a preview zone"
        )
        self.domain = domain


class DomainNotFound(SteadError):
    def __init__(self, domain: str) -> None:
        super().__init__(f"domain {domain} is not one of the verified domains of this account")
        self.domain = domain


class MappingNotFound(SteadError):
    """The name is not mapped, or by another account: the error is the same for both."""

    def __init__(self, domain: str) -> None:
        super().__init__(f"domain {domain} is not mapped")
        self.domain = domain


class VerificationNotFound(SteadError):
    def __init__(self, reference: str) -> None:
        super().__init__(f"no pending verification for {reference}: create one first")
        self.reference = reference


class VerificationFailed(SteadError):
    """DNS was asked, and none of the TXT records has the code."""

    def __init__(self, domain: str, records: Sequence[str]) -> None:
        names = ", ".join(records)
        super().__init__(
            f"domain {domain} is not verified yet: no TXT record at {names} has the verification code."
            " DNS changes can take minutes to arrive: try again"
        )
        self.domain = domain


class DnsUnavailable(SteadError):
    """The resolver of this host did not answer, so nothing is known about the record."""

    def __init__(self, name: str, reason: str) -> None:
        super().__init__(f"cannot look up the TXT record of {name}: {reason}; try again")
        self.name = name


class LookupsBusy(SteadError):
    def __init__(self) -> None:
        super().__init__("too many DNS lookups of this account are in progress: try again in some seconds")
