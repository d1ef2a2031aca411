"""Validates Kubernetes objects against strict schemas: check_manifests.py FILE ...

Built-in kinds: the API server's own schemas, without additional fields. KEDA's and the Prometheus
operator's: their models, which must give back each field that an object has. The last line is JSON.
"""

from __future__ import annotations

import json
import sys
from importlib import import_module
from pathlib import Path
from typing import Any

import kubernetes_validate  # type: ignore[import-not-found]
import yaml

VERSIONS = ["1.29", "1.37"]  # of Kubernetes: an older and the newest
MODELS = {
    "keda.sh/v1alpha1": "cloudcoil.models.keda.v1alpha1",
    "monitoring.coreos.com/v1": "cloudcoil.models.prometheus_operator.v1",
}


def problem_in(found: dict[str, Any]) -> str:
    """Returns why an object is invalid; empty if it is valid."""
    module = MODELS.get(found["apiVersion"])
    try:
        if module:
            model = getattr(import_module(module), found["kind"])
            kept = model.model_validate(found).model_dump(
                mode="json", by_alias=True, exclude_unset=True
            )
            return lost_field(found, kept)
        for version in VERSIONS:
            kubernetes_validate.validate(found, version, strict=True)
    except Exception as error:  # each validator raises its own
        return f"{type(error).__name__}: {str(error)[:500]}"
    return ""


def lost_field(given: Any, kept: Any, path: str = "") -> str:
    """Returns the first field that a model does not have; empty if there is none."""
    if isinstance(given, dict):
        for name, value in given.items():
            if not isinstance(kept, dict) or name not in kept:
                return f"unknown field {path}.{name}"
            if lost := lost_field(value, kept[name], f"{path}.{name}"):
                return lost
    if isinstance(given, list):
        for index, value in enumerate(given):
            if lost := lost_field(value, kept[index], f"{path}[{index}]"):
                return lost
    return ""


def main() -> None:
    """Validates all objects in all files."""
    valid = 0
    invalid = 0
    for path in sys.argv[1:]:
        for found in yaml.safe_load_all(Path(path).read_text()):
            problem = problem_in(found) if found else ""
            if problem:
                print(f"{path}: {found['kind']} {found['metadata']['name']}: {problem}")
                invalid += 1
            elif found:
                valid += 1
    print(json.dumps({"valid": valid, "invalid": invalid}))
    sys.exit(bool(invalid))


if __name__ == "__main__":
    main()
