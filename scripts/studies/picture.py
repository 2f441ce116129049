"""The README's picture: a run's loss and gate over its steps, and its speed with the norms and without.

    python bench.py out/demo --batch=1 --seq=64 --runtimes=eager,compiled --out=out/demo/bench.json
    python scripts/report.py picture out/demo out/demo-taper=none --bench=out/demo/bench.json

A second run is one that keeps its norms. Speed is of the benchmark's first batch and context, in each of its
runtimes. About 80 lines of each run's log are written beside it. Needs matplotlib.
"""

import math
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from nanonorm.cli import check_out
from nanonorm.errors import BadInput
from nanonorm.files import atomic_write
from nanonorm.plots import pyplot, smooth
from scripts.studies.gaps import write_logs
from scripts.studies.runs import FinishedRun, check_speeds, load, read_json

# variant -> (colour, what it is)
BARS = {
    "baseline": ("#000000", "with its norms"),
    "weightless": ("#009E73", "gains alone folded"),
    "unfused": ("#56B4E9", "norms as scalings"),
    "folded": ("#0072B2", "norms folded away"),
    "floor": ("#BBBBBB", "products, attention"),
}


@dataclass
class Knobs:
    """Which benchmark is drawn beside the run, and where to."""

    bench: str | None = None  # JSON file that bench.py wrote with --out
    out: str = "out/picture.png"  # the picture


def read_bars(path: Path, settings: dict) -> tuple[str, list[dict]]:
    """(the machine, the benchmark's rows for its first batch and context), of a network with the size that a
    run's settings say. Raises: BadInput."""
    report = read_json(path, "python bench.py RUN --out=")
    try:
        if (mode := report["settings"]["mode"]) != "prefill":
            raise BadInput(f"{path} is of mode={mode}; the picture has prefill")
        if "baseline" in (variants := report["settings"]["variants"])[1:]:
            raise BadInput(f"{path} compares with {variants[0]}; make it with --variants=baseline,...")
        for knob in ("n_layer", "n_embd"):
            if (there := report["model"][knob]) != settings[knob]:
                raise BadInput(f"{path} is of a network with {knob}={there}, not the run's {settings[knob]}")
        rows = [row for row in report["rows"] if row["variant"] in BARS]
        for row in rows:
            check_speeds(row)
        shapes = [(row["batch"], row["seq"]) for row in rows]
        return report["machine"], [row for row, shape in zip(rows, shapes, strict=True) if shape == shapes[0]]
    except (KeyError, TypeError, ValueError) as e:
        what = f"{type(e).__name__}: {e}"
        raise BadInput(f"{path} is not a report of bench.py ({what}); name another --bench") from None


def validated(run: FinishedRun) -> list[tuple[str, str, str, dict[int, float]]]:
    """(label, colour, marker, {step: loss}) of what was validated: with the gate where it was, and without
    the norms that taper, which is another loss only while the gate is up."""
    both = (run.series(name).items() for name in ("val/loss", "val/loss_gated"))
    gone, gated = ({step: loss for step, loss in one if math.isfinite(loss)} for one in both)
    if not gated or gated == gone:
        return [("validation", "#D55E00", "o", gone)]
    up = {step: loss for step, loss in gone.items() if loss != gated.get(step)}
    return [("validation", "#D55E00", "o", gated), ("validation with the gate at 0", "#0072B2", "D", up)]


def draw_training(ax, run: FinishedRun, **look):
    """Training loss as a line, smoothed over a fiftieth of the run."""
    training = run.series("train/ce")
    smoothed = smooth(np.array([list(training.values())]), max(1, len(training) // 50))[0]
    ax.plot(list(training), smoothed, **look)


def draw_loss(ax, run: FinishedRun, kept: FinishedRun | None):
    """Training losses as lines, validation as points, the first and the last of a run with their values."""
    draw_training(ax, run, color="#F0C0A0", linewidth=4, label="training")
    points = validated(run)
    if kept:  # a thin line over a wide one, since the two may be one
        draw_training(ax, kept, color="#000000", linewidth=1, label="training with the norms kept")
        points.append(("norms kept", "#000000", "s", kept.series("val/loss")))
    for label, colour, marker, found in points:
        size, below = (4, True) if marker == "s" else (8, False)
        ax.plot(list(found), list(found.values()), marker, color=colour, markersize=size, clip_on=False)
        for step in dict.fromkeys([*list(found)[:1], *list(found)[-1:]]):
            text, side = f"{label}: {found[step]:.2f}", "right" if below or step > min(found) else "left"
            place = {"xytext": (0, -8 if below else 8), "ha": side, "va": "top" if below else "bottom"}
            ax.annotate(text, (step, found[step]), textcoords="offset points", color=colour, **place)
    ax.margins(y=0.15)
    ax.legend(loc="upper right")
    ax.set(ylabel="loss, nats per token")


def draw_gate(ax, gate: dict[int, float]):
    """The gate over the steps: 1 is with norms, 0 without."""
    ax.fill_between(list(gate), list(gate.values()), color="#E69F00", alpha=0.35, linewidth=0)
    ax.plot(list(gate), list(gate.values()), color="#E69F00")
    last = max(gate)
    ax.text(0.02 * last, 0.1, "with its norms")
    ax.text(0.98 * last, 0.1, "without", ha="right")
    ax.set(ylabel="gate", ylim=(0, 1.05), yticks=(0, 1))


def draw_speed(ax, machine: str, rows: list[dict]):
    """The speedup over the network with its norms, a mark a runtime: medians of ratios, and quartiles."""
    names = list(dict.fromkeys(row["variant"] for row in rows))
    runtimes = list(dict.fromkeys(row["runtime"] for row in rows))
    for place, runtime in enumerate(runtimes):
        for row in (row for row in rows if row["runtime"] == runtime):
            x, at, colour = row["speedup"], names.index(row["variant"]), BARS[row["variant"]][0]
            marker, label = "os^v"[place % 4], None if at else runtime
            ends = [[x - row["speedup_q1"]], [row["speedup_q3"] - x]] if at else None
            at += place / 3  # below the runtime before it
            look = {"marker": marker, "color": colour, "capsize": 3, "linestyle": "none"}
            ax.errorbar(x, at, xerr=ends, label=label, **look)
            right = row["speedup_q3"] if ends else x
            ax.annotate(f"{x:.2f}x", (right, at), (7, 0), textcoords="offset points", va="center")
    ax.set_yticks(range(len(names)), [f"{name}\n{BARS[name][1]}" for name in names])
    ax.set_ylim(len(names) - 0.3, -0.6)
    ax.margins(x=0.25)
    ax.axvline(1, color="#000000", linewidth=0.8)
    ax.legend(loc="center right")
    ax.set(xlabel=f"median of ratios, and quartiles\n({machine})")
    batch, seq = rows[0]["batch"], rows[0]["seq"]
    ax.set_title(f"Speedup, {batch} x {seq} tokens", loc="left", weight="bold")


def draw_picture(run: FinishedRun, kept: FinishedRun | None, machine: str, rows: list[dict]):
    """A matplotlib figure: the run's loss and gate on the left, beside it the loss of one that kept its
    norms; speed on the right."""
    gate = run.series("gate")
    fig = pyplot().figure(figsize=(9.6, 3.6), layout="constrained")
    left, right = fig.subfigures(1, 2, width_ratios=(1.15, 1))
    ratios, title = (1,), "Training"
    if gate:
        ratios, title = (3.2, 1), "The norms are gated away while the network trains"
    axes = left.subplots(len(ratios), 1, sharex=True, height_ratios=ratios, squeeze=False).flatten()
    draw_loss(axes[0], run, kept)
    if gate:
        draw_gate(axes[1], gate)
    axes[0].set_title(title, loc="left", weight="bold")
    axes[-1].set(xlabel="optimizer step", xlim=(0, run.last("iter")))
    draw_speed(right.subplots(), machine, rows)
    return fig


def main(k: Knobs, words: list[str], command: str) -> str:
    if len(words) not in (1, 2) or k.bench is None:
        example = "python scripts/report.py picture out/demo out/demo-taper=none --bench=bench.json"
        raise BadInput(f"name a run, if you like one that kept its norms, and a benchmark: {example}")
    runs = [load(Path(word)) for word in words]
    machine, rows = read_bars(Path(k.bench), runs[0].settings)
    alike = ("norm", "dataset", "max_iters", "n_layer", "n_embd", "batch_size", "learning_rate", "seed")
    kept = {"taper": "none"} | {knob: runs[0].settings[knob] for knob in alike}
    if any(run.settings[knob] != value for run in runs[1:] for knob, value in kept.items()):
        raise BadInput(f"{words[1]} is not {words[0]} with its norms kept; leave it out, or train that")
    if not rows:
        raise BadInput(f"{k.bench} has none of {', '.join(BARS)}; name another --bench")
    check_out("out", k.out, ".png")
    fig = draw_picture(runs[0], runs[1] if len(runs) > 1 else None, machine, rows)
    with atomic_write(k.out) as f:
        fig.savefig(f, format="png")
    logs = Path(k.out).with_suffix(".logs.jsonl")
    write_logs(logs, runs, 80)
    return f"wrote {k.out} and {logs}"
