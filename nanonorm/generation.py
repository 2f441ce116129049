"""Text from a model: the loop over new tokens, and the draw of each.

`model` is a model.Transformer. Shapes: B batch, T time, V vocabulary.
"""

import math

import torch

from nanonorm.errors import ModelError
from nanonorm.kernels import upcast


@torch.inference_mode()
def generate(
    model, prompts, max_new_tokens: int, temperature=1.0, top_k: int | None = None, top_p=1.0,
    seed: int | None = None, stop_id: int | tuple[int, ...] | None = None, use_cache=True, compile=False,
    vocab_size: int | None = None,
):  # fmt: skip
    """Continue prompts: ids (B, T >= 1), or a list of B rows of ids of any lengths. Temperature 0 is greedy.
    Returns (B, T + new); of a list, a list of rows. Ends early once every row has said stop_id, or one of
    several (rows that did before are padded with the first). `compile` makes the step from one token to the
    next a single graph, compiled once for each B and each 128 tokens of cache, with padding and without; it
    needs the cache. No id from vocab_size on is drawn: a model may have more rows than its tokenizer has ids.
    Raises: ModelError for logits that are not finite, a prompt without ids, compile without a cache, a
    top_k or top_p that leaves no token, and a temperature below 0.

    A row's context is its last block_size tokens, less one where a sink stands in front; when full it drops
    to its newer half (of one token: to its last), with the cache or without. Shorter rows are padded on the
    left, where nobody looks: each gets what it would get alone. `seed` is of all rows together: a row is
    drawn otherwise beside others.
    """
    if compile and not use_cache:
        raise ModelError("compile=True needs the cache; leave use_cache=False out")
    if not top_p > 0 or (top_k is not None and top_k < 1):  # nan is refused, too
        raise ModelError(f"top_k={top_k}, top_p={top_p} leave no token to draw; at least 1, and above 0")
    if not temperature >= 0:
        raise ModelError(f"temperature={temperature}: 0 takes the likeliest token, and more draws")
    size, device = model.config.longest_text, model.tok_emb.weight.device
    idx, padding = aligned(prompts, device)
    starts = [max(pad, idx.shape[1] - size) for pad in padding]  # the column where each row's context begins
    rng = None if seed is None else torch.Generator(device).manual_seed(seed)
    done = torch.zeros(len(idx), 1, dtype=torch.bool, device=device)
    finite = torch.zeros((), device=device)
    stops = (stop_id,) if isinstance(stop_id, int) else tuple(stop_id or ())
    any_stop = torch.tensor(stops, dtype=torch.long, device=device)
    decode = compiled_decoding(model, device) if compile else model
    was_training, cache, new, fresh = model.training, None, None, True
    model.eval()
    try:
        for _ in range(max_new_tokens):
            end = idx.shape[1]
            if any(end - start > size for start in starts):
                half = end - max(1, size // 2)
                starts, fresh = [half if end - start > size else start for start in starts], True
            if fresh:
                first = min(starts)
                pad = None
                if max(starts) > first:
                    pad = torch.tensor([start - first for start in starts], device=device)
            if fresh and use_cache:
                length = end - first + max_new_tokens
                length = 128 * math.ceil(length / 128) if compile else length
                cache = model.Cache(model, len(idx), min(size, length))
            whole = fresh or not use_cache
            # idx[:, -1:] would have other strides at every step, and be compiled anew
            unseen, network = (idx[:, first:], model) if whole else (new, decode)
            logits = network(unseen, cache=cache, last_only=True, pad=pad)
            fresh = False
            finite = finite + logits.sum(dtype=torch.float32)  # nan or infinite once a logit was
            new = sample_token(logits[:, -1, :vocab_size], temperature, top_k, top_p, rng)
            if stops:
                new = new.masked_fill(done, stops[0])
                done |= torch.isin(new, any_stop)
            idx = torch.cat((idx, new), 1)
            if stops and done.all():
                break
    finally:
        model.train(was_training)
    if not finite.isfinite():
        why = "is this a checkpoint from before its taper's end?"
        raise ModelError(f"the logits are not finite, so there is nothing to sample; {why}")
    return idx if torch.is_tensor(prompts) else [row[pad:] for row, pad in zip(idx, padding, strict=True)]


def aligned(prompts, device):
    """Rows of ids as one tensor, their right ends aligned: (B, T), and how many columns of each are padding.
    That is the row's first id: at position 0 and by itself, it is finite where the row is."""
    rows = [torch.as_tensor(row, dtype=torch.long, device=device) for row in prompts]
    if not rows or any(row.dim() != 1 or not len(row) for row in rows):
        raise ModelError("a prompt is a row of at least one id, and there must be at least one prompt")
    longest = max(map(len, rows))
    padding = [longest - len(row) for row in rows]
    padded = [torch.cat((row[:1].expand(pad), row)) for row, pad in zip(rows, padding, strict=True)]
    return torch.stack(padded), padding


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
