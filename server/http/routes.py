"""The paths of the HTTP protocol and their actions."""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache
from urllib.parse import unquote

from trimaran.server.shared_memory.region_specs import Kind

GET = frozenset(("GET",))
POST = frozenset(("POST",))
BOTH = GET | POST


@dataclass(frozen=True, slots=True)
class Route:
    """A matched path: the action, its methods, and the names found in the path."""

    action: str
    methods: frozenset[str]
    name: str = ""
    version: str = ""
    kind: Kind = "system"
    """The kind of shared memory that the path names."""

    @property
    def category(self) -> str:
        """The category of access control that the action belongs to."""
        return _CATEGORIES[self.action]


_CATEGORIES = {
    "live": "health",
    "ready": "health",
    "model_ready": "health",
    "server_metadata": "metadata",
    "model_metadata": "metadata",
    "model_config": "model-config",
    "statistics": "statistics",
    "infer": "inference",
    "generate": "inference",
    "generate_stream": "inference",
    "logging": "logging",
    "trace": "trace",
    "index": "model-repository",
    "load": "model-repository",
    "unload": "model-repository",
    "named_repository": "model-repository",
    "region_register": "shared-memory",
    "region_status": "shared-memory",
    "region_unregister": "shared-memory",
}

_SHORT_PATH, _NUM_KEPT = 256, 1024
"""Characters of a path whose route is kept, and the number of these paths."""

_FIXED = {
    "/v2": Route("server_metadata", GET),
    "/v2/health/live": Route("live", GET),
    "/v2/health/ready": Route("ready", GET),
    "/v2/models/stats": Route("statistics", GET),
    "/v2/logging": Route("logging", BOTH),
    "/v2/trace/setting": Route("trace", BOTH),
    "/v2/repository/index": Route("index", POST),
}

_OF_MODEL = {
    "": ("model_metadata", GET),
    "ready": ("model_ready", GET),
    "config": ("model_config", GET),
    "stats": ("statistics", GET),
    "infer": ("infer", POST),
    "generate": ("generate", POST),
    "generate_stream": ("generate_stream", POST),
}

_SHARED_MEMORY: dict[str, Kind] = {"systemsharedmemory": "system", "cudasharedmemory": "cuda"}


def path_of(target: str) -> str:
    """The path of a request line; clients of proxies send a whole URL."""
    if target.startswith(("http://", "https://")):
        target = "/" + target.split("/", 3)[3] if target.count("/") > 2 else "/"
    return target.partition("?")[0]


def match(path: str) -> Route | None:
    """The route of a path, compared exactly; None if there is none."""
    return _match_short(path) if len(path) <= _SHORT_PATH else _match(path)


def _match(path: str) -> Route | None:
    fixed = _FIXED.get(path)
    if fixed is not None:
        return fixed
    empty, *parts = path.split("/")
    if empty or len(parts) < 3 or parts[0] != "v2":
        return None
    # An empty name is invalid, and so is a path that ends in a slash.
    if "" in parts:
        return None
    if parts[1] == "models":
        return _model_route(unquote(parts[2]), parts[3:])
    if parts[1] == "repository":
        return _repository_route([unquote(part) for part in parts[2:]])
    if parts[1] in _SHARED_MEMORY:
        return _shared_memory_route(
            _SHARED_MEMORY[parts[1]], [unquote(part) for part in parts[2:]]
        )
    return None


# Clients repeat a few paths; unknown ones take little memory, because they are short.
_match_short = lru_cache(maxsize=_NUM_KEPT)(_match)


def _model_route(name: str, rest: list[str]) -> Route | None:
    if rest == ["trace", "setting"]:
        return Route("trace", BOTH, name)
    version = ""
    if len(rest) >= 2 and rest[0] == "versions":
        version, rest = rest[1], rest[2:]
        if not (version.isascii() and version.isdigit()):
            return None
    found = _OF_MODEL.get("/".join(rest))
    return Route(*found, name, version) if found else None


def _repository_route(rest: list[str]) -> Route | None:
    if len(rest) == 2 and rest[1] == "index":
        return Route("index", POST)
    if len(rest) == 3 and rest[0] == "models" and rest[2] in ("load", "unload"):
        return Route(rest[2], POST, rest[1])
    if len(rest) == 4 and rest[1] == "models" and rest[3] in ("load", "unload"):
        return Route("named_repository", POST, rest[2])
    return None


def _shared_memory_route(kind: Kind, rest: list[str]) -> Route | None:
    name = ""
    if len(rest) == 3 and rest[0] == "region":
        name, rest = rest[1], rest[2:]
        if rest == ["register"]:
            return Route("region_register", POST, name, kind=kind)
    if rest == ["status"]:
        return Route("region_status", GET, name, kind=kind)
    if rest == ["unregister"]:
        return Route("region_unregister", POST, name, kind=kind)
    return None
