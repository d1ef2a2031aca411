"""What an OpenAI-compatible server says of itself, asked over HTTP."""

from __future__ import annotations

import http.client
import os
import re
from urllib.parse import urlsplit

import msgspec

from ..errors import ConfigError

TIMEOUT = 10.0  # seconds for a question


class Model(msgspec.Struct, frozen=True):
    """The first model of /v1/models."""

    id: str
    root: str | None = None  # folder or hub name, for its tokenizer
    max_model_len: int | None = None


class _Models(msgspec.Struct):
    data: list[Model]


class _Version(msgspec.Struct):
    version: str


def address(flag: str, url: str) -> str:
    """The URL without what follows its port, or ConfigError that names the flag."""
    try:
        parts = urlsplit(url)
        port = parts.port
    except ValueError:
        parts, port = urlsplit(""), None
    if parts.scheme not in ("http", "https") or not parts.hostname or parts.path.rstrip("/") not in ("", "/v1"):
        raise ConfigError(f"{flag}: {url} is not a URL such as http://127.0.0.1:8000")
    if parts.username or parts.query or parts.fragment:
        raise ConfigError(f"{flag}: {url} has more than a host and a port; an API key goes into OPENAI_API_KEY")
    host = f"[{parts.hostname}]" if ":" in parts.hostname else parts.hostname
    return f"{parts.scheme}://{host}" + (f":{port}" if port else "")


def connect(url: str, timeout: float) -> http.client.HTTPConnection:
    parts = urlsplit(url)
    kind = http.client.HTTPSConnection if parts.scheme == "https" else http.client.HTTPConnection
    return kind(parts.netloc, timeout=timeout)


def headers() -> dict[str, str]:
    """As `vllm bench serve` sends them."""
    key = os.environ.get("OPENAI_API_KEY")
    return {"Content-Type": "application/json"} | ({"Authorization": f"Bearer {key}"} if key else {})


def get(url: str, path: str) -> bytes:
    """A page, or ConfigError."""
    connection = connect(url, TIMEOUT)
    try:
        connection.request("GET", path, headers=headers())
        answer = connection.getresponse()
        content = answer.read()
    except (OSError, http.client.HTTPException, UnicodeError) as error:  # the last: no name of a host
        raise ConfigError(f"cannot reach {url}: {reason(error)}: is it running?") from None
    finally:
        connection.close()
    if answer.status == 401:
        raise ConfigError(f"{url} wants an API key: put it into the environment as OPENAI_API_KEY")
    if answer.status != 200:
        raise ConfigError(f"{url}{path} answered {answer.status}: it is not a vLLM, nor a proxy in front of one")
    return content


def reason(error: Exception) -> str:
    return getattr(error, "strerror", None) or str(error) or type(error).__name__


def model(url: str) -> Model:
    try:
        models = msgspec.json.decode(get(url, "/v1/models"), type=_Models).data
    except msgspec.DecodeError:
        raise ConfigError(f"{url}/v1/models does not answer as vLLM does") from None
    if not models:
        raise ConfigError(f"{url} serves no model")
    return models[0]


def version(url: str) -> str:
    try:
        return msgspec.json.decode(get(url, "/version"), type=_Version).version
    except msgspec.DecodeError:
        raise ConfigError(f"{url}/version does not answer as vLLM does") from None


def kv_tokens(url: str) -> int:
    """Tokens that fit into the KV cache of the one engine behind a URL."""
    text = get(url, "/metrics").decode(errors="replace")
    engines = re.findall(r"^vllm:cache_config_info\{(.*)\} ", text, re.MULTILINE)
    if not engines:
        raise ConfigError(
            f"{url}/metrics has no vllm:cache_config_info: give the address of an instance itself, not of a proxy"
        )
    if len(engines) > 1:
        raise ConfigError(f"{url} has {len(engines)} engines (data parallel): profile an instance with one")
    blocks, size = (re.search(rf'\b{name}="(\d+)"', engines[0]) for name in ("num_gpu_blocks", "block_size"))
    if not blocks or not size:
        raise ConfigError(f"{url}/metrics: vllm:cache_config_info does not say num_gpu_blocks and block_size")
    return int(blocks[1]) * int(size[1])
