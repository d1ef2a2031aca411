"""Plant one fault at a time and see whether the tests notice: `make mutants`.

It tests the tests.  Each line: what breaks, the file, the text, and what replaces it; then, where it is not plain which
test is nearest to that file, the test that sees it (several, or a single one, as pytest takes them).

    python tests/mutants.py [-j JOBS] [WORD ...]      only the mutants of whose line one of the words is a part

The nearest tests run first, then those that need luck, with few seeds and then with many; the first failure ends it.
Each mutant has a copy of the tree to itself, and as many run at a time as there are cores.
"""

from __future__ import annotations

import argparse
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor, as_completed
from pathlib import Path
from typing import NamedTuple

ROOT = Path(__file__).resolve().parent.parent
COPIED = ("vllm_disagg", "kv_connectors", "tests")
LIMIT = 600.0  # seconds of one run of pytest with few seeds: a fault by which the tests hang is noticed, too
FEW, MORE, MANY = 100, 1000, int(os.environ.get("SEEDS", "10000"))  # worlds


class Mutant(NamedTuple):
    what: str
    file: str  # of vllm_disagg, or from the root
    old: str
    new: str
    tests: str = ""


class Run(NamedTuple):
    """Of pytest."""

    tests: Sequence[str]
    seeds: int = FEW


MUTANTS: list[tuple[str, ...]] = [
    ("P says intact of what it let go", "prefill.py", "event.reader in self.settled.get(event.transfer, ())", "event.transfer in self.settled"),
    ("P releases while sending", "prefill.py", "ended >= self.expected and not self.is_sending()", "ended >= self.expected"),
    ("P's lease ends during its own send", "prefill.py", "or t.is_sending() or t.deadline > now", "or t.deadline > now"),
    ("P forgets endings", "prefill.py", "self.settled[transfer] = done", "pass"),
    ("P serves on after a withdrawal", "prefill.py", "t = self.transfers.pop(transfer, None)\n        self._settle", "t = self.transfers.get(transfer)\n        self._settle"),
    ("P releases what is not pinned", "prefill.py", "if t.state is State.HELD and t.is_over()", "if t.is_over()"),
    ("P keeps blocks nobody wants", "prefill.py", "return [Release(transfer, delivered=bool(self.settled.get(transfer)))]", "return []"),
    ("P never gives a reader up", "prefill.py", "reader.gone |= reader.is_active and reader.heard + self.lease <= now", "pass"),
    ("P never lets go of what nobody reads", "prefill.py", "elif t.state is State.HELD:\n            return self._release(transfer, t)", "elif False:\n            pass"),
    ("P offers layers that are not computed", "prefill.py", "t.layers = event.layers\n", "t.layers = event.layers + 1\n"),
    ("P offers tokens before all layers are", "prefill.py", "if t.layers >= len(self.shape.layers):", "if t.layers >= len(self.shape.layers) - 1:"),
    ("P serves what is not final", "prefill.py", "            and t.is_final(extent)\n", ""),
    ("P answers for another life", "prefill.py", "if event.source != self.name:", "if False:"),
    ("P sends the wrong block", "layout.py", "start = (extent.token - first) // block_size\n    stop = -(-(extent.token_end - first) // block_size)", "start = (extent.token - first) // block_size + 1\n    stop = -(-(extent.token_end - first) // block_size) + 1"),
    ("the tail is sent too early", "layout.py", "return end if tokens >= end else tokens - tokens % block_size", "return min(end, tokens)"),
    ("the last layer is not split off", "layout.py", "min(layer + layers, extent.layer_end)", "layer + layers"),
    ("D reports a cancel while bytes land", "decode.py", "return [] if t.pieces else self._report(name, t.reason, now)", "return self._report(name, t.reason, now)"),
    ("D trusts its own read", "decode.py", "source.state = State.SETTLING\n        return [self._done(event.transfer, source), *self._pump(now)]", "source.state = State.SETTLED\n        return self._report_if_settled(event.transfer, t, now)"),
    ("D ignores intact", "decode.py", "if not event.intact:", "if False:"),
    ("D lands a piece twice", "decode.py", "piece.where is not Where.ASKED", "piece.where is Where.WAITING"),
    ("D takes damaged bytes", "decode.py", "if not event.ok:", "if False:"),
    ("D never gives up a silent P", "decode.py", "if any(now >= source.heard + self.silence for source in t.open):", "if False:"),
    ("D gives no sign of life", "decode.py", "actions += [self._pull(name, source), *(self._fetch(name, n, now) for n in overdue)]", "actions += [self._fetch(name, n, now) for n in overdue]"),
    ("D never asks for a lost piece again", "decode.py", "if t.pieces[n].again <= now]", "if False]"),
    ("D never repeats Done", "decode.py", "actions.append(self._done(name, source))", "pass"),
    ("D accepts Settled at any time", "decode.py", "if t.reason is not None or source.state is not State.SETTLING:", "if False:"),
    ("D believes another life of P", "decode.py", "if event.source not in t.sources or event.reader != self.name:", "if False:"),
    ("D loses a credit", "decode.py", "        self.flying[piece.source] -= piece.bytes\n        t.moved = now", "        t.moved = now"),
    ("D sees an older offer as news", "decode.py", "told <= (source.tokens, source.ahead, source.layers)", "False"),
    ("D forgets the layers ahead", "reading.py", "(early, len(self.asked), full)", "(early, len(self.asked), more)"),
    ("success after one of two sources", "decode.py", "return [] if t.open else self._report(name, None, now)", "return [] if len(t.open) == len(t.sources) else self._report(name, None, now)"),
    ("the wrong heads", "mapping.py", "there, head - theirs.head))", "there, head - ours.head))"),
    ("the wrong layers of a stage", "mapping.py", "there = reader.first + at - sources[source].first", "there = at"),
    ("P hears of one reader of two", "mapping.py", "readers_of[source] += source not in mine", "readers_of[source] |= source not in mine"),
    ("D lands in another layer", "reading.py", "layer = share.layer + extent.layer - share.layer_there", "layer = extent.layer"),
    ("D lands what precedes its start", "reading.py", "token = max(extent.token, self.blocks.token)", "token = extent.token"),
    ("D asks in its own blocks", "reading.py", "start = blocks.token - blocks.token % there.block_size", "start = blocks.token"),
    ("D takes other blocks for its own", "reading.py", "other = None if cut.lies_as(kind.cut(heads)) else cut", "other = None"),
    ("P serves what its window has left", "prefill.py", "            and (not kind.window or extent.token + kind.block_size > t.ahead - kind.window + 1)  # vLLM keeps no others\n", ""),
    ("P computes first and serves whoever asks", "prefill.py", "t.state is not State.WANTED and reader.prompt != t.prompt:", "False:"),
    ("P serves whoever asked before it computes", "prefill.py", "if r.is_active and r.prompt != t.prompt]", "if False]"),
    ("a refused reader is still one", "prefill.py", "        t.readers[reader].gone = True\n        return Send(reader, wire.Fail(transfer", "        return Send(reader, wire.Fail(transfer"),
    ("P takes blocks of another group", "prefill.py", "t.blocks[kind.group], 0", "t.blocks[0], 0"),
    ("D writes into blocks of another group", "reading.py", "blocks = event.blocks[kind.group]", "blocks = event.blocks[0]"),
    ("a failure spares the other sources' pieces", "decode.py", "t.pieces = {n: p for n, p in t.pieces.items() if p.where is Where.LANDING}", "t.pieces = {n: p for n, p in t.pieces.items() if p.where is Where.LANDING and p.source == but}"),
    ("one of two sources says how much there is", "search.py", "if len(search.said) < len(search.readers):", "if False:"),
    ("the most that a source has", "search.py", "min(search.said.values())", "max(search.said.values())"),
    ("a refusal is no answer", "search.py", "        search.is_over = True\n", "        if isinstance(message, wire.Fail):\n            return []\n        search.is_over = True\n"),
    ("P believes another life of D", "search.py", " or message.source not in search.readers or message.reader != self.name:", ":"),
    ("sources forget who seeks", "search.py", "                actions += self._pulls(transfer, search)\n", ""),
    ("a search goes on beside its transfer", "search.py", "        self.open.pop(transfer, None)\n\n    def cancelled", "        pass\n\n    def cancelled"),
    ("a cancelled search leaves D waiting", "search.py", "for s in search.readers] if search else []", "for s in search.readers] if False else []"),
    ("D offers cached KV before it is computed", "kv_connectors/worker.py", "        scheduled = [e for e in scheduled if not e.cached]\n", ""),
    ("cached KV is never final", "kv_connectors/worker.py", "        if self._cached:  #", "        if False:  #"),
    ("D serves blocks of a preempted request", "kv_connectors/scheduler.py", "        self._end_back(leg)\n        if leg.grant.leg == \"prefill\" and", "        if leg.grant.leg == \"prefill\" and"),
    ("D serves blocks of a finished request", "kv_connectors/scheduler.py", "            return False, None\n        self._end_back(leg)\n", "            return False, None\n"),
    ("D serves on after its load", "kv_connectors/scheduler.py", "            self._end_back(leg)  # after a failure", "            pass  # after a failure"),
    ("D serves blocks that it was not shown", "kv_connectors/scheduler.py", "if not leg.local or any(len(ids) * size < leg.local for size, ids in zip(self._block_sizes, held, strict=True)):", "if not leg.local:"),
    ("P waits for D's word for ever", "kv_connectors/scheduler.py", "if not is_known and time.monotonic() < leg.until:", "if not is_known:"),
    ("P takes the word of one of its ranks", "kv_connectors/scheduler.py", "is_known = len(leg.found) >= len(self.engine.workers)", "is_known = bool(leg.found)"),
    ("P reads back all that it must compute", "kv_connectors/scheduler.py", "if local < there < leg.length:", "if local < there:"),
    ("P reads back twice", "kv_connectors/scheduler.py", "            leg.back = Back.OVER\n\n", "            leg.back = Back.NEW\n\n"),
    ("an aborted P reads on", "kv_connectors/scheduler.py", "            self._next.decode.append(events.Cancelled(back))", "            pass"),
    ("D overlooks a lost note", "transports/pairs.py", "if event.seq != self.seq:", "if event.seq < self.seq:"),
    ("D takes what its slot does not hold", "transports/pairs.py", "if not 0 < event.size <= self.slot:", "if False:"),
    ("D believes another epoch", "transports/pairs.py", "        if event.epoch != self.epoch or self.state is State.CLOSED:\n            return []\n        match event:\n            case Meet():\n                return [Hear(event.epoch, event.blob)]\n            case Said():\n                return [Tell(Meet(event.epoch, event.blob))]\n            case Up():\n                self.is_up", "        match event:\n            case Meet():\n                return [Hear(event.epoch, event.blob)]\n            case Said():\n                return [Tell(Meet(event.epoch, event.blob))]\n            case Up():\n                self.is_up"),
    ("D receives into a slot that is read", "transports/pairs.py", "return [Deliver(self.epoch, slot, piece)]", "self.free.append(slot)\n        return [Deliver(self.epoch, slot, piece)]"),
    ("D waits for ever for an epoch", "transports/pairs.py", "return self._break(self.overdue(bool(self.posted)), now) if due is not None and due <= now else []", "return []"),
    ("D does not go back to ZMQ", "transports/pairs.py", "actions.append(Route(None))", "pass"),
    ("D never pairs again", "transports/pairs.py", "self.retry, self.wait = now + self.wait", "self.retry, self.wait = now + 1e9"),
    ("P says Sent while it gathers", "transports/pairs.py", "*(Finished(piece) for piece in self.waiting)]", "*(Finished(piece) for piece in [*self.waiting, *self.gathering.values()])]"),
    ("P drops what waits for a slot", "transports/pairs.py", "actions: list[SourceAction] = [Close(self.epoch, why), *(Finished(piece) for piece in self.waiting)]", "actions: list[SourceAction] = [Close(self.epoch, why)]"),
    ("P grows beyond its ring", "transports/pairs.py", "while self.waiting and self.free:\n            piece, slot = self.waiting.popleft(), self.free.pop()", "while self.waiting:\n            piece, slot = self.waiting.popleft(), self.free.pop() if self.free else 0"),
    ("P waits for ever for a frozen D", "transports/pairs.py", "return self._break(self.overdue(bool(self.told))) if due is not None and due <= now else []", "return []"),
    ("P waits for what has ended before it looked", "transports/pairs.py", "if event.seq in self.slots:", "if True:"),
    ("D takes a way that P has helped", "transports/nixl_way.py", "if count == self._count:", "if True:"),
    ("D forgets that it asked for help", "transports/nixl_way.py", "        elif self.helped:\n", "        elif False:\n"),
    ("D blames a connection that comes up", "transports/nixl_way.py", "if self.tries >= TRIES:", "if True:"),
    ("D believes an earlier count", "transports/nixl_way.py", "if turn != self.turn:", "if False:"),
    ("D takes bytes that were damaged on TCP", "transports/tcp.py", "ok = state.digest() == told", "ok = True"),
    ("D waits for ever in the middle of a piece", "transports/tcp.py", "if source.is_inside and now > source.moved + self._port.config.silence:", "if False:"),
    ("P holds blocks for a reader that stands still", "transports/tcp_serving.py", "if r.queue and now > min(r.moved + self._port.config.silence, r.due)]", "if False]"),
    ("a slow piece never ends at D", "transports/tcp.py", "elif now > source.due:", "elif False:"),
    ("a source takes all credits", "decode.py", "(mine and mine + piece.bytes > self.window // 2) or ", ""),
    ("P leaves out the last token too late", "kv_connectors/scheduler.py", "(arrives and self._last)", "self._last"),
    ("P leaves out the last token of what it cannot tell", "kv_connectors/scheduler.py", "if digest and grant.leg", "if grant.leg"),
    ("P keeps quiet about a prompt that it cannot tell", "kv_connectors/scheduler.py", "                self._give_up(leg)\n", ""),
    ("P lets in who has no ticket", "transports/tcp_serving.py", "self._tickets.pop(guest.recv(notes.TICKET))", "(guest.recv(notes.TICKET).hex(), 1)"),
    ("a ticket opens the door twice", "transports/tcp_serving.py", "self._tickets.pop(guest.recv(notes.TICKET))", "self._tickets[guest.recv(notes.TICKET)]"),
    ("P does not notice that a reader has been killed", "transports/tcp_serving.py", "        if broken:\n", "        if False:\n"),
    ("P waits for the lease of a reader whose link is broken", "prefill.py", "reader.heard = min(reader.heard, now + self.grace - self.lease)", "pass"),
    ("a broken link ends a reader that lives", "prefill.py", "reader.heard = min(reader.heard, now + self.grace - self.lease)", "reader.gone = True"),
    ("a P that was frozen never hears that it was given up", "decode.py", "self.partings.append((now + self.retry, now + PARTING, actions[:]))", "pass"),
    ("D never stops to say that it has given up", "decode.py", "            if again < until:\n", "            if True:\n"),
    ("a door that lets nobody in stays", "transports/tcp_serving.py", "                self._shut()\n                return", "                return"),
    ("a piece that begins on a lost connection never ends", "transports/tcp.py", "if self._current.connection is None:", "if False:"),
    ("D takes bytes that were damaged on ZMQ", "transports/zmq.py", "ok = checksum(land.transfer, self._frames) == self._checksum", "ok = True"),
    ("a piece waits for ever for its reader's connection", "transports/zmq.py", "            if now < until:\n", "            if True:\n"),
    ("a member of another fleet comes in by CURVE", "transports/control.py", "known = client == z85.decode(self._client()[0])", "known = True"),
    ("any password opens the data port", "transports/control.py", "known = hmac.compare_digest(password, self._password())", "known = True"),
    ("links are never closed", "transports/control.py", "if len(self.links) <= LINKS:", "if True:"),
    ("silent connections are not bounded", "transports/half_open.py", "while len(self._young) > LIMIT:", "while False:"),
    ("a member is taken for a stranger", "transports/half_open.py", "            self._young.pop(int(message[-1].get(zmq.SRCFD)), None)\n", "            pass\n"),
    ("D takes bytes that were damaged on Gloo", "transports/mover.py", "ok = checksum(land.transfer, [frame]) == expected and self._memory", "ok = self._memory", "tests/transports/test_two_sided.py::test_a_damaged_piece_is_asked_for_again"),
    ("more communicators than there is room for", "transports/two_sided.py", "        if len(is_open) < OPEN:\n", "        if True:\n"),
    ("D reads from who is not whom it thinks", "transports/nixl.py", "if not bytes(found[: notes.NONCE]) == bytes(found[opened.size - notes.NONCE : opened.size]) == nonce:", "if False:", "tests/transports/test_nixl.py::test_a_worker_whose_memory_is_not_what_it_said_is_not_read_from"),
    ("D reads outside what P has registered", "transports/nixl.py", "if note.agent != card.agent or not notes.is_inside(note.runs, card.regions):", "if note.agent != card.agent:", "tests/transports/test_nixl.py::test_what_a_source_says_is_checked"),
    ("D takes a piece of another size", "transports/nixl.py", "if size > PIECE or (alike and sum(size for _, size in ours) != size):", "if size > PIECE:", "tests/transports/test_nixl.py::test_what_a_source_says_is_checked"),
    ("auto takes NIXL though it is slower", "transports/nixl.py", 'if speed < told and config.transport == "auto":', "if False:", "tests/transports/test_nixl.py::test_a_slow_way_is_told"),
    ("the card of one worker is taken from another", "transports/nixl_notes.py", 'if not card.agent.startswith(f"{source}#"):', "if False:", "tests/transports/test_nixl.py::test_notes_that_make_no_sense"),
    ("the second agent listens on every interface", "transports/nixl_agent.py", "    with _environment:\n        settings = environment(config, os.environ)\n", "    settings = environment(config, os.environ)\n    with _environment:\n", "tests/transports/test_nixl.py::test_two_agents_made_at_once_are_both_kept_to_the_loopback"),
    ("auto takes NIXL without RDMA", "transports/nixl_agent.py", 'if config.transport == "auto" and not rdma_devices():', "if False:", "tests/transports/test_nixl.py::test_auto_leaves_nixl_out_without_rdma"),
    ("a read of NIXL that hangs is waited for", "transports/nixl_reads.py", "            elif now >= opened.until:\n", "            elif False:\n", "tests/transports/test_nixl.py::test_a_source_that_dies_or_freezes"),
    ("D reports while a hanging read may still write", "transports/nixl_reads.py", "if closing[0].error:", "if False:", "tests/unit/test_nixl_reads.py"),
    ("P confirms what vLLM has taken back", "driver.py", "            return\n        self._drain()\n        do(decoded)", "            return\n        do(decoded)"),
    ("a load ends twice when the thread fails", "driver.py", "        self._owed.discard((type(outcome), outcome.transfer))\n", ""),
    ("a broken driver reports while bytes land", "driver.py", "if kind is events.Report and transfer in self._landing:", "if False:"),
    ("a slower carrier takes the pieces", "driver.py", "best = next((up[name] for name in self._carriers if name in up), self._fallback)", "best = next(iter(up.values()), self._fallback)"),
    ("P's blocks are held by a piece that cannot be sent", "driver.py", "            self._do_prefill(events.Sent(action.transfer, action.reader))\n        else:", "            pass\n        else:"),
]

MACHINES = ("prefill.py", "decode.py", "search.py", "reading.py", "layout.py", "mapping.py")
OF_MACHINES = ["tests/unit/test_prefill.py", "tests/unit/test_decode.py", "tests/unit/test_search.py"]
WORLD = ["tests/property/test_world.py"]
TESTS = {
    **{file: [Run(OF_MACHINES), *(Run(WORLD, seeds) for seeds in (FEW, MORE, MANY))] for file in MACHINES},
    "driver.py": [Run(["tests/unit/test_driver.py"])],
    "scatter.py": [Run(["tests/unit/test_memory.py", "tests/unit/test_kvcache.py"]), Run(["tests/property/test_mapping.py"])],
    "transports/pairs.py": [Run(["tests/property/test_pairs.py"], 160)],
    "transports/nixl_way.py": [Run(["tests/unit/test_nixl_way.py"])],
    "transports/nixl_reads.py": [Run(["tests/unit/test_nixl_reads.py"]), Run(["tests/transports/test_nixl.py"])],
    "transports/nixl_notes.py": [Run(["tests/transports/test_nixl.py"])],
    "transports/nixl_agent.py": [Run(["tests/transports/test_nixl.py"])],
    "transports/nixl_serving.py": [Run(["tests/transports/test_nixl.py"])],
    "transports/nixl.py": [Run(["tests/transports/test_nixl.py"])],
    "transports/tcp.py": [Run(["tests/transports/test_tcp.py"])],
    "transports/tcp_serving.py": [Run(["tests/transports/test_tcp.py"])],
    "transports/tcp_notes.py": [Run(["tests/transports/test_tcp.py"])],
    "transports/two_sided.py": [Run(["tests/transports/test_two_sided.py"])],
    "transports/mover.py": [Run(["tests/transports/test_two_sided.py"])],
    "transports/control.py": [Run(["tests/unit/test_zmq_carrier.py", "tests/unit/test_driver.py"])],
    "transports/zmq.py": [Run(["tests/unit/test_zmq_carrier.py", "tests/unit/test_driver.py"])],
    "transports/half_open.py": [Run(["tests/unit/test_zmq_carrier.py", "tests/transports/test_floods.py"])],
    "kv_connectors/scheduler.py": [Run(["tests/unit/test_scheduler_side.py", "tests/unit/test_worker_side.py"])],
    "kv_connectors/worker.py": [Run(["tests/unit/test_scheduler_side.py", "tests/unit/test_worker_side.py"])],
}


def runs(mutant: Mutant) -> list[Run]:
    """Of pytest, until one fails."""
    if named := mutant.tests.split():
        by_luck = any(test.startswith("tests/property") for test in named)
        return [Run(named), *([Run(named, MANY)] if by_luck else [])]
    if mutant.file in TESTS:
        return TESTS[mutant.file]
    path = Path(mutant.file)
    folder = "tests/proxy" if "proxy" in path.parts else "tests/unit"
    names = [name for name in (f"test_{path.stem}.py", f"test_proxy_{path.stem}.py") if (ROOT / folder / name).exists()]
    if "launcher" in path.parts:
        names = [found.name for found in sorted((ROOT / folder).glob("test_launcher*.py"))]
    return [*([Run([f"{folder}/{name}" for name in names])] if names else []), Run([folder])]


def source(root: Path, file: str) -> Path:
    return root / file if (root / file).exists() else root / "vllm_disagg" / file


def check(mutants: Sequence[Mutant]) -> None:
    """A line that no longer fits its file plants nothing."""
    wrong = [f"{m.file} holds {count} times: {m.old!r}" for m in mutants if (count := _count(m)) != 1]
    missing = {
        test for m in mutants for run in runs(m) for test in run.tests if not (ROOT / test.partition("::")[0]).exists()
    }
    if wrong or missing:
        sys.exit("\n".join(["mutants:", *wrong, *(f"there is no {test}" for test in sorted(missing))]))


def _count(mutant: Mutant) -> int:
    path = source(ROOT, mutant.file)
    return path.read_text().count(mutant.old) if path.exists() and mutant.old != mutant.new else 0


def is_caught(mutant: Mutant) -> bool:
    with tempfile.TemporaryDirectory() as folder:
        copy = _copied(Path(folder))
        path = source(copy, mutant.file)
        path.write_text(path.read_text().replace(mutant.old, mutant.new))
        return any(not passes(copy, run) for run in runs(mutant))


def _copied(folder: Path) -> Path:
    for entry in ROOT.iterdir():
        if entry.name in COPIED:
            shutil.copytree(entry, folder / entry.name)
        elif not entry.name.startswith(".") or entry.name == ".cache":
            (folder / entry.name).symlink_to(entry)
    return folder


def passes(folder: Path, run: Run) -> bool:
    command = [sys.executable, "-m", "pytest", "-x", "-p", "no:cacheprovider", *run.tests]
    env = {**os.environ, "SEEDS": str(run.seeds), "PYTHONPATH": f"{folder}:{folder}/tests"}
    pytest = subprocess.Popen(command, cwd=folder, env=env, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, process_group=0)
    try:
        said, _ = pytest.communicate(timeout=LIMIT * max(1, run.seeds // 1000))
    except subprocess.TimeoutExpired:
        os.killpg(pytest.pid, signal.SIGKILL)
        pytest.communicate()
        return False
    if pytest.returncode not in (0, 1):  # it has run no test
        sys.exit(f"mutants: {' '.join(command)}\n{said.decode(errors='replace')[-3000:]}")
    return pytest.returncode == 0


def tried(mutant: Mutant) -> tuple[Mutant, bool, float]:
    began = time.monotonic()
    return mutant, is_caught(mutant), time.monotonic() - began


def failing(mutants: Sequence[Mutant], pool: ThreadPoolExecutor) -> list[str]:
    """Tests that fail without any fault, and so notice none."""
    tests = sorted({test for mutant in mutants for run in runs(mutant) for test in run.tests})
    tests = [test for test in tests if test.partition("::")[0] not in tests or "::" not in test]
    with tempfile.TemporaryDirectory() as folder:
        copy = _copied(Path(folder))
        good = pool.map(lambda test: passes(copy, Run([test])), tests)
        return [test for test, is_good in zip(tests, good, strict=True) if not is_good]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("-j", "--jobs", type=int, default=os.cpu_count())
    parser.add_argument("words", nargs="*")
    args = parser.parse_args()
    every = [Mutant(*line) for line in MUTANTS]
    check(every)
    mutants = [m for m in every if not args.words or any(word in "\n".join(m) for word in args.words)]
    began = time.monotonic()
    missed = 0
    with ThreadPoolExecutor(args.jobs) as pool:
        if bad := failing(mutants, pool):
            sys.exit(f"mutants: these fail without any fault: {' '.join(bad)}")
        for done in as_completed([pool.submit(tried, mutant) for mutant in mutants]):
            mutant, caught, seconds = done.result()
            print(f"{'caught' if caught else 'MISSED'} {seconds:4.0f} s  {mutant.what}", flush=True)
            missed += not caught
    print(f"{len(mutants) - missed} of {len(mutants)} caught in {(time.monotonic() - began) / 60:.0f} minutes")
    sys.exit(bool(missed))


if __name__ == "__main__":
    main()
