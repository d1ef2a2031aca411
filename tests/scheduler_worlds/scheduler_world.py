"""Seeded worlds of vLLM's own schedulers with the real connector.

    engines      vLLM's Scheduler or AsyncScheduler, the connector's scheduler side
    ranks        the connector's worker side; the machines; symbolic memory
    between      a control channel that loses, repeats and reorders; transports of four kinds

The oracle is what attention reads: each element that a step reads must be the request's own, of
that position, layer and head. At the end no request, block, leg, transfer, credit or table entry
is left, and each request has ended within a bound of moves.

All is drawn from one `random.Random(seed)`: a failing seed replays, and `SchedulerWorld.log` is its
story.
"""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from random import Random
from unittest import mock

from simulated_driver import LEASE_SECONDS, SimulatedDriver
from simulated_engine import SimulatedEngine
from simulated_rank import SimulatedRank
from simulated_transports import FAST, Piece, SendKind
from standard_router import Params, RoutedRequest, StandardRouter
from symbol_cache import WrongRead
from symbols import OTHER_TOKEN, VOCABULARY, describe_symbol
from world_config import world_folder
from world_models import HEADS
from world_setup import MischiefLevels, WorldSetup, draw_setup

from kv_connectors import admission as connector_admission
from kv_connectors import compatibility
from kv_connectors import layers as connector_layers
from kv_connectors import scheduler as connector_scheduler
from vllm_disagg.fleet.grants import REQUEST_KEY, Grant, mint
from vllm_disagg.protocol import events
from vllm_disagg.protocol.reasons import Reason

GRANT_SECONDS = 600.0
STALL_SECONDS = (5.0, 15.0)  # of P's and D's loads: `Grant.patience`
# A path that loses each fifth piece may take minutes for one load, and get on with it all the time.
IDLE_ROUNDS = 1000  # without progress: 50 s, beyond all limits of time of a load
SETTLE_ROUNDS = 6000
MOVE_SECONDS = (0.0005, 0.002, 0.02)
ROUND_SECONDS = 0.05
RELEASED = (Reason.BLOCKS_REVOKED, Reason.BLOCKS_RELEASED, Reason.UNKNOWN_TRANSFER)
COMMANDS = ("pause and keep", "pause and wait", "pause and abort")


class NeverEnds(AssertionError):
    """Requests that get no further for IDLE_ROUNDS, or do not end within SETTLE_ROUNDS."""


class LeftBehind(AssertionError):
    """Something that is left when all requests have ended."""


@dataclass
class NetworkItem:
    """Something on its way to a rank."""

    to: str
    frame: bytes  # a message
    to_sender: bool
    piece: Piece | None = None  # bytes in place of a message


class WorldClock:
    """Replaces the module `time` in the connector's scheduler side."""

    def __init__(self, world: SchedulerWorld) -> None:
        """Takes the time of a world."""
        self._world = world

    def monotonic(self) -> float:
        """Returns the world's time."""
        return self._world.now

    def time(self) -> float:
        """Returns the same: requests arrive by this clock."""
        return self._world.now

    def sleep(self, seconds: float) -> None:
        """Does not wait: the world's time passes by its own moves."""


class SchedulerWorld:
    """One run."""

    def __init__(
        self, seed: int, setup: WorldSetup | None = None, *, is_calm: bool = False
    ) -> None:
        """Draws a world, or takes its setup. `is_calm`: nothing goes wrong in it."""
        self.random = Random(seed)
        self.setup = setup or draw_setup(self.random, is_calm=is_calm)
        self.now = 1000.0
        self.log: list[tuple[float, str, str, object]] = []
        self.counts: Counter[str] = Counter()
        self.loads: Counter[str] = Counter()  # by direction and reason
        self._network: list[NetworkItem] = []
        self._drivers: dict[str, SimulatedDriver] = {}
        self._prompts: list[list[int]] = []
        self._turns: list[list[int]] = []  # prompts with their answers, as a D has cached them
        self._asked = 0
        self._legs: list[Callable[[], None]] = []  # not sent yet
        self._tokens: list[str] = []  # grants that were used
        self._decode_of_reuse: dict[str, str] = {}  # by transfer: D's request
        self._ended: set[str] = set()  # requests
        self._granted_transfers: set[str] = set()
        # By transfer and engine: ranks that have loaded it. By transfer: the engine with all ranks.
        self._loaded_ranks: Counter[tuple[str, str]] = Counter()
        self._takers: dict[str, str] = {}
        self._router = StandardRouter(self)
        self._mischief = self.setup.mischief
        self.prefills: list[SimulatedEngine] = []
        self.decodes: list[SimulatedEngine] = []

    # The run --------------------------------------------------------------------------------------
    def run(self) -> SchedulerWorld:
        """Runs the world to its end; raises AssertionError for anything wrong."""
        with self._in_place():
            self._create_engines()
            self._actors = self._draw_actors()
            for _ in range(self.setup.moves):
                self.random.choice(self._actors)()
            self._settle()
            self._check_end()
        return self

    @contextmanager
    def _in_place(self) -> Iterator[None]:
        """Replaces the clock and the size of progress reports in the product."""
        logging.disable(logging.CRITICAL)
        try:
            with (
                mock.patch.object(connector_scheduler, "time", WorldClock(self)),
                mock.patch.object(connector_layers, "PROGRESS_BYTES", 1),
                # For proxies. It reads files of each package, a quarter of a world's seconds.
                mock.patch.object(compatibility, "answer_settings", lambda _: ""),
                # From the seed, as all that is drawn.
                mock.patch.object(connector_admission, "new_transfer", self._new_transfer),
                mock.patch.object(connector_scheduler, "new_transfer", self._new_transfer),
            ):
                yield
        finally:
            logging.disable(logging.NOTSET)

    def _new_transfer(self) -> str:
        return f"{self.random.getrandbits(128):032x}"

    def _create_engines(self) -> None:
        setup = self.setup
        for side, engines, count, settings in (
            ("p", self.prefills, setup.prefills, setup.prefill),
            ("d", self.decodes, setup.decodes, setup.decode),
        ):
            for number in range(count):
                rank = number if count > 1 else None
                engine = SimulatedEngine(self, f"{side}{number}", setup.model, settings, rank)
                engines.append(engine)
                for one in engine.ranks:
                    self._drivers[one.driver.name] = one.driver

    @property
    def engines(self) -> list[SimulatedEngine]:
        """All engines."""
        return [*self.prefills, *self.decodes]

    def _draw_actors(self) -> list[Callable[[], None]]:
        """Returns the moves of this world, each as often as it is likely."""
        weights: dict[Callable[[], None], int] = {
            self._deliver: 10,
            self._compute: 8,
            self._turn_engine: 6,
            self._turn_driver: 4,
            self._move_bytes: 4,
            self._ask_at_times: 1,
            self._pass_time: 1,
            self._do_mischief: 1,
        }
        actors: list[Callable[[], None]] = []
        for move, weight in weights.items():
            factor = self.random.choice([1, 2, 2, 4])
            actors += [move] * (weight * factor)
        return actors

    def note(self, who: str, what: str, value: object) -> None:
        """Adds a line to the story."""
        self.log.append((self.now, who, what, value))

    def story(self, lines: int = 80) -> str:
        """Returns the last lines of the story."""
        return "\n".join(
            f"{now:9.2f} {who} {what} {value}" for now, who, what, value in self.log[-lines:]
        )

    def features(self) -> Counter[str]:
        """Returns what this world had: each feature of its setup once, and how often what was."""
        found = Counter(self.setup.features())
        for name, count in self.counts.items():
            if count and name not in ("steps", "answers"):
                found[name] += count
        for load, count in self.loads.items():
            found[f"load: {load}"] += count
        return found

    def failed_loads(self) -> dict[str, int]:
        """Returns the loads that have not ended well. A calm world has none."""
        good = (" ok", " needless")
        return {load: count for load, count in self.loads.items() if not load.endswith(good)}

    # Moves ----------------------------------------------------------------------------------------
    def _compute(self) -> None:
        ranks = [rank for engine in self.engines for rank in engine.ranks if rank.can_advance]
        if ranks:
            self.random.choice(ranks).advance()

    def _turn_engine(self) -> None:
        self.random.choice(self.engines).take_turn()

    def _turn_driver(self) -> None:
        self._any_rank().driver.take_turn()

    def _move_bytes(self) -> None:
        for driver in self._drivers.values():
            driver.move_bytes()

    def _any_rank(self) -> SimulatedRank:
        return self.random.choice(self.random.choice(self.engines).ranks)

    def _pass_time(self) -> None:
        self.now += self.random.choice(MOVE_SECONDS)

    def _deliver(self) -> None:
        """Delivers what was sent first, or one of the next with reordering."""
        if not self._network:
            return
        index = 0
        if self._happens(5 * self._mischief.reorder):
            index = self.random.randrange(min(len(self._network), 6))
            self.counts["reordered messages"] += index > 0
        item = self._network[index]
        driver = self._drivers[item.to]
        if driver.is_frozen:
            # The others do not wait for it.
            self._network.append(self._network.pop(index))
            return
        del self._network[index]
        if item.piece is not None:
            driver.on_piece(item.piece)
            return
        if self._happens(self._mischief.loss):
            self.counts["lost messages"] += 1
            return
        if self._happens(self._mischief.repeat):
            self.counts["repeated messages"] += 1
            self._network.append(item)
        if item.to_sender:
            driver.on_receiver_message(item.frame)
        else:
            driver.on_sender_message(item.frame)

    def _happens(self, percent: int) -> bool:
        return percent > 0 and self.random.randrange(100) < percent

    def happens_badly(self) -> bool:
        """Draws whether a client or a router misuses parameters of transfers this time."""
        return self._happens(5 * self._mischief.bad_grants)

    # Network --------------------------------------------------------------------------------------
    def post_message(self, to: str, frame: bytes, *, to_sender: bool) -> None:
        """Sends a message over the control channel."""
        self._network.append(NetworkItem(to, frame, to_sender))

    def post_piece(self, piece: Piece) -> None:
        """Sends bytes to the receiver's address."""
        to = piece.action.reader
        self._network.append(NetworkItem(to, b"", to_sender=False, piece=piece))

    def draw_send_kind(self, address: str) -> SendKind:
        """Returns how a piece is sent. One-sided reads need the fast path."""
        kinds = self.setup.send_kinds
        if not address.startswith(FAST):
            kinds = tuple(kind for kind in kinds if kind is not SendKind.ONE_SIDED)
        return self.random.choice(kinds or (SendKind.AT_ONCE,))

    def draw_reads_by_address(self) -> bool:
        """Returns whether a new fast path reads pieces by address."""
        return SendKind.ONE_SIDED in self.setup.send_kinds and self.random.random() < 0.5

    def driver(self, name: str) -> SimulatedDriver:
        """Returns the driver of a rank."""
        return self._drivers[name]

    # Clients and proxy ----------------------------------------------------------------------------
    def _ask_at_times(self) -> None:
        """Asks while few requests are open, so that some go on with earlier answers."""
        is_open = sum(len(engine.request_names()) for engine in self.engines)
        if self._legs or is_open < self.setup.concurrency:
            self._ask()

    def _ask(self) -> None:
        """Sends a leg that waits for it, or a new request's first one."""
        if self._legs:
            self._legs.pop(self.random.randrange(len(self._legs)))()
        elif self._asked < self.setup.requests:
            self._asked += 1
            self._make_request(self._asked)

    def _make_request(self, number: int) -> None:
        random = self.random
        prompt = self._make_prompt()
        answer = random.randint(1, self.setup.max_answer)
        priority = random.randint(0, 3)
        adapter = self._draw_adapter()
        prefill, decode = self._draw_pair()
        if random.random() < 0.15:
            engine = random.choice([prefill, decode])
            self._legs.append(
                lambda: engine.add(f"plain{number}", prompt, answer, priority, None, adapter)
            )
            return
        if self.setup.routed_share and random.random() < self.setup.routed_share:
            routed = RoutedRequest(number, prompt, answer, priority, decode, adapter)
            p_answer = 3 if self.happens_badly() else 1
            self._legs.append(lambda: self._router.send(prefill, routed, p_answer))
            return
        other = list(prompt)
        if self._happens(10 * self._mischief.other_prompts):
            other[random.randrange(len(other))] = OTHER_TOKEN
            self.counts["other prompts at D"] += 1
        d_adapter = self.draw_adapter_at_d(adapter)
        p_token, d_token = self._mint_pair(prefill, decode, number)
        # A prefill leg of several tokens is permitted for models without windows and states only.
        p_answer = 3 if self.happens_badly() else 1
        legs: list[Callable[[], None]] = [
            lambda: prefill.add(
                f"prefill{number}", prompt, p_answer, priority, {REQUEST_KEY: p_token}, adapter
            ),
            lambda: decode.add(
                f"decode{number}", other, answer, priority, {REQUEST_KEY: d_token}, d_adapter
            ),
        ]
        random.shuffle(legs)
        if self.happens_badly():
            del legs[0]  # the other leg waits in vain
        # The first one at once, the other a little later.
        self._legs += legs[1:]
        if legs:
            legs[0]()

    def _draw_adapter(self) -> int:
        """Returns the adapter of a request; 0: the base model."""
        if not self.setup.adapters:
            return 0
        return self.random.randint(0, self.setup.adapters)

    def draw_adapter_at_d(self, adapter: int) -> int:
        """Returns the adapter that is named at D: with mischief another one than at P."""
        if self.setup.adapters and self._happens(10 * self._mischief.other_prompts):
            self.counts["other adapters at D"] += 1
            return self._draw_adapter()
        return adapter

    def _draw_pair(self) -> tuple[SimulatedEngine, SimulatedEngine]:
        """Returns the engines of a request; those of both roles may exchange them."""
        prefill = self.random.choice(self.prefills)
        decode = self.random.choice(self.decodes)
        has_both_roles = prefill.setup.kv_role == decode.setup.kv_role == "kv_both"
        if has_both_roles and self.random.random() < 0.3:
            return decode, prefill
        return prefill, decode

    def _mint_pair(
        self, prefill: SimulatedEngine, decode: SimulatedEngine, number: int
    ) -> tuple[str, str]:
        """Returns the grants of both legs of a new transfer, as a proxy mints them."""
        random = self.random
        transfer = self._new_transfer()
        self._granted_transfers.add(transfer)
        back = None
        if self.setup.has_reuse and prefill.info.two_way and decode.info.two_way:
            back = self._new_transfer()
            self._decode_of_reuse[back] = f"decode{number}"
        p_stall, d_stall = STALL_SECONDS
        p_grant = Grant(
            2,
            "prefill",
            transfer,
            prefill.info.incarnation,
            sources=decode.info.workers if back else [],
            patience=p_stall,
            back=back,
            until=prefill.clock + GRANT_SECONDS,
        )
        d_grant = Grant(
            2,
            "decode",
            transfer,
            decode.info.incarnation,
            sources=prefill.info.workers,
            patience=d_stall,
            back=back,
            until=decode.clock + GRANT_SECONDS,
        )
        key = world_folder().key
        tokens = [mint(key, p_grant), mint(key, d_grant)]
        if self._tokens and self._happens(5 * self._mischief.bad_grants):
            tokens[random.randrange(2)] = random.choice(self._tokens)
        self._tokens += tokens
        return tokens[0], tokens[1]

    def _make_prompt(self) -> list[int]:
        """Returns a new prompt, a part of an earlier one and more, or an earlier turn and more."""
        random = self.random
        start: list[int] = []
        luck = random.random()
        if self._prompts and luck < 0.3:
            earlier = random.choice(self._prompts)
            start = earlier[: random.choice([len(earlier), random.randint(1, len(earlier))])]
        elif self._turns and luck < 0.7:
            start = random.choice(self._turns)
        more = [random.randint(1, VOCABULARY) for _ in range(random.randint(1, 25))]
        # At least one new token: an engine cannot reuse the whole of a prompt.
        prompt = start[: self.setup.max_prompt - 1] + more
        prompt = prompt[: self.setup.max_prompt]
        self._prompts.append(prompt)
        return prompt

    def on_answer(self, name: str, tokens: list[int], params: Params | None) -> None:
        """Takes an answer: a later prompt may go on with it. `params`: of the KV transfer."""
        self.counts["answers"] += 1
        self._ended.add(str(name))  # vLLM's ids have another hash
        self._legs += self._router.take_answer(name, params)
        if not name.startswith("prefill"):
            self._turns.append(tokens)

    def count_load(self, engine: str, result: events.LoadResult) -> None:
        """Counts the end of a load by direction and reason. `engine`: the one that loads."""
        direction = "handover"
        decode = self._decode_of_reuse.get(result.transfer)
        if decode is not None:
            direction = "reuse"
        elif result.transfer in self._granted_transfers:
            direction = "load"
        if result.reason is None:
            self._check_taken_once(engine, result.transfer)
        reason = "ok" if result.reason is None else result.reason.value
        # D had the whole prompt cached, and its answer has ended: P's leg has no use.
        if decode in self._ended and result.reason in RELEASED:
            reason = "needless"
        self.loads[f"{direction} {reason}"] += 1

    def _check_taken_once(self, engine: str, transfer: str) -> None:
        """Raises AssertionError if all ranks of two engines have loaded one transfer."""
        self._loaded_ranks[transfer, engine] += 1
        (ranks,) = (len(one.ranks) for one in self.engines if one.label == engine)
        if self._loaded_ranks[transfer, engine] < ranks:
            return
        taker = self._takers.setdefault(transfer, engine)
        assert taker == engine, f"{taker} and {engine} have both loaded {transfer}"

    # Mischief -------------------------------------------------------------------------------------
    def _do_mischief(self) -> None:
        random = self.random
        levels = self._mischief
        if self._happens(6 * levels.abort):
            self._abort_one()
        if self._happens(2 * levels.reset):
            kinds = ("reset", "reset with running requests")
            random.choice(self.engines).command(random.choice(kinds))
        if self._happens(levels.pause):
            random.choice(self.engines).command(random.choice(COMMANDS))
        if self._happens(10 * levels.pause):
            random.choice(self.engines).command("resume")
        if self._happens(3 * levels.freeze):
            driver = self._any_rank().driver
            driver.is_frozen = not driver.is_frozen
        if self._happens(2 * levels.leap):
            self.now += random.choice([0.4, 2.0, 2 * LEASE_SECONDS])
        if self._happens(10 * max(levels.reroute, SendKind.ONE_SIDED in self.setup.send_kinds)):
            self._reroute()

    def _abort_one(self) -> None:
        """Aborts one leg, or both as a proxy does when the client leaves."""
        names = self.random.choice(self.engines).request_names()
        if not names:
            return
        name = self.random.choice(names)
        number = name.lstrip("abcdefghijklmnopqrstuvwxyz")
        aborted = [name]
        if self.random.random() < 0.5:
            aborted = [f"prefill{number}", f"decode{number}", f"again{number}"]
        for engine in self.engines:
            for one in aborted:
                engine.abort(one)

    def _reroute(self) -> None:
        """Connects a fast path; with mischief it may break as well."""
        random = self.random
        reader = self._any_rank().driver
        others = self.decodes if reader.name.startswith("p") else self.prefills
        source = random.choice(random.choice(others).ranks).driver
        if reader.is_frozen:
            return
        if self._mischief.reroute and random.random() < 0.5:
            self.counts["broken paths"] += 1
            reader.break_fast(source.name)
            # The source may notice it, too.
            if random.random() < 0.5 and not source.is_frozen:
                self.counts["lost connections"] += 1
                source.lose_connection(reader.name)
        else:
            reader.connect_fast(source.name)

    # End ------------------------------------------------------------------------------------------
    def _settle(self) -> None:
        """Ends all mischief; then each request must get on, and end within a bound of rounds."""
        self._mischief = MischiefLevels()
        for driver in self._drivers.values():
            driver.is_frozen = False
        for engine in self.engines:
            engine.command("resume")
        idle_rounds = 0
        for _ in range(SETTLE_ROUNDS):
            if not self._is_busy():
                return
            before = self._progress()
            self._ask()
            self._play_round()
            idle_rounds = idle_rounds + 1 if self._progress() == before else 0
            if idle_rounds == IDLE_ROUNDS:
                break
        busy = [engine.leftovers() for engine in self.engines if engine.is_busy]
        raise NeverEnds(f"requests that never end: {busy}")

    def _progress(self) -> tuple[int, ...]:
        """Returns what has been done so far: answers, steps that compute, pieces of KV in place."""
        pieces = sum(driver.pieces_written for driver in self._drivers.values())
        return self.counts["answers"], self.counts["steps"], pieces

    def _is_busy(self) -> bool:
        is_asking = bool(self._legs) or self._asked < self.setup.requests
        return is_asking or any(engine.is_busy for engine in self.engines)

    def _play_round(self) -> None:
        """Lets everybody do what can be done now."""
        for engine in self.engines:
            for _ in range(3):
                engine.take_turn()
        for _ in range(4 * self.setup.prefills + 4 * self.setup.decodes):
            self._compute()
        for _ in range(len(self._network)):
            self._deliver()
        self._move_bytes()
        for driver in self._drivers.values():
            driver.take_turn()
        self.now += ROUND_SECONDS

    def _check_end(self) -> None:
        """Raises AssertionError for anything that is left."""
        # Leases and repeated messages end in time; a last request takes what is reported late.
        # In steps: a longer one would be sleep, which prolongs the leases.
        for _ in range(64):
            self.now += LEASE_SECONDS / 16
            self._play_round()
        for engine in self.engines:
            engine.add("last", [1, 2, 3], 1, 0)
        self._settle()
        left = [engine.leftovers() for engine in self.engines]
        if any(left):
            raise LeftBehind(f"left at the end: {left}")

    def describe_wrong_read(self, engine: SimulatedEngine, wrong: WrongRead) -> str:
        """Returns a wrong read in words."""
        stories = [
            (f"{one.label} {name}", story)
            for one in self.engines
            for name, story in one._stories.items()
        ]
        layers = len(self.setup.model.layers)
        found = describe_symbol(wrong.found, stories, layers, HEADS)
        expected = describe_symbol(wrong.expected, stories, layers, HEADS)
        return (
            f"rank {wrong.rank}: {wrong.request} reads in layer {wrong.layer} at position"
            f" {wrong.position}: {found}; its own is: {expected}"
        )
