"""The whole transformer: norms, attention, MLP, cache, generation, model files, fold and its proof.

Pre-norm, causal, SwiGLU, RoPE, no bias, no dropout. Three knobs choose the normalization: `norm` (which
normalizer), `taper` (which of them are gated into a fixed scaling) and `aux_weight` (the loss that holds the
residual stream's scale). Papers, cited below by these names:

    TaperNorm      Kanavalau, Amo Alonso, Lall, arXiv 2602.10408; its symbols: g, c, gamma, gamma_tilde, s, mu
    CoupledNorm    Loretz, Hochreiter, ICML 2026
    CBWC+RMSNorm   "Enjoy your Layer Normalization with the computational efficiency of RMSNorm"
    DyT            Zhu et al., arXiv 2503.10622;  Derf: the same with erf and a learned shift

Shapes: B batch, T time, D = n_embd, H query heads, K key/value heads, C = D/H, F SwiGLU width, V vocabulary.
"""

import copy
import math
from dataclasses import asdict, dataclass, fields, replace
from functools import partial
from typing import Annotated, Literal, NamedTuple

import torch
import torch.nn as nn
import torch.nn.functional as F

from nanonorm.errors import ModelError
from nanonorm.files import FORMAT, read_file
from nanonorm.kernels import (
    attend,
    eager_training,
    head_loss,
    inverse_rms,
    rms_norm,
    rms_norm_and_inverse,
    swiglu,
    swiglu_product,
    upcast,
)
from nanonorm.typed import Count, NonNegative, Positive, Range, Whole, check, hints, in_words


@dataclass(frozen=True)
class ModelConfig:
    """The architecture; travels in every model file. The one declaration of its knobs: the run's settings
    and the benchmark's take them from here, and `--help` prints the comments. Raises: ModelError for what
    makes no sense."""

    # shape
    vocab_size: Annotated[int, Range(2, 65536)] = 10_000  # token ids; in a run None: its corpus's number
    block_size: Count = 512  # context length, tokens
    n_layer: Annotated[int, Range(1, 4096)] = 8  # blocks
    n_head: Count = 16  # query heads
    n_kv_head: Count | None = None  # key/value heads (grouped-query attention); None: n_head
    n_embd: Count = 512  # width of the residual stream
    tie_embeddings: bool = True  # the output head shares the embedding table
    rope_base: Positive = 10000.0  # base of the rotary angles
    # norms
    norm: Literal["rmsnorm", "layernorm", "coupled", "cbwc", "dyt", "derf"] = "rmsnorm"  # the normalizer
    taper: Literal["none", "internal", "final", "all"] = "none"  # which norms are gated away
    aux_weight: NonNegative = 0.0  # lambda of the fixed-target scale loss; the paper's is 0.1, 0 is off
    norm_bias: bool = True  # shift of layernorm and cbwc
    norm_eps: Positive = 1e-6  # added to the mean square or the variance
    ema_rate: Annotated[float, Range(1e-6, 1.0)] = 0.01  # mu of the calibration and scale-target averages
    calib_skip_first: bool = False  # leave position 0 of every window out of the calibration
    coupled_grad: bool = False  # let the gradient through the statistic that CoupledNorm's MLP reuses
    coupled_from_layer: Whole = 0  # blocks below this one keep plain RMSNorm (coupled only)
    # how this model was derived; not a knob
    form: Literal["trained", "unfused", "folded", "weightless"] = "trained"

    def __post_init__(self):
        for f in fields(self):
            kind, value = hints(ModelConfig)[f.name], getattr(self, f.name)
            try:
                object.__setattr__(self, f.name, check(kind, value))
            except ValueError:
                raise ModelError(f"{f.name} must be {in_words(kind)}, not {str(value)[:60]!r}") from None
        if self.n_kv_head is None:
            object.__setattr__(self, "n_kv_head", self.n_head)
        self.refuse_nonsense()

    def refuse_nonsense(self):
        """Raises: ModelError for knobs that contradict each other, naming what would work."""
        norm, tapers, coupled = self.norm, self.taper != "none", self.norm == "coupled"
        if self.n_embd % self.n_head:
            raise ModelError(f"n_embd={self.n_embd} must be a multiple of n_head={self.n_head}")
        if self.head_dim % 2:
            raise ModelError(f"n_embd/n_head={self.head_dim} must be even: RoPE turns pairs")
        if self.n_head % self.n_kv_head:
            raise ModelError(f"n_head={self.n_head} must be a multiple of n_kv_head={self.n_kv_head}")
        if tapers and norm not in ("rmsnorm", "layernorm"):
            raise ModelError(f"a taper needs norm=rmsnorm or layernorm; with {norm} use taper=none")
        if not self.norm_bias and norm not in ("layernorm", "cbwc"):
            raise ModelError(f"norm_bias=False needs norm=layernorm or cbwc, not {norm}")
        if self.coupled_grad and not coupled:
            raise ModelError(f"coupled_grad=True needs norm=coupled, not {norm}")
        if self.coupled_from_layer and not coupled:
            raise ModelError(f"coupled_from_layer needs norm=coupled, not {norm}")
        if self.coupled_from_layer >= self.n_layer:
            raise ModelError(
                "coupled_from_layer must be below n_layer; for RMSNorm everywhere use norm=rmsnorm"
            )
        if self.calib_skip_first and not tapers:
            raise ModelError("calib_skip_first=True needs a taper: with taper=none nothing is calibrated")
        if self.calib_skip_first and self.block_size == 1:
            raise ModelError("calib_skip_first=True needs block_size above 1")

    @property
    def head_dim(self) -> int:
        return self.n_embd // self.n_head

    @property
    def hidden(self) -> int:
        """SwiGLU width: 8/3 n_embd rounded up to a multiple of 8."""
        return 8 * math.ceil(self.n_embd / 3)  # three matrices of it cost what two of 4 n_embd would


# ---------------------------------------------------------------------------------------------------------
# norms
#
# A norm maps (B, T, D) to (B, T, D) given the gate, a 0-dim tensor that only TaperNorm reads. For folding it
# writes itself as y = core(h [- mean(h)]) * gain + shift, all but the core being linear: `factor` returns
# (core, gain or None, shift or None, centre). Statistics are in float32 or better, whatever the input.


class Identity(nn.Module):
    """Where a norm was."""

    def forward(self, h, gate=None):
        return h

    def factor(self, gains: bool):
        return self, None, None, False


class RMSNorm(nn.Module):
    """h/r(h) * weight [+ bias]; the weightless form has neither."""

    def __init__(self, dim: int, eps: float, gain: bool = True, shift: bool = False):
        super().__init__()
        self.eps, self.shape = eps, (dim,)
        self.weight = nn.Parameter(torch.ones(dim)) if gain else None
        self.bias = nn.Parameter(torch.zeros(dim)) if shift else None

    def forward(self, h, gate=None):
        return rms_norm(h, self.weight, self.bias, self.eps)

    def factor(self, gains: bool):
        if not gains:
            return self, None, None, False
        return type(self)(*self.shape, self.eps, gain=False, shift=False), self.weight, self.bias, False


class LayerNorm(RMSNorm):
    """(h - mean)/sigma * weight [+ bias], sigma = sqrt(var + eps)."""

    def forward(self, h, gate=None):
        return F.layer_norm(h, self.shape, self.weight, self.bias, self.eps)


class DyT(nn.Module):
    """tanh(alpha h) * weight + bias, alpha a learned scalar. Nothing of it folds away."""

    def __init__(self, dim: int):
        super().__init__()
        self.alpha = nn.Parameter(torch.tensor(0.5))
        self.weight = nn.Parameter(torch.ones(dim))
        self.bias = nn.Parameter(torch.zeros(dim))

    def squash(self, h):
        return torch.tanh(self.alpha * h)

    def forward(self, h, gate=None):
        return torch.addcmul(self.bias, self.squash(h), self.weight)

    def factor(self, gains: bool):
        return self, None, None, False


class Derf(DyT):
    """erf(alpha h + s) * weight + bias, alpha and s learned scalars."""

    def __init__(self, dim: int):
        super().__init__(dim)
        self.s = nn.Parameter(torch.tensor(0.0))

    def squash(self, h):
        return torch.erf(torch.addcmul(self.s, self.alpha, h))


def scaled(h, weight, bias, centre: bool):
    """h [- mean(h)], times a vector [+ bias]. (..., D) -> (..., D)."""
    y = (h - h.mean(-1, keepdim=True) if centre else h) * weight
    return y if bias is None else y + bias


class Scale(nn.Module):
    """What is left of a tapered norm at gate 0, as an explicit element-wise step."""

    def __init__(self, weight, bias, centre: bool):
        super().__init__()
        self.centre = centre
        self.weight = nn.Parameter(weight)
        self.bias = None if bias is None else nn.Parameter(bias)

    def forward(self, h, gate=None):
        return scaled(h, self.weight, self.bias, self.centre)

    def factor(self, gains: bool):
        return Identity(), self.weight, self.bias, self.centre


class Tracker(nn.Module):
    """Bias-corrected EMAs of token means, one observation per optimizer step, collected in the "norm" phase.

    `phase` is host state, set by Transformer.set_phase. `sums` holds the step so far: of each quantity over
    its tokens and, last, the number of tokens; Transformer.update_statistics turns it into the observation.
    """

    def __init__(self, rate: float, *quantities: str):
        super().__init__()
        self.phase, self.quantities = "norm", quantities
        self.log_keep = math.log1p(-rate) if rate < 1 else -math.inf
        for name in (*quantities, "ema_count"):
            self.register_buffer(name, torch.tensor(0.0))
        self.register_buffer("sums", torch.zeros(len(quantities) + 1), persistent=False)

    def collecting(self) -> bool:
        return self.phase == "norm" and self.training and torch.is_grad_enabled()

    def add(self, *values):
        """Add this micro-batch to the step's sums. values: one (B, T) a quantity."""
        count = torch.full_like(values[0][0, 0], values[0].numel())
        self.sums += torch.stack((*(v.sum() for v in values), count))

    def averages(self) -> list:
        return [getattr(self, name) for name in self.quantities]

    def corrected(self) -> list:
        seen = -torch.expm1(self.ema_count * self.log_keep)  # 1 - (1 - mu)^n, which would cancel in float32
        return [ema / seen for ema in self.averages()]

    def freeze(self, buffer, value, degenerate=False):
        if degenerate or not (torch.isfinite(value) and value > 0):
            seen = f"{self.ema_count.item():g} steps that give {value.item():g}"
            cause = "the stream is 0 or not finite there, or was never seen"
            remedy = "raise gate_start, or lower learning_rate and start anew"
            raise ModelError(f"cannot calibrate on {seen}: {cause}; {remedy}")
        buffer.copy_(value)


DELTA = 1e-12  # keeps c finite where the stream is 0


class TaperNorm(Tracker):
    """RMSNorm (or LayerNorm, `centre`) that the gate g turns into a fixed scaling.

        g * h/r(h) * weight + (1-g) * c * h * weight_tilde

    For LayerNorm h is h - mean(h), r is sigma, and a bias is added. Phase "norm" is the plain norm (the
    baseline's own kernel), "blend" the formula, "scale" its g = 0 case. In eval mode the module is always
    at g = 0, before calibration with the c that calibration would give now.
    """

    def __init__(
        self, dim: int, eps: float, centre=False, shift=False, skip_first=False, ema_rate: float = 0.01
    ):  # fmt: skip
        super().__init__(ema_rate, "ema_num", "ema_den")
        self.eps, self.centre, self.skip_first = eps, centre, skip_first
        self.weight = nn.Parameter(torch.ones(dim))
        self.weight_tilde = nn.Parameter(torch.ones(dim))
        self.bias = nn.Parameter(torch.zeros(dim)) if shift else None
        self.register_buffer("c", torch.tensor(1.0))

    def forward(self, h, gate=None):
        if self.training and self.phase == "norm":
            if self.collecting():
                self.observe(h)
            if self.centre:
                return F.layer_norm(h, h.shape[-1:], self.weight, self.bias, self.eps)
            return rms_norm(h, self.weight, None, self.eps)
        if self.training and self.phase == "blend":
            x = upcast(h)
            if self.centre:
                x = x - x.mean(-1, keepdim=True)
            fixed = (1 - gate) * self.c * self.weight_tilde  # (D)
            return rms_norm(x, gate * self.weight, self.bias, self.eps, fixed).to(h.dtype)
        return scaled(h, self.fixed(), self.bias, self.centre)

    @torch.no_grad()
    def observe(self, h):
        """num = |h w|^2 / r(h) and den = |h w|^2 of every token. h: (B, T, D)."""
        x = upcast(h[:, 1:] if self.skip_first else h)
        if self.centre:
            x = x - x.mean(-1, keepdim=True)
        r = torch.sqrt(torch.linalg.vector_norm(x, dim=-1).square() / x.shape[-1] + self.eps)  # (B, T)
        power = torch.linalg.vector_norm(x * self.weight, dim=-1).square()  # (B, T)
        self.add(power / r, power)

    def c_now(self):
        """c* = E[|h w|^2/r] / E[|h w|^2], the least-squares fit of c h w to h/r w. 0-dim."""
        num, den = self.corrected()
        return num / (den + DELTA)

    def calibrate(self):
        """Freeze c and start weight_tilde from weight. ModelError if nothing usable was observed."""
        nothing_flows = self.corrected()[1] <= DELTA  # c would be a fit to DELTA, not to the stream
        self.freeze(self.c, self.c_now(), degenerate=nothing_flows)
        self.weight_tilde.copy_(self.weight)

    def fixed(self):
        """c * weight_tilde, the scaling at g = 0 (D); before calibration what c_now() makes of it."""
        if self.phase != "norm":
            return self.c * self.weight_tilde
        return torch.where(self.ema_count > 0, self.c_now() * self.weight, self.c * self.weight_tilde)

    def at_zero(self) -> Scale:
        return Scale(self.fixed(), self.bias, self.centre)

    def factor(self, gains: bool):
        return self.at_zero().factor(gains)


def stream_scale(h, eps: float, centre: bool):
    """s(h): r(h), or sigma with `centre`. (B, T, D) -> (B, T)."""
    h = upcast(h)
    power = h.var(-1, correction=0) if centre else h.square().mean(-1)
    return torch.sqrt(power + eps)


class ScaleAnchor(Tracker):
    """Fixed-target scale loss on the input of the final norm: mean((s(h) - s_tgt)^2).

    s is r(h), or sigma for LayerNorm. In the "norm" phase there is no loss and the mean of s is tracked; the
    target is its bias-corrected EMA, frozen when that phase ends.
    """

    def __init__(self, eps: float, centre: bool, ema_rate: float):
        super().__init__(ema_rate, "ema_s")
        self.eps, self.centre = eps, centre
        self.register_buffer("target", torch.tensor(0.0))

    def forward(self, h):
        if self.phase != "norm":
            return (stream_scale(h, self.eps, self.centre) - self.target).square().mean()
        if self.collecting():
            self.add(stream_scale(h.detach(), self.eps, self.centre))
        return None

    def target_now(self):
        return self.corrected()[0] if self.phase == "norm" else self.target

    def calibrate(self):
        nothing = math.sqrt(self.eps) * (1 + 1e-5)  # s of a stream that is 0, and its rounding
        self.freeze(self.target, self.target_now(), degenerate=self.target_now() <= nothing)


NORMS = {  # name -> norm of a ModelConfig
    "rmsnorm": lambda c: RMSNorm(c.n_embd, c.norm_eps),
    "layernorm": lambda c: LayerNorm(c.n_embd, c.norm_eps, shift=c.norm_bias),
    "coupled": lambda c: RMSNorm(c.n_embd, c.norm_eps),
    "cbwc": lambda c: RMSNorm(c.n_embd, c.norm_eps, shift=c.norm_bias),
    "dyt": lambda c: DyT(c.n_embd),
    "derf": lambda c: Derf(c.n_embd),
}
TAPERED_SITES = {"none": (), "internal": ("block",), "final": ("final",), "all": ("block", "final")}


def make_norm(c: ModelConfig, site: str) -> nn.Module:
    """The norm of a site, "block" or "final", before any fold."""
    if site not in TAPERED_SITES[c.taper]:
        return NORMS[c.norm](c)
    centre = c.norm == "layernorm"
    shift = centre and c.norm_bias
    return TaperNorm(c.n_embd, c.norm_eps, centre, shift, c.calib_skip_first, c.ema_rate)


# ---------------------------------------------------------------------------------------------------------
# layers


class CentredEmbedding(nn.Embedding):
    """Rows with their mean taken off (CBWC): the stream starts with mean 0. The parameter stays uncentred."""

    def forward(self, idx):
        x = super().forward(idx)
        return x - x.mean(-1, keepdim=True)

    def plain(self) -> nn.Embedding:
        return nn.Embedding.from_pretrained(self.weight - self.weight.mean(1, keepdim=True), freeze=False)


class CentredLinear(nn.Linear):
    """V = W - mean of W over its output features (CBWC): what it writes has mean 0."""

    def centred(self):
        return self.weight - self.weight.mean(0, keepdim=True)

    def forward(self, x):
        return F.linear(x, self.centred())

    def plain(self) -> nn.Linear:
        linear = nn.Linear(self.in_features, self.out_features, bias=False, device="meta")
        linear.weight = nn.Parameter(self.centred())
        return linear


def rope_tables(c: ModelConfig, device) -> torch.Tensor:
    """float32 rotary tables (2, block_size, 1, C): [0] cos, [1] sin with the half-split rotation's sign."""
    numbers = partial(torch.arange, device=device, dtype=torch.float32)
    frequency = c.rope_base ** (-numbers(0, c.head_dim, 2) / c.head_dim)
    angle = torch.outer(numbers(c.block_size), frequency)  # (block_size, C/2)
    cos, sin = angle.cos(), angle.sin()
    return torch.stack((torch.cat((cos, cos), -1), torch.cat((-sin, sin), -1))).unsqueeze(2)


class KVCache:
    """Keys and values of the tokens seen so far, preallocated. k and v hold one (B, K, length, C) a layer;
    `pos` (0-dim) counts the tokens. One tensor for all layers would be copied in each of them by the
    compiler, which cannot write into a slice."""

    def __init__(self, model: "Transformer", batch: int, length: int):
        c, w = model.config, model.tok_emb.weight
        shape = (batch, c.n_kv_head, length, c.head_dim)
        self.k = [torch.zeros(shape, device=w.device, dtype=w.dtype) for _ in range(c.n_layer)]
        self.v = [torch.zeros_like(k) for k in self.k]
        self.pos = torch.zeros((), dtype=torch.long, device=w.device)
        self.columns = torch.arange(length, device=w.device)


class Attention(nn.Module):
    def __init__(self, c: ModelConfig, writer: type[nn.Linear]):
        super().__init__()
        self.n_head, self.n_kv_head, self.head_dim = c.n_head, c.n_kv_head, c.head_dim
        self.qkv = nn.Linear(c.n_embd, (c.n_head + 2 * c.n_kv_head) * c.head_dim, bias=False)
        self.proj = writer(c.n_embd, c.n_embd, bias=False)

    def forward(self, x, rope, kv=None, rows=None, mask=None):
        """x: (B, T, D); rope: (2, T, 1, C); kv: this layer's cache (2 of (B, K, length, C)); rows: (T)
        positions to write in it; mask: (T, length). Returns the heads' output before `proj`, (B, T, D)."""
        B, T, D = x.shape
        H, K = self.n_head, self.n_kv_head
        heads = self.qkv(x).view(B, T, H + 2 * K, self.head_dim)
        qk, v = heads.split((H + K, K), 2)
        cos, sin = rope.to(qk.dtype)
        qk = torch.addcmul(qk * cos, qk.roll(self.head_dim // 2, -1), sin)  # (B, T, H+K, C)
        if torch.is_grad_enabled():
            v = v.clone()  # a view would keep all of qkv for the backward
        q, k, v = (t.transpose(1, 2) for t in (*qk.split((H, K), 2), v))  # (B, heads, T, C)
        if kv is not None:
            k, v = kv[0].index_copy_(2, rows, k), kv[1].index_copy_(2, rows, v)  # (B, K, length, C)
        y = attend(q, k, v, mask)
        return y.transpose(1, 2).reshape(B, T, D)


def product_matrix(linear: nn.Linear):
    """The (out, in) matrix that a layer multiplies by, where it does nothing else; None for one with a
    bias, a hook or an adapter."""
    watched = linear._forward_hooks or linear._forward_pre_hooks
    if type(linear) not in (nn.Linear, CentredLinear) or linear.bias is not None or watched:
        return None
    return linear.centred() if type(linear) is CentredLinear else linear.weight


class MLP(nn.Module):
    def __init__(self, c: ModelConfig, writer: type[nn.Linear]):
        super().__init__()
        self.gate_up = nn.Linear(c.n_embd, 2 * c.hidden, bias=False)
        self.down = writer(c.hidden, c.n_embd, bias=False)

    def forward(self, x):
        """(B, T, D) -> (B, T, D)"""
        uncompiled = torch.is_grad_enabled() and not torch.compiler.is_compiling()  # a compiler fuses better
        if uncompiled and (down := product_matrix(self.down)) is not None:
            return swiglu_product(self.gate_up(x), down)
        return self.down(swiglu(self.gate_up(x)))


class Block(nn.Module):
    def __init__(self, c: ModelConfig):
        super().__init__()
        writer = CentredLinear if c.norm == "cbwc" else nn.Linear
        self.norm_attn = make_norm(c, "block")
        self.attn = Attention(c, writer)
        self.norm_mlp = make_norm(c, "block")
        self.mlp = MLP(c, writer)

    def forward(self, x, gate, *context):
        x = x + self.attn.proj(self.attn(self.norm_attn(x, gate), *context))
        return x + self.mlp(self.norm_mlp(x, gate))

    def fold(self, gains: bool):
        self.norm_attn = absorb(self.norm_attn, self.attn.qkv, gains)
        self.norm_mlp = absorb(self.norm_mlp, self.mlp.gate_up, gains)


class CoupledBlock(Block):
    """The attention's RMS statistic serves the MLP too (CoupledNorm). There it is a constant to the gradient
    unless `coupled_grad`. Folded, the gains live in qkv and gate_up and the statistic enters the SwiGLU."""

    def __init__(self, c: ModelConfig):
        super().__init__(c)
        self.eps, self.through = c.norm_eps, c.coupled_grad

    def forward(self, x, gate, *context):
        if eager_training(x) and not (self.through or self.norm_mlp.weight is None):
            normed, inverse = rms_norm_and_inverse(x, self.norm_attn.weight, None, self.eps)
            h = x + self.attn.proj(self.attn(normed, *context))
            return h + self.mlp(h * inverse.to(h.dtype) * self.norm_mlp.weight)
        inverse = inverse_rms(x, self.eps).to(x.dtype)  # (B, T, 1)
        reused = inverse if self.through else inverse.detach()
        if self.norm_mlp.weight is None:
            h = add_product(x, self.attn(x * inverse, *context), self.attn.proj)
            return add_product(h, swiglu(self.mlp.gate_up(h), reused), self.mlp.down)
        h = x + self.attn.proj(self.attn(x * inverse * self.norm_attn.weight, *context))
        return h + self.mlp(h * reused * self.norm_mlp.weight)

    def fold(self, gains: bool):
        super().fold(gains=True)


def add_product(residual, x, linear: nn.Linear):
    """residual + linear(x) in one product. (B, T, D), (B, T, in) -> (B, T, D)."""
    return torch.addmm(residual.flatten(0, 1), x.flatten(0, 1), linear.weight.t()).view_as(residual)


class Losses(NamedTuple):
    """Of one batch: total = ce + aux, 0-dim; stream: the final norm's input (B, T, D), detached."""

    total: torch.Tensor
    ce: torch.Tensor
    aux: torch.Tensor
    stream: torch.Tensor


class Transformer(nn.Module):
    """`model(idx)` gives logits, `model(idx, targets)` Losses. In eval mode whatever tapers is at g = 0."""

    def __init__(self, config: ModelConfig):
        super().__init__()
        if config.form != "trained":
            made = "is made by fold() or unfuse(), or read by Transformer.load()"
            raise ModelError(f"form={config.form} {made}")
        c = self.config = config
        self.meta: dict = {}  # what the file it was loaded from says beside the weights
        self.tok_emb = (CentredEmbedding if c.norm == "cbwc" else nn.Embedding)(c.vocab_size, c.n_embd)
        plain = c.coupled_from_layer if c.norm == "coupled" else c.n_layer
        self.blocks = nn.ModuleList(Block(c) if i < plain else CoupledBlock(c) for i in range(c.n_layer))
        self.norm_final = make_norm(c, "final")
        self.lm_head = None if c.tie_embeddings else nn.Linear(c.n_embd, c.vocab_size, bias=False)
        self.anchor = ScaleAnchor(c.norm_eps, c.norm == "layernorm", c.ema_rate) if c.aux_weight > 0 else None
        self.register_buffer("gate", torch.tensor(1.0), persistent=False)  # the schedule's, the host's to set
        self.rope = rope_tables(c, self.gate.device)
        for name, p in self.named_parameters():  # the same draws in the same order for every norm
            if p.dim() == 2:
                writes_stream = name.endswith(("attn.proj.weight", "mlp.down.weight"))
                nn.init.normal_(p, std=0.02 / math.sqrt(2 * c.n_layer) if writes_stream else 0.02)
        self.set_phase("norm")

    def _apply(self, fn, recurse=True):
        super()._apply(fn, recurse)
        self.rope = rope_tables(self.config, self.tok_emb.weight.device)  # float32, whatever the weights are
        return self

    # --- forward

    def forward(self, idx, targets=None, cache: KVCache | None = None, last_only: bool = False):
        """idx, targets: (B, T) token ids. Returns logits (B, T, V), with last_only (B, 1, V); or Losses."""
        T = idx.shape[1]
        x = self.tok_emb(idx)  # (B, T, D)
        if cache is None:
            context = [(self.rope[:, :T],)] * len(self.blocks)
        else:
            rows = cache.pos + torch.arange(T, device=idx.device)
            mask = cache.columns <= rows[:, None]  # (T, length)
            context = [(self.rope[:, rows], kv, rows, mask) for kv in zip(cache.k, cache.v, strict=True)]
        for block, args in zip(self.blocks, context, strict=True):
            x = block(x, self.gate, *args)
        if cache is not None:
            cache.pos += T
        if targets is None:
            x = x[:, -1:] if last_only else x
            return F.linear(self.norm_final(x, self.gate), *self.head())
        ce = head_loss(self.norm_final(x, self.gate), *self.head(), targets)
        scale_loss = None if self.anchor is None else self.anchor(x)
        if scale_loss is None:
            return Losses(ce, ce.detach(), torch.zeros_like(ce), x.detach())
        aux = self.config.aux_weight * scale_loss
        return Losses(ce + aux, ce.detach(), aux.detach(), x.detach())

    def head(self):
        """(weight (V, D), bias (V) or None) of the output head."""
        if self.lm_head is None:
            return self.tok_emb.weight, None
        return self.lm_head.weight, self.lm_head.bias

    @torch.no_grad()
    def diagnostics(self, stream) -> tuple[torch.Tensor, torch.Tensor]:
        """Mean scale of the final norm's input, mean l2 norm of the logits, 0-dim. stream: (B, T, D).

        |W y|^2 = y (W'W) y, so the (B, T, V) logits are never built.
        """
        h = upcast(stream)
        y = upcast(self.norm_final(h, self.gate))
        W = upcast(self.head()[0])
        s = stream_scale(h, self.config.norm_eps, self.config.norm == "layernorm").mean()
        return s, ((y @ (W.t() @ W)) * y).sum(-1).clamp_min(0).sqrt().mean()

    def flops_per_token(self) -> int:
        """Of a training step (forward, backward) at a full window: 6 per matrix weight, causal attention."""
        c = self.config
        matrices = {name: p.numel() for name, p in self.named_parameters() if p.dim() == 2}
        if self.lm_head is not None:
            del matrices["tok_emb.weight"]  # looked up, not multiplied by
        return 6 * sum(matrices.values()) + 6 * c.n_layer * c.block_size * c.n_embd

    # --- taper

    def taper_norms(self) -> dict[str, TaperNorm]:
        """{"0.attn": ..., "0.mlp": ..., "final": ...}, those that taper."""
        sites = {}
        for i, block in enumerate(self.blocks):
            sites |= {f"{i}.attn": block.norm_attn, f"{i}.mlp": block.norm_mlp}
        sites["final"] = self.norm_final
        return {name: norm for name, norm in sites.items() if isinstance(norm, TaperNorm)}

    def trackers(self) -> dict[str, Tracker]:
        return self.taper_norms() | ({} if self.anchor is None else {"anchor": self.anchor})

    def set_phase(self, phase: str):
        """phase: "norm", "blend" or "scale". Only parameters that the phase uses take a gradient."""
        self.phase = phase
        for t in self.trackers().values():
            t.phase = phase
        for n in self.taper_norms().values():
            n.weight.requires_grad_(phase != "scale")
            n.weight_tilde.requires_grad_(phase != "norm")

    @torch.no_grad()
    def calibrate(self):
        """Freeze every c and the scale target as the norm phase ends. Raises: ModelError, naming the norm."""
        for name, tracker in self.trackers().items():
            try:
                tracker.calibrate()
            except ModelError as e:
                raise ModelError(f"{name}: {e}") from None

    @torch.no_grad()
    def update_statistics(self, all_reduce=None):
        """Once a step: one EMA observation from its micro-batches. `all_reduce` sums over ranks in place."""
        trackers = list(self.trackers().values()) if self.phase == "norm" else []
        if not trackers:
            return
        flat = torch.cat([t.sums for t in trackers])
        if all_reduce is not None:
            all_reduce(flat)
        means, averages = [], []
        for t, sums in zip(trackers, flat.split([len(t.sums) for t in trackers]), strict=True):
            means += (sums[:-1] / sums[-1]).unbind()
            averages += t.averages()
        torch._foreach_lerp_(averages, means, self.config.ema_rate)
        torch._foreach_add_([t.ema_count for t in trackers], 1.0)
        torch._foreach_zero_([t.sums for t in trackers])

    # --- text

    @torch.inference_mode()
    def generate(
        self, idx, max_new_tokens: int, temperature=1.0, top_k: int | None = None, top_p=1.0,
        seed: int | None = None, stop_id: int | None = None, use_cache=True, compile=False,
    ):  # fmt: skip
        """Continue idx (B, T >= 1). Temperature 0 is greedy. Returns (B, T + new), and ends early once
        every row has said stop_id (rows that said it before are padded with it). `compile` makes the step
        from one token to the next a single graph, compiled once for each B and each 128 tokens of cache; it
        needs the cache. Raises: ModelError for logits that are not finite.

        The context is the last block_size tokens; when full it drops to its newer half, with the cache or
        without.
        """
        was_training = self.training
        self.eval()
        size = self.config.block_size
        rng = None if seed is None else torch.Generator(idx.device).manual_seed(seed)
        done = torch.zeros(len(idx), 1, dtype=torch.bool, device=idx.device)
        finite = torch.zeros((), device=idx.device)
        start, cache, fresh = max(0, idx.shape[1] - size), None, True
        decode = compiled_decoding(self, idx.device) if compile else self
        for _ in range(max_new_tokens):
            if idx.shape[1] - start > size:
                start, fresh = idx.shape[1] - max(1, size // 2), True
            if not use_cache:
                logits = self(idx[:, start:], last_only=True)
            elif fresh:
                unseen = idx[:, start:]
                length = unseen.shape[1] + max_new_tokens
                length = 128 * math.ceil(length / 128) if compile else length
                cache, fresh = KVCache(self, len(idx), min(size, length)), False
                logits = self(unseen, cache=cache, last_only=True)
            else:
                logits = decode(unseen, cache=cache, last_only=True)
            finite = finite + logits.sum(dtype=torch.float32)  # nan or infinite once a logit was
            new = sample_token(logits[:, -1], temperature, top_k, top_p, rng)
            if stop_id is not None:
                new = new.masked_fill(done, stop_id)
                done |= new == stop_id
            idx, unseen = torch.cat((idx, new), 1), new
            if stop_id is not None and done.all():
                break
        self.train(was_training)
        if not finite.isfinite():
            why = "is this a checkpoint from before its taper's end?"
            raise ModelError(f"the logits are not finite, so there is nothing to sample; {why}")
        return idx

    # --- files

    def to_file(self, meta: dict) -> dict:
        """What a model file holds; torch.save it."""
        return {"config": asdict(self.config), "state": self.state_dict(), "meta": {**meta, "format": FORMAT}}

    @classmethod
    def load(cls, path, device="cpu") -> "Transformer":
        """The model of any file this project writes, in eval mode on `device`; its `meta` is the file's.

        Raises: ModelError, one line, for a file that is missing, cut short, foreign, or does not fit its
        config.
        """
        return cls.from_file(read_file(path), path).to(device)

    @classmethod
    def from_file(cls, file: dict, path="file") -> "Transformer":
        """The same from what read_file(path) returned."""
        state, meta = file["state"], file["meta"]
        try:
            config = ModelConfig(**file["config"])
            table = (config.vocab_size, config.n_embd)
            if config.n_layer > len(state) or state["tok_emb.weight"].shape != table:
                raise ModelError(f"{path} does not fit its config: other shapes")  # before they are allocated
            # the form gives the structure, the file the values
            model = FORMS[config.form](cls(replace(config, form="trained")))
        except (TypeError, RuntimeError) as e:
            raise ModelError(f"{path} holds a config that this version cannot use: {e}") from None
        check_state(state, model.state_dict(), path)
        gate, phase = meta.get("gate", 0.0), meta.get("phase", "norm")
        if phase not in ("norm", "blend", "scale"):
            said = phase if isinstance(phase, str) else type(phase).__name__
            raise ModelError(f"{path} is of another version: it says that its phase is {said}")
        if not (isinstance(gate, float) and 0 <= gate <= 1 and isinstance(meta.get("corpus", {}), dict)):
            raise ModelError(
                f"{path} is of another version: its gate or its corpus is not what this one writes"
            )
        model.to(state["tok_emb.weight"].dtype).load_state_dict(state)
        model.meta = meta
        model.gate.fill_(gate)
        model.set_phase(phase)
        return model.eval()


def compiled_decoding(model: Transformer, device: torch.device):
    """`model` as one graph a call, for shapes that do not change."""
    torch._dynamo.config.recompile_limit = 256  # it counts other models and shapes too, and gives up after 8
    options = {"cpp_wrapper": True} if device.type == "cpu" else None  # on a CPU, C++ calls the kernels then
    return torch.compile(model, fullgraph=True, dynamic=False, options=options)


def check_state(state: dict, wanted: dict, path):
    """Raises: ModelError, naming the tensor, unless `state` is finite and shaped and named as `wanted`."""
    for name in sorted(wanted.keys() | state.keys(), key=str):
        if name not in state:
            raise ModelError(f"{path} does not fit its config: tensor {name} is missing")
        if name not in wanted:
            raise ModelError(f"{path} does not fit its config: it has no place for tensor {name}")
        got, want = tuple(state[name].shape), tuple(wanted[name].shape)
        if got != want:
            raise ModelError(f"{path} does not fit its config: {name} is {got}, not {want}")
        if not torch.isfinite(state[name]).all():
            raise ModelError(f"{path} is damaged: {name} holds values that are not finite")


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


# ---------------------------------------------------------------------------------------------------------
# folding: everything linear that stands before a matrix product moves into the matrix


def absorb(norm: nn.Module, linear: nn.Linear, gains: bool) -> nn.Module:
    """Move the linear part of `norm` into the layer that reads it; returns what is left of the norm.

    y = core(h) * gain + shift read by W:  W <- W diag(gain), b <- b + W shift, and a centring of h becomes
    W <- W (I - 11'/D).
    """
    core, gain, shift, centre = norm.factor(gains)
    W = linear.weight.data
    if shift is not None:
        linear.bias = nn.Parameter(W @ shift.data + (0 if linear.bias is None else linear.bias.data))
    if gain is not None:
        W = W * gain.data
    if centre:
        W = W - W.mean(1, keepdim=True)
    linear.weight = nn.Parameter(W)
    return core


def transformed(model: Transformer, change, form: str) -> Transformer:
    """A copy in eval mode, without the anchor, with `change(copy)` done in float64 and cast back once."""
    dtype = model.tok_emb.weight.dtype
    with torch.no_grad():
        new = copy.deepcopy(model).double()
        new.anchor = None
        change(new)
        new.config = replace(model.config, form=form, tie_embeddings=new.lm_head is None)
        return new.to(dtype).requires_grad_().eval()


def fold(model: Transformer, gains: bool = False) -> Transformer:
    """A plain model with the same logits: tapered norms at g = 0 are gone, CBWC's weights are centred for
    good, CoupledNorm keeps one bare statistic a block. `gains` moves the gains and shifts of the norms that
    stay into the layers that read them as well. A tied head that changes is untied. `model` itself is left
    alone."""

    def change(m: Transformer):
        tied, last = m.lm_head is None, m.norm_final
        if tied:
            m.lm_head = nn.Linear(m.config.n_embd, m.config.vocab_size, bias=False, device="meta")
            m.lm_head.weight = nn.Parameter(m.tok_emb.weight.data.clone())
        m.norm_final = absorb(last, m.lm_head, gains)
        for block in m.blocks:
            block.fold(gains)
        centred = [(name, layer) for name, layer in m.named_modules() if hasattr(layer, "plain")]
        for name, layer in centred:
            m.set_submodule(name, layer.plain())
        if tied and m.norm_final is last and not centred:
            m.lm_head = None

    return transformed(model, change, "weightless" if gains else "folded")


def unfuse(model: Transformer) -> Transformer:
    """A copy in which every tapered norm is an explicit scaling (`Scale`)."""

    def change(m: Transformer):
        for parent in (m, *m.blocks):
            for name, child in parent.named_children():
                if isinstance(child, TaperNorm):
                    setattr(parent, name, child.at_zero())

    return transformed(model, change, "unfused")


def exports(config: ModelConfig) -> dict[str, str]:
    """{file name: form} that a finished run writes: two where folding changes the network, else one."""
    changes = config.taper != "none" or config.norm in ("coupled", "cbwc")
    return {"unfused.pt": "unfused", "folded.pt": "folded"} if changes else {"model.pt": "unfused"}


FORMS = {"trained": lambda m: m, "unfused": unfuse, "folded": fold, "weightless": partial(fold, gains=True)}

# Largest |logit difference| over largest |logit|: float64 shows that the algebra is exact; in the model's own
# type two orders of summation differ by rounding, which grows with depth (seen: 1e-6 in float32 at 8 layers).
TOLERANCE = {torch.float64: 1e-9, torch.float32: 1e-4, torch.bfloat16: 1e-1}


@torch.no_grad()
def fold_error(model: Transformer, form: str, idx, dtype: torch.dtype) -> float:
    """max |logits(FORMS[form](model)) - logits(model)| / max |logits(model)| in `dtype` on idx (B, T)."""
    reference = copy.deepcopy(model).to(dtype).eval()
    logits = reference(idx)
    return ((FORMS[form](reference)(idx) - logits).abs().max() / logits.abs().max()).item()


def export(model: Transformer, form: str, idx) -> tuple[Transformer, dict[str, float]]:
    """(FORMS[form](model), {dtype: its fold_error on idx (B, T)}), in float64 and in the model's own type.

    Raises: ModelError if an error exceeds TOLERANCE or is not finite.
    """
    errors = {}
    for dtype in (torch.float64, model.tok_emb.weight.dtype):
        name = str(dtype).removeprefix("torch.")
        errors[name] = fold_error(model, form, idx, dtype)
        if not errors[name] <= TOLERANCE[dtype]:
            off = f"{errors[name]:.1e} of the logit scale in {name}"
            raise ModelError(f"the {form} model differs from the trained one by {off}; not exported")
    return FORMS[form](model), errors
