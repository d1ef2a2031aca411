"""The known bytes of a proof piece."""

from __future__ import annotations

import numpy as np

from vllm_disagg.transports.collective.proof import proof_content, proof_seed


def test_each_epoch_of_each_pair_has_bytes_of_its_own() -> None:
    """Memory that another epoch, or another pair, has left behind is no proof."""
    seeds = {
        proof_seed("p/0", "d/0", 1),
        proof_seed("p/0", "d/0", 2),
        proof_seed("p/0", "d/1", 1),
        proof_seed("p/1", "d/0", 1),
        proof_seed("d/0", "p/0", 1),
    }
    assert len(seeds) == 5
    contents = [proof_content(seed, 4096).tobytes() for seed in seeds]
    assert len({content[:64] for content in contents}) == 5
    assert len({content[-64:] for content in contents}) == 5


def test_both_ends_compute_the_same_bytes() -> None:
    seed = proof_seed("p/0", "d/0", 1)
    assert np.array_equal(proof_content(seed, 1001), proof_content(seed, 1001))
    assert proof_content(seed, 1001).size == 1001
