"""Measures how `compress: fp8` changes answers: a pair with it, one without, one plain vLLM.

    python benchmarks/rounding.py MODEL [--train SECONDS] [--prompts N] [--tokens N]

Each gets the same English prompts, 8 at a time, at temperature 0, one stack after the other. All
run in bfloat16 and without prefix caching. The plain vLLM gets the prompts twice, the second time
in the opposite order. The second run and the pair without compression show the effect of bfloat16
alone, since requests are batched differently.

`--train`: trains MODEL for so long (on the CPU, saved as MODEL-trained) on three quarters of
Python's help texts. Prompts are from the last quarter. With random weights many tokens are of
nearly equal probability, and every rounding decides between them. The last line is one JSON object.
"""

from __future__ import annotations

import argparse
import json
import random
import statistics
import sys
import tempfile
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

from vllm_disagg.fleet import keys

sys.path.insert(0, str(Path(__file__).parents[1] / "tests/engine"))
from asking import TEXT, Record, ask, body
from engines import Engine, Process, Proxy

LEARNT = TEXT[: len(TEXT) * 3 // 4]
HELD_OUT = TEXT[len(TEXT) * 3 // 4 :]
FLAGS = ["--dtype", "bfloat16", "--no-enable-prefix-caching"]


def train(model: str, seconds: float) -> str:
    """Trains a copy of a model and returns its folder, beside that of the model."""
    import torch  # noqa: PLC0415 - slow, and only here
    import transformers  # noqa: PLC0415

    torch.set_num_threads(1)  # of so small a model two are slower
    words = transformers.AutoTokenizer.from_pretrained(model)
    net = transformers.AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32)
    ids = torch.tensor(words(LEARNT)["input_ids"])
    adam = torch.optim.AdamW(net.parameters(), 2e-3)
    end = time.monotonic() + seconds
    losses = [0.0]
    while (left := end - time.monotonic()) > 0:
        adam.param_groups[0]["lr"] = 2e-3 * min(1.0, left / seconds * 2)
        batch = torch.stack([ids[at : at + 512] for at in torch.randint(len(ids) - 512, (4,))])
        loss = net(batch, labels=batch).loss
        loss.backward()
        torch.nn.utils.clip_grad_norm_(net.parameters(), 1.0)
        adam.step()
        adam.zero_grad()
        losses.append(loss.item())
    trained = f"{model}-trained"
    words.save_pretrained(trained)
    net.to(torch.bfloat16).save_pretrained(trained)
    last = statistics.mean(losses[-20:])
    print(f"trained {len(losses) - 1} steps, loss {losses[1]:.2f} to {last:.2f}", flush=True)
    return trained


def answers(url: str, prompts: list[str], tokens: int) -> list[Record]:
    asked = [body(prompt, tokens, logprobs=5, ignore_eos=True) for prompt in prompts]
    with ThreadPoolExecutor(8) as pool:
        return list(pool.map(lambda one: ask(url, one), asked))


def compare(ours: list[Record], plain: list[Record]) -> dict[str, float]:
    """Compares the tokens, and the logprobs of those best 5 first tokens that both have."""
    prefixes = []
    gaps = []
    for one, other in zip(ours, plain, strict=True):
        assert one.status == other.status == 200, (one.error, other.error)
        mine = one.tokens[0]
        theirs = other.tokens[0]
        prefixes.append(
            next(
                (at for at, (a, b) in enumerate(zip(mine, theirs, strict=True)) if a != b),
                len(mine),
            )
        )
        first = dict(one.logprobs[1:6])
        expected = dict(other.logprobs[1:6])
        gaps += [abs(first[token] - expected[token]) for token in first.keys() & expected.keys()]
    return {
        "same_answer": round(
            statistics.mean(p == len(o.tokens[0]) for p, o in zip(prefixes, plain, strict=True)), 3
        ),
        "same_first_token": round(statistics.mean(p > 0 for p in prefixes), 3),
        "mean_common_prefix": round(statistics.mean(prefixes), 1),
        "first_logprob_difference_mean": round(statistics.mean(gaps), 4),
        "first_logprob_difference_max": round(max(gaps), 3),
    }


def carried(decode: Engine) -> dict[str, float]:
    """Returns the loads and bytes that a decode engine received."""
    return {
        "loads": decode.metric("vllm:disagg_load_seconds_count"),
        "kv_bytes": decode.metric("vllm:disagg_received_bytes_total"),
        "wire_bytes": decode.metric("vllm:disagg_received_wire_bytes_total", 'transport="zmq"'),
    }


def ask_stack(
    folder: Path, model: str, compress: str, prompts: list[str], tokens: int
) -> tuple[list[Record], Any]:
    """Returns the answers of a pair with this setting, and its counts of loads and bytes.

    With an empty setting, returns the two answers of one plain vLLM.
    """
    if compress:
        settings: dict[str, object] = {"compress": compress}
        engines = [
            Engine(
                f"{role}-{compress}",
                folder,
                *FLAGS,
                role=role,
                cpu=cpu,
                settings=settings,
                model=model,
            )
            for role, cpu in (("kv_producer", "0"), ("kv_consumer", "1"))
        ]
        processes: list[Process] = [*engines, Proxy(folder, *engines)]
    else:
        processes = [Engine("plain", folder, *FLAGS, model=model)]
    try:
        for process in processes:
            process.start()
        for process in processes:
            process.wait_ready()
        print(f"asking {processes[-1].name} {compress}", flush=True)
        found = answers(processes[-1].url, prompts, tokens)
        return found, carried(engines[1]) if compress else answers(
            processes[-1].url, prompts[::-1], tokens
        )[::-1]
    finally:
        for process in processes[::-1]:
            process.stop()


def measure_answers(model: str, count: int, tokens: int) -> dict[str, Any]:
    source = random.Random(7)
    lengths = [source.randint(400, 2400) for _ in range(count)]  # characters: 2.5 a token
    prompts = [
        HELD_OUT[at : at + length]
        for length in lengths
        for at in [source.randrange(len(HELD_OUT) - length)]
    ]
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        keys.create(str(folder / "key"))
        plain, again = ask_stack(folder, model, "", prompts, tokens)
        found = {"prompts": count, "tokens": tokens, "plain again": compare(again, plain)}
        for compress in ("off", "fp8"):
            ours, counts = ask_stack(folder, model, compress, prompts, tokens)
            found[compress] = {**compare(ours, plain), **counts}
    return found


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("model")
    parser.add_argument("--train", type=float, default=0.0, metavar="SECONDS")
    parser.add_argument("--prompts", type=int, default=120)
    parser.add_argument("--tokens", type=int, default=32)
    options = parser.parse_args()
    model = train(options.model, options.train) if options.train else options.model
    print(
        json.dumps(
            {"model": Path(model).name, **measure_answers(model, options.prompts, options.tokens)}
        )
    )


if __name__ == "__main__":
    main()
