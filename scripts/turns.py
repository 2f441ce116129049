"""Contestants that take turns: every round runs each of them once, in a fresh random order, so that whatever the machine
does meanwhile falls on all. A ratio of two times of the same round is then worth having; a millisecond alone is not.

    times = rounds({"a": step_a, "b": step_b}, iters=20)                            # in this process
    said = take_turns({"a": (work, "a"), "b": (work, "b")}, rounds=20, seed=0)      # each in a process of its own
"""

import ctypes
import gc
import multiprocessing
import random
import time
from contextlib import suppress
from pathlib import Path

import numpy as np
from torch.profiler import profile

from config import BadInput


def rounds(steps: dict, iters: int) -> dict[str, np.ndarray]:
    """{name: (iters,) ms} of the steps, functions of nothing, after one round to warm up."""
    times, order = {name: [] for name in steps}, random.Random(0)
    for _ in range(1 + iters):
        for name in order.sample(list(steps), len(steps)):
            begin = time.perf_counter()
            steps[name]()
            times[name].append((time.perf_counter() - begin) * 1e3)
    return {name: np.array(t[1:]) for name, t in times.items()}


def serve(pipe, work, args):
    for value in work(*args):
        pipe.send(value)
        if not pipe.recv():
            break


def take_turns(contestants: dict[str, tuple], rounds: int, seed: int) -> dict[str, list]:
    """What each contestant said: first when it was ready, then in each of the rounds.

    contestants: {name: (generator function, its arguments...)}, importable from a module; it yields once when it is ready and
    once for each turn, and only one is at work at a time. Allocator settings, threads and peak memory are a process's own, so
    each has one. Raises: BadInput if one dies; its traceback is on stderr.
    """
    context, order, pipes, processes = multiprocessing.get_context("spawn"), random.Random(seed), {}, []
    said = {name: [] for name in contestants}

    def hear(name):
        try:
            said[name].append(pipes[name].recv())
        except EOFError:
            raise BadInput(f"{name} has died; its message is above") from None

    try:
        for name, (work, *args) in contestants.items():
            pipes[name], far = context.Pipe()
            processes.append(context.Process(target=serve, args=(far, work, args), daemon=True))
            processes[-1].start()
            far.close()
            hear(name)
        for _ in range(rounds):
            for name in order.sample(list(contestants), len(contestants)):
                pipes[name].send(True)
                hear(name)
        for pipe, process in zip(pipes.values(), processes, strict=True):
            pipe.send(False)
            process.join(20)
    finally:
        for process in processes:
            process.kill()
    return said


def resident_peak(step) -> int:
    """Bytes that `step` adds to this process's resident memory at its highest. Linux."""

    def status(field: str) -> int:
        line = next(line for line in Path("/proc/self/status").read_text().splitlines() if line.startswith(field))
        return int(line.split()[1]) * 1024

    before = status("VmRSS")
    Path("/proc/self/clear_refs").write_text("5")  # the peak from here on
    step()
    return status("VmHWM") - before


def release_garbage():
    """Collect what nobody refers to and, under glibc, hand freed memory back: what building left behind is not a step's."""
    gc.collect()
    with suppress(AttributeError, OSError):
        ctypes.CDLL(None).malloc_trim(0)


def tensor_peak(step) -> int:
    """Bytes that the tensors which `step` makes hold at most at once, as torch's CPU allocator counts them."""
    with profile(profile_memory=True) as recorded:
        step()
    events = [e for e in recorded.profiler.kineto_results.events() if e.name() == "[memory]"]
    sizes = [e.nbytes() for e in sorted(events, key=lambda e: e.start_ns())]
    return int(np.cumsum([0, *sizes]).max())
