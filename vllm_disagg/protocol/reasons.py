"""Reasons of failed transfers, apart from the events: commands without numpy read them, too."""

from __future__ import annotations

from enum import Enum


class Reason(str, Enum):
    """Names why a transfer failed.  A closed set, because the values label metrics."""

    CANCELLED = "cancelled"  # the receiving engine cancelled the request
    BLOCKS_REVOKED = "blocks_revoked"  # the sending engine aborted or preempted the request
    PROMPT_MISMATCH = "prompt_mismatch"  # the sender computes another prompt under this id
    UNKNOWN_TRANSFER = "unknown_transfer"  # the sender has no such transfer, or no room for it
    PEER_TIMEOUT = "peer_timeout"  # the sender does not answer
    TRANSFER_STALLED = "transfer_stalled"  # the sender answers, but no bytes or tokens arrive
    ENGINE_STALLED = "engine_stalled"  # the sending engine has work, but has made no step for long
    CORRUPT = "corrupt"  # a piece failed its checksum or size several times, or others did before
    INTERNAL_ERROR = "internal_error"  # the driver of this worker failed
    KV_MISMATCH = "kv_mismatch"  # the sums of both sides' blocks differ, did too often, or failed
    BLOCKS_RELEASED = "blocks_released"  # the sender released blocks before all bytes were in place


class Uncompared(str, Enum):
    """Why the blocks of a load that succeeded were not all compared with those of its senders."""

    NOT_SUMMED_HERE = "not_summed_here"  # KV in host memory
    OTHER_LAYOUT = "other_layout"  # other block sizes, or a part of the heads
    NO_SENDER_SUMS = "no_sender_sums"  # KV in host memory there, more tokens written, or a failure
