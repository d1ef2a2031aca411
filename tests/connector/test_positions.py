"""M-RoPE: vLLM's positions of a token are the same at P and at D.

Of models as Qwen2.5-VL and Qwen3-VL, whose own modules need torchvision, PaddleOCR-VL's module has
the same function.
"""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

pytest.importorskip("vllm")

import numpy as np
import torch
from vllm.model_executor.layers.rotary_embedding import MRotaryEmbedding
from vllm.multimodal.inputs import PlaceholderRange
from vllm_release import as_of_032

pytestmark = as_of_032("computes positions by other functions")
MERGED = 2  # patches of an image that make one token, in each direction
TEXT_TOKEN, IMAGE_TOKEN = 7, 8


def positions(tokens: list[int], images: list[Any]) -> tuple[torch.Tensor, int]:
    """Returns vLLM's positions of a prompt, and how far the answer's are from its length."""
    from vllm.model_executor.models.paddleocr_vl import (
        PaddleOCRVLForConditionalGeneration as Model,
    )

    vision = SimpleNamespace(spatial_merge_size=MERGED, tokens_per_second=1.0)
    model: Any = SimpleNamespace(config=SimpleNamespace(vision_config=vision))
    model.iter_mm_grid_thw = lambda features: Model.iter_mm_grid_thw(model, features)
    return Model.get_mrope_input_positions(model, tokens, images)


def image(offset: int, height: int, width: int) -> Any:
    """Returns an image of height x width tokens at a place of the prompt."""
    grid = torch.tensor([1, height * MERGED, width * MERGED])
    return SimpleNamespace(
        modality="image",
        mm_position=PlaceholderRange(offset, height * width),
        data={"image_grid_thw": SimpleNamespace(data=grid)},
    )


IMAGES = [image(5, 4, 6), image(40, 7, 2)]
PROMPT = [TEXT_TOKEN] * 80
for one in IMAGES:
    place = one.mm_position
    PROMPT[place.offset : place.offset + place.length] = [IMAGE_TOKEN] * place.length


def answer_positions(delta: int, start: int, count: int) -> np.ndarray[Any, Any]:
    """Returns the positions that vLLM gives to generated tokens."""
    found = np.zeros((3, count), dtype=np.int64)
    MRotaryEmbedding.get_next_input_positions_tensor(found, 0, delta, start, count)
    return found


def test_an_image_moves_the_positions_behind_it() -> None:
    found, delta = positions(PROMPT, IMAGES)
    assert found.shape == (3, len(PROMPT))
    assert delta < 0


def test_a_prompt_without_its_last_token_has_the_same_positions() -> None:
    """P computes it so where a model has sliding windows or states."""
    whole, delta = positions(PROMPT, IMAGES)
    shorter, same_delta = positions(PROMPT[:-1], IMAGES)
    assert torch.equal(shorter, whole[:, :-1])
    assert same_delta == delta


def test_the_next_prompt_gives_an_answer_the_positions_of_its_decode() -> None:
    """So P may read the KV of D's answer back, also if the next turn has a further image."""
    whole, delta = positions(PROMPT, IMAGES)
    answered = 9
    start = len(PROMPT)
    later = image(start + answered + 3, 5, 5)
    prompt = [*PROMPT, *[TEXT_TOKEN] * (answered + 3), *[IMAGE_TOKEN] * 25, TEXT_TOKEN]
    next_turn, _ = positions(prompt, [*IMAGES, later])
    assert torch.equal(next_turn[:, :start], whole)
    decoded = answer_positions(delta, start, answered)
    assert np.array_equal(next_turn[:, start : start + answered].numpy(), decoded)
