"""Marks of tests that need vLLM 0.32, for older releases that are supported too."""

from __future__ import annotations

import pytest
from packaging.version import Version

from vllm_disagg.errors import ConfigError
from vllm_disagg.launcher.machine import vllm_version

# By its version. A check for what vLLM has could be wrong as the product's is.
IS_BEFORE_032 = vllm_version() < Version("0.32")


def as_of_032(reason: str) -> pytest.MarkDecorator:
    """Skips a test on an older vLLM. `reason`: continues "vLLM before 0.32"."""
    return pytest.mark.skipif(IS_BEFORE_032, reason=f"vLLM before 0.32 {reason}")


def refused_before_032(words: str) -> pytest.MarkDecorator:
    """Expects the refusal of a test's set-up on an older vLLM. `words`: of the refusal."""
    return pytest.mark.xfail(
        IS_BEFORE_032,
        reason=f"refused before vLLM 0.32: {words}",
        raises=pytest.RaisesExc(ConfigError, match=f"needs vLLM 0.32 .*{words}"),
        strict=True,
    )
