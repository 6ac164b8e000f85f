#!/usr/bin/python3
"""Stands in for `copilot --headless` inside a VM: JSON-RPC over TCP as the Copilot SDK speaks it.

Each message runs one shell command, the text between backquotes, if the client permits it. There is no model.
"""

import argparse
import json
import os
import re
import socketserver
import subprocess
import uuid
from typing import Any

AUTHENTICATION_FAILED, METHOD_NOT_FOUND = -32002, -32601


class Client(socketserver.StreamRequestHandler):
    """One connection: messages with a header Content-Length each."""

    def handle(self) -> None:
        self.prompts: dict[str, tuple[str, str]] = {}
        authenticated = False
        while (message := self._receive()) is not None:
            method, params = message.get("method", ""), message.get("params") or {}
            if method == "connect":
                authenticated = params.get("token") == os.environ.get("COPILOT_CONNECTION_TOKEN")
            if not authenticated:
                self._fail(message, AUTHENTICATION_FAILED, "AUTHENTICATION_FAILED")
            elif (action := ACTIONS.get(method)) is None:
                self._fail(message, METHOD_NOT_FOUND, f"Unhandled method {method}")
            else:
                self._send(id=message["id"], result=action(self, params))
                if method == "session.send":
                    self._ask(params["sessionId"], params["prompt"])

    def _connect(self, _: dict[str, Any]) -> dict[str, Any]:
        return {"ok": True, "protocolVersion": 3, "version": "stand-in"}

    def _create(self, params: dict[str, Any]) -> dict[str, Any]:
        return {"sessionId": params.get("sessionId") or str(uuid.uuid4())}

    def _accept(self, _: dict[str, Any]) -> dict[str, Any]:
        return {"messageId": str(uuid.uuid4())}

    def _decide(self, params: dict[str, Any]) -> dict[str, Any]:
        session, command = self.prompts.pop(params["requestId"])
        if params["result"]["kind"].startswith("approve"):
            ended = subprocess.run(command, shell=True, capture_output=True, text=True, timeout=60)
            text = ended.stdout.strip()
        else:
            text = f"not permitted: {command}"
        self._event(session, "assistant.message", messageId=str(uuid.uuid4()), content=text)
        self._event(session, "session.idle")
        return {"success": True}

    def _detach(self, _: dict[str, Any]) -> dict[str, Any]:
        return {"success": True}

    def _ask(self, session: str, prompt: str) -> None:
        """Ask the client to permit the command."""
        found = re.search("`(.+)`", prompt)
        command, request = found[1] if found else "true", str(uuid.uuid4())
        self.prompts[request] = (session, command)
        wanted: dict[str, Any] = {
            "kind": "shell",
            "fullCommandText": command,
            "intention": "run it",
            "commands": [],
        }
        self._event(session, "permission.requested", requestId=request, permissionRequest=wanted)

    def _event(self, session: str, kind: str, **data: Any) -> None:
        event = {"id": str(uuid.uuid4()), "parentId": None, "timestamp": "2026-01-01T00:00:00Z"}
        params = {"sessionId": session, "event": {**event, "type": kind, "data": data}}
        self._send(method="session.event", params=params)

    def _fail(self, message: dict[str, Any], code: int, text: str) -> None:
        if "id" in message:
            self._send(id=message["id"], error={"code": code, "message": text})

    def _send(self, **message: Any) -> None:
        body = json.dumps({"jsonrpc": "2.0", **message}).encode()
        self.wfile.write(b"Content-Length: %d\r\n\r\n%s" % (len(body), body))

    def _receive(self) -> dict[str, Any] | None:
        length = 0
        while (line := self.rfile.readline(1000)) not in (b"", b"\r\n"):
            name, _, value = line.partition(b":")
            if name.lower() == b"content-length":
                length = int(value)
        return json.loads(self.rfile.read(length)) if length else None


ACTIONS = {
    "connect": Client._connect,
    "session.create": Client._create,
    "session.send": Client._accept,
    "session.permissions.handlePendingPermissionRequest": Client._decide,
    "session.detach": Client._detach,
}


if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("--headless", action="store_true")
    parser.add_argument("--host", default="127.0.0.1")
    parser.add_argument("--port", type=int, required=True)
    arguments = parser.parse_args()
    socketserver.ThreadingTCPServer.allow_reuse_address = True
    with socketserver.ThreadingTCPServer((arguments.host, arguments.port), Client) as server:
        server.serve_forever()
