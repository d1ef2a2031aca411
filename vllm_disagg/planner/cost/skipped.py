"""Modules that the quantization of a checkpoint names, matched by name and layer.

A module is named as in vLLM, from its layer on: `self_attn.q_proj` in `layers.3`. A name in a
checkpoint is a regular expression after `re:`, a pattern with `*`, or a module with all in it.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from fnmatch import fnmatchcase
from typing import Any

FIELDS = ("ignore", "modules_to_not_convert", "exclude_modules")
_ROOT = re.compile(r"(?:model\.|language_model\.|backbone\.)*(?=layers\.)")
_LAYER = re.compile(r"layers\.(\d+)\.?(.*)")
# Modules that no checkpoint quantizes, or whose weights the planner does not count: norms, routers
# and other gates, convolutions, embeddings, vision, layers for drafts, and what an indexer computes
# of hidden states.
_NOT_COUNTED = re.compile(
    r"norm|router|gate$|gate\.e_score|e_score|in_proj_(ba|b|a)$|conv1d|rotary|embed|^head$|lm_head"
    r"|vision|visual|audio|projector|mm_proj|patch|\bmtp\b|eh_proj|shared_head|Attention$"
    r"|indexers_proj|indexer\.(wk|weights_proj)$"
)
# Modules that vLLM computes as one, and that some checkpoints name so.
_FUSED = {
    "q_proj": "qkv_proj",
    "k_proj": "qkv_proj",
    "v_proj": "qkv_proj",
    "gate_proj": "gate_up_proj",
    "up_proj": "gate_up_proj",
    "in_proj_qkv": "in_proj_qkvz",
    "in_proj_z": "in_proj_qkvz",
}


# Parts of a regular expression that may take exponential or high polynomial time: a group that
# repeats, and a repeat of anything but a digit.
_REPEATED_GROUP = re.compile(r"\)[*+{]")
_REPEAT = re.compile(r"(?<!\\d)[*+{]")
MAX_REPEATS = 4  # of a pattern


class ModuleNames:
    """Names of modules, and which of them a model has.

    Raises ValueError for a regular expression that is wrong, or that may take too long.
    """

    def __init__(self, names: Iterable[str]) -> None:
        self._everywhere: list[str] = []
        self._in_layer: dict[int, list[str]] = {}
        self._unmatched: dict[tuple[int | None, str], str] = {}
        self._expressions: dict[str, re.Pattern[str]] = {}
        for name in names:
            found = _LAYER.fullmatch(_ROOT.sub("", name, count=1))
            if found:
                layer, pattern = int(found[1]), found[2] or "*"
                self._in_layer.setdefault(layer, []).append(pattern)
                self._unmatched[layer, pattern] = name
            else:
                pattern = name if name.startswith("re:") else _ROOT.sub("", name, count=1)
                if pattern.startswith("re:"):
                    self._expressions[pattern] = _compiled(pattern[3:])
                self._everywhere.append(pattern)
                self._unmatched[None, pattern] = name

    def count(self, module: str, layers: Sequence[int]) -> int:
        """Returns the number of `layers` in which a module is named."""
        if not self._everywhere and not self._in_layer:
            return 0
        return sum(self._has(module, layer) for layer in layers)

    def _has(self, module: str, layer: int) -> bool:
        parent, _, leaf = module.rpartition(".")
        is_named = False
        for name in (module, f"{parent}.{_FUSED[leaf]}" if leaf in _FUSED else ""):
            if not name:
                continue
            path = f"layers.{layer}.{name}"
            for key, found in (
                *((layer, pattern) for pattern in self._in_layer.get(layer, ())),
                *((None, pattern) for pattern in self._everywhere),
            ):
                if self._matches(found, path if key is None else name):
                    self._unmatched.pop((key, found), None)
                    is_named = True
        return is_named

    def _matches(self, pattern: str, path: str) -> bool:
        """Returns whether a name is a module's or that of one that contains it."""
        if expression := self._expressions.get(pattern):
            roots = ("model.", "language_model.model.", "")
            return any(expression.match(root + path) for root in roots)
        if "*" in pattern:
            return fnmatchcase(path, pattern) or fnmatchcase(path, f"{pattern}.*")
        return f".{pattern}." in f".{path}."

    def unknown(self, layers: int) -> str:
        """Returns a name that no counted module of a model has, or an empty text."""
        for (layer, pattern), name in self._unmatched.items():
            is_draft = layer is not None and layer >= layers
            if not is_draft and not _NOT_COUNTED.search(pattern.rstrip("*.")):
                return name
        return ""


def skipped(quantization: dict[str, Any]) -> Iterable[str]:
    """Yields the names of modules that are not quantized."""
    for field in FIELDS:
        names = quantization.get(field)
        if isinstance(names, list):
            yield from map(str, names)


def _compiled(pattern: str) -> re.Pattern[str]:
    """Compiles a regular expression. Raises ValueError if it is wrong, or may take too long."""
    try:
        found = re.compile(pattern)
    except (re.error, RecursionError, OverflowError) as error:
        raise ValueError(f"{pattern[:80]!r} is no regular expression: {error}") from None
    if _REPEATED_GROUP.search(pattern) or len(_REPEAT.findall(pattern)) > MAX_REPEATS:
        raise ValueError(
            f"the regular expression {pattern[:80]!r} repeats a group, or has more than"
            f" {MAX_REPEATS} repeats"
        )
    return found
