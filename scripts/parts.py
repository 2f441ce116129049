"""What a training step is made of: the loss and the attention against their alternatives, and each variant's
whole step against the baseline's, interleaved in one process.

    python scripts/parts.py                                          # on this CPU
    python scripts/parts.py --what=step --dtype=bfloat16 --n_embd=256 --n_layer=8 --n_head=16 --vocab_size=10000 --block_size=512

Each round runs every alternative once; a ratio is the median over rounds of (first / alternative), with its quartiles:
above 1 the alternative is faster.
"""

import random
import sys
import time
from contextlib import nullcontext
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Literal

import numpy as np
import torch
import torch.nn as nn
import torch.nn.functional as F
from torch.utils.checkpoint import checkpoint

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from config import Count, keep_freed_memory, one_line_errors, parse
from model import ModelConfig, ModelError, Transformer, attend


@dataclass
class Parts:
    """What is timed. The shape of the step is the demo's."""

    what: tuple[Literal["loss", "attention", "step"], ...] = ("loss", "attention", "step")  # tables
    tokens: Count = 4096  # of a batch, for the loss
    loss_embd: tuple[Count, ...] = (64, 128, 256, 512)  # widths of the head's input
    loss_vocab: Count = 10_000  # its token ids
    head_dim: tuple[Count, ...] = (4, 8, 16, 32)  # head sizes, for attention
    heads: Count = 128  # windows times heads, for attention
    window: Count = 512  # tokens of a window, for attention
    n_embd: tuple[Count, ...] = (64,)  # widths, for the step
    n_layer: Count = 4  # blocks
    n_head: Count = 4  # attention heads
    vocab_size: Count = 2048  # token ids
    block_size: Count = 256  # tokens of a window
    batch_size: Count = 8  # windows
    dtype: Literal["float32", "bfloat16"] = "float32"  # of autocast in the step
    compiled: bool = False  # the step through torch.compile (half a minute a variant first)
    keep: bool = True  # keep freed memory, as train.py does
    iters: Count = 9  # timed rounds, after one to warm up


def rounds(steps: dict, iters: int) -> dict[str, np.ndarray]:
    """{name: (iters,) ms}, one call of each a round, in a new order each time."""
    times, order = {name: [] for name in steps}, random.Random(0)
    for _ in range(1 + iters):
        for name in order.sample(list(steps), len(steps)):
            begin = time.perf_counter()
            steps[name]()
            times[name].append((time.perf_counter() - begin) * 1e3)
    return {name: np.array(t[1:]) for name, t in times.items()}


def loss_steps(tokens: int, width: int, vocab: int) -> dict:
    """Forward and backward of the head and the loss, float32 inputs and gradients."""
    y, W = torch.randn(tokens, width, requires_grad=True), (0.02 * torch.randn(vocab, width)).requires_grad_()
    targets = torch.randint(vocab, (tokens,))

    def total(y, targets, low):
        with torch.autocast("cpu", torch.bfloat16, enabled=low):
            logits = F.linear(y, W)
        return F.cross_entropy(logits.float(), targets, reduction="sum")

    def twice(low, size=512):
        chunks = zip(y.split(size), targets.split(size), strict=True)
        sum(checkpoint(total, *chunk, low, use_reentrant=False, preserve_rng_state=False) for chunk in chunks).backward()

    def chunked(size, dtype=torch.float32):
        options = nn.LinearCrossEntropyOptions(batch_chunk_size=size, acc_policy="balanced" if size else "auto")
        F.linear_cross_entropy(y.to(dtype), W.to(dtype), targets, options=options).backward()

    steps = {}
    for low, name in (False, "float32"), (True, "bfloat16"):
        steps[f"plain, {name}"] = partial(lambda low: total(y, targets, low).backward(), low)
        steps[f"chunks of 512 twice, {name}"] = partial(twice, low)
        if hasattr(nn, "LinearCrossEntropyOptions"):
            for size in (None, 256, 512, 1024):
                steps[f"library's chunks of {size or 'auto'}, {name}"] = partial(chunked, size, getattr(torch, name))
    return steps


def attention_steps(heads: int, window: int, head_dim: int) -> dict:
    """Forward and backward of causal attention."""
    plain, steps = partial(F.scaled_dot_product_attention, is_causal=True), {}
    for name, dtype in ("float32", torch.float32), ("bfloat16", torch.bfloat16):
        qkv = [torch.randn(1, window, heads, head_dim).to(dtype).transpose(1, 2).requires_grad_() for _ in range(3)]
        for how, kernel in ("plain", plain), ("attend", attend):
            steps[f"{how}, {name}"] = partial(lambda kernel, qkv: kernel(*qkv).sum().backward(), kernel, qkv)
    return steps


def training_step(model, tokens, batch_size: int, autocast, forward=None, lr: float = 0.0):
    """train.py's optimizer step of one micro-batch, as a function: gather windows, forward, backward, statistics, clip, AdamW.

    tokens: 1-D int16; forward: what is called in place of `model` (compiled, say). At lr 0 the weights stay, so that all rounds
    do the same work.
    """
    T = model.config.block_size
    optimizer, forward = torch.optim.AdamW(model.parameters(), lr=lr, fused=True), model if forward is None else forward
    rng, params, totals = np.random.default_rng(0), list(model.parameters()), torch.zeros(3, dtype=torch.float64)

    def step():
        starts = torch.from_numpy(rng.integers(len(tokens) - T, size=batch_size))
        ids = tokens[starts[:, None] + torch.arange(T + 1)].long() & 0xFFFF
        with autocast:
            losses = forward(ids[:, :-1], ids[:, 1:])
        losses.total.backward()
        totals.add_(torch.stack((losses.ce, losses.aux, torch.ones_like(losses.ce))).double())
        model.update_statistics()
        used = [p for p in params if p.grad is not None]
        total_norm = torch.nn.utils.get_total_norm([p.grad for p in used])
        torch.nn.utils.clip_grads_with_norm_(used, 1.0, total_norm)
        optimizer.found_inf = (~torch.isfinite(total_norm)).float()
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)

    return step


def variant_steps(k: Parts, width: int) -> dict:
    """{name: a whole optimizer step} of the model with that width."""
    tokens = torch.randint(k.vocab_size, (1_000_000,)).to(torch.int16)
    autocast = torch.autocast("cpu", torch.bfloat16) if k.dtype == "bfloat16" else nullcontext()

    def make(phase="norm", **knobs):
        torch.manual_seed(0)
        model = Transformer(ModelConfig(k.vocab_size, k.block_size, k.n_layer, k.n_head, n_embd=width, **knobs)).train()
        if phase != "norm":
            model(tokens[None, : k.block_size].long(), tokens[None, : k.block_size].long())
            model.update_statistics()
            model.calibrate()
            model.set_phase(phase)
            model.gate.fill_(0.5 if phase == "blend" else 0.0)
        return training_step(model, tokens, k.batch_size, autocast, torch.compile(model) if k.compiled else model)

    torch._dynamo.config.recompile_limit = 64  # dynamo counts the variants as recompilations of one forward, and gives up after 8

    taper = {"taper": "internal", "aux_weight": 0.1}
    steps = {"baseline": make(), "baseline again": make()}
    steps |= {f"taper, {phase}": make(phase, **taper) for phase in ("norm", "blend", "scale")}
    return steps | {norm: make(norm=norm) for norm in ("coupled", "layernorm", "cbwc", "dyt", "derf")}


def table(title: str, cases: dict, iters: int):
    """cases: {label: () that makes the steps}; prints a row for each step."""
    for label, make in cases.items():
        times = rounds(make(), iters)
        first = next(iter(times))
        print(f"\n| {title}, {label} | ms | {first} / this, quartiles |\n|---|---:|---:|")
        for name, t in times.items():
            low, middle, high = np.percentile(times[first] / t, (25, 50, 75))
            print(f"| {name} | {np.median(t):.1f} | {'1' if name == first else f'{middle:.3f}x {low:.3f}-{high:.3f}'} |", flush=True)


def main():
    k, _, _ = parse(Parts, sys.argv[1:], usage=__doc__)
    if k.keep:
        keep_freed_memory()
    torch.manual_seed(0)
    print(f"torch {torch.__version__}, {torch.get_num_threads()} threads, medians of {k.iters} rounds; freed memory kept: {k.keep}")
    if "loss" in k.what:
        cases = {f"n_embd {d}": lambda d=d: loss_steps(k.tokens, d, k.loss_vocab) for d in k.loss_embd}
        table(f"head and loss, {k.tokens} tokens, vocabulary {k.loss_vocab}", cases, k.iters)
    if "attention" in k.what:
        cases = {f"head_dim {c}": lambda c=c: attention_steps(k.heads, k.window, c) for c in k.head_dim}
        table(f"attention, {k.heads} heads, {k.window} tokens", cases, k.iters)
    if "step" in k.what:
        cases = {f"n_embd {d}": lambda d=d: variant_steps(k, d) for d in k.n_embd}
        shape = f"{k.batch_size} x {k.block_size} tokens, n_layer {k.n_layer}, n_head {k.n_head}, {k.dtype}"
        table(f"training step{', compiled' if k.compiled else ''}, {shape}", cases, k.iters)


if __name__ == "__main__":
    with one_line_errors(ModelError):
        main()
