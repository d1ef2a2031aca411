"""Loads a model by name, by folder or by the path of its config.json."""

from __future__ import annotations

import json
import os.path
from pathlib import Path
from typing import Any

from ...errors import ConfigError
from .families import parse
from .known_models import MODELS, key_of
from .sizes import ModelCosts


def load(text: str, kv_cache_dtype: str = "auto", gpu: str = "") -> ModelCosts:
    """Loads a model by name, by folder or by the path of its config.json.

    `kv_cache_dtype` is vLLM's flag, `gpu` the type of GPU that serves it, if known. Raises
    ConfigError with the accepted values.
    """
    served = {"kv_cache_dtype": kv_cache_dtype, "served_on": gpu.lower()}
    if key := key_of(text):
        return parse(key, {**MODELS[key], **served})
    # `os.path` takes a text that is too long for a path as none.
    path = Path(text) / "config.json" if os.path.isdir(text) else Path(text)
    if not os.path.isfile(path):
        raise ConfigError(
            f"--model: {text} is neither a folder with a config.json nor a known name:"
            f" give one of {', '.join(MODELS)}"
        )
    config = _object(path)
    modelopt = path.with_name("hf_quant_config.json")
    if "quantization_config" not in config and modelopt.is_file():
        quantization = _object(modelopt).get("quantization")
        if not isinstance(quantization, dict):
            raise ConfigError(f"--model: {modelopt} has no quantization")
        config["quantization_config"] = {"quant_method": "modelopt", **quantization}
    return parse(text, {**config, **served})


def _object(path: Path) -> dict[str, Any]:
    """Reads a JSON object."""
    try:
        found = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError) as error:
        raise ConfigError(f"--model: {path} cannot be read as JSON: {error}") from None
    if not isinstance(found, dict):
        raise ConfigError(f"--model: {path} holds no JSON object")
    return found
