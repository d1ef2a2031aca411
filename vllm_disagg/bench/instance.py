"""Facts about an OpenAI-compatible server, requested over HTTP."""

from __future__ import annotations

import re

import msgspec

from ..errors import ConfigError
from ..http_client import get


class ServedModel(msgspec.Struct, frozen=True):
    """First entry of /v1/models."""

    id: str
    root: str | None = None  # folder or hub name, for its tokenizer
    max_model_len: int | None = None


class _ModelsAnswer(msgspec.Struct):
    data: list[ServedModel]


class _ServerVersion(msgspec.Struct):
    version: str


def model(url: str) -> ServedModel:
    """Returns the first served model."""
    try:
        models = msgspec.json.decode(get(url, "/v1/models"), type=_ModelsAnswer).data
    except msgspec.DecodeError:
        raise ConfigError(f"{url}/v1/models: the answer is not that of vLLM") from None
    if not models:
        raise ConfigError(f"{url} serves no model")
    return models[0]


def version(url: str) -> str:
    """Returns the version of vLLM."""
    try:
        return msgspec.json.decode(get(url, "/version"), type=_ServerVersion).version
    except msgspec.DecodeError:
        raise ConfigError(f"{url}/version: the answer is not that of vLLM") from None


def kv_tokens(url: str) -> int:
    """Returns the tokens of KV cache of the single engine behind a URL."""
    text = get(url, "/metrics").decode(errors="replace")
    engines = re.findall(r"^vllm:cache_config_info\{(.*)\} ", text, re.MULTILINE)
    if not engines:
        raise ConfigError(
            f"{url}/metrics has no vllm:cache_config_info:"
            " give the address of an instance, not of a proxy"
        )
    if len(engines) > 1:
        raise ConfigError(
            f"{url} has {len(engines)} engines (data parallel): profile an instance with one"
        )
    blocks = re.search(r'\bnum_gpu_blocks="(\d+)"', engines[0])
    size = re.search(r'\bblock_size="(\d+)"', engines[0])
    if not blocks or not size:
        raise ConfigError(
            f"{url}/metrics: vllm:cache_config_info lacks num_gpu_blocks or block_size"
        )
    return int(blocks[1]) * int(size[1])
