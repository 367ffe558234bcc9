"""The paths of the OpenAI port and their actions."""

from __future__ import annotations

from dataclasses import dataclass
from urllib.parse import unquote

GET = frozenset(("GET",))
POST = frozenset(("POST",))


@dataclass(frozen=True, slots=True)
class OpenAiRoute:
    """A matched path: the action, its methods and its category, and the name in the path."""

    action: str
    methods: frozenset[str]
    category: str
    name: str = ""


_FIXED = {
    "/v1/models": OpenAiRoute("models", GET, "metadata"),
    "/v1/completions": OpenAiRoute("completions", POST, "inference"),
    "/v1/chat/completions": OpenAiRoute("chat", POST, "inference"),
    "/v1/responses": OpenAiRoute("responses", POST, "inference"),
    "/v1/embeddings": OpenAiRoute("embeddings", POST, "inference"),
    "/tokenize": OpenAiRoute("tokenize", POST, "inference"),
    "/detokenize": OpenAiRoute("detokenize", POST, "inference"),
    # The page holds no data and needs no key: the requests of the page carry the key.
    "/chat": OpenAiRoute("page", GET, "health"),
    "/health": OpenAiRoute("ready", GET, "health"),
    "/health/live": OpenAiRoute("live", GET, "health"),
    "/health/ready": OpenAiRoute("ready", GET, "health"),
    "/version": OpenAiRoute("version", GET, "metadata"),
    "/metrics": OpenAiRoute("metrics", GET, "statistics"),
}

_MODELS = "/v1/models/"


def match(path: str) -> OpenAiRoute | None:
    """The route of a path, compared exactly; None if there is none."""
    found = _FIXED.get(path)
    if found is not None:
        return found
    if not path.startswith(_MODELS):
        return None
    name = path.removeprefix(_MODELS)
    for action in ("load", "unload"):
        if name.endswith(f"/{action}"):
            name = name.removesuffix(f"/{action}")
            return OpenAiRoute(action, POST, "model-repository", unquote(name))
    return OpenAiRoute("model", GET, "metadata", unquote(name)) if name else None
