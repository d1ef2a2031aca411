"""Measures TTFT of later turns of a conversation, with bidirectional KV reuse and without.

    python benchmarks/turns.py MODEL [--answer N] [--turns N] [--conversations N] [--at-once N ...]

One prefill engine (pinned to core 0) and one decode engine (core 1) run behind two proxies. `reuse`
is the default. `off` has --policy least_loaded, which records no prefixes, so P never reads back.
With one P and one D both policies choose the same instances. Conversations of either kind
alternate. Each turn's prompt is the last one, its whole answer and --new random tokens. The last
line is one JSON object.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import random
import re
import statistics
import subprocess
import sys
import tempfile
import time
import urllib.request
from pathlib import Path

import aiohttp
from handoff import REST
from processes import free_port
from stack import VLLM, Stack

FLAGS = [
    "--max-model-len",
    "4096",
    "--enforce-eager",
    "--served-model-name",
    "tiny",
    "--dtype",
    "bfloat16",
]
PROXIES = {"reuse": [], "off": ["--policy", "least_loaded"]}
COUNTERS = {
    "computed": "vllm:request_prefill_kv_computed_tokens_sum",
    "read back": "vllm:disagg_reused_bytes_total",
}


def start(stack: Stack, model: str, folder: Path) -> tuple[str, dict[str, str]]:
    """Starts engines and proxies. Returns P's URL, and those of the proxies by name."""
    key = folder / "key"
    urls = []
    subprocess.run([sys.executable, "-m", "vllm_disagg.cli", "key", str(key)], check=True)
    for core, role in enumerate(("kv_producer", "kv_consumer")):
        transfer = {
            "kv_connector": "DisaggConnector",
            "kv_role": role,
            "kv_load_failure_policy": "recompute",
        }
        transfer["kv_connector_extra_config"] = {"key_file": str(key)}  # type: ignore[assignment]
        urls.append(f"http://127.0.0.1:{(port := free_port())}")
        command = [
            VLLM,
            "serve",
            model,
            "--port",
            str(port),
            *FLAGS,
            "--kv-transfer-config",
            json.dumps(transfer),
        ]
        stack.start(
            folder / f"{role}.log",
            command,
            VLLM_CPU_OMP_THREADS_BIND=str(core),
            VLLM_CPU_KVCACHE_SPACE="4",
        )
    for url in urls:
        stack.wait(url, "/health")
    fronts = {}
    for name, flags in PROXIES.items():
        command = [
            sys.executable,
            "-m",
            "vllm_disagg.cli",
            "proxy",
            "--port",
            str(port := free_port()),
            *flags,
        ]
        command += ["--key-file", str(key), "--prefill", urls[0], "--decode", urls[1]]
        stack.start(folder / f"{name}.log", command)
        fronts[name] = f"http://127.0.0.1:{port}"
        stack.wait(fronts[name], "/readiness?mode=pair")
    return urls[0], fronts


def counters(url: str) -> dict[str, float]:
    with urllib.request.urlopen(f"{url}/metrics") as page:
        text = page.read().decode()
    found = {
        what: re.findall(rf"^{name}{{.*}} (\S+)$", text, re.MULTILINE)
        for what, name in COUNTERS.items()
    }
    return {what: sum(map(float, values)) for what, values in found.items()}


async def ask(
    session: aiohttp.ClientSession, url: str, prompt: list[int], answer: int
) -> tuple[float, list[int]]:
    """Returns the seconds to the first token, and all tokens."""
    body = {
        "model": "tiny",
        "prompt": prompt,
        "max_tokens": answer,
        "temperature": 0,
        "ignore_eos": True,
    }
    body |= {"stream": True, "return_token_ids": True}
    began = time.perf_counter()
    first = 0.0
    tokens = []
    async with session.post(f"{url}/v1/completions", json=body) as response:
        response.raise_for_status()
        async for line in response.content:
            if line.startswith(b"data: {"):
                first = first or time.perf_counter() - began
                tokens += json.loads(line[6:])["choices"][0]["token_ids"]
    return first, tokens


async def talk(
    session: aiohttp.ClientSession, url: str, seed: str, together: int, args: argparse.Namespace
) -> list[list[float]]:
    """Runs conversations in step. Returns the seconds to the first token, by turn."""
    source = random.Random(seed)
    prompts = [[source.randrange(10, 900) for _ in range(args.first)] for _ in range(together)]
    times = []
    for _ in range(args.turns):
        await asyncio.sleep(REST)
        answers = await asyncio.gather(
            *(ask(session, url, prompt, args.answer) for prompt in prompts)
        )
        times.append([seconds for seconds, _ in answers])
        for prompt, (_, tokens) in zip(prompts, answers, strict=True):
            prompt += tokens + [source.randrange(10, 900) for _ in range(args.new)]
    return times


async def measure(
    prefill: str, fronts: dict[str, str], args: argparse.Namespace
) -> list[dict[str, object]]:
    rows = []
    async with aiohttp.ClientSession(timeout=aiohttp.ClientTimeout(600)) as session:
        for name, url in fronts.items():
            await talk(
                session,
                url,
                f"warm {name}",
                1,
                argparse.Namespace(**{**vars(args), "answer": 150, "turns": 2}),
            )
        for together in args.at_once:
            by_turn: dict[str, list[list[float]]] = {
                name: [[] for _ in range(args.turns)] for name in fronts
            }
            did = {name: dict.fromkeys(COUNTERS, 0.0) for name in fronts}
            for at in range(max(1, args.conversations // together)):
                for name in list(fronts)[:: 1 if at % 2 else -1]:
                    before = counters(prefill)
                    for turn, times in enumerate(
                        await talk(session, fronts[name], f"{together} {at} {name}", together, args)
                    ):
                        by_turn[name][turn] += times
                    await asyncio.sleep(1)
                    after = counters(prefill)
                    did[name] = {
                        what: did[name][what] + after[what] - before[what] for what in COUNTERS
                    }
            for turn in range(args.turns):
                ms = {name: [1000 * seconds for seconds in by_turn[name][turn]] for name in fronts}
                row = {
                    "at_once": together,
                    "turn": turn + 1,
                    "prompt": args.first + turn * (args.answer + args.new),
                }
                for name, values in ms.items():
                    row |= {
                        name: round(statistics.median(values), 1),
                        f"{name}_max": round(max(values), 1),
                        "n": len(values),
                    }
                rows.append(row)
                print("  ".join(f"{what} {value}" for what, value in row.items()), flush=True)
            print(f"x{together}, P in all: {did}", flush=True)
            rows.append({"at_once": together, "prefill": did})
    return rows


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("model")
    parser.add_argument("--first", type=int, default=300, help="tokens of the first prompt")
    parser.add_argument("--answer", type=int, default=500, help="tokens of each answer")
    parser.add_argument("--new", type=int, default=60, help="tokens of new text at each turn")
    parser.add_argument("--turns", type=int, default=4)
    parser.add_argument(
        "--conversations", type=int, default=4, help="of each kind, for each of --at-once"
    )
    parser.add_argument("--at-once", type=int, nargs="+", default=[1, 4])
    args = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        stack = Stack("turns", "bfloat16")
        try:
            rows = asyncio.run(measure(*start(stack, args.model, Path(folder)), args))
        finally:
            stack.stop()
    print(json.dumps({"settings": vars(args), "rows": rows}))


if __name__ == "__main__":
    main()
