"""Caddy's configuration as JSON. It is static: mappings are files (see routes.py), not configuration."""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from string import ascii_uppercase
from typing import Any

from stead.addresses import GATEWAY
from stead.edge import pages
from stead.edge.gate import MAX_HELD
from stead.edge.gate_server import (
    ADMIT_PATH,
    ASK_PATH,
    CLIENT_HEADER,
    ERROR_HEADER,
    HOST_HEADER,
    UPSTREAM_HEADER,
)
from stead.settings import Settings

MAX_HEADER_BYTES = 64 << 10
HEADER_TIMEOUT = 15
"""Seconds in which a client must send all headers of a request."""
IDLE_TIMEOUT = 120
"""Seconds that a connection of a client may stay without a request."""
UPSTREAM_IDLE = 20
"""Seconds that an unused connection to a VM is kept. A freed address is not used again before that."""
_DIAL_TIMEOUT = 5
_MAX_UPSTREAM = 256
"""Connections to one port of a VM; further requests wait for one. WebSockets are not counted. Without a bound
a VM that does not answer would take all descriptors of Caddy."""
_MAX_TO_GATE = 2 * MAX_HELD
"""More than requests may wait there, so that there are always connections for short answers."""
_MAX_DEPTH = 10
"""Labels below a preview zone for which the installation's own CA signs."""
_LOOPBACK_NAMES = ("localhost", "127.0.0.1", "::1")
_CA = "stead"
_UPSTREAM = "{stead.upstream}"

Json = dict[str, Any]

_CLOSE: Json = {
    # The client has to connect again, and new connections are limited in front of Caddy. HTTP/3 has no such
    # header: its clients take an answer with one for malformed.
    "match": [{"not": [{"protocol": "http/3"}]}],
    "handle": [{"handler": "headers", "response": {"set": {"Connection": ["close"]}}}],
}
_TOO_MANY: Json = {"status_code": [429]}


@dataclass(frozen=True)
class Descriptors:
    """Numbers of the inherited sockets."""

    https: int
    quic: int | None
    http: int | None
    guests_https: int
    guests_http: int

    @property
    def all(self) -> tuple[int, ...]:
        found = (self.https, self.quic, self.http, self.guests_https, self.guests_http)
        return tuple(number for number in found if number is not None)


@dataclass(frozen=True)
class CertificateFiles:
    certificate: Path
    key: Path


@dataclass(frozen=True)
class EdgePaths:
    """Paths and addresses that Caddy uses."""

    admin: Path
    storage: Path
    log: Path
    routes: Path
    unmapped: Path
    api: Path
    gate: str
    certificates: Sequence[CertificateFiles]
    """Those that the server itself signs or orders."""
    root: Path
    intermediate: Path
    intermediate_key: Path


def caddy_configuration(
    settings: Settings, descriptors: Descriptors, paths: EdgePaths, https_port: int
) -> Json:
    return {
        "admin": {"listen": f"unix/{paths.admin}", "config": {"persist": False}},
        "logging": {"logs": {"default": _log(paths.log)}},
        "storage": {"module": "file_system", "root": str(paths.storage)},
        "apps": {
            "pki": {"certificate_authorities": {_CA: _authority(paths)}},
            "tls": _tls(settings, paths),
            "http": {
                "servers": _servers(settings, descriptors, paths, https_port),
                "grace_period": "2s",
            },
        },
    }


def own_names(settings: Settings) -> list[str]:
    """Host names of the API and of Git."""
    return [*settings.api_names, *settings.git_names, *_LOOPBACK_NAMES]


def _log(path: Path) -> Json:
    return {
        "writer": {"output": "file", "filename": str(path), "roll_size_mb": 10, "roll_keep": 3},
        "level": "WARN",
        # One line for each failed request would let anyone fill the log.
        "exclude": ["http.log.error", "http.handlers.reverse_proxy"],
    }


def _authority(paths: EdgePaths) -> Json:
    return {
        "name": "Stead",
        "install_trust": False,
        "root": {"certificate": str(paths.root), "format": "pem_file"},
        "intermediate": {
            "certificate": str(paths.intermediate),
            "private_key": str(paths.intermediate_key),
            "format": "pem_file",
        },
    }


# Certificates


def _tls(settings: Settings, paths: EdgePaths) -> Json:
    public = list(settings.public_names)
    acme = [_acme(settings)]
    # Names that are deeper in a preview zone than its wildcard reaches.
    deep = ["*." * depth + zone for zone in settings.local_zones for depth in range(2, _MAX_DEPTH + 1)]
    internal = [{"module": "internal", "ca": _CA, "lifetime": "168h"}]
    policies: list[Json] = [
        {"subjects": deep, "on_demand": True, "issuers": internal},
        {"subjects": public, "issuers": acme},
        {"on_demand": True, "issuers": acme},
    ]
    return {
        "certificates": {
            "load_files": [
                {"certificate": str(each.certificate), "key": str(each.key)} for each in paths.certificates
            ],
            "automate": public,
        },
        "automation": {
            "policies": [policy for policy in policies if policy.get("subjects") != []],
            "on_demand": {"permission": {"module": "http", "endpoint": f"http://{paths.gate}{ASK_PATH}"}},
        },
    }


def _acme(settings: Settings) -> Json:
    # Caddy looks whether something listens for challenges; the sockets that it inherited for VMs do.
    challenges = {"bind_host": str(GATEWAY)}
    found: Json = {
        "module": "acme",
        "ca": settings.acme_directory,
        # Blank, not missing: else Caddy looks for an address in its storage, and takes `default`, the folder
        # of an account that is not written yet, for one. ACME servers refuse that.
        "email": settings.acme_email or " ",
        "challenges": challenges,
    }
    if settings.acme_roots:
        found["trusted_roots_pem_files"] = [str(settings.acme_roots)]
    return found


def local_certificates(settings: Settings) -> dict[str, list[str]]:
    """Names of each certificate that the installation's own CA signs, by the name of its file.

    One for own names and one per zone: a client whose trusted root does not have a new zone yet refuses the
    whole certificate that has it.
    """
    own = [name for name in own_names(settings) if name not in settings.public_names]
    return {"local": own} | {zone: [zone, f"*.{zone}"] for zone in settings.local_zones}


# Requests


def _servers(settings: Settings, descriptors: Descriptors, paths: EdgePaths, https_port: int) -> Json:
    listeners = [(f"fd/{descriptors.https}", ["h1", "h2"]), (f"fd/{descriptors.guests_https}", ["h1", "h2"])]
    alternative: list[Json] = []
    if descriptors.quic is not None:
        listeners.append((f"fdgram/{descriptors.quic}", ["h3"]))
        # Caddy does not know the port of an inherited socket.
        alternative = [_header("Alt-Svc", f'h3=":{https_port}"; ma=2592000')]
    names = own_names(settings)
    metrics: Json = {
        "match": [{"host": names, "path": ["/metrics"]}],
        "handle": [{"handler": "static_response", "status_code": 404}],
        "terminal": True,
    }
    closing: Json = {"match": _TOO_MANY, "routes": [_CLOSE, {"handle": [{"handler": "copy_response"}]}]}
    api: Json = {
        "match": [{"host": names}],
        "handle": [*alternative, _proxy(f"unix/{paths.api}") | {"handle_response": [closing]}],
        "terminal": True,
    }
    https = _server(
        [address for address, _ in listeners],
        [
            _canonical_host(),
            *_https_only(settings),
            metrics,
            api,
            _known(paths, alternative),
            *_unmapped(paths, alternative),
            {"handle": [*alternative, _asking_gate(paths)]},
        ],
    )
    https["listen_protocols"] = [protocols for _, protocols in listeners]
    https["tls_connection_policies"] = [{"default_sni": names[0]}]
    https["errors"] = {"routes": _failures(names, paths)}
    found = {"https": https, "guests_http": _redirecting(descriptors.guests_http, 443)}
    if descriptors.http is not None:
        found["http"] = _redirecting(descriptors.http, https_port)
    return found


def _server(listen: Sequence[str], routes: list[Json]) -> Json:
    return {
        "listen": list(listen),
        "routes": routes,
        "automatic_https": {"disable": True},
        "max_header_bytes": MAX_HEADER_BYTES,
        "read_header_timeout": f"{HEADER_TIMEOUT}s",
        "idle_timeout": f"{IDLE_TIMEOUT}s",
        "protocols": ["h1", "h2", "h3"],
    }


def _redirecting(descriptor: int, https_port: int) -> Json:
    port = "" if https_port == 443 else f":{https_port}"
    answer = {
        "handler": "static_response",
        "status_code": 308,
        "headers": {"Location": [f"https://{{http.request.host}}{port}{{http.request.uri}}"]},
    }
    found = _server([f"fd/{descriptor}"], [{"handle": [answer]}])
    found["protocols"] = ["h1"]
    return found


def _header(name: str, value: str) -> Json:
    return {"handler": "headers", "response": {"set": {name: [value]}, "deferred": True}}


def _canonical_host() -> Json:
    """Host names in upper case, or with a dot at the end, become those of the route files."""
    lower = [{"search": letter, "replace": letter.lower()} for letter in ascii_uppercase]
    dot = {"search_regexp": r"\.(:[0-9]*)?$", "replace": "$1"}
    return {
        "match": [{"header_regexp": {"Host": {"pattern": r"[A-Z]|\.(:[0-9]*)?$"}}}],
        "handle": [{"handler": "headers", "request": {"replace": {"Host": [*lower, dot]}}}],
    }


def _unmapped(paths: EdgePaths, before: Iterable[Json]) -> list[Json]:
    """Names that the gate found not to be mapped; the same answers as the gate's."""
    file = {"file": {"root": str(paths.unmapped), "try_files": ["/{http.request.host}"]}}
    refusal = pages.not_mapped("{http.request.host}")
    page = {"header": {"Accept": ["*text/html*"]}}
    return [
        {
            "match": [file | page if as_page else file],
            "handle": [*before, _static(refusal, as_page=as_page)],
            "terminal": True,
        }
        for as_page in (True, False)
    ]


def _static(refusal: pages.Refusal, *, as_page: bool) -> Json:
    body, kind = refusal.body(as_page=as_page)
    headers = [*refusal.headers(), ("content-type", kind)]
    return {
        "handler": "static_response",
        "status_code": refusal.status,
        "headers": {name: [value] for name, value in headers},
        "body": body.decode(),
    }


def _https_only(settings: Settings) -> list[Json]:
    """HSTS on public names of the API and of Git. Local names also lead to the plain port."""
    public = list(settings.public_names)
    header = _header("Strict-Transport-Security", "max-age=31536000")
    return [{"match": [{"host": public}], "handle": [header]}] if public else []


def _known(paths: EdgePaths, before: Iterable[Json]) -> Json:
    """Names with a route file: straight to the VM."""
    pattern = {"root": str(paths.routes), "try_files": ["/{http.request.host}/*"]}
    upstream = {
        "handler": "map",
        "source": "{http.matchers.file.relative}",
        "destinations": [_UPSTREAM],
        "mappings": [{"input_regexp": "^/?[^/]+/([0-9.]+:[0-9]+)$", "outputs": ["${1}"]}],
    }
    return {
        "match": [{"file": pattern}],
        "handle": [*before, upstream, _to_vm(_UPSTREAM)],
        "terminal": True,
    }


def _to_vm(upstream: str) -> Json:
    grpc = {"header": {"Content-Type": ["application/grpc*"]}}
    return {
        "handler": "subroute",
        "routes": [
            {"match": [grpc], "handle": [_proxy(upstream, "h2c")], "terminal": True},
            {"handle": [_proxy(upstream, max_conns_per_host=_MAX_UPSTREAM)]},
        ],
    }


def _proxy(upstream: str, version: str = "1.1", **transport: Json | int) -> Json:
    return {
        "handler": "reverse_proxy",
        "upstreams": [{"dial": upstream}],
        # A client could forge them; Caddy sets X-Forwarded-* itself.
        "headers": {"request": {"delete": ["Forwarded", "X-Real-Ip"]}},
        "transport": {
            "protocol": "http",
            "versions": [version],
            "dial_timeout": f"{_DIAL_TIMEOUT}s",
            # Do not touch `Accept-Encoding`: the VM and the client agree on it.
            "compression": False,
            # No TCP keep-alive: the probes would count as traffic and keep an idle VM awake.
            "keep_alive": {
                "idle_timeout": f"{UPSTREAM_IDLE}s",
                "probe_interval": "-1s",
                "max_idle_conns_per_host": _MAX_UPSTREAM,
            },
            **transport,
        },
    }


def _asking_gate(paths: EdgePaths, error: str = "") -> Json:
    """Ask the gate, then send the unchanged request to the address that it answers with."""
    headers = {
        HOST_HEADER: ["{http.request.host}"],
        ERROR_HEADER: [error],
        CLIENT_HEADER: ["{http.request.remote.host}"],
    }
    unneeded = ["Authorization", "Cookie", "Expect"]
    return {
        "handler": "reverse_proxy",
        "upstreams": [{"dial": paths.gate}],
        "transport": {
            "protocol": "http",
            "max_conns_per_host": _MAX_TO_GATE,
            "keep_alive": {"max_idle_conns_per_host": _MAX_TO_GATE},
        },
        "rewrite": {"method": "GET", "uri": ADMIT_PATH},
        "headers": {"request": {"set": headers, "delete": unneeded}},
        "handle_response": [
            {
                "match": {"status_code": [200]},
                "routes": [{"handle": [_to_vm(f"{{http.reverse_proxy.header.{UPSTREAM_HEADER}}}")]}],
            },
            {
                "match": _TOO_MANY,
                "routes": [_CLOSE, {"handle": [_static(pages.too_many(), as_page=False)]}],
            },
        ],
    }


def _failures(names: list[str], paths: EdgePaths) -> list[Json]:
    failed = {"expression": "{http.error.status_code} in [502, 503, 504]"}
    restarting = {
        "handler": "static_response",
        "status_code": 502,
        "headers": {"Content-Type": ["application/json"], "Retry-After": ["2"]},
        "body": '{"code":"SERVICE_UNAVAILABLE","error":"SERVICE_UNAVAILABLE",'
        '"message":"the API does not answer: try again","description":"the API does not answer: try again"}',
    }
    return [
        {"match": [{"host": names, **failed}], "handle": [restarting], "terminal": True},
        {"match": [failed], "handle": [_asking_gate(paths, "{http.error.message}")]},
    ]
