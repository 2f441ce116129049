"""How the report's figures are drawn, and the README's one picture of a run and its speed.

    python scripts/figures.py out/demo --bench=bench.json --out=results/demo.png

One palette, one legend below the axes, a band over the seeds; the numbers behind every curve are kept for a
CSV. bench.json is what `python bench.py out/demo --out=bench.json` writes. Needs matplotlib.
"""

import math
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Literal, NamedTuple

import numpy as np
from pydantic import ValidationError

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from nanonorm.cli import parse
from nanonorm.errors import BadInput, one_line_errors
from nanonorm.files import atomic_write, json_object
from nanonorm.plots import pyplot
from nanonorm.typed import Count, Positive, Record, why
from scripts.runs import Unusable, read_finished

# Okabe and Ito's colours, which the colour-blind can tell apart, and a dash each for print
STYLE = {
    "baseline": ("#000000", "-"), "baseline_aux": ("#777777", "-"),
    "internal": ("#0072B2", "--"), "internal_aux": ("#56B4E9", "-"),
    "final": ("#E69F00", "-."), "all": ("#D55E00", "--"), "all_aux": ("#CC79A7", "-"),
    "coupled": ("#009E73", "-"), "layernorm": ("#0072B2", "--"), "cbwc": ("#56B4E9", ":"),
    "vanilla": ("#000000", "-"), "fakeln": ("#E69F00", "-"),
    "dyt": ("#D55E00", "-."), "derf": ("#CC79A7", (0, (5, 1, 1, 1, 1, 1))),
}  # fmt: skip
OTHER = ("#999999", ":")  # what has no style of its own
NORM_FREE = ("dyt", "derf")  # their loss and stream would set the scale of all others
WIDTH = 6.5  # inches, a text column
COLUMNS = ["figure", "panel", "curve", "x", "mean", "low", "high", "n"]  # of curves.csv
CURVE_POINTS = 400  # of a long run, in the CSV


def series_of(lines: list[dict], name: str) -> dict[int, float]:
    """{step: value} of a metric in the lines of a log, nan where the log has null."""
    return {x["iter"]: math.nan if x[name] is None else x[name] for x in lines if name in x}


def curve(runs: list, name: str, base: list = ()) -> tuple[np.ndarray, np.ndarray]:
    """(steps (T), values (runs, T)) of a metric at the steps that all runs have.

    runs: anything with a `seed` and a log's `lines`; with `base`, the values are the differences to the run
    of the same seed there, and a run without one is left out.
    """
    of_seed = {run.seed: series_of(run.lines, name) for run in base}
    found, below = [], []  # a metric of each run, and what is taken off it
    for run in runs:
        if not base or run.seed in of_seed:
            values = series_of(run.lines, name)
            found.append(values)
            below.append(of_seed[run.seed] if base else dict.fromkeys(values, 0))
    steps = sorted(set.intersection(*map(set, found + below))) if found else []
    values = [[s[k] - b[k] for k in steps] for s, b in zip(found, below, strict=True)]
    return np.array(steps), np.array(values).reshape(len(found), len(steps))


def smooth(values, width: int):
    """Running median over `width` log lines, an odd number, fewer at the ends. (n, T) -> (n, T)."""
    reach = width // 2
    rows = [values[:, max(0, at - reach) : at + reach + 1] for at in range(values.shape[-1])]
    return np.stack([np.median(row, -1) for row in rows], -1) if rows else values


def styled_pyplot():
    """matplotlib's pyplot with the look of these figures. Raises: BadInput if matplotlib is not installed."""
    plt = pyplot()
    plt.rcParams.update(
        {"font.size": 9, "axes.titlesize": 9, "axes.grid": True, "grid.alpha": 0.3,
         "axes.spines.top": False, "axes.spines.right": False, "lines.linewidth": 1.3,
         "legend.frameon": False, "savefig.dpi": 200}
    )  # fmt: skip
    return plt


class Panel(NamedTuple):
    """A metric over the steps."""

    title: str
    metric: str
    label: str = ""  # of the y axis
    less_baseline: bool = False  # the difference to the baseline's run of the same seed
    since: float = 0.0  # share of the run that comes before the frame


def shades(colours: list[str]) -> list[str]:
    """The colours, where one comes again as a mix of it with white; of a light one, with black."""
    found = []
    for i, colour in enumerate(colours):
        rgb = np.array(list(bytes.fromhex(colour[1:])))
        mixed = 0.7 * colours[:i].count(colour) / max(1, colours.count(colour) - 1)
        other = 255 if rgb @ (0.3, 0.59, 0.11) < 140 else 0
        found.append("#" + bytes(np.rint(rgb + mixed * (other - rgb)).astype(int).tolist()).hex().upper())
    return found


def rows_needed(cells: int, columns: int) -> int:
    return -(-cells // columns)


class Figures:
    """Draws and writes; keeps the numbers behind the curves for curves.csv."""

    def __init__(self, out: Path):
        self.plt, self.out = styled_pyplot(), out
        self.points = []  # rows of COLUMNS

    def axes(self, rows: int, columns: int, height: float):
        size = (WIDTH, height)
        fig, axes = self.plt.subplots(rows, columns, figsize=size, layout="constrained", squeeze=False)
        return fig, axes.flatten()

    def log_scale(self, ax, low: float, high: float):
        """A logarithmic y axis with plain numbers."""
        ax.set(yscale="log", ylim=(low, high))
        ticker = self.plt.matplotlib.ticker
        steps = (1, 2, 5) if high / low < 100 else (1,)
        ax.yaxis.set_major_locator(ticker.LogLocator(subs=steps, numticks=7))
        ax.yaxis.set_major_formatter(ticker.FuncFormatter(lambda v, _: f"{v:g}"))
        ax.yaxis.set_minor_formatter(ticker.NullFormatter())

    def draw(self, ax, figure: str, panel: str, name: str, x, values, width: int = 1, each=False, **more):
        """Mean of values (n, T) over runs, smoothed, with a band of their 2.5 to 97.5 percentiles, or with a
        thin line for each run."""
        if not values.size:
            return
        y = smooth(values, width) if width > 1 else values
        mean, low, high = np.mean(y, 0), *np.percentile(y, (2.5, 97.5), axis=0)
        colour, line = STYLE.get(name, OTHER)
        look = {"color": colour, "linestyle": line, "label": f"{name} (n={len(y)})", **more}
        if look["linestyle"] != "-":  # a dash over a line can be seen, one under it cannot
            look = {"zorder": 2.5, "linewidth": 1.6} | look
        ax.plot(x, mean, **look)
        if each:
            ax.plot(x, y.T, color=look["color"], linewidth=0.5, alpha=0.6)
        elif len(y) > 1:
            ax.fill_between(x, low, high, color=look["color"], alpha=0.2, linewidth=0)
        rows = list(zip(x, mean, low, high, strict=True))
        for at, *row in rows[:: rows_needed(len(rows), CURVE_POINTS)]:
            self.points.append((figure, panel, name, f"{at:.12g}", *(f"{v:.5g}" for v in row), len(y)))

    def save(self, fig, name: str, legend_from=None, columns: int = 3) -> str:
        """Write NAME.png with one legend below the axes; returns the markdown that shows it."""
        if legend_from is not None:
            handles, labels = legend_from.get_legend_handles_labels()
            longest = max(map(len, labels), default=0)
            columns = max(1, min(columns, 95 // (10 + longest)))  # what fits below the axes
            rows = rows_needed(len(labels), columns)
            fig.set_figheight(fig.get_figheight() + 0.19 * max(0, rows - 2))
            fig.legend(handles, labels, loc="outside lower center", ncols=columns, handlelength=3)
        with atomic_write(self.out / f"{name}.png") as f:
            fig.savefig(f, format="png")
        self.plt.close(fig)
        return f"![{name}]({name}.png)"

    # --- metrics over the steps

    def panels(self, name: str, panels: list[Panel], rows: dict, variants, columns=2, height=3.2, each=False):
        """A figure of metrics over steps; rows: {variant: runs}; a band over the runs, or each. Returns its
        markdown."""
        fig, axes = self.axes(rows_needed(len(panels), columns), columns, height)
        for ax, panel in zip(axes, panels, strict=True):
            base = rows["baseline"] if panel.less_baseline else ()
            late = {}  # past the first twentieth: the start would set the scale
            for v in variants:
                x, y = curve(rows.get(v, []), panel.metric, base)
                if not y.size or (panel.less_baseline and not base):
                    continue
                width = len(x) // 50 | 1
                self.draw(ax, name, panel.title, v, x, y, width, each)
                late[v] = smooth(y, width)[:, int(len(x) * (panel.since or 0.05)) :]
                if panel.since:
                    ax.set_xlim(x[int(len(x) * panel.since)], x[-1])
            self.fit(ax, late)
            title = panel.title + self.leaves_frame(ax, late)
            ax.set(xlabel="optimizer step", ylabel=panel.label, title=title)
        return self.save(fig, name, axes[0])

    def fit(self, ax, late: dict[str, np.ndarray]):
        """Fit the y axis to the variants' values (runs, T), the norm-free only where there are no others."""
        fitted = [y.ravel() for v, y in late.items() if v not in NORM_FREE]
        fitted = fitted or [y.ravel() for y in late.values()]
        values = np.concatenate([*fitted, np.array([math.nan])])
        if not np.isfinite(values).any():
            return
        low, high = np.nanpercentile(values, (0.5, 98))  # a spike leaves the frame, and flattens nothing
        if low > 0 and high / low > 8:
            self.log_scale(ax, low / 1.3, high * 1.5)
        else:
            room = high - low + 1e-9
            ax.set_ylim(low - 0.1 * room, high + 0.15 * room)

    def leaves_frame(self, ax, late: dict[str, np.ndarray]) -> str:
        """A line for the title that names the norm-free variants the frame does not hold; "" for none."""
        bottom, top = ax.get_ylim()
        gone = []
        for v in NORM_FREE:
            if v in late and not ((bottom < late[v]) & (late[v] < top)).all():
                gone.append(v)
        verb = "leaves" if len(gone) == 1 else "leave"
        return f"\n({' and '.join(gone)} {verb} the frame)" if gone else ""

    # --- the taper

    def calibration(self, name: str, variant: str, runs: list) -> str:
        """c over the calibration and by layer, the gate and the learning rate."""
        fig, (ax, by_layer, gate, lr) = self.axes(2, 2, 4.6)
        n_layer, gate_start = (runs[0].settings[knob] for knob in ("n_layer", "gate_start"))
        sites = [k for k in runs[0].lines[-1] if k.startswith("taper/c.")]
        colours = self.plt.get_cmap("viridis")(np.linspace(0, 0.9, max(2, n_layer)))
        for kind, line in (("attn", "-"), ("mlp", "--")):
            for i, site in enumerate(s for s in sites if s.endswith(kind)):
                x, y = curve(runs, site)
                near = x <= 1.5 * gate_start
                look = {"color": colours[i], "linestyle": line, "label": f"block {i}, {kind}"}
                self.draw(ax, name, "calibration of c", site, x[near], y[:, near], **look)
        self.frozen(by_layer, name, runs, sites, n_layer)
        ax.axvline(gate_start, color="#999999", linestyle=":", label="frozen")
        ax.set(xlabel="optimizer step", ylabel="c (1 / RMS)", title=f"{variant}: calibration of c")
        every = [v for run in runs for s in sites for v in series_of(run.lines, s).values()]
        for panel in (ax, by_layer):
            self.log_scale(panel, min(every) / 1.2, max(every) * 1.2)
        for panel, metric, label in ((gate, "gate", "gate g"), (lr, "lr", "learning rate")):
            self.draw(panel, name, label, metric, *curve(runs, metric), color="#000000", linestyle="-")
            panel.set(xlabel="optimizer step", ylabel=label)
        if n_layer <= 4:
            return self.save(fig, name, ax, 4)
        # the colour says the depth; eight lines and more would need a legend of their own
        shades = self.plt.Normalize(0, len(colours) - 1), self.plt.get_cmap("viridis")
        bar = self.plt.cm.ScalarMappable(*shades)
        fig.colorbar(bar, ax=ax, label="block (solid attn, dashed mlp)")
        return self.save(fig, name)

    def frozen(self, ax, name: str, runs: list, sites: list[str], n_layer: int):
        """The last c of every site, by block."""
        panel = "c as frozen"
        for kind, line, colour in (("attn", "-", "#0072B2"), ("mlp", "--", "#D55E00")):
            c = np.array([[r.lines[-1][s] for s in sites if s.endswith(kind)] for r in runs])
            look = {"color": colour, "linestyle": line, "marker": "o", "markersize": 3, "label": kind}
            self.draw(ax, name, panel, f"c, {kind}", np.arange(c.shape[1]), c, **look)
        if "taper/c.final" in sites:
            c = np.array([[r.lines[-1]["taper/c.final"]] * 2 for r in runs])
            ends = np.array([n_layer - 0.2, n_layer + 0.2])
            self.draw(ax, name, panel, "c, final", ends, c, color="#009E73", label="final norm")
        ax.set(xlabel="block", ylabel="c (1 / RMS)", title=panel)
        ax.legend()
        ax.xaxis.get_major_locator().set_params(integer=True)

    # --- the stream, and studies of a knob

    def residual(self, name: str, measured: dict[str, np.ndarray]) -> str:
        """The residual stream's RMS by block. measured: {variant: (runs, 3, layers)} of stream_rms. The
        designs with norms share one scale, those without another."""
        families = [{v: m for v, m in measured.items() if (v in NORM_FREE) == free} for free in (False, True)]
        rows = sum(rows_needed(len(family), 4) for family in families)
        fig, axes = self.axes(rows, 4, 1.7 * rows + 0.4)
        cells, shown = iter(axes), []
        for family in filter(None, families):
            every = np.concatenate([values[:, :2].ravel() for values in family.values()])
            for i, (variant, values) in enumerate(family.items()):
                ax = next(cells)
                shown.append(ax)
                x = np.arange(values.shape[2])
                lines = (("before attention", "#0072B2", "-"), ("before the MLP", "#D55E00", "--"))
                for row, (what, colour, line) in enumerate(lines):
                    look = {"color": colour, "linestyle": line, "marker": "o", "markersize": 3, "label": what}
                    self.draw(ax, name, variant, what, x, values[:, row], each=True, **look)
                first = i % 4 == 0
                label = "RMS (dimensionless)" if first else ""
                ax.set(title=f"{variant} (n={len(values)})", xlabel="block", ylabel=label)
                if len(x) <= 8:
                    ax.set_xticks(x)
                else:
                    ax.xaxis.get_major_locator().set_params(integer=True)
                ax.tick_params(labelleft=first)
                self.log_scale(ax, every.min() / 1.5, every.max() * 1.5)
            for _ in range(-len(family) % 4):
                next(cells).remove()
        return self.save(fig, name, shown[0])

    def study(self, name: str, label: str, panels: list, log: bool = True) -> str:
        """Means and bars over a knob. panels: (y label, {curve: [(x, values)]}, a level to draw or None)."""
        fig, axes = self.axes(1, len(panels), 2.9)
        for ax, (y_label, curves, level) in zip(axes, panels, strict=True):
            ticks = sorted({float(x) for points in curves.values() for x, _ in points})
            styles = [STYLE.get(curve_name.partition(",")[0], OTHER) for curve_name in curves]
            colours = shades([colour for colour, _ in styles])
            for i, (curve_name, points) in enumerate(curves.items()):
                x = np.array([x for x, _ in points], float)
                rows = [np.asarray(values, float) for _, values in points]
                colour, line = colours[i], styles[i][1]
                mean = np.array([values.mean() for values in rows])
                low, high = np.array([np.percentile(values, (2.5, 97.5)) for values in rows]).T
                counts = [len(values) for values in rows]
                n = "-".join(str(count) for count in sorted({min(counts), max(counts)}))
                aside = 0.015 * (i - (len(curves) - 1) / 2)  # side by side, so that no bar hides another
                at = x * (ticks[-1] / ticks[0]) ** aside if log else x + (ticks[-1] - ticks[0]) * aside
                look = {"color": colour, "linestyle": line, "marker": "o", "markersize": 4, "capsize": 3}
                look |= {"zorder": 2 if line == "-" else 2.5, "label": f"{curve_name} (n={n})"}
                ax.errorbar(at, mean, (mean - low, high - mean), **look)
                for point in zip(x, mean, low, high, counts, strict=True):
                    self.points.append((name, y_label, curve_name, *point))
            if log:
                ax.set_xscale("log")
            ax.set_xticks(ticks, [f"{v:g}" for v in ticks])
            ax.minorticks_off()
            if level is not None:
                ax.axhline(level, color="black", linestyle=":", linewidth=1)
            ax.set(xlabel=label, ylabel=y_label)
        return self.save(fig, name, axes[0])


# ---------------------------------------------------------------------------------------------------------
# the README's picture


@dataclass
class Picture:
    """Which benchmark is drawn beside the run, and where to."""

    bench: str | None = None  # JSON file that bench.py wrote with --out
    out: str = "results/demo.png"  # the picture
    runtime: Literal["eager", "compiled", "graph"] | None = None  # of the bars; None: the file's first
    batch: Count | None = None  # sequences at a time; None: the file's first
    seq: Count | None = None  # tokens of context; None: the file's first


class BenchRow(Record):
    """One cell of a table of bench.py; ms_q1 and ms_q3 are quartiles."""

    variant: str
    runtime: str
    batch: Count
    seq: Count
    tok_s: Positive
    ms: Positive
    ms_q1: Positive
    ms_q3: Positive
    speedup: Positive


class BenchReport(Record):
    """What bench.py --out=x.json writes."""

    machine: str
    rows: list[BenchRow]


# variant -> (colour, what it is)
BARS = {
    "baseline": ("#000000", "with its norms"),
    "unfused": ("#56B4E9", "norms as scalings"),
    "folded": ("#0072B2", "norms folded away"),
    "floor": ("#BBBBBB", "matrix products alone"),
}


def read_bars(k: Picture) -> tuple[str, list[BenchRow]]:
    """(the machine, its rows for one runtime, batch and context) of a benchmark. Raises: BadInput."""
    try:
        report = BenchReport.model_validate(json_object(Path(k.bench).read_bytes()))
    except OSError as e:
        remedy = f"python bench.py RUN --out={k.bench} writes it"
        raise BadInput(f"cannot read {k.bench}: {e.strerror}; {remedy}") from None
    except ValueError as e:
        reason = why(e) if isinstance(e, ValidationError) else e
        raise BadInput(f"{k.bench} is not a report of bench.py ({reason}); name another --bench") from None
    rows = [row for row in report.rows if row.variant in BARS]
    if not rows:
        raise BadInput(f"{k.bench} has none of {', '.join(BARS)}; name another --bench")
    for name in ("runtime", "batch", "seq"):
        there = [getattr(row, name) for row in rows]
        asked = getattr(k, name)
        wanted = there[0] if asked is None else asked
        if wanted not in there:
            raise BadInput(
                f"{k.bench} has no {name}={wanted}; it has {', '.join(map(str, dict.fromkeys(there)))}"
            )
        rows = [row for row in rows if getattr(row, name) == wanted]
    return report.machine, rows


def validated(lines: list[dict]) -> list[tuple[str, str, str, dict[int, float]]]:
    """(label, colour, marker, {step: loss}) of what was validated: with the gate where it was, and without
    the norms that taper, which is another loss only while the gate is up."""
    gone, gated = (
        {step: loss for step, loss in series_of(lines, name).items() if math.isfinite(loss)}
        for name in ("val/loss", "val/loss_gated")
    )
    if not gated or gated == gone:
        return [("validation", "#D55E00", "o", gone)]
    up = {step: loss for step, loss in gone.items() if loss != gated.get(step)}
    return [("validation", "#D55E00", "o", gated), ("validation with the gate at 0", "#0072B2", "D", up)]


def draw_loss(ax, lines: list[dict]):
    """Training loss as a line, validation as points, the first and the last with their values."""
    training = series_of(lines, "train/ce")
    steps, losses = np.array(list(training)), np.array(list(training.values()))
    smoothed = smooth(losses[None], max(1, len(steps) // 50))[0]
    ax.plot(steps, losses, color="#BBBBBB", linewidth=0.8)
    ax.plot(steps, smoothed, color="#000000", linewidth=1.6)
    at = len(steps) // 8
    ax.annotate("training", (steps[at], smoothed[at]), (8, 4), textcoords="offset points")
    for label, colour, marker, found in validated(lines):
        ax.plot(list(found), list(found.values()), marker, color=colour, markersize=6, clip_on=False)
        for step in dict.fromkeys([*list(found)[:1], *list(found)[-1:]]):
            text = f"{label}: {found[step]:.2f}" if step == min(found) else f"{found[step]:.2f}"
            side = "right" if step > 0.8 * steps[-1] else "center"
            ax.annotate(text, (step, found[step]), (0, 9), textcoords="offset points", color=colour, ha=side)
    ax.set(ylabel="loss, nats per token")


def draw_gate(ax, lines: list[dict]):
    """The gate over the steps: 1 is with norms, 0 without."""
    gate = series_of(lines, "gate")
    ax.fill_between(list(gate), list(gate.values()), color="#E69F00", alpha=0.35, linewidth=0)
    ax.plot(list(gate), list(gate.values()), color="#E69F00")
    last = max(gate)
    ax.text(0.02 * last, 0.1, "with its norms")
    ax.text(0.98 * last, 0.1, "without", ha="right")
    ax.set(ylabel="gate", ylim=(0, 1.05), yticks=(0, 1))


def draw_speed(ax, machine: str, rows: list[BenchRow]):
    """Bars of tok/s with their quartiles, and the speedup over the first beside them."""
    tips = []
    for at, row in enumerate(rows):
        low, high = (row.tok_s * row.ms / quartile for quartile in (row.ms_q3, row.ms_q1))
        ax.barh(at, row.tok_s, 0.62, color=BARS[row.variant][0])
        whiskers = [[row.tok_s - low], [high - row.tok_s]]
        ax.errorbar(row.tok_s, at, xerr=whiskers, color="#777777", capsize=3, linewidth=1.2)
        said = f"{row.tok_s:,.0f}" if at == 0 else f"{row.tok_s:,.0f}, {row.speedup:.2f}x"
        ax.annotate(said, (high, at), (6, 0), textcoords="offset points", va="center")
        tips.append(high)
    first = rows[0]
    sequences = "1 sequence" if first.batch == 1 else f"{first.batch} sequences"
    ax.set_yticks(range(len(rows)), [f"{row.variant}\n{BARS[row.variant][1]}" for row in rows])
    ax.invert_yaxis()
    ax.tick_params(axis="y", length=0)
    ax.set_axisbelow(True)
    ax.grid(visible=False, axis="y")
    ax.set_xlim(0, 1.55 * max(tips))
    ax.locator_params(axis="x", nbins=4)
    ax.xaxis.set_major_formatter(lambda value, _: f"{value:,.0f}")
    ax.set(xlabel=f"tok/s and quartiles ({machine})")
    ax.set_title(f"Speed, {sequences} of {first.seq} tokens, {first.runtime}", loc="left", weight="bold")


def draw_picture(lines: list[dict], machine: str, rows: list[BenchRow]):
    """The README's picture as a matplotlib figure: a run's loss and gate on the left, speed on the right."""
    plt = styled_pyplot()
    gated = bool(series_of(lines, "gate"))
    fig = plt.figure(figsize=(9.6, 3.6), layout="constrained")
    left, right = fig.subfigures(1, 2, width_ratios=(1.15, 1))
    ratios = (3.2, 1) if gated else (1,)
    axes = left.subplots(len(ratios), 1, sharex=True, height_ratios=ratios, squeeze=False).flatten()
    draw_loss(axes[0], lines)
    title = "Training"
    if gated:
        draw_gate(axes[1], lines)
        title = "The norms are gated away while the network trains"
    axes[0].set_title(title, loc="left", weight="bold")
    axes[-1].set(xlabel="optimizer step", xlim=(0, lines[-1]["iter"]))
    draw_speed(right.subplots(), machine, rows)
    return fig


def main():
    k, _, words = parse(Picture, sys.argv[1:], usage=__doc__)
    if len(words) != 1 or k.bench is None:
        example = "python scripts/figures.py out/demo --bench=bench.json"
        raise BadInput(f"name a run folder and a benchmark of it: {example}")
    try:
        _, lines = read_finished(Path(words[0]))
    except Unusable as e:
        raise BadInput(f"{words[0]} holds no finished run: {e}") from None
    fig = draw_picture(lines, *read_bars(k))
    with atomic_write(k.out) as f:
        fig.savefig(f, format="png")
    print(f"wrote {k.out}")


if __name__ == "__main__":
    with one_line_errors():
        main()
