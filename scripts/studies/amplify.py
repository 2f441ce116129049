"""What becomes of a token that is a little too large: norms forget it, fixed scalings let it grow.

    python scripts/studies/amplify.py out/original out/no_norms/folded.pt --data=NAME --layer=12 --out=a.csv

In every window one token's stream is multiplied by e^delta as it enters block --layer, and d = log(r'/r) is
taken wherever a later block reads it: r' is its scale then, r what it is without. Printed is the mean of
d / delta over windows, without those in which it is e or more, or not finite; the share of those, which are
far; and r at block --layer over r. A norm divides the change away: were what the blocks write as it was, and
along the stream, d / delta would be that last number. A fixed scaling hands it on: what attention and MLP
write changes with it, a SwiGLU's by the square. Windows that are not finite as they are do not count; a line
says how many.

PATH is what scripts/evaluate.py takes and our own reader reads; all are of one depth.
"""

import math
import sys
from dataclasses import dataclass
from typing import Annotated, NamedTuple

import numpy as np
import torch

from model import Transformer  # not found? pip install -e .
from nanonorm.cli import check_out, parse
from nanonorm.errors import BadInput, one_line_errors
from nanonorm.tables import markdown, write_csv
from nanonorm.typed import Count, Range, Whole
from scripts.evaluate import checked, open_text
from scripts.exports.networks import Network, open_network


@dataclass
class Knobs:
    """What is measured, and where it goes."""

    data: tuple[str, ...] | None = None  # folders, or names under data/
    layer: Whole = 0  # the block that gets the changed token
    delta: Annotated[float, Range(1e-3, 3.0)] = 0.1  # log of the factor
    window: Count = 255  # tokens
    windows: Count = 32  # of each text
    seed: Whole = 1  # of the choice of tokens
    out: str | None = None  # .csv file for the numbers


@torch.inference_mode()
def scales(model: Transformer, idx, at, layer: int, factor: float) -> torch.Tensor:
    """log r of token `at` (B) of each row where block layer, layer + 1, ... and the final norm read it, its
    stream times `factor` at the first of them. idx: (B, T). -> (n_layer - layer + 1, B), float64"""
    rows, found, handles = torch.arange(len(idx)), [], []

    def see(first: bool, x):
        if first:
            x = x.clone()
            x[rows, at] *= factor
        found.append(model.scale(x[rows, at]).squeeze(-1).double().log())
        return x

    for i, block in enumerate(model.blocks[layer:]):

        def before(module, args, first=i == 0):
            return see(first, args[0]), *args[1:]

        handles.append(block.register_forward_pre_hook(before))
    try:
        see(False, model.stream(idx))
    finally:
        for handle in handles:
            handle.remove()
    return torch.stack(found)


class Growth(NamedTuple):
    """(n_layer - layer + 1) each: what is left of the change, over the windows that stay near; the share of
    the others; what would be left if all writes stayed, along the stream. bad: windows that are not
    finite as they are, of `windows` in all."""

    left: np.ndarray
    far: np.ndarray
    share: np.ndarray
    bad: int
    windows: int


def growth(model: Transformer, ids: np.ndarray, k: Knobs) -> Growth:
    """ids: (n, T)"""
    T, parts = ids.shape[1], []
    places = torch.from_numpy(np.random.default_rng(k.seed).integers(T // 4, T, len(ids)))
    for idx, at in zip(torch.from_numpy(ids).split(8), places.split(8), strict=True):
        parts.append(torch.stack([scales(model, idx, at, k.layer, x) for x in (1.0, math.exp(k.delta))]))
    plain, changed = torch.cat(parts, 2).numpy()
    good = np.isfinite(plain).all(0)
    d = (changed[:, good] - plain[:, good]) / k.delta
    far = ~(np.abs(d) < math.e)
    with np.errstate(all="ignore"):
        left = np.where(far, 0, d).sum(1) / (~far).sum(1)  # nan where no window stays near
    share = np.exp(plain[0, good] - plain[:, good]).mean(1)
    return Growth(left, far.mean(1), share, int((~good).sum()), len(good))


def measured(network: Network, k: Knobs, texts) -> Growth:
    model = (network.model or open_network(network.name).model).float().eval()
    return growth(model, np.concatenate([t.blocks(k.window, k.windows) for t in texts]).astype(np.int64), k)


def main():
    k, _, words = parse(Knobs, sys.argv[1:], usage=__doc__)
    if not words or not k.data:
        raise BadInput("name networks, and --data=FOLDER[,FOLDER...]")
    check_out("out", k.out, ".csv")
    texts = [open_text(name) for name in dict.fromkeys(k.data)]
    networks = checked(list(dict.fromkeys(words)), texts, own=True)
    k.window = min(k.window, *(network.context for network in networks))
    for text in texts:
        text.remark_on(k.window)
    if len({network.layers for network in networks}) > 1:
        raise BadInput("the networks have different numbers of blocks; compare those of one depth")
    if k.layer >= networks[0].layers:
        raise BadInput(f"--layer={k.layer}: {networks[0].name} has {networks[0].layers} blocks")
    found = {network.name: measured(network, k, texts) for network in networks}
    rows, cells = [], []
    for i, place in enumerate([*map(str, range(k.layer, networks[0].layers)), "final"]):
        at = {name: (of.left[i], of.far[i], of.share[i]) for name, of in found.items()}
        cells.append([place, *(f"{left:.3f}, {far:.0%}, {share:.3f}" for left, far, share in at.values())])
        rows += [(name, place, *(f"{x:.5f}" for x in of), found[name].bad) for name, of in at.items()]
    print(markdown(cells, ["block", *found]))
    for name, of in found.items():
        if of.bad:
            print(f"\n{name}: {of.bad} of {of.windows} windows are not finite as they are")
    if k.out:
        write_csv(k.out, ["network", "block", "d_over_delta", "far", "stream_share", "not_finite"], rows)


if __name__ == "__main__":
    with one_line_errors():
        main()
