"""Windows of the token files as tensors. A training batch is a function of (seed, step, index of the micro-batch over all ranks),
of nothing else: so a resumed run sees what an uninterrupted one does, and so do two ranks.

tokens: 1-D int16 tensor, memory-mapped or on the device, whose bits are the uint16 of a .bin file.
"""

import numpy as np
import torch


def windows(tokens, starts, length: int, device):
    """(inputs, targets), each (len(starts), length), of the windows that begin at `starts` (numpy int64)."""
    at = torch.from_numpy(starts).to(tokens.device)[:, None] + torch.arange(length + 1, device=tokens.device)
    ids = tokens[at].to(device, non_blocking=True).long() & 0xFFFF  # the int16 hold uint16
    return ids[:, :-1], ids[:, 1:]


def train_batch(tokens, cfg, step: int, index: int, device):
    """Micro-batch `index` (over all ranks) of optimizer step `step`."""
    rng = np.random.default_rng((cfg.seed, step, index))
    return windows(tokens, rng.integers(len(tokens) - cfg.block_size, size=cfg.batch_size), cfg.block_size, device)
