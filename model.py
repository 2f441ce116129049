"""The whole transformer, in plain code: settings, norms, tapers, attention, MLPs, blocks.

Pre-norm, causal; SwiGLU, RoPE, no bias and no dropout unless a knob says otherwise: GPT-2, Llama, Qwen2 and
Qwen3 are settings of it. Three knobs choose the normalization: `norm` (which normalizer), `taper` (which of
them are gated into a fixed scaling) and `aux_weight` (the loss that holds the residual stream's scale).
Papers, cited below by these names:

    TaperNorm      Kanavalau, Amo Alonso, Lall, arXiv 2602.10408; its symbols: g, c, gamma, gamma_tilde, s, mu
    CoupledNorm    Loretz, Hochreiter, ICML 2026
    CBWC+RMSNorm   "Enjoy your Layer Normalization with the computational efficiency of RMSNorm"
    FakeLN         Baroni et al. 2025, arXiv 2507.02559, as its public code has it
    DyT            Zhu et al., arXiv 2503.10622;  Derf: the same with erf and a learned shift

What becomes of a trained network (unfused, folded, read from a file) is in forms.py. `@fast(kernel)` names a
function of nanonorm/kernels.py that computes the same faster on some machines; nothing here depends on it.

Shapes: B batch, T time, D = n_embd, H query heads, K key/value heads, C = head_dim, F = hidden, V vocabulary.
"""

import copy
import math
from collections.abc import Callable
from dataclasses import asdict, dataclass
from functools import partial
from typing import Annotated, Literal, NamedTuple

import torch
import torch.nn as nn
import torch.nn.functional as F

from nanonorm import kernels
from nanonorm.cache import KVCache, behind_padding
from nanonorm.errors import ModelError
from nanonorm.files import FORMAT
from nanonorm.generation import generate
from nanonorm.kernels import NOT_COUNTED, autocasts, fast, is_watched, upcast
from nanonorm.knobs import FREE, V2, Needs, OneOf, Since, changed, check_needs, check_types
from nanonorm.rotary import is_llama3_scaling, llama3_frequencies
from nanonorm.scale import BatchAnchor, Ceiling, ScaleAnchor, SiteLoss, Tracked, Tracker, ordinary, recomputed
from nanonorm.schedules import TAPERED_SITES, gate_sites
from nanonorm.sink import Alone, Sunk
from nanonorm.typed import Count, NonNegative, Numbers, Positive, Range, Rate, Whole

# What a knob may need to mean anything
TAPER = Needs("taper", lambda c: c.taper != "none", "a taper")
BLOCKS = Needs("taper", lambda c: "block" in TAPERED_SITES[c.taper], "taper=internal or all")
FIT = Needs("taper", lambda c: TAPER.met(c) and c.calibration == "least_squares", "a taper by least_squares")
ANCHOR = Needs("aux_weight", lambda c: c.aux_weight > 0, "aux_weight above 0, such as 0.1")
AVERAGES = Needs("taper", lambda c: TAPER.met(c) or (ANCHOR.met(c) and c.anchor_target == "fixed"))
COUPLED = Needs("norm", lambda c: c.norm == "coupled", "norm=coupled")
SITES = Needs("norm", lambda c: NORMS[c.norm].tapers, "a norm that a taper could take, such as rmsnorm")
SITE_LOSS = Needs("site_weight", lambda c: c.site_weight > 0, "site_weight above 0, such as 1")
COUNTS, HOLDS = (TAPER, SITE_LOSS, FREE, Since(4)), (SITE_LOSS, FREE, Since(4))
SHIFT = Needs("norm", lambda c: NORMS[c.norm].shift, "a norm with a shift, such as layernorm")
SQUASH = Needs("norm", lambda c: c.norm in ("dyt", "derf"), "norm=dyt or derf")


@dataclass
class ModelKnobs:
    """The knobs of the architecture, declared here alone: ModelConfig, the run's settings and the benchmark's
    have them from here, and `--help` prints the comments."""

    # shape
    vocab_size: Annotated[int, Range(2, 2**24)] = 10_000  # token ids; in a run None: its corpus's number
    block_size: Annotated[int, Range(1, 2**24), FREE] = 512  # context length, tokens
    n_layer: Annotated[int, Range(1, 4096)] = 8  # blocks
    n_head: Count = 16  # query heads
    n_kv_head: Count | None = None  # key/value heads (grouped-query attention); None: n_head
    n_embd: Count = 512  # width of the residual stream
    head_dim: Annotated[Count | None, V2] = None  # width of a head; None: n_embd/n_head
    mlp: Annotated[str, OneOf(lambda: MLPS), V2] = "swiglu"  # what it computes; gelu: tanh form
    hidden: Annotated[Count | None, V2] = None  # width of the MLP; None: 8/3 n_embd, to 8s; gelu: 4 n_embd
    tie_embeddings: bool = True  # the output head shares the embedding table
    positions: Annotated[Literal["rope", "learned"], V2] = "rope"  # rotary angles, or an added table
    rope_base: Positive = 10000.0  # base of the rotary angles
    rope_scaling: Annotated[Numbers | None, V2] = None  # Llama 3's: factor, low, high factor, old length
    bias: Annotated[bool, V2] = False  # every linear layer of the blocks has a bias
    qkv_bias: Annotated[bool, V2] = False  # the query, key and value projection alone has one
    qk_norm: Annotated[bool, V2] = False  # RMSNorm of every query and key head, before the rotation
    dropout: Annotated[float, Range(0.0, 0.999), FREE, V2] = 0.0  # of embeddings, attention, blocks' sums
    # the embeddings' learned factor starts here
    emb_scale: Annotated[Annotated[float, Range(1e-6, 1e6)] | None, V2] = None
    # first weights
    init: Annotated[Literal["gpt2", "fan_in"], V2] = "gpt2"  # sd of blocks' matrices: 0.02, 1/sqrt(in)
    dyt_alpha: Annotated[Numbers | None, SQUASH, V2] = None  # before attentions, MLPs, head; None: 0.5 each
    # norms
    norm: Annotated[str, OneOf(lambda: NORMS), FREE] = "rmsnorm"  # which norm
    taper: Annotated[Literal["none", "internal", "final", "all"], FREE] = "none"  # norms that are gated away
    taper_qk: Annotated[bool, TAPER, FREE, V2] = False  # queries' and keys' norms taper too
    taper_from_layer: Annotated[Whole, BLOCKS, SITE_LOSS, FREE, Since(4)] = 0  # blocks below it keep norms
    taper_ceiling: Annotated[Positive | None, FIT, FREE, Since(4)] = None  # times a norm's output, at most
    # c: TaperNorm's fit, or FakeLN's
    calibration: Annotated[Literal["least_squares", "mean_scale"], TAPER, FREE, V2] = "least_squares"
    aux_weight: Annotated[NonNegative, FREE] = 0.0  # lambda of the anchor; the paper's is 0.1, 0 is off
    # the anchor's target: the running scale, frozen at gate_start, or each batch's
    anchor_target: Annotated[Literal["fixed", "batch"], ANCHOR, FREE, V2] = "fixed"
    # what the anchor measures: (s - target)^2, or (s/target - 1)^2
    anchor_unit: Annotated[Literal["absolute", "relative"], ANCHOR, FREE, V2] = "absolute"
    site_weight: Annotated[NonNegative, SITES, FREE, Since(4)] = 0.0  # of the site loss, the spread of log r
    site_far: Annotated[NonNegative, *HOLDS] = 0.0  # weight in it of tokens far from the mean
    site_rate: Annotated[Rate | None, *HOLDS] = None  # of its mean; 1: the last step's, None: ema_rate
    site_start: Annotated[Whole, *HOLDS] = 0  # the site loss begins after so many steps, 0 as 1
    site_until: Annotated[Literal["norm", "blend", "scale"], *HOLDS] = "blend"  # the site loss's last phase
    norm_bias: Annotated[bool, SHIFT] = True  # layernorm and cbwc have a shift
    norm_eps: Positive = 1e-6  # added to the mean square or the variance
    ema_rate: Annotated[Rate, AVERAGES, SITE_LOSS, FREE] = 0.01  # mu, of running means
    calib_skip_first: Annotated[bool, TAPER, SITE_LOSS, FREE] = False  # c, site loss: without position 0
    # c and the site loss leave out tokens above so many times the micro-batch's median scale; None: none
    sink_multiple: Annotated[Annotated[float, Range(1.0, 1e6)] | None, *COUNTS] = None
    coupled_grad: Annotated[bool, COUPLED, FREE] = False  # the reused statistic has a gradient in the MLP
    coupled_from_layer: Annotated[Whole, COUPLED, FREE] = 0  # blocks below this one keep plain RMSNorm
    coupled_floor: Annotated[bool, COUPLED, FREE, Since(4)] = False  # the reused mean square gets a floor
    sink_token: Annotated[Whole | None, FREE, Since(4)] = None  # id, before every text; it keeps its norms

    @property
    def ahead(self) -> int:
        """How many slots of block_size stand in front of a text: the sink's."""
        return int(self.sink_token is not None)

    @property
    def longest_text(self) -> int:
        """Tokens of a text, at most."""
        return self.block_size - self.ahead


@dataclass
class ModelConfig(ModelKnobs):
    """An architecture; travels in every model file. Never changed once made: replace() makes another, of the
    same head_dim, hidden and n_kv_head. Raises: ModelError for what makes no sense."""

    form: Literal["trained", "unfused", "folded", "weightless"] = "trained"  # its making; not a knob

    def __post_init__(self):
        check_types(self, ModelError)
        if self.n_embd % self.n_head and self.head_dim is None:
            multiple = f"n_embd={self.n_embd} must be a multiple of n_head={self.n_head}"
            raise ModelError(f"{multiple}, or head_dim be given")
        # three matrices of a SwiGLU's width cost what a GELU's two would
        hidden = 8 * math.ceil(self.n_embd / 3) if self.mlp == "swiglu" else 4 * self.n_embd
        derived = {"n_kv_head": self.n_head, "head_dim": self.n_embd // self.n_head, "hidden": hidden}
        for name, value in derived.items():
            if getattr(self, name) is None:
                setattr(self, name, value)
        self.refuse_nonsense()

    def refuse_nonsense(self):
        """Raises: ModelError for knobs that contradict each other, naming what would work."""
        tapers, rotary = self.taper != "none", self.positions == "rope"
        if self.head_dim % 2 and rotary:
            raise ModelError(f"head_dim={self.head_dim} must be even: RoPE turns pairs")
        if not rotary and (self.rope_scaling is not None or self.rope_base != ModelKnobs.rope_base):
            raise ModelError("rope_base and rope_scaling need positions=rope")
        if self.rope_scaling is not None and not is_llama3_scaling(self.rope_scaling):
            four = "factor, low and high frequency factor, original length, and high must be above low"
            raise ModelError(f"rope_scaling must be four numbers: {four}")
        if self.bias and self.qkv_bias:
            raise ModelError("bias=True gives qkv a bias already: leave qkv_bias out")
        if self.n_head % self.n_kv_head:
            raise ModelError(f"n_head={self.n_head} must be a multiple of n_kv_head={self.n_kv_head}")
        if tapers and not NORMS[self.norm].tapers:
            ways = " or ".join(name for name, variant in NORMS.items() if variant.tapers)
            raise ModelError(f"a taper needs norm={ways}; with {self.norm} use taper=none")
        if self.coupled_from_layer >= self.n_layer:
            raise ModelError("coupled_from_layer must be below n_layer; RMSNorm everywhere is norm=rmsnorm")
        if self.taper_from_layer >= self.n_layer:
            raise ModelError("taper_from_layer must be below n_layer; for no block use taper=none or final")
        if self.taper_qk and not (self.qk_norm and self.taper in ("internal", "all")):
            raise ModelError("taper_qk=True needs qk_norm=True and taper=internal or all")
        check_needs(self, ModelError)
        if self.site_weight and self.form != "trained":
            raise ModelError(f"site_weight above 0 needs norms, which are gone in {self.form} form")
        if self.dyt_alpha is not None and (len(self.dyt_alpha) != 3 or max(self.dyt_alpha) > 1e6):
            raise ModelError("dyt_alpha is three numbers up to 1e6, as in --dyt_alpha='(1,1,1)'")
        if self.calib_skip_first and self.block_size == 1:
            raise ModelError("calib_skip_first=True needs block_size above 1")
        if self.sink_token is not None:
            self.refuse_sink()

    def refuse_sink(self):
        """Raises: ModelError for a sink that cannot be."""
        if self.sink_token >= self.vocab_size:
            raise ModelError(f"sink_token={self.sink_token} must be below vocab_size={self.vocab_size}")
        if self.block_size == 1:
            raise ModelError("sink_token takes a slot of the context: it needs block_size above 1")
        if self.calib_skip_first:
            raise ModelError("calib_skip_first=True is for a sink in the text; with sink_token leave it out")


# ---------------------------------------------------------------------------------------------------------
# norms
#
# A norm maps (..., D) to (..., D). For folding it writes itself as y = core(h [- mean(h)]) * gain + shift,
# all but the core being linear: `factor` returns (core, gain or None, shift or None, centre). Statistics are
# in float32 or better, whatever the input. To add one: subclass Norm, and give it a row of NORMS.


class Identity(nn.Module):
    """Where a norm was."""

    def forward(self, h):
        return h

    def factor(self, gains: bool):
        return self, None, None, False


class Norm(nn.Module):
    """x * inverse(x) * weight [+ bias], x = h or, if it `centres`, h - mean(h): a norm that has a statistic.
    `inverse`, `centres`, the gain `weight` and the shift `bias` are all that tapers, anchor and fold ask."""

    centres = False

    def __init__(self, dim: int, eps: float, shift: bool = False):
        super().__init__()
        self.eps, self.shape = eps, (dim,)
        self.weight = nn.Parameter(torch.ones(dim))
        self.bias = nn.Parameter(torch.zeros(dim)) if shift else None

    def inverse(self, x):
        """What a token is multiplied by, from x = centred(h). (..., D) -> (..., 1), float32 or better"""
        raise NotImplementedError

    def scale(self, h):
        """What a token is divided by, s(h) of the anchor. (..., D) -> (..., 1)"""
        return 1 / self.inverse(self.centred(h))

    def centred(self, h):
        x = upcast(h)
        return x - x.mean(-1, keepdim=True) if self.centres else x

    def normalize(self, h, weight, bias):
        x = self.centred(h)
        y = x * self.inverse(x)
        y = y if weight is None else y * weight
        return (y if bias is None else y + bias).to(h.dtype)

    def forward(self, h):
        return self.normalize(h, self.weight, self.bias)

    def blend(self, h, weight, bias, fixed):
        """Part norm, part fixed scaling: x * inverse(x) * weight + x * fixed [+ bias]."""
        x = self.centred(h)
        return torch.addcmul(self.normalize(x, weight, bias), x, fixed).to(h.dtype)

    def moments(self, h, weight):
        """(|x w|^2 * inverse(x), |x w|^2, inverse(x)) of every token. (..., D) -> 3 (...)"""
        x = self.centred(h)
        power, inverse = (x * weight).square().sum(-1), self.inverse(x).squeeze(-1)
        return power * inverse, power, inverse

    def bare(self) -> "Norm":
        """The same statistic, without gain and shift. Raises: ModelError if it has tensors of its own."""
        if own := {n for n, _ in (*self.named_parameters(), *self.named_buffers())} - {"weight", "bias"}:
            raise ModelError(f"a Norm has no tensors but gain and shift, this one {', '.join(sorted(own))}")
        bare = copy.deepcopy(self)
        bare.weight = bare.bias = None
        return bare

    def factor(self, gains: bool):
        return (self.bare(), self.weight, self.bias, False) if gains else (self, None, None, False)


class RMSNorm(Norm):
    """h/r(h) * weight [+ bias], r(h) = sqrt(|h|^2/D + eps)."""

    def inverse(self, x):
        return torch.rsqrt(upcast(x).square().mean(-1, keepdim=True) + self.eps)

    def scale(self, h):
        return torch.sqrt(upcast(h).square().mean(-1, keepdim=True) + self.eps)

    @fast(kernels.rms_norm)
    def normalize(self, h, weight, bias):
        y = F.rms_norm(h, self.shape, weight, self.eps)  # h * inverse(h) * weight
        return y if bias is None else y + bias

    blend = fast(kernels.rms_blend)(Norm.blend)  # these two are right for LayerNorm as well: they centre
    moments = fast(kernels.rms_moments)(Norm.moments)


class LayerNorm(RMSNorm):
    """(h - mean)/sigma * weight [+ bias], sigma = sqrt(var + eps)."""

    centres = True

    def scale(self, h):
        return torch.sqrt(upcast(h).var(-1, keepdim=True, correction=0) + self.eps)

    def normalize(self, h, weight, bias):
        return F.layer_norm(h, self.shape, weight, bias, self.eps)


class CoupledNorm(RMSNorm):
    """h * inverse [* weight], the statistic being given: a block computes it once (CoupledNorm)."""

    def forward(self, h, inverse):
        y = h * inverse.to(h.dtype)
        return y if self.weight is None else y * self.weight

    def factor(self, gains: bool):
        return super().factor(gains=True)  # folded, its gain is always in the next layer

    @fast(kernels.rms_norm_and_inverse)
    def normed_and_inverse(self, h, differentiable: bool):
        """(the norm of h (B, T, D), its statistic (B, T, 1)), the latter with a gradient if it is wanted."""
        inverse = self.inverse(h)
        return self(h, inverse), inverse if differentiable else inverse.detach()


class DyT(nn.Module):
    """tanh(alpha h) * weight + bias, alpha a learned scalar. Nothing of it folds away."""

    def __init__(self, dim: int):
        super().__init__()
        self.alpha = nn.Parameter(torch.tensor(0.5))
        self.weight = nn.Parameter(torch.ones(dim))
        self.bias = nn.Parameter(torch.zeros(dim))

    def squash(self, h):
        return torch.tanh(self.alpha * h)

    def forward(self, h):
        return torch.addcmul(self.bias, self.squash(h), self.weight)

    factor = Identity.factor


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


class Scaling(nn.Module):
    """What is left of a tapered norm at gate 0, as an explicit element-wise step."""

    def __init__(self, weight, bias, centre: bool):
        super().__init__()
        self.centre = centre
        self.weight = nn.Parameter(weight)
        self.bias = None if bias is None else nn.Parameter(bias)

    def forward(self, h):
        return scaled(h, self.weight, self.bias, self.centre)

    def factor(self, gains: bool):
        return Identity(), self.weight, self.bias, self.centre


# ---------------------------------------------------------------------------------------------------------
# tapers: a norm that is gated into a fixed scaling

DELTA = 1e-12  # keeps c finite where the stream is 0


class Taper(Tracker):
    """A norm that the gate g turns into a fixed scaling (TaperNorm); x and inverse as in Norm:

        g * x * inverse(x) * weight + (1-g) * c * x * weight_tilde [+ bias]

    Phase "norm" is the plain norm (the baseline's own kernel), "blend" the formula, "scale" its g = 0 case.
    Eval mode is always at g = 0, before calibration with the c that it would give now. Gain and shift are its
    own; of the norm that it wraps it keeps the statistic. A sink that is `apart` has the norm in every phase.
    """

    quantities, shown, gains = ("ema_num", "ema_den"), ("output",), ("weight", "weight_tilde")

    def __init__(self, norm: Norm, skip_first=False, ema_rate=0.01, sink_multiple: float | None = None):
        super().__init__(ema_rate)
        self.norm, self.skip_first, self.sink_multiple = norm.bare(), skip_first, sink_multiple
        self.gate = self.gate_values = torch.ones(())  # a Transformer puts views of its own gates here
        for name in self.gains:
            self.register_parameter(name, nn.Parameter(norm.weight.detach().clone()))
        self.bias = norm.bias
        self.register_buffer("c", torch.tensor(1.0))

    def set_phase(self, phase: str):
        """Only the gains that the phase uses take a gradient."""
        self.phase = phase
        self.weight.requires_grad_(phase != "scale")
        self.weight_tilde.requires_grad_(phase != "norm")

    def forward(self, h):
        if self.apart or (self.training and self.phase == "norm"):
            if self.collecting():
                self.observe(h)
            return self.norm.normalize(h, self.weight, self.bias)
        if self.training and self.phase == "blend":
            fixed = (1 - self.gate) * self.c * self.weight_tilde  # (D)
            return self.norm.blend(h, self.gate * self.weight, self.bias, fixed)
        return scaled(h, self.fixed(), self.bias, self.norm.centres)

    def observe(self, h):
        """num = |x w|^2 * inverse(x), den = |x w|^2, output = |x w|^2 * inverse(x)^2 of every token that
        counts. h: (B, T, D), or (B, T, heads, C)."""
        h = (h[:, 1:] if self.skip_first else h).detach()
        num, den, inverse = self.norm.moments(h, self.weight.detach())
        self.add(num, den, num * inverse, counts=ordinary(inverse, self.sink_multiple))

    def c_now(self):
        """c* = E[|x w|^2 * inverse] / E[|x w|^2], the least-squares fit of c x w to the norm of h. 0-dim."""
        num, den = self.corrected()
        return num / (den + DELTA)

    def calibrate(self):
        """Freeze c and start weight_tilde from weight. ModelError if it fits DELTA or eps, and no stream."""
        fits_eps = self.c_now() * self.scale_of_nothing() > 1 - 1e-5
        self.freeze(self.c, self.c_now(), degenerate=(self.corrected()[-1] <= DELTA) | fits_eps)
        self.weight_tilde.copy_(self.weight)

    def fixed(self):
        """The scaling at g = 0 (D): c * weight_tilde; before calibration what c_now() makes of it."""
        if self.phase != "norm":
            return self.c * self.weight_tilde
        seen = self.ema_count > 0  # before the first step c_now() is 0/0: it must meet no gradient
        c, gain = (self.c_now(), self.c), (self.weight, self.weight_tilde)
        return torch.where(seen, *c) * torch.where(seen, *gain)

    def at_zero(self) -> "Scaling":
        return Scaling(self.fixed(), self.bias, self.norm.centres)

    def factor(self, gains: bool):
        return self.at_zero().factor(gains)


class MeanScaleTaper(Taper):
    """FakeLN: c = 1 / mean of the scale, and one gain, which trains from the first step to the last.

        (g * inverse(x) + (1-g) * c) * x * weight [+ bias]

    Its EMA moves once a step and is bias-corrected; FakeLN's moves once a micro-batch and starts from a file.
    c follows it as long as a gate is above 0: in step k it is made of the steps before k.
    """

    quantities, shown, gains, phases = ("ema_s",), ("square",), ("weight",), ("norm", "blend")
    set_phase = Tracker.set_phase

    @property
    def weight_tilde(self):
        return self.weight

    def blends(self) -> bool:
        return self.training and self.phase == "blend" and not self.apart

    def forward(self, h, both: bool = False):
        """(B, T, D) -> (B, T, D); `both`, where it blends: at the gate, and at the values' one."""
        if not self.blends():
            return super().forward(h)
        if self.collecting():
            self.observe(h)
        x = self.norm.centred(h)
        inverse = self.norm.inverse(x)

        def at(gate):
            y = x * (gate * inverse + (1 - gate) * self.c) * self.weight
            return (y if self.bias is None else y + self.bias).to(h.dtype)

        return (at(self.gate), at(self.gate_values)) if both else at(self.gate)

    def observe(self, h):
        s = self.norm.scale((h[:, 1:] if self.skip_first else h).detach()).squeeze(-1)
        self.add(s, s.square(), counts=ordinary(1 / s, self.sink_multiple))

    def c_now(self):
        return 1 / self.corrected()[0]

    def follow(self):
        still_up = torch.maximum(self.gate, self.gate_values) > 0
        self.c.copy_(torch.where(still_up, self.c_now(), self.c))


CALIBRATIONS = {"least_squares": Taper, "mean_scale": MeanScaleTaper}


def make_norm(c: ModelConfig, site: str) -> nn.Module:
    """The norm of a site, "block", "final" or "qk" (queries or keys, always RMSNorm)."""
    norm = RMSNorm(c.head_dim, c.norm_eps) if site == "qk" else NORMS[c.norm].make(c)
    if c.taper_qk if site == "qk" else site in TAPERED_SITES[c.taper]:
        norm = CALIBRATIONS[c.calibration](norm, c.calib_skip_first, c.ema_rate, c.sink_multiple)
    if c.site_weight and site == "block":
        SiteLoss(statistic(c), c).hold(norm)
    if c.taper_ceiling is not None and isinstance(norm, Taper):  # behind the site loss, which sees all of h
        Ceiling(c.taper_ceiling, c.ema_rate).hold(norm)
    return norm


def statistic(c: ModelConfig) -> Norm:
    """The bare norm whose scale is s(h): that of the run's norm, of one without a statistic RMSNorm's."""
    norm = NORMS[c.norm].make(c)
    return (norm if isinstance(norm, Norm) else RMSNorm(c.n_embd, c.norm_eps)).bare()


# ---------------------------------------------------------------------------------------------------------
# rotary position embeddings (Su et al., arXiv 2104.09864), with Llama 3's scaling


def rope_tables(c: ModelConfig, device) -> torch.Tensor | None:
    """float32 rotary tables (2, block_size, 1, C), rounded as Hugging Face rounds them: [0] cos, [1] sin with
    the half-split rotation's sign. A CPU makes them, as a GPU rounds otherwise. None: learned positions."""
    if c.positions != "rope":
        return None
    numbers = partial(torch.arange, device="meta" if str(device) == "meta" else "cpu", dtype=torch.float32)
    frequency = 1.0 / c.rope_base ** (numbers(0, c.head_dim, 2) / c.head_dim)  # radians a token
    if c.rope_scaling is not None:
        frequency = llama3_frequencies(frequency, *c.rope_scaling)
    angle = torch.outer(numbers(c.block_size), frequency)  # (block_size, C/2)
    cos, sin = angle.cos(), angle.sin()
    return torch.stack((torch.cat((cos, cos), -1), torch.cat((-sin, sin), -1))).unsqueeze(2).to(device)


# ---------------------------------------------------------------------------------------------------------
# layers


class CentredEmbedding(nn.Embedding):
    """Rows with their mean taken off (CBWC): the stream starts with mean 0. The parameter stays uncentred."""

    def forward(self, idx):
        x = super().forward(idx)
        return x - x.mean(-1, keepdim=True)


class CentredLinear(nn.Linear):
    """V = W - mean of W over its output features (CBWC): what it writes has mean 0."""

    def centred(self):
        """(V, bias), the bias centred as well."""
        bias = None if self.bias is None else self.bias - self.bias.mean()
        return self.weight - self.weight.mean(0, keepdim=True), bias

    def forward(self, x):
        return F.linear(x, *self.centred())


@fast(kernels.attention, training=False, eager=False)
def attend(q, k, v, mask=None, dropout: float = 0.0):
    """Attention, causal unless there is a mask, (T, S) or (B, 1, T, S). (B, H, T, C), k and v (B, K, S, C)
    -> (B, H, T, C). dropout: of the attention's weights."""
    grouped = q.shape[1] != k.shape[1]
    return F.scaled_dot_product_attention(
        q, k, v, mask, dropout, is_causal=mask is None, enable_gqa=grouped, scale=q.shape[-1] ** -0.5
    )  # fmt: skip


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
        """(B, T, D) -> queries and keys (B, T, H + K, C), values (B, T, K, C)"""
        H, K, C = self.n_head, self.n_kv_head, self.head_dim
        return self.qkv(x).unflatten(-1, (-1, C)).split((H + K, K), 2)

    def forward(self, x, rope, kv=None, rows=None, mask=None):
        """x: (B, T, D); rope: (2, T, 1, C), (2, B, T, 1, C) or None; kv: this layer's cache, called with k, v
        (B, K, T, C) and `rows`, the (T) columns to write; mask: (T, length) or (B, 1, T, length). Returns
        the heads' output before `proj`, (B, T, H C)."""
        return self.mixed(*self.heads(x), rope, kv, rows, mask)

    def mixed(self, qk, v, rope, kv=None, rows=None, mask=None):
        """The same from the heads, (B, T, H + K, C) and (B, T, K, C)."""
        H, K = self.n_head, self.n_kv_head
        B, T = v.shape[:2]
        if self.norm_q is not None:
            q, k = qk.split((H, K), 2)
            qk = torch.cat((self.norm_q(q), self.norm_k(k)), 2)
        if rope is not None:
            cos, sin = rope.to(qk.dtype)
            qk = torch.addcmul(qk * cos, qk.roll(self.head_dim // 2, -1), sin)  # (B, T, H+K, C)
        if torch.is_grad_enabled():
            v = v.clone()  # a view would keep all of qkv for the backward
        q, k, v = (t.transpose(1, 2) for t in (*qk.split((H, K), 2), v))  # (B, heads, T, C)
        if kv is not None:
            k, v = kv(k, v, rows)  # (B, K, length, C)
        in_front = mask is None and k.shape[2] > T  # a sink, seen by all: one query more keeps it causal
        q = F.pad(q, (0, 0, 1, 0)) if in_front else q
        y = attend(q, k, v, mask, self.dropout if self.training else 0.0)
        y = y[:, :, 1:] if in_front else y
        return y.transpose(1, 2).reshape(B, T, -1)


class SplitAttention(Attention):
    """Its values may read another input than its queries and keys (FakeLN)."""

    def forward(self, x, *context, values=None):
        """x, values: (B, T, D); None: x"""
        if values is None:
            return super().forward(x, *context)
        if type(self.qkv) is not nn.Linear or is_watched(self.qkv):
            return self.mixed(self.heads(x)[0], self.heads(values)[1], *context)
        C, K = self.head_dim, self.n_kv_head
        rows = ((self.n_head + K) * C, K * C)
        biases = (None, None) if self.qkv.bias is None else self.qkv.bias.split(rows)
        parts = map(F.linear, (x, values), self.qkv.weight.split(rows), biases)
        return self.mixed(*(part.unflatten(-1, (-1, C)) for part in parts), *context)


def product(linear: nn.Linear, x, inverse=None):
    """linear(x / r), r given as its inverse (B, T, 1), which scales the product: the bias comes after."""
    if inverse is None:
        return linear(x)
    if linear.bias is None:
        return linear(x) * inverse
    if type(linear) is nn.Linear and not is_watched(linear):
        return F.linear(x, linear.weight) * inverse + linear.bias
    return (linear(x) - linear.bias) * inverse + linear.bias


class SwiGLU(nn.Module):
    def __init__(self, c: ModelConfig, writer: type[nn.Linear]):
        super().__init__()
        self.gate_up = nn.Linear(c.n_embd, 2 * c.hidden, bias=c.bias)
        self.down = writer(c.hidden, c.n_embd, bias=c.bias)

    @property
    def reader(self) -> nn.Linear:
        """The layer that reads the norm."""
        return self.gate_up

    @fast(kernels.swiglu_activation, training=False)
    def activation(self, x, inverse=None):
        """(B, T, D) [, (B, T, 1)] -> (B, T, F)"""
        opening, up = product(self.gate_up, x, inverse).chunk(2, -1)
        return F.silu(opening) * up

    @fast(kernels.swiglu)
    def forward(self, x):
        """(B, T, D) -> (B, T, D)"""
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


class Block(Alone, nn.Module):
    def __init__(self, c: ModelConfig, attention: type[Attention] = Attention):
        super().__init__()
        writer = CentredLinear if NORMS[c.norm].centred else nn.Linear
        self.dropout = c.dropout
        self.norm_attn = make_norm(c, "block")
        self.attn = attention(c, writer)
        self.norm_mlp = make_norm(c, "block")
        self.mlp = MLPS[c.mlp](c, writer)

    def drop(self, y):
        return F.dropout(y, self.dropout, self.training) if self.dropout else y

    def forward(self, x, *context):
        """x: the stream (B, T, D); context: as Attention.forward has it."""
        x = x + self.drop(self.attn.proj(self.attn(self.norm_attn(x), *context)))
        return x + self.drop(self.mlp(self.norm_mlp(x)))


class FakeLNBlock(Block):
    """Queries and keys read the attention's norm at one gate, values at another (FakeLN)."""

    def __init__(self, c: ModelConfig):
        super().__init__(c, SplitAttention)

    def forward(self, x, *context):
        if not (isinstance(self.norm_attn, MeanScaleTaper) and self.norm_attn.blends()):
            return super().forward(x, *context)
        normed, values = self.norm_attn(x, both=True)
        x = x + self.drop(self.attn.proj(self.attn(normed, *context, values=values)))
        return x + self.drop(self.mlp(self.norm_mlp(x)))


class CoupledBlock(Block):
    """The attention's RMS statistic serves the MLP too (CoupledNorm). There it is a constant to the gradient
    unless `coupled_grad`. Folded, the gains live in qkv and gate_up and the statistic enters the SwiGLU.

    With `coupled_floor` the MLP divides by sqrt(r^2 + floor), floor at least 0: what attention adds to the
    stream is not all in proportion to it (not in the paper; scripts/couple.py fits it)."""

    def __init__(self, c: ModelConfig):
        super().__init__(c)
        self.norm_attn, self.norm_mlp = (CoupledNorm(c.n_embd, c.norm_eps) for _ in range(2))
        self.through = c.coupled_grad
        self.floor = nn.Parameter(torch.zeros(())) if c.coupled_floor else None

    def forward(self, x, *context):
        normed, inverse = self.norm_attn.normed_and_inverse(x, self.through)
        y = self.attn(normed, *context)
        if self.floor is not None:
            inverse = (inverse.pow(-2) + self.floor.clamp_min(0)).rsqrt()
        if self.norm_mlp.weight is None:  # folded
            h = self.add(x, y, self.attn.proj)
            return self.add(h, self.mlp.activation(h, inverse.to(h.dtype)), self.mlp.down)
        h = x + self.drop(self.attn.proj(y))
        return h + self.drop(self.mlp(self.norm_mlp(h, inverse)))

    def add(self, x, y, writer: nn.Linear):
        """x + drop(writer(y)), in one product where that can be. (B, T, D), (B, T, in) -> (B, T, D)"""
        dropped = self.dropout and self.training
        if dropped or autocasts(x) or type(writer) is not nn.Linear or is_watched(writer):
            return x + self.drop(writer(y))
        x = x if writer.bias is None else x + writer.bias
        return torch.addmm(x.flatten(0, 1), y.flatten(0, 1), writer.weight.t()).view_as(x)


class Variant(NamedTuple):
    """What a value of `norm` stands for."""

    make: Callable[[ModelConfig], nn.Module]  # a norm of width n_embd
    tapers: bool = False  # it has a statistic, and nothing but tapers hangs on it
    shift: bool = False  # it has one that norm_bias=False takes away
    block: type[Block] = Block
    centred: bool = False  # the layers that write the stream write it with mean 0
    of: str | None = None  # the norm whose trained weights it can begin from, beside its own


NORMS = {
    "rmsnorm": Variant(lambda c: RMSNorm(c.n_embd, c.norm_eps), tapers=True),
    "layernorm": Variant(lambda c: LayerNorm(c.n_embd, c.norm_eps, shift=c.norm_bias), True, shift=True),
    "coupled": Variant(lambda c: RMSNorm(c.n_embd, c.norm_eps), block=CoupledBlock, of="rmsnorm"),
    "cbwc": Variant(
        lambda c: RMSNorm(c.n_embd, c.norm_eps, shift=c.norm_bias), shift=True, centred=True, of="layernorm"
    ),
    "dyt": Variant(lambda c: DyT(c.n_embd)),
    "derf": Variant(lambda c: Derf(c.n_embd)),
}
MLPS = {"swiglu": SwiGLU, "gelu": GELU, "gelu_erf": GELU}


def make_block(c: ModelConfig, i: int) -> Block:
    """Block i of a network."""
    c = changed(c, taper="none", site_weight=0.0) if i < c.taper_from_layer else c
    if c.norm == "coupled" and i < c.coupled_from_layer:
        return Block(c)
    return FakeLNBlock(c) if c.calibration == "mean_scale" else NORMS[c.norm].block(c)


# ---------------------------------------------------------------------------------------------------------
# first weights

STD = 0.02  # GPT-2's
WRITES_STREAM = ("attn.proj.weight", "mlp.down.weight")
ALPHAS = {"norm_attn": 0, "norm_mlp": 1, "norm_final": 2}  # a norm's place in dyt_alpha


def initialize(model: "Transformer"):
    """Draw a Transformer's matrices, the same ones in the same order for every norm, and set what its config
    says of the rest; biases are 0.

    `init` is the spread of a block's matrices: GPT-2's 0.02, or 1/sqrt(fan in), which makes what a matrix
    writes as large as what it reads, at any width. Those that write the stream are divided by
    sqrt(2 n_layer) (GPT-2). Tables and an untied head have 0.02 in both; `emb_scale` is the table's own knob.
    """
    c = model.config
    for name, p in model.named_parameters():
        if p.dim() == 2:
            std = 1 / math.sqrt(p.shape[1]) if c.init == "fan_in" and name.startswith("blocks.") else STD
            nn.init.normal_(p, std=std / math.sqrt(2 * c.n_layer) if name.endswith(WRITES_STREAM) else std)
        elif name.endswith("bias"):
            nn.init.zeros_(p)
        elif name.endswith(".alpha") and c.dyt_alpha is not None:
            nn.init.constant_(p, c.dyt_alpha[ALPHAS[name.split(".")[-2]]])


# ---------------------------------------------------------------------------------------------------------
# the network

ANCHORS = {"fixed": ScaleAnchor, "batch": BatchAnchor}


class Losses(NamedTuple):
    """Of a batch: total = ce + aux, 0-dim, alone with a graph; stream: the final norm's input (B, T, D)."""

    total: torch.Tensor
    ce: torch.Tensor
    aux: torch.Tensor
    stream: torch.Tensor


class Transformer(Tracked, Sunk, nn.Module):
    """`model(idx)` gives logits, `model(idx, targets)` Losses. In eval mode whatever tapers is at g = 0."""

    def __init__(self, config: ModelConfig):
        super().__init__()
        if config.form != "trained":
            made = "is made by forms.fold() or unfuse(), or read by forms.load_model()"
            raise ModelError(f"form={config.form} {made}")
        c = self.config = config
        self.meta: dict = {}  # what the file it was loaded from says beside the weights
        self.end_token: int | None = None  # the corpus's end of a text
        self.mask_end = self.grad_checkpoint = False  # the run's
        table = CentredEmbedding if NORMS[c.norm].centred else nn.Embedding
        self.tok_emb = table(c.vocab_size, c.n_embd)
        self.emb_scale = None if c.emb_scale is None else nn.Parameter(torch.tensor(c.emb_scale))
        self.pos_emb = table(c.block_size, c.n_embd) if c.positions == "learned" else None
        self.blocks = nn.ModuleList(make_block(c, i) for i in range(c.n_layer))
        self.norm_final = make_norm(c, "final")
        self.lm_head = None if c.tie_embeddings else nn.Linear(c.n_embd, c.vocab_size, bias=False)
        self.scale = statistic(c).scale  # s(h) of the anchor and the log, (B, T, D) -> (B, T, 1)
        self.anchor = ANCHORS[c.anchor_target](statistic(c), c) if c.aux_weight > 0 else None
        # the schedule's, the host's to set; without a taper one that nobody reads
        self.register_buffer("gate", upcast(torch.ones(max(1, len(self.gate_sites())))), persistent=False)
        self.bind_gates()
        self.rope = rope_tables(c, self.gate.device)
        initialize(self)
        self.set_phase("norm")

    def _apply(self, fn, recurse=True):
        super()._apply(fn, recurse)
        self.rope = rope_tables(self.config, self.tok_emb.weight.device)  # float32, whatever the weights are
        return self

    def bind_gates(self):
        """Hand every norm that tapers its own entry of `gate`, 0-dim (FakeLN: and its values'). To be called
        when that buffer has become another."""
        gates = dict(zip(self.gate_sites(), self.gate.unbind(), strict=False))
        for name, norm in self.named_modules():
            if isinstance(norm, Taper):
                norm.gate = gates[name]
                norm.gate_values = gates.get(f"{name}.v", norm.gate)

    # --- forward

    def forward(self, idx, targets=None, cache: KVCache | None = None, last_only: bool = False, pad=None):
        """idx, targets: (B, T) token ids; pad: as stream() takes it. Returns logits (B, T, V), with last_only
        (B, 1, V); or Losses."""
        x = self.stream(idx, cache, pad)
        if targets is None:
            return self.logits(self.norm_final(x[:, -1:] if last_only else x))
        if targets.shape != idx.shape:
            raise ModelError(f"targets {tuple(targets.shape)} do not have idx's shape {tuple(idx.shape)}")
        if self.mask_end and self.training:
            targets = targets.masked_fill(targets == self.end_token, NOT_COUNTED)
        return self.losses(x, self.cross_entropy(self.norm_final(x), targets), idx)

    def logits(self, y):
        """The output head, whose tied table is never centred, of the final norm's output. -> (B, T, V)"""
        return F.linear(y, self.tok_emb.weight) if self.lm_head is None else self.lm_head(y)

    @fast(kernels.cross_entropy, training=False, anywhere=True)
    def cross_entropy(self, y, targets):
        """Mean cross-entropy over the targets that count, 0 if none does, in float32 or better. 0-dim

        y: (B, T, D), as `logits` reads it; targets: (B, T), of which NOT_COUNTED ones do not count.
        """
        logits, targets = upcast(self.logits(y)).flatten(0, 1), targets.flatten()
        counted = (targets != NOT_COUNTED).sum().clamp_min(1)
        return F.cross_entropy(logits, targets, reduction="sum", ignore_index=NOT_COUNTED) / counted

    def stream(self, idx, cache: KVCache | None = None, pad=None):
        """The final norm's input. (B, T) token ids -> (B, T, D). pad: how many tokens at the beginning
        of each row are padding, (B), those in the cache included; None: none."""
        T, ahead = idx.shape[1], self.config.ahead
        if self.config.longest_text < T:
            room = f"block_size={self.config.block_size}{' holds with its sink' if ahead else ''}"
            raise ModelError(f"{T} tokens are more than this model's {room}; give fewer")
        counts, mask = cache is not None or pad is not None, None  # without a mask attention is causal
        columns = torch.arange(ahead + T, device=idx.device) if counts else slice(ahead, ahead + T)
        rows = columns[ahead:] if counts and ahead else columns
        if cache is not None and not cache.empty:
            rows, columns = cache.pos + rows, cache.columns
            mask = columns <= rows[:, None]  # (T, length)
        at, mask = (rows, mask) if pad is None else behind_padding(pad, rows, columns, ahead)
        x = self.embed(idx, at)  # (B, T, D)
        rope = None if self.rope is None else self.rope[:, at]
        repeats = self.grad_checkpoint and self.training and torch.is_grad_enabled()
        for block, kv in zip(self.blocks, self.kv_calls(cache), strict=True):
            context = (x, rope, kv, rows, mask)
            x = recomputed(block, *context) if repeats else block(*context)
        if cache is not None:
            cache.pos += T
            cache.empty = False
        return x

    def losses(self, x, ce, idx) -> Losses:
        """Of a batch, anchor included. x: the final norm's input (B, T, D); ce: what its output costs;
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
            at = rows if torch.is_tensor(rows) else torch.arange(rows.start or 0, rows.stop, device=x.device)
            x = x + self.pos_emb(at)
        x = upcast(x) if autocasts(x) else x  # a frozen table may be bfloat16, the stream not
        return F.dropout(x, self.config.dropout, self.training) if self.config.dropout else x

    def head(self):
        """(weight (V, D), bias (V) or None) of the output head."""
        if self.lm_head is None:
            return self.tok_emb.weight, None
        return self.lm_head.weight, self.lm_head.bias

    # --- taper

    def taper_norms(self) -> dict[str, Taper]:
        """{"0.attn": ..., "0.q": ..., "0.k": ..., "0.mlp": ..., "final": ...}, those that taper."""
        sites = {}
        for i, block in enumerate(self.blocks):
            sites |= {f"{i}.attn": block.norm_attn, f"{i}.q": block.attn.norm_q, f"{i}.k": block.attn.norm_k}
            sites[f"{i}.mlp"] = block.norm_mlp
        sites["final"] = self.norm_final
        return {name: norm for name, norm in sites.items() if isinstance(norm, Taper)}

    def gate_sites(self) -> list[str]:
        """What the entries of `gate` are of: of each block attn [, its values], q, k, mlp; then final."""
        return gate_sites(self.config)

    # --- text, a file

    generate, Cache = generate, KVCache

    def to_file(self, meta: dict) -> dict:
        """What a model file holds, to be read by forms.load_model; torch.save it."""
        taper = {"phase": self.phase, "gate": self.gate.tolist()} if self.config.form == "trained" else {}
        meta = {**taper, **meta, "format": FORMAT}
        return {"config": asdict(self.config), "state": self.state_dict(), "meta": meta}
