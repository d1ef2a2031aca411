"""What pyproject.toml promises of the packages: entry points, types, one version, one command."""

from __future__ import annotations

import subprocess
import sys
import tomllib
from importlib import import_module
from pathlib import Path

import vllm_disagg

ROOT = Path(__file__).parents[2]
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())


def test_entry_points_name_functions() -> None:
    project = PROJECT["project"]
    plugins = project["entry-points"]["vllm.general_plugins"]
    for entry in [*project["scripts"].values(), *plugins.values()]:
        module, _, function = entry.partition(":")
        assert callable(getattr(import_module(module), function)), entry


def test_version_has_one_source() -> None:
    assert PROJECT["project"]["dynamic"] == ["version"]
    assert PROJECT["tool"]["setuptools"]["dynamic"] == {
        "version": {"attr": "vllm_disagg.__version__"}
    }


def test_both_packages_are_typed() -> None:
    assert all(
        (ROOT / package / "py.typed").is_file() for package in ("vllm_disagg", "kv_connectors")
    )


def test_the_package_is_the_command() -> None:
    command = [sys.executable, "-m", "vllm_disagg", "--version"]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True)
    assert done.stdout == f"vllm-disagg {vllm_disagg.__version__}\n"
