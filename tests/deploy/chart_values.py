"""Reads the example of the chart's values in the guide."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import yaml

GUIDE = Path(__file__).parents[2] / "docs" / "how-to" / "deploy-on-kubernetes.md"


def example_text() -> str:
    """Returns the guide's only block of YAML."""
    (found,) = re.findall(r"^```yaml\n(.*?)^```$", GUIDE.read_text(), re.MULTILINE | re.DOTALL)
    return str(found)


def example() -> Any:
    """Returns the values."""
    return yaml.safe_load(example_text())
