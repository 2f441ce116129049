"""Fast paths, mostly on a CPU, each named after the plain code in model.py that it equals to rounding.

Where model.py says `@fast(kernel)`, the kernel runs in place of the plain function wherever `applies` says
so, and this is the only place that says so. `with turned_off():` does without. results/NOTES.md has what
each saves. Shapes: B batch, T time, D width, H query heads, K key/value heads, C head size, F SwiGLU width.
"""

import math
from contextlib import contextmanager, nullcontext, suppress
from functools import partial, wraps
from pathlib import Path

import torch
import torch.nn as nn
import torch.nn.functional as F
from torch.nn.modules import module as torch_module
from torch.utils.checkpoint import checkpoint

NOT_COUNTED = -100  # a target that no loss counts, as F.cross_entropy has it
KERNELS, OFF = set(), set()  # names: of all that `fast` was given; of those that are turned off


@contextmanager
def turned_off():
    """Turn all fast paths off."""
    off = KERNELS - OFF
    OFF.update(off)
    try:
        yield
    finally:
        OFF.difference_update(off)


def fast(kernel, training=True, eager=True, anywhere=False):
    """Decorate a function: where `applies`, `kernel` runs in its place, called with the same arguments. A
    kernel that cannot serve them returns NotImplemented, and then the plain function runs after all.

    training, eager: the kernel is for that alone; anywhere: not for CPUs alone.
    """
    name = kernel.__name__
    KERNELS.add(name)

    def decorate(formula):
        @wraps(formula)
        def either(*args, **named):
            if named:  # a kernel takes no names
                return formula(*args, **named)
            idle = training and not args[0].training  # first: text is made a token at a time
            if idle or name in OFF or not applies(args, training, eager, anywhere):
                return formula(*args)
            found = kernel(*args)
            return formula(*args) if found is NotImplemented else found

        either.kernel = kernel
        return either

    return decorate


def applies(args, training: bool, eager: bool, anywhere: bool) -> bool:
    """Whether a fast path may serve a call; if for training alone, of a module in training. args: perhaps the
    module whose method it is, then a tensor."""
    if training and not torch.is_grad_enabled():
        return False
    x = args[1] if isinstance(args[0], nn.Module) else args[0]
    if not x.is_cpu:  # there the compiler's work may be cut, but not torch.func's
        return anywhere and not torch._C._are_functorch_transforms_active()
    # a compiler fuses better; torch.func cannot see into an autograd.Function
    return not eager or not (torch.compiler.is_compiling() or torch._C._are_functorch_transforms_active())


def is_watched(module: nn.Module) -> bool:
    """Whether a hook, forward or backward, would miss a product that is taken around the module."""
    kinds = ("_forward_hooks", "_forward_pre_hooks", "_backward_hooks", "_backward_pre_hooks")
    return torch_module._has_any_global_hook() or any(getattr(module, kind) for kind in kinds)


def upcast(h):
    """float32 for the 16-bit types; wider types as they are. Statistics and losses are never narrower."""
    return h.float() if h.dtype in (torch.bfloat16, torch.float16) else h


def autocasts(h) -> bool:
    """True where matrix products are cast to a narrower type, which float64's never are."""
    here = h.device.type != "meta" and h.dtype != torch.float64
    return here and torch.is_autocast_enabled(h.device.type)


# ---------------------------------------------------------------------------------------------------------
# RMSNorm: the methods of model.RMSNorm, of which LayerNorm is one that centres


def rms_norm(norm, h, weight, bias):
    """normalize: h/r(h) * weight [+ bias]. (..., D) -> (..., D)"""
    if weight is None:
        return NotImplemented
    return EagerRMSNorm.apply(h, weight, bias, norm.eps)[0]


def rms_blend(norm, h, weight, bias, fixed):
    """blend: x/r(x) * weight + x * fixed [+ bias], x = h or h - mean(h). (..., D) -> (..., D)"""
    return EagerRMSNorm.apply(norm.centred(h), weight, bias, norm.eps, fixed)[0].to(h.dtype)


def rms_norm_and_inverse(norm, h, differentiable: bool):
    """normed_and_inverse: h/r(h) * weight, and 1/r(h), which gets no gradient. (..., D), (..., 1)"""
    if differentiable or norm.weight is None or is_watched(norm):
        return NotImplemented
    return EagerRMSNorm.apply(h, norm.weight, None, norm.eps)


def rms_moments(norm, h, weight):
    """moments: |x w|^2 / r(x), |x w|^2 and 1 / r(x), without the squares in memory. (..., D) -> 3 (...)"""
    x = norm.centred(h)
    r = torch.sqrt(torch.linalg.vector_norm(x, dim=-1).square() / x.shape[-1] + norm.eps)
    power = torch.linalg.vector_norm(x * weight, dim=-1).square()
    return power / r, power, 1 / r


class EagerRMSNorm(torch.autograd.Function):
    """(h/r(h) * weight [+ h * fixed] [+ bias], 1/r(h)), the second without gradient.

    F.rms_norm is a chain of operators in eager mode on a CPU, each with a backward of its own; this one keeps
    a third less for its backward."""

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
# SwiGLU


def swiglu(mlp, x):
    """SwiGLU.forward: down(silu(a) * b), (a, b) = gate_up(x), by one function. (B, T, D) -> (B, T, D)"""
    if getattr(type(mlp).activation, "kernel", None) is not swiglu_activation:
        return NotImplemented  # a subclass has an activation of its own
    down = mlp.down
    centred = getattr(down, "centred", None)
    if not (type(down) is nn.Linear or centred) or down.bias is not None or is_watched(down):
        return NotImplemented  # it may carry an adapter
    weight = centred()[0] if centred else down.weight
    return EagerSwiGLU.apply(mlp.gate_up(x), weight)


GATED_TOKENS, GATED_SIZE = 8, 1 << 18  # of the matrix, in numbers: below, one more launch costs more


def swiglu_activation(mlp, x, inverse=None):
    """SwiGLU.activation without a gradient, as two products: one of both writes the rows of each 2 F numbers
    apart, and reading them so costs more than it saves. (B, T, D) [, (B, T, 1)] -> (B, T, F)"""
    layer = mlp.gate_up
    if type(layer) is not nn.Linear or x.numel() < GATED_TOKENS * x.shape[-1]:
        return NotImplemented  # it may be wrapped, or carry an adapter
    if layer.weight.numel() < GATED_SIZE or layer.bias is not None or is_watched(layer):
        return NotImplemented
    if torch.is_grad_enabled() or torch.is_autocast_enabled("cpu"):
        return NotImplemented
    of_opening, of_up = layer.weight.chunk(2)
    up = F.linear(x, of_up)
    opening = F.linear(x, of_opening)  # written last, and read first
    if inverse is not None:
        up, opening = up.mul_(inverse), opening.mul_(inverse)
    return F.silu(opening, inplace=True).mul_(up)


class EagerSwiGLU(torch.autograd.Function):
    """Keeps gate_up alone for the backward, where autograd would also keep a silu and a product of half its
    size each, and writes its gradient in one piece."""

    @staticmethod
    def forward(ctx, gate_up, weight):
        ctx.save_for_backward(gate_up, weight)
        opening, up = gate_up.chunk(2, -1)
        return F.linear(F.silu(opening).mul_(up), weight)

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx, grad):
        gate_up, weight = ctx.saved_tensors
        of_gate_up, of_product = torch.empty_like(gate_up), grad @ weight.to(grad.dtype)
        (opening, up), (of_opening, of_up) = gate_up.chunk(2, -1), of_gate_up.chunk(2, -1)
        silu = F.silu(opening)
        torch.mul(of_product, silu, out=of_up)
        torch.ops.aten.silu_backward(of_product.mul_(up), opening, grad_input=of_opening)
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


def attention(q, k, v, mask=None, dropout: float = 0.0):
    """attend: the same in float32, for heads of up to 16 numbers, for which the CPU's kernel is fastest in
    it; and in windows of 256 tokens and more padded to PAD_HEADS_TO. (B, H, T, C) -> (B, H, T, C)"""
    if mask is not None or q.shape[-1] > 16:
        return NotImplemented
    (T, C), dtype = q.shape[-2:], q.dtype
    q, k, v = (upcast(t) for t in (q, k, v))
    if C < PAD_HEADS_TO and T >= 256:
        q, k, v = (F.pad(t, (0, PAD_HEADS_TO - C)) for t in (q, k, v))
    uncast, grouped = torch.is_autocast_enabled("cpu"), q.shape[1] != k.shape[1]
    with torch.autocast("cpu", enabled=False) if uncast else nullcontext():
        y = F.scaled_dot_product_attention(
            q, k, v, None, dropout, is_causal=True, enable_gqa=grouped, scale=C**-0.5
        )  # fmt: skip
    return y[..., :C].to(dtype)


# ---------------------------------------------------------------------------------------------------------
# the loss


LOGITS_AT_ONCE = 1 << 25  # of a network, held at a time in pieces: 128 MiB in float32
WHOLE_LOGITS = 1 << 29  # up to which they are held whole on a GPU: 2 GiB


def cross_entropy(model, y, targets):
    """Transformer.cross_entropy in chunks; elsewhere than on a CPU where the logits would be large."""
    if model.lm_head is not None and (type(model.lm_head) is not nn.Linear or is_watched(model.lm_head)):
        return NotImplemented
    weight, bias = model.head()
    if y.is_cpu:
        return chunked_cross_entropy(y, weight, bias, targets)
    if targets.numel() * len(weight) <= WHOLE_LOGITS:
        return NotImplemented
    of_none = (None, None, None, targets.flatten(), (1.0, 0.0), torch.is_grad_enabled())
    return in_pieces(y.flatten(0, 1), weight, bias, *of_none)[0]


def chunked_cross_entropy(y, weight, bias, targets):
    """Mean cross-entropy of softmax(W y + b) over targets other than NOT_COUNTED, 0 if there are none, 512
    tokens at a time: the (B, T, V) logits are never held. y: (B, T, D); weight: (V, D); targets: (B, T).
    0-dim

    Where torch cannot chunk by itself (before 2.13; in 16 bits its loss has three digits, and in float16 no
    room for the sum), the logits are computed twice.
    """
    y, targets = y.flatten(0, 1), targets.flatten()
    counted = (targets != NOT_COUNTED).sum().clamp_min(1)
    autocast = torch.is_autocast_enabled("cpu")
    low = autocast or y.dtype.itemsize < 4
    if hasattr(nn, "LinearCrossEntropyOptions") and not low:
        chunks = nn.LinearCrossEntropyOptions(batch_chunk_size=512)
        of_all = partial(F.linear_cross_entropy, y, weight, targets, linear_bias=bias, options=chunks)
        return of_all(reduction="sum") / counted

    def total(y, targets):
        return F.cross_entropy(upcast(F.linear(y, weight, bias)), targets, reduction="sum")

    once_more = partial(checkpoint, total, use_reentrant=False, preserve_rng_state=False)
    # the chunks share no cast: the gradient of a shared one would be summed over them in bfloat16
    with torch.autocast("cpu", torch.get_autocast_dtype("cpu"), enabled=autocast, cache_enabled=False):
        pieces = zip(y.split(512), targets.split(512), strict=True)
        return sum(once_more(*piece) for piece in pieces) / counted


@torch._disable_dynamo  # the pieces would be unrolled. torch.compiler.disable imports the compiler, 2 s
def in_pieces(*args):
    return LossInPieces.apply(*args)


def log_probabilities(y, weight, bias):
    """log softmax(W y + b). (n, D) -> (n, V), float32 or better."""
    logits = upcast(F.linear(y, weight, bias))
    return logits.sub_(logits.logsumexp(-1, keepdim=True))


class LossInPieces(torch.autograd.Function):
    """(ce_weight * cross-entropy + kl_weight * KL(teacher || student), cross-entropy, KL); without `taught`
    the cross-entropy alone. Each piece's gradient is computed beside its loss, so that its logits need not be
    made twice."""

    @staticmethod
    def forward(ctx, y, weight, bias, taught, teacher_weight, teacher_bias, targets, weights, wants):
        (ce_weight, kl_weight), wanted = weights, ctx.needs_input_grad[:3]
        counts = (targets != NOT_COUNTED).unsqueeze(1)  # (N, 1)
        n = counts.sum().clamp_min(1)
        targets = targets.unsqueeze(1).where(counts, 0)
        divisors = torch.where(counts, n, math.inf)  # of a token's gradient
        wide, sums = torch.promote_types(y.dtype, torch.float32), []
        grads = [
            torch.zeros_like(t, dtype=wide) if wants and asked else None
            for t, asked in zip((y, weight, bias), wanted, strict=True)
        ]
        of_y, of_weight, of_bias = grads
        rows = max(1, LOGITS_AT_ONCE // len(weight))
        for at in (slice(i, i + rows) for i in range(0, len(y), rows)):
            student = log_probabilities(y[at], weight, bias)
            right, counted = targets[at], counts[at]
            ce = student.gather(1, right).neg()
            kl = torch.zeros_like(ce)
            if taught is not None:
                teacher = log_probabilities(taught[at], teacher_weight, teacher_bias)
                p = teacher.exp()
                kl = teacher.sub_(student).mul_(p).sum(1, keepdim=True)
            sums.append(torch.stack([of_token.where(counted, 0).sum() for of_token in (ce, kl)]))
            if not wants:
                continue
            of_logits = student.exp_().mul_(ce_weight + kl_weight)
            if taught is not None:
                of_logits.sub_(p, alpha=kl_weight)
            of_logits.scatter_add_(1, right, torch.full_like(right, -ce_weight, dtype=of_logits.dtype))
            of_logits /= divisors[at]
            if of_y is not None:
                of_y[at] = of_logits.to(weight.dtype) @ weight
            if of_weight is not None:
                of_weight.addmm_(of_logits.t(), upcast(y[at]))
            if of_bias is not None:
                of_bias += of_logits.sum(0)
        ctx.save_for_backward(*grads)
        ctx.types = [None if t is None else t.dtype for t in (y, weight, bias)]
        ce, kl = (t.clone() for t in torch.stack(sums).sum(0) / n)
        ctx.mark_non_differentiable(ce, kl)
        return ce_weight * ce + kl_weight * kl, ce, kl

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx, grad, *_):
        kept = zip(ctx.saved_tensors, ctx.types, strict=True)
        return *(None if t is None else (t * grad).to(dtype) for t, dtype in kept), *[None] * 6
