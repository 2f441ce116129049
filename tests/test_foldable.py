"""nanonorm.foldable and its command: a fold is right to 1e-9 in float64 on random values, or refused."""

import copy
import itertools
import math
import pickle
import re
import subprocess
import sys

import pytest
import torch
import torch.nn as nn
import torch.nn.functional as F
from conftest import ROOT, adamw_losses, refuses, same_state, scale_of_difference, slow, state_of
from hypothesis import assume, given, settings
from hypothesis import strategies as st
from running import refused, train
from torch.nn.utils import parametrizations, parametrize

from nanonorm.foldable import apply_report, center, find, fold, fold_errors
from nanonorm.foldable.graph import tensors_in
from nanonorm.foldable.search import FoldReport
from scripts.foldables.zoo import Tokens, randomize

D, T, V = 8, 5, 11
torch.manual_seed(0)  # the networks below
IDS = torch.tensor([[0, 3, 1, 4, 10], [2, 7, 1, 8, 2]])
X = torch.randn(2, T, D, generator=torch.Generator().manual_seed(1))


def norms_left(model) -> int:
    return sum(isinstance(m, nn.LayerNorm | nn.GroupNorm) for m in model.modules())


def difference(a, b) -> float:
    return max(scale_of_difference(x, y) for x, y in zip(tensors_in(a), tensors_in(b), strict=True))


def other_input(x, seed: int):
    if x.is_floating_point():
        return x.double() + seed
    return x.flip(1) if seed else x


def check(model, inputs, folded: int, ops: int = 0, **options):
    """The verdict is `folded` LayerNorms with `ops` operations, and that fold is right on random values."""
    model = randomize(model).eval()
    before = state_of(model)
    new, report = fold(model, inputs, **options)
    assert (report.folded, len(report.ops)) == (folded, ops), report
    assert same_state(before, state_of(model)) and norms_left(new) == norms_left(model) - folded
    assert report.certified and report.errors.keys() >= {"given", "random"}
    args = inputs if isinstance(inputs, tuple) else (inputs,)
    for seed in (0, 1) if folded else ():  # what is left alone needs no comparison
        twin = randomize(copy.deepcopy(model).double(), seed + 5)
        data = tuple(other_input(a, seed) for a in args)
        with torch.no_grad():
            want = twin(*data)
            got = fold(twin, data, **options)[0](*data)
            assert difference(got, want) < 1e-9
            plain = copy.deepcopy(twin)  # the comparison can fail: RMSNorms alone give something else
            apply_report(plain, FoldReport([], replace=report.replace))
            assert difference(plain(*data), want) > 1e-3
    return report


class Net(nn.Module):
    """A table, layers, LayerNorms, a fused matrix, a gain and a head; `net` wires them."""

    def __init__(self):
        super().__init__()
        self.table, self.pos = nn.Embedding(V, D), nn.Parameter(torch.randn(T, D))
        self.lin, self.lin2 = nn.Linear(D, D), nn.Linear(D, D)
        self.ln, self.ln2 = nn.LayerNorm(D), nn.LayerNorm(D)
        self.q, self.g, self.head = nn.Linear(D, 3 * D), nn.Parameter(torch.randn(D)), nn.Linear(D, V)


def net(forward, **modules):
    """An instance of Net with this forward and these modules."""
    model = type("Wired", (Net,), {"forward": forward})()
    for name, module in modules.items():
        setattr(model, name, module)
    return model


def row(forward, inputs=X, folded=1, **modules):
    """A network, its inputs, and how many LayerNorms fold."""
    return net(forward, **modules), inputs, folded


# --- what folds


def block(s, h):
    h = h + s.lin(F.gelu(s.ln(h)))
    return s.head(s.ln2(h))


class Twice(nn.Module):
    def forward(self, w):
        return 2 * w


class Single(nn.Module):
    def forward(self, x):
        if x.dtype != torch.float32:
            raise TypeError("single only")
        return x.clone()


class NormPlusOne(nn.LayerNorm):
    def forward(self, x):
        return F.layer_norm(x, self.normalized_shape, self.weight + 1, self.bias, self.eps)


class NormWithLimit(nn.LayerNorm):
    def forward(self, x):
        return super().forward(x).clamp(-30, 30)


class NormThatDrops(nn.LayerNorm):
    def forward(self, x):
        return F.dropout(super().forward(x), 0.1, self.training)


class NormByHand(nn.LayerNorm):
    def forward(self, x):
        y = torch.subtract(x, x.mean(-1, keepdim=True).expand_as(x))
        v = torch.var(x, -1, keepdim=True, unbiased=False)
        return torch.divide(y, torch.sqrt(v + self.eps)) * self.weight + self.bias


class NormOfAConstant(NormByHand):
    def forward(self, x):
        y = x - x.mean(-1, keepdim=True)
        v = y.square().mean(-1, keepdim=True).detach()
        return y / torch.sqrt(v + self.eps) * self.weight + self.bias


ONE, DOUBLING, READING, NARROW = nn.Linear(D, D), nn.LayerNorm(D), nn.LayerNorm(D), nn.LayerNorm(4)
DOUBLING.register_forward_pre_hook(lambda module, args, kw: ((2 * args[0],), kw), with_kwargs=True)
READING.register_forward_hook(lambda module, args, out: out + args[0])
PICTURE = torch.randn(2, 3, 4, 4)
FOLDS = {
    "linear": row(lambda s, x: s.ln(s.lin(x))),
    "no bias": row(lambda s, x: s.ln(s.lin(x)), lin=nn.Linear(D, D, bias=False)),
    "layernorm without gain": row(lambda s, x: s.ln(s.lin(x)), ln=nn.LayerNorm(D, elementwise_affine=False)),
    "layernorm without shift": row(lambda s, x: s.ln(s.lin(x)), ln=nn.LayerNorm(D, bias=False)),
    "pre-norm block": row(lambda s, i: block(s, s.table(i) + s.pos), IDS, folded=2),
    "scaled and subtracted": row(lambda s, x: s.ln(-s.lin(x) * 0.3 - 2 * s.lin2(x) / 7)),
    "scaled by a token's own number": row(lambda s, x: s.ln(s.lin(x) * x[..., :1].sigmoid())),
    "transposed weight": row(lambda s, x: s.ln(x @ s.lin.weight.t() + s.lin.bias)),
    "addmm": row(lambda s, x: s.ln(torch.addmm(s.lin.bias, x.view(-1, D), s.lin2.weight).view(x.shape))),
    "einsum-free bmm": row(lambda s, x: s.ln(torch.bmm(x, s.lin.weight.expand(2, D, D)))),
    "attention mix": row(lambda s, x: s.ln((x @ x.mT).softmax(-1) @ s.lin(x))),
    "sdpa": row(lambda s, x: s.ln(F.scaled_dot_product_attention(x, x, s.lin(x)))),
    "a class token and padding": row(
        lambda s, x: s.ln(F.pad(torch.cat([s.pos[:1].expand(2, 1, D), s.lin(x)], 1), (0, 0, 0, 2)))),
    "two norms on one layer": row(lambda s, x: s.ln(s.lin(x)) + s.ln2(s.lin(x)), folded=2),
    "one layer called twice": row(lambda s, x: s.ln(s.lin(F.gelu(s.ln2(s.lin(x))))), folded=2),
    "one norm called twice": row(lambda s, x: s.ln(s.lin2(F.gelu(s.ln(s.lin(x)))))),
    "mean over tokens": row(lambda s, x: s.ln(s.lin(x).mean(1))),
    "token selected": row(
        lambda s, x: s.ln(s.lin(x)[:, 0]) + s.ln2(s.lin(x)[torch.arange(2), torch.tensor([1, 2])]), folded=2),
    "split over tokens": row(
        lambda s, x: s.ln(s.lin(x).split([2, 3], 1)[1]) + s.ln2(s.lin2(x).unbind(1)[0])[:, None], folded=2),
    "rolled windows": row(lambda s, x: s.ln(s.lin(x).roll(1, 1).view(1, 2 * T, D).permute(1, 0, 2))),
    "masked with zero": row(lambda s, x: s.ln(s.lin(x).masked_fill(x[..., :1] > 0, 0.0) + s.lin2(x))),
    "conv1d": row(lambda s, x: s.ln(s.c(x.mT).mT), c=nn.Conv1d(D, D, 3, padding=1)),
    "conv2d patches": row(lambda s, x: s.ln(s.c(x).flatten(2).mT), PICTURE, c=nn.Conv2d(3, D, 2, 2)),
    "conv3d": row(lambda s, x: s.ln(s.c(x).flatten(2).mT), torch.randn(2, 2, 3, 3, 3), c=nn.Conv3d(2, D, 2)),
    "conv transpose": row(lambda s, x: s.ln(s.c(x).flatten(2).mT), PICTURE, c=nn.ConvTranspose2d(3, D, 2, 2)),
    "conv transpose 1d": row(lambda s, x: s.ln(s.c(x.mT).mT), c=nn.ConvTranspose1d(D, D, 3)),
    "per-head norm": row(lambda s, x: s.n(s.lin(x).view(2, T, 2, 4).transpose(1, 2)), n=NARROW),
    "every second channel": row(lambda s, x: s.n(s.lin(x).view(2, T, 4, 2).mT), n=NARROW),
    "group norm": row(lambda s, x: s.n(s.lin(x).flatten(0, 1)), n=nn.GroupNorm(2, D)),
    "group norm behind a grouped convolution": row(lambda s, x: s.n(s.c(x.mT).mean(-1)), n=nn.GroupNorm(4, D),
        c=nn.Conv1d(D, D, 3, groups=2)),
    "layer scale of its own": row(lambda s, x: s.ln(s.lin2(F.gelu(x)) + s.g * s.lin(x))),
    "layer scale behind a convolution": row(lambda s, x: s.ln((s.g * s.c(x.mT)).mT),
        g=nn.Parameter(torch.randn(D, 1)), c=nn.Conv1d(D, D, 1)),
    "in place": row(lambda s, x: s.ln(s.lin(x).add_(s.lin2(x)).mul_(0.5))),
    "a gainless norm hands on its zero mean": row(lambda s, x: s.ln2(s.ln(s.lin(x)) + s.lin2(x)),
        ln=nn.LayerNorm(D, elementwise_affine=False), folded=2),
    "einsum": row(lambda s, x: s.ln(torch.einsum("btd,ed->ebt", x, s.lin.weight).permute(1, 2, 0))),
    "einsum over heads": row(
        lambda s, x: s.ln(torch.einsum("hbtk,hkd->btd", x.view(2, T, 2, 4).movedim(2, 0), s.heads)),
        heads=nn.Parameter(torch.randn(2, 4, D))),
    "a sliced weight": row(lambda s, x: s.ln(F.linear(x, s.wide.weight[:, :D])), wide=nn.Linear(3 * D, D)),
    "a weight with a low-rank term": row(lambda s, x: s.ln(F.linear(x, s.lin.weight + s.pos.mT @ s.low)),
        low=nn.Parameter(torch.randn(T, D))),
    "a table read as a matrix": row(lambda s, i: s.ln(F.one_hot(i, V).to(s.pos.dtype) @ s.table.weight), IDS),
    "a table indexed": row(lambda s, i: s.ln(s.table.weight[i]), IDS),
    "a padding row": row(lambda s, i: s.ln(s.e(i)), IDS, e=nn.Embedding(V, D, padding_idx=2)),
    "a doubled weight": row(lambda s, x: s.ln(s.w(x)),
        w=parametrize.register_parametrization(nn.Linear(D, D), "weight", Twice())),
    "one of two streams": row(lambda s, x: s.ln(torch.where(x[..., :1] > 0, s.lin(x), s.lin2(x)))),
    "a hook on the norm": row(lambda s, x: s.ln(s.lin(x)), ln=DOUBLING),
    "an unused second reader": row(lambda s, x: (lambda h: (h.exp(), s.ln(h))[1])(s.lin(x))),
    "one layer of two names": row(lambda s, x: s.ln2(s.again(F.gelu(s.ln(s.lin(x))))), folded=2, lin=ONE,
        again=ONE),
    "a large eps": row(lambda s, x: s.ln(s.lin(x)), ln=nn.LayerNorm(D, eps=0.3)),
    "LSTM with norms inside": row(lambda s, x: lstm(s, x), lin=nn.Linear(D, 4 * D), lin2=nn.Linear(D, 4 * D),
        ln=nn.LayerNorm(4 * D), ln2=nn.LayerNorm(4 * D), folded=2),
    "a saved buffer": row(lambda s, x: s.ln(s.lin(x) + s.b), b=nn.Buffer(torch.randn(T, D))),
    "a fused matrix cut in three": row(
        lambda s, x: (lambda q, k, v: s.ln(q) + s.ln2(k) * v)(*s.q(x).chunk(3, -1)), folded=2),
    "a fused matrix that is no module": row(
        lambda s, x: (lambda h: s.ln(h.narrow(2, D, D)) * h[..., :D])(x @ s.q.weight.T)),
    "rows of a weight": row(lambda s, x: s.ln(F.linear(x, s.q.weight[:D])) * F.linear(x, s.q.weight[D:]),
        q=nn.Linear(D, 2 * D)),
    "a part of the channels": row(lambda s, x: (lambda h: s.n(h[..., :4]) * h[..., 4:])(s.lin(x)), n=NARROW),
    "a gain that is stored minus 1": row(lambda s, x: s.ln(s.lin(x)), ln=NormPlusOne(D)),
    "a norm written by hand": row(lambda s, x: s.ln(s.lin(x)), ln=NormByHand(D)),
}  # fmt: skip


def lstm(s, x):
    """Gates from LN(W x) + LN(U h): the cell is not linear in them, and its own state is not centred."""
    h = c = torch.zeros(len(x), D, dtype=x.dtype)
    for t in range(T):
        i, f, g, o = (s.ln(s.lin(x[:, t])) + s.ln2(s.lin2(h))).chunk(4, -1)
        c = f.sigmoid() * c + i.sigmoid() * g.tanh()
        h = o.sigmoid() * c.tanh()
    return h


@pytest.mark.parametrize("name", FOLDS)
def test_what_folds(name):
    model, inputs, folded = FOLDS[name]
    check(copy.deepcopy(model), inputs, folded)


# --- what must be refused: each of these would change the function


SEVERAL, NAMED = type("Several", (list,), {}), type("Named", (dict,), {})


class Slot:
    __slots__ = ("h",)

    def __init__(self, h):
        self.h = h


def deep(h):
    for _ in range(10):
        h = Slot(h)
    return h


REFUSED = {
    "an input": row(lambda s, x: s.ln(x)),
    "an activation": row(lambda s, x: s.ln(F.gelu(s.lin(x)))),
    "another norm": row(lambda s, x: s.ln2(x + s.ln(x))),
    "a second reader": row(lambda s, x: s.ln(s.lin(x)) + F.gelu(s.lin(x)) + s.head(s.lin2(x)).sum()),
    "a head on the stream": row(lambda s, x: (lambda h: (s.ln(h), s.head(h)))(s.lin(x))),
    "a returned stream": row(lambda s, x: (lambda h: (s.ln(h), h))(s.lin(x))),
    "a stream in a returned object": row(lambda s, x: (lambda h: {"y": s.ln(h), "all": [h * 2]})(s.lin(x))),
    "a stream in a list of one's own": row(lambda s, x: (lambda h: (s.ln(h), SEVERAL([h])))(s.lin(x))),
    "a stream in a dict of one's own": row(lambda s, x: (lambda h: (s.ln(h), NAMED(h=h)))(s.lin(x))),
    "a stream in slots": row(lambda s, x: (lambda h: (s.ln(h), Slot(h)))(s.lin(x))),
    "a stream ten objects deep": row(lambda s, x: (lambda h: (s.ln(h), deep(h)))(s.lin(x))),
    "a stream that a generator yields": row(lambda s, x: (lambda h: (s.ln(h), (t for t in [h])))(s.lin(x))),
    "a norm with a limit": row(lambda s, x: s.ln(s.lin(x)), ln=NormWithLimit(D)),
    "a norm without a gradient to its statistic": row(lambda s, x: s.ln(s.lin(x)), ln=NormOfAConstant(D)),
    "a norm with dropout": row(lambda s, x: s.ln(s.lin(x)), ln=NormThatDrops(D)),
    "a part of a detached stream": row(lambda s, x: (lambda h: (s.ln(h), h.detach()[:, :1]))(s.lin(x))),
    "a mean": row(lambda s, x: (lambda h: (s.ln(h), h.mean(-1)))(s.lin(x))),
    "a softmax over the tokens": row(lambda s, x: (lambda h: (s.ln(h), h.softmax(1)))(s.lin(x))),
    "divided by its own norm": row(lambda s, x: (lambda h: s.ln(h / h.norm(dim=-1, keepdim=True)))(s.lin(x))),
    "multiplied by its own mean": row(lambda s, x: (lambda h: s.ln(h * h.mean()))(s.lin(x))),
    "a matrix times itself": row(lambda s, x: s.ln(x @ (s.lin.weight @ s.lin.weight))),
    "einsum of two streams": row(lambda s, x: s.ln(torch.einsum("btd,btd->btd", s.lin(x), s.lin2(x)))),
    "parts of a fused matrix that overlap": row(
        lambda s, x: (lambda h: s.ln(h[..., :D]) + h[..., 4 : D + 4].exp())(s.q(x))),
    "queries that others read": row(lambda s, x: (lambda q, k, v: s.ln(q) + q * v)(*s.q(x).chunk(3, -1))),
    "a fused matrix that is read whole": row(lambda s, x: (lambda h: (s.ln(h[..., :D]), h.exp()))(s.q(x))),
    "a part across the heads": row(lambda s, x: s.n(s.lin(x)[..., 2:6]), n=NARROW),
    "every second row": row(lambda s, x: s.ln(F.linear(x, s.q.weight[::2])), q=nn.Linear(D, 2 * D)),
    "a table with a largest norm": row(lambda s, i: s.ln(s.e(i)), IDS, e=nn.Embedding(V, D, max_norm=1.0)),
    "a state kept in a buffer": row(lambda s, x: (lambda h: (s.b.copy_(h), s.ln(h))[1])(s.lin(x)),
        b=nn.Buffer(torch.zeros(2, T, D))),
    "a hook that reads the norm's input": row(lambda s, x: s.ln(s.lin(x)), ln=READING),
    "a gain that is computed": row(lambda s, x: s.ln(s.lin(x)),
        ln=parametrize.register_parametrization(nn.LayerNorm(D), "weight", Twice())),
    "spectral norm": row(lambda s, x: s.ln(s.w(x)), w=parametrizations.spectral_norm(nn.Linear(D, D))),
    "a batch norm": row(lambda s, x: s.ln(s.b(s.lin(x).mT).mT), b=nn.BatchNorm1d(D)),
    "a shared module with another reader": row(lambda s, x: s.ln(s.lin(x)) + F.relu(s.lin(x + 1))),
    "a tied head": row(lambda s, i: F.linear(s.ln(s.table(i)), s.table.weight), IDS),
    "something uniform added": row(lambda s, x: s.ln(s.lin(x) + 1.0) + s.ln2(s.lin2(x) + x[..., :1])),
    "a product of two streams": row(lambda s, x: s.ln(s.lin(x) * s.lin2(x))),
    "a square": row(lambda s, x: (lambda h: s.ln(h * h))(s.lin(x))),
    "a gain per channel from elsewhere": row(lambda s, x: s.ln(s.lin(x) * s.head.weight.mean(0))),
    "joined channels": row(lambda s, x: s.n(torch.cat([s.lin(x), s.lin2(x)], -1)), n=nn.LayerNorm(2 * D)),
    "depthwise convolution": row(lambda s, x: s.ln(s.c(x.mT).mT), c=nn.Conv1d(D, D, 3, padding=1, groups=D)),
    "a grouped convolution": row(lambda s, x: s.ln(s.c(x.mT).mT), c=nn.Conv1d(D, D, 3, padding=1, groups=2)),
    "groups that straddle a grouped convolution": row(lambda s, x: s.n(s.c(x.mT).mean(-1)),
        n=nn.GroupNorm(2, D), c=nn.Conv1d(D, D, 3, groups=4)),
    "grouped and transposed": row(lambda s, x: s.ln(s.c(x.mT).mT), c=nn.ConvTranspose1d(D, D, 3, groups=2)),
    "a norm over the tokens": row(lambda s, x: s.n(s.lin(x).mT), n=nn.LayerNorm(T)),
    "readers along two axes": row(lambda s, x: (lambda h: (s.ln(h), s.n(h.mT)))(s.lin(x)), n=nn.LayerNorm(T)),
    "a norm over tokens and channels": row(lambda s, x: s.n(s.lin(x)), n=nn.LayerNorm([T, D])),
    "a view that moves the channel": row(lambda s, x: s.ln(s.c(x.mT).reshape(2, D, D)), torch.randn(2, D, D),
        c=nn.Conv1d(D, D, 1)),
    "a write into the stream": row(lambda s, x: (lambda h: (h[..., :2].add_(1), s.ln(h))[1])(s.lin(x))),
    "a norm over space": row(lambda s, x: s.n(s.c(x)), PICTURE, n=nn.GroupNorm(2, D), c=nn.Conv2d(3, D, 1)),
    "a function, no module": row(lambda s, x: F.layer_norm(s.lin(x), (D,), s.ln.weight, s.ln.bias)),
    "its own gain": row(lambda s, x: F.layer_norm(s.pos, (D,), s.pos[0])),
    "an unsaved buffer": row(lambda s, x: s.ln(s.lin(x) + s.b),
        b=nn.Buffer(torch.randn(T, D), persistent=False)),
    "a gain read by others as well": row(lambda s, x: s.ln(s.lin2(F.gelu(x)) + s.g * s.lin(x)) + s.g),
    "a gain on two readers' stream": row(lambda s, x: (lambda h: s.ln(h * s.g) + F.relu(h))(s.lin(x))),
    "an LSTM": row(lambda s, x: s.ln(s.r(x)[0]), r=nn.LSTM(D, D, batch_first=True)),
    "a GRU": row(lambda s, x: s.ln(s.r(x)[0]), r=nn.GRU(D, D, batch_first=True)),
    "an RNN cell": row(lambda s, x: s.ln(s.r(x[:, 0])), r=nn.RNNCell(D, D)),
    "an Elman loop": row(lambda s, x: s.ln(s.lin(x[:, 0]) + s.lin2(torch.tanh(s.lin(x[:, 0]))))),
    "a maximum": row(lambda s, x: s.ln(s.lin(x).amax(1))),
    "weight norm": row(lambda s, x: s.ln(s.w(x)), w=parametrizations.weight_norm(nn.Linear(D, D))),
    "a single channel": row(lambda s, x: s.n(s.one(x)), n=nn.LayerNorm(1), one=nn.Linear(D, 1)),
    "a mask filled with one": row(lambda s, x: s.ln(s.lin(x).masked_fill(x[..., :1] > 0, 1.0))),
    "padding with one": row(lambda s, x: s.ln(F.pad(s.lin(x), (0, 0, 1, 0), value=1.0))),
}  # fmt: skip


@pytest.mark.parametrize("name", REFUSED)
def test_what_is_refused(name):
    model, inputs, _ = REFUSED[name]
    report = find(copy.deepcopy(model).eval(), inputs, op_cost=1e6)
    assert report.folded == 0 and report.norms and not report.centre
    reached = [n for n in report.norms if "not reached" not in n.reason]
    assert reached and all(n.reason and n.verdict.startswith("not: ") for n in reached)
    assert not any("\n" in n.verdict for n in reached)
    check(copy.deepcopy(model), inputs, 0, op_cost=1e6)  # and folding nothing changes nothing


# How queries, keys and values (2 heads of 4 each; or 3, 2 and 1 heads) are cut out of one matrix.
CUTS = {
    "chunk": lambda h: [x.unflatten(-1, (2, 4)) for x in h.chunk(3, -1)],
    "split": lambda h: [x.unflatten(-1, (-1, 4)) for x in h.split([12, 8, 4], -1)],
    "select": lambda h: [h.view(2, T, 2, 3, 4)[..., i, :] for i in range(3)],
    "unbind": lambda h: h.reshape(2, T, 3, 2, 4).permute(2, 0, 3, 1, 4).unbind(0),
}

READER = st.sampled_from(("norm", "both", "gelu", "none"))


@settings(max_examples=20)
@given(st.sampled_from(sorted(CUTS)), st.tuples(READER, READER, READER))
def test_parts_of_a_fused_matrix(cut, readers):
    """A norm of each head folds where nobody else reads its third, whatever reads the others."""

    def forward(s, x):
        out = x.sum()
        for part, reader, norm in zip(CUTS[cut](s.q(x)), readers, s.norms, strict=True):
            h = norm(part) if reader in ("norm", "both") else torch.zeros(1)
            out = out + h.square().sum() + (part.exp().sum() if reader in ("both", "gelu") else 0)
        return out

    norms = nn.ModuleList(nn.LayerNorm(4) for _ in range(3))
    model = randomize(net(forward, norms=norms)).double()
    new, report = fold(model, X.double())
    verdicts = {norm.name: norm.foldable for norm in report.norms if "not reached" not in norm.reason}
    assert verdicts == {f"norms.{i}": r == "norm" for i, r in enumerate(readers) if r in ("norm", "both")}
    assert difference(new(X.double()), model(X.double())) < 1e-12


def test_the_reason_names_the_node():
    alone = net(lambda s, x: s.n(s.c(x.mT)), n=nn.GroupNorm(D, D), c=nn.Conv1d(D, D, 1))  # a channel a group
    assert "normalises over space" in find(alone, X).norms[0].reason
    first, second = find(net(lambda s, x, y: s.ln(F.gelu(s.lin(x))) + s.ln2(y)), (X, X)).norms
    assert (first.name, first.dim, first.blocker) == ("ln", D, "gelu") and "comes out of gelu" in first.reason
    assert (second.name, second.blocker) == ("ln2", "input 1") and "input of the model" in second.reason
    # no operation is inserted on a tensor inside an argument
    inside = find(net(lambda s, d: block(s, d["h"])), ({"h": X},))
    assert inside.folded == 0 and "is an input of the model" in inside.norms[0].reason


# --- tied tables, inserted operations, dropout, choice of outputs


def test_a_tied_table_is_left_intact():
    """One operation behind the table, or on request a table of its own: the head never sees an edit."""
    model = net(lambda s, i: block(s, s.table(i) + s.pos), head=nn.Linear(D, V, bias=False))
    model.head.weight = model.table.weight
    report = check(model, IDS, 2, ops=1)
    assert "table.weight" not in report.centre and report.centre.keys() == {"pos", "lin.weight", "lin.bias"}
    assert str(report.ops[0]) == "output of table"
    assert report.norms[0].verdict == "foldable with 1 inserted centring operation"
    folded, _ = fold(model, IDS)
    assert folded.head.weight is folded.table.weight and torch.equal(folded.table.weight, model.table.weight)
    report = check(model, IDS, 2, ops=0, untie=True)
    folded, _ = fold(model, IDS, untie=True)
    assert report.untied == ["table.weight"] and torch.equal(folded.head.weight, model.head.weight)
    assert not torch.equal(folded.head.weight, folded.table.weight)
    assert model.head.weight is model.table.weight


def test_a_table_shared_with_something_that_did_not_run_is_not_edited():
    model = net(lambda s, i: s.ln(s.table(i)))
    model.head.weight = model.table.weight
    report = check(model, IDS, 0)
    assert "do not reach" in report.norms[0].reason


def residual(s, h):
    h = h + s.lin(F.gelu(s.ln(h)))
    return h + s.lin2(F.gelu(s.ln2(h)))


def test_an_operation_is_inserted_where_it_pays():
    """One for two LayerNorms yes, one for one no; its price decides."""
    two, one = net(lambda s, x: block(s, x)), net(lambda s, x: s.ln(x + s.lin(x)))
    check(two, X, 0, op_cost=2)
    check(one, X, 0)
    check(one, X, 1, ops=1, op_cost=0.5)


INSERTED = {
    "model input 0": row(lambda s, x: block(s, x), folded=2),
    # the stream starts in a function: no module makes it
    "input of layer": row(lambda s, x: s.ln(s.layer(F.gelu(s.lin(x)))), folded=3, layer=net(residual)),
    # as in BLOOM, a LayerNorm starts the stream
    "output of ln": row(lambda s, x: s.ln2(s.layer(s.ln(s.lin(x)))), folded=4, layer=net(residual)),
}


@pytest.mark.parametrize("place", INSERTED)
def test_where_an_operation_is_inserted(place):
    assert str(check(*INSERTED[place], ops=1).ops[0]) == place


@pytest.mark.parametrize(("inputs", "place"), [({"h": X.double()}, "h"), (X.double(), "0")])
def test_operations_at_inputs_given_by_name_or_position(inputs, place):
    model = randomize(net(lambda s, h=None: block(s, h))).eval().double()
    new, report = fold(model, inputs)
    assert report.folded == 2 and str(report.ops[0]) == f"model input {place}"
    assert difference(new(h=X.double()), model(h=X.double())) < 1e-12
    assert difference(new(X.double()), model(X.double())) < 1e-12


@pytest.mark.parametrize(
    ("answer", "item", "ops"),
    [(lambda h, x: {"h": h}, "h", 0), (lambda h, x: (x.sum(), h), 1, 0), (lambda h, x: (h, x.sum()), 0, 1)],
)
def test_operations_only_where_a_hook_gets_at_the_tensor(answer, item, ops):
    """Behind a module whose first tensor is not the one that others read there is none."""
    module = net(lambda s, x: answer(F.gelu(s.lin(x)), x))
    check(net(lambda s, x: block(s, s.m(x)[item]), m=module), X, 2 * ops, ops=ops)


def test_operations_survive_copying_and_pickling():
    model, ids = randomize(Tokens(True, 2)).double().eval(), torch.randint(61, (2, 9))
    new, report = fold(model, ids)
    assert len(report.ops) == 1
    for twin in (copy.deepcopy(new), pickle.loads(pickle.dumps(new))):  # noqa: S301
        assert difference(twin(ids), model(ids)) < 1e-12
    new.table._forward_hooks.clear()
    assert difference(new(ids), model(ids)) > 1e-3  # the operation was needed


def test_dropout_in_training_mode_is_refused_unless_told():
    model = randomize(net(lambda s, x: s.ln(s.drop(s.lin(x))), drop=nn.Dropout(0.5)))
    report = find(model.train(), X)
    assert report.folded == 0 and "dropout in training mode breaks the zero mean" in report.norms[0].reason
    assert find(model.train(), X, allow_dropout=True).folded == 1
    report = find(model.eval(), X)
    assert report.folded == 1 and report.dropout
    with refuses("dropout"):
        center(copy.deepcopy(model), report)
    center(copy.deepcopy(model), report, allow_dropout=True)
    # also where an operation in place hides it
    report = find(net(lambda s, x: s.ln(s.drop(s.lin(x)).mul_(2)), drop=nn.Dropout(0.5)).eval(), X)
    assert report.folded == 1 and report.dropout == ["dropout in drop"]
    for drop in (nn.Dropout(0.5, inplace=True), nn.Dropout1d(0.5), nn.AlphaDropout(0.5)):
        report = find(net(lambda s, x: s.ln(s.drop(s.lin(x))), drop=drop).eval(), X)
        assert report.folded == 1 and len(report.dropout) == 1, drop


def test_what_code_holds_of_a_parameter_is_not_edited():
    """A plain attribute, `tied = table.weight.detach()`, that an edit in place would change as well."""
    model = randomize(net(lambda s, i: F.linear(s.ln(s.table(i)), s.tied))).eval()
    model.tied = model.table.weight.detach()
    report = find(model, IDS)
    assert report.folded == 0 and "shares its memory with" in report.norms[0].reason


def test_parameters_that_share_their_memory_are_not_edited():
    """`head.weight.data = table.weight.data`: two parameters, one memory, which a copy would not show."""
    model = randomize(net(lambda s, i: s.head(s.ln(s.table(i))), head=nn.Linear(D, V, bias=False))).eval()
    model.head.weight.data = model.table.weight.data
    want = model(IDS)
    new, report = fold(model, IDS, inplace=True)
    assert report.folded == 0 and "shares its memory with head.weight" in report.norms[0].reason
    assert torch.equal(new(IDS), want)
    apart = torch.randn(2 * D, D)
    model = net(lambda s, x: s.ln(s.lin(x)))
    model.lin.weight.data, model.lin2.weight.data = apart[:D], apart[D:]
    assert find(model, X).folded == 1


def test_outputs_say_what_must_be_kept():
    model = net(lambda s, x: (lambda h: (s.ln(h), h))(s.lin(x)))
    assert find(model, X).folded == 0 and "returned by the model" in find(model, X).norms[0].reason
    new, report = fold(randomize(model).double(), X.double(), outputs=lambda out: out[0])
    assert report.folded == 1 and difference(new(X.double())[0], model(X.double())[0]) < 1e-12
    assert difference(new(X.double())[1], model(X.double())[1]) > 1e-3


def test_in_place_and_on_a_copy():
    model = randomize(net(lambda s, x: s.ln(s.lin(x)))).eval()
    want = model.double()(X.double())
    new, _ = fold(model, X.double(), inplace=True)
    assert new is model and norms_left(model) == 1 and difference(model(X.double()), want) < 1e-12


def test_find_works_on_the_meta_device_and_changes_nothing():
    with torch.device("meta"):
        model = Tokens(True, 2, tied=False)
        ids = torch.zeros(2, 9, dtype=torch.long)
    report = find(model.eval(), (ids,))
    assert report.folded == len(report.norms) == 5 and not report.ops
    with refuses("meta"):
        fold(model, (ids,))
    model = net(lambda s, x: s.ln(s.r(s.lin(x))[0]), r=nn.LSTM(D, D))
    before, want = state_of(model), model(X)
    find(model, X)
    assert same_state(before, state_of(model)) and torch.equal(model(X)[0], want[0])
    assert not nn.modules.module._has_any_global_hook()  # nothing of the capture stays in the process


def test_a_model_that_cannot_be_captured_or_run_again_is_one_line():
    with refuses("torch.export cannot capture"):
        find(net(lambda s, x: s.ln(x) if x.sum() > 0 else x), X)
    model = net(lambda s, x: s.ln(s.lin(x)))
    model.cache = model.lin(X)  # copy.deepcopy does not take it
    with refuses("cannot be proved"):
        fold(model, X)


# --- the proof, the printed algorithm


def test_a_wrong_plan_is_refused_and_the_model_untouched():
    """The proof does not trust the search: a layer with a second reader is put into the report by hand."""
    model = randomize(net(lambda s, x: s.ln(s.lin(x)) + F.gelu(s.lin2(x)))).eval()
    report = find(model, X)
    assert report.folded == 1
    report.centre["lin2.weight"] = report.centre["lin.weight"]
    before = state_of(model)
    with refuses("nothing was changed"):
        fold(model, X, inplace=True, report=report)
    assert same_state(before, state_of(model)) and norms_left(model) == 2


@pytest.mark.parametrize(
    ("forward", "size", "kind"),
    [
        # for one token, and only for one, this reshape is a transpose
        (lambda s, x: s.ln(s.c(x.mT).reshape(x.shape[0], -1, D)), (1, 1, D), "other length"),
        (lambda s, x: s.ln(s.lin(x) if x.shape[1] > 4 else F.gelu(s.lin(x))), (2, T, D), "other length"),
        (lambda s, x: s.ln(s.lin(x) if x.shape[0] > 1 else F.gelu(s.lin(x))), (2, T, D), "other batch"),
    ],
)
def test_a_fold_that_holds_for_the_examples_size_only_is_refused(forward, size, kind):
    model, x = net(forward, c=nn.Conv1d(D, D, 1)), torch.randn(size)
    assert find(model, x).folded == 1
    before = state_of(model)
    with refuses(f"({kind})"):
        fold(model, x, inplace=True)
    assert same_state(before, state_of(model))


def test_the_proof_looks_behind_fill_values_and_at_something():
    """A mask's 1e38 is no scale, and of outputs without a finite number nothing is proved."""
    wrong = FoldReport([], replace={"ln": (-1, D, 1, 1e-5)})
    model = net(lambda s, x: s.ln(s.lin(x)).masked_fill(x > 1, torch.finfo(torch.float32).min))
    with refuses("nothing was changed"):
        fold(model, X, report=wrong)
    with refuses("by inf"):
        fold(net(lambda s, x: s.ln(s.lin(x)) * math.nan), X)
    added = net(lambda s, x: s.ln(s.lin(x)) - 1e10 * torch.arange(D).eq(D - 1), lin=nn.Linear(D, D))
    with refuses("nothing was changed"):
        fold(randomize(added), X, report=wrong)
    right = net(lambda s, x: s.ln2(s.lin2(s.ln(s.lin(x)))) - 1e10 * torch.arange(D).eq(D - 1))
    assert fold(randomize(right), X)[1].certified
    with refuses("with a report untie is not read"):
        fold(right, X, report=wrong, untie=True)


def test_what_does_not_run_in_float64_is_proved_in_float32():
    """And the report says so; a wrong fold is refused there as well."""
    single = net(lambda s, x: s.ln(s.one(s.lin(x))), one=Single())
    new, report = fold(randomize(single), X)
    assert report.certified and report.folded == 1
    assert "error in float32, to 1e-04 (float64 fails: TypeError: single only)" in str(report)
    assert max(report.errors.values()) < 1e-5 and difference(new(X), single(X)) < 1e-5
    before = state_of(single)
    with refuses("nothing was changed"):
        fold(single, X, inplace=True, report=FoldReport([], replace=report.replace))
    assert same_state(before, state_of(single))


def test_initial_gains_cannot_hide_a_wrong_fold():
    """Post-norm with gains 1 and shifts 0: the printed algorithm's fold looks right, but not on "random"."""
    model = net(lambda s, x: s.ln2(s.ln(s.lin(x)) + s.lin2(s.ln(s.lin(x))))).eval()
    report = find(model, X, assume_centered_ln=True)
    assert report.folded == 2 and find(model, X).folded == 1
    errors = fold_errors(model, X, report)
    assert errors["given"] < 1e-9 and errors["random"] > 1e-2
    _, report = fold(model, X, assume_centered_ln=True)
    assert not report.certified


# --- training


def trained(model):
    def loss(step):
        logits = model(IDS.roll(step, 1))
        return logits.square().mean() + F.cross_entropy(logits.flatten(0, 1), torch.arange(IDS.numel()) % 5)

    return adamw_losses(loss, model, 40, lr=1e-2, weight_decay=0.1)


def fused_heads(s, i):
    q, k, v = s.q(s.table(i)).view(2, T, 2, 3, 4).unbind(3)
    return s.head((s.n(q) * s.n(k) + v).flatten(2))


# kind -> (forward, the modules that share a weight, LayerNorms that fold)
TRAINED = {
    "untied": (lambda s, i: block(s, s.table(i) + s.pos), None, 2),
    "tied": (lambda s, i: block(s, s.table(i) + s.pos), ("head", "table"), 2),
    "shared": (lambda s, i: s.head(s.ln2(s.lin2(F.gelu(s.ln(s.lin(s.table(i))))))), ("lin2", "lin"), 2),
    "by head": (lambda s, i: s.head(F.gelu(s.n(s.lin(s.table(i)).view(2, T, 2, 4))).flatten(2)), None, 1),
    "fused": (fused_heads, None, 1),
}  # fmt: skip


@pytest.mark.parametrize("kind", TRAINED)
def test_centred_training_is_layernorm_training(kind):
    """CBWC: the same losses over an AdamW run with weight decay, parameters uncentred all along."""
    forward, shared, folded = TRAINED[kind]
    model, layer = net(forward, n=nn.LayerNorm(4)), "q" if kind == "fused" else "lin"
    if shared:
        one, other = (getattr(model, name) for name in shared)
        one.weight = other.weight
    model = randomize(model).double()
    report = find(model, IDS)
    assert report.folded == folded
    other = center(copy.deepcopy(model), report)
    assert norms_left(other) == norms_left(model) - report.folded
    want, got = trained(model), trained(other)
    assert (want - got).abs().max() < 1e-9 and want[-1] < want[0] - 0.1
    centred = getattr(other, layer)
    assert centred.parametrizations.weight.original.mean(0).abs().max() > 1e-3
    assert centred.weight.mean(0).abs().max() < (1e-12 if folded == 2 else 1)


def test_what_another_network_would_train_is_refused():
    """A table of its own is no tied one, and a gain that a matrix takes in no gain."""
    tied = net(lambda s, i: block(s, s.table(i)), head=nn.Linear(D, V, bias=False))
    tied.head.weight = tied.table.weight
    with refuses("untie=False"):
        center(tied, find(tied, IDS, untie=True))
    scaled = net(lambda s, x: s.ln(s.lin2(F.gelu(x)) + s.g * s.lin(x)))
    with refuses("absorb=False"):
        center(copy.deepcopy(scaled), find(scaled, X))
    assert find(scaled, X, absorb=False).folded == 0


# --- random networks against brute force


class Random(nn.Module):
    """A DAG drawn step by step: (operator, operands, layer)."""

    def __init__(self, steps, returned):
        super().__init__()
        self.steps, self.returned = steps, returned
        self.layers = nn.ModuleList(nn.Linear(6, 6) for _ in range(4))
        self.norms = nn.ModuleList(nn.LayerNorm(6) for _ in range(len(steps)))
        self.head = nn.Linear(6, 3)

    def forward(self, x):
        values, read = [self.layers[0](x)], set()
        for number, (kind, a, b, layer) in enumerate(self.steps):
            a, b = a % len(values), b % len(values)
            read |= {a} | ({b} if kind == "add" else set())
            u, v = values[a], values[b]
            values.append({
                "add": lambda u=u, v=v: u + v, "act": lambda u=u: F.gelu(u),
                "scale": lambda u=u, k=layer: u * (0.71, 1.93, -1.37, -0.83)[k],
                "linear": lambda u=u, k=layer: self.layers[k](u),
                "norm": lambda u=u, n=number: self.norms[n](u),
            }[kind]())  # fmt: skip
        ends = [v for i, v in enumerate(values) if i not in read]
        return [self.head(v) for v in ends] + (ends[-1:] if self.returned else [])


KIND = st.sampled_from(("add", "add", "scale", "act", "linear", "linear", "norm", "norm"))
STEP = st.tuples(KIND, st.integers(0, 9), st.integers(0, 9), st.integers(0, 3))


def brute_force(model, x, norm: str) -> bool:
    """Is there any set of layers to centre with which this LayerNorm can be RMSNorm and no output changes?"""
    want = model(x)
    report = FoldReport([], replace={norm: (-1, 6, 1, 1e-5)})
    for size in range(5):
        for chosen in itertools.combinations(range(4), size):
            twin = copy.deepcopy(model)
            apply_report(twin, report)
            with torch.no_grad():
                for k in chosen:
                    twin.layers[k].weight -= twin.layers[k].weight.mean(0)
                    twin.layers[k].bias -= twin.layers[k].bias.mean()
            if difference(twin(x), want) < 1e-9:
                return True
    return False


@pytest.mark.parametrize("count, most", [(15, 8), slow(600, 12)])
def test_random_networks_agree_with_brute_force(count, most):
    @settings(max_examples=count)
    @given(st.lists(STEP, min_size=2, max_size=most), st.booleans())
    def every_one(steps, returned):
        assume(any(kind == "norm" for kind, *_ in steps))
        model = randomize(Random(steps, returned).double(), seed=len(steps)).eval()
        x = torch.randn(3, 6, dtype=torch.float64, generator=torch.Generator().manual_seed(2))
        report = find(model, x, op_cost=1e6)
        with torch.no_grad():
            for norm in report.norms:
                if "not reached" not in norm.reason:
                    assert norm.foldable == brute_force(model, x, norm.name), (norm, steps, returned)
            new, _ = fold(model, x, report=report)
            assert difference(new(x), model(x)) < 1e-9

    every_one()


# --- the command


def test_the_command_prints_its_table(capsys):
    torch.set_num_threads(2)
    train("torch-prenorm", "torch-postnorm", "--layers=2", "--list", program="scripts/foldable.py")
    out = capsys.readouterr().out
    assert f"torch {torch.__version__}, 1 threads" in out and torch.get_num_threads() == 1
    assert "| torch-prenorm |  | 5/5 + 1 op |" in out
    assert "| torch-postnorm |  | 3/4 |" in out and "0/4" in out
    assert "encoder.norm (32): foldable with 1 inserted centring operation" in out
    assert "centring operation on the output of table" in out
    assert "encoder.layers.0.norm1 (32): not: " in out


@pytest.mark.parametrize(
    ("words", "says"),
    [
        ([], "name architectures"),
        (["torch-prenorm", "gtp2"], "gpt2"),
        (["gpt2", "--checkpoint=x"], "name no architectures"),
        (["--layers=7", "--checkpoint=x"], "name no architectures or --layers"),
        (["torch-prenorm", "--layers=0"], "layers must be"),
        (["torch-prenorm", f"--seed={2**70}"], "seed must be"),
        (["--chekpoint", "x"], "flags are written"),
        (["--checkpoint=nowhere"], "config.json"),
    ],
)
def test_bad_input_is_one_line(capsys, words, says):
    assert says in refused(capsys, *words, program="scripts/foldable.py")


def test_without_transformers_the_command_names_the_remedy(monkeypatch, capsys):
    monkeypatch.setitem(sys.modules, "transformers", None)
    assert "needs transformers" in refused(capsys, "gpt2", program="scripts/foldable.py")


def test_the_example_of_the_report(capsys):
    text = (ROOT / "results/foldable.md").read_text()
    (code,) = re.findall(r"```python\n(.*?)```", text, re.S)
    exec(compile(code, "results/foldable.md", "exec"), {})  # noqa: S102
    assert capsys.readouterr().out.split("\n") == ["foldable", "5 of 5 True", ""]


ALONE = """
import sys
sys.modules["numpy"] = None
import torch
from torch import nn
from nanonorm.foldable import fold

_, report = fold(nn.Sequential(nn.Linear(4, 4), nn.LayerNorm(4)).eval(), torch.randn(2, 4))
print(report.folded, report.certified)
"""


def test_the_library_needs_torch_alone():
    """No other package, and nothing of the project but nanonorm.errors; it runs where not even numpy is."""
    own = [ROOT / "nanonorm/errors.py", *(ROOT / "nanonorm/foldable").glob("*.py")]
    lines = re.findall(r"^ *(?:from|import) ([\w.]+)", "\n".join(path.read_text() for path in own), re.M)
    known = {*sys.stdlib_module_names, "torch", "networkx"}  # torch requires networkx
    others = {name for name in lines if name.partition(".")[0] not in known}
    assert {name for name in others if not name.startswith("nanonorm.foldable.")} == {"nanonorm.errors"}
    done = subprocess.run([sys.executable, "-c", ALONE], capture_output=True, text=True, cwd=ROOT)
    assert done.stdout.split() == ["1", "True"], done.stderr
