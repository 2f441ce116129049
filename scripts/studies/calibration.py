"""The position-0 hazard: what the first token of a window does to the scaling that stands in for a norm.

In GPT-2 the residual stream of position 0 is tens of times as large as the others'. Taper's least-squares
c* weights each token by |hbar gamma|^2, so that one token can drag it down for all others; FakeLN's 1/mean of
sigma hardly moves. For every norm of the stream this measures both, on held-out text and with the
checkpoint's own gains, with position 0 and without, each times the mean sigma of the other positions: 1 where
the scaling has their size. Sigma varies, so c* alone would be a little below 1 (gamma may move it either
way); "skip first" shows by how much.
"""

from contextlib import ExitStack

import torch

from model import CoupledBlock, Norm, Taper, Transformer
from nanonorm.errors import BadInput
from nanonorm.kernels import upcast
from nanonorm.machine import widest_float
from scripts.studies.tables import markdown

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


COLUMNS = {
    "sigma, position 0": "sigma_first",
    "sigma, others": "sigma_others",
    "c* sigma": "c_times_sigma",
    "c* sigma, skip first": "c_skip_first_times_sigma",
    "sigma / mean sigma": "c_mean_scale_times_sigma",
}  # head -> key of a row


def table(rows: list[dict]) -> str:
    """A table in Markdown, and what is lowest in it."""
    forms = {key: ".3f" if key.startswith("c_") else ".4g" for key in COLUMNS.values()}
    cells = ([row["site"], *(format(row[key], form) for key, form in forms.items())] for row in rows)
    said = [markdown(cells, ["norm", *COLUMNS])]
    for head, what in (("c* sigma", "with position 0"), ("c* sigma, skip first", "without it")):
        worst = min(rows, key=lambda row: row[COLUMNS[head]])
        said.append(f"c* sigma {what}: {worst[COLUMNS[head]]:.3f} at the lowest, {worst['site']}")
    return "\n".join(said)
