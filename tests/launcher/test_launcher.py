"""Tests the launcher: its plan, and the flags that it refuses."""

from __future__ import annotations

import json
import os
import shlex
import socket
import subprocess
import sys
from importlib import metadata
from pathlib import Path
from types import SimpleNamespace

import pytest

from vllm_disagg import cli
from vllm_disagg.errors import ConfigError
from vllm_disagg.launcher import machine, model_check, plan
from vllm_disagg.launcher.machine import MachineFacts
from vllm_disagg.launcher.plan import UpOptions


def cpus(count: int, memory: float = 64.0, kv_space: str = "") -> MachineFacts:
    return MachineFacts(tuple(range(count)), None, memory, "vllm", "vllm-disagg", kv_space=kv_space)


def gpus(count: int) -> MachineFacts:
    return MachineFacts(tuple(range(8)), tuple(map(str, range(count))), 64.0, "vllm", "vllm-disagg")


def planned(facts: MachineFacts, **flags: object) -> plan.LaunchPlan:
    options = UpOptions(model="m", **flags)  # type: ignore[arg-type]
    ports = list(range(9100, 9100 + options.prefill + options.decode))
    return plan.make(options, facts, ports, "fleet.key")


# The plan -----------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("cores", "flags", "bound"),
    [
        (2, {}, ["0", "1"]),
        (5, {}, ["0-1", "2-3"]),
        (8, {}, ["0-2", "4-6"]),  # each leaves one core to what is not OpenMP
        (4, {"tensor_parallel": 2}, ["0|1", "2|3"]),
        (32, {"prefill": 2, "tensor_parallel": 2}, ["0-3|5-8", "10-13|15-18", "20-23|25-28"]),
        (2, {"decode": 2}, ["0", "1", "0"]),
        (1, {"tensor_parallel": 2}, ["0|0", "0|0"]),
    ],
)
def test_cores(cores: int, flags: dict[str, object], bound: list[str]) -> None:
    made = planned(cpus(cores), **flags)
    assert [engine.env["VLLM_CPU_OMP_THREADS_BIND"] for engine in made.engines] == bound
    ranks = sum(len(text.split("|")) for text in bound)
    assert len(made.warnings) == (cores < ranks)


def test_cores_that_are_not_consecutive() -> None:
    facts = MachineFacts((0, 2, 4, 5, 6, 9), None, 8.0, "vllm", "vllm-disagg")
    assert [e.env["VLLM_CPU_OMP_THREADS_BIND"] for e in planned(facts).engines] == [
        "0,2,4",
        "5-6,9",
    ]


@pytest.mark.parametrize(
    ("memory", "set_by_user", "space"),
    [(1.0, "", "1"), (64.0, "", "8"), (900.0, "", "16"), (1.0, "3", "3")],
)
def test_memory_for_kv(memory: float, set_by_user: str, space: str) -> None:
    made = planned(cpus(8, memory, set_by_user))
    assert {engine.env["VLLM_CPU_KVCACHE_SPACE"] for engine in made.engines} == {space}
    assert f"{space} GiB" in " ".join(made.notes)
    assert [w for w in made.warnings if "memory" in w] == (
        [f"1 GiB of memory are free; 2 workers may take {2 * int(space) + 4} GiB and their weights"]
        if memory < 2
        else []
    )


def test_memory_for_kv_that_is_no_number() -> None:
    with pytest.raises(ConfigError, match="VLLM_CPU_KVCACHE_SPACE=4G is not"):
        planned(cpus(8, kv_space="4G"))


def test_gpus() -> None:
    made = planned(gpus(6), prefill=1, decode=2, tensor_parallel=2)
    assert [engine.env for engine in made.engines] == [
        {"CUDA_VISIBLE_DEVICES": d} for d in ("0,1", "2,3", "4,5")
    ]
    with pytest.raises(
        ConfigError, match="3 instances with tensor parallel size 2 need 6 GPUs, and 5 GPUs can"
    ):
        planned(gpus(5), prefill=1, decode=2, tensor_parallel=2)


def test_the_commands() -> None:
    made = planned(cpus(4), tensor_parallel=2, port=8123, extra=["--dtype", "float32"])
    prefill, decode = made.engines
    assert (prefill.name, decode.name) == ("prefill-0", "decode-0")
    assert prefill.argv[:5] == ["vllm", "serve", "m", "--host", "127.0.0.1"]
    assert prefill.argv[-2:] == ["--dtype", "float32"]
    assert (
        "--disable-access-log-for-endpoints=/health,/metrics" in prefill.argv
    )  # the proxy asks four times a second
    for engine, role in ((prefill, "kv_producer"), (decode, "kv_consumer")):
        transfer = json.loads(engine.argv[engine.argv.index("--kv-transfer-config") + 1])
        assert transfer == {
            "kv_connector": "DisaggConnector",
            "kv_role": role,
            "kv_load_failure_policy": "recompute",
            "kv_connector_extra_config": {"key_file": "fleet.key"},
        }
        assert engine.argv[engine.argv.index("--tensor-parallel-size") + 1] == "2"
    said = " ".join(made.proxy.argv[1:])
    assert said == (
        "proxy --host 127.0.0.1 --port 8123 --key-file fleet.key "
        "--prefill http://127.0.0.1:9100 --decode http://127.0.0.1:9101"
    )


def test_engines_whose_roles_follow_the_load_take_both() -> None:
    made = planned(cpus(4), prefill=1, decode=2, changes_roles=True)
    for engine in made.engines:
        transfer = json.loads(engine.argv[engine.argv.index("--kv-transfer-config") + 1])
        assert transfer["kv_role"] == "kv_both"
    assert made.proxy.argv.count("--decode") == 2


def test_each_role_and_the_proxy_get_their_own_arguments() -> None:
    made = planned(
        cpus(4),
        extra=["--dtype", "float32"],
        role_extra={"prefill": ["--max-num-seqs", "4"], "decode": ["--enforce-eager"]},
        proxy_args=["--spill"],
    )
    prefill, decode = made.engines
    assert prefill.argv[-4:] == ["--dtype", "float32", "--max-num-seqs", "4"]
    assert decode.argv[-3:] == ["--dtype", "float32", "--enforce-eager"]
    assert made.proxy.argv[-1] == "--spill"


def test_what_is_printed_can_be_typed(tmp_path: Path) -> None:
    """Runs the commands in a shell, with stand-ins that print their arguments."""
    for name in ("vllm", "vllm-disagg"):
        script = tmp_path / name
        script.write_text('#!/bin/sh\nprintf "%s\\n" "$VLLM_CPU_OMP_THREADS_BIND" "$@"\n')
        script.chmod(0o755)
    options = UpOptions(model="my model", extra=["--served-model-name", "it's"], tensor_parallel=2)
    made = plan.make(options, cpus(4), [9100, 9101], "a key")
    lines = plan.by_hand(made, cpus(4), "a key").splitlines()
    env = {"PATH": f"{tmp_path}:{os.environ['PATH']}"}
    said = [
        subprocess.check_output(["sh", "-c", f"{line.removesuffix(' &')}"], env=env, text=True)
        for line in lines
    ]
    assert said[0].splitlines() == ["", "key", "a key"]
    assert said[1].splitlines() == ["0|1", *made.engines[0].argv[1:]]
    assert said[-1].splitlines() == ["", *made.proxy.argv[1:]]
    assert json.loads(shlex.split(plan.example(options, made))[-1])["model"] == "it's"


@pytest.mark.parametrize(
    ("extra", "name"),
    [
        ([], "m"),
        (["--dtype", "float32"], "m"),
        (["--served-model-name", "tiny"], "tiny"),
        (["--served_model_name=tiny", "--dtype", "auto"], "tiny"),
        (["--dtype", "auto", "--served-model-name"], "m"),  # vLLM will refuse it
    ],
)
def test_the_example_names_the_model_that_is_served(extra: list[str], name: str) -> None:
    options = UpOptions(model="m", extra=extra)
    made = plan.make(options, cpus(2), [9100, 9101], "a key")
    assert json.loads(shlex.split(plan.example(options, made))[-1])["model"] == name


@pytest.mark.parametrize(
    ("key_file", "key"), [("/tmp/a b/admin.key", "of the file"), ("", "of the user")]
)
def test_the_fleet_commands_hold_the_admin_key(key_file: str, key: str, tmp_path: Path) -> None:
    """Runs the commands in a shell, with a curl that prints its arguments; none holds the key."""
    (tmp_path / "curl").write_text('#!/bin/sh\nprintf "%s\\n" "$@"\n')
    (tmp_path / "curl").chmod(0o755)
    if key_file:
        key_file = str(tmp_path / "admin key")
        Path(key_file).write_text(f"{key}\n")
    made = plan.make(UpOptions(model="m"), cpus(2), [9100, 9101], "a key")
    env = {"PATH": f"{tmp_path}:{os.environ['PATH']}", "DISAGG_ADMIN_KEY": "of the user"}
    seen, drain = plan.fleet_commands(made, key_file)
    assert key not in seen + drain
    said = [
        subprocess.check_output(["sh", "-c", line], env=env, text=True).splitlines()
        for line in (seen, drain)
    ]
    assert said[0] == [f"{made.proxy.url}/disagg/instances", "-H", f"Authorization: Bearer {key}"]
    assert f"Authorization: Bearer {key}" in said[1] and json.loads(said[1][-1]) == {
        "url": "http://127.0.0.1:9100"
    }


@pytest.mark.parametrize(
    "word",
    [
        "--kv-transfer-config",
        "--kv_transfer_config={}",
        "--kv-transfer-config.kv_role",
        "--port=1",
        "-tp",
        "-tp2",
        "-t",
        "--tensor-parallel",
        "--tensor_par=2",
        "--kv-transfer.kv_role",
        "--host",
    ],
)
def test_what_is_ours_cannot_be_given_twice(word: str) -> None:
    with pytest.raises(ConfigError, match="after --"):
        planned(cpus(2), extra=["--dtype", "auto", word])


def test_other_flags_of_vllm_are_passed_on() -> None:
    words = ["--model-impl=vllm", "--tokenizer", "t", "--data-parallel-size", "1", "-O3", "-", "--"]
    assert plan.own_flags([*words, "--hf-overrides", "{}", "--port-range", "--", ""]) == []


# What it refuses ----------------------------------------------------------------------------------


def refused(capsys: pytest.CaptureFixture[str], *words: str) -> str:
    """Returns the single line of the error of `up`."""
    assert cli.main(["up", *words]) == 2
    said = capsys.readouterr()
    assert said.out == "" and said.err.count("\n") == 1, said
    return said.err.removeprefix("vllm-disagg up: ")


def installed(monkeypatch: pytest.MonkeyPatch, version: str = "0.32.0+cpu") -> None:
    """Pretends that this version of vLLM is installed."""
    ours = metadata.version
    monkeypatch.setattr(metadata, "version", lambda name: version if name == "vllm" else ours(name))
    monkeypatch.setattr(machine, "executable", lambda name: name)
    monkeypatch.setattr(model_check, "_check_hub", lambda model: None)


def test_models_that_are_none(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert "no such folder" in refused(capsys, "--model", str(tmp_path / "gone"))
    assert "no such folder" in refused(capsys, "--model", "./gone")
    assert "no config.json" in refused(capsys, "--model", str(tmp_path))


def test_a_machine_without_what_is_needed(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def missing(name: str) -> str:
        raise metadata.PackageNotFoundError(name)

    installed(monkeypatch, "0.27.1+cpu")
    assert "vLLM 0.27.1+cpu is too old" in refused(capsys, "--model", "a/b")
    installed(monkeypatch)
    monkeypatch.setenv("VLLM_PLUGINS", "other")
    assert "VLLM_PLUGINS=other excludes the plugin vllm_disagg" in refused(capsys, "--model", "a/b")
    monkeypatch.setattr(metadata, "entry_points", lambda **_: ())
    assert "does not find the plugin vllm_disagg" in refused(capsys, "--model", "a/b")
    monkeypatch.setattr(metadata, "version", missing)
    assert "vLLM is not installed in" in refused(capsys, "--model", "a/b")


def test_no_vllm_executable(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.setattr(sys, "executable", str(tmp_path / "python"))
    with pytest.raises(ConfigError, match="no executable vllm in"):
        machine.executable("vllm")


def test_no_gpu_for_a_vllm_that_needs_one(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    installed(monkeypatch, "0.32.0")
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    assert "need 2 GPUs, and no GPU can be used here" in refused(capsys, "--model", "a/b")


def test_gpus_are_those_we_may_use(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "3, GPU-5")
    assert machine.list_gpus() == ("3", "GPU-5")
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES")
    listed = (
        "GPU 0: NVIDIA H200 (UUID: GPU-1)\n  MIG 1g Device 0: (UUID: MIG-1)\n"
        "GPU 1: NVIDIA H200 (UUID: GPU-2)\n"
    )
    monkeypatch.setattr(subprocess, "run", lambda *_, **__: SimpleNamespace(stdout=listed))
    assert machine.list_gpus() == ("0", "1")


def test_addresses_that_cannot_be_had(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    installed(monkeypatch)
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = str(taken.getsockname()[1])
        assert "choose another with --port" in refused(capsys, "--model", "a/b", "--port", port)
    assert "invalid host name" in refused(
        capsys, "--model", "a/b", "--host", "a..b", "--no-api-key"
    )
    assert "is not a port" in refused(capsys, "--model", "a/b", "--port", "70000")
    assert "lets others in" in refused(capsys, "--model", "a/b", "--host", "0.0.0.0")


def test_dry_run_starts_nothing(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    installed(monkeypatch, "0.99.0+cpu")
    assert cli.main(["up", "--model", "a/b", "--port", "0", "--dry-run"]) == 0
    said = capsys.readouterr()
    assert [line.count(" serve ") for line in said.out.splitlines()] == [0, 1, 1, 0]
    assert "warning: vLLM 0.99.0+cpu is newer than" in said.err
