"""What a proxy costs: ours beside vllm-router in front of the same scripted instances
(`scripted.py`), in one run. There are two P and two D, so that ours keeps what a stream said, for
the case that its D dies.

    python benchmarks/proxy_cost.py --router PATH [--rounds N] [--save NAME] [--python PATH]
    python benchmarks/proxy_cost.py --streams 10000
    python benchmarks/proxy_cost.py --viewer [--rounds N]
    python benchmarks/proxy_cost.py --long-prompts 150 [--rounds N]

Each round measures, each figure of one proxy right after the other's: CPU of a P/D request with a
body of 200 B, 16 KB and 400 KB (8 clients, each with one request at a time); CPU of a streamed
token (64 streams of 300 tokens in steps of 10 ms, the requests' own cost included); the latency
that the proxy adds to a request of 200 B (one at a time, minus the median of the two legs asked
directly, together for ours and one after the other for the router, as each of them does). A proxy
has the last core to itself, all else shares the others. CPU is user and system time of all threads,
from /proc/PID/stat. Before the rounds: memory at rest, with 1 and with 1,000 open streams. Figures
are medians of the rounds. The last line is one JSON object; its ratios ours/router are medians of
the rounds' ratios, because the machine may change from one round to the next.

`--python PATH`: ours a second time in the same rounds, by that interpreter, which must have this
project's packages.

`--streams N`: N streams at once through one process of ours; each must be whole.

`--viewer`: CPU of a P/D request of 200 B through ours while one viewer has the status page's feed
open, beside no viewer, in turn; and the CPU of a viewer of a proxy without requests.

`--long-prompts N`: TTFT of streams with bodies of 220 KB, from N clients with one request each,
through ours and through the router, minus the median of the same load on D alone.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import resource
import signal
import statistics
import sys
import time
import urllib.request
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, nullcontext
from pathlib import Path

import uvloop
from running_proxies import CORES, Proxy, proxies
from scripted import Client, body, request

SIZES = {"200b": (200, 3000), "16k": (16_384, 2000), "400k": (409_600, 320)}  # bytes, requests
CLIENTS = 8
STREAMS = 64
TOKENS = 300
STEP = 10
LATENCIES = 300
VIEWED_REQUESTS = 15_000  # for seconds: one event a second, and CPU is counted in 10 ms
IDLE_SECONDS = 4
LONG_BYTES = 220_000
LONG_TOKENS, LONG_STEP = 20, 100  # tokens of an answer; milliseconds of a step
LONG_REQUESTS = 5  # of each client and round


async def requests(port: int, data: bytes, count: int) -> None:
    """`count` requests from a few clients, each with one at a time."""
    left = count

    async def run() -> None:
        nonlocal left
        client = await Client.connect("127.0.0.1", port)
        while left > 0:
            left -= 1
            if not await client.ask(data):
                raise SystemExit("a request failed")
        client.close()

    await asyncio.gather(*(run() for _ in range(CLIENTS)))


async def open_streams(
    port: int, count: int, data: bytes, at_once: int
) -> tuple[list[Client], list[asyncio.Future[bool]]]:
    """`count` streams, all open and begun; and what tells their ends."""
    clients: list[Client] = []
    ends: list[asyncio.Future[bool]] = []
    room = asyncio.Semaphore(at_once)

    async def run() -> None:
        async with room:
            client = await Client.connect("127.0.0.1", port)
            began = asyncio.get_running_loop().create_future()
            end = client.ask(data, began)
            await asyncio.wait((began, end), return_when=asyncio.FIRST_COMPLETED)
            clients.append(client)
            ends.append(end)

    await asyncio.gather(*(run() for _ in range(count)))
    return clients, ends


async def finish(clients: list[Client], ends: list[asyncio.Future[bool]], tokens: int) -> None:
    """Every stream must have all its tokens and its end."""
    good = await asyncio.gather(*ends)
    whole = sum(
        ok and client.events == tokens + 1 for ok, client in zip(good, clients, strict=True)
    )
    for client in clients:
        client.close()
    if whole != len(clients):
        raise SystemExit(f"{len(clients) - whole} of {len(clients)} streams were not whole")


async def streamed(proxy: Proxy) -> None:
    """Measures the CPU time of a token."""
    data = request(body(200, stream=True, max_tokens=TOKENS, seed=STEP))
    before = proxy.cpu()
    clients, ends = await open_streams(proxy.port, STREAMS, data, STREAMS)
    await finish(clients, ends, TOKENS)
    proxy.add("token", (proxy.cpu() - before) / (STREAMS * TOKENS) * 1e6)


async def direct(urls: dict[str, list[str]], together: bool) -> list[float]:
    """Measures the seconds of both legs without a proxy."""
    ports = [int(urls[role][0].rpartition(":")[2]) for role in ("prefill", "decode")]
    legs = [await Client.connect("127.0.0.1", port) for port in ports]
    data = request(body(200))
    times = []
    for _ in range(LATENCIES):
        began = time.perf_counter()
        if together:
            await asyncio.gather(*(leg.ask(data) for leg in legs))
        else:
            for leg in legs:
                await leg.ask(data)
        times.append(time.perf_counter() - began)
    for leg in legs:
        leg.close()
    return times


async def latency(proxy: Proxy, urls: dict[str, list[str]]) -> None:
    base = statistics.median(await direct(urls, together=proxy.name != "router"))
    client = await Client.connect("127.0.0.1", proxy.port)
    data = request(body(200))
    for _ in range(LATENCIES):
        began = time.perf_counter()
        await client.ask(data)
        proxy.latencies.append(time.perf_counter() - began - base)
    client.close()


def legs(urls: dict[str, list[str]]) -> dict[str, int]:
    """Returns the completions that the scripted instances have answered so far, by role."""
    with urllib.request.urlopen(urls["prefill"][0] + "/count", timeout=5) as answer:
        counts: dict[str, int] = json.load(answer)
    return counts


async def answered(
    proxy: Proxy, urls: dict[str, list[str]], name: str, size: int, count: int
) -> None:
    """Measures the CPU time of a request with a body of `size` bytes."""
    data = request(body(size))
    await requests(proxy.port, data, count // 10)
    before = proxy.cpu()
    asked = legs(urls)
    await requests(proxy.port, data, count)
    proxy.add(name, (proxy.cpu() - before) / count * 1e6)
    if any(now - asked[role] < count for role, now in legs(urls).items()):
        raise SystemExit(f"{proxy.name} did not send every request to both instances")


def one_round(made: list[Proxy], urls: dict[str, list[str]]) -> None:
    for name, (size, count) in SIZES.items():
        for proxy in made:
            uvloop.run(answered(proxy, urls, name, size, count))
    for proxy in made:
        uvloop.run(streamed(proxy))
    for proxy in made:
        uvloop.run(latency(proxy, urls))


async def memory(proxy: Proxy, streams: int, step: int = 1000, tokens: int = 6) -> float:
    """Measures resident bytes with so many open streams; afterwards all must end complete."""
    data = request(body(200, stream=True, max_tokens=tokens, seed=step))
    clients, ends = await open_streams(proxy.port, streams, data, 32)
    rss = proxy.rss()
    await finish(clients, ends, tokens)
    return rss


def compare(rounds: int, router: str, python: str, save: str) -> None:
    names = ["ours", "other", "router"] if python else ["ours", "router"]
    with proxies(names, router, python) as (urls, made):
        for proxy in made:
            proxy.add("rss_1", uvloop.run(memory(proxy, 1, 50)))
            proxy.add("rss_1000", uvloop.run(memory(proxy, 1000)))
        for number in range(rounds):
            one_round(made if number % 2 else made[::-1], urls)
            for proxy in made:
                row = "  ".join(
                    f"{name} {values[-1]:.1f}"
                    for name, values in proxy.figures.items()
                    if "rss" not in name
                )
                print(f"round {number + 1} {proxy.name:6}  {row}", flush=True)
    *own, theirs = made
    result: dict[str, object] = {"rounds": rounds}
    for proxy in made:
        quantiles = statistics.quantiles(proxy.latencies, n=100)
        figures = {name: round(proxy.median(name), 1) for name in (*SIZES, "token")}
        result[proxy.name] = {
            **{f"cpu_us_{name}": value for name, value in figures.items()},
            "added_ms_p50": round(quantiles[49] * 1e3, 3),
            "added_ms_p99": round(quantiles[98] * 1e3, 3),
            **{name: round(proxy.median(name) / 2**20, 1) for name in ("rss_1", "rss_1000")},
            "rounds": {
                name: [round(value, 1) for value in proxy.figures[name]]
                for name in (*SIZES, "token")
            },
        }
    for proxy in own:
        end = "" if proxy.name == "ours" else f"_{proxy.name}"
        for name in ("token", *SIZES):
            pairs = zip(proxy.figures[name], theirs.figures[name], strict=True)
            ratio = statistics.median(mine / peer for mine, peer in pairs)
            result[f"ratio_{name}{end}"] = round(ratio, 3)
    if save:
        Path(f"{save}.json").write_text(json.dumps(result, indent=2) + "\n")
    print(json.dumps(result))


def crowd(streams: int) -> None:
    """Measures many streams through one proxy process."""
    _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
    room = (hard - 200) // 2  # a stream is two connections of the proxy
    if streams > room:
        limit = f"one process may open {hard} files here (RLIMIT_NOFILE)"
        print(f"{limit}: {room} streams instead of {streams}")
        streams = room
    with proxies(["ours"]) as (_, (ours,)):
        one = uvloop.run(memory(ours, 1, 50))
        began = time.monotonic()
        cpu = ours.cpu()
        many = uvloop.run(memory(ours, streams, 5000, 8))
        result = {
            "streams": streams,
            "dropped": 0,  # `finish` has looked at each
            "kib_per_stream": round((many - one) / streams / 1024, 1),
            "rss_mib": round(many / 2**20, 1),
            "seconds": round(time.monotonic() - began, 1),
            "cpu_seconds": round(ours.cpu() - cpu, 1),
        }
    print(json.dumps(result))


@asynccontextmanager
async def viewer(port: int) -> AsyncIterator[list[bytes]]:
    """Reads the status page's feed, as a browser does. Yields the chunks so far."""
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    writer.write(b"GET /disagg/status/stream HTTP/1.1\r\nhost: localhost\r\n\r\n")
    chunks = [await reader.read(1 << 20)]
    if not chunks[0].startswith(b"HTTP/1.1 200"):
        raise SystemExit(f"no feed: {chunks[0][:300]!r}")

    async def read() -> None:
        while data := await reader.read(1 << 20):
            chunks.append(data)

    reading = asyncio.create_task(read())
    try:
        yield chunks
    finally:
        reading.cancel()
        writer.close()


async def viewed(proxy: Proxy, with_viewer: bool) -> None:
    """Measures the CPU of a request, with or without a viewer."""
    name = "viewer" if with_viewer else "alone"
    data = request(body(200))
    async with viewer(proxy.port) if with_viewer else nullcontext():
        await requests(proxy.port, data, VIEWED_REQUESTS // 10)
        before = proxy.cpu()
        await requests(proxy.port, data, VIEWED_REQUESTS)
        proxy.add(name, (proxy.cpu() - before) / VIEWED_REQUESTS * 1e6)


async def idle(proxy: Proxy, with_viewer: bool) -> None:
    """Measures the CPU of a second without requests, in milliseconds."""
    name = "idle_viewer" if with_viewer else "idle"
    async with viewer(proxy.port) if with_viewer else nullcontext():
        before = proxy.cpu()
        await asyncio.sleep(IDLE_SECONDS)
        proxy.add(name, (proxy.cpu() - before) / IDLE_SECONDS * 1e3)


def compare_viewer(rounds: int) -> None:
    """Measures what one viewer of the status page costs."""
    with proxies(["ours"]) as (_, (ours,)):
        uvloop.run(viewed(ours, False))  # warms up
        ours.figures.clear()
        for number in range(rounds):
            for with_viewer in (False, True) if number % 2 else (True, False):
                uvloop.run(viewed(ours, with_viewer))
        for with_viewer in (False, True):
            uvloop.run(idle(ours, with_viewer))
        alone = ours.median("alone")
        result = {
            "rounds": rounds,
            "cpu_us_alone": round(alone, 1),
            "cpu_us_viewer": round(ours.median("viewer"), 1),
            "ratio": round(ours.median("viewer") / alone, 3),
            "idle_ms_a_second": round(ours.median("idle"), 1),
            "idle_viewer_ms_a_second": round(ours.median("idle_viewer"), 1),
            "each": {
                name: [round(value, 1) for value in ours.figures[name]]
                for name in ("alone", "viewer")
            },
        }
    print(json.dumps(result))


async def first_tokens(port: int, clients: int) -> list[float]:
    """Returns the TTFT of long prompts, in seconds, with all clients at work."""
    data = request(body(LONG_BYTES, stream=True, max_tokens=LONG_TOKENS, seed=LONG_STEP))
    seconds: list[float] = []

    async def run(number: int) -> None:
        # Clients that began together would go on in step.
        await asyncio.sleep(number / clients * LONG_TOKENS * LONG_STEP / 1e3)
        client = await Client.connect("127.0.0.1", port)
        for _ in range(LONG_REQUESTS):
            sent_at = time.perf_counter()
            began = asyncio.get_running_loop().create_future()
            end = client.ask(data, began)
            await asyncio.wait((began, end), return_when=asyncio.FIRST_COMPLETED)
            seconds.append(time.perf_counter() - sent_at)
            if not await end:
                raise SystemExit("a request failed")
        client.close()

    await asyncio.gather(*(run(number) for number in range(clients)))
    return seconds


def compare_long_prompts(clients: int, rounds: int, router: str) -> None:
    """Measures the TTFT that the proxies add to long prompts."""
    with proxies(["ours", "router"], router) as (urls, made):
        decode = int(urls["decode"][0].rpartition(":")[2])
        for _ in range(rounds):
            base = statistics.median(uvloop.run(first_tokens(decode, clients)))
            for proxy in made:
                before = proxy.cpu()
                seconds = uvloop.run(first_tokens(proxy.port, clients))
                proxy.add("cpu_us", (proxy.cpu() - before) / len(seconds) * 1e6)
                proxy.latencies += [second - base for second in seconds]
    result: dict[str, object] = {"clients": clients, "bytes": LONG_BYTES, "rounds": rounds}
    for proxy in made:
        quantiles = statistics.quantiles(proxy.latencies, n=100)
        result[proxy.name] = {
            "added_ms_p50": round(quantiles[49] * 1e3, 2),
            "added_ms_p99": round(quantiles[98] * 1e3, 2),
            "cpu_us_a_request": round(proxy.median("cpu_us")),
        }
    print(json.dumps(result))


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--router", metavar="PATH", default=".venv-router/bin/vllm-router")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--save", metavar="NAME", default="", help="write NAME.json")
    parser.add_argument(
        "--streams", type=int, default=0, help="only: so many streams at once through ours"
    )
    parser.add_argument(
        "--viewer", action="store_true", help="only: the cost of a viewer of the status page"
    )
    parser.add_argument(
        "--long-prompts", type=int, default=0, metavar="N", help="only: 220 KB from N clients"
    )
    parser.add_argument(
        "--python", metavar="PATH", default="", help="another interpreter for ours, beside"
    )
    args = parser.parse_args()
    os.sched_setaffinity(0, CORES[:-1] or CORES)
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # leave nothing running
    if args.streams:
        crowd(args.streams)
    elif args.viewer:
        compare_viewer(args.rounds)
    elif not Path(args.router).is_file():
        sys.exit(f"proxy_cost: no vllm-router at {args.router}; `make bench` installs one")
    elif args.long_prompts:
        compare_long_prompts(args.long_prompts, args.rounds, args.router)
    else:
        compare(args.rounds, args.router, args.python, args.save)


if __name__ == "__main__":
    main()
