"""vLLM's three steps through the proxy: render a prompt, generate tokens, turn them into text."""

from __future__ import annotations

import http.client
import json
from collections.abc import Iterator
from typing import Any

import pytest
from asking import english
from conftest import Machine
from engines import Engine, Proxy, wait

try:
    from vllm.entrypoints.common import cli_args  # as of vLLM 0.33
except ImportError:
    from vllm.entrypoints.launchers import cli_args

FLAG = "--enable-scale-out"

pytestmark = [
    pytest.mark.wide,
    pytest.mark.skipif(
        "enable_scale_out" not in vars(cli_args.BaseFrontendArgs), reason=f"no {FLAG}"
    ),
]


class Rendering:
    """A pair with these endpoints, and its proxy."""

    def __init__(self, machine: Machine) -> None:
        self.prefill = Engine("rendering-P", machine.folder, FLAG, role="kv_producer", cpu="0")
        self.decode = Engine("rendering-D", machine.folder, FLAG, role="kv_consumer", cpu="1")
        self.proxy = Proxy(machine.folder, self.prefill, self.decode)
        self.prefill.patience = self.decode.patience = 300.0  # on a machine with much other work
        machine.start(self.prefill, self.decode)
        machine.start(self.proxy)


@pytest.fixture(scope="module")
def pair(machine: Machine) -> Iterator[Rendering]:
    machine.stop()  # all others, for the memory's sake
    yield Rendering(machine)
    machine.stop()


def post(url: str, path: str, body: object) -> Any:
    connection = http.client.HTTPConnection(url.removeprefix("http://"), timeout=60)
    try:
        connection.request("POST", path, json.dumps(body), {"content-type": "application/json"})
        answer = connection.getresponse()
        text = answer.read()
        assert answer.status == 200, f"{path}: {answer.status} {text!r:.500}"
        return json.loads(text)
    finally:
        connection.close()


def in_steps(url: str, path: str, asked: dict[str, object]) -> list[str]:
    """Returns the texts of the three steps."""
    rendered = post(url, f"{path}/render", asked)
    parts = rendered if isinstance(rendered, list) else [rendered]
    assert all(part["kv_transfer_params"] is None for part in parts)
    generated = [post(url, "/inference/v1/generate", part) for part in parts]
    if path == "/v1/completions":
        given: dict[str, object] = {"generate_responses": generated, "completion_request": asked}
    else:
        given = {"generate_response": generated[0], "chat_request": asked}
    choices = post(url, f"{path}/derender", {"model": "tiny", **given})["choices"]
    return [
        choice["text"] if "text" in choice else choice["message"]["content"] for choice in choices
    ]


@pytest.mark.parametrize("path", ["/v1/completions", "/v1/chat/completions"])
def test_in_three_steps(pair: Rendering, path: str) -> None:
    before = pair.decode.received
    for at in range(4):
        text = english(900 + 300 * at, f"rendered {path} {at}")
        prompt = (
            {"prompt": text}
            if path == "/v1/completions"
            else {"messages": [{"role": "user", "content": text}]}
        )
        asked = {"model": "tiny", "max_tokens": 24, "temperature": 0, **prompt}
        ours = in_steps(pair.proxy.url, path, asked)
        assert ours == in_steps(pair.decode.url, path, asked) and ours[0]
    wait("KV moves", lambda: pair.decode.received > before)
