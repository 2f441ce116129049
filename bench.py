"""tok/s of the variants on this machine: the papers' speed table, with what a fair one needs beside it.

    python bench.py out/demo                 a run folder (its exports are what is timed) or one model file
    python bench.py --n_embd=256             no checkpoint: random weights of that shape, calibrated and folded
    python bench.py out/demo --mode=decode   one token at a time with the KV cache

One process, one clock. In every timed round each variant runs once, in a fresh random order, so drift and
neighbours hit all alike; a speedup is the median over rounds of (baseline's time / variant's time), both of the
same round. Before anything is timed, variants that must agree are compared: a benchmark of a wrong fold is
worth nothing. The floor is the same matrix products and attention calls and nothing else: what a variant takes
above it is norms, element-wise work and launches. Prints tables, then one line of JSON; --out=x.json keeps it.
"""

import copy
import gc
import itertools
import json
import platform
import random
import sys
import time
from dataclasses import asdict, dataclass, fields, replace
from functools import partial
from pathlib import Path
from typing import Literal

import numpy as np
import torch
import torch.nn as nn
import torch.nn.functional as F
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from config import BadInput, Count, ModelKnobs, Whole, atomic_write, keep_freed_memory, one_line_errors, parse, processor
from model import FORMS, NORMS, TOLERANCE, KVCache, ModelConfig, ModelError, Transformer, attend

# name -> (norm, taper, form). norm "plain": the one with a statistic that the run's own competes with; taper "own": the run's.
VARIANTS = {
    "baseline": ("plain", "none", "trained"),
    "weightless": ("plain", "none", "weightless"),
    "unfused": ("plain", "own", "unfused"),
    "folded": ("plain", "own", "folded"),
    "all_unfused": ("plain", "all", "unfused"),
    "all_folded": ("plain", "all", "folded"),
    **{norm: (norm, "none", "trained") for norm in NORMS},
    **{f"{norm}_weightless": (norm, "none", "weightless") for norm in ("rmsnorm", "layernorm", "cbwc")},
    **{f"{norm}_folded": (norm, "none", "folded") for norm in ("coupled", "cbwc")},
}
FLOOR = "floor"


@dataclass
class Bench(ModelKnobs):
    """A benchmark. The model's knobs are for runs without PATH; a file brings its own."""

    # what is timed
    mode: Literal["prefill", "decode"] = "prefill"  # prefill: logits of the last token, no cache; decode: one token, KV cache
    variants: tuple[Literal[*VARIANTS], ...] | None = None  # columns; speedups are over the first; None: the run's own and its rivals
    runtimes: tuple[Literal["eager", "compiled", "graph"], ...] | None = None  # None: on a GPU all, on a CPU eager
    batch: tuple[Count, ...] = (1, 4)  # sequences at a time
    seq: tuple[Count, ...] | None = None  # tokens of context; None: 512 (or block_size, if that is less), its half and its quarter
    # how
    warmup: Whole = 10  # untimed rounds
    iters: Count = 50  # timed rounds
    device: str = "auto"  # cpu, cuda, cuda:1; auto: a GPU if there is one
    dtype: Literal["auto", "float32", "bfloat16"] = "auto"  # of weights and activations; auto: bfloat16 on a GPU, float32 on a CPU
    seed: Whole = 1337  # of random weights, tokens and the order in a round
    out: str | None = None  # .json file for the numbers


# ---------------------------------------------------------------------------------------------------------
# the models


def read_run(path: Path) -> dict[str, Transformer]:
    """The models of a run folder or of one file: {form: model}, float32, on the CPU. Raises: BadInput, ModelError."""
    exports = [p for name in ("unfused", "folded", "model") if (p := path / f"{name}.pt").exists()]
    found = (exports or list(path.glob("ckpt.pt"))) if path.is_dir() else [path]
    if not found:
        raise BadInput(f"{path} holds none of unfused.pt, folded.pt, model.pt, ckpt.pt; name the out_dir of a run or a model file")
    return {m.config.form: m for m in (Transformer.load(p).float() for p in found)}


def random_model(config: ModelConfig, device) -> Transformer:
    """A model in eval mode with random weights and gains; what tapers is calibrated on one random batch and at gate 0."""
    model = Transformer(config).to(device)
    for name, p in model.named_parameters():
        if p.dim() == 1:  # a gain of 1 or a shift of 0 would hide a wrong fold
            nn.init.normal_(p, std=0.1) if name.endswith("bias") else nn.init.uniform_(p, 0.5, 1.5)
    if model.taper_norms():
        model.train()
        model(torch.randint(config.vocab_size, (4, min(64, config.block_size)), device=device), last_only=True)
        model.update_statistics()
        model.calibrate()
        for norm in model.taper_norms().values():
            norm.c *= 0.1  # nothing has trained this network to hold its scale: at gate 0 it would overflow, block by block
        model.set_phase("scale")
    return model.eval()


def build(names, shape: ModelConfig, run: dict, device, dtype, seed: int) -> dict[str, Transformer]:
    """{variant: model} on `device` in `dtype`, what the run's files hold from them and the rest random.

    Variants that differ in form alone come from the same weights; forms are made before the cast. Raises: BadInput, ModelError.
    """
    sources, models = {}, {}
    plain = "layernorm" if shape.norm in ("layernorm", "cbwc") else "rmsnorm"
    for name in names:
        norm, taper, form = VARIANTS[name]
        norm = plain if norm == "plain" else norm
        taper = taper if taper != "own" else "internal" if shape.taper == "none" else shape.taper
        own = run if (norm, taper) == (shape.norm, shape.taper) else {}
        if own and not own.keys() & {form, "trained", "unfused"}:
            raise BadInput(f"{name} cannot be made from the {shape.form} form alone; name the run folder, or leave it out of --variants")
        if not own and (norm, taper) not in sources:
            torch.manual_seed(seed)
            sources[norm, taper] = random_model(
                replace(shape, form="trained", norm=norm, taper=taper, aux_weight=0.0, calib_skip_first=False, coupled_grad=False,
                        norm_bias=shape.norm_bias or norm not in ("layernorm", "cbwc"),
                        coupled_from_layer=shape.coupled_from_layer if norm == "coupled" else 0), device)  # fmt: skip
        source = own.get("trained") or own.get("unfused") or sources.get((norm, taper))
        models[name] = own[form] if form in own else FORMS[form](source)
    return {name: copy.deepcopy(m).to(device, dtype).requires_grad_(False).eval() for name, m in models.items()}


class Floor(nn.Module):
    """The matrix products and attention calls of one forward, back to back, and nothing else.

    Each product reads the one before it, as in the model, so a compiler can drop none of them and the caches see
    the same traffic. Weights keep the size of what passes (std 1/sqrt(fan in)): no denormals, however deep.
    """

    def __init__(self, c: ModelConfig, mode: str, batch: int, seq: int, device, dtype):
        super().__init__()
        D, H, K, C = c.n_embd, c.n_head, c.n_kv_head, c.head_dim
        like = partial(torch.randn, device=device, dtype=dtype)
        shapes = ((H + 2 * K) * C, D), (D, D), (2 * c.hidden, D), (D, c.hidden)
        self.layers = [[like(s) * s[1] ** -0.5 for s in shapes] for _ in range(c.n_layer)]
        self.head = like(c.vocab_size, D) * D**-0.5
        self.heads, self.decode = (H, K, C), mode == "decode"
        self.x = like(batch, 1 if self.decode else seq, D)
        self.cache = like(2, batch, K, seq, C) if self.decode else None
        self.mask = torch.ones(1, seq, device=device, dtype=torch.bool) if self.decode else None

    def forward(self):
        """-> (B, 1, V)"""
        x, (H, K, C) = self.x, self.heads  # (B, T, D)
        B, T, D = x.shape
        for qkv, proj, gate_up, down in self.layers:
            q, k, v = (t.transpose(1, 2) for t in F.linear(x, qkv).view(B, T, H + 2 * K, C).split((H, K, K), 2))
            if self.decode:
                k, v = self.cache
            y = attend(q, k, v, self.mask)
            x = F.linear(y.transpose(1, 2).reshape(B, T, D), proj)
            x = F.linear(F.linear(x, gate_up)[..., : down.shape[1]], down)
        return F.linear(x[:, -1:], self.head)


# ---------------------------------------------------------------------------------------------------------
# one forward: how it is called, in which runtime, and how much work it launches


def make_step(model: nn.Module, mode: str, batch: int, seq: int, seed: int):
    """(reset, step): step() is the work that is timed and returns logits (B, 1, V); reset() goes before it, untimed."""
    if isinstance(model, Floor):
        return (lambda: None), (lambda: model())
    w = model.tok_emb.weight
    rng = torch.Generator(w.device).manual_seed(seed)
    idx = torch.randint(model.config.vocab_size, (batch, seq if mode == "prefill" else 1), device=w.device, generator=rng)
    if mode == "prefill":
        return (lambda: None), (lambda: model(idx, last_only=True))
    cache = KVCache(model, batch, seq)  # seq - 1 tokens seen; the new one makes seq
    for t in cache.k + cache.v:
        t.normal_(generator=rng)
    return (lambda: cache.pos.fill_(seq - 1)), (lambda: model(idx, cache=cache, last_only=True))


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
    return lambda: (graph.replay(), logits)[1]


def in_runtime(runtime: str, reset, step):
    """The step as that runtime calls it. A graph break in torch.compile is an error."""
    if runtime == "compiled":
        # dynamo keeps what it compiled per code object and searches it on every call: each variant gets one of its own
        step.__code__ = step.__code__.replace()
        step = torch.compile(step, fullgraph=True, dynamic=False)
    return captured(reset, step) if runtime == "graph" else step


class CountOperators(TorchDispatchMode):
    """Counts the ATen operators that compute something: not those, like views, that hand back an input's memory unwritten."""

    count = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        def memory(values):
            return {t.untyped_storage()._cdata for t in tree_leaves(values) if isinstance(t, torch.Tensor)}

        out = func(*args, **(kwargs or {}))
        self.count += func._schema.is_mutable or not memory(out) <= memory((args, kwargs))
        return out


def count_work(reset, step, runtime: str, device) -> int | None:
    """GPU kernels (and copies) of one forward, or ATen operators on a CPU; None where neither can be counted."""
    reset()
    if device.type == "cuda":
        torch.cuda.synchronize()
        with torch.inference_mode(), torch.profiler.profile() as profile:
            step()
            torch.cuda.synchronize()
        kernels = (e.device_type == torch.autograd.DeviceType.CUDA and not e.is_user_annotation for e in profile.events())
        return sum(kernels) or None
    if runtime != "eager":
        return None  # a compiled CPU kernel is a C++ function that no dispatcher sees
    with torch.no_grad(), CountOperators() as counter:  # inference mode would show composite operators whole
        step()
    return counter.count


# ---------------------------------------------------------------------------------------------------------
# compare, then time


def agree(differences: dict, pair: str, ours, theirs, what: str):
    """Keep in differences[pair] the largest max |ours - theirs| / max |theirs| so far; BadInput if rounding does not explain it."""
    error = ((ours - theirs).float().abs().max() / theirs.abs().max()).item()
    if not error <= TOLERANCE[ours.dtype]:  # nan, which logits that are not finite give, fails as well
        allowed = f"{TOLERANCE[ours.dtype]:.0e} in {ours.dtype}"
        raise BadInput(f"{what}: {pair} does not hold: logits differ by {error:.1e} of their scale, more than {allowed}")
    differences[pair] = max(error, differences.get(pair, 0.0))


def first_call(reset, step, runtime: str, what: str):
    """(step in its runtime, its first logits (B, 1, V)). A compiler that fails is BadInput."""
    try:
        step = in_runtime(runtime, reset, step)
        reset()
        return step, step().clone()
    except Exception as e:
        if runtime != "compiled" or isinstance(e, torch.OutOfMemoryError):
            raise
        if "CxxCompiler" in f"{type(e).__name__} {e}":
            raise BadInput("torch.compile needs a C++ compiler on a CPU and found none: install g++, or use --runtimes=eager") from None
        raise BadInput(f"{what}: torch.compile fails ({str(e).splitlines()[0][:200]}); leave compiled out of --runtimes") from e


def milliseconds(step, device) -> float:
    """Of one call, on a GPU from an empty queue: work still queued would hide the time it takes to launch this step."""
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


def measure(models: dict, shape: ModelConfig, k: Bench, batch: int, seq: int, runtime: str, device, differences: dict) -> list[dict]:
    """One row of the table: compare, then time. A dict of figures for each variant and the floor. Raises: BadInput."""
    if runtime == "compiled":
        torch.compiler.reset()  # drop the programs of the row before: shapes are static
    steps, logits, work, row = {}, {}, {}, []
    floor = Floor(shape, k.mode, batch, seq, device, getattr(torch, k.dtype))
    for name, model in {**models, FLOOR: floor}.items():
        what = f"{name}, {k.mode} {batch} x {seq}, {runtime}"
        reset, step = make_step(model, k.mode, batch, seq, k.seed)
        with torch.inference_mode():
            _, logits[name] = first_call(reset, step, "eager", what)
            step, own = first_call(reset, step, runtime, what)
        if not own.isfinite().all():
            raise BadInput(f"{what}: the logits are not finite, so a comparison of speed means nothing")
        if runtime != "eager":
            agree(differences, f"{runtime} = eager", own, logits[name], what)
        for twin in [n for n in models if n in logits and n != name and VARIANTS[n][:2] == VARIANTS.get(name, ())[:2]]:
            agree(differences, f"{name} = {twin}", logits[name], logits[twin], what)
        steps[name], work[name] = (reset, step), count_work(reset, step, runtime, device)
    with torch.inference_mode():
        times = time_rounds(steps, k.warmup, k.iters, device, random.Random(k.seed))
    for name, t in times.items():
        ms, ms_q1, ms_q3 = np.percentile(t, (50, 25, 75)).tolist()
        speedup, speedup_q1, speedup_q3 = np.percentile(times[next(iter(models))] / t, (50, 25, 75)).tolist()
        row.append(dict(
            variant=name, runtime=runtime, batch=batch, seq=seq, tok_s=batch * (seq if k.mode == "prefill" else 1) / ms * 1e3,
            ms=ms, ms_q1=ms_q1, ms_q3=ms_q3, speedup=speedup, speedup_q1=speedup_q1, speedup_q3=speedup_q3,
            above_floor_ms=float(np.median(t - times[FLOOR])), work=work[name]))  # fmt: skip
    return row


# ---------------------------------------------------------------------------------------------------------
# tables


def print_line(label, cells, widths):
    cells = [f"{c:>{w}}" for c, w in zip(cells, widths, strict=True)]
    print(f"| {label:>11} | " + " | ".join(cells) + " |", flush=True)


def print_table(title: str, rows, cell, widths, last=()):
    """Print `rows` (an iterable of lists of figures) as they come, then the row `last` (label, cells). Returns the rows."""
    kept = []
    print(f"\n{title}\n")
    for row in rows:
        if not kept:
            widths = [max(w, len(r["variant"])) for w, r in zip(widths, row, strict=True)]
            print_line("batch x seq", [r["variant"] for r in row], widths)
            print("|" + "|".join("-" * (w + 1) + ":" for w in (11, *widths)) + "|")
        print_line(f"{row[0]['batch']} x {row[0]['seq']}", map(cell, row), widths)
        kept.append(row)
    if last:
        print_line(*last, widths)
    return kept


def print_runtime(runtime: str, rows, names, unit: str) -> list[dict]:
    """Print both tables of one runtime, `rows` being an iterable of measure()'s. Returns all figures in one list."""
    first, others = names[0], len(names) - 1

    def speed(r):
        ratio = "" if r["variant"] == first else f" {r['speedup']:.3f}x {r['speedup_q1']:.3f}-{r['speedup_q3']:.3f}"
        return f"{r['tok_s']:,.0f}{ratio}"

    def cost(r):
        above = "" if r["variant"] == FLOOR else f" {r['above_floor_ms']:+#.3g}"
        return f"{r['ms']:#.4g} {r['ms_q1']:#.4g}-{r['ms_q3']:#.4g}{above}"

    def span(counts):
        if None in counts:
            return "-"
        return f"{min(counts)}-{max(counts)}" if min(counts) < max(counts) else f"{counts[0]}"

    rows = print_table(f"{runtime}: tok/s, speedup over {first}, its quartiles", rows, speed, [9] + [27] * others)
    work = [span([r["work"] for r in column]) for column in zip(*rows, strict=True)]
    print_table(f"{runtime}: ms a forward, quartiles, ms above the floor", rows, cost, [26] * others + [20], (unit, work))
    return [r for row in rows for r in row]


def machine(device: torch.device) -> str:
    """The processor's name, and how much of it is used."""
    return processor(device) + (f", {torch.get_num_threads()} threads" if device.type == "cpu" else "")


# ---------------------------------------------------------------------------------------------------------
# the command


def resolve(k: Bench, shape: ModelConfig) -> torch.device:
    """Fill in the knobs that default to another one and refuse what cannot run. Returns the device. Raises: BadInput."""
    gpus = torch.cuda.device_count()
    try:
        device = torch.device(("cuda" if gpus else "cpu") if k.device == "auto" else k.device)
    except RuntimeError:
        device = torch.device("meta")
    if device.type not in ("cpu", "cuda") or (device.type == "cuda" and (device.index or 0) >= gpus):
        raise BadInput(f"device={k.device}: this machine has cpu and {gpus} cuda devices")
    gpu = device.type == "cuda"
    if gpu:
        device = torch.device("cuda", device.index or 0)
        torch.cuda.set_device(device)
    own = [n for n in VARIANTS if n.startswith(shape.norm) and shape.norm not in ("rmsnorm", "layernorm")]
    longest = min(512, shape.block_size)
    k.variants = tuple(dict.fromkeys(k.variants or ("baseline", "weightless", *(own or ("unfused", "folded")))))
    k.runtimes = tuple(dict.fromkeys(k.runtimes or (("eager", "compiled", "graph") if gpu else ("eager",))))
    k.seq = tuple(dict.fromkeys(k.seq or (max(1, longest // 4), max(1, longest // 2), longest)))
    k.dtype = ("bfloat16" if gpu else "float32") if k.dtype == "auto" else k.dtype
    if max(k.seq) > shape.block_size:
        raise BadInput(f"seq={max(k.seq)} is longer than the model's block_size={shape.block_size}")
    if not gpu and "graph" in k.runtimes:
        raise BadInput("CUDA graphs need a GPU; on a CPU there are eager and compiled")
    if k.out is not None and not (k.out.endswith(".json") and Path(k.out).resolve().parent.is_dir()):
        raise BadInput(f"out={k.out} must be a .json file in a folder that exists")
    return device


def main(argv: list[str]):
    k, explicit, words = parse(Bench, argv, usage="python bench.py [PATH] [--key=value ...]   PATH: a run folder or a model file")
    if len(words) > 1:
        raise BadInput(f"one PATH at a time, not {' '.join(words)}")
    knobs = {f.name: getattr(k, f.name) for f in fields(ModelKnobs)}
    if words and explicit & knobs.keys():
        raise BadInput(f"{words[0]} has its own shape: leave out --{min(explicit & knobs.keys())}, or the path")
    run = read_run(Path(words[0])) if words else {}
    shape = next(iter(run.values())).config if run else ModelConfig(**{**knobs, "vocab_size": k.vocab_size or 10_000})
    device = resolve(k, shape)
    models = build(k.variants, shape, run, device, getattr(torch, k.dtype), k.seed)
    unit = "kernels" if device.type == "cuda" else "operators"
    what = {"prefill": "batch x seq / time, last-token logits, no KV cache", "decode": "batch / time, one token, KV cache of seq"}[k.mode]
    size = sum(p.numel() for p in models[k.variants[0]].parameters()) / 1e6

    print(f"machine  {machine(device)}; torch {torch.__version__}; {k.dtype}")
    print(f"model    {words[0] if words else 'random weights'}: {size:.2f} M parameters, n_layer {shape.n_layer}, n_embd {shape.n_embd}")
    print(f"measure  {k.mode}: tok/s = {what}; medians of {k.iters} interleaved rounds after {k.warmup}")
    print(f"floor    the matrix products and attention calls alone; {unit}: of one forward")
    if device.type == "cpu" and "compiled" not in k.runtimes:
        print("compiled not timed; --runtimes=eager,compiled adds it (needs a C++ compiler and minutes: each shape is compiled)")

    figures, differences = [], {}
    for runtime in k.runtimes:
        shapes = itertools.product(k.batch, k.seq)
        rows = (measure(models, shape, k, batch, seq, runtime, device, differences) for batch, seq in shapes)
        figures += print_runtime(runtime, rows, [*models, FLOOR], unit)
    print("\nlogits agree; largest difference over largest logit: " + ", ".join(f"{pair} {e:.0e}" for pair, e in differences.items()))
    spread = float(np.median([(r["ms_q3"] - r["ms_q1"]) / r["ms"] for r in figures]))
    if spread > 0.1:
        print(f"noisy: half of a cell's times typically lie {spread:.0%} of their median apart; is something else running?")
    report = dict(
        settings={n: v for n, v in asdict(k).items() if n not in knobs}, path=words[0] if words else None, model=asdict(shape),
        machine=machine(device), torch=torch.__version__, cuda=torch.version.cuda, python=platform.python_version(),
        work=unit, differences=differences, rows=figures)  # fmt: skip
    if k.out:
        with atomic_write(k.out, "w") as f:
            f.write(json.dumps(report) + "\n")
    print(json.dumps(report))


if __name__ == "__main__":
    keep_freed_memory()
    with one_line_errors(ModelError, torch.OutOfMemoryError):
        main(sys.argv[1:])
