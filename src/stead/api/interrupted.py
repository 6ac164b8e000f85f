"""What creates with an idempotency key had made when the server was interrupted."""

from dataclasses import dataclass

from stead.api.creation import created_answer
from stead.api.repeatable import answer_of, request_uuid, snapshot_id, vpc_id
from stead.api.wire.identities import CreatedIdentity
from stead.api.wire.networks import CreatedVpc
from stead.api.wire.repos import CreatedRepo
from stead.api.wire.vms import Snapshotted
from stead.builds.background import Answer
from stead.builds.idempotency import InterruptedCreate
from stead.domains.domains import Domains
from stead.errors import SnapshotNotFound
from stead.identity.errors import IdentityNotFound
from stead.identity.identities import Identities
from stead.machines import Machines
from stead.networks.errors import VpcNotFound
from stead.networks.networks import Networks
from stead.repos.errors import RepoNotFound
from stead.repos.repos import Repos


@dataclass(frozen=True)
class InterruptedCreates:
    identities: Identities
    repos: Repos
    networks: Networks
    domains: Domains
    machines: Machines | None

    async def answer(self, create: InterruptedCreate) -> Answer | None:
        """The answer of a create that had made everything; None if it had not, and can be repeated."""
        try:
            if create.path == "/identity/v1/identities":
                made = await self.identities.get(create.account, request_uuid(create.request))
                return answer_of(CreatedIdentity.model_validate(made))
            if create.path == "/git/v1/repo":
                return answer_of(CreatedRepo(repo_id=(await self.repos.get(request_uuid(create.request))).id))
            if create.path == "/v1/vpcs":
                return answer_of(
                    CreatedVpc.of(await self.networks.get(create.account, vpc_id(create.request)))
                )
            if self.machines is not None:
                return await self._of_vms(self.machines, create.path, create.request)
        except (IdentityNotFound, RepoNotFound, VpcNotFound, SnapshotNotFound):
            pass
        return None

    async def _of_vms(self, machines: Machines, path: str, request: str) -> Answer | None:
        if path.endswith("/snapshot"):
            taken = await machines.snapshots.get(snapshot_id(request))
            return answer_of(Snapshotted(snapshot_id=taken.id, source_vm_id=taken.source_machine))
        for info in await machines.made_for(request):
            if path == "/v1/vms" and info.purpose == "use":
                return created_answer(info, self.domains.of_machine(info.id))
            if path.endswith("/fork"):
                # Some of the forks may be missing, and no client has heard of the others.
                await machines.delete(info.id, forget=True)
        return None
