"""Calls of the SDK for repositories and their answers, for a scripted server."""

from collections.abc import Callable
from typing import Any
from urllib.parse import parse_qs, urlsplit

from support import sdk_clients
from support.scripted_server import Seen, Step
from support.sdk_clients import Client

REPO = "0f8fad5b-d9cb-469f-a165-70867728950e"
ROOT = f"/git/v1/repo/{REPO}"
ONE, TWO, THREE = "1" * 40, "2" * 40, "3" * 40
WHO = {"name": "Ann", "email": "ann@example.com", "date": "2026-01-31T12:00:00+02:00"}


async def attempt(client: Client, call: Callable[[Any], Any], *steps: Step) -> tuple[Any, list[Seen]]:
    """The result or the error of a call on a repository, and the requests that it sent."""
    return await sdk_clients.attempt(client, lambda stead: call(stead.git.repos.ref(REPO)), *steps)


def query(seen: Seen) -> dict[str, str]:
    return {key: values[0] for key, values in parse_qs(urlsplit(seen.target).query).items()}


def commit(sha: str, *parents: str) -> dict[str, Any]:
    return {
        "sha": sha,
        "message": f"commit {sha[0]}",
        "author": WHO,
        "committer": WHO,
        "tree": {"sha": THREE},
        "parents": [{"sha": each} for each in parents],
    }
