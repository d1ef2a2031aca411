"""Background load on other instances of the machine while one is measured.

Instances share cores, caches and memory bandwidth. An instance alone on an idle machine is faster
than in a deployment.
"""

from __future__ import annotations

import random
import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager

from ..errors import DisaggError
from .instance import ServedModel
from .steps import PROBE_TOKEN_IDS
from .stream import complete

PROMPT_TOKENS = 256  # of each request to a neighbour
ANSWER_TOKENS = 32


@contextmanager
def busy(neighbours: Sequence[tuple[str, ServedModel]]) -> Iterator[None]:
    """Keeps one request in flight on each neighbour until the context ends.

    Raises DisaggError if a request failed.
    """
    stopped = threading.Event()
    failures = list[DisaggError]()

    def send_requests(url: str, model: ServedModel) -> None:
        generator = random.Random()
        limit = model.max_model_len or PROMPT_TOKENS + ANSWER_TOKENS
        length = min(PROMPT_TOKENS, limit - ANSWER_TOKENS)
        while not stopped.is_set():
            prompt = generator.choices(PROBE_TOKEN_IDS, k=length)
            try:
                complete(url, model.id, [prompt], ANSWER_TOKENS)
            except DisaggError as error:
                failures.append(error)
                return

    threads = [threading.Thread(target=send_requests, args=pair) for pair in neighbours]
    for thread in threads:
        thread.start()
    try:
        yield
    finally:
        stopped.set()
        for thread in threads:
            thread.join()
    if failures:
        raise DisaggError(f"the load on a neighbour stopped: {failures[0]}")
