"""Wire models of triggers and deliveries."""

from typing import Literal, Self

from stead.api.wire import Time, Wire
from stead.repos.webhooks.triggers import Delivery, Trigger


class TriggerRule(Wire):
    """Which pushes match: branch patterns, and globs of changed files."""

    event: Literal["push"]
    branches: list[str] | None = None
    globs: list[str] | None = None


class WebhookAction(Wire):
    action: Literal["webhook"]
    endpoint: str


class NewTrigger(Wire):
    trigger: TriggerRule
    action: WebhookAction


class TriggerCreated(Wire):
    trigger_id: str


class TriggerModel(Wire):
    id: str
    repository_id: str
    managed: bool = False
    created_at: Time
    trigger: TriggerRule
    action: WebhookAction

    @classmethod
    def of(cls, trigger: Trigger) -> Self:
        rule = TriggerRule(
            event="push", branches=list(trigger.branches) or None, globs=list(trigger.globs) or None
        )
        return cls(
            id=trigger.id,
            repository_id=trigger.repo,
            created_at=trigger.created_at,
            trigger=rule,
            action=WebhookAction(action="webhook", endpoint=trigger.endpoint),
        )


class TriggerList(Wire):
    triggers: list[TriggerModel]


class DeliveryModel(Wire):
    """A webhook delivery and its result."""

    id: str
    state: str
    body: str
    attempts: int
    created_at: Time
    next_attempt_at: Time | None
    last_attempt_at: Time | None
    finished_at: Time | None
    status: int | None
    error: str | None
    response: str | None
    redelivery_of: str | None

    @classmethod
    def of(cls, delivery: Delivery) -> Self:
        return cls(
            id=delivery.id,
            state=delivery.state,
            body=delivery.body,
            attempts=delivery.attempts,
            created_at=delivery.created_at,
            next_attempt_at=delivery.next_at,
            last_attempt_at=delivery.attempted_at,
            finished_at=delivery.finished_at,
            status=delivery.status,
            error=delivery.error,
            response=delivery.response,
            redelivery_of=delivery.redelivery_of,
        )


class DeliveryList(Wire):
    deliveries: list[DeliveryModel]
    offset: int
    total: int
