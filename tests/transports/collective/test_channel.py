"""Seeded worlds of two channel ends: lost notes, peers that freeze, links that fail.

The link here has the properties of NCCL and Gloo: the n-th send of an epoch goes into the n-th
receive. Received bytes are compared with the announced piece.
"""

from __future__ import annotations

import os
import random
from collections import deque
from dataclasses import dataclass, field

import pytest

from vllm_disagg.kv.extents import Extent
from vllm_disagg.protocol.events import SendPiece
from vllm_disagg.transports.collective import channel, notes
from vllm_disagg.transports.collective.receiver_end import MAX_QUEUED_PIECES, ReceiverEnd
from vllm_disagg.transports.collective.sender_end import SenderEnd

SEEDS = int(os.environ.get("SEEDS", "160"))
FIRST = int(os.environ.get("SEED", "0"))
SIZE, SLOT, PATIENCE = 10, 12, 2.0
# percent
CHAOS = {
    "lose": 2,
    "fail": 1,
    "freeze": 2,
    "refuse": 1,
    "leap": 1,
    "oversize": 1,
    "garble": 2,
}
PROOF = ("the known bytes", 0)


@dataclass
class Posted:
    """Operations that were posted at both ends of one epoch."""

    sends: list[tuple[int, tuple[str, int] | None]] = field(
        default_factory=list
    )  # seq, what lies in the slot
    receives: list[tuple[int, int]] = field(default_factory=list)  # seq, slot
    sent: int = 0  # so many sends have ended
    received: int = 0
    open_ends: set[str] = field(default_factory=set)
    is_broken: bool = False


class World:
    def __init__(self, seed: int) -> None:
        self.random = random.Random(seed)
        self.is_eager = self.random.random() < 0.5
        self.chaos = {
            what: often * self.random.choice([0, 1, 1, 8]) for what, often in CHAOS.items()
        }
        self.now = 0.0
        self.p, self.d = SenderEnd(PATIENCE), ReceiverEnd(PATIENCE, slot=SLOT)
        self.wires: dict[str, deque[bytes]] = {"p": deque(), "d": deque()}  # to whom
        self.epochs: dict[int, Posted] = {}
        self.gathers: list[tuple[channel.TransmitSlot, bool]] = []
        # Gathered, but P has not looked yet.
        self.gathered: deque[tuple[channel.TransmitSlot, bool]] = deque()
        self.routed: int | None = None
        self.asked: dict[int, SendPiece] = {}  # not finished, by number
        self.number = 0
        self.landing: list[tuple[int, int]] = []  # epoch, slot: D reads it
        self.checking: list[tuple[channel.CheckProof, bool]] = []  # proof, is it right
        self.proved: set[int] = set()
        self.delivered: set[int] = set()
        self.frozen: set[str] = set()
        self.log: list[str] = []

    def roll(self, what: str) -> bool:
        return self.random.randrange(100) < self.chaos.get(what, 0)

    # The two ends
    def at(self, who: str, event: object) -> None:
        end = self.p if who == "p" else self.d
        self.log.append(f"{self.now:6.2f} {who} <- {event}")
        for action in end.handle(event, self.now):  # type: ignore[arg-type]
            self.log.append(f"{self.now:6.2f} {who} -> {action}")
            self.do(who, action)
        end.validate()

    def do(self, who: str, action: object) -> None:
        match action:
            case channel.SendNote():
                if not self.roll("lose"):
                    self.wires["d" if who == "p" else "p"].append(notes.encode(action.note))
            case channel.OpenLink():
                self.epochs.setdefault(action.epoch, Posted()).open_ends.add(who)
            case channel.CloseLink():
                self.epochs[action.epoch].is_broken = True
            case channel.TransmitProof() | channel.CheckProof():
                self.do_proof(action)
            case channel.TransmitSlot():
                epoch = self.epochs[action.epoch]
                assert action.seq == len(epoch.sends), "not in order"
                epoch.sends.append((action.seq, None))
                self.gathers.append((action, self.roll("oversize")))
            case channel.ReceiveSlot():
                epoch = self.epochs[action.epoch]
                assert action.seq == len(epoch.receives), "not in order"
                assert action.size <= SLOT, "into a slot that does not hold it"
                assert (action.epoch, action.slot) not in self.landing, (
                    "into a slot that is being read"
                )
                epoch.receives.append((action.seq, action.slot))
            case channel.SendFinished():
                assert all(gather.piece is not action.piece for gather, _ in self.gathers), (
                    "finished while it is read"
                )
                del self.asked[action.piece.number]
            case channel.DeliverSlot():
                _, content = self.epochs[action.epoch].sends[action.piece.seq]
                assert content == (action.piece.transfer, action.piece.number), (
                    "bytes of another piece"
                )
                self.delivered.add(action.piece.number)
                self.landing.append((action.epoch, action.slot))
            case channel.ChangeRoute():
                assert action.epoch is None or action.epoch in self.proved, "used without proof"
                self.routed = action.epoch
            case _:
                assert isinstance(action, channel.PassBlob), action

    def do_proof(self, action: channel.TransmitProof | channel.CheckProof) -> None:
        sends = self.epochs[action.epoch].sends
        if isinstance(action, channel.TransmitProof):
            assert not sends, "the proof is not the first send"
            sends.append((channel.PROOF_SEQ, PROOF))
            self.proof_bytes = action.size
        else:
            assert sends[0] == (channel.PROOF_SEQ, PROOF)
            assert action.size == self.proof_bytes, "the ends differ about the proof"
            self.checking.append((action, not self.roll("garble")))

    # What happens
    def ask(self) -> None:
        """The receiver's ReadRequest; the sender has its address from the last TransferRequest."""
        if self.routed is not None and len(self.asked) < 12:
            number, self.number = self.number, self.number + 1
            piece = SendPiece("t", "d", f"x:{self.routed}", number, Extent(0, 1, 0, 1), [0])
            self.asked[number] = piece
            self.at("p", channel.SendRequested(piece, self.routed))

    def gather(self) -> None:
        if self.gathers:
            action, too_large = self.gathers.pop(0)
            if not too_large:
                sends = self.epochs[action.epoch].sends
                sends[action.seq] = (action.seq, (action.piece.transfer, action.piece.number))
            self.gathered.append((action, too_large))
        if self.gathered and self.random.random() < 0.7:
            action, too_large = self.gathered.popleft()
            self.at(
                "p",
                channel.SlotGathered(action.epoch, action.seq, -1 if too_large else self.size(), 0),
            )

    def size(self) -> int:
        """Return the size of a piece; a sender may exceed the receiver's slots."""
        return SLOT + 1 if self.roll("oversize") else SIZE

    def move(self) -> None:
        """Match one send with its receive, and let links connect or fail."""
        for number, epoch in list(self.epochs.items()):
            if epoch.is_broken:
                who, posted, ended = self.random.choice(
                    [
                        ("p", len(epoch.sends), epoch.sent),
                        ("d", len(epoch.receives), epoch.received),
                    ]
                )
                # An idle link reports nothing: Gloo's waits for the operations that were posted.
                if posted > ended and self.random.random() < 0.3:
                    self.at(who, channel.LinkFailed(number, "the peer is gone"))
                continue
            if epoch.open_ends == {"p", "d"}:
                self.at("p", channel.LinkUp(number)), self.at("d", channel.LinkUp(number))
                epoch.open_ends.add("up")
            if self.is_eager and epoch.sent < len(epoch.sends) and epoch.sends[epoch.sent][1]:
                epoch.sent += 1  # into buffers of the library, before anybody receives
                self.at("p", channel.SlotCompleted(number, epoch.sent - 1))
            if (
                epoch.received < min(len(epoch.sends), len(epoch.receives))
                and epoch.sends[epoch.received][1]
            ):
                at, epoch.received = epoch.received, epoch.received + 1
                if epoch.sent == at:
                    epoch.sent += 1
                    self.at("p", channel.SlotCompleted(number, at))
                self.at("d", channel.SlotCompleted(number, at))

    def free(self) -> None:
        if self.checking:
            check, is_right = self.checking.pop(0)
            if is_right:
                self.proved.add(check.epoch)
            self.at("d", channel.ProofChecked(check.epoch, check.slot, is_right))
        if self.landing:
            self.at(
                "d", channel.SlotFreed(*self.landing.pop(self.random.randrange(len(self.landing))))
            )

    def hear(self, who: str) -> None:
        if self.wires[who] and who not in self.frozen:
            data = self.wires[who].popleft()
            self.at(
                who,
                notes.decode_receiver_note(data) if who == "p" else notes.decode_sender_note(data),
            )

    def pass_time(self, seconds: float) -> None:
        self.now += seconds
        for who, end in (("p", self.p), ("d", self.d)):
            due = end.next_deadline()
            if due is not None and due <= self.now and who not in self.frozen:
                self.at(who, channel.ChannelTick())
                after = end.next_deadline()
                assert after is None or after > self.now, (
                    "a Tick that moves no deadline makes a busy loop"
                )

    def step(self) -> None:
        self.random.choice(
            [
                self.ask,
                self.ask,
                self.gather,
                self.gather,
                self.free,
                self.free,
                self.move,
                self.move,
            ]
        )()
        self.hear("p"), self.hear("d")
        if self.roll("freeze"):
            self.frozen ^= {self.random.choice("pd")}
        if self.roll("fail"):
            end = self.random.choice([self.p, self.d])
            self.at("p" if end is self.p else "d", channel.LinkFailed(end.epoch, "broke"))
        if self.roll("refuse"):
            self.do("p", channel.SendNote(notes.ChannelBroken(self.d.epoch, "busy")))
        self.pass_time(12.0 if self.roll("leap") else self.random.choice([0.0, 0.01, 0.1]))
        if self.random.random() < 0.1:
            self.at("d", channel.ConnectChannel())

    def run(self) -> None:
        for _ in range(250):
            self.step()
        self.chaos, self.frozen = {}, set()
        while self.checking:
            self.free()
        # Only behind a wrong proof, which keeps the receiver from pairing for long. So much time
        # would also end an epoch that one end has closed and the other still believes in.
        if self.d.retry_at > self.now + channel.BACKOFF_SECONDS[1]:
            self.pass_time(channel.WRONG_PROOF_RETRY_SECONDS)
        target = 0
        for turn in range(160):
            if turn == 130:  # by now all failures are behind it
                target = self.number
            if turn % 5 == 0:
                self.at("d", channel.ConnectChannel())
            for do in (self.ask, self.gather, self.gather, self.move, self.free, self.free):
                do()
            while self.wires["p"] or self.wires["d"]:
                self.hear("p"), self.hear("d")
            self.pass_time(1.0)
        for _ in range(60):
            self.gather(), self.move(), self.free()
            while self.wires["p"] or self.wires["d"]:
                self.hear("p"), self.hear("d")
        assert max(self.delivered, default=-1) >= target, "a quiet world does not pair again"
        assert not self.asked, f"never finished: {self.asked}"


@pytest.mark.parametrize("part", range(4))
def test_both_ends_execute_one_order_or_abort(part: int) -> None:
    for seed in range(FIRST + part, FIRST + SEEDS, 4):
        world = World(seed)
        try:
            world.run()
        except Exception:
            print(f"SEED={seed}", *world.log[-60:], sep="\n")
            raise


@pytest.mark.parametrize(
    ("address", "epoch"),
    [
        ("gloo:3", 3),
        ("nccl:999999999", 999_999_999),
        ("gloo:" + "9" * 30, None),  # no note could carry it
        ("gloo:", None),
        ("gloo:-1", None),
    ],
)
def test_an_address_names_an_epoch(address: str, epoch: int | None) -> None:
    assert notes.epoch_of(address) == epoch
    assert notes.epoch_of(notes.address("gloo", 7)) == 7


def test_a_request_of_a_closed_epoch_tells_the_receiver() -> None:
    """The first note was lost with a connection, and an idle end of D has no early deadline."""
    world = World(0)
    world.chaos = {}
    world.at("d", channel.ConnectChannel())
    world.hear("p"), world.move(), world.hear("d"), world.move(), world.free()
    world.chaos = {"lose": 100}
    world.at("p", channel.LinkFailed(1, "broke"))
    world.chaos = {}
    world.ask()
    assert not world.asked and world.routed == 1
    world.hear("d")
    assert world.routed is None


def test_a_late_request_does_not_break_the_next_epoch() -> None:
    """It crosses the PairRequest that follows, as requests and notes have ways of their own."""
    p, d = SenderEnd(PATIENCE), ReceiverEnd(PATIENCE, slot=SLOT)
    d.epoch = 1  # the first one is over
    _, request = d.handle(channel.ConnectChannel(), 0.0)
    assert isinstance(request, channel.SendNote) and isinstance(request.note, notes.PairRequest)
    p.handle(request.note, 0.0)
    late = SendPiece("t", "d", "x:1", 0, Extent(0, 1, 0, 1), [0])
    finished, told = p.handle(channel.SendRequested(late, 1), 0.1)
    assert finished == channel.SendFinished(late) and isinstance(told, channel.SendNote)
    assert isinstance(told.note, notes.ChannelBroken) and d.handle(told.note, 0.2) == []
    assert d.state is channel.ChannelState.OPENING and d.epoch == 2


def test_a_full_ring_delays_and_never_grows() -> None:
    world = World(0)
    world.chaos, world.is_eager = {}, False
    world.at("d", channel.ConnectChannel())
    world.hear("p"), world.move(), world.hear("d"), world.move(), world.free()
    for _ in range(12):
        world.ask()
    assert (
        len(world.gathers) == channel.SLOTS_PER_CHANNEL
        and len(world.p.waiting) == 12 - channel.SLOTS_PER_CHANNEL
    )
    for _ in range(200):
        world.gather(), world.hear("d"), world.move(), world.free()
    assert world.delivered == set(range(12)) and not world.asked


def test_reasons_for_a_broken_epoch() -> None:
    d = ReceiverEnd(PATIENCE, slot=SLOT)
    d.handle(channel.ConnectChannel(), 0.0)
    d.handle(channel.LinkUp(1), 0.1), d.handle(notes.ChannelReady(1), 0.2)
    d.handle(channel.ProofChecked(1, d.proof_slot, True), 0.3)
    close, told, route = d.handle(notes.ChannelPiece(1, 2, "t", 0, SIZE, 0), 1.0)
    assert (
        isinstance(close, channel.CloseLink)
        and close.why == "piece 2 was announced where 1 was due"
    )
    assert isinstance(told, channel.SendNote) and route == channel.ChangeRoute(None)
    assert d.handle(channel.ConnectChannel(), 1.5) == [], "pairs again at once"
    assert d.handle(channel.ConnectChannel(), 2.1)


def test_announced_pieces_that_wait_for_a_slot_are_bounded() -> None:
    """A faulty sender that announced on and on filled the memory of D."""
    d = ReceiverEnd(PATIENCE, slot=SLOT)
    d.handle(channel.ConnectChannel(), 0.0)
    d.handle(channel.LinkUp(1), 0.1), d.handle(notes.ChannelReady(1), 0.2)
    d.handle(channel.ProofChecked(1, d.proof_slot, True), 0.3)
    room = MAX_QUEUED_PIECES + channel.SLOTS_PER_CHANNEL
    for seq in range(1, room + 1):
        d.handle(notes.ChannelPiece(1, seq, "t", seq, SIZE, 0), 1.0)
    assert len(d.queued) == MAX_QUEUED_PIECES
    close, told, route = d.handle(notes.ChannelPiece(1, room + 1, "t", 0, SIZE, 0), 1.0)
    assert isinstance(close, channel.CloseLink) and "wait for a slot already" in close.why
    assert isinstance(told, channel.SendNote) and route == channel.ChangeRoute(None)
    assert not d.queued


def proving() -> tuple[ReceiverEnd, list[object]]:
    """Returns a receiver's end whose proof piece is due, and what it has done for that."""
    d = ReceiverEnd(PATIENCE, slot=SLOT)
    d.handle(channel.ConnectChannel(), 0.0)
    d.handle(notes.ChannelReady(1), 0.1)
    return d, list(d.handle(channel.LinkUp(1), 0.2))


def test_the_proof_piece_comes_before_any_request() -> None:
    d, posted = proving()
    assert posted == [channel.ReceiveSlot(1, channel.PROOF_SEQ, d.proof_slot, SLOT)]
    check = channel.CheckProof(1, d.proof_slot, SLOT)
    assert d.handle(channel.SlotCompleted(1, channel.PROOF_SEQ), 0.3) == [check]
    checked = channel.ProofChecked(1, d.proof_slot, True)
    assert d.handle(checked, 0.4) == [channel.ChangeRoute(1)]
    assert sorted(d.free) == list(range(channel.SLOTS_PER_CHANNEL))


def test_a_wrong_proof_closes_the_path_for_long() -> None:
    d, _ = proving()
    close, told = d.handle(channel.ProofChecked(1, d.proof_slot, False), 1.0)
    assert close == channel.CloseLink(1, "its proof piece arrived with wrong bytes")
    assert told == channel.SendNote(notes.ChannelBroken(1, close.why))
    end = 1.0 + channel.WRONG_PROOF_RETRY_SECONDS
    assert d.handle(channel.ConnectChannel(), end - 1.0) == []
    assert d.handle(channel.ConnectChannel(), end)


def test_a_proof_that_never_comes_ends_the_epoch() -> None:
    d, _ = proving()
    deadline = d.next_deadline()
    assert deadline == 0.2 + channel.PAIRING_SECONDS
    assert d.handle(channel.ChannelTick(), deadline - 0.1) == []
    close, _ = d.handle(channel.ChannelTick(), deadline)
    assert close == channel.CloseLink(1, "its proof piece did not arrive within 10 s")


def test_the_senders_end_gives_up_a_proof_that_is_not_taken() -> None:
    p = SenderEnd(PATIENCE)
    p.handle(notes.PairRequest(1, SLOT), 0.0)
    ready, proof = p.handle(channel.LinkUp(1), 0.2)
    assert ready == channel.SendNote(notes.ChannelReady(1))
    assert isinstance(proof, channel.TransmitProof) and proof.size == SLOT
    close, _ = p.handle(channel.ChannelTick(), 0.2 + channel.PAIRING_SECONDS)
    assert isinstance(close, channel.CloseLink)


def test_a_request_may_come_before_the_proof_is_seen_to_end() -> None:
    """The receiver may be quicker: its request must not be refused as one of an ended epoch."""
    p = SenderEnd(PATIENCE)
    p.handle(notes.PairRequest(1, SLOT), 0.0)
    p.handle(channel.LinkUp(1), 0.2)
    piece = SendPiece("t", "d", "x:1", 0, Extent(0, 1, 0, 1), [0])
    (sent,) = p.handle(channel.SendRequested(piece, 1), 0.3)
    assert isinstance(sent, channel.TransmitSlot) and sent.seq == channel.PROOF_SEQ + 1
    p.handle(channel.SlotCompleted(1, channel.PROOF_SEQ), 0.4)
    p.validate()
