"""The angles of rotary position embeddings (Su et al., arXiv 2104.09864), with Llama 3's scaling.

Shapes: C = head_dim; a table has block_size rows.
"""

import math
from functools import partial

import torch

ROTARY_ANGLES = "1/base**(2i/C)"  # before: base**(-2i/C), one rounding away


def rope_tables(c, device) -> torch.Tensor | None:
    """float32 rotary tables (2, block_size, 1, C): [0] cos, [1] sin with the half-split rotation's sign.

    c: a ModelConfig. Rounded as Hugging Face rounds them. None for learned positions.
    """
    if c.positions != "rope":
        return None
    numbers = partial(torch.arange, device=device, dtype=torch.float32)
    frequency = 1.0 / c.rope_base ** (numbers(0, c.head_dim, 2) / c.head_dim)  # radians a token
    if c.rope_scaling is not None:
        frequency = llama3_frequencies(frequency, *c.rope_scaling)
    angle = torch.outer(numbers(c.block_size), frequency)  # (block_size, C/2)
    cos, sin = angle.cos(), angle.sin()
    return torch.stack((torch.cat((cos, cos), -1), torch.cat((-sin, sin), -1))).unsqueeze(2)


def llama3_frequencies(frequency, factor: float, low: float, high: float, original: float):
    """Slow rotations divided by `factor`, fast ones as they are, and between a blend of both. (C/2)

    Slow turns fewer than `low` times in the `original` length, fast more than `high` times (Llama 3.1).
    """
    wavelength = 2 * math.pi / frequency
    kept = (original / wavelength - low) / (high - low)
    blend = (1 - kept) * frequency / factor + kept * frequency
    slowed = torch.where(wavelength > original / low, frequency / factor, blend)
    return torch.where(wavelength < original / high, frequency, slowed)


def is_llama3_scaling(rope_scaling: tuple) -> bool:
    """True if these can be Llama 3's (factor, low, high, original length)."""
    return len(rope_scaling) == 4 and rope_scaling[1] < rope_scaling[2]
