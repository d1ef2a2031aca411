"""Both legs of a request sent straight to the engines, with grants made here: what only a proxy
does otherwise.
"""

from __future__ import annotations

import http.client
import json
import time
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any

import msgspec
from asking import TIMEOUT, Body, Record, ask
from engines import Engine

from vllm_disagg.fleet import grants, keys
from vllm_disagg.protocol import peers


class Legs:
    """A prefill engine, a decode engine, and the fleet's key."""

    def __init__(self, key_file: str, prefill: Engine, decode: Engine) -> None:
        self.key = keys.load(key_file)
        self.prefill, self.decode = prefill, decode
        self._began = time.monotonic()
        self.p, self.d = probe(self.key, prefill), probe(self.key, decode)
        assert not peers.difference(self.p.layout, self.d.layout)
        self._pool = ThreadPoolExecutor(64)

    def mint(self, leg: str, transfer: str, **more: object) -> str:
        """A grant for one of our two engines."""
        fields: dict[str, object] = {
            "engine": self.p.incarnation if leg == "prefill" else self.d.incarnation
        }
        if leg == "decode":
            fields["sources"] = self.p.workers
        fields["until"] = self.until(leg)
        return grants.mint(self.key, grants.Grant(2, leg, transfer, **{**fields, **more}))  # type: ignore[arg-type]

    def until(self, leg: str, seconds: float = 300.0) -> float:
        """By the clock of the engine of a leg."""
        return (
            (self.p if leg == "prefill" else self.d).clock
            + time.monotonic()
            - self._began
            + seconds
        )

    def send_prefill(self, body: Body, transfer: str, grant: str = "") -> Future[Record]:
        one = {**body, "max_tokens": 1, **with_grant(grant or self.mint("prefill", transfer))}
        return self._pool.submit(ask, self.prefill.url, one)

    def send_decode(self, body: Body, transfer: str, **more: object) -> Future[Record]:
        return self._pool.submit(
            ask, self.decode.url, {**body, **with_grant(self.mint("decode", transfer, **more))}
        )

    def ask(self, body: Body) -> Record:
        """A request as the proxy runs it."""
        transfer = grants.new_transfer()
        prefill, decode = self.send_prefill(body, transfer), self.send_decode(body, transfer)
        assert prefill.result().status == 200
        return decode.result()

    def close(self) -> None:
        self._pool.shutdown()


def probe(key: keys.FleetKey, engine: Engine) -> peers.EngineInfo:
    """What an engine says of itself: first only what the second probe must name."""
    card = _probe(key, engine, "", 0.0)
    assert not card.keys() - {"incarnation", "clock", "rank"}, card
    return msgspec.convert(
        _probe(key, engine, card["incarnation"], card["clock"] + 60.0), peers.EngineInfo
    )


def _probe(key: keys.FleetKey, engine: Engine, name: str, until: float) -> dict[str, Any]:
    grant = grants.mint(key, grants.Grant(2, "probe", grants.new_transfer(), name, until=until))
    connection = http.client.HTTPConnection("127.0.0.1", engine.port, timeout=TIMEOUT)
    asked = {"model": "tiny", "prompt": "x", "max_tokens": 1, **with_grant(grant)}
    connection.request(
        "POST", "/v1/completions", json.dumps(asked), {"content-type": "application/json"}
    )
    answer = json.loads(connection.getresponse().read())
    connection.close()
    return dict(answer["kv_transfer_params"][grants.ANSWER_KEY])


def with_grant(grant: object) -> Body:
    return {"kv_transfer_params": {grants.REQUEST_KEY: grant}}
