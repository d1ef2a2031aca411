"""NCCL between two processes on one GPU or two.

Needs a GPU; for two ranks on one GPU, NCCL >= 2.30.4.
"""

from __future__ import annotations

import signal

import pytest
import torch

if not torch.cuda.is_available():
    pytest.skip("no GPU here", allow_module_level=True)

from gpu_runs import hit_the_sender, measured


def test_bytes_are_right_and_the_rates_are_told() -> None:
    measured("--transports", "nccl,zmq")


@pytest.mark.parametrize("how", [signal.SIGKILL, signal.SIGSTOP])
def test_a_peer_that_dies_or_freezes_does_not_hang_the_other(how: signal.Signals) -> None:
    """The prefill worker is hit in mid-stream; the decode worker must report it and end."""
    hit_the_sender("nccl", how)
