"""Why model.py computes its loss and its attention as it does: the alternatives, interleaved in one process.

    python scripts/parts.py                              # forward and backward, on this CPU
    python scripts/parts.py --n_embd=64,512 --iters=20

Each round runs every alternative once; a ratio is the median over rounds of (plain / alternative), with its quartiles.
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
from model import attend


@dataclass
class Parts:
    """What is timed."""

    n_embd: tuple[Count, ...] = (64, 128, 256, 512)  # widths of the head's input
    vocab_size: Count = 10_000  # token ids
    tokens: Count = 4096  # of a batch, for the loss
    head_dim: tuple[Count, ...] = (4, 8, 16, 32)  # head sizes, for attention: 2 x 16 heads
    block_size: Count = 512  # tokens of a window, for attention
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


def table(title: str, cases: dict, iters: int):
    """cases: {label: steps}; prints a row each."""
    print(f"\n{title}\n")
    for i, (label, steps) in enumerate(cases.items()):
        if not i:
            print(f"| | {' | '.join(steps)} |\n|---|{'---:|' * len(steps)}")
        times = rounds(steps, iters)
        cells = []
        for name, t in times.items():
            low, middle, high = np.percentile(times["plain"] / t, (25, 50, 75))
            cells.append(f"{np.median(t):.1f} ms" + (f", {middle:.2f}x {low:.2f}-{high:.2f}" if name != "plain" else ""))
        print(f"| {label} | {' | '.join(cells)} |", flush=True)


def main():
    k, _, _ = parse(Parts, sys.argv[1:], usage=__doc__)
    torch.manual_seed(0)
    print(f"torch {torch.__version__}, {torch.get_num_threads()} threads, medians of {k.iters} rounds")
    losses = {f"n_embd {d}": loss_steps(k.tokens, d, k.vocab_size) for d in k.n_embd}
    table(f"head and loss, {k.tokens} tokens, vocabulary {k.vocab_size}", losses, k.iters)
    heads = {f"head_dim {c}": attention_steps(k.block_size, c) for c in k.head_dim}
    table(f"attention, 2 x 16 heads, {k.block_size} tokens", heads, k.iters)


if __name__ == "__main__":
    with one_line_errors():
        main()
