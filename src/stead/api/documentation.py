"""The /docs page: FastAPI's Swagger UI, with assets from an installed package instead of a CDN."""

import base64
import hashlib
import re
from collections.abc import Sequence
from typing import Any

from fastapi import FastAPI
from fastapi.openapi.docs import get_swagger_ui_html
from fastapi.routing import APIRoute
from starlette.responses import HTMLResponse
from starlette.routing import BaseRoute
from starlette.staticfiles import StaticFiles

from stead.api.bodies import json_body_of
from stead.api.callers import PUBLIC, TOKEN_HEADER

DESCRIPTION = f"""Real Linux VMs and Git repositories for AI agents, on your own hosts.

Authenticate with an API key (`Authorization: Bearer ...`) or an identity token (`{TOKEN_HEADER}`). Errors are
JSON with `code` and `message`. Every answer has an `x-freestyle-trace-id` header: search for it in the log of
the server. The OpenAPI description is at [/openapi.json](/openapi.json)."""
_SECURITY_SCHEMES = {
    "API key": {"type": "http", "scheme": "bearer"},
    "identity token": {"type": "apiKey", "in": "header", "name": TOKEN_HEADER},
}


class Api(FastAPI):
    """FastAPI whose OpenAPI description says how to authenticate."""

    own_routes: Sequence[BaseRoute] = ()

    def openapi(self) -> dict[str, Any]:
        if self.openapi_schema is None:
            schema = super().openapi()
            schema["components"]["securitySchemes"] = _SECURITY_SCHEMES
            schema["security"] = [{name: []} for name in _SECURITY_SCHEMES]
            for path in PUBLIC & schema["paths"].keys():
                for operation in schema["paths"][path].values():
                    operation["security"] = []
            self._describe_bodies(schema)
        return super().openapi()

    def _describe_bodies(self, schema: dict[str, Any]) -> None:
        """Add the bodies that routes read themselves, which FastAPI does not know."""
        for route in self.own_routes:
            if not isinstance(route, APIRoute):
                continue
            body = json_body_of(each.call for each in route.dependant.dependencies)
            if body is None:
                continue
            model = _without_nulls(body.adapter.json_schema(ref_template="#/components/schemas/{model}"))
            definitions = model.pop("$defs", {})
            if "properties" in model:
                definitions[model["title"]] = model
                model = {"$ref": f"#/components/schemas/{model['title']}"}
            else:
                model["title"] = "Body"
            schema["components"]["schemas"] = definitions | schema["components"]["schemas"]
            described: dict[str, Any] = {"content": {"application/json": {"schema": model}}}
            if body.required:
                described = {"required": True, **described}
            for method in route.methods or ():
                schema["paths"][route.path_format][method.lower()]["requestBody"] = described


def _without_nulls(schema: Any) -> Any:
    """As FastAPI describes models: a default of null is left out."""
    if isinstance(schema, dict):
        return {name: _without_nulls(value) for name, value in schema.items() if value is not None}
    return [_without_nulls(value) for value in schema] if isinstance(schema, list) else schema


def add_documentation(app: FastAPI) -> None:
    """Serve the page. Its Content-Security-Policy allows only its own script, its assets and this API."""
    page = get_swagger_ui_html(
        openapi_url="/openapi.json",
        title=f"{app.title} API",
        swagger_js_url="/docs/swagger-ui-bundle.js",
        swagger_css_url="/docs/swagger-ui.css",
        swagger_favicon_url="/docs/favicon-32x32.png",
        swagger_ui_parameters={"validatorUrl": None},
    )
    (script,) = re.findall(rb"<script>(.*?)</script>", bytes(page.body), re.DOTALL)
    digest = base64.b64encode(hashlib.sha256(script).digest()).decode()
    page.headers["Content-Security-Policy"] = (
        f"default-src 'none'; script-src 'self' 'sha256-{digest}'; style-src 'self'; img-src 'self' data:;"
        " connect-src 'self'; base-uri 'none'; form-action 'none'; frame-ancestors 'none'"
    )

    @app.get("/docs", include_in_schema=False)
    async def docs() -> HTMLResponse:
        return page

    app.mount("/docs", StaticFiles(packages=[("fastapi_swagger", "resources")]))
