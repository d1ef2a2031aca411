"""Hypothesis chooses what happens next, one rule at a time, and shrinks what breaks to the few
steps that matter.
"""

from __future__ import annotations

import os

from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, precondition, rule
from world_ranks import FAST

from vllm_disagg.kv import extents
from vllm_disagg.protocol import messages
from world import EQUAL, SPLITS, Topology, World
from world_engines import PrefillEngine

EXAMPLES = int(os.environ.get("EXAMPLES", "150"))
ENGINES = st.tuples(st.sampled_from(SPLITS), st.sampled_from([2, 4, 8]))
OF_FOUR = st.tuples(st.sampled_from(SPLITS), st.just(4))
TOPOLOGIES = st.one_of(
    st.just(EQUAL),
    st.tuples(st.sampled_from([1, 2]), st.just(0), ENGINES, ENGINES),
    st.tuples(st.just(2), st.sampled_from([3, 6]), OF_FOUR, OF_FOUR),
)


class Transfers(RuleBasedStateMachine):
    """A calm world, in which only the rules below do harm. World and machines check themselves at
    every step.
    """

    @initialize(topology=TOPOLOGIES, has_gpus=st.booleans())
    def begin(self, topology: Topology, has_gpus: bool) -> None:
        self.world = World(0, chaos=frozenset(), topology=topology, has_gpus=has_gpus)

    @property
    def p(self) -> PrefillEngine:
        return self.world.prefill

    @rule()
    def dispatch(self) -> None:
        self.world.dispatch()

    @rule(midway=st.booleans())
    def compute(self, midway: bool) -> None:
        self.p.midway = midway
        if not self.p.frozen:
            self.p.compute()

    @rule()
    def finish(self) -> None:
        if not self.p.frozen:
            self.p.finish()

    @rule(again=st.booleans())
    def withdraw(self, again: bool) -> None:
        if not self.p.frozen:
            self.p.withdraw_one(again)

    @rule(data=st.data())
    def transmit(self, data: st.DataObject) -> None:
        rank = self.world.sides[data.draw(st.sampled_from(sorted(self.world.sides)))]
        if not rank.frozen:
            rank.serving.transmit()

    @rule(data=st.data())
    def land(self, data: st.DataObject) -> None:
        rank = self.world.sides[data.draw(st.sampled_from(sorted(self.world.sides)))]
        if not rank.frozen:
            rank.reading.land()

    @precondition(lambda self: self.world.has_gpus)
    @rule(data=st.data(), works=st.integers(1, 20))
    def gpu(self, data: st.DataObject, works: int) -> None:
        """The GPU does some of what was launched, and the thread that waits for it looks."""
        rank = self.world.sides[data.draw(st.sampled_from(sorted(self.world.sides)))]
        assert rank.gpu is not None
        for _ in range(min(works, len(rank.gpu.launched))):
            rank.gpu.launched.popleft()()
        if not rank.frozen:
            rank.gpu.take_reached()
            rank.drain()

    @precondition(lambda self: self.world.has_gpus)
    @rule(data=st.data())
    def blind(self, data: st.DataObject) -> None:
        self.world.blind(self.world.sides[data.draw(st.sampled_from(sorted(self.world.sides)))])

    @rule(label=st.sampled_from(["d", "e"]))
    def decode_step(self, label: str) -> None:
        if not self.world.decodes[label].frozen:
            self.world.decodes[label].step()

    @rule()
    def preempt_at_decode(self) -> None:
        self.world.preempt_at_decode()

    @precondition(lambda self: self.world.network)
    @rule(data=st.data(), fate=st.sampled_from(["deliver", "deliver", "deliver", "repeat", "drop"]))
    def network(self, data: st.DataObject, fate: str) -> None:
        index = data.draw(st.integers(0, len(self.world.network) - 1))
        if fate == "drop":
            self.world.network.pop(index)
            return
        if fate == "repeat":
            self.world.network.append(self.world.network[index])
        self.world.network.insert(0, self.world.network.pop(index))
        self.world.deliver()

    @rule(seconds=st.sampled_from([0.01, 0.6, 3.0, 11.0]))
    def time(self, seconds: float) -> None:
        self.world.pass_time(seconds)

    @precondition(lambda self: self.world.wanted)
    @rule(data=st.data())
    def cancel(self, data: st.DataObject) -> None:
        self.world.cancel(*data.draw(st.sampled_from(sorted(self.world.wanted))))

    @rule(data=st.data(), what=st.sampled_from(["connect", "break", "leave"]))
    def change_transport(self, data: st.DataObject, what: str) -> None:
        side = data.draw(st.sampled_from(self.world.readers()))
        source = data.draw(st.sampled_from(self.p.ranks))
        self.world.change_transport(side, source, what)

    @rule(label=st.sampled_from(["p", "d", "e"]))
    def die(self, label: str) -> None:
        self.world.die(label)

    @rule(data=st.data())
    def freeze_or_thaw(self, data: st.DataObject) -> None:
        self.world.sides[data.draw(st.sampled_from(sorted(self.world.sides)))].frozen ^= True

    @rule(
        transfer=st.sampled_from(["t0", "t1", "stranger"]),
        reader=st.sampled_from(["d0.0", "e0.0", "stranger"]),
        numbers=st.lists(st.integers(0, 40), min_size=6, max_size=6),
        kind=st.sampled_from(["pull", "fetch"]),
    )
    def a_reader_that_lies(self, transfer: str, reader: str, numbers: list[int], kind: str) -> None:
        """Whatever a member of the fleet asks, only its own transfer may suffer; and no exception
        comes of it.
        """
        p = self.p.ranks[numbers[0] % len(self.p.ranks)]
        if p.frozen:
            return
        if kind == "pull":
            message: messages.ToSender = messages.TransferRequest(
                "stranger", p.name, reader, "nowhere.0", numbers[0]
            )
        else:
            message = messages.ReadRequest(
                transfer, p.name, "stranger", numbers[0], extents.Extent(*numbers)
            )
        p.receive("serving", messages.encode(message))
        names = self.names()
        self.world.network = [sent for sent in self.world.network if is_for(sent[0], names)]
        outgoing = p.serving.outgoing
        p.serving.outgoing = [out for out in outgoing if is_for(out[0].address, names)]

    def names(self) -> set[str]:
        return {
            f"{label}.{life}"
            for label, side in self.world.sides.items()
            for life in range(side.life + 1)
        }

    def teardown(self) -> None:
        self.world.settle()


def is_for(address: str, names: set[str]) -> bool:
    return address.partition(FAST)[0] in names


TestTransfers = Transfers.TestCase
TestTransfers.settings = settings(
    max_examples=EXAMPLES,
    stateful_step_count=40,
    deadline=None,
    suppress_health_check=[HealthCheck.too_slow, HealthCheck.filter_too_much],
)
