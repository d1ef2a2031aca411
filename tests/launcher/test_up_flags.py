"""What `up` passes on, reads from a file, and refuses before it starts anything."""

from __future__ import annotations

import argparse
import fcntl
import json
import os
import resource
import signal
import subprocess
import sys
import threading
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import huggingface_hub
import pytest
from huggingface_hub import constants, errors

from vllm_disagg import cli
from vllm_disagg.errors import ConfigError
from vllm_disagg.launcher import (
    backoff,
    config_file,
    flags,
    guard,
    main,
    model_check,
    plan,
    processes,
    scrape_targets,
)
from vllm_disagg.launcher.phases import StartProgress
from vllm_disagg.proxy import settings
from vllm_disagg.proxy.flags import add_arguments as add_proxy_arguments


def parsed(*words: str) -> argparse.Namespace:
    """Returns the flags as `cli` parses them."""
    parser = argparse.ArgumentParser()
    flags.add_arguments(parser)
    return parser.parse_args(main.expand(list(words)), argparse.Namespace(extra=[]))


@pytest.mark.parametrize("is_https", [False, True])
def test_scrape_targets_have_their_scheme(tmp_path: Path, is_https: bool) -> None:
    engine = plan.ChildCommand("decode-0", [], {}, "127.0.0.1", 8200, "/health")
    proxy = plan.ChildCommand("proxy", [], {}, "::1", 8000, "/readiness", is_https)
    scrape_targets.write(str(tmp_path), plan.LaunchPlan([engine], proxy, [], [], []))
    labels = {"labels": {"__scheme__": "https"}} if is_https else {}
    for name, group in (
        ("engines", {"targets": ["127.0.0.1:8200"]}),
        ("proxies", {"targets": ["[::1]:8000"], **labels}),
    ):
        assert json.loads((tmp_path / "targets" / f"{name}.yml").read_text()) == [group]


def refused(capsys: pytest.CaptureFixture[str], *words: str) -> str:
    """Returns the single line of the error of `up`."""
    try:
        assert cli.main(["up", *words]) == 2
    except SystemExit as error:  # of argparse
        assert error.code == 2
    said = capsys.readouterr()
    assert said.out == "" and said.err.count("\n") == 1, said
    return said.err.removeprefix("vllm-disagg up: ")


# Passed on ----------------------------------------------------------------------------------------


def test_arguments_of_one_role() -> None:
    args = parsed(
        "--model", "m", "--prefill-args", "--max-num-seqs 4", "--decode-args=--x '{\"a\": 1}'"
    )
    options = flags.options(args, 8000)
    assert options.role_extra == {
        "prefill": ["--max-num-seqs", "4"],
        "decode": ["--x", '{"a": 1}'],
    }
    one_word = parsed("--model", "m", "--prefill-args", "--enforce-eager")
    assert flags.options(one_word, 1).role_extra["prefill"] == ["--enforce-eager"]


def test_roles_that_follow_the_load() -> None:
    typed = ["--roles", "auto", "--objective-ttft", "1"]
    with pytest.raises(ConfigError, match="--roles auto needs --objective-tpot"):
        flags.options(parsed("--model", "m", *typed), 8000)
    options = flags.options(parsed("--model", "m", *typed, "--objective-tpot", "0.1"), 8000)
    assert options.changes_roles
    assert "--roles=auto" in options.proxy_args
    assert not flags.options(parsed("--model", "m"), 8000).changes_roles


def test_flags_of_the_proxy() -> None:
    """What `up` gives the proxy is what the user has typed, and the proxy understands it."""
    typed = ["--policy", "round_robin", "--spill", "--queue-size", "7", "--access-log", "-"]
    options = flags.options(parsed("--model", "m", *typed), 8000)
    assert sorted(options.proxy_args) == [
        "--access-log=-",
        "--policy=round_robin",
        "--queue-size=7",
        "--spill",
    ]
    assert flags.options(parsed("--model", "m"), 8000).proxy_args == []
    parser = argparse.ArgumentParser()
    add_proxy_arguments(parser)
    words = ["--decode", "http://h:1", *options.proxy_args]
    read = settings.from_arguments(parser.parse_args(words))
    assert (read.policy, read.spill, read.queue_size) == ("round_robin", True, 7)


@pytest.mark.parametrize(
    ("typed", "environment", "word"),
    [
        ([], "", ""),
        (["--api-key", "it's"], "e", "'it'\"'\"'s'"),
        (["--api-key-file", "a b"], "e", "\"$(head -n 1 'a b')\""),
        ([], "e", '"$VLLM_API_KEY"'),
    ],
)
def test_the_key_in_the_printed_command(
    typed: list[str], environment: str, word: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("VLLM_API_KEY", environment)
    assert flags.options(parsed("--model", "m", *typed), 1).client_key == word


# --config -----------------------------------------------------------------------------------------


def test_a_file_has_flags_and_the_command_line_wins(tmp_path: Path) -> None:
    path = tmp_path / "up.yaml"
    path.write_text(
        "model: a/b\nprefill: 2\ndecode: 3\nprefill-args: --max-num-seqs 4\n"
        "decode_args: [--x, '{\"a b\": 1}']\napi-key: [one, two]\nno-api-key: false\nspill: true\n"
    )
    args = parsed("--config", str(path), "--decode", "1", "--api-key", "three")
    options = flags.options(args, 1)
    assert (options.model, options.prefill, options.decode) == ("a/b", 2, 1)
    assert options.api_keys == ["one", "two", "three"] and not options.no_api_key
    assert options.role_extra == {
        "prefill": ["--max-num-seqs", "4"],
        "decode": ["--x", '{"a b": 1}'],
    }
    assert options.proxy_args == ["--spill"]


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("modle: a/b\n", "no flag of up is named 'modle'; did you mean model?"),
        ("- a\n", "not a mapping of flags to values"),
        ("a: [\n", "not YAML in line 2"),
        ("spill: maybe\n", "spill is 'maybe', but must be true or false"),
        ("spill: [a]\n", "spill is ['a'], but must be true or false"),
        ("prefill: [1, 2]\n", "prefill is a list, but takes one value"),
        ("prefill: []\n", "prefill is a list, but takes one value"),
        ("prefill: true\n", "true is not a number from 1 to 1024"),
        ("api-key: [{a: 1}]\n", "api-key is {'a': '1'}, but must be a text or a number"),
        ('log-dir: "a\\0b"\n', "log-dir is 'a\\x00b', but must be a text or a number"),
        ("a: " + "[" * 2_000, "too deep"),
        ("config: other.yaml\n", "no flag of up is named 'config'"),
        ("worker: x\n", "no flag of up is named 'worker'"),
        (b"\xff\xfe", "not a text file"),
    ],
)
def test_a_file_that_cannot_be_used(
    text: str | bytes, words: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "up.yaml"
    path.write_bytes(text if isinstance(text, bytes) else text.encode())
    assert words in refused(capsys, f"--config={path}")


def test_values_of_a_file_stay_as_they_are_written(tmp_path: Path) -> None:
    """YAML has octal numbers, dates, and a `no` that means false."""
    path = tmp_path / "up.yaml"
    path.write_text("model: 2026-11-23\napi-key: 00123\nrestart: no\n")
    args = parsed("--config", "none.yaml", "--config", str(path))
    assert (args.model, args.restart) == ("2026-11-23", "no")
    assert flags.options(args, 1).api_keys == ["00123"]


def test_a_file_that_is_missing(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for words in (["--config="], ["--config", ""]):
        assert "an empty text names no file; leave the flag out" in refused(capsys, *words)
    assert "an empty text names nothing" in refused(capsys, "--model", "m", "--log-dir=")
    said = refused(capsys, "--config", str(tmp_path / "none"))
    assert "No such file" in said
    with pytest.raises(ConfigError):
        config_file.expand(["--config", str(tmp_path)], argparse.ArgumentParser())


# Bad input ----------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("typed", "words"),
    [
        ([], "--model is needed"),
        (["--model", "m", "--prefill-args", "'"], "--prefill-args"),
        (["--model", "m", "--policy", "best"], "--policy"),
        (["--model", "m", "--restart", "always"], "--restart"),
        (["--model", "m", "--prefill", "0"], "0 is not a number from 1 to 1024"),
        (["--model", "m", "--decode", "9" * 5000], "9 is not a number from 1 to 1024"),
        # The list of its cores filled all memory.
        (["--model", "m", "--tensor-parallel-size", "1000000000"], "is not a number from 1 to"),
        (["--model", "m", "--worker", "x"], "unrecognized arguments: --worker x"),
    ],
)
def test_one_line_for_bad_flags(
    typed: list[str], words: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert words in refused(capsys, *typed)


@pytest.fixture
def runnable(monkeypatch: pytest.MonkeyPatch) -> None:
    """Pretends that vLLM runs here, and that no model is missing."""
    from test_launcher import cpus

    monkeypatch.setattr(main.machine, "examine", lambda: cpus(2))
    monkeypatch.setattr(model_check, "check", lambda *_: None)


@pytest.mark.usefixtures("runnable")
@pytest.mark.parametrize("is_there", [True, False])
def test_a_dry_run_changes_no_file(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], *, is_there: bool
) -> None:
    logs = tmp_path / "new" / "logs"
    if is_there:
        logs.mkdir(parents=True)
    before = sorted(tmp_path.rglob("*"))
    start = ("up", "--model", "m", "--port", "0", "--dry-run", "--log-dir", str(logs))
    for more in ((), ("--access-log", str(logs / "a")), ("--access-log", str(tmp_path / "b"))):
        assert cli.main([*start, *more]) == 0, capsys.readouterr().err
        assert " serve m" in capsys.readouterr().out
        assert sorted(tmp_path.rglob("*")) == before
    missing = str(tmp_path / "missing" / "c")
    assert refused(capsys, *start[1:], "--access-log", missing) == (
        f"--access-log {missing!r}: No such file or directory\n"
    )
    assert sorted(tmp_path.rglob("*")) == before


@pytest.mark.usefixtures("runnable")
def test_one_line_for_files_that_cannot_be_used(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "a file").write_text("x")
    below = str(tmp_path / "a file" / "below")
    start = ("--model", "m", "--port", "0")
    for words in (
        ("--log-dir", below),
        ("--access-log", below),
        ("--api-key-file", below),
        ("--admin-key-file", below),
        ("--ssl-certfile", below),
    ):
        said = refused(capsys, *start, *words)
        assert said.startswith(words[0]) and below in said
    for name in ("prefill-0.log", "proxy.log", "access.log"):
        for number, more in enumerate(([], ["--dry-run"])):
            folder = tmp_path / f"{number} of {name}"
            (folder / name).mkdir(parents=True)
            said = refused(capsys, *start, "--log-dir", str(folder), *more)
            assert said == f"--log-dir '{folder / name}': Is a directory\n"
    assert "No such file" in refused(capsys, *start, "--log-dir", "/proc/x", "--dry-run")
    (tmp_path / "targets").write_text("")
    said = refused(capsys, *start, "--log-dir", str(tmp_path))
    assert said == f"--log-dir: {tmp_path / 'targets'}: File exists\n"
    os.mkfifo(tmp_path / "pipe")
    before = signal.signal(signal.SIGALRM, signal.default_int_handler)
    signal.alarm(5)  # ends a start that hangs
    said = refused(capsys, *start, "--access-log", str(tmp_path / "pipe"))
    signal.alarm(0)
    signal.signal(signal.SIGALRM, before)
    assert "No such device or address" in said
    assert "in --decode-args: give it before --" in refused(
        capsys, *start, "--decode-args", "--tensor-parallel-size 2"
    )
    assert "--queue-timeout must be more than 0" in refused(capsys, *start, "--queue-timeout", "0")


# The model's name ---------------------------------------------------------------------------------


def on_hub(monkeypatch: pytest.MonkeyPatch, cache: Path, error: Exception | None) -> list[str]:
    """Pretends that the hub answers so; returns the names that it was asked for."""
    asked: list[str] = []

    def info(_: object, model: str, **__: object) -> None:
        asked.append(model)
        if error:
            raise error

    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(cache))
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", False)
    monkeypatch.setattr(huggingface_hub, "try_to_load_from_cache", lambda *_: None)
    monkeypatch.setattr(huggingface_hub.HfApi, "model_info", info)
    return asked


def missing() -> errors.RepositoryNotFoundError:
    made = errors.RepositoryNotFoundError.__new__(errors.RepositoryNotFoundError)
    Exception.__init__(made, "404")
    return made


@pytest.mark.parametrize(
    ("error", "words"),
    [
        (missing(), "has no such model, or only for a token"),
        (OSError("no route"), "does not answer (no route)"),
    ],
)
def test_a_name_that_no_hub_has(
    error: Exception, words: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "models--Qwen--Qwen3-8B").mkdir()
    asked = on_hub(monkeypatch, tmp_path, error)
    with pytest.raises(ConfigError) as raised:
        model_check.check("Qwen/Qwen3-8BB", [])
    assert words in str(raised.value) and asked == ["Qwen/Qwen3-8BB"]
    assert str(raised.value).endswith("; did you mean Qwen/Qwen3-8B?")
    assert "\n" not in str(raised.value)


def test_names_that_need_no_hub(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    asked = on_hub(monkeypatch, tmp_path, missing())
    model_check.check("s3://bucket/model", [])
    for flag in ("--load-format=x", "--load_format", "--config", "--revision", "--hf-token"):
        model_check.check("a/b", [flag, "value"])
    for name in ("VLLM_USE_MODELSCOPE", "VLLM_MODEL_REDIRECT_PATH"):
        monkeypatch.setenv(name, "true")
        model_check.check("a/b", [])
        monkeypatch.delenv(name)
    monkeypatch.setattr(huggingface_hub, "try_to_load_from_cache", lambda *_: "/cached")
    model_check.check("a/b", [])
    assert asked == []
    monkeypatch.setattr(huggingface_hub, "try_to_load_from_cache", lambda *_: None)
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    with pytest.raises(ConfigError, match="HF_HUB_OFFLINE is set"):
        model_check.check("a/b", [])
    assert asked == []


def test_a_hub_that_refuses_to_answer(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A mirror may have files only: vLLM finds out."""
    error = errors.HfHubHTTPError.__new__(errors.HfHubHTTPError)
    asked = on_hub(monkeypatch, tmp_path, error)
    model_check.check("a/b", [])
    assert asked == ["a/b"]


def test_folders_and_names_that_no_model_has(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="the folder holds no"):
        model_check.check(str(tmp_path), [])
    (tmp_path / "params.json").touch()
    model_check.check(str(tmp_path), [])
    with pytest.raises(ConfigError, match="not a name that a model can have"):
        model_check.check("a--b/c", [])


@pytest.mark.parametrize(
    ("name", "meant"),
    [
        ("https://hub.example/Qwen/Qwen3-8B", "Qwen/Qwen3-8B"),
        ("https://hub.example/Qwen/Qwen3-8B/tree/main", "Qwen/Qwen3-8B"),
        ("https://hub.example", ""),
        ("Qwen/Qwen3 8B", "Qwen/Qwen3-8B"),
        ("Qwen/Qwen3-8B ", "Qwen/Qwen3-8B"),
        ("Qwen\\Qwen3-8B", "Qwen/Qwen3-8B"),
        ("Qwen/Qwen3-8B:latest", "Qwen/Qwen3-8B"),
        ("a\nb", "a-b"),
        ("a?", ""),
    ],
)
@pytest.mark.parametrize("extra", [[], ["--revision=x"]])
def test_what_is_no_name_is_refused(name: str, meant: str, extra: list[str]) -> None:
    with pytest.raises(ConfigError) as raised:
        model_check.check(name, extra)
    said = str(raised.value)
    assert said.startswith(f"--model {name!r}: ") and "\n" not in said
    assert said.partition("; did you mean ")[2] == (f"{meant}?" if meant else "")


@pytest.mark.parametrize("name", ["s3://b/m", "S3://b/m x", "gs://b/m", "az://b/m"])
def test_object_stores_are_names(name: str) -> None:
    model_check.check(name, [])


def test_a_name_on_the_hub(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    asked = on_hub(monkeypatch, tmp_path, None)
    model_check.check("a/b", [])
    assert asked == ["a/b"]


# Phases and pauses --------------------------------------------------------------------------------

# As vLLM 0.32 prints them.
STEPS = [
    (9.0, "(EngineCore pid=7) INFO 11-22 04:00:01 [cpu_model_runner.py:68] Starting to load model"),
    (
        12.0,
        "(EngineCore pid=7) INFO 11-22 [default_loader.py:502] Loading weights took 2.9 seconds",
    ),
    (12.1, "(EngineCore pid=7) INFO 11-22 [gpu_model_runner.py:515] Model loading took 1 GiB"),
    (30.0, "INFO 11-22 [core.py:386] init engine (profile, create kv cache, warmup model) took 18"),
]


def test_phases_of_a_start() -> None:
    progress = StartProgress(0.0)
    names = [progress.phase]
    for at, line in STEPS:
        progress.on_line(line, at)
        names.append(progress.phase)
    assert names == ["imports", "weights", "compilation", "compilation", "server"]
    assert progress.describe(31.0) == "imports 9 s, weights 3 s, compilation 18 s, server 1 s"


def test_a_line_that_a_version_lacks() -> None:
    progress = StartProgress(0.0)
    progress.on_line(STEPS[3][1], 30.0)
    progress.on_line(STEPS[0][1], 31.0)  # too late: no phase comes back
    assert progress.describe(31.0) == "imports 30 s, weights 0 s, compilation 0 s, server 1 s"


def test_pauses_grow_until_a_child_runs_steadily() -> None:
    made = backoff.RestartBackoff()
    short = [made.pause("d", 1.0) for _ in range(8)]
    assert short == [1, 2, 4, 8, 16, 32, 60, 60]
    assert made.pause("p", 1.0) == 1.0, "each child has its own"
    assert made.pause("d", backoff.STEADY_SECONDS) == 1.0


# Full disks ---------------------------------------------------------------------------------------


def test_a_log_is_whole_lines_after_a_full_disk(tmp_path: Path) -> None:
    """What did not fit is lost, and not written later into other lines."""
    path = tmp_path / "decode-0.log"
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    lines = processes.LineFile(str(path))
    lines.write_line("first")
    resource.setrlimit(resource.RLIMIT_FSIZE, (10, hard))
    try:
        for line in ("second", "third", "fourth"):
            lines.write_line(line)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
    lines.write_line("fifth \udcff")
    lines.write_line("sixth")
    lines.close()
    assert path.read_text() == "first\nseco\nfifth ?\nsixth\n"


def test_a_log_may_be_copied_and_cut(tmp_path: Path) -> None:
    """As copytruncate of logrotate does."""
    path = tmp_path / "decode-0.log"
    lines = processes.LineFile(str(path))
    lines.write_line("first")
    os.truncate(path, 0)
    lines.write_line("second")
    lines.close()
    lines.reopen()  # of a child that has ended
    assert path.read_text() == "second\n"


def test_no_folder_for_temporary_files_is_one_line(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(processes.tempfile, "_get_candidate_names", lambda: iter(["x"]))
    monkeypatch.setattr(processes.tempfile, "tempdir", "/proc/nowhere")
    children = processes.ChildProcesses(processes.ChildOutput(None, ""), lambda: False)  # type: ignore[arg-type]
    with pytest.raises(ConfigError, match=r"temporary files can be used .*; set TMPDIR"):
        children.__enter__()


def test_a_child_whose_output_cannot_be_read_is_ended(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It ended all other children, and ran on without an owner."""
    monkeypatch.setattr(processes.tempfile, "tempdir", str(tmp_path))
    children = processes.ChildProcesses(processes.ChildOutput(None, ""), lambda: False)  # type: ignore[arg-type]
    children._output._console = SimpleNamespace(is_terminal=False)  # type: ignore[assignment]
    started: list[subprocess.Popen[bytes]] = []
    make = subprocess.Popen

    def popen(*args: Any, **more: Any) -> subprocess.Popen[bytes]:
        started.append(make(*args, **more))
        return started[-1]

    def lack(_: threading.Thread) -> None:
        raise RuntimeError("can't start new thread")

    command = SimpleNamespace(name="decode-0", env={})
    with children, monkeypatch.context() as patched:
        patched.setattr(processes.subprocess, "Popen", popen)
        patched.setattr(threading.Thread, "start", lack)
        with pytest.raises(ConfigError, match="cannot start sleep: can't start new thread"):
            children.start(command, ["sleep", "600"])  # type: ignore[arg-type]
        assert started[0].returncode == -signal.SIGKILL


def test_the_folder_of_the_key_is_kept_from_cleaners(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """systemd-tmpfiles tries this lock, and would remove the key after ten days."""
    monkeypatch.setattr(processes.tempfile, "tempdir", str(tmp_path))
    children = processes.ChildProcesses(processes.ChildOutput(None, ""), lambda: False)  # type: ignore[arg-type]
    with children:
        folder = os.open(children.directory, os.O_RDONLY)
        for kind in (fcntl.LOCK_SH, fcntl.LOCK_EX):  # of systemd 236 and of 250
            with pytest.raises(BlockingIOError):
                fcntl.flock(folder, kind | fcntl.LOCK_NB)
    fcntl.flock(folder, fcntl.LOCK_EX | fcntl.LOCK_NB)
    os.close(folder)
    assert not list(tmp_path.iterdir())


def test_a_guard_that_does_not_start_ends_up_at_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Engines of a launcher that is killed later would stay, with their GPU memory."""
    monkeypatch.setattr(processes.tempfile, "tempdir", str(tmp_path))
    monkeypatch.setattr(guard, "ARGUMENTS", ["python", "-c", "raise SystemExit(3)"])
    children = processes.ChildProcesses(processes.ChildOutput(None, ""), lambda: False)  # type: ignore[arg-type]
    with pytest.raises(ConfigError, match=r"the guard, .* does not start: .* status 3"):
        children.__enter__()
    assert not list(tmp_path.iterdir())


def test_no_package_of_the_environment_replaces_a_module_that_the_guard_needs(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As an old back-port of pathlib in site-packages would."""
    (tmp_path / "pathlib.py").write_text("raise ImportError('a back-port')\n")
    monkeypatch.setattr(guard, "__file__", str(tmp_path / "vllm_disagg/launcher/guard.py"))
    found = {**guard.environment(), guard.CODE: "import pathlib; print('found')"}
    done = subprocess.run(
        guard.ARGUMENTS, executable=sys.executable, env=found, capture_output=True, check=True
    )
    assert done.stdout == b"found\n"


# Starting again -----------------------------------------------------------------------------------


class ScriptedChildren:
    """Children that start, or cannot."""

    def __init__(self) -> None:
        self.failures: list[str] = []
        self.started: list[str] = []

    def start(self, command: plan.ChildCommand, argv: list[str]) -> None:
        if self.failures:
            raise ConfigError(self.failures.pop())
        self.started.append(command.name)

    def drop(self, child: object) -> None:
        """Forgets a child, as ChildProcesses does."""


@pytest.fixture
def watched(monkeypatch: pytest.MonkeyPatch) -> tuple[Any, ScriptedChildren, SimpleNamespace]:
    """Returns the watch of a proxy without engines, its children, and its clock and readiness."""
    world = SimpleNamespace(now=100.0, is_ready=False, lines=[])
    clock = SimpleNamespace(monotonic=lambda: world.now)
    monkeypatch.setattr(main, "time", clock)
    monkeypatch.setattr(main, "probe", lambda _: (world.is_ready, ""))
    monkeypatch.setattr(main, "_say_ready", lambda *_: world.lines.append("ready"))
    command = plan.ChildCommand("proxy", ["true"], {}, "127.0.0.1", 1, "/health")
    launch: Any = SimpleNamespace(engines=[], proxy=command)
    children: Any = ScriptedChildren()
    console: Any = SimpleNamespace(write_line=world.lines.append)
    signals: Any = None
    watch = main._Watch(launch, children, signals, console, restarts=True)
    return watch, children, world


def ended(world: SimpleNamespace, started_at: float) -> Any:
    """Returns the end of the child that started then."""
    return SimpleNamespace(child=SimpleNamespace(name="proxy", started_at=started_at))


def test_a_child_that_cannot_be_started_is_tried_again(watched: Any) -> None:
    watch, children, world = watched
    children.failures = ["proxy: no more processes"]
    watch._on_end(ended(world, 0.0))
    world.now += 1
    watch._start_due()
    assert children.started == [] and "no more processes; next try in 2 s" in world.lines[-1]
    world.now += 2
    watch._start_due()
    assert children.started == ["proxy"]


def test_a_long_start_that_fails_is_no_steady_run(watched: Any) -> None:
    """Each start takes longer than a steady run has to; only the last one succeeds."""
    watch, _, world = watched
    world.now += backoff.STEADY_SECONDS
    pauses = []
    for is_ready in (False, False, True, False):
        watch._on_end(ended(world, world.now))
        pauses.append(watch._due["proxy"] - world.now)
        world.now += 60
        watch._start_due()
        world.now += backoff.STEADY_SECONDS
        world.is_ready = is_ready
        watch._check_started()
        world.now += backoff.STEADY_SECONDS * is_ready
    world.now += 60
    watch._start_due()
    watch._on_end(ended(world, world.now))
    world.is_ready = True
    watch._check_started()
    assert pauses == [1, 2, 4, 1]
    assert world.lines.count("ready") == 1, "an ended child is no longer expected to be ready"


def test_the_reference_names_all_flags() -> None:
    """Each flag of the proxy is passed on, set by `up`, or for other instances."""
    from vllm_disagg.proxy import flags as proxy_flags

    names: set[Any] = {flag.name for flag in proxy_flags.all_flags()}
    assert names >= flags.OWN_FLAGS | flags.OTHER_INSTANCES
