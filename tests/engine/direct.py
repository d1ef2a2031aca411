"""Sends both legs of a request directly to the engines, with grants made here without a proxy."""

from __future__ import annotations

import time
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any

import msgspec
from asking import TIMEOUT_SECONDS, Body, Record, ask, post
from engines import Engine

from vllm_disagg.fleet import grants, keys
from vllm_disagg.protocol import peers


class Legs:
    """A prefill engine, a decode engine, and the fleet's key."""

    def __init__(
        self, key_file: str, prefill: Engine, decode: Engine, *, p_rank: int = 0, d_rank: int = 0
    ) -> None:
        """Probes both. `p_rank`, `d_rank`: of engines with data parallel ranks."""
        self.key = keys.load(key_file)
        self.prefill = prefill
        self.decode = decode
        self.p_url = prefill.urls[p_rank]
        self.d_url = decode.urls[d_rank]
        self._probed_at = time.monotonic()
        self.p = probe(self.key, self.p_url)
        self.d = probe(self.key, self.d_url)
        assert not peers.difference(self.p.layout, self.d.layout)
        self._pool = ThreadPoolExecutor(64)

    def mint(self, leg: str, transfer: str, **more: object) -> str:
        """Returns a grant for one leg, at the engine of that leg."""
        fields: dict[str, object] = {
            "engine": self.p.incarnation if leg == "prefill" else self.d.incarnation
        }
        if leg == "decode":
            fields["sources"] = self.p.workers
        fields["until"] = self.until(leg)
        return grants.mint(self.key, grants.Grant(2, leg, transfer, **{**fields, **more}))  # type: ignore[arg-type]

    def until(self, leg: str, seconds: float = 300.0) -> float:
        """Returns the time after these seconds, by the clock of the leg's engine."""
        engine = self.p if leg == "prefill" else self.d
        return engine.clock + time.monotonic() - self._probed_at + seconds

    def send_prefill(self, body: Body, transfer: str, grant: str = "") -> Future[Record]:
        """Starts a prefill leg; `grant`: another one than `mint` makes."""
        one = {**body, "max_tokens": 1, **with_grant(grant or self.mint("prefill", transfer))}
        return self._pool.submit(ask, self.p_url, one)

    def send_decode(self, body: Body, transfer: str, **more: object) -> Future[Record]:
        """Starts a decode leg; `more`: fields of its grant."""
        return self._pool.submit(
            ask, self.d_url, {**body, **with_grant(self.mint("decode", transfer, **more))}
        )

    def ask(self, body: Body) -> Record:
        """Runs a request as the proxy does: both legs at the same time."""
        transfer = grants.new_transfer()
        prefill = self.send_prefill(body, transfer)
        decode = self.send_decode(body, transfer)
        assert prefill.result().status == 200
        return decode.result()

    def close(self) -> None:
        """Waits for all legs."""
        self._pool.shutdown()


def probe(key: keys.FleetKey, url: str) -> peers.EngineInfo:
    """Returns an engine's description; a first probe finds the incarnation for the second."""
    card = _probe(key, url, "", 0.0)
    assert not card.keys() - {"incarnation", "clock", "rank"}, card
    found = _probe(key, url, card["incarnation"], card["clock"] + 60.0)
    return msgspec.convert(found, peers.EngineInfo)


def _probe(key: keys.FleetKey, url: str, name: str, until: float) -> dict[str, Any]:
    grant = grants.mint(key, grants.Grant(2, "probe", grants.new_transfer(), name, until=until))
    asked = {"model": "tiny", "prompt": "x", "max_tokens": 1, **with_grant(grant)}
    _, answer = post(url, asked, "/v1/completions", TIMEOUT_SECONDS)
    return dict(answer["kv_transfer_params"][grants.ANSWER_KEY])


def with_grant(grant: object) -> Body:
    """Returns the field of a request that carries a grant."""
    return {"kv_transfer_params": {grants.REQUEST_KEY: grant}}
