"""A minimal P/D application of Ray Serve, in front of two engines, until a signal ends it.

    python ray_pd_app.py PORT PREFILL_URL DECODE_URL

Its two legs are those of Ray's own P/D server. The Python needs `ray[serve]` and `aiohttp`.
"""

# No annotations of the future: FastAPI reads those of this class's methods as they are.
import os
import signal
import sys
import threading

import aiohttp
import ray
from fastapi import FastAPI, Request, Response
from fastapi.responses import StreamingResponse
from ray import serve

app = FastAPI()
NULLS = ("remote_engine_id", "remote_block_ids", "remote_host", "remote_port")
PREFILL_PARAMS = {
    "do_remote_decode": True,
    "do_remote_prefill": False,
    **dict.fromkeys(NULLS),
}


@serve.deployment(max_ongoing_requests=256)
@serve.ingress(app)
class TwoLegs:
    """Sends each request to P, then with P's parameters to D."""

    def __init__(self, prefill: str, decode: str) -> None:
        """`prefill`, `decode`: the URLs of the engines."""
        self._prefill = prefill
        self._decode = decode
        self._session = aiohttp.ClientSession(timeout=aiohttp.ClientTimeout(total=600))

    @app.get("/health")
    async def health(self) -> str:
        return "ok"

    @app.post("/v1/{path:path}")
    async def serve_both(self, path: str, request: Request) -> Response:
        asked = await request.json()
        leg = {**asked, "stream": False, "max_tokens": 1, "kv_transfer_params": PREFILL_PARAMS}
        leg.pop("stream_options", None)
        leg.pop("min_tokens", None)
        if "max_completion_tokens" in leg:
            leg["max_completion_tokens"] = 1
        async with self._session.post(f"{self._prefill}/v1/{path}", json=leg) as answer:
            if answer.status != 200:
                return Response(await answer.read(), answer.status)
            params = (await answer.json()).get("kv_transfer_params")
        leg = {**asked, "kv_transfer_params": params}
        answer = await self._session.post(f"{self._decode}/v1/{path}", json=leg)
        kind = answer.headers.get("content-type")
        return StreamingResponse(answer.content.iter_any(), answer.status, media_type=kind)


def main() -> None:
    port, prefill, decode = sys.argv[1:]
    os.environ["RAY_USAGE_STATS_ENABLED"] = "0"
    ray.init(num_cpus=2, include_dashboard=False, log_to_driver=True)
    serve.start(http_options={"host": "127.0.0.1", "port": int(port)})
    serve.run(TwoLegs.bind(prefill, decode))
    ended = threading.Event()
    signal.signal(signal.SIGTERM, lambda *_: ended.set())  # Ray has set a handler of its own
    ended.wait()
    serve.shutdown()
    ray.shutdown()


if __name__ == "__main__":
    main()
