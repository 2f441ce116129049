"""What the tables of speed share: contestants that take turns, ratios, and what a step adds to memory.

    said = take_turns({"a": (work, "a"), "b": (work, "b")}, rounds=20, seed=0)

Every round runs each contestant once, in a fresh random order, so that whatever the machine does meanwhile
falls on all. A ratio of two times of the same round is then worth having; a millisecond alone is not.
"""

import ctypes
import gc
import json
import multiprocessing
import random
import sys
import time
from contextlib import suppress
from pathlib import Path

import numpy as np
from torch.profiler import profile

from nanonorm.cli import parse
from nanonorm.errors import BadInput
from nanonorm.files import atomic_write

TURN_MS = 200  # a turn lasts at least so long: its first step finds cold caches and sleeping threads


def serve(pipe, work, args):
    """A contestant's process: send what `work` yields, one value a turn, until told to stop."""
    for value in work(*args):
        pipe.send(value)
        if not pipe.recv():
            break


def hear(pipe, name: str):
    """The next value from a contestant. Raises: BadInput if it has died."""
    try:
        return pipe.recv()
    except EOFError:
        raise BadInput(f"{name} crashed; see its traceback above") from None


def take_turns(contestants: dict[str, tuple], rounds: int, seed: int) -> dict[str, list]:
    """What each contestant said: first when it was ready, then in each of the rounds.

    contestants: {name: (generator function, its arguments...)}, importable from a module; it yields once when
    it is ready and once for each turn, and only one is at work at a time. Each has a process of its own, with
    its allocator settings, threads and peak memory. Raises: BadInput if one dies; its traceback is on stderr.
    """
    context, order = multiprocessing.get_context("spawn"), random.Random(seed)
    pipes, processes, said = {}, [], {}
    try:
        for name, (work, *args) in contestants.items():
            pipes[name], far = context.Pipe()
            processes.append(context.Process(target=serve, args=(far, work, args), daemon=True))
            processes[-1].start()
            far.close()
            said[name] = [hear(pipes[name], name)]
        for _ in range(rounds):
            for name in order.sample(list(contestants), len(contestants)):
                pipes[name].send(True)
                said[name].append(hear(pipes[name], name))
        for pipe, process in zip(pipes.values(), processes, strict=True):
            pipe.send(False)
            process.join(20)
    finally:
        for process in processes:
            process.kill()
    return said


def timed_turns(step):
    """Yield the median ms of `step` in each turn, for ever."""
    while True:
        times = []
        while sum(times) < TURN_MS:
            begin = time.perf_counter()
            step()
            times.append((time.perf_counter() - begin) * 1e3)
        yield float(np.median(times))


def ratios(times: dict[str, np.ndarray], to: str) -> dict[str, tuple[float, float, float, float]]:
    """{name: (its median, then median and quartiles of its times over those of `to`, round by round)}."""
    found = {}
    for name, t in times.items():
        low, middle, high = np.percentile(t / times[to], (25, 50, 75)).tolist()
        found[name] = (float(np.median(t)), middle, low, high)
    return found


def read_flags(cls, usage: str):
    """The knobs of a command that takes flags alone. Raises: BadInput."""
    k, _, words = parse(cls, sys.argv[1:], usage=usage)
    if words:
        raise BadInput(f"{words[0]}: this command takes flags only, --key=value; --help lists them")
    return k


def finish(report: dict, out: str | None = None):
    """Print a report as the last line, JSON, and keep it in the file `out`."""
    line = json.dumps(report)
    if out:
        with atomic_write(out, "w") as f:
            f.write(line + "\n")
    print(f"\n{line}")


def resident_peak(step) -> int | None:
    """Run `step`. Returns the bytes that it adds to this process's resident memory at its highest; None where
    the system does not count them (only Linux does)."""

    def status(field: str) -> int:
        lines = Path("/proc/self/status").read_text().splitlines()
        return next(int(line.split()[1]) * 1024 for line in lines if line.startswith(field))

    try:
        Path("/proc/self/clear_refs").write_text("5")  # the peak from here on
    except OSError:
        step()
        return None
    before = status("VmRSS")
    step()
    return status("VmHWM") - before


def release_garbage():
    """Collect garbage and, under glibc, return freed memory: what building left behind is not a step's."""
    gc.collect()
    with suppress(AttributeError, OSError, TypeError):
        ctypes.CDLL(None).malloc_trim(0)


def tensor_peak(step) -> int:
    """Bytes that the tensors made by `step` hold at most at once, as torch's CPU allocator counts them."""
    with profile(profile_memory=True) as recorded:
        step()
    events = [e for e in recorded.profiler.kineto_results.events() if e.name() == "[memory]"]
    sizes = [e.nbytes() for e in sorted(events, key=lambda e: e.start_ns())]
    return int(np.cumsum([0, *sizes]).max())
