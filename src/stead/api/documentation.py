"""The /docs page, rendered from the OpenAPI schema: one HTML page without scripts or external resources."""

from collections.abc import Iterator, Mapping
from html import escape
from typing import Any

Schema = Mapping[str, Any]

_JSON = "application/json"
_SHAPES = "data types"
_STYLE = """
body{font:16px/1.5 system-ui,sans-serif;margin:0 auto;max-width:60rem;padding:1rem 1.5rem}
body{color:#1b1f24;background:#fff}h1{margin-bottom:0}
h2{margin-top:2.5rem;border-bottom:1px solid #d0d7de;text-transform:capitalize}
article{margin:1.5rem 0;padding:.75rem 1rem;border:1px solid #d0d7de;border-radius:8px}
code{font:14px/1.4 ui-monospace,monospace}h3{margin:0;font-size:1rem;overflow-wrap:anywhere}
.m{display:inline-block;min-width:4.2rem;font-weight:700;color:#0550ae}a{color:#0550ae}
table{border-collapse:collapse;margin:.5rem 0;width:100%}
td{padding:.15rem .75rem .15rem 0;vertical-align:top;border-top:1px solid #eaeef2}
td:first-child{width:30%;overflow-wrap:anywhere}td:nth-child(2){width:26%;overflow-wrap:anywhere}
.q{color:#59636e}nav a{margin-right:1rem}p{margin:.4rem 0}
@media(prefers-color-scheme:dark){body{background:#0d1117;color:#e6edf3}article,h2{border-color:#30363d}
td{border-color:#21262d}.m,a{color:#79c0ff}.q{color:#9198a1}}
"""


def page(schema: Schema) -> str:
    """The page with all calls and data types of a schema."""
    shapes: Schema = schema.get("components", {}).get("schemas", {})
    groups: dict[str, list[str]] = {}
    for path, operations in schema["paths"].items():
        for method, operation in operations.items():
            tag = operation.get("tags", ["other"])[0]
            groups.setdefault(tag, []).append(_operation(shapes, method, path, operation))
    groups[_SHAPES] = [_shape(shapes, name, shape) for name, shape in shapes.items() if _is_object(shape)]
    links = "".join(f'<a href="#{escape(tag)}">{escape(tag)}</a>' for tag in groups)
    body = "".join(
        f'<h2 id="{escape(tag)}">{escape(tag)}</h2>{"".join(texts)}' for tag, texts in groups.items()
    )
    info = schema["info"]
    return (
        '<!doctype html><html lang="en"><head><meta charset="utf-8">'
        '<meta name="viewport" content="width=device-width,initial-scale=1">'
        f"<title>{escape(info['title'])} API</title><style>{_STYLE}</style></head><body>"
        f"<h1>{escape(info['title'])} API <small class=q>{escape(info['version'])}</small></h1>"
        f"<p>{escape(info['description'])}</p>"
        "<p>Authenticate with an API key (<code>Authorization: Bearer ...</code>) or an identity token "
        "(<code>X-Freestyle-Identity-Access-Token</code>). Errors are JSON with <code>code</code> and "
        "<code>message</code>. Every answer has an <code>x-freestyle-trace-id</code> header: search for "
        'it in the server\'s log. The OpenAPI description is at <a href="/openapi.json">/openapi.json</a>. '
        "* marks required fields.</p>"
        f"<nav>{links}</nav>{body}</body></html>"
    )


def _operation(shapes: Schema, method: str, path: str, operation: Schema) -> str:
    given = [
        _row(each["name"], each["schema"], shapes, each.get("required", False), each.get("description", ""))
        for each in operation.get("parameters", ())
        if each["in"] in ("query", "path") or each["name"].lower().startswith("x-")
    ]
    text = escape(operation.get("description") or operation.get("summary", "")).replace("\n\n", "</p><p>")
    return (
        f"<article><h3><span class=m>{method.upper()}</span> <code>{escape(path)}</code></h3><p>{text}</p>"
        f"{_table('', given)}"
        f"{_contents('Body', operation.get('requestBody', {}), shapes)}"
        f"{_contents('Answer', operation['responses'].get('200', {}), shapes)}</article>"
    )


def _contents(title: str, part: Schema, shapes: Schema) -> str:
    """The fields of a JSON body; other bodies are shown by their media type."""
    texts = []
    for media, content in part.get("content", {}).items():
        if media == _JSON:
            texts.append(_table(title, _fields(content.get("schema", {}), shapes)))
        else:
            texts.append(f"<p class=q>{title}: <code>{escape(media)}</code></p>")
    return "".join(texts)


def _table(title: str, rows: list[str]) -> str:
    head = f"<p class=q>{title}</p>" if title else ""
    return f"{head}<table>{''.join(rows)}</table>" if rows else ""


def _shape(shapes: Schema, name: str, shape: Schema) -> str:
    text = escape(shape.get("description", "")).replace("\n\n", "</p><p>")
    return (
        f'<article id="shape-{escape(name)}"><h3><code>{escape(name)}</code></h3><p>{text}</p>'
        f"{_table('', _fields(shape, shapes))}</article>"
    )


def _fields(part: Schema, shapes: Schema) -> list[str]:
    return [
        _row(name, field, shapes, name in each.get("required", ()), field.get("description", ""))
        for each in _alternatives(part, shapes)
        for name, field in each["properties"].items()
    ]


def _alternatives(part: Schema, shapes: Schema) -> Iterator[Schema]:
    if "$ref" in part:
        part = shapes[part["$ref"].rpartition("/")[2]]
    for key in ("anyOf", "oneOf"):
        for each in part.get(key, ()):
            yield from _alternatives(each, shapes)
    if _is_object(part):
        yield part


def _is_object(part: Schema) -> bool:
    return bool(part.get("properties"))


def _row(name: str, part: Schema, shapes: Schema, required: bool, description: str) -> str:
    mark = "*" if required else ""
    return (
        f"<tr><td><code>{escape(name)}{mark}</code></td><td><code>{_type(part, shapes)}</code></td>"
        f"<td>{escape(description)}</td></tr>"
    )


def _type(part: Schema, shapes: Schema) -> str:
    """A type in HTML; objects are links."""
    if "$ref" in part:
        name = part["$ref"].rpartition("/")[2]
        if not _is_object(shapes[name]):
            return _type(shapes[name], shapes)
        return f'<a href="#shape-{escape(name)}">{escape(name)}</a>'
    if "anyOf" in part:
        kinds = [_type(each, shapes) for each in part["anyOf"]]
        return " | ".join(dict.fromkeys(kinds))
    if "enum" in part:
        return escape(" | ".join(str(value) for value in part["enum"]))
    if part.get("type") == "array":
        return f"{_type(part.get('items', {}), shapes)}[]"
    if isinstance(part.get("additionalProperties"), dict):
        return f"{{name: {_type(part['additionalProperties'], shapes)}}}"
    return escape(str(part.get("const") or part.get("type", "any")))
