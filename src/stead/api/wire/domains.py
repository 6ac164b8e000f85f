"""Wire models of domains, verifications and mappings."""

from typing import Annotated, Self

from pydantic import AfterValidator, Field

from stead.api.wire import Time, Wire
from stead.api.wire.numbers import Count
from stead.domains.domains import Domain, Mapping, Verification


def _utf8(text: str) -> str:
    """Refuse lone surrogates: neither the database nor an answer can contain them."""
    try:
        text.encode()
    except UnicodeEncodeError:
        raise ValueError("must be valid UTF-8") from None
    return text


Text = Annotated[str, AfterValidator(_utf8), Field(max_length=1000)]


class NewVerification(Wire):
    domain: Text


class CompletedVerification(Wire):
    """The verification to complete: by domain, or by id."""

    domain: Text | None = None
    id: Text | None = None


class CancelledVerification(Wire):
    domain: Text
    verification_code: Text


class DomainName(Wire):
    domain: str


class VerificationModel(Wire):
    id: str
    domain: str
    verification_code: str = Field(description="What the TXT record must contain.")
    record_name: str = Field(description="The name of the TXT record; one at a parent domain counts too.")
    account_id: str
    created_at: Time

    @classmethod
    def of(cls, verification: Verification) -> Self:
        return cls(
            id=verification.id,
            domain=verification.domain,
            verification_code=verification.code,
            record_name=verification.record,
            account_id=verification.account,
            created_at=verification.created_at,
        )


class DomainModel(Wire):
    id: str
    domain: str
    account_id: str
    created_at: Time
    verified_dns: bool
    implicitly_owned: bool = Field(description="A name of a preview zone: owned while it is mapped.")
    deploy_to_domain: bool = True
    deploy_to_subdomains: bool = True
    manage_dns: bool = Field(default=False, description="This server does not manage DNS records.")

    @classmethod
    def of(cls, domain: Domain) -> Self:
        return cls(
            id=domain.id,
            domain=domain.domain,
            account_id=domain.account,
            created_at=domain.created_at,
            verified_dns=not domain.implicit,
            implicitly_owned=domain.implicit,
        )


class NewMapping(Wire):
    """The VM and port of a mapping. The npm package repeats the `domain` of the path here."""

    domain: Text | None = None
    vm_id: Text | None = None
    vm_port: Count | None = Field(default=None, description="The port in the VM; default: 443.")
    deployment_id: Text | None = Field(default=None, description="Not supported: leave it out.")


class MappingModel(Wire):
    id: str
    domain: str
    deployment_id: None = None
    vm_id: str
    vm_port: int
    ownership_id: str
    created_at: Time
    unmapped_at: None = None

    @classmethod
    def of(cls, mapping: Mapping) -> Self:
        return cls(
            id=mapping.id,
            domain=mapping.domain,
            vm_id=mapping.machine,
            vm_port=mapping.port,
            ownership_id=mapping.ownership,
            created_at=mapping.created_at,
        )


class PortUrl(Wire):
    url: str
    domain: str
    port: int
