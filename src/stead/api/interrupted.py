"""What creates with an idempotency key had made when the server was interrupted."""

from dataclasses import dataclass

from stead.api.repeatable import request_uuid, snapshot_id, vpc_id
from stead.creation.creation import Creation
from stead.creation.idempotency import InterruptedCreate
from stead.creation.results import Ensured, TakenSnapshot
from stead.errors import SnapshotNotFound
from stead.identity.errors import IdentityNotFound
from stead.identity.identities import Identities
from stead.networks.errors import VpcNotFound
from stead.networks.networks import Networks
from stead.repos.errors import RepoNotFound
from stead.repos.repos import Repos


@dataclass(frozen=True)
class InterruptedCreates:
    identities: Identities
    repos: Repos
    networks: Networks
    creation: Creation | None

    async def find(self, create: InterruptedCreate) -> object:
        """What a create had made; None if it had not made everything, and can be repeated."""
        try:
            if create.path == "/identity/v1/identities":
                return Ensured(await self.identities.get(create.account, request_uuid(create.request)))
            if create.path == "/git/v1/repo":
                return Ensured((await self.repos.get(request_uuid(create.request))).id)
            if create.path == "/v1/vpcs":
                return Ensured(await self.networks.get(create.account, vpc_id(create.request)))
            if self.creation is not None:
                return await self._find_vms(self.creation, create.path, create.request)
        except (IdentityNotFound, RepoNotFound, VpcNotFound, SnapshotNotFound):
            pass
        return None

    async def _find_vms(self, creation: Creation, path: str, request: str) -> object:
        machines = creation.machines
        if path.endswith("/snapshot"):
            taken = await machines.snapshots.get(snapshot_id(request))
            return TakenSnapshot(taken.id, taken.source_machine)
        if path == "/v1/vms":
            return await creation.made_for(request)
        if path.endswith("/fork"):
            # Some of the forks may be missing, and no client has heard of the others.
            for info in await machines.made_for(request):
                await machines.delete(info.id, forget=True)
        return None
