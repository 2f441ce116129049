"""Text from a model: the cache of keys and values, the loop over new tokens, and the draw of each.

`model` is a model.Transformer. Shapes: B batch, T time, K key/value heads, C = head_dim, V vocabulary.
"""

import math

import torch

from nanonorm.errors import ModelError
from nanonorm.kernels import upcast


class KVCache:
    """Keys and values of the tokens seen so far, preallocated. k and v hold one (B, K, length, C) a layer;
    `pos` (0-dim) counts the tokens. One tensor for all layers would be copied in each of them by the
    compiler, which cannot write into a slice."""

    def __init__(self, model, batch: int, length: int):
        c, w = model.config, model.tok_emb.weight
        shape = (batch, c.n_kv_head, length, c.head_dim)
        self.k = [torch.zeros(shape, device=w.device, dtype=w.dtype) for _ in range(c.n_layer)]
        self.v = [torch.zeros_like(k) for k in self.k]
        self.pos = torch.zeros((), dtype=torch.long, device=w.device)
        self.columns = torch.arange(length, device=w.device)

    def update(self, layer: int, k, v, rows):
        """Write k and v (B, K, T, C) at positions `rows` (T); returns the layer's (B, K, length, C)."""
        return self.k[layer].index_copy_(2, rows, k), self.v[layer].index_copy_(2, rows, v)


@torch.inference_mode()
def generate(
    model, idx, max_new_tokens: int, temperature=1.0, top_k: int | None = None, top_p=1.0,
    seed: int | None = None, stop_id: int | tuple[int, ...] | None = None, use_cache=True, compile=False,
    vocab_size: int | None = None,
):  # fmt: skip
    """Continue idx (B, T >= 1). Temperature 0 is greedy. Returns (B, T + new), and ends early once
    every row has said stop_id, or one of several (rows that did before are padded with the first).
    `compile` makes the step from one token to the next a single graph, compiled once for each B and each
    128 tokens of cache; it needs the cache. No id from vocab_size on is drawn: a model may have more rows
    than its tokenizer has ids. Raises: ModelError for logits that are not finite.

    The context is the last block_size tokens; when full it drops to its newer half, with the cache or
    without.
    """
    was_training = model.training
    model.eval()
    size = model.config.block_size
    rng = None if seed is None else torch.Generator(idx.device).manual_seed(seed)
    done = torch.zeros(len(idx), 1, dtype=torch.bool, device=idx.device)
    finite = torch.zeros((), device=idx.device)
    stops = (stop_id,) if isinstance(stop_id, int) else tuple(stop_id or ())
    any_stop = torch.tensor(stops, dtype=torch.long, device=idx.device)
    start, cache, fresh = max(0, idx.shape[1] - size), None, True
    decode = compiled_decoding(model, idx.device) if compile else model
    for _ in range(max_new_tokens):
        if idx.shape[1] - start > size:
            start, fresh = idx.shape[1] - max(1, size // 2), True
        if not use_cache:
            logits = model(idx[:, start:], last_only=True)
        elif fresh:
            unseen = idx[:, start:]
            length = unseen.shape[1] + max_new_tokens
            length = 128 * math.ceil(length / 128) if compile else length
            cache, fresh = KVCache(model, len(idx), min(size, length)), False
            logits = model(unseen, cache=cache, last_only=True)
        else:
            logits = decode(unseen, cache=cache, last_only=True)
        finite = finite + logits.sum(dtype=torch.float32)  # nan or infinite once a logit was
        new = sample_token(logits[:, -1, :vocab_size], temperature, top_k, top_p, rng)
        if stops:
            new = new.masked_fill(done, stops[0])
            done |= torch.isin(new, any_stop)
        idx, unseen = torch.cat((idx, new), 1), new
        if stops and done.all():
            break
    model.train(was_training)
    if not finite.isfinite():
        why = "is this a checkpoint from before its taper's end?"
        raise ModelError(f"the logits are not finite, so there is nothing to sample; {why}")
    return idx


def compiled_decoding(model, device: torch.device):
    """`model` as one graph a call, for shapes that do not change."""
    torch._dynamo.config.recompile_limit = 256  # it counts other models and shapes too, and gives up after 8
    options = {"cpp_wrapper": True} if device.type == "cpu" else None  # on a CPU, C++ calls the kernels then
    return torch.compile(model, fullgraph=True, dynamic=False, options=options)


def sample_token(logits, temperature: float, top_k: int | None, top_p: float, rng):
    """Draw the next token of each row. (B, V) -> (B, 1)."""
    if temperature < 1e-6:  # divided by less, logits would overflow
        return logits.argmax(-1, keepdim=True)
    logits = (upcast(logits) / temperature).nan_to_num()  # to draw from; generate() refuses the rest
    if top_k is not None:
        kth = logits.topk(min(top_k, logits.shape[-1])).values[:, -1:]
        logits = logits.masked_fill(logits < kth, -math.inf)
    p, order = logits.softmax(-1).sort(descending=True, stable=True)
    p = p.masked_fill(p.cumsum(-1) - p >= top_p, 0)  # the smallest set whose mass reaches top_p; never empty
    return order.gather(1, torch.multinomial(p, 1, generator=rng))
