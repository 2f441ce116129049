"""How the report's figures are drawn: one palette, one legend below the axes, bands over seeds, the numbers kept for a CSV.

Runs are anything with a `seed`, `settings`, `lines` (of metrics.jsonl) and `series(metric)` -> {step: value}. Needs matplotlib.
"""

import csv
import math
import sys
from pathlib import Path

import numpy as np

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from config import BadInput, atomic_write

# Okabe and Ito's colours, told apart by the colour-blind, and a dash each for print
STYLE = {
    "baseline": ("#000000", "-"), "internal": ("#0072B2", "--"), "internal_aux": ("#56B4E9", "-"), "final": ("#E69F00", "-."),
    "all": ("#D55E00", "--"), "all_aux": ("#CC79A7", "-"), "coupled": ("#009E73", "-"), "layernorm": ("#0072B2", "--"),
    "cbwc": ("#56B4E9", ":"), "dyt": ("#D55E00", "-."), "derf": ("#CC79A7", (0, (5, 1, 1, 1, 1, 1))),
}  # fmt: skip
NORM_FREE = ("dyt", "derf")  # their loss and stream would set the scale of all others
WIDTH = 6.5  # inches, a text column


def curve(runs: list, name: str, base: list = ()) -> tuple[np.ndarray, np.ndarray]:
    """(steps (T), values (runs, T)) of a metric at the steps that all have; with `base` the difference to the same seed's."""
    of = {r.seed: r.series(name) for r in base}
    series = [(r.series(name), of.get(r.seed)) for r in runs if not base or r.seed in of]
    steps = sorted(set.intersection(*(set(s) & set(b or s) for s, b in series))) if series else []
    return np.array(steps), np.array([[s[k] - (b[k] if b else 0) for k in steps] for s, b in series]).reshape(len(series), len(steps))


def smooth(values, width: int):
    """Running mean over `width` log lines, fewer at the ends. (n, T) -> (n, T)."""
    weight, kernel = np.convolve(np.ones(values.shape[-1]), np.ones(width), "same"), np.ones(width)
    return np.array([np.convolve(row, kernel, "same") / weight for row in values]).reshape(values.shape)


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
        self.plt, self.out, self.points = plt, out, [("figure", "panel", "curve", "x", "mean", "low", "high", "n")]

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

    def draw(self, ax, figure: str, panel: str, name: str, x, values, width: int = 1, **more):
        """Mean of values (n, T) over runs, with the band of their 2.5 to 97.5 percentiles, smoothed over `width` points."""
        if not values.size:
            return
        y = smooth(values, width) if width > 1 else values
        mean, low, high = np.mean(y, 0), *np.percentile(y, (2.5, 97.5), axis=0)
        colour, line = STYLE.get(name, ("#999999", ":"))
        look = {"color": colour, "linestyle": line, "label": f"{name} (n={len(y)})", **more}
        above = {"zorder": 2.5, "linewidth": 1.6} if look["linestyle"] != "-" else {}  # a dash over a line is seen, one under it is not
        ax.plot(x, mean, **above, **look)
        if len(y) > 1:
            ax.fill_between(x, low, high, color=more.get("color", colour), alpha=0.2, linewidth=0)
        rows = list(zip(x, mean, low, high, strict=True))[:: -(-len(x) // 400)]  # of a long run 400 points
        self.points += [(figure, panel, name, f"{at:.12g}", *(f"{v:.5g}" for v in row), len(y)) for at, *row in rows]

    def save(self, fig, name: str, legend_from=None, columns: int = 3) -> str:
        """Write NAME.png with one legend below the axes; returns the markdown that shows it."""
        if legend_from is not None:
            handles, labels = legend_from.get_legend_handles_labels()
            columns = max(1, min(columns, 95 // (10 + max(map(len, labels), default=0))))  # what fits below the axes
            fig.set_figheight(fig.get_figheight() + 0.19 * max(0, -(-len(labels) // columns) - 2))
            fig.legend(handles, labels, loc="outside lower center", ncols=columns, handlelength=3)
        with atomic_write(self.out / f"{name}.png") as f:
            fig.savefig(f, format="png")
        self.plt.close(fig)
        return f"![{name}]({name}.png)"

    def write(self, name: str, rows: list):
        """Write rows as a CSV file."""
        with atomic_write(self.out / name, "w") as f:
            csv.writer(f, lineterminator="\n").writerows(rows)

    def panels(self, name: str, specs: list, rows: dict, variants, columns: int = 2, height: float = 3.2) -> str:
        """A figure of metrics over steps. specs: (title, metric, y label, whether it is the difference to the baseline's, the share of
        the run that comes before the frame)."""
        fig, axes = self.axes(-(-len(specs) // columns), columns, height)
        for ax, (title, metric, label, difference, since) in zip(axes, specs, strict=True):
            late = {}  # past the first twentieth: the start would set the scale
            for v in variants if rows["baseline"] or not difference else ():
                x, y = curve(rows.get(v, []), metric, rows["baseline"] if difference else ())
                if y.size:
                    width = max(1, len(x) // 50)
                    self.draw(ax, name, title, v, x, y, width=width)
                    late[v] = smooth(y, width)[:, int(len(x) * (since or 0.05)) :]
                    if since:
                        ax.set_xlim(x[int(len(x) * since)], x[-1])
            fitted = [y.ravel() for v, y in late.items() if v not in NORM_FREE] or [y.ravel() for y in late.values()]
            values = np.concatenate([*fitted, np.array([math.nan])])
            if np.isfinite(values).any():  # a spike leaves the frame instead of flattening all else
                low, high = np.nanpercentile(values, (0.5, 98))
                if low > 0 and high / low > 8:
                    self.log(ax, low / 1.3, high * 1.5)
                else:
                    ax.set_ylim(low - 0.1 * (high - low + 1e-9), high + 0.15 * (high - low + 1e-9))
            bottom, top = ax.get_ylim()
            if gone := [v for v in NORM_FREE if v in late and not ((bottom < late[v]) & (late[v] < top)).all()]:
                title += f"\n({' and '.join(gone)} leave{'s' * (len(gone) == 1)} the frame)"
            ax.set(xlabel="optimizer step", ylabel=label, title=title)
        return self.save(fig, name, axes[0])

    def calibration(self, name: str, variant: str, runs: list) -> str:
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
                self.draw(ax, name, "calibration of c", site, x[near], y[:, near], **more)
            final = np.array([[r.lines[-1][s] for s in sites if s.endswith(kind)] for r in runs])
            if final.size:
                colour = "#0072B2" if kind == "attn" else "#D55E00"
                x = np.arange(final.shape[1])
                more = {"color": colour, "linestyle": line, "marker": "o", "markersize": 3, "label": kind}
                self.draw(by_layer, name, "c as frozen", f"c, {kind}", x, final, **more)
        if "taper/c.final" in sites:
            final = np.array([[r.lines[-1]["taper/c.final"]] * 2 for r in runs])
            last = runs[0].settings["n_layer"]
            ends = np.array([last - 0.2, last + 0.2])
            self.draw(by_layer, name, "c as frozen", "c, final", ends, final, color="#009E73", label="final norm")
        ax.axvline(runs[0].settings["gate_start"], color="#999999", linestyle=":", label="frozen")
        ax.set(xlabel="optimizer step", ylabel="c (1 / RMS)", title=f"{variant}: calibration of c")
        by_layer.set(xlabel="block", ylabel="c (1 / RMS)", title="c as frozen")
        by_layer.legend()
        by_layer.xaxis.get_major_locator().set_params(integer=True)
        every = [v for r in runs for s in sites for v in r.series(s).values()]
        for panel in (ax, by_layer):
            self.log(panel, min(every) / 1.2, max(every) * 1.2)
        for panel, metric, label in ((gate, "gate", "gate g"), (lr, "lr", "learning rate")):
            self.draw(panel, name, label, metric, *curve(runs, metric), color="#000000", linestyle="-")
            panel.set(xlabel="optimizer step", ylabel=label)
        few = runs[0].settings["n_layer"] <= 4
        if not few:  # the colour says the depth; eight and more lines would need a legend of their own
            bar = self.plt.cm.ScalarMappable(self.plt.Normalize(0, len(colours) - 1), self.plt.get_cmap("viridis"))
            fig.colorbar(bar, ax=ax, label="block (solid attn, dashed mlp)")
        return self.save(fig, name, ax if few else None, 4)

    def residual(self, name: str, measured: dict[str, np.ndarray]) -> str:
        """measured: {variant: (runs, 3, layers)} of stream_rms. One scale for the designs with norms, another for those without."""
        families = [{v: m for v, m in measured.items() if (v in NORM_FREE) == free} for free in (False, True)]
        rows = sum(-(-len(family) // 4) for family in families)
        fig, axes = self.axes(rows, 4, 1.7 * rows + 0.4)
        cells, shown = iter(axes), []
        for family in filter(None, families):
            every = np.concatenate([values[:, :2].ravel() for values in family.values()])
            for i, (variant, values) in enumerate(family.items()):
                shown.append(ax := next(cells))
                x = np.arange(values.shape[2])
                for row, (what, colour, line) in enumerate((("before attention", "#0072B2", "-"), ("before the MLP", "#D55E00", "--"))):
                    more = {"color": colour, "linestyle": line, "marker": "o", "markersize": 3, "label": what}
                    self.draw(ax, name, variant, what, x, values[:, row], **more)
                ax.set(title=f"{variant} (n={len(values)})", xlabel="block", ylabel="RMS (dimensionless)" if i % 4 == 0 else "")
                ax.set_xticks(x) if len(x) <= 8 else ax.xaxis.get_major_locator().set_params(integer=True)
                ax.tick_params(labelleft=i % 4 == 0)
                self.log(ax, every.min() / 1.5, every.max() * 1.5)
            for _ in range(-len(family) % 4):
                next(cells).remove()
        return self.save(fig, name, shown[0])

    def study(self, name: str, label: str, panels: list, log: bool = True) -> str:
        """panels: (y label, {curve: [(x, values)]}, level): means and bars over a knob, and a level to compare with."""
        fig, axes = self.axes(1, len(panels), 2.9)
        for ax, (y_label, curves, level) in zip(axes, panels, strict=True):
            ticks = sorted({float(x) for points in curves.values() for x, _ in points})
            for i, (curve_name, points) in enumerate(curves.items()):
                x, rows = np.array([p[0] for p in points], float), [np.asarray(p[1], float) for p in points]
                colour, line = STYLE.get(curve_name, list(STYLE.values())[1 + i % 5])
                mean = np.array([r.mean() for r in rows])
                low, high = np.array([np.percentile(r, (2.5, 97.5)) for r in rows]).T
                n = "-".join(str(v) for v in sorted({min(map(len, rows)), max(map(len, rows))}))
                aside = 0.015 * (i - (len(curves) - 1) / 2)  # beside each other, so that no bar hides another
                at = x * (ticks[-1] / ticks[0]) ** aside if log else x + (ticks[-1] - ticks[0]) * aside
                ax.errorbar(at, mean, (mean - low, high - mean), color=colour, linestyle=line, marker="o", markersize=4, capsize=3,
                            zorder=2 if line == "-" else 2.5, label=f"{curve_name} (n={n})")  # fmt: skip
                points = zip(x, mean, low, high, map(len, rows), strict=True)
                self.points += [(name, y_label, curve_name, *point) for point in points]
            if log:
                ax.set_xscale("log")
            ax.set_xticks(ticks, [f"{v:g}" for v in ticks])
            ax.minorticks_off()
            if level is not None:
                ax.axhline(level, color="black", linestyle=":", linewidth=1)
            ax.set(xlabel=label, ylabel=y_label)
        return self.save(fig, name, axes[0])
