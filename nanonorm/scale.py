"""The scale of the stream in training: running means of what its tokens show, and the losses that hold it.

Shapes: B batch, T time, D width.
"""

import math
from contextlib import contextmanager, nullcontext
from functools import partial

import torch
import torch.nn as nn
from torch.utils.checkpoint import checkpoint

from nanonorm.errors import ModelError
from nanonorm.kernels import upcast

PHASES = ("norm", "blend", "scale")  # of a taper: its gate at 1, on its way, at 0


def ordinary(inverse, multiple: float | None):
    """Which tokens of a micro-batch are no sinks: their r, given as 1/r, is at most `multiple` times the
    median there. At least half always are, however fast the stream grows. (...) -> bool (...); None: all."""
    return None if multiple is None else multiple * inverse >= inverse.median()


def as_wide(t, moved):
    """A buffer after the network was cast or moved, `t` before it: one in float32 or better stays as wide."""
    return t.to(moved.device) if moved.dtype.itemsize < 4 <= t.dtype.itemsize else moved


class Tracker(nn.Module):
    """Bias-corrected EMAs of token means, one observation per optimizer step, collected in some phases.

    `phase` is host state, set by Transformer.set_phase. `sums` holds the step so far: of each quantity over
    the tokens that count, of what is only `shown`, the number of tokens that count and that of all;
    observe_step turns it into the observation. `last` are those of the last step, over all ranks.
    """

    quantities: tuple[str, ...]
    shown: tuple[str, ...] = ()
    phases: tuple[str, ...] = ("norm",)  # in which it collects

    def __init__(self, rate: float):
        super().__init__()
        self.phase = "norm"
        self.apart = False  # True while the sink token passes (nanonorm/sink.py)
        self.rate, self.log_keep = rate, math.log1p(-rate) if rate < 1 else -math.inf
        for name in (*self.quantities, "ema_count"):
            self.register_buffer(name, torch.tensor(0.0))
        for name in ("sums", "last"):
            size = len(self.quantities) + len(self.shown) + 2
            self.register_buffer(name, torch.zeros(size), persistent=False)

    def register_buffer(self, name, tensor, persistent=True):
        """Statistics are in float32 or better, whatever torch's default type is."""
        super().register_buffer(name, upcast(tensor), persistent)

    def _apply(self, fn, recurse=True):
        before = dict(self._buffers)
        super()._apply(fn, recurse)
        self._buffers.update({name: as_wide(t, self._buffers[name]) for name, t in before.items()})
        return self

    def set_phase(self, phase: str):
        self.phase = phase

    def collecting(self) -> bool:
        return self.phase in self.phases and self.training and torch.is_grad_enabled() and not self.apart

    def add(self, *values, counts=None):
        """Add this micro-batch to the step's sums. values: one (B, T) or (B, T, heads) a quantity, then what
        is shown; counts: which tokens do, None: all."""
        totals = [(v if counts is None else v.where(counts, 0)).sum() for v in values]
        every = torch.full_like(totals[0], values[0].numel())
        self.sums.add_(torch.stack((*totals, every if counts is None else counts.sum().to(every), every)))

    def means(self) -> torch.Tensor:
        """Of each quantity, then of what is shown, over the last step's tokens that count."""
        return self.last[:-2] / self.last[-2]

    def left_out(self) -> torch.Tensor:
        """Which share of the last step's tokens did not count. 0-dim"""
        return 1 - self.last[-2] / self.last[-1]

    def averages(self) -> list:
        return [getattr(self, name) for name in self.quantities]

    def corrected(self) -> list:
        seen = -torch.expm1(self.ema_count * self.log_keep)  # 1 - (1 - mu)^n, which would cancel in float32
        return [ema / seen for ema in self.averages()]

    def follow(self):
        """Once a step, after the EMAs have moved: set on the device what is to follow them."""

    def scale_of_nothing(self) -> float:
        """What its norm divides a token that is 0 by."""
        return self.norm.scale(torch.zeros(self.norm.shape)).item()

    def freeze(self, buffer, value, degenerate):
        if degenerate or not (torch.isfinite(value) and value > 0):
            seen = f"{self.ema_count.item():g} steps that give {value.item():g}"
            cause = "the stream is 0 or not finite there, or was never seen"
            remedy = "raise gate_start, or lower learning_rate and start anew"
            raise ModelError(f"cannot calibrate on {seen}: {cause}; {remedy}")
        buffer.copy_(value)


def observe_step(trackers: list[Tracker], all_reduce=None):
    """One EMA observation of each tracker, from the micro-batches of a step. `all_reduce` sums over ranks in
    place."""
    flat = torch.cat([t.sums for t in trackers])
    if all_reduce is not None:
        all_reduce(flat)
    torch._foreach_copy_([t.last for t in trackers], flat.split([len(t.sums) for t in trackers]))
    means, averages, rates = [], [], []
    for t in trackers:
        means += t.means()[: len(t.quantities)].unbind()
        averages += t.averages()
        rates += [t.rate] * len(t.quantities)
    torch._foreach_lerp_(averages, means, rates)
    torch._foreach_add_([t.ema_count for t in trackers], 1.0)
    torch._foreach_zero_([t.sums for t in trackers])
    for t in trackers:
        t.follow()


def refuse_loose_tensors(model: nn.Module):
    """Raises: ModelError for a tensor that is neither parameter nor buffer: no file would hold its values."""
    made_anew = {Tracker: ("gate", "gate_values"), Tracked: ("rope",)}
    for path, module in model.named_modules():
        ours = next((names for kind, names in made_anew.items() if isinstance(module, kind)), ())
        for name, value in vars(module).items():
            if isinstance(value, torch.Tensor) and name not in ours:
                remedy = "register it as a persistent buffer, or make it in forward"
                raise ModelError(f"no file holds {path}.{name}, which is a plain tensor: {remedy}")


class Tracked:
    """What a model.Transformer does with its trackers."""

    def _apply(self, fn, recurse=True):
        gate = self.gate
        super()._apply(fn, recurse)
        self.gate = as_wide(gate, self.gate)
        self.bind_gates()
        return self

    def __setstate__(self, state):
        super().__setstate__(state)
        self.bind_gates()  # pickle gives every view memory of its own

    def fill_buffers(self):
        """Take the buffers that no file holds from the meta device to the CPU, as 0. Raises: ModelError for
        a tensor that is not of this project: its values would be lost."""
        refuse_loose_tensors(self)
        for module in self.modules():
            for name, buffer in module.named_buffers(recurse=False):
                if buffer.is_meta and name not in ("gate", "sums", "last", "target"):
                    raise ModelError(f"no file holds the buffer {name}: register it with persistent=True")
                if buffer.is_meta:
                    setattr(module, name, buffer.new_zeros(buffer.shape, device="cpu"))

    def trackers(self) -> dict[str, Tracker]:
        anchor = {"anchor": self.anchor} if isinstance(self.anchor, Tracker) else {}
        sites = {f"{name}.site": site for name, site in site_losses(self).items()}
        tapers = self.taper_norms()
        limits = {f"{name}.ceiling": ceiling for name, ceiling in ceilings(self).items()}
        return tapers | anchor | sites | limits

    def set_phase(self, phase: str):
        """phase: "norm", "blend" or "scale". Only parameters that the phase uses take a gradient. Raises:
        ModelError for another."""
        if phase not in PHASES:
            raise ModelError(f"no phase {phase}; there are {', '.join(PHASES)}")
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
            observe_step(trackers, all_reduce)


def distance(s, target, relative: bool):
    """Mean over tokens of (s - target)^2, or of (s/target - 1)^2. 0-dim"""
    return (s / target - 1 if relative else s - target).square().mean()


class ScaleAnchor(Tracker):
    """Fixed-target scale loss on the input of the final norm: the distance of s(h) from s_tgt (TaperNorm).

    s is what a norm divides a token by: r(h), for LayerNorm sigma. In the "norm" phase there is no loss and
    the mean of s is tracked; the target is its bias-corrected EMA, frozen when that phase ends.
    """

    quantities = ("ema_s",)

    def __init__(self, norm, cfg):
        """norm: a bare model.Norm, whose `scale` is s; cfg: settings with anchor_unit and ema_rate."""
        super().__init__(cfg.ema_rate)
        self.norm, self.relative = norm, cfg.anchor_unit == "relative"
        self.register_buffer("target", torch.tensor(0.0))

    def forward(self, h, idx=None, end_token=None):
        """h: (B, T, D). Returns the loss, 0-dim, or None where there is none yet."""
        if self.phase != "norm":
            return distance(self.norm.scale(h), self.target, self.relative)
        if self.collecting():
            self.add(self.norm.scale(h.detach()).squeeze(-1))
        return None

    def target_now(self):
        return self.corrected()[0] if self.phase == "norm" else self.target

    def calibrate(self):
        nothing = self.scale_of_nothing() * (1 + 1e-5)  # and its rounding
        self.freeze(self.target, self.target_now(), degenerate=self.target_now() <= nothing)


class BatchAnchor(nn.Module):
    """FakeLN's scale loss: the target is the micro-batch's own mean of s, without gradient, over the tokens
    that are neither first in their window nor the end of a text (1 if there are none). The distance is over
    all tokens, from the first step on, whatever the gates."""

    def __init__(self, norm, cfg):
        """norm: a bare model.Norm, whose `scale` is s; cfg: settings with anchor_unit."""
        super().__init__()
        self.norm, self.relative = norm, cfg.anchor_unit == "relative"
        # of the last one, for the log; compiled, torch 2.13 writes into no 0-dim float64 buffer on a CPU
        self.register_buffer("target", torch.zeros(1), persistent=False)

    def forward(self, h, idx, end_token=None):
        """h: (B, T, D); idx: (B, T), the tokens it comes from."""
        s = self.norm.scale(h).squeeze(-1)  # (B, T)
        with torch.no_grad():
            counts = (torch.arange(idx.shape[1], device=idx.device) > 0).expand_as(idx)
            if end_token is not None:
                counts = counts & (idx != end_token)
            n = counts.sum()
            mean = (s * counts).sum() / n.clamp_min(1)
            target = torch.where(n > 0, mean, torch.ones_like(mean))
            if self.training:
                self.target.copy_(target)
        return distance(s, target, self.relative)

    def target_now(self):
        return self.target[0]


FAR = 0.7  # of log r: twice or half the mean


class Alongside(torch.autograd.Function):
    """h, as it is; in the backward a loss (0-dim) that nobody adds to the total gets the gradient 1."""

    generate_vmap_rule = True

    @staticmethod
    def forward(h, loss):
        return h.view_as(h)

    @staticmethod
    def setup_context(ctx, inputs, output):
        ctx.save_for_backward(inputs[1].detach())

    @staticmethod
    def backward(ctx, up):
        return up, torch.ones_like(*ctx.saved_tensors)


class SiteLoss(Tracker):
    """A loss on the spread of the scale at one norm's input (not in the papers):

        mean over tokens of d^2 + far * relu(|d| - FAR)^2,  d = log r(h) - its running mean

    What a norm is replaced by at gate 0 is off by this spread; at gate 1 the network's function does not
    depend on it. It has no unit, so one weight serves every width. Tokens count as they do for c. A mean that
    lags behind a growing stream holds it back, too: `site_rate=1` takes the last step's. The first step has
    none yet, and no loss; nor have those before `site_start`. It ends with the phase `site_until`. The total
    loss does not show it: its gradient enters where h is read, `share` times, which a run sets to
    1/(micro-batches a step).
    """

    quantities, shown = ("ema_log_s",), ("spread", "loss")

    def __init__(self, norm, cfg):
        """norm: a bare model.Norm; cfg: settings with the site_ and calibration's knobs, and n_layer."""
        super().__init__(cfg.ema_rate if cfg.site_rate is None else cfg.site_rate)
        self.norm, self.far, self.share, self.start = norm, cfg.site_far, 1.0, cfg.site_start
        self.phases = PHASES[: PHASES.index(cfg.site_until) + 1]
        held = cfg.n_layer - cfg.taper_from_layer  # blocks; all of them where none tapers
        self.weight = cfg.site_weight / (2 * held)  # a mean over their norms
        self.skip_first, self.sink_multiple = cfg.calib_skip_first, cfg.sink_multiple

    def hold(self, norm: nn.Module):
        """Become a part of the norm whose input this is about."""
        norm.site = self
        norm.register_forward_pre_hook(self.before)

    def before(self, norm, args):
        """A forward pre-hook: the same input, h (B, T, D), with a loss alongside."""
        if not self.collecting():
            return args
        h = args[0]
        log_s = self.norm.scale(h[:, 1:] if self.skip_first else h).log().squeeze(-1)  # (B, T)
        known = log_s.detach()
        counts = ordinary((-known).exp(), self.sink_multiple)
        counts = torch.ones_like(known, dtype=torch.bool) if counts is None else counts
        n = counts.sum().clamp_min(1)
        d = log_s - torch.where(self.ema_count > 0, self.corrected()[0], known)
        spread = d.square()
        loss = spread + self.far * (d.abs() - FAR).clamp_min(0).square()
        loss = loss * (self.ema_count >= self.start)
        self.add(known, spread.detach(), loss.detach(), counts=counts)
        loss = self.weight * self.share * loss.where(counts, 0).sum() / n
        return (Alongside.apply(h, loss), *args[1:])

    def calibrate(self):
        """Nothing is frozen: the mean goes on running."""


def site_losses(model: nn.Module) -> dict[str, SiteLoss]:
    """{"0.attn": ..., "0.mlp": ...}, if the run has a site loss."""
    sites = {}
    for i, block in enumerate(model.blocks):
        for kind in ("attn", "mlp"):
            sites[f"{i}.{kind}"] = getattr(getattr(block, f"norm_{kind}"), "site", None)
    return {name: site for name, site in sites.items() if site is not None}


class Ceiling(Tracker):
    """Limits what a taper's fixed branch can do to one token (not in the papers):

        h * min(1, ceiling / (c s(h)))

    A norm does not see the scale of what it reads, so its branch stays what it is, but for norm_eps; the
    fixed branch puts out at most `ceiling` times what the norm would, with the gain that c was fitted to. In
    training and in val/loss_gated, from the blend on: an export knows nothing of it, and is what was trained
    if no token meets it any more.
    """

    quantities, phases = ("ema_limited",), ("blend", "scale")

    def __init__(self, ceiling: float, ema_rate: float):
        super().__init__(ema_rate)
        self.ceiling = ceiling

    def hold(self, taper: nn.Module):
        """Become a part of the model.Taper whose input this is about."""
        taper.ceiling = self
        taper.register_forward_pre_hook(self.before)

    def before(self, taper, args):
        """A forward pre-hook: h (..., D), lowered where it is too large."""
        if not self.training or self.phase not in self.phases or self.apart:
            return args
        h = args[0]
        share = self.ceiling / (taper.c * taper.norm.scale(h))  # (..., 1)
        if self.collecting():
            self.add((share.detach() < 1).to(share.dtype).squeeze(-1))
        return ((h * share.clamp_max(1)).to(h.dtype), *args[1:])

    def calibrate(self):
        """Nothing is frozen."""


def ceilings(model: nn.Module) -> dict[str, Ceiling]:
    """{"0.attn": ..., "final": ...}: the names of the tapers that have one."""
    tapers = model.taper_norms()
    return {name: taper.ceiling for name, taper in tapers.items() if hasattr(taper, "ceiling")}


def drop_held(part: nn.Module):
    """Take site losses and ceilings away from the norms in `part`."""
    for norm in [m for m in part.modules() if {"site", "ceiling"} & m._modules.keys()]:
        for name in {"site", "ceiling"} & norm._modules.keys():
            delattr(norm, name)
        for key, hook in [*norm._forward_pre_hooks.items()]:
            if isinstance(getattr(hook, "__self__", None), SiteLoss | Ceiling):
                del norm._forward_pre_hooks[key]


# ---------------------------------------------------------------------------------------------------------
# gradient checkpointing: a second forward in which nothing is observed again


@contextmanager
def unobserved(block: nn.Module):
    """Let nothing in a block be observed a second time. The sums are put back, since a compiled block that
    did not add to them would be another graph, which keeps other tensors for its backward."""
    sums = [m.sums for m in block.modules() if isinstance(m, Tracker) and m.phase in m.phases]
    kept = [t.clone() for t in sums]
    try:
        yield
    finally:
        if sums:
            torch._foreach_copy_(sums, kept)


def recomputed(block: nn.Module, *args):
    """block(*args), which its backward computes once more, with the same dropout, instead of keeping it. A
    compiler moves no average twice by itself: to it a buffer's change is an output of the forward."""
    again = partial(checkpoint, block, *args, use_reentrant=False, preserve_rng_state=block.dropout > 0)
    if torch.compiler.is_compiling():
        return again()
    return again(context_fn=lambda: (nullcontext(), unobserved(block)))
