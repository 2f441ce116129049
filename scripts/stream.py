"""What scale a trained network's stream has by site, position and token, and what of it TaperNorm's c misses.

    python scripts/stream.py out/demo --data=stdlib --out=out/demo_stream
    python scripts/stream.py gpt2 --data=data/owt_held_out,data/pile_held_out --out=out/gpt2_stream
    python scripts/stream.py out/original out/no_norms/folded.pt --data=NAME --out=out/both   # side by side

PATH is whatever scripts/evaluate.py takes and our own reader reads; --data is as there. A site is
where a norm reads the stream, whether one is left there or not: 3.attn, 3.mlp, final. r is what the norm
divides a token by: the RMS, or LayerNorm's sigma. A sink is a token whose r is above --sink_multiple times
the median at its site; the others are the ordinary tokens.

c is the number for which c x w is nearest, by least squares, to the norm's output x w / r; x is the stream,
centred if the norm centres, w the norm's gain. With p = |x w|^2 it is E[p/r] / E[p] (TaperNorm), and leaves
1 - E[p/r]^2 / (E[p] E[p/r^2]) of that output. Where p goes as r^2 this is 1 - (E r)^2 / E r^2, "by r alone".
c r is c times the ordinary tokens' mean r: 1 where the scaling has their size. 1 / mean r is FakeLN's c.
Where a fold has taken the norm, its gain is in the next layer, and w is 1: r is the same, c and what it
leaves are of other sizes than before the fold.

Prints tables and writes a folder: stream.md with the tables, stream.csv (a row a site), sinks.csv (a row a
token that is a sink at some site), and a figure a network and text; of several networks also spread.png, the
sd of log r of their ordinary tokens by site (needs matplotlib). Windows that are not finite are left out.
"""

import shlex
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

import numpy as np
import torch

from data.tokenizer import Tokenizer, load_tokenizer  # not found? pip install -e .
from model import Norm, Taper, Transformer, statistic
from nanonorm.cli import parse
from nanonorm.errors import BadInput, one_line_errors
from nanonorm.files import folder_name
from nanonorm.machine import pick_device
from nanonorm.plots import COLOURS
from nanonorm.residual import watched
from nanonorm.tables import table_of, write_csv
from nanonorm.typed import Count, Range, Several, Whole
from scripts.evaluate import Text, batches, checked, open_text, opened
from scripts.exports.networks import Network
from scripts.studies.figures import Figures

EPS = 1e-5  # of GPT-2's LayerNorm; in place of an eps so large that the norm is a fixed scaling
AT_ONCE = 2048  # tokens in one forward pass
SHOWN = 20  # tokens in the table of sinks; sinks.csv has all
KINDS = {"all": "all tokens", "skip_first": "without position 0", "ordinary": "without sinks"}  # that c sees
ORDINARY, FIRST, BEHIND = "#000000", "#D55E00", "#0072B2"  # tokens' colours
BY_SITE = ("#E69F00", "#56B4E9", "#009E73", "#CC79A7", "#000000")  # from the first site to the last


@dataclass
class Knobs:
    """What is measured, and where it goes."""

    data: tuple[str, ...] | None = None  # folders, or names under data/
    out: str | None = None  # the folder to make
    tokens: Count = 16_384  # of each text, in windows from all of it
    window: Several = 512  # tokens of a window, at most the network's context
    begin: Whole | None = None  # the id of a token to put in front of each window; None: none
    # a token is a sink above so many times the median r of its site
    sink_multiple: Annotated[float, Range(1.0, 1e6)] = 4.0
    device: str = "auto"  # cpu, cuda, ...


# ---------------------------------------------------------------------------------------------------------
# measured; arrays are (sites, n, T), of n windows of T tokens


def windows_of(text: Text, k: Knobs, T: int) -> np.ndarray:
    """Windows from all of a text, (n, T) ids, the begin token in front included. Raises: BadInput."""
    front = k.begin is not None
    blocks = text.blocks(T - front, None)
    text.remark_on(T - front)
    some = blocks[np.linspace(0, len(blocks) - 1, min(len(blocks), max(1, k.tokens // T))).astype(int)]
    return np.insert(some, 0, k.begin, axis=1) if front else some


def sites_of(model: Transformer) -> list[str]:
    """Every site, as Transformer.taper_norms names those that taper."""
    return [f"{i}.{kind}" for i in range(len(model.blocks)) for kind in ("attn", "mlp")] + ["final"]


@torch.inference_mode()
def measure(model: Transformer, windows) -> np.ndarray:
    """r and |x w|^2 of every token, (2, sites, n, T) in float64. windows: ids (B, T) each."""
    norm, found = statistic(model.config), []
    norm.eps = norm.eps if norm.eps <= 1 else EPS

    def look(reader, h):
        x = norm.centred(h)
        x = x * reader.weight if isinstance(reader, Norm | Taper) and reader.weight is not None else x
        return torch.stack((norm.scale(h)[..., 0], x.square().sum(-1))).double().cpu()

    for idx in windows:
        sites = []

        def see(i, x, h, sites=sites):
            sites += [look(model.blocks[i].norm_attn, x), look(model.blocks[i].norm_mlp, h)]

        with watched(model, see):
            last = model.stream(idx)
        found.append(torch.stack([*sites, look(model.norm_final, last)], 1))
    return torch.cat(found, 2).numpy()


def sinks_of(r, multiple: float) -> np.ndarray:
    """Which tokens are sinks, bool."""
    return r > multiple * np.median(r, (1, 2), keepdims=True)


def fit(r, power) -> tuple[float, float]:
    """c of some tokens, and the share of the norm's output that it leaves. (tokens), (tokens)"""
    num, den, output = (power / r).sum(), power.sum(), (power / r**2).sum()
    return num / den, 1 - num**2 / (den * output)


def site_row(r, power, sink) -> dict:
    """What is said of a site. (n, T) each"""
    ordinary, median = r[~sink], np.median(r)
    mean = ordinary.mean()
    found = {"tokens": r.size, "median": median, "first": r[:, 0].mean(), "ordinary": mean}
    found |= {"largest": r.max() / median, "sinks": sink.sum(), "sinks_behind": sink[:, 1:].sum()}
    found |= {"sd_log": np.log(ordinary).std(), "residual_of_r": 1 - mean**2 / (ordinary**2).mean()}
    behind = np.broadcast_to(np.arange(r.shape[1]) > 0, r.shape)
    for kind, of in zip(KINDS, (sink | ~sink, behind, ~sink), strict=True):
        found[f"c_{kind}"], found[f"residual_{kind}"] = fit(r[of], power[of])
    found["c_mean_scale"] = 1 / r.mean()
    return found | {f"c_{kind}_times_r": found[f"c_{kind}"] * mean for kind in (*KINDS, "mean_scale")}


def token_rows(r, sink, ids, sites: list[str], tokenizer: Tokenizer, begin: int | None) -> list[dict]:
    """What is said of each token id that is a sink at some site, the most frequent first. ids: (n, T)"""
    special = {begin: "begin token", tokenizer.eot_id: tokenizer.end_token}
    anywhere, found = sink.any(0), []
    times = (r / np.median(r, (1, 2), keepdims=True)).max(0)  # (n, T)
    for token in np.unique(ids[anywhere]).tolist():
        which = anywhere & (ids == token)
        behind = np.nonzero(which[:, 1:])[1] + 1  # their positions
        where = [site for site, at in zip(sites, sink, strict=True) if at[which].any()]
        text = special.get(token) or repr(tokenizer.decode([token]))
        of_token = {"token": text, "id": token, "in_text": (ids == token).sum()}
        of_token |= {"sinks": which.sum(), "behind": len(behind)}
        of_token["positions"] = f"{behind.min()} to {behind.max()}" if len(behind) else "-"
        found.append(of_token | {"sites": f"{where[0]} to {where[-1]}", "largest": times[which].max()})
    return sorted(found, key=lambda of_token: -of_token["sinks"])


# ---------------------------------------------------------------------------------------------------------
# told

SITES = {
    "median r": ("median", ".4g"),
    "r at position 0": ("first", ".4g"),
    "largest / median": ("largest", ".3g"),
    "sinks": ("sinks", "d"),
    "behind position 0": ("sinks_behind", "d"),
    "sd log r": ("sd_log", ".3f"),
    "c leaves": ("residual_all", ".4f"),
    "without position 0": ("residual_skip_first", ".4f"),
    "without sinks": ("residual_ordinary", ".4f"),
    "by r alone": ("residual_of_r", ".4f"),
    "c r": ("c_all_times_r", ".3f"),
    "c r without position 0": ("c_skip_first_times_r", ".3f"),
    "c r without sinks": ("c_ordinary_times_r", ".3f"),
    "r / mean r": ("c_mean_scale_times_r", ".3f"),
}  # head -> key of a row, its form
TOKENS = {
    "id": ("id", "d"),
    "in the windows": ("in_text", "d"),
    "as a sink": ("sinks", "d"),
    "behind position 0": ("behind", "d"),
    "at positions": ("positions", "s"),
    "at sites": ("sites", "s"),
    "largest / median": ("largest", ".3g"),
}


def draw_spread(figures: Figures, rows: list[dict]) -> str:
    """The networks side by side, a panel a text; returns its markdown."""
    texts, models = (list(dict.fromkeys(row[key] for row in rows)) for key in ("data", "model"))
    fig, panels = figures.axes(len(texts), 1, 0.4 + 1.9 * len(texts), sharex="col")
    for ax, text in zip(panels, texts, strict=True):
        for i, model in enumerate(models):
            sd = [row["sd_log"] for row in rows if (row["data"], row["model"]) == (text, model)]
            ax.plot(np.arange(len(sd)) / 2, sd, color=[ORDINARY, *COLOURS][i % 6], marker=".", label=model)
        ax.set(title=Path(text).name, ylabel="sd of log r", ylim=(0, None))
    panels[-1].set_xlabel("block")
    return figures.save(fig, "spread", panels[-1])


def draw(figures: Figures, name: str, rows: list[dict], r, sink) -> str:
    """A text's figure; returns its markdown."""
    fig, (scale, growth, by_position, left) = figures.axes(2, 2, 5.2)
    at, ordinary = np.arange(len(r)) / 2, np.where(sink, np.nan, r)  # the MLP of block i reads at i + 1/2
    low, middle, high = np.nanpercentile(ordinary, (5, 50, 95), (1, 2))
    scale.fill_between(at, low, high, color=ORDINARY, alpha=0.2, linewidth=0)
    scale.plot(at, middle, color=ORDINARY, label="ordinary tokens: median, 5 to 95%")
    scale.plot(at, r[:, :, 0].mean(1), "--", color=FIRST, label="position 0: mean")
    behind = np.nonzero(sink[:, :, 1:])
    dots = {"markersize": 3, "alpha": 0.5, "label": "sinks behind it"}
    scale.plot(at[behind[0]], r[:, :, 1:][behind], ".", color=BEHIND, **dots)
    figures.log_scale(scale, low.min() / 1.5, r.max() * 1.5)
    scale.set(xlabel="block", ylabel="r", title="Scale of the stream")

    of_block = np.nanmean(ordinary[1:-1:2] / ordinary[:-1:2], (1, 2))
    growth.plot(of_block, color=ORDINARY, marker=".")
    growth.plot((r[1:-1:2, :, 0] / r[:-1:2, :, 0]).mean(1), "--", color=FIRST, marker=".")
    growth.set(xlabel="block", ylabel="times", title="Growth of r from attention to the MLP")

    medians = np.median(r, 1) / np.array([[row["median"]] for row in rows])
    for i, colour in zip(np.linspace(0, len(r) - 1, 5).astype(int), BY_SITE, strict=True):
        by_position.plot(1 + np.arange(r.shape[2]), medians[i], color=colour, label=rows[i]["site"])
    figures.log_scale(by_position, medians.min() / 1.1, medians.max() * 1.1)
    by_position.set(xscale="log", xlabel="position, from 1", title="Median r by position")
    by_position.set_ylabel("times the site's median")

    lines = ("-", "#BBBBBB", 3), ("--", FIRST, 1.3), (":", BEHIND, 1.6)  # each is seen where it is on another
    for (kind, label), (line, colour, width) in zip(KINDS.items(), lines, strict=True):
        y = [row[f"residual_{kind}"] for row in rows]
        left.plot(at, y, line, color=colour, linewidth=width, label=label)
    left.set(yscale="log", xlabel="block", ylabel="share of the norm's output", title="What c leaves")
    for ax, axis, columns in ((by_position, by_position.xaxis, 3), (left, left.yaxis, 2)):
        axis.set_major_formatter("{x:g}")
        ax.legend(fontsize=7, loc="upper center", bbox_to_anchor=(0.5, -0.26), ncols=columns)
    return figures.save(fig, name, scale)


def report(k: Knobs, network: Network, text: Text, figures: Figures, device, tag: str):
    """(blocks of markdown, a row a site, a row a token) of one text. tag: its figure's name.
    Raises: BadInput if no window is finite."""
    model, T = network.model, min(k.window, network.context)
    ids = windows_of(text, k, T)
    some = batches(ids, max(1, AT_ONCE // T), device, text.name)
    r, power = measure(model, (idx for _, idx in some))
    finite = np.isfinite(r).all((0, 2))
    if not finite.any():
        raise BadInput(f"{network.name} is finite in no window of {text.name}")
    r, power, ids = r[:, finite], power[:, finite], ids[finite]
    sink, sites = sinks_of(r, k.sink_multiple), sites_of(model)
    of = {"model": network.name, "data": text.name}
    rows = [of | {"site": s, **site_row(*at)} for s, *at in zip(sites, r, power, sink, strict=True)]
    tokenizer = load_tokenizer(text.folder / text.manifest.tokenizer)
    tokens = [of | found for found in token_rows(r, sink, ids, sites, tokenizer, k.begin)]
    many = f"{sink.any(0).sum():,} of {ids.size:,} tokens are sinks at some site"
    said = f"{len(ids)} windows of {T} tokens. {many}: r above {k.sink_multiple:g} times the site's median."
    said += f" Not finite, and left out: {n}." if (n := (~finite).sum()) else ""
    shown = [table_of(tokens[:SHOWN], ["token"], TOKENS)] if tokens else []
    shown += [table_of(rows, ["site"], SITES), draw(figures, tag, rows, r, sink)]
    return [f"## {network.name}, {text.name}", said, *shown], rows, tokens


def main(argv: list[str]):
    k, _, words = parse(Knobs, argv, usage=__doc__)
    if not words or not k.data or k.out is None:
        example = "python scripts/stream.py PATH [PATH ...] --data=FOLDER[,FOLDER...] --out=DIR"
        raise BadInput(f"name networks, text and a folder to make: {example}")
    device, texts = pick_device(k.device), [open_text(name) for name in dict.fromkeys(k.data)]
    networks = checked(list(dict.fromkeys(words)), texts, own=True)
    for network in networks:
        if k.begin is not None and k.begin >= network.vocab_size:
            raise BadInput(f"begin={k.begin} is no token of {network.name}, which has {network.vocab_size}")
    names = [text.folder.name for text in texts]
    if len(set(names)) < len(names):
        names = range(1, len(names) + 1)
    figures, rows, tokens = None, [], []
    blocks = ["# The stream", "    " + shlex.join(["python", "scripts/stream.py", *argv])]
    for i, network in enumerate(opened(networks, device), 1):
        figures = figures or Figures(k.out)
        own = "stream" if len(networks) == 1 else f"stream_{i}"
        for text, named in zip(texts, names, strict=True):
            tag = folder_name(f"{own}_{named}")
            said, of_sites, of_tokens = report(k, network, text, figures, device, tag)
            print("\n\n".join(said), flush=True)
            blocks, rows, tokens = blocks + said, rows + of_sites, tokens + of_tokens
    if len(networks) > 1:
        blocks.insert(2, draw_spread(figures, rows))
    write_csv(figures.out / "stream.csv", [*rows[0]], (row.values() for row in rows))
    head = ["model", "data", "token", *(key for key, _ in TOKENS.values())]
    write_csv(figures.out / "sinks.csv", head, ([row[key] for key in head] for row in tokens))
    print(figures.write("stream.md", blocks))


if __name__ == "__main__":
    with one_line_errors(torch.OutOfMemoryError):
        main(sys.argv[1:])
