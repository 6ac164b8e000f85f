"""Stands in for a model inside a VM: the Chat Completions API.

It runs the command between backquotes with the shell tool, and answers with what the tool returned.
"""

import json
import re
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any


class Completions(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"

    def do_GET(self) -> None:
        self._answer(
            "application/json", b'{"object": "list", "data": [{"id": "scripted", "object": "model"}]}'
        )

    def do_POST(self) -> None:
        request = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        message = _reply(request)
        reason = "tool_calls" if "tool_calls" in message else "stop"
        head = {"id": "1", "created": 0, "model": request["model"]}
        usage = {"prompt_tokens": 1, "completion_tokens": 1, "total_tokens": 2}
        if request.get("stream"):
            head["object"] = "chat.completion.chunk"
            choices = [
                [{"index": 0, "delta": message, "finish_reason": None}],
                [{"index": 0, "delta": {}, "finish_reason": reason}],
            ]
            chunks: list[str] = [json.dumps({**head, "choices": each}) for each in choices]
            chunks += [json.dumps({**head, "choices": [], "usage": usage}), "[DONE]"]
            body = "".join(f"data: {each}\n\n" for each in chunks).encode()
            self._answer("text/event-stream", body)
        else:
            choice = {"index": 0, "message": message, "finish_reason": reason}
            answer = {**head, "object": "chat.completion", "choices": [choice], "usage": usage}
            self._answer("application/json", json.dumps(answer).encode())

    def _answer(self, kind: str, body: bytes) -> None:
        self.send_response(200)
        self.send_header("Content-Type", kind)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)


def _reply(request: dict[str, Any]) -> dict[str, Any]:
    messages = request["messages"]
    tools = [each["function"]["name"] for each in request.get("tools", ())]
    returned = [_text(each["content"]) for each in messages if each["role"] == "tool"]
    asked = " ".join(_text(each["content"]) for each in messages if each["role"] == "user")
    commands = re.findall("`([a-z]+)`", asked)
    if returned:
        return {"role": "assistant", "content": returned[-1].splitlines()[0]}
    if "bash" in tools and commands:
        arguments = json.dumps({"command": commands[-1], "description": "as asked"})
        call = {"index": 0, "id": "call_1", "type": "function"}
        function = {"name": "bash", "arguments": arguments}
        return {"role": "assistant", "content": None, "tool_calls": [{**call, "function": function}]}
    return {"role": "assistant", "content": "nothing to run"}


def _text(content: Any) -> str:
    if isinstance(content, str):
        return content
    return "".join(part.get("text", "") for part in content or ())


if __name__ == "__main__":
    ThreadingHTTPServer(("127.0.0.1", 8999), Completions).serve_forever()
