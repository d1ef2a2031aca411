"""Videos and images whose positions depend on their shapes (Qwen2-VL, M-RoPE).

Needs torchvision, for vLLM's processor: `make wide` has it, in a folder that TORCHVISION names. A
video is sent as its frames, so nothing decodes it.
"""

from __future__ import annotations

import base64
import io
import os
import random
from collections.abc import Iterator

import pytest
from asking import Body, english
from conftest import Machine
from PIL import Image
from test_images import chat, compare, compare_legs, image
from test_models import FLOAT32, Pair

FOLDER = os.environ.get("TORCHVISION", "")
pytestmark = [
    pytest.mark.wide,
    pytest.mark.skipif(not FOLDER, reason="TORCHVISION names no folder of torchvision"),
]

SHAPES = [(56, 112), (112, 56), (84, 84), (56, 56), (140, 84)]  # pixels, in multiples of 28


@pytest.fixture(scope="module")
def pair(machine: Machine) -> Iterator[Pair]:
    machine.stop()  # all others, for the memory's sake
    env = {"ENGINE_CHANGES": "host_torchvision", "PYTHONPATH": FOLDER}
    made = Pair(machine, "video", "video", *FLOAT32, env=env)
    yield made
    made.legs.close()
    machine.stop()


def video(seed: str, frames: int = 4, shape: tuple[int, int] = (84, 84)) -> Body:
    """Returns a part of a message: random frames, each a JPEG."""
    source = random.Random(seed)
    packed = []
    for _ in range(frames):
        file = io.BytesIO()
        pixels = source.randbytes(3 * shape[0] * shape[1])
        Image.frombytes("RGB", shape, pixels).save(file, "JPEG")
        packed.append(base64.b64encode(file.getvalue()).decode())
    return {"type": "video_url", "video_url": {"url": f"data:video/jpeg;base64,{','.join(packed)}"}}


def test_a_hundred_chats_through_the_proxy(pair: Pair, machine: Machine) -> None:
    """One text and many videos; videos of all shapes; images; two videos and an image; none."""
    asked = [chat(english(400, "one text"), video(f"many {at}")) for at in range(32)]
    asked += [
        chat(
            english(40 + 35 * at, f"own {at}"),
            video(f"own {at}", 2 + at % 7, SHAPES[at % len(SHAPES)]),
        )
        for at in range(40)
    ]
    asked += [chat(english(60, "an image"), image(f"image {at}")) for at in range(20)]
    asked += [
        chat(english(300, f"all {at}"), video(f"1st {at}"), image(f"{at}"), video(f"2nd {at}", 2))
        for at in range(6)
    ]
    asked += [chat(english(500, f"no video {at}")) for at in range(6)]
    plain = compare(pair, machine, asked)
    assert len({record.prompt_tokens for record in plain[:32]}) == 1
    for alike in (plain[:32], plain[72:92]):
        assert len({record.texts for record in alike}) > len(alike) // 2, (
            "videos that change nothing show nothing"
        )


def test_legs_that_have_seen_different_videos(pair: Pair) -> None:
    words = english(900, "legs")
    compare_legs(pair, *(chat(words, video(seed)) for seed in ("one leg", "the other leg")))
