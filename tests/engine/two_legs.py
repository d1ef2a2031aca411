"""The standard handshake of P/D routers, as a client: P's leg, then D's leg with P's parameters."""

from __future__ import annotations

import http.client
import json
from typing import Any

from asking import TIMEOUT_SECONDS, Body, Record, ask

from vllm_disagg.fleet import handovers

COMPLETIONS = "/v1/completions"
PREFILL_PARAMS = {
    "do_remote_decode": True,
    "do_remote_prefill": False,
    "remote_engine_id": None,
    "remote_block_ids": None,
    "remote_host": None,
    "remote_port": None,
}
Params = dict[str, Any]


def prefill_body(asked: Body) -> Body:
    """Returns the body of a request's prefill leg, with the changes that routers make."""
    leg = {**asked, "stream": False, "max_tokens": 1, "kv_transfer_params": dict(PREFILL_PARAMS)}
    for name in ("stream_options", "min_tokens"):
        leg.pop(name, None)
    if "max_completion_tokens" in leg:
        leg["max_completion_tokens"] = 1
    return leg


def send_prefill(url: str, asked: Body, path: str = COMPLETIONS) -> Params | None:
    """Sends a prefill leg; returns the parameters of its answer."""
    address = url.removeprefix("http://")
    connection = http.client.HTTPConnection(address, timeout=TIMEOUT_SECONDS)
    try:
        leg = json.dumps(prefill_body(asked))
        connection.request("POST", path, leg, {"content-type": "application/json"})
        answer = connection.getresponse()
        text = answer.read()
        assert answer.status == 200, text
        params: Params | None = json.loads(text).get("kv_transfer_params")
        return params
    finally:
        connection.close()


def send_decode(
    url: str, asked: Body, params: object, path: str = COMPLETIONS, timeout: float = TIMEOUT_SECONDS
) -> Record:
    """Sends a decode leg with the parameters, verbatim."""
    return ask(url, {**asked, "kv_transfer_params": params}, path, timeout)


def ask_both(prefill: str, decode: str, asked: Body, path: str = COMPLETIONS) -> Record:
    """Runs a request by both legs; fails unless P's answer has parameters."""
    params = send_prefill(prefill, asked, path)
    assert params is not None and handovers.TOKEN_KEY in params, params
    return send_decode(decode, asked, params, path)
