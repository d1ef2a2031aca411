"""One streamed completion of several prompts, with the time of every token."""

from __future__ import annotations

import http.client
import time
from collections.abc import Callable, Sequence

import msgspec

from ..errors import ConfigError, DisaggError
from ..fleet.conventions import OLDEST_VLLM
from ..http_client import connect, headers, reason
from .steps import TokenEvent

READ_TIMEOUT_SECONDS = 120.0  # without a byte


class _CompletionChoice(msgspec.Struct):
    index: int
    token_ids: list[int] | None = None


class _CompletionChunk(msgspec.Struct):
    choices: list[_CompletionChoice] = []
    error: msgspec.Raw | None = None


_decode = msgspec.json.Decoder(_CompletionChunk).decode


def complete(
    url: str,
    model: str,
    prompts: Sequence[Sequence[int]],
    answer: int,
    origin: float | None = None,
    on_decoding: Callable[[], None] | None = None,
) -> list[list[TokenEvent]]:
    """Returns the token arrivals of each prompt, in seconds since the request was sent.

    With `origin` they are in seconds since that reading of the monotonic clock. `on_decoding` is
    called at each token from the first of the last prompt on.
    Raises ConfigError if the server refuses the request, and DisaggError if the answer is
    incomplete.
    """
    body = msgspec.json.encode(
        {
            "model": model,
            # A list of prompts, even of one, is never handed over: one engine computes it whole.
            "prompt": prompts[0] if len(prompts) == 1 else prompts,
            "max_tokens": answer,
            "ignore_eos": True,
            "temperature": 0,
            "stream": True,
            "return_token_ids": True,
        }
    )
    connection = connect(url, READ_TIMEOUT_SECONDS)
    try:
        connection.connect()
        started_at = time.monotonic() if origin is None else origin
        connection.request("POST", "/v1/completions", body, headers())
        response = connection.getresponse()
        if response.status != 200:
            message = _message(response.read())
            raise ConfigError(f"{url} refused a request: {response.status}: {message}")
        return _read(response, len(prompts), answer, started_at, on_decoding)
    except (OSError, http.client.HTTPException) as error:
        raise DisaggError(f"{url} stopped answering: {reason(error)}") from None
    finally:
        connection.close()


def _read(
    response: http.client.HTTPResponse,
    count: int,
    answer: int,
    started_at: float,
    on_decoding: Callable[[], None] | None,
) -> list[list[TokenEvent]]:
    """Reads the stream of `count` answers of `answer` tokens each."""
    events: list[list[TokenEvent]] = [[] for _ in range(count)]
    for line in response:
        if not line.startswith(b"data: {"):
            continue
        now = time.monotonic() - started_at
        try:
            chunk = _decode(line[6:])
        except msgspec.DecodeError as error:
            raise DisaggError(
                f"an answer is not a completion in the format of vLLM's streams: {error}"
            ) from None
        if chunk.error:
            raise DisaggError(f"a request failed: {_message(line[6:])}")
        for choice in chunk.choices:
            if not 0 <= choice.index < count:
                raise DisaggError(f"an answer has index {choice.index}, with {count} prompts")
            if choice.token_ids:
                events[choice.index].append(TokenEvent(now, len(choice.token_ids)))
        if on_decoding and all(events):
            on_decoding()
    if any(sum(event.tokens for event in answers) != answer for answers in events):
        raise DisaggError(
            f"an answer ended early, or had no token ids (vLLM {OLDEST_VLLM} or newer is needed)"
        )
    return events


def _message(content: bytes) -> str:
    """Returns the error message of an answer, shortened."""
    try:
        error = msgspec.json.decode(content)["error"]
        return str(error["message"] if isinstance(error, dict) else error)[:300]
    except (msgspec.DecodeError, KeyError, TypeError):
        return content[:300].decode(errors="replace")
