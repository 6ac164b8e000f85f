"""Domains: verification of ownership, and host names mapped to ports of VMs."""

from typing import Annotated

from fastapi import APIRouter, Path, Query

from stead.api.callers import OwnedVm, Owner
from stead.api.dependencies import DomainsDep
from stead.api.errors import ApiError
from stead.api.wire import LARGEST, Nothing
from stead.api.wire.domains import (
    CancelledVerification,
    CompletedVerification,
    DomainModel,
    DomainName,
    MappingModel,
    NewMapping,
    NewVerification,
    PortUrl,
    VerificationModel,
)
from stead.domains.domains import MAX_PORT, PAGE
from stead.domains.hostnames import canonical_pattern
from stead.errors import InvalidRequest, MachineNotFound

_HTTPS = 443

Limit = Annotated[int, Query(ge=1, le=PAGE, description="The maximum number of entries.")]
Offset = Annotated[int, Query(ge=0, le=LARGEST, description="The number of entries to skip.")]

router = APIRouter(tags=["domains"])
_ROOT = "/domains/v1"


@router.post(f"{_ROOT}/verifications")
async def create_verification(
    owner: Owner, domains: DomainsDep, wanted: NewVerification
) -> VerificationModel:
    """Start to verify a domain: answers with the code for a TXT record, the same one while it is pending."""
    return VerificationModel.of(await domains.verify(owner.account, wanted.domain))


@router.put(f"{_ROOT}/verifications")
async def complete_verification(
    owner: Owner, domains: DomainsDep, wanted: CompletedVerification
) -> DomainName:
    """Look the TXT record up, and make the account the owner of the domain and its subdomains."""
    found = await domains.complete(owner.account, domain=wanted.domain, verification=wanted.id)
    return DomainName(domain=found.domain)


@router.get(f"{_ROOT}/verifications")
async def list_verifications(owner: Owner, domains: DomainsDep) -> list[VerificationModel]:
    """List the verifications that are not completed, oldest first."""
    return [VerificationModel.of(each) for each in await domains.verifications(owner.account)]


@router.delete(f"{_ROOT}/verifications")
async def cancel_verification(
    owner: Owner, domains: DomainsDep, wanted: CancelledVerification
) -> CancelledVerification:
    """Cancel a verification that is not completed."""
    found = await domains.cancel(owner.account, wanted.domain, wanted.verification_code)
    return CancelledVerification(domain=found.domain, verification_code=found.code)


@router.get(f"{_ROOT}/domains")
async def list_domains(
    owner: Owner,
    domains: DomainsDep,
    limit: Limit = PAGE,
    offset: Offset = 0,
    implicit: Annotated[
        bool, Query(alias="implicitlyOwned", description="Include mapped names of preview zones.")
    ] = False,
) -> list[DomainModel]:
    """List the account's verified domains, oldest first."""
    found = await domains.owned(owner.account, limit=limit, offset=offset, implicit=implicit)
    return [DomainModel.of(each) for each in found]


@router.delete(f"{_ROOT}/domains/{{domain}}")
async def release_domain(domain: str, owner: Owner, domains: DomainsDep) -> Nothing:
    """Give up a verified domain. Names of it must be unmapped first."""
    await domains.release(owner.account, domain)
    return Nothing()


@router.post(f"{_ROOT}/certs/{{domain}}/wildcard")
async def request_wildcard_certificate(domain: str, owner: Owner, domains: DomainsDep) -> DomainName:
    """Check that the account owns a domain. Its names get certificates by themselves, on first use."""
    domains.check_owned(owner.account, domain)
    return DomainName(domain=domain)


@router.get(f"{_ROOT}/mappings")
async def list_mappings(
    owner: Owner,
    domains: DomainsDep,
    domain: Annotated[str | None, Query(description="Only the mapping of this name.")] = None,
    ownership: Annotated[
        str | None, Query(alias="domainOwnership", description="Only mappings of this owned domain, by id.")
    ] = None,
    limit: Limit = PAGE,
    offset: Offset = 0,
) -> list[MappingModel]:
    """List the account's mappings, oldest first."""
    found = await domains.mappings(
        owner.account, domain=domain, ownership=ownership, limit=limit, offset=offset
    )
    return [MappingModel.of(each) for each in found]


@router.post(f"{_ROOT}/mappings/{{domain}}")
async def create_mapping(domain: str, owner: Owner, domains: DomainsDep, wanted: NewMapping) -> MappingModel:
    """Map a host name, or `*.` and a domain, to a port of a VM. A mapped name moves in one step."""
    if wanted.domain is not None and canonical_pattern(wanted.domain) != canonical_pattern(domain):
        raise InvalidRequest(f"the path names {domain}, the body {wanted.domain}")
    if wanted.deployment_id is not None:
        text = "deploymentId: not implemented: serverless deployments; map the domain to a VM"
        raise ApiError("NOT_FOUND", text, deploymentId=wanted.deployment_id)
    if wanted.vm_id is None:
        raise InvalidRequest("vmId is missing: name the VM that the domain leads to")
    port = _HTTPS if wanted.vm_port is None else wanted.vm_port
    try:
        return MappingModel.of(await domains.map(owner.account, domain, wanted.vm_id, port))
    except MachineNotFound as error:
        raise ApiError("VM_ACCESS_DENIED_FOR_MAPPING", str(error), vmId=wanted.vm_id) from error


@router.delete(f"{_ROOT}/mappings/{{domain}}")
async def delete_mapping(domain: str, owner: Owner, domains: DomainsDep) -> Nothing:
    """Remove a mapping. The domain stays verified; a name of a preview zone becomes free."""
    await domains.unmap(owner.account, domain)
    return Nothing()


@router.put("/v1/vms/{vm_id}/urls/{port}")
async def ensure_url(
    port: Annotated[int, Path(ge=1, le=MAX_PORT, description="The port in the VM.")],
    info: OwnedVm,
    owner: Owner,
    domains: DomainsDep,
) -> PortUrl:
    """The URL of a port of a VM: of a name in the first preview zone, which is mapped unless there is one."""
    mapping = await domains.map_preview(owner.account, info.id, port)
    return PortUrl(url=domains.url(mapping.domain), domain=mapping.domain, port=mapping.port)
