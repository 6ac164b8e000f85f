"""Triggers of a repository: who is told of pushes, and what came of it."""

from typing import Annotated

from fastapi import APIRouter, Query

from stead.api.repos import OwnedRepo
from stead.api.services import ServicesDep
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
async def list_triggers(repo: OwnedRepo, services: ServicesDep) -> TriggerList:
    """A repository's triggers, oldest first."""
    found = await services.triggers.list(repo.info.id)
    return TriggerList(triggers=[TriggerModel.of(trigger) for trigger in found])


@router.post("")
async def create_trigger(repo: OwnedRepo, services: ServicesDep, wanted: NewTrigger) -> TriggerCreated:
    """Have an endpoint told of pushes, from now on."""
    rule = wanted.trigger
    made = await services.triggers.create(
        repo.info.id, wanted.action.endpoint, branches=rule.branches or (), globs=rule.globs or ()
    )
    return TriggerCreated(trigger_id=made.id)


@router.delete("/{trigger}")
async def delete_trigger(trigger: str, repo: OwnedRepo, services: ServicesDep) -> Nothing:
    """Nothing more is sent for it."""
    await services.triggers.delete(repo.info.id, trigger)
    return Nothing()


@router.get("/{trigger}/deliveries")
async def list_deliveries(
    trigger: str,
    repo: OwnedRepo,
    services: ServicesDep,
    limit: Annotated[int, Query(ge=1, le=MAX_PAGE)] = 20,
    offset: Annotated[int, Query(ge=0, le=LARGEST)] = 0,
) -> DeliveryList:
    """What was sent for a trigger, and is to be, newest first."""
    page = await services.triggers.deliveries(repo.info.id, trigger, limit=limit, offset=offset)
    deliveries = [DeliveryModel.of(delivery) for delivery in page.items]
    return DeliveryList(deliveries=deliveries, offset=page.offset, total=page.total)


@router.post("/{trigger}/deliveries/{delivery}/redeliver")
async def redeliver(trigger: str, delivery: str, repo: OwnedRepo, services: ServicesDep) -> DeliveryModel:
    """Send the same once more."""
    return DeliveryModel.of(await services.triggers.redeliver(repo.info.id, trigger, delivery))
