"""Describes an engine to proxies and other engines, from the handshakes of its workers."""

from __future__ import annotations

import hashlib
import importlib.metadata
from collections import Counter
from collections.abc import Mapping, Sequence

import msgspec
import vllm

import vllm_disagg
from vllm_disagg.protocol.peers import EngineInfo

from .compatibility import INVARIANCE, QUANTIZATION
from .data_parallel import SharedServerRank
from .metadata import Handshake


def describe(
    handshakes: Sequence[Handshake],
    role: str,
    layout: Mapping[str, str],
    *,
    rank: SharedServerRank | None,
    permits_reuse: bool,
    failure_policy: str,
    plain_chat: bool,
) -> EngineInfo:
    """Returns the description of an engine.

    `handshakes`: by pipeline stage, then by tensor parallel rank. The ranks of one stage hold the
    same layers. `role`: prefill, decode or both. `layout`: the facts of `compatibility.layout`.
    `rank`: of an engine whose API server has several.
    `failure_policy`: vLLM's setting for failed loads.
    `plain_chat`: no parser takes reasoning out of the text of its chats.
    """
    names = "".join(handshake.worker.name for handshake in handshakes)
    layer_numbers: dict[str, int] = {}  # by name, in the model
    form_counts: Counter[str] = Counter()
    workers = []
    for handshake in handshakes:
        holds = handshake.worker.holds
        for name, layer in zip(handshake.layers, holds.layers, strict=True):
            if name not in layer_numbers:
                kind = holds.kinds[layer]
                form_counts[f"{kind.total_heads} heads of {kind.fingerprint}"] += 1
            layer_numbers.setdefault(name, len(layer_numbers))
        first = layer_numbers[handshake.layers[0]] if handshake.layers else 0
        holds = msgspec.structs.replace(holds, first=first)
        workers.append(msgspec.structs.replace(handshake.worker, holds=holds))
    layout = dict(layout)
    if any(handshake.varies for handshake in handshakes):
        layout[INVARIANCE] = "1, but not in all layers"
    # Tensor-parallel ranks have parts of the same layers.
    unusual = {each for handshake in handshakes for each in handshake.expert_numbers.items()}
    for numbers, count in sorted(Counter(numbers for _, numbers in unusual).items()):
        # No fact of its own, so that engines without such layers pair with those of older versions.
        layout[QUANTIZATION] += f", {count} layers of experts {numbers} (--moe-backend chooses)"
    digest = hashlib.sha256(" ".join(layer_numbers).encode()).hexdigest()[:12]
    forms = [f"{count} layers of {form}" for form, count in sorted(form_counts.items())]
    return EngineInfo(
        incarnation=hashlib.sha256(names.encode()).hexdigest()[:16],
        role=role,  # type: ignore[arg-type]
        workers=workers,
        layout={
            **layout,
            "layers": f"{len(layer_numbers)} ({digest})",
            "KV of a token": "; ".join(forms),
        },
        rank=rank.header if rank is not None else None,
        label=rank.label if rank is not None else None,
        two_way=permits_reuse,
        version=vllm.__version__,
        release=vllm_disagg.__version__,
        transformers=importlib.metadata.version("transformers"),
        failure_policy=failure_policy,
        plain_chat=plain_chat,
    )


def shared_gpu(handshakes: Sequence[Handshake]) -> str:
    """Returns which ranks of one engine have their KV on one GPU; empty if each has its own."""
    ranks: dict[str, int] = {}  # by GPU
    for rank, handshake in enumerate(handshakes):
        if handshake.gpu in ranks:
            return (
                f"ranks {ranks[handshake.gpu]} and {rank} both have their KV on GPU"
                f" {handshake.gpu}: give each rank a GPU of its own in CUDA_VISIBLE_DEVICES"
            )
        if handshake.gpu:
            ranks[handshake.gpu] = rank
    return ""
