"""Random requests, each answered as plain vLLM answers it, in every part of the answer.

    RANDOM_REQUESTS=2000 [RANDOM_FIRST=0] pytest -s tests/engine/test_random_requests.py

A stream is put together again: where it is cut into events is a matter of time. With
ENGINE_FLAGS=--enable-scale-out prompts of token ids are answered, too.
"""

from __future__ import annotations

import json
import os
from collections import Counter
from concurrent.futures import ThreadPoolExecutor
from http.client import HTTPConnection
from typing import Any

import pytest
from asking import TIMEOUT_SECONDS, at_once, tally
from conftest import Main
from random_requests import RandomRequest, RequestMaker
from whole_answers import difference, joined

FIRST = int(os.environ.get("RANDOM_FIRST", "0"))
COUNT = int(os.environ.get("RANDOM_REQUESTS", "60"))
AT_ONCE = 4
# Of the proxies; the second one sends P's first token.
FLAGS = ("--policy prefix_aware", "--first-token prefill --decode-dispatch late")


@pytest.mark.parametrize("flags", FLAGS, ids=FLAGS)
def test_random_requests(main: Main, flags: str) -> None:
    """Each answer equals plain vLLM's: status, texts, tokens, ends, usage, logprobs, errors."""
    made = [(seed, RequestMaker(seed).make()) for seed in range(FIRST, FIRST + COUNT)]
    statuses: Counter[str] = Counter()
    with main.other_proxy("proxy of random requests", *flags.split()) as proxy:

        def compare(seed: int, request: RandomRequest) -> str:
            path, body = request.path, request.body
            urls = (proxy.url, main.plain.url)
            (ours, said), (theirs, expected) = at_once(lambda url: answer(url, path, body), urls)
            statuses[f"{path} {theirs}"] += 1
            found = f"status {ours}, plain vLLM: {theirs}" if ours != theirs else ""
            if theirs < 500:  # of its own failure an engine may say more or less
                found = found or difference(said, expected)
            tally["wrong" if found else "exact" if theirs == 200 else "clean"] += 1
            return found and f"seed {seed} {path} {body!r:.900}\n    {found}"

        with ThreadPoolExecutor(AT_ONCE) as pool:
            together = [one for one in made if not one[1].is_alone]
            found = list(pool.map(compare, *zip(*together, strict=True)))
        found += [compare(*one) for one in made if one[1].is_alone]
    print(dict(sorted(statuses.items())))
    differences = [one for one in found if one]
    assert not differences, "\n".join([f"{len(differences)} differ:", *differences])
    main.expect_well()


def answer(url: str, path: str, body: dict[str, Any]) -> tuple[int, Any]:
    """Returns status and content of an answer; a stream as if it had come whole."""
    connection = HTTPConnection(url.removeprefix("http://"), timeout=TIMEOUT_SECONDS)
    try:
        connection.request("POST", path, json.dumps(body), {"content-type": "application/json"})
        response = connection.getresponse()
        data = response.read()
        if "text/event-stream" not in (response.getheader("content-type") or ""):
            return response.status, json.loads(data)
        whole = joined(data)
        # A stream of vLLM's may fail before its first token, for which the proxy has a status.
        return 502 if "error" in whole.get("chunk", {}) else response.status, whole
    finally:
        connection.close()
