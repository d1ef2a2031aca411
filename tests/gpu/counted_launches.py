"""Counts what the proof at start launches, which bounds its time on a GPU."""

from __future__ import annotations

from typing import Any

from torch.utils._python_dispatch import TorchDispatchMode

# The proof may take 200 ms: that leaves 15 us for each launch.
MAX_LAUNCHES = 13_000
# Of a layer that is the only one of its form: 80 of these stay below.
MAX_LAUNCHES_BY_LAYER = 160


class CountedLaunches(TorchDispatchMode):
    """Counts torch's operations, but views and allocations: on a GPU each is a launch.

    Triton's interpreter, too, makes tensors over memory that is there.
    """

    ALLOCATIONS = frozenset(("empty", "empty_like", "new_empty", "set_"))

    def __init__(self) -> None:
        super().__init__()
        self.count = 0

    def __torch_dispatch__(self, op: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = op.overloadpacket.__name__
        self.count += not op.is_view and name not in self.ALLOCATIONS
        return op(*args, **(kwargs or {}))
