#!/usr/bin/python3
"""Stands in for the Claude Code CLI inside a VM: the SDK's protocol, one JSON document for each line.

Like the real one it is interactive on a terminal, and speaks the protocol on pipes.
"""

import json
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

SESSION = {"session_id": "fake", "uuid": "00000000-0000-4000-8000-000000000000"}


def send(**message: Any) -> None:
    print(json.dumps(message, ensure_ascii=False), flush=True)


def received() -> Iterator[dict[str, Any]]:
    """What the SDK sends, except for requests, which are answered at once."""
    for line in sys.stdin:
        message = json.loads(line)
        if message["type"] == "control_request":
            reply = {"subtype": "success", "request_id": message["request_id"], "response": {}}
            send(type="control_response", response=reply)
        else:
            yield message


def main() -> None:
    if sys.stdin.isatty() or sys.stdout.isatty():
        sys.exit("interactive: this is a terminal")
    messages = received()
    prompt = next(each for each in messages if each["type"] == "user")["message"]["content"]
    if not isinstance(prompt, str):
        prompt = "".join(part["text"] for part in prompt)
    send(type="system", subtype="init", tools=["Bash"], model="fake", cwd=str(Path.cwd()), **SESSION)

    request = {"subtype": "can_use_tool", "tool_name": "Bash", "input": {"command": "hostname"}}
    send(type="control_request", request_id="ask", request={**request, "tool_use_id": "t1"})
    allowed = next(each for each in messages if each["type"] == "control_response")["response"]["response"]
    assert allowed["behavior"] == "allow", allowed
    ran = subprocess.run(allowed["updatedInput"]["command"], shell=True, capture_output=True, text=True)

    facts = {"length": len(prompt), "start": prompt[:40], "end": prompt[-40:], "host": ran.stdout.strip()}
    facts |= {
        "key": os.environ.get("ANTHROPIC_API_KEY"),
        "folder": str(Path.cwd()),
        "long": "漢é🙂x" * 50_000,
    }
    text = json.dumps(facts, ensure_ascii=False)
    content = [{"type": "text", "text": text}]
    answer = {"id": "m1", "type": "message", "role": "assistant", "model": "fake", "content": content}
    send(type="assistant", message=answer, parent_tool_use_id=None, **SESSION)
    counts = {"num_turns": 1, "duration_ms": 1, "duration_api_ms": 1, "total_cost_usd": 0, "usage": {}}
    send(type="result", subtype="success", is_error=False, result=text, **counts, **SESSION)
    for _ in messages:
        pass  # the bridge cannot close standard input; it kills


main()
