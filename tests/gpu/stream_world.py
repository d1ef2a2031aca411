"""P and D on simulated GPUs, with this project's own code between their vLLMs.

Real: `DeviceMemory`, `DeviceStaging`, `GpuFacts`, the sender and receiver machines, both ends of a
collective channel. Simulated: streams (`simulated_gpu.py`), NCCL's link, the network, and vLLM,
which launches steps far ahead of the GPU and gives freed blocks to others at once.

What D decodes with is compared with what P has computed when the decode kernel *runs*. Everything
is drawn from one seed.
"""

from __future__ import annotations

import re
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from simulated_gpu import SimulatedGpu, SimulatedRuntime

from kv_connectors.gpu.facts import GpuFacts
from kv_connectors.gpu.memory import DeviceMemory
from kv_connectors.gpu.staging import DeviceStaging
from vllm_disagg.kv import reshard
from vllm_disagg.kv.layout import uniform
from vllm_disagg.kv.planes import Plane
from vllm_disagg.protocol import events
from vllm_disagg.protocol.peers import WorkerInfo
from vllm_disagg.protocol.receiver import Receiver
from vllm_disagg.protocol.sender import Sender
from vllm_disagg.transports.collective import channel
from vllm_disagg.transports.collective.proof import proof_content
from vllm_disagg.transports.collective.receiver_end import ReceiverEnd
from vllm_disagg.transports.collective.sender_end import SenderEnd

BLOCK_TOKENS = 4
PATIENCE = 1e9  # no time passes for the machines
BOUNCE, DIRECT = "zmq:d", "nccl:1"  # addresses of D
EPOCH = 1
SLOT_BLOCKS = 4
OLD = 0xEE  # what others have in a block
# A gather and what vLLM does with its blocks, whichever was launched first.
GATHER_RACE = re.compile(
    r"(?:others|prefill) on p compute against move of (?P<first>\w+)"
    r"|move of (?P<second>\w+) on p stream \d+ against (?:others|prefill)"
)


@dataclass
class Shape:
    """Sizes of a world."""

    layers: int = 3
    blocks: int = 12
    block_bytes: int = 32
    blocks_per_piece: int = 1  # at most 4, the size of a slot


class Engine:
    """One engine's GPU: caches, memory, and facts on their way to its driver."""

    def __init__(self, world: StreamWorld, name: str) -> None:
        self.world = world
        self.name = name
        self.runtime = SimulatedRuntime(world.gpu, name)
        self.runtime.use_device()
        shape = world.shape
        self.caches = [
            torch.full((shape.blocks, shape.block_bytes), OLD, dtype=torch.uint8)
            for _ in range(shape.layers)
        ]
        planes = [
            [Plane(cache.data_ptr(), shape.block_bytes, 1, shape.block_bytes, shape.block_bytes)]
            for cache in self.caches
        ]
        self.layout = uniform(shape.layers, BLOCK_TOKENS, [shape.block_bytes])
        self.memory = DeviceMemory(planes, self.layout, self.runtime)
        self.staging = DeviceStaging(self.memory)
        self.inbox: deque[Any] = deque()  # of the driver
        self.facts = GpuFacts(self.runtime, self.inbox.extend)
        self.link = Link(self)
        self.free = list(range(1, shape.blocks))

    def take(self, count: int) -> list[int]:
        taken = self.free[-count:]
        del self.free[-count:]
        return taken

    def address(self, layer: int, block: int) -> int:
        return self.caches[layer].data_ptr() + block * self.world.shape.block_bytes

    def compute(
        self, name: str, layer: int, blocks: Sequence[int], content: np.ndarray, seconds: float = 0
    ) -> None:
        """Launches a kernel of vLLM that writes one layer's blocks."""

        def run() -> None:
            self.caches[layer].numpy()[list(blocks)] = content

        written = [self.address(layer, block) for block in blocks]
        self.world.gpu.launch(self.runtime.compute, name, run, [], written, seconds)

    def overwrite(self, blocks: Sequence[int]) -> None:
        """Launches a step of other requests, which have these blocks now."""
        content = np.full((len(blocks), self.world.shape.block_bytes), OLD, np.uint8)
        for layer in range(self.world.shape.layers):
            self.compute("others", layer, blocks, content)

    @property
    def has_reached_facts(self) -> bool:
        event: Any = self.facts._queue.next_event()
        return event is not None and event.is_reached

    @property
    def has_waiting_facts(self) -> bool:
        return self.facts._queue.next_event() is not None


class Link:
    """One end of a simulated NCCL communicator: its stream, its slots, what it has posted."""

    def __init__(self, engine: Engine) -> None:
        self.stream = engine.runtime.new_stream()
        size = SLOT_BLOCKS * engine.world.shape.block_bytes
        self.slots = engine.staging.slots(channel.SLOTS_PER_CHANNEL, size)
        self.posted: deque[tuple[int, Any]] = deque()  # (seq, event behind the call)


@dataclass
class Prompt:
    """One request, at P and at D."""

    transfer: str
    truth: np.ndarray = field(repr=False)  # layer, block, byte
    at_p: list[int] = field(default_factory=list)  # blocks
    at_d: list[int] = field(default_factory=list)
    launched: int = 0  # blocks that P computes
    is_over_at_p: bool = False
    result: events.LoadResult | None = None
    loaded_at: float = 0.0
    was_read: bool = False  # by D's decode kernel


class StreamWorld:
    """One run. `revokes`: P's vLLM preempts, D's cancels."""

    def __init__(
        self, gpu: SimulatedGpu, address: str, revokes: bool = False, shape: Shape | None = None
    ) -> None:
        self.gpu = gpu
        self.random = gpu.random
        self.shape = shape or Shape()
        self.address = address
        self.revokes = revokes
        self.p = Engine(self, "p")
        self.d = Engine(self, "d")
        self.sender = Sender("p", self.p.layout, lease=PATIENCE)
        piece_bytes = self.shape.blocks_per_piece * self.shape.block_bytes
        self.receiver = Receiver("d", address, 0, self.d.layout, piece_bytes=piece_bytes)
        self.worker = WorkerInfo("p", "", "", holds=self.p.layout)
        self.plan = reshard.plan([self.p.layout], [self.d.layout])
        self.prompts: dict[str, Prompt] = {}
        self.messages: deque[tuple[Callable[[Any], None], Any]] = deque()
        self.pieces: deque[tuple[str, int, bytes]] = deque()  # on the wire, of the bounce
        self.posted: dict[tuple[str, int], events.PostRead] = {}
        self.polls: list[tuple[Callable[[], Any], Callable[[Any], None]]] = []
        # In the order of their sends, in which the worker reports them.
        self.gathers: deque[tuple[Callable[[], Any], Callable[[Any], None]]] = deque()
        self.sending = SenderEnd(PATIENCE)
        self.reading = ReceiverEnd(PATIENCE, slot=SLOT_BLOCKS * self.shape.block_bytes)
        for end in (self.sending, self.reading):
            end.slot = SLOT_BLOCKS * self.shape.block_bytes
            end.begin(EPOCH, 0.0)
        self.in_flight: dict[int, tuple[torch.Tensor, Any]] = {}  # by seq: bytes, event of the send
        self.wrong: list[str] = []
        self.revoked: set[str] = set()
        self.is_proved = False
        if address == DIRECT:
            self.pair()

    def pair(self) -> None:
        """Carries the proof piece before anything else."""
        self.on_sending_end(channel.LinkUp(EPOCH))
        self.on_reading_end(channel.LinkUp(EPOCH))
        while not self.is_proved:
            self.poll()
            self.gpu.step()

    @property
    def races(self) -> list[str]:
        """All races except those of a gather whose transfer was revoked.

        vLLM takes revoked blocks at once. The gather only reads them, and no Confirm follows.
        """
        return [race for race in self.gpu.races if not self._is_of_revoked(race)]

    def _is_of_revoked(self, race: str) -> bool:
        found = GATHER_RACE.fullmatch(race)
        return found is not None and (found["first"] or found["second"]) in self.revoked

    # P's vLLM -------------------------------------------------------------------------------------
    def submit_prompt(self, blocks: int) -> Prompt | None:
        if len(self.p.free) < blocks or len(self.d.free) < blocks:
            return None
        transfer = f"{len(self.prompts) + 1:032x}"
        size = (self.shape.layers, blocks, self.shape.block_bytes)
        truth = np.random.default_rng(self.random.randrange(2**32)).integers(0, 255, size, np.uint8)
        prompt = Prompt(transfer, truth, self.p.take(blocks), self.d.take(blocks))
        self.prompts[transfer] = prompt
        return prompt

    def launch_chunk(self, prompt: Prompt, blocks: int, layer_seconds: float = 0.0) -> None:
        """Launches a step: its layers are announced as they are launched."""
        begin = prompt.launched
        prompt.launched = min(begin + blocks, len(prompt.at_p))
        new = prompt.at_p[begin : prompt.launched]
        tokens = prompt.launched * BLOCK_TOKENS
        self.p.facts.submit([events.BlocksScheduled(prompt.transfer, tokens, [new])])
        for layer in range(self.shape.layers):
            content = prompt.truth[layer, begin : prompt.launched]
            self.p.compute("prefill", layer, new, content, layer_seconds)
            self.p.facts.submit([events.LayersComputed(prompt.transfer, layer + 1)])

    def finish(self, prompt: Prompt) -> None:
        prompt.is_over_at_p = True
        self.p.facts.submit([events.PrefillFinished(prompt.transfer)])

    def revoke(self, prompt: Prompt) -> None:
        """Preempts: others write into the blocks from now on."""
        prompt.is_over_at_p = True
        self.revoked.add(prompt.transfer)
        self.p.facts.submit([events.BlocksRevoked(prompt.transfer)])
        self.give_back(self.p, prompt.at_p)

    @staticmethod
    def give_back(engine: Engine, blocks: list[int]) -> None:
        engine.overwrite(blocks)
        engine.free += blocks

    # D's vLLM -------------------------------------------------------------------------------------
    def want(self, prompt: Prompt) -> None:
        """Parks a request, in blocks that an earlier step may still write."""
        self.d.overwrite(prompt.at_d)
        end = len(prompt.at_d) * BLOCK_TOKENS
        blocks = [events.GroupBlocks(0, prompt.at_d)]
        load = events.LoadRequested(
            prompt.transfer, [self.worker], self.plan, blocks, end, stall_timeout=PATIENCE
        )
        self.d.facts.submit([load])

    def on_loaded(self, result: events.LoadResult) -> None:
        prompt = self.prompts[result.transfer]
        assert prompt.result is None, "reported twice"
        prompt.result = result
        prompt.loaded_at = self.gpu.now
        if result.reason is None:
            self.decode(prompt)
        self.give_back(self.d, prompt.at_d)

    def decode(self, prompt: Prompt) -> None:
        """Launches a kernel that reads what was loaded."""

        def run() -> None:
            prompt.was_read = True
            for layer, truth in enumerate(prompt.truth):
                found = self.d.caches[layer].numpy()[prompt.at_d]
                if not np.array_equal(found, truth):
                    self.wrong.append(f"{prompt.transfer}: layer {layer}")

        layers = range(self.shape.layers)
        read = [self.d.address(layer, block) for layer in layers for block in prompt.at_d]
        self.gpu.launch(self.d.runtime.compute, "decode", run, read, [])

    # The drivers ----------------------------------------------------------------------------------
    def drain(self, engine: Engine) -> None:
        while engine.inbox:
            fact = engine.inbox.popleft()
            if engine is self.p:
                self.handle_sender(fact)
            else:
                self.handle_receiver(fact)

    def deliver(self) -> None:
        """Delivers one message or one piece of the bounce."""
        self.drain(self.p)
        self.drain(self.d)
        if self.messages and (not self.pieces or self.random.random() < 0.5):
            handle, message = self.messages.popleft()
            handle(message)
        elif self.pieces:
            self.write_piece(*self.pieces.popleft())

    def handle_sender(self, event: Any) -> None:
        for action in self.sender.handle(event, 0.0):
            match action:
                case events.SendMessage():
                    self.messages.append((self.handle_receiver, action.message))
                case events.SendPiece():
                    self.send(action)
                case events.ReleaseBlocks():
                    self.give_back(self.p, self.prompts[action.transfer].at_p)
        self.sender.validate()

    def handle_receiver(self, event: Any) -> None:
        for action in self.receiver.handle(event, 0.0):
            match action:
                case events.SendMessage():
                    self.messages.append((self.handle_sender, action.message))
                case events.PostRead():
                    self.posted[action.transfer, action.number] = action
                case events.CancelReads():
                    self.cancel(action)
                case events.LoadResult():
                    self.on_loaded(action)
        self.receiver.validate()

    def cancel(self, action: events.CancelReads) -> None:
        for number in action.numbers:
            read = self.posted.pop((action.transfer, number), None)
            if read is not None:
                self.end_read(read, events.ReadStatus.CANCELLED)

    def end_read(self, read: events.PostRead, status: events.ReadStatus) -> None:
        self.d.inbox.append(events.ReadCompleted(read.transfer, read.number, status))

    def end_write(self, read: events.PostRead, is_written: bool) -> None:
        status = events.ReadStatus.WRITTEN if is_written else events.ReadStatus.DAMAGED
        self.end_read(read, status)

    # The bounce through host memory ---------------------------------------------------------------
    def send(self, piece: events.SendPiece) -> None:
        if self.address == DIRECT:
            self.on_sending_end(channel.SendRequested(piece, EPOCH))
            return
        frames = self.p.memory.read(piece.extent, piece.blocks)
        self.pieces.append((piece.transfer, piece.number, b"".join(frames)))
        self.p.inbox.append(piece.completed())

    def write_piece(self, transfer: str, number: int, content: bytes) -> None:
        read = self.posted.pop((transfer, number), None)
        if read is not None:
            is_written = self.d.memory.write(read.extent, read.blocks, [memoryview(content)])
            self.end_write(read, is_written)

    # The collective channel -----------------------------------------------------------------------
    def on_sending_end(self, event: Any) -> None:
        for action in self.sending.handle(event, 0.0):
            match action:
                case channel.SendNote():
                    self.on_reading_end(action.note)
                case channel.TransmitProof():
                    self.transmit_proof(action)
                case channel.TransmitSlot():
                    self.transmit(action)
                case channel.SendFinished():
                    self.p.inbox.append(action.piece.completed())
                case _:
                    raise AssertionError(action)
        self.sending.validate()

    def transmit(self, action: channel.TransmitSlot) -> None:
        link = self.p.link
        slot = link.slots[action.slot]
        self.gpu.label = f"of {action.piece.transfer}"
        size, poll = self.p.staging.gather(action.piece, slot, link)
        self.gpu.label = ""

        def gathered(digest: int) -> None:
            self.on_sending_end(channel.SlotGathered(EPOCH, action.seq, size, digest))

        self.gathers.append((poll, gathered))
        self.launch_send(action.seq, slot, size)

    def transmit_proof(self, action: channel.TransmitProof) -> None:
        slot = self.p.link.slots[action.slot]
        self.p.staging.fill(slot, proof_content(EPOCH, action.size), self.p.link)
        self.launch_send(channel.PROOF_SEQ, slot, action.size)

    def launch_send(self, seq: int, slot: torch.Tensor, size: int) -> None:
        link = self.p.link
        flight = torch.zeros(size, dtype=torch.uint8)
        self.gpu.launch(
            link.stream, "send", lambda: flight.copy_(slot[:size]), [slot.data_ptr()], []
        )
        event = self.p.runtime.record_event(link.stream)
        self.in_flight[seq] = flight, event
        link.posted.append((seq, event))

    def on_reading_end(self, event: Any) -> None:
        for action in self.reading.handle(event, 0.0):
            match action:
                case channel.ReceiveSlot():
                    self.receive(action)
                case channel.DeliverSlot():
                    self.scatter(action)
                case channel.CheckProof():
                    self.check_proof(action)
                case channel.ChangeRoute():
                    self.is_proved = True
                case _:
                    raise AssertionError(action)
        self.reading.validate()

    def receive(self, action: channel.ReceiveSlot) -> None:
        link = self.d.link
        slot = link.slots[action.slot]
        flight, sent = self.in_flight.pop(action.seq)
        link.stream.wait_event(sent)  # the kernels of both ends end together
        self.gpu.launch(
            link.stream,
            "receive",
            lambda: slot[: action.size].copy_(flight),
            [],
            [slot.data_ptr()],
        )
        link.posted.append((action.seq, self.d.runtime.record_event(link.stream)))

    def check_proof(self, action: channel.CheckProof) -> None:
        slot = self.d.link.slots[action.slot]
        poll = self.d.staging.compare(slot, proof_content(EPOCH, action.size))

        def checked(is_right: bool) -> None:
            assert is_right, "the proof piece came with other bytes"
            self.on_reading_end(channel.ProofChecked(EPOCH, action.slot, is_right))

        self.polls.append((poll, checked))

    def scatter(self, action: channel.DeliverSlot) -> None:
        piece = action.piece
        read = self.posted.pop((piece.transfer, piece.number), None)
        freed = channel.SlotFreed(EPOCH, action.slot)
        if read is None:
            self.on_reading_end(freed)
            return
        slot = self.d.link.slots[action.slot]
        poll = self.d.staging.scatter(read, slot, piece.size, piece.checksum, self.d.link)

        def scattered(is_written: bool) -> None:
            self.end_write(read, is_written)
            self.on_reading_end(freed)

        self.polls.append((poll, scattered))

    def poll(self) -> bool:
        """Looks at every copy and link once; returns whether anything has ended."""
        has_ended = False
        while self.gathers and (digest := self.gathers[0][0]()) is not None:
            has_ended = True
            _, gathered = self.gathers.popleft()
            gathered(digest)
        polls = self.polls
        self.polls = []
        for poll, done in polls:
            result = poll()
            if result is None:
                self.polls.append((poll, done))
            else:
                has_ended = True
                done(result)
        for link, end in (
            (self.p.link, self.on_sending_end),
            (self.d.link, self.on_reading_end),
        ):
            while link.posted and link.posted[0][1].query():
                has_ended = True
                end(channel.SlotCompleted(EPOCH, link.posted.popleft()[0]))
        return has_ended

    def go_on(self) -> None:
        """Does all that the host can do; no time passes unless it waits for a copy."""
        has_worked = True
        while has_worked:
            has_worked = self.poll()
            for engine in (self.p, self.d):
                while engine.has_reached_facts:
                    engine.facts.submit_next()
            while self.p.inbox or self.d.inbox or self.messages or self.pieces:
                has_worked = True
                self.deliver()

    # One run --------------------------------------------------------------------------------------
    def step(self) -> None:
        kind = self.random.randrange(10)
        if kind == 0:
            self.start()
        elif kind == 1:
            self.go_on_with_one()
        elif kind == 2:
            engine = self.random.choice([self.p, self.d])
            if engine.has_waiting_facts:
                engine.facts.submit_next()
        elif kind == 3 and self.revokes:
            self.revoke_one()
        elif kind <= 6:
            self.deliver()
        elif kind <= 8:
            self.poll()
        else:
            self.gpu.run_some()

    def start(self) -> None:
        """A request comes; D may want it first."""
        prompt = self.submit_prompt(self.random.randint(1, 3))
        if prompt is not None:
            self.want(prompt)

    def running(self) -> list[Prompt]:
        return [prompt for prompt in self.prompts.values() if not prompt.is_over_at_p]

    def go_on_with_one(self) -> None:
        running = self.running()
        if running:
            prompt = self.random.choice(running)
            if prompt.launched < len(prompt.at_p):
                self.launch_chunk(prompt, self.random.randint(1, 2))
            else:
                self.finish(prompt)

    def revoke_one(self) -> None:
        running = self.running()
        if running and self.random.random() < 0.3:
            self.revoke(self.random.choice(running))
        loading = [prompt for prompt in self.prompts.values() if prompt.result is None]
        if loading and self.random.random() < 0.3:
            prompt = self.random.choice(loading)
            self.d.facts.submit([events.LoadCancelled(prompt.transfer)])

    def run(self, steps: int = 80) -> None:
        for _ in range(steps):
            self.step()
        self.settle()

    def settle(self) -> None:
        """Everything comes to its end."""
        for _ in range(2000):
            if self.is_over():
                break
            self.go_on_with_one()
            for engine in (self.p, self.d):
                if engine.has_waiting_facts:
                    engine.facts.submit_next()
            self.deliver()
            self.poll()
            self.gpu.step()
        assert self.is_over(), self.prompts
        self.gpu.finish()

    def is_over(self) -> bool:
        has_work = self.messages or self.pieces or self.p.inbox or self.d.inbox or self.polls
        has_work = has_work or self.gathers
        are_loaded = all(prompt.result is not None for prompt in self.prompts.values())
        return are_loaded and not has_work and not self.running() and not self.sender.transfers
