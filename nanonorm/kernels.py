"""Norms, products, SwiGLU, attention and the loss by the fastest kernels at hand, on a CPU above all.

Each function says what it computes; how it does so on which machine is its own affair. results/NOTES.md has
what each special kernel saves. Shapes: B batch, T time, D width, H query heads, K key/value heads, C head
size, F SwiGLU width.
"""

from contextlib import nullcontext, suppress
from functools import partial
from pathlib import Path

import torch
import torch.nn as nn
import torch.nn.functional as F
from torch.utils.checkpoint import checkpoint


def upcast(h):
    """float32 for the 16-bit types; wider types as they are. Statistics and losses are never narrower."""
    return h.float() if h.dtype in (torch.bfloat16, torch.float16) else h


PIECE = 1 << 24  # numbers of a large matrix in float64 at a time: 128 MiB


def types_of(model: nn.Module) -> list[torch.dtype]:
    """The types of a model's weights, the widest first."""
    return sorted({p.dtype for p in model.parameters()}, key=lambda t: -torch.finfo(t).bits)


def by_rows(table, change) -> torch.Tensor:
    """change(rows) of a large table (out, in), in float64 and cast back."""
    new = torch.empty_like(table)
    rows = max(1, PIECE // table.shape[1])
    for to, piece in zip(new.split(rows), table.detach().split(rows), strict=True):
        to.copy_(change(piece.double()))
    return new


def with_factor(table: nn.Embedding, factor) -> nn.Embedding:
    """The same table (V, D), times a 0-dim factor."""
    rows = by_rows(table.weight, lambda rows: rows * factor.double())
    return type(table).from_pretrained(rows, freeze=False)


def eager_training(h) -> bool:
    """True on a CPU where a gradient is wanted and no compiler is at work, which would fuse better."""
    return h.is_cpu and torch.is_grad_enabled() and not torch.compiler.is_compiling()


def autocasts(h) -> bool:
    """True where matrix products are cast to a narrower type."""
    return h.device.type != "meta" and torch.is_autocast_enabled(h.device.type)


# ---------------------------------------------------------------------------------------------------------
# RMSNorm


def inverse_rms(h, eps: float):
    """1/r(h), r(h) = sqrt(|h|^2/D + eps). (..., D) -> (..., 1), float32 or better."""
    return torch.rsqrt(upcast(h).square().mean(-1, keepdim=True) + eps)


def rms_norm(h, weight, bias, eps: float, fixed=None):
    """h/r(h) [* weight] [+ h * fixed] [+ bias]. (..., D) -> (..., D)"""
    if weight is not None and eager_training(h):
        return rms_norm_and_inverse(h, weight, bias, eps, fixed)[0]
    y = F.rms_norm(h, h.shape[-1:], weight, eps)
    y = y if fixed is None else torch.addcmul(y, h, fixed)
    return y if bias is None else y + bias


def rms_norm_and_inverse(h, weight, bias, eps: float, fixed=None):
    """rms_norm and 1/r(h), which gets no gradient; eager training on a CPU. (..., D) -> (..., D), (..., 1)"""
    return EagerRMSNorm.apply(h, weight, bias, eps, fixed)


def scaled(h, weight, bias, centre: bool):
    """h [- mean(h)], times a vector [+ bias]. (..., D) -> (..., D)."""
    y = (h - h.mean(-1, keepdim=True) if centre else h) * weight
    return y if bias is None else y + bias


class EagerRMSNorm(torch.autograd.Function):
    """F.rms_norm is a chain of operators in eager mode on a CPU, each with a backward of its own; this one
    keeps a third less for its backward."""

    @staticmethod
    def forward(ctx, h, weight, bias, eps, fixed=None):
        x = upcast(h)
        mean_square = torch.linalg.vector_norm(x, dim=-1, keepdim=True).square_() / x.shape[-1]
        inverse = (mean_square + eps).rsqrt_()  # (..., 1)
        ctx.save_for_backward(h, inverse, weight, fixed)
        ctx.mark_non_differentiable(inverse)
        y = (x * inverse).mul_(weight)
        if fixed is not None:
            y.addcmul_(x, fixed)
        return (y if bias is None else y.add_(bias)).to(h.dtype), inverse

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx, grad, _):
        h, inverse, weight, fixed = ctx.saved_tensors
        g, x, w = upcast(grad), upcast(h), upcast(weight)
        # LayerNorm's one kernel, told that the mean is 0, also subtracts the mean of g * w: that is put back
        mean, wanted = torch.zeros_like(inverse), (True, *ctx.needs_input_grad[1:3])
        layer_norm_backward = torch.ops.aten.native_layer_norm_backward
        of_h, of_weight, of_bias = layer_norm_backward(g, x, w.shape, mean, inverse, w, w, wanted)
        of_h.add_((g @ w).unsqueeze(-1).mul_(inverse).div_(x.shape[-1]))
        of_fixed = None if fixed is None else (g * x).flatten(0, -2).sum(0)
        if fixed is not None:
            of_h.addcmul_(g, fixed)
        return of_h.to(h.dtype), of_weight, of_bias, None, of_fixed


# ---------------------------------------------------------------------------------------------------------
# matrix products beside a statistic or the stream


def product(linear: nn.Linear, x, inverse=None):
    """linear(x / r), r given as its inverse (B, T, 1), which scales the product: the bias comes after."""
    if inverse is None:
        return linear(x)
    y = F.linear(x, linear.weight) * inverse
    return y if linear.bias is None else y + linear.bias


def add_product(residual, x, linear: nn.Linear):
    """residual + linear(x) in one product. (B, T, D), (B, T, in) -> (B, T, D)."""
    residual = residual if linear.bias is None else residual + linear.bias
    return torch.addmm(residual.flatten(0, 1), x.flatten(0, 1), linear.weight.t()).view_as(residual)


# ---------------------------------------------------------------------------------------------------------
# SwiGLU


def swiglu(gate_up, inverse=None):
    """silu(gate) * up, both scaled by `inverse` first if it is given. (..., 2F), (..., 1) -> (..., F)"""
    gate, up = (gate_up if inverse is None else gate_up * inverse).chunk(2, -1)
    return F.silu(gate) * up


def swiglu_product(gate_up, weight):
    """swiglu(gate_up) @ weight.t(), for eager training. (..., 2F), (D, F) -> (..., D)"""
    return EagerSwiGLU.apply(gate_up, weight)


class EagerSwiGLU(torch.autograd.Function):
    """Keeps gate_up alone for the backward, where autograd would also keep a silu and a product of half its
    size each, and writes its gradient in one piece."""

    @staticmethod
    def forward(ctx, gate_up, weight):
        ctx.save_for_backward(gate_up, weight)
        gate, up = gate_up.chunk(2, -1)
        return F.linear(F.silu(gate).mul_(up), weight)

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx, grad):
        gate_up, weight = ctx.saved_tensors
        of_gate_up, of_product = torch.empty_like(gate_up), grad @ weight.to(grad.dtype)
        (gate, up), (of_gate, of_up) = gate_up.chunk(2, -1), of_gate_up.chunk(2, -1)
        silu = F.silu(gate)
        torch.mul(of_product, silu, out=of_up)
        torch.ops.aten.silu_backward(of_product.mul_(up), gate, grad_input=of_gate)
        if not ctx.needs_input_grad[1]:
            return of_gate_up, None
        of_weight = grad.flatten(0, -2).t() @ silu.mul_(up).flatten(0, -2)
        return of_gate_up, of_weight.to(weight.dtype)


# ---------------------------------------------------------------------------------------------------------
# attention


def heads_padded_to() -> int:
    """The head size up to which narrower heads are padded for attention on a CPU; 0 turns padding off.

    It is 1.8x as fast on an AMD EPYC and 0.82x on an Intel Xeon (results/speed.md), so Intel's CPUs do
    without.
    """
    return 0 if "GenuineIntel" in cpu_details() else 16


def cpu_details() -> str:
    """What Linux says of the CPU; elsewhere nothing."""
    with suppress(OSError, UnicodeDecodeError):
        return Path("/proc/cpuinfo").read_text()
    return ""


PAD_HEADS_TO = heads_padded_to()


def attend(q, k, v, mask=None, dropout: float = 0.0):
    """Attention, causal unless there is a mask (T, S). (B, H, T, C), k and v (B, K, S, C) -> (B, H, T, C).
    dropout: of the attention's weights.

    The CPU's kernel is fastest in float32 for heads of up to 16 numbers, so without a mask they are cast,
    and in windows of 256 tokens and more padded to PAD_HEADS_TO.
    """
    T, C = q.shape[-2:]
    dtype, narrow = q.dtype, q.is_cpu and C <= 16 and mask is None
    if narrow:
        q, k, v = (upcast(t) for t in (q, k, v))
    if narrow and C < PAD_HEADS_TO and T >= 256:
        q, k, v = (F.pad(t, (0, PAD_HEADS_TO - C)) for t in (q, k, v))
    uncast = narrow and torch.is_autocast_enabled("cpu")
    grouped = q.shape[1] != k.shape[1]
    with torch.autocast("cpu", enabled=False) if uncast else nullcontext():
        y = F.scaled_dot_product_attention(
            q, k, v, mask, dropout, is_causal=mask is None, enable_gqa=grouped, scale=C**-0.5
        )  # fmt: skip
    return y[..., :C].to(dtype)


# ---------------------------------------------------------------------------------------------------------
# the loss


def head_loss(y, weight, bias, targets, left_out: int | None = None):
    """Mean cross-entropy of softmax(W y + b), 0-dim. y: (B, T, D); weight: (V, D); targets: (B, T).

    Targets that are `left_out` do not count: the mean is over the others, and 0 if there are none.

    In float32 or better. On a CPU 512 tokens at a time: the (B, T, V) logits are never held (results/speed.md
    has the times). Where torch cannot chunk by itself (before 2.13; in bfloat16 its loss has three digits),
    the chunks' logits are computed twice.
    """
    y, targets = y.flatten(0, 1), targets.flatten()
    counted, ignored = len(y), {}
    if left_out is not None:
        counted, ignored = (targets != left_out).sum().clamp_min(1), {"ignore_index": left_out}

    def total(y, targets):
        return F.cross_entropy(upcast(F.linear(y, weight, bias)), targets, reduction="sum", **ignored)

    if not y.is_cpu or torch.compiler.is_compiling():
        return total(y, targets) / counted
    autocast = torch.is_autocast_enabled("cpu")
    low = autocast or y.dtype == torch.bfloat16
    if hasattr(nn, "LinearCrossEntropyOptions") and not low:
        chunks = nn.LinearCrossEntropyOptions(batch_chunk_size=512)
        of_all = partial(F.linear_cross_entropy, y, weight, targets, linear_bias=bias, options=chunks)
        return of_all(reduction="sum", **ignored) / counted if ignored else of_all()
    once_more = partial(checkpoint, total, use_reentrant=False, preserve_rng_state=False)
    # the chunks share no cast: the gradient of a shared one would be summed over them in bfloat16
    with torch.autocast("cpu", torch.get_autocast_dtype("cpu"), enabled=autocast, cache_enabled=False):
        pieces = zip(y.split(512), targets.split(512), strict=True)
        return sum(once_more(*piece) for piece in pieces) / counted
