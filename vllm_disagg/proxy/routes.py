"""Every path that clients may ask for, and how it is served: the routes of vLLM 0.32, in one table.

    generate   both legs, where the body allows it (`dialects.py`)
    forward    one instance answers, another one if it dies first; bodies are checked for what only the proxy may send
    look up    decode instances are asked in turn until one knows the id in the path or in the body
    models     one instance answers, or one of each kind, if they serve different models
    all        every instance must do it
    own        the proxy answers

What is not here is a 404 and reaches no engine: vLLM's development and administration routes (/sleep, /wake_up,
/pause, /collective_rpc, /reset_prefix_cache, /update_weights, /scale_elastic_ep, /start_profile, /server_info ...),
/invocations, which would carry any of the bodies below past their checks, /inference/v1/abort_requests, with which
clients could abort each other's requests (to abort, close the connection), and /v1/realtime, which is a WebSocket.
"""

from __future__ import annotations

from typing import Literal

from .dialects import DIALECTS

How = Literal["generate", "forward", "look up", "models", "all", "own"]

ROUTES: dict[str, tuple[tuple[str, ...], How]] = {
    **dict.fromkeys(DIALECTS, (("POST",), "generate")),
    **dict.fromkeys(
        (
            # generation whose bodies or answers are not made for two legs
            "/v1/chat/completions/batch",
            "/cohere/v2/chat",
            # texts and tokens
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
            # sound
            "/v1/audio/transcriptions",
            "/v1/audio/translations",
        ),
        (("POST",), "forward"),
    ),
    "/v1/models": (("GET",), "models"),
    "/version": (("GET",), "forward"),
    "/tokenizer_info": (("GET",), "forward"),
    "/v1/load_lora_adapter": (("POST",), "all"),
    "/v1/unload_lora_adapter": (("POST",), "all"),
    "/health": (("GET",), "own"),
    "/ping": (("GET", "POST"), "own"),
    "/readiness": (("GET",), "own"),
    "/metrics": (("GET",), "own"),
    "/disagg/instances": (("GET",), "own"),
}

UNGUARDED = frozenset(("/health", "/ping", "/readiness", "/metrics", "/version"))

RESPONSES = "/v1/responses/"


def find(path: str) -> tuple[tuple[str, ...], How] | None:
    """The methods of a path and how it is served; None when it is not."""
    if path in ROUTES:
        return ROUTES[path]
    name, _, rest = path.removeprefix(RESPONSES).partition("/")
    if path.startswith(RESPONSES) and name and name.isascii() and name.replace("_", "").replace("-", "").isalnum():
        if not rest and "/" not in path[len(RESPONSES) :]:
            return ("GET",), "look up"
        if rest == "cancel":
            return ("POST",), "look up"
    return None


def is_form(path: str) -> bool:
    """Whether its bodies are forms, not JSON."""
    return path.startswith("/v1/audio/")


def guarded(path: str) -> bool:
    """Whether a client needs a key.  vLLM guards only some prefixes; here it is all that costs an engine something."""
    return path not in UNGUARDED
