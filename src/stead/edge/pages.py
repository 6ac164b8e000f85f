"""Answers of the edge itself: JSON for programs, a small page for browsers.

Anybody sees them, so they name no VM and give no reason of the host. Those are in the server's log, under the
trace id that the answer shows.
"""

import html
import json
from dataclasses import dataclass, replace
from typing import Self

_STYLE = "body{font:16px/1.5 system-ui,sans-serif;max-width:36em;margin:15vh auto;padding:0 1em}"
_RELOAD_AFTER = 2
TRACE_HEADER = "x-freestyle-trace-id"


@dataclass(frozen=True)
class Refusal:
    """Why a request for a host name is not passed on."""

    status: int
    code: str
    title: str
    message: str
    reload: bool = False
    """The page reloads itself: the next attempt may succeed."""
    trace: str | None = None
    """Finds the reason in the server's log."""

    def traced(self, trace: str) -> Self:
        return replace(self, trace=trace)

    def body(self, *, as_page: bool) -> tuple[bytes, str]:
        """The body and its content type."""
        if as_page:
            return self._page(), "text/html; charset=utf-8"
        fields = {
            "code": self.code,
            "error": self.code,
            "message": self._text,
            "description": self._text,
        }
        return json.dumps(fields).encode(), "application/json"

    @property
    def _text(self) -> str:
        return self.message if self.trace is None else f"{self.message} (trace id {self.trace})"

    def headers(self) -> list[tuple[str, str]]:
        found = [("cache-control", "no-store")]
        if self.trace is not None:
            found.append((TRACE_HEADER, self.trace))
        return [*found, ("retry-after", str(_RELOAD_AFTER))] if self.reload else found

    def _page(self) -> bytes:
        again = f'<meta http-equiv="refresh" content="{_RELOAD_AFTER}">' if self.reload else ""
        hint = "<p>This page reloads by itself.</p>" if self.reload else ""
        return (
            f'<!doctype html><html lang="en"><head><meta charset="utf-8">{again}'
            f"<title>{html.escape(self.title)}</title><style>{_STYLE}</style></head>"
            f"<body><h1>{html.escape(self.title)}</h1><p>{html.escape(self._text)}</p>{hint}</body></html>"
        ).encode()


def not_mapped(host: str) -> Refusal:
    text = f"{host} is not mapped to a VM: map it with `stead domains map {host} VM PORT`"
    return Refusal(404, "DOMAIN_NOT_MAPPED", "Not found", text)


def too_many() -> Refusal:
    text = (
        "too many requests from this address for names that are not mapped, or to VMs that had to be woken:"
        " try again in a minute"
    )
    return Refusal(429, "LIMIT_EXCEEDED", "Too many requests", text)


def gone(host: str) -> Refusal:
    return Refusal(404, "VM_NOT_FOUND", "Not found", f"the VM to which {host} is mapped does not exist")


def not_listening(host: str, port: int) -> Refusal:
    text = (
        f"nothing listens on port {port} of the VM to which {host} is mapped"
        " (listen on 0.0.0.0, not on 127.0.0.1)"
    )
    return Refusal(502, "CONNECTION_REFUSED", "Nothing listens on this port yet", text, reload=True)


def starting(host: str) -> Refusal:
    text = f"the VM to which {host} is mapped is starting"
    return Refusal(503, "VM_STARTING", "Starting", text, reload=True)


def not_started(host: str) -> Refusal:
    text = f"the VM to which {host} is mapped cannot be started: the server's log has the reason"
    return Refusal(503, "SERVICE_UNAVAILABLE", "The VM cannot be started", text)


def no_answer(host: str) -> Refusal:
    text = f"the VM to which {host} is mapped closed the connection, or broke HTTP, before it answered"
    return Refusal(502, "BAD_GATEWAY", "No answer", text)
