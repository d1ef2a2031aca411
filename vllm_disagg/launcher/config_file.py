"""The file of `vllm-disagg up --config FILE`: flags in YAML, as `vllm serve --config` has them.

    model: Qwen/Qwen3-8B
    prefill: 2
    decode: 1
    prefill-args: --max-num-batched-tokens 8192
    api-key: [one, two]
    no-api-key: true

A flag on the command line replaces that of the file; one that may be repeated adds to it. A switch
that the file turns on stays on.
"""

from __future__ import annotations

import argparse
import shlex
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import yaml

from ..errors import ConfigError
from ..setting_values import did_you_mean

FLAG = "--config"
# Their values begin with dashes, which argparse takes for flags unless they follow an =.
ARGUMENT_FLAGS = ("--prefill-args", "--decode-args")
SWITCH = {"true": True, "false": False}


def expand(words: list[str], parser: argparse.ArgumentParser) -> list[str]:
    """Returns the words of the command line, after those of the file that --config names.

    Raises ConfigError for a file that cannot be used.
    """
    words = _joined(words)
    path = _path_in(words)
    if path is None:
        return words
    return [*_words(path, _actions(parser)), *words]


def _joined(words: list[str]) -> list[str]:
    """Joins each flag of ARGUMENT_FLAGS with the word that follows."""
    joined: list[str] = []
    for word in words:
        if joined and joined[-1] in ARGUMENT_FLAGS:
            joined[-1] += f"={word}"
        else:
            joined.append(word)
    return joined


def _path_in(words: Iterable[str]) -> str | None:
    """Returns the value of the last --config; None without one."""
    path = None
    is_next = False
    for word in words:
        if is_next:
            path = word
        is_next = word == FLAG
        if word.startswith(f"{FLAG}="):
            path = word.partition("=")[2]
    return path


def _actions(parser: argparse.ArgumentParser) -> dict[str, argparse.Action]:
    """Returns the parser's flags by name without dashes, except help and --config itself."""
    found = {}
    for action in parser._actions:
        for name in action.option_strings:
            if name.startswith("--") and name not in ("--help", FLAG):
                found[name.removeprefix("--")] = action
    return found


def _words(path: str, actions: dict[str, argparse.Action]) -> list[str]:
    """Returns the flags of a file as words."""
    words: list[str] = []
    for key, value in _read(path).items():
        name = str(key).replace("_", "-")
        if name not in actions:
            names = [known for known, action in actions.items() if action.help != argparse.SUPPRESS]
            raise ConfigError(
                f"{FLAG} {path}: no flag of up is named {name!r}{did_you_mean(name, names)}"
            )
        if actions[name].nargs == 0:
            if not isinstance(value, str) or value not in SWITCH:
                raise ConfigError(f"{FLAG} {path}: {name} is {value!r}, but must be true or false")
            words += [f"--{name}"] if SWITCH[value] else []
            continue
        values = value if isinstance(value, list) else [value]
        for one in values:
            if not isinstance(one, str) or "\0" in one:
                raise ConfigError(
                    f"{FLAG} {path}: {name} is {one!r}, but must be a text or a number"
                )
        if f"--{name}" in ARGUMENT_FLAGS and isinstance(value, list):
            values = [shlex.join(values)]
        if len(values) != 1 and not isinstance(actions[name], argparse._AppendAction):
            raise ConfigError(f"{FLAG} {path}: {name} is a list, but takes one value")
        words += [f"--{name}={one}" for one in values]
    return words


def _read(path: str) -> dict[Any, Any]:
    """Returns the mapping of a YAML file."""
    if not path:
        raise ConfigError(f"{FLAG}: an empty text names no file; leave the flag out")
    try:
        # All values are texts: YAML would turn a key 00123 into 83, and `no` into false.
        found = yaml.load(Path(path).read_text(), Loader=yaml.BaseLoader)
    except OSError as error:
        raise ConfigError(f"{FLAG} {path}: {error.strerror}") from None
    except UnicodeDecodeError:
        raise ConfigError(f"{FLAG} {path}: not a text file") from None
    except RecursionError:
        raise ConfigError(f"{FLAG} {path}: too deep") from None
    except yaml.YAMLError as error:
        mark = getattr(error, "problem_mark", None)
        where = f" in line {mark.line + 1}" if mark else ""
        raise ConfigError(f"{FLAG} {path}: not YAML{where}") from None
    if not isinstance(found, dict):
        raise ConfigError(f"{FLAG} {path}: not a mapping of flags to values, as `prefill: 2`")
    return found
