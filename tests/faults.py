"""Run train.py with one fault in it. The program has no hook for this: the functions that it calls are
replaced first.

    python tests/faults.py '{"at": "fsync", "n": 3, "do": "kill"}' --max_iters=20 ...

at      write (to a file beside its target), log (a line of metrics.jsonl), fsync, link, replace;
        before, after (an optimizer step);
        agree (the ranks on whether to go on: once when they start, then once a step)
n       the how-manieth call in this process, from 1
do      kill (SIGKILL of this process, with half of a write on the disk), error (a RuntimeError), the name of
        an errno to raise, or of signals for this process
rank    under torchrun, the rank that it happens to; without it rank 0
once    a file that is made when it happens: it does not happen again while that is there
counts  instead of the others: a file that gets the number of calls of each kind
"""

import builtins
import errno
import json
import os
import runpy
import signal
import sys
from collections import Counter
from pathlib import Path

import torch

ROOT = Path(__file__).resolve().parent.parent


class Faulty:
    """A file whose writes are fault points."""

    def __init__(self, file, kind, point):
        self.file, self.kind, self.point = file, kind, point

    def write(self, data):
        self.point(self.kind, lambda: (self.file.write(data[: len(data) // 2]), self.file.flush()))
        return self.file.write(data)

    def __getattr__(self, name):
        return getattr(self.file, name)

    def __enter__(self):
        return self

    def __exit__(self, *error):
        self.file.close()


def install(fault: dict, put=setattr) -> Counter:
    """Set the fault; returns the calls counted so far, by kind. `put`: setattr, or monkeypatch.setattr."""
    calls, here = Counter(), int(os.environ.get("RANK", 0)) == fault.get("rank", 0)

    def point(kind, torn=lambda: None):
        calls[kind] += 1
        once = Path(fault["once"]) if "once" in fault else None
        if not here or kind != fault.get("at") or calls[kind] != fault["n"] or (once and once.exists()):
            return
        if once:
            once.touch()
        if fault["do"].startswith("SIG"):
            for name in fault["do"].split():
                os.kill(os.getpid(), getattr(signal, name))
            return
        if fault["do"] == "error":
            raise RuntimeError("a bug")
        if fault["do"] != "kill":
            raise OSError(getattr(errno, fault["do"]), os.strerror(getattr(errno, fault["do"])))
        torn()
        os.kill(os.getpid(), signal.SIGKILL)

    def guarded(kind, function):
        def call(*args, **more):
            point(kind)
            return function(*args, **more)

        return call

    def opened(path, mode="r", *args, **more):
        file = plain(path, mode, *args, **more)
        kind = None
        if isinstance(path, Path) and mode[0] in "wa":
            kind = {".tmp": "write", ".jsonl": "log"}.get(path.suffix)
        return Faulty(file, kind, point) if kind else file

    def step(self, *args, **more):
        point("before")
        update(self, *args, **more)
        point("after")

    def all_reduce(*args, **more):
        if len(args) > 2:  # in a group of its own
            point("agree")
        return reduce(*args, **more)

    plain, update, reduce = builtins.open, torch.optim.AdamW.step, torch.distributed.all_reduce
    for kind in ("fsync", "link", "replace"):
        put(os, kind, guarded(kind, getattr(os, kind)))
    put(builtins, "open", opened)
    put(torch.optim.AdamW, "step", step)
    put(torch.distributed, "all_reduce", all_reduce)
    return calls


if __name__ == "__main__":
    fault, program = json.loads(sys.argv[1]), str(ROOT / "train.py")
    calls = install(fault)
    sys.argv, sys.path[0] = [program, *sys.argv[2:]], str(ROOT)
    try:
        runpy.run_path(program, run_name="__main__")
    finally:
        if "counts" in fault:
            Path(fault["counts"]).write_text(json.dumps(calls))
