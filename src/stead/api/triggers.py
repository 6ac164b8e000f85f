"""HTTP routes of triggers: webhooks on pushes, and their deliveries."""

from typing import Annotated

from fastapi import APIRouter, Query

from stead.api.dependencies import TriggersDep
from stead.api.repos import OwnedRepo
from stead.api.wire import LARGEST, Nothing
from stead.api.wire.triggers import (
    DeliveryList,
    DeliveryModel,
    NewTrigger,
    TriggerCreated,
    TriggerList,
    TriggerModel,
)

router = APIRouter(prefix="/git/v1/repo/{repo_id}/trigger", tags=["repositories"])

MAX_PAGE = 100


@router.get("")
async def list_triggers(repo: OwnedRepo, triggers: TriggersDep) -> TriggerList:
    """List triggers, oldest first."""
    found = await triggers.list(repo.info.id)
    return TriggerList(triggers=[TriggerModel.of(trigger) for trigger in found])


@router.post("")
async def create_trigger(repo: OwnedRepo, triggers: TriggersDep, wanted: NewTrigger) -> TriggerCreated:
    """Create a trigger: call a webhook after each matching push."""
    rule = wanted.trigger
    made = await triggers.create(
        repo.info.id, wanted.action.endpoint, branches=rule.branches or (), globs=rule.globs or ()
    )
    return TriggerCreated(trigger_id=made.id)


@router.delete("/{trigger}")
async def delete_trigger(trigger: str, repo: OwnedRepo, triggers: TriggersDep) -> Nothing:
    """Delete a trigger. Pending deliveries are dropped."""
    await triggers.delete(repo.info.id, trigger)
    return Nothing()


@router.get("/{trigger}/deliveries")
async def list_deliveries(
    trigger: str,
    repo: OwnedRepo,
    triggers: TriggersDep,
    limit: Annotated[int, Query(ge=1, le=MAX_PAGE)] = 20,
    offset: Annotated[int, Query(ge=0, le=LARGEST)] = 0,
) -> DeliveryList:
    """List deliveries of a trigger, newest first: sent, pending and failed."""
    page = await triggers.deliveries(repo.info.id, trigger, limit=limit, offset=offset)
    deliveries = [DeliveryModel.of(delivery) for delivery in page.items]
    return DeliveryList(deliveries=deliveries, offset=page.offset, total=page.total)


@router.post("/{trigger}/deliveries/{delivery}/redeliver")
async def redeliver(trigger: str, delivery: str, repo: OwnedRepo, triggers: TriggersDep) -> DeliveryModel:
    """Send a delivery again, with the same body."""
    return DeliveryModel.of(await triggers.redeliver(repo.info.id, trigger, delivery))
