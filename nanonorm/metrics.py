"""What a log line says of a step, by its names in wandb (docs/how-it-works.md lists them).

Shapes: B batch, T time, D width, V vocabulary.
"""

import torch

from nanonorm import machine
from nanonorm.kernels import upcast
from nanonorm.optimizer import grad_norms
from nanonorm.ranks import whole
from nanonorm.scale import ceilings, site_losses
from nanonorm.schedules import lr_at, mean_gate


def log_line(step, done: int, tokens_per_s: float, peak: float) -> dict[str, float]:
    """The metrics after `done` steps of a train.Step. train/loss is what steps minimize. It, ce, aux
    and kl are means over micro-batches of what each has as the mean over the targets that it counts: not
    those of -100, nor with mask_end the ends of texts. Metrics of the stream are of the first rank's last
    micro-batch, and they and the gradient of the weights before the step; logits/l2 is of that stream, but of
    the final norm and the head after it. peak: FLOP/s of the machine, 0 if not measured."""
    model, totals, (stream, norms) = step.model, step.totals, step.last
    step.ranks.sum(totals)
    *sums, n = totals.tolist()
    totals.zero_()
    s, largest, l2 = diagnostics(model, stream)
    mfu = tokens_per_s * machine.flops_per_token(model) / peak if peak else 0.0
    line = grad_norms(list(step.trained), norms)
    means = {name: total / n for name, total in zip(step.losses, sums, strict=True)}
    line |= {"train/loss": means.pop("total"), **{f"train/{name}": mean for name, mean in means.items()}}
    line |= {"s/mean": s.item(), "s/max": largest.item(), "logits/l2": l2.item(), "lr": lr_at(done, step.cfg)}
    line |= {**site_metrics(model), "perf/tok_s": tokens_per_s, "perf/mfu": mfu}
    if model.anchor is not None:
        line["s/target"] = model.anchor.target_now().item()
    if model.taper_norms():
        line |= {"gate": mean_gate(model.gate), **step.gates.metrics(), **taper_metrics(model)}
    return line


@torch.no_grad()
def diagnostics(model, stream) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Mean and largest scale of a token before the final norm, mean l2 norm of the logits, 0-dim. stream: (B,
    T, D).

    |W y + b|^2 = y (W'W) y + 2 y (W'b) + |b|^2, so the (B, T, V) logits are never built.
    """
    h = upcast(stream)
    W, b = model.head()
    y, W = upcast(model.norm_final(h)), upcast(W)
    squares = ((y @ whole(W.t() @ W)) * y).sum(-1)
    if b is not None:  # a head into which a LayerNorm was folded
        squares = squares + 2 * (y @ (whole(W).t() @ upcast(b))) + upcast(b).square().sum()
    s = model.scale(h)
    return s.mean(), s.max(), squares.clamp_min(0).sqrt().mean()


def residual(taper) -> torch.Tensor:
    """Which share of a norm's output c_now() would leave, on the last step's tokens; of a model.Taper by
    their power, of a MeanScaleTaper every token alike. 0-dim, to 1e-6 in float32"""
    c, (cross, power, *output) = taper.c_now(), taper.means()
    return 1 - c * (2 * cross - c * power) / (output[0] if output else 1.0)


def taper_metrics(model) -> dict[str, float]:
    """What the log tells of each taper's c, by its name in wandb: c, what it leaves, which share of tokens
    it was not fitted to."""
    line = {}
    for name, norm in model.taper_norms().items():
        line[f"taper/c.{name}"] = (norm.c_now() if model.phase == "norm" else norm.c).item()
        if model.phase in norm.phases:  # c still moves
            line[f"taper/residual.{name}"] = residual(norm).item()
            if norm.sink_multiple is not None:
                line[f"taper/sinks.{name}"] = norm.left_out().item()
    return line | limited(model)


def limited(model) -> dict[str, float]:
    """Which share of the last step's tokens the ceiling of each taper limited, and their mean."""
    shares = {name: ceiling.means()[0].item() for name, ceiling in ceilings(model).items()}
    if not shares or model.phase == "norm":
        return {}
    named = {f"taper/limited.{name}": share for name, share in shares.items()}
    return named | {"taper/limited": sum(shares.values()) / len(shares)}


FEW = 1e-6  # of a run's tokens and sites


def at_ceiling(model) -> str:
    """What to say of tapers whose ceilings tokens met of late, by their running means; "" if fewer than FEW
    did."""
    of_late = [c.corrected()[0].item() for c in ceilings(model).values() if c.ema_count > 0]
    share = sum(of_late) / max(1, len(of_late))
    if share < FEW:
        return ""
    met = f"taper_ceiling={model.config.taper_ceiling} still limited {share:.1e} of the tokens of late"
    return f"{met}, a mean over sites; the exports have no ceiling, and may do worse there"


def site_metrics(model) -> dict[str, float]:
    """What the log tells of a site loss in the last step: the loss with its weight, and of each site the
    variance of log r over tokens, about its running mean."""
    line, sites = {}, site_losses(model)
    for name, site in sites.items():
        if site.phase in site.phases:
            _, line[f"site/spread.{name}"], loss = site.means().tolist()
            line["train/site"] = line.get("train/site", 0.0) + site.weight * loss
    return line
