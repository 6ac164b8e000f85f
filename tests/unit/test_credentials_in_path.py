"""Credentials in paths: Stead's own are moved to their header, others stay out of the log."""

import time
from typing import Any

import pytest

from stead.api.credentials_in_path import move_credentials, without_credentials

_TOKEN = "stid_" + "x" * 43


@pytest.mark.parametrize(
    ("path", "logged"),
    [
        ("/v1/vms", "/v1/vms"),
        (
            "/x-access-token:ghp_abc@github.com/o/r.git/info/refs",
            "/x-access-token:***@github.com/o/r.git/info/refs",
        ),
        ("/x-access-token:a/b@c@github.com/r", "/x-access-token:***@github.com/r"),
        ("/x-access-token:ghp_abc/o/r", "/x-access-token:***/o/r"),
        ("/x-access-token:ghp_abc", "/x-access-token:***"),
        ("/me:password@github.com/o/r", "/***@github.com/o/r"),
        ("/ghp_abc:@github.com/o/r", "/***@github.com/o/r"),
        ("/ghp_abc@github.com/o/r", "/***@github.com/o/r"),
        ("/https:/me:password@github.com/o/r", "/https:/***@github.com/o/r"),
        ("/https:/ghp_abc@github.com/o/r", "/https:/***@github.com/o/r"),
        ("/https://ghp_abc@github.com/o/r", "/https://***@github.com/o/r"),
        ("//ghp_abc@github.com/o/r", "//***@github.com/o/r"),
        ("/@vite/client", "/@vite/client"),
        ("/v1/vms/abc/files/srv/@scope/me@example.com", "/v1/vms/abc/files/srv/@scope/me@example.com"),
    ],
)
def test_path_in_the_log(path: str, logged: str) -> None:
    assert without_credentials(path) == logged


@pytest.mark.parametrize("path", ["/" + "a:" * 30_000 + "/@", "/" + "@" * 60_000, "/x-access-token:" * 4000])
def test_hostile_paths_take_no_time(path: str) -> None:
    started = time.process_time()
    without_credentials(path)
    assert time.process_time() - started < 0.1


def test_own_token_is_moved_to_its_header() -> None:
    scope: dict[str, Any] = {
        "type": "http",
        "path": f"/x-access-token:{_TOKEN}@git.freestyle.sh/repo/info/refs",
        "headers": [(b"host", b"h")],
    }
    move_credentials(scope)
    assert scope["path"] == "/repo/info/refs" and scope["raw_path"] == b"/repo/info/refs"
    assert [name for name, _ in scope["headers"]] == [b"host", b"authorization"]
