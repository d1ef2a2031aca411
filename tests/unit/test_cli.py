"""The command line: answers to good and bad arguments."""

from __future__ import annotations

import errno
import os
import subprocess
import sys
from pathlib import Path

import pytest

import vllm_disagg
from vllm_disagg import cli
from vllm_disagg.fleet import keys


def test_version(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        cli.main(["--version"])
    assert ended.value.code == 0
    assert capsys.readouterr().out == f"vllm-disagg {vllm_disagg.__version__}\n"


@pytest.mark.parametrize(
    "words", [[], ["nothing"], ["key"], ["key", "x", "--", "y"], ["proxy", "--", "--decode"]]
)
def test_words_that_make_no_command(words: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        cli.main(words)
    assert ended.value.code == 2
    assert "vllm-disagg" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (
            ["proxy", "--log-levle", "info"],
            "vllm-disagg proxy: unrecognized arguments: --log-levle",
        ),
        (
            ["proxy", "--prefil", "http://a:1"],
            "vllm-disagg proxy: unrecognized arguments: --prefil",
        ),
        (["key", "x", "--", "y"], "vllm-disagg key: nothing follows -- in key"),
        (["up", "--decod", "2", "--model", "m"], "vllm-disagg up: unrecognized arguments: --decod"),
    ],
)
def test_a_wrong_flag_names_the_help_of_its_own_command(
    words: list[str], message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as ended:
        cli.main(words)
    error = capsys.readouterr().err
    assert ended.value.code == 2 and error.count("\n") == 1
    assert error.startswith(message) and f"(vllm-disagg {words[0]} --help)" in error


# The proxy's image lacks these packages, and vLLM.
WITHOUT_PACKAGES = """
import sys

class Blocker:
    def find_spec(self, name, path=None, target=None):
        if name.partition(".")[0] in ("numpy", "zmq", "vllm", "torch", "nixl"):
            raise ModuleNotFoundError(f"No module named {name!r}", name=name)

sys.meta_path.insert(0, Blocker())
from vllm_disagg import cli

sys.exit(cli.main(sys.argv[1:]))
"""
CLOSED = "http://127.0.0.1:1"


@pytest.mark.parametrize(
    ("words", "status", "start"),
    [
        (["doctor", "--proxy", CLOSED], 2, f"FAIL proxy {CLOSED}: GET /health: Connection"),
        (
            ["doctor", "--prefill", CLOSED, "--decode", "http://127.0.0.1:2"],
            2,
            f"FAIL prefill {CLOSED}: GET /health: Connection refused",
        ),
        (["doctor"], 2, "vllm-disagg doctor: numpy is not installed in "),
        (["bench", "--url", CLOSED], 2, "vllm-disagg bench: numpy is not installed in "),
        (["up", "--model", "m", "--help"], 0, "usage: vllm-disagg up"),
        (["drain", CLOSED], 2, f"vllm-disagg drain: cannot reach {CLOSED}"),
        (["proxy", "--help"], 0, "usage: vllm-disagg proxy"),
    ],
)
def test_commands_in_the_proxys_image(words: list[str], status: int, start: str) -> None:
    """A command works there, or ends in one line that says where to run it."""
    done = subprocess.run(
        [sys.executable, "-c", WITHOUT_PACKAGES, *words],
        capture_output=True,
        text=True,
        check=False,
    )
    said = done.stdout + done.stderr
    assert said.startswith(start), said
    assert done.returncode == status and "Traceback" not in said
    assert done.stderr.count("\n") <= 1


def test_a_key_is_written_once_and_only_for_its_owner(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "fleet.key"
    assert cli.main(["key", str(path)]) == 0
    assert path.stat().st_mode & 0o777 == 0o600
    assert keys.load(str(path)).is_set
    capsys.readouterr()
    assert cli.main(["key", str(path)]) == 2
    error = capsys.readouterr().err
    assert error.startswith("vllm-disagg key: ") and error.count("\n") == 1


def interrupted_status(words: list[str]) -> int:
    """Returns the exit status; an interrupt that is not caught fails the test, not the tests."""
    try:
        return cli.main(words)
    except KeyboardInterrupt:
        pytest.fail("a traceback")


def test_ctrl_c_is_not_an_error(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def interrupted(_: str) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(keys, "create", interrupted)
    assert interrupted_status(["key", "anything"]) == 130
    assert capsys.readouterr().err == ""


def test_ctrl_c_is_no_error_while_modules_are_imported(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """They are imported in the first second of a command."""

    def interrupted(_: str) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(cli, "import_module", interrupted)
    assert interrupted_status(["proxy", "--decode", "http://127.0.0.1:1"]) == 130
    assert capsys.readouterr().err == ""


@pytest.mark.parametrize("name", cli.COMMANDS)
def test_each_command_explains_itself(name: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        cli.main([name, "--help"])
    assert ended.value.code == 0
    assert f"usage: vllm-disagg {name}" in capsys.readouterr().out


def test_only_the_command_that_runs_is_imported(tmp_path: Path) -> None:
    code = (
        "import sys; from vllm_disagg import cli; cli.main(['key', sys.argv[1]]); "
        "others = ('vllm_disagg.proxy', 'vllm_disagg.launcher', 'uvloop'); "
        "sys.exit(any(name.startswith(others) for name in sys.modules))"
    )
    command = [sys.executable, "-c", code, str(tmp_path / "key")]
    assert subprocess.run(command, env=os.environ, capture_output=True, check=False).returncode == 0


@pytest.mark.parametrize("unbuffered", ["", "1"])
def test_output_without_room_is_one_line(tmp_path: Path, unbuffered: str) -> None:
    """Status 1 of the doctor would mean warnings; 0 would mean that its report is there."""
    command = [sys.executable, "-m", "vllm_disagg", "key", str(tmp_path / "key")]
    environment = {**os.environ, "PYTHONUNBUFFERED": unbuffered}
    with open("/dev/full", "wb") as full:
        ended = subprocess.run(
            command, env=environment, stdout=full, stderr=subprocess.PIPE, text=True, check=False
        )
    assert ended.returncode == 2
    assert ended.stderr == "vllm-disagg key: cannot write: No space left on device\n"


@pytest.mark.parametrize("unbuffered", ["", "1"])
@pytest.mark.parametrize("words", [["--help"], ["--version"], ["up", "--help"], ["plan", "-h"]])
def test_help_without_room_is_one_line(words: list[str], unbuffered: str) -> None:
    command = [sys.executable, "-m", "vllm_disagg", *words]
    environment = {**os.environ, "PYTHONUNBUFFERED": unbuffered}
    program = " ".join(["vllm-disagg", *words[:-1]])
    with open("/dev/full", "wb") as full:
        ended = subprocess.run(
            command, env=environment, stdout=full, stderr=subprocess.PIPE, text=True, check=False
        )
    assert ended.returncode == 2
    assert ended.stderr == f"{program}: cannot write: No space left on device\n"


@pytest.mark.parametrize("unbuffered", ["", "1"])
def test_a_reader_of_help_that_has_left_is_no_error(unbuffered: str) -> None:
    reader, writer = os.pipe()
    os.close(reader)
    ended = subprocess.run(
        [sys.executable, "-m", "vllm_disagg", "up", "--help"],
        env={**os.environ, "PYTHONUNBUFFERED": unbuffered},
        stdout=writer,
        stderr=subprocess.PIPE,
        text=True,
        check=False,
    )
    os.close(writer)
    assert (ended.returncode, ended.stderr) == (cli.READER_LEFT_STATUS, "")


@pytest.mark.parametrize("unbuffered", ["", "1"])
def test_a_reader_that_has_left_is_no_error(tmp_path: Path, unbuffered: str) -> None:
    command = [sys.executable, "-m", "vllm_disagg", "key", str(tmp_path / "key")]
    environment = {**os.environ, "PYTHONUNBUFFERED": unbuffered}
    reader, writer = os.pipe()
    os.close(reader)
    ended = subprocess.run(
        command, env=environment, stdout=writer, stderr=subprocess.PIPE, text=True, check=False
    )
    os.close(writer)
    assert (ended.returncode, ended.stderr) == (cli.READER_LEFT_STATUS, "")


def test_a_name_that_the_locale_cannot_show_is_no_error(tmp_path: Path) -> None:
    command = [sys.executable, "-m", "vllm_disagg", "key", str(tmp_path / "schl\u00fcssel")]
    environment = {**os.environ, "PYTHONIOENCODING": "ascii"}
    ended = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
    assert (ended.returncode, ended.stderr) == (0, "")
    assert "schl\\xfcssel" in ended.stdout


@pytest.mark.parametrize("streams", ["2>&-", "2>/dev/full", "0<&- 2>&-", "1>&-", "1>/dev/full"])
@pytest.mark.parametrize("words", [["key", "/nowhere/key"], ["key", "--wrong"]])
def test_an_error_is_one_line_on_a_stream_that_is_open(words: list[str], streams: str) -> None:
    command = ["sh", "-c", f'exec "$@" {streams}', "sh", sys.executable, "-m", "vllm_disagg"]
    ended = subprocess.run([*command, *words], capture_output=True, text=True, check=False)
    assert ended.returncode == 2
    said = ended.stdout + ended.stderr
    assert said.startswith("vllm-disagg key: ") and said.count("\n") == 1


def test_no_file_takes_the_number_of_a_closed_stream() -> None:
    """A library would write its texts into it, and a child inherit it."""
    code = (
        "import os; from vllm_disagg import cli, standard_streams as streams;"
        " streams.open_closed(); number = os.open('/dev/null', os.O_RDONLY);"
        " os.write(1, f'{number} {[os.get_inheritable(n) for n in range(3)]}'.encode())"
    )
    for streams in ("0<&- 2>&-", "0<&-", "2>&-"):
        command = ["sh", "-c", f'exec "$@" {streams}', "sh", sys.executable, "-c", code]
        assert subprocess.check_output(command) == b"3 [True, True, True]", streams


def test_other_errors_of_the_system_keep_their_traceback(monkeypatch: pytest.MonkeyPatch) -> None:
    def failing(_: str) -> None:
        raise PermissionError(errno.EPERM, "not permitted")

    monkeypatch.setattr(keys, "create", failing)
    with pytest.raises(PermissionError):
        cli.main(["key", "anything"])
