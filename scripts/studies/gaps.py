"""What each setting costs against the baseline of the same seed: a table with intervals, and its figure.

    python scripts/report.py gaps out/coupled_mlp --by=mlp,learning_rate --out=results/is_it_the_swiglu
    python scripts/report.py gaps results/does_removal_cost/gaps.csv --out=results/does_removal_cost  # again

PATHs are run folders and folders of runs, as of the report `papers`. Runs with the same values of the --by
knobs are compared with the baseline among them, or with the variant that --to names; whatever else they
differ in names the row. A gap is the relative one of val/loss, in %, by pairs of a seed, with the 95%
interval of its mean by Student's t. Writes gaps.md, gaps.csv (a row a run) and gaps.png, and with --logs=N
logs.jsonl, about N lines of each run's log. A gaps.csv in place of PATHs is drawn again, whether its runs
are still there or not; beside PATHs it brings settings, or seeds, of its own, paired among themselves. Needs
matplotlib. --tuned=learning_rate, a knob of --by, lets each setting have its own best value of it: of those
with most seeds the one with the lowest mean loss, which flatters it a little.
"""

import csv
import json
import math
import re
import shlex
from collections import defaultdict
from dataclasses import dataclass, field, replace
from itertools import pairwise
from pathlib import Path
from statistics import fmean

from config import Config
from nanonorm.errors import BadInput
from nanonorm.files import atomic_write
from nanonorm.knobs import is_read
from nanonorm.log import thinned
from nanonorm.plots import shades
from nanonorm.tables import markdown, write_csv
from nanonorm.typed import Count, Positive, check_text, hints
from scripts.studies.figures import LINE_OF, OTHER, Figures
from scripts.studies.runs import (
    MACHINE,
    PAPER_ROWS,
    FinishedRun,
    by_seed,
    collect,
    in_order,
    refuse_knob,
    resumed,
    varying,
    versions_of,
)
from scripts.studies.stats import interval, relative, spread

MARKERS = "osD^v<>pPX*h"  # a variant of the papers' tables each
FOLLOW = ("warmup_iters", "lr_decay_iters", "gate_start", "gate_end")  # in a longer run these come later
DRAWN = """A dot is a run or a pair of runs, a bar the interval of three and more, a hollow mark the \
mean of fewer. Settings of one value stand side by side, the dots of each to its right. A line joins means \
over the same seeds, at the value itself. A run that is more than {far:g}% behind is written at \
the edge of its panels, and its setting has no mean there."""


@dataclass
class Knobs:
    """What is compared."""

    by: tuple[str, ...] = ("max_iters",)  # knobs: runs are compared where these are the same
    against: str | None = None  # a knob with numbers: the figure is the gap against it, a panel a group
    to: str = "baseline"  # the variant that the others are compared with
    tuned: str | None = None  # one of --by: each setting is shown at its own best value of it
    seeds: tuple[int, ...] | None = None  # only runs of these count; None: all
    logs: Count | None = None  # about so many lines of each run's log, in logs.jsonl; None: no such file
    far: Positive = 10.0  # %: in the figure a run this far behind is of another kind, and no mean holds it
    out: str = "out/gaps"  # folder of gaps.md, gaps.csv and gaps.png


@dataclass(eq=False)
class Cell:
    """The runs of one setting: a row of the table, a point of the figure.

    group: their values of --by; what: the setting in words; at: their value of --against, None where it is
    not read; gaps: {seed: gap to the base's run in %}, empty for the base itself; best: the value of --tuned.
    """

    group: tuple
    what: str
    at: float | None
    runs: list[FinishedRun] = field(default_factory=list)
    gaps: dict[int, float] = field(default_factory=dict)
    best: object = None

    @property
    def variant(self) -> str:
        return self.runs[0].variant

    def place(self) -> tuple:
        """A key to sort settings by."""
        at = math.inf if self.at is None else self.at
        return in_order(self.group), bool(self.gaps), variant_index(self.what), self.what, at

    def values(self, y: str) -> dict[int, float]:
        """{seed: gap or loss}"""
        return self.gaps if y == "gap" else by_seed(self.runs)

    def near_and_far(self, y: str, far: float) -> tuple[list[float], list[float]]:
        """(values, those of runs that are more than `far` % behind)"""
        both = [], []
        for seed, value in self.values(y).items():
            both[self.gaps.get(seed, 0) > far].append(value)
        return both


def scales(knob: str, finished: list[FinishedRun]) -> bool:
    """Whether a step of the schedule comes at one share of every run that reads it."""
    settings = [run.settings for run in finished if knob in run.point]
    return knob in FOLLOW and len({round(c[knob] / c["max_iters"], 3) for c in settings}) == 1


def named_by(finished: list[FinishedRun], by: tuple[str, ...], against: str | None) -> list[str]:
    """The knobs that name a row: those in which runs differ, but for a schedule that scales with the length
    of the run. Raises: BadInput for runs of several texts or machines."""
    alike = defaultdict(list)
    for run in finished:
        alike[tuple(run.settings[knob] for knob in by)].append(run)
    within = {knob for runs in alike.values() for knob in varying(runs)}
    differ = [knob for knob in varying(finished) if knob not in (*by, against)]
    differ = [knob for knob in differ if knob in within or not scales(knob, finished)]
    if odd := [name for name in differ if name in ("corpus", *MACHINE)]:
        values = sorted({str(run.point[odd[0]]) for run in finished})
        raise BadInput(f"runs of several {odd[0]}: {'; '.join(values)}; compare them one at a time")
    return differ


def compared(
    finished: list[FinishedRun], by: tuple[str, ...], against: str | None = None, to: str = "baseline"
) -> list[Cell]:
    """The settings with their gaps to the variant `to`; where it reads `against` too, pairs agree in that.
    Groups in order of their values, the variant `to` first in each. Raises: BadInput."""
    differ, found = named_by(finished, by, against), {}
    for run in finished:
        own = [f"{knob}={run.settings[knob]}" for knob in differ if run.point.get(knob) is not None]
        at = run.settings[against] if against in run.point else None
        key = (tuple(run.settings[k] for k in by), " ".join([run.variant, *own]), at)
        found.setdefault(key, Cell(*key)).runs.append(run)
    return paired(list(found.values()), to)


def paired(found: list[Cell], to: str) -> list[Cell]:
    """The settings, in order, with their gaps. Raises: BadInput."""
    bases = {}  # (group, at) -> the cell that others are compared with
    for cell in found:
        if cell.variant == to:
            other = bases.setdefault((cell.group, cell.at), cell)
            if other is not cell:
                names = " and ".join(sorted((other.what, cell.what)))
                raise BadInput(f"{names} would be one {to}; name what differs in --by")
    reads_it = any(at is not None for _, at in bases)
    for cell in found:
        base = bases.get((cell.group, cell.at if reads_it else None))
        if base and cell.variant != to:
            found_of = relative(by_origin(cell.runs), by_origin(base.runs))
            cell.gaps = {seed: gap for (_, seed), gap in found_of.items()}
    return sorted(found, key=Cell.place)


def by_origin(runs: list[FinishedRun]) -> dict[tuple, float]:
    """{(the gaps.csv that has a run, None for a folder, and its seed): its loss}"""
    return {(run.head.get("read from"), run.seed): run.loss for run in runs}


def at_best(found: list[Cell], k: Knobs) -> list[Cell]:
    """Each setting at one value of --tuned, compared with the base at the base's own."""
    place, best = k.by.index(k.tuned), {}
    for cell in sorted(found, key=lambda cell: (-len(cell.runs), fmean(by_seed(cell.runs).values()))):
        rest = (*cell.group[:place], *cell.group[place + 1 :])
        mine = replace(cell, group=rest, gaps={}, best=cell.group[place])
        best.setdefault((rest, cell.what, cell.at), mine)
    return paired(list(best.values()), k.to)


def variant_index(name: str) -> int:
    """The place of a setting's variant in the papers' tables, behind them for another."""
    order, variant = list(PAPER_ROWS), name.split()[0]
    return order.index(variant) if variant in order else len(order)


def table_text(
    found: list[Cell], by: tuple[str, ...], against: str | None = None, tuned: str | None = None
) -> str:
    table = []
    for cell in found:
        gap, losses = interval(cell.gaps.values()), [run.loss for run in cell.runs]
        at = ["-" if cell.at is None else f"{cell.at:g}"] if against else []
        scale = spread([s for run in cell.runs if (s := run.last("s/mean")) is not None], 2)
        rest = [len(losses), spread(losses), scale, gap.n, f"{gap.mean:+.2f}" if gap.n else "-", gap.ends()]
        table.append([*cell.group, cell.what, *at, *([cell.best] if tuned else []), *rest])
    head = [*by, "", *filter(None, (against, tuned)), "n", "val/loss", "last s/mean", "pairs", "gap, %"]
    return markdown(table, [*head, "95% interval"])


def read_again(path: str, k: Knobs) -> list[Cell]:
    """The settings of a gaps.csv, as `compared` has those of runs. Raises: BadInput."""
    found, kinds = {}, hints(Config)
    try:
        for row in csv.DictReader(Path(path).read_text().splitlines()):
            if None in row.values() or not row["what"]:
                raise ValueError("a row is cut short")
            if not 0 < float(row["loss"]) < math.inf:
                raise ValueError(f"{row['loss']} is no loss")
            seed, scale = int(row["seed"]), float(row["scale"]) if row["scale"] else None
            if k.seeds and seed not in k.seeds:
                continue
            at = float(row[k.against]) if k.against and row[k.against] else None
            group = tuple(check_text(kinds[n], row[n]) if row[n] else None for n in k.by)
            key = (group, row["what"], at)
            cell, variant = found.setdefault(key, Cell(*key)), row["what"].split()[0]
            settings, line = {"seed": seed}, {"val/loss": float(row["loss"]), "s/mean": scale}
            if seed in by_seed(cell.runs):
                raise ValueError(f"{cell.what} has several runs of seed {seed}")
            head = {"read from": row.get("origin") or path}
            cell.runs.append(FinishedRun(Path(row["folder"]), variant, settings, {}, head, [line]))
    except (OSError, KeyError, ValueError, TypeError, csv.Error) as e:
        raise BadInput(f"cannot read {path} with these --by and --against: {e!r}") from None
    return paired(list(found.values()), k.to)


def joined(earlier: list[Cell], later: list[Cell], path: str) -> list[Cell]:
    """Settings of a gaps.csv, and of runs, each with the gaps that it has; that all else is the same is the
    caller's word. Raises: BadInput for a seed of one setting in both."""
    found = {(cell.group, cell.what, cell.at): cell for cell in earlier}
    for cell in later:
        same = found.setdefault((cell.group, cell.what, cell.at), cell)
        if same is not cell:
            if by_seed(same.runs).keys() & by_seed(cell.runs):
                where = f"{cell.runs[0].folder} and {path}"
                raise BadInput(f"{where} both have {cell.what}; leave one out, or name what differs in --by")
            same.runs += cell.runs
            same.gaps |= cell.gaps
    return sorted(found.values(), key=Cell.place)


# ---------------------------------------------------------------------------------------------------------
# drawn


def looks(found: list[Cell]) -> dict[str, dict]:
    """{setting: how it is drawn}: its variant's marker, a shade of its variant's colour, its number of pairs
    (of runs, for the one that the others are compared with)."""
    names = list(dict.fromkeys(cell.what for cell in found))
    colours = shades([LINE_OF.get(name.split()[0], OTHER)[0] for name in names])
    drawn = {}
    for name, colour in zip(names, colours, strict=True):
        mine = [cell for cell in found if cell.what == name]
        counts = [len(cell.gaps) for cell in mine if cell.gaps] or [len(cell.runs) for cell in mine]
        n = "-".join(str(count) for count in sorted({min(counts), max(counts)}))
        short = re.sub(r"\((.*?),?\)", lambda tuple_: re.sub(r"\.0\b|\s", "", tuple_[1]), name)
        marker = MARKERS[variant_index(name) % len(MARKERS)]
        look = {"linestyle": "none", "marker": marker, "markersize": 4, "capsize": 2}
        drawn[name] = {"color": colour, "label": f"{short} (n={n})", **look}
    return drawn


def draw(figures: Figures, found: list[Cell], k: Knobs):
    """The gaps over the values of --against, a panel a group; without it over the groups. Where the variant
    that others are compared with is there too, a row of panels below has the losses."""
    found = [cell for cell in found if cell.at is not None or not k.against]
    groups, drawn = list(dict.fromkeys(cell.group for cell in found)), looks(found)
    rows = {"gap": f"gap to {k.to}\nof the same seed, %"}
    if any(cell.variant == k.to for cell in found):
        rows["loss"] = "val/loss, nats"
    titles = ["\n".join(f"{knob}={value}" for knob, value in zip(k.by, g, strict=True)) for g in groups]
    if not k.against:
        found = [replace(cell, group=(), at=groups.index(cell.group)) for cell in found]
        names, groups, titles = titles, [()], [""]
    fig, axes = figures.axes(len(rows), len(groups), 2.6 * len(rows), sharex="col", sharey="row")
    axes = axes.reshape(len(rows), len(groups))
    for panels, (y, label) in zip(axes, rows.items(), strict=True):
        panels[0].set_ylabel(f"{label}\n(above: {k.tuned})" if k.tuned else label)
        for ax, group in zip(panels, groups, strict=True):
            draw_settings(figures, ax, [cell for cell in found if cell.group == group], drawn, y, k)
            if y == "gap":
                ax.axhline(0, color="#000000", linewidth=0.8)
        if written := [text.get_text().count("\n") + 1 for ax in panels for text in ax.texts]:
            low, high = ax.get_ylim()  # no dot where the edge is written on
            ax.set_ylim(low, high + (high - low) * max(written) / 12)
    for head, ax, title in zip(axes[0], axes[-1], titles, strict=True):
        head.set_title(title)
        ax.set_xlabel(k.against or "")
    if not k.against:
        names = names if len(names) > 1 else []  # what is everywhere the same tells nothing
        ax.set_xticks(range(len(names)), names)
        ax.set_xlim(-0.5, max(1, len(names)) - 0.5)
    figures.save(fig, "gaps", axes[-1, -1])


def draw_settings(figures: Figures, ax, here: list[Cell], drawn: dict, y: str, k: Knobs):
    """One panel of y, gap or loss; over a knob neighbours of the same seeds are joined."""
    ticks = sorted({cell.at for cell in here})
    trained = any(gap < k.far for cell in here for gap in cell.gaps.values())
    wide = 0 < 5 * ticks[0] <= ticks[-1]
    along, back = (math.log, math.exp) if wide else (float, float)
    span = along(ticks[-1]) - along(ticks[0]) or 0.2 * ticks[0] or 1.0
    room = span * min(0.9, len(drawn) * (0.05 * ax.get_gridspec().ncols if k.against else 0.12))
    share = min(0.6, 0.1 * len(drawn))  # of the way to the next value
    room = min([room, *(share * (along(b) - along(a)) for a, b in pairwise(ticks))])
    to = {cell.at: f" vs {cell.best}" for cell in here if y == "gap" and cell.variant == k.to}
    for i, (name, look) in enumerate(drawn.items()):
        mine = [cell for cell in here if cell.what == name and cell.values(y)]
        x = [back(along(cell.at) + room * ((i + 0.5) / len(drawn) - 0.5)) for cell in mine]
        values = [cell.near_and_far(y, k.far if trained else math.inf) for cell in mine]
        above = [[*[""] * i, f"{cell.best}{to.get(cell.at, '')}"] if k.tuned else [] for cell in mine]
        figures.dots(ax, x, values, above, "+.0f" if y == "gap" else ".2f", **look)
        means = [math.nan if far else sum(near) / len(near) for near, far in values]
        for (a, b), ends in zip(pairwise(mine), pairwise(means), strict=True):
            if k.against and a.values(y).keys() == b.values(y).keys():
                ax.plot((a.at, b.at), ends, color=look["color"], linewidth=1.0)
    if wide:
        ax.set_xscale("log")
    if k.against and len(ticks) == 1:
        ax.set_xlim(ticks[0] - span, ticks[0] + span)
    if len(ticks) < 9:
        narrow = ax.get_gridspec().ncols * len(ticks) > 8
        ax.set_xticks(ticks, [f"{v:g}" for v in ticks], rotation=40 if narrow else 0)
        ax.minorticks_off()


# ---------------------------------------------------------------------------------------------------------
# the command


def refuse_nonsense(k: Knobs, finished: list[FinishedRun]):
    """Raises: BadInput."""
    named = [*((knob, "by") for knob in k.by), *([(k.against, "against")] if k.against else [])]
    for knob, flag in named:
        refuse_knob(flag, knob)
        for run in finished:
            value = run.settings[knob]
            if flag == "by" and not is_read(knob, Config(**run.settings)):
                remedy = f"leave it out: where runs differ in {knob}, the rows say it"
                raise BadInput(f"--by={knob}: {run.variant} does not read it; {remedy}")
            if flag == "against" and value is not None and type(value) not in (int, float):
                raise BadInput(f"--against={knob}: {value} is not a number")
    if k.against in k.by:
        raise BadInput(f"{k.against} is in --by and --against; leave it out of one of them")
    if k.to not in (there := sorted({run.variant for run in finished})):
        raise BadInput(f"--to={k.to}: no run is that; there are {', '.join(there)}")


def write_logs(path: Path, runs: list[FinishedRun], most: int):
    """Of each run the settings, of later ones where they differ from the first's, and its log, thinned."""
    with atomic_write(path, "w") as f:
        for run in runs:
            settings = run.settings
            if run is not runs[0]:
                settings = {name: v for name, v in settings.items() if v != runs[0].settings[name]}
            resumed = run.head.get("resumed", [])
            head = {"settings": settings, "versions": run.head["versions"], "resumed": resumed}
            for line in (head, *thinned(run.lines, most)):
                f.write(json.dumps({"run": str(run.folder)} | line) + "\n")


def main(k: Knobs, paths: list[str], command: str) -> str:
    if not paths:
        raise BadInput("name folders of runs: python scripts/report.py gaps out/small --by=max_iters")
    if k.tuned and k.tuned not in k.by:
        raise BadInput(f"--tuned={k.tuned}: it is one of --by; name it there too")
    files = [path for path in paths if path.endswith(".csv")]
    again = len(files) == len(paths)
    if len(files) > 1:
        raise BadInput(f"one gaps.csv at a time; leave {files[1]} out")
    if again and k.seeds:
        raise BadInput("--seeds is for runs: the table beside a gaps.csv has all of its seeds")
    if again and k.logs:
        raise BadInput("--logs is for runs: a gaps.csv has no logs")
    if files and not again and Path(files[0]).resolve() == Path(k.out, "gaps.csv").resolve():
        raise BadInput(f"--out={k.out} would write over {files[0]}; name another")
    found = read_again(files[0], k) if files else []
    if not again:
        finished, left_out = collect([path for path in paths if path not in files])
        finished = [run for run in finished if not k.seeds or run.seed in k.seeds]
        if not finished:
            raise BadInput(f"--seeds={','.join(map(str, k.seeds))}: no run has one of these")
        refuse_nonsense(k, finished)
        later, before = compared(finished, k.by, k.against, k.to), sum(len(cell.runs) for cell in found)
        found = joined(found, later, files[0]) if files else later
    if k.tuned:
        found, k = at_best(found, k), replace(k, by=tuple(knob for knob in k.by if knob != k.tuned))
    for cell in found:
        if lost := set(k.seeds or ()) - by_seed(cell.runs).keys():
            raise BadInput(f"--seeds={min(lost)}: {cell.what} has no run of it")
    if not any(cell.gaps for cell in found):
        lost = "".join(f"; left out, {folder}: {why}" for folder, why in ({} if again else left_out).items())
        raise BadInput(f"no pair: no run has a {k.to} of its seed with the same values of --by{lost}")
    if k.against and all(cell.at is None for cell in found):
        raise BadInput(f"--against={k.against}: no run reads it")
    figures = Figures(k.out)
    draw(figures, found, k)
    if again:
        return f"drew {figures.out / 'gaps.png'}"
    versions = versions_of(finished, ("commit", "processor", "torch", "dtype"))
    text = [f"# Gaps to {k.to}", command, table_text(found, k.by, k.against, k.tuned)]
    text.append(
        "Validation at gate 0; s/mean is of the last micro-batch; ± is a standard deviation over n seeds; "
        "gaps are by pairs of a seed, with the interval of their mean by Student's t. "
        f"{len(finished)} runs; {versions}."
    )
    if k.tuned:
        chosen = "of its values those with most seeds count, and of them the one with the lowest mean loss"
        text.append(f"Each setting has its own {k.tuned}, written above it: {chosen}.")
    text += [f"And {before} runs of {path}, whose own page says how they were made." for path in files]
    text += [f"Left out, {folder}: {why}" for folder, why in left_out.items()]
    text += resumed(finished)
    text.append("![gaps](gaps.png)")
    text.append(DRAWN.format(far=k.far))
    flags = [word for word in shlex.split(command) if word.startswith("--")]
    flags = [word for word in flags if not word.startswith(("--seeds=", "--logs="))]  # those are of runs
    redraw = shlex.join(["python", "scripts/report.py", "gaps", str(Path(k.out, "gaps.csv")), *flags])
    text += [f"    {redraw}", "draws the figure again."]
    of_all = [*filter(None, (k.against, k.tuned, "origin" if files else None)), *k.by]
    head, table = ["what", "seed", "loss", "scale", "folder", "gap", *of_all], []
    for cell in found:
        for run in cell.runs:
            numbers = [run.seed, run.loss, run.last("s/mean"), run.folder, cell.gaps.get(run.seed)]
            own = ["" if cell.at is None else f"{cell.at:.12g}"] if k.against else []
            own += [*([cell.best] if k.tuned else []), *([run.head.get("read from")] if files else [])]
            table.append([cell.what, *numbers, *own, *cell.group])
    write_csv(figures.out / "gaps.csv", head, table)
    logs = figures.out / "logs.jsonl"
    if k.logs:
        write_logs(logs, finished, k.logs)
    else:
        logs.unlink(missing_ok=True)  # an earlier table's
    return f"{len(finished)} runs, {len(left_out)} left out; {figures.write('gaps.md', text)}"
