"""Tables and figures of the papers, from finished runs: markdown, PNG and CSV.

    python scripts/report.py out/small --out=results/tinystories_small
    python scripts/report.py out/small out/lambda out/steps --out=results/tinystories_small

Each PATH is a run folder or a folder of runs. A run that cannot be used (no metrics, half-written, unfinished, of another
version, not finite, a second copy) is named in the report with the reason, and is in no number. Runs that differ in
anything but the variant and the seed are never averaged: sizes and lengths get tables of their own, lambda and the gate
schedule a study each. Needs matplotlib.
"""

import csv
import io
import json
import math
import shlex
import sys
from collections import defaultdict
from dataclasses import asdict, dataclass, fields
from pathlib import Path

import numpy as np
import torch

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from config import ROOT, BadInput, Config, Count, atomic_write, one_line_errors, parse
from data import open_corpus
from model import ModelConfig, ModelError, Transformer, exports
from scripts.sweep import AUX_WEIGHT, NOT_THE_RUN, READ_BY, VARIANTS, identity, tail

TAPERS = ("baseline", "internal", "internal_aux", "final", "all", "all_aux")
OTHERS = ("baseline", "coupled", "layernorm", "cbwc", "dyt", "derf")

# Relative gap to Baseline in %, after 1 M steps of 8,192 tokens at 1 to 30 M parameters: arXiv 2602.10408, first version
PAPER = {"internal_aux": "+0.7 to +1.5", "all": "+0.8 to +1.8", "all_aux": "+0.8 to +1.8"}

# Okabe and Ito's colours, told apart by the colour-blind, and a dash each for print
STYLE = {
    "baseline": ("#000000", "-"), "internal": ("#0072B2", "--"), "internal_aux": ("#56B4E9", "-"), "final": ("#E69F00", "-."),
    "all": ("#D55E00", "--"), "all_aux": ("#CC79A7", "-"), "coupled": ("#009E73", "-"), "layernorm": ("#0072B2", "--"),
    "cbwc": ("#56B4E9", ":"), "dyt": ("#D55E00", "-."), "derf": ("#CC79A7", (0, (5, 1, 1, 1, 1, 1))),
}  # fmt: skip
WIDTH = 6.5  # inches, a text column
SKIP = {"out_dir", "dataset", "seed", "norm", "taper", "aux_weight", "device"} | NOT_THE_RUN  # no point of comparison of their own


@dataclass
class Report:
    """What is written."""

    out: str = "results/report"  # folder of report.md, *.png and *.csv
    tokens: Count = 4096  # of validation text, for the residual stream's RMS


@dataclass(eq=False)
class Run:
    """A finished run. settings: as recorded; point: what it may be compared by, defaults that follow another knob as None."""

    folder: Path
    variant: str
    settings: dict
    point: dict
    head: dict
    lines: list[dict]

    @property
    def seed(self) -> int:
        return self.settings["seed"]

    @property
    def loss(self) -> float:
        return self.lines[-1]["val/loss"]

    def series(self, name: str) -> dict[int, float]:
        """{step: value}, nan where the log has null."""
        return {x["iter"]: math.nan if x[name] is None else x[name] for x in self.lines if name in x}


# --- runs


class LeftOut(Exception):
    """Why a run is in no number."""


def variant_of(s: dict) -> str:
    """Its name in VARIANTS, else one made of its knobs."""
    kind = (s["norm"], s["taper"], s["aux_weight"] > 0)
    made = "_".join([s["norm"]] + [s["taper"]] * (s["taper"] != "none") + ["aux"] * (s["aux_weight"] > 0))
    return next((name for name, knobs in VARIANTS.items() if knobs == kind), made)


def point_of(head: dict) -> dict:
    """What sets runs apart beside variant and seed; lambda and the gate's knobs where they are read."""
    s, read = head["settings"], Config(**head["settings"])
    follows = {"warmup_iters": max(1, s["max_iters"] // 20), "lr_decay_iters": max(s["max_iters"], s["warmup_iters"] + 1),
               "gate_start": s["warmup_iters"], "gate_end": s["max_iters"]}  # fmt: skip
    point = {k: None if v == follows.get(k, math.nan) else v for k, v in s.items() if k not in SKIP}
    point = {k: v for k, v in point.items() if READ_BY.get(k, lambda c: True)(read)}
    point |= {"aux_weight": s["aux_weight"]} if s["aux_weight"] else {}
    return point | {"corpus": head["corpus"]["tokenizer_sha256"][:8], "device": head["versions"]["device"]}


def load(folder: Path) -> Run:
    """The run in a folder. Raises: LeftOut."""
    try:
        text = (folder / "metrics.jsonl").read_text()
    except (OSError, UnicodeDecodeError):
        raise LeftOut("no metrics.jsonl that can be read") from None
    try:
        head, *lines = [json.loads(line) for line in text.splitlines()]
    except ValueError:
        raise LeftOut("half-written: metrics.jsonl has a line that is cut, or none") from None
    try:
        s = head["settings"]
        if set(s) != {f.name for f in fields(Config)}:
            raise KeyError("settings")
        run = Run(folder, variant_of(s), s, point_of(head), head, lines)
        model = ModelConfig(**{f.name: s[f.name] for f in fields(ModelConfig) if s.get(f.name) is not None})
        last, end = (lines[-1] if lines else {"iter": 0}), s["max_iters"]
        if last["iter"] < end:
            said = [line for line in tail(f"{folder}.log") if "non-finite" in line][-1:]  # what the sweep kept of it
            raise LeftOut(f"unfinished: {last['iter']} of {end} steps" + "".join(f" ({line.strip()})" for line in said))
        if missing := [name for name in exports(model) if not (folder / name).exists()]:
            raise LeftOut(f"unfinished: no {missing[0]}")
        if last["val/loss"] is None:
            raise LeftOut("val/loss is not finite")
        if bad := [x["iter"] for x in lines if x.get("train/loss", 0) is None]:
            raise LeftOut(f"train/loss is not finite at step {bad[0]}")
    except (KeyError, TypeError, ModelError) as e:
        raise LeftOut(f"written by another version ({type(e).__name__}: {e})") from None
    return run


def collect(paths: list[str]) -> tuple[list[Run], dict[str, str]]:
    """(runs, {folder: why it is left out}) of run folders and folders of runs. Raises: BadInput if there is nothing to report."""
    runs, left_out, seen = [], {}, {}
    for path in map(Path, paths):
        if not path.is_dir():
            raise BadInput(f"no folder {path}; name run folders, or folders of runs")
        marks = ("metrics.jsonl", "config.json", "ckpt.pt")
        for folder in [path] if any((path / m).exists() for m in marks) else sorted(p for p in path.iterdir() if p.is_dir()):
            try:
                run = load(folder)
                key = (identity({**run.settings, "dataset": None}), run.point["corpus"], run.point["device"])
                if (first := seen.setdefault(key, folder)) != folder:
                    raise LeftOut(f"the same settings as {first}")
                runs.append(run)
            except LeftOut as e:
                left_out[str(folder)] = str(e)
    if not runs:
        why = "; ".join(f"{name}: {reason}" for name, reason in left_out.items())
        raise BadInput(f"no finished run in {', '.join(paths)}" + (f" ({why})" if why else ""))
    return runs, left_out


def varying(runs: list[Run]) -> list[str]:
    """Knobs in which runs that read them differ, lambda among runs of the same variant."""
    found = []
    for k in dict.fromkeys(k for r in runs for k in r.point):
        groups = [runs] if k != "aux_weight" else [[r for r in runs if r.variant == v] for v in {r.variant for r in runs}]
        if any(len({repr(r.point[k]) for r in g if k in r.point}) > 1 for g in groups):
            found.append(k)
    return found


def split(runs: list[Run], knobs) -> dict[tuple, list[Run]]:
    """Runs by their values of some knobs, in order."""
    groups = defaultdict(list)
    for r in runs:
        groups[tuple(r.point.get(k) for k in knobs)].append(r)
    return dict(sorted(groups.items(), key=lambda item: [(v is not None, isinstance(v, str), v) for v in item[0]]))


def main_rows(runs: list[Run], options: list[str]) -> dict[str, list[Run]]:
    """{variant: its runs by seed}; of several lambdas the paper's, of several gates the default, else the one with most seeds."""
    usual = {**asdict(Config()), "aux_weight": AUX_WEIGHT}
    rows = {}
    for variant in [*VARIANTS, *sorted({r.variant for r in runs} - set(VARIANTS))]:
        groups = split([r for r in runs if r.variant == variant], options)
        best = max(groups, key=lambda g: (sum(v == usual[k] for k, v in zip(options, g, strict=True)), len(groups[g])), default=None)
        rows[variant] = sorted(groups[best], key=lambda r: r.seed) if best is not None else []
    return rows


# --- numbers


def spread(values, digits: int = 4, sign: str = "") -> str:
    """mean +- sample standard deviation; a dash for what there is not."""
    if not len(values):
        return "-"
    sd = f" ± {np.std(values, ddof=1):.{digits}f}" if len(values) > 1 else ""
    return f"{np.mean(values):{sign}.{digits}f}{sd}"


def paired(runs: list[Run], base: list[Run]) -> list[float]:
    """Relative gap in % to the run of the same seed, for each seed that both have."""
    of = {r.seed: r.loss for r in base}
    return [100 * (r.loss / of[r.seed] - 1) for r in runs if r.seed in of]


def curve(runs: list[Run], name: str, base: list[Run] = ()) -> tuple[np.ndarray, np.ndarray]:
    """(steps (T), values (runs, T)) of a metric at the steps that all have; with `base` the difference to the same seed's."""
    of = {r.seed: r.series(name) for r in base}
    series = [(r.series(name), of.get(r.seed)) for r in runs if not base or r.seed in of]
    steps = sorted(set.intersection(*(set(s) & set(b or s) for s, b in series))) if series else []
    return np.array(steps), np.array([[s[k] - (b[k] if b else 0) for k in steps] for s, b in series]).reshape(len(series), len(steps))


def smooth(values, width: int):
    """Running mean over `width` log lines, fewer at the ends. (..., T) -> (..., T)."""
    weight, kernel = np.convolve(np.ones(values.shape[-1]), np.ones(width), "same"), np.ones(width)
    return np.array([np.convolve(row, kernel, "same") / weight for row in values]).reshape(values.shape)


def stream_rms(run: Run, tokens: int) -> np.ndarray | str:
    """(3, layers): RMS of the residual stream before attention, before the MLP, and their ratio, means over validation tokens at
    gate 0, from the last checkpoint. A str says why there is none."""
    folder = ROOT / "data" / run.settings["dataset"]
    path = next((p for n in ("ckpt.pt", "unfused.pt", "model.pt") if (p := run.folder / n).exists()), run.folder / "ckpt.pt")
    try:
        meta, _, val = open_corpus(folder, run.settings["block_size"])
        if meta["tokenizer_sha256"] != run.head["corpus"]["tokenizer_sha256"]:
            return f"{folder.name} is another corpus than the run's"
        model = Transformer.load(path)
    except (BadInput, ModelError) as e:
        return str(e)
    length = run.settings["block_size"]
    count = max(1, min(tokens, len(val)) // length)
    idx = torch.from_numpy(val[: count * length].copy()).view(count, length).long() & 0xFFFF
    before, found = [], []  # the stream of the block at work; a pair per block

    def rms(h):
        return h.float().square().mean(-1).sqrt()

    def after_attention(module, args, out):
        x, h = rms(before[-1]), rms(before[-1] + out)  # CoupledNorm's blocks call no norm, so its input is rebuilt here
        found.append([x.mean().item(), h.mean().item(), (h / x).mean().item()])

    for block in model.blocks:
        block.register_forward_pre_hook(lambda module, args: before.append(args[0]))
        block.attn.proj.register_forward_hook(after_attention)
    with torch.no_grad():
        model(idx, last_only=True)
    return np.array(found).T


# --- figures


class Figures:
    """Draws and writes; keeps the numbers behind the curves for curves.csv."""

    def __init__(self, out: Path):
        try:
            import matplotlib

            matplotlib.use("Agg")
            import matplotlib.pyplot as plt
        except ImportError:
            raise BadInput("figures need matplotlib: pip install -r requirements-dev.txt") from None
        plt.rcParams.update({"font.size": 9, "axes.grid": True, "grid.alpha": 0.3, "axes.spines.top": False, "axes.spines.right": False,
                             "lines.linewidth": 1.3, "savefig.dpi": 200, "legend.frameon": False, "axes.titlesize": 9})  # fmt: skip
        self.plt, self.out, self.points = plt, out, [("figure", "curve", "x", "mean", "low", "high", "n")]

    def axes(self, rows: int, columns: int, height: float):
        fig, axes = self.plt.subplots(rows, columns, figsize=(WIDTH, height), layout="constrained", squeeze=False)
        return fig, axes.flatten()

    def log(self, ax, low: float, high: float):
        """A logarithmic y axis with plain numbers."""
        ax.set(yscale="log", ylim=(low, high))
        ticker = self.plt.matplotlib.ticker
        decades = math.log10(high / low)
        ax.yaxis.set_major_locator(ticker.LogLocator(subs=(1, 2, 5) if decades < 2 else (1,), numticks=7))
        ax.yaxis.set_major_formatter(ticker.FuncFormatter(lambda v, _: f"{v:g}"))
        ax.yaxis.set_minor_formatter(ticker.NullFormatter())

    def draw(self, ax, figure: str, name: str, x, values, style: str | None = None, width: int = 1, **more):
        """Mean of values (n, T) over runs, with the band of their 2.5 to 97.5 percentiles, smoothed over `width` points."""
        if not values.size:
            return
        y = smooth(values, width) if width > 1 else values
        mean, low, high = np.mean(y, 0), *np.percentile(y, (2.5, 97.5), axis=0)
        colour, line = STYLE.get(style or name, ("#999999", ":"))
        ax.plot(x, mean, **{"color": colour, "linestyle": line, "label": f"{name} (n={len(y)})", **more})
        if len(y) > 1:
            ax.fill_between(x, low, high, color=more.get("color", colour), alpha=0.2, linewidth=0)
        self.points += [(figure, name, *row, len(y)) for row in zip(x, mean, low, high, strict=True)]

    def save(self, fig, name: str, legend_from=None, columns: int = 3) -> str:
        """Write NAME.png with one legend below the axes; returns the markdown that shows it."""
        if legend_from is not None:
            handles, labels = legend_from.get_legend_handles_labels()
            fig.legend(handles, labels, loc="outside lower center", ncols=columns, handlelength=3)
        with atomic_write(self.out / f"{name}.png") as f:
            fig.savefig(f, format="png")
        self.plt.close(fig)
        return f"![{name}]({name}.png)"

    def panels(self, name: str, specs: list, rows: dict, variants, columns: int = 2, height: float = 3.2) -> str:
        """A figure of metrics over steps. specs: (title, metric, y label, whether it is the difference to the baseline's)."""
        fig, axes = self.axes(-(-len(specs) // columns), columns, height)
        for ax, (title, metric, label, difference) in zip(axes, specs, strict=True):
            late = []  # past the first twentieth: the start would set the scale
            for v in variants:
                x, y = curve(rows.get(v, []), metric, rows["baseline"] if difference else ())
                if y.size:
                    self.draw(ax, name, v, x, y, width=max(1, len(x) // 50))
                    late.append(smooth(y, max(1, len(x) // 50))[:, len(x) // 20 :].flatten())
            ax.set(xlabel="optimizer step", ylabel=label, title=title)
            values = np.concatenate([*late, np.array([math.nan])])
            if np.isfinite(values).any():  # a spike leaves the frame instead of flattening all else
                low, high = np.nanpercentile(values, (0.5, 98))
                if low > 0 and high / low > 8:
                    self.log(ax, low / 1.3, high * 1.5)
                else:
                    ax.set_ylim(low - 0.1 * (high - low + 1e-9), high + 0.15 * (high - low + 1e-9))
        return self.save(fig, name, axes[0])

    def calibration(self, name: str, variant: str, runs: list[Run]) -> str:
        """c over the calibration and by layer, the gate and the learning rate."""
        fig, (ax, by_layer, gate, lr) = self.axes(2, 2, 4.6)
        sites = [k for k in runs[0].lines[-1] if k.startswith("taper/c.")]
        colours = self.plt.get_cmap("viridis")(np.linspace(0, 0.9, max(2, runs[0].settings["n_layer"])))
        until = 1.5 * runs[0].settings["gate_start"]
        for kind, line in (("attn", "-"), ("mlp", "--")):
            for i, site in enumerate(s for s in sites if s.endswith(kind)):
                x, y = curve(runs, site)
                near = x <= until
                more = {"color": colours[i], "linestyle": line, "label": f"block {i}, {kind}"}
                self.draw(ax, name, site, x[near], y[:, near], **more)
            final = np.array([[r.lines[-1][s] for s in sites if s.endswith(kind)] for r in runs])
            if final.size:
                colour = "#0072B2" if kind == "attn" else "#D55E00"
                x = np.arange(final.shape[1])
                self.draw(by_layer, name, f"c, {kind}", x, final, color=colour, linestyle=line, marker="o", markersize=3, label=kind)
        if "taper/c.final" in sites:
            final = np.array([[r.lines[-1]["taper/c.final"]] * 2 for r in runs])
            last = runs[0].settings["n_layer"]
            self.draw(by_layer, name, "c, final", np.array([last - 0.2, last + 0.2]), final, color="#009E73", label="final norm")
        ax.axvline(runs[0].settings["gate_start"], color="#999999", linestyle=":", label="frozen")
        ax.set(xlabel="optimizer step", ylabel="c (1 / RMS)", title=f"{variant}: calibration of c")
        by_layer.set(xlabel="block", ylabel="c (1 / RMS)", title="c as frozen")
        by_layer.legend()
        by_layer.xaxis.get_major_locator().set_params(integer=True)
        every = [r.lines[i][s] for r in runs for i in (0, -1) for s in sites]
        for panel in (ax, by_layer):
            self.log(panel, min(every) / 1.2, max(every) * 1.2)
        for panel, metric, label in ((gate, "gate", "gate g"), (lr, "lr", "learning rate")):
            self.draw(panel, name, metric, *curve(runs, metric), color="#000000", linestyle="-")
            panel.set(xlabel="optimizer step", ylabel=label)
        few = runs[0].settings["n_layer"] <= 4
        if not few:  # the colour says the depth; eight and more lines would need a legend of their own
            bar = self.plt.cm.ScalarMappable(self.plt.Normalize(0, len(colours) - 1), self.plt.get_cmap("viridis"))
            fig.colorbar(bar, ax=ax, label="block (solid attn, dashed mlp)")
        return self.save(fig, name, ax if few else None, 4)

    def residual(self, name: str, measured: dict[str, np.ndarray]) -> str:
        """measured: {variant: (runs, 3, layers)} of stream_rms."""
        rows = -(-len(measured) // 4)
        fig, axes = self.axes(rows, 4, 1.7 * rows + 0.4)
        every = np.concatenate([values[:, :2].ravel() for values in measured.values()])
        for i, (ax, (variant, values)) in enumerate(zip(axes, measured.items(), strict=False)):
            x = np.arange(values.shape[2])
            for row, (what, colour, line) in enumerate((("before attention", "#0072B2", "-"), ("before the MLP", "#D55E00", "--"))):
                more = {"color": colour, "linestyle": line, "marker": "o", "markersize": 3, "label": what}
                self.draw(ax, name, f"{variant}, {what}", x, values[:, row], **more)
            ax.set(title=f"{variant} (n={len(values)})", xlabel="block", ylabel="RMS" if i % 4 == 0 else "")
            ax.xaxis.get_major_locator().set_params(integer=True)
            self.log(ax, every.min() / 1.5, every.max() * 1.5)  # one scale for all, to compare them by
        for ax in axes[len(measured) :]:
            ax.remove()
        return self.save(fig, name, axes[0])

    def study(self, name: str, label: str, panels: list, log: bool = True) -> str:
        """panels: (y label, {curve: [(x, values)]}, level): points with bands over a knob, and a dashed level to compare with."""
        fig, axes = self.axes(1, len(panels), 2.9)
        for ax, (y_label, curves, level) in zip(axes, panels, strict=True):
            for curve_name, points in curves.items():
                x, rows = np.array([p[0] for p in points]), [np.asarray(p[1], float) for p in points]
                colour, line = STYLE.get(curve_name, ("#999999", ":"))
                mean = np.array([r.mean() for r in rows])
                low, high = np.array([np.percentile(r, (2.5, 97.5)) for r in rows]).T
                n = "-".join(str(v) for v in sorted({min(map(len, rows)), max(map(len, rows))}))
                ax.errorbar(x, mean, (mean - low, high - mean), color=colour, linestyle=line, marker="o", markersize=4, capsize=3,
                            label=f"{curve_name} (n={n})")  # fmt: skip
                self.points += [(f"{name}: {y_label}", curve_name, *row) for row in zip(x, mean, low, high, map(len, rows), strict=True)]
                if log and x.min() > 0:
                    ax.set_xscale("log")
                    ax.set_xticks(x, [f"{v:g}" for v in x], minor=False)
                    ax.minorticks_off()
            if level is not None:
                ax.axhline(level, color="black", linestyle=":", linewidth=1)
            ax.set(xlabel=label, ylabel=y_label)
        return self.save(fig, name, axes[0])


# --- the report


def markdown(head: list[str], rows: list[list]) -> str:
    """A table, its first column to the left and the others to the right."""
    lines = [head, [":---"] + ["---:"] * (len(head) - 1), *rows]
    return "\n".join("| " + " | ".join(str(cell) for cell in line) + " |" for line in lines)


def gap_cells(runs: list[Run], base: list[Run]) -> list[str]:
    """Relative gap to Baseline in %: of the means, and by pairs of the same seed."""
    if not runs or not base:
        return ["-", "-"]
    of_means, pairs = 100 * (np.mean([r.loss for r in runs]) / np.mean([r.loss for r in base]) - 1), paired(runs, base)
    return [f"{of_means:+.2f}", f"{spread(pairs, 2, '+')} ({len(pairs)})"]


def speed_cell(runs: list[Run]) -> str:
    values = [v for r in runs for v in list(r.series("perf/tok_s").values())[1:]]  # the first line holds the warm-up
    return "{1:,.0f} ({0:,.0f} - {2:,.0f})".format(*np.percentile(values, (25, 50, 75))) if values else "-"


def main_table(rows: dict[str, list[Run]]) -> str:
    base, table = rows["baseline"], []
    for v, runs in rows.items():
        bpb = [r.lines[-1]["val/bpb"] for r in runs]
        table.append([v, len(runs), spread([r.loss for r in runs]), spread(bpb), *gap_cells(runs, base), PAPER.get(v, "-")])
    return markdown(["variant", "n", "val/loss, nats/token", "val/bpb", "gap, %", "gap by pairs, % (pairs)", "paper's gap, %"], table)


def equality_table(rows: dict[str, list[Run]]) -> str:
    seeds = {v: {r.seed: r for r in rows[v]} for v in ("baseline", "layernorm", "cbwc")}
    table = []
    for seed in sorted(set().union(*seeds.values())):
        loss = {v: of[seed].loss if seed in of else math.nan for v, of in seeds.items()}
        table.append([seed, *(f"{loss[v]:.7f}" for v in seeds), f"{loss['cbwc'] - loss['layernorm']:+.7f}",
                      f"{loss['baseline'] - loss['layernorm']:+.7f}"])  # fmt: skip
    head = ["seed", "RMSNorm (baseline)", "LayerNorm", "CBWC + RMSNorm", "CBWC - LayerNorm", "RMSNorm - LayerNorm"]
    return markdown(head, table).replace("+nan", "-").replace("nan", "-")


def knobs_text(point: dict, knobs) -> str:
    return ", ".join(f"{k} {point[k]}" for k in knobs if point.get(k) is not None)


def lambda_study(figures: Figures, name: str, group: list[Run], options: list[str], base: list[Run]) -> list[str]:
    """Loss, drift of s and logit norm over lambda; lambda 0 is the variant without the anchor."""
    table, loss, drift, logits = [], {}, {}, {}
    for variant in ("internal_aux", "all_aux"):
        for (weight,), runs in split([r for r in group if r.variant in (variant, variant.removesuffix("_aux"))], ["aux_weight"]).items():
            runs = main_rows(runs, [k for k in options if k != "aux_weight"])[variant if weight else variant.removesuffix("_aux")]
            ends = [r.lines[-1] for r in runs]
            s, l2 = [e["s/mean"] for e in ends], [e["logits/l2"] for e in ends]
            off = [100 * (e["s/mean"] / e["s/target"] - 1) for e in ends if weight]
            target = spread([e["s/target"] for e in ends if weight])
            cells = [spread([r.loss for r in runs]), gap_cells(runs, base)[1], spread(s), target, spread(off, 1, "+"), spread(l2, 1)]
            table.append([variant, weight or 0, len(runs), *cells])
            if weight:
                for curves, values in ((loss, [r.loss for r in runs]), (drift, off), (logits, l2)):
                    curves.setdefault(variant, []).append((weight, values))
    level = np.mean([r.loss for r in base]) if base else None
    picture = figures.study(name, "lambda (aux_weight)", [("val/loss, nats/token", loss, level), ("s off its target, %", drift, 0),
                                                          ("logits/l2", logits, None)])  # fmt: skip
    head = ["variant", "lambda", "n", "val/loss", "gap by pairs, % (pairs)", "s/mean", "s/target", "s off target, %", "logits/l2"]
    note = "At the last step. Points: means over seeds; bars: 2.5 to 97.5 percentiles; dotted: the baseline's loss, and no drift."
    return ["### Lambda", "", markdown(head, table), "", picture, "", note, ""]


def schedule_study(figures: Figures, name: str, group: list[Run], knobs: list[str], base: list[Run]) -> list[str]:
    """The knobs of the taper that vary, each combination a row."""
    table, curves = [], defaultdict(list)
    for variant in dict.fromkeys(r.variant for r in group):
        for runs in split([r for r in group if r.variant == variant and any(k in r.point for k in knobs)], [*knobs, "aux_weight"]).values():
            s = runs[0].settings
            cells = [s["aux_weight"], len(runs), spread([r.loss for r in runs]), *gap_cells(runs, base)]
            table.append([variant, *(s[k] for k in knobs), *cells])
            if gaps := paired(runs, base):
                curves[variant, s["aux_weight"], *(s[k] for k in knobs if k != "gate_end")].append((s["gate_end"], gaps))
    head = ["variant", *knobs, "lambda", "n", "val/loss", "gap, %", "gap by pairs, % (pairs)"]
    text = ["### Schedule of the taper", "", markdown(head, table), ""]
    if "gate_end" not in knobs or not curves:
        return text
    named = {"_".join(map(str, key)) if len(curves) > len({c[0] for c in curves}) else key[0]: sorted(v) for key, v in curves.items()}
    return [*text, figures.study(name, "gate_end, optimizer step", [("gap to baseline by pairs, %", named, 0)], log=False), ""]


def steps_study(figures: Figures, name: str, rows_at: dict[int, dict[str, list[Run]]]) -> list[str]:
    """The gap over the length of training."""
    table, curves = [], defaultdict(list)
    for v in dict.fromkeys(v for rows in rows_at.values() for v in rows):
        table.append([v, *(gap_cells(rows.get(v, []), rows["baseline"])[1] for rows in rows_at.values())])
        for steps, rows in rows_at.items():
            if v != "baseline" and (gaps := paired(rows.get(v, []), rows["baseline"])):
                curves[v].append((steps, gaps))
    families = [("gap to baseline by pairs, %", {v: curves[v] for v in family if v in curves}, 0) for family in (TAPERS, OTHERS)]
    head = ["gap by pairs, % (pairs)", *(f"{steps:,} steps" for steps in rows_at)]
    pictures = [figures.study(f"{name}_{which}", "optimizer steps of the whole run", [family])
                for which, family in zip(("tapers", "others"), families, strict=True) if family[1]]  # fmt: skip
    return ["### The gap against the length of training", "", markdown(head, table), "", *pictures, ""]


def residual_study(figures: Figures, name: str, rows: dict[str, list[Run]], tokens: int) -> tuple[list[str], dict[str, str]]:
    """(markdown, {variant: alpha})."""
    measured, reasons, alphas = {}, {}, {}
    for v, runs in rows.items():
        found = [stream_rms(r, tokens) for r in runs]
        reasons |= {f"{r.folder}": f for r, f in zip(runs, found, strict=True) if isinstance(f, str)}
        if arrays := [f for f in found if not isinstance(f, str)]:
            measured[v] = np.array(arrays)
            alphas[v] = spread(measured[v][:, 2].mean(1), 3)
    text = ["### The residual stream (CoupledNorm's Figure 3)", ""]
    if measured:
        table = [[v, len(values), alphas[v], *(f"{a:.3f}" for a in values[:, 2].mean(0))] for v, values in measured.items()]
        layers = range(max(len(row) for row in table) - 3)
        text += [markdown(["variant", "n", "mean alpha", *(f"block {i}" for i in layers)], table), "",
                 f"alpha: RMS of a token's stream before the MLP over that before attention; mean over {tokens:,} validation tokens.",
                 "", figures.residual(name, measured), ""]  # fmt: skip
    return text + [f"Left out, {folder}: {why}" for folder, why in reasons.items()], alphas


def section(figures: Figures, title: str, tag: str, group: list[Run], options: list[str], k: Report) -> list[str]:
    """Everything about runs that differ in variant, seed, length, lambda and schedule alone."""
    by_steps = {steps: runs for (steps,), runs in split(group, ["max_iters"]).items()}
    rows_at = {steps: main_rows(runs, options) for steps, runs in by_steps.items()}
    chosen = max(rows_at, key=lambda n: (sum(map(len, rows_at[n].values())), n))
    rows, here, seeds = rows_at[chosen], by_steps[chosen], sorted({r.seed for r in by_steps[chosen]})
    text = [f"## {title}", ""]
    for steps in rows_at:
        told = [f"{v}: {knobs_text(r[0].point, options)}" for v, r in rows_at[steps].items() if r and knobs_text(r[0].point, options)]
        text += [f"### Validation loss at gate 0, {steps:,} steps (TaperNorm's Tables 1 and 2)", "", main_table(rows_at[steps]), ""]
        text += [f"Of several settings the table holds {'; '.join(told)}.", ""] if told else []
    text += ["mean ± sample standard deviation over n seeds. A pair is two runs of the same seed, which see the same batches.",
             "The paper's gap: arXiv 2602.10408, first version, after 1,000,000 steps; the same in kind, not in size or length.", "",
             f"The figures: {chosen:,} steps, seeds {', '.join(map(str, seeds))}. A line is the mean over seeds, a band their 2.5 to 97.5 "
             "percentiles, interpolated between the runs (of three seeds nearly the range). Running mean over a fiftieth of the run. "
             "Axes are fitted to what follows the first twentieth of it; spikes leave the frame.", ""]  # fmt: skip
    for family, which in ((TAPERS, "tapers"), (OTHERS, "others")):
        specs = [
            ("Training loss", "train/ce", "nats per token", False),
            ("less the baseline's", "train/ce", "nats per token", True),
        ]
        text += ["### Training loss" + (" (TaperNorm's Figure 2)" if which == "tapers" else ", other norms"), "",
                 figures.panels(f"loss_{which}{tag}", specs, rows, family), ""]  # fmt: skip
    specs = [("Norm of the logits", "logits/l2", "mean l2 norm", False), ("Scale of the last stream", "s/mean", "mean s(h)", False)]
    text += ["### Logit norm (TaperNorm's Figure 3)", "", figures.panels(f"logits{tag}", specs, rows, TAPERS), ""]
    kinds = ("qkv", "proj", "gate_up", "down", "emb", "norm")
    specs = [(kind, f"grad/{kind}", "gradient norm" if i % 3 == 0 else "", False) for i, kind in enumerate(kinds)]
    text += ["### Gradient norms by kind of weight, before clipping (TaperNorm's Figure 4)", "",
             figures.panels(f"gradients{tag}", specs, rows, TAPERS, 3, 4.6), ""]  # fmt: skip
    for v in ("internal_aux", "all_aux", "internal", "all"):
        if rows.get(v):
            text += ["### Calibration, gate and learning rate", "", figures.calibration(f"calibration{tag}", v, rows[v]), ""]
            break
    residual, alphas = residual_study(figures, f"residual{tag}", rows, k.tokens)
    text += residual
    speeds = []
    for v in ("baseline", "coupled", "layernorm", "cbwc"):
        cells = [spread([r.loss for r in rows[v]]), gap_cells(rows[v], rows["baseline"])[1], speed_cell(rows[v]), alphas.get(v, "-")]
        speeds.append([v, len(rows[v]), *cells])
    head = ["variant", "n", "val/loss", "gap by pairs, % (pairs)", "tok/s, median (quartiles)", "alpha"]
    text += ["### CoupledNorm's Table 1, and CBWC, at this scale", "", markdown(head, speeds), "",
             "tok/s as the runs logged it: processes of their own, at other times and with other neighbours. It is no comparison of "
             "speed; scripts/parts.py, which interleaves the variants in one process, is.", "",
             "### CBWC against LayerNorm and RMSNorm, val/loss by seed", "", equality_table(rows), ""]  # fmt: skip
    if len(rows_at) > 1:
        text += steps_study(figures, f"steps{tag}", rows_at)
    if "aux_weight" in options and any(r.variant in ("internal_aux", "all_aux") for r in here):
        text += lambda_study(figures, f"lambda{tag}", here, options, rows["baseline"])
    if schedule := [o for o in options if o != "aux_weight"]:
        text += schedule_study(figures, f"schedule{tag}", here, schedule, rows["baseline"])
    return text


def preamble(runs: list[Run], left_out: dict[str, str], differ: list[str]) -> list[str]:
    """What the numbers are made of."""
    heads = [r.head for r in runs]
    shared = {n: v for n, v in runs[0].settings.items() if n not in SKIP | set(differ) and all(r.settings[n] == v for r in runs)}
    names = ("torch", "numpy", "python", "device", "threads", "commit")
    versions = {n: ", ".join(sorted({str(h["versions"].get(n)) for h in heads})) for n in names}
    corpora = {h["corpus"]["tokenizer_sha256"]: h["corpus"] for h in heads}
    text = ["# Report", "", "    " + shlex.join(["python", *sys.argv]), "",
            *(f"- Corpus: {c['source']}; {c['train_tokens']:,} tokens for training, {c['val_tokens']:,} held out, vocabulary "
              f"{c['vocab_size']:,}, tokenizer sha256 {sha[:12]}" for sha, c in corpora.items()),
            f"- Shared settings: {', '.join(f'{n}={v}' for n, v in shared.items())}",
            f"- They differ in: {', '.join(['variant', 'seed', *differ])}",
            f"- Parameters: {', '.join(sorted({format(h['parameters'], ',') for h in heads}))}",
            f"- Versions: {'; '.join(f'{n} {v}' for n, v in versions.items())}",
            f"- Runs used: {len(runs)}; left out: {len(left_out)}"]  # fmt: skip
    return text + [f"  - {folder}: {why}" for folder, why in left_out.items()] + [""]


def write_csv(path: Path, rows: list):
    text = io.StringIO()
    csv.writer(text, lineterminator="\n").writerows(rows)
    with atomic_write(path, "w") as f:
        f.write(text.getvalue())


def main():
    k, _, paths = parse(Report, sys.argv[1:], usage=__doc__)
    if not paths:
        raise BadInput("name run folders, or folders of runs: python scripts/report.py out/small --out=results/small")
    runs, left_out = collect(paths)
    out = Path(k.out)
    figures = Figures(out)
    try:
        out.mkdir(parents=True, exist_ok=True)
    except OSError as e:
        raise BadInput(f"cannot make the folder {out}: {e.strerror}; name another --out") from None
    differ = varying(runs)
    options = [n for n in differ if n in READ_BY or n == "aux_weight"]
    sizes = [n for n in differ if n not in options and n != "max_iters"]
    text = preamble(runs, left_out, differ)
    for i, group in enumerate(split(runs, sizes).values()):
        title = knobs_text(group[0].point, sizes) or "Results"
        text += section(figures, title, f"_{i + 1}" if sizes else "", group, options, k)
    with atomic_write(out / "report.md", "w") as f:
        f.write("\n".join(text).rstrip() + "\n")
    columns = ["max_iters", "n_embd", "n_layer", "aux_weight", "gate_start", "gate_end"]
    ends = ["val/loss", "val/bpb", "train/ce", "logits/l2", "s/mean", "s/target"]
    rows = [[r.folder, r.variant, r.seed, *(r.settings[c] for c in columns), *(r.lines[-1].get(e) for e in ends)] for r in runs]
    write_csv(out / "runs.csv", [["folder", "variant", "seed", *columns, *ends], *rows])
    write_csv(out / "curves.csv", figures.points)
    print(f"{len(runs)} runs, {len(left_out)} left out; wrote {out / 'report.md'}, runs.csv, curves.csv and the figures")


if __name__ == "__main__":
    with one_line_errors(ModelError):
        main()
