"""What every figure shares, and bench.py's two. matplotlib is imported only when something is drawn.

A row is a dict of figures as bench.py makes it: variant, runtime, batch, seq, ms, tok_s, speedup, and their
quartiles.
"""

import numpy as np

from nanonorm.errors import needed
from nanonorm.files import atomic_write

COLOURS = ("#0072B2", "#56B4E9", "#E69F00", "#009E73", "#CC79A7")  # Okabe and Ito: everyone tells them apart
GREY = "#999999"
STYLE = {
    "font.size": 9, "axes.titlesize": 9, "axes.grid": True, "axes.axisbelow": True, "grid.alpha": 0.3,
    "axes.spines.top": False, "axes.spines.right": False, "lines.linewidth": 1.3, "legend.frameon": False,
    "savefig.dpi": 200,
}  # fmt: skip


def pyplot():
    """matplotlib's pyplot, in the one style of all figures, drawing to files alone. Raises: BadInput if
    matplotlib is not installed."""
    matplotlib = needed("matplotlib", "matplotlib", "a figure")
    matplotlib.use("Agg")
    import matplotlib.pyplot

    matplotlib.rcParams.update(STYLE)
    return matplotlib.pyplot


def smooth(values, width: int):
    """Running median over `width` log lines, an odd number, fewer at the ends. (n, T) -> (n, T)."""
    reach = width // 2
    rows = [values[:, max(0, at - reach) : at + reach + 1] for at in range(values.shape[-1])]
    return np.stack([np.median(row, -1) for row in rows], -1) if rows else values


def shades(colours: list[str]) -> list[str]:
    """The colours, where one comes again as a mix of it with black, which is seen on white; of a dark one,
    with white."""
    found = []
    for i, colour in enumerate(colours):
        rgb = np.array(list(bytes.fromhex(colour[1:])))
        mixed = 0.45 * colours[:i].count(colour) / max(1, colours.count(colour) - 1)
        other = 255 if rgb @ (0.3, 0.59, 0.11) < 70 else 0
        found.append("#" + bytes(np.rint(rgb + mixed * (other - rgb)).astype(int).tolist()).hex().upper())
    return found


def looks(names: list[str], floor: str) -> dict[str, dict]:
    """A colour for each variant, grey for the floor; from the sixth on they come again, hatched or dashed."""
    found = {name: {"color": COLOURS[i % 5], "again": i // 5} for i, name in enumerate(names)}
    return found | ({floor: {"color": GREY, "again": 0}} if floor in names else {})


def draw_speedups(path: str, rows: list[dict], floor: str, title: str):
    """Each speedup over the first variant by batch size, with error bars from quartile to quartile: a row of
    panels for each runtime, without the floor and with it."""
    runtimes, names = (list(dict.fromkeys(r[key] for r in rows)) for key in ("runtime", "variant"))
    size = (6.5, 1 + 2.2 * len(runtimes))
    figure, panels = pyplot().subplots(len(runtimes), 2, figsize=size, squeeze=False, layout="constrained")
    for (near, far), runtime in zip(panels, runtimes, strict=True):
        for i, (name, look) in enumerate(looks(names, floor).items()):
            points = [r for r in rows if (r["runtime"], r["variant"]) == (runtime, name)]
            points.sort(key=lambda r: r["batch"])
            x, y, low, high = (
                np.array([r[key] for r in points]) for key in ("batch", "speedup", "speedup_q1", "speedup_q3")
            )
            x = x * 1.05 ** (i - (len(names) - 1) / 2)  # side by side, so that no bar hides another
            own = {"color": look["color"], "linestyle": "--" if look["again"] else "-", "label": name}
            far.errorbar(x, y, (y - low, high - y), marker="o", markersize=3, capsize=2, **own)
            if name != floor:
                near.errorbar(x, y, (y - low, high - y), marker="o", markersize=3, capsize=2, **own)
        batches = sorted({r["batch"] for r in rows})
        for panel, what in ((near, runtime), (far, f"{runtime}, with the {floor}")):
            panel.set_xscale("log", base=2)
            panel.set_xticks(batches, map(str, batches))
            panel.minorticks_off()
            panel.set_title(what, loc="left")
        near.set_ylabel(f"speedup over {names[0]},\nmedian and quartiles")
    for panel in panels[-1]:
        panel.set_xlabel("batch size")
    save_figure(figure, panels[0, 1], title, path)


def save_figure(figure, legend_from, title: str, path: str):
    """A title, one legend below, and the file."""
    figure.suptitle(title, fontsize=9)
    handles = legend_from.get_legend_handles_labels()
    figure.legend(*handles, loc="outside lower center", ncols=5)
    with atomic_write(path) as f:
        figure.savefig(f, format="png")
