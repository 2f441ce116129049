"""The course of runs over their steps, a panel a metric, by the names that wandb shows.

    python scripts/report.py course out/demo --out=out/panels.png
    python scripts/report.py course out/a out/b --metrics=gate,train/kl,taper/limited --out=results/x/ab.png

PATH is a run's folder; the run need not be over. Of a metric that ends in a dot, as "taper/c.", each site is
a thin line, all of a run's colour, which NAME/seed1/ and NAME/seed2/ beside other runs share. Of a log of
more than 400 lines each n-th is drawn; what leaves its panel, as a spike does, is a triangle at the edge.
Writes the figure, and beside it a .csv of its numbers; one such .csv in place of PATHs is drawn again. Needs
matplotlib.
"""

import csv
import math
import os
import re
from collections import defaultdict
from dataclasses import dataclass
from pathlib import Path

from nanonorm.cli import check_out
from nanonorm.errors import BadInput
from nanonorm.log import is_number, read_log, say
from nanonorm.plots import COLOURS
from nanonorm.tables import write_csv
from nanonorm.typed import Count
from scripts.studies.figures import CURVE_POINTS, Figures

# What a run on one device shows of itself, of which it may lack some
USUAL = (
    "train/loss", "val/loss", "train/aux", "train/kl", "gate", "lr", "grad/total", "s/mean", "taper/c.",
    "taper/residual.",
)  # fmt: skip

LABELS = {  # how a metric begins -> its unit
    r"\w+/(loss|ce|kl)": "nats per token",
    "grad/": "L2 norm",
    "taper/c": "1 / scale",
    "taper/residual": "share of power",
    "taper/(limited|sinks)": "share of tokens",
    "(train/site|site/)": "log scale, squared",
}


@dataclass
class Knobs:
    """What is drawn, and where it goes."""

    metrics: tuple[str, ...] = USUAL  # a name that ends in a dot: all that begin with it
    columns: Count = 3  # of panels
    out: str | None = None  # .png file to write


def series(lines: list[dict], metric: str) -> dict[str, dict[int, float]]:
    """Name -> step -> value, of a metric, or of all whose names begin with one that ends in a dot."""
    found = {}
    for line in lines:
        for name, value in line.items():
            named = name == metric or (metric.endswith(".") and name.startswith(metric))
            if named and value is not None:
                if not is_number(value):
                    shown = str(value)[:20]
                    raise BadInput(f"{name} at step {line['iter']} is {shown}, which no panel can show")
                found.setdefault(name, {})[line["iter"]] = value
    return found


def lines_of(folder: Path) -> list[dict]:
    """What a run has logged. Raises: BadInput."""
    try:
        return [line for line in read_log(folder / "metrics.jsonl").lines if "iter" in line]
    except OSError as e:
        raise BadInput(f"{folder} has no log to read ({e.strerror}); name the folder of a run") from None


def runs_of(words: list[str]) -> dict[str, list[dict]]:
    """Run -> what it has logged, of run folders, or of the .csv of a figure. Raises: BadInput."""
    if not words[0].endswith(".csv"):
        return dict(zip(names_of(words), map(lines_of, map(Path, words)), strict=True))
    if len(words) > 1:
        raise BadInput(f"one figure's .csv at a time; leave {words[1]} out")
    runs = defaultdict(list)
    try:
        for row in csv.DictReader(Path(words[0]).read_text().splitlines()):
            runs[row["run"]].append({"iter": int(row["step"]), row["metric"]: float(row["value"])})
    except (OSError, KeyError, ValueError, TypeError, csv.Error) as e:
        raise BadInput(f"{words[0]} is not the .csv of a course ({e!r}); name another") from None
    return runs


def names_of(words: list[str]) -> list[str]:
    """What tells each run's folder from the others. Raises: BadInput for one that is named twice."""
    paths = [Path(os.path.abspath(word)) for word in words]
    if len(set(paths)) < len(paths):
        raise BadInput("a run is named twice; name each once")
    shared = Path(os.path.commonpath(paths)) if len(paths) > 1 else paths[0].parent
    return [str(path.relative_to(shared)) for path in paths]


def groups_of(runs) -> dict[str, str]:
    """Run -> what it is drawn as: "NAME (n=2)" of "NAME/seed1" if that has two seeds, else the run itself."""
    names = [re.sub(r"/seed\d+$", "", run) for run in runs]
    named = zip(runs, names, map(names.count, names), strict=True)
    return {run: f"{name} (n={n})" if n > 1 else run for run, name, n in named}


def few_points(values: dict[int, float]) -> list[tuple[int, float]]:
    """What is drawn of a line: so few that a long run's .csv stays small. What is so short stays as it is."""
    *every, last = values.items()
    return [*every[:: math.ceil(len(every) / CURVE_POINTS) or 1], last]


def main(k: Knobs, words: list[str], command: str) -> str:
    check_out("out", k.out, ".png")
    if not words or k.out is None:
        raise BadInput("name run folders and --out=FILE.png")
    runs = runs_of(words)
    found = {m: {name: series(lines, m) for name, lines in runs.items()} for m in k.metrics}
    lacking = [m for m, of in found.items() if not any(of.values())]
    found = {m: of for m, of in found.items() if m not in lacking}
    if not found:
        raise BadInput(f"{', '.join(words)} logged none of {', '.join(k.metrics)}")
    if lacking and k.metrics != USUAL:
        say(f"no panel for {', '.join(lacking)}: no run logged it")
    figures, rows = Figures(Path(k.out).parent), math.ceil(len(found) / k.columns)
    fig, axes = figures.axes(rows, min(k.columns, len(found)), 0.6 + 1.7 * rows)
    groups, points = groups_of(runs), []
    apart = COLOURS[::2] + COLOURS[1::2]  # no two blues side by side
    colours = dict(zip(dict.fromkeys(groups.values()), apart * len(runs), strict=False))
    for ax, (metric, of_runs) in zip(axes, found.items(), strict=False):
        for run, lines in of_runs.items():
            for j, (name, values) in enumerate(lines.items()):
                shown = few_points(values)
                look = {"color": colours[groups[run]], "linewidth": 0.5 if len(lines) > 1 else 1.2}
                look |= {"marker": "o", "markersize": 3} if len(shown) < 10 else {}
                ax.plot(*zip(*shown, strict=True), label=None if j else groups[run], **look)
                points += [(run, name, step, f"{value:.6g}") for step, value in shown]
        figures.fit(ax, [list(v.values()) for lines in of_runs.values() for v in lines.values()])
        figures.mark_spikes(ax)
        label = next((words for begin, words in LABELS.items() if re.match(begin, metric)), "")
        each = "*" if metric.endswith(".") else ""
        ax.set(title=metric + each, ylabel=label, xlim=(0, None))
    for ax in axes[len(found) :]:
        ax.set_axis_off()
    for ax in axes[: len(found)][-k.columns :]:
        ax.set_xlabel("optimizer step")
    figures.save(fig, Path(k.out).stem, *(axes if len(runs) > 1 else ()))  # a run may lack the first metric
    if words[0].endswith(".csv"):
        return f"drew {k.out}"
    write_csv(Path(k.out).with_suffix(".csv"), ["run", "metric", "step", "value"], points)
    return f"wrote {k.out}, and its numbers beside it\n{command}"
