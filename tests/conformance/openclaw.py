#!/usr/bin/python3
"""Stands in for the `openclaw` command inside a VM: it writes settings, and its gateway serves a page."""

import json
import sys
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from urllib.parse import parse_qs, urlsplit

SETTINGS = Path("/root/.openclaw/settings.json")


def settings() -> dict[str, str]:
    return dict(json.loads(SETTINGS.read_text())) if SETTINGS.exists() else {}


def option(name: str) -> str:
    return sys.argv[sys.argv.index(name) + 1]


class Gateway(BaseHTTPRequestHandler):
    def do_GET(self) -> None:
        token = parse_qs(urlsplit(self.path).query).get("token")
        self.send_response(200 if token == [option("--token")] else 401)
        self.end_headers()
        self.wfile.write(f"{settings()['gateway.controlUi.allowedOrigins']}\n".encode())


if __name__ == "__main__":
    if sys.argv[1:3] == ["config", "set"]:
        SETTINGS.parent.mkdir(exist_ok=True)
        SETTINGS.write_text(json.dumps(settings() | {sys.argv[3]: sys.argv[4]}))
    else:
        assert (sys.argv[1], option("--bind"), option("--auth")) == ("gateway", "lan", "token")
        ThreadingHTTPServer(("0.0.0.0", int(option("--port"))), Gateway).serve_forever()
