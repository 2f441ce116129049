"""An attention sink as constants: a token that the network itself puts in front of every text.

What attention makes of it depends on nothing but the weights, as nothing stands before it. It keeps its norms
while the others taper; when they are gone its keys and values stay, as two tensors, and no norm is left.

Shapes: B batch, T time, D width, K key/value heads, C head_dim; keys and values of the sink are (K, 1, C) in
each layer.
"""

import copy
from functools import partial

import torch

from nanonorm.scale import Tracker


class Kept:
    """Called as a layer's cache is, with the keys and values of one token: keeps them."""

    def __call__(self, k, v, rows):
        self.k, self.v = k[0].clone(), v[0].clone()  # torch warns of views that leave a shard
        return k, v


def behind(k_sink, v_sink, k, v, rows):
    """The same for text: k and v (B, K, T, C) behind the sink's, (B, K, 1 + T, C) each."""
    pairs = (k_sink, k), (v_sink, v)
    return tuple(torch.cat((of.to(t.dtype).expand(len(t), -1, -1, -1), t), 2) for of, t in pairs)


def pass_alone(blocks, trackers: list[Tracker], x, rope) -> tuple[torch.Tensor, list[tuple]]:
    """(the stream behind them, [(keys, values) in each of `blocks`]) of one token, with the norms that tapers
    have taken, whatever their gates; no tracker sees it. x: (1, 1, D); rope: of its position."""
    found = []
    for t in trackers:
        t.apart = True
    try:
        for block in blocks:
            x, *pair = block.alone(x, rope)
            found.append(tuple(pair))
    finally:
        for t in trackers:
            t.apart = False
    return x, found


class Alone:
    """What a model.Block does with the sink."""

    def alone(self, x, rope):
        """(its output, keys, values) of one token; x: (1, 1, D), rope: the rotary table of its position.
        All are outputs, so that a sharded block is gathered whichever brings the first gradient."""
        kept = Kept()
        return self.forward(x, rope, kept), kept.k, kept.v


class Sunk:
    """What a model.Transformer does with the token of `sink_token`."""

    def sink(self) -> list[tuple]:
        """[(keys, values) of the sink in each layer]; without one []. Where norms are gone they are stored,
        else they are computed, and their gradient goes through every matrix, and through the gains of norms
        as long as these train: in phase "scale" a tapered one's `weight` stays what it was (FakeLN's one gain
        trains on), so that the sink goes on without a jump. What computes them is for one thread at a time,
        what has them stored for many."""
        if self.config.sink_token is None:
            return []
        if self.config.form != "trained":
            return list(zip(self.sink_k, self.sink_v, strict=True))
        return pass_alone(self.blocks, list(self.trackers().values()), *self.sink_begins())[1]

    def sink_begins(self):
        """(the sink's stream before the first block (1, 1, D), its rotary table or None)"""
        ids = torch.full((1, 1), self.config.sink_token, device=self.tok_emb.weight.device)
        return self.embed(ids, slice(0, 1)), None if self.rope is None else self.rope[:, :1]

    def kv_calls(self, cache) -> list:
        """What each layer calls with the keys and values of a text: the cache's update, what puts the sink's
        in front of them, or None."""
        layers = range(len(self.blocks))
        if cache is not None:
            return [partial(cache.update, i) for i in layers]
        return [partial(behind, *pair) for pair in self.sink()] or [None for _ in layers]


@torch.no_grad()
def exact_sink(model, dtype: torch.dtype) -> list[tuple]:
    """model.sink(), computed in `dtype` a block at a time, without dropout."""
    if model.config.sink_token is None or model.config.form != "trained":
        return [(k.to(dtype), v.to(dtype)) for k, v in model.sink()]
    model, found = copy.copy(model), []
    model.training = False  # of the copy alone: an embedding without dropout
    x, rope = model.sink_begins()
    x = x.to(dtype)
    for block in model.blocks:
        block = copy.deepcopy(block).to(dtype).eval()
        x, pairs = pass_alone([block], [m for m in block.modules() if isinstance(m, Tracker)], x, rope)
        found += pairs
    return found


@torch.no_grad()
def store_sink(model, new):
    """Give `new`, `model` in another form, the sink of `model` as buffers (n_layer, K, 1, C)."""
    c, weight = model.config, model.blocks[0].attn.qkv.weight
    if c.sink_token is None:
        return
    found = [weight.new_empty(2, c.n_kv_head, 1, c.head_dim)] * c.n_layer
    if not weight.is_meta:  # else another rank has the values, or a file
        found = exact_sink(model, torch.float64)
    keys, values = zip(*found, strict=True)
    new.register_buffer("sink_k", torch.stack(keys).to(weight.dtype))
    new.register_buffer("sink_v", torch.stack(values).to(weight.dtype))


def text_calls(model, dtype: torch.dtype) -> list:
    """What kv_calls(None) gives, for the blocks of `model` cast to `dtype`."""
    return [partial(behind, *pair) for pair in exact_sink(model, dtype)] or [None for _ in model.blocks]
