"""Keys and values of the tokens that a network has seen, and what stands before and behind padding.

`model` is a model.Transformer. Shapes: B batch, T time, K key/value heads, C head_dim.
"""

import torch

from nanonorm.errors import ModelError
from nanonorm.kernels import autocasts


class KVCache:
    """Keys and values of the tokens seen so far, preallocated. k and v hold one (B, K, length, C) a layer, in
    the type that attention reads; `pos` (0-dim) counts the tokens, and `empty` tells the host if that is
    0. One tensor for all layers would be copied in each by the compiler, which cannot write into a slice.

    A network with a sink has its keys and values in a column of their own before these, which `length` and
    `pos` do not count. Raises: ModelError for more tokens than a text may have.
    """

    def __init__(self, model, batch: int, length: int):
        c, w = model.config, model.tok_emb.weight
        if length > c.longest_text:
            longest = f"longer than this model's texts, {c.longest_text} at most"
            raise ModelError(f"a cache of {length} tokens is {longest}; make it shorter")
        shape, device = (batch, c.n_kv_head, c.ahead + length, c.head_dim), w.device
        dtype = torch.get_autocast_dtype(device.type) if autocasts(w) else w.dtype
        self.k = [torch.zeros(shape, device=device, dtype=dtype) for _ in range(c.n_layer)]
        self.v = [torch.zeros_like(k) for k in self.k]
        self.ahead = c.ahead
        with torch.no_grad():
            for layer, (k, v) in enumerate(model.sink()):
                self.k[layer][:, :, :1], self.v[layer][:, :, :1] = k, v
        self.pos = torch.zeros((), dtype=torch.long, device=device)
        self.columns, self.empty = torch.arange(shape[2], device=device), True

    def update(self, layer: int, k, v, rows):
        """Write k and v (B, K, T, C) in the columns `rows` (T); returns the layer's (B, K, length, C), or
        where it was empty what it holds now: attention is causal then, and needs no mask, which flash
        attention refuses."""
        if k.dtype != self.k[layer].dtype:  # of autocast
            k, v = k.to(self.k[layer].dtype), v.to(self.k[layer].dtype)
        seen = self.k[layer].index_copy_(2, rows, k), self.v[layer].index_copy_(2, rows, v)
        if self.empty and self.ahead:
            return tuple(t[:, :, : self.ahead + k.shape[2]] for t in seen)
        return (k, v) if self.empty else seen


def behind_padding(pad, rows, columns, ahead: int = 0):
    """(positions (B, T), which columns are seen (B, 1, T, S)) of the columns `rows` (T) of a text of which
    the first `pad` (B) are padding. Positions count from the first token behind it; padding sees itself, and
    all see the first `ahead` columns, behind which the padding stands."""
    rows, first = rows[:, None], pad[:, None, None] + ahead
    seen = (columns <= rows) & (columns >= first) | (columns == rows)
    seen = seen | (columns < ahead) if ahead else seen
    return (rows[:, 0] - pad[:, None]).clamp_min(ahead), seen.unsqueeze(1)
