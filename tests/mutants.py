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
    ("P offers tokens before all layers are", "prefill.py", "if t.layers >= self.shape.layers:", "if t.layers >= self.shape.layers - 1:"),
    ("P serves what is not final", "prefill.py", "            and t.is_final(extent)\n", ""),
    ("P answers for another life", "prefill.py", "if event.source != self.name:", "if False:"),
    ("P sends the wrong block", "layout.py", "start = (extent.token - first) // block_size\n    stop = -(-(extent.token_end - first) // block_size)", "start = (extent.token - first) // block_size + 1\n    stop = -(-(extent.token_end - first) // block_size) + 1"),
    ("the tail is sent too early", "layout.py", "return end if tokens >= end else tokens - tokens % block_size", "return min(end, tokens)"),
    ("the last layer is not split off", "layout.py", "min(layer + layers, extent.layer_end)", "layer + layers"),
    ("D reports a cancel while bytes land", "decode.py", "return [] if t.pieces else self._report(name, t.reason, now)", "return self._report(name, t.reason, now)"),
    ("D trusts its own read", "decode.py", "t.state, t.retry = State.SETTLING, now + self.retry\n        return [self._done(event.transfer, t), *self._pump(now)]", "return self._report(event.transfer, None, now)"),
    ("D ignores intact", "decode.py", "None if event.intact else Reason.LOST", "None"),
    ("D lands a piece twice", "decode.py", "piece.where is not Where.ASKED", "piece.where is Where.WAITING"),
    ("D takes damaged bytes", "decode.py", "if not event.ok:", "if False:"),
    ("D never gives up a silent P", "decode.py", "if now >= t.heard + self.silence:", "if False:"),
    ("D gives no sign of life", "decode.py", "return [self._pull(name, t.source), *(self._fetch", "return [*(self._fetch"),
    ("D never asks for a lost piece again", "decode.py", "and p.again <= now]", "and False]"),
    ("D never repeats Done", "decode.py", "if t.state is State.SETTLING:\n            return [self._done(name, t)]", "if t.state is State.SETTLING:\n            return []"),
    ("D accepts Settled at any time", "decode.py", "if t.state is not State.SETTLING:\n                    return []\n", ""),
    ("D believes another life of P", "decode.py", "if event.source != t.source or event.reader != self.name:", "if False:"),
    ("D loses a credit", "decode.py", "        self.flying -= piece.bytes\n        t.moved = now", "        t.moved = now"),
    ("D sees an older offer as news", "decode.py", "(event.tokens, event.ahead, event.layers) <= (t.tokens, t.ahead, t.layers)", "False"),
    ("D forgets the layers ahead", "decode.py", "limit = max(full, ahead) if layer < t.layers else full", "limit = max(full, ahead)"),
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
]


def is_caught(file: str, old: str, new: str) -> bool:
    with tempfile.TemporaryDirectory() as folder:
        shutil.copytree(ROOT / "vllm_disagg", f"{folder}/vllm_disagg")
        shutil.copytree(ROOT / "tests", f"{folder}/tests")
        shutil.copy(ROOT / "pyproject.toml", folder)
        path = Path(folder, "vllm_disagg", file)
        text = path.read_text()
        if text.count(old) != 1:
            sys.exit(f"mutants: {file} holds {text.count(old)} times: {old!r}")
        path.write_text(text.replace(old, new))
        of_pairs = file == "transports/pairs.py"
        tests = ["tests/property/test_pairs.py"] if of_pairs else ["tests/unit/test_decode.py", "tests/property/test_world.py"]
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
