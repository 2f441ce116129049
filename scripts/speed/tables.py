"""What the tables of speed share: the shape of the networks, and a table of steps.

Steps take turns (nanonorm/timing.py): whatever the machine does meanwhile falls on all. So a ratio of two
times of the same round is worth having; a millisecond alone is not.
"""

import random
from dataclasses import dataclass

import numpy as np
import torch

from model import ModelConfig
from nanonorm.tables import markdown
from nanonorm.timing import ratio, tensor_peak, time_rounds
from nanonorm.typed import Count


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
