"""How GPT-2 takes the loss of its LayerNorms: its course in fine-tunings by protocol and seed.

    python scripts/report.py gpt2 out/gpt2_small --base=out/gpt2_tiny --out=out/gpt2_report

The folder holds a folder a protocol, vanilla and some of fakeln, internal and all, each with a run folder a
seed; --out holds in before/ what scripts/stream.py made of the network before. Runs of the same seed see the
same windows and the same dropout masks, so a gap is taken by pairs. Writes report.md, the figures and
curves.csv into --out; what the networks lose on held-out texts is in report.py held_out. Needs matplotlib.
"""

from dataclasses import dataclass
from pathlib import Path

import numpy as np

from config import Config
from nanonorm.errors import BadInput
from nanonorm.schedules import drop_steps, gate_sites
from nanonorm.tables import markdown
from scripts.studies.figures import Figures, Panel, curve
from scripts.studies.runs import FinishedRun, load, load_all, resumed, versions_of
from scripts.studies.stats import spread

PROTOCOLS = ("vanilla", "fakeln", "internal", "all")
SHAPE = ("n_layer", "n_embd", "n_head", "block_size")  # what is said of the network before
NEAR = 5  # steps that are averaged on either side of an event
PANELS = [
    Panel("Training loss", "train/ce", "nats per token"),
    Panel("less vanilla's", "train/ce", "nats per token", less_baseline=True),
    Panel("Gate, mean over the norms", "gate", "gate"),
    Panel("Scale of the last stream", "s/mean", "mean sigma (dimensionless)"),
]

Runs = dict[str, list[FinishedRun]]  # protocol -> its runs by seed


@dataclass
class Knobs:
    """What is reported."""

    base: str = "out/gpt2_tiny"  # run folder of the network that all of them start from
    out: str = "out/gpt2_report"  # folder of before/, and of what is written


def refuse_what_cannot_be_compared(runs: Runs):
    """Raises: BadInput if runs lack a step of the log, or a partner."""
    seeds = {name: [run.seed for run in found] for name, found in runs.items()}
    for name, found in runs.items():
        if seeds[name] != seeds["vanilla"]:
            said = f"the runs of {name} are of seeds {seeds[name]}, vanilla of {seeds['vanilla']}"
            raise BadInput(f"{said}; gaps are taken by pairs")
        for run in found:
            later = [again.get("log_interval") or 1 for again in run.head.get("resumed", [])]
            if (every := max(run.settings["log_interval"], *later, 1)) > 1:
                raise BadInput(f"{run.folder} has log_interval={every}; it must be 1")
            if run.settings.get("gate_budget") is not None:
                raise BadInput(f"{run.folder} has gate_budget: its gates fall at steps of their own")
            if name == "fakeln" and run.settings["gate_schedule"] != "sequential":
                schedule = run.settings["gate_schedule"]
                raise BadInput(f"{run.folder} has gate_schedule={schedule}; in fakeln/ it must be sequential")
            if name == "fakeln" and run.settings.get("gate_order", "first") != "first":
                raise BadInput(f"{run.folder} has gate_order=last; in fakeln/ the first block begins")


# ---------------------------------------------------------------------------------------------------------
# what the removal of each norm does


def events_of(run: FinishedRun) -> dict[int, list[str]]:
    """{step: the gates that fall at it} of a sequential removal."""
    config, events = Config(**run.settings), {}
    sites = gate_sites(config)
    for site, step in zip(sites, drop_steps(config, sites), strict=True):
        events.setdefault(step, []).append(site)
    return events


def event_table(fakeln: list[FinishedRun], vanilla: list[FinishedRun]) -> str:
    """A row an event of the sequential removal: the training loss less vanilla's before it, in the step that
    is the first without the norm, and before the next event: of NEAR steps, or of those since an event that
    is nearer."""
    steps, values = curve(fakeln, "train/ce", vanilla)  # a log line n is of the step n - 1
    of_step = dict(zip(steps - 1, values.T, strict=True))  # {step: (runs)}
    events = sorted(event for event in events_of(fakeln[0]).items() if event[0] <= max(of_step))
    ends = [step for step, _ in events[1:]] + [min(events[-1][0] + 10 * NEAR, max(of_step) + 1)]

    def mean_before(step: int, event: int):
        first = max(step - NEAR, min(event + 1, step - 1))
        return np.mean([of_step[k] for k in range(first, step) if k in of_step], 0)

    rows, last = [], -NEAR
    for (step, sites), end in zip(events, ends, strict=True):
        before, at, after = mean_before(step, last), of_step[step], mean_before(end, step)
        last = step
        changes = [spread(values - before, sign="+") for values in (at, after)]
        rows.append([step, ", ".join(sites), spread(before), *changes])
    head = ["step", "norms that go", "loss less vanilla's, before", "in the step", "before the next"]
    return markdown(rows, head)


def draw_events(figures: Figures, fakeln: list[FinishedRun], vanilla: list[FinishedRun]) -> str:
    """The training loss less vanilla's around the removal, step by step, with a line an event."""
    fig, (ax,) = figures.axes(1, 1, 2.9)
    x, y = curve(fakeln, "train/ce", vanilla)
    events = events_of(fakeln[0])
    near = (x > min(events) - 20) & (x < max(events) + 60)
    figures.draw(ax, "events", "events", "fakeln", x[near] - 1, y[:, near])
    for step in events:
        ax.axvline(step, color="#999999", linestyle=":", linewidth=0.8, zorder=1)
    ax.set(xlabel="optimizer step", ylabel="nats per token", title="FakeLN's training loss less vanilla's")
    return figures.save(fig, "events")


# ---------------------------------------------------------------------------------------------------------
# the report


def about(base: FinishedRun, runs: list[FinishedRun], how: str) -> str:
    """What the numbers are of: a pre-trained network, and the runs that begin with it."""
    head, steps, val = base.head, base.settings["max_iters"], base.series("val/loss")
    shape = ", ".join(f"{name} {base.settings[name]}" for name in SHAPE)
    near = min(val, key=lambda step: abs(step - 0.8 * steps))
    fell = 100 * (1 - val[steps] / val[near])
    said = f"val/loss {val[steps]:.4f}, {fell:.2f}% below that of step {near:,}"
    names = ("commit", "processor", "torch", "dtype")
    text = [
        f"- The network: {head['parameters']:,} parameters, {shape}; {steps:,} steps of pre-training, {said}",
        f"- Corpus: {head['corpus']['source']}, {head['corpus']['train_tokens']:,} tokens",
        f"- Runs from it: {how}",
        "- Differences are by pairs of the same seed; ± is a standard deviation over seeds, not texts",
        f"- Of the network: {versions_of([base], names)}; of the runs: {versions_of(runs, names)}",
        *(f"- {said}" for said in resumed([base, *runs])),
    ]
    return "\n".join(text)


def main(k: Knobs, words: list[str], command: str) -> str:
    if len(words) != 1:
        raise BadInput("name the folder of the runs: python scripts/report.py gpt2 out/gpt2_small")
    figures, folder = Figures(k.out), Path(words[0])
    runs = {name: load_all(folder / name) for name in PROTOCOLS if (folder / name).is_dir()}
    if not runs.get("vanilla"):
        raise BadInput(f"no run in {folder / 'vanilla'}: the others are compared with those")
    base = load(Path(k.base))
    refuse_what_cannot_be_compared(runs)
    every = [run for found in runs.values() for run in found]
    how = [f"{name}, seeds {', '.join(str(run.seed) for run in found)}" for name, found in runs.items()]
    how.append(f"{every[0].settings['max_iters']:,} steps")
    text = ["# GPT-2 without LayerNorm, small", command, about(base, every, "; ".join(how))]
    with_base = runs | {"baseline": runs["vanilla"]}
    text += ["## Over the steps", figures.panels("curves", PANELS, with_base, PROTOCOLS, height=5.0)]
    if "fakeln" in runs:
        text += ["## What each removal of FakeLN does", event_table(runs["fakeln"], runs["vanilla"])]
        text.append(
            f"Training losses less vanilla's of the same seed, windows and dropout: the mean of {NEAR} steps "
            f"before an event (dotted below); its step, less that; {NEAR} steps before the next, less that."
        )
        text.append(draw_events(figures, runs["fakeln"], runs["vanilla"]))
    text += ["## c in the network before", "By norm and text: [before/stream.md](before/stream.md)."]
    return figures.write("report.md", text)
