"""Lists the paths that the proxy serves, and how: the routes of vLLM 0.33 in one table.

    generate   both legs, if the body allows that (`endpoint_schema.py`)
    forward    one instance answers, another one if the first dies before its answer;
               bodies must not contain parameters that only the proxy may send
    look up    decode instances are asked in turn until one has the id in the path or in the body;
               none has it only if all of them say so
    models     one instance answers, or one of each kind if they serve different models;
               a kind of which none answers is left out
    session    a WebSocket, connected to one instance (`websocket.py`)
    all        every instance must do it
    own        the proxy answers

Any other path is answered with 404 and reaches no engine. `REFUSED` has the reason for routes of
vLLM that are not served.
"""

from __future__ import annotations

import re
from typing import Literal
from urllib.parse import unquote

from .endpoint_schema import SCHEMAS

How = Literal["generate", "forward", "look up", "models", "session", "all", "own"]

# Between texts and tokens: of no engine step.
_TEXTS = (
    "/tokenize",
    "/detokenize",
    "/v1/messages/count_tokens",
    "/v1/completions/render",
    "/v1/chat/completions/render",
    "/v1/responses/render",
    "/v1/messages/render",
    "/cohere/v2/chat/render",
    "/v1/completions/derender",
    "/v1/chat/completions/derender",
)

ROUTES: dict[str, tuple[tuple[str, ...], How]] = {
    **dict.fromkeys(SCHEMAS, (("POST",), "generate")),
    **dict.fromkeys(
        (
            # generation whose bodies or answers are not made for two legs
            "/v1/chat/completions/batch",
            "/cohere/v2/chat",
            *_TEXTS,
            # models that do not generate
            "/v1/embeddings",
            "/v2/embed",
            "/pooling",
            "/classify",
            "/score",
            "/v1/score",
            "/rerank",
            "/v1/rerank",
            "/v2/rerank",
            "/generative_scoring",
            "/v1/systemone",
            "/v1/decisions",
            # sound
            "/v1/audio/transcriptions",
            "/v1/audio/translations",
        ),
        (("POST",), "forward"),
    ),
    "/v1/models": (("GET",), "models"),
    "/v1/realtime": (("GET",), "session"),
    "/version": (("GET",), "forward"),
    "/tokenizer_info": (("GET",), "forward"),
    "/v1/load_lora_adapter": (("POST",), "all"),
    "/v1/unload_lora_adapter": (("POST",), "all"),
    "/adapters": (("POST",), "all"),  # SageMaker's names for both, which vLLM's app has too
    "/health": (("GET", "HEAD"), "own"),
    "/ping": (("GET", "HEAD", "POST"), "own"),
    "/readiness": (("GET", "HEAD"), "own"),
    "/metrics": (("GET", "HEAD"), "own"),
    "/load": (("GET", "HEAD"), "own"),
    "/disagg/instances": (("GET",), "own"),
    "/disagg/status": (("GET",), "own"),
    "/disagg/status/stream": (("GET",), "own"),
    "/disagg": (("GET", "HEAD"), "own"),  # the status page, also as /disagg/
}

# Guarded by the admin API itself (`requests/admin.py`).
FLEET_VIEWS = frozenset(("/disagg/instances", "/disagg/status", "/disagg/status/stream"))

# Paths whose answers are generated; only these have latencies and count as goodput.
GENERATING = frozenset((*SCHEMAS, "/v1/chat/completions/batch", "/cohere/v2/chat"))

# Of forwarded requests: vLLM's API server answers these alone, whatever its engine does.
_WITHOUT_ENGINE = frozenset((*_TEXTS, "/version", "/tokenizer_info"))

_ONE = "is about one engine: ask that instance itself"
_DOCS = "describes one engine's own routes: ask that instance itself"
_ABORT = "would let clients abort each other's requests: to abort yours, close its connection"
# Routes of vLLM 0.33 that clients of a proxy may not use, and the reason.
REFUSED = {
    **dict.fromkeys(
        (
            # development and administration
            "/sleep",
            "/wake_up",
            "/is_sleeping",
            "/release_kv_cache_memory",
            "/collective_rpc",
            "/server_info",
            "/reset_prefix_cache",
            "/reset_mm_cache",
            "/reset_encoder_cache",
            "/start_profile",
            "/stop_profile",
            "/scale_elastic_ep",
            "/is_scaling_elastic_ep",
            "/fault_tolerance/apply",
            "/fault_tolerance/status",
            "/kv_event_sources",
            # weights, for training
            "/pause",
            "/resume",
            "/is_paused",
            "/init_weight_transfer_engine",
            "/shutdown_weight_transfer_engine",
            "/start_weight_update",
            "/start_draft_weight_update",
            "/update_weights",
            "/finish_weight_update",
            "/update_weight_version",
            "/weight_info",
            "/weight_checker",
            "/get_world_size",
        ),
        _ONE,
    ),
    **dict.fromkeys(("/docs", "/docs/oauth2-redirect", "/redoc", "/openapi.json"), _DOCS),
    **dict.fromkeys(("/abort_requests", "/inference/v1/abort_requests"), _ABORT),
    "/invocations": (
        "carries any endpoint's body past its checks: ask that endpoint by its own path"
    ),
}

STATUS_PAGE = "/disagg"  # holds no data; it asks its user for the key of the data

# Paths without a key; but for the page they are as in vLLM.
UNGUARDED = frozenset(
    ("/health", "/ping", "/readiness", "/metrics", "/version", "/load", STATUS_PAGE)
)

RESPONSES = "/v1/responses/"
ADAPTERS = "/adapters/"
OTHER = "other"  # the template of all paths that are not served
# Clients may choose these ids. "." and ".." are parts of a path, as an engine reads it.
_RESPONSE_ID = re.compile(r"(?!\.\.?$)[A-Za-z0-9_.:~-]+")
_ADAPTER = re.compile(r"[A-Za-z0-9_:-][A-Za-z0-9_.:-]*")


def find(path: str) -> tuple[tuple[str, ...], How] | None:
    """Returns a path's methods and how it is served; None if it is not served."""
    if path in ROUTES:
        return ROUTES[path]
    return _BY_TEMPLATE.get(template(path))


_BY_TEMPLATE: dict[str, tuple[tuple[str, ...], How]] = {
    "/v1/responses/{id}": (("GET",), "look up"),
    "/v1/responses/{id}/cancel": (("POST",), "look up"),
    "/adapters/{name}": (("DELETE",), "all"),
}


def needs_engine(path: str) -> bool:
    """Returns whether the answer to a forwarded request shows that the engine works."""
    return path not in _WITHOUT_ENGINE and (find(path) or ((), ""))[1] in ("forward", "session")


def template(path: str) -> str:
    """Returns a path without the parts that clients choose, for labels of metrics."""
    if path in ROUTES:
        return path
    if path.startswith(RESPONSES):
        name, slash, rest = path[len(RESPONSES) :].partition("/")
        if _RESPONSE_ID.fullmatch(unquote(name)) and (rest == "cancel" or not slash):
            return "/v1/responses/{id}/cancel" if slash else "/v1/responses/{id}"
    if path.startswith(ADAPTERS) and _ADAPTER.fullmatch(path, len(ADAPTERS)):
        return "/adapters/{name}"
    return OTHER


def is_form(path: str) -> bool:
    """Returns whether a path's bodies are forms, not JSON."""
    return path.startswith("/v1/audio/")


def guarded(path: str) -> bool:
    """Returns whether a client needs a key for a path.

    vLLM guards only some prefixes. The proxy guards every path that takes an engine's time.
    """
    return path not in UNGUARDED and path not in FLEET_VIEWS
