"""What each setting costs against the baseline of the same seed: a table with intervals, and its figure.

    python scripts/gaps.py out/coupled_mlp --by=mlp,learning_rate,max_iters --out=results/coupled_mlp
    python scripts/gaps.py out/gate out/gate_long --against=gate_end --out=results/gate

PATHs are run folders and folders of runs, as scripts/report.py takes them. Runs with the same values of the
--by knobs are compared with the baseline among them, or with the variant that --to names; whatever else they
differ in names the row. A gap is the relative one of val/loss, in %, by pairs of a seed, with the 95%
interval of its mean by Student's t. Writes gaps.md, gaps.csv (a row a run) and gaps.png. Needs matplotlib and
pandas.
"""

import math
import shlex
import sys
from collections import defaultdict
from dataclasses import dataclass, fields
from itertools import product
from pathlib import Path

import numpy as np
import pandas as pd

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from config import Config
from nanonorm.cli import parse
from nanonorm.errors import BadInput, one_line_errors
from nanonorm.files import atomic_write
from nanonorm.knobs import is_read
from scripts.figures import OTHER, STYLE, Figures, shades
from scripts.report import (
    FinishedRun,
    collect,
    half_width,
    interval,
    markdown,
    spread,
    table_of,
    varying,
)
from scripts.runs import NOT_THE_RUN, PAPER_ROWS

MARKERS = "osD^v<>pPX*h"  # a variant of the papers' tables each
FOLLOW = ("warmup_iters", "lr_decay_iters", "gate_start", "gate_end")  # in a longer run these come later


@dataclass
class Gaps:
    """What is compared."""

    by: tuple[str, ...] = ("max_iters",)  # knobs: runs are compared where these are the same
    against: str | None = None  # a knob with numbers: the figure is the gap against it, a panel a group
    to: str = "baseline"  # the variant that the others are compared with
    out: str = "results/gaps"  # folder of gaps.md, gaps.csv and gaps.png


def scales(knob: str, finished: list[FinishedRun]) -> bool:
    """Whether a step of the schedule comes at one share of every run that reads it."""
    settings = [run.settings for run in finished if knob in run.point]
    return knob in FOLLOW and len({round(c[knob] / c["max_iters"], 3) for c in settings}) == 1


def rows_of(
    finished: list[FinishedRun], by: tuple[str, ...], against: str | None = None, to="baseline"
) -> pd.DataFrame:
    """A row a run: its group (the values of `by`), what it is, the value of `against` (nan where the run does
    not read it), seed, loss, scale of the last stream, and its gap to the variant `to` in % (nan for that
    variant, and without a partner). Where `to` reads `against` as well, pairs agree in it.

    Raises: BadInput."""
    differ = [knob for knob in varying(table_of(finished)) if knob not in (*by, against)]
    alike = defaultdict(list)
    for run in finished:
        alike[tuple(run.settings[knob] for knob in by)].append(run)
    within = {knob for runs in alike.values() for knob in varying(table_of(runs))}
    differ = [knob for knob in differ if knob in within or not scales(knob, finished)]
    if odd := [name for name in differ if name in ("corpus", "device", "torch")]:
        values = sorted({str(run.point[odd[0]]) for run in finished})
        raise BadInput(f"runs of several {odd[0]}: {'; '.join(values)}; compare them one at a time")
    rows = []
    for run in finished:
        own = [f"{knob}={run.settings[knob]}" for knob in differ if run.point.get(knob) is not None]
        row = {"group": tuple(run.settings[knob] for knob in by), "what": " ".join([run.variant, *own])}
        row |= {"variant": run.variant, "seed": run.seed, "loss": run.loss}
        value = run.settings[against] if against in run.point else None
        row["against"] = math.nan if value is None else value
        rows.append(row | {"scale": run.lines[-1].get("s/mean", math.nan), "folder": str(run.folder)})
    table = pd.DataFrame(rows)
    base = table[table.variant == to]
    twice = base[base.duplicated(["group", "seed", "against"])]
    if len(twice):
        first = twice.iloc[0]
        raise BadInput(f"{first.folder} is a second {to} of seed {first.seed}; name what differs in --by")
    for _, same in base.groupby("group"):
        if len(several := sorted(set(same.what))) > 1:
            raise BadInput(f"{' and '.join(several[:2])} would be one {to}; name what differs in --by")
    reads_it = base.against.notna().any()
    at = table.against if reads_it else pd.Series(math.nan, table.index)
    at = at.astype(object).where(at.notna(), None)  # None, unlike nan, is equal to itself
    keys = list(zip(table.group, table.seed, at, strict=True))
    of = {key: loss for key, loss, v in zip(keys, table.loss, table.variant, strict=True) if v == to}
    gap = 100 * (table.loss / np.array([of.get(key, math.nan) for key in keys]) - 1)
    return table.assign(gap=gap.where(table.variant != to))


def in_order(group: tuple) -> list[tuple]:
    """A key to sort groups by: numbers by size, before all else by its text."""
    return [(0, v, "") if isinstance(v, int | float) else (1, 0, str(v)) for v in group]


def summary(table: pd.DataFrame, to="baseline") -> pd.DataFrame:
    """A row a group, setting and value of the knob against which gaps are drawn: n, losses, scale, the gap's
    mean and half its interval (nan for one pair). Groups in order of their values, the variant `to` first
    in each."""
    rows = []
    for group in sorted(set(table.group), key=in_order):
        here = table[table.group == group]
        first = set(here.what[here.variant == to])
        for what in sorted(set(here.what), key=lambda name: (name not in first, variant_index(name), name)):
            for value, same in here[here.what == what].groupby("against", dropna=False):
                gaps = same.gap.dropna()
                row = {"group": group, "what": what, "against": value, "n": len(same), "pairs": len(gaps)}
                row |= {"loss": spread(same.loss), "scale": spread(same.scale, 2)}
                row |= {"mean": gaps.mean(), "half": half_width(gaps)}
                rows.append(row)
    return pd.DataFrame(rows)


def table_text(found: pd.DataFrame, by: tuple[str, ...], against: str | None = None) -> str:
    rows = []
    for row in found.itertuples():
        gap = "-" if not row.pairs else f"{row.mean:+.2f}"
        within = "-" if math.isnan(row.half) else interval(row.mean, row.half)
        at = ["-" if math.isnan(row.against) else f"{row.against:g}"] if against else []
        rows.append([*row.group, row.what, *at, row.n, row.loss, row.scale, row.pairs, gap, within])
    head = [*by, "", *([against] if against else []), "n", "val/loss", "last s/mean", "pairs", "gap, %"]
    head.append("95% interval")
    return markdown(rows, head)


def variant_index(name: str) -> int:
    """The place of a setting's variant in the papers' tables, behind them for another."""
    rows = list(PAPER_ROWS)
    return rows.index(variant) if (variant := name.split()[0]) in rows else len(rows)


def looks(found: pd.DataFrame) -> dict[str, dict]:
    """{setting: how it is drawn}: its variant's marker, a shade of its variant's colour, its number of pairs
    (of runs, for the one that the others are compared with)."""
    names = list(dict.fromkeys(found.what))
    colours = shades([STYLE.get(name.split()[0], OTHER)[0] for name in names])
    drawn = {}
    for name, colour in zip(names, colours, strict=True):
        mine = found[found.what == name]
        counts = mine.pairs if mine.pairs.any() else mine.n
        n = "-".join(str(count) for count in sorted({counts.min(), counts.max()}))
        marker = MARKERS[variant_index(name) % len(MARKERS)]
        drawn[name] = {"color": colour, "marker": marker, "label": f"{name} (n={n})"}
    return drawn


def bars(rows: pd.DataFrame) -> pd.Series | None:
    """Half the intervals, nan for fewer than three pairs; None if there is none to draw."""
    half = rows.half.where(rows.pairs > 2)
    return None if half.isna().all() else half


def draw(out: Path, found: pd.DataFrame, table: pd.DataFrame, by: tuple[str, ...], to: str):
    """Each gap with the pairs it is of as small points and, of three pairs or more, its interval; a line a
    group."""
    figures, found = Figures(out), found[found.pairs > 0]
    groups, drawn = list(dict.fromkeys(found.group)), looks(found)
    fig, (ax,) = figures.axes(1, 1, max(1.7, 1.0 + 0.15 * len(groups) * (len(drawn) + 1)))  # room for a label
    for i, (name, look) in enumerate(drawn.items()):
        rows = found[found.what == name]
        at = [groups.index(group) + 0.7 * ((i + 0.5) / len(drawn) - 0.5) for group in rows.group]
        look = look | {"linestyle": "none", "markersize": 4, "capsize": 2}
        ax.errorbar(rows["mean"], at, xerr=bars(rows), **look)
        for group, y in zip(rows.group, at, strict=True):
            pairs = table.gap[(table.group == group) & (table.what == name)]
            ax.plot(pairs, [y] * len(pairs), ".", color="#000000", markersize=2.5, zorder=3)
    widest = (found["mean"].abs() + found.half.where(found.pairs > 2, 0)).max()
    if widest > 10:  # a failed run would press all the others together
        ax.set_xscale("symlog", linthresh=1)
        ax.xaxis.set_major_formatter("{x:g}")
    ax.axvline(0, color="#000000", linewidth=0.8)
    ax.set_yticks(range(len(groups)), [", ".join(map(str, group)) for group in groups])
    ax.set_ylim(len(groups) - 0.5, -0.5)
    shown = "mean, pairs" if bars(found) is None else "mean, 95% interval, pairs"
    axis = f"gap to {to} of the same seed, %: {shown}"
    ax.set(xlabel=axis + ("\n(logarithmic beyond 1)" if widest > 10 else ""), ylabel=",\n".join(by))
    figures.save(fig, "gaps", ax)


def draw_against(
    out: Path, found: pd.DataFrame, table: pd.DataFrame, by: tuple[str, ...], to: str, against: str
):
    """The gaps over a knob's values, with the pairs they are of as small points and, of three pairs or more,
    their intervals: a panel a group, a line a setting. Where `to` has values of the knob too, a row of panels
    below has the losses."""
    figures, found, table = Figures(out), found[found.against.notna()], table[table.against.notna()]
    rows = ["gap", "loss"] if (table.variant == to).any() else ["gap"]
    groups, drawn = list(dict.fromkeys(found.group)), looks(found)
    fig, axes = figures.axes(len(rows), len(groups), 2.6 * len(rows))
    for ax, (y, group) in zip(axes, product(rows, groups), strict=True):
        here = found[found.group == group]
        low, high = here.against.min(), here.against.max()
        wide = 0 < 10 * low <= high
        for i, (name, look) in enumerate(drawn.items()):
            line = here[here.what == name] if y == "loss" else here[(here.what == name) & (here.pairs > 0)]
            runs = table[(table.group == group) & (table.what == name)]
            aside = (2 * i - len(drawn) + 1) / 80 / max(1, len(drawn) - 1)  # so that no bar hides another
            if y == "loss":
                aside = 0
            shift = {v: v * (high / low) ** aside if wide else v + (high - low) * aside for v in line.against}
            means = [runs[y][runs.against == v].mean() for v in line.against]
            look = look | {"markersize": 4, "capsize": 2, "linewidth": 1.0}
            if len(line):
                ax.errorbar(shift.values(), means, bars(line) if y == "gap" else None, **look)
            ax.plot(runs.against.map(shift), runs[y], ".", color=look["color"], markersize=2.5)
        if wide:
            ax.set_xscale("log")
        values = sorted(set(here.against))
        if len(values) < 9:
            ax.set_xticks(values, [f"{v:g}" for v in values])
            ax.xaxis.set_minor_locator(figures.plt.NullLocator())
        if y == "gap":
            ax.axhline(0, color="#000000", linewidth=0.8)
            ax.set_title(", ".join(f"{knob}={value}" for knob, value in zip(by, group, strict=True)))
        if y == rows[-1]:
            ax.set_xlabel(against)
    for i, ax in enumerate(axes):
        if i % len(groups):
            ax.sharey(axes[i - i % len(groups)])
        ax.set_xlim(axes[i % len(groups)].get_xlim())
    for first, y in zip(axes[:: len(groups)], rows, strict=True):
        first.set_ylabel(f"gap to {to}\nof the same seed, %" if y == "gap" else "val/loss")
        first.autoscale(axis="y")  # over the row: what comes to share takes the limits that are there
    figures.save(fig, "gaps", axes[-1])


def main():
    k, _, paths = parse(Gaps, sys.argv[1:], usage=__doc__)
    if not paths:
        raise BadInput("name folders of runs: python scripts/gaps.py out/small --by=max_iters")
    knobs = {f.name for f in fields(Config)}
    if unknown := [knob for knob in k.by if knob not in knobs]:
        raise BadInput(f"--by={unknown[0]}: train.py has no such knob")
    if k.against is not None and k.against not in knobs:
        raise BadInput(f"--against={k.against}: train.py has no such knob")
    if same := NOT_THE_RUN & {*k.by, k.against}:
        instead = "; gate_end does" if "gate_end_ratio" in same else ""
        raise BadInput(f"{min(same)} sets no runs apart{instead}")
    if k.against in k.by:
        raise BadInput(f"{k.against} is in --by and --against; leave it out of one of them")
    finished, left_out = collect(paths)
    values = [run.settings[k.against] for run in finished] if k.against else []
    if odd := [value for value in values if value is not None and type(value) not in (int, float)]:
        raise BadInput(f"--against={k.against}: {odd[0]} is not a number")
    if k.to not in (there := sorted({run.variant for run in finished})):
        raise BadInput(f"--to={k.to}: no run is that; there are {', '.join(there)}")
    for knob, run in product(k.by, finished):
        if not is_read(knob, Config(**run.settings)):
            remedy = f"leave it out: where runs differ in {knob}, the rows say it"
            raise BadInput(f"--by={knob}: {run.variant} does not read it; {remedy}")
    table, out = rows_of(finished, k.by, k.against, k.to), Path(k.out)
    if table.gap.isna().all():
        raise BadInput(f"no pair: no run has a {k.to} of its seed with the same values of --by")
    found = summary(table, k.to)
    if k.against is not None and found.against.isna().all():
        raise BadInput(f"--against={k.against}: no run reads it")
    try:
        out.mkdir(parents=True, exist_ok=True)
    except OSError as e:
        raise BadInput(f"cannot make the folder {out}: {e.strerror}; name another --out") from None
    heads = [run.head for run in finished]
    names = ("commit", "processor", "torch", "dtype")
    what = {name: sorted({str(head["versions"].get(name)) for head in heads}) for name in names}
    text = [f"# Gaps to {k.to}", "    " + shlex.join(["python", *sys.argv])]
    text.append(table_text(found, k.by, k.against))
    text.append(
        "Validation at gate 0; s/mean is of the last micro-batch; ± is a standard deviation over n seeds; "
        f"gaps are by pairs of a seed, with the interval of their mean by Student's t. {len(finished)} runs; "
        + "; ".join(f"{name} {', '.join(values)}" for name, values in what.items())
        + "."
    )
    text += [f"Left out, {folder}: {why}" for folder, why in left_out.items()]
    if k.against is None:
        draw(out, found, table, k.by, k.to)
    else:
        draw_against(out, found, table, k.by, k.to, k.against)
    with atomic_write(out / "gaps.md", "w") as f:
        f.write("\n\n".join([*text, "![gaps](gaps.png)"]) + "\n")
    with atomic_write(out / "gaps.csv", "w") as f:
        columns = table.drop(columns=["group", "variant", "against"])
        if k.against is not None:
            columns[k.against] = table.against
        columns[list(k.by)] = pd.DataFrame(table.group.tolist(), index=table.index)
        columns.to_csv(f, index=False, lineterminator="\n")
    print(f"{len(finished)} runs, {len(left_out)} left out; wrote {out / 'gaps.md'}, gaps.csv and gaps.png")


if __name__ == "__main__":
    with one_line_errors():
        main()
