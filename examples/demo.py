"""Start a prefill and a decode instance and the proxy, and show what they do: demo.py MODEL (see
`make demo`).

Each prompt is asked twice, through the proxy and of the decode instance alone, which then is an
ordinary vLLM; the answers must have the same tokens. Each request has another `cache_salt`, so it
cannot reuse another's prefix.

Everything that the processes write goes to a log file; the terminal shows it until they are
stopped. The table is the last output.
"""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
import tempfile
import threading
import time
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from pydoc_data.topics import topics
from typing import IO, Any, NamedTuple

from openai import OpenAI

SIZES = [20, 60, 150, 300, 600, 1200, 2000, 3000]  # tokens of a prompt, about
CHARACTERS = 3.1  # of this text, for each token of this tokenizer
ANSWER_TOKENS = 24
COUNTERS_TIMEOUT_SECONDS = 5.0
MIB = 1 << 20
# A prompt is computed in several chunks. The two best tokens of a random model are often nearly
# equal. In bfloat16 the rounding, which depends on the chunk's size, would decide between them.
FLAGS = {
    "served-model-name": "tiny",
    "dtype": "float32",
    "max-model-len": "4096",
    "max-num-batched-tokens": "512",
}
VLLM = ["--enforce-eager", *(f"--{flag}={value}" for flag, value in FLAGS.items())]
ROW = "{:>7} {:>6} {:>11} {:>11} {:>9} {:>8}"


class Answer(NamedTuple):
    tokens: list[int]
    prompt_tokens: int
    first: float  # seconds until the first token


class Line(NamedTuple):
    """Results of one prompt."""

    together: Answer
    alone: Answer
    moved: float  # bytes of KV
    early: float  # of them, while the prefill still computed

    def is_equal(self) -> bool:
        return self.together.tokens == self.alone.tokens


def main() -> int:
    if len(sys.argv) != 2:
        sys.exit(__doc__)
    command = [
        sys.executable,
        "-m",
        "vllm_disagg",
        "up",
        "--model",
        sys.argv[1],
        "--port",
        "0",
        "--",
        *VLLM,
    ]
    reach_directly()
    try:
        with started(command) as up:
            lines = compare(*addresses(up))
    except KeyboardInterrupt:
        return 130
    return report(lines)


def reach_directly() -> None:
    """Has requests to this machine go to no HTTP proxy, which the environment may name."""
    given = os.environ.get("no_proxy") or os.environ.get("NO_PROXY") or ""
    os.environ["no_proxy"] = os.environ["NO_PROXY"] = f"{given},127.0.0.1".lstrip(",")


@contextmanager
def started(command: list[str]) -> Iterator[subprocess.Popen[str]]:
    """Runs a command and stops it at the end; hides its output while it stops."""
    is_stopping = threading.Event()
    pipe = subprocess.PIPE
    with (
        tempfile.NamedTemporaryFile(
            "w", prefix="vllm-disagg-demo-", suffix=".log", delete=False
        ) as log,
        subprocess.Popen(command, stdout=pipe, stderr=pipe, text=True, errors="replace") as process,
    ):
        copying = threading.Thread(target=copy_lines, args=(process.stderr, log, is_stopping))
        copying.start()
        try:
            yield process
        finally:
            if process.poll() is None:
                is_stopping.set()
                process.send_signal(signal.SIGINT)
                process.wait()
            copying.join()
            print(
                f"demo: all processes are stopped; their output is in {log.name}", file=sys.stderr
            )


def copy_lines(source: IO[str], log: IO[str], is_stopping: threading.Event) -> None:
    """Copies each line to the log and, until the processes are stopped, to the terminal."""
    for line in source:
        log.write(line)
        if not is_stopping.is_set():
            sys.stderr.write(line)
            sys.stderr.flush()


def addresses(up: subprocess.Popen[str]) -> tuple[str, str]:
    """Returns the addresses of proxy and decode instance, from the output of `up`."""
    assert up.stdout
    proxy = ""
    for line in up.stdout:
        if line.startswith("ready: "):
            proxy = line.split()[1]
        if proxy and (decode := re.search(r"--decode (http://\S+)", line)):
            return proxy, decode[1]
    up.wait()  # so that its last lines are shown, too
    sys.exit("demo: the instances did not start; the log above shows the reason")


def compare(proxy: str, decode: str) -> list[Line]:
    text = " ".join(topics[name] for name in sorted(topics))
    together = client(proxy)
    alone = client(decode)
    for warm_up in (together, alone):
        ask(warm_up, text[:2000], f"warm-up {id(warm_up)}")
    lines = []
    for number, size in enumerate(SIZES):
        start = number * 40_000
        prompt = text[start : start + int(size * CHARACTERS)]
        before = counters(decode)
        answer = ask(together, prompt, f"together {number}")
        moved, early = moved_since(before, decode)
        lines.append(Line(answer, ask(alone, prompt, f"alone {number}"), moved, early))
        print(f"demo: {len(lines)} of {len(SIZES)} prompts asked twice", file=sys.stderr)
    return lines


def report(lines: list[Line]) -> int:
    print("\nTTFT: time to first token.  Early: KV that moved while the prefill still computed.\n")
    print(ROW.format("prompt", "equal", "TTFT, P+D", "TTFT, alone", "KV moved", "early"))
    for line in lines:
        milliseconds = (f"{answer.first * 1e3:.0f} ms" for answer in (line.together, line.alone))
        share = f"{line.early / line.moved:.0%}" if line.moved else "-"
        equal = "yes" if line.is_equal() else "NO"
        print(
            ROW.format(
                line.together.prompt_tokens,
                equal,
                *milliseconds,
                f"{line.moved / MIB:.1f} MiB",
                share,
            )
        )
    exact = sum(line.is_equal() for line in lines)
    moved = sum(line.moved > 0 for line in lines)
    print(f"\n{exact} of {len(lines)} exact: the same tokens as one instance alone gives")
    print(f"{moved} of {len(lines)} computed by one process and generated by another")
    return 0 if exact == moved == len(lines) else 1


def client(url: str) -> OpenAI:
    return OpenAI(base_url=f"{url}/v1", api_key="none", max_retries=0, timeout=120)


def ask(server: OpenAI, prompt: str, salt: str) -> Answer:
    began = time.monotonic()
    first = 0.0
    tokens: list[int] = []
    prompt_tokens = 0
    extra: dict[str, Any] = {"return_token_ids": True, "cache_salt": salt, "ignore_eos": True}
    stream = server.completions.create(
        model="tiny",
        prompt=prompt,
        max_tokens=ANSWER_TOKENS,
        temperature=0,
        stream=True,
        stream_options={"include_usage": True},
        extra_body=extra,
    )
    for chunk in stream:
        first = first or time.monotonic() - began
        if chunk.usage:
            prompt_tokens = chunk.usage.prompt_tokens
        for choice in chunk.choices:
            tokens += (choice.model_extra or {}).get("token_ids") or []
    if len(tokens) != ANSWER_TOKENS:
        sys.exit(f"demo: received {len(tokens)} tokens instead of {ANSWER_TOKENS}")
    return Answer(tokens, prompt_tokens, first)


def counters(decode: str) -> tuple[float, float]:
    """Returns the KV bytes that the decode instance has received, and those received early."""
    with urllib.request.urlopen(f"{decode}/metrics", timeout=30) as page:
        text = page.read().decode()
    names = ("received", "overlapped")
    received, early = (
        re.findall(rf"^vllm:disagg_{name}_bytes_total\S* (\S+)", text, re.MULTILINE)
        for name in names
    )
    return sum(map(float, received)), sum(map(float, early))


def moved_since(before: tuple[float, float], decode: str) -> tuple[float, float]:
    deadline = time.monotonic() + COUNTERS_TIMEOUT_SECONDS
    while True:
        received, early = counters(decode)
        if received > before[0] or time.monotonic() > deadline:
            return received - before[0], early - before[1]
        time.sleep(0.1)


if __name__ == "__main__":
    sys.exit(main())
