"""Lets vLLM import a torchvision for CUDA beside a torch for CPUs, when imported at Python's start.

Its compiled part does not load then, and its import fails for two operators of that part alone.
Resizing of images and videos is Python over torch.
"""

from __future__ import annotations

from import_hooks import before_import

BOXES = "(Tensor dets, Tensor scores, float iou_threshold) -> Tensor"
_kept: list[object] = []  # an operator lives as long as its library


def define_operators() -> None:
    """Defines the operators without code for them."""
    import torch

    library = torch.library.Library("torchvision", "DEF")
    for name in ("nms", "qnms"):
        library.define(name + BOXES)
    _kept.append(library)


before_import("torchvision", define_operators)
