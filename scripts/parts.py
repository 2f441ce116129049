"""What a training step is made of: the loss and the attention against their alternatives, and each variant's
whole step against the baseline's, interleaved in one process.

    python scripts/parts.py                              # on this CPU
    python scripts/parts.py --n_embd=64,512 --iters=20

Each round runs every alternative once; a ratio is the median over rounds of (first / alternative), with its quartiles:
above 1 the alternative is faster.
"""

import sys
import time
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
import torch.nn as nn
import torch.nn.functional as F

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from config import Count, one_line_errors, parse
from model import ModelConfig, Transformer, attend


@dataclass
class Parts:
    """What is timed."""

    n_embd: tuple[Count, ...] = (64, 128, 256, 512)  # widths of the head's input
    vocab_size: Count = 10_000  # token ids
    tokens: Count = 4096  # of a batch, for the loss
    head_dim: tuple[Count, ...] = (4, 8, 16, 32)  # head sizes, for attention: 2 x 16 heads
    block_size: Count = 512  # tokens of a window, for attention
    batch_size: Count = 8  # windows of 256 tokens, for a step of the demo's model (4 layers of width 64)
    iters: Count = 9  # timed rounds, after one to warm up


def rounds(steps: dict, iters: int) -> dict[str, np.ndarray]:
    """{name: (iters,) ms}, one call of each a round."""
    times = {name: [] for name in steps}
    for _ in range(1 + iters):
        for name, step in steps.items():
            begin = time.perf_counter()
            step()
            times[name].append((time.perf_counter() - begin) * 1e3)
    return {name: np.array(t[1:]) for name, t in times.items()}


def loss_steps(tokens: int, width: int, vocab: int) -> dict:
    """Forward and backward of the head and the loss, float32 inputs and gradients."""
    y, W = torch.randn(tokens, width, requires_grad=True), (0.02 * torch.randn(vocab, width)).requires_grad_()
    targets = torch.randint(vocab, (tokens,))

    def plain(low=False):
        with torch.autocast("cpu", torch.bfloat16, enabled=low):
            logits = F.linear(y, W)
        F.cross_entropy(logits.float(), targets).backward()

    def chunked(size):
        options = nn.LinearCrossEntropyOptions(batch_chunk_size=size)
        F.linear_cross_entropy(y, W, targets, options=options).backward()

    steps = {"plain": plain, "plain, bfloat16 logits": lambda: plain(True)}
    if hasattr(nn, "LinearCrossEntropyOptions"):
        steps |= {f"chunks of {size or 'auto'}": lambda size=size: chunked(size) for size in (None, 256, 1024)}
    return steps


def attention_steps(block_size: int, head_dim: int) -> dict:
    """Forward and backward of causal attention, 2 x 16 heads, float32."""
    q, k, v = (torch.randn(2, 16, block_size, head_dim, requires_grad=True) for _ in range(3))
    return {
        "plain": lambda: F.scaled_dot_product_attention(q, k, v, is_causal=True).sum().backward(),
        "attend": lambda: attend(q, k, v).sum().backward(),
    }


def variant_steps(batch_size: int) -> dict:
    """{name: a whole optimizer step} of the demo's model: forward, backward, statistics, clip, AdamW."""
    idx = torch.randint(2048, (batch_size, 256))

    def make(phase="norm", **knobs):
        torch.manual_seed(0)
        model = Transformer(ModelConfig(vocab_size=2048, block_size=256, n_layer=4, n_head=4, n_embd=64, **knobs)).train()
        optimizer = torch.optim.AdamW(model.parameters(), lr=0.0, fused=True)  # the weights stay: all rounds do the same work
        if phase != "norm":
            model(idx, idx)
            model.update_statistics()
            model.calibrate()
            model.set_phase(phase)
            model.gate.fill_(0.5 if phase == "blend" else 0.0)

        def step():
            model(idx, idx).total.backward()
            model.update_statistics()
            torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            optimizer.zero_grad(set_to_none=True)

        return step

    taper = {"taper": "internal", "aux_weight": 0.1}
    steps = {"baseline": make(), "baseline again": make()}
    steps |= {f"taper, {phase}": make(phase, **taper) for phase in ("norm", "blend", "scale")}
    return steps | {norm: make(norm=norm) for norm in ("coupled", "layernorm", "cbwc", "dyt", "derf")}


def table(title: str, cases: dict, iters: int):
    """cases: {label: steps}; prints a row each."""
    print(f"\n{title}\n")
    for i, (label, steps) in enumerate(cases.items()):
        if not i:
            print(f"| | {' | '.join(steps)} |\n|---|{'---:|' * len(steps)}")
        times = rounds(steps, iters)
        cells = []
        for name, t in times.items():
            first = next(iter(times))
            low, middle, high = np.percentile(times[first] / t, (25, 50, 75))
            cells.append(f"{np.median(t):.1f} ms" + (f", {middle:.3f}x {low:.3f}-{high:.3f}" if name != first else ""))
        print(f"| {label} | {' | '.join(cells)} |", flush=True)


def main():
    k, _, _ = parse(Parts, sys.argv[1:], usage=__doc__)
    torch.manual_seed(0)
    print(f"torch {torch.__version__}, {torch.get_num_threads()} threads, medians of {k.iters} rounds")
    losses = {f"n_embd {d}": loss_steps(k.tokens, d, k.vocab_size) for d in k.n_embd}
    table(f"head and loss, {k.tokens} tokens, vocabulary {k.vocab_size}", losses, k.iters)
    heads = {f"head_dim {c}": attention_steps(k.block_size, c) for c in k.head_dim}
    table(f"attention, 2 x 16 heads, {k.block_size} tokens", heads, k.iters)
    table("training step", {f"{k.batch_size} x 256": variant_steps(k.batch_size)}, k.iters)


if __name__ == "__main__":
    with one_line_errors():
        main()
