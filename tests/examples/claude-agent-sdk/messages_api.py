"""Stands in for the Messages API inside a VM: asks for one Bash command, then says that it is done."""

import json
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

COMMAND = "hostname > /root/written-by-claude"


class Messages(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"

    def do_HEAD(self) -> None:
        self._answer("text/plain", b"")

    def do_GET(self) -> None:
        self.do_HEAD()

    def do_POST(self) -> None:
        body = self.rfile.read(int(self.headers["Content-Length"]))
        if "count_tokens" in self.path:
            self._answer("application/json", b'{"input_tokens": 1}')
            return
        request = json.loads(body)
        names = [tool.get("name") for tool in request.get("tools", ())]
        asked = b"tool_result" in body
        if "Bash" in names and not asked:
            block: dict[str, Any] = {"type": "tool_use", "id": "toolu_1", "name": "Bash", "input": {}}
            arguments = json.dumps({"command": COMMAND, "description": "Write the host name"})
            delta, reason = {"type": "input_json_delta", "partial_json": arguments}, "tool_use"
        else:
            block = {"type": "text", "text": ""}
            delta, reason = {"type": "text_delta", "text": "it is written"}, "end_turn"
        usage = {"input_tokens": 1, "output_tokens": 1}
        head = {"id": "msg_1", "type": "message", "role": "assistant", "model": request["model"]}
        if not request.get("stream"):
            full = {"type": "text", "text": "it is written"}
            answer = {**head, "content": [full], "stop_reason": "end_turn", "usage": usage}
            self._answer("application/json", json.dumps(answer).encode())
            return
        events: list[dict[str, Any]] = [
            {
                "type": "message_start",
                "message": {**head, "content": [], "stop_reason": None, "usage": usage},
            },
            {"type": "content_block_start", "index": 0, "content_block": block},
            {"type": "content_block_delta", "index": 0, "delta": delta},
            {"type": "content_block_stop", "index": 0},
            {
                "type": "message_delta",
                "delta": {"stop_reason": reason, "stop_sequence": None},
                "usage": usage,
            },
            {"type": "message_stop"},
        ]
        text = "".join(f"event: {event['type']}\ndata: {json.dumps(event)}\n\n" for event in events)
        self._answer("text/event-stream", text.encode())

    def _answer(self, kind: str, body: bytes) -> None:
        self.send_response(200)
        self.send_header("Content-Type", kind)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)


if __name__ == "__main__":
    ThreadingHTTPServer(("127.0.0.1", 8999), Messages).serve_forever()
