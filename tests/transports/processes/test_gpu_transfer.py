"""What tests/gpu reads in the output of benchmarks/gpu_transfer.py, by its dry run with Gloo."""

from __future__ import annotations

import signal

import pytest
import torch

if torch.cuda.is_available():
    pytest.skip("tests/gpu runs it on the GPU here", allow_module_level=True)

from gpu_runs import hit_the_sender, measured

SMALL = ("--gigabytes", "0.002")


def test_bytes_are_right_and_the_rates_are_told() -> None:
    assert list(measured("--transports", "gloo,zmq", "--rounds", "1", *SMALL)) == ["gloo", "zmq"]


@pytest.mark.parametrize("how", [signal.SIGKILL, signal.SIGSTOP])
def test_a_peer_that_dies_or_freezes_does_not_hang_the_other(how: signal.Signals) -> None:
    hit_the_sender("gloo", how, *SMALL)
