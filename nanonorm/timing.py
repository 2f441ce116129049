"""How a step is called in a runtime, how long it takes beside others, how much work it launches, what it
holds."""

import gc
import multiprocessing
import random
import tempfile
import time
from pathlib import Path

import numpy as np
import torch
from torch.profiler import profile
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from nanonorm import onnx
from nanonorm.errors import BadInput

TURN_MS = 200  # a turn lasts at least so long: its first step finds cold caches and sleeping threads


def captured(reset, step):
    """The step as a CUDA graph: one launch, inputs and outputs at fixed addresses."""
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):  # libraries allocate their workspaces on first use, which a capture may not
        for _ in range(3):
            reset()
            step()
    torch.cuda.current_stream().wait_stream(side)
    reset()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        logits = step()

    def replay():
        graph.replay()
        return logits

    replay.step = step  # holds the inputs, of which the graph has the addresses alone
    return replay


def in_runtime(runtime: str, reset, step):
    """The step as that runtime calls it. A graph break in torch.compile is an error."""
    if runtime == "compiled":
        # dynamo searches all it compiled for a code object on every call: each variant gets one of its own
        step.__code__ = step.__code__.replace()
        return torch.compile(step, fullgraph=True, dynamic=False)
    return captured(reset, step) if runtime == "graph" else step


class LastToken(torch.nn.Module):
    """A prefill as a module of one input: token ids (B, T) -> logits (B, 1, V)."""

    def __init__(self, model):
        super().__init__()
        self.model = model

    def forward(self, x):
        return self.model(x, last_only=True)


class OnnxStep:
    """model(x, last_only=True) under onnxruntime. nodes: of the graph that it runs."""

    def __init__(self, model, x):
        self.x = x
        with tempfile.TemporaryDirectory() as folder:
            path, optimized = Path(folder, "step.onnx"), Path(folder, "optimized.onnx")
            onnx.export(LastToken(model), x, path)
            self.session = onnx.Session(path, optimized)
            self.nodes = onnx.nodes(optimized)

    def __call__(self):
        return self.session(self.x)


class CountOperators(TorchDispatchMode):
    """Counts the ATen operators that compute: not views, which hand back an input's memory unwritten."""

    count = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        def memory(values):
            return {t.untyped_storage()._cdata for t in tree_leaves(values) if isinstance(t, torch.Tensor)}

        out = func(*args, **(kwargs or {}))
        only_views = memory(out) <= memory((args, kwargs)) and not func._schema.is_mutable
        self.count += not only_views
        return out


def count_work(reset, step, runtime: str, device) -> int | None:
    """GPU kernels and copies of one forward, on a CPU ATen operators, under onnxruntime the graph's nodes;
    None where they cannot be counted."""
    reset()
    if device.type == "cuda":
        torch.cuda.synchronize()
        with torch.inference_mode(), torch.profiler.profile() as profile:
            step()
            torch.cuda.synchronize()
        events = [e for e in profile.events() if e.device_type == torch.autograd.DeviceType.CUDA]
        return sum(not e.is_user_annotation for e in events) or None
    if runtime != "eager":
        return getattr(step, "nodes", None)  # a compiled CPU kernel is C++ that no dispatcher sees
    with torch.no_grad(), CountOperators() as counter:  # inference mode would show composite operators whole
        step()
    return counter.count


def milliseconds(step, device) -> float:
    """Of one call; on a GPU from an empty queue, as work still queued would hide the time launching takes."""
    if device.type == "cpu":
        begin = time.perf_counter()
        step()
        return (time.perf_counter() - begin) * 1e3
    start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    torch.cuda.synchronize()
    start.record()
    step()
    end.record()
    end.synchronize()
    return start.elapsed_time(end)


def time_rounds(steps: dict, warmup: int, iters: int, device, rng: random.Random) -> dict[str, np.ndarray]:
    """{name: (iters,) milliseconds}. steps: {name: (reset, step)}; each runs once a round, in a new order."""
    order, times = list(steps), {name: [] for name in steps}
    gc.collect()
    gc.disable()
    try:
        for _ in range(warmup + iters):
            rng.shuffle(order)
            for name in order:
                reset, step = steps[name]
                reset()
                times[name].append(milliseconds(step, device))
    finally:
        gc.enable()
    return {name: np.array(t[warmup:]) for name, t in times.items()}


def ratio(over: np.ndarray, under: np.ndarray) -> tuple[float, float, float]:
    """Median and quartiles of one's times over another's, round by round."""
    low, middle, high = np.percentile(over / under, (25, 50, 75)).tolist()
    return middle, low, high


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
    """What each contestant said: first when it was ready, then in each of the rounds, which have the
    contestants in a fresh random order.

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


def tensor_peak(step) -> int:
    """Bytes that the tensors made by `step` hold at most at once, as torch's CPU allocator counts them."""
    with profile(profile_memory=True) as recorded:
        step()
    events = [e for e in recorded.profiler.kineto_results.events() if e.name() == "[memory]"]
    sizes = [e.nbytes() for e in sorted(events, key=lambda e: e.start_ns())]
    return int(np.cumsum([0, *sizes]).max())
