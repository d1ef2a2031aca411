"""Flags of what a plan counts: GPUs, their price or their power; and the file of prices."""

from __future__ import annotations

import json
from argparse import Namespace
from pathlib import Path
from typing import Any

import msgspec

from ...errors import ConfigError
from ...setting_values import GivenText
from ..cost import hardware
from ..search.performance_source import PerformanceSource
from ..search.placement import Criterion
from ..search.scenario import Scenario

COEFFICIENTS_GPU = "a100"  # of DistServe's measurements
MAX_PRICE = 1e6  # of a GPU and hour: more is a slip
COUNTED = ("gpus", "cost", "power")


def add_arguments(group: Any) -> None:
    """Adds the flags of what is counted."""
    group.add_argument(
        "--by",
        choices=COUNTED,
        help="what goodput is divided by, and what is least with --rate"
        " (default: cost with --prices, else gpus)",
    )
    group.add_argument(
        "--prices",
        action=GivenText,
        metavar="FILE",
        help='price of a GPU and hour by type, as JSON: {"h100": 2.5, "l40s": 0.9}',
    )


def counted(scenario: Scenario, args: Namespace) -> Scenario:
    """Returns the scenario with the criterion and the prices that the flags give."""
    prices = read_prices(args.prices) if args.prices else {}
    price = None
    if prices:
        sides = (scenario.prefill, scenario.decode)
        price = Criterion("$/h", *(_price(prices, source, args.prices) for source in sides))
    by = args.by or ("cost" if prices else "gpus")
    if by == "cost" and not price:
        raise ConfigError("--by cost needs --prices: the price of a GPU and hour by type")
    criterion = Criterion()
    if by == "cost" and price:
        criterion = price
    if by == "power":
        criterion = power_of(scenario)
    return msgspec.structs.replace(scenario, criterion=criterion, price=price)


def power_of(scenario: Scenario) -> Criterion:
    """Returns the power of GPUs as a criterion, in kW. Raises ConfigError without GPU types."""
    watts = []
    for source in (scenario.prefill, scenario.decode):
        name = gpu_name(source)
        if not name:
            raise ConfigError(
                "--by power needs --gpu, also beside --profile: the GPU that it measured"
            )
        watts.append(hardware.gpu(name).watts / 1000)
    return Criterion("kW", *watts)


def gpu_name(source: PerformanceSource) -> str:
    """Returns the GPU type of a source; empty for a profile without --gpu."""
    if source.gpu:
        return source.gpu.name
    return COEFFICIENTS_GPU if source.kind == "coefficients" else ""


def read_prices(path: str) -> dict[str, float]:
    """Reads a file of prices. Raises ConfigError with one line for an entry that is no price."""
    try:
        text = Path(path).read_text(encoding="utf-8")
        found = json.loads(text, object_pairs_hook=_unique)
    except (OSError, ValueError, RecursionError) as error:
        raise ConfigError(f"--prices: {path} cannot be read as JSON: {error}") from None
    if not isinstance(found, dict) or not found:
        raise ConfigError(f'--prices: {path} holds no prices by GPU type, as {{"h100": 2.5}}')
    for name, price in found.items():
        if name.lower() not in hardware.GPUS:
            known = ", ".join(hardware.GPUS)
            raise ConfigError(f"--prices: {path} has {name}, not a known GPU: give one of {known}")
        is_number = isinstance(price, (int, float)) and not isinstance(price, bool)
        if not is_number or not 0 < price <= MAX_PRICE:
            raise ConfigError(
                f"--prices: {path} has {json.dumps(price)} for {name}:"
                " give a price of a GPU and hour, more than 0"
            )
    return {name.lower(): float(price) for name, price in found.items()}


def _unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    """Returns an object's fields. Raises ValueError if a name stands twice, in any case."""
    names = [name.lower() for name, _ in pairs]
    for name in names:
        if names.count(name) > 1:
            raise ValueError(f"{name} stands twice")
    return dict(pairs)


def _price(prices: dict[str, float], source: PerformanceSource, path: str) -> float:
    """Returns the price of a source's GPU. Raises ConfigError if the file has none."""
    name = gpu_name(source)
    if not name:
        raise ConfigError(
            "--prices goes with --gpu, also beside --profile: the GPU that it measured"
        )
    if name not in prices:
        raise ConfigError(f"--prices: {path} has no price of {name}")
    return prices[name]
