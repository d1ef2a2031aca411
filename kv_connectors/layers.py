"""Finds out which layers' KV is final in the middle of a step.

vLLM calls the connector after each attention layer. Layers are numbered before the first step: a
layer's number is its address on the wire, and does not tell when the layer is computed. A layer
may be computed several times in a step (loops over layers, microbatches); its KV is final at the
last call. Layers with SSM states are computed without a call.

Theory. The number of calls of a layer in earlier steps predicts that of this step. A layer counts
as final once it has had the highest number of calls in any earlier step. Only a prefix of the
layers, by number, is reported. If a reported layer is computed again, the report was wrong: the
caller takes it back, and nothing is reported for the rest of the step.

Final layers are announced in groups, so that messages stay few.
"""

from __future__ import annotations

from collections.abc import Sequence

from vllm_disagg.kv.layout import RankLayout
from vllm_disagg.protocol.events import BlocksScheduled

PROGRESS_BYTES = 2 << 20  # of the layers in one group


class FinalLayers:
    """Counts the calls of each layer in a step, and reports how many first layers are final.

    In the first step no layer is final before the end. A layer without calls never is.
    """

    def __init__(self, names: Sequence[str]) -> None:
        """Number the layers in the order of their names here."""
        self._numbers = {name: number for number, name in enumerate(names)}
        self._expected_calls = [0] * len(names)
        self._calls = [0] * len(names)  # in this step
        self.begin_step()

    def __len__(self) -> int:
        return len(self._numbers)

    def begin_step(self) -> None:
        """Start to count for a new step, and expect the highest counts so far."""
        self._expected_calls = [
            max(calls) for calls in zip(self._expected_calls, self._calls, strict=True)
        ]
        self._calls = [0] * len(self._calls)
        self._final = 0  # layers
        # Never all layers: only the end of the step proves that a call was the last one.
        self._max_final = len(self._calls) - 1

    def count_call(self, name: str) -> int:
        """Count one call of a layer; return how many of the first layers are final.

        Returns 0 for the rest of the step once a final layer is computed again.
        """
        number = self._numbers.get(name)
        if number is None:  # a layer that uses another layer's KV
            return self._final
        self._calls[number] += 1
        if number < self._final:
            self._final = 0
            self._max_final = 0
        while self._final < self._max_final and self._is_final(self._final):
            self._final += 1
        return self._final

    def _is_final(self, number: int) -> bool:
        return self._calls[number] == self._expected_calls[number] > 0


def layers_per_event(layout: RankLayout, scheduled: Sequence[BlocksScheduled]) -> int:
    """Returns how many layers of a step hold `PROGRESS_BYTES`, by the largest layer kind.

    `scheduled`: the prompts that the step computes.
    """
    layer_bytes = 0
    for kind in layout.kinds:
        blocks = sum(len(event.blocks[kind.group]) for event in scheduled)
        layer_bytes = max(layer_bytes, sum(kind.block_bytes) * blocks)
    if not layer_bytes:
        return len(layout.layers) + 1  # none before the step's end
    return -(-PROGRESS_BYTES // layer_bytes)
