"""Which alpha serves CoupledNorm best in a trained network: fitted to the statistic, or to the KL.

    python scripts/studies/alphas.py out/smollm2_hf --data=smollm2 --out=results/smollm2/choices

Every way is fitted on training text and compared on validation text, for several numbers of kept blocks. To
the statistic: `ratio` is the mean of r(h)/r(x), the others are scripts/couple.py's least squares; the first
position of a window is left out. To the KL: --steps of Adam on the logarithms of the numbers, from the
least-squares ones, a fresh batch of windows each. "one" has one alpha for all coupled blocks, "each" one a
block, "floor" a floor beside it. Writes choices.md, choices.csv and choices.png; needs matplotlib.
"""

import shlex
import sys
from dataclasses import dataclass
from pathlib import Path

import torch
import torch.nn.functional as F
from torch.func import functional_call

from begin import untapered  # not found? pip install -e .
from data import corpus_folder, open_corpus, refuse_other_tokens
from data.sampling import spread_starts, windows
from nanonorm.cli import parse
from nanonorm.errors import BadInput, one_line_errors
from nanonorm.log import say
from nanonorm.machine import keep_freed_memory
from nanonorm.run import given_weights
from nanonorm.tables import markdown, write_csv
from nanonorm.typed import Count, Positive, Several, Some, Whole
from scripts.couple import compare, coupled, measure, numbers_of, whole_rmsnorm
from scripts.studies.figures import Figures

STATISTIC = ("ratio, one", "ratio, each", "least squares, one", "least squares, each", "least squares, floor")
KL = ("KL, one", "KL, each", "KL, floor")
COLOURS = {"ratio": "#E69F00", "least squares": "#0072B2", "KL": "#D55E00"}
MARKS = {"one": "o", "each": "s", "floor": "^"}


@dataclass
class Knobs:
    """What is fitted and compared."""

    data: str | None = None  # a prepared corpus in the network's tokens
    out: str | None = None  # folder to write
    kept: Some[Whole] = (0, 1, 2, 4)  # numbers of first blocks that keep RMSNorm
    kl_kept: tuple[Whole, ...] = (2,)  # those for which the KL is fitted too
    window: Several = 256  # tokens
    tokens: Count = 8192  # of training text, for the statistic
    compared: Count = 2048  # of validation text
    steps: Count = 12  # of Adam, to the KL
    batch: Count = 2  # windows a step
    rate: Positive = 0.02  # of the first step; down to 0 by a cosine


def statistic_numbers(own: dict, way: str, keep: int) -> torch.Tensor:
    """(alpha, floor) of every coupled block, (2, L - keep). own: of all blocks, as measure() has it."""
    fit, _, shared = way.partition(", ")
    numbers = numbers_of(own, keep, "ratio" if fit == "ratio" else "floor" if shared == "floor" else "layer")
    if shared == "one":
        numbers[0] = numbers[0].mean()
    return numbers


def kl_numbers(file, path, network, start: torch.Tensor, shared: str, batches, k: Knobs) -> torch.Tensor:
    """The same, from `start`, by minimizing KL(network || coupled network). batches: ids (B, T)."""
    n_layer, n = network.config.n_layer, start.shape[1]
    student = coupled(file, path, n_layer - n, start).requires_grad_(False)
    coupled_blocks = range(n_layer - n, n_layer)
    gains = {f"blocks.{i}.norm_mlp.weight": network.blocks[i].norm_mlp.weight for i in coupled_blocks}
    factors = torch.zeros(2, 1 if shared == "one" else n, requires_grad=True)  # logarithms
    adam = torch.optim.Adam([factors], k.rate)
    schedule = torch.optim.lr_scheduler.CosineAnnealingLR(adam, k.steps)

    def numbers():
        return start.float() * factors.exp()

    for idx in batches:
        with torch.no_grad():
            wanted = network(idx).log_softmax(-1)
        alphas, floors = numbers()
        pairs = zip(gains.items(), alphas, strict=True)
        tensors = {name: gain.detach() / alpha for (name, gain), alpha in pairs}
        if start[1].any():
            tensors |= {f"blocks.{i}.floor": floors[i - n_layer] for i in coupled_blocks}
        logits = functional_call(student, tensors, (idx,))
        kl = F.kl_div(logits.log_softmax(-1), wanted, reduction="sum", log_target=True) / idx.numel()
        adam.zero_grad()
        kl.backward()
        adam.step()
        schedule.step()
        say(f"{n_layer - n} kept, {shared}: KL {kl.item():.4f}")
    return numbers().detach().double()


def as_rows(found: dict) -> list[dict]:
    """A row for each choice that couple.compare has found."""
    rows = []
    for (kept, way), ((alphas, floors), d) in found.items():
        low, high = alphas.min().item(), alphas.max().item()
        rows.append({"kept": kept, "way": way, "alpha_low": low, "alpha_mean": alphas.mean().item(),
                     "alpha_high": high, "floor_high": floors.max().item(), "original": d.before,
                     "cross_entropy": d.after, "kl": d.kl})  # fmt: skip
    return rows


def table(rows: list[dict]) -> str:
    """KL by way and kept blocks."""
    kept = sorted({row["kept"] for row in rows})
    of = {(row["way"], row["kept"]): row for row in rows}
    ways = [way for way in (*STATISTIC, *KL) if any(row["way"] == way for row in rows)]
    kls = [[way, *(f"{of[way, n]['kl']:.4f}" if (way, n) in of else "" for n in kept)] for way in ways]
    return markdown(kls, ["KL to the original, by kept blocks", *kept])


def draw(figures: Figures, rows: list[dict]) -> str:
    """KL over kept blocks, a mark for each way; returns its markdown."""
    fig, (ax,) = figures.axes(1, 1, 3.0)
    ways = list(dict.fromkeys(row["way"] for row in rows))
    for at, way in enumerate(ways):
        fit, _, shared = way.partition(", ")
        points = [(row["kept"], row["kl"]) for row in rows if row["way"] == way]
        x, y = zip(*points, strict=True)
        aside = (at - (len(ways) - 1) / 2) * 0.06
        look = {"marker": MARKS[shared], "color": COLOURS[fit], "linestyle": "none", "label": way}
        ax.plot([n + aside for n in x], y, markersize=6, fillstyle="none", **look)
    kls = [row["kl"] for row in rows]
    figures.log_scale(ax, max(min(kls), 1e-6) / 1.3, max(*kls, 2e-6) * 1.3)
    ax.xaxis.get_major_locator().set_params(integer=True)
    ax.set(xlabel="first blocks that keep both norms", ylabel="KL to the original, nats a token")
    return figures.save(fig, "choices", ax)


def main():
    k, _, words = parse(Knobs, sys.argv[1:], usage=__doc__)
    if len(words) != 1 or k.out is None or k.data is None:
        raise BadInput("name a network, a prepared corpus in its tokens and a folder to write")
    keep_freed_memory()
    figures = Figures(k.out)
    file, path = given_weights(words[0])
    base = whole_rmsnorm(file, path)
    if (most := max(k.kept + k.kl_kept)) >= base.n_layer:
        raise BadInput(f"{path} has {base.n_layer} blocks: {most} cannot be kept; lower --kept, --kl_kept")
    network = untapered(file, path, base.block_size, base.sink_token).requires_grad_(False)
    k.window = min(k.window, base.longest_text)
    folder = corpus_folder(k.data)
    meta, train, val = open_corpus(folder, k.window, base.ahead)
    refuse_other_tokens(meta, folder, file["meta"].get("corpus", {}), path)
    train, val, stride = torch.from_numpy(train), torch.from_numpy(val), meta.get("block_size", 1)
    starts = spread_starts(len(train), k.window, k.tokens, stride)
    batches = [windows(train, starts[i : i + 8], k.window, "cpu")[0] for i in range(0, len(starts), 8)]
    _, own = measure(network, batches)
    kept = sorted({*k.kept, *k.kl_kept})
    choices = {(n, way): statistic_numbers(own, way, n) for n in kept for way in STATISTIC}
    order = torch.randperm(len(starts), generator=torch.Generator().manual_seed(0)).split(k.batch)
    fresh = [windows(train, starts[part.numpy()], k.window, "cpu")[0] for part in order[: k.steps]]
    if k.kl_kept and len(fresh) < k.steps:
        needs = f"{k.steps} steps need {k.steps * k.batch * k.window} tokens"
        raise BadInput(f"{needs}, not {len(starts) * k.window}; give --tokens, or text, as many")
    for n in k.kl_kept:
        for way in KL:
            shared = way.partition(", ")[2]
            begin = choices[n, f"least squares, {shared}"]
            choices[n, way] = kl_numbers(file, path, network, begin, shared, fresh, k)
    choices = dict(sorted(choices.items(), key=lambda choice: choice[0][0]))
    rows = as_rows(compare(file, path, network, choices, val, stride, k))
    shown = table(rows)
    print(shown)
    command = "    " + shlex.join(["python", "scripts/studies/alphas.py", *sys.argv[1:]])
    others = spread_starts(len(val), k.window, k.compared, stride)
    counts = f"{len(starts) * k.window:,} tokens to fit on, {len(others) * k.window:,} others to compare on"
    about = f"{counts}, of {meta['source']}."
    original = f"The original's cross-entropy there is {rows[0]['original']:.4f} nats a token."
    write_csv(Path(k.out) / "choices.csv", list(rows[0]), (row.values() for row in rows))
    text = ["# Every choice of alpha", command, f"{about} {original}", shown, draw(figures, rows)]
    figures.write("choices.md", text)


if __name__ == "__main__":
    with one_line_errors():
        main()
