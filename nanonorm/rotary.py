"""Llama 3's scaling of rotary frequencies. Shapes: C = head_dim."""

import math

import torch

ROTARY_ANGLES = "1/base**(2i/C)"  # how model.py rounds them; before: base**(-2i/C), one rounding away


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
