"""Prometheus metrics."""

from typing import Any

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, generate_latest
from prometheus_client.exposition import CONTENT_TYPE_LATEST
from starlette.responses import Response
from starlette.types import Scope

from stead.machines import Machines

registry = CollectorRegistry()
_BUCKETS = (0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30, 60, 300, 3600)
requests = Counter(
    "stead_http_requests", "HTTP requests answered.", ("method", "route", "status"), registry=registry
)
durations = Histogram(
    "stead_http_request_seconds",
    "Duration of HTTP requests in seconds.",
    ("method", "route"),
    buckets=_BUCKETS,
    registry=registry,
)
open_websockets = Gauge("stead_websockets", "WebSockets open.", registry=registry)
loop_lag = Histogram(
    "stead_event_loop_lag_seconds",
    "How late the event loop runs a timer, measured every 50 ms.",
    buckets=(0.001, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10),
    registry=registry,
)
machine_states = Gauge("stead_machines", "VMs by state.", ("state",), registry=registry)


def observe(scope: Scope, status: int, seconds: float) -> None:
    """Count a call by its route, not its path: ids in paths would make one time series each."""
    route: Any = scope.get("route")
    name = getattr(route, "path", "none")
    method = scope.get("method", "WEBSOCKET")
    requests.labels(method, name, str(status)).inc()
    if scope["type"] == "http":
        durations.labels(method, name).observe(seconds)


async def exposition(machines: Machines) -> Response:
    machine_states.clear()
    for state, count in (await machines.count()).items():
        machine_states.labels(state).set(count)
    return Response(generate_latest(registry), media_type=CONTENT_TYPE_LATEST)
