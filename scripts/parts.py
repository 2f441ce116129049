"""What a training step is made of: the loss and the attention against their alternatives, and each variant's
whole step against the baseline's, interleaved in one process.

    python scripts/parts.py                                          # on this CPU
    python scripts/parts.py --what=step --dtype=bfloat16 --n_embd=256 --n_layer=8 --n_head=16 --vocab_size=10000 --block_size=512

Each round runs every alternative once; a ratio is the median over rounds of (first / alternative), with its quartiles:
above 1 the alternative is faster. A peak is the most that the alternative's tensors hold at once.
"""

import itertools
import sys
from contextlib import nullcontext
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Literal

import numpy as np
import torch
import torch.nn as nn
import torch.nn.functional as F

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from config import BadInput, Count, keep_freed_memory, one_line_errors, parse
from data.sampling import windows
from model import ModelConfig, ModelError, Transformer, attend, head_loss
from scripts.turns import rounds, tensor_peak


@dataclass
class Parts:
    """What is timed. The shape of the step is the demo's."""

    what: tuple[Literal["loss", "attention", "step"], ...] = ("loss", "attention", "step")  # tables
    tokens: Count = 4096  # of a batch, for the loss
    loss_embd: tuple[Count, ...] = (64, 128, 256, 512)  # widths of the head's input
    loss_vocab: Count = 10_000  # its token ids
    head_dim: tuple[Count, ...] = (4, 8, 16, 32)  # head sizes, for attention
    heads: Count = 128  # windows times heads, for attention
    window: tuple[Count, ...] = (512,)  # tokens of a window, for attention
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


def loss_steps(tokens: int, width: int, vocab: int) -> dict:
    """Forward and backward of the head and the loss: float32 inputs and gradients, logits in the type named."""
    y, W = torch.randn(1, tokens, width, requires_grad=True), (0.02 * torch.randn(vocab, width)).requires_grad_()
    targets = torch.randint(vocab, (1, tokens))

    def plain():
        return F.cross_entropy(F.linear(y, W).float().flatten(0, 1), targets.flatten())

    def library(dtype, **options):
        options = nn.LinearCrossEntropyOptions(**options)
        return F.linear_cross_entropy(y[0].to(dtype), W.to(dtype), targets[0], options=options)

    def step(loss, low):
        with torch.autocast("cpu", torch.bfloat16, enabled=low):
            value = loss()
        value.backward()
        y.grad = W.grad = None

    steps = {}
    for dtype in (torch.float32, torch.bfloat16):
        low, name = dtype == torch.bfloat16, str(dtype).removeprefix("torch.")
        steps[f"plain, {name}"] = partial(step, plain, low)
        steps[f"head_loss, {name}"] = partial(step, partial(head_loss, y, W, None, targets), low)
        if hasattr(nn, "LinearCrossEntropyOptions"):
            steps[f"library's own chunks, {name}"] = partial(step, partial(library, dtype), False)
            for size in (256, 512, 1024):
                steps[f"library's chunks of {size}, {name}"] = partial(step, partial(library, dtype, batch_chunk_size=size), False)
    return steps


def attention_steps(heads: int, window: int, head_dim: int) -> dict:
    """Forward and backward of causal attention."""
    plain, padded, steps = partial(F.scaled_dot_product_attention, is_causal=True), max(head_dim, 16), {}

    def pad(q, k, v):
        q, k, v = (F.pad(t, (0, padded - head_dim)) for t in (q, k, v))
        return F.scaled_dot_product_attention(q, k, v, is_causal=True, scale=head_dim**-0.5)[..., :head_dim]

    for name, dtype in ("float32", torch.float32), ("bfloat16", torch.bfloat16):
        qkv = [torch.randn(1, window, heads, head_dim).to(dtype).transpose(1, 2).requires_grad_() for _ in range(3)]
        kernels = {"plain": plain} | ({"padded to 16": pad} if padded > head_dim else {}) | {"attend": attend}
        for how, kernel in kernels.items():
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
        batch = windows(tokens, rng.integers(len(tokens) - T, size=batch_size), T, "cpu")
        with autocast:
            losses = forward(*batch)
        losses.total.backward()
        totals.add_(torch.stack((losses.ce, losses.aux, torch.ones_like(losses.ce))).double())
        model.update_statistics()
        used = [p for p in params if p.grad is not None]
        total_norm = torch.nn.utils.get_total_norm([p.grad for p in used])
        torch.nn.utils.clip_grads_with_norm_(used, 1.0, total_norm)
        optimizer.found_inf = (~(torch.isfinite(total_norm) & torch.isfinite(totals).all())).float()
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


def table(title: str, steps: dict, iters: int, memory: bool = False):
    """Print a row for each step; `memory`: the most its tensors hold at once as well."""
    times, first = rounds(steps, iters), next(iter(steps))
    print(f"\n| {title} | ms | {first} / this, quartiles |{' peak, MB |' * memory}\n|---|---:|---:|{'---:|' * memory}")
    for name, t in times.items():
        low, middle, high = np.percentile(times[first] / t, (25, 50, 75))
        ratio = "1" if name == first else f"{middle:.3f}x {low:.3f}-{high:.3f}"
        peak = f" {tensor_peak(steps[name]) / 1e6:.0f} |" if memory else ""
        print(f"| {name} | {np.median(t):.1f} | {ratio} |{peak}", flush=True)


def main():
    k, _, words = parse(Parts, sys.argv[1:], usage=__doc__)
    if words:
        raise BadInput(f"{words[0]}: there is nothing to name here but --key=value")
    if k.keep:
        keep_freed_memory()
    torch.manual_seed(0)
    print(f"torch {torch.__version__}, {torch.get_num_threads()} threads, medians of {k.iters} rounds; freed memory kept: {k.keep}")
    for d in k.loss_embd if "loss" in k.what else ():
        title = f"head and loss, {k.tokens} tokens, vocabulary {k.loss_vocab}, n_embd {d}"
        table(title, loss_steps(k.tokens, d, k.loss_vocab), k.iters, memory=True)
    for C, T in itertools.product(k.head_dim, k.window) if "attention" in k.what else ():
        table(f"attention, {k.heads} heads, {T} tokens, head_dim {C}", attention_steps(k.heads, T, C), k.iters)
    for d in k.n_embd if "step" in k.what else ():
        shape = f"{k.batch_size} x {k.block_size} tokens, n_layer {k.n_layer}, n_head {k.n_head}, {k.dtype}, n_embd {d}"
        table(f"training step{', compiled' if k.compiled else ''}, {shape}", variant_steps(k, d), k.iters)


if __name__ == "__main__":
    with one_line_errors(ModelError):
        main()
