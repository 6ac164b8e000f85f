"""Background requests and idempotency keys hold what was created; they held the bodies of HTTP answers."""

import json
from datetime import datetime
from typing import Any

import sqlalchemy as sa
from alembic import op

revision = "0023"
down_revision = "0022"

_KNOWN = ("code", "error", "message", "description")
"""The part of an error body that repeats its code and message."""


def upgrade() -> None:
    connection = op.get_bind()
    op.add_column("background_requests", sa.Column("result", sa.Text))
    rows = connection.execute(sa.text("SELECT id, status, answer FROM background_requests")).all()
    for row in rows:
        if row.answer is not None:
            result = requested(row.status, json.loads(row.answer))
            _set(connection, "background_requests", row.id, result)
    for column in ("status", "answer"):
        op.execute(f"ALTER TABLE background_requests DROP COLUMN {column}")

    op.execute("ALTER TABLE idempotency_keys RENAME COLUMN answer TO result")
    rows = connection.execute(sa.text("SELECT id, account, target, result FROM idempotency_keys")).all()
    for row in rows:
        if row.result is not None:
            path = row.target.partition(" ")[2]
            _set(connection, "idempotency_keys", row.id, keyed(row.account, path, json.loads(row.result)))


def _set(connection: sa.Connection, table: str, row: str, result: dict[str, Any]) -> None:
    rows = sa.table(table, sa.column("id", sa.Text), sa.column("result", sa.Text))
    connection.execute(rows.update().where(rows.c.id == row).values(result=json.dumps(result)))


def requested(status: int, body: dict[str, Any]) -> dict[str, Any]:
    """The result of a background request, by the answer that it had."""
    if status == 200:
        return _vm(body) if "id" in body else _snapshot(body)
    details = {name: value for name, value in body.items() if name not in _KNOWN}
    return {
        "kind": "failure",
        "code": body["code"],
        "message": body["message"],
        "status": status,
        "details": details,
    }


def keyed(account: str, path: str, body: dict[str, Any]) -> dict[str, Any]:
    """The result of a create with an idempotency key, by the answer that it had."""
    created = body.get("created", True)
    match path:
        case "/v1/vms":
            return _vm(body)
        case "/v1/vms/snapshots":
            return _snapshot(body)
        case "/git/v1/repo":
            return {"value": body["repoId"], "created": created}
        case "/identity/v1/identities":
            identity = {
                "id": body["id"],
                "account": account,
                "managed": body["managed"],
                "created_at": _seconds(body["createdAt"]),
                "name": body.get("name"),
                "vm_grants": body["vmGrants"],
                "repo_grants": body["repoGrants"],
            }
            return {"value": identity, "created": created}
        case "/v1/vpcs":
            vpc = {
                "id": body["vpcId"],
                "account": body["accountId"],
                "name": body.get("name"),
                "cidr": body["cidr"],
                "created_at": _seconds(body["createdAt"]),
            }
            return {"value": vpc, "created": created}
    if path.endswith("/fork"):
        children = [{"id": each["id"], "name": each.get("name")} for each in body["forks"]]
        return {"parent": body["vmId"], "children": children}
    return {
        "id": body["snapshotId"],
        "source": body["sourceVmId"],
        "instance": body.get("sourceVmInstanceId"),
    }


def _vm(body: dict[str, Any]) -> dict[str, Any]:
    return {
        "kind": "vm",
        "id": body["id"],
        "snapshot": body.get("snapshotId"),
        "domains": body.get("domains", []),
        "created": body.get("created", True),
    }


def _snapshot(body: dict[str, Any]) -> dict[str, Any]:
    return {"kind": "snapshot", "id": body["snapshotId"]}


def _seconds(text: str) -> float:
    """The middle of the microsecond: times are cut to microseconds when they are shown."""
    moment = datetime.fromisoformat(text)
    return int(moment.timestamp()) + (moment.microsecond + 0.5) / 1e6
