"""The position-0 hazard: what the first token of a window does to the scaling that stands in for a norm.

In GPT-2 the residual stream of position 0 is tens of times as large as the others'. Taper's least-squares
c* weights each token by |hbar gamma|^2, so that one token can drag it down for all others; FakeLN's 1/mean of
sigma hardly moves. For every norm of the stream this measures both, on held-out text and with the
checkpoint's own gains, with position 0 and without, each times the mean sigma of the other positions: 1 where
the scaling has their size. Sigma varies, so c* alone would be a little below 1 (gamma may move it either
way); "skip first" shows by how much.
"""

from contextlib import ExitStack

import numpy as np
import torch

from model import CoupledBlock, Norm, Taper, Transformer
from nanonorm.errors import BadInput
from nanonorm.files import atomic_write
from nanonorm.kernels import upcast
from nanonorm.machine import widest_float
from nanonorm.plots import COLOURS, GREY, pyplot

EPS = 1e-5  # of GPT-2's LayerNorm; in place of an eps so large that the norm is a fixed scaling


def sites(model: Transformer) -> dict[str, Norm | Taper]:
    """{"blocks.0.norm_attn": ..., "norm_final": ...}: the stream's norms that still compute a statistic."""
    named = {}
    for i, block in enumerate(model.blocks):
        if not isinstance(block, CoupledBlock):  # it computes its norms without the modules
            named |= {f"blocks.{i}.norm_attn": block.norm_attn, f"blocks.{i}.norm_mlp": block.norm_mlp}
    named["norm_final"] = model.norm_final
    return {name: norm for name, norm in named.items() if isinstance(norm, Norm | Taper)}


class Watch:
    """Sums over the tokens that pass a norm, at position 0 and at the others.

    sums: (2, 4): tokens, sigma, |hbar gamma|^2 / sigma, |hbar gamma|^2
    """

    def __init__(self, norm: Norm | Taper, device):
        statistic = norm.norm if isinstance(norm, Taper) else norm
        self.eps = statistic.eps if statistic.eps <= 1 else EPS
        self.centre = statistic.centres
        self.gain = None if norm.weight is None else norm.weight.detach()
        self.sums = torch.zeros(2, 4, dtype=widest_float(device), device=device)

    def __call__(self, module, args):
        x = upcast(args[0])  # (B, T, D)
        if self.centre:
            x = x - x.mean(-1, keepdim=True)
        sigma = torch.sqrt(x.square().mean(-1) + self.eps)  # (B, T)
        power = (x if self.gain is None else x * self.gain).square().sum(-1)
        each = torch.stack((torch.ones_like(sigma), sigma, power / sigma, power), -1).to(self.sums.dtype)
        self.sums += torch.stack((each[:, 0].sum(0), each[:, 1:].sum((0, 1))))

    def row(self, site: str) -> dict:
        """What the table shows of a site, and c itself."""
        first, rest = self.sums.tolist()
        n, sigma, num, den = (a + b for a, b in zip(first, rest, strict=True))
        others = rest[1] / rest[0]
        c = {"c": num / den, "c_skip_first": rest[2] / rest[3], "c_mean_scale": n / sigma}
        fits = {f"{name}_times_sigma": value * others for name, value in c.items()}
        return {"site": site, "sigma_first": first[1] / first[0], "sigma_others": others, **c, **fits}


@torch.inference_mode()
def measure(model: Transformer, batches, device) -> list[dict]:
    """A row a site. batches: of ids (B, T) on `device`, T above 1. Raises: BadInput if no norm is left."""
    watches = {name: Watch(norm, device) for name, norm in sites(model).items()}
    if not watches:
        remedy = "give the checkpoint that it was made of"
        raise BadInput(f"no norm of the residual stream computes a statistic of its own here; {remedy}")
    with ExitStack() as held:
        for name, watch in watches.items():
            held.enter_context(model.get_submodule(name).register_forward_pre_hook(watch))
        for idx in batches:
            model(idx)
    return [watch.row(name) for name, watch in watches.items()]


HEADS = (
    "norm",
    "sigma, position 0",
    "sigma, others",
    "c* sigma",
    "c* sigma, skip first",
    "sigma / mean sigma",
)
KEYS = ("c_times_sigma", "c_skip_first_times_sigma", "c_mean_scale_times_sigma")


def print_table(rows: list[dict]):
    """Print a Markdown table, and what is lowest in it."""
    widths = [max(len(HEADS[0]), *(len(row["site"]) for row in rows)), *map(len, HEADS[1:])]

    def line(cells):
        print("| " + " | ".join(f"{c:>{w}}" for c, w in zip(cells, widths, strict=True)) + " |", flush=True)

    line(HEADS)
    print("|" + "|".join("-" * (w + 1) + ":" for w in widths) + "|")
    for row in rows:
        scales = [f"{row[key]:.4g}" for key in ("sigma_first", "sigma_others")]
        line([row["site"], *scales, *(f"{row[key]:.3f}" for key in KEYS)])
    for key, what in zip(KEYS[:2], ("with position 0", "without it"), strict=True):
        worst = min(rows, key=lambda row: row[key])
        print(f"c* sigma {what}: {worst[key]:.3f} at the lowest, {worst['site']}")


def draw(path: str, rows: list[dict], title: str):
    """The table as two panels: sigma of position 0 and of the others, and how well each c fits the others."""
    figure, (scales, fits) = pyplot().subplots(2, 1, figsize=(6.5, 5), sharex=True, layout="constrained")
    x = np.arange(len(rows))
    for key, label, colour in (
        ("sigma_first", "position 0", COLOURS[2]),
        ("sigma_others", "the others", COLOURS[0]),
    ):
        scales.semilogy(x, [row[key] for row in rows], ".-", color=colour, label=label)
    names = ("c*, all positions", "c*, without position 0", "1 / mean sigma (FakeLN)")
    for key, label, colour in zip(KEYS, names, (COLOURS[2], COLOURS[0], COLOURS[3]), strict=True):
        fits.plot(x, [row[key] for row in rows], ".-", color=colour, label=label)
    fits.axhline(1, color=GREY, linewidth=0.8)
    scales.set_ylabel("mean sigma")
    fits.set_ylabel("c times sigma of the others")
    fits.set_xlabel("norm, in the order of the forward pass")
    for panel in (scales, fits):
        panel.spines[["top", "right"]].set_visible(False)
        panel.legend(fontsize=9, frameon=False)
    fits.xaxis.get_major_locator().set_params(integer=True)
    figure.suptitle(title, fontsize=9)
    with atomic_write(path) as f:
        figure.savefig(f, dpi=200, format="png")
