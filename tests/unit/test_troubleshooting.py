"""Produces each line that docs/how-to/troubleshooting.md quotes, and looks for the quote in it."""

from __future__ import annotations

import argparse
import asyncio
import logging
import re
import signal
import socket
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import msgspec
import pytest

from vllm_disagg import config
from vllm_disagg.errors import BadGrant, ConfigError
from vllm_disagg.fleet import grants, keys, sealing
from vllm_disagg.fleet.keys import FleetKey
from vllm_disagg.launcher import machine, model_check, plan
from vllm_disagg.launcher.machine import MachineFacts
from vllm_disagg.launcher.plan import UpOptions
from vllm_disagg.launcher.processes import ExitCause
from vllm_disagg.protocol.events import LoadResult, Reason
from vllm_disagg.protocol.peers import EngineInfo, WorkerInfo
from vllm_disagg.proxy import flags, settings
from vllm_disagg.proxy.http import bearer
from vllm_disagg.proxy.http.addresses import AllowedNetworks
from vllm_disagg.proxy.http.request import HttpRequest
from vllm_disagg.proxy.membership import discovery, sources, state_changes
from vllm_disagg.proxy.membership.discovery import Discovery
from vllm_disagg.proxy.requests import first_token
from vllm_disagg.proxy.requests.admin import Admin
from vllm_disagg.proxy.routing.fleet import Fleet, Instance
from vllm_disagg.trace import TransferTrace

PAGE = Path(__file__).parents[2] / "docs" / "how-to" / "troubleshooting.md"
HEADING = re.compile(r"^### `(.*)`$", re.MULTILINE)
KEY = FleetKey(b"k" * keys.KEY_BYTES)
NO_KEYS = bearer.AcceptedKeys([], "")

Produce = Callable[[Path], object]
PRODUCED: dict[str, Produce] = {}  # by the first words of the quote


def produces(words: str) -> Callable[[Produce], Produce]:
    """Registers the function that produces the line with these words; it may raise or log it."""

    def register(produce: Produce) -> Produce:
        PRODUCED[words] = produce
        return produce

    return register


def engine(role: Any, **layout: str) -> EngineInfo:
    return EngineInfo(f"of {role}", role, [], layout)


def instance(role: Any, of: EngineInfo | None, refusal: str = "") -> Instance:
    made = Instance(f"http://{role}:1", role)
    made.on_probe_answered("m", of, refusal=refusal)
    return made


def watcher(key: FleetKey) -> Discovery:
    return Discovery(Fleet(), {}, key, lambda: None, NO_KEYS, 1.0, 100.0)


def key_file(folder: Path, text: str, mode: int = 0o600) -> str:
    path = folder / "fleet.key"
    path.write_text(text)
    path.chmod(mode)
    return str(path)


@produces("no fleet key: set")
def _(_: Path) -> object:
    return config.parse({})


@produces("a proxy of vllm-disagg answers there")
def _(_: Path) -> object:
    return discovery.IS_PROXY


@produces("No such file")
def _(folder: Path) -> object:
    return keys.load(str(folder / "none"))


@produces("not 64 hexadecimal")
def _(folder: Path) -> object:
    return keys.load(key_file(folder, "hello"))


@produces("other users of this machine")
def _(folder: Path) -> object:
    return keys.load(key_file(folder, "00" * keys.KEY_BYTES, 0o644))


@produces("no setting is named")
def _(_: Path) -> object:
    return config.parse({"leese": 3, "key_file": "k"})


@produces("lease is '10 sec'")
def _(_: Path) -> object:
    return config.parse({"lease": "10 sec", "key_file": "k"})


@produces("is a wildcard")
def _(_: Path) -> object:
    return config.parse({"host": "0.0.0.0", "key_file": "k"})


@produces("is not loopback")
def _(_: Path) -> object:
    return config.parse({"host": "10.0.0.1"})


@produces("was ended by SIGKILL")
def _(_: Path) -> object:
    return f"decode-0 {ExitCause().explain(-signal.SIGKILL)}"


@produces("no such folder")
def _(folder: Path) -> object:
    return model_check.check(str(folder / "none"), [])


@produces("cannot listen on")
def _(_: Path) -> object:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        return machine.check_port("127.0.0.1", taken.getsockname()[1])


@produces("excludes the plugin")
def _(_: Path) -> object:
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("VLLM_PLUGINS", "other")
        return machine.check_plugin()


@produces("GPUs, and 1 GPU")
def _(_: Path) -> object:
    facts = MachineFacts((0,), ("0",), 8.0, "vllm", "vllm-disagg")
    return plan.make(UpOptions(model="m", tensor_parallel=2), facts, [1, 2], "k")


@produces("lets others in")
def _(_: Path) -> object:
    parser = argparse.ArgumentParser()
    flags.add_arguments(parser)
    words = ["--decode", "http://h:1", "--host", "0.0.0.0"]
    return settings.from_arguments(parser.parse_args(words))


@produces("without this project's connector")
def _(_: Path) -> object:
    return instance("decode", None).unavailable_reason


@produces("grants (minted with another key)")
def _(_: Path) -> object:
    refusal = watcher(KEY).prober._explain("minted with another key")
    return instance("decode", None, refusal).unavailable_reason


@produces("grants (not a grant of version 2")
def _(_: Path) -> object:
    """As an engine of another release answers: by the key it is a grant, and not by its fields."""
    token = sealing.seal(KEY, grants.USE, msgspec.msgpack.encode([3, "probe"]))
    with pytest.raises(BadGrant) as refused:
        grants.verify(KEY, token)
    refusal = watcher(KEY).prober._explain(str(refused.value))
    assert "key_file" not in refusal
    return instance("decode", None, refusal).unavailable_reason


@produces("VLLM_BATCH_INVARIANT=1 does not hold here")
def _(_: Path) -> object:
    pytest.importorskip("vllm")
    from vllm.config import CompilationMode

    from kv_connectors import worker

    vllm_config = SimpleNamespace(
        model_config=SimpleNamespace(
            max_model_len=4096, architectures=["M"], hf_text_config=SimpleNamespace()
        ),
        quant_config=None,
        compilation_config=SimpleNamespace(mode=CompilationMode.NONE),
    )
    made = worker.WorkerSide(config.Config(), KEY, 0, vllm_config, None)  # type: ignore[arg-type]
    made._gpu = SimpleNamespace()  # type: ignore[assignment]
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("VLLM_BATCH_INVARIANT", "1")
        layer = SimpleNamespace(kv_lora_rank=512)
        patch.setattr(worker.compat, "attentions", lambda *_: {"a": layer})
        patch.setattr(worker.compat, "experts", lambda _: {})
        patch.setattr(worker.compat, "linear_backend", lambda *_: "auto")
        patch.setattr(worker.compat, "splits_adapters", lambda _: False)
        return made._varies(["a"])


@produces("this proxy has no fleet key")
def _(_: Path) -> object:
    refusal = watcher(FleetKey(None)).prober._explain("minted with another key")
    return instance("decode", None, refusal).unavailable_reason


@produces("is given as --prefill")
def _(_: Path) -> object:
    return instance("prefill", engine("decode")).unavailable_reason


@produces("are never paired")
def _(_: Path) -> object:
    prefill = instance("prefill", engine("prefill", block_size="16"))
    decode = instance("decode", engine("decode", block_size="32"))
    return state_changes.log_mismatches(prefill, [decode])


@produces("P's workers are on the loopback")
def _(_: Path) -> object:
    made = []
    described: list[tuple[Any, str]] = [("prefill", "one"), ("decode", "another")]
    for role, machine_name in described:
        worker = WorkerInfo(role, "tcp://127.0.0.1:1", "tcp://127.0.0.1:2", host=machine_name)
        made.append(instance(role, EngineInfo(role, role, [worker], {})))
    return state_changes.log_mismatches(made[0], made[1:])


@produces("this engine recomputes")
def _(_: Path) -> object:
    return TransferTrace().log_failure(LoadResult("ab" * 16, Reason.PEER_TIMEOUT))


@produces("no key was sent")
def _(_: Path) -> object:
    return bearer.unauthorized(HttpRequest())[2].decode()


@produces("changes over HTTP are off")
def _(_: Path) -> object:
    nothing: Any = None
    admin = Admin(nothing, None, None, AllowedNetworks(), NO_KEYS, roles_follow_load=False)
    refused = admin.refusal(HttpRequest("POST", "/disagg/instances"), nothing)
    assert refused
    return refused[2].decode()


@produces("fleet file: ignored")
def _(folder: Path) -> object:
    async def follow() -> None:
        task = asyncio.create_task(
            sources.follow_file(str(folder / "none"), 9.0, *2 * [lambda _: None])
        )
        await asyncio.sleep(0)
        task.cancel()

    return asyncio.run(follow())


@produces("made different tokens")
def _(_: Path) -> object:
    pair = first_token.KnownPair()
    relay = first_token.FirstTokenRelay(pair, "P and D", lambda *_: True, lambda _: None)
    return relay.on_difference()


def quotes() -> list[str]:
    return HEADING.findall(PAGE.read_text())


@pytest.mark.parametrize("quote", quotes())
def test_the_quoted_line_is_what_is_printed(
    quote: str, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    (produce,) = (made for words, made in PRODUCED.items() if words in quote)
    with caplog.at_level(logging.INFO):
        logging.getLogger("vllm_disagg").propagate = True
        try:
            said = str(produce(tmp_path))
        except ConfigError as error:
            said = str(error)
    pattern = ".*".join(re.escape(part.strip()) for part in quote.split("..."))
    assert re.search(pattern, said + caplog.text), (said, caplog.text)


def test_there_are_twenty_entries_and_none_is_twice() -> None:
    assert len(quotes()) == len(set(quotes())) == len(PRODUCED) >= 20
