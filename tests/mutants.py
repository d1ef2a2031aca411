"""Plant one fault at a time in the protocol and see whether the tests of the machines notice: `make mutants`.

It tests the tests.  Each line: what breaks, the file, the text, and what replaces it.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
OF_MACHINES = ["tests/unit/test_prefill.py", "tests/unit/test_decode.py", "tests/unit/test_search.py"]
MUTANTS = [
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
]
TESTS = {
    "transports/pairs.py": ["tests/property/test_pairs.py"],
    "transports/nixl_way.py": ["tests/unit/test_nixl_way.py"],
    "transports/tcp.py": ["tests/transports/test_tcp.py"],
    "transports/tcp_serving.py": ["tests/transports/test_tcp.py"],
}


def is_caught(file: str, old: str, new: str) -> bool:
    with tempfile.TemporaryDirectory() as folder:
        for part in ("vllm_disagg", "kv_connectors", "tests"):
            shutil.copytree(ROOT / part, f"{folder}/{part}")
        shutil.copy(ROOT / "pyproject.toml", folder)
        of_connector = file.startswith("kv_connectors/")
        path = Path(folder, file) if of_connector else Path(folder, "vllm_disagg", file)
        text = path.read_text()
        if text.count(old) != 1:
            sys.exit(f"mutants: {file} holds {text.count(old)} times: {old!r}")
        path.write_text(text.replace(old, new))
        of_pairs = file == "transports/pairs.py"
        tests = TESTS.get(file, [*OF_MACHINES, "tests/property/test_world.py"])
        if of_connector:
            tests = ["tests/unit/test_scheduler_side.py", "tests/unit/test_worker_side.py"]
        command = [sys.executable, "-m", "pytest", "-x", *tests]
        env = {**os.environ, "SEEDS": os.environ.get("SEEDS", "160" if of_pairs else "10000"), "PYTHONPATH": f"{folder}:{folder}/tests"}
        return subprocess.run(command, cwd=folder, env=env, capture_output=True, timeout=600).returncode == 1


def main() -> None:
    missed = []
    for what, file, old, new in MUTANTS:
        caught = is_caught(file, old, new)
        print(f"{'caught' if caught else 'MISSED'}  {what}", flush=True)
        missed += [] if caught else [what]
    print(f"{len(MUTANTS) - len(missed)} of {len(MUTANTS)} caught")
    sys.exit(bool(missed))


if __name__ == "__main__":
    main()
