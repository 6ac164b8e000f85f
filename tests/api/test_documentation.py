"""The /docs page works without an API key, without the internet and under a strict CSP."""

import re
from typing import Any, cast

import httpx2

from stead.api.admission import Admission
from stead.api.app import create_app
from stead.api.callers import PUBLIC, Authentication
from stead.api.calls import Calls


async def test_the_docs_page_loads_only_assets_of_this_server() -> None:
    gate = Authentication(create_app(), cast("Any", None))  # it asks no one about public paths
    app = Calls(gate, Admission(10, 100, 100))
    async with httpx2.AsyncClient(transport=httpx2.ASGITransport(app), base_url="http://stead.test") as http:
        page = await http.get("/docs")
        assets = re.findall(r'(?:src|href)="([^"]+)"', page.text)
        answers = [await http.get(asset) for asset in assets]
    await app.close()
    assert [answer.headers["content-type"].partition(";")[0] for answer in answers] == [
        "text/css",
        "image/png",
        "text/javascript",
    ]
    assert all(answer.status_code == 200 and len(answer.content) > 500 for answer in answers)
    assert {"/docs", *assets} <= PUBLIC and "//" not in page.text
    policy = page.headers["content-security-policy"]
    assert policy.startswith("default-src 'none'; script-src 'self' 'sha256-") and "unsafe" not in policy


def test_the_openapi_description_says_how_to_authenticate() -> None:
    schema = create_app().openapi()
    schemes = schema["components"]["securitySchemes"]
    assert schema["security"] == [{name: []} for name in schemes] and len(schemes) == 2
    open_paths = {
        path for path, calls in schema["paths"].items() if calls.get("get", {}).get("security") == []
    }
    assert open_paths == {"/healthz", "/.well-known/jwks.json"}
