"""Windows of the token files as tensors.

A window of training is a function of (seed, step, its number in the step) and nothing else. So a resumed run
sees what an uninterrupted one does, however a step is split into micro-batches and over ranks, and no rank
needs to ask another what to read.

tokens: 1-D int16 or int32 tensor, memory-mapped or on the device, whose bits are the unsigned ids of a .bin
file.
"""

import numpy as np
import torch


def windows(tokens, starts, length: int, device):
    """(inputs, targets), each (len(starts), length) int64, of the windows at `starts` (numpy int64)."""
    at = torch.from_numpy(starts).to(tokens.device)[:, None] + torch.arange(length + 1, device=tokens.device)
    unsigned = (1 << 8 * tokens.element_size()) - 1
    ids = tokens[at].to(device, non_blocking=True).long() & unsigned
    return ids[:, :-1], ids[:, 1:]


def starts_of(n_tokens: int, cfg, step: int, windows: range, apart: int = 1) -> np.ndarray:
    """Where the windows of these numbers in optimizer step `step` start, int64, drawn cfg.draw_size at a
    time, at multiples of `apart`."""
    size, high = cfg.draw_size or cfg.batch_size, -(-(n_tokens - cfg.block_size) // apart)
    draws = range(windows.start // size, (windows.stop - 1) // size + 1)
    drawn = [np.random.default_rng((cfg.seed, step, draw)).integers(high, size=size) for draw in draws]
    first = windows.start - draws.start * size
    return np.concatenate(drawn)[first : first + len(windows)] * apart


def train_batch(tokens, cfg, step: int, index: int, device, cut: int | None = None):
    """Micro-batch `index` (over all ranks) of optimizer step `step`. cut: tokens of a window of a corpus that
    is cut into windows (data/windows.py); None: a window begins anywhere.

    Returns: (inputs, targets), each (batch_size, block_size) int64.
    """
    numbers = range(index * cfg.batch_size, (index + 1) * cfg.batch_size)
    return windows(tokens, starts_of(len(tokens), cfg, step, numbers, cut or 1), cfg.block_size, device)


def few_windows(tokens, config):
    """The first windows, on which two networks are compared: (inputs, targets), each (n, T) int64, at most
    2,048 tokens and four windows of 512. With learned positions T is the whole context of `config`, a
    ModelConfig: the two may differ in any row of their table."""
    T = config.block_size if config.positions == "learned" else min(512, config.block_size)
    T = min(T, len(tokens) - 1)
    count = min(4, max(1, 2048 // T), (len(tokens) - 1) // T)
    return windows(tokens, np.arange(count) * T, T, "cpu")


def on_device(device, *splits: np.ndarray) -> list[torch.Tensor]:
    """The splits as tensors: on a GPU if they take under a quarter of what is free, else memory-mapped."""
    tensors = [torch.from_numpy(split) for split in splits]
    n_bytes = sum(t.numel() * t.element_size() for t in tensors)
    if device.type == "cuda" and n_bytes < 0.25 * torch.cuda.mem_get_info(device)[0]:
        return [t.to(device) for t in tensors]
    return tensors
