"""Windows of the token files as tensors.

A window of training is a function of (seed, step, its number in the step) and nothing else. So a resumed run
sees what an uninterrupted one does, however a step is split into micro-batches and over ranks, and no rank
needs to ask another what to read.

tokens: 1-D int16 or int32 tensor, memory-mapped or on the device, whose bits are the unsigned ids of a .bin
file.
"""

import numpy as np
import torch


def sent(t, device):
    """A tensor on a device. From the host to a GPU it goes by page-locked memory, so nothing waits for it;
    torch gives no such memory out again before the copy is over. To the host it waits: whoever read it at
    once would read what was there before."""
    if torch.device(device).type == "cpu":
        return t.to(device)
    return (t.pin_memory() if t.is_cpu else t).to(device, non_blocking=True)


def windows(tokens, starts, length: int, device):
    """(inputs, targets), each (len(starts), length) int64, of the windows at `starts` (numpy int64)."""
    at = sent(torch.from_numpy(starts), tokens.device)[:, None]
    unsigned = (1 << 8 * tokens.element_size()) - 1
    ids = sent(tokens[at + torch.arange(length + 1, device=tokens.device)], device).long() & unsigned
    return ids[:, :-1], ids[:, 1:]


def spread_starts(length: int, window: int, tokens: int, stride: int = 1) -> np.ndarray:
    """Where windows begin that hold `tokens` of a text of `length`, at least one of them, from all of it: at
    multiples of `stride`."""
    count = max(1, min(tokens, length - 1) // window)
    return np.linspace(0, (length - 1 - window) // stride, count).astype(np.int64) * stride


def starts_of(n_tokens: int, cfg, step: int, windows: range, stride: int = 1) -> np.ndarray:
    """Where the windows of these numbers in optimizer step `step` start, int64, drawn cfg.draw_size at a
    time, at multiples of `stride`."""
    size, high = cfg.draw_size or cfg.batch_size, -(-(n_tokens - cfg.longest_text) // stride)
    draws = range(windows.start // size, (windows.stop - 1) // size + 1)
    drawn = [np.random.default_rng((cfg.seed, step, draw)).integers(high, size=size) for draw in draws]
    first = windows.start - draws.start * size
    return np.concatenate(drawn)[first : first + len(windows)] * stride


def train_batch(tokens, cfg, step: int, indices, device, cut: int | None = None):
    """The micro-batches of these indices (over all ranks) of optimizer step `step`. cut: tokens of a window
    of a corpus that is cut into windows (data/windows.py); None: a window begins anywhere.

    Returns: (inputs, targets), each (len(indices), batch_size, T = longest_text) int64.
    """
    B, n_tokens = cfg.batch_size, len(tokens)
    starts = [starts_of(n_tokens, cfg, step, range(i * B, (i + 1) * B), cut or 1) for i in indices]
    batch = windows(tokens, np.concatenate(starts), cfg.longest_text, device)
    return tuple(t.unflatten(0, (-1, B)) for t in batch)


def few_windows(tokens, config):
    """The first windows, on which two networks are compared: (inputs, targets), each (n, T) int64, at most
    2,048 tokens and four windows of 512. With learned positions T is the whole context of `config`, a
    ModelConfig: the two may differ in any row of their table."""
    T = config.longest_text if config.positions == "learned" else min(512, config.longest_text)
    T = min(T, len(tokens) - 1)
    count = min(4, max(1, 2048 // T), (len(tokens) - 1) // T)
    return windows(tokens, np.arange(count) * T, T, "cpu")


SHARE = 0.25  # of a GPU's free memory, which a corpus may take; the rest is for activations


def on_device(device, *splits: np.ndarray, to_come: int = 0) -> list[torch.Tensor]:
    """The splits as tensors: on a GPU if they take at most SHARE of what is free beside `to_come` bytes more,
    else memory-mapped. To be called when the model and its optimizer are there."""
    tensors = [torch.from_numpy(split) for split in splits]
    n_bytes = sum(t.nbytes for t in tensors)
    if device.type == "cuda" and n_bytes <= SHARE * (torch.cuda.mem_get_info(device)[0] - to_come):
        return [t.to(device) for t in tensors]
    return tensors
