"""What the tables of speed share: a shape, contestants that take turns, ratios, and what a step holds.

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
from dataclasses import dataclass

import numpy as np
import torch
from torch.profiler import profile

from model import ModelConfig
from nanonorm.cli import parse
from nanonorm.errors import BadInput
from nanonorm.files import atomic_write
from nanonorm.timing import time_rounds
from nanonorm.typed import Count
from scripts.studies.tables import markdown

TURN_MS = 200  # a turn lasts at least so long: its first step finds cold caches and sleeping threads


@dataclass
class Shape:
    """Of the networks that are timed, and of a training step."""

    n_layer: Count = 8  # blocks
    n_head: Count = 16  # attention heads
    vocab_size: Count = 10_000  # token ids
    block_size: Count = 512  # tokens of a training window
    batch_size: Count = 8  # windows of a training step

    def config(self, width: int, **knobs) -> ModelConfig:
        """Raises: ModelError."""
        shape = dict(vocab_size=self.vocab_size, block_size=self.block_size, n_layer=self.n_layer)
        return ModelConfig(**shape, n_head=self.n_head, n_embd=width, **knobs)


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


def ratio(over: np.ndarray, under: np.ndarray) -> tuple[float, float, float]:
    """Median and quartiles of one's times over another's, round by round."""
    low, middle, high = np.percentile(over / under, (25, 50, 75)).tolist()
    return middle, low, high


def in_words(ratio: tuple[float, float, float], digits: int = 3) -> str:
    middle, low, high = (f"{value:.{digits}f}" for value in ratio)
    return f"{middle}x {low}-{high}"


def table(title: str, steps: dict, iters: int, memory: bool = False) -> dict[str, tuple]:
    """Time steps in this process, in turns, and print a row for each; with `memory` also the most that its
    tensors hold at once. Returns {name: ratio of the first one's times to its own}."""
    resets = {name: (lambda: None, step) for name, step in steps.items()}
    times, first = time_rounds(resets, 1, iters, torch.device("cpu"), random.Random(0)), next(iter(steps))
    found, rows = {name: ratio(times[first], t) for name, t in times.items()}, []
    for name, t in times.items():
        rows.append([name, f"{np.median(t):.1f}", "1" if name == first else in_words(found[name])])
        if memory:
            rows[-1].append(f"{tensor_peak(steps[name]) / 1e6:.0f}")
    heads = [title, "ms", f"{first} / this, quartiles", *(["peak, MB"] if memory else [])]
    print(f"\n{markdown(rows, heads)}", flush=True)
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
