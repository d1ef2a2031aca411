"""Images: an image becomes tokens of the prompt, and their KV is transferred as all other KV."""

from __future__ import annotations

import base64
import io
import random
import threading
from collections import Counter
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

import pytest
import torch
from asking import Body, Record, ask, english, expect_same
from conftest import Machine
from direct import with_grant
from engines import Proxy, wait
from PIL import Image
from test_models import AT_ONCE, FLOAT32, Pair

from vllm_disagg.fleet import grants

pytestmark = pytest.mark.wide

CHAT = "/v1/chat/completions"


@pytest.fixture(scope="module")
def pair(machine: Machine) -> Iterator[Pair]:
    machine.stop()  # all others, for the memory's sake
    made = Pair(machine, "images", "images", *FLOAT32)
    yield made
    made.legs.close()
    machine.stop()


def pixels(seed: str) -> bytes:
    """Returns a PNG of random pixels."""
    packed = io.BytesIO()
    Image.frombytes("RGB", (56, 56), random.Random(seed).randbytes(3 * 56 * 56)).save(packed, "PNG")
    return packed.getvalue()


def image(seed: str) -> Body:
    """Returns a part of a message: random pixels as a data address."""
    address = f"data:image/png;base64,{base64.b64encode(pixels(seed)).decode()}"
    return {"type": "image_url", "image_url": {"url": address}}


def chat(words: str, *parts: Body) -> Body:
    """Returns a chat of one message; `parts`: images and the like before its words."""
    return {
        "model": "tiny",
        "messages": [{"role": "user", "content": [*parts, {"type": "text", "text": words}]}],
        **{
            "max_tokens": 12,
            "temperature": 0,
            "logprobs": True,
            "top_logprobs": 3,
            "return_token_ids": True,
        },
    }


def compare(pair: Pair, machine: Machine, asked: list[Body]) -> list[Record]:
    """Returns plain vLLM's answers; fails unless the proxy's are the same and most KV moves."""
    name = pair.plain.name.replace("plain", "proxy")
    proxy = Proxy(machine.folder, pair.prefill, pair.decode, name=name)
    machine.start(proxy)
    with ThreadPoolExecutor(AT_ONCE) as pool:
        plain = list(pool.map(lambda one: ask(pair.plain.url, one, CHAT), asked))
        ours = list(pool.map(lambda one: ask(proxy.url, one, CHAT), asked))
    for at, (found, expected) in enumerate(zip(ours, plain, strict=True)):
        expect_same(found, expected, f"chat {at}")
    wait("KV moves", lambda: pair.decode.metric("vllm:disagg_load_seconds_count") > 80)
    machine.stop(proxy)
    return plain


def compare_legs(pair: Pair, one: Body, other: Body) -> None:
    """Sends two chats as legs of one transfer, which P must refuse.

    As when each engine fetches an address that returns something else each time.
    """
    transfer, before = grants.new_transfer(), pair.decode.received
    first = {**one, "max_tokens": 1, **with_grant(pair.legs.mint("prefill", transfer))}
    second = {**other, **with_grant(pair.legs.mint("decode", transfer))}
    with ThreadPoolExecutor(2) as pool:
        legs = (
            pool.submit(ask, pair.prefill.url, first, CHAT),
            pool.submit(ask, pair.decode.url, second, CHAT),
        )
        expected = ask(pair.plain.url, other, CHAT)
        assert legs[0].result().status == 200
        expect_same(legs[1].result(), expected)
    found = ask(pair.plain.url, one, CHAT)
    assert expected.texts != found.texts, "images that change nothing show nothing"
    assert expected.prompt_tokens == found.prompt_tokens
    assert pair.decode.received == before
    assert pair.decode.metric("vllm:disagg_failed_loads_total", 'reason="prompt_mismatch"') == 1


def test_a_hundred_chats_through_the_proxy(pair: Pair, machine: Machine) -> None:
    """Different images and texts; one text and many images; one image and many texts."""
    asked = [chat(english(40 + 35 * at, f"own {at}"), image(f"own {at}")) for at in range(40)]
    asked += [chat(english(900, "one text"), image(f"many {at}")) for at in range(32)]
    asked += [
        chat(english(700, "begins alike") + english(20 + 40 * at, f"ends {at}"), image("one"))
        for at in range(32)
    ]
    asked += [chat(english(500, f"no image {at}")) for at in range(4)]
    plain = compare(pair, machine, asked)
    assert len({record.texts for record in plain[40:72]}) > 16, (
        "images that change nothing show nothing"
    )


def test_p_and_d_fetch_an_address_once_each(pair: Pair, machine: Machine) -> None:
    """P and D each fetch an image once; the proxy fetches none."""
    fetched: list[str] = []  # by several threads

    class Images(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            fetched.append(self.path)
            found = pixels(self.path)
            self.send_response(200)
            self.send_header("content-type", "image/png")
            self.send_header("content-length", str(len(found)))
            self.end_headers()
            self.wfile.write(found)

        def log_message(self, *_: object) -> None:
            pass

    server = ThreadingHTTPServer(("127.0.0.1", 0), Images)
    threading.Thread(target=server.serve_forever).start()
    try:
        paths = [f"/{at}.png" for at in range(12)]
        asked = []
        for path in paths:
            url = f"http://127.0.0.1:{server.server_port}{path}"
            part = {"type": "image_url", "image_url": {"url": url}}
            asked.append(chat(english(300, path), part))
        proxy = Proxy(machine.folder, pair.prefill, pair.decode, name="addresses-proxy")
        machine.start(proxy)
        before = pair.decode.received
        with ThreadPoolExecutor(AT_ONCE) as pool:
            ours = list(pool.map(lambda one: ask(proxy.url, one, CHAT), asked))
            assert Counter(fetched) == dict.fromkeys(paths, 2)
            plain = list(pool.map(lambda one: ask(pair.plain.url, one, CHAT), asked))
    finally:
        server.shutdown()
        server.server_close()
    for found, expected in zip(ours, plain, strict=True):
        expect_same(found, expected)
    wait("KV moves", lambda: pair.decode.received > before)
    machine.stop(proxy)


def packed(numbers: torch.Tensor) -> str:
    """Returns a tensor as clients send it."""
    written = io.BytesIO()
    torch.save(numbers, written)
    return base64.b64encode(written.getvalue()).decode()


def test_images_as_embeddings_are_refused_as_by_plain_vllm(pair: Pair, machine: Machine) -> None:
    """An image without numbers ended D, where vLLM 0.32 lets engines that load KV take it."""
    proxy = Proxy(machine.folder, pair.prefill, pair.decode, name="embeds-proxy")
    machine.start(proxy)
    for number, sent in enumerate(
        [
            {},
            None,
            {"image_grid_thw": packed(torch.tensor([1, 4, 4]))},
            {"image_embeds": packed(torch.ones(16, 128))},
            packed(torch.ones(16, 128)),
        ]
    ):
        part = {"type": "image_embeds", "image_embeds": sent}
        asked = chat(english(300, f"embeds {number}"))
        asked["messages"][0]["content"].insert(0, part)
        plain = ask(pair.plain.url, asked, CHAT)
        assert plain.status == 400
        for url in (pair.decode.url, pair.prefill.url, proxy.url):
            expect_same(ask(url, asked, CHAT), plain, f"{sent} at {url}")
    alive = chat(english(300, "after the embeds"), image("after the embeds"))
    expect_same(ask(pair.decode.url, alive, CHAT), ask(pair.plain.url, alive, CHAT))
    machine.stop(proxy)


def test_legs_that_have_seen_different_images(pair: Pair) -> None:
    words = english(900, "legs")
    compare_legs(pair, *(chat(words, image(seed)) for seed in ("one leg", "the other leg")))
