"""The whole transformer: norms, attention, MLP, cache, generation, model files, fold and its proof.

Pre-norm, causal; SwiGLU, RoPE, no bias and no dropout unless a knob says otherwise: GPT-2, Llama, Qwen2 and
Qwen3 are settings of it. Three knobs choose the normalization: `norm` (which normalizer), `taper` (which of
them are gated into a fixed scaling) and `aux_weight` (the loss that holds the residual stream's scale).
Papers, cited below by these names:

    TaperNorm      Kanavalau, Amo Alonso, Lall, arXiv 2602.10408; its symbols: g, c, gamma, gamma_tilde, s, mu
    CoupledNorm    Loretz, Hochreiter, ICML 2026
    CBWC+RMSNorm   "Enjoy your Layer Normalization with the computational efficiency of RMSNorm"
    FakeLN         Baroni et al. 2025, arXiv 2507.02559, as its public code has it
    DyT            Zhu et al., arXiv 2503.10622;  Derf: the same with erf and a learned shift

Shapes: B batch, T time, D = n_embd, H query heads, K key/value heads, C = head_dim, F = hidden, V vocabulary.
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
from nanonorm.files import FORMAT, check_state, phase_and_gates, read_file
from nanonorm.generation import KVCache, generate
from nanonorm.initialization import initialize
from nanonorm.kernels import (
    PIECE,
    add_product,
    attend,
    autocasts,
    by_rows,
    eager_training,
    head_loss,
    inverse_rms,
    product,
    rms_norm,
    rms_norm_and_inverse,
    scaled,
    swiglu,
    swiglu_product,
    types_of,
    upcast,
    with_factor,
)
from nanonorm.rotary import is_llama3_scaling, rope_tables
from nanonorm.scale import (
    BatchAnchor,
    ScaleAnchor,
    Tracker,
    diagnostics,
    observe_step,
    recomputed,
    stream_scale,
)
from nanonorm.schedules import TAPERED_SITES, gate_sites
from nanonorm.typed import Count, NonNegative, Numbers, Positive, Range, Whole, check, hints, in_words


@dataclass(frozen=True)
class ModelConfig:
    """The architecture; travels in every model file. The one declaration of its knobs: the run's settings
    and the benchmark's take them from here, and `--help` prints the comments. Raises: ModelError for what
    makes no sense."""

    # shape
    vocab_size: Annotated[int, Range(2, 2**24)] = 10_000  # token ids; in a run None: its corpus's number
    block_size: Annotated[int, Range(1, 2**24)] = 512  # context length, tokens
    n_layer: Annotated[int, Range(1, 4096)] = 8  # blocks
    n_head: Count = 16  # query heads
    n_kv_head: Count | None = None  # key/value heads (grouped-query attention); None: n_head
    n_embd: Count = 512  # width of the residual stream
    head_dim: Count | None = None  # width of a head; None: n_embd/n_head
    mlp: Literal["swiglu", "gelu", "gelu_erf"] = "swiglu"  # gelu is the tanh form, gelu_erf the exact one
    hidden: Count | None = None  # width of the MLP; None: 8/3 n_embd, up to a multiple of 8; gelu: 4 n_embd
    tie_embeddings: bool = True  # the output head shares the embedding table
    positions: Literal["rope", "learned"] = "rope"  # rotary angles, or a table added to the embeddings
    rope_base: Positive = 10000.0  # base of the rotary angles
    rope_scaling: Numbers | None = None  # Llama 3's: factor, low, high frequency factor, original length
    bias: bool = False  # every linear layer of the blocks has a bias
    qkv_bias: bool = False  # the query, key and value projection alone has one
    qk_norm: bool = False  # RMSNorm of every query and key head, before the rotation
    dropout: Annotated[float, Range(0.0, 0.999)] = 0.0  # of embeddings, attention, and what a block adds
    emb_scale: Annotated[float, Range(1e-6, 1e6)] | None = None  # the embeddings' learned factor starts here
    # first weights
    init: Literal["gpt2", "fan_in"] = "gpt2"  # standard deviation of the blocks' matrices: 0.02, 1/sqrt(in)
    dyt_alpha: Numbers | None = None  # of dyt, derf: alpha before attentions, MLPs, the head; None: 0.5 each
    # norms
    norm: Literal["rmsnorm", "layernorm", "coupled", "cbwc", "dyt", "derf"] = "rmsnorm"  # the normalizer
    taper: Literal["none", "internal", "final", "all"] = "none"  # which norms are gated away
    taper_qk: bool = False  # the norms of queries and keys taper too (internal, all)
    calibration: Literal["least_squares", "mean_scale"] = "least_squares"  # c: TaperNorm's fit, or FakeLN's
    aux_weight: NonNegative = 0.0  # lambda of the scale loss; the paper's is 0.1, 0 is off
    anchor_target: Literal["fixed", "batch"] = "fixed"  # of that loss: frozen at gate_start, or each batch's
    anchor_unit: Literal["absolute", "relative"] = "absolute"  # (s - target)^2, or (s/target - 1)^2
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
        if self.n_embd % self.n_head and self.head_dim is None:
            multiple = f"n_embd={self.n_embd} must be a multiple of n_head={self.n_head}"
            raise ModelError(f"{multiple}, or head_dim be given")
        # three matrices of a SwiGLU's width cost what a GELU's two would
        hidden = 8 * math.ceil(self.n_embd / 3) if self.mlp == "swiglu" else 4 * self.n_embd
        derived = {"n_kv_head": self.n_head, "head_dim": self.n_embd // self.n_head, "hidden": hidden}
        for name, value in derived.items():
            if getattr(self, name) is None:
                object.__setattr__(self, name, value)
        self.refuse_nonsense()

    def refuse_nonsense(self):
        """Raises: ModelError for knobs that contradict each other, naming what would work."""
        norm, tapers, coupled = self.norm, self.taper != "none", self.norm == "coupled"
        rotary, default_base = self.positions == "rope", type(self).rope_base
        if self.head_dim % 2 and rotary:
            raise ModelError(f"head_dim={self.head_dim} must be even: RoPE turns pairs")
        if not rotary and (self.rope_scaling is not None or self.rope_base != default_base):
            raise ModelError("rope_base and rope_scaling need positions=rope")
        if self.rope_scaling is not None and not is_llama3_scaling(self.rope_scaling):
            four = "factor, low and high frequency factor, original length, and high must be above low"
            raise ModelError(f"rope_scaling must be four numbers: {four}")
        if self.bias and self.qkv_bias:
            raise ModelError("bias=True gives qkv a bias already: leave qkv_bias out")
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
        if self.taper_qk and not (self.qk_norm and self.taper in ("internal", "all")):
            raise ModelError("taper_qk=True needs qk_norm=True and taper=internal or all")
        for name, value in NO_TAPER.items():
            if getattr(self, name) != value and not tapers:
                needs = "needs a taper: with taper=none nothing is calibrated"
                raise ModelError(f"{name}={getattr(self, name)} {needs}")
        for name, value in NO_ANCHOR.items():
            if getattr(self, name) != value and not self.aux_weight:
                raise ModelError(f"{name}={getattr(self, name)} needs aux_weight above 0, such as 0.1")
        alphas = self.dyt_alpha
        if alphas is not None and (norm not in ("dyt", "derf") or len(alphas) != 3 or max(alphas) > 1e6):
            raise ModelError("dyt_alpha is three numbers up to 1e6, and needs norm=dyt or derf")
        if self.calib_skip_first and self.block_size == 1:
            raise ModelError("calib_skip_first=True needs block_size above 1")


# The knobs that mean something only beside another, and their values where that is off
NO_TAPER = {"taper": "none", "taper_qk": False, "calib_skip_first": False, "calibration": "least_squares"}
NO_ANCHOR = {"aux_weight": 0.0, "anchor_target": "fixed", "anchor_unit": "absolute"}


# ---------------------------------------------------------------------------------------------------------
# norms
#
# A norm maps (B, T, D) to (B, T, D) given the gates of all sites, which only TaperNorm reads. For folding it
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


DELTA = 1e-12  # keeps c finite where the stream is 0


class TaperNorm(Tracker):
    """RMSNorm (or LayerNorm, `centre`) that the gate g turns into a fixed scaling.

        g * h/r(h) * weight + (1-g) * c * h * weight_tilde

    For LayerNorm h is h - mean(h), r is sigma, and a bias is added. Phase "norm" is the plain norm (the
    baseline's own kernel), "blend" the formula, "scale" its g = 0 case. In eval mode the module is always
    at g = 0, before calibration with the c that calibration would give now. `site` is its place among the
    gates of a Transformer; outside of one it is given its own.
    """

    quantities, gains = ("ema_num", "ema_den"), ("weight", "weight_tilde")

    def __init__(self, dim: int, eps: float, centre=False, shift=False, skip_first=False, ema_rate=0.01):
        super().__init__(ema_rate)
        self.eps, self.centre, self.skip_first, self.site = eps, centre, skip_first, ()
        for name in self.gains:
            self.register_parameter(name, nn.Parameter(torch.ones(dim)))
        self.bias = nn.Parameter(torch.zeros(dim)) if shift else None
        self.register_buffer("c", torch.tensor(1.0))

    def set_phase(self, phase: str):
        """Only the gains that the phase uses take a gradient."""
        self.phase = phase
        self.weight.requires_grad_(phase != "scale")
        self.weight_tilde.requires_grad_(phase != "norm")

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
            g = gate[self.site]  # 0-dim
            fixed = (1 - g) * self.c * self.weight_tilde  # (D)
            return rms_norm(x, g * self.weight, self.bias, self.eps, fixed).to(h.dtype)
        return scaled(h, self.fixed(), self.bias, self.centre)

    @torch.no_grad()
    def observe(self, h):
        """num = |h w|^2 / r(h) and den = |h w|^2 of every token. h: (B, T, D), or (B, T, heads, C)."""
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
        nothing_flows = self.corrected()[-1] <= DELTA  # c would be a fit to DELTA, not to the stream
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


class MeanScaleNorm(TaperNorm):
    """FakeLN: a TaperNorm with c = 1 / mean of r, and one gain, which trains from the first step to the last.

        (g/r(h) + (1-g) * c) * h * weight

    r's mean is over all tokens of a step, and its EMA moves once a step and is bias-corrected; FakeLN's moves
    once a micro-batch and starts from a file. c follows it as long as the gate is above 0, and stays from
    then on: in step k it is made of the steps before k. The norm before the attention has two gates, for
    queries and keys, and for values, which share all else: c stays when the second drops. In phase "blend"
    it returns what each of the two sees, in a pair.
    """

    quantities, gains, phases = ("ema_s",), ("weight",), ("norm", "blend")
    set_phase = Tracker.set_phase

    @property
    def weight_tilde(self):
        return self.weight

    def forward(self, h, gate=None):
        if not (self.training and self.phase == "blend"):
            return super().forward(h, gate)
        if self.collecting():
            self.observe(h)
        x = upcast(h)
        if self.centre:
            x = x - x.mean(-1, keepdim=True)
        inverse, seen = inverse_rms(x, self.eps), []
        for g in gate[self.site].view(-1):  # one or two, 0-dim
            y = x * (g * inverse + (1 - g) * self.c) * self.weight
            seen.append((y if self.bias is None else y + self.bias).to(h.dtype))
        return seen[0] if len(seen) == 1 else tuple(seen)

    @torch.no_grad()
    def observe(self, h):
        self.add(stream_scale(h[:, 1:] if self.skip_first else h, self.eps, self.centre))

    def c_now(self):
        return 1 / self.corrected()[0]

    def follow(self, gate):
        still_up = gate[self.site].max() > 0
        self.c.copy_(torch.where(still_up, self.c_now(), self.c))


CALIBRATIONS = {"least_squares": TaperNorm, "mean_scale": MeanScaleNorm}
ANCHORS = {"fixed": ScaleAnchor, "batch": BatchAnchor}

NORMS = {  # name -> norm of a ModelConfig
    "rmsnorm": lambda c: RMSNorm(c.n_embd, c.norm_eps),
    "layernorm": lambda c: LayerNorm(c.n_embd, c.norm_eps, shift=c.norm_bias),
    "coupled": lambda c: RMSNorm(c.n_embd, c.norm_eps),
    "cbwc": lambda c: RMSNorm(c.n_embd, c.norm_eps, shift=c.norm_bias),
    "dyt": lambda c: DyT(c.n_embd),
    "derf": lambda c: Derf(c.n_embd),
}


def make_norm(c: ModelConfig, site: str) -> nn.Module:
    """The norm of a site, "block", "final" or "qk" (queries or keys, always RMSNorm), before any fold."""
    taper_norm = partial(CALIBRATIONS[c.calibration], skip_first=c.calib_skip_first, ema_rate=c.ema_rate)
    if site == "qk":
        return taper_norm(c.head_dim, c.norm_eps) if c.taper_qk else RMSNorm(c.head_dim, c.norm_eps)
    if site not in TAPERED_SITES[c.taper]:
        return NORMS[c.norm](c)
    centre = c.norm == "layernorm"
    shift = centre and c.norm_bias
    return taper_norm(c.n_embd, c.norm_eps, centre, shift)


# ---------------------------------------------------------------------------------------------------------
# layers


class CentredEmbedding(nn.Embedding):
    """Rows with their mean taken off (CBWC): the stream starts with mean 0. The parameter stays uncentred."""

    def forward(self, idx):
        x = super().forward(idx)
        return x - x.mean(-1, keepdim=True)

    def plain(self) -> nn.Embedding:
        table = by_rows(self.weight, lambda rows: rows - rows.mean(1, keepdim=True))
        return nn.Embedding.from_pretrained(table, freeze=False)


class CentredLinear(nn.Linear):
    """V = W - mean of W over its output features (CBWC): what it writes has mean 0."""

    def centred(self):
        """(V, bias), the bias centred as well."""
        bias = None if self.bias is None else self.bias - self.bias.mean()
        return self.weight - self.weight.mean(0, keepdim=True), bias

    def forward(self, x):
        return F.linear(x, *self.centred())

    def plain(self) -> nn.Linear:
        linear = nn.Linear(self.in_features, self.out_features, bias=False, device="meta")
        weight, bias = self.centred()
        linear.weight, linear.bias = nn.Parameter(weight), None if bias is None else nn.Parameter(bias)
        return linear


class Attention(nn.Module):
    def __init__(self, c: ModelConfig, writer: type[nn.Linear]):
        super().__init__()
        self.n_head, self.n_kv_head, self.head_dim = c.n_head, c.n_kv_head, c.head_dim
        self.dropout = c.dropout
        width = (c.n_head + 2 * c.n_kv_head) * c.head_dim
        self.qkv = nn.Linear(c.n_embd, width, bias=c.bias or c.qkv_bias)
        self.norm_q, self.norm_k = (make_norm(c, "qk") if c.qk_norm else None for _ in range(2))
        self.proj = writer(c.n_head * c.head_dim, c.n_embd, bias=c.bias)

    def heads(self, x):
        """x: (B, T, D), or a pair, for queries and keys and for values. (B, T, H + K, C), (B, T, K, C)"""
        H, K, C = self.n_head, self.n_kv_head, self.head_dim
        if isinstance(x, tuple):
            sizes = ((H + K) * C, K * C)
            biases = (None, None) if self.qkv.bias is None else self.qkv.bias.split(sizes)
            parts = map(F.linear, x, self.qkv.weight.split(sizes), biases)
            return tuple(part.unflatten(-1, (-1, C)) for part in parts)
        return self.qkv(x).unflatten(-1, (-1, C)).split((H + K, K), 2)

    def forward(self, x, rope, kv=None, rows=None, mask=None, gate=None):
        """x: as heads() takes it; rope: (2, T, 1, C) or None; kv: this layer's cache, called with k, v
        (B, K, T, C) and `rows`, the (T) positions to write; mask: (T, length). Returns the heads' output
        before `proj`, (B, T, H C)."""
        H, K = self.n_head, self.n_kv_head
        qk, v = self.heads(x)
        B, T = v.shape[:2]
        if self.norm_q is not None:
            q, k = qk.split((H, K), 2)
            qk = torch.cat((self.norm_q(q, gate), self.norm_k(k, gate)), 2)
        if rope is not None:
            cos, sin = rope.to(qk.dtype)
            qk = torch.addcmul(qk * cos, qk.roll(self.head_dim // 2, -1), sin)  # (B, T, H+K, C)
        if torch.is_grad_enabled():
            v = v.clone()  # a view would keep all of qkv for the backward
        q, k, v = (t.transpose(1, 2) for t in (*qk.split((H, K), 2), v))  # (B, heads, T, C)
        if kv is not None:
            k, v = kv(k, v, rows)  # (B, K, length, C)
        y = attend(q, k, v, mask, self.dropout if self.training else 0.0)
        return y.transpose(1, 2).reshape(B, T, -1)

    def take_out_scaling(self):
        """Remove the norms of queries and keys if they are scalings at gate 0. Returns what the rows of qkv
        are to be multiplied by in their place, ((H + 2K) C, 1), or None."""
        if not isinstance(self.norm_q, TaperNorm | Scale):
            return None
        q, k = (norm.factor(gains=False)[1].detach() for norm in (self.norm_q, self.norm_k))
        self.norm_q = self.norm_k = None
        K = self.n_kv_head
        return torch.cat((q.repeat(self.n_head), k.repeat(K), torch.ones_like(k).repeat(K))).unsqueeze(1)


def product_matrix(linear: nn.Linear):
    """The (out, in) matrix that a layer multiplies by, where it does nothing else; None for one with a
    bias, a hook or an adapter."""
    watched = linear._forward_hooks or linear._forward_pre_hooks
    if type(linear) not in (nn.Linear, CentredLinear) or linear.bias is not None or watched:
        return None
    return linear.centred()[0] if type(linear) is CentredLinear else linear.weight


class SwiGLU(nn.Module):
    def __init__(self, c: ModelConfig, writer: type[nn.Linear]):
        super().__init__()
        self.gate_up = nn.Linear(c.n_embd, 2 * c.hidden, bias=c.bias)
        self.down = writer(c.hidden, c.n_embd, bias=c.bias)

    @property
    def reader(self) -> nn.Linear:
        """The layer that reads the norm."""
        return self.gate_up

    def activation(self, x, inverse=None):
        """(B, T, D) [, (B, T, 1)] -> (B, T, F)"""
        return swiglu(product(self.gate_up, x, inverse))

    def forward(self, x):
        """(B, T, D) -> (B, T, D)"""
        uncompiled = torch.is_grad_enabled() and not torch.compiler.is_compiling()  # a compiler fuses better
        if uncompiled and (down := product_matrix(self.down)) is not None:
            return swiglu_product(self.gate_up(x), down)
        return self.down(self.activation(x))


class GELU(nn.Module):
    def __init__(self, c: ModelConfig, writer: type[nn.Linear]):
        super().__init__()
        self.approximate = "tanh" if c.mlp == "gelu" else "none"
        self.up = nn.Linear(c.n_embd, c.hidden, bias=c.bias)
        self.down = writer(c.hidden, c.n_embd, bias=c.bias)

    @property
    def reader(self) -> nn.Linear:
        return self.up

    def activation(self, x, inverse=None):
        return F.gelu(product(self.up, x, inverse), approximate=self.approximate)

    def forward(self, x):
        return self.down(self.activation(x))


class Block(nn.Module):
    def __init__(self, c: ModelConfig):
        super().__init__()
        writer = CentredLinear if c.norm == "cbwc" else nn.Linear
        self.dropout = c.dropout
        self.norm_attn = make_norm(c, "block")
        self.attn = Attention(c, writer)
        self.norm_mlp = make_norm(c, "block")
        self.mlp = SwiGLU(c, writer) if c.mlp == "swiglu" else GELU(c, writer)

    def drop(self, y):
        return F.dropout(y, self.dropout, self.training) if self.dropout else y

    def forward(self, x, gate, *context):
        x = x + self.drop(self.attn.proj(self.attn(self.norm_attn(x, gate), *context, gate=gate)))
        return x + self.drop(self.mlp(self.norm_mlp(x, gate)))

    def fold(self, gains: bool):
        rows = self.attn.take_out_scaling()
        self.norm_attn = absorb(self.norm_attn, self.attn.qkv, gains, rows)
        self.norm_mlp = absorb(self.norm_mlp, self.mlp.reader, gains)


class CoupledBlock(Block):
    """The attention's RMS statistic serves the MLP too (CoupledNorm). There it is a constant to the gradient
    unless `coupled_grad`. Folded, the gains live in qkv and gate_up and the statistic enters the SwiGLU."""

    def __init__(self, c: ModelConfig):
        super().__init__(c)
        self.eps, self.through = c.norm_eps, c.coupled_grad

    def forward(self, x, gate, *context):
        if eager_training(x) and not (self.through or self.norm_mlp.weight is None):
            normed, inverse = rms_norm_and_inverse(x, self.norm_attn.weight, None, self.eps)
            h = x + self.drop(self.attn.proj(self.attn(normed, *context, gate=gate)))
            return h + self.drop(self.mlp(h * inverse.to(h.dtype) * self.norm_mlp.weight))
        inverse = inverse_rms(x, self.eps).to(x.dtype)  # (B, T, 1)
        reused = inverse if self.through else inverse.detach()
        if self.norm_mlp.weight is None:
            if self.dropout and self.training:
                raise ModelError("a folded coupled model adds without dropout: train the one it came from")
            h = add_product(x, self.attn(x * inverse, *context, gate=gate), self.attn.proj)
            return add_product(h, self.mlp.activation(h, reused), self.mlp.down)
        h = x + self.drop(self.attn.proj(self.attn(x * inverse * self.norm_attn.weight, *context, gate=gate)))
        return h + self.drop(self.mlp(h * reused * self.norm_mlp.weight))

    def fold(self, gains: bool):
        super().fold(gains=True)


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
        self.end_token: int | None = None  # the corpus's end of a text
        self.mask_end = self.grad_checkpoint = False  # the run's
        table = CentredEmbedding if c.norm == "cbwc" else nn.Embedding
        self.tok_emb = table(c.vocab_size, c.n_embd)
        self.emb_scale = None if c.emb_scale is None else nn.Parameter(torch.tensor(c.emb_scale))
        self.pos_emb = table(c.block_size, c.n_embd) if c.positions == "learned" else None
        plain = c.coupled_from_layer if c.norm == "coupled" else c.n_layer
        self.blocks = nn.ModuleList(Block(c) if i < plain else CoupledBlock(c) for i in range(c.n_layer))
        self.norm_final = make_norm(c, "final")
        self.lm_head = None if c.tie_embeddings else nn.Linear(c.n_embd, c.vocab_size, bias=False)
        self.anchor = ANCHORS[c.anchor_target](c) if c.aux_weight > 0 else None
        places = {name: i for i, name in enumerate(self.gate_sites())}
        for name, norm in self.named_modules():
            if isinstance(norm, TaperNorm):
                i = places[name]
                norm.site = slice(i, i + 2) if f"{name}.v" in places else i
        # the schedule's, the host's to set; without a taper one that nobody reads
        self.register_buffer("gate", torch.ones(max(1, len(places))), persistent=False)
        self.rope = rope_tables(c, self.gate.device)
        initialize(self)
        self.set_phase("norm")

    def _apply(self, fn, recurse=True):
        super()._apply(fn, recurse)
        self.rope = rope_tables(self.config, self.tok_emb.weight.device)  # float32, whatever the weights are
        return self

    # --- forward

    def forward(self, idx, targets=None, cache: KVCache | None = None, last_only: bool = False):
        """idx, targets: (B, T) token ids. Returns logits (B, T, V), with last_only (B, 1, V); or Losses."""
        x = self.stream(idx, cache)
        if targets is None:
            x = x[:, -1:] if last_only else x
            return F.linear(self.norm_final(x, self.gate), *self.head())
        left_out = self.end_token if self.mask_end and self.training else None
        ce = head_loss(self.norm_final(x, self.gate), *self.head(), targets, left_out)
        return self.losses(x, ce, idx)

    def stream(self, idx, cache: KVCache | None = None):
        """The final norm's input. (B, T) token ids -> (B, T, D)"""
        T = idx.shape[1]
        rows, mask = slice(T), None
        if cache is not None:
            rows = cache.pos + torch.arange(T, device=idx.device)
            mask = cache.columns <= rows[:, None]  # (T, length)
        x = self.embed(idx, rows)  # (B, T, D)
        rope = None if self.rope is None else self.rope[:, rows]
        repeats = self.grad_checkpoint and self.training and torch.is_grad_enabled()
        for i, block in enumerate(self.blocks):
            kv = None if cache is None else partial(cache.update, i)
            context = (x, self.gate, rope, kv, rows, mask)
            x = recomputed(block, *context) if repeats else block(*context)
        if cache is not None:
            cache.pos += T
        return x

    def losses(self, x, ce, idx) -> Losses:
        """Of a batch, with the scale loss. x: the final norm's input (B, T, D); ce: what its output costs;
        idx: (B, T), the tokens that x comes from."""
        scale_loss = None if self.anchor is None else self.anchor(x, idx, self.end_token)
        if scale_loss is None:
            return Losses(ce, ce.detach(), torch.zeros_like(ce), x.detach())
        aux = self.config.aux_weight * scale_loss
        return Losses(ce + aux, ce.detach(), aux.detach(), x.detach())

    def embed(self, idx, rows):
        """The stream's first value. (B, T) ids, their positions (a slice, (T) or (B, T)) -> (B, T, D)."""
        x = self.tok_emb(idx)
        x = x if self.emb_scale is None else x * self.emb_scale
        if self.pos_emb is not None:
            at = torch.arange(rows.stop, device=idx.device) if isinstance(rows, slice) else rows
            x = x + self.pos_emb(at)
        x = upcast(x) if autocasts(x) else x  # a frozen table may be bfloat16, the stream not
        return F.dropout(x, self.config.dropout, self.training) if self.config.dropout else x

    def head(self):
        """(weight (V, D), bias (V) or None) of the output head."""
        if self.lm_head is None:
            return self.tok_emb.weight, None
        return self.lm_head.weight, self.lm_head.bias

    def flops_per_token(self) -> int:
        """Of a training step (forward, backward) at a full window: 6 per matrix weight, causal attention."""
        c = self.config
        matrices = {name: p.numel() for name, p in self.named_parameters() if p.dim() == 2}
        matrices.pop("pos_emb.weight", None)  # looked up, not multiplied by
        if self.lm_head is not None:
            del matrices["tok_emb.weight"]  # likewise
        return 6 * sum(matrices.values()) + 6 * c.n_layer * c.block_size * c.n_head * c.head_dim

    # --- taper

    def taper_norms(self) -> dict[str, TaperNorm]:
        """{"0.attn": ..., "0.q": ..., "0.k": ..., "0.mlp": ..., "final": ...}, those that taper."""
        sites = {}
        for i, block in enumerate(self.blocks):
            sites |= {f"{i}.attn": block.norm_attn, f"{i}.q": block.attn.norm_q, f"{i}.k": block.attn.norm_k}
            sites[f"{i}.mlp"] = block.norm_mlp
        sites["final"] = self.norm_final
        return {name: norm for name, norm in sites.items() if isinstance(norm, TaperNorm)}

    def gate_sites(self) -> list[str]:
        """What the entries of `gate` are of."""
        return gate_sites(self.config)

    def trackers(self) -> dict[str, Tracker]:
        return self.taper_norms() | ({"anchor": self.anchor} if isinstance(self.anchor, Tracker) else {})

    def set_phase(self, phase: str):
        """phase: "norm", "blend" or "scale". Only parameters that the phase uses take a gradient."""
        self.phase = phase
        for t in self.trackers().values():
            t.set_phase(phase)

    @torch.no_grad()
    def calibrate(self):
        """Set every c and the scale target as the norm phase ends. Raises: ModelError, naming the norm."""
        for name, tracker in self.trackers().items():
            try:
                tracker.calibrate()
            except ModelError as e:
                raise ModelError(f"{name}: {e}") from None

    @torch.no_grad()
    def update_statistics(self, all_reduce=None):
        """Once a step: one EMA observation from its micro-batches. `all_reduce` sums over ranks in place."""
        trackers = [t for t in self.trackers().values() if self.phase in t.phases]
        if trackers:
            observe_step(trackers, self.gate, self.config.ema_rate, all_reduce)

    # --- text, and what a log line says

    generate = generate
    diagnostics = diagnostics

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
        """The same from what read_file(path) returned; the tensors are the file's own, not copies."""
        config, (phase, gates) = config_of(file, path), phase_and_gates(file, path)
        model = skeleton(config, path)
        if len(gates) not in (1, len(model.gate)):
            said = f"{path} does not fit its config: {len(gates)} gates"
            raise ModelError(f"{said} in place of {len(model.gate)}")
        check_state(file["state"], model.state_dict(), path)
        model.load_state_dict(file["state"], assign=True)
        for module in model.modules():
            for name, buffer in module.named_buffers(recurse=False):
                if buffer.is_meta:  # not of the file: the gate, and the sums of a step
                    setattr(module, name, buffer.new_zeros(buffer.shape, device="cpu"))
        model.rope = rope_tables(config, "cpu")
        model.meta = file["meta"]
        model.gate.copy_(torch.tensor(gates))
        model.set_phase(phase)
        return model.eval()


def config_of(file: dict, path) -> ModelConfig:
    """The architecture that a file says it holds. Raises: ModelError if its tensors contradict it."""
    try:
        config = ModelConfig(**file["config"])
    except (TypeError, ModelError) as e:
        raise ModelError(f"{path} holds a config that this version cannot use: {e}") from None
    table, theirs = (config.vocab_size, config.n_embd), file["state"].get("tok_emb.weight")
    if config.n_layer > len(file["state"]) or theirs is None or theirs.shape != table:
        raise ModelError(f"{path} does not fit its config: other shapes")  # before they are made
    return config


def skeleton(config: ModelConfig, path) -> Transformer:
    """A model without values, on the meta device. Raises: ModelError if no memory could hold it."""
    try:
        with torch.device("meta"):
            return FORMS[config.form](Transformer(replace(config, form="trained")))
    except RuntimeError as e:
        raise ModelError(f"{path} holds a config that this version cannot use: {e}") from None


# ---------------------------------------------------------------------------------------------------------
# folding: everything linear that stands before a matrix product moves into the matrix
#
# A model is changed and proved part by part, a part being a block, or the final norm with some rows of the
# output head. So float64 never holds more than one of them, however large the model is.


def absorb(norm: nn.Module, linear: nn.Linear, gains: bool, rows=None) -> nn.Module:
    """Move the linear part of `norm` into the layer that reads it; returns what is left of the norm.

    y = core(h) * gain + shift read by W:  W <- W diag(gain), b <- b + W shift, and a centring of h becomes
    W <- W (I - 11'/D). `rows` (out, 1) then multiplies what W writes, bias and all.
    """
    core, gain, shift, centre = norm.factor(gains)
    W, b = linear.weight.data, None if linear.bias is None else linear.bias.data
    if shift is not None:
        b = W @ shift.data + (0 if b is None else b)
    if gain is not None:
        W = W * gain.data
    if centre:
        W = W - W.mean(1, keepdim=True)
    if rows is not None:
        W, b = W * rows, None if b is None else b * rows[:, 0]
    linear.weight, linear.bias = nn.Parameter(W), None if b is None else nn.Parameter(b)
    return core


class End(nn.Module):
    """The final norm, and some rows of the output head: (B, T, D) -> (B, T, rows)."""

    def __init__(self, norm: nn.Module, weight, bias):
        super().__init__()
        self.norm = norm
        self.linear = nn.Linear(*reversed(weight.shape), bias=False, device="meta")
        self.linear.weight = nn.Parameter(weight)
        self.linear.bias = None if bias is None else nn.Parameter(bias)

    def forward(self, x):
        return self.linear(self.norm(x))

    def fold(self, gains: bool):
        self.norm = absorb(self.norm, self.linear, gains)


def ends(model: Transformer) -> list[End]:
    """The end of a model, all rows of its head, in views of at most PIECE numbers."""
    weight, bias = (None if t is None else t.detach() for t in model.head())
    weights = weight.split(max(1, PIECE // weight.shape[1]))
    biases = [None] * len(weights) if bias is None else bias.split(len(weights[0]))
    return [End(model.norm_final, *piece) for piece in zip(weights, biases, strict=True)]


def reformed(part: nn.Module, form: str) -> nn.Module:
    """A copy of a Block or an End in another form, in eval mode: changed in float64, cast back once. It
    shares the tensors that come out as they were."""
    new, old = copy.deepcopy(part).double(), dict(part.named_parameters())
    if form == "unfused":
        changed = {name: m.at_zero() for name, m in new.named_modules() if isinstance(m, TaperNorm)}
    else:
        new.fold(gains=form == "weightless")
        changed = {name: m.plain() for name, m in new.named_modules() if hasattr(m, "plain")}
    for name, module in changed.items():
        new.set_submodule(name, module)
    for name, p in list(new.named_parameters()):
        owner, _, leaf = name.rpartition(".")
        was = old.get(name)
        p = p.detach().to(old[f"{owner}.weight"].dtype if was is None else was.dtype)
        same = was is not None and not p.is_meta and torch.equal(p, was)
        setattr(new.get_submodule(owner), leaf, nn.Parameter(was.detach() if same else p))
    return new.eval()


@torch.no_grad()
def transformed(model: Transformer, form: str) -> Transformer:
    """The model in another form, in eval mode and without the anchor. What the form does not change is
    shared with `model`, which is left alone."""
    shared = {id(p): nn.Parameter(p.detach()) for p in model.parameters()} | {id(model.rope): model.rope}
    new, folds = copy.deepcopy(model, shared), form != "unfused"
    new.anchor = None
    new.blocks = nn.ModuleList(reformed(block, form) for block in model.blocks)
    weight, bias = (None if t is None else t.detach() for t in model.head())
    tip = reformed(End(model.norm_final, weight[:1], None if bias is None else bias[:1]), form)
    new.norm_final = tip.norm
    of_norm = model.norm_final.factor(form == "weightless")[1:] if folds else ()
    head_changes = any(part is not None and part is not False for part in of_norm)
    if head_changes:
        bias = None if tip.linear.bias is None else weight.new_empty(len(weight))
        new.lm_head = End(tip.norm, torch.empty_like(weight), bias).linear
        for to, piece in zip(ends(new), ends(model), strict=True):
            linear = reformed(piece, form).linear
            to.linear.weight.copy_(linear.weight)
            if bias is not None:
                to.linear.bias.copy_(linear.bias)
    elif model.emb_scale is not None or (folds and isinstance(model.tok_emb, CentredEmbedding)):
        new.lm_head = End(tip.norm, weight, bias).linear
    if model.emb_scale is not None:
        new.tok_emb, new.emb_scale = with_factor(model.tok_emb, model.emb_scale), None
    for name in ("tok_emb", "pos_emb"):
        if folds and isinstance(getattr(new, name), CentredEmbedding):
            setattr(new, name, getattr(new, name).plain())
    new.config = replace(model.config, form=form, tie_embeddings=new.lm_head is None, emb_scale=None)
    return new.eval()


def fold(model: Transformer, gains: bool = False) -> Transformer:
    """A plain model with the same logits: tapered norms at g = 0 are gone, CBWC's weights are centred for
    good, CoupledNorm keeps one bare statistic a block. `gains` moves the gains and shifts of the norms that
    stay into the layers that read them as well. A tied head that changes is untied. `model` itself is left
    alone, and shares the tensors that the fold does not change."""
    return transformed(model, "weightless" if gains else "folded")


def unfuse(model: Transformer) -> Transformer:
    """The model with every tapered norm as an explicit scaling (`Scale`); it shares all other tensors."""
    return transformed(model, "unfused")


def exports(config: ModelConfig) -> dict[str, str]:
    """{file name: form} that a finished run writes: two where folding changes the network, else one."""
    changes = config.taper != "none" or config.norm in ("coupled", "cbwc")
    return {"unfused.pt": "unfused", "folded.pt": "folded"} if changes else {"model.pt": "unfused"}


FORMS = {"trained": lambda m: m, "unfused": unfuse, "folded": fold, "weightless": partial(fold, gains=True)}

# Largest |logit difference| over largest |logit|: float64 shows that the algebra is exact; in the model's own
# type two orders of summation differ by rounding, which grows with depth (seen: 1e-6 in float32 at 8 layers).
TOLERANCE = {torch.float64: 1e-9, torch.float32: 1e-4, torch.float16: 1e-2, torch.bfloat16: 1e-1}


@torch.no_grad()
def first_stream(model: Transformer, idx, dtype: torch.dtype, form: str = "trained"):
    """What `model`, its tables brought to `form`, embeds idx (B, T) as, computed in `dtype`. (B, T, D)"""
    x, tables = 0, ((model.tok_emb, idx, model.emb_scale), (model.pos_emb, torch.arange(idx.shape[1]), None))
    for table, ids, factor in tables:
        if table is not None:
            rows = table.weight[ids.flatten()].to(dtype)  # a small table: the whole one may be large
            small = type(table).from_pretrained(rows)
            if factor is not None and form != "trained":
                small, factor = with_factor(small, factor), None
            if form not in ("trained", "unfused") and hasattr(small, "plain"):
                small = small.plain()
            found = small(torch.arange(ids.numel())).view(*ids.shape, -1)
            x = x + (found if factor is None else found * factor.to(dtype))
    return x


@torch.no_grad()
def fold_error(model: Transformer, form: str, idx, dtype: torch.dtype) -> float:
    """max |logits(FORMS[form](model)) - logits(model)| / max |logits(model)| in `dtype` on idx (B, T), on the
    CPU and part by part. In another type than the model's own the parts are cast first, then folded."""
    own = dtype in types_of(model)
    new = FORMS[form](model) if own else model

    def both(part, changed):
        exact = copy.deepcopy(part).to(dtype).eval()
        return exact, copy.deepcopy(changed).to(dtype).eval() if own else reformed(exact, form)

    x = first_stream(model, idx, dtype)
    y = first_stream(new, idx, dtype, form)
    context = (model.gate, None if model.rope is None else model.rope[:, : idx.shape[1]])
    for parts in zip(model.blocks, new.blocks, strict=True):
        exact, changed = both(*parts)
        x, y = exact(x, *context), changed(y, *context)
    differences, scales = [], []
    for parts in zip(ends(model), ends(new), strict=True):
        exact, changed = both(*parts)
        logits = exact(x)
        differences.append((changed(y) - logits).abs().max())
        scales.append(logits.abs().max())
    return (torch.stack(differences).max() / torch.stack(scales).max()).item()


def export(model: Transformer, form: str, idx) -> tuple[Transformer, dict[str, float]]:
    """(FORMS[form](model), {dtype: its fold_error on idx (B, T)}), in float64 and in the model's own type: of
    several the widest, held to what the narrowest can do.

    Raises: ModelError if an error exceeds TOLERANCE or is not finite.
    """
    errors, types = {}, types_of(model)
    for dtype, limit in ((torch.float64, torch.float64), (types[0], types[-1])):
        name = str(dtype).removeprefix("torch.")
        errors[name] = fold_error(model, form, idx, dtype)
        if not errors[name] <= TOLERANCE[limit]:
            off = f"{errors[name]:.1e} of the logit scale in {name}"
            raise ModelError(f"the {form} model differs from the trained one by {off}; not exported")
    return FORMS[form](model), errors
