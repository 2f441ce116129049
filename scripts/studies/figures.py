"""How every report's figures look: one palette, one legend below the axes, every run shown.

A run is a thin line over the steps, and a dot elsewhere. An interval is drawn from three values on. A
line joins means of the same seeds alone. The numbers behind the curves go into curves.csv. Needs matplotlib.
"""

import math
import textwrap
from pathlib import Path
from typing import NamedTuple

import numpy as np

from nanonorm.files import atomic_write
from nanonorm.plots import pyplot, smooth
from nanonorm.tables import report_folder, write_csv, write_markdown
from scripts.studies.runs import FinishedRun
from scripts.studies.stats import interval

# Okabe and Ito's colours, which the colour-blind can tell apart, and a dash each for print
LINE_OF = {
    "baseline": ("#000000", "-"), "baseline_aux": ("#777777", "-"),
    "internal": ("#0072B2", "--"), "internal_aux": ("#56B4E9", "-"),
    "final": ("#E69F00", "-."), "all": ("#D55E00", "--"), "all_aux": ("#CC79A7", "-"),
    "coupled": ("#009E73", "-"), "layernorm": ("#0072B2", "--"), "cbwc": ("#56B4E9", ":"),
    "vanilla": ("#000000", "-"), "fakeln": ("#E69F00", "-"),
    "dyt": ("#D55E00", "-."), "derf": ("#CC79A7", (0, (5, 1, 1, 1, 1, 1))),
}  # fmt: skip
OTHER = ("#999999", ":")  # what has no style of its own
HOLLOW = {"linestyle": "none", "markerfacecolor": "#FFFFFF", "zorder": 2.5}
WIDTH = 6.5  # inches, a text column
LEGEND = 95  # characters that fit below the axes, with 10 for each column's line and gap
COLUMNS = ["figure", "panel", "curve", "x", "mean", "low", "high", "n"]  # of curves.csv
CURVE_POINTS = 400  # of a long run, in the CSV


class Panel(NamedTuple):
    """A metric over the steps."""

    title: str
    metric: str
    label: str = ""  # of the y axis
    less_baseline: bool = False  # the difference to the baseline's run of the same seed


def curve(
    runs: list[FinishedRun], metric: str, base: list[FinishedRun] = ()
) -> tuple[np.ndarray, np.ndarray]:
    """(steps (T), values (runs, T)) of a metric at the steps that all runs have. With `base`, the values are
    the differences to the run of the same seed there, and a run without one is left out."""
    of_seed = {run.seed: run.series(metric) for run in base}
    paired = [run for run in runs if run.seed in of_seed or not base]
    found = [run.series(metric) for run in paired]
    below = [of_seed[run.seed] for run in paired] if base else [dict.fromkeys(s, 0) for s in found]
    steps = sorted(set.intersection(*map(set, found + below))) if found else []
    values = [[s[k] - b[k] for k in steps] for s, b in zip(found, below, strict=True)]
    return np.array(steps), np.array(values).reshape(len(found), len(steps))


class Figures:
    """Draws and writes into a folder, which is made if it is not there; keeps the numbers behind the curves.
    Raises: BadInput if it cannot be made, or matplotlib is not installed."""

    def __init__(self, out: str | Path):
        self.plt, self.out = pyplot(), report_folder(out)
        self.points = []  # rows of COLUMNS

    def axes(self, rows: int, columns: int, height: float, **shared):
        size = {"figsize": (WIDTH, height), "layout": "constrained", "squeeze": False}
        fig, axes = self.plt.subplots(rows, columns, **size, **shared)
        return fig, axes.flatten()

    def log_scale(self, ax, low: float, high: float):
        """A logarithmic y axis with plain numbers."""
        ax.set(yscale="log", ylim=(low, high))
        ticker = self.plt.matplotlib.ticker
        steps = (1, 2, 5) if high / low < 100 else (1,)
        ax.yaxis.set_major_locator(ticker.LogLocator(subs=steps, numticks=7))
        ax.yaxis.set_major_formatter("{x:g}")
        ax.yaxis.set_minor_formatter(ticker.NullFormatter())

    def draw(self, ax, figure: str, panel: str, name: str, x, values, width: int = 1, dots=False, **more):
        """Values (runs, T), smoothed: their mean as a line, each run as a thin line or as dots."""
        if not values.size:
            return
        y = smooth(values, width) if width > 1 else values
        mean, low, high = np.mean(y, 0), *np.percentile(y, (2.5, 97.5), axis=0)
        colour, line = LINE_OF.get(name, OTHER)
        look = {"color": colour, "linestyle": line, "label": f"{name} (n={len(y)})", **more}
        if look["linestyle"] != "-":  # a dash over a line can be seen, one under it cannot
            look = {"zorder": 2.5, "linewidth": 1.6} | look
        ax.plot(x, mean, **look)
        each = {"linestyle": "none", "marker": ".", "markersize": 4} if dots else {"linewidth": 0.5}
        if dots or len(y) > 1:
            ax.plot(x, y.T, color=look["color"], alpha=0.5, **each)
        rows = list(zip(x, mean, low, high, strict=True))
        for at, *row in rows[:: math.ceil(len(rows) / CURVE_POINTS)]:
            self.points.append((figure, panel, name, f"{at:.12g}", *(f"{v:.5g}" for v in row), len(y)))

    def dots(self, ax, at: list, values: list[tuple[list, list]], above: list[list[str]], form: str, **look):
        """(values, far ones) at each place: the mean, hollow of one or two, of three and more with its 95%
        interval, and right of it a dot each. The lines of `above` are written at the upper edge, and below
        them the far ones; no mean is there."""
        found = [interval([] if far else near) for near, far in values]
        half = [i.half if i.n > 2 else math.nan for i in found]
        bars = half if np.isfinite(half).any() else None  # else the legend has none either
        ax.errorbar(at, [i.mean for i in found], yerr=bars, **look)
        few = [i.mean if i.n < 3 else math.nan for i in found]
        ax.plot(at, few, **{name: look[name] for name in ("color", "marker", "markersize")}, **HOLLOW)
        beside = self.plt.matplotlib.transforms.ScaledTranslation(3.5 / 72, 0, ax.figure.dpi_scale_trans)
        dots = {"linestyle": "none", "marker": ".", "color": look["color"], "markersize": 5, "zorder": 3}
        dots |= {"markeredgecolor": "#FFFFFF", "markeredgewidth": 0.3, "clip_on": False}
        for place, (near, far), lines in zip(at, values, above, strict=True):
            if near:  # a line without points would take all room from the panels
                (drawn,) = ax.plot([place] * len(near), near, **dots)
                drawn.set_transform(drawn.get_transform() + beside)
            if far:
                lines = [*lines, "\u2191", *(format(value, form) for value in sorted(far, reverse=True))]
            if lines:
                edge = {"xycoords": ("data", "axes fraction"), "ha": "center", "va": "top", "size": 6}
                ax.annotate("\n".join(lines), (place, 1), color=look["color"], **edge)

    def panels(self, name: str, panels: list[Panel], rows: dict, variants, height=3.2) -> str:
        """A figure of metrics over steps; rows: {variant: runs}. Returns its markdown."""
        fig, axes = self.axes(math.ceil(len(panels) / 2), min(2, len(panels)), height)
        for ax, panel in zip(axes, panels, strict=True):
            base = rows["baseline"] if panel.less_baseline else ()
            late = []  # past the first twentieth: the start would set the scale
            for v in variants:
                x, y = curve(rows.get(v, []), panel.metric, base)
                if not y.size or (panel.less_baseline and not base):
                    continue
                width = len(x) // 50 | 1
                self.draw(ax, name, panel.title, v, x, y, width)
                late += list(smooth(y, width)[:, len(x) // 20 :])
            self.fit(ax, late)
            ax.set(xlabel="optimizer step", ylabel=panel.label, title=panel.title)
        return self.save(fig, name, axes[0])

    def fit(self, ax, late: list[np.ndarray]):
        """Fit the y axis to the runs' values (T)."""
        values = np.concatenate([*late, np.array([math.nan])])
        if not np.isfinite(values).any():
            return
        low, high = np.nanpercentile(values, (0.5, 98))  # a spike leaves the frame, and flattens nothing
        if low > 0 and high / low > 8:
            self.log_scale(ax, low / 1.3, high * 1.5)
        else:
            room = high - low + 1e-9
            ax.set_ylim(low - 0.1 * room, high + 0.15 * room)

    def mark_spikes(self, ax):
        """A triangle at the edge of a fitted panel where a line leaves it."""
        (low, high), edges = ax.get_ylim(), {"transform": ax.get_xaxis_transform(), "clip_on": False}
        for line in [*ax.lines]:
            for x, y in zip(*line.get_data(), strict=True):
                if not low <= y <= high:
                    at, marker = (1, "^") if y > high else (0, "v")
                    ax.plot(x, at, marker, color=line.get_color(), markersize=3, **edges)

    def save(self, fig, name: str, *legend_from) -> str:
        """Write NAME.png with one legend of these axes below them; returns the markdown that shows it."""
        shown = {}
        for ax in legend_from:
            shown |= dict(zip(*reversed(ax.get_legend_handles_labels()), strict=True))
        if shown:
            names = [textwrap.fill(label, LEGEND - 10) for label in shown]
            columns = max(1, min(3, LEGEND // (10 + max(map(len, shown)))))
            rows = math.ceil(sum(name.count("\n") + 1 for name in names) / columns)
            fig.set_figheight(fig.get_figheight() + 0.19 * max(0, rows - 2))
            fig.legend(shown.values(), names, loc="outside lower center", ncols=columns, handlelength=3)
        with atomic_write(self.out / f"{name}.png") as f:
            fig.savefig(f, format="png")
        self.plt.close(fig)
        return f"![{name}]({name}.png)"

    def write(self, name: str, blocks: list[str]) -> str:
        """Write a report of these figures, and curves.csv where there are curves; returns what to say."""
        write_markdown(self.out / name, blocks)
        if self.points:
            write_csv(self.out / "curves.csv", COLUMNS, self.points)
        return f"wrote {self.out / name} with its figures and numbers"
