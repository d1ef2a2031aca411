"""Facts about an OpenAI-compatible server, requested over HTTP."""

from __future__ import annotations

import re
from http.client import HTTPException

import msgspec

from ..errors import ConfigError
from ..http_client import MAX_PAGE_BYTES, PAGE_TIMEOUT_SECONDS, connect, get, headers


class ServedModel(msgspec.Struct, frozen=True):
    """First entry of /v1/models."""

    id: str
    root: str | None = None  # folder or hub name, for its tokenizer
    max_model_len: int | None = None


class _ModelsAnswer(msgspec.Struct):
    data: list[ServedModel]


class _FingerprintedAnswer(msgspec.Struct):
    system_fingerprint: str | None = None


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


def tensor_parallel_size(url: str, model: str) -> int | None:
    """Returns an engine's tensor parallel size; None if its answers do not name it.

    A fingerprint as `vllm-0.33.0-tp2-0123abcd` names all sizes above 1. Of an engine with
    `--fingerprint-mode hash` it names none, and 1 is returned.
    """
    body = msgspec.json.encode({"model": model, "prompt": [[1]], "max_tokens": 1})
    connection = connect(url, PAGE_TIMEOUT_SECONDS)
    try:
        connection.request("POST", "/v1/completions", body, headers())
        answer = msgspec.json.decode(
            connection.getresponse().read(MAX_PAGE_BYTES), type=_FingerprintedAnswer
        )
    except (OSError, HTTPException, msgspec.DecodeError):
        return None
    finally:
        connection.close()
    found = re.match(r"vllm-[^-]+(?:-tp(\d+))?", answer.system_fingerprint or "")
    return int(found[1] or 1) if found else None
