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
    """Keeps one request in flight on each neighbour until the context ends. Raises DisaggError if
    one failed.
    """
    over = threading.Event()
    failed = list[DisaggError]()

    def ask(url: str, model: ServedModel) -> None:
        chance = random.Random()
        limit = model.max_model_len or PROMPT_TOKENS + ANSWER_TOKENS
        length = min(PROMPT_TOKENS, limit - ANSWER_TOKENS)
        while not over.is_set():
            try:
                complete(url, model.id, [chance.choices(PROBE_TOKEN_IDS, k=length)], ANSWER_TOKENS)
            except DisaggError as error:
                failed.append(error)
                return

    threads = [threading.Thread(target=ask, args=pair) for pair in neighbours]
    for thread in threads:
        thread.start()
    try:
        yield
    finally:
        over.set()
        for thread in threads:
            thread.join()
    if failed:
        raise DisaggError(f"a neighbour did not keep at work: {failed[0]}")
